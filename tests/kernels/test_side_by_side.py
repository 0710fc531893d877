"""dx of queries, keys and values as one product, over weights and gradients that lie side by side."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import Place, assert_same, check, evaluate
from op_table import SMALL, angles
from torch import Tensor

from liger_trainer.extras.selfcheck_cases import Draw, adapted, layer
from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._side_by_side import (
    ask_for_columns,
    columns_asked,
    free_behind,
    joined,
    laid_side_by_side,
)
from liger_trainer.kernels.lora_linears import lora_linears, lora_linears_reference
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_trainer.kernels.rope import rope, rope_reference

WIDTH = 16  # of a head
OUT = {"q": 64, "k": 32, "v": 32}  # columns
LEAVES = ["x", *(f"{name}_{factor}{i}" for name in OUT for factor in "ab" for i in range(2))]


def inputs(place: Place, ranks: dict[str, tuple[int, ...]], bias: bool = False) -> dict[str, Tensor]:
    """x (2, 5, 24) with gaps between rows, three layers with adapters of these ranks, angles, and norms' weights."""
    draw = Draw(SMALL)
    tensors = {"x": draw(2, 5, 30)[..., 3:27]}
    for name, rows in OUT.items():
        tensors |= adapted(draw, name, rows, 24, ranks[name])
        tensors |= {f"{name}_bias": draw(rows)} if bias else {}
    tensors |= angles(WIDTH)({}, draw) | {f"{name}_norm": draw(WIDTH) for name in "qk"}
    moved = {k: x.to(place.device, place.dtype) for k, x in tensors.items()}
    return moved | {"x": torch.cat([moved["x"]] * 2, -1)[..., :24]}


def attention(
    linears: Callable, rotate: Callable, normed: bool = False, rows: int | None = None, drop: float = 0.0,
    heads: int = 4,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """Layers and the rotation behind them. rows: free ones behind the weights; None: these lie apart.

    heads: so many of q's are rotated, and the others not.
    """

    def run(x: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor, k_norm: Tensor, **tensors: Any) -> tuple[Tensor, ...]:
        layers = [layer(tensors, name) for name in OUT]
        layers = [replace(p, adapters=tuple(a._replace(dropout=drop) for a in p.adapters)) for p in layers]
        if rows is not None:
            weights = laid_side_by_side([p.weight for p in layers], rows)
            layers = [replace(p, weight=w) for p, w in zip(layers, weights, strict=True)]
        q, k, v = linears(x, layers)
        q, k = (y.unflatten(-1, (-1, WIDTH)) for y in (q, k))
        if normed:
            return *rotate(q, k, q_norm, k_norm, cos, sin), v
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if heads == q.shape[1]:
            return *rotate(q, k, cos, sin), v
        turned, k = rotate(q[:, :heads], k, cos, sin)
        return torch.cat([turned, q[:, heads:]], 1), k, v

    return run


@pytest.fixture
def products(monkeypatch) -> list[list[int]]:
    """The columns of dy in each product of each dx."""
    seen, compute = [], _low_rank.input_gradient
    monkeypatch.setattr(
        _low_rank, "input_gradient",
        lambda sides, *rest: (seen.append([dy.shape[1] for dy, _ in sides]), compute(sides, *rest))[1],
    )  # fmt: skip
    return seen


ONE_EACH: dict[str, tuple[int, ...]] = {"q": (3,), "k": (1,), "v": (2,)}
TWO_OF_Q: dict[str, tuple[int, ...]] = {"q": (3, 2), "k": (1,), "v": (2,)}
# ranks, free rows, whether there are biases, and the columns of the products
FORMS: dict[str, tuple[dict[str, tuple[int, ...]], int | None, bool, list[int]]] = {
    "A too": (ONE_EACH, 6, False, [134]),
    "two adapters": (TWO_OF_Q, 9, False, [136]),
    "biases": (ONE_EACH, 6, True, [134]),
    "A by itself": (ONE_EACH, 5, False, [128]),
    "apart": (ONE_EACH, None, False, [64, 32, 32]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normed", [False, True], ids=["rope", "qk_norm_rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("term_first", [0, 10**9], ids=["A first", "A last"])
def test_outputs_and_gradients(triton_fp32, products, monkeypatch, form, normed, dtype, term_first):
    """Against fp64, by so many products."""
    monkeypatch.setattr(_low_rank, "TERM_FIRST", term_first)
    ranks, rows, bias, columns = FORMS[form]
    tensors = inputs(triton_fp32._replace(dtype=dtype), ranks, bias)
    ours, plain = (qk_norm_rope, qk_norm_rope_reference) if normed else (rope, rope_reference)
    reference = attention(lora_linears_reference, plain, normed)
    check(attention(lora_linears, ours, normed, rows), reference, tensors, None, leaves=LEAVES)
    assert products == [columns]


def test_heads_that_are_not_rotated_keep_what_lies_behind_the_others(triton_fp32, products):
    """Autograd's sum of what two readers of q give is memory of its own, without free columns."""
    tensors = inputs(triton_fp32, ONE_EACH)
    for heads in (2, 3):
        plain = attention(lora_linears_reference, rope_reference, heads=heads)
        check(attention(lora_linears, rope, rows=6, heads=heads), plain, tensors, None, leaves=LEAVES)
    assert products == [[64, 64], [64, 64]]  # v's is behind k's


def test_dropout_has_the_same_masks(triton_fp32, products):
    """They are in the adapters' part of dx, which is added by itself."""
    tensors, results = inputs(triton_fp32, ONE_EACH), []
    for rows in (6, None):
        torch.manual_seed(0)
        results.append(evaluate(attention(lora_linears, rope, rows=rows, drop=0.5), tensors, None, leaves=LEAVES))
    assert_same(*results, rtol=1e-5, atol=1e-5)
    assert products == [[128], [64, 32, 32]]


def test_a_second_backward_gives_the_same_bits(triton_fp32, products):
    tensors = inputs(triton_fp32, ONE_EACH)
    x = tensors["x"].requires_grad_()
    outputs = attention(lora_linears, rope, rows=6)(**tensors)
    upstream = [torch.randn_like(y) for y in outputs]
    first, second = (torch.autograd.grad(outputs, x, upstream, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second) and products == [[134], [134]]


def test_nothing_is_asked_for_where_x_needs_no_gradient(triton_fp32, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(_low_rank, "ask_for_columns", lambda outputs, columns: asked.append(columns))
    tensors = inputs(triton_fp32, ONE_EACH)
    for leaves in (LEAVES[1:], LEAVES):
        evaluate(attention(lora_linears, rope, rows=6), tensors, None, leaves=leaves)
    assert asked == [32 + 6]


def test_only_outputs_of_one_op_are_asked_for():
    q, k, v, other = (torch.empty(2, 4) for _ in range(4))
    ask_for_columns([q, k, v], 7)
    ask_for_columns([other, v], 7)
    assert columns_asked(q.view(2, 2, 2).transpose(0, 1), k) == 7
    assert columns_asked(q, other) is None and columns_asked(k, torch.empty(2, 4)) is None


def test_what_is_joined_and_what_is_free():
    a, b = laid_side_by_side([torch.ones(2, 3), torch.zeros(4, 3)], 2)
    both = joined(a, b, 0)
    assert both is not None and torch.equal(both, torch.cat([a, b])) and both.data_ptr() == a.data_ptr()
    assert joined(b, a, 0) is None and joined(a, b.clone(), 0) is None and joined(a, b[1:], 0) is None
    assert joined(a[:, :2], a[:, 2:], 1) is not None and joined(a[:, :2], b[:, 2:], 1) is None
    rows = free_behind(b, 2, 0)
    assert rows is not None and joined(b, rows, 0) is not None
    # b's rows are not free, nor is there a third one
    assert free_behind(a, 1, 0) is None and free_behind(b, 3, 0) is None and free_behind(rows[:1], 2, 0) is None
