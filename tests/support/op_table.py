"""Every op of the layers and of given distributions in every form, for tests of what all of them promise.

Ops and inputs are those of `liger_trainer/extras/selfcheck_cases.py`, at sizes that take several small blocks; what is
here are the forms: options, missing weights, packed tensors, further adapters.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kernel_checks import Place
from torch import Tensor

from liger_trainer.extras import selfcheck_cases as shared
from liger_trainer.extras.selfcheck import all_checks
from liger_trainer.extras.selfcheck_cases import Draw, Sizes, adapted
from liger_trainer.kernels.types import Gate

Tensors = dict[str, Any]
SMALL = Sizes(rows=7, hidden=24, inner=21, vocab=37, rank=3, heads=4, keys=2, width=16, positions=5)
ADAPTER = re.compile(r"(^|_)[ab]\d*$")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
_CHECKS = {check.name: check for check in all_checks()}
_CALLED = {
    "gated_mlp": shared.with_list, "linears": shared.with_list, "lora_linear": shared.with_layer,
    "lora_linears": shared.with_layers, "lora_mlp": shared.with_mlp, "lora_experts": shared.with_experts,
    "cross_entropy": lambda op: over_a_copy(op),
}  # fmt: skip


def over_a_copy(op: Callable) -> Callable:
    """cross_entropy, in place over a copy of the logits, which a leaf does not give away."""

    def run(logits: Tensor, labels: Tensor, weight: Tensor | None = None, inplace: bool = False, **options: Any) -> Any:
        how = {"inplace": True} if inplace else {}
        return op(logits * 1 if inplace else logits, labels, weight=weight, **how, **options)

    return run


def op_named(name: str) -> tuple[Callable, Callable]:
    """Return an op and its reference, as functions of tensors by name."""
    module = importlib.import_module(f"liger_trainer.kernels.{name}")
    called = _CALLED.get(name, lambda op: op)
    return called(getattr(module, name)), called(getattr(module, f"{name}_reference"))


@dataclass(frozen=True)
class Case:
    """A form of an op.

    Attributes:
        rows: the tensors that have a row for each token, in any number of dimensions if `leading`.
        change: makes the form's tensors from those of the shared table.
        options: what the op and its reference take besides tensors.
    """

    op: str
    form: str
    rows: tuple[str, ...]
    leaves: tuple[str, ...]
    leading: bool = True
    options: Tensors = field(default_factory=dict)
    change: Callable[[Tensors, Draw], Tensors] = lambda tensors, draw: tensors
    sizes: Sizes = SMALL

    @property
    def name(self) -> str:
        return f"{self.op}, {self.form}" if self.form else self.op

    @property
    def function(self) -> Callable:
        return op_named(self.op)[0]

    @property
    def reference(self) -> Callable:
        return op_named(self.op)[1]

    def inputs(self, place: Place | None = None, **sizes: int) -> Tensors:
        draw = Draw(replace(self.sizes, **sizes))
        tensors = self.change(_CHECKS[self.op].tensors(draw), draw)
        place = place or Place("torch", "cpu", torch.float32)
        return {k: _to(x, place) for k, x in tensors.items()}

    def leaves_of(self, tensors: Tensors) -> list[str]:
        """The tensors with a gradient: those named, and adapters."""
        return [k for k, x in tensors.items() if x is not None and (k in self.leaves or ADAPTER.search(k))]


def _to(x: Any, place: Place) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(place.device, place.dtype) if x.is_floating_point() else x.to(place.device)


def without(*names: str) -> Callable:
    return lambda tensors, draw: tensors | dict.fromkeys(names)


def with_bias(*weights: str) -> Callable:
    """A bias for each weight, called `bias` for `weight` and else `<name>_bias`."""

    def change(tensors: Tensors, draw: Draw) -> Tensors:
        names = {w: w[: -len("weight")] + "bias" if w.endswith("weight") else f"{w}_bias" for w in weights}
        return tensors | {name: draw(*tensors[w].shape[:-1]) for w, name in names.items()}

    return change


def packed(gate: str = "gate", up: str = "up") -> Callable:
    """gate and up in one tensor; the second is gone."""

    def change(tensors: Tensors, draw: Draw) -> Tensors:
        dim = 0 if gate.endswith("weight") or "x" in tensors else -1
        joined = {gate: torch.cat([tensors[gate], tensors[up]], dim)}
        left = {k: x for k, x in (tensors | joined).items() if k != up and not k.startswith("up_")}
        return left if "x" in tensors else left | {up: None}

    return change


def both(*changes: Callable) -> Callable:
    def change(tensors: Tensors, draw: Draw) -> Tensors:
        for each in changes:
            tensors = each(tensors, draw)
        return tensors

    return change


def ranks(**of_layers: Sequence[int]) -> Callable:
    """Other adapters: of each layer named (`weight` for the only one) so many, with these ranks."""

    def change(tensors: Tensors, draw: Draw) -> Tensors:
        for name, each in of_layers.items():
            start = "" if name == "weight" else f"{name}_"
            weight = tensors[f"{start}weight"]
            tensors = {k: x for k, x in tensors.items() if not k.startswith((f"{start}a", f"{start}b")) or "bias" in k}
            if each:
                drawn = adapted(draw, "" if name == "weight" else name, *weight.shape, ranks=tuple(each))
                tensors |= {k: x for k, x in drawn.items() if not k.endswith("weight")}
        return tensors

    return change


def angles(
    rotary: int, *, rows: int = 1, interleaved: bool = False, half_width: bool = False, axes: int = 0
) -> Callable:
    """cos and sin of random positions in the layouts of transformers: (1 or B, S, R), with axes (3, 1 or B, S, R)."""

    def change(tensors: Tensors, draw: Draw) -> Tensors:
        at = draw.integers(200, *([axes] if axes else []), rows, draw.sizes.positions)
        t = at[..., None].double() * 100.0 ** -torch.linspace(0, 1, rotary // 2, dtype=torch.double)
        if not half_width:
            t = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
        return tensors | {"cos": t.cos(), "sin": t.sin()}

    return change


def over_heads(tensors: Tensors, draw: Draw) -> Tensors:
    """OLMo 2's weights, which hold a number for each column of each head."""
    return tensors | {f"{x}_weight": 1 + 0.2 * draw(tensors[x].shape[2] * tensors[x].shape[3]) for x in "qk"}


def documents(*ends: int) -> Callable:
    return lambda tensors, draw: tensors | {"ends": torch.tensor(ends, dtype=torch.int32)}


def of_one_length(tokens: int) -> Callable:
    return lambda tensors, draw: tensors | {"ends": tokens}


def sinks(tensors: Tensors, draw: Draw) -> Tensors:
    """Two lower than every score, and high ones, which take most of the weight."""
    return tensors | {"sinks": 2 * draw(tensors["q"].shape[1])}


def taps(count: int) -> Callable:
    return lambda tensors, draw: tensors | {"weight": draw(tensors["weight"].shape[0], count)}


def two_rows(tensors: Tensors, draw: Draw) -> Tensors:
    """Documents that go on from one row into the next."""
    x = tensors["x"]
    return tensors | {"x": torch.cat([x, draw(*x.shape)]), "ends": torch.tensor([0, 2, 30, 46], dtype=torch.int32)}


def one_expert_a_token(tensors: Tensors, draw: Draw) -> Tensors:
    return tensors | {name: tensors[name][:, :1] for name in ("index", "weights")}


def experts_without(expert: int) -> Callable:
    """One expert for each token, never this one."""

    def change(tensors: Tensors, draw: Draw) -> Tensors:
        tensors = one_expert_a_token(tensors, draw)
        return tensors | {"index": tensors["index"].where(tensors["index"] != expert, expert - 1)}

    return change


def logits(*sides: str) -> Callable:
    return lambda tensors, draw: tensors | {x: draw(*tensors[x].shape, std=2.0) for x in sides}


def some_ignored(tensors: Tensors, draw: Draw) -> Tensors:
    return tensors | {"labels": draw.labels()}


def likeliest(tensors: Tensors, draw: Draw) -> Tensors:
    """Half of the labels are the likeliest tokens."""
    labels = tensors["labels"].clone()
    labels[1::2] = tensors["logits"].argmax(-1)[1::2]
    return tensors | {"labels": labels}


def of_classes(tensors: Tensors, draw: Draw) -> Tensors:
    return likeliest(tensors, draw) | {"weight": draw(tensors["logits"].shape[1]).abs() + 0.1}


def _cases(op: str, by_row: str, leaves: str, forms: dict[str, tuple], leading=True, **sizes: int) -> list[Case]:
    """A case for each form: (change or None, options), with own sizes in the options under "sizes"."""
    found = []
    for form, (change, options) in forms.items():
        own = {**sizes, **options.get("sizes", {})}
        options = {k: x for k, x in options.items() if k != "sizes"}
        how: dict[str, Any] = {"change": change} if change else {}
        case = Case(op, form, tuple(by_row.split()), tuple(leaves.split()), leading, options, **how)
        found.append(replace(case, sizes=replace(SMALL, **own)))
    return found


AT_TEMPERATURE = {"from_logits": True, "temperature": 1.7}
REDUCTIONS = ("none", "mean", "sum", "batchmean")


def _given(op: str, kinds: dict[str, Tensors]) -> list[Case]:
    """The unfused divergences: of distributions, or of logits; in each reduction, the mean with some rows ignored."""
    forms = {}
    for kind, options in kinds.items():
        change = lambda tensors, draw: tensors  # noqa: E731
        if options.get("log_target"):
            change = lambda tensors, draw: tensors | {"target": tensors["target"].log()}  # noqa: E731
        if options.get("from_logits"):
            change = logits("input", "target")
        for reduction in REDUCTIONS:
            ignoring = both(change, *[some_ignored] * (reduction == "mean"))
            name = ", ".join(x for x in (kind, reduction * (reduction != "batchmean")) if x)
            forms[name] = (ignoring, {"reduction": reduction, **options})
    return _cases(op, "input target labels", "input target", forms, rows=5)


RMS = {
    "": (None, {}),
    "offset": (None, {"offset": 1.0, "eps": 0.5}),
    "cast": (None, {"cast_before_weight": True}),
    "all options": (None, {"eps": 0.3, "offset": 0.7, "cast_before_weight": True}),
    "no weight": (without("weight"), {"eps": 0.3}),
    "one column": (None, {"sizes": {"hidden": 1}}),
    "whole tiles": (None, {"sizes": {"rows": 16, "hidden": 32}}),
}
GATED = {
    "": (None, {}), "packed": (packed(), {}), "one column": (None, {"sizes": {"hidden": 1}}),
    "whole blocks": (None, {"sizes": {"hidden": 48}}),
}  # fmt: skip
LINEAR = {
    f"{name}{', packed' * is_packed}": (both(with_bias("weight"), *[packed()] * is_packed), {"activation": name})
    for name in ACTIVATIONS for is_packed in (False, True)
}  # fmt: skip
PACKED_LORA = both(packed("gate_weight", "up_weight"), ranks(gate=(4,)))
CE = {"scale": 1.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02}
SMOOTH = {"label_smoothing": 0.2}
QWEN, OLMO = {"cast_before_weight": True}, {"norm_over_heads": True}
OPS = [
    *_cases("rms_norm", "x", "x weight", RMS),
    *_cases("add_rms_norm", "x residual", "x residual weight", RMS),
    *_cases("layer_norm", "x", "x weight bias", {
        "": (None, {}), "eps": (None, {"eps": 0.5}), "no weight": (without("weight"), {}),
        "no bias": (without("bias"), {}), "neither": (without("weight", "bias"), {}),
        "one column": (None, {"sizes": {"hidden": 1}}), "whole tiles": (None, {"sizes": {"rows": 16, "hidden": 32}}),
    }),
    *_cases("gated_rms_norm", "x gate", "x gate weight", {
        "": (None, {}), "sigmoid, 3 groups": (None, {"activation": "sigmoid", "groups": 3}),
        "gate first": (None, {"gate_first": True, "groups": 3}),
        "gate first, sigmoid": (None, {"gate_first": True, "activation": "sigmoid"}),
        "groups of a column": (None, {"groups": 24}), "whole tiles": (None, {"sizes": {"rows": 16, "hidden": 32}}),
    }),
    *_cases("rope", "q k", "q k", {
        "": (None, {}), "one pair": (angles(2), {"sizes": {"width": 2, "heads": 1, "keys": 1, "positions": 1}}),
        "no power of two": (None, {"sizes": {"heads": 3, "keys": 1, "width": 10}}),
        "more heads than a tile": (None, {"sizes": {"heads": 14, "width": 40}}),
        "no token": (None, {"sizes": {"positions": 0}}),
        "a part, of each row": (angles(8, rows=2), {}),
        "Phi": (angles(24), {"sizes": {"heads": 3, "keys": 1, "width": 80}}),
        "interleaved": (angles(6, rows=2, interleaved=True), {"interleaved": True}),
        "interleaved Phi": (angles(24, interleaved=True), {"interleaved": True, "sizes": {"keys": 1, "width": 80}}),
        "half width": (angles(8, half_width=True), {"half_width": True}),
        "half width, interleaved": (angles(16, rows=2, half_width=True), {"half_width": True, "interleaved": True}),
        "three axes": (angles(16, axes=3), {"mrope_section": (3, 2, 3)}),
        "one of three axes": (angles(16, rows=2, axes=3), {"mrope_section": (0, 8, 0)}),
        "interleaved axes": (angles(16, axes=3, interleaved=True), {"mrope_section": (2, 3, 3), "interleaved": True}),
        "half width of axes": (angles(8, axes=3, half_width=True), {"mrope_section": [2, 1, 1], "half_width": True}),
    }, leading=False),
    *_cases("qk_norm_rope", "q k", "q k q_weight k_weight", {
        "": (None, {}), "Qwen3": (None, QWEN), "Gemma3": (None, {"offset": 1.0}), "OLMo2": (over_heads, OLMO),
        "cast after offset": (None, {"offset": 1.0, **QWEN}), "eps": (None, {"eps": 0.5}),
        "one pair": (None, {"sizes": {"width": 2, "heads": 1, "keys": 1, "positions": 1}, **QWEN}),
        "no power of two": (None, {"sizes": {"heads": 3, "keys": 1, "width": 10}, **QWEN}),
        "OLMo2, no power of two": (over_heads, {"sizes": {"heads": 3, "keys": 1, "width": 10}, **OLMO}),
        "more heads than a tile": (None, {"sizes": {"heads": 6, "keys": 4, "width": 40}}),
        "a part": (angles(8), QWEN), "interleaved": (angles(6, rows=2, interleaved=True), {"interleaved": True}),
        "half width": (angles(4, half_width=True), {"half_width": True, "offset": 1.0}),
        "three axes": (angles(16, axes=3), {"mrope_section": (3, 2, 3), **QWEN}),
        "OLMo2, axes": (both(over_heads, angles(16, axes=3)), {"mrope_section": (3, 2, 3), **OLMO}),
    }, leading=False),
    *_cases("document_attention", "q k v", "q k v sinks", {
        "": (documents(0, 1, 30, 30, 61, 70), {}), "no token": (documents(0, 0), {"sizes": {"rows": 0}}),
        "no power of two": (documents(0, 1, 30, 70), {"sizes": {"heads": 3, "keys": 1, "width": 24}}),
        "one document": (documents(0, 70), {"sizes": {"heads": 2}}), "many": (documents(*range(0, 70, 7), 70), {}),
        "at the edges of blocks": (documents(0, 32, 64, 70), {}), "empty ones behind": (documents(0, 70, 70, 70), {}),
        **{f"window {n}": (documents(0, 50, 70), {"window": n}) for n in (2, 5, 16, 33, 200)},
        "scale": (documents(0, 50, 70), {"scale": 2.0}),
        "sinks": (both(documents(0, 1, 30, 30, 61, 70), sinks), {}), "softcap": (None, {"softcap": 2.0}),
        "sinks, no token": (both(documents(0, 0), sinks), {"sizes": {"rows": 0}}),
        "Gemma 2": (documents(0, 50, 70), {"softcap": 3.0, "window": 20, "scale": 0.4}),
        "gpt-oss": (both(of_one_length(35), sinks), {"window": 9, "sizes": {"heads": 8, "keys": 1}}),
        "one length": (of_one_length(70), {}), "one length of 7": (of_one_length(7), {"window": 5}),
        "one length of 1": (both(of_one_length(1), sinks), {"softcap": 2.0}),
        "one length, past a block": (of_one_length(49), {"sizes": {"rows": 49}}),
        "few key heads": (documents(0, 1, 30, 70), {"sizes": {"heads": 6, "keys": 1}}),
        "wide": (documents(0, 50, 70), {"sizes": {"heads": 2, "keys": 1, "width": 260}}),
        "wide, all": (both(of_one_length(35), sinks),
                      {"softcap": 2.0, "window": 20, "sizes": {"heads": 4, "keys": 1, "width": 320}}),
    }, leading=False, rows=70, heads=2, keys=1),
    *_cases("causal_conv", "x", "x weight bias", {
        "": (None, {}), "silu": (None, {"silu": True}), "bias": (with_bias("weight"), {}),
        "silu, bias": (with_bias("weight"), {"silu": True}), "whole rows": (without("ends"), {"silu": True}),
        "two rows": (both(two_rows, with_bias("weight")), {"silu": True}), "one tap": (taps(1), {"silu": True}),
        "two taps": (taps(2), {}), "seven taps": (taps(7), {"silu": True}),
        "empty ones behind": (documents(0, 23, 23, 23), {}), "many": (documents(*range(24)), {"silu": True}),
        "one column": (None, {"silu": True, "sizes": {"hidden": 1}}), "no token": (None, {"sizes": {"rows": 0}}),
    }, leading=False, rows=23),
    *_cases("swiglu", "gate up", "gate up", GATED),
    *_cases("geglu", "gate up", "gate up", GATED | {
        "erf": (None, {"approximate": "none"}), "erf, packed": (packed(), {"approximate": "none"}),
    }),
    *_cases("relu2", "x", "x", {form: how for form, how in GATED.items() if form != "packed"}),
    *_cases("clamped_swiglu", "gate up", "gate up", {
        "": (None, {"limit": 1.5}), "gpt-oss": (None, {"limit": 1.5, "alpha": 1.702, "shift": 1.0}),
        "packed": (packed(), {"limit": 1.5}),
        "interleaved": (packed(), {"limit": 1.5, "alpha": 1.702, "shift": 1.0, "interleaved": True}),
    }),
    *_cases("gated_linear", "gate up", "gate up weight bias", {"": (None, {})} | LINEAR),
    *_cases("gated_mlp", "x", "x gate up down gate_bias up_bias down_bias", {
        "": (None, {}), "bias": (with_bias("gate", "up", "down"), {}), "packed": (packed(), {}),
        "gelu": (both(packed(), with_bias("gate", "down")), {"activation": "gelu"}),
    }),
    *_cases("activation_linear", "x", "x weight bias", {
        "": (None, {}), **{x: (with_bias("weight"), {"activation": x}) for x in ACTIVATIONS},
    }),
    *_cases("linears", "x", "x q k q_bias", {"": (None, {}), "a bias": (with_bias("q"), {})}),
    *_cases("lora_linear", "x", "x", {
        "": (None, {}), "bias": (with_bias("weight"), {}), "rank 1": (ranks(weight=(1,)), {}),
        "two adapters": (ranks(weight=(3, 5)), {}), "three": (both(ranks(weight=(2, 2, 1)), with_bias("weight")), {}),
        "none": (ranks(weight=()), {}),
    }),
    *_cases("lora_linears", "x", "x", {
        "": (None, {}), "bias": (with_bias("q_weight", "v_weight"), {}),
        "several ranks": (ranks(q=(2,), k=(5,), v=(1, 3)), {}), "one without": (ranks(k=()), {}),
        "none": (ranks(q=(), k=(), v=()), {}),
    }),
    *_cases("lora_mlp", "x", "x", {
        "": (None, {}), **{x: (with_bias("gate_weight", "down_weight"), {"activation": x}) for x in ACTIVATIONS},
        "packed": (PACKED_LORA, {}), "gelu, packed": (PACKED_LORA, {"activation": "gelu"}),
        "gate only": (ranks(up=(), down=()), {}), "down only": (ranks(gate=(), up=(), down=(4,)), {}),
        "several": (ranks(gate=(2, 3), up=(1,)), {}), "none": (ranks(gate=(), up=(), down=()), {}),
        "remade": (None, {"remake": True}), "remade, packed": (PACKED_LORA, {"remake": True}),
    }),
    *_cases("lora_experts", "x weights index", "x weights", {
        "": (None, {"gate": Gate()}), "bias": (with_bias("up_weight", "down_weight"), {"gate": Gate()}),
        "tanh": (None, {"gate": Gate("gelu_tanh", "up first")}), "gelu": (None, {"gate": Gate("gelu")}),
        "limited": (None, {"gate": Gate(limit=0.7)}),
        "gpt-oss": (with_bias("up_weight", "down_weight"),
                    {"gate": Gate(layout="interleaved", limit=0.7, alpha=1.702, shift=1.0)}),
        "one expert": (one_expert_a_token, {"gate": Gate(), "sizes": {"experts": 1}}),
        "an expert without tokens": (experts_without(2), {"gate": Gate(), "sizes": {"rows": 20}}),
        "more rows than a tile": (one_expert_a_token, {"gate": Gate(), "sizes": {"rows": 40, "experts": 2}}),
        "odd sizes": (None, {"gate": Gate(), "sizes": {"rows": 13, "hidden": 7, "inner": 9, "rank": 1}}),
        "up only": (without("down_a", "down_b"), {"gate": Gate()}),
        "down only": (without("up_a", "up_b"), {"gate": Gate()}),
        "no adapters": (without("up_a", "up_b", "down_a", "down_b"), {"gate": Gate()}),
    }, leading=False, rows=12, hidden=8, inner=16),
    *_cases("cross_entropy", "logits labels", "logits", {
        "": (likeliest, {}), **{name: (likeliest, {name: value}) for name, value in CE.items()},
        "all, weighted": (of_classes, CE), "weighted": (of_classes, {}), "smoothing, weighted": (of_classes, SMOOTH),
        "sum": (of_classes, {"reduction": "sum", **CE}), "none": (likeliest, {"reduction": "none"}),
        "none, weighted": (of_classes, {"reduction": "none", **CE}), "inplace": (of_classes, {"inplace": True, **CE}),
        "inplace, none": (of_classes, {"inplace": True, "reduction": "none", **CE}),
        "inplace, sum": (likeliest, {"inplace": True, "reduction": "sum"}),
        "two columns": (likeliest, {"sizes": {"rows": 2, "vocab": 2}}), "one block": (None, {"sizes": {"vocab": 16}}),
        "many blocks": (likeliest, {"sizes": {"vocab": 101}}), "no token": (None, {"sizes": {"rows": 0}}),
        "inplace, no token": (None, {"inplace": True, "sizes": {"rows": 0}}),
    }, leading=False, rows=9),
    *_given("kl_div", {"": {}, "log_target": {"log_target": True}, "logits": AT_TEMPERATURE}),
    *_given("jsd", {
        "": {"beta": 0.3}, "forward": {"beta": 0.0}, "reverse": {"beta": 1.0},
        "logits": {"beta": 0.3, **AT_TEMPERATURE}, "reverse, logits": {"beta": 1.0, "from_logits": True},
    }),
    *_given("tvd", {"": {}, "logits": AT_TEMPERATURE}),
]  # fmt: skip
CASES = {case.name: case for case in OPS}
