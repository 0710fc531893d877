"""The linear head of the fused losses: products by chunks of rows and tiles of the vocabulary, and their gradients.

    logits = hidden @ weight.T + bias + low @ low_weight.T,  low = sum_i scaling_i dropout_i(hidden) @ a_i.T

The low-rank terms of all adapters form one product: their a_i are stacked in rows, their b_i in the columns of
low_weight. Plain torch makes low, so autograd carries its gradient on to every a_i, to hidden, and through the dropout.
Only a second product with few columns meets the vocabulary. Source: LoRA (Hu et al. 2021, arXiv:2106.09685).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import Needs, check_dtypes, multiply_, stats_dtype
from ._labelled_rows import Rows, take


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
    low = [_low(hidden, adapter, dtype) for adapter in adapters]
    if len(adapters) == 1:
        return low[0], adapters[0].b
    return torch.cat(low, 1), torch.cat([adapter.b for adapter in adapters], 1)


def _low(hidden: Tensor, adapter: Lora, dtype: torch.dtype) -> Tensor:
    x = (F.dropout(hidden, adapter.dropout) if adapter.dropout else hidden).to(dtype)
    return torch.addmm(x.new_zeros(()), x, adapter.a.to(dtype).t(), beta=0, alpha=adapter.scaling)  # rounded once


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
        terms = [(take(self.hidden, rows).to(self.dtype), self.weight[:vocab])]
        if self.low is not None and self.low_weight is not None:
            terms.append((take(self.low, rows).to(self.dtype), self.low_weight[:vocab]))
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
        *larger, smallest = self.terms
        out = workspace[: smallest[0].shape[0], : smallest[1].shape[0]]
        project(*smallest, out)
        for x, w in larger:
            addmm_into(out, x, w.t(), beta=1, alpha=1.0)
        return out


class TermGradients:
    """d loss / d (x, w) of one product x @ w.T; see `HeadGradients`."""

    def __init__(
        self, x: Tensor, w: Tensor, needs: tuple[bool, bool], rows: Rows, vocab: int, alpha: float,
        wide: torch.dtype | None, overwrite: bool, rounded_in_place: bool = False,
    ):  # fmt: skip
        self._vocab, self._alpha, self._rounded_in_place = vocab, alpha, rounded_in_place
        self._x_sum = self.x = self.w = None
        if needs[0]:
            over = overwrite and rows.index is None
            dtype = stats_dtype(x.dtype) if rounded_in_place else x.dtype
            self.x = x.detach() if over else torch.empty(rows.count, x.shape[1], dtype=dtype, device=x.device)
        if needs[1]:
            make = torch.empty_like if vocab == w.shape[0] and rows.count > 0 else torch.zeros_like
            dtype = torch.promote_types(w.dtype, wide or w.dtype)
            self.w = make(w, dtype=dtype, memory_format=torch.contiguous_format)

    def add(self, dlogits: Tensor, x: Tensor, w: Tensor, rows: slice, columns: slice) -> None:
        """Add a chunk. dlogits: (n, c); x (n, H), w (c, H): the chunk's rows and the tile's columns, in its dtype."""
        if self.w is not None:
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

        dtype: that of the weight, or of half its size.
        """
        assert self.w is not None
        rest = self.w[first : self._vocab].view(-1).view(dtype)
        return rest[: shape[0] * shape[1]].view(shape) if shape[0] * shape[1] <= rest.numel() else None

    def finish(self, rows: Rows, x: Tensor, w: Tensor, overwrite: bool) -> tuple[Tensor | None, Tensor | None]:
        dx = _rounded_in_place(self.x, x.dtype) if self.x is not None and self._rounded_in_place else self.x
        if dx is not None and rows.index is not None:
            into = x.detach().zero_() if overwrite else torch.zeros_like(x)
            dx = into.index_copy_(0, rows.index, dx)
        return dx, None if self.w is None else self.w.to(w.dtype)


def _rounded_in_place(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Round (n, H) to a dtype of half the size, or of the same, in the front of its own memory."""
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
    the logits it would round every entry again; as a pass of its own it would move the whole weight gradient again.
    With `rounded_in_place` the hidden states' gradient is summed as a whole, and lies in the memory of its sums.
    `factor`, a scalar that only the device knows (see `upstream_rows`), multiplies the gradients at the end. Until then
    the weight's sum over all tokens may exceed fp16's range, so it is kept in fp32.
    """

    def __init__(
        self, head: LinearHead, needs: Needs, rows: Rows, vocab: int, wide: torch.dtype | None,
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
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    elif out.dtype == torch.promote_types(out.dtype, a.dtype):
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)
    else:
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
    """Raise ValueError if autograd needs hidden after it was overwritten. (A dropout keeps a copy of its own.)"""
    needed = (adapter.a.requires_grad and not adapter.dropout for adapter in adapters_of(lora))
    if overwrite_hidden and torch.is_grad_enabled() and any(needed):
        raise ValueError("overwrite_hidden would overwrite what the gradient of lora's a needs: leave it out.")
