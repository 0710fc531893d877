"""Outputs of norms that a backward makes again instead of keeping them, from what the norm keeps anyway.

A norm's output is read by the linear layers behind it, which keep it for their weights' gradients: in a decoder layer
two tensors of the size of the hidden states. The norm keeps its input and its weight. So an op that would keep y keeps
these two instead, which takes no memory, and runs the norm's forward once more in its backward: bit for bit the same y.

Source    recomputation: Chen et al. 2016, arXiv:1604.06174; of norms alone: Korthikanti et al. 2022, arXiv:2205.05198
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_NAME = "_liger_made_of"


class Source(NamedTuple):
    """What an op saves in place of x, and how its backward gets x from them: `make(*tensors)`."""

    tensors: tuple[Tensor | None, ...]
    make: Callable[..., Tensor]
    versions: tuple[int, ...] = ()


def can_be_made(y: Tensor, make: Callable[..., Tensor], x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Note on y that `make(x, *parameters)` gives it again, and return y. Call it where the op of y keeps x.

    Engines that shard parameters take their memory away between the passes, and give it back to one module after the
    other: in a group of processes the note has copies.
    """
    if y.requires_grad and x.is_contiguous():
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parameters = tuple(None if p is None else p.detach().clone() for p in parameters)
        tensors = tuple(None if t is None else t.detach() for t in (x, *parameters))
        setattr(y, _NAME, Source(tensors, make, (y._version, x._version)))
    return y


def source_of(x: Tensor, cast: Tensor) -> Source:
    """Return what to save for a backward that needs `cast`, which is x in the dtype that its op computes in."""
    source = getattr(x, _NAME, None)
    if source is None or source.versions != (x._version, source.tensors[0]._version):  # written into since
        return Source((cast,), _itself)
    return Source(source.tensors, functools.partial(_made, source.make, cast.dtype))


def _itself(x: Tensor) -> Tensor:
    return x


def _made(make: Callable[..., Tensor], dtype: torch.dtype, *tensors: Tensor | None) -> Tensor:
    return make(*tensors).to(dtype)
