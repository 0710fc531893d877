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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._chunks import (
    Execution,
    HeadGradients,
    Needs,
    Rows,
    RowSelection,
    all_rows,
    check_execution,
    compute_dtype,
    labelled_weight,
    project,
    put,
    refuse_second_derivatives,
    rescale,
    row_plan,
    selected_rows,
    stats_dtype,
    take,
    upstream_rows,
    workspace,
)
from ._divergence_rows import FIELDS, DivergenceOptions, RowInputs, divergence_rows
from ._rows import LogitTransform, transform

KINDS = ("forward_kl", "reverse_kl", "jsd")


class LinearDivergence(NamedTuple):
    """What `linear_divergence` returns. Per-token values are fp32 (fp64 for fp64 inputs), nats, 0 where ignored.

    All but `divergence` are of the distributions at temperature 1. Without labels, the fields about them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    divergence: Tensor  # (N,) sum of the weighted divergences at the loss's temperature, times T^2 if the loss is
    log_prob: Tensor  # (N,) the student's log-probability of the label
    entropy: Tensor  # (N,) the student's entropy
    is_top1: Tensor  # (N,) bool, whether no token is likelier than the label for the student
    forward_kl: Tensor  # (N,) KL(teacher || student)
    reverse_kl: Tensor  # (N,) KL(student || teacher)
    agrees: Tensor  # (N,) bool, whether student and teacher have a likeliest token in common
    teacher_log_prob: Tensor  # (N,) the teacher's log-probability of the label
    teacher_entropy: Tensor  # (N,) the teacher's entropy


def divergence_weights(kind: str | Mapping[str, float], beta: float) -> dict[str, float]:
    """{kind: weight}, with the JSD at beta 0 and 1 replaced by the KL that it tends to (after division by beta)."""
    given = {kind: 1.0} if isinstance(kind, str) else dict(kind)
    if not given or set(given) - set(KINDS):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, or a mapping of these to weights; got {kind!r}.")
    weights: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for name, weight in given.items():
        limit = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta)) if name == "jsd" else None
        weights[limit or name] += float(weight)
    return weights


def divergence_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """(N,) weighted divergences of logits (N, V), in plain torch. Not multiplied by T^2."""
    q, p = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    m = torch.logsumexp(torch.stack([q + _log(1 - beta), p + _log(beta)]), 0)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    weights = divergence_weights(kind, beta)
    total = weights["forward_kl"] * kl(p, q) + weights["reverse_kl"] * kl(q, p)
    if weights["jsd"]:
        total = total + weights["jsd"] * (beta * kl(p, m) + (1 - beta) * kl(q, m))
    return total


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


def distillation_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, labels: Tensor | None = None, ce_weight: float = 0.0, temperature: float = 1.0,
    num_items: float | Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    scale_by_temperature_squared: bool = True, ignore_index: int = -100,
) -> LinearDivergence:  # fmt: skip
    """The loss in plain torch, from logits (N, V) of both sides."""
    dtype = stats_dtype(student_logits.dtype)
    s, t = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    has_label = keep & (labels is not None)
    label = torch.zeros_like(keep, dtype=torch.int64) if labels is None else labels * keep
    q, p = s.log_softmax(-1), t.log_softmax(-1)
    log_prob, teacher_log_prob = (x.gather(1, label[:, None]).squeeze(1) * has_label for x in (q, p))
    ce = -(1 - label_smoothing) * log_prob - label_smoothing * q.mean(-1) + z_loss * s.logsumexp(-1).square()
    divergence = divergence_reference(s, t, kind=kind, beta=beta, temperature=temperature)
    divergence = divergence * (temperature**2 if scale_by_temperature_squared else 1.0)
    loss = (divergence + ce_weight * ce)[keep].sum() / (keep.sum().clamp(min=1) if num_items is None else num_items)
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    fields = (
        divergence, log_prob, -(q.exp() * q).sum(-1), (log_prob >= q.amax(-1)) & has_label,
        (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1), agrees, teacher_log_prob, -(p.exp() * p).sum(-1),
    )  # fmt: skip
    return LinearDivergence(loss, *((x * keep).detach() for x in fields))


def linear_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, vocab_size: int | None = None, **options,
) -> LinearDivergence:  # fmt: skip
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    V = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    bias, teacher_bias = (None if b is None else b[:V] for b in (bias, teacher_bias))
    student = transform(F.linear(hidden, weight[:V]), bias, LogitTransform(scale, softcap))[0]
    with torch.no_grad():
        how = LogitTransform(teacher_scale, teacher_softcap)
        teacher = transform(F.linear(teacher_hidden, teacher_weight[:V]), teacher_bias, how)[0]
    return distillation_reference(student, teacher, **options)


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

    @property
    def alpha(self) -> float:
        return 1.0 / self.rows.num_items if self.rows.num_items else 0.0


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


class LinearDivergenceFunction(torch.autograd.Function):
    """Gradients in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair: Pair, needs: Needs):
        student, rows, how = LinearHead.of(hidden, weight, bias), pair.rows, pair.how
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = None
            if needs.any:
                gradients = HeadGradients(hidden, weight, bias, needs, rows, pair.vocab, how, pair.alpha)
            out = _walk(student, pair, pair.token_weight, gradients)
            if gradients is not None:
                ctx.save_for_backward(*gradients.finish(rows, hidden, weight, bias, how))
        per_token = put(out.t(), rows, hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return out[0].sum() * pair.alpha, per_token

    @staticmethod
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
        return per_token[0].clone() if per_token_loss else out[0].sum() * pair.alpha, per_token

    @staticmethod
    def backward(ctx, grad_loss, _):
        refuse_second_derivatives()
        hidden, weight, bias = ctx.saved_tensors
        pair, rows = ctx.pair, ctx.pair.rows
        upstream = take(grad_loss, rows) if ctx.per_token_loss else grad_loss * pair.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        token_weight = upstream if pair.token_weight is None else upstream * pair.token_weight
        needs = Needs(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = HeadGradients(hidden, weight, bias, needs, rows, pair.vocab, pair.how, 1.0, largest)
            _walk(LinearHead(hidden, weight, bias, ctx.dtype), pair, token_weight, gradients)
            result = gradients.finish(rows, hidden, weight, bias, pair.how)
        return *result, None, None


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
    options = DivergenceOptions(
        **divergence_weights(kind, beta), beta=beta, ce_weight=ce_weight, temperature=temperature,
        label_smoothing=label_smoothing, z_loss=z_loss, scale_by_temperature_squared=scale_by_temperature_squared,
        student=LogitTransform(scale, softcap), teacher=LogitTransform(teacher_scale, teacher_softcap),
        logits_dtype=logits_dtype,
    )  # fmt: skip
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1 or None, got {vocab_size}.")
    vocab = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    if labels is None:
        selected = all_rows(hidden, num_items) if rows is None else rows.wait()
    else:
        selected = selected_rows(labels, rows, num_items, ignore_index)
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
    _, divergence, log_prob, entropy, is_top1, forward_kl, reverse_kl, agrees, *of_teacher = per_token.unbind(0)
    return LinearDivergence(
        loss, divergence, log_prob, entropy, is_top1 > 0, forward_kl, reverse_kl, agrees > 0, *of_teacher
    )


def _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, ce_weight, logits_dtype) -> None:
    for side, x, w, b in (("", hidden, weight, bias), ("teacher_", teacher_hidden, teacher_weight, teacher_bias)):
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(
                f"{side}hidden (N, H) and {side}weight (V, H) must share H: "
                f"{side}hidden is {tuple(x.shape)}, {side}weight is {tuple(w.shape)}."
            )
        if b is not None and b.shape != w.shape[:1]:
            raise ValueError(
                f"{side}bias must be one per row of {side}weight: "
                f"{side}bias is {tuple(b.shape)}, {side}weight is {tuple(w.shape)}."
            )
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise ValueError(
            f"Student and teacher must see the same tokens: hidden has {hidden.shape[0]} rows, "
            f"teacher_hidden {teacher_hidden.shape[0]}."
        )
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels must be one per row of hidden: labels is {tuple(labels.shape)}, hidden {tuple(hidden.shape)}."
        )
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight is {ce_weight}, but cross-entropy needs labels and none were given.")
    if logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype must be None or torch.float32, got {logits_dtype}.")
