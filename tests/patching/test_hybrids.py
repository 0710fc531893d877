"""Models with layers beside attention: packed rows are the sum over single documents, in loss and gradients."""

import copy

import pytest
import torch
from families import build
from packed import documents, packed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.patching.packing import token_mixers
from liger_trainer.patching.packing.packed_rows import PackedRows, patch_packed_attention, why_documents_mix

LENGTHS = (5, 1, 2, 70, 64, 3)
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}


def tiny(family):
    model = build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], num_hidden_layers=2, **FAMILIES[family])
    if isinstance(model, str):
        pytest.skip(model)
    if not any(token_mixers._convs_of(type(module)) for module in model.modules()):
        pytest.skip("this transformers calls no function for its convolutions")
    return model.train()


def outcome(model, batches):
    """The sum of the loss over all tokens with a label, and its gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        count = (batch["labels"][:, 1:] != -100).sum()
        if count:
            loss = model(**batch, use_cache=False).loss * count
            loss.backward()
            total += loss.item()
    return torch.tensor(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def single(rows):
    return [{"input_ids": row[None], "labels": row[None]} for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_rows_are_as_before(family):
    model = tiny(family)
    rows = torch.stack(documents([9, 9], 50)) + 4
    batches = [{"input_ids": rows, "labels": rows}]
    want = outcome(model, batches)
    with patch(model) as patched:
        assert patched.report.swapped["causal conv"] == 1
        assert_same(outcome(model, batches), want)
    assert_same(outcome(model, batches), want)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_packed_rows_are_the_sum_over_documents(family):
    model = tiny(family)
    rows = [row + 4 for row in documents(LENGTHS, 50)]
    want = outcome(model, single(rows))
    patched = patch(model)
    patch_packed_attention(model, patched, PackedRows())
    assert_same(outcome(model, [packed(rows)]), want)


def test_a_convolution_across_documents_is_noticed(monkeypatch):
    """The test above fails where lengths do not reach the convolution."""
    model = tiny("lfm2")
    rows = [row + 4 for row in documents(LENGTHS, 50)]
    want = outcome(model, single(rows))
    op = token_mixers.causal_conv
    monkeypatch.setattr(token_mixers, "causal_conv", lambda x, w, b, ends, *, silu, bounds: op(x, w, b, silu=silu))
    patched = patch(model)
    patch_packed_attention(model, patched, PackedRows())
    with pytest.raises(AssertionError):
        assert_same(outcome(model, [packed(rows)]), want)


def test_without_our_convolution_packing_is_refused():
    model = tiny("lfm2")
    assert "causal_conv1d" in why_documents_mix(model, by_lengths=True)
    with patch(model, hybrids=False) as patched, pytest.raises(ConfigError, match="type conv"):
        patch_packed_attention(model, patched, PackedRows())
    with patch(model) as patched, pytest.raises(ConfigError, match="type conv"):  # told by positions alone
        patch_packed_attention(model, patched, PackedRows(by_lengths=False))


def test_what_is_no_causal_convolution_is_left_alone():
    def doubled(hidden_states, weight, bias=None, activation=None):
        shifted = torch.nn.functional.pad(hidden_states, (3, 0)).unfold(2, 4, 1)
        y = 2 * (shifted * weight[:, None]).sum(-1)
        y = y if bias is None else y + bias[:, None]
        return y if activation is None else torch.nn.functional.silu(y)

    def exact(hidden_states, weight, bias=None, activation=None):
        return doubled(hidden_states, weight / 2, bias, activation)

    assert "no causal convolution" in token_mixers.why_no_conv(doubled)
    assert token_mixers.why_no_conv(exact) is None


def test_copies_of_a_patched_model_convolve_by_our_op():
    model = tiny("lfm2")
    patched = patch(model)
    clone = copy.deepcopy(model)
    patched.undo()
    patch_packed_attention(clone, clone._liger_patched, PackedRows())
    assert why_documents_mix(clone, by_lengths=True) is None and why_documents_mix(model, by_lengths=True)
