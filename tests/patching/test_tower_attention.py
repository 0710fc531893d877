"""Towers that read images of several sizes: attention in one call computes what the calls image by image computed."""

import copy

import pytest
import torch
from packed import flash_by_definition
from recorders import calls_of
from tiny import assert_same_gradients, named_gradients
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm4v import modeling_glm4v
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from liger_trainer import PatchOptions
from liger_trainer.common.replacements import Replacements
from liger_trainer.patching import vision as tower_attention
from liger_trainer.patching.options import PatchReport
from liger_trainer.patching.packing import packed_attention as flash
from liger_trainer.patching.vision import TOWER, patch_tower_attention

SIZES = {"hidden_size": 32, "depth": 4, "num_heads": 2, "intermediate_size": 48, "patch_size": 4, "in_channels": 3}
TOWERS = {
    modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel: (modeling_qwen2_5_vl.Qwen2_5_VLVisionConfig,
     {**SIZES, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1, 3]}),
    modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel: (modeling_qwen2_vl.Qwen2VLVisionConfig, {**SIZES,
     "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 24}),
    modeling_qwen3_vl.Qwen3VLVisionModel: (modeling_qwen3_vl.Qwen3VLVisionConfig, {**SIZES, "out_hidden_size": 24,
     "deepstack_visual_indexes": [1], "num_position_embeddings": 64}),
    modeling_glm4v.Glm4vVisionModel: (modeling_glm4v.Glm4vVisionConfig, {**SIZES, "out_hidden_size": 24,
     "image_size": 32, "intermediate_size": 64}),
}  # fmt: skip
GRIDS = torch.tensor([[1, 4, 6], [1, 8, 8], [1, 4, 4], [1, 4, 4]])  # frames, rows and columns of patches
ENDS = [0, 24, 88, 104, 120]
QWEN2 = list(TOWERS)[1]
towers = pytest.mark.parametrize("kind", TOWERS, ids=lambda kind: kind.__name__)


def tower(kind, implementation="sdpa", dtype=torch.float32):
    config_class, sizes = TOWERS[kind]
    config = config_class(**sizes)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return kind(config).to(dtype)


def patches(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ENDS[-1], 3 * 2 * 4 * 4, generator=generator).to(dtype)


def step(model, pixels, grids=GRIDS):
    output = model(pixels, grid_thw=grids)
    features = output.pooler_output if hasattr(output, "pooler_output") else output
    return features.detach(), named_gradients(model, features.double().square().sum())


def patched(model):
    record, report = Replacements(), PatchReport("tower")
    patch_tower_attention(model, PatchOptions(), record, report)
    return record, report


def counting(monkeypatch, name):
    """How often transformers' own attention function is called."""
    calls, function = [], ALL_ATTENTION_FUNCTIONS[name]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, name, lambda *a, **how: calls.append(1) or function(*a, **how)
    )
    return calls


@towers
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_call_computes_what_calls_image_by_image_computed(kind, implementation):
    model = tower(kind, implementation, torch.float64)
    want = step(model, patches(torch.float64))
    record, report = patched(model)
    assert report.swapped[TOWER] == 4
    features, gradients = step(model, patches(torch.float64))
    torch.testing.assert_close(features, want[0], rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients, want[1])
    record.undo()
    assert model.config._attn_implementation == implementation
    assert torch.equal(step(model, patches(torch.float64))[0], want[0])


def test_images_of_one_size_share_a_call(monkeypatch):
    """The last two images have one size, so that three calls a layer do for four."""
    model, calls = tower(QWEN2), counting(monkeypatch, "sdpa")
    model(patches(), grid_thw=GRIDS)
    before = len(calls)
    patched(model)
    model(patches(), grid_thw=GRIDS)
    assert (before, len(calls) - before) == (4 * 4, 4 * 3)


@towers
def test_the_operation_of_gpus_is_called_as_it_is_defined(monkeypatch, kind):
    """Layout, lengths and scale; the operation itself runs on GPUs alone."""
    model = tower(kind, dtype=torch.float64)
    want = step(model, patches(torch.float64))
    monkeypatch.setattr(flash, "FLASH_ATTENTION", flash_by_definition)
    calls = calls_of(monkeypatch, flash, "FLASH_ATTENTION")
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    patched(model)
    features, gradients = step(model, patches(torch.float64))
    torch.testing.assert_close(features, want[0], rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients, want[1])
    assert len(calls) == 4


def test_what_stays_as_it_is():
    off = PatchOptions(towers=False)
    model, report = tower(QWEN2), PatchReport("tower")
    patch_tower_attention(model, off, Replacements(), report)
    assert not report.swapped and model.config._attn_implementation == "sdpa"
    model = tower(QWEN2)
    model.config._attn_implementation_internal = "flash_attention_2"
    _, report = patched(model)
    assert not report.swapped
    with pytest.MonkeyPatch.context() as patcher:  # a tower whose code compares the implementation's name
        patcher.setattr(tower_attention, "compares_with", lambda kind, names: True)
        assert not patched(tower(QWEN2))[1].swapped


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@towers
def test_flash_on_a_gpu(kind):
    """In bf16 within twice the error of the calls image by image, both against fp32."""
    truth = tower(kind).cuda()
    plain = copy.deepcopy(truth).bfloat16()
    ours = copy.deepcopy(plain)
    patched(ours)
    with pytest.MonkeyPatch.context() as patcher:
        calls = calls_of(patcher, flash, "attend")
        (want, exact), (rounded, rough), (got, gradients) = (
            step(model, patches().cuda().to(next(model.parameters()).dtype), GRIDS.cuda())
            for model in (truth, plain, ours)
        )
    assert len(calls) == 4
    assert (got.float() - want).norm() <= 2 * (rounded.float() - want).norm()
    for name, gradient in exact.items():
        errors = [(x[name].float() - gradient).norm() for x in (gradients, rough)]
        assert errors[0] <= 2 * errors[1] + 1e-3 * gradient.norm(), name
