"""How the kernels are checked: every output of an op against fp64, within twice the error of plain torch."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_trainer.kernels import (
    _cross_entropy_rows,
    _divergence_kernels,
    linear_cross_entropy,
    linear_divergence,
)
from liger_trainer.kernels._triton import INSTALLED, INTERPRETED

CUDA = torch.cuda.is_available() and not INTERPRETED
TRITON_DEVICE = "cuda" if CUDA else "cpu"
PATHS: dict[str, list[torch.dtype]] = {"torch": [torch.float64, torch.float32, torch.bfloat16, torch.float16]}
if INSTALLED and (CUDA or INTERPRETED):  # the interpreter computes in numpy, which has no bf16
    PATHS["triton"] = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA

LEAVES = ("hidden", "weight", "bias")
# Options that a reference does not take.
ONLY_OURS = (
    "workspace_mb", "logits_dtype", "rows", "recompute", "accumulate_dtype", "overwrite_hidden", "inplace",
)  # fmt: skip


class Place(NamedTuple):
    """Where a test runs an op: "triton" or "torch", and the device and dtype of its tensors."""

    path: str
    device: str
    dtype: torch.dtype


def set_path(monkeypatch, path: str, block: int = 16) -> str:
    """Send every op down the Triton or the torch path, with blocks so short that a small vocabulary takes several.

    Returns the device to put tensors on.
    """
    for module in _with_paths(len(sys.modules)):
        monkeypatch.setattr(module, "use_triton", lambda x: path == "triton")
    for name in ("BLOCK", "TILE_BLOCK"):
        monkeypatch.setattr(_cross_entropy_rows, name, block)
    monkeypatch.setattr(_divergence_kernels, "LANES", max(2, block // 2))
    monkeypatch.setattr(_divergence_kernels, "VECTOR_BYTES", 8)
    return TRITON_DEVICE if path == "triton" else "cpu"


@functools.cache
def _with_paths(imported: int) -> list[Any]:
    """Return the modules that ask which path to take, looked for whenever others have been imported."""
    named = [(name, module) for name, module in sys.modules.items() if name.startswith("liger_trainer.kernels.")]
    return [module for _, module in named if hasattr(module, "use_triton")]


def random_inputs(
    n: int, h: int, v: int, *, dtype=torch.float32, device="cpu", bias=False, ignored=0.0, seed=0, spread=3.0
) -> dict[str, Tensor]:
    """Inputs of `linear_cross_entropy`. Logits have a standard deviation of about `spread`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "hidden": torch.randn(n, h, generator=generator) * (spread / h**0.5),
        "weight": torch.randn(v, h, generator=generator),
    }
    if bias:
        tensors["bias"] = torch.randn(v, generator=generator)
    labels = torch.randint(v, (n,), generator=generator)
    labels[: n // 2] = (tensors["hidden"] @ tensors["weight"].t()).argmax(-1)[: n // 2]  # so that is_top1 is mixed
    labels[torch.rand(n, generator=generator) < ignored] = -100
    return {k: x.to(device, dtype) for k, x in tensors.items()} | {"labels": labels.to(device)}


def random_pair(
    n: int,
    h: int,
    teacher_h: int,
    v: int,
    *,
    dtype=torch.float32,
    device="cpu",
    bias=False,
    ignored=0.0,
    labels=True,
    seed=0,
) -> dict[str, Tensor]:
    """Inputs of `linear_divergence`: a teacher that agrees with the student on about half of the tokens."""
    student = random_inputs(n, h, v, bias=bias, ignored=ignored, seed=seed)
    teacher = random_inputs(n, teacher_h, v, bias=bias, seed=seed + 1)
    best = (student["hidden"] @ student["weight"].t()).argmax(-1)[::2]
    teacher["hidden"][::2] = teacher["weight"][best] * (6.0 / teacher_h)
    tensors = {**student, **{f"teacher_{k}": x for k, x in teacher.items() if k != "labels"}}
    if not labels:
        del tensors["labels"]
    return {k: x.to(device, dtype if x.is_floating_point() else None) for k, x in tensors.items()}


def evaluate(
    op: Callable, tensors: Mapping[str, Any], upstream: float | Tensor = 1.0, frozen=(), leaves=LEAVES, **options
) -> dict[str, Tensor]:
    """Every field of the op's result by name, and the gradient of each leaf as d_<name>.

    upstream is the loss's own gradient, (N,) or one for all.
    """
    tensors = {k: x.detach().requires_grad_(k in leaves and k not in frozen) for k, x in tensors.items()}
    result = op(**tensors, **options)
    inputs = {f"d_{k}": x for k, x in tensors.items() if x.requires_grad}
    upstream = torch.as_tensor(upstream).to(result.loss).expand(result.loss.shape)
    grads = torch.autograd.grad(result.loss, list(inputs.values()), upstream)
    return {k: x.detach() for k, x in fields(result).items()} | dict(zip(inputs, grads, strict=True))


def fields(result) -> dict[str, Tensor]:
    """Of an op's result, by name; the terms of a loss among them as `of <kind>`."""
    named = result._asdict()
    return named | {f"of {kind}": x for kind, x in named.pop("terms", {}).items()}


def error(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """(largest, root-mean-square) difference; of booleans, the number of differing entries."""
    if truth.numel() == 0:
        return 0.0, 0.0
    if truth.dtype == torch.bool:
        return float((got.cpu() != truth.cpu()).sum()), 0.0
    difference = got.double().cpu() - truth.double().cpu()
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def assert_within_plain_error(
    name: str, got: Tensor, plain: Tensor, truth: Tensor, compute: torch.dtype, logits: float = 0.0
) -> None:
    """got errs at most twice as much as plain, plus a floor of a few roundings.

    They are those of the result itself; of the largest logit in fp32, since the fused passes subtract log-partitions
    where plain torch first subtracts maxima; and for the loss of one logit in `compute`, an error that plain torch can
    escape by luck.
    """
    assert got.shape == truth.shape, f"{name} is {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert torch.isfinite(got).all(), f"{name} holds {got[~torch.isfinite(got)][0]}"
    if not truth.numel():
        return
    floor = 0.0
    if truth.dtype != torch.bool:
        largest = max(truth.abs().max().item(), 1.0 if name[:2] != "d_" else 0.0)
        unit = torch.finfo(compute if name == "loss" else got.dtype).eps
        floor = largest * unit * (4 if unit > 1e-5 else 32)
        wide = torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
        floor += 4 * wide * (1 + largest * logits)  # 1: probabilities, whose differences are the logits' gradient
    for kind, g, p in zip(("largest", "rms"), error(got, truth), error(plain, truth), strict=True):
        assert g <= 2 * p + floor, f"{name}: {kind} error {g:.3e}, plain torch {p:.3e}, floor {floor:.3e}, in {compute}"


def largest_logit(tensors: Mapping[str, Tensor], scale=1.0, teacher_scale=1.0, temperature=1.0, **_) -> float:
    logits = [torch.zeros(1)]
    if "logits" in tensors and tensors["logits"].numel():
        logits.append((tensors["logits"] * scale).abs().amax()[None])
    for side, factor in (("", scale), ("teacher_", teacher_scale)):
        if f"{side}hidden" in tensors and tensors["hidden"].numel():
            logits.append((tensors[f"{side}hidden"] @ tensors[f"{side}weight"].t() * factor).abs().amax()[None])
    return max(x.item() for x in logits) * max(1.0, 1 / temperature)


def check(
    op: Callable, reference: Callable, tensors: Mapping[str, Any], upstream: float | Tensor = 1.0, frozen=(),
    leaves=LEAVES, **options,
) -> dict:  # fmt: skip
    """Compare every field and gradient of op with its reference in fp64; return what op gave."""
    plain_options = {k: v for k, v in options.items() if k not in ONLY_OURS}
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    got = evaluate(op, tensors, upstream, frozen, leaves, **options)
    plain = evaluate(reference, tensors, upstream, frozen, leaves, **plain_options)
    truth = evaluate(reference, double, upstream, frozen, leaves, **plain_options)
    assert got.keys() == truth.keys()
    compute, logits = tensors[leaves[0]].dtype, largest_logit(double, **options)
    for name in truth:
        expected = tensors[name[2:]].dtype if name[:2] == "d_" else plain[name].dtype
        assert got[name].dtype == expected, f"{name} is {got[name].dtype}, expected {expected}"
        assert_within_plain_error(name, got[name], plain[name], truth[name], compute, logits)
    return got


check_cross_entropy = functools.partial(
    check, linear_cross_entropy.linear_cross_entropy, linear_cross_entropy.linear_cross_entropy_reference
)
check_divergence = functools.partial(
    check, linear_divergence.linear_divergence, linear_divergence.linear_divergence_reference
)


def under_autocast(op, dtype: torch.dtype):
    """`op` within autocast to `dtype`, on the device of its first tensor."""

    def run(**tensors):
        with torch.autocast(next(iter(tensors.values())).device.type, dtype):
            return op(**tensors)

    return run
