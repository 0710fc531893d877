"""patch_lora: which layers run on our ops, when PEFT's forward runs instead, and what the report says."""

import copy
import gc
import importlib.util
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from quick_cases import by_turns
from recorders import calls_of
from steps import adapted, assert_same_outcome, assert_same_step, step
from tiny import FAMILIES, assert_same_gradients, masked_batch, named_gradients, tiny_model
from torch import nn

from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._dropout import LEVELS, kept
from liger_trainer.patching.layers import lora as patch_lora
from liger_trainer.patching.patcher import patch

LORA_ONLY = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}


@pytest.fixture
def calls(monkeypatch) -> dict[str, list[tuple]]:
    """The calls of our ops and of PEFT's forward, by name."""
    patch_lora._disproof()  # which calls the forward itself
    ours = {name: calls_of(monkeypatch, patch_lora, name) for name in OURS}
    return ours | {"peft": calls_of(monkeypatch, LoraLinear, "forward")}


def counts(calls: dict[str, list[tuple]]) -> dict[str, int]:
    return {name: len(each) for name, each in calls.items() if each}


def sizes(calls: dict[str, list[tuple]]) -> list[int]:
    """Of how many layers each op is that takes several."""
    return [len(layers) for _, layers in calls["lora_linears"]]


OURS = {"lora_linears": 2, "lora_linear": 2, "lora_mlp": 2}


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "patched before, and undone", "off"])
def test_every_layer_on_our_ops(case, calls):
    """Per layer, queries, keys and values, the attention's output, and the MLP."""
    family = case if case in FAMILIES else "llama"
    plain, model = adapted(tiny_model(family)), tiny_model(family)
    if case == "patched before, and undone":
        patch(model).undo()
    model = adapted(model)
    report = patch(model, {**LORA_ONLY, "lora": case != "off"}).report
    step(model)
    if case == "off":
        assert counts(calls) == {"peft": 14} and not any("LoRA" in kind for kind in report.swapped)
        return
    assert report.swapped["LoRA linear"] == 14 and report.swapped["LoRA MLP"] == 2 and not report.left_alone
    assert counts(calls) == OURS and sizes(calls) == [3, 3]
    assert_same_step(model, plain)


def test_adapters_added_later_reach_the_mlp(calls):
    """PEFT's new layers have PEFT's forward, and the report of `patch`, made before, says nothing of them."""
    plain, model = adapted(tiny_model()), tiny_model()
    patched = patch(model)
    model = adapted(model)
    assert not any("LoRA" in kind for kind in patched.report.swapped)
    assert_same_step(model, plain)
    assert counts(calls) == {"lora_mlp": 2, "peft": 8 + 14}  # 14 of the plain model


def another_forward(layer):
    layer.base_layer.forward = lambda x: nn.functional.linear(x, layer.base_layer.weight)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "merged": lambda layer: layer.merge(),
    "trained base": lambda layer: layer.base_layer.weight.requires_grad_(),
    "hook": lambda layer: layer.lora_A.default.register_forward_hook(lambda *_: None),
    "hook of the base": lambda layer: layer.base_layer.register_forward_pre_hook(lambda *_: None),
    "backward hook of the base": lambda layer: layer.base_layer.register_full_backward_hook(lambda *_: None),
    "hook of the dropout": lambda layer: layer.lora_dropout["default"].register_forward_hook(lambda *a: a[-1] * 2),
    "another forward": another_forward,
    "no cast": lambda layer: setattr(layer, "cast_input_dtype_enabled", False),
    "dropout of features": lambda layer: layer.lora_dropout.update({"default": nn.FeatureAlphaDropout(0.5)}),
}


@pytest.mark.parametrize(("change", "name"), by_turns(CHANGES, ["self_attn.q_proj", "mlp.up_proj"]))
def test_what_runs_pefts_forward(change, name, calls):
    """One layer in a state that the ops do not know, changed after patching: the others stay on them."""
    plain, model = adapted(tiny_model()), adapted(tiny_model())
    patch(model, LORA_ONLY)
    for each in (plain, model):
        CHANGES[change](each.get_submodule(f"base_model.model.model.layers.1.{name}"))
    torch.manual_seed(5)
    got, in_mlp = step(model), "mlp" in name
    assert counts(calls) == {"lora_linears": 1 + in_mlp, "lora_linear": 4, "lora_mlp": 2 - in_mlp, "peft": 1}
    torch.manual_seed(5)
    assert_same_outcome(got, step(plain))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gate_proj", "forward_hook"), ("down_proj", "full_backward_hook"), ("act_fn", "forward_pre_hook"),
     ("down_proj", "full_backward_pre_hook"), ("act_fn", "full_backward_hook")],
)  # fmt: skip
def test_hooks_on_an_mlps_children_run(name, kind):
    """A layer with a hook is called, so that the hook sees what it would."""
    model, seen = adapted(tiny_model()), []
    patch(model, LORA_ONLY)
    layer = model.base_model.model.model.layers[0].mlp.get_submodule(name)
    getattr(layer, f"register_{kind}")(lambda *_: seen.append(name))
    step(model)
    assert len(seen) == 1


# the adapters, the layer that is left to PEFT, and why
REASONS: dict[str, tuple[dict, str, str]] = {
    "dora": ({"use_dora": True}, "q_proj", "DoraLinearVariant, not plain LoRA"),
    "everything dropped": ({"lora_dropout": 1.0}, "q_proj", "lora_dropout is 1.0, with which nothing is left"),
    "lora_bias": ({"lora_bias": True}, "q_proj", r"an adapter has a bias \(lora_bias\)"),
    "dropout in place": ({"lora_dropout": 0.1}, "q_proj", r"drops out by Dropout\(p=0.1, inplace=True\)"),
    "another PEFT": ({}, "q_proj", "values differ"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "embed_tokens", "lora.Embedding is another kind of layer"),
}


@pytest.fixture
def seeds(monkeypatch) -> list[torch.Tensor]:
    """The seeds that ops draw, in order."""
    drawn, draw = [], _low_rank.draw_seed
    monkeypatch.setattr(_low_rank, "draw_seed", lambda x: drawn.append(draw(x)) or drawn[-1])
    return drawn


class Masked(nn.Dropout):
    """PEFT's dropout with the mask that one of our ops made."""

    def __init__(self, p: float, seed: torch.Tensor, stream: int):
        super().__init__(p)
        self.seed, self.stream = seed, stream

    def forward(self, input):
        threshold = round(self.p * LEVELS)
        rows = input.flatten(0, -2)
        mask = kept(self.seed, self.stream, (rows.shape[0], rows.shape[1]), threshold).view(input.shape)
        return input.where(mask, 0) / (1 - threshold / LEVELS)


# The layers that read their dropout from one seed, in the order of their masks.
OPS = (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
       ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])  # fmt: skip


def test_dropout_is_peft_s_with_other_masks(kernels, seeds, calls):
    """The loss and gradients of PEFT's own forward with our masks; in eval mode there are none."""
    plain, model = (adapted(tiny_model(), lora_dropout=0.3) for _ in range(2))
    assert not patch(model, LORA_ONLY).report.left_alone
    got = step(model)
    assert counts(calls) == OURS and len(seeds) == 2 * len(OPS)
    assert len({int(seed) for seed in seeds}) == len(seeds)
    places: Any = itertools.product(plain.base_model.model.model.layers, OPS)
    for seed, (layer, names) in zip(seeds, places, strict=True):
        for stream, name in enumerate(names):
            layer.get_submodule(name).lora_dropout["default"] = Masked(0.3, seed, stream).train()
    assert_same_outcome(got, step(plain))
    for each in (plain, model):
        for module in each.modules():
            if isinstance(module, LoraLinear):
                module.lora_dropout["default"] = nn.Dropout(0.3)
        each.eval()
    assert_same_step(model, plain)


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
def test_checkpointing_makes_the_same_masks(kernels, reentrant):
    """Layers that run a second time in the backward: gradients as without, with torch's seed alone."""
    outcomes = []
    for checkpoints in (False, True):
        model = adapted(tiny_model(), lora_dropout=0.3)
        model.enable_input_require_grads()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        patch(model, LORA_ONLY)
        torch.manual_seed(7)
        outcomes.append(step(model))
    assert_same_outcome(*outcomes)


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_report_says_why(case, training, monkeypatch):
    """Also of a model in eval mode, which is trained later."""
    options, name, reason = REASONS[case]
    model = adapted(tiny_model("phi"), **{"target_modules": ["q_proj"], **options}).train(training)
    if case == "dropout in place":
        for layer in model.base_model.model.model.layers:
            layer.self_attn.q_proj.lora_dropout["default"].inplace = True
    elif case == "another PEFT":
        forward = LoraLinear.forward
        monkeypatch.setattr(LoraLinear, "forward", lambda self, x: forward(self, x) * 1.001)
        monkeypatch.setattr(patch_lora, "_disproof", patch_lora._disproof.__wrapped__)
    report = patch(model).report
    assert "LoRA linear" not in report.swapped and list(report.left_alone) == [f"LoRA on {name}"]
    assert re.search(f"PEFT's forward runs: .*{reason}", report.left_alone[f"LoRA on {name}"])


def test_the_output_head_is_left_to_the_loss():
    model = adapted(tiny_model(), target_modules=["lm_head", "q_proj"])
    assert patch(model).report.swapped["LoRA linear"] == 2
    assert "forward" not in vars(model.get_output_embeddings())


# Layers of one input


def attention_of(model, layer=0):
    return model.base_model.model.model.layers[layer].self_attn


@pytest.mark.parametrize(
    ("targets", "other_input", "want"),
    [
        (["q_proj", "v_proj"], None, [2, 2]),
        (["q_proj", "o_proj"], None, []),
        *(("all-linear", name, [3]) for name in ("q_proj", "k_proj", "v_proj")),  # the other layer of the model
    ],
    ids=str,
)
def test_layers_of_one_input_are_one_op(calls, targets, other_input, want):
    plain, model = (adapted(tiny_model(), target_modules=targets) for _ in range(2))
    patch(model, LORA_ONLY)
    if other_input:
        for each in (plain, model):
            getattr(attention_of(each), other_input).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    assert_same_step(model, plain)
    assert sizes(calls) == want


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_waits_for_another_layer_is_of_the_same_tensor(mode):
    """Not of one that was changed in between, nor of another, and what nobody takes is dropped in the next pass."""
    model = adapted(tiny_model())
    patch(model, LORA_ONLY)
    attention = attention_of(model)

    def assert_own(name, x):
        layer = getattr(attention, name)
        torch.testing.assert_close(layer(x), type(layer).forward(layer, x))

    with mode():
        x, y = torch.randn(2, 2, 5, 32)
        attention.q_proj(x)
        if mode is torch.no_grad:  # where a tensor tells that it was written into
            x.mul_(2)
        assert_own("k_proj", x)
        attention.q_proj(x)
        attention.q_proj(y)
        assert_own("v_proj", x)
        assert_own("k_proj", y)
        attention(x, (torch.ones(1, 5, 8), torch.ones(1, 5, 8)), None)
    held = [weakref.ref(each) for each in (x, y)]
    del x, y
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize(("adapters", "autocast"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_half_precision_within_twice_pefts_error(adapters, autocast):
    """A bf16 base with PEFT's default adapters (fp32) and with bf16 ones: gradients against the model in fp64."""
    base = tiny_model(dtype=torch.bfloat16)
    plain = adapted(base, autocast_adapter_dtype=adapters == torch.float32)
    truth = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    patch(model, LORA_ONLY)
    results = []
    for each in (truth, plain, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and each is not truth):
            loss = each(**masked_batch()).loss
        results.append(named_gradients(each, loss))
    want, theirs, ours = results
    assert {g.dtype for g in ours.values()} == {adapters}
    error = [sum((g[name].double() - want[name]).norm() ** 2 for name in want) for g in (ours, theirs)]
    assert error[0] <= 4 * error[1]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("kind", "checkpointed"), by_turns(["nf4", "nested nf4", "fp4"], [False, True]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qlora(dtype, kind, checkpointed, calls, request, monkeypatch):
    """A 4-bit base: the same loss and gradients, and nf4 weights are unpacked into one memory by our kernel."""
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    has_kernels, places, unpack_into = device == "cuda" or dtype == torch.float32, [], patch_lora.unpack_into
    if has_kernels and device == "cpu":
        request.getfixturevalue("kernels")
    monkeypatch.setattr(
        patch_lora, "unpack_into", lambda *args: (places.append(args[2].data_ptr()), unpack_into(*args))[1]
    )

    def quantised() -> Any:
        model = tiny_model(dtype=dtype, hidden_size=64, intermediate_size=64)
        for name, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                layer = Linear4bit(
                    module.in_features, module.out_features, bias=False, compute_dtype=dtype,
                    compress_statistics=kind.startswith("nested"), quant_type=kind.split()[-1],
                )  # fmt: skip
                layer.load_state_dict(module.state_dict())
                parent, _, child = name.rpartition(".")
                setattr(model.model.get_submodule(parent), child, layer)
        model.is_loaded_in_4bit = True  # pyright: ignore[reportArgumentType]
        return adapted(model.to(device))  # pyright: ignore[reportArgumentType]

    plain, model = quantised(), quantised()
    report = patch(model, LORA_ONLY).report
    assert report.swapped["LoRA linear"] == 14 and report.swapped["LoRA MLP"] == 2, str(report)
    for each in (plain, model):
        if checkpointed:
            each.gradient_checkpointing_enable({"use_reentrant": False})
            each.train()
    batch = {name: x.to(device) for name, x in masked_batch().items()}
    losses = [each(**batch).loss for each in (plain, model)]
    want, got = (named_gradients(each, loss) for each, loss in zip((plain, model), losses, strict=True))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # between two orders of rounding
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)
    assert_same_gradients(got, want, tolerance)
    assert counts(calls) == {op: count * (1 + checkpointed) for op, count in OURS.items()}
    assert len(set(places)) == (has_kernels and kind != "fp4")
