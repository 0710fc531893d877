"""MLPs and stacked experts swapped by ours: the same values and gradients, and what is refused."""

import copy
import functools
import inspect
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, SeedOssConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from transformers.models.persimmon.modeling_persimmon import PersimmonMLP
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

from liger_trainer.common.replacements import Replacements
from liger_trainer.patching import mlps as patch_mlps
from liger_trainer.patching.patcher import PatchOptions, PatchReport

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

    def __init__(self, activation="gelu"):
        super().__init__()
        self.into, self.out, self.act = nn.Linear(H, 2 * INNER), nn.Linear(INNER, H), ACT2FN[activation]

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


def seed_oss(dropout):
    return SeedOssMLP(SeedOssConfig(hidden_size=H, intermediate_size=INNER, residual_dropout=dropout))


MLPS = {
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
    "multipliers of 1": (lambda: FalconH1MLP(config()), "SwiGLU"),
    "dropout of 0": (
        lambda: SeedOssMLP(SeedOssConfig(hidden_size=H, intermediate_size=INNER, residual_dropout=0.0)),
        "SwiGLU",
    ),
}


def layer(make):
    torch.manual_seed(0)
    return make()


def swapped(module, copied=True, **options):
    """A patched copy, and the report."""
    model, report = nn.Sequential(copy.deepcopy(module) if copied else module), PatchReport("test")
    patch_mlps.patch_mlps(model, PatchOptions(**options), Replacements(), report)
    return model[0], report


def run(module, x, autocast=False):
    """Output, and the gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), x.grad, *(p.grad for p in module.parameters())


def assert_same(got, want, bound):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - theirs).double().norm() <= bound * theirs.double().norm()


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name", MLPS)
def test_values_and_gradients_are_the_layers_own(request, name, path):
    make, kind = MLPS[name]
    own = layer(make)
    ours, report = swapped(own)
    assert report.swapped == {kind: 1} and not report.left_alone
    if path == "triton":
        request.getfixturevalue("kernels")
    x = torch.randn(3, 5, H)
    assert_same(run(ours, x), run(own, x), 2e-6)


@pytest.mark.parametrize("name", ["llama with biases", "phi3, packed", "up first", "persimmon, biased"])
def test_half_precision_and_autocast(name):
    own = layer(MLPS[name][0])
    ours, _ = swapped(own)
    x = torch.randn(3, 5, H)
    assert_same(run(ours, x, autocast=True), run(own, x, autocast=True), 3e-2)
    assert_same(run(ours.bfloat16(), x.bfloat16()), run(own.bfloat16(), x.bfloat16()), 3e-2)


def test_the_product_is_not_kept_for_the_backward(kernels):
    own = layer(MLPS["llama"][0])
    ours, _ = swapped(own)

    def kept(module):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append((x.data_ptr(), tuple(x.shape))) or x, lambda x: x
        ):
            module(torch.randn(7, H, requires_grad=True))
        return len({pointer for pointer, shape in sizes if shape == (7, INNER)})

    assert kept(ours) == 2 and kept(own) == 4  # gate and up; with silu(gate) and the product


def test_the_linear_layers_are_called():
    ours, _ = swapped(layer(MLPS["llama"][0]))
    x, calls = torch.randn(2, H), []
    before = ours(x)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(ours, name).register_forward_hook(lambda module, inputs, out, name=name: calls.append(name))
    assert torch.allclose(ours(x), before, atol=1e-6)
    assert calls == ["gate_proj", "up_proj", "down_proj"]


def test_linear_layers_may_be_replaced_after_patching():
    own = layer(MLPS["llama"][0])
    ours, _ = swapped(own)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for module in (own, ours):
        for name in ("gate_proj", "down_proj"):
            torch.manual_seed(1)
            old = getattr(module, name)
            setattr(module, name, Doubled(old.in_features, old.out_features))
    x = torch.randn(2, H)
    assert_same(run(ours, x), run(own, x), 2e-6)


def test_the_input_may_be_given_by_name():
    ours, _ = swapped(layer(MLPS["llama"][0]))
    x = torch.randn(2, H)
    assert torch.equal(ours(x=x), ours(x))


class Base(nn.Module):
    """A SwiGLU MLP whose forward the tests below change in one place."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, INNER), nn.Linear(H, INNER), nn.Linear(INNER, H)
        self.act = nn.SiLU()

    def middle(self, gate, up):
        return self.act(gate) * up

    def forward(self, x):
        return self.down(self.middle(self.gate(x), self.up(x)))


class Clamped(Base):
    def middle(self, gate, up):
        return self.act(gate.clamp(max=50)) * up.clamp(-50, 50)


class Capped(Base):
    def middle(self, gate, up):
        return 30 * torch.tanh(super().middle(gate, up) / 30)


class Multiplied(Base):
    def middle(self, gate, up):
        return self.act(gate * 1.01) * up


class Sparse(Base):
    def middle(self, gate, up):
        return self.act(F.relu(gate - gate.mean(-1, keepdim=True))) * up


class OnePlus(Base):
    def middle(self, gate, up):
        return self.act(gate) * (up + 1)


class QuickGelu(Base):
    def middle(self, gate, up):
        return gate * torch.sigmoid(1.702 * gate) * up


class Interleaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(H, 2 * INNER), nn.Linear(INNER, H)

    def forward(self, x):
        both = self.both(x)
        return self.down(F.silu(both[..., ::2]) * both[..., 1::2])


class Dropping(Base):
    def __init__(self, p=0.1):
        super().__init__()
        self.drop = nn.Dropout(p)

    def middle(self, gate, up):
        return self.drop(super().middle(gate, up))


class Quantised(Base):
    """Rounds in training alone."""

    def middle(self, gate, up):
        h = super().middle(gate, up)
        return h.round() if self.training else h


class Detached(Base):
    def middle(self, gate, up):
        return self.act(gate.detach()) * up


class WeightsRead(Base):
    def forward(self, x):
        return F.linear(self.middle(self.gate(x), self.up(x)), self.down.weight)


class WithState(Base):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Widening(Base):
    def forward(self, x):
        return super().forward(x).float()


REFUSED = {
    "clamp": (Clamped, "it is not down(act(gate) * up) with act one of silu, gelu_tanh, gelu"),
    "softcap": (Capped, "it is not"),
    "multiplier": (Multiplied, "it is not"),
    "a multiplier of a real family": (lambda: FalconH1MLP(config(mlp_multipliers=[0.5, 1.0])), "it is not"),
    "sparsity": (Sparse, "it is not"),
    "one plus up": (OnePlus, "it is not"),
    "another activation": (QuickGelu, "it is not"),
    "interleaved": (Interleaved, "it is not"),
    "dropout": (Dropping, "it is not"),
    "dropout of a real family": (lambda: seed_oss(0.1), "it is not"),
    "rounding in training": (Quantised, "it is not"),
    "another gradient": (Detached, "it is not"),
    "the weight without its layer": (WeightsRead, "it is not"),
    "fp32 out of bf16": (Widening, "it is not"),
    "sub-norm": (lambda: BitNetMLP(config(hidden_act="relu2")), "it has more than its linear layers: ffn_sub_norm"),
    "parameters": (WithState, "it has more than its linear layers: scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_mlp_that_computes_something_else_is_left_alone_with_the_reason(name):
    make, reason = REFUSED[name]
    ours, report = swapped(layer(make))
    assert "forward" not in vars(ours) and not report.swapped
    assert report.left_alone[type(ours).__name__].startswith(reason)


def test_the_mlp_that_the_refused_ones_derive_from_is_served():
    assert swapped(Base())[1].swapped == {"SwiGLU": 1}
    assert swapped(Dropping(0.0))[1].swapped == {"SwiGLU": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: PhiMLP(config(hidden_act="gelu_new")),
        lambda: nn.Sequential(nn.Linear(H, INNER), nn.ReLU(), nn.Linear(INNER, H)),
    ],
    ids=["ungated gelu", "a sequence"],
)
def test_what_is_no_gated_mlp_is_not_mentioned(make):
    report = swapped(layer(make))[1]
    assert not report.swapped and not report.left_alone


def test_hooks_on_the_activation_are_not_cut_off():
    own = Base()
    own.act.register_forward_hook(lambda module, inputs, out: out * 2)
    ours, report = swapped(own)
    assert report.left_alone == {"Base": "its act has hooks or another forward, which would not be called"}
    assert "forward" not in vars(ours)


HOOKS = {  # how a hook is put on a module; it doubles what it is given
    "forward": lambda m, seen: m.register_forward_hook(lambda module, inputs, out: seen.append(m) or out * 2),
    "forward pre": lambda m, seen: m.register_forward_pre_hook(lambda module, x: seen.append(m) or (x[0] * 2,)),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda module, d_x, _: seen.append(m) or (d_x[0] * 2,)),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(lambda module, d: seen.append(m) or (d[0] * 2,)),
    "all modules'": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: (seen.append(m) or out * 2) if module is m else None
    ),
}


def check_hooks(own, ours, child, put) -> None:
    """A hook on a child counts on both while it is there, and afterwards the ops run again."""
    x, seen = torch.randn(5, H), []
    plain = run(own, x)
    hooked = []
    for module in (own, ours):
        handle = put(module.get_submodule(child), seen)
        hooked.append(run(module, x))
        handle.remove()
    assert seen == [own.get_submodule(child), ours.get_submodule(child)]
    assert any(not torch.allclose(x, y) for x, y in zip(hooked[0], plain, strict=True))
    assert_same(hooked[1], hooked[0], 2e-6)
    assert_same(run(ours, x), plain, 2e-6)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("child", ["act", "gate", "up", "down"])
def test_hooks_put_on_a_child_after_patching_run(kind, child):
    own = Base()
    ours, report = swapped(own)
    assert report.swapped == {"SwiGLU": 1}
    check_hooks(own, ours, child, HOOKS[kind])


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_put_on_the_activation_of_experts_after_patching_run(kind):
    own = Routed(experts())
    ours, report = swapped(own)
    assert report.swapped == {"SwiGLU experts": 1}
    check_hooks(own, ours, "experts.act_fn", HOOKS[kind])


def test_a_forward_that_somebody_replaced_is_left_alone():
    own = Base()
    own.forward = types.MethodType(lambda self, x: x, own)
    assert swapped(own)[1].left_alone == {"Base": "its forward has been replaced"}


@pytest.mark.parametrize("option, name", [("swiglu", "llama"), ("geglu", "gemma"), ("relu2", "nemotron")])
def test_each_option_is_its_own(option, name):
    own = layer(MLPS[name][0])
    assert not swapped(own, **{option: False})[1].swapped
    others = {o: False for o in ("swiglu", "geglu", "relu2") if o != option}
    assert swapped(own, **others)[1].swapped == {MLPS[name][1]: 1}


def test_what_another_part_computes_is_passed_over():
    model, replacements, report = nn.Sequential(Base(), Base()), Replacements(), PatchReport("test")
    replacements.claim(model[0])
    patch_mlps.patch_mlps(model, PatchOptions(), replacements, report)
    assert report.swapped == {"SwiGLU": 1} and "forward" not in vars(model[0])


def test_compiled_whole():
    own = layer(MLPS["llama"][0])
    ours, _ = swapped(own)
    x = torch.randn(3, H)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), own(x), atol=1e-5)


def experts(implementation="grouped_mm", kind=MixtralExperts, **options):
    given = MixtralConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=4, **options)
    given._experts_implementation = implementation
    torch.manual_seed(0)
    module = kind(given)
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


@pytest.mark.parametrize("activation, kind", [("silu", "SwiGLU"), ("gelu", "GEGLU"), ("gelu_pytorch_tanh", "GEGLU")])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_stacked_experts(implementation, activation, kind):
    own = Routed(experts(implementation, hidden_act=activation))
    ours, report = swapped(own)
    assert report.swapped == {f"{kind} experts": 1} and not report.left_alone
    calls = []
    gate = ours.experts._apply_gate
    ours.experts._apply_gate = lambda packed: calls.append(packed.shape) or gate(packed)
    x = torch.randn(6, H)
    assert_same(run(ours, x), run(own, x), 2e-6)
    assert calls == [(12, 2 * INNER)]


def test_experts_in_a_loop_do_not_call_the_gate():
    report = swapped(Routed(experts("eager")))[1]
    assert not report.swapped
    assert report.left_alone["MixtralExperts"].startswith("its implementation (eager) does not call `_apply_gate`")


def test_experts_by_an_implementation_without_code_to_read(monkeypatch):
    loop = inspect.unwrap(MixtralExperts.forward)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "partial", functools.partial(loop))
    report = swapped(Routed(experts("partial")))[1]
    assert report.left_alone["MixtralExperts"].startswith("its implementation (partial) does not call `_apply_gate`")


class UpFirstExperts(MixtralExperts):
    def _apply_gate(self, packed):
        up, gate = packed.chunk(2, -1)
        return F.silu(gate) * up


def test_experts_with_up_first():
    own = Routed(experts(kind=UpFirstExperts))
    ours, report = swapped(own)
    assert report.swapped == {"SwiGLU experts": 1}
    assert_same(run(ours, torch.ones(6, H)), run(own, torch.ones(6, H)), 2e-6)


class ClampedExperts(MixtralExperts):
    def _apply_gate(self, packed):
        gate, up = packed.chunk(2, -1)
        return F.silu(gate) * up.clamp(-100, 100)


def test_clamped_experts_are_left_alone():
    assert "its gate is not" in swapped(Routed(experts(kind=ClampedExperts)))[1].left_alone["ClampedExperts"]
    given = GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=4)
    given._experts_implementation = "grouped_mm"
    report = swapped(GptOssExperts(given))[1]
    assert "its gate is not" in report.left_alone["GptOssExperts"] and not report.swapped
    assert hasattr(DeepseekV4Experts, "_apply_gate")


class LoopExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * INNER, H))
        self.down_proj = nn.Parameter(torch.zeros(4, H, INNER))


def test_experts_without_a_gate_to_replace_are_left_alone():
    assert swapped(LoopExperts())[1].left_alone == {"LoopExperts": "its experts have no `_apply_gate` to replace"}


def test_experts_that_somebody_replaced_the_gate_of_are_left_alone():
    own = experts()
    own._apply_gate = lambda packed: packed
    assert swapped(own)[1].left_alone == {"MixtralExperts": "its `_apply_gate` has been replaced"}
