"""Divergence between a student's and a teacher's next-token distributions, from hidden states; no logits are stored.

    s = transform(hidden @ weight.T + bias) / T,  q = softmax(s)          student
    t = the same of the teacher,                  p = softmax(t)          teacher

    forward_kl  KL(p || q) = sum p (t - s) - lse_t + lse_s                 d/ds = q - p
    reverse_kl  KL(q || p) = sum q (s - t) - lse_s + lse_t                 d/ds = q (log q - log p - KL(q || p))
    jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = (1 - beta) q + beta p
                                                                           d/ds = (1 - beta) q (log q/m - KL(q || m))
    loss = sum over rows of [T^2 sum_k weight_k D_k + ce_weight CE] / num_items,   CE at T = 1

Shapes    hidden: (N, Hs)  weight: (Vs, Hs)  teacher_hidden: (N, Ht)  teacher_weight: (Vt, Ht)  labels: (N,)
Vocabulary  the first V = min(Vs, Vt, vocab_size) rows of either head. What lies beyond is padding and takes no part.
Method    as in linear_cross_entropy.py, with a second workspace for the teacher's logits: four products in all. The row
          kernel makes one pass for all statistics, one more for the JSD, and one that writes the student's gradient in
          place.
Numerics  log-ratios are formed from differences that vanish where both logits agree: a student equal to its teacher
          gives loss 0 and gradient 0 exactly. Softmax and sums in fp32.
Source    generalised JSD and its convention: Agarwal et al. 2023 (GKD), arXiv:2306.13649, as in TRL; T^2: Hinton et
          al. 2015, arXiv:1503.02531; gradients in the forward as in linear_cross_entropy.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._autograd import first_order
from ._chunks import (
    Execution,
    HeadGradients,
    Needs,
    Rows,
    RowSelection,
    check_execution,
    check_head,
    check_labels,
    compute_dtype,
    labelled_weight,
    project,
    put,
    rescale,
    row_plan,
    selected_rows,
    stats_dtype,
    take,
    upstream_rows,
    workspace,
)
from ._divergence_reference import (
    KINDS,
    LinearDivergence,
    distillation_reference,
    divergence_reference,
    divergence_weights,
    linear_divergence_reference,
)
from ._divergence_rows import FIELDS, DivergenceOptions, RowInputs, divergence_rows
from ._rows import LogitTransform
from ._traced import check_traceable, fake_outputs, save_gradients, scaled_gradients, traced_outputs

__all__ = [
    "KINDS", "LinearDivergence", "distillation_reference", "divergence_reference", "divergence_weights",
    "linear_divergence", "linear_divergence_reference",
]  # fmt: skip


@dataclass(frozen=True)
class LinearHead:
    """The inputs of one side: hidden (N, H), weight (V, H), bias (V,) or None; and the dtype of their product."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "LinearHead":
        return cls(hidden, weight, bias, compute_dtype(hidden, weight))

    def labelled(self, rows: Rows, vocab: int) -> "LinearHead":
        """The labelled rows and the shared vocabulary, in the product's dtype."""
        bias = None if self.bias is None else self.bias[:vocab].contiguous()
        hidden, weight = take(self.hidden, rows).to(self.dtype), self.weight[:vocab].to(self.dtype)
        return LinearHead(hidden, weight, bias, self.dtype)


@dataclass(frozen=True)
class Pair:
    """Everything of a call that has no gradient of its own."""

    teacher: LinearHead
    labels: Tensor | None
    token_weight: Tensor | None
    rows: Rows
    vocab: int
    options: DivergenceOptions
    how: Execution


def _walk(student: LinearHead, pair: Pair, token_weight: Tensor | None, gradients: HeadGradients | None) -> Tensor:
    """(10, rows.count) per-token values, and the student's gradients if wanted."""
    rows, vocab, o = pair.rows, pair.vocab, pair.options
    dtype, teacher_dtype = student.dtype, pair.teacher.dtype
    wide, teacher_wide = (torch.promote_types(d, o.logits_dtype or d) for d in (dtype, teacher_dtype))
    device = student.hidden.device
    student, teacher = student.labelled(rows, vocab), pair.teacher.labelled(rows, vocab)
    labels = None if pair.labels is None else take(pair.labels, rows).contiguous()
    out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=device)
    # Wider logits widen the workspace, not the chunks.
    plan = row_plan(rows.count, vocab, dtype.itemsize + teacher_dtype.itemsize, pair.how)
    ws, teacher_ws = (workspace(min(plan.rows, rows.count), vocab, d, device) for d in (wide, teacher_wide))
    grad_ws = ws.view(dtype)[:, :vocab]  # in place: in the front of each row where the logits are wider
    for chunk in plan.chunks(rows.count):
        n, x = chunk.stop - chunk.start, student.hidden[chunk]
        inputs = RowInputs(
            project(x, student.weight, ws[:n]), project(teacher.hidden[chunk], teacher.weight, teacher_ws[:n]),
            student.bias, teacher.bias, None if labels is None else labels[chunk],
            None if token_weight is None else token_weight[chunk],
        )  # fmt: skip
        divergence_rows(inputs, out[:, chunk], None if gradients is None else grad_ws[:n], o)
        if gradients is not None:
            gradients.add(grad_ws[:n], x, student.weight, chunk, slice(0, vocab))
    return out


def _with_gradients(student: LinearHead, pair: Pair, needs: Needs):
    """(loss, per-token (10, N), (d hidden, d weight, d bias))."""
    rows, how, inputs = pair.rows, pair.how, (student.hidden, student.weight, student.bias)
    gradients = HeadGradients(*inputs, needs, rows, pair.vocab, how, pair.rows.alpha) if needs.any else None
    out = _walk(student, pair, pair.token_weight, gradients)
    result = (None, None, None) if gradients is None else gradients.finish(rows, *inputs, how)
    return out[0].sum() * pair.rows.alpha, put(out.t(), rows, student.hidden.shape[0]).t(), result


class LinearDivergenceFunction(torch.autograd.Function):
    """Gradients in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair: Pair, needs: Needs):
        student = LinearHead.of(hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            loss, per_token, gradients = _with_gradients(student, pair, needs)
        if needs.any:
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(per_token)
        return loss, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return *rescale(ctx.saved_tensors, grad_loss), None, None


class RecomputedDivergenceFunction(torch.autograd.Function):
    """Logits computed once more in the backward, for a gradient of each token's loss and nothing held in between."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair: Pair, per_token_loss: bool):
        ctx.pair, ctx.per_token_loss = pair, per_token_loss
        ctx.dtype = compute_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            out = _walk(LinearHead(hidden, weight, bias, ctx.dtype), pair, pair.token_weight, None)
        ctx.save_for_backward(hidden, weight, bias)
        per_token = put(out.t(), pair.rows, hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if per_token_loss else out[0].sum() * pair.rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        hidden, weight, bias = ctx.saved_tensors
        pair, rows = ctx.pair, ctx.pair.rows
        upstream = take(grad_loss, rows) if ctx.per_token_loss else grad_loss * pair.rows.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        token_weight = upstream if pair.token_weight is None else upstream * pair.token_weight
        needs = Needs(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = HeadGradients(hidden, weight, bias, needs, rows, pair.vocab, pair.how, 1.0, largest)
            _walk(LinearHead(hidden, weight, bias, ctx.dtype), pair, token_weight, gradients)
            result = gradients.finish(rows, hidden, weight, bias, pair.how)
        return *result, None, None


SCALARS = (*KINDS, "beta", "ce_weight", "temperature", "label_smoothing", "z_loss")


@torch.library.custom_op("liger_trainer::linear_divergence", mutates_args=())
def _traced_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, labels: Tensor | None, token_weight: Tensor | None, num_items: Tensor | None,
    scalars: Sequence[float], scales: Sequence[float], softcaps: Sequence[float], scale_by_temperature_squared: bool,
    ignore_index: int, vocab: int, logits_dtype: torch.dtype | None, workspace_mb: float | None,
    accumulate_dtype: torch.dtype | None, teacher_dtype: torch.dtype, dtype: torch.dtype, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The default mode as torch.compile sees it. Scales and softcaps: the student's, the teacher's; 0 is no softcap."""
    student, teacher = (LogitTransform(scale, softcap or None) for scale, softcap in zip(scales, softcaps, strict=True))
    values = dict(zip(SCALARS, scalars, strict=True))
    options = DivergenceOptions(
        **values, scale_by_temperature_squared=scale_by_temperature_squared, student=student, teacher=teacher,
        logits_dtype=logits_dtype,
    )  # fmt: skip
    rows = selected_rows(hidden, labels, None, num_items, ignore_index)
    pair = Pair(
        LinearHead(teacher_hidden, teacher_weight, teacher_bias, teacher_dtype), labels,
        labelled_weight(token_weight, rows, hidden.dtype), rows, vocab, options,
        Execution(workspace_mb, accumulate_dtype),
    )  # fmt: skip
    result = _with_gradients(LinearHead(hidden, weight, bias, dtype), pair, Needs(*needs))
    return traced_outputs(*result)  # pyright: ignore[reportReturnType]


@_traced_op.register_fake
def _(hidden, weight, bias, *options):
    *_, dtype, needs = options
    return fake_outputs(hidden, weight, bias, dtype, len(FIELDS), needs)


_traced_op.register_autograd(scaled_gradients, setup_context=save_gradients)


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    kind: str | Mapping[str, float] = "forward_kl", beta: float = 0.5, labels: Tensor | None = None,
    ce_weight: float = 0.0, temperature: float = 1.0, num_items: float | Tensor | None = None,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, scale_by_temperature_squared: bool = True, ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean", vocab_size: int | None = None,
    logits_dtype: torch.dtype | None = None, rows: RowSelection | None = None, recompute: bool = False,
    workspace_mb: float | None = None, accumulate_dtype: torch.dtype | None = None, overwrite_hidden: bool = False,
) -> LinearDivergence:  # fmt: skip
    """Distillation loss of a student's head against a teacher's, mixed with hard cross-entropy in the same pass.

    The formulas are at the top of this file. No gradient goes to the teacher.

    Args:
        hidden: (N, Hs), fp32, fp16, bf16 (fp64 on CPU).
        weight: (Vs, Hs). Frozen if it does not require a gradient: its product is skipped.
        teacher_hidden: (N, Ht), any float dtype; Ht may differ from Hs.
        teacher_weight: (Vt, Ht).
        kind: "forward_kl", "reverse_kl" or "jsd"; or several with weights, {"forward_kl": 0.5, "reverse_kl": 0.5}.
        beta: of the JSD: m = (1 - beta) student + beta teacher. At 0 it stands for the forward KL, at 1 for the
            reverse.
        labels: (N,) int64. Rows with ignore_index take no part in either loss. Without labels, every row does.
        ce_weight: weight of the cross-entropy against labels, at temperature 1.
        temperature: divides both sides' logits in the divergences.
        num_items: what the sum over tokens is divided by; default the number of rows that take part.
        bias, teacher_bias: (Vs,) and (Vt,), added to the logits.
        scale, teacher_scale, softcap, teacher_softcap: what either model does to its logits, see
            `linear_cross_entropy`.
        label_smoothing, z_loss: of the cross-entropy, see `linear_cross_entropy`.
        scale_by_temperature_squared: multiply the divergences, value and gradient, by temperature^2, so that their
            gradients keep their size when the temperature changes.
        token_weight, reduction, recompute, accumulate_dtype, overwrite_hidden: see `linear_cross_entropy`. Recomputing
            makes six products of four; the workspace stays what it is.
        vocab_size: the real vocabulary, where both heads are padded beyond it.
        logits_dtype: torch.float32 keeps both sides' logits in fp32 under bf16 products: less error in the gradient,
            for about 5 % of time and twice the workspace (docs/results/losses.md). Default: the products' dtype, as the
            models themselves do.
        rows: see `linear_cross_entropy`.
        workspace_mb: MiB for both chunks of logits in the products' dtype; twice that for fp32 logits under bf16.

    Returns:
        LinearDivergence: loss and per-token values.

    Raises:
        ValueError: shapes that do not fit, an unknown kind, an option out of range, or ce_weight without labels.
    """
    _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, ce_weight, logits_dtype)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1 or None, got {vocab_size}.")
    vocab = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    weights = divergence_weights(kind, beta)
    if torch.compiler.is_compiling():
        check_traceable(rows, recompute, overwrite_hidden)
        needs = Needs.of(hidden, weight, bias)
        loss, per_token, *_ = _traced_op(
            hidden, weight, bias, teacher_hidden.detach(), teacher_weight.detach(), teacher_bias, labels, token_weight,
            None if num_items is None else torch.as_tensor(num_items),
            [*weights.values(), beta, ce_weight, temperature, label_smoothing, z_loss], [scale, teacher_scale],
            [softcap or 0.0, teacher_softcap or 0.0], scale_by_temperature_squared, ignore_index, vocab, logits_dtype,
            workspace_mb, accumulate_dtype, compute_dtype(teacher_hidden, teacher_weight),
            compute_dtype(hidden, weight), [needs.hidden, needs.weight, needs.bias],
        )  # fmt: skip
        return _named(loss, per_token)
    options = DivergenceOptions(
        **weights, beta=beta, ce_weight=ce_weight, temperature=temperature, label_smoothing=label_smoothing,
        z_loss=z_loss, scale_by_temperature_squared=scale_by_temperature_squared,
        student=LogitTransform(scale, softcap), teacher=LogitTransform(teacher_scale, teacher_softcap),
        logits_dtype=logits_dtype,
    )  # fmt: skip
    selected = selected_rows(hidden, labels, rows, num_items, ignore_index)
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    pair = Pair(
        LinearHead.of(teacher_hidden.detach(), teacher_weight.detach(), teacher_bias), labels,
        labelled_weight(token_weight, selected, hidden.dtype), selected, vocab, options,
        Execution(workspace_mb, accumulate_dtype, overwrite_hidden),
    )  # fmt: skip
    if recompute:
        loss, per_token = RecomputedDivergenceFunction.apply(hidden, weight, bias, pair, reduction == "none")
    else:
        needs = Needs.of(hidden, weight, bias)
        loss, per_token = LinearDivergenceFunction.apply(hidden, weight, bias, pair, needs)
    return _named(loss, per_token)


def _named(loss: Tensor, per_token: Tensor) -> LinearDivergence:
    _, divergence, log_prob, entropy, is_top1, forward_kl, reverse_kl, agrees, *of_teacher = per_token.unbind(0)
    return LinearDivergence(
        loss, divergence, log_prob, entropy, is_top1 > 0, forward_kl, reverse_kl, agrees > 0, *of_teacher
    )


def _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, ce_weight, logits_dtype) -> None:
    for side, x, w, b in (("", hidden, weight, bias), ("teacher_", teacher_hidden, teacher_weight, teacher_bias)):
        check_head(x, w, None, side)
        if b is not None and b.shape != w.shape[:1]:
            raise ValueError(
                f"{side}bias must be one per row of {side}weight: "
                f"{side}bias is {tuple(b.shape)}, {side}weight is {tuple(w.shape)}."
            )
    check_labels(hidden, labels, ce_weight)
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise ValueError(
            f"Student and teacher must see the same tokens: hidden has {hidden.shape[0]} rows, "
            f"teacher_hidden {teacher_hidden.shape[0]}."
        )
    if logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype must be None or torch.float32, got {logits_dtype}.")
