"""What the autograd functions of this folder share: memory, a backward that refuses second derivatives, and outputs of
norms that a backward computes again.

A norm's output is read by the linear layers behind it, which keep it for their weights' gradients: in a decoder layer
two tensors of the size of the hidden states. The norm keeps its input and its weight. So an op that would keep y keeps
these two instead, which takes no memory, and runs the norm's forward once more in its backward: bit for bit the same y.

Source    recomputation: Chen et al. 2016, arXiv:1604.06174; of norms: Korthikanti et al. 2022, arXiv:2205.05198
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

RESCALED = SHAPES.RESCALED
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor in a dtype that no op computes in, such as an integer or fp8."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be float32, bfloat16, float16 or float64, got {str(x.dtype).removeprefix('torch.')}."
            )


def check_label_dtype(labels: Tensor | None) -> None:
    if labels is not None and labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {str(labels.dtype).removeprefix('torch.')}: use labels.long().")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised contiguous memory of x's shape. (torch.empty takes the host twice as long.)"""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def vector(n: int, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uninitialised memory for n numbers on x's device."""
    return x.new_empty(n, dtype=dtype)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of many tensors to its target, in one launch for all: torch has no public function that does."""
    torch._foreach_copy_(targets, sources)


def graph_is_kept() -> bool:
    """Return whether autograd keeps the graph for another backward (retain_graph=True). Call it inside a backward."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def first_order(backward: Callable) -> Callable:
    """Make a backward refuse create_graph=True. A kernel's result has no graph, so torch would take it for a constant.

    torch's once_differentiable doesn't refuse when the incoming gradient is itself a constant, for example of a
    sum. The backward also runs with autocast off, so its products stay in the dtypes that the forward chose.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # it is in a backward only under create_graph=True
            raise RuntimeError(
                "This op has no second derivatives: differentiate it without create_graph=True, call its form in plain "
                "torch, <op>_reference, instead, or undo the patch of the model that runs it: patched.undo()."
            )
        # an output that was not used has no gradient
        device = next((x.device.type for x in gradients if x is not None), None)
        if device is None or not torch.is_autocast_enabled(device):
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return checked


class NeededGradients(NamedTuple):
    """Which gradients a call must produce, in the order of `LinearHead.tensors`."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool = False
    low_weight: bool = False

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "NeededGradients":
        enabled = torch.is_grad_enabled()
        return cls(*(t is not None and enabled and t.requires_grad for t in tensors))

    @property
    def any(self) -> bool:
        return any(self)


@triton.jit
def _rescale_kernel(x_ptr, factor_ptr, columns, stride_row, stride_column, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    # Asked on the device, so that the host need not wait. Most losses are used as they are.
    if factor != 1.0:
        program, spans = tl.program_id(0).to(tl.int64), tl.cdiv(columns, SPAN)  # int64: an address may pass 2^31
        first = program % spans * SPAN
        for start in range(0, SPAN, BLOCK):
            cols = first + start + tl.arange(0, BLOCK)
            at = program // spans * stride_row + cols * stride_column
            x = tl.load(x_ptr + at, mask=cols < columns)
            tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype), mask=cols < columns)


@remembered
def _rescale_launch(rows: int, columns: int, strides: tuple[int, int], span: int) -> Launch:
    grid = (rows * -(-columns // span),)
    return Launch(_rescale_kernel, grid, columns, *strides, SPAN=span, BLOCK=4096, num_warps=8)


def rescale(gradients: Sequence[Tensor | None], factor: Tensor) -> Sequence[Tensor | None]:
    """Multiply the gradients by `factor`, the gradient of the loss, in place. Call it inside a backward.

    `factor` is a scalar on their device. If it is 1 (the loss was used without a factor), the kernel sees that on the
    device and stops: nothing is moved, and the host doesn't wait. If autograd keeps the graph for another backward, the
    saved gradients stay as they are, and the copies that are returned get multiplied.
    """
    if graph_is_kept():
        gradients = [None if x is None else x.clone() for x in gradients]  # the saved ones are needed once more
    multiply_(gradients, factor)
    return gradients


def multiply_(tensors: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply tensors (n,) or (n, m) in place by `factor`, a scalar on their device. If it is 1, move nothing."""
    for x in tensors:
        if x is None or not x.numel():  # no gradient was needed, or nothing has one
            continue
        if use_triton(x):
            shape, strides = ((1, x.numel()), (0, 1)) if x.is_contiguous() else (x.shape, x.stride())
            if _rescale_launch(*shape, strides, RESCALED)(x, factor, has_twin=True):
                continue
        if factor.item() != 1.0:
            x.mul_(factor.item())


_NAME = "_liger_made_of"


class Scaled(NamedTuple):
    """The matrix rows * scale[:, None] * factor, which is not in memory: an RMSNorm's output, up to its rounding."""

    rows: Tensor  # (N, K)
    scale: Tensor  # (N,) fp32
    factor: Tensor | None  # (K,); None: 1


class Source(NamedTuple):
    """What an op saves in place of x, and how its backward gets x from them: `make(*tensors)`.

    scaled: gives it as `Scaled`, for those that need not have it in memory; None where there is no such form.
    """

    tensors: tuple[Tensor | None, ...]
    make: Callable[..., Tensor]
    versions: tuple[int, ...] = ()
    scaled: Callable[..., Scaled] | None = None

    def without_tensors(self) -> "Source":
        """Return what a context may hold: the tensors are saved as tensors."""
        return self._replace(tensors=())


def note_recomputable(
    y: Tensor, make: Callable[..., Tensor], x: Tensor, *parameters: Tensor | None,
    scaled: Callable[..., Scaled] | None = None,
) -> Tensor:  # fmt: skip
    """Note on y that `make(x, *parameters)` gives it again, and return y. Call it where the op of y keeps x.

    scaled: see `Source`; of the same arguments.

    Engines that shard parameters take their memory away between the passes, and give it back to one module after the
    other: in a group of processes the note has copies.
    """
    if y.requires_grad and x.is_contiguous():
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # small: a number a row or a column
            parameters = tuple(None if p is None else p.detach().clone() for p in parameters)
        tensors = tuple(None if t is None else t.detach() for t in (x, *parameters))
        setattr(y, _NAME, Source(tensors, make, (y._version, x._version), scaled))
    return y


def saved_or_recomputed(x: Tensor, cast: Tensor) -> Source:
    """Return what to save for a backward that needs `cast`, which is x in the dtype that its op computes in."""
    source = getattr(x, _NAME, None)  # an attribute of the tensor: the op behind the norm sees nothing else of it
    if source is None or source.versions != (x._version, source.tensors[0]._version):  # written into since
        return Source((cast,), lambda x: x)
    make, dtype = source.make, cast.dtype  # and not `cast` itself, which would stay in memory
    return Source(source.tensors, lambda *tensors: make(*tensors).to(dtype), scaled=source.scaled)
