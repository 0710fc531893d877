"""map_kernels: our layers by way of Hugging Face's `kernels`, where that is installed; an error where it is not."""

import copy
from typing import Any

import pytest
import torch
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from transformers.utils.import_utils import is_kernels_available

from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.patching import hf_kernels as kernel_mapping
from liger_trainer.patching.hf_kernels import map_kernels

installed = pytest.mark.skipif(not is_kernels_available(), reason="needs Hugging Face's kernels package")


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(kernel_mapping, "is_kernels_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install .*patch\(model\) needs no such package"):
        map_kernels(tiny_model())


@pytest.mark.parametrize("family, kind", [("llama", "RMSNorm"), ("gemma2", "RMSNorm"), ("llama", "SwiGLU")])
def test_the_layer_class_is_what_the_package_takes(family, kind):
    """No constructor, no members but the two flags, the same parameters; bound to a module it computes the same."""
    model = tiny_model(family)
    module = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm" if kind == "RMSNorm" else "MLP"))
    (found,) = {x.name: x for x in kernel_mapping._layers(model) if x.module is module}.values()
    layer: Any = kernel_mapping._layer_class(type(module), found.forward(found.rule))
    extra = set(dir(layer)) - set(dir(torch.nn.Module))
    assert layer.__init__ is torch.nn.Module.__init__ and extra == {"has_backward", "can_torch_compile"}
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(layer.forward(module, x), module(x))


@installed
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_mapped_model_equals_the_plain_one(family):
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    want = plain(**masked_batch()).loss
    gradients = named_gradients(plain, want)
    report = map_kernels(model)
    assert report.swapped["rope"] == 1 and report.swapped["RMSNorm"] >= 5
    assert report.swapped["SwiGLU"] + report.swapped["GEGLU"] == 2
    for mode in (True, False):  # transformers maps anew
        got = model.train(mode)(**masked_batch()).loss
        torch.testing.assert_close(got, want)
        assert_same_gradients(named_gradients(model, got), gradients)
    layers = model.model.layers[0]
    for module in (layers.mlp, layers.input_layernorm):
        assert vars(module)["forward"].__func__.__module__ == kernel_mapping.__name__


@installed
def test_refused():
    model = tiny_model()
    patched = patch(model)
    with pytest.raises(ConfigError, match="is patched"):
        map_kernels(model)
    patched.undo()
    map_kernels(model)
    with pytest.raises(ConfigError, match="other kernels"):
        map_kernels(model)
