"""Divergence between a student's and a teacher's next-token distributions, from hidden states, without stored logits.

    s = transform(hidden @ weight.T + bias + lora) / T,  q = softmax(s)   student; lora: see _linear_head.py
    t = the same for the teacher,                        p = softmax(t)   teacher

    forward_kl       KL(p || q) = sum p (t - s) - lse_t + lse_s            d/ds = q - p
    reverse_kl       KL(q || p) = sum q (s - t) - lse_s + lse_t            d/ds = q (log q - log p - KL(q || p))
    jsd              beta KL(p || m) + (1 - beta) KL(q || m), m = (1 - beta) q + beta p
                                                                           d/ds = (1 - beta) q (log q/m - KL(q || m))
    skew_kl          KL(p || m), m = alpha p + (1 - alpha) q               d/ds = -(1 - alpha) q (r - sum q r), r = p/m
    skew_reverse_kl  KL(q || m), m = alpha q + (1 - alpha) p               d/ds = q (r - sum q r)
                                                                           r = log q/m - alpha q/m
    symmetric_kl     (forward_kl + reverse_kl) / 2
    tvd              sum |p - q| / 2                                       d/ds = q (r - sum q r) / 2, r = sign(q - p)
    loss = sum over rows of [T^2 sum_k weight_k D_k + ce_weight CE] / num_items,   CE at T = 1

A teacher_share a < 1 replaces the teacher's logits t everywhere by (1 - a) s + a t, where s gets no gradient.

Shapes    hidden: (N, Hs)  weight: (Vs, Hs)  teacher_hidden: (N, Ht)  teacher_weight: (Vt, Ht)  labels: (N,)
Vocabulary  the first V = min(Vs, Vt, vocab_size) rows of each head. Rows beyond are padding and take no part. Nor does
          a token whose logits are -inf on both sides. If they are -inf on only one side, and the other side gives the
          token more than 1e-10 of its mass, the KL from the other side is infinite.
Method    as in linear_cross_entropy.py, with a second workspace for the teacher's logits: four products in total. The
          row kernel makes one pass for all statistics, one more for all kinds but the KLs, and one
          that writes the student's gradient in place.
Numerics  log-ratios come from differences that vanish where both logits agree: a student equal to its teacher gives
          exactly loss 0 and gradient 0. Softmax and sums in fp32. The gradient of tvd jumps where q and p cross: where
          they differ by less than their rounding errors its sign is random, as in plain torch.
Source    generalised JSD and its convention: Agarwal et al. 2023 (GKD), arXiv:2306.13649, as in TRL; skewed KLs: Ko et
          al. 2024 (DistiLLM), arXiv:2402.03898; teacher_share: Shing et
          al. 2025 (TAID), arXiv:2501.16937; T^2: Hinton et al. 2015, arXiv:1503.02531; gradients in the forward as in
          linear_cross_entropy.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._divergence_kernels import divergence_rows
from ._divergence_reference import (
    LinearDivergence,
    distillation_reference,
    divergence_reference,
    linear_divergence_reference,
    named_terms,
)
from ._divergence_torch import FIELDS, TERMS, DivergenceOptions, RowInputs
from ._linear_head import (
    Adapters,
    LinearHead,
    Lora,
    Operands,
    Rows,
    RowSelection,
    adapters_of,
    check_head,
    check_overwritten,
    compute_dtype,
    gather_rows,
    labelled_weight,
    vocabulary,
)
from ._linear_loss import (
    Execution,
    LinearLoss,
    LogitChunk,
    LossOp,
    check_execution,
    check_labels,
    workspace,
)
from ._logits import LogitTransform
from ._ranks import VocabParallel
from .divergence_kinds import KINDS, ROW_KINDS, divergence_weights

__all__ = [
    "KINDS", "LinearDivergence", "Lora", "distillation_reference", "divergence_reference", "divergence_weights",
    "linear_divergence", "linear_divergence_reference",
]  # fmt: skip


@dataclass(frozen=True)
class LinearPair(LinearLoss):
    """The loss of a student's head against a teacher's. labels, token_weight: those of the rows that take part."""

    teacher: LinearHead
    labels: Tensor | None  # (rows.count,)
    token_weight: Tensor | None  # (rows.count,)
    options: DivergenceOptions

    fields = FIELDS

    def chunk_state(self, rows: int) -> tuple[Operands, Tensor]:
        """Return (operands of the teacher's logits, a workspace for a chunk of them)."""
        # cast once for all chunks
        operands = self.teacher.operands(self.rows, self.vocab).part(slice(None), slice(0, self.vocab))
        dtype = self.logits_dtype(self.teacher.dtype)
        return operands, workspace(rows, self.vocab, dtype, self.teacher.hidden.device)

    def write_rows(self, chunk: LogitChunk) -> None:
        operands, ws = chunk.chunk_state  # memory for the teacher's logits, which all chunks share
        teacher = operands.part(chunk.rows, slice(0, self.vocab))  # the teacher's rows of the same tokens
        labels, token_weight = (None if x is None else x[chunk.rows] for x in (self.labels, self.token_weight))
        inputs = RowInputs(chunk.logits, teacher.logits(ws), chunk.bias, teacher.bias, labels, token_weight)
        divergence_rows(inputs, chunk.values, chunk.dlogits, self.options)

    def weighted(self, factor: Tensor) -> "LinearPair":
        token_weight = factor if self.token_weight is None else factor * self.token_weight
        return replace(self, token_weight=token_weight)

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self.options.logits_dtype or dtype)

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        return dtype.itemsize + self.teacher.dtype.itemsize  # both sides share the workspace


def _loss(
    rows: Rows, how: Execution, head: LinearHead, labels: Tensor | None, token_weight: Tensor | None,
    teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, teacher_low: Tensor | None,
    teacher_low_weight: Tensor | None, teacher_dtype: torch.dtype, vocab: int, kinds: str, weights: Sequence[float],
    beta: float, alpha: float, teacher_share: float, ce_weight: float, temperature: float, label_smoothing: float,
    z_loss: float, scale_by_temperature_squared: bool, scale: float, softcap: float | None, teacher_scale: float,
    teacher_softcap: float | None, logits_dtype: torch.dtype | None,
) -> LinearPair:  # fmt: skip
    """Make the loss. kinds: separated by spaces, since custom ops can't take list[str]."""
    options = DivergenceOptions(
        dict(zip(kinds.split(), weights, strict=True)), beta, alpha, teacher_share, ce_weight, temperature,
        label_smoothing, z_loss, scale_by_temperature_squared, LogitTransform(scale, softcap),
        LogitTransform(teacher_scale, teacher_softcap), logits_dtype,
    )  # fmt: skip
    teacher = LinearHead(teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_low_weight, teacher_dtype)
    labels = None if labels is None else gather_rows(labels, rows).contiguous()
    weight = labelled_weight(token_weight, rows, head.hidden.dtype)
    return LinearPair(rows, vocab, how, teacher, labels, weight, options)


_op = LossOp("linear_divergence", _loss)


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
    lora: Adapters = None, teacher_lora: Adapters = None, alpha: float = 0.1, teacher_share: float = 1.0,
    parallel: VocabParallel | None = None, teacher_parallel: VocabParallel | None = None,
) -> LinearDivergence:  # fmt: skip
    """Compute the distillation loss of a student's head against a teacher's, mixed with cross-entropy in the same pass.

    The formulas are at the top of this file. The teacher gets no gradient.

    Args:
        hidden: (N, Hs), fp32, fp16, bf16 (fp64: torch).
        weight: (Vs, Hs). Frozen if it requires no gradient: its product is skipped.
        teacher_hidden: (N, Ht), any float dtype; Ht may differ from Hs.
        teacher_weight: (Vt, Ht).
        kind: one of KINDS, or several with weights, {"forward_kl": 0.5, "jsd": 0.5}. A kind of weight 0 is measured
            (see the result's `terms`), but is no part of loss and gradient.
        beta: of the JSD: m = (1 - beta) student + beta teacher. 0 means the forward KL, 1 the reverse KL.
        labels: (N,) int64. Rows with ignore_index take no part in either loss. Without labels, every row does.
        ce_weight: weight of the cross-entropy against labels, at temperature 1.
        temperature: divides both sides' logits in the divergences.
        num_items: divisor of the sum over tokens; default: the number of rows that take part.
        bias, teacher_bias: (Vs,) and (Vt,), added to the logits.
        scale, teacher_scale, softcap, teacher_softcap: what each model does to its logits, see `linear_cross_entropy`.
        label_smoothing, z_loss: of the cross-entropy, see `linear_cross_entropy`.
        scale_by_temperature_squared: multiply the divergences, value and gradient, by temperature^2, so that their
            gradients keep their size when the temperature changes.
        token_weight, reduction, recompute, accumulate_dtype, overwrite_hidden: see `linear_cross_entropy`. With
            recompute, there are six products instead of four; the workspace stays the same.
        vocab_size: the real vocabulary, if both heads are padded beyond it.
        logits_dtype: torch.float32 keeps both sides' logits in fp32 under bf16 products: less error in the gradient,
            for about 5 % of time and twice the workspace (docs/results/losses.md). Default: the products' dtype, as in
            the models themselves.
        rows: see `linear_cross_entropy`.
        workspace_mb: MiB for both chunks of logits in the products' dtype; twice that for fp32 logits under bf16.
        lora, teacher_lora: low-rank additions to each head, see `linear_cross_entropy`.
        alpha: in [0, 1), of the skewed KLs: the share of p in skew_kl's m, and of q in skew_reverse_kl's. At 0 they are
            the forward and the reverse KL.
        teacher_share: in [0, 1], the teacher's share in the logits that the student is compared with, see the top of
            this file; the rest is the student's own. 1: only the teacher. The result's fields at temperature 1 always
            use the real teacher.
        parallel: how the rows of the student's head lie on the ranks of a group; see `linear_cross_entropy`.
        teacher_parallel: how those of the teacher's head lie, on the same group and in the same ranges of rows. Without
            it, teacher_weight is the whole head, of which this rank reads its share.

    Returns:
        LinearDivergence: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit, a kind is unknown, an option is out of range, or ce_weight lacks labels.
    """
    check_head(hidden, weight, bias, lora)
    check_head(teacher_hidden, teacher_weight, teacher_bias, teacher_lora, "teacher_")
    _check(hidden, teacher_hidden, labels, ce_weight, logits_dtype)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    check_overwritten(overwrite_hidden, lora)
    weights = divergence_weights(kind, beta, alpha)  # of row kinds: what the kernel computes
    # heads may be padded to different lengths: the common part counts
    vocab = min(_vocabulary(weight, parallel, vocab_size), _vocabulary(teacher_weight, teacher_parallel))
    if parallel is None and teacher_parallel is not None:
        raise ValueError("teacher_parallel needs parallel: with a whole student's head, gather the teacher's.")
    if parallel is not None:
        held = weight.shape[0]
        parallel.check(weight, overwrite_hidden)
        if teacher_parallel is not None:
            parallel.check_teacher(teacher_parallel, vocab, held, teacher_weight.shape[0])
        else:
            # A whole teacher: each rank reads the rows that it has of the student's head.
            teacher_weight = parallel.slice_of(teacher_weight, held)
            teacher_bias = None if teacher_bias is None else parallel.slice_of(teacher_bias, held)
            teacher_lora = [x._replace(b=parallel.slice_of(x.b, held)) for x in adapters_of(teacher_lora)]
    if teacher_weight is weight and not weight.requires_grad:
        # Adapters whose teacher is their own base: one head, and one copy of it in the dtype of the products.
        dtypes = {compute_dtype(x, weight) for x in (hidden, teacher_hidden)}
        if len(dtypes) == 1:
            weight = teacher_weight = weight.to(dtypes.pop())
    head = LinearHead.of(hidden, weight, bias, lora)
    with torch.no_grad():  # the teacher's adapters get no gradient either
        teacher = LinearHead.of(teacher_hidden, teacher_weight, teacher_bias, teacher_lora).detached()
    arguments: list[Any] = [
        *teacher.tensors, teacher.dtype, vocab, " ".join(weights), [*weights.values()], beta, alpha, teacher_share,
        ce_weight, temperature, label_smoothing, z_loss, scale_by_temperature_squared, scale, softcap, teacher_scale,
        teacher_softcap, logits_dtype,
    ]  # fmt: skip
    value, per_token = _op(
        head, labels, token_weight, arguments, rows=rows, num_items=num_items, ignore_index=ignore_index,
        reduction=reduction, recompute=recompute, workspace_mb=workspace_mb, accumulate_dtype=accumulate_dtype,
        overwrite_hidden=overwrite_hidden, parallel=parallel, teacher=teacher,
    )  # fmt: skip
    return _named(value, per_token, kind, beta, alpha)


def _vocabulary(weight: Tensor, parallel: VocabParallel | None, vocab_size: int | None = None) -> int:
    """Return how many rows of a head take part, wherever they lie."""
    return vocabulary(weight, vocab_size) if parallel is None else min(parallel.vocab, vocab_size or parallel.vocab)


def _named(loss: Tensor, per_token: Tensor, kind, beta: float, alpha: float) -> LinearDivergence:
    fields, terms = per_token[1:TERMS].unbind(0), per_token[TERMS:].unbind(0)
    # in the order of FIELDS
    divergence, log_prob, entropy, is_top1, forward_kl, reverse_kl, agrees, *teacher_fields = fields
    return LinearDivergence(
        loss, divergence, log_prob, entropy, is_top1 > 0, forward_kl, reverse_kl, agrees > 0, *teacher_fields,
        terms=named_terms(kind, beta, alpha, dict(zip(ROW_KINDS, terms, strict=True))),
    )  # fmt: skip


def _check(hidden, teacher_hidden, labels, ce_weight, logits_dtype) -> None:
    check_labels(hidden, labels, ce_weight)
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise ValueError(
            f"Student and teacher must see the same tokens: hidden has {hidden.shape[0]} rows, "
            f"teacher_hidden {teacher_hidden.shape[0]}."
        )
    if logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype must be None or torch.float32, got {logits_dtype}.")
