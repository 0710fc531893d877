"""The loop of the fused linear losses: logits by chunks of rows, a row kernel, and two ways to compute gradients.

A loss is a `LinearLoss`: its targets, and the kernel that turns rows of logits into per-token values and, in place,
their gradient. Two matrix products then carry that gradient to the hidden states and to the weight (_linear_head.py).
`GradientsInForward` computes gradients in the forward, which works since the loss is the last thing that a model
computes. `Recomputed` computes the logits again in the backward: it accepts a gradient for each token's loss, and holds
nothing in between.

An op calls its `LossOp`, which applies one of the two. Their forward calls the loss's `write_rows` for each chunk,
which launches the kernel. `docs/how-it-works.md` follows this path from the trainer on.

One workspace is used again for every chunk of rows. From top to bottom: how large chunks are (`ChunkPlan`,
`Execution`), the loop (`LinearLoss`), the gradients, and the op (`LossOp`).
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ._autograd import NeededGradients, check_label_dtype, first_order, rescale, stats_dtype
from ._linear_head import (
    HeadGradients,
    LinearHead,
    Operands,
    Rows,
    RowSelection,
    gather_rows,
    scatter_rows,
    selected_rows,
)
from ._ranks import VocabParallel
from ._tuning import SHAPES

WORKSPACE_MB, LAUNCH_BYTES = SHAPES.WORKSPACE_MB, SHAPES.LAUNCH_BYTES
FROZEN_ROWS = 1024  # of a chunk: with fewer, the product for the hidden states' gradient leaves multiprocessors idle
ROUNDINGS = 16  # more chunks than this, summed in the weight's dtype, have twice the error of a single product
BYTES_A_WORD = 4096  # workspace per word of the vocabulary (see `workspace_bytes`): 2,048 rows of bf16 logits
TILE_ROWS = 256
WIDE_TILE, LAST_TILE = SHAPES.WIDE_TILE, SHAPES.LAST_TILE  # see `tiles_in_gradient`
LEAST_ROWS = 32  # of a chunk, where memory is short: fewer would save little and take very long
CHUNK_ROWS = (256, 512, 1024, 2048, 4096, 8192)  # sizes that `tile_plan` tries

Memory = TypeVar("Memory")


class ChunkPlan(NamedTuple):
    """How many rows (a chunk) and columns of the vocabulary (a tile) have their logits in the workspace at a time."""

    rows: int
    columns: int

    def chunks(self, count: int) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows))

    def tiles(self, vocab: int) -> Iterator[slice]:
        return (slice(start, min(start + self.columns, vocab)) for start in range(0, vocab, self.columns))


def row_plan(count: int, vocab: int, bytes_per_logit: int, how: "Execution") -> ChunkPlan:
    """Return chunks of whole rows of equal size, as large as the workspace allows.

    Each chunk reads and writes the weight's gradient once, so few large chunks approach the speed of the bare matrix
    products. Liger-Kernel's rule uses only V / H: it gives small models chunks whose time goes into that traffic.
    By default a batch that would fill more than half of WORKSPACE_MB by itself is cut in two: one chunk would save
    little time, and as little memory as stored logits. A frozen weight has no gradient: its chunks have half as many
    rows by default.
    """
    limit = _whole_tiles(max(1, how.workspace_bytes(vocab) // (vocab * bytes_per_logit)), down=True)
    if how.frozen and how.workspace_mb is None and limit > FROZEN_ROWS:
        limit = max(FROZEN_ROWS, _whole_tiles(limit // 2, down=True))
    chunks = max(1, -(-count // limit))
    # 2**19: half a MiB
    if chunks == 1 and how.workspace_mb is None and count * vocab * bytes_per_logit > WORKSPACE_MB * 2**19:
        chunks = 2
    return ChunkPlan(max(1, min(limit, _whole_tiles(-(-count // chunks)))), vocab)


def tile_plan(
    count: int, vocab: int, hidden_size: int, itemsize: int, needs: "NeededGradients", how: "Execution", spare: int = 0
) -> ChunkPlan:
    """Return the cheapest chunks and tiles that fit the workspace, for losses that compute logits twice.

    A chunk reads the weight three times, and reads and writes its gradient. A tile reads and writes an fp32 sum of the
    hidden states' gradient, which lies in the workspace too, and costs the host its launches. The default workspace has
    the size of the hidden states, or `spare` bytes, which the backward will take anyway, up to `workspace_bytes`.
    """
    budget = how.workspace_bytes(vocab)
    if how.workspace_mb is None:
        budget = max(16 * 2**20, count * hidden_size * itemsize, min(spare, budget))
    plans = []
    # All sizes are tried, and the cheapest by what it moves is taken: see below.
    for rows in CHUNK_ROWS:
        left = budget - 4 * rows * hidden_size * needs.hidden  # the fp32 sum of the chunk's hidden states' gradient
        columns = _whole_tiles(max(left, 0) // (rows * itemsize), down=True)
        if columns >= TILE_ROWS:
            columns = min(columns, vocab)
            moved = (6 + 4 * needs.weight) / rows + 8 * needs.hidden / columns  # bytes for each count * vocab * hidden
            # a tile's launches, as bytes that the GPU could have moved meanwhile
            plans.append((moved + LAUNCH_BYTES / (rows * columns * hidden_size), ChunkPlan(rows, columns)))
    return min(plans)[1] if plans else ChunkPlan(TILE_ROWS, min(TILE_ROWS, vocab))


def tiles_in_gradient(count: int, vocab: int, logit_bytes: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of tiles whose logits fit where the weight's gradient will have the rows after theirs.

    What tiles add to the gradient are the rows of their own words, so until the next words the rest is free. The less
    is left, the fewer columns fit with all rows. Once they are fewer than WIDE_TILE, a tile has WIDE_TILE rows, or
    count / ROUNDINGS if that is more. The last tiles, of LAST_TILE columns, find no place and take other memory.

    Args:
        count: rows of logits, at least 1.
        logit_bytes: of one logit.
        row_bytes: of a row of the weight's gradient.
    """
    start, rows = 0, count
    while start < vocab:
        left = vocab - start
        columns = left * row_bytes // (row_bytes + rows * logit_bytes)
        if columns < WIDE_TILE and rows > WIDE_TILE:
            rows = min(rows, max(WIDE_TILE, _whole_tiles(-(-count // ROUNDINGS))))
            columns = left * row_bytes // (row_bytes + rows * logit_bytes)
        columns = columns // WIDE_TILE * WIDE_TILE or columns // LAST_TILE * LAST_TILE or LAST_TILE
        stop = min(start + columns, vocab)
        for chunk in ChunkPlan(rows, vocab).chunks(count):
            yield chunk, slice(start, stop)
        start = stop


def _whole_tiles(rows: int, down: bool = False) -> int:
    """Round rows to the products' tiles: chunks that end inside a tile are up to 10 % slower."""
    if rows < TILE_ROWS:
        return rows
    return (rows if down else rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def workspace(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory (rows, vocab). Rows start at multiples of 16 numbers, so cuBLAS and row kernels read vectors."""
    return torch.empty(rows, -(-vocab // 16) * 16, dtype=dtype, device=device)[:, :vocab]


_was_short: list[bool] = []


def fit_to_memory(plan: ChunkPlan, allocate: Callable[[ChunkPlan], Memory]) -> tuple[ChunkPlan, Memory]:
    """Return (plan, allocate(plan)), the rows of a chunk halved as often as the GPU lacks the memory for them.

    The first time, a warning says so: plans differ from batch to batch, and so would its text.

    Nothing is computed before the workspace is there, so the loss and its gradients stay right. The weight's gradient
    is rounded once for each chunk.

    Raises:
        torch.OutOfMemoryError: chunks of LEAST_ROWS don't fit either.
    """
    fits = plan
    while True:
        try:
            memory = allocate(fits)
        except torch.OutOfMemoryError:
            if fits.rows <= LEAST_ROWS:
                raise
        else:
            break
        # outside of the handler, where the error would keep what was allocated
        fits = fits._replace(rows=max(LEAST_ROWS, _whole_tiles(fits.rows // 2, down=True)))
    if fits != plan and not _was_short:
        _was_short.append(True)
        warnings.warn(
            f"The GPU's memory is short: the loss takes {fits.rows} rows at a time instead of {plan.rows}, which is "
            "slower. A smaller batch or workspace_mb would leave more room.",
            stacklevel=2,
        )
    return fits, memory


@dataclass(frozen=True)
class Execution:
    """How to compute a fused linear loss. It changes time, memory and the rounding of gradients, not the loss."""

    workspace_mb: float | None = None  # None: `workspace_bytes` decides, or `tile_plan` if logits are recomputed
    accumulate_dtype: torch.dtype | None = None  # dtype of the weight's gradient while chunks are added to it
    overwrite_hidden: bool = False
    frozen: bool = False  # the weight has no gradient, which each chunk would read and write

    def __post_init__(self):
        if self.accumulate_dtype not in (None, torch.float32):
            raise ValueError(f"accumulate_dtype must be None or torch.float32, got {self.accumulate_dtype}.")

    def sum_dtype(self, chunks: int) -> torch.dtype | None:
        """Return the dtype in which a weight's gradient sums so many chunks. None: the weight's own."""
        return torch.float32 if chunks > ROUNDINGS else self.accumulate_dtype

    def workspace_bytes(self, vocab: int) -> int:
        if self.workspace_mb is not None:
            return int(self.workspace_mb * 2**20)
        least = int(WORKSPACE_MB * 2**20)
        return min(max(least, BYTES_A_WORD * vocab), 2 * least)


class LogitChunk(NamedTuple):
    """A chunk of rows: its logits in the workspace, and where its values and gradient go."""

    rows: slice  # positions among the rows that take part
    operands: Operands  # the tensors that the logits are computed from
    logits: Tensor  # (n, V), raw, without bias
    bias: Tensor | None  # (V,)
    values: Tensor  # (fields, n), for the kernel to write
    dlogits: Tensor | None  # (n, V), for the kernel to write, possibly over the logits; None: not needed
    chunk_state: Any  # what the loss's own `chunk_state` returned


@dataclass(frozen=True)
class LinearLoss:
    """All inputs of a call that need no gradient. The first per-token value is the loss."""

    rows: Rows
    vocab: int
    how: Execution

    fields: ClassVar[Sequence[str]]
    keeps_values: ClassVar[bool] = False  # whether `recomputed` needs what `statistics` returned

    def chunk_state(self, rows: int) -> Any:
        """Return what `write_rows` needs besides the chunk, for chunks of at most `rows` rows.

        It lives for one walk over the chunks, so that a loss that waits for its backward holds no workspace.
        """
        return None

    def write_rows(self, chunk: LogitChunk) -> None:
        """Write the values of a chunk's rows and, if `dlogits` is there, their gradient."""
        raise NotImplementedError

    def weighted(self, factor: Tensor) -> Self:
        """Return this loss with each token's loss multiplied by factor (rows.count,)."""
        raise NotImplementedError

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored logits. dtype: of the products."""
        return dtype

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        """Return the workspace bytes per logit. Wider logits widen the workspace instead of shrinking the chunks."""
        return dtype.itemsize

    def plan(self, dtype: torch.dtype) -> ChunkPlan:
        return row_plan(self.rows.count, self.vocab, self.bytes_per_logit(dtype), self.how)

    def gradients(
        self, head: LinearHead, needs: NeededGradients, plan: ChunkPlan, alpha: float, factor: Tensor | None = None,
        rounded_in_place: bool = False,
    ) -> HeadGradients:  # fmt: skip
        """Return empty gradients for the chunks of `plan` to fill."""
        # With a factor the sum over all tokens may exceed fp16 until it is multiplied, so it stays in fp32.
        wide = self.how.sum_dtype(-(-self.rows.count // plan.rows)) if factor is None else torch.float32
        over = self.how.overwrite_hidden
        return HeadGradients(head, needs, self.rows, self.vocab, wide, over, alpha, factor, rounded_in_place)

    def new_values(self, head: LinearHead) -> Tensor:
        """Return memory for the per-token values (fields, rows.count).

        Where labelled rows are chosen, their number changes with each batch. The fields then lie a multiple of 16
        apart, or Triton would compile the row kernel again for the first number that is one.
        """
        count = self.rows.count
        apart = count if self.rows.index is None else -(-count // 16) * 16
        shape = len(self.fields), apart
        return torch.empty(shape, dtype=stats_dtype(head.dtype), device=head.hidden.device)[:, :count]

    def chunks(self, head: LinearHead, values: Tensor, gradients: HeadGradients | None) -> Iterator[LogitChunk]:
        """Yield each chunk for `write_rows`, then add the gradient that it wrote to `gradients`.

        A generator keeps the loop over chunks and the kernel's call visible in the caller.
        """
        dtype, columns = head.dtype, slice(0, self.vocab)
        operands = head.operands(self.rows, self.vocab).part(slice(None), columns)  # each weight is cast once
        if gradients is not None:
            gradients.write_over(operands)
        plan, (ws, chunk_state) = fit_to_memory(self.plan(dtype), lambda plan: self.memory(head, plan))
        grad_ws = ws.view(dtype)[:, : self.vocab]  # in place: wider logits leave it the front of each row
        for rows in plan.chunks(self.rows.count):
            part = operands.part(rows, columns)
            logits, dlogits = part.logits(ws), grad_ws[: rows.stop - rows.start]
            wanted = None if gradients is None else dlogits
            # Here the caller runs the row kernel, which writes the gradient over the logits.
            yield LogitChunk(rows, part, logits, part.bias, values[:, rows], wanted, chunk_state)
            if gradients is not None:
                gradients.add(dlogits, part, rows, columns)

    def memory(self, head: LinearHead, plan: ChunkPlan) -> tuple[Tensor, Any]:
        """Return (workspace, other side) for the chunks of a plan."""
        rows = min(plan.rows, self.rows.count)
        ws = workspace(rows, self.vocab, self.logits_dtype(head.dtype), head.hidden.device)
        return ws, self.chunk_state(rows)

    def statistics(self, head: LinearHead, needs: NeededGradients) -> Tensor:
        """Return per-token values (fields, rows.count), for a backward that recomputes and returns `needs`."""
        values = self.new_values(head)
        for chunk in self.chunks(head, values, None):
            self.write_rows(chunk)
        return values

    def recomputed(
        self, head: LinearHead, needs: NeededGradients, upstream: Tensor, largest: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the head's gradients. upstream (rows.count,), largest: see `upstream_rows`."""
        gradients, loss = self.gradients(head, needs, self.plan(head.dtype), 1.0, largest), self.weighted(upstream)
        for chunk in loss.chunks(head, loss.new_values(head), gradients):
            loss.write_rows(chunk)
        chunk = None  # as in GradientsInForward
        return gradients.finish()


class GradientsInForward(torch.autograd.Function):
    """Gradients computed in the forward; the backward multiplies them by the loss's gradient unless that is 1."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, needs: NeededGradients, reduction: str, dtype: torch.dtype, *tensors):
        head, rows, gradients = LinearHead(*tensors, dtype=dtype), loss.rows, None
        with torch.autocast(head.hidden.device.type, enabled=False):
            if needs.any:
                gradients = loss.gradients(head, needs, loss.plan(dtype), rows.alpha)
            values = loss.new_values(head)
            for chunk in loss.chunks(head, values, gradients):
                loss.write_rows(chunk)
            chunk = None  # free the workspace before `finish` allocates
            if gradients is not None:
                ctx.save_for_backward(*gradients.finish())
            per_token = scatter_rows(values.t(), rows, head.hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return values[0].sum() * rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return None, None, None, None, *rescale(ctx.saved_tensors, grad_loss)


class Recomputed(torch.autograd.Function):
    """Gradients from logits that the backward computes again."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, needs: NeededGradients, reduction: str, dtype: torch.dtype, *tensors):
        # the loss holds only its targets, no workspace
        ctx.loss, ctx.needs, ctx.reduction, ctx.dtype = loss, needs, reduction, dtype
        with torch.autocast(tensors[0].device.type, enabled=False):
            values = loss.statistics(LinearHead(*tensors, dtype=dtype), needs)
        ctx.save_for_backward(values if loss.keeps_values else None, *tensors)
        per_token = scatter_rows(values.t(), loss.rows, tensors[0].shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if reduction == "none" else values[0].sum() * loss.rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        values, *tensors = ctx.saved_tensors
        loss, rows = ctx.loss, ctx.loss.rows
        # (count,) or a scalar
        upstream = gather_rows(grad_loss, rows) if ctx.reduction == "none" else grad_loss * rows.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        with torch.autocast(tensors[0].device.type, enabled=False):
            gradients = loss.recomputed(LinearHead(*tensors, dtype=ctx.dtype), ctx.needs, upstream, largest, values)
        return None, None, None, None, *gradients


def upstream_rows(upstream: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return each row's upstream gradient (count,), and in fp16 the largest of them, which they are divided by.

    Most logits' gradients of a mean are below fp16's smallest number.
    """
    upstream = upstream.to(stats_dtype(dtype)).expand(count).contiguous()
    if dtype != torch.float16 or not count:
        return upstream, None
    largest = upstream.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # all may be 0, and 0 / 0 is NaN
    return upstream / largest, largest


def check_labels(hidden: Tensor, labels: Tensor | None, ce_weight: float = 0.0) -> None:
    check_label_dtype(labels)
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels must be one per row of hidden: labels is {tuple(labels.shape)}, hidden {tuple(hidden.shape)}."
        )
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight is {ce_weight}, but cross-entropy needs labels and none were given.")


def check_execution(
    hidden: Tensor, token_weight: Tensor | None, reduction: str, num_items, recompute: bool, overwrite_hidden: bool
) -> None:
    if token_weight is not None and token_weight.shape != hidden.shape[:1]:
        raise ValueError(
            f"token_weight must be one per row of hidden: "
            f"token_weight is {tuple(token_weight.shape)}, hidden {tuple(hidden.shape)}."
        )
    if reduction not in ("mean", "none"):
        raise ValueError(f'reduction must be "mean" or "none", got {reduction!r}. For a sum, give num_items=1.')
    if reduction == "none" and not recompute:
        raise ValueError('reduction="none" needs recompute=True: the forward cannot know each token\'s gradient.')
    if reduction == "none" and num_items is not None:
        raise ValueError('num_items is what reduction="mean" divides by; with reduction="none" it has no use.')
    if overwrite_hidden and hidden.is_leaf and hidden.requires_grad:
        raise ValueError("overwrite_hidden=True would overwrite a leaf: hidden must be the output of a layer.")
    if overwrite_hidden and recompute:
        raise ValueError("overwrite_hidden works without recompute: the backward computes logits from hidden again.")


# Under torch.compile a fused loss is one opaque op: what it does depends on how many labels are in use, so there is
# nothing to trace. It returns the loss, per-token values and the gradients of the head's tensors; its backward
# multiplies these by the gradient of the loss.

# The host waits for the number of labels, which a CUDA graph can't record: Inductor leaves the ops out of its graphs.
TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
SHARED_BY_BUILDERS = 4  # rows, how, head and labels: an opaque op makes these four from its own inputs


def check_traceable(rows: RowSelection | None, recompute: bool, overwrite_hidden: bool) -> None:
    """Raise ValueError for an option that must select the rows outside the op, or write to an input."""
    options = {"rows": rows is not None, "recompute": recompute, "overwrite_hidden": overwrite_hidden}
    for name in (name for name, wanted in options.items() if wanted):
        raise ValueError(f"{name} has no place under torch.compile: leave it out, or call the loss outside of it.")


class LossOp:
    """A fused loss, called in one of three ways: as it is, as an opaque op under torch.compile, or over ranks' shards.

    Args:
        name: of the opaque op, liger_trainer::<name>. Its schema holds the tensors and numbers that rows, how, head and
            labels are made from, then token_weight and `arguments` with the types that build annotates.
        build: makes the loss of a call from (rows, how, head, labels, token_weight, *arguments).
    """

    def __init__(self, name: str, build: Callable[..., LinearLoss]):
        self.build = build
        fields = len(inspect.signature(build).return_annotation.fields)

        def run(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, low_weight: Tensor | None,
            dtype: torch.dtype, needs: Sequence[bool], labels: Tensor | None, num_items: Tensor | None,
            ignore_index: int, workspace_mb: float | None, accumulate_dtype: torch.dtype | None, *arguments: Any,
        ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
            """Compute the loss and its gradients. `dtype`: of the products; autocast is off when this runs."""
            rows = selected_rows(hidden, labels, None, num_items, ignore_index)
            head = LinearHead(hidden, weight, bias, low, low_weight, dtype)
            loss = build(rows, Execution(workspace_mb, accumulate_dtype), head, labels, *arguments)
            saved = SavedGradients()
            value, per_token = GradientsInForward.forward(
                saved, loss, NeededGradients(*needs), "mean", dtype, *head.tensors
            )
            return _outputs(value, per_token, saved.gradients)  # pyright: ignore[reportReturnType]

        # torch reads the schema from it: run's, with build's own arguments at the end, of which *arguments says nothing
        *inputs, _ = inspect.signature(run).parameters.values()
        own = list(inspect.signature(build).parameters.values())[SHARED_BY_BUILDERS:]
        run.__signature__ = inspect.signature(run).replace(parameters=[*inputs, *own])
        self._opaque = torch.library.custom_op(f"liger_trainer::{name}", mutates_args=(), tags=TAGS)(run)
        self._opaque.register_fake(lambda *inputs: _fake_outputs(inputs, fields))
        self._opaque.register_autograd(_scaled_gradients, setup_context=_save_gradients)

    def __call__(
        self, head: LinearHead, labels: Tensor | None, token_weight: Tensor | None, arguments: Sequence[Any], *,
        rows: RowSelection | None, num_items: float | Tensor | None, ignore_index: int, reduction: str, recompute: bool,
        workspace_mb: float | None, accumulate_dtype: torch.dtype | None, overwrite_hidden: bool,
        parallel: VocabParallel | None = None, teacher: LinearHead | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (loss, per-token values (fields, N)). teacher: whose logits a shard computes, too."""
        if parallel is None and torch.compiler.is_compiling():
            check_traceable(rows, recompute, overwrite_hidden)
            value, per_token, *_ = self._opaque(
                *head.tensors, head.dtype, list(NeededGradients.of(*head.tensors)), labels,
                None if num_items is None else torch.as_tensor(num_items), ignore_index, workspace_mb, accumulate_dtype,
                token_weight, *arguments,
            )  # fmt: skip
            return value, per_token.detach()  # an output of the op, of which only the loss has a gradient
        selected = selected_rows(head.hidden, labels, rows, num_items, ignore_index)
        how = Execution(workspace_mb, accumulate_dtype, overwrite_hidden, not head.weight.requires_grad)
        if parallel is not None:
            sides = [head] if teacher is None else [head, teacher]
            call = selected, labels, token_weight, arguments, how, reduction, recompute
            return parallel.run(self.build, sides, *call)
        loss = self.build(selected, how, head, labels, token_weight, *arguments)
        function = Recomputed if recompute else GradientsInForward
        return function.apply(loss, NeededGradients.of(*head.tensors), reduction, head.dtype, *head.tensors)


class SavedGradients:
    """Autograd's context for a forward that runs outside of a graph."""

    gradients: tuple[Tensor | None, ...] = (None,) * 5

    def save_for_backward(self, *gradients: Tensor | None) -> None:
        self.gradients = gradients

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


def _outputs(loss: Tensor, per_token: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the outputs of the opaque op: contiguous, with an empty tensor for None."""
    return loss, per_token.contiguous(), *(per_token.new_empty(0) if x is None else x.contiguous() for x in gradients)


def _fake_outputs(inputs: Sequence, fields: int) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of `_outputs`. inputs: `LinearHead.tensors`, dtype, needs, ..."""
    head, (dtype, needs) = inputs[:5], inputs[5:7]
    hidden, stats = head[0], stats_dtype(dtype)
    loss, per_token = hidden.new_empty((), dtype=stats), hidden.new_empty((fields, hidden.shape[0]), dtype=stats)
    gradients = (
        x.new_empty(x.shape) if needed and x is not None else per_token.new_empty(0)
        for x, needed in zip(head, needs, strict=True)
    )
    return loss, per_token, *gradients


def _save_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.inputs = len(inputs)


@first_order
def _scaled_gradients(ctx, grad_loss: Tensor, *_) -> tuple[Tensor | None, ...]:
    """Run the backward of an opaque op whose first inputs are `LinearHead.tensors`."""
    gradients = [x * grad_loss if x.dim() and x.shape[0] else None for x in ctx.saved_tensors]
    return *gradients, *[None] * (ctx.inputs - len(gradients))
