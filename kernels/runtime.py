"""How the kernels run on this machine, and what memory they would take on a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import _linear_head as _head
from . import _low_rank, _triton, lora_experts
from ._linear_head import Rows, RowSelection
from ._triton import INSTALLED, SLOW_LAUNCHES, unknown_launcher, use_triton, without_launches
from ._tuning import architecture_of

__all__ = [
    "INSTALLED", "SLOW_LAUNCHES", "is_interpreted", "launch_table", "unknown_launcher", "use_triton", "without_data",
]  # fmt: skip


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on CPU tensors."""
    return _triton.INTERPRETED


def launch_table(device: torch.device) -> str:
    """Return, in words, by whose launch shapes kernels run on a GPU."""
    table = architecture_of(device)
    how = "swept" if table.swept else "not swept: the H100's shapes where they fit"
    return f"{table.name}, up to {table.shared // 1024} KiB of shared memory a block ({how})"


@contextlib.contextmanager
def without_data(count: int, num_items: float) -> Iterator[None]:
    """Make ops on CPU tensors without data allocate the memory that they allocate on a GPU, and compute nothing.

    Args:
        count: the number of labelled rows in a batch, which the ops would otherwise read from it.
        num_items: divisor of the loss.
    """
    with (
        without_launches(),
        _replaced(RowSelection, wait=lambda selection: Rows(selection._index[:count], count, num_items)),
        # The CPU can't multiply bf16 matrices into fp32.
        _replaced(_head, addmm_into=lambda out, a, b, *, beta, alpha: None, project=lambda x, w, out: out),
        # How many rows each expert has is in the data.
        _replaced(
            lora_experts,
            grouped=lambda x, matrices, ends: x.new_empty(len(x), matrices.shape[2]),
            outer=lambda x, y, ends: x.new_empty(len(ends), x.shape[1], y.shape[1]),
        ),
        _replaced(
            _low_rank,
            _has_wide_results=lambda x: torch.version.hip is None,
            _wide_product=lambda m, n: m.new_empty(len(m), n.shape[1], dtype=torch.float32),
        ),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
