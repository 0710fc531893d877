"""Rotary functions of one tensor, and the one that turns backwards: proved, swapped, equal to the model's own."""

import pytest
import torch
from families import build
from tiny import assert_same_gradients, masked_batch, named_gradients
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.codegen import modeling_codegen
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.nanochat import modeling_nanochat

from liger_trainer.patching.layers import rotary
from liger_trainer.patching.layers.rotary import is_alone, prove_alone, prove_rotary, replacement_alone
from liger_trainer.patching.patcher import patch

ROPE = {**dict.fromkeys(
    ("rms_norm", "layer_norm", "swiglu", "geglu", "relu2", "gelu", "linear", "lora", "fused_linear_cross_entropy"),
    False,
)}  # fmt: skip
HALVES = frozenset({"halves"})
# swapped modules, and calls of the op of each; DeepSeek V4 rotates back, too, and has compressors beside attention
TAKES = {"gemma4_text": (2, 2), "gemma3n_text": (2, 2), "codegen": (2, 2), "gptj": (2, 2), "nanochat": (2, 1)}
TAKES["deepseek_v4"] = (4, 2)


@pytest.fixture
def calls(monkeypatch):
    shapes, op = [], rotary.rope
    monkeypatch.setattr(
        rotary, "rope", lambda q, k, *angles, **o: (shapes.append(k.shape[1]), op(q, k, *angles, **o))[1]
    )
    return shapes


@pytest.mark.parametrize("family", TAKES)
def test_loss_and_gradients_are_the_models_own(family, calls):
    plain, ours = (build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]) for _ in range(2))
    report = patch(ours, ROPE).report
    modules, each = TAKES[family]
    assert report.swapped == {"rope": modules} and not report.left_alone
    losses = [model(**masked_batch()).loss for model in (ours, plain)]
    assert len(calls) >= 2 * each and all(bool(heads) == (each == 1) for heads in calls)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert_same_gradients(*(named_gradients(model, loss) for model, loss in zip((ours, plain), losses, strict=True)))


def test_what_is_proved():
    gemma, codegen = (m.apply_rotary_pos_emb for m in (modeling_gemma4, modeling_codegen))
    assert is_alone(gemma) and is_alone(codegen) and not is_alone(modeling_nanochat.apply_rotary_pos_emb)
    rule = prove_alone(gemma, HALVES)
    assert not isinstance(rule, str) and not rule.interleaved and not rule.reverse
    rule = prove_alone(codegen, frozenset())
    assert not isinstance(rule, str) and rule.interleaved and rule.half_width
    rule = prove_rotary(modeling_nanochat.apply_rotary_pos_emb, HALVES)
    assert not isinstance(rule, str) and rule.reverse
    rule = prove_alone(modeling_deepseek_v4.apply_rotary_pos_emb, frozenset())
    assert not isinstance(rule, str) and rule.trailing and rule.interleaved and rule.half_width


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_of_one_tensor(heads_dim, dtype):
    own = modeling_gemma4.apply_rotary_pos_emb
    rule = prove_alone(own, HALVES)
    assert not isinstance(rule, str)
    ours = replacement_alone(own, rule)
    x = torch.randn((2, 3, 5, 16) if heads_dim == 1 else (2, 5, 3, 16)).to(dtype)
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got, want = (f(x, cos, sin, unsqueeze_dim=heads_dim) for f in (ours, own))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))
    torch.testing.assert_close(ours(x, cos=cos, sin=sin, unsqueeze_dim=heads_dim), got)


def test_what_the_op_does_not_serve_goes_to_the_models_own_function():
    own = modeling_gemma4.apply_rotary_pos_emb
    rule = prove_alone(own, HALVES)
    assert not isinstance(rule, str)
    x, cos = torch.randn(2, 5, 16), torch.randn(2, 5, 16)  # no heads
    torch.testing.assert_close(replacement_alone(own, rule)(x, cos, cos, 0), own(x, cos, cos, 0), rtol=0, atol=0)
