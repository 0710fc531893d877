"""Norms swapped by ours: the same values, dtypes and gradients as the layer's own forward, and what is refused."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from liger_trainer.common.replacements import Replacements
from liger_trainer.patching import norms as patch_norms
from liger_trainer.patching import structure
from liger_trainer.patching.norms import prove
from liger_trainer.patching.patcher import PatchOptions, PatchReport

H = 40
FP32, BF16 = torch.float32, torch.bfloat16
# name: (the layer, kind, offset, rounds before the weight, under autocast)
NORMS = {
    "llama": (lambda: LlamaRMSNorm(H, 1e-5), "RMSNorm", 0, True, "keep"),
    "llama4": (lambda: Llama4TextRMSNorm(H, 1e-5), "RMSNorm", 0, True, "keep"),
    "olmo2": (lambda: Olmo2RMSNorm(H, 1e-6), "RMSNorm", 0, False, "keep"),
    "gemma": (lambda: GemmaRMSNorm(H, 1e-6), "RMSNorm", 1, False, "keep"),
    "gemma4": (lambda: Gemma4RMSNorm(H), "RMSNorm", 0, False, "keep"),
    "gemma4 without weight": (lambda: Gemma4RMSNorm(H, with_scale=False), "RMSNorm", 0, False, "keep"),
    "torch": (lambda: nn.LayerNorm(H), "LayerNorm", 0, False, "widen"),
    "torch without bias": (lambda: nn.LayerNorm(H, bias=False), "LayerNorm", 0, False, "widen"),
    "torch without weight": (lambda: nn.LayerNorm(H, elementwise_affine=False), "LayerNorm", 0, False, "widen"),
    "cohere": (lambda: CohereLayerNorm(H, 1e-5), "LayerNorm", 0, False, "keep"),
    "olmo: eps in the code": (lambda: OlmoLayerNorm(H), "LayerNorm", 0, False, "keep"),
    "nemotron": (lambda: NemotronLayerNorm1P(H), "LayerNorm", 1, False, "narrow"),
}


def layer(make, dtype=FP32):
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5 + 0.7)
    return module.to(dtype)


def swapped(module, **options):
    """A patched copy, and its report."""
    model, report = nn.Sequential(copy.deepcopy(module)), PatchReport("test")
    patch_norms.patch_norms(model, PatchOptions(**options), Replacements(), report)
    return model[0], report


def run(module, x, autocast=False):
    """Output, and the gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", BF16, enabled=autocast):
        out = module(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), x.grad, *(p.grad for p in module.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_the_form_is_recognised(name):
    make, kind, offset, cast, autocast = NORMS[name]
    norm = prove(layer(make))
    assert not isinstance(norm, str), norm
    assert (norm.form.kind, norm.form.offset, norm.autocast) == (kind, offset, autocast)
    assert norm.form.cast_before_weight == cast
    report = swapped(layer(make))[1]
    assert report.swapped == {kind: 1} and not report.left_alone


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_dtypes_and_gradients_are_the_layers_own(name, dtypes, autocast):
    x_dtype, weight_dtype = dtypes
    own = layer(NORMS[name][0], weight_dtype)
    ours, _ = swapped(own)
    x = (torch.randn(5, 7, H) * torch.logspace(-4, 1, 5)[:, None, None] + 0.1).to(x_dtype)
    truth = run(copy.deepcopy(own).double(), x.double())
    floor = 3e-6 if x_dtype == FP32 else 4e-3
    for got, want, true in zip(run(ours, x, autocast), run(own, x, autocast), truth, strict=True):
        assert got.dtype == want.dtype
        assert (got - true).norm() <= 2 * (want - true).norm() + floor * true.norm()
    if x_dtype == BF16:  # the same roundings in the same order, but for a few
        assert (ours(x) != own(x)).float().mean() < (0.06 if "torch" in name or name == "nemotron" else 0.01)


@pytest.mark.parametrize("name", ["torch", "torch without weight"])
def test_half_precision_becomes_fp32_under_autocast_where_torchs_layer_norm_does(monkeypatch, name):
    ours, _ = swapped(layer(NORMS[name][0]))
    x = torch.randn(3, H, dtype=BF16)
    with torch.autocast("cpu", BF16):
        assert ours(x).dtype == BF16  # on a CPU it does not
        monkeypatch.setattr(structure, "widens_under_autocast", lambda kind, device: device == "cpu")
        got = ours(x)
    want = F.layer_norm(x.float(), (H,), *((ours.weight, ours.bias) if ours.elementwise_affine else ()))
    assert got.dtype == FP32 and torch.allclose(got, want, atol=1e-6)
    assert ours(x).dtype == BF16  # without autocast


def test_whether_torchs_norms_widen_is_asked_of_the_device():
    assert not structure.widens_under_autocast("LayerNorm", "cpu")
    with structure.on_miniatures(autocast=True):  # as on a GPU
        assert structure.widens_under_autocast.__wrapped__("LayerNorm", "cpu")


def test_nemotron_narrows_under_autocast_as_its_own_forward_does():
    own = layer(NORMS["nemotron"][0])
    ours, _ = swapped(own)
    x = torch.randn(9, H)
    torch.set_autocast_enabled("cuda", True)  # what its forward asks for, on any device
    try:
        got, want = run(ours, x, True), run(own, x, True)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert got[0].dtype == want[0].dtype == BF16
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and (mine - theirs).norm() <= 2e-2 * theirs.norm()


def test_the_input_may_be_given_by_name_and_weights_are_read_when_called():
    own = layer(NORMS["llama"][0])
    ours, _ = swapped(own)
    x = torch.randn(2, H)
    assert torch.equal(ours(hidden_states=x), ours(x))
    ours.weight = own.weight = nn.Parameter(torch.linspace(1, 2, H))
    ours.variance_epsilon = own.variance_epsilon = 0.3
    assert torch.allclose(ours(x), own(x), atol=1e-6)
    with pytest.raises(ValueError):
        ours(x, x)


def test_a_frozen_norm_has_no_gradient():
    ours, _ = swapped(layer(NORMS["llama"][0]).requires_grad_(False))
    x = torch.randn(2, H, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is not None and ours.weight.grad is None


class Base(nn.Module):
    """A norm whose forward the tests below change in one place."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))
        self.eps = eps

    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self.weight.float() * self.normed(x)).to(x.dtype)


class EpsOutside(Base):
    def normed(self, x):
        return x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + self.eps)


class EpsForgotten(Base):
    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))


class Scaled(Base):
    def normed(self, x):
        return 1.01 * super().normed(x)


class Grouped(Base):
    def normed(self, x):
        return super().normed(x.view(*x.shape[:-1], 2, -1)).flatten(-2)


class HalfPrecision(Base):
    def normed(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Detached(Base):
    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).detach()


class WithoutGradient(Base):
    def normed(self, x):
        with torch.no_grad():
            return super().normed(x)


class Widening(Base):
    def forward(self, x):
        return self.weight * self.normed(x)


class Noisy(Base):
    def normed(self, x):
        return super().normed(x) * (1 + 0.1 * torch.randn(()) * self.training)


class Failing(Base):
    def forward(self, x):
        raise RuntimeError("a message of\nseveral lines")


REFUSED = {
    "eps outside the root": (EpsOutside, "values differ"),
    "eps forgotten": (EpsForgotten, "values differ"),
    "one per cent more": (Scaled, "values differ"),
    "groups": (Grouped, "values differ"),
    "mean square in bf16": (HalfPrecision, "values differ.* in torch.bfloat16"),
    "rstd in bf16": (lambda: DeepseekV4UnweightedRMSNorm(), "values differ.* in torch.bfloat16"),
    "rstd without gradient": (Detached, "gradients differ"),
    "normed without gradient": (WithoutGradient, "gradients differ"),
    "fp32 out of bf16": (Widening, "it returns torch.float32 where torch.bfloat16"),
    "noise in training": (Noisy, "values differ"),
    "fails": (Failing, "RuntimeError: a message of several lines"),
    "gated": (lambda: Qwen3NextRMSNormGated(H), "it takes hidden_states, gate, where a norm has one input"),
    "torch's GroupNorm": (lambda: nn.GroupNorm(4, H), "fails on a miniature|values differ"),
    "eps of the dtype": (lambda: nn.RMSNorm(H), "its eps is None, not a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_norm_that_computes_something_else_is_left_alone_with_the_reason(name):
    make, reason = REFUSED[name]
    own = make()
    ours, report = swapped(own)
    assert "forward" not in vars(ours) and not report.swapped
    assert list(report.left_alone) == [type(own).__name__]
    assert re.search(reason, report.left_alone[type(own).__name__])


def test_the_norm_that_the_refused_ones_derive_from_is_served():
    assert swapped(Base())[1].swapped == {"RMSNorm": 1}


def test_a_torch_rms_norm_with_an_eps_is_served():
    ours, report = swapped(layer(lambda: nn.RMSNorm(H, eps=1e-5)))
    assert report.swapped == {"RMSNorm": 1}
    x = torch.randn(4, H)
    assert torch.allclose(ours(x), F.rms_norm(x, (H,), ours.weight, 1e-5), atol=1e-6)


def test_quantised_weights_are_left_alone():
    own = Base()
    own.weight = nn.Parameter(torch.ones(H, dtype=torch.int8), requires_grad=False)
    assert swapped(own)[1].left_alone == {"Base": "its weight is quantised"}


def test_a_forward_that_somebody_replaced_is_left_alone():
    own = Base()
    own.forward = lambda x: x
    ours, report = swapped(own)
    assert report.left_alone == {"Base": "its forward has been replaced"}
    x = torch.randn(2, H)
    assert ours(x) is x


def test_each_option_is_its_own():
    model = nn.Sequential(nn.LayerNorm(H), LlamaRMSNorm(H))
    for option, kind in (("rms_norm", "RMSNorm"), ("layer_norm", "LayerNorm")):
        report, replacements = PatchReport("test"), Replacements()
        patch_norms.patch_norms(model, PatchOptions(**{option: False}), replacements, report)
        assert report.swapped == {({"RMSNorm", "LayerNorm"} - {kind}).pop(): 1}
        replacements.undo()


def test_norms_that_another_part_computes_are_passed_over():
    model, replacements, report = nn.Sequential(Base(), Base(), Base()), Replacements(), PatchReport("test")
    replacements.claim(model[0])
    replacements.forward(model[1], lambda module, x: x)
    patch_norms.patch_norms(model, PatchOptions(), replacements, report)
    assert report.swapped == {"RMSNorm": 1} and "forward" in vars(model[2])


def test_one_proof_serves_equal_layers_and_another_setting_has_its_own(monkeypatch):
    proofs = []
    monkeypatch.setattr(patch_norms, "prove", lambda module: proofs.append(module.eps) or prove(module))
    report = PatchReport("test")
    model = nn.Sequential(*(Base(eps) for eps in (1e-6, 1e-5, 1e-6, 1e-6)))
    patch_norms.patch_norms(model, PatchOptions(), Replacements(), report)
    assert proofs == [1e-6, 1e-5] and report.swapped == {"RMSNorm": 4}


def test_the_proof_leaves_random_state_modes_and_the_layer_alone():
    own = layer(NORMS["llama"][0])
    before, state = copy.deepcopy(own.state_dict()), torch.get_rng_state()
    for context in (torch.no_grad(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", BF16)):
        with context:
            assert not isinstance(prove(own), str)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in own.state_dict().items()) and own.weight.grad is None


def test_on_the_meta_device():
    with torch.device("meta"):
        own = nn.Sequential(LlamaRMSNorm(4096), nn.LayerNorm(4096))
    report = PatchReport("test")
    patch_norms.patch_norms(own, PatchOptions(), Replacements(), report)
    assert report.swapped == {"RMSNorm": 1, "LayerNorm": 1}
    assert all("forward" in vars(norm) for norm in own)


def test_compiled_whole():
    model = nn.Sequential(layer(NORMS["gemma"][0]), layer(NORMS["torch"][0]))
    x = torch.randn(3, H)
    want = model(x)
    patch_norms.patch_norms(model, PatchOptions(), Replacements(), PatchReport("test"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), want, atol=1e-5)


class ByWidth(nn.Module):
    """A norm of several columns, and none of one."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return x if x.shape[-1] == 1 else F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.mark.parametrize("widths", [(1, H), (H, 1)], ids=str)
def test_a_width_is_proved_for_itself(widths):
    model, report = swapped(nn.Sequential(*map(ByWidth, widths)))
    assert report.swapped == {"RMSNorm": 1} and list(report.left_alone) == ["ByWidth"]
    assert [("forward" in vars(norm)) for norm in model] == [width == H for width in widths]


@pytest.mark.parametrize("make", [LlamaRMSNorm, Olmo2RMSNorm, GemmaRMSNorm], ids=lambda make: make.__name__)
def test_a_norm_of_one_column(make):
    own = layer(lambda: make(1))
    ours, report = swapped(own)
    assert report.swapped == {"RMSNorm": 1}
    x = torch.randn(5, 7, 1)
    for got, want in zip(run(ours, x), run(own, x), strict=True):
        torch.testing.assert_close(got, want)
