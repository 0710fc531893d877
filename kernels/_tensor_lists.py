"""Kernels over many tensors in one launch: a table of their addresses, and which chunk of which tensor a program takes.

Source    many tensors a launch: apex's multi_tensor_apply
"""

import array
import functools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def table_of(numbers: Iterable[int], device: torch.device) -> Tensor:
    """Return addresses and sizes as int64 on the device."""
    return _sent(torch.frombuffer(array.array("q", numbers), dtype=torch.int64), device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """Return the table on the device, without waiting for it."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


@functools.lru_cache(8)  # of a training: the norm, and each group of parameters; some MiB each
def chunks_of(numels: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """Return (programs, 2) int32: each program's tensor, and the number of its chunk in it."""
    counts = torch.tensor([-(-n // chunk) for n in numels])
    owners = torch.repeat_interleave(torch.arange(len(numels)), counts)
    firsts = (counts.cumsum(0) - counts)[owners]
    return _sent(torch.stack([owners, torch.arange(len(owners)) - firsts], 1).to(torch.int32), device)


def are_aligned(columns: Iterable[Iterable[int]]) -> bool:
    """Return whether loads from these addresses may be 16 bytes wide."""
    bits = 0
    for addresses in columns:
        bits = functools.reduce(operator.or_, addresses, bits)
    return not bits % 16


def are_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the tensors of each list have one dtype, those of a place one shape, and all are contiguous."""
    shapes = [x.shape for x in columns[0]]
    return (
        all(all(map(Tensor.is_contiguous, column)) for column in columns)
        and all(len({x.dtype for x in column}) == 1 for column in columns)
        and all([x.shape for x in column] == shapes for column in columns[1:])
    )


def in_one_order(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have one shape, no gaps in memory, and their numbers in one order there."""
    first = tensors[0]
    if any(x.shape != first.shape for x in tensors):
        return False
    if all(x.is_contiguous() for x in tensors):
        return True
    strides = torch.empty_like(first, device="meta").stride()  # those of first, if it has no gaps
    return all(x.stride() == strides for x in tensors)
