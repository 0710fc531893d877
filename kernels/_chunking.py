"""What the fused linear losses share: which rows count, how many at a time, and what becomes of their gradients.

The losses walk over the labelled rows in chunks (_fused_linear.py). The logits of a chunk live in one reused workspace;
a row kernel turns them into their own gradient in place; two matrix products then carry that gradient to the hidden
states and to the weight (_head.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import graph_is_kept
from ._labelled_rows import HostCopy, Rows, RowSelection
from ._triton import Launch, remembered, tl, triton, use_triton

WORKSPACE_MB = 512  # measured on an H100: docs/results/losses.md. Halving it costs about 5 % of time.
ROUNDINGS = 16  # of a sum in the weight's dtype: more chunks than this have an error of twice that of one product
BYTES_A_WORD = 4096  # of a larger workspace for a larger vocabulary, up to twice as much: 2,048 rows of bf16 logits
TILE_ROWS = 256
LAUNCH_BYTES = 3e8  # what an H100 moves while the host launches the work of a tile
CHUNK_ROWS = (256, 512, 1024, 2048, 4096, 8192)  # to choose from where logits are recomputed


def all_rows(hidden: Tensor, num_items: float | Tensor | None) -> Rows:
    """Every row of hidden, for a loss without labels."""
    if isinstance(num_items, Tensor):
        num_items = HostCopy(num_items).get().item()
    return Rows(None, hidden.shape[0], max(hidden.shape[0], 1) if num_items is None else num_items)


def selected_rows(
    hidden: Tensor, labels: Tensor | None, rows: RowSelection | None, num_items, ignore_index: int
) -> Rows:
    """The rows of hidden that take part: all without labels, else the labelled ones."""
    if rows is not None and num_items is not None:
        raise ValueError("num_items was given twice: rows already holds it. Give it to RowSelection alone.")
    if rows is not None:
        return rows.wait()
    return all_rows(hidden, num_items) if labels is None else RowSelection(labels, num_items, ignore_index).wait()


def labelled_weight(token_weight: Tensor | None, rows: Rows, dtype: torch.dtype) -> Tensor | None:
    """(rows.count,) in the dtype of the row kernels' sums."""
    if token_weight is None:
        return None
    return take(token_weight.detach(), rows).to(stats_dtype(dtype)).contiguous()


def upstream_rows(upstream: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(count,) gradients of each row's loss, and in fp16 the largest of them, by which they are divided.

    fp16's smallest number is above most logits' gradients of a mean.
    """
    upstream = upstream.to(stats_dtype(dtype)).expand(count).contiguous()
    if dtype != torch.float16 or not count:
        return upstream, None
    largest = upstream.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return upstream / largest, largest


def take(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.index is None else x.index_select(0, rows.index)


def put(x: Tensor, rows: Rows, total: int) -> Tensor:
    """Rows of x at their places among `total` rows, zero elsewhere."""
    if rows.index is None:
        return x
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows.index, x)


class Plan(NamedTuple):
    """Rows of a chunk, and columns of a tile of the vocabulary, whose logits are in the workspace at a time."""

    rows: int
    columns: int

    def chunks(self, count: int) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows))

    def tiles(self, vocab: int) -> Iterator[slice]:
        return (slice(start, min(start + self.columns, vocab)) for start in range(0, vocab, self.columns))


def row_plan(count: int, vocab: int, bytes_per_logit: int, how: "Execution") -> Plan:
    """Chunks of whole rows of equal size, as large as the workspace allows.

    Each chunk reads and writes the weight's gradient once, so few and large chunks approach the speed of the bare
    matrix products; a rule by V / H alone (Liger-Kernel's) gives small models chunks that are bound by that traffic.
    """
    limit = _whole_tiles(max(1, how.workspace_bytes(vocab) // (vocab * bytes_per_logit)), down=True)
    chunks = max(1, -(-count // limit))
    return Plan(max(1, min(limit, _whole_tiles(-(-count // chunks)))), vocab)


def tile_plan(count: int, vocab: int, hidden_size: int, itemsize: int, needs: "Needs", how: "Execution") -> Plan:
    """The chunks and tiles that cost least within the workspace, where logits are computed twice.

    A chunk reads the weight three times, and reads and writes its gradient; a tile reads and writes an fp32 sum of the
    hidden states' gradient, which lies in the workspace too, and costs the host its launches. Default workspace: a bit
    less than the size of the hidden states, the rest is for what else is held for each row.
    """
    budget = max(16, 0.97 * count * hidden_size * itemsize / 2**20) * 2**20
    budget = int(budget if how.workspace_mb is None else how.workspace_bytes(vocab))
    plans = []
    for rows in CHUNK_ROWS:
        left = budget - 4 * rows * hidden_size * needs.hidden
        columns = _whole_tiles(max(left, 0) // (rows * itemsize), down=True)
        if columns >= TILE_ROWS:
            columns = min(columns, vocab)
            moved = (6 + 4 * needs.weight) / rows + 8 * needs.hidden / columns  # bytes for each count * vocab * hidden
            plans.append((moved + LAUNCH_BYTES / (rows * columns * hidden_size), Plan(rows, columns)))
    return min(plans)[1] if plans else Plan(TILE_ROWS, min(TILE_ROWS, vocab))


def _whole_tiles(rows: int, down: bool = False) -> int:
    """Rows rounded to the products' tiles: chunks that end inside one are up to 10 % slower."""
    if rows < TILE_ROWS:
        return rows
    return (rows if down else rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def workspace(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows, vocab). Rows start at multiples of 16 numbers: cuBLAS and the row kernels then read them by vectors."""
    return torch.empty(rows, -(-vocab // 16) * 16, dtype=dtype, device=device)[:, :vocab]


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Needs(NamedTuple):
    """Which gradients a call must produce, in the order of `LinearHead.tensors`."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool = False
    low_weight: bool = False

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "Needs":
        enabled = torch.is_grad_enabled()
        return cls(*(t is not None and enabled and t.requires_grad for t in tensors))

    @property
    def any(self) -> bool:
        return any(self)


@dataclass(frozen=True)
class Execution:
    """How a fused linear loss is computed, which changes time and memory, and the rounding of its gradients."""

    workspace_mb: float | None = None  # None: see workspace_bytes, or `tile_plan` where logits are recomputed
    accumulate_dtype: torch.dtype | None = None  # of the weight's gradient while chunks are added to it
    overwrite_hidden: bool = False

    def __post_init__(self):
        if self.accumulate_dtype not in (None, torch.float32):
            raise ValueError(f"accumulate_dtype must be None or torch.float32, got {self.accumulate_dtype}.")

    def sum_dtype(self, chunks: int) -> torch.dtype | None:
        """What the gradient of a weight is widened to while so many chunks are added to it."""
        return torch.float32 if chunks > ROUNDINGS else self.accumulate_dtype

    def workspace_bytes(self, vocab: int) -> int:
        if self.workspace_mb is not None:
            return int(self.workspace_mb * 2**20)
        least = int(WORKSPACE_MB * 2**20)
        return min(max(least, BYTES_A_WORD * vocab), 2 * least)


RESCALED = 2**16  # numbers a program: most often it finds out that there is nothing to do, and even that takes time


@triton.jit
def _rescale_kernel(x_ptr, factor_ptr, columns, stride_row, stride_column, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        program, spans = tl.program_id(0).to(tl.int64), tl.cdiv(columns, SPAN)
        first = program % spans * SPAN
        for start in range(0, SPAN, BLOCK):
            cols = first + start + tl.arange(0, BLOCK)
            at = program // spans * stride_row + cols * stride_column
            x = tl.load(x_ptr + at, mask=cols < columns)
            tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype), mask=cols < columns)


@remembered
def _rescale_launch(rows: int, columns: int, strides: tuple[int, int], span: int) -> Launch:
    grid = (rows * -(-columns // span),)
    return Launch(_rescale_kernel, grid, columns, *strides, SPAN=span, BLOCK=4096, num_warps=8)


def rescale(gradients: Sequence[Tensor | None], factor: Tensor) -> Sequence[Tensor | None]:
    """In a backward: the gradients times that of the loss itself, `factor`, a scalar on their device.

    In place. Where the factor is 1 (a loss used as it is), a kernel finds out there and leaves, so nothing is moved and
    the host does not wait. A graph kept for another backward keeps its gradients too, and hands out copies.
    """
    if graph_is_kept():
        gradients = [None if x is None else x.clone() for x in gradients]
    multiply_(gradients, factor)
    return gradients


def multiply_(tensors: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply (n,) or (n, m) in place by a scalar on their device; where it is 1, nothing is moved."""
    for x in tensors:
        if x is None or not x.numel():
            continue
        if use_triton(x):
            shape, strides = ((1, x.numel()), (0, 1)) if x.is_contiguous() else (x.shape, x.stride())
            _rescale_launch(*shape, strides, RESCALED)(x, factor)
        elif factor.item() != 1.0:
            x.mul_(factor.item())


def check_labels(hidden: Tensor, labels: Tensor | None, ce_weight: float = 0.0) -> None:
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
