"""Find the rows of a batch that have a label on the device, and count them on the host without waiting for the queue.

A loss drops the other rows before its products, so the host must know how many remain. If the count starts before the
backbone runs, it arrives long before the loss asks for it.

Method    one program walks over the labels and writes the positions of the labelled ones, in order. One launch replaces
          a dozen: the host's time is all that this costs
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._autograd import stats_dtype
from ._collectives import all_gather
from ._triton import Launch, remembered, tl, triton, use_triton

BLOCK = 4096


class HostCopy:
    """A small tensor on its way to the host. `get` waits for the copy, not for the work queued after it."""

    def __init__(self, value: Tensor):
        self._event = None
        self._value = value.detach()
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))  # the copy's stream, on any device

    def get(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value


def token_count(keep: Tensor, num_items: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what a sum over the tokens in `keep` (N,) is divided by, on their device: num_items, or their count.

    It is 1 if it would be 0 and there is no token, so that the loss is 0 and not NaN. With tokens, num_items = 0 gives
    inf, as in torch, since only the device knows. `full` fills in a number there: a copy would wait for the device.
    """
    if num_items is None:
        return keep.sum(dtype=dtype).clamp(min=1)
    if isinstance(num_items, Tensor):
        total = num_items.to(keep.device, dtype).reshape(())
    else:
        total = torch.full((), num_items, dtype=dtype, device=keep.device)
        if num_items:
            return total
    return total.where((total != 0) | keep.any(), 1)


@dataclass(frozen=True)
class Rows:
    """The labelled rows of a batch, as the host knows them.

    Raises:
        ValueError: num_items isn't positive, but there are rows: their sum can't be divided by 0.
    """

    index: Tensor | None  # (count,) int64 on the device; None when every row counts
    count: int
    num_items: float  # what the summed loss is divided by
    of_ranks: list[tuple[float, float]] | None = None  # (count, alpha) of each rank, if `share` has asked for them

    def __post_init__(self):
        if self.count and not self.num_items > 0:
            raise ValueError(
                f"num_items must be positive, got {self.num_items} for {self.count} rows that take part in the loss. "
                "Count the labels that are in use, over all micro-batches and processes, or leave num_items out."
            )

    @property
    def alpha(self) -> float:
        """Return the factor of the summed loss."""
        return 1.0 / self.num_items if self.num_items else 0.0


class RowSelection:
    """The labelled rows, on their way to the host.

    Start it before the backbone and give it to a loss as `rows`. Without one, a loss starts its own, and the host then
    waits once for the work queued so far.

    Args:
        labels: any shape, int64.
        num_items: what the summed loss is divided by; a tensor travels along with the count.
        ignore_index: the label of rows that take no part.
    """

    def __init__(self, labels: Tensor, num_items: float | Tensor | None = None, ignore_index: int = -100):
        self._total = labels.numel()
        if isinstance(num_items, Tensor) and num_items.is_cpu and not labels.is_cpu:
            num_items = num_items.item()  # the host has it: a copy to the device would wait for the queue
        self._num_items = num_items
        find = _find_triton if use_triton(labels) else _find_torch
        on_device = num_items.to(labels.device) if isinstance(num_items, Tensor) else None
        self._index, self._on_device = find(labels.reshape(-1), on_device, ignore_index)
        self._counts, self._of_ranks = HostCopy(self._on_device), None

    @property
    def device(self) -> torch.device:
        return self._on_device.device

    def share(self, group: Any) -> None:
        """Start the exchange of the ranks' counts, for a head that is sharded over them; see _vocab_parallel.py.

        All ranks of the group must call it. Without it, the loss exchanges them, and the host waits.
        """
        count, total = self._on_device.unbind()
        if not isinstance(self._num_items, Tensor):
            total = count if self._num_items is None else torch.full_like(count, self._num_items)
        alpha = total.reciprocal().where(total != 0, 0)
        self._of_ranks = HostCopy(counts_of_ranks(torch.stack([count, alpha]), group))

    def wait(self) -> Rows:
        count, total = self._counts.get().tolist()
        count = int(count)
        num_items = total if isinstance(self._num_items, Tensor) else self._num_items
        index = None if count == self._total else self._index[:count]
        of_ranks = None if self._of_ranks is None else [(a, b) for a, b in self._of_ranks.get().tolist()]
        return Rows(index, count, max(count, 1) if num_items is None else num_items, of_ranks)


def counts_of_ranks(mine: Tensor, group: Any) -> Tensor:
    """Return (ranks, 2) from each rank's (count, alpha) in fp64."""
    of_ranks = mine.new_empty(2 * dist.get_world_size(group))
    all_gather(of_ranks, mine, group=group)
    return of_ranks.view(-1, 2)


def _find_torch(labels: Tensor, num_items: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return (positions of labelled rows at the front, [count, num_items] in fp64). Sizes don't depend on the count."""
    valid = labels != ignore_index
    position = torch.where(valid, valid.cumsum(0) - 1, valid.numel())
    index = torch.zeros(valid.numel() + 1, dtype=torch.int64, device=valid.device)
    index.scatter_(0, position, torch.arange(valid.numel(), device=valid.device))
    count = valid.sum(dtype=torch.float64)
    return index, torch.stack([count, count if num_items is None else num_items.reshape(()).double()])


@triton.jit
def _find_kernel(
    labels_ptr, num_items_ptr, index_ptr, counts_ptr, n, ignore_index, HAS_NUM_ITEMS: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    count = tl.program_id(0) * 0
    for start in range(0, n, BLOCK):
        at = start + lanes
        valid = (tl.load(labels_ptr + at, mask=at < n, other=0) != ignore_index) & (at < n)
        one = valid.to(tl.int32)
        tl.store(index_ptr + count + tl.cumsum(one, 0) - 1, at.to(tl.int64), mask=valid)
        count += tl.sum(one, 0)
    tl.store(counts_ptr, count.to(tl.float64))
    if HAS_NUM_ITEMS:
        tl.store(counts_ptr + 1, tl.load(num_items_ptr).to(tl.float64))


@remembered
def _launch(n: int, ignore_index: int, has_num_items: bool) -> Launch:
    return Launch(_find_kernel, (1,), n, ignore_index, HAS_NUM_ITEMS=has_num_items, BLOCK=BLOCK, num_warps=8)


def _find_triton(labels: Tensor, num_items: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    index = torch.empty(labels.shape, dtype=torch.int64, device=labels.device)
    counts = torch.empty(2, dtype=torch.float64, device=labels.device)
    launch = _launch(labels.numel(), ignore_index, num_items is not None)
    if not launch(labels.contiguous(), num_items, index, counts, has_twin=True):
        return _find_torch(labels, num_items, ignore_index)
    return index, counts


def all_rows(hidden: Tensor, num_items: float | Tensor | None) -> Rows:
    """Return every row of hidden, for a loss without labels."""
    if isinstance(num_items, Tensor):
        num_items = HostCopy(num_items).get().item()
    return Rows(None, hidden.shape[0], max(hidden.shape[0], 1) if num_items is None else num_items)


def selected_rows(
    hidden: Tensor, labels: Tensor | None, rows: RowSelection | None, num_items, ignore_index: int
) -> Rows:
    """Return the rows of hidden that take part: the labelled ones, or all without labels."""
    if rows is not None and num_items is not None:
        raise ValueError("num_items was given twice: rows already holds it. Give it to RowSelection alone.")
    if rows is not None:
        return rows.wait()
    return all_rows(hidden, num_items) if labels is None else RowSelection(labels, num_items, ignore_index).wait()


def labelled_weight(token_weight: Tensor | None, rows: Rows, dtype: torch.dtype) -> Tensor | None:
    """Return the weights (rows.count,) of the labelled rows, in the dtype of the row kernels' sums."""
    if token_weight is None:
        return None
    return take(token_weight.detach(), rows).to(stats_dtype(dtype)).contiguous()


def take(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.index is None else x.index_select(0, rows.index)


def put(x: Tensor, rows: Rows, total: int) -> Tensor:
    """Place the rows of x among `total` rows, zero elsewhere."""
    if rows.index is None:
        return x
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows.index, x)
