"""Kernels over many tensors in one launch: a table of their addresses, and which chunk of which tensor a program takes.

Source    many tensors a launch: apex's multi_tensor_apply
"""

import array
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def table_of(numbers: Iterable[int], device: torch.device) -> Tensor:
    """Return addresses and sizes as int64 on the device. The host doesn't wait."""
    table = torch.frombuffer(array.array("q", numbers), dtype=torch.int64)
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


@functools.lru_cache(64)
def chunks_of(numels: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """Return (programs, 2) int32: each program's tensor, and the number of its chunk in it."""
    counts = torch.tensor([-(-n // chunk) for n in numels])
    owners = torch.repeat_interleave(torch.arange(len(numels)), counts)
    firsts = (counts.cumsum(0) - counts)[owners]
    return torch.stack([owners, torch.arange(len(owners)) - firsts], 1).to(device, torch.int32)


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return whether loads from these may be 16 bytes wide."""
    bits = 0
    for address in addresses:
        bits |= address
    return not bits % 16


def in_one_order(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have one shape, no gaps in memory, and their numbers in one order there."""
    first = tensors[0]
    for x in tensors:
        if x.shape != first.shape:
            return False
    for x in tensors:
        if not x.is_contiguous():
            break
    else:
        return True
    strides = torch.empty_like(first, device="meta").stride()  # those of first, if it has no gaps
    return all(x.stride() == strides for x in tensors)
