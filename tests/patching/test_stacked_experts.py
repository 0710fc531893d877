"""Frozen stacked experts, with PEFT's adapters and without: loss and gradients are PEFT's, nothing is merged."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from peft.tuners.lora.layer import ParamWrapper
from quick_cases import slow_but
from recorders import calls_of
from steps import ADAPTER_STATES, adapted, assert_same_step, lora
from tiny import masked_batch
from torch import nn
from torch.nn.utils import parametrize
from trainings import logged, sft, trained
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import SFTTrainer

from liger_trainer import LigerTrainer
from liger_trainer.compat.four_bit_tensor import FourBitTensor
from liger_trainer.patching.patcher import patch

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about a second adapter
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def tiny(family: str = "qwen3_moe", experts: str = "grouped_mm", **overrides: Any) -> Any:
    overrides = {"num_experts_per_tok": 2, **overrides}
    return build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], experts=experts, **overrides).train()


def wrapped(model: Any, parameters: list[str] = BOTH, **options: Any) -> Any:
    return adapted(model, **{"target_parameters": parameters, "target_modules": ["o_proj"], **options})


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def train_weights(model: Any, end: str) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(end):
            parameter.requires_grad_()


@pytest.fixture
def merges(monkeypatch) -> list[tuple]:
    """Calls with which PEFT merges adapters into a parameter, for a forward."""
    return calls_of(monkeypatch, ParamWrapper, "_activate_lora")


# by layout and gate: SiLU; with a shared expert beside; transposed; transposed with biases, interleaved and clamped
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "granitemoe", "aria_text", "gpt_oss"]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *(pytest.param(family, "grouped_mm", marks=[pytest.mark.slow] * (family not in ("deepseek_v3",
         "aria_text"))) for family in FAMILIES),
        ("qwen3_moe", "eager"),
        ("gpt_oss", "batched_mm"),
    ],
)  # fmt: skip
def test_adapters_on_both(family, implementation, merges):
    plain, ours = (wrapped(tiny(family, implementation)) for _ in range(2))
    if not wrappers_of(ours):
        pytest.skip("this transformers has its experts elsewhere")
    report = patch(ours).report
    assert report.swapped["LoRA experts"] == len(wrappers_of(ours)) // 2 > 0
    assert not report.left_alone
    loss = ours(**masked_batch()).loss
    loss.backward()
    assert not merges
    assert_same_step(ours, plain)
    router = [p for name, p in ours.named_parameters() if "mlp.gate." in name or "router" in name]
    assert router and not any(p.requires_grad for p in router)


@pytest.mark.parametrize(
    "options",
    [dict(parameters=BOTH[:1]), dict(parameters=BOTH[1:]), dict(use_rslora=True),
     dict(parameters=[], target_modules=["q_proj", "v_proj"])],
    ids=["gate and up", "down", "rslora", "none: frozen experts"],
)  # fmt: skip
def test_adapters_on_some(options):
    plain, ours = (wrapped(tiny(), **options) for _ in range(2))
    kind = "LoRA experts" if options.get("parameters", BOTH) else "frozen experts"
    assert patch(ours).report.swapped[kind] == 2
    assert_same_step(ours, plain)


def hook(modules: list[Any]) -> None:
    for module in modules:
        module.register_forward_hook(lambda *_: None)


def wrappers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ParamWrapper)]


BY_PEFT: dict[str, Callable[[Any], Any]] = {
    "trained experts": lambda model: train_weights(model, "down_proj"),
    "hooked experts": lambda model: hook(experts_of(model)),
    "hooked adapters": lambda model: hook([each.lora_A["default"] for each in wrappers_of(model)]),
}
STATES = {**ADAPTER_STATES, **BY_PEFT}


@pytest.mark.parametrize(
    "state",
    slow_but(STATES, "both at once", "disabled", "merged and taken apart", "trained experts", "hooked adapters"),
)
def test_states(state, merges):
    """Switched after patching: what experts compute is decided when they are called."""
    plain, ours = wrapped(tiny()), wrapped(tiny())
    for model in (plain, ours):
        torch.manual_seed(2)
        model.add_adapter("other", lora(r=2, target_parameters=BOTH, target_modules=["o_proj"]))
    patch(ours)
    for model in (plain, ours):
        STATES[state](model)
    ours(**masked_batch())
    assert bool(merges) == (state in BY_PEFT)
    assert_same_step(ours, plain)


def test_wrapped_after_the_patch():
    """PEFT's forward runs, on experts whose own forward the patch may have swapped."""
    model = tiny().requires_grad_(False)
    assert patch(model).report.swapped["frozen experts"] == 2
    assert_same_step(wrapped(model), wrapped(tiny()))


def test_undone_and_copied():
    plain, ours = (wrapped(tiny()) for _ in range(2))
    patched = patch(ours)
    clone = copy.deepcopy(ours.get_base_model())
    patched.undo()
    assert not any("forward" in vars(m) for m in wrappers_of(ours))
    assert_same_step(ours, plain)
    assert_same_step(clone, plain.get_base_model())


class Eighth(nn.Module):
    """Stands for a quantised weight: it is kept as integers and made anew whenever it is read."""

    def forward(self, packed):
        return packed.float() / 8


def quantise(model: Any) -> Any:
    for module in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            packed = (getattr(module, name).detach() * 8).round().to(torch.int8)
            del module._parameters[name]
            module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            parametrize.register_parametrization(module, name, Eighth(), unsafe=True)
    return model


def test_quantised_experts():
    """A base that only its own parametrisation can unpack, as in 4 bits."""
    model = quantise(tiny().requires_grad_(False))
    want = tiny().requires_grad_(False)
    for module in experts_of(want):
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, name).data = (getattr(module, name) * 8).round() / 8
    every = [f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    plain, ours = wrapped(want), wrapped(model, every)  # PEFT wants whole names there
    pairs = list(zip(adapters(ours), adapters(plain), strict=True))
    for own, other in pairs:
        own.data = other.data.clone()
    assert patch(ours).report.swapped["LoRA experts"] == 2
    for model in (ours, plain):
        model(**masked_batch()).loss.backward()
    for own, other in pairs:
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


def in_4_bits(model: Any, unpacks: bool = False) -> Any:
    """The model with experts in 4 bits: MXFP4 of gpt-oss, nf4 of others; or with the numbers that those stand for."""
    for module in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name).detach()
            if getattr(module, "is_transposed", False):
                experts, inputs, outputs = weight.shape
                generator = torch.Generator().manual_seed(inputs)
                blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
                scales = torch.randint(120, 124, blocks.shape[:-1], generator=generator)
                quantised = FourBitTensor.mxfp4(blocks.to(torch.uint8), scales.to(torch.uint8), weight.dtype)
            else:
                quantised = FourBitTensor.nf4(weight)
            setattr(module, name, nn.Parameter(quantised.unpacked() if unpacks else quantised, requires_grad=False))
    return model


IN_4_BITS = {"qwen3_moe": {}, "gpt_oss": {"hidden_size": 64, "intermediate_size": 32}}


@pytest.mark.parametrize("parameters", [BOTH, []], ids=["adapted", "frozen"])
@pytest.mark.parametrize("family", IN_4_BITS)
def test_experts_in_4_bits(family, parameters):
    """Loss and gradients of adapters are those of the unpacked experts, which have none."""
    plain, ours = (wrapped(in_4_bits(tiny(family, **IN_4_BITS[family]), u), parameters) for u in (True, False))
    assert patch(ours).report.swapped["LoRA experts" if parameters else "frozen experts"] == 2
    assert_same_step(ours, plain)
    ours(**masked_batch()).loss.backward()
    assert all(
        isinstance(getattr(m, n), FourBitTensor) for m in experts_of(ours) for n in ("gate_up_proj", "down_proj")
    )
    assert all((p.grad is not None) == p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("run", ["plain", "checkpointing"])
def test_experts_in_4_bits_through_the_trainer(run, tmp_path):
    results = []
    for unpacks in (True, False):
        torch.manual_seed(3)
        peft_config = lora(r=4, target_modules=["q_proj", "o_proj"], target_parameters=BOTH)
        options = {"output_dir": str(tmp_path / str(unpacks)), "max_steps": 3, "max_length": 12, **RUNS[run][0]}
        results.append(trained(sft(in_4_bits(tiny(), unpacks), peft_config=peft_config, **options)))
    want, got = map(logged, results)
    assert got == pytest.approx(want, rel=1e-5) and len(want) == 3
    results[1].save_model(str(tmp_path / "saved"))
    assert {p.name for p in (tmp_path / "saved").glob("*.safetensors")} == {"adapter_model.safetensors"}
    with pytest.raises(RuntimeError, match="liger-trainer merge"):
        results[1].model.merge_and_unload()


def adapters(model: Any) -> list[nn.Parameter]:
    """A and B of the experts, in one order, whichever wrapper is the outer one."""
    wrappers = wrappers_of(model)
    wrappers = [
        wrappers[i] for start in (0, 2) for i in sorted((start, start + 1), key=lambda i: wrappers[i].parameter_name)
    ]
    return [x["default"].weight for w in wrappers for x in (w.lora_A, w.lora_B)]


def other_implementation(model: Any) -> None:
    for module in experts_of(model):
        module.config._experts_implementation = "another"


def other_gate(model: Any) -> None:
    for module in experts_of(model):
        module._apply_gate = types.MethodType(lambda self, packed: packed, module)


REFUSED = {
    "another implementation": (other_implementation, "the experts' implementation (another) is none of"),
    "another gate": (other_gate, "its `_apply_gate` has been replaced"),
    "trained": (lambda model: train_weights(model, "gate_up_proj"), "the experts are trained too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_peft_has_a_reason(case, monkeypatch):
    change, reason = REFUSED[case]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "another", lambda self, x, *_: x)
    model = wrapped(tiny())
    change(model)
    report = patch(model).report
    assert "LoRA experts" not in report.swapped
    assert reason in report.left_alone["LoRA on down_proj, gate_up_proj"], str(report)


def train(cls, **options):
    peft_config = lora(r=4, target_modules=["q_proj", "o_proj"], target_parameters=BOTH)
    torch.manual_seed(3)
    return trained(sft(tiny(), cls=cls, max_steps=3, max_length=12, peft_config=peft_config, **options))


RUNS = {
    "plain": ({}, 1e-5),
    "checkpointing": ({"gradient_checkpointing": True}, 1e-5),
    "reentrant checkpointing": ({"gradient_checkpointing": True,
     "gradient_checkpointing_kwargs": {"use_reentrant": True}}, 1e-5),
    "autocast": ({"bf16": True, "gradient_checkpointing": True}, 2e-2),
}  # fmt: skip


@pytest.mark.parametrize("run", slow_but(RUNS, "plain", "autocast"))
def test_through_the_trainer(run):
    options, rtol = RUNS[run]
    ours, theirs = train(LigerTrainer, **options), train(SFTTrainer, **options)
    got, want = logged(ours), logged(theirs)
    assert got == pytest.approx(want, rel=rtol) and len(want) == 3
    patched = ours.model.get_base_model()
    assert patched._liger_patched.report.swapped["LoRA experts"] == 2
