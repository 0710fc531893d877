"""Choose how many rows and columns of the vocabulary a fused loss holds logits for at a time.

One workspace is reused for every chunk of rows; _fused_linear.py walks over the chunks.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ._autograd import Needs

WORKSPACE_MB = 512  # measured on an H100: docs/results/losses.md. Halving it costs about 5 % of time.
ROUNDINGS = 16  # more chunks than this, summed in the weight's dtype, have twice the error of a single product
BYTES_A_WORD = 4096  # workspace per word of the vocabulary (see `workspace_bytes`): 2,048 rows of bf16 logits
TILE_ROWS = 256
WIDE_TILE, LAST_TILE = 2048, 1024  # see `tiles_beside_gradient`; multiples fill the products' last wave on an H100
LAUNCH_BYTES = 3e8  # bytes that an H100 moves while the host launches the kernels of one tile
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
    products. Liger-Kernel's rule uses V / H alone: it gives small models chunks whose time goes into that traffic.
    By default a batch that would fill more than half of WORKSPACE_MB by itself is cut in two: one chunk would save
    little time, and as little memory as stored logits.
    """
    limit = _whole_tiles(max(1, how.workspace_bytes(vocab) // (vocab * bytes_per_logit)), down=True)
    chunks = max(1, -(-count // limit))
    if chunks == 1 and how.workspace_mb is None and count * vocab * bytes_per_logit > WORKSPACE_MB * 2**19:
        chunks = 2
    return ChunkPlan(max(1, min(limit, _whole_tiles(-(-count // chunks)))), vocab)


def tile_plan(
    count: int, vocab: int, hidden_size: int, itemsize: int, needs: "Needs", how: "Execution", spare: int = 0
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
    for rows in CHUNK_ROWS:
        left = budget - 4 * rows * hidden_size * needs.hidden
        columns = _whole_tiles(max(left, 0) // (rows * itemsize), down=True)
        if columns >= TILE_ROWS:
            columns = min(columns, vocab)
            moved = (6 + 4 * needs.weight) / rows + 8 * needs.hidden / columns  # bytes for each count * vocab * hidden
            plans.append((moved + LAUNCH_BYTES / (rows * columns * hidden_size), ChunkPlan(rows, columns)))
    return min(plans)[1] if plans else ChunkPlan(TILE_ROWS, min(TILE_ROWS, vocab))


def tiles_beside_gradient(count: int, vocab: int, logit_bytes: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
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


def fitted(plan: ChunkPlan, allocate: Callable[[ChunkPlan], Memory]) -> tuple[ChunkPlan, Memory]:
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
