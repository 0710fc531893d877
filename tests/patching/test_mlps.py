"""MLPs and stacked experts swapped by ours: the same values and gradients, and what is refused."""

import copy
import functools
import inspect
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from layers import assert_same, changed, layer, run, swapped
from tiny import masked_batch, tiny_model
from torch import nn
from transformers import MixtralConfig, SeedOssConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from transformers.models.persimmon.modeling_persimmon import PersimmonMLP
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP

from liger_trainer.patching.layers.experts import patch_experts
from liger_trainer.patching.layers.mlps import patch_mlps
from liger_trainer.patching.patcher import patch

H, INNER = 16, 24


def config(**options):
    return SimpleNamespace(
        **{
            "hidden_size": H, "intermediate_size": INNER, "hidden_act": "silu", "mlp_bias": False, "rms_norm_eps": 1e-6,
            "block_multiple_of": 8, "block_ffn_dim_multiplier": None, "block_auto_adjust_ff_dim": False,
            "mlp_multipliers": [1.0, 1.0], **options,
        }
    )  # fmt: skip


class UpFirst(nn.Module):
    """Packed as [up | gate]."""

    def __init__(self):
        super().__init__()
        self.into, self.out, self.act = nn.Linear(H, 2 * INNER), nn.Linear(INNER, H), ACT2FN["gelu"]

    def forward(self, x):
        up, gate = self.into(x).chunk(2, -1)
        return self.out(self.act(gate) * up)


class Shuffled(nn.Module):
    """The layers in another order than that of the computation, all square, and a function for the activation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(H, H), nn.Linear(H, H, bias=False), nn.Linear(H, H)

    def forward(self, hidden):
        return self.a(self.b(hidden) * F.silu(self.c(hidden)))


class Base(nn.Module):
    """A SwiGLU MLP whose forward the refused ones change in one place."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, INNER), nn.Linear(H, INNER), nn.Linear(INNER, H)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.0)

    def middle(self, gate, up):
        return self.act(gate) * up

    def forward(self, x):
        return self.down(self.drop(self.middle(self.gate(x), self.up(x))))


class ClampedMLP(Base):
    def __init__(self):
        super().__init__()
        self.limit = 0.7

    def middle(self, gate, up):
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def seed_oss(dropout):
    return SeedOssMLP(SeedOssConfig(hidden_size=H, intermediate_size=INNER, residual_dropout=dropout))


MLPS = {
    "base": (Base, "SwiGLU"),
    "llama": (lambda: LlamaMLP(config()), "SwiGLU"),
    "llama with biases": (lambda: LlamaMLP(config(mlp_bias=True)), "SwiGLU"),
    "square": (lambda: LlamaMLP(config(intermediate_size=H)), "SwiGLU"),
    "gemma": (lambda: GemmaMLP(config(hidden_act="gelu_pytorch_tanh")), "GEGLU"),
    "exact gelu": (lambda: LlamaMLP(config(hidden_act="gelu")), "GEGLU"),
    "phi3, packed": (lambda: Phi3MLP(config()), "SwiGLU"),
    "up first": (UpFirst, "GEGLU"),
    "lfm2, other names": (lambda: Lfm2MLP(config()), "SwiGLU"),
    "another order": (Shuffled, "SwiGLU"),
    "nemotron": (lambda: NemotronMLP(config(hidden_act="relu2")), "ReLU2"),
    "persimmon, biased": (lambda: PersimmonMLP(config(hidden_act="relu2")), "ReLU2"),
    "siglip": (lambda: SiglipMLP(config(hidden_act="gelu_pytorch_tanh")), "GELU MLP"),
    "phi, exact gelu": (lambda: PhiMLP(config(hidden_act="gelu")), "GELU MLP"),
    "multipliers of 1": (lambda: FalconH1MLP(config()), "SwiGLU"),
    "dropout of 0": (lambda: seed_oss(0.0), "SwiGLU"),
    "clamped": (lambda: ClampedMLP(), "SwiGLU"),
    "clamped, packed": (lambda: MiniMaxM3VLDenseMLP(config(swiglu_alpha=1.7, swiglu_limit=0.7,
     dense_intermediate_size=INNER)), "SwiGLU"),
}  # fmt: skip
OPTIONS = {"SwiGLU": "swiglu", "GEGLU": "geglu", "ReLU2": "relu2", "GELU MLP": "gelu"}


def patched(module, **options):
    return swapped(patch_mlps, module, **options)


@pytest.mark.parametrize(
    ("name", "path"),
    [*((name, "torch") for name in MLPS), ("llama with biases", "triton"), ("up first", "triton"),
     ("persimmon, biased", "triton"), ("siglip", "triton")],
)  # fmt: skip
def test_values_and_gradients_are_the_layers_own(request, name, path):
    make, kind = MLPS[name]
    own = layer(make)
    ours, report = patched(own)
    assert report.swapped == {kind: 1} and not report.left_alone
    if path == "triton":
        request.getfixturevalue("kernels")
    x = torch.randn(3, 5, H)
    assert_same(run(ours, x), run(own, x))


@pytest.mark.parametrize("name", ["llama with biases", "phi3, packed", "up first", "persimmon, biased", "siglip"])
def test_half_precision_autocast_and_options(name):
    make, kind = MLPS[name]
    own = layer(make)
    ours, _ = patched(own)
    x = torch.randn(3, 5, H)
    assert_same(run(ours, x, autocast=True), run(own, x, autocast=True), 3e-2)
    assert_same(run(ours.bfloat16(), x.bfloat16()), run(own.bfloat16(), x.bfloat16()), 3e-2)
    assert not patched(own, **{OPTIONS[kind]: False})[1].swapped
    assert patched(own, **{o: o == OPTIONS[kind] for o in OPTIONS.values()})[1].swapped == {kind: 1}


def test_the_product_is_not_kept_for_the_backward(kernels):
    own = layer(MLPS["llama"][0])
    ours, _ = patched(own)

    def kept(module):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append((x.data_ptr(), tuple(x.shape))) or x, lambda x: x
        ):
            module(torch.randn(7, H, requires_grad=True))
        return len({pointer for pointer, shape in sizes if shape == (7, INNER)})

    assert kept(ours) == 2 and kept(own) == 4  # gate and up; with silu(gate) and the product
    own = layer(MLPS["siglip"][0])
    ours, _ = patched(own)
    assert kept(ours) == 1 and kept(own) == 2  # with gelu(up)


def test_linear_layers_may_be_replaced_after_patching_and_are_called():
    own = layer(MLPS["llama"][0])
    ours, _ = patched(own)
    calls = []

    class Doubled(nn.Linear):
        def forward(self, x):
            calls.append(self)
            return 2 * super().forward(x)

    for module in (own, ours):
        for name in ("gate_proj", "down_proj"):
            torch.manual_seed(1)
            old = getattr(module, name)
            setattr(module, name, Doubled(old.in_features, old.out_features))
    x = torch.randn(2, H)
    assert_same(run(ours, x), run(own, x))
    assert calls == [ours.gate_proj, ours.down_proj, own.gate_proj, own.down_proj]
    assert torch.equal(ours(x=x), ours(x))


class Interleaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(H, 2 * INNER), nn.Linear(INNER, H)

    def forward(self, x):
        both = self.both(x)
        return self.down(F.silu(both[..., ::2]) * both[..., 1::2])


def otherwise(middle):
    return changed(Base, middle=middle)


def base_with(**attributes):
    module = Base()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked():
    module = Base()
    module.act.register_forward_hook(lambda module, inputs, out: out * 2)
    return module


SPARSE = otherwise(lambda self, gate, up: self.act(F.relu(gate - gate.mean(-1, keepdim=True))) * up)


def rounding(self, gate, up):
    h = self.act(gate) * up
    return h.round() if self.training else h


REFUSED = {
    "clamp": (otherwise(lambda self, gate, up: self.act(gate.clamp(max=50)) * up.clamp(-50, 50)),
     "it is not down(act(gate) * up) with act one of silu, gelu_tanh, gelu"),
    "softcap": (otherwise(lambda self, gate, up: 30 * torch.tanh(Base.middle(self, gate, up) / 30)), "it is not"),
    "multiplier": (otherwise(lambda self, gate, up: self.act(gate * 1.01) * up), "it is not"),
    "a multiplier of a real family": (lambda: FalconH1MLP(config(mlp_multipliers=[0.5, 1.0])), "it is not"),
    "sparsity": (SPARSE, "it is not"),
    "one plus up": (otherwise(lambda self, gate, up: self.act(gate) * (up + 1)), "it is not"),
    "another activation": (otherwise(lambda self, gate, up: gate * torch.sigmoid(1.702 * gate) * up), "it is not"),
    "interleaved": (Interleaved, "it is not"),
    "dropout": (lambda: base_with(drop=nn.Dropout(0.1)), "it drops out elements in training"),
    "dropout of a real family": (lambda: seed_oss(0.1), "it drops out elements in training"),
    "rounding in training": (otherwise(rounding), "it is not"),
    "another gradient": (otherwise(lambda self, gate, up: self.act(gate.detach()) * up), "it is not"),
    "the weight without its layer": (changed(Base, forward=lambda self, x: F.linear(self.middle(self.gate(x),
     self.up(x)), self.down.weight)), "it is not"),
    "fp32 out of bf16": (changed(Base, forward=lambda self, x: Base.forward(self, x).float()), "it is not"),
    "sub-norm": (lambda: BitNetMLP(config(hidden_act="relu2")), "it has more than its linear layers: ffn_sub_norm"),
    "parameters": (lambda: base_with(scale=nn.Parameter(torch.ones(1))), "it has more than its linear layers: scale"),
    "hooks": (hooked, "its act has hooks or another forward, which would not be called"),
    "replaced": (lambda: base_with(forward=lambda x: x), "its forward has been replaced"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_mlp_that_computes_something_else_is_left_alone_with_the_reason(name):
    make, reason = REFUSED[name]
    own = layer(make)
    ours, report = patched(own)
    assert isinstance(vars(ours).get("forward"), type(vars(own).get("forward"))) and not report.swapped
    assert report.left_alone[type(ours).__name__].startswith(reason)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PhiMLP(config(hidden_act="relu")),
        lambda: nn.Sequential(nn.Linear(H, INNER), nn.ReLU(), nn.Linear(INNER, H)),
    ],
    ids=["ungated relu", "a sequence"],
)
def test_what_is_no_gated_mlp_is_not_mentioned(make):
    report = patched(layer(make))[1]
    assert not report.swapped and not report.left_alone


HOOKS = {  # how a hook is put on a module; it doubles what it is given
    "forward": lambda m, seen: m.register_forward_hook(lambda module, inputs, out: seen.append(m) or out * 2),
    "forward pre": lambda m, seen: m.register_forward_pre_hook(lambda module, x: seen.append(m) or (x[0] * 2,)),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda module, d_x, _: seen.append(m) or (d_x[0] * 2,)),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(lambda module, d: seen.append(m) or (d[0] * 2,)),
    "all modules'": lambda m, seen: nn.modules.module.register_module_forward_hook(lambda module, inputs,
     out: (seen.append(m) or out * 2) if module is m else None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("child", "kind"),
    [*(("act", kind) for kind in HOOKS), ("gate", "forward"), ("gate", "backward"), ("down", "forward pre"),
     ("down", "backward pre"), ("experts.act_fn", "forward"), ("experts.act_fn", "all modules'")],
)  # fmt: skip
def test_hooks_put_on_a_child_after_patching_run(kind, child):
    """A hook counts on both while it is there, and afterwards the ops run again."""
    own = Routed(experts()) if "experts" in child else layer(Base)
    ours, report = swapped(patch_experts if "experts" in child else patch_mlps, own)
    assert report.swapped.total() == 1
    x, seen, hooked = torch.randn(5, H), [], []
    plain = run(own, x)
    for module in (own, ours):
        handle = HOOKS[kind](module.get_submodule(child), seen)
        hooked.append(run(module, x))
        handle.remove()
    assert seen == [own.get_submodule(child), ours.get_submodule(child)]
    assert any(not torch.allclose(x, y) for x, y in zip(hooked[0], plain, strict=True))
    assert_same(hooked[1], hooked[0])
    assert_same(run(ours, x), plain)


def experts(implementation="grouped_mm", kind=MixtralExperts, config=MixtralConfig, **options):
    settings = config(hidden_size=H, intermediate_size=INNER, num_local_experts=4, **options)
    settings._experts_implementation = implementation
    torch.manual_seed(0)
    module = kind(settings)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


class Routed(nn.Module):
    """Experts called as their block calls them, two for each token."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        index = torch.stack([torch.arange(len(x)) % 4, (torch.arange(len(x)) * 3 + 1) % 4], 1)
        return self.experts(x, index, torch.linspace(0.2, 0.8, 2 * len(x)).view(-1, 2))


def up_first(self, packed):
    up, gate = packed.chunk(2, -1)
    return F.silu(gate) * up


def clamped_to_limits(self, packed):
    gate, up = packed.chunk(2, -1)
    return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_after_the_activation(self, packed):
    gate, up = packed.chunk(2, -1)
    return F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def limited(**methods):
    module = experts(kind=changed(MixtralExperts, **methods))
    module.limit = 0.8
    return module


def clamped(self, packed):
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up.clamp(-100, 100)


EXPERTS = {
    "silu": (lambda: experts(), "SwiGLU"),
    "batched": (lambda: experts("batched_mm"), "SwiGLU"),
    "gelu": (lambda: experts(hidden_act="gelu"), "GEGLU"),
    "tanh": (lambda: experts("batched_mm", hidden_act="gelu_pytorch_tanh"), "GEGLU"),
    "up first": (lambda: experts(kind=changed(MixtralExperts, _apply_gate=up_first)), "SwiGLU"),
    "gpt-oss": (lambda: experts(kind=GptOssExperts, config=GptOssConfig), "SwiGLU"),
    "clamped": (lambda: limited(_apply_gate=clamped_to_limits), "SwiGLU"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_stacked_experts(name):
    make, kind = EXPERTS[name]
    own = Routed(make())
    ours, report = swapped(patch_experts, own)
    assert report.swapped == {f"{kind} experts": 1} and not report.left_alone
    assert not swapped(patch_experts, own, **{OPTIONS[kind]: False})[1].swapped
    calls = []
    gate = ours.experts._apply_gate
    ours.experts._apply_gate = lambda packed: calls.append(packed.shape) or gate(packed)
    x = torch.randn(6, H)
    assert_same(run(ours, x), run(own, x))
    assert calls == [(12, 2 * INNER)]
    for each in (own, ours):  # another activation takes effect
        each.experts.act_fn = nn.Tanh()
    assert_same(run(ours, x), run(own, x))


class LoopExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * INNER, H))
        self.down_proj = nn.Parameter(torch.zeros(4, H, INNER))


def with_another_gate():
    module = experts()
    module._apply_gate = types.MethodType(lambda self, packed: packed, module)
    return module


REFUSED_EXPERTS = {
    "a loop": (lambda: experts("eager"), "its implementation (eager) does not call `_apply_gate`"),
    "no code to read": (lambda: experts("partial"), "its implementation (partial) does not call `_apply_gate`"),
    "clamped": (lambda: experts(kind=changed(MixtralExperts, _apply_gate=clamped)), "its gate is not"),
    "clamped elsewhere": (lambda: limited(_apply_gate=clamped_after_the_activation), "its gate is not"),
    "no gate": (LoopExperts, "its experts run by a loop of their own"),
    "replaced": (with_another_gate, "its `_apply_gate` has been replaced"),
}


@pytest.mark.parametrize("name", REFUSED_EXPERTS)
def test_experts_that_compute_something_else_are_left_alone_with_the_reason(name, monkeypatch):
    loop = functools.partial(inspect.unwrap(MixtralExperts.forward))
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "partial", loop)
    make, reason = REFUSED_EXPERTS[name]
    own = make()
    report = swapped(patch_experts, own)[1]
    assert not report.swapped and report.left_alone[type(own).__name__].startswith(reason)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi"])
def test_an_activation_replaced_after_the_patch_takes_effect(family):
    model = tiny_model(family).eval()
    patched = patch(model)
    twin, batch = copy.deepcopy(model), masked_batch()
    before = model(**batch).loss
    for each in (model, twin):
        found = 0
        for module in each.modules():
            for name in ("act_fn", "act", "activation_fn"):
                if hasattr(module, name):
                    setattr(module, name, nn.Tanh())
                    found += 1
        assert found
    got, twins = model(**batch).loss, twin(**batch).loss
    patched.undo()
    want = model(**batch).loss
    torch.testing.assert_close((got, twins), (want, want))
    assert not torch.allclose(want, before, rtol=1e-6)
