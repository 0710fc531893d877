"""Gated norms swapped by ours: the same values and gradients as the layers', and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from layers import changed
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_trainer.common.replacements import Replacements
from liger_trainer.patching.layers.gated_norms import KIND, patch_gated_norms
from liger_trainer.patching.layers.norms import patch_norms
from liger_trainer.patching.options import PatchOptions, PatchReport

H = 24
NORMS = {
    "qwen3-next": lambda: Qwen3NextRMSNormGated(H),
    "qwen3.5": lambda: Qwen3_5RMSNormGated(H, 1e-3),
    "sigmoid": lambda: KimiLinearRMSNormGated(H, 1e-5),
    "gate first, groups": lambda: Zamba2RMSNormGated(H, 8, 1e-5),
    "gate first, one group": lambda: Zamba2RMSNormGated(H, H, 1e-5),
}
PLACES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


def module_of(make):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    model[0].weight.data = torch.randn(H)
    return model


def patched(make, **options):
    model, replacements, report = module_of(make), Replacements(), PatchReport("test")
    for part in (patch_gated_norms, patch_norms):
        part(model, PatchOptions(**options), replacements, report)
    return model, report


def run(layer, x, gate):
    x, gate = (t.clone().requires_grad_() for t in (x, gate))
    y = layer(x, gate)
    layer.zero_grad()
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), x.grad, gate.grad, layer.weight.grad


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("dtype", "weights"), PLACES, ids=str)
def test_values_and_gradients_are_the_layers_own(name, dtype, weights):
    ours, report = patched(NORMS[name])
    assert report.swapped == {KIND: 1} and not report.left_alone
    own = module_of(NORMS[name])
    for layer in (ours, own):
        layer.to(weights)
    x, gate = torch.randn(2, 7, H).to(dtype), torch.randn(2, 7, H).to(dtype)
    for got, want in zip(run(ours[0], x, gate), run(own[0], x, gate), strict=True):
        assert got.dtype == want.dtype
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
        torch.testing.assert_close(got, want, **tolerance)


def test_without_a_gate_the_layers_own_forward_runs():
    ours, _ = patched(NORMS["gate first, groups"])
    x = torch.randn(3, H)
    torch.testing.assert_close(ours[0](x), module_of(NORMS["gate first, groups"])[0](x), rtol=0, atol=0)
    torch.testing.assert_close(ours[0](x, gate=None), ours[0](x), rtol=0, atol=0)


def test_options():
    assert not patched(NORMS["qwen3-next"], rms_norm=False)[1].swapped


def gelu(self, hidden_states, gate):
    return Qwen3NextRMSNormGated.forward(self, hidden_states, gate) * 0 + F.gelu(gate) * hidden_states


def one_percent(self, hidden_states, gate):
    return Qwen3NextRMSNormGated.forward(self, hidden_states, gate) * 1.01


def detached(self, hidden_states, gate):
    return Qwen3NextRMSNormGated.forward(self, hidden_states, gate.detach())


def of_all_columns(self, hidden_states, gate=None):
    own, self.group_size = self.group_size, H
    try:
        return Zamba2RMSNormGated.forward(self, hidden_states, gate)
    finally:
        self.group_size = own


REFUSED = {
    "another gate": lambda: changed(Qwen3NextRMSNormGated, forward=gelu)(H),
    "one percent": lambda: changed(Qwen3NextRMSNormGated, forward=one_percent)(H),
    "no gradient of the gate": lambda: changed(Qwen3NextRMSNormGated, forward=detached)(H),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_something_else_is_left_alone_with_the_reason(name):
    _, report = patched(REFUSED[name])
    assert not report.swapped
    (reason,) = report.left_alone.values()
    assert "gradients differ" in reason if name.startswith("no gradient") else "its values differ" in reason


def test_groups_are_read_from_what_the_layer_computes():
    """Of a layer with groups of 8 columns that normalises all of them, all are normalised together."""
    ours, report = patched(lambda: changed(Zamba2RMSNormGated, forward=of_all_columns)(H, 8))
    assert report.swapped == {KIND: 1}
    own = module_of(lambda: Zamba2RMSNormGated(H, H))
    x, gate = torch.randn(5, H), torch.randn(5, H)
    torch.testing.assert_close(ours[0](x, gate), own[0](x, gate))


def test_a_replaced_forward_is_left_alone():
    model, replacements, report = module_of(NORMS["qwen3-next"]), Replacements(), PatchReport("test")
    model[0].forward = lambda hidden_states, gate: hidden_states
    patch_gated_norms(model, PatchOptions(), replacements, report)
    assert report.left_alone == {"Qwen3NextRMSNormGated": "its forward has been replaced"}
