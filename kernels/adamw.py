"""AdamW over all tensors of a model in one launch, with the gradients clipped on their way in.

    g = coefficient g        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = (1 - lr decay) p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

Shapes    p, g, m, v: any, in the same memory layout; t: () fp32, the steps of p with this one
Method    A table holds the tensors' addresses; each program finds its tensor there, and updates CHUNK numbers of it.
          The coefficient of clipping is a number on the device, so that gradients need not be written to be clipped.
          Moments may be in 8 bits (eight_bits.py). Weights in bf16 may be rounded up or down by chance, so that their
          mean is right: an update below half of their last digit is lost otherwise. 16 bits of a counter-based
          generator are added below that digit. They come from the weight's place, the tensor's number, t and a seed,
          and so are the same on each rank, after a resume, and for any CHUNK.
Numerics  fp32 inside; p, m and v are rounded once when stored. As torch's fused AdamW, whose clipping rounds g as well
Traffic   read p, g, m, v; write p, m, v. Clipping apart from it: another read and write of g
Source    Loshchilov and Hutter 2019, arXiv:1711.05101; many tensors a launch: apex's multi_tensor_apply; the generator:
          Philox 4x32, Salmon et al. 2011; rounding by chance: Gupta et al. 2015, arXiv:1502.02551
"""

import array
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ._dropout import philox
from ._triton import Launch, tl, triton, use_triton
from ._tuning import SHAPES
from .eight_bits import BLOCK, decoded, decoded_reference, encoded, encoded_reference, maps_on


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
CHUNK_8BIT, WARPS_8BIT = SHAPES.ADAMW_8BIT
BLOCK_ = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class ByChance:
    """Rounding of bf16 parameters to either neighbour, so that their mean is what was rounded.

    Attributes:
        seed: below 2^63, the same on all ranks.
        numbers: of each parameter, by which their bits differ, below 2^31.
    """

    seed: int
    numbers: Sequence[int]


def adamw_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    coefficient: Tensor | None = None, found_inf: Tensor | None = None,
    largest: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None, floor: bool = True,
    rounding: ByChance | None = None,
) -> None:  # fmt: skip
    """Compute `adamw_` in plain torch."""
    if found_inf is not None and bool(found_inf):
        return
    for i, (p, g, m, v, t) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        wide = torch.promote_types(p.dtype, torch.float32)
        old, grad = p.to(wide), g.to(wide)
        grad = grad if coefficient is None else grad * coefficient
        if largest is None:
            mean, square = m.to(wide), v.to(wide)
        else:
            mean = decoded_reference(m, largest[0][i], signed=True).to(wide)
            square = decoded_reference(v, largest[1][i], signed=False).to(wide)
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad * grad
        corrections = [1 - beta ** float(t) for beta in betas]
        update = mean / ((square / corrections[1]).sqrt() + eps)
        new = (1 - lr * weight_decay) * old - lr / corrections[0] * update
        if rounding is not None and p.dtype == torch.bfloat16:
            new = rounded_reference(new, rounding.seed, rounding.numbers[i], int(t))
        p.copy_(new)
        if largest is not None:
            mean, maxima = encoded_reference(mean, signed=True)
            largest[0][i].copy_(maxima)
            square, maxima = encoded_reference(square, signed=False, floor=floor)
            largest[1][i].copy_(maxima)
        m.copy_(mean)
        v.copy_(square)


def rounded_reference(x: Tensor, seed: int, number: int, step: int) -> Tensor:
    """Return x (any, fp32), rounded to bf16 by chance, as fp32."""
    group = torch.arange(-(-x.numel() // 8), device=x.device)  # one call of the generator makes the bits of eight
    counter = [group & 0xFFFFFFFF, group >> 32, torch.full_like(group, number), torch.full_like(group, step)]
    words = torch.stack(philox(torch.tensor(seed, device=x.device), counter), -1)
    bits = torch.stack((words & 0xFFFF, words >> 16), -1).flatten()[: x.numel()].view(x.shape)
    rounded = (x.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


@triton.jit
def _kernel(
    table_ptr, chunks_ptr, coefficient_ptr, found_inf_ptr, maps_ptr, lr, keep, log_beta1, log_beta2, rest1, rest2, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, COLUMNS: tl.constexpr, FLOOR: tl.constexpr,
    BY_CHANCE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Update one chunk.

    table_ptr: int64, COLUMNS for each tensor: the addresses of p, g, m, v and t, its numel, and where moments are in 8
    bits or p is rounded by chance the addresses of the largest magnitudes of m and v, its number, and the seed.
    chunks_ptr: int32, for each program its tensor and the chunk's number in it. keep: 1 - lr decay. rest1, rest2:
    1 - beta.
    """
    if found_inf_ptr is not None:
        # As torch does for a gradient scaler: the step is skipped on the device, and the host does not learn of it.
        if tl.load(found_inf_ptr) != 0.0:
            return
    chunk = tl.program_id(0).to(tl.int64)  # int64: a tensor may have more than 2^31 numbers
    row = table_ptr + tl.load(chunks_ptr + 2 * chunk).to(tl.int64) * COLUMNS
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
    count = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    step = count.to(tl.float64)
    rate = lr / (1.0 - tl.exp(step * log_beta1)).to(tl.float32)  # fp64: at first these are small differences
    unbias = tl.rsqrt((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
    coefficient = 1.0
    if coefficient_ptr is not None:
        coefficient = tl.load(coefficient_ptr)
    pointers = p_ptr, g_ptr, m_ptr, v_ptr
    numbers = coefficient, keep, rest1, rest2, rate, unbias, eps
    if start + CHUNK <= numel:  # a mask would keep loads from being 16 bytes wide
        _update(pointers, row, maps_ptr, start, numel, count, numbers, FLOOR, BY_CHANCE, True, CHUNK)
    else:
        _update(pointers, row, maps_ptr, start, numel, count, numbers, FLOOR, BY_CHANCE, False, CHUNK)


@triton.jit
def _update(
    pointers, row, maps_ptr, start, numel, count, numbers, FLOOR: tl.constexpr, BY_CHANCE: tl.constexpr,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    p_ptr, g_ptr, m_ptr, v_ptr = pointers
    coefficient, keep, rest1, rest2, rate, unbias, eps = numbers
    EIGHT_BITS: tl.constexpr = m_ptr.dtype.element_ty == tl.uint8
    if EIGHT_BITS:
        block = start // BLOCK_ + tl.arange(0, CHUNK // BLOCK_)
        at = block[:, None] * BLOCK_ + tl.arange(0, BLOCK_)[None, :]
    else:
        at = start + tl.arange(0, CHUNK)
    mask = None if WHOLE else at < numel
    g = tl.load(g_ptr + at, mask=mask).to(tl.float32) * coefficient
    m = tl.load(m_ptr + at, mask=mask)
    v = tl.load(v_ptr + at, mask=mask)
    if EIGHT_BITS:
        inside = block * BLOCK_ < numel
        m_largest = tl.load(row + 6).to(tl.pointer_type(tl.float32)) + block
        v_largest = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + block
        m = decoded(maps_ptr, m, tl.load(m_largest, mask=inside, other=0.0))
        v = decoded(maps_ptr + 256, v, tl.load(v_largest, mask=inside, other=0.0))
    m, v = m.to(tl.float32), v.to(tl.float32)
    p = tl.load(p_ptr + at, mask=mask).to(tl.float32)
    m += rest1 * (g - m)  # b1 m + (1 - b1) g with one product
    v += rest2 * (g * g - v)
    p = p * keep - rate * m / (tl.sqrt(v) * unbias + eps)  # weight decay first, of the old parameter
    if BY_CHANCE:
        p = _rounded(p, start, tl.load(row + 8), count, tl.load(row + 9))
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    if EIGHT_BITS:
        if not WHOLE:
            m, v = tl.where(mask, m, 0.0), tl.where(mask, v, 0.0)
        m, most = encoded(m, True, FLOOR)
        tl.store(m_largest, most, mask=inside)
        v, most = encoded(v, False, FLOOR)
        tl.store(v_largest, most, mask=inside)
    tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x, start, number, count, seed):
    """Round x, any shape of numbers in a row from `start`, to bf16 by chance."""
    group = start // 8 + tl.arange(0, x.numel // 8)
    zero = tl.zeros_like(group).to(tl.uint32)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(seed, low, high, number.to(tl.uint32) + zero, count.to(tl.uint32) + zero, 7)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # in the order that reshaping turns into c0 c1 c2 c3
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), x.shape).to(tl.int32)
    rounded = ((x.to(tl.int32, bitcast=True) + bits) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # bits added to NaN could make a number of it


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    coefficient: Tensor | None = None, found_inf: Tensor | None = None,
    largest: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None, floor: bool = True,
    rounding: ByChance | None = None,
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
        largest: the moments are codes, uint8, and these the largest magnitudes of their blocks of 256 numbers,
            (ceil(numel / 256),) fp32 for each parameter, of exp_avgs and of exp_avg_sqs. Parameters are contiguous.
        floor: a mean of squares that is not 0 is never stored as 0 in 8 bits.
        rounding: how bf16 parameters are rounded. None: to the nearest.
    """
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor}
    options |= {"coefficient": coefficient, "found_inf": found_inf}
    seed, numbers = (None, range(len(params))) if rounding is None else (rounding.seed, rounding.numbers)
    columns = params, grads, exp_avgs, exp_avg_sqs, steps, *(largest or ())
    if params and use_triton(params[0]) and are_alike(columns[:4]):  # what a model's are, found in a third of the time
        return _launch(columns, numbers, seed, options)
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for *tensors, number in zip(*columns, numbers, strict=True):
        by_triton = use_triton(tensors[0]) and in_one_order(tensors[:4])
        kinds.setdefault((by_triton, *(x.dtype for x in tensors[:3])), []).append((*tensors, number))
    for (by_triton, *_), rows in kinds.items():
        *columns, numbers = zip(*rows, strict=True)
        (_launch if by_triton else _by_torch)(columns, numbers, seed, options)


def _by_torch(
    columns: Sequence[Sequence[Tensor]], numbers: Sequence[int], seed: int | None, options: dict[str, Any]
) -> None:
    params, grads, means, squares, steps, *largest = columns
    rounding = None if seed is None else ByChance(seed, numbers)
    more: dict[str, Any] = {"largest": largest or None, "rounding": rounding}
    adamw_reference(params, grads, means, squares, steps, **more, **options)


def _launch(
    columns: Sequence[Sequence[Tensor]], numbers: Sequence[int], seed: int | None, options: dict[str, Any]
) -> None:
    """Update parameters.

    columns: they, gradients, both moments, each of one dtype; steps; the largest magnitudes, if moments are in 8 bits.
    """
    params, grads, means, squares, _, *largest = columns
    device = params[0].device
    numels = tuple(map(Tensor.numel, params))
    chunk, warps = (CHUNK_8BIT, WARPS_8BIT) if largest else (CHUNK, WARPS)
    chunks = chunks_of(numels, chunk, device)
    if not len(chunks):  # only tensors without numbers
        return
    addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
    table = [*addresses[:5], numels]
    by_chance = seed is not None and params[0].dtype == torch.bfloat16
    if largest or by_chance:
        zeros = [0] * len(params)
        table += [*(addresses[5:] or (zeros, zeros)), numbers, [seed or 0] * len(params)]
    # torch.bfloat16 -> tl.bfloat16
    kinds = (getattr(tl, str(column[0].dtype).removeprefix("torch.")) for column in (params, grads, means))
    constants = dict(zip(("PARAM", "GRAD", "MOMENT"), kinds, strict=True))
    betas = options["betas"]
    logs = (math.log(beta) if beta else -math.inf for beta in betas)  # b^t = e^(t log b), since t is on the device
    lr, keep = options["lr"], 1 - options["lr"] * options["weight_decay"]
    launch = Launch(
        _kernel, (len(chunks),), lr, keep, *logs, *(1 - beta for beta in betas), options["eps"], **constants,
        COLUMNS=len(table), FLOOR=options["floor"], BY_CHANCE=by_chance, ALIGNED=are_aligned(addresses[:4]),
        CHUNK=chunk, num_warps=warps,
    )  # fmt: skip
    tensors = options["coefficient"], options["found_inf"], maps_on(device) if largest else None
    on_device = table_of(itertools.chain.from_iterable(zip(*table, strict=True)), device)
    if not launch(on_device, chunks, *tensors, has_twin=True):
        return _by_torch(columns, numbers, seed, options)
    for column in (params, means, squares, *largest):
        increment_version(column)  # a kernel doesn't tell autograd
