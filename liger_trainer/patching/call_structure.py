"""What a layer is called with, taken apart into tensors and a structure that two calls can be compared by."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .document_mask import DocumentMask

Tensors = list[Tensor]


class NotCapturable(Exception):
    """A call that cannot be replayed. The message says why."""


@dataclass(frozen=True)
class TensorSpec:
    """What a replayed tensor has in common with the recorded one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor and holds none that a layer reads."""

    key: tuple
    value: Any = field(compare=False)


def flatten(value: Any, tensors: Tensors) -> Any:
    """Return the hashable structure of `value`, and append its tensors.

    Raises:
        NotCapturable: it holds something else than tensors, numbers and text.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        grad = value.requires_grad and torch.is_grad_enabled()
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype, value.device, grad)
    if type(value) in (tuple, list):
        return type(value), tuple(flatten(item, tensors) for item in value)
    if type(value) is dict:
        lengths_are_given = isinstance(value.get("cu_seq_lens_q"), Tensor)
        return dict, tuple(
            (key, _constant(item) if isinstance(item, DocumentMask) and lengths_are_given else flatten(item, tensors))
            for key, item in value.items()
        )
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    raise NotCapturable(f"a layer gets a {type(value).__name__}")


def _constant(mask: DocumentMask) -> Constant:
    """Return a mask beside which the lengths of the documents are given: attention reads those."""
    return Constant((mask.rows, mask.length, mask.window), mask)


def fill(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of a structure, with these tensors in it."""
    if isinstance(structure, Constant):
        return structure.value
    if isinstance(structure, TensorSpec):
        return next(tensors)
    if isinstance(structure, tuple):
        kind, items = structure
        if kind is dict:
            return {key: fill(item, tensors) for key, item in items}
        return kind(fill(item, tensors) for item in items)
    return structure


def specs_of(structure: Any) -> list[TensorSpec]:
    """Return the specs of a structure's tensors, in their order."""
    if isinstance(structure, TensorSpec):
        return [structure]
    if isinstance(structure, tuple):
        items = [item for _, item in structure[1]] if structure[0] is dict else structure[1]
        return [spec for item in items for spec in specs_of(item)]
    return []
