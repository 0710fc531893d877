"""Compile every Triton kernel for an H100, as the ops launch it, on any machine: no GPU, nothing runs.

    python tests/support/compile_kernels.py [--short | --all]

Each op goes through forward and backward on small CPU tensors, while Triton is told that the device is an H100 and each
launch ends after compilation: a kernel gets just the types, constants and divisibilities that the op gives it. What
kernels would have written stays uninitialised. Prints one line of JSON for each kernel compiled, or that could not be:
file, kernel, dtype (of the op's tensors), types, constants, warps and bytes of shared memory, or the error.
One way through each kernel in bf16 and fp32; with --all in fp16 too, and all options in bf16. With --short, a third of
the time, bf16 goes as far as LLVM, where shared memory is laid out, and fp32 as far as Triton's own first IR, in which
a kernel's Python has become code: what the interpreter accepts and the compiler does not fails there.

test_compiles.py runs this in a process of its own: Triton reads TRITON_INTERPRET, which tests set, once.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
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

from liger_trainer.kernels import _triton

_triton.use_triton = lambda x: True  # before the ops import it

from liger_trainer.kernels import _linear_head  # noqa: E402
from liger_trainer.kernels._cross_entropy_rows import FIELDS as CE_FIELDS  # noqa: E402
from liger_trainer.kernels._cross_entropy_rows import CrossEntropyOptions, Targets, Tile  # noqa: E402
from liger_trainer.kernels._divergence_shards import divergence_shard  # noqa: E402
from liger_trainer.kernels._divergence_torch import FIELDS, DivergenceOptions, RowInputs  # noqa: E402
from liger_trainer.kernels._dropout import add_gradients, runs_of, values_of_kept  # noqa: E402
from liger_trainer.kernels._logits import LogitTransform  # noqa: E402
from liger_trainer.kernels._low_rank import split  # noqa: E402
from liger_trainer.kernels._packed_gate import Gate  # noqa: E402
from liger_trainer.kernels._vocab_parallel import shard_rows  # noqa: E402
from liger_trainer.kernels.activation_linear import activation_linear  # noqa: E402
from liger_trainer.kernels.adamw import adamw_  # noqa: E402
from liger_trainer.kernels.add_rms_norm import add_rms_norm  # noqa: E402
from liger_trainer.kernels.clamped_swiglu import clamped_swiglu  # noqa: E402
from liger_trainer.kernels.cross_entropy import cross_entropy  # noqa: E402
from liger_trainer.kernels.divergence_kinds import ROW_KINDS  # noqa: E402
from liger_trainer.kernels.document_attention import document_attention  # noqa: E402
from liger_trainer.kernels.gated_linear import gated_linear  # noqa: E402
from liger_trainer.kernels.gated_rms_norm import gated_rms_norm  # noqa: E402
from liger_trainer.kernels.geglu import geglu  # noqa: E402
from liger_trainer.kernels.gradient_norm import gradient_norm  # noqa: E402
from liger_trainer.kernels.jsd import jsd  # noqa: E402
from liger_trainer.kernels.kl_div import kl_div  # noqa: E402
from liger_trainer.kernels.layer_norm import layer_norm  # noqa: E402
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence  # noqa: E402
from liger_trainer.kernels.linear_log_probs import linear_log_probs  # noqa: E402
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence  # noqa: E402
from liger_trainer.kernels.lora_experts import SILU, StackedProjection, lora_experts  # noqa: E402
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope  # noqa: E402
from liger_trainer.kernels.relu2 import relu2  # noqa: E402
from liger_trainer.kernels.rms_norm import rms_norm  # noqa: E402
from liger_trainer.kernels.rope import rope  # noqa: E402
from liger_trainer.kernels.swiglu import swiglu  # noqa: E402
from liger_trainer.kernels.tvd import tvd  # noqa: E402

_linear_head.use_triton = lambda x: False  # its result sizes what follows; `heads` compiles it by itself

DTYPES = ("bfloat16", "float32", "float16")
ALL, SHORT = "--all" in sys.argv[1:], "--short" in sys.argv[1:]
LAST_STAGE = {"bfloat16": "llir", "float32": "ttir"}  # if short
V = 32003  # longer than any kernel's block, and no multiple of one
N = 32


class H100:
    """As much of a Triton driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

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
        line = {"file": function.__module__.rpartition(".")[2], "kernel": function.__name__, "dtype": self.dtype}
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
    return ALL and dtype == torch.bfloat16


def leaf(*shape: int, dtype: torch.dtype, frozen: bool = False) -> Tensor:
    return torch.rand(shape).to(dtype).requires_grad_(not frozen)


def step(op: Callable, *args, **options) -> None:
    """Forward and backward, with a gradient of its own for each output."""
    result = op(*args, **options)
    outputs = [x for x in ([result] if isinstance(result, Tensor) else result) if x.requires_grad]
    torch.autograd.backward(outputs, [torch.rand_like(x) for x in outputs])


def norms(dtype: torch.dtype) -> None:
    x, w, b = leaf(N + 1, 1000, dtype=dtype), leaf(1000, dtype=dtype), leaf(1000, dtype=dtype)  # tiles with masks
    step(rms_norm, x, w)
    step(add_rms_norm, x, leaf(N + 1, 1000, dtype=dtype), w)
    step(layer_norm, x, w, b)
    step(gated_rms_norm, x, leaf(N + 1, 1000, dtype=dtype), w)
    if not in_every_way(dtype):
        return
    wide, frozen = leaf(16384, dtype=torch.float32), leaf(4096, dtype=dtype, frozen=True)
    x_4096, x_16384 = leaf(N, 4096, dtype=dtype), leaf(N, 16384, dtype=dtype)  # no masks; one row a tile
    step(rms_norm, x_4096, frozen)
    step(rms_norm, x_16384, wide)
    step(rms_norm, x_16384.detach(), wide, cast_before_weight=True)
    step(rms_norm, leaf(N, 2000, dtype=dtype)[:, :1000])  # strided, no weight
    step(add_rms_norm, x, x.detach().float(), w.float(), cast_before_weight=True)
    step(lambda *given: add_rms_norm(*given)[0], x_4096, x_4096.detach(), frozen)  # the sum is not used
    gate = leaf(N, 4096, dtype=dtype)
    step(gated_rms_norm, x_4096, gate, frozen, activation="sigmoid")
    step(gated_rms_norm, x_4096, gate, leaf(4096, dtype=torch.float32), gate_first=True, groups=4)
    step(gated_rms_norm, x_4096.detach(), gate, frozen, gate_first=True)
    step(gated_rms_norm, leaf(N * 32, 128, dtype=dtype), leaf(N * 32, 128, dtype=dtype), leaf(128, dtype=dtype))
    step(gated_rms_norm, leaf(N, 8192, dtype=dtype), leaf(N, 8192, dtype=dtype), leaf(8192, dtype=dtype))
    step(layer_norm, x_4096, frozen, leaf(4096, dtype=dtype))
    step(layer_norm, x.detach(), w, b.detach())
    step(layer_norm, x)


def rotary(dtype: torch.dtype) -> None:
    B, S, D = 2, 33, 128
    q, k = leaf(B, S, 6, D, dtype=dtype), leaf(B, S, 2, D, dtype=dtype)
    q_rows, k_rows = q.transpose(1, 2), k.transpose(1, 2)
    weights = leaf(D, dtype=dtype), leaf(D, dtype=dtype)
    angles = torch.rand(1, S, D).to(dtype), torch.rand(1, S, D).to(dtype)
    step(rope, q_rows, k_rows, *angles)
    step(qk_norm_rope, q, k, *weights, *angles, cast_before_weight=True)  # Qwen 3
    if not in_every_way(dtype):
        return
    step(rope, q_rows, k_rows.detach(), *angles)
    for shape, options in (
        ((B, S, D), dict(interleaved=True)),
        ((B, S, D // 2), {}),  # the rest of the columns does not turn
        ((3, B, S, D), dict(mrope_section=(16, 24, 24))),
        ((1, S, D // 2), dict(half_width=True)),
        ((1, S, D // 4), dict(half_width=True, interleaved=True)),
    ):
        step(rope, q_rows, k_rows, torch.rand(shape), torch.rand(shape), **options)
    turns = torch.rand(B, S, D), torch.rand(B, S, D)
    step(qk_norm_rope, q, k, *(w.detach() for w in weights), *turns, interleaved=True, offset=1.0)
    partial_turns = turns[0][..., :64], turns[1][..., :64]
    step(qk_norm_rope, q.detach(), k, *(w.float() for w in weights), *partial_turns, cast_before_weight=True)
    over_heads = leaf(6 * D, dtype=dtype), leaf(2 * D, dtype=dtype)  # OLMo 2
    of_axes = torch.rand(3, B, S, D), torch.rand(3, B, S, D)
    step(qk_norm_rope, q, k, *over_heads, *of_axes, norm_over_heads=True, mrope_section=(16, 24, 24))


def packed_rows(dtype: torch.dtype) -> None:
    def run(D: int, heads: int = 4, T: int = 70, **options) -> None:
        q, k, v = leaf(T, heads + 4, D, dtype=dtype).split([heads, 2, 2], 1)
        step(document_attention, q, k, v, torch.tensor([0, 30, T], dtype=torch.int32), **options)

    run(128)
    if not in_every_way(dtype):
        return
    run(64, window=16)
    run(96, heads=2)
    run(128, T=4096)  # a number of tokens that is a multiple of 16
    run(256)


def gated(dtype: torch.dtype) -> None:
    width = 1000
    gate, up, packed = (leaf(N, columns, dtype=dtype) for columns in (width, width, 2 * width))
    weight, bias = leaf(48, width, dtype=dtype), leaf(48, dtype=dtype)
    step(swiglu, gate, up)
    step(swiglu, packed)
    if not in_every_way(dtype):
        return
    step(swiglu, gate[:-1, :512], up[:-1, :512])  # whole blocks
    step(swiglu, packed[:, :width], up.detach())
    step(swiglu, gate.detach(), up.float())
    for approximate in ("tanh", "none"):
        step(geglu, gate, up, approximate=approximate)
        step(geglu, packed, approximate=approximate)
    for x in (gate, packed[:, :width]):
        step(relu2, x)
        step(relu2, x.half())
    for activation in ("gelu", "relu2"):
        step(gated_linear, gate, up, weight, bias, activation=activation)
        step(activation_linear, gate, weight, bias, activation=activation)
    step(gated_linear, packed, None, weight)
    step(clamped_swiglu, gate, up, limit=7.0)
    step(clamped_swiglu, gate, up.detach(), limit=7.0)
    step(clamped_swiglu, packed, limit=7.0, alpha=1.702, shift=1.0, interleaved=True)
    step(gated_linear, gate, up, weight.detach())
    step(gated_linear, gate.detach(), up.detach(), weight)


def low_rank(dtype: torch.dtype) -> None:
    """Dropout of adapters, and what LoRA ops do with fp32 adapters over a bf16 base, which takes a GPU."""
    x, dx, seed = torch.rand(N, 1000).to(dtype), torch.rand(N, 1000).to(dtype), torch.zeros(1, dtype=torch.int64)
    a, values = torch.rand(768, 1000).to(dtype), torch.rand(N, 768).to(dtype)
    every = ((1, 16, 1), (1, 16, 3), (1, 128, 1), (4, 16, 1), (4, 16, 3), (3, 64, 2), (1, 1, 1))
    for slots, rank, count in every if in_every_way(dtype) else every[1:2]:
        runs = runs_of(((rank, count, 2.0),) * count, count, slots)  # a rank, threshold or number of 1 is a constant
        part = slots * rank * count
        values_of_kept(x, a[:part], seed, runs, slots, (values.float() if slots == 3 else values)[:, :part])
        add_gradients(values[:, :part], a[:part], seed, runs, slots, x, dx)
    if dtype != torch.bfloat16:
        return
    runs = runs_of(((16, 3277, 2.0),), 0, 1)
    add_gradients(values[:, :16], a[:16], seed, runs, 1, None, dx)
    add_gradients(values[:, :16], a[:16], seed, runs, 1, x, None)
    values_of_kept(x, a[:16].float(), seed, runs, 1, values[:, :16].float())
    add_gradients(values[:, :16].float(), a[:16].float(), seed, runs, 1, x, dx)
    for count, form in product((1, 3), ("hml", "hmlh", "hhhm")):
        split(torch.rand(N, count, 16), form, torch.empty(N, len(form), 40, dtype=dtype)[..., 8:24], 2.0)


def experts(dtype: torch.dtype) -> None:
    index = torch.stack([torch.randperm(6)[:2] for _ in range(N)])

    def layer(outputs: int, inputs: int, rank: int, bias: bool) -> StackedProjection:
        low = (leaf(6, rank, inputs, dtype=dtype), leaf(6, outputs, rank, dtype=dtype)) if rank else (None, None)
        biases = leaf(6, outputs, dtype=dtype, frozen=True) if bias else None
        return StackedProjection(leaf(6, outputs, inputs, dtype=dtype, frozen=True), biases, *low)

    def run(gate: Gate = SILU, width: int = 72, inner: int = 80, rank: int = 16, bias: bool = False) -> None:
        x, weights = leaf(N, width, dtype=dtype), leaf(N, 2, dtype=dtype)
        step(
            lora_experts,
            x,
            index,
            weights,
            layer(2 * inner, width, rank, bias),
            layer(width, inner, rank, bias),
            gate=gate,
        )

    run()
    if not in_every_way(dtype):
        return
    run(Gate("gelu_tanh", "up first"), inner=1200)  # several blocks of the gate
    run(Gate("gelu"), width=2048, rank=64)
    run(Gate(layout="interleaved", limit=7.0, alpha=1.702, shift=1.0), bias=True)
    run(rank=0, bias=True)  # a bias alone is added
    x, weights = leaf(N, 72, dtype=dtype, frozen=True), leaf(N, 2, dtype=torch.float32, frozen=True)
    step(lora_experts, x, index, weights, layer(160, 72, 5, False), layer(72, 80, 0, False))


def distributions(dtype: torch.dtype) -> None:
    x, t = leaf(2, N, V, dtype=dtype), leaf(2, N, V, dtype=dtype)
    for from_logits in (False, True):
        step(kl_div, x, t, from_logits=from_logits)
    if not in_every_way(dtype):
        return
    frozen, labels = t.detach(), torch.randint(-100, V, (2, N))
    for op, options in (
        (kl_div, {}),
        (kl_div, dict(log_target=True)),
        (kl_div, dict(from_logits=True, temperature=2.0)),
        (jsd, {}),
        (jsd, dict(from_logits=True, temperature=2.0)),
        (tvd, {}),
        (tvd, dict(from_logits=True)),
    ):
        step(op, x, t, **options)
    for from_logits in (False, True):
        step(kl_div, x, frozen, labels=labels, from_logits=from_logits)
        step(jsd, x, frozen, labels=labels, reduction="none", from_logits=from_logits)
    step(kl_div, x[:, 1:], t[:, 1:].float(), reduction="sum")
    with torch.no_grad():
        kl_div(x, t)
        kl_div(x, t, from_logits=True)


def cross_entropies(dtype: torch.dtype) -> None:
    logits, labels = leaf(N, V, dtype=dtype), torch.randint(V, (N,))
    for inplace in (False, True):
        step(loss_of(cross_entropy), logits * 1, labels, inplace=inplace)
    if not in_every_way(dtype):
        return
    every = dict(weight=torch.rand(V), label_smoothing=0.1, z_loss=0.1, softcap=5.0, temperature=2.0)
    for reduction, inplace in product(("mean", "none"), (False, True)):
        step(loss_of(cross_entropy), logits * 1, labels, reduction=reduction, inplace=inplace, **every)
    step(loss_of(cross_entropy), leaf(N, 101, dtype=dtype), labels % 101)


def heads(dtype: torch.dtype) -> None:
    hidden, weight, bias = leaf(N, 16, dtype=dtype), leaf(V, 16, dtype=dtype), leaf(V, dtype=dtype)
    labels = torch.randint(V, (N,)).index_fill(0, torch.tensor([0]), -100)
    for num_items in (None, torch.tensor(3.0)):
        _linear_head._find_triton(labels, num_items, -100)
    _triton._probe_kernel[(1,)](torch.zeros(16), BLOCK=16)
    head = partial(step, loss_of(linear_cross_entropy), hidden, weight, labels)
    teacher = leaf(N, 24, dtype=dtype), leaf(V, 24, dtype=dtype)
    divergence = partial(step, loss_of(linear_divergence), hidden, weight, *teacher)
    recompute = dict(recompute=True, workspace_mb=0.5)
    cache = torch.stack([torch.randperm(V)[:50] for _ in range(N)]), torch.full((N, 50), -5.0)
    sparse = partial(step, loss_of(linear_sparse_divergence), hidden, weight, *cache)
    log_probs = partial(
        step, lambda *args, **options: sum(linear_log_probs(*args, **options)[:2]), hidden, weight, labels
    )
    head()
    head(**recompute)
    log_probs()
    divergence()
    sparse()
    if not in_every_way(dtype):
        return
    every = dict(softcap=5.0, scale=1.5, temperature=2.0, label_smoothing=0.1, z_loss=0.1, token_weight=torch.rand(N))
    head(bias=bias, dft=True, **every)
    head(bias=bias, reduction="none", **every, **recompute)
    log_probs(bias=bias, softcap=5.0, mean_logits=True)
    divergence(kind="reverse_kl", labels=labels, ce_weight=0.5)
    divergence(kind="jsd", logits_dtype=torch.float32)
    for kind in ("skew_kl", "skew_reverse_kl", "tvd"):
        divergence(kind=kind)
    divergence(kind={"tvd": 0.0, "reverse_kl": 1.0}, teacher_share=0.5)
    divergence(reduction="none", **recompute)
    mix = dict.fromkeys(KINDS, 0.3)
    every |= dict(kind=mix, teacher_share=0.5, labels=labels, ce_weight=0.5, teacher_softcap=3.0, teacher_bias=bias)
    divergence(bias=bias, **every)
    sparse(tail="none", labels=labels, ce_weight=0.5, top_ids=labels)
    options = dict(softcap=5.0, scale=1.5, temperature=2.0, token_weight=torch.rand(N))
    sparse(bias=bias, labels=labels, ce_weight=0.5, **options)
    for kind in ("reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"):
        sparse(kind=kind)
    every_kind = dict.fromkeys(KINDS, 0.3)
    sparse(kind=every_kind, bias=bias, labels=labels, ce_weight=0.5, top_ids=labels, **options)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
        linear_divergence(hidden, weight, *teacher)
        linear_sparse_divergence(hidden, weight, *cache)


def optimizer(dtype: torch.dtype) -> None:
    """A step over tensors of any address, with and without clipping and the drop of steps that are not finite."""
    buffer, one = torch.zeros(4 * N + 1, dtype=dtype), torch.ones(())
    options = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for start in range(2):  # aligned or not
        tensors = [[x] for x in buffer[start : start + 4 * N].view(4, N)]
        adamw_(*tensors, [one], **options, coefficient=one, found_inf=one)
        adamw_(*tensors, [one], **options)
        gradient_norm(tensors[1])


def embeddings(dtype: torch.dtype) -> None:
    """Tokens in one span and in several."""


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
    for options in (DivergenceOptions({"forward_kl": 1.0}), DivergenceOptions({"skew_kl": 1.0}), every):
        biases = (bias, bias) if options is every else (None, None)
        rows = RowInputs(student, teacher, *biases, labels, numbers if options is every else None)
        divergence_shard(rows, 32, 2 * V, out, student, options, OneRank())
    rows = RowInputs(student.float(), teacher.float(), None, None, None, None)
    divergence_shard(rows, 32, 2 * V, out, student, DivergenceOptions({"jsd": 1.0}), OneRank())
    values = torch.zeros(len(CE_FIELDS), N)
    shard_rows(Tile(student, None, 32, 2 * V), Targets(labels), values, student, CrossEntropyOptions(), OneRank())


def loss_of(op: Callable) -> Callable:
    return lambda *args, **options: op(*args, **options).loss


GROUPS = (
    norms, rotary, packed_rows, gated, low_rank, experts, distributions, cross_entropies, heads, optimizer, embeddings,
    shards,
)  # fmt: skip


def main() -> None:
    driver: Any = H100()
    triton.runtime.driver.set_active(driver)
    compiler, jit = Compiler(), cast(Any, JITFunction)
    if SHORT:
        compiler.shorten()
    jit.run = lambda function, *args, **kwargs: compiler(function, *args, **kwargs)
    for name in DTYPES if ALL else DTYPES[:2]:
        compiler.dtype = name
        for group in GROUPS:
            group(getattr(torch, name))


if __name__ == "__main__":
    main()
