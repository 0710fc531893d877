"""Both towers of vision-language models: what is swapped, on real images, computes what the model computed."""

import functools

import pytest
import steps
import torch
import transformers
from quick_cases import slow_but
from recorders import RunsAgain, calls_of
from torch._subclasses.fake_tensor import FakeTensorMode
from trainings import logged, sft, trained
from transformers import Trainer, TrainingArguments
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision import VISION_FAMILIES, picture_chats, vision_model, vision_processor

import liger_trainer
from liger_trainer import PatchOptions, patch
from liger_trainer.common.replacements import Replacements
from liger_trainer.compat.recognitions import counts_placeholders
from liger_trainer.errors import ConfigError
from liger_trainer.patching import vision as placeholders
from liger_trainer.patching.graphs.cuda_graphs import GraphedLayers
from liger_trainer.patching.graphs.layer_graphs import NotCapturable
from liger_trainer.patching.layers import rotary
from liger_trainer.patching.options import PatchReport
from liger_trainer.patching.patcher import patched_record
from liger_trainer.patching.vision import embed_patches, patch_patch_embedding

QUICK = ("qwen3_vl", "gemma3")
families = pytest.mark.parametrize("family", slow_but(VISION_FAMILIES, *QUICK))
# of two layers in each tower; the text's come first
SWAPPED = {
    "qwen2_5_vl": {"rope": 2 + 2, "RMSNorm": 5 + 5, "SwiGLU": 2 + 2, "tower attention": 2, "placeholders": 1},
    "qwen3_vl": {"rope": 2, "QK norm + rope": 2, "RMSNorm": 5, "LayerNorm": 7, "SwiGLU": 2, "GELU MLP": 2,
                 "tower attention": 2, "placeholders": 1},
    "gemma3": {"QK norm + rope": 2, "RMSNorm": 10, "LayerNorm": 5, "GEGLU": 2, "GELU MLP": 2, "patch embedding": 1,
               "placeholders": 1},
    "gemma4": {"RMSNorm": 33, "GEGLU": 2},
    "smolvlm": {"rope": 2, "RMSNorm": 5, "LayerNorm": 5, "SwiGLU": 2},
    "llava": {"rope": 2, "RMSNorm": 5, "LayerNorm": 6, "SwiGLU": 2},
    "internvl": {"rope": 2, "RMSNorm": 5 + 4, "LayerNorm": 5, "SwiGLU": 2},
}  # fmt: skip


@functools.cache
def batch_of(family):
    rows = picture_chats(3)
    return dict(DataCollatorForVisionLanguageModeling(vision_processor(family))([rows[i] for i in range(3)]))


def step(model, family):
    return steps.step(model, {**batch_of(family), "use_cache": False})


def assert_same_step(got, want, rtol=1e-5):
    steps.assert_same_outcome(got, want, loss_rtol=rtol)


@families
def test_a_patched_model_computes_what_it_computed(family):
    """As a whole, and each part alone. Every gradient, so that of the patches' embedding too."""
    model = vision_model(family).train()
    want = step(model, family)
    with patch(model) as patched:
        swapped = {kind: count for kind, count in patched.report.swapped.items() if kind != "fused loss"}
        got = step(model, family)
    assert SWAPPED[family].items() <= swapped.items()
    parts = [got]
    for option in ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "gelu", "towers", "fused_linear_cross_entropy"):
        try:
            with patch(model, steps.only(option)):
                parts.append(step(model, family))
        except ConfigError:
            assert option != "fused_linear_cross_entropy"
    for part in parts:
        assert_same_step(part, want)
    assert len(parts) > 3
    again = step(model, family)
    assert again[0] == want[0]


def test_a_tower_s_rows_are_contiguous():
    """SigLIP's are transposed, and so is every sum with them."""
    model, seen = vision_model("gemma3"), []
    for layer in model.model.vision_tower.encoder.layers:
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].is_contiguous()))
    with torch.no_grad():
        model(**batch_of("gemma3"))
        with patch(model, steps.only("towers")):
            model(**batch_of("gemma3"))
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_placeholders_are_counted_on_the_host(monkeypatch, family):
    """With the model's own message where they do not fit the images. The copy is one of a GPU's ids in use."""
    monkeypatch.setattr(placeholders, "_is_far", lambda ids: True)
    masks, on_device = [], placeholders._on_device
    monkeypatch.setattr(placeholders, "_on_device", lambda *a: masks.append(on_device(*a)) or masks[-1])
    model, batch = vision_model(family).train(), batch_of(family)
    want = step(model, family)
    wrong = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == image_token(model), 5)}
    with pytest.raises(ValueError, match="do not match") as stock:
        model(**wrong)
    with patch(model, steps.only("towers")) as patched:
        assert patched.report.swapped["placeholders"] == 1
        got = step(model, family)
        assert masks and masks[0].shape[:2] == batch["input_ids"].shape
        with pytest.raises(ValueError, match="do not match") as ours:
            model(**wrong)
        seen = len(masks)
        model(input_ids=batch["input_ids"].masked_fill(batch["input_ids"] == image_token(model), 5))
        assert len(masks) == seen
    assert str(ours.value) == str(stock.value)
    assert_same_step(got, want, 1e-6)


def test_ids_come_to_the_host_once_for_teacher_and_student(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.clone()) or copies[-1])
    ids = torch.arange(6).view(2, 3)
    assert placeholders._on_host(ids) is placeholders._on_host(ids) and len(copies) == 1
    ids[0, 0] = 9
    assert torch.equal(placeholders._on_host(ids), ids) and len(copies) == 2
    with torch.inference_mode():  # where nothing tells whether a tensor was written into
        ids = torch.arange(3)
        for _ in range(2):
            placeholders._on_host(ids)
    assert len(copies) == 4


def test_a_model_that_reads_its_embeddings_counts_its_placeholders_itself():
    class ReadsShape(torch.nn.Module):
        def forward(self, input_ids=None, pixel_values=None):
            return self.get_placeholder_mask(input_ids, pixel_values, pixel_values)

        def get_placeholder_mask(self, input_ids, inputs_embeds, image_features):
            return (input_ids == 3).unsqueeze(-1), inputs_embeds.shape[-1]

    class ReadsElements(ReadsShape):
        def get_placeholder_mask(self, input_ids, inputs_embeds, image_features):
            mask = input_ids == 3
            return mask, inputs_embeds[mask].numel()

    assert counts_placeholders(ReadsShape) and not counts_placeholders(ReadsElements)


def test_a_model_that_finds_placeholders_before_it_has_embeddings_does_so_itself(monkeypatch):
    monkeypatch.setattr(placeholders, "_is_far", lambda ids: True)
    model, batch = vision_model("gemma4"), batch_of("gemma4")
    want = model(**batch).loss
    with patch(model) as patched:
        assert "placeholders" not in patched.report.swapped
        torch.testing.assert_close(model(**batch).loss, want)


def image_token(model):
    return next(getattr(model.config, name) for name in ("image_token_id", "image_token_index") if name in model.config)


def angles(seed=0, tokens=12, width=8, layout="halves"):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, heads, width, generator=generator) for heads in (4, 2))
    cos, sin = (rotary.LAYOUTS[layout](torch.randn(tokens, width // 2, generator=generator)) for _ in range(2))
    return q, k, cos, sin


def test_the_rotary_function_of_a_tower():
    rule = rotary.prove_rotary(apply_rotary_pos_emb_vision, frozenset({"pairs"}))  # whatever the text's layout is
    assert rule == rotary.RotaryRule(layout="halves")
    ours = rotary.replacement(apply_rotary_pos_emb_vision, rule)
    with pytest.MonkeyPatch.context() as patcher:
        rotated = calls_of(patcher, rotary, "rotate")
        for inputs in (angles(), [x[None] for x in angles(1)]):  # a batch of tokens, as some towers have it
            torch.testing.assert_close(ours(*inputs), apply_rotary_pos_emb_vision(*inputs))
        assert len(rotated) == 2
        half = [x.bfloat16() if i < 2 else x for i, x in enumerate(angles(2))]
        assert [x.dtype for x in ours(*half)] == [torch.bfloat16] * 2 and len(rotated) == 3
        rotary.replacement.cache_clear()  # the function of another model
        other = rotary.replacement(apply_rotary_pos_emb_vision, rule)
        with FakeTensorMode() as mode:  # nothing can be read yet
            other(*(mode.from_tensor(x) for x in angles(3)))
        inputs = angles(4, layout="pairs")
        torch.testing.assert_close(other(*inputs), apply_rotary_pos_emb_vision(*inputs))
        assert len(rotated) == 3


def test_a_function_that_is_no_such_rotation_is_left_alone():
    def scaled(q, k, cos, sin):
        q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
        return q * 1.01, k

    assert "no rotation" in rotary.prove_rotary(scaled, frozenset())


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_stock_flag(family):
    """use_liger_kernel of TRL's and of transformers' trainer, unmodified."""
    rows, processor = picture_chats(4), vision_processor(family)
    collate = DataCollatorForVisionLanguageModeling(processor)

    def losses(trainer_class, config_class, **options):
        trainer = trained(sft(
            vision_model(family), rows, cls=trainer_class, config=config_class, max_steps=2, data_collator=collate,
            per_device_train_batch_size=2, remove_unused_columns=False, processing_class=processor, **options,
        ))  # fmt: skip
        return logged(trainer), patched_record(trainer.model)

    for classes, extra in (((SFTTrainer, SFTConfig), {"max_length": None}), ((Trainer, TrainingArguments), {})):
        want, record = losses(*classes, **extra)
        assert record is None
        liger_trainer.enable()
        try:
            got, record = losses(*classes, use_liger_kernel=True, **extra)
        finally:
            liger_trainer.disable()
        assert record is not None and ("fused loss" in record.report.swapped) == (classes[0] is Trainer)
        assert got == pytest.approx(want, rel=1e-5)


def test_the_function_of_a_family():
    with liger_trainer.apply_liger_kernel_to_qwen2_5_vl(rms_norm=False) as handle:
        record = patched_record(vision_model("qwen2_5_vl"))
    assert handle.family == "qwen2_5_vl" and record is not None and "RMSNorm" not in record.report.swapped
    assert record.report.swapped["rope"] == 4
    model = vision_model("llava")
    assert liger_trainer.apply_liger_kernel_to_llava(model=model).report.swapped["SwiGLU"] == 2
    assert isinstance(model, transformers.LlavaForConditionalGeneration)


@families
def test_decoder_layers_in_graphs(family):
    """What a graph replays takes what the model does between layers, such as Qwen3-VL's deep features of images."""
    plain, graphed = (vision_model(family).train() for _ in range(2))
    for model in (plain, graphed):
        patch(model)
    try:
        layers = GraphedLayers(graphed, recorder=RunsAgain)
    except NotCapturable as reason:
        pytest.fail(str(reason))
    replays = RunsAgain.replays
    for _ in range(4):
        for model in (plain, graphed):
            step(model, family)
            with torch.no_grad():  # other values in each pass
                for parameter in model.parameters():
                    parameter.mul_(0.99)
        assert_same_step(step(graphed, family), step(plain, family))
    recorded = family != "gemma4"  # whose layers write keys and values into a dictionary
    assert layers.report.startswith("CUDA graphs: 2 layers") == recorded, layers.report
    assert (RunsAgain.replays > replays) == recorded
    layers.undo()


@pytest.mark.parametrize(
    "conv, shape",
    [
        (torch.nn.Conv2d(3, 10, 4, 4), (2, 3, 8, 12)),
        (torch.nn.Conv2d(3, 10, (4, 2), (4, 2), padding="valid", bias=False), (2, 3, 8, 12)),
        (torch.nn.Conv3d(3, 10, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 8, 12)),
        (torch.nn.Conv2d(3, 10, 4, 4), (2, 3, 9, 12)),  # a row of pixels is left over: by the convolution
    ],
    ids=["2d", "not square", "3d", "left over"],
)
def test_patches_are_embedded_by_a_product(conv, shape):
    conv, x = conv.double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    leaves = [x, *conv.parameters()]
    ours, theirs = embed_patches(conv, x), conv(x)
    torch.testing.assert_close(ours, theirs)
    d_out = torch.randn_like(theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, d_out) for y in (ours, theirs)))
    assert ours.flatten(2).transpose(1, 2).is_contiguous() == (shape[2] % 4 == 0)


@pytest.mark.parametrize("options", [{"padding": 1}, {"dilation": 2}, {"groups": 3}, {"stride": 2}], ids=str)
def test_another_convolution_stays(options):
    class Embedding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 9, 4, **{"stride": 4, **options})

        def forward(self, x):
            return self.conv(x).flatten(2).transpose(1, 2)

    report = PatchReport("tower")
    patch_patch_embedding(Embedding(), PatchOptions(), Replacements(), report)
    assert not report.swapped


def test_a_convolution_that_checkpointing_has_hooked():
    model = vision_model("gemma3").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    want = step(model, "gemma3")
    with patch(model, steps.only("towers")) as patched:
        assert patched.report.swapped["patch embedding"] == 1
        assert_same_step(step(model, "gemma3"), want)


def test_the_configuration_of_a_patched_model_makes_another_model():
    model = vision_model("qwen2_5_vl")
    with patch(model) as patched:
        assert patched.report.swapped["tower attention"] == 2
        other = type(model)._from_config(model.config)
    assert other.model.visual.config._attn_implementation == "sdpa"
    assert model.model.visual.config is model.config.vision_config
