"""The linear head of the fused losses: which rows take part, the products by chunks of rows and tiles of the
vocabulary, and their gradients.

    logits = hidden @ weight.T + bias + low @ low_weight.T,  low = sum_i scaling_i dropout_i(hidden) @ a_i.T

Rows      A loss drops rows without a label before its products, so the host must know how many remain. It counts them
          without waiting for the queue: if the count starts before the backbone runs, it arrives long before the loss
          asks for it. One program walks over the labels and writes the positions of the labelled ones, in order; a
          dozen operations of torch would cost the host more time.
Adapters  The low-rank terms of all adapters form one product: their a_i are stacked in rows, their b_i in columns of
          low_weight. Plain torch makes low, so autograd carries its gradient on to every a_i, to hidden, and through
          the dropout. Only a second product with few columns meets the vocabulary.
Source    LoRA: Hu et al. 2021, arXiv:2106.09685
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import NeededGradients, check_dtypes, multiply_, stats_dtype
from ._ranks import counts_of_ranks
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

BLOCK, WARPS = SHAPES.LABELLED_ROWS


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
        # both write to the device; `wait` reads what they found
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
        alpha = total.reciprocal().where(total != 0, 0)  # 1 / num_items: the rank's factor of its summed loss
        self._of_ranks = HostCopy(counts_of_ranks(torch.stack([count, alpha]), group))

    def wait(self) -> Rows:
        count, total = self._counts.get().tolist()
        count = int(count)
        num_items = total if isinstance(self._num_items, Tensor) else self._num_items
        # None: every row has a label, and nothing is gathered
        index = None if count == self._total else self._index[:count]
        of_ranks = None if self._of_ranks is None else [(a, b) for a, b in self._of_ranks.get().tolist()]
        return Rows(index, count, max(count, 1) if num_items is None else num_items, of_ranks)


def _find_torch(labels: Tensor, num_items: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return (positions of labelled rows at the front, [count, num_items] in fp64). Sizes don't depend on the count."""
    valid = labels != ignore_index  # (n,)
    # the others go to the last place, which is cut off
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
    count = tl.program_id(0) * 0  # a tensor and no constant, so that the loop may change it
    for start in range(0, n, BLOCK):
        at = start + lanes
        valid = (tl.load(labels_ptr + at, mask=at < n, other=0) != ignore_index) & (at < n)
        one = valid.to(tl.int32)  # cumsum needs a number
        tl.store(index_ptr + count + tl.cumsum(one, 0) - 1, at.to(tl.int64), mask=valid)
        count += tl.sum(one, 0)  # of all blocks so far: where the next block writes
    tl.store(counts_ptr, count.to(tl.float64))
    if HAS_NUM_ITEMS:
        tl.store(counts_ptr + 1, tl.load(num_items_ptr).to(tl.float64))


@remembered
def _launch(n: int, ignore_index: int, has_num_items: bool) -> Launch:
    return Launch(_find_kernel, (1,), n, ignore_index, HAS_NUM_ITEMS=has_num_items, BLOCK=BLOCK, num_warps=WARPS)


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
        raise ValueError("num_items was given twice: rows already holds it. Give it only to RowSelection.")
    if rows is not None:
        return rows.wait()
    return all_rows(hidden, num_items) if labels is None else RowSelection(labels, num_items, ignore_index).wait()


def labelled_weight(token_weight: Tensor | None, rows: Rows, dtype: torch.dtype) -> Tensor | None:
    """Return the weights (rows.count,) of the labelled rows, in the dtype of the row kernels' sums."""
    if token_weight is None:
        return None
    return gather_rows(token_weight.detach(), rows).to(stats_dtype(dtype)).contiguous()


def gather_rows(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.index is None else x.index_select(0, rows.index)


def scatter_rows(x: Tensor, rows: Rows, total: int) -> Tensor:
    """Place the rows of x among `total` rows, zero elsewhere."""
    if rows.index is None:
        return x
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows.index, x)


class Lora(NamedTuple):
    """A low-rank addition to a head's weight: logits += scaling * dropout(hidden) @ a.T @ b.T."""

    a: Tensor  # (r, H)
    b: Tensor  # (V, r)
    scaling: float = 1.0
    dropout: float = 0.0  # probability; 0 outside of training


Adapters = Lora | Sequence[Lora] | None


def adapters_of(lora: Adapters) -> Sequence[Lora]:
    if lora is None:
        return ()
    return (lora,) if isinstance(lora, Lora) else lora


def low_rank(hidden: Tensor, lora: Adapters, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return (low (N, R), low_weight (V, R)), R the sum of the ranks. low is in `dtype`, low_weight as stored."""
    adapters = adapters_of(lora)
    if not adapters:
        return None, None
    low = []  # (N, r_i) each, rounded once
    for a, _, scaling, dropout in adapters:
        x = (F.dropout(hidden, dropout) if dropout else hidden).to(dtype)
        low.append(torch.addmm(x.new_zeros(()), x, a.to(dtype).t(), beta=0, alpha=scaling))
    if len(adapters) == 1:
        return low[0], adapters[0].b
    return torch.cat(low, 1), torch.cat([adapter.b for adapter in adapters], 1)


def linear_reference(hidden: Tensor, weight: Tensor, lora: Adapters = None) -> Tensor:
    """Return logits (N, V) without bias in plain torch, adapter by adapter."""
    logits = F.linear(hidden, weight)
    for a, b, scaling, dropout in adapters_of(lora):
        x = F.dropout(hidden, dropout) if dropout else hidden
        logits = logits + F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) * scaling
    return logits


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on, else hidden's and weight's promoted."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


@dataclass(frozen=True)
class LinearHead:
    """The inputs of one side's logits, in the order of their gradients, and the dtype of the products."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    low: Tensor | None  # (N, R)
    low_weight: Tensor | None  # (V, R)
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: Adapters = None) -> "LinearHead":
        dtype = compute_dtype(hidden, weight)
        return cls(hidden, weight, bias, *low_rank(hidden, lora, dtype), dtype)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias, self.low, self.low_weight

    def detached(self) -> "LinearHead":
        bias, low, low_weight = (None if x is None else x.detach() for x in self.tensors[2:])
        return LinearHead(self.hidden.detach(), self.weight.detach(), bias, low, low_weight, self.dtype)

    def operands(self, rows: Rows, vocab: int) -> "Operands":
        """Return the rows that take part, in the products' dtype, and the first `vocab` words in their own."""
        terms = [(gather_rows(self.hidden, rows).to(self.dtype), self.weight[:vocab])]
        if self.low is not None and self.low_weight is not None:
            terms.append((gather_rows(self.low, rows).to(self.dtype), self.low_weight[:vocab]))
        return Operands(terms, None if self.bias is None else self.bias[:vocab].contiguous())


class Operands(NamedTuple):
    """The tensors that the logits of a chunk of rows and a tile of the vocabulary are computed from."""

    terms: list[tuple[Tensor, Tensor]]  # (n, H) and (c, H), and with adapters (n, R) and (c, R)
    bias: Tensor | None  # (c,)

    def part(self, rows: slice, columns: slice) -> "Operands":
        """Return the part for `rows` and `columns`, with weights in the products' dtype."""
        terms = [(x[rows], w[columns].to(x.dtype)) for x, w in self.terms]
        return Operands(terms, None if self.bias is None else self.bias[columns])

    def logits(self, workspace: Tensor) -> Tensor:
        """Compute logits (n, c) without bias into the workspace's corner. The smallest product goes first: it is
        rounded a second time when the others are added.
        """
        *larger, smallest = self.terms  # with adapters: the base first, whose product is the larger
        out = workspace[: smallest[0].shape[0], : smallest[1].shape[0]]
        project(*smallest, out)
        for x, w in larger:
            addmm_into(out, x, w.t(), beta=1, alpha=1.0)
        return out


class TermGradients:
    """d loss / d (x, w) of one product x @ w.T; see `HeadGradients`.

    Args:
        needs: whether the gradients of x and of w are needed.
        vocab: rows of w that are tokens; those beyond are padding.
        wide: a dtype in which dw is added up where it is wider than w's.
        overwrite: dx is written into x's own memory, which nothing reads after that.
        rounded_in_place: dx is added up in fp32, and the front half of that memory then becomes dx in x's dtype. Not
            together with `overwrite`: the losses refuse overwrite_hidden where they recompute.
    """

    def __init__(
        self, x: Tensor, w: Tensor, needs: tuple[bool, bool], rows: Rows, vocab: int, alpha: float,
        wide: torch.dtype | None, overwrite: bool, rounded_in_place: bool = False,
    ):  # fmt: skip
        self._vocab, self._alpha, self._rounded_in_place = vocab, alpha, rounded_in_place
        self._x_sum = self.x = self.w = None
        if needs[0]:
            over = overwrite and rows.index is None  # else the gradient has fewer rows than the hidden states
            dtype = stats_dtype(x.dtype) if rounded_in_place else x.dtype
            self._new_x = functools.partial(torch.empty, rows.count, x.shape[1], dtype=dtype, device=x.device)
            self.x = x.detach() if over else None
        self._needs_x = needs[0]
        if needs[1]:
            # Rows of padding beyond the vocabulary, and all rows of a batch without labels, get no product: they must
            # be 0.
            make = torch.empty_like if vocab == w.shape[0] and rows.count > 0 else torch.zeros_like
            dtype = torch.promote_types(w.dtype, wide or w.dtype)
            self.w = make(w, dtype=dtype, memory_format=torch.contiguous_format)

    def write_over(self, x: Tensor) -> None:
        """Have dx written over x (rows.count, H), a copy of the rows whose chunks are read once, one by one."""
        if self._needs_x and self.x is None and not self._rounded_in_place and x.dtype == self._new_x.keywords["dtype"]:
            self.x = x

    def _allocate(self) -> None:
        if self._needs_x and self.x is None:
            self.x = self._new_x()

    def add(self, dlogits: Tensor, x: Tensor, w: Tensor, rows: slice, columns: slice) -> None:
        """Add a chunk. dlogits: (n, c); x (n, H), w (c, H): the chunk's rows and the tile's columns, in its dtype."""
        self._allocate()
        if self.w is not None:
            # beta 0 for the first chunk: the memory is uninitialised, and need not be zeroed first. So callers add, for
            # each tile, the chunk at row 0 first, and for each chunk the tile at column 0.
            addmm_into(self.w[columns], dlogits.t(), x, beta=1 if rows.start else 0, alpha=self._alpha)
        if self.x is not None:  # last: self.x may share x's memory
            self._add_x(dlogits, w, self.x[rows], columns)

    def _add_x(self, dlogits: Tensor, w: Tensor, out: Tensor, columns: slice) -> None:
        """Compute the rows of dx. Several tiles are summed in fp32: rounding after each would double the error."""
        if self._rounded_in_place or columns == slice(0, self._vocab):
            return addmm_into(out, dlogits, w, beta=1 if columns.start else 0, alpha=self._alpha)
        if columns.start == 0:
            self._x_sum = torch.empty(out.shape, dtype=stats_dtype(out.dtype), device=out.device)
        assert self._x_sum is not None
        addmm_into(self._x_sum, dlogits, w, beta=1 if columns.start else 0, alpha=self._alpha)
        if columns.stop == self._vocab:
            out.copy_(self._x_sum)
            self._x_sum = None

    def free_rows(self, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Return memory for `shape` in the rows of dw from `first` on, or None if it is too small.

        dtype: the weight's, or of half its size.
        """
        assert self.w is not None
        rest = self.w[first : self._vocab].view(-1).view(dtype)  # what later tiles will overwrite
        return rest[: shape[0] * shape[1]].view(shape) if shape[0] * shape[1] <= rest.numel() else None

    def finish(self, rows: Rows, x: Tensor, w: Tensor, overwrite: bool) -> tuple[Tensor | None, Tensor | None]:
        self._allocate()
        dx = _rounded_in_place(self.x, x.dtype) if self.x is not None and self._rounded_in_place else self.x
        # The rows that take part are scattered among all; the others have gradient 0.
        if dx is not None and rows.index is not None:
            into = x.detach().zero_() if overwrite else torch.zeros_like(x)
            dx = into.index_copy_(0, rows.index, dx)
        return dx, None if self.w is None else self.w.to(w.dtype)


def _rounded_in_place(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Round (n, H) to a dtype of half the size, or of the same, in the front of its memory."""
    if dtype == sums.dtype:
        return sums
    out = sums.view(-1).view(dtype)[: sums.numel()].view(sums.shape)
    start = min(len(sums), 64)
    out[:start] = sums[:start].to(dtype)
    while start < len(sums):  # rows [start, 2 * start) go where sums before `start` were
        stop = min(2 * start, len(sums))
        out[start:stop] = sums[start:stop]
        start = stop
    return out


class HeadGradients:
    """d loss / d (hidden, weight, bias, low, low_weight), built from d loss / d logits by chunks and tiles.

    The products apply the factor 1 / num_items as their alpha, to fp32 accumulators. In the low-precision gradient of
    the logits it would round every entry again; as a separate pass it would move the whole weight gradient again.
    With `rounded_in_place` the hidden states' gradient is summed as a whole, and lies in the memory of its sums.
    `factor`, a scalar that only the device knows (see `upstream_rows`), multiplies the gradients at the end. Until then
    the weight's sum over all tokens may exceed fp16's range, so it is kept in fp32.
    """

    def __init__(
        self, head: LinearHead, needs: NeededGradients, rows: Rows, vocab: int, wide: torch.dtype | None,
        overwrite_hidden: bool, alpha: float, factor: Tensor | None, rounded_in_place: bool = False,
    ):  # fmt: skip
        self._head, self._rows, self._overwrite, self._alpha, self._factor = head, rows, overwrite_hidden, alpha, factor
        common = rows, vocab, alpha, wide
        first = head.hidden, head.weight, (needs.hidden, needs.weight)
        self._terms = [TermGradients(*first, *common, overwrite_hidden, rounded_in_place)]
        if head.low is not None and head.low_weight is not None:
            low = TermGradients(head.low, head.low_weight, (needs.low, needs.low_weight), *common, False)
            self._terms.append(low)
        self._bias = None
        if needs.bias:
            assert head.bias is not None
            self._bias = torch.zeros(head.bias.shape[0], dtype=stats_dtype(head.bias.dtype), device=head.bias.device)

    def write_over(self, operands: Operands) -> None:
        """Have gradients written over the gathered rows, whose chunks nobody reads after `add`."""
        if self._rows.index is not None:
            for gradients, (x, _) in zip(self._terms, operands.terms, strict=True):
                gradients.write_over(x)

    def add(self, dlogits: Tensor, operands: Operands, rows: slice, columns: slice) -> None:
        """Add a chunk. dlogits: (n, c), the gradient of the operands' logits: the chunk's rows, the tile's columns."""
        if self._bias is not None:
            self._bias[columns].add_(dlogits.sum(0, dtype=self._bias.dtype), alpha=self._alpha)
        for gradients, (x, w) in zip(self._terms, operands.terms, strict=True):
            gradients.add(dlogits, x, w, rows, columns)

    def free_rows(self, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Return memory for `shape` where the weight's gradient will have rows from `first` on; None if too small."""
        return self._terms[0].free_rows(first, shape, dtype)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of `LinearHead.tensors`, each in its tensor's shape and dtype; None where not needed."""
        head = self._head
        if self._factor is not None:
            multiply_([self._bias, *(t for term in self._terms for t in (term.x, term.w))], self._factor)
        dhidden, dweight = self._terms[0].finish(self._rows, head.hidden, head.weight, self._overwrite)
        dbias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        if head.low is None or head.low_weight is None:
            return dhidden, dweight, dbias, None, None
        return dhidden, dweight, dbias, *self._terms[1].finish(self._rows, head.low, head.low_weight, False)


def addmm_into(out: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
    """Compute out = beta * out + alpha * a @ b. A wider out (fp32 for bf16 products) accumulates in its own dtype."""
    if a.dtype == torch.bfloat16 and a.stride(0) > a.shape[1] and a.shape[1] % 32 and not a.is_cuda:
        # With AMX, oneDNN reads rows of bf16 up to a multiple of 32, and multiplies what lies between them by 0: NaN
        # stays NaN there, and that memory is uninitialised.
        a = a.contiguous()
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    elif out.dtype == torch.promote_types(out.dtype, a.dtype):
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)
    else:
        # beta 0 must clear NaN from uninitialised memory, which 0 * NaN would keep
        out.mul_(beta) if beta else out.zero_()
        out.add_(a @ b, alpha=alpha)


def project(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Compute x @ w.T into out, which may be fp32 while x and w are narrower."""
    if out.dtype == x.dtype:
        return torch.mm(x, w.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), w.t().to(out.dtype), out=out)


def vocabulary(weight: Tensor, vocab_size: int | None, side: str = "") -> int:
    """Return how many rows of a head take part: the first vocab_size, or all. side: see `check_head`."""
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"{side}vocab_size must be at least 1 or None, got {vocab_size}.")
    return min(weight.shape[0], vocab_size or weight.shape[0])


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: Adapters = None, side: str = "") -> None:
    """Raise ValueError if shapes or dtypes don't fit. side: prefix of names in messages, "" or "teacher_"."""
    check_dtypes(**{f"{side}hidden": hidden, f"{side}weight": weight, f"{side}bias": bias})
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{side}hidden (N, H) and {side}weight (V, H) must share H: "
            f"{side}hidden is {tuple(hidden.shape)}, {side}weight is {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{side}bias must be one per row of {side}weight: "
            f"{side}bias is {tuple(bias.shape)}, {side}weight {tuple(weight.shape)}."
        )
    for i, adapter in enumerate(adapters_of(lora)):
        if not isinstance(adapter, Lora):
            raise ValueError(f"{side}lora must be a Lora or a sequence of them, got {type(adapter).__name__}.")
        a, b = adapter.a.shape, adapter.b.shape
        if (*b[:1], *a[1:]) != weight.shape or a[:1] != b[1:]:
            raise ValueError(
                f"Adapter {i} of {side}lora must have a (r, H) and b (V, r) for {side}weight (V, H): "
                f"a is {tuple(a)}, b {tuple(b)}, {side}weight {tuple(weight.shape)}."
            )


def check_overwritten(overwrite_hidden: bool, lora: Adapters) -> None:
    """Raise ValueError if autograd needs hidden after it was overwritten. (A dropout keeps its own copy.)"""
    needed = (adapter.a.requires_grad and not adapter.dropout for adapter in adapters_of(lora))
    if overwrite_hidden and torch.is_grad_enabled() and any(needed):
        raise ValueError("overwrite_hidden would overwrite what the gradient of lora's a needs: leave it out.")
