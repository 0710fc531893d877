"""Norms swapped by ours: the same values, dtypes and gradients as the layer's own forward, and what is refused."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import assert_same, changed, layer, run, swapped
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaWeightlessRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_trainer.patching import structure
from liger_trainer.patching.layers import norms
from liger_trainer.patching.layers.norms import GATED_KIND as KIND
from liger_trainer.patching.layers.norms import patch_gated_norms, patch_norms, prove_norm

H, GH = 40, 24  # columns of norms and of gated norms
FP32, BF16 = torch.float32, torch.bfloat16
# name: (the layer of H columns, kind)
NORMS = {
    "llama": (lambda n: LlamaRMSNorm(n, 1e-5), "RMSNorm"),  # rounds before the weight
    "olmo2": (lambda n: Olmo2RMSNorm(n, 1e-6), "RMSNorm"),
    "gemma": (lambda n: GemmaRMSNorm(n, 1e-6), "RMSNorm"),  # 1 + weight
    "gemma4": (Gemma4RMSNorm, "RMSNorm"),
    "gemma4 without weight": (lambda n: Gemma4RMSNorm(n, with_scale=False), "RMSNorm"),
    "torch": (nn.LayerNorm, "LayerNorm"),  # which on a GPU widens under autocast
    "torch without bias": (lambda n: nn.LayerNorm(n, bias=False), "LayerNorm"),
    "torch without weight": (lambda n: nn.LayerNorm(n, elementwise_affine=False), "LayerNorm"),
    "torch, RMS": (lambda n: nn.RMSNorm(n, eps=1e-5), "RMSNorm"),
    "cohere": (lambda n: CohereLayerNorm(n, 1e-5), "LayerNorm"),
    "olmo: eps in the code": (OlmoLayerNorm, "LayerNorm"),
    "nemotron": (NemotronLayerNorm1P, "LayerNorm"),  # 1 + weight, and narrows under autocast
}


def norm(name, width=H, dtype=FP32):
    return layer(lambda: NORMS[name][0](width), dtype)


def both_parts(*how):
    patch_gated_norms(*how)
    patch_norms(*how)


def patched(module, **options):
    return swapped(both_parts, module, **options)


@pytest.mark.parametrize("name", NORMS)
def test_each_norm_is_recognised_and_has_its_option(name):
    kind = NORMS[name][1]
    report = patched(norm(name))[1]
    assert report.swapped == {kind: 1} and not report.left_alone
    other = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}[kind]
    assert not patched(norm(name), **{other: False})[1].swapped
    if name in ("llama", "olmo2", "gemma"):  # also where a proof has one column to tell by
        assert patched(norm(name, 1))[1].swapped == {"RMSNorm": 1}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(NORMS)), width=st.sampled_from([1, 2, 7, H, 129]),
    dtypes=st.sampled_from([(FP32, FP32), (BF16, BF16), (BF16, FP32)]), autocast=st.booleans(),
)  # fmt: skip
def test_values_dtypes_and_gradients_are_the_layers_own(name, width, dtypes, autocast):
    x_dtype, weight_dtype = dtypes
    own = norm(name, width, weight_dtype)
    ours, report = patched(own)
    if not report.swapped:  # of few columns a proof may tell less
        assert width < H
        return
    x = (torch.randn(5, 7, width) * torch.logspace(-4, 1, 5)[:, None, None] + 0.1).to(x_dtype)
    if name == "torch, RMS" and x_dtype != weight_dtype:
        return  # torch takes none
    truth = run(copy.deepcopy(own).double(), x.double())
    floor = 3e-5 if x_dtype == FP32 and not autocast else 1e-2
    for got, want, true in zip(*(run(each, x, autocast=autocast) for each in (ours, own)), truth, strict=True):
        assert got.dtype == want.dtype
        assert (got - true).norm() <= 2 * (want - true).norm() + floor * (true.norm() + (width < H))
    if x_dtype == BF16 and width == H and not autocast:  # the same roundings in the same order, but for a few
        assert (ours(x) != own(x)).float().mean() < (0.06 if "torch" in name or name == "nemotron" else 0.01)


@pytest.mark.parametrize("name", ["torch", "torch without weight"])
def test_half_precision_becomes_fp32_under_autocast_where_torchs_layer_norm_does(monkeypatch, name):
    ours, _ = patched(norm(name))
    x = torch.randn(3, H, dtype=BF16)
    with structure.on_miniatures(autocast=True):  # it is asked of the device, here as of a GPU
        assert structure.widens_under_autocast.__wrapped__("LayerNorm", "cpu")
    with torch.autocast("cpu", BF16):
        assert ours(x).dtype == BF16  # on a CPU it does not
        monkeypatch.setattr(structure, "widens_under_autocast", lambda kind, device: device == "cpu")
        got = ours(x)
    want = F.layer_norm(x.float(), (H,), *((ours.weight, ours.bias) if ours.elementwise_affine else ()))
    assert got.dtype == FP32 and torch.allclose(got, want, atol=1e-6)
    assert ours(x).dtype == BF16  # without autocast


def test_nemotron_narrows_under_autocast_as_its_own_forward_does():
    own = norm("nemotron")
    ours, _ = patched(own)
    x = torch.randn(9, H)
    torch.set_autocast_enabled("cuda", True)  # what its forward asks for, on any device
    try:
        got, want = run(ours, x, autocast=True), run(own, x, autocast=True)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert got[0].dtype == BF16
    assert_same(got, want, 2e-2)


def test_weights_and_eps_are_read_when_called():
    own = norm("llama").requires_grad_(False)
    ours, _ = patched(own)
    x = torch.randn(2, H, requires_grad=True)
    assert torch.equal(ours(hidden_states=x), ours(x))
    ours.weight = own.weight = nn.Parameter(torch.linspace(1, 2, H), requires_grad=False)
    ours.variance_epsilon = own.variance_epsilon = 0.3
    assert torch.allclose(ours(x), own(x), atol=1e-6)
    ours(x).sum().backward()
    assert x.grad is not None and ours.weight.grad is None
    with pytest.raises(ValueError):
        ours(x, x)


class Base(nn.Module):
    """A norm whose forward the refused ones change in one place."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))
        self.eps = eps

    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self.weight.float() * self.normed(x)).to(x.dtype)


def square(x):
    return x.float().square().mean(-1, keepdim=True)


def failing(self, x):
    raise RuntimeError("a message of\nseveral lines")


def quantised():
    module = Base()
    module.weight = nn.Parameter(torch.ones(H, dtype=torch.int8), requires_grad=False)
    return module


def replaced(module):
    module.forward = lambda x, gate=None: x
    return module


def otherwise(normed):
    return changed(Base, normed=normed)


def gated_otherwise(forward):
    """A gated norm that computes `forward`, which gets the family's own and its inputs."""
    kind = Qwen3NextRMSNormGated
    return lambda: changed(kind, forward=lambda self, hidden_states, gate: forward(
        functools.partial(kind.forward, self), hidden_states, gate))(GH)  # fmt: skip


REFUSED = {
    "eps outside the root": (otherwise(lambda self, x: x.float() / (square(x).sqrt() + self.eps)), "values differ"),
    "eps forgotten": (otherwise(lambda self, x: x.float() * torch.rsqrt(square(x))), "values differ"),
    "one per cent more": (otherwise(lambda self, x: 1.01 * Base.normed(self, x)), "values differ"),
    "groups": (otherwise(lambda self, x: Base.normed(self, x.unflatten(-1, (2, -1))).flatten(-2)), "values differ"),
    "mean square in bf16": (otherwise(lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)),
     "values differ.* in torch.bfloat16"),
    "rstd in bf16": (DeepseekV4UnweightedRMSNorm, "values differ.* in torch.bfloat16"),
    "rstd without gradient": (otherwise(lambda self, x: x.float() * torch.rsqrt(square(x) + self.eps).detach()),
     "gradients differ"),
    "normed without gradient": (otherwise(lambda self, x: torch.no_grad()(Base.normed)(self, x)), "gradients differ"),
    "fp32 out of bf16": (changed(Base, forward=lambda self, x: self.weight * self.normed(x)),
     "it returns torch.float32 where torch.bfloat16"),
    "noise in training": (otherwise(lambda self, x: Base.normed(self,
     x) * (1 + 0.1 * torch.randn(()) * self.training)), "values differ"),
    "fails": (changed(Base, forward=failing), "RuntimeError: a message of several lines"),
    "two inputs": (changed(Base, forward=lambda self, x, y: x), "it takes x, y, where a norm has one input"),
    "another gate": (gated_otherwise(lambda own, x, gate: own(x, gate) * 0 + F.gelu(gate) * x), "values differ"),
    "gated, one per cent more": (gated_otherwise(lambda own, x, gate: own(x, gate) * 1.01), "its values differ"),
    "gate without gradient": (gated_otherwise(lambda own, x, gate: own(x, gate.detach())), "gradients differ"),
    "gated, replaced": (lambda: replaced(Qwen3NextRMSNormGated(GH)), "its forward has been replaced"),
    "torch's GroupNorm": (lambda: nn.GroupNorm(4, H), "fails on a miniature|values differ"),
    "eps of the dtype": (lambda: nn.RMSNorm(H), "its eps is None, not a number"),
    "quantised": (quantised, "its weight is quantised"),
    "replaced": (lambda: replaced(Base()), "its forward has been replaced"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_norm_that_computes_something_else_is_left_alone_with_the_reason(name):
    make, reason = REFUSED[name]
    own = make()
    ours, report = patched(own)
    assert vars(ours).get("forward") is vars(own).get("forward") and not report.swapped
    assert list(report.left_alone) == [type(own).__name__]
    assert re.search(reason, report.left_alone[type(own).__name__])


def test_one_proof_serves_equal_layers_and_another_setting_has_its_own(monkeypatch):
    proofs = []
    monkeypatch.setattr(norms, "prove_norm", lambda module: proofs.append(module.eps) or prove_norm(module))
    report = patched(nn.Sequential(*(Base(eps) for eps in (1e-6, 1e-5, 1e-6, 1e-6))))[1]
    assert proofs == [1e-6, 1e-5] and report.swapped == {"RMSNorm": 4}


def test_the_proof_leaves_random_state_modes_and_the_layer_alone():
    own = norm("llama")
    before, state = copy.deepcopy(own.state_dict()), torch.get_rng_state()
    for context in (torch.no_grad(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", BF16)):
        with context:
            assert not isinstance(prove_norm(own), str)
    with torch.device("meta"):
        assert patched(nn.Sequential(LlamaRMSNorm(4096), nn.LayerNorm(4096)))[1].swapped.total() == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in own.state_dict().items()) and own.weight.grad is None


def test_compiled_whole():
    model = nn.Sequential(norm("gemma"), norm("torch"))
    x = torch.randn(3, H)
    compiled = torch.compile(patched(model)[0], backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


class ByWidth(nn.Module):
    """A norm of several columns, and none of one."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return x if x.shape[-1] == 1 else F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.mark.parametrize("widths", [(1, H), (H, 1)], ids=str)
def test_a_width_is_proved_for_itself(widths):
    model, report = patched(nn.Sequential(*map(ByWidth, widths)))
    assert report.swapped == {"RMSNorm": 1} and list(report.left_alone) == ["ByWidth"]
    assert [("forward" in vars(norm)) for norm in model] == [width == H for width in widths]


def test_a_buffer_that_the_layer_does_not_use_is_no_weight():
    """FalconMamba has one for the kernels of others."""
    torch.manual_seed(0)
    own = FalconMambaWeightlessRMSNorm(H)
    ours, report = patched(own)
    assert report.swapped == {"RMSNorm": 1}
    x = torch.randn(3, H)
    own.weight.fill_(2.0)
    torch.testing.assert_close(ours(x), own(x))


# Norms with a gate

GATED = {
    "qwen3-next": lambda: Qwen3NextRMSNormGated(GH),
    "qwen3.5": lambda: Qwen3_5RMSNormGated(GH, 1e-3),
    "sigmoid": lambda: KimiLinearRMSNormGated(GH, 1e-5),
    "gate first, groups": lambda: Zamba2RMSNormGated(GH, 8, 1e-5),
    "gate first, one group": lambda: Zamba2RMSNormGated(GH, GH, 1e-5),
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(("dtype", "weights"), [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
def test_gated_norms_compute_what_the_layers_did(name, dtype, weights):
    own = layer(GATED[name])
    ours, report = patched(own)
    assert report.swapped == {KIND: 1} and not report.left_alone
    assert not patched(own, rms_norm=False)[1].swapped
    x, gate = torch.randn(2, 2, 7, GH).to(dtype)
    for got, want in zip(*(run(each.to(weights), x, gate) for each in (ours, own)), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **({} if dtype == FP32 else {"rtol": 2e-2, "atol": 6e-2}))
    if "gate first" in name:  # without a gate the layer's own forward runs
        for how in ({}, {"gate": None}):
            torch.testing.assert_close(ours(x, **how), own(x, **how), rtol=0, atol=0)


def of_all_columns(self, hidden_states, gate=None):
    own, self.group_size = self.group_size, GH
    try:
        return Zamba2RMSNormGated.forward(self, hidden_states, gate)
    finally:
        self.group_size = own


def test_groups_are_read_from_what_the_layer_computes():
    """Of a layer with groups of 8 columns that normalises all of them, all are normalised together."""
    ours, report = patched(layer(lambda: changed(Zamba2RMSNormGated, forward=of_all_columns)(GH, 8)))
    assert report.swapped == {KIND: 1}
    x, gate = torch.randn(2, 5, GH)
    torch.testing.assert_close(ours(x, gate), layer(lambda: Zamba2RMSNormGated(GH, GH))(x, gate))
