"""Launch shapes: sizes of blocks and tiles, warps, and what decides between two ways of computing, as sweeps found
them.

Nothing is autotuned. A tuner times kernels when they first run, so two runs could choose different tiles, and their
sums would round differently: here a run that is repeated or resumed gives the same bits. It would also add seconds to
every start, and could not time anything while a CUDA graph records. Shapes are therefore measured once, by the
benchmarks of `benchmarks/`, and written down here with the commit of the sweep, whose message has the figures.

Swept is the H100. Most shapes need so little of a multiprocessor that every architecture takes them as they are: class
H100. What shared memory decides is in a table per architecture: ARCHITECTURES, by compute capability, with what each
takes from another. Right on all of them, which the tests compile for; fastest, as far as we know, on the H100.
"""

import functools
from dataclasses import dataclass, replace

import torch

from ._triton import INTERPRETED, triton


@dataclass(frozen=True, eq=False)  # compared, and hashed, by identity
class Architecture:
    """The launch shapes that shared memory decides, for GPUs that have `shared` bytes of it a block."""

    name: str
    shared: int
    # Attention within documents, by the columns of a head that they go up to: queries and keys of a block, warps,
    # stages (c8aeca4; 256 and 512: docs/results/attention-nvidia-h100-80gb-hbm3.md). "narrow" is dkdv where windows are
    # of 256 tokens at most.
    attention: dict[str, dict[int, tuple[int, int, int, int]]]
    attention_exact: dict[str, dict[int, tuple[int, int, int, int]]]  # in fp32: no tensor cores, large compile slowly
    # Attention of one token, by the columns of a head that they go up to: keys of a block, warps, stages (428bfe8d);
    # and bytes of keys to which a block is cut.
    decode: dict[int, tuple[int, int, int]]
    decode_bytes: int
    norm_stages: tuple[int, int]  # tiles that a norm's backward prefetches: of 16-bit numbers, and wider ones (b3b0ff8)
    swept: bool = False


ATTENTION = "forward", "dq", "dkdv", "dk", "dv"  # kernels of attention within documents

HOPPER = Architecture(
    "Hopper",
    227 * 1024,
    attention={
        "forward": {128: (64, 32, 4, 3), 256: (128, 64, 8, 2), 512: (64, 32, 8, 2)},
        "dq": {64: (64, 32, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2), 512: (64, 16, 8, 2)},
        "dkdv": {128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
        "dk": {512: (32, 64, 8, 1)},
        "dv": {512: (32, 64, 8, 2)},
        "narrow": {64: (32, 64, 4, 3)},
    },
    attention_exact=dict.fromkeys(ATTENTION, {256: (32, 32, 4, 1), 512: (16, 16, 4, 1)}),
    decode={64: (32, 4, 3), 256: (64, 4, 2)},
    decode_bytes=32 * 1024,
    norm_stages=(3, 2),
    swept=True,
)
BLACKWELL = replace(HOPPER, name="Blackwell", swept=False)  # of data centres: as much shared memory
AMPERE = replace(  # A100: all of Hopper's fit but for wide heads
    HOPPER, name="Ampere", shared=163 * 1024, swept=False,
    attention={
        "forward": HOPPER.attention["forward"] | {256: (64, 32, 4, 2), 512: (64, 32, 8, 1)},
        "dq": HOPPER.attention["dq"] | {512: (32, 32, 8, 1)},
        "dkdv": HOPPER.attention["dkdv"],
        "dk": {512: (32, 32, 8, 1)},
        "dv": {512: (32, 64, 8, 1)},
        "narrow": HOPPER.attention["narrow"],
    },
)  # fmt: skip
# A40, RTX 30; L4, L40S, RTX 40; RTX 50: 100 KiB a multiprocessor, so half the keys or queries where heads are wide.
GA10X = Architecture(
    "Ampere (GA10x)",
    99 * 1024,
    attention={
        "forward": HOPPER.attention["forward"] | {256: (64, 32, 4, 2), 512: (16, 32, 4, 1)},
        "dq": HOPPER.attention["dq"] | {256: (32, 32, 4, 2), 512: (16, 16, 4, 1)},
        "dkdv": HOPPER.attention["dkdv"] | {256: (32, 32, 4, 2)},
        "dk": {512: (16, 16, 4, 1)},
        "dv": {512: (16, 16, 4, 1)},
        "narrow": HOPPER.attention["narrow"],
    },
    attention_exact=dict.fromkeys(ATTENTION, {128: (32, 32, 4, 1), 256: (16, 16, 4, 1), 512: (16, 16, 4, 1)})
    | {"dq": {128: (32, 32, 4, 1), 256: (16, 16, 4, 1), 512: (8, 16, 4, 1)}}
    | dict.fromkeys(("dk", "dv"), {512: (16, 8, 4, 1)}),
    decode=HOPPER.decode,
    decode_bytes=16 * 1024,
    norm_stages=(2, 1),
)
ADA = replace(GA10X, name="Ada")
GB20X = replace(GA10X, name="Blackwell (GB20x)")
ARCHITECTURES = {
    (8, 0): AMPERE, (8, 6): GA10X, (8, 7): AMPERE, (8, 9): ADA, (9, 0): HOPPER,
    (10, 0): BLACKWELL, (10, 3): BLACKWELL, (12, 0): GB20X, (12, 1): GB20X,
}  # fmt: skip
BY_MEMORY = HOPPER, AMPERE, GA10X


@functools.cache
def architecture_of(device: torch.device) -> Architecture:
    """Return a device's table, having asked the device how much shared memory it gives to a block.

    A capability that is not listed, or a device that gives less than its architecture does, takes the first table of
    BY_MEMORY that fits, and the last where none does. Triton then refuses what is too large, and `Launch` says so.
    """
    if device.type == "cpu" or INTERPRETED:
        return HOPPER
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    capability = torch.cuda.get_device_capability(index) if torch.version.cuda and device.type == "cuda" else (0, 0)
    return table_for(capability, shared)


def table_for(capability: tuple[int, int], shared: int) -> Architecture:
    known = ARCHITECTURES.get(capability)
    fitting = (table for table in (known, *BY_MEMORY) if table is not None and table.shared <= shared)
    return next(fitting, BY_MEMORY[-1])


class H100:
    """Compute capability 9.0: 132 multiprocessors, 228 KiB of shared memory each, 50 MiB of L2 cache."""

    # Fused linear losses. MiB of logits that are held at a time (0c90350); half of it costs about 5 % of time.
    WORKSPACE_MB = 512
    # Columns of the tiles that lie in the weight's gradient, and of the last ones (29d202f): multiples fill the
    # products' last wave.
    WIDE_TILE, LAST_TILE = 2048, 1024
    # Bytes that the GPU moves while the host launches the kernels of one tile (b3b0ff8).
    LAUNCH_BYTES = 3e8

    # Rows of logits, (columns at a time, warps). With 32 warps a multiprocessor holds one row at a time, so that L2
    # still has it for the second pass (b3b0ff8). A tile of recomputed logits is read once: with 4 warps a row, many
    # rows are on their way at a time (21aee70).
    CROSS_ENTROPY, CROSS_ENTROPY_TILE = (16384, 32), (2048, 4)
    DIVERGENCE = 1024, 32  # lanes, each of 16 bytes, and warps (b24ac0c)
    SPARSE_ROWS = 8192, 32  # beca325
    LABELLED_ROWS = 4096, 8  # not swept: one program takes microseconds

    # Norms: numbers of a program's tile, and columns for each of its warps (37c2c84); the backward's (b3b0ff8).
    NORM_FORWARD, NORM_COLUMNS_A_WARP = 4096, 512
    NORM_BACKWARD, NORM_BACKWARD_WARPS = 8192, 8
    NORM_SUM = 128, 32, 8  # rows, columns, warps of the sum over programs (b3b0ff8)
    LAYER_NORM_BY_TORCH = 2**22  # numbers up to which torch's own is as fast, and spares the host 50 us (3512d1e)

    # Elements of a program, and warps.
    GATED = 512, 4  # b3b0ff8
    PACKED_GATE = 1024  # columns at a time; not swept
    RESCALED = 2**16  # most programs find nothing to do, and starting one takes time (0c90350)
    ROPE = 4096, 4  # 31209f9
    # (elements of a tile, elements of a warp) of both passes; programs a multiprocessor and prefetched tiles of the
    # backward of trainable weights (b3b0ff8)
    QK_NORM_FORWARD, QK_NORM_BACKWARD = (1024, 512), (2048, 512)
    QK_NORM_PROGRAMS, QK_NORM_STAGES = 4, 1
    ADAMW = 2048, 8  # 52390b3
    ADAMW_8BIT = 1024, 4  # numbers in whole blocks of 256, and warps: of (2048, 8), (2048, 4), (4096, 8) the fastest
    GRADIENT_NORM = 16384, 4096, 8  # elements of a program, elements at a time, warps (52390b3)

    # Adapters. Dropout on the way in: rows, columns, numbers of A at most, and warps (4b166ae); (rows, columns, warps,
    # programs at a time by their registers) of the backward for few, some and many numbers a column (e516faf).
    DROPOUT_FORWARD = 32, 128, 4096, 4
    DROPOUT_BACKWARD = (16, 128, 4, 528), (32, 128, 4, 264), (32, 64, 8, 264)
    # The activation with adapters' terms: rows, columns, warps, prefetched tiles, and programs wanted (39929257).
    LORA_GATED_FORWARD, LORA_GATED_BACKWARD = (64, 64, 4, 2, 384), (32, 64, 4, 2, 1568)
    # Numbers of a result from which an adapter's term is written first, for the base product to add to. Below, L2 still
    # has the result when the term is added. Measured with 8,192 rows of 1,024 and of 4,096: docs/lora.md.
    TERM_FIRST = 2**24
    SPLIT = 1024, 4  # numbers of a program that splits fp32 into bf16, and warps; not swept
    EXPERTS_ADD, EXPERTS_COMBINE = (64, 128, 4), 1024  # rows, columns, warps; columns (f283d92)

    # Attention within documents: tokens a program of bounds, and at a time of the sinks' gradient; programs of dk and
    # dv that give each multiprocessor two. Not swept.
    ATTENTION_BOUNDS, ATTENTION_SINKS, ATTENTION_PROGRAMS = 256, 1024, 264
    CAUSAL_CONV = 16, 128, 4  # tokens, channels, warps; not swept

    # Sampling: tiles of a row of logits, columns at a time, warps (not swept).
    DRAW_TOKENS = 16, 1024, 4
    # Products of few rows: the most rows; columns of a tile, numbers of K at a time, warps, stages, and stages where
    # there are more programs than multiprocessors; programs wanted (428bfe8d).
    THIN_ROWS, THIN_TILE, THIN_PROGRAMS = 128, (32, 128, 4, 4, 3), 90

    # Divergences of given distributions: entries and warps of a program, or of a step along a row; bytes of two rows
    # up to which two of them a multiprocessor stay in L2 between a forward's passes (not swept, from its size).
    GIVEN, GIVEN_LOGITS = (4096, 8), (4096, 16)
    EARLY_ROW_BYTES = 128 * 1024


SHAPES = H100
