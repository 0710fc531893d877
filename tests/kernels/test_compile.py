"""The fused losses under torch.compile: whole graphs, the same values and gradients as without."""

import pytest
import torch
from kernel_checks import LEAVES, fields, random_inputs, random_pair

from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence

SINGLE = random_inputs(9, 6, 21, bias=True, ignored=0.3)
PAIR = random_pair(9, 6, 5, 21, bias=True, ignored=0.3)
UNLABELLED = {k: x for k, x in PAIR.items() if k != "labels"}
WEIGHTS = torch.linspace(0.1, 2.0, 9)
MIXED = {"kind": {"forward_kl": 0.5, "jsd": 0.4}, "temperature": 2.0, "softcap": 5.0, "teacher_scale": 1.2,
         "teacher_softcap": 4.0}  # fmt: skip
SKEWED = {"kind": {"tvd": 0.0, "symmetric_kl": 0.2, "skew_kl": 0.5}, "alpha": 0.3, "teacher_share": 0.6}
EVERY = {"scale": 1.3, "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1, "dft": True, "token_weight": WEIGHTS}
CALLS = [
    (linear_cross_entropy, SINGLE, {"num_items": 7.0, **EVERY}),
    (linear_cross_entropy, SINGLE, {"num_items": torch.tensor(5)}),
    (linear_divergence, UNLABELLED, {**SKEWED, "num_items": torch.tensor(3)}),
    (linear_divergence, PAIR, {"ce_weight": 0.5, "num_items": 7.0, "token_weight": WEIGHTS, **MIXED}),
]


def run(step, tensors, frozen=()):
    """Outputs and gradients by name."""
    inputs = {k: x.clone().requires_grad_(k in LEAVES and k not in frozen) for k, x in tensors.items()}
    result = step(**inputs)
    result["loss"].backward()
    return {k: x.detach() for k, x in result.items()} | {
        f"d_{k}": x.grad for k, x in inputs.items() if x.grad is not None
    }


@pytest.mark.parametrize("frozen", [(), pytest.param(("weight", "bias"), marks=pytest.mark.slow)], ids=["", "frozen"])
@pytest.mark.parametrize("op, tensors, options", CALLS)
def test_whole_graph_equals_eager(op, tensors, options, frozen):
    def step(**inputs):
        result = fields(op(**inputs, **options))
        return result | {"loss": 2 * result["loss"]}

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, expected = run(compiled, tensors, frozen), run(step, tensors, frozen)
    assert got.keys() == expected.keys() and ("d_weight" in got) == (not frozen)
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, msg=lambda m, name=name: f"{name}: {m}")


def test_without_gradients():
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, expected in zip(compiled(**SINGLE), linear_cross_entropy(**SINGLE), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("op, tensors", [(linear_cross_entropy, SINGLE), (linear_divergence, PAIR)])
def test_autocast_decides_when_traced(op, tensors):
    torch.compiler.reset()
    compiled = torch.compile(lambda **k: fields(op(**k)), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = run(compiled, tensors), run(lambda **k: fields(op(**k)), tensors)
    assert got["d_weight"].dtype == torch.float32
    assert torch.equal(got["loss"], expected["loss"])
    assert not torch.equal(got["loss"], run(lambda **k: fields(op(**k)), tensors)["loss"])


@pytest.mark.parametrize("name, value", [("recompute", True), ("overwrite_hidden", True), ("rows", None)])
@pytest.mark.parametrize("op, tensors", [(linear_cross_entropy, SINGLE), (linear_divergence, PAIR)])
def test_what_has_no_place_in_a_graph_is_refused(op, tensors, name, value):
    option = {name: RowSelection(tensors["labels"]) if name == "rows" else value}
    torch.compiler.reset()
    compiled = torch.compile(lambda **k: op(**k, **option).loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{name} has no place under torch.compile"):
        compiled(**tensors)


@pytest.mark.parametrize(
    "op, tensors, name",
    [
        (linear_cross_entropy, SINGLE, "softcap"),
        (linear_divergence, PAIR, "softcap"),
        (linear_divergence, PAIR, "teacher_softcap"),
    ],
)
def test_options_out_of_range_are_refused_in_a_graph_too(op, tensors, name):
    torch.compiler.reset()
    compiled = torch.compile(lambda **k: op(**k, **{name: 0.0}).loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="softcap must be positive or None, got 0.0"):
        compiled(**tensors)
