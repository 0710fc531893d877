"""What the fused linear losses share: which rows count, how many at a time, and the gradients of the head.

Both losses walk over the labelled rows in chunks. A chunk's logits live in one reused workspace; a row kernel turns
them into their own gradient in place; two matrix products then carry that gradient to the hidden states and to the
weight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._triton import tl, triton, use_triton

WORKSPACE_MB = 512  # measured on an H100: docs/results/losses.md. Halving it costs about 5 % of time.
TILE_ROWS = 256


class HostCopy:
    """A device scalar on its way to the host. `get` waits for the copy, not for the work queued after it."""

    def __init__(self, value: Tensor):
        self._event = None
        self._value = value.detach()
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value.detach().reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


@dataclass(frozen=True)
class Rows:
    """The labelled rows of a batch, known to the host."""

    index: Tensor | None  # (count,) int64 on the device; None when every row counts
    count: int
    num_items: float  # what the summed loss is divided by


class RowSelection:
    """Finds the labelled rows on the device, and lets the host know how many without waiting for the queue.

    Started before the backbone runs, the count has arrived long before the loss asks for it. The losses start one
    themselves when given none; the host then waits for the work queued so far, once.
    """

    def __init__(self, labels: Tensor, num_items: float | Tensor | None = None, ignore_index: int = -100):
        valid = labels.reshape(-1) != ignore_index
        self._total = valid.numel()
        self._index = _first_true(valid)
        self._count = HostCopy(valid.sum())
        self._num_items = HostCopy(num_items) if isinstance(num_items, Tensor) else num_items

    def wait(self) -> Rows:
        count = int(self._count.get())
        num_items = self._num_items.get() if isinstance(self._num_items, HostCopy) else self._num_items
        index = None if count == self._total else self._index[:count]
        return Rows(index, count, max(count, 1) if num_items is None else num_items)


def _first_true(valid: Tensor) -> Tensor:
    """Positions of the true entries, in order, in the front of a tensor of full length: no size the host must know."""
    position = torch.where(valid, valid.cumsum(0) - 1, valid.numel())
    index = torch.zeros(valid.numel() + 1, dtype=torch.int64, device=valid.device)
    return index.scatter_(0, position, torch.arange(valid.numel(), device=valid.device))


def all_rows(hidden: Tensor, num_items: float | Tensor | None) -> Rows:
    """Every row of hidden, for a loss without labels."""
    if isinstance(num_items, Tensor):
        num_items = HostCopy(num_items).get()
    return Rows(None, hidden.shape[0], max(hidden.shape[0], 1) if num_items is None else num_items)


def take(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.index is None else x.index_select(0, rows.index)


def put(x: Tensor, rows: Rows, total: int) -> Tensor:
    """Rows of x at their places among `total` rows, zero elsewhere."""
    if rows.index is None:
        return x
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows.index, x)


def chunk_bounds(count: int, bytes_per_row: int, workspace_mb: float) -> Iterator[tuple[int, int]]:
    """Chunks of equal size, as large as the workspace allows.

    Each chunk reads and writes the weight's gradient once, so few and large chunks approach the speed of the bare
    matrix products; a rule by V / H alone (Liger-Kernel's) gives small models chunks that are bound by that traffic.
    """
    limit = _whole_tiles(max(1, int(workspace_mb * 2**20) // bytes_per_row), down=True)
    chunks = -(-count // limit)
    rows = min(limit, _whole_tiles(-(-count // chunks))) if chunks else 0
    for start in range(0, count, max(rows, 1)):
        yield start, min(start + rows, count)


def _whole_tiles(rows: int, down: bool = False) -> int:
    """Rows rounded to the products' tiles: chunks that end inside one are up to 10 % slower."""
    if rows < TILE_ROWS:
        return rows
    return (rows if down else rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def workspace(bounds: list[tuple[int, int]], vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows of the largest chunk, vocab). Rows start at multiples of 16 bytes, which cuBLAS wants for full speed."""
    rows = max((stop - start for start, stop in bounds), default=0)
    return torch.empty(rows, -(-vocab // 8) * 8, dtype=dtype, device=device)[:, :vocab]


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on, else what hidden and weight promote to."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Needs:
    """Which gradients a call must produce."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Needs":
        enabled = torch.is_grad_enabled()
        wanted = (t is not None and enabled and t.requires_grad for t in (hidden, weight, bias))
        return cls(*wanted)

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


class HeadGradients:
    """d loss / d (hidden, weight, bias), built chunk by chunk from d loss / d logits.

    The factor 1 / num_items is the products' alpha, applied to their fp32 accumulators: folding it into the
    low-precision logits' gradient would round every entry once more, and a pass of its own would move the whole weight
    gradient again.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, rows: Rows, vocab: int):
        self._alpha = 1.0 / rows.num_items if rows.num_items else 0.0
        self._first = True
        self.hidden = torch.empty(rows.count, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        self.weight = self.bias = None
        if not needs.hidden:
            self.hidden = None
        if needs.weight:
            whole = vocab == weight.shape[0] and rows.count > 0
            self.weight = (torch.empty_like if whole else torch.zeros_like)(
                weight, memory_format=torch.contiguous_format
            )
        if needs.bias:
            assert bias is not None
            self.bias = torch.zeros(bias.shape[0], dtype=stats_dtype(bias.dtype), device=bias.device)

    def add(self, dlogits: Tensor, x: Tensor, w: Tensor, start: int, stop: int) -> None:
        """dlogits: (n, vocab); x: (n, H) and w: (vocab, H) in dlogits' dtype; start, stop: the chunk's rows."""
        if self.hidden is not None:
            addmm_into(self.hidden[start:stop], dlogits, w, beta=0, alpha=self._alpha)
        if self.weight is not None:
            addmm_into(self.weight[: w.shape[0]], dlogits.t(), x, beta=0 if self._first else 1, alpha=self._alpha)
        if self.bias is not None:
            self.bias[: w.shape[0]].add_(dlogits.sum(0, dtype=self.bias.dtype), alpha=self._alpha)
        self._first = False

    def finish(self, rows: Rows, total: int, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(total, H), (V, H) and (V,), each in its input's dtype, None where not needed."""
        hidden = None if self.hidden is None else put(self.hidden, rows, total)
        dbias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return hidden, self.weight, dbias


def addmm_into(out: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
    """out = beta * out + alpha * a @ b. A wider out (fp32 under bf16 products) accumulates in its own precision."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    else:
        out.mul_(beta) if beta else out.zero_()
        out.add_(a @ b, alpha=alpha)


def project(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """x @ w.T into out, which may be fp32 where x and w are narrower."""
    if out.dtype == x.dtype:
        return torch.mm(x, w.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), w.t().to(out.dtype), out=out)


@triton.jit
def _rescale_kernel(x_ptr, numel, factor_ptr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < numel)
        tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < numel)


def rescale(gradients: Sequence[Tensor | None], factor: Tensor) -> Sequence[Tensor | None]:
    """In a backward: the gradients times that of the loss itself, `factor`, a scalar on their device.

    In place. Where the factor is 1 (a loss used as it is), a kernel finds out there and leaves, so nothing is moved and
    the host does not wait. A graph kept for another backward keeps its gradients too, and hands out copies.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The fused losses have no second derivatives: use backward or grad without create_graph=True."
        )
    if torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        gradients = [None if x is None else x.clone() for x in gradients]
    for x in gradients:
        if x is None or not x.numel():
            continue
        if use_triton(x):
            grid = (triton.cdiv(x.numel(), 4096),)
            _rescale_kernel[grid](x, x.numel(), factor, BLOCK=4096, num_warps=8)
        elif factor.item() != 1.0:
            x.mul_(factor.item())
    return gradients
