"""AdamW over all tensors of a model in one launch, with the gradients clipped on their way in.

    g = coefficient g        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = (1 - lr decay) p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

Shapes    p, g, m, v: any, in the same memory layout; t: () fp32, the steps of p with this one
Method    A table holds the tensors' addresses; each program finds its tensor there, and updates CHUNK numbers of it.
          The coefficient of clipping is a number on the device, so that gradients need not be written to be clipped.
Numerics  fp32 inside; p, m and v are rounded once when stored. As torch's fused AdamW, whose clipping rounds g as well
Traffic   read p, g, m, v; write p, m, v. Clipping apart from it: another read and write of g
Source    Loshchilov and Hutter 2019, arXiv:1711.05101; many tensors a launch: apex's multi_tensor_apply
"""

import array
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ._triton import Launch, tl, triton, use_triton
from ._tuning import SHAPES


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
    firsts = (counts.cumsum(0) - counts)[owners]  # the number of the first chunk of the same tensor
    return _sent(torch.stack([owners, torch.arange(len(owners)) - firsts], 1).to(torch.int32), device)


def are_aligned(columns: Iterable[Iterable[int]]) -> bool:
    """Return whether loads from these addresses may be 16 bytes wide."""
    bits = 0
    for addresses in columns:
        bits = functools.reduce(operator.or_, addresses, bits)
    return not bits % 16  # a low bit is set if any address is unaligned


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


CHUNK, WARPS = SHAPES.ADAMW


def adamw_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    coefficient: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute `adamw_` in plain torch."""
    if found_inf is not None and bool(found_inf):
        return
    for p, g, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        wide = torch.promote_types(p.dtype, torch.float32)
        old, grad = p.to(wide), g.to(wide)
        grad = grad if coefficient is None else grad * coefficient
        mean = betas[0] * m.to(wide) + (1 - betas[0]) * grad
        square = betas[1] * v.to(wide) + (1 - betas[1]) * grad * grad
        corrections = [1 - beta ** float(t) for beta in betas]
        update = mean / ((square / corrections[1]).sqrt() + eps)
        p.copy_((1 - lr * weight_decay) * old - lr / corrections[0] * update)
        m.copy_(mean)
        v.copy_(square)


@triton.jit
def _kernel(
    table_ptr, chunks_ptr, coefficient_ptr, found_inf_ptr, lr, keep, log_beta1, log_beta2, rest1, rest2, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Update one chunk.

    table_ptr: int64, for each tensor the addresses of p, g, m, v and t, and its numel. chunks_ptr: int32, for each
    program its tensor and the chunk's number in it. keep: 1 - lr decay. rest1, rest2: 1 - beta.
    """
    if found_inf_ptr is not None:
        # As torch does for a gradient scaler: the step is skipped on the device, and the host does not learn of it.
        if tl.load(found_inf_ptr) != 0.0:
            return
    chunk = tl.program_id(0).to(tl.int64)  # int64: a tensor may have more than 2^31 numbers
    row = table_ptr + tl.load(chunks_ptr + 2 * chunk).to(tl.int64) * 6
    start = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * CHUNK
    numel = tl.load(row + 5)  # the sixth number of a tensor in the table
    p_ptr = tl.load(row).to(tl.pointer_type(PARAM))
    g_ptr = tl.load(row + 1).to(tl.pointer_type(GRAD))
    m_ptr = tl.load(row + 2).to(tl.pointer_type(MOMENT))
    v_ptr = tl.load(row + 3).to(tl.pointer_type(MOMENT))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
    rate = lr / (1.0 - tl.exp(step * log_beta1)).to(tl.float32)  # fp64: at first these are small differences
    unbias = tl.rsqrt((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
    coefficient = 1.0
    if coefficient_ptr is not None:
        coefficient = tl.load(coefficient_ptr)
    pointers = p_ptr, g_ptr, m_ptr, v_ptr
    numbers = coefficient, keep, rest1, rest2, rate, unbias, eps
    if start + CHUNK <= numel:  # a mask would keep loads from being 16 bytes wide
        _update(pointers, start, numel, numbers, True, CHUNK)
    else:
        _update(pointers, start, numel, numbers, False, CHUNK)


@triton.jit
def _update(pointers, start, numel, numbers, WHOLE: tl.constexpr, CHUNK: tl.constexpr):
    p_ptr, g_ptr, m_ptr, v_ptr = pointers
    coefficient, keep, rest1, rest2, rate, unbias, eps = numbers
    at = start + tl.arange(0, CHUNK)
    mask = None if WHOLE else at < numel
    g = tl.load(g_ptr + at, mask=mask).to(tl.float32) * coefficient
    m = tl.load(m_ptr + at, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + at, mask=mask).to(tl.float32)
    p = tl.load(p_ptr + at, mask=mask).to(tl.float32)
    m += rest1 * (g - m)  # b1 m + (1 - b1) g with one product
    v += rest2 * (g * g - v)
    p = p * keep - rate * m / (tl.sqrt(v) * unbias + eps)  # weight decay first, of the old parameter
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=mask)


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    coefficient: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Update params, exp_avgs and exp_avg_sqs in place by AdamW, in one launch for each combination of dtypes.

    A parameter with gaps in memory, or whose gradient or moments are in another order there, is updated in torch.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: as many tensors each, on one device; fp32, fp16 or bf16 (fp64: torch),
            both moments of a parameter in one dtype.
        steps: () fp32 tensors on the parameters' device, the steps of each parameter with this one.
        lr, betas, eps, weight_decay: those of `torch.optim.AdamW`.
        coefficient: () fp32 on the device, by which gradients are multiplied, to clip them. None: 1.
        found_inf: () fp32 on the device. If it is not 0, nothing is updated. None: 0.
    """
    numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    numbers |= {"coefficient": coefficient, "found_inf": found_inf}
    columns = params, grads, exp_avgs, exp_avg_sqs
    if params and use_triton(params[0]) and are_alike(columns):  # what a model's are, found in a third of the time
        return _launch(columns, steps, **numbers)
    kinds: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for tensors in zip(*columns, steps, strict=True):
        if use_triton(tensors[0]) and in_one_order(tensors[:4]):
            kinds.setdefault(tuple(x.dtype for x in tensors[:3]), []).append(tensors)
        else:
            adamw_reference(*([x] for x in tensors), **numbers)
    for rows in kinds.values():
        *columns, of_kind = zip(*rows, strict=True)
        _launch(columns, of_kind, **numbers)


def _launch(
    columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, coefficient: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Update parameters. columns: they, gradients and both moments, each of one dtype."""
    device = columns[0][0].device
    numels = tuple(map(Tensor.numel, columns[0]))
    chunks = chunks_of(numels, CHUNK, device)
    if not len(chunks):  # only tensors without numbers
        return
    addresses = [list(map(Tensor.data_ptr, column)) for column in (*columns, steps)]
    table = table_of(itertools.chain.from_iterable(zip(*addresses, numels, strict=True)), device)
    # torch.bfloat16 -> tl.bfloat16
    kinds = (getattr(tl, str(column[0].dtype).removeprefix("torch.")) for column in columns[:3])
    constants = dict(zip(("PARAM", "GRAD", "MOMENT"), kinds, strict=True))
    logs = (math.log(beta) if beta else -math.inf for beta in betas)  # b^t = e^(t log b), since t is on the device
    scalars = lr, 1 - lr * weight_decay, *logs, *(1 - beta for beta in betas), eps
    launch = Launch(
        _kernel, (len(chunks),), *scalars, **constants, ALIGNED=are_aligned(addresses[:4]), CHUNK=CHUNK, num_warps=WARPS
    )
    if not launch(table, chunks, coefficient, found_inf, has_twin=True):
        params, grads, exp_avgs, exp_avg_sqs = columns
        return adamw_reference(
            params, grads, exp_avgs, exp_avg_sqs, steps, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            coefficient=coefficient, found_inf=found_inf,
        )  # fmt: skip
    for column in (columns[0], *columns[2:]):
        increment_version(column)  # a kernel doesn't tell autograd
