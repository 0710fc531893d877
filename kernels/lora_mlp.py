"""A gated MLP of frozen linear layers with LoRA adapters:  y = down(act(gate(x)) * up(x)).

Shapes    x: (..., K)  gate, up: (I, K), or packed [gate | up] (2I, K)  down: (H, I)  y: (..., H)
Method    Each of gate, up and down is the layer of lora_linear.py. The forward saves x, gate(x), up(x) and two matrices
          of the adapters' rank, but not h = act(gate) * up. Where each layer has one adapter, the activation's kernels
          add the adapters' terms to gate(x), up(x) and dh, and sum up the gradients of three factors: _lora_gated.py.
          Other adapters have products of their own, and the kernel that turns dh into the gradients of gate(x) and
          up(x) writes h over dh, for down's A. Those gradients overwrite gate(x) and up(x) unless the graph is kept;
          nobody else sees them. The products add the parts of dx from gate and up in place. With remake=True gate(x)
          and up(x) are not saved either: the backward makes them again from x, with the same dropout masks, in two
          products more.
Numerics  as lora_linear and gated_linear: h in the product's dtype, from fp32, rounded once
Traffic   besides the products: forward 2 reads and 1 write of N I elements, backward 3 reads and 2 writes (3 with h)
Source    Hu et al. 2021, arXiv:2106.09685; Shazeer 2020, arXiv:2002.05202; Chen et al. 2016, arXiv:1604.06174
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, graph_is_kept, saved_or_recomputed
from ._dropout import threshold_of
from ._gated import ACTIVATIONS, backward, forward, gated_reference, halves, runs_plain
from ._lora_gated import MOST_RANK, Terms
from ._lora_gated import backward as backward_with_terms
from ._lora_gated import forward as forward_with_terms
from ._low_rank import (
    Masks,
    Numerics,
    Projection,
    Stack,
    a_gradients,
    adapters_of,
    as_matrix,
    check_projection,
    input_and_a_gradients,
    input_gradient,
    input_of_a,
    layout_of,
    leaves_of,
    project,
    rank_gradients,
    restored,
    stacked,
    tensors_of,
    values_of,
    with_biases,
)
from .lora_linear import interleaved, lora_linear_reference


def lora_mlp_reference(
    x: Tensor, gate: Projection, up: Projection | None, down: Projection, *, activation: str = "silu"
) -> Tensor:
    """Return in plain torch what the op must equal."""
    hidden = [_linear(x, p) if p is not None else None for p in (gate, up)]
    assert hidden[0] is not None
    return _linear(gated_reference(hidden[0], hidden[1], activation), down)


def _linear(x: Tensor, p: Projection) -> Tensor:
    return lora_linear_reference(x, p.weight, p.bias, p.adapters, unpack=p.unpack)


class LoraMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, down, activation, remake, *leaves):
        """Run the forward. first: (gate, up), or packed (gate_up,). leaves: A and B of each adapter, down's last."""
        numerics = Numerics.of(x, adapters_of((*first, down)))
        flat, masks = as_matrix(x, numerics.compute), Masks.of(x, (*first, down))
        ctx.layout, given = layout_of((*first, down)), tensors_of((*first, down))
        first, down = stacked([first, [down]], numerics)
        hidden, values, terms = _through_first(flat, first, down, masks, numerics)
        if terms is None:
            h = forward(*_halves(hidden), activation, numerics.compute)
            h_values = values_of(h, down, masks.after(first), numerics)
        else:
            h, h_values = forward_with_terms(*_halves(hidden), terms, down.adapters[0].factor, activation)
        (y,) = project(h, down, h_values, numerics)
        ctx.numerics, ctx.activation = numerics, activation
        source, ctx.remake = saved_or_recomputed(x, flat), remake
        # remake: biases are enough to compute gate(x) and up(x) again, from what x is saved as.
        kept = [p.bias for p in first.projections] if remake else [*hidden, values]
        ctx.source, ctx.sources, ctx.kept = source.without_tensors(), len(source.tensors), len(kept)
        ctx.save_for_backward(*source.tensors, *kept, h_values, masks.seed, *given)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @first_order
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        sources, saved = saved[: ctx.sources], saved[ctx.sources :]
        kept, (h_values, seed, *tensors) = saved[: ctx.kept], saved[ctx.kept :]
        need_x, _, _, _, _, *needs = ctx.needs_input_grad
        numerics, masks = ctx.numerics, Masks(seed)
        *first, down = restored(ctx.layout, tensors)
        first, down = stacked([first, [down]], numerics)
        count = 2 * len(first.adapters)
        needs, down_needs = needs[:count], needs[count:]
        if ctx.remake:  # as the forward had them; x's memory is free afterwards
            x = as_matrix(ctx.source.make(*sources), numerics.compute)
            hidden, values, terms = _through_first(x, with_biases(first, kept), down, masks, numerics)
            del x
        else:
            *hidden, values = kept
            terms = _terms_of(first, down, values, masks, numerics)
        dy_rows, h_masks = as_matrix(dy, numerics.compute), masks.after(first)
        dys, first_dbs, down_gradient = _through_down(ctx, dy_rows, hidden, h_values, terms, down, h_masks, down_needs)
        needs_b = needs[1::2] if terms is None else [False] * len(first.adapters)
        g, dbs = rank_gradients(dys, values, first, needs_b, need_x or any(needs[::2]), numerics)
        flat = input_of_a(ctx.source, sources, numerics, seed) if any(needs[::2]) else None
        dx, das = input_and_a_gradients(dys, g, flat, first, masks, numerics, need_x)
        dx = None if dx is None else dx.view(*dy.shape[:-1], dx.shape[-1])
        return dx, None, None, None, None, *interleaved(das, first_dbs or dbs, needs), *down_gradient


def _through_first(
    x: Tensor, first: Stack, down: Stack, masks: Masks, numerics: Numerics
) -> tuple[list[Tensor], Tensor | None, Terms | None]:
    """Return (gate(x) and up(x), or both packed; s x A^T; the adapters' terms, if gate(x) and up(x) are without)."""
    values = values_of(x, first, masks, numerics)
    terms = _terms_of(first, down, values, masks, numerics)
    return project(x, first, values if terms is None else None, numerics), values, terms


def _terms_of(first: Stack, down: Stack, values: Tensor | None, masks: Masks, numerics: Numerics) -> Terms | None:
    """Return the adapters as the activation's kernels take them: one of each layer, in the products' 16-bit dtype.

    None: other adapters' terms are products of their own.
    """
    if values is None or any(len(p.adapters) != 1 for p in (*first.projections, *down.projections)):
        return None
    # fp32 would not fit into registers
    if numerics.rank != numerics.compute or numerics.compute.itemsize != 2 or max(first.ranks + down.ranks) > MOST_RANK:
        return None
    bs, threshold = [adapter.b for adapter in first.adapters], threshold_of(down.adapters[0].dropout)
    gate_b, up_b = bs if len(bs) == 2 else bs[0].chunk(2)
    up_start = first.ranks[0] if len(bs) == 2 else 0  # packed gate and up have the same values
    seed = masks.seed if threshold else None
    return Terms(values[:, 0], gate_b, up_b, up_start, down.adapters[0].a, seed, masks.after(first).stream, threshold)


def _through_down(
    ctx, dy: Tensor, hidden: Sequence[Tensor], values: Tensor | None, terms: Terms | None, down: Stack, masks: Masks,
    needs: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:  # fmt: skip
    """Return (gradients of gate(x) and up(x), or one packed; dB of their adapters; gradients of down's adapters).

    values: down's. Without terms there are no dB.
    """
    numerics = ctx.numerics
    g, dbs = rank_gradients([dy], values, down, needs[1::2], True, numerics)
    dh = input_gradient([dy], down, numerics)  # (N, I)
    # Another backward would read gate(x) and up(x) again, unless it makes them again itself.
    gradients = [torch.empty_like(y) for y in hidden] if graph_is_kept() and not ctx.remake else list(hidden)
    if terms is not None and g is not None:
        sums = backward_with_terms(dh, *_halves(hidden), g[:, 0], *_halves(gradients), terms, ctx.activation)
        shapes = [(y.shape[1], rank) for y, rank in zip(hidden, terms.ranks, strict=False)]
        *first_dbs, da = sums.split([*map(math.prod, shapes), terms.a.numel()])
        first_dbs = [db.view(shape) for db, shape in zip(first_dbs, shapes, strict=True)]
        return gradients, first_dbs, interleaved([da.view_as(terms.a)], dbs, needs)
    # Twice: here the adapters' part is added to dh; below, A's gradient reads the h that `backward` writes over dh.
    a_gradients(g, None, dh, down, masks, numerics)
    need_h = any(needs[::2])  # h is read for the A of down's adapters only
    backward(dh, *_halves(hidden), *_halves(gradients), ctx.activation, dh if need_h else None)
    das = a_gradients(g, dh if need_h else None, None, down, masks, numerics)
    return gradients, [], interleaved(das, dbs, needs)


def _halves(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return gate and up of [gate, up], or of packed [gate_up]."""
    return halves(hidden[0], hidden[1] if len(hidden) == 2 else None)


def lora_mlp(
    x: Tensor, gate: Projection, up: Projection | None, down: Projection, *, activation: str = "silu",
    remake: bool = False,
) -> Tensor:  # fmt: skip
    """Compute down(act(gate(x)) * up(x)), where each is a frozen linear layer, with or without LoRA adapters.

    Differentiable once. It equals three lora_linear with the activation between them; on a CPU, and while torch.compile
    traces, it is computed in that plain form, with the masks that torch's dropout draws.

    Args:
        x: (..., K).
        gate, up: (I, K) each; with up=None, gate is packed [gate | up] (2I, K).
        down: (H, I).
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (squared ReLU).
        remake: make gate(x) and up(x) again in the backward instead of keeping them: two products, for 2 N I elements.

    Returns:
        (..., H), in x's dtype, or autocast's.

    Raises:
        ValueError: if shapes don't fit, the activation is unknown, or a base weight or bias requires a gradient.
    """
    check_dtypes(x=x)
    first = (gate,) if up is None else (gate, up)
    _check(x, first, down, activation)
    if runs_plain(x):
        return lora_mlp_reference(x, gate, up, down, activation=activation)
    return LoraMLPFunction.apply(x, first, down, activation, remake, *leaves_of((*first, down)))


def _check(x: Tensor, first: Sequence[Projection], down: Projection, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    for name, projection in zip(("gate", "up"), first, strict=False):
        check_projection("lora_mlp", name, projection, x.shape[-1])
    check_projection("lora_mlp", "down", down, None)
    shapes = [p.shape for p in (*first, down)]
    if None in shapes:
        return
    rows = {shape[0] for shape in shapes[:-1] if shape}
    width = shapes[-1][1] if shapes[-1] else 0
    if rows != {width * (3 - len(first))}:
        raise ValueError(
            "gate and up must have as many rows as down has columns, or packed twice as many: "
            f"they are {', '.join(str(shape) for shape in shapes)}."
        )
