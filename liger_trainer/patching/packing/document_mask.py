"""Which tokens of packed rows see one another, told by lengths in place of a mask of the row's length squared.

transformers describes a mask by functions of positions, nested, and asks the attention implementation of a model to
make the tensor. Where those functions say no more than "causal, within a window, within a document", `MaskMaker`
returns a `DocumentMask` instead, as FlexAttention returns its BlockMask. The model hands it to its attention
(packed_attention.py) like any mask, gradient checkpointing included, so no attention can miss it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
)

from ...common.replacements import replaced_in_this_thread
from ...compat.recognitions import mask_structure
from ...errors import ConfigError
from ...kernels.document_attention import document_bounds

MaskFunction = Callable[..., Any]

_padded_on_the_right = ContextVar("padded_on_the_right", default=False)


@contextlib.contextmanager
def padded_on_the_right(padded: bool = True) -> Iterator[None]:
    """Within the context, padding stands behind the tokens of each row, where causal attention does not see it.

    Then attention needs no mask, and nobody has to look at the one that came with the batch, which waits for the
    device. What stands at the padding itself differs.
    """
    before = _padded_on_the_right.set(padded)
    try:
        yield
    finally:
        _padded_on_the_right.reset(before)


@contextlib.contextmanager
def documents_come_along(come: bool = True) -> Iterator[None]:
    """Within the context, batches bring the lengths of their documents, so rows do hold several.

    Then transformers need not look at the positions whether they do, which waits for the device.
    """
    name = "find_packed_sequence_indices"
    former = getattr(masking_utils, name)
    replaced = replaced_in_this_thread(masking_utils, name, numbers_of_documents, former)
    with replaced if come else contextlib.nullcontext():
        yield


def numbers_of_documents(position_ids: Tensor) -> Tensor:
    """Number the documents of each row from 0, by positions (rows, length) that begin again in each."""
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


class Documents:
    """Documents that lie end to end, each a separate sequence.

    Args:
        ends: (documents + 1) int32, ascending from 0 to the number of tokens. Documents may be empty.
        longest: tokens of the longest document, or more; None: read from `ends`, which waits for the device.
        each: tokens of every document, if they all have as many.
    """

    def __init__(self, ends: Tensor, longest: int | None = None, each: int | None = None):
        self.ends, self.each = ends, each
        self._longest = longest
        self._of_layers: dict[tuple[str, torch.device], Any] = {}

    @cached_property
    def longest(self) -> int:
        return int(self.ends.diff().max()) if self._longest is None else int(self._longest)

    def once(self, what: str, device: torch.device, make: Callable[[Tensor], Any]) -> Any:
        """Return `make(ends)` on a device, computed once for all layers; `what` names it.

        A CUDA graph computes its own, since the ends are others when it is replayed.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return make(self.ends.to(device))
        if (what, device) not in self._of_layers:
            with torch.inference_mode(False):  # a later pass may keep them for its backward
                self._of_layers[what, device] = make(self.ends.to(device))
        return self._of_layers[what, device]

    def bounds(self, tokens: int, device: torch.device) -> Tensor:
        """Return where each token's document begins and ends (`document_bounds`)."""
        return self.once("bounds", device, lambda ends: document_bounds(ends, tokens))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document. Waits for the device."""
        return self.ends.diff().tolist()

    @classmethod
    def of_rows(cls, rows: int, length: int, index: Tensor | None, device: Any) -> "Documents":
        """Return the documents of rows laid end to end.

        Args:
            index: (rows, length), a number for each token that changes where the next document begins; None: each row
                is one document.
        """
        if index is None:
            return cls(torch.arange(rows + 1, dtype=torch.int32, device=device) * length, length, length)
        begins = torch.ones_like(index, dtype=torch.bool)
        torch.ne(index[:, 1:], index[:, :-1], out=begins[:, 1:])
        ends = begins.flatten().nonzero().flatten()
        return cls(torch.cat([ends, ends.new_tensor([index.numel()])]).to(torch.int32))


_READ: set[tuple] = set()


class DocumentMask:
    """Causal attention within documents, in place of a mask (rows, 1, length, length).

    Args:
        rows, length: of the batch.
        index: (rows, length), the number of each token's document in its row; None: one document a row.
        window: a token sees so many tokens, itself the last of them; None: all before it.
        device: of the batch.
        make: makes the mask of the former implementation, for rows that prove to hold one document each.
        single: each row is known to hold one document, with padding behind it or none. Then the mask is a tensor to a
            model that takes it for one.
    """

    def __init__(
        self, rows: int, length: int, index: Tensor | None, window: int | None, device: Any,
        make: Callable[[], Tensor | None], single: bool = False,
    ):  # fmt: skip
        self.rows, self.length, self.index, self.window, self.device = rows, length, index, window, device
        self.make, self.single, self._read = make, single, single or index is not None

    @cached_property
    def documents(self) -> Documents:
        """The documents, computed once for all layers that share this mask."""
        return Documents.of_rows(self.rows, self.length, self.index, self.device)

    @cached_property
    def tensor(self) -> Tensor | None:
        """The mask of the former implementation."""
        _READ.add(self.sizes)
        return self.make()

    @property
    def sizes(self) -> tuple[int, int, int | None]:
        return self.rows, self.length, self.window

    @property
    def is_read(self) -> bool:
        """Whether a mask of these sizes has been read as a tensor, which cannot be made while a CUDA graph records."""
        return self.sizes in _READ

    def read(self, position_ids: Any) -> None:
        """Look, once, for documents in positions (rows, length) that the model did not show its mask."""
        if not self._read and isinstance(position_ids, Tensor) and position_ids.ndim == 2:
            index = masking_utils.find_packed_sequence_indices(position_ids)
            self.index = None if index is None else index.expand(self.rows, -1)
            self._read = True

    def to(self, device: Any, **how: Any) -> "DocumentMask":
        """Return the mask on another device, as accelerate moves what it hands to a layer."""
        if torch.device(device) == torch.device(self.device):
            return self
        index = None if self.index is None else self.index.to(device, **how)

        def make() -> Tensor | None:
            return None if self.tensor is None else self.tensor.to(device)

        moved = DocumentMask(self.rows, self.length, index, self.window, device, make, self.single)
        moved._read = self._read
        return moved

    def __getattr__(self, name: str) -> Any:
        if not self.__dict__.get("single") or name.startswith("__"):  # unset in an object that is being made
            raise _NotATensor(name)
        return getattr(_as_tensor(self, name), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        named = {key: _with_tensors(value, name) for key, value in (kwargs or {}).items()}
        return function(*_with_tensors(tuple(args), name), **named)


def _as_tensor(mask: DocumentMask, name: str) -> Tensor:
    if not mask.single or mask.tensor is None:
        raise _NotATensor(name)
    return mask.tensor


def _with_tensors(value: Any, name: str) -> Any:
    """Put tensors in the place of masks among the arguments of an operation."""
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(item, name) for item in value)
    return _as_tensor(value, name) if isinstance(value, DocumentMask) else value


def _operator(name: str) -> Callable[..., Any]:
    return lambda mask, *others: getattr(_as_tensor(mask, name), name)(*others)


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "lt", "le", "gt", "ge", "invert"):
    setattr(DocumentMask, f"__{_name}__", _operator(f"__{_name}__"))


class _NotATensor(ConfigError, AttributeError):
    """The model computes with its mask."""

    def __init__(self, name: str):
        super().__init__(
            f"The model reads its attention mask as a tensor ({name}), and attention over packed rows has none. Set "
            "`attention: model`, which leaves the model's own attention, or `packing: false`."
        )


@dataclass(frozen=True)
class MaskMaker:
    """A mask function of transformers' `AttentionMaskInterface`.

    It makes a `DocumentMask` where rows hold several documents, and where a mask would only say "causal" or "within a
    window", since only attention sees lengths that came with the batch. For all else it calls the mask function of
    `former`, "sdpa" or "eager".
    """

    former: str

    @torch.compiler.disable
    def __call__(self, *args: Any, **how: Any) -> Any:
        exports = torch.compiler.is_exporting()  # torch.export, whose graph cannot read lengths
        mask = NotImplemented if args or exports else self._by_lengths(**how)
        return ALL_MASK_ATTENTION_FUNCTIONS[self.former](*args, **how) if mask is NotImplemented else mask

    def _by_lengths(
        self, *, batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
        mask_function: MaskFunction = masking_utils.causal_mask_function, attention_mask: Tensor | None = None,
        use_vmap: bool = False, device: Any = "cpu", **how: Any,
    ) -> Any:  # fmt: skip
        """Return a `DocumentMask`, or None where attention needs no mask; NotImplemented: the former function's."""
        is_sdpa = self.former == "sdpa"
        # Padding behind the tokens is beyond what causal attention sees; any other has to be masked.
        if attention_mask is not None and not _padded_on_the_right.get():
            return NotImplemented
        structure = None if use_vmap or q_length != kv_length else mask_structure(mask_function)
        if structure is None:
            return NotImplemented
        index, window = structure
        says_causal = is_sdpa and index is None and (window is None or window >= q_length)  # as sdpa's `is_causal` does
        if attention_mask is not None and (says_causal or index is not None):
            return None if says_causal else NotImplemented
        if says_causal or q_length == 1 or isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
            return NotImplemented
        make = functools.partial(
            ALL_MASK_ATTENTION_FUNCTIONS[self.former], batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            mask_function=mask_function, use_vmap=False, device=device, **how,
        )  # fmt: skip
        single = attention_mask is not None  # the padding is left out of the mask, which depends on sizes only
        return DocumentMask(batch_size, q_length, index, window, device, make, single)
