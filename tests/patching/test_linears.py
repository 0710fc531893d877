"""Trained layers of one input: computed together where they are nothing but weights, and as before elsewhere."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import masked_batch, tiny_model
from torch.testing import assert_close

from liger_trainer.kernels import linears as op
from liger_trainer.patching.layers import linears as patching
from liger_trainer.patching.patcher import patch


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call of the op computes."""
    counts, compute = [], op.linears

    def counted(x, weights, biases):
        counts.append(len(weights))
        return compute(x, weights, biases)

    monkeypatch.setattr(patching, "linears", counted)
    return counts


def gradients(model):
    loss = model(**masked_batch()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def pair(family="qwen3", **options):
    plain = tiny_model(family, **options)
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gemma2"])
def test_gradients_are_the_plain_models(family, calls):
    plain, model = pair(family)
    patched = patch(model)
    layers = model.config.num_hidden_layers
    assert patched.report.swapped["shared input"] == 2 * layers
    assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
    assert sorted(calls) == [2] * layers + [3] * layers
    patched.undo()
    assert not any("forward" in vars(m) for m in model.modules())
    calls.clear()
    model(**masked_batch())
    assert not calls


def test_without_gradients_each_is_called(calls):
    plain, model = pair()
    patch(model)
    with torch.no_grad():
        assert_close(model(**masked_batch()).loss, plain(**masked_batch()).loss)
    assert not calls


def test_checkpointing(calls):
    plain, model = pair()
    patch(model)
    for each in (plain, model):
        each.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
    assert calls


@pytest.mark.parametrize("change", ["hook", "frozen", "replaced"])
def test_a_layer_that_becomes_more_than_its_weight(change, calls):
    """A hook and another forward are called; a weight that is frozen has no gradient."""
    plain, model = pair(num_hidden_layers=1)
    patch(model)
    seen = []
    for each in (plain, model):
        layer = each.get_submodule("model.layers.0.self_attn.k_proj")
        if change == "hook":
            layer.register_forward_hook(lambda module, args, output: seen.append(1) or 2 * output)
        elif change == "frozen":
            layer.weight.requires_grad_(False)
        else:
            layer.forward = lambda x, weight=layer.weight: 3 * torch.nn.functional.linear(x, weight)
    assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
    assert calls == ([3, 2] if change == "frozen" else [2])
    assert len(seen) == (2 if change == "hook" else 0)


def test_frozen_layers_are_left_alone():
    model = tiny_model()
    model.requires_grad_(False)
    assert "shared input" not in patch(model).report.swapped


def test_adapters_that_come_after_the_patch(calls):
    """PEFT wraps the layers: MLPs run as one op, attention by PEFT's forward on layers that are computed together."""
    plain, model = pair()
    patched = patch(model)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    results = []
    for each in (plain, model):
        torch.manual_seed(0)
        results.append(gradients(get_peft_model(each, config)))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    assert set(calls) == {3} and patched
