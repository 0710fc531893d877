"""Compile every Triton kernel for a GPU, as the ops launch it there, on any machine: no GPU, nothing runs.

    python tests/support/compile_kernels.py [--short | --all | --shared | --all --shared] [--sm=90,100]

Each op goes through forward and backward on small CPU tensors, while Triton is told that the device is such a GPU and
each launch ends after compilation: a kernel gets just the types, constants and divisibilities that the op gives it.
What kernels would have written stays uninitialised. Prints one line of JSON for each kernel compiled, or that could not
be: sm, file, kernel, dtype (of the op's tensors), types, constants, warps and bytes of shared memory, or the error.
One way through each kernel in bf16 and fp32; with --all in fp16 too, and all options in bf16. With --short, a third of
the time, bf16 goes as far as LLVM, where shared memory is laid out, and fp32 as far as Triton's own first IR, in which
a kernel's Python has become code: what the interpreter accepts and the compiler does not fails there. With
--shared as far as LLVM in both, and only what takes much shared memory: the launches of `Architecture` in
kernels/_tuning.py, those of attention in fp32 only with --all, since without tensor cores they compile slowly.

test_compiles.py runs this in its own process: Triton reads TRITON_INTERPRET, which tests set, once.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, where it is not installed

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from liger_trainer.kernels import _triton, _tuning

ALL, SHORT, SHARED = (f"--{name}" in sys.argv[1:] for name in ("all", "short", "shared"))
SMS = [int(sm) for x in sys.argv[1:] if x.startswith("--sm=") for sm in x.removeprefix("--sm=").split(",")] or [90]
SM = SMS[0]  # this process'; each of the others has its own, which imports nothing again

_triton.use_triton = lambda x: True  # before the ops import them
_tuning.architecture_of = lambda device: _tuning.ARCHITECTURES[divmod(SM, 10)]

from kernel_checks import Place  # noqa: E402
from op_table import CASES  # noqa: E402

from liger_trainer.kernels import _linear_head  # noqa: E402
from liger_trainer.kernels._cross_entropy_rows import FIELDS as CE_FIELDS  # noqa: E402
from liger_trainer.kernels._cross_entropy_rows import CrossEntropyOptions, Targets, Tile  # noqa: E402
from liger_trainer.kernels._divergence_shards import divergence_shard  # noqa: E402
from liger_trainer.kernels._divergence_torch import FIELDS, DivergenceOptions, RowInputs  # noqa: E402
from liger_trainer.kernels._dropout import add_gradients, runs_of, values_of_kept  # noqa: E402
from liger_trainer.kernels._logits import LogitTransform  # noqa: E402
from liger_trainer.kernels._low_rank import split  # noqa: E402
from liger_trainer.kernels._vocab_parallel import shard_rows  # noqa: E402
from liger_trainer.kernels.adamw import ByChance, adamw_  # noqa: E402
from liger_trainer.kernels.cross_entropy import cross_entropy  # noqa: E402
from liger_trainer.kernels.decode_attention import QKNorm, Rotation, decode_attention  # noqa: E402
from liger_trainer.kernels.divergence_kinds import ROW_KINDS  # noqa: E402
from liger_trainer.kernels.draw_tokens import draw_tokens, note_tokens  # noqa: E402
from liger_trainer.kernels.four_bits import NestedScales, unpack, unpack_nf4_  # noqa: E402
from liger_trainer.kernels.gradient_norm import gradient_norm  # noqa: E402
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence  # noqa: E402
from liger_trainer.kernels.linear_log_probs import linear_log_probs  # noqa: E402
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence  # noqa: E402
from liger_trainer.kernels.thin_linear import ROWS as THIN_ROWS  # noqa: E402
from liger_trainer.kernels.thin_linear import thin_linear  # noqa: E402

_linear_head.use_triton = lambda x: False  # its result sizes what follows; `heads` compiles it by itself

DTYPES = ("bfloat16", "float32", "float16")
LAST_STAGE = {"bfloat16": "llir", "float32": "llir" if SHARED else "ttir"}  # if short
V = 32003  # longer than any kernel's block, and no multiple of one
N = 32


class Device:
    """As much of a Triton driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", SM, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for JITFunction.run: compiles, reports, launches nothing."""

    def __init__(self):
        self.dtype = ""
        self._run, self._seen = JITFunction.run, set()

    def __call__(self, function: JITFunction, *args, grid, warmup, **kwargs) -> None:
        file = function.__module__.rpartition(".")[2]
        line = {"sm": SM, "file": file, "kernel": function.__name__, "dtype": self.dtype}
        try:
            kernel: Any = self._run(function, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            constants = {k: x for k, x in kwargs.items() if not isinstance(x, Tensor)}
            return self._print(line | {"constants": constants, "error": _reasons(error)})
        names = list(kernel.src.signature)
        constants = {names[i[0]]: x for i, x in kernel.src.constants.items()}
        types = {name: x for name, x in kernel.src.signature.items() if x != "constexpr"}
        found = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
        self._print(line | {"types": types, "constants": constants} | found)

    def shorten(self) -> None:
        """Leave out the stages after the last one, under other names in Triton's cache."""
        backend: Any = CUDABackend
        add_stages, version = backend.add_stages, backend.hash

        def add_first_stages(*args) -> None:
            add_stages(*args)
            stages = args[1]
            names = list(stages)
            for name in names[names.index(LAST_STAGE[self.dtype]) + 1 :]:
                stages[name] = _left_out

        backend.add_stages = add_first_stages
        backend.hash = lambda backend: f"{version(backend)} as far as {LAST_STAGE[self.dtype]}"

    def _print(self, line: dict) -> None:
        text = json.dumps(line, default=str)
        if text not in self._seen:
            self._seen.add(text)
            print(text, flush=True)


def _left_out(source: Any, metadata: dict) -> bytes:
    metadata.setdefault("name", "")
    metadata.setdefault("shared", 0)
    return b""


def _reasons(error: BaseException | None) -> str:
    """The compiler's error, and of those in functions that the kernel calls, from the outside inwards."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(texts)


def in_every_way(dtype: torch.dtype) -> bool:
    return ALL and dtype == torch.bfloat16 and not SHARED


def is_slow(dtype: torch.dtype) -> bool:
    """Of attention, and not asked for."""
    return dtype == torch.float32 and not ALL


def leaf(*shape: int, dtype: torch.dtype, frozen: bool = False) -> Tensor:
    return torch.rand(shape).to(dtype).requires_grad_(not frozen)


def step(op: Callable, *args, **options) -> None:
    """Forward and backward, with another gradient for each output."""
    result = op(*args, **options)
    outputs = [x for x in ([result] if isinstance(result, Tensor) else result) if x.requires_grad]
    torch.autograd.backward(outputs, [torch.rand_like(x) for x in outputs])


# Larger than any block, and no multiple of one; in turn widths that blocks divide, and one row a tile.
WIDE = {"rows": N + 1, "hidden": 1000, "inner": 80, "vocab": V, "rank": 16, "width": 128, "positions": 33}
OTHER_SIZES: dict[str, list[dict[str, int]]] = {
    "rms_norm": [{"rows": N, "hidden": 4096}, {"rows": N, "hidden": 16384}],
    "add_rms_norm": [{"rows": N, "hidden": 4096}], "layer_norm": [{"rows": N, "hidden": 4096}],
    "gated_rms_norm": [{"rows": 32 * N, "hidden": 120}, {"hidden": 8184}], "swiglu": [{"rows": N, "hidden": 512}],
    "document_attention": [{"rows": 4096}, {"width": 64}, {"width": 256}, {"width": 512}],
    "lora_experts": [{"hidden": 2048, "rank": 64}, {"inner": 1200}],
}  # fmt: skip
# What takes much shared memory: ops of the table, in these sizes.
HUNGRY: dict[str, list[dict[str, int]]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm"), [{"rows": N, "hidden": 4096}]),
    "document_attention": [{"width": 128}, {"width": 256}, {"width": 512}],
}
ALWAYS = (
    "swiglu, packed",
    "kl_div, logits",
    "document_attention, sinks",
)  # by kernels that no op's first form launches
SET_THEMSELVES = {"document_attention": {"rows": 70, "width": 128}, "lora_experts": {"rows": N, "hidden": 72}}


def table(dtype: torch.dtype) -> None:
    """Every op of the layers and of given distributions; in every form, and frozen, if asked for."""
    for name, case in CASES.items():
        if SHARED and (name not in HUNGRY or name == "document_attention" and is_slow(dtype)):
            continue
        if name not in ALWAYS and name != case.op and not in_every_way(dtype):
            continue
        size = WIDE | SET_THEMSELVES.get(case.op, {})
        if "mrope_section" in case.options or "groups" in case.options or "three" in case.form:
            size = {}
        sizes_of = HUNGRY if SHARED else {name: [{}, *(OTHER_SIZES.get(name, []) if in_every_way(dtype) else [])]}
        for sizes in [size | other for other in sizes_of[name]]:
            tensors = case.inputs(Place("", "cpu", dtype), **sizes)
            leaves = case.leaves_of(tensors)
            for trained in [leaves, *([leaves[:1], leaves[1:]] if in_every_way(dtype) else [])]:
                given = {k: x.detach().requires_grad_(k in trained) if isinstance(x, Tensor) and x.is_floating_point()
                         else x for k, x in tensors.items()}  # fmt: skip
                if trained:
                    step(case.function, **given, **case.options)


def low_rank(dtype: torch.dtype) -> None:
    """Dropout of adapters, and what LoRA ops do with fp32 adapters over a bf16 base, which takes a GPU."""
    x, dx, seed = torch.rand(N, 1000).to(dtype), torch.rand(N, 1000).to(dtype), torch.zeros(1, dtype=torch.int64)
    a, values = torch.rand(768, 1000).to(dtype), torch.rand(N, 768).to(dtype)
    every = ((1, 16, 1), (1, 16, 3), (1, 128, 1), (4, 16, 1), (4, 16, 3), (3, 64, 2), (1, 1, 1))
    # in fp32 the backward of three adapters takes most shared memory
    hungry = [each for each in every if each[2] == 3] if dtype == torch.float32 else []
    for slots, rank, count in hungry if SHARED else every if in_every_way(dtype) else every[1:2]:
        runs = runs_of(((rank, count, 2.0),) * count, count, slots)  # a rank, threshold or number of 1 is a constant
        part = slots * rank * count
        values_of_kept(x, a[:part], seed, runs, slots, (values.float() if slots == 3 else values)[:, :part])
        add_gradients(values[:, :part], a[:part], seed, runs, slots, x, dx)
    if dtype != torch.bfloat16 or SHARED:
        return
    runs = runs_of(((16, 3277, 2.0),), 0, 1)
    add_gradients(values[:, :16], a[:16], seed, runs, 1, None, dx)
    add_gradients(values[:, :16], a[:16], seed, runs, 1, x, None)
    values_of_kept(x, a[:16].float(), seed, runs, 1, values[:, :16].float())
    add_gradients(values[:, :16].float(), a[:16].float(), seed, runs, 1, x, dx)
    for count, form in product((1, 3), ("hml", "hmlh", "hhhm")):
        split(torch.rand(N, count, 16), form, torch.empty(N, len(form), 40, dtype=dtype)[..., 8:24], 2.0)


def heads(dtype: torch.dtype) -> None:
    """Losses of given logits and of a head: always the commonest forms, all of `further` if asked for."""
    hidden, weight, bias = leaf(N, 16, dtype=dtype), leaf(V, 16, dtype=dtype), leaf(V, dtype=dtype)
    labels = torch.randint(V, (N,)).index_fill(0, torch.tensor([0]), -100)
    for num_items in (None, torch.tensor(3.0)):
        _linear_head._find_triton(labels, num_items, -100)
    _triton._probe_kernel[(1,)](torch.zeros(16), BLOCK=16)
    logits = leaf(N, V, dtype=dtype)
    teacher = leaf(N, 24, dtype=dtype), leaf(V, 24, dtype=dtype)
    cache = torch.stack([torch.randperm(V)[:50] for _ in range(N)]), torch.full((N, 50), -5.0)
    recompute, mix = dict(recompute=True, workspace_mb=0.5), dict.fromkeys(KINDS, 0.3)
    smooth = dict(label_smoothing=0.1, z_loss=0.1, softcap=5.0, temperature=2.0)
    options = dict(softcap=5.0, scale=1.5, temperature=2.0, token_weight=torch.rand(N))
    every, ce = options | dict(label_smoothing=0.1, z_loss=0.1), dict(labels=labels, ce_weight=0.5)
    both = dict(kind=mix, teacher_share=0.5, **ce, teacher_softcap=3.0, teacher_bias=bias)
    # the op, what it is given, its options: always, and further ones
    forms: list[tuple[Callable, tuple, list[dict], list[dict]]] = [
        (lambda *args, **how: cross_entropy(args[0] * 1, *args[1:], **how), (logits, labels.clamp(min=0)),
         [{"inplace": inplace} for inplace in (False, True)],
         [dict(weight=torch.rand(V), reduction=reduction, inplace=inplace, **smooth)
          for reduction, inplace in product(("mean", "none"), (False, True))]),
        (linear_cross_entropy, (hidden, weight, labels), [{}, recompute],
         [dict(bias=bias, dft=True, **every), dict(bias=bias, reduction="none", **every, **recompute)]),
        (lambda *args, **how: [sum(linear_log_probs(*args, **how)[:2])], (hidden, weight, labels), [{}],
         [dict(bias=bias, softcap=5.0, mean_logits=True)]),
        (linear_divergence, (hidden, weight, *teacher), [{}], [
            dict(kind="reverse_kl", **ce), dict(kind="jsd", logits_dtype=torch.float32),
            *({"kind": kind} for kind in ("skew_kl", "skew_reverse_kl", "tvd")),
            dict(kind={"tvd": 0.0, "reverse_kl": 1.0}, teacher_share=0.5), dict(reduction="none", **recompute),
            dict(bias=bias, **every, **both),
        ]),
        (linear_sparse_divergence, (hidden, weight, *cache), [{}], [
            dict(tail="none", **ce, top_ids=labels), dict(bias=bias, **ce, **options),
            *({"kind": kind} for kind in ("reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd")),
            dict(kind=mix, bias=bias, **ce, top_ids=labels, **options),
        ]),
    ]  # fmt: skip
    for op, given, always, further in forms:
        for how in [*always, *further * in_every_way(dtype)]:
            step(lambda *args, op=op, **how: op(*args, **how)[0], *given, **how)
        if in_every_way(dtype):
            with torch.no_grad():
                op(*given)
    if in_every_way(dtype):  # one block
        step(lambda *args: cross_entropy(*args).loss, leaf(N, 101, dtype=dtype), labels.clamp(min=0) % 101)


def optimizer(dtype: torch.dtype) -> None:
    """A step over tensors of any address, with and without clipping and the drop of steps that are not finite."""
    buffer, one = torch.zeros(4 * N + 1, dtype=dtype), torch.ones(())
    options = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for start in range(2):  # aligned or not
        tensors = [[x] for x in buffer[start : start + 4 * N].view(4, N)]
        adamw_(*tensors, [one], **options, coefficient=one, found_inf=one)
        adamw_(*tensors, [one], **options)
        codes, largest = [torch.zeros(N, dtype=torch.uint8)], ([one], [one])
        chances = (None, ByChance(1, [0])) if dtype == torch.bfloat16 else (None,)
        for chance in chances:
            for floor in (True, False):
                eight_bits: dict = {"largest": largest, "floor": floor, "rounding": chance}
                adamw_(*tensors[:2], codes, codes, [one], **options, **eight_bits)
        if dtype == torch.bfloat16:
            adamw_(*tensors, [one], **options, rounding=ByChance(1, [0]))
        gradient_norm(tensors[1])


def sampling(dtype: torch.dtype) -> None:
    """A step of decoding: attention of one token a row over keys that it has kept, and a draw."""
    numbers = torch.zeros(N, dtype=torch.int32)
    widths = (128, 80, 256) if in_every_way(dtype) else (128, 256) if SHARED else (128,)
    for width in () if SHARED and is_slow(dtype) else widths:
        q, new, kept = (torch.rand(N, *shape).to(dtype) for shape in ((8, width), (2, width), (2, 40, width)))
        every = [{}, {"softcap": 5.0, "window": 16}, {"window": 16}] if in_every_way(dtype) else [{}]
        for how in every:
            decode_attention(q, new, new, kept, kept, numbers, numbers, scale=0.1, **how)
        angles, norm = new[:, 0], QKNorm(new[0, 0], new[0, 0], 1e-6, 0.0, True)
        rotation = Rotation(angles, angles, norm)
        decode_attention(q, new, new, kept, kept, numbers, numbers, scale=0.1, rotation=rotation)
    x, weights, residual = (torch.rand(*shape).to(dtype) for shape in ((N, 512), (3, 64, 512), (N, 64)))
    for count, how in (
        (3, {}),
        (1, {"residual": residual}),
        (2, {"activation": "silu"}),
    ):
        thin_linear(x, [*weights[:count]], **how)
    if SHARED:
        thin_linear(torch.rand(THIN_ROWS, 512).to(dtype), [*weights[:2]], activation="silu")  # the most rows
        return
    logits, seed, banned = (
        torch.rand(N, V).to(dtype),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(V, dtype=torch.bool),
    )
    draw_tokens(logits, seed, numbers, numbers, temperature=0.7, banned=banned)
    draw_tokens(logits, seed, numbers, numbers, temperature=0.0)
    tokens, done = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.bool)
    note_tokens(tokens, tokens[:, None].expand(N, 9), numbers, tokens, numbers, numbers, done, seed, numbers[:1])


def four_bits(dtype: torch.dtype) -> None:
    """Weights of each format."""
    codes = torch.zeros(N * 32, dtype=torch.uint8)
    unpack(codes, torch.zeros(N), N * 64, dtype)
    unpack(codes, torch.zeros(N * 2, dtype=torch.uint8), N * 64, dtype)
    nested = NestedScales(torch.zeros(N, dtype=torch.uint8), *(torch.zeros(n) for n in (256, N, 1)))
    for scales in (torch.zeros(N), nested):
        unpack_nf4_(torch.zeros(N * 64, dtype=dtype), codes, scales)


class OneRank:
    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x

    max_ = sum_


def shards(dtype: torch.dtype) -> None:
    """Rows of a head that lies on several ranks, over this rank's columns."""
    student, teacher, labels = torch.randn(N, V, dtype=dtype), torch.randn(N, V, dtype=dtype), torch.randint(V, (N,))
    out, bias, numbers = torch.zeros(len(FIELDS), N), torch.randn(V, dtype=dtype), torch.rand(N)
    mix = dict.fromkeys(ROW_KINDS, 0.3)
    every = DivergenceOptions(mix, 0.3, 0.2, 0.5, 0.5, 2.0, 0.1, 0.1, True, LogitTransform(1.5, 5.0))
    for options in (DivergenceOptions({"forward_kl": 1.0}), DivergenceOptions({ROW_KINDS[-1]: 1.0}), every):
        biases = (bias, bias) if options is every else (None, None)
        rows = RowInputs(student, teacher, *biases, labels, numbers if options is every else None)
        divergence_shard(rows, 32, 2 * V, out, student, options, OneRank())
    rows = RowInputs(student.float(), teacher.float(), None, None, None, None)
    divergence_shard(rows, 32, 2 * V, out, student, DivergenceOptions({"jsd": 1.0}), OneRank())
    values = torch.zeros(len(CE_FIELDS), N)
    shard_rows(Tile(student, None, 32, 2 * V), Targets(labels), values, student, CrossEntropyOptions(), OneRank())


GROUPS = (table, low_rank, sampling) if SHARED else (table, low_rank, heads, optimizer, sampling, four_bits, shards)


def main() -> None:
    global SM
    for sm in SMS:
        child = os.fork()
        if not child:
            SM = sm
            return compile_all()
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)


def compile_all() -> None:
    driver: Any = Device()
    triton.runtime.driver.set_active(driver)
    compiler, jit = Compiler(), cast(Any, JITFunction)
    if SHORT or SHARED:
        compiler.shorten()
    jit.run = lambda function, *args, **kwargs: compiler(function, *args, **kwargs)
    for name in DTYPES if ALL and not SHARED else DTYPES[:2]:
        compiler.dtype = name
        for group in GROUPS:
            group(getattr(torch, name))


if __name__ == "__main__":
    main()
