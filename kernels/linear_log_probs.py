"""Log-probabilities of labels under a linear head, each with its own gradient, without the logits of the batch.

    x = transform(hidden @ weight.T + bias + lora) / temperature          transform: scale, then softcap (_logits.py)
    log_prob = x[label] - lse      d log_prob / dx_j = [j = label] - q_j           lse = log sum_j e^x_j, q = softmax(x)
    entropy = lse - sum_j q_j x_j  d entropy / dx_j = -q_j (x_j - lse + entropy)

Shapes    hidden: (N, H)  weight: (V, H)  labels: (N,) int64  bias: (V,)
Method    What preference optimisation and reinforcement learning minimise is a function of these values, so each
          token's upstream gradient is known in the backward only. The forward keeps only the values; the backward
          computes each chunk's logits again, and one kernel turns them into their gradient in place. That makes four
          products. If only hidden needs a gradient (a frozen head, as with LoRA), the forward computes d log_prob /
          d hidden of each row, and the backward multiplies it by the row's upstream gradient: two products. A gradient
          of the entropy takes the other way then, too.
Numerics  as linear_cross_entropy.py. The frozen head's direction is rounded once to hidden's dtype, then multiplied.
Traffic   per logit: 2 reads and 2 writes by the kernels and the first products, 2 reads by the other two
Source    chunks and rows: linear_cross_entropy.py; gradients by recomputed tiles: TRL's ChunkedLogProbFunction;
          mean logit without another pass: label smoothing (Szegedy et al. 2016, arXiv:1512.00567)
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import NeededGradients, first_order, graph_is_kept, stats_dtype
from ._cross_entropy_rows import ENTROPY, FIELDS, LSE, CrossEntropyOptions, Targets, Tile, tile_gradient, whole_rows
from ._linear_head import (
    Adapters,
    LinearHead,
    RowSelection,
    all_rows,
    check_head,
    gather_rows,
    linear_reference,
    scatter_rows,
    selected_rows,
    vocabulary,
)
from ._linear_loss import TAGS, Execution, LinearLoss, LogitChunk, check_labels, check_traceable, upstream_rows
from ._logits import LogitTransform, entropy_of, transform

__all__ = ["LogProbs", "linear_log_probs", "linear_log_probs_reference", "stored_log_probs"]

SMOOTHED = 0.5  # smoothing that makes the row kernel's loss hold the mean logit; a half costs no digit
HIDDEN_ALONE = NeededGradients(True, False, False)


class LogProbs(NamedTuple):
    """Per-token values (N,), in fp32 (fp64 for fp64 inputs), in nats; 0 where ignored.

    Attributes:
        log_prob: of the label, with gradient.
        entropy: of the distribution, with gradient.
        is_top1: whether no token is more likely than the label; bool.
        mean_logit: over the vocabulary, after scale, softcap and temperature, without gradient. None if not asked for.
    """

    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logit: Tensor | None


def linear_log_probs_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, temperature: float = 1.0, ignore_index: int | None = -100, mean_logits: bool = False,
    vocab_size: int | None = None, lora: Adapters = None,
) -> LogProbs:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    logits = transform(linear_reference(hidden, weight, lora), bias, LogitTransform(scale, softcap))[0] / temperature
    return stored_log_probs(logits[:, : vocabulary(weight, vocab_size)], labels, ignore_index, mean_logits)


def stored_log_probs(
    logits: Tensor, labels: Tensor, ignore_index: int | None = -100, mean_logits: bool = False
) -> LogProbs:
    """Return the values of logits (N, V) that are there, in plain torch and in their dtype."""
    kept = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    log_probs = F.log_softmax(logits, -1)
    place = labels.where(kept, 0)[:, None]  # an ignored label may be -100, which `gather` refuses
    log_prob = log_probs.gather(1, place).squeeze(1).where(kept, 0)
    is_top1 = (logits.gather(1, place).squeeze(1) >= logits.amax(-1)) & kept
    mean = logits.detach().mean(-1).where(kept, 0) if mean_logits else None
    return LogProbs(log_prob, entropy_of(log_probs).where(kept, 0), is_top1, mean)


@dataclass(frozen=True)
class LinearLogProbs(LinearLoss):
    """The values of one call, and their gradients. targets: those of the rows that take part."""

    targets: Targets
    options: CrossEntropyOptions  # smoothed if the mean logit is wanted

    fields = FIELDS

    @property
    def plain(self) -> CrossEntropyOptions:
        return replace(self.options, label_smoothing=0.0)

    def write_rows(self, chunk: LogitChunk) -> None:
        """Write the values and, where wanted, the gradient of -log_prob."""
        targets, smoothed = self.targets.rows(chunk.rows), self.options.label_smoothing > 0
        whole_rows(chunk.logits, chunk.bias, targets, chunk.values, None if smoothed else chunk.dlogits, self.options)
        if smoothed and chunk.dlogits is not None:
            # The smoothed loss gives the mean logit. Its gradient has that in it, too, so the plain one is written by
            # itself.
            one = torch.ones_like(chunk.values[LSE])
            tile_gradient(self._tile(chunk), targets, chunk.values[LSE], one, chunk.dlogits, self.plain)

    def values(self, head: LinearHead, direction: bool) -> tuple[Tensor, Tensor | None]:
        """Return the values (fields, N) of all rows and, if `direction`, d log_prob / d hidden (N, H)."""
        # -1: the kernel writes the gradient of -log_prob.
        gradients = self.gradients(head, HIDDEN_ALONE, self.plan(head.dtype), -1.0) if direction else None
        values = self.new_values(head)
        for chunk in self.chunks(head, values, gradients):
            self.write_rows(chunk)
        chunk = None  # free the workspace before `finish` allocates
        per_token = scatter_rows(values.t(), self.rows, head.hidden.shape[0]).t()
        return per_token, None if gradients is None else gradients.finish()[0]

    def head_gradients(
        self,
        head: LinearHead,
        needs: NeededGradients,
        per_token: Tensor,
        log_prob: Tensor | None,
        entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the head's tensors. per_token: what `values` returned; others: (N,) upstream."""
        values, count = gather_rows(per_token.t(), self.rows).t().contiguous(), self.rows.count
        like = values.new_zeros(per_token.shape[1])
        # (2 count,): both are divided by one largest number.
        upstream = torch.cat([gather_rows(like if x is None else x, self.rows) for x in (log_prob, entropy)])
        upstream, largest = upstream_rows(upstream, 2 * count, head.dtype)
        factor, entropy_factor = upstream[:count].neg(), upstream[count:]  # of -log_prob, and of the entropy
        gradients = self.gradients(head, needs, self.plan(head.dtype), 1.0, largest)
        for chunk in self.chunks(head, values, gradients):
            assert chunk.dlogits is not None
            rows = chunk.rows
            with_entropy = None if entropy is None else (chunk.values[ENTROPY], entropy_factor[rows])
            tile_gradient(
                self._tile(chunk), self.targets.rows(rows), chunk.values[LSE], factor[rows], chunk.dlogits, self.plain,
                with_entropy,
            )  # fmt: skip
        chunk = None
        return gradients.finish()

    def _tile(self, chunk: LogitChunk) -> Tile:
        return Tile(chunk.logits, chunk.bias, 0, self.vocab)


def _outputs(per_token: Tensor, mean_logits: bool) -> LogProbs:
    """Return the fields that a caller gets. `whole_rows` wrote loss, log_prob, entropy, is_top1 and lse."""
    loss, log_prob, entropy, is_top1, lse = per_token
    mean = None
    if mean_logits:  # loss = nll / 2 + (lse - mean) / 2
        mean = (lse - log_prob - 2 * loss).detach()
    return LogProbs(log_prob, entropy, is_top1.detach() > 0, mean)


class TokenLogProbs(torch.autograd.Function):
    """(log_prob, entropy, is_top1, mean_logit) of `LinearLogProbs`; see the top of this file."""

    @staticmethod
    def forward(ctx, values: LinearLogProbs, needs: NeededGradients, dtype: torch.dtype, *tensors):
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward
        with torch.autocast(tensors[0].device.type, enabled=False):
            per_token, direction = values.values(LinearHead(*tensors, dtype=dtype), needs == HIDDEN_ALONE)
        ctx.values, ctx.needs, ctx.dtype = values, needs, dtype
        ctx.save_for_backward(per_token, direction, *tensors)
        log_prob, entropy, is_top1, mean = _outputs(per_token, values.options.label_smoothing > 0)
        ctx.mark_non_differentiable(is_top1, *([] if mean is None else [mean]))
        return log_prob.clone(), entropy.clone(), is_top1, mean  # not views of what is saved: callers may write to them

    @staticmethod
    @first_order
    def backward(ctx, log_prob, entropy, *_):
        per_token, direction, *tensors = ctx.saved_tensors
        if log_prob is None and entropy is None:
            return None, None, None, *[None] * len(tensors)
        # A frozen head, and only log_prob used: its gradient was made in the forward, and only its size is missing.
        if direction is not None and log_prob is not None and entropy is None:
            out = torch.empty_like(direction) if graph_is_kept() else direction
            dhidden = torch.mul(direction, log_prob[:, None].to(stats_dtype(ctx.dtype)), out=out)
            return None, None, None, dhidden, *[None] * (len(tensors) - 1)
        with torch.autocast(tensors[0].device.type, enabled=False):
            head = LinearHead(*tensors, dtype=ctx.dtype)
            gradients = ctx.values.head_gradients(head, ctx.needs, per_token, log_prob, entropy)
        return None, None, None, *gradients


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, temperature: float = 1.0, ignore_index: int | None = -100,
    rows: RowSelection | None = None, mean_logits: bool = False, vocab_size: int | None = None,
    workspace_mb: float | None = None, accumulate_dtype: torch.dtype | None = None, lora: Adapters = None,
) -> LogProbs:  # fmt: skip
    """Compute each label's log-probability under softmax of `hidden @ weight.T`, and the distribution's entropy.

    Equals log_softmax(transform(F.linear(hidden, weight, bias)) / temperature).gather(labels), with any upstream
    gradient for each token.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64: torch). Any strides.
        weight: (V, H). Frozen if it requires no gradient: its product is skipped, and the logits are computed once.
        labels: (N,) int64, each in [0, vocab_size) or ignore_index. Ignored rows cost nothing. On the GPU a label
            outside gives NaN.
        bias: (V,), added to the logits.
        scale: multiplies the logits (Granite, Cohere).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), after scale.
        temperature: divides the logits, after softcap.
        ignore_index: the label of rows whose values are 0. None: every row has a label, and the host need not wait to
            learn which.
        rows: the labelled rows, if their selection started earlier (see `RowSelection`).
        mean_logits: return the mean logit of each row, too.
        vocab_size: the real vocabulary, if the head is padded beyond its own: the softmax runs over its first rows.
        workspace_mb: MiB for the chunk of logits. Default: 512, or the size of 2,048 rows if that is larger, up to
            1024; half of that where weight is frozen, but no less than 1,024 rows.
        accumulate_dtype: torch.float32 sums the weight's gradient in fp32 and rounds it once. Default: the weight's
            dtype up to 16 chunks; beyond, fp32.
        lora: low-rank additions to the head, one `Lora` or several.

    Returns:
        LogProbs.

    Raises:
        ValueError: if shapes don't fit, an option is out of range, or `rows` is given without an ignore_index.
    """
    check_head(hidden, weight, bias, lora)
    check_labels(hidden, labels)
    if rows is not None and ignore_index is None:
        raise ValueError("ignore_index=None says that every row has a label, and rows which have: give one of them.")
    head = LinearHead.of(hidden, weight, bias, lora)
    vocab = vocabulary(weight, vocab_size)
    arguments = scale, softcap, temperature, mean_logits, vocab, workspace_mb, accumulate_dtype
    if torch.compiler.is_compiling():
        check_traceable(rows, False, False)
        per_token = _opaque(*head.tensors, head.dtype, labels, ignore_index, *arguments)
        return _outputs(per_token, mean_logits)
    values = _values(head, labels, rows, ignore_index, *arguments)
    return LogProbs(*TokenLogProbs.apply(values, NeededGradients.of(*head.tensors), head.dtype, *head.tensors))


def _values(
    head: LinearHead, labels: Tensor, rows: RowSelection | None, ignore_index: int | None, scale: float,
    softcap: float | None, temperature: float, mean_logits: bool, vocab: int, workspace_mb: float | None,
    accumulate_dtype: torch.dtype | None,
) -> LinearLogProbs:  # fmt: skip
    if ignore_index is None:
        selected = all_rows(head.hidden, 1)
    else:
        selected = selected_rows(head.hidden, labels, rows, None, ignore_index)
    options = CrossEntropyOptions(LogitTransform(scale, softcap), temperature, SMOOTHED if mean_logits else 0.0)
    targets = Targets(gather_rows(labels, selected).contiguous())
    how = Execution(workspace_mb, accumulate_dtype, frozen=not head.weight.requires_grad)
    return LinearLogProbs(selected, vocab, how, targets, options)


# Under torch.compile: an opaque op each for the values and for their gradients.


@torch.library.custom_op("liger_trainer::linear_log_probs", mutates_args=(), tags=TAGS)
def _opaque(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, low_weight: Tensor | None,
    dtype: torch.dtype, labels: Tensor, ignore_index: int | None, scale: float, softcap: float | None,
    temperature: float, mean_logits: bool, vocab: int, workspace_mb: float | None,
    accumulate_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return the values (fields, N). `dtype`: of the products; autocast is off when this runs."""
    head = LinearHead(hidden, weight, bias, low, low_weight, dtype)
    arguments = scale, softcap, temperature, mean_logits, vocab, workspace_mb, accumulate_dtype
    return _values(head, labels, None, ignore_index, *arguments).values(head, False)[0].contiguous()


@_opaque.register_fake
def _(hidden, weight, bias, low, low_weight, dtype, *_):
    return hidden.new_empty((len(FIELDS), hidden.shape[0]), dtype=stats_dtype(dtype))


@torch.library.custom_op("liger_trainer::linear_log_probs_backward", mutates_args=(), tags=TAGS)
def _opaque_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, low_weight: Tensor | None,
    dtype: torch.dtype, labels: Tensor, ignore_index: int | None, scale: float, softcap: float | None,
    temperature: float, mean_logits: bool, vocab: int, workspace_mb: float | None,
    accumulate_dtype: torch.dtype | None, needs: list[bool], per_token: Tensor, upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the head's tensors, an empty tensor for None. upstream: (fields, N)."""
    head = LinearHead(hidden, weight, bias, low, low_weight, dtype)
    arguments = scale, softcap, temperature, mean_logits, vocab, workspace_mb, accumulate_dtype
    values = _values(head, labels, None, ignore_index, *arguments)
    gradients = values.head_gradients(head, NeededGradients(*needs), per_token, upstream[1], upstream[2])
    return tuple(hidden.new_empty(0) if x is None else x.contiguous() for x in gradients)  # pyright: ignore[reportReturnType]


@_opaque_backward.register_fake
def _(*inputs):
    head, needs = inputs[:5], inputs[-3]
    return tuple(
        x.new_empty(x.shape) if needed and x is not None else inputs[0].new_empty(0)
        for x, needed in zip(head, needs, strict=True)
    )


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5], inputs[6], output)
    ctx.rest = inputs[5], inputs[7:]


@first_order
def _compiled_backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
    *head, labels, per_token = ctx.saved_tensors
    dtype, rest = ctx.rest
    needs = list(ctx.needs_input_grad[:5])
    gradients = _opaque_backward(*head, dtype, labels, *rest, needs, per_token, upstream.contiguous())
    given = (x if needed else None for x, needed in zip(gradients, needs, strict=True))
    return *given, *[None] * (2 + len(rest))


_opaque.register_autograd(_compiled_backward, setup_context=_keep)
