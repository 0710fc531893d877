"""How kernels are checked: every output and gradient of an op against fp64, within twice the error of plain torch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from small_blocks import kernel_modules, set_blocks
from torch import Tensor

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence, linear_divergence_reference
from liger_trainer.kernels.runtime import INSTALLED, is_interpreted

CUDA = torch.cuda.is_available() and not is_interpreted()
TRITON_DEVICE = "cuda" if CUDA else "cpu"
PATHS: dict[str, list[torch.dtype]] = {"torch": [torch.float64, torch.float32, torch.bfloat16, torch.float16]}
if INSTALLED and (CUDA or is_interpreted()):  # the interpreter computes in numpy, which has no bf16
    PATHS["triton"] = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA

LEAVES = ("hidden", "weight", "bias")
# Options that a reference does not take.
ONLY_OURS = (
    "workspace_mb", "logits_dtype", "rows", "recompute", "accumulate_dtype", "overwrite_hidden", "inplace",
    "remake",
)  # fmt: skip


class Place(NamedTuple):
    """Where a test runs an op: "triton" or "torch", and the device and dtype of its tensors."""

    path: str
    device: str
    dtype: torch.dtype


def set_path(monkeypatch, path: str, shipped: bool = False, block: int = 16) -> str:
    """Send every op down the Triton or the torch path, with small blocks (of logits `block`), or those shipped.

    Return the device to put tensors on.
    """
    for module in kernel_modules().values():
        if hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: path == "triton")
    if not shipped:
        set_blocks(monkeypatch, block)
    return TRITON_DEVICE if path == "triton" else "cpu"


def normal(*shape: int, seed: int = 0, spread: float = 1.0, like: Place | None = None) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return drawn if like is None else drawn.to(like.device, like.dtype)


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
    n: int, h: int, teacher_h: int, v: int, *, dtype=torch.float32, device="cpu", bias=False, ignored=0.0, labels=True,
    seed=0,
) -> dict[str, Tensor]:  # fmt: skip
    """Inputs of `linear_divergence`: a teacher that agrees with the student on about half of the tokens."""
    student = random_inputs(n, h, v, bias=bias, ignored=ignored, seed=seed)
    teacher = random_inputs(n, teacher_h, v, bias=bias, seed=seed + 1)
    best = (student["hidden"] @ student["weight"].t()).argmax(-1)[::2]
    teacher["hidden"][::2] = teacher["weight"][best] * (6.0 / teacher_h)
    tensors = {**student, **{f"teacher_{k}": x for k, x in teacher.items() if k != "labels"}}
    if not labels:
        del tensors["labels"]
    return {k: x.to(device, dtype if x.is_floating_point() else None) for k, x in tensors.items()}


def double(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in tensors.items()}


def evaluate(
    op: Callable, tensors: Mapping[str, Any], upstream: float | Tensor | None = 1.0, frozen=(),
    leaves: Sequence[str] = LEAVES, rounded: torch.dtype | None = None, **options,
) -> dict[str, Tensor]:  # fmt: skip
    """Every output of the op by name, and the gradient of each leaf as d_<name>.

    Args:
        upstream: the gradient of the loss, one for all tokens or of each; None: of every output, at random.
        rounded: what the random ones are rounded to, so that every dtype gets the same; by default the first leaf's.
        leaves: the tensors that get a gradient, if given and not in `frozen`. They keep their strides.
    """
    wanted = [k for k in leaves if tensors.get(k) is not None and k not in frozen]
    inputs = {k: x.detach().requires_grad_(k in wanted) if isinstance(x, Tensor) else x for k, x in tensors.items()}
    outputs = fields(op(**inputs, **options))
    if upstream is None:
        rounded, numbers = rounded or dtype_of(tensors, leaves), enumerate(outputs.values())
        trained = [(x, normal(*x.shape, seed=i).to(rounded).to(x)) for i, x in numbers if x.requires_grad]
    else:
        trained = [(outputs["loss"], torch.as_tensor(upstream).to(outputs["loss"]).expand(outputs["loss"].shape))]
    results, ups = zip(*trained, strict=True) if wanted else ((), ())
    grads = torch.autograd.grad(results, [inputs[k] for k in wanted], ups) if wanted else ()
    return {k: x.detach() for k, x in outputs.items()} | {f"d_{k}": g for k, g in zip(wanted, grads, strict=True)}


def dtype_of(tensors: Mapping[str, Any], leaves: Sequence[str]) -> torch.dtype:
    return next(tensors[k].dtype for k in leaves if tensors.get(k) is not None)


def fields(result: Any) -> dict[str, Tensor]:
    """Of an op's result, by name, or else as out0, out1, ...; the terms of a loss among them as `of <kind>`."""
    if isinstance(result, Tensor):
        return {"out0": result}
    if not hasattr(result, "_asdict"):
        return {f"out{i}": x for i, x in enumerate(result)}
    named = {k: x for k, x in result._asdict().items() if x is not None}
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
        if got.dtype == torch.float64:
            floor *= 2  # plain torch is the truth itself here, and its own roundings are not in `plain`'s error
    for kind, g, p in zip(("largest", "rms"), error(got, truth), error(plain, truth), strict=True):
        assert g <= 2 * p + floor, f"{name}: {kind} error {g:.3e}, plain torch {p:.3e}, floor {floor:.3e}, in {compute}"


def largest_logit(tensors: Mapping[str, Tensor], scale=1.0, teacher_scale=1.0, temperature=1.0, **_) -> float:
    """0 for what is no loss of logits."""
    logits = [0.0]
    if "logits" in tensors and tensors["logits"].numel():
        logits.append((tensors["logits"] * scale).abs().max().item())
    for side, factor in (("", scale), ("teacher_", teacher_scale)):
        if f"{side}hidden" in tensors and tensors["hidden"].numel():
            logits.append((tensors[f"{side}hidden"] @ tensors[f"{side}weight"].t() * factor).abs().max().item())
    return max(logits) * max(1.0, 1 / temperature)


def check(
    op: Callable, reference: Callable, tensors: Mapping[str, Any], upstream: float | Tensor | None = 1.0, frozen=(),
    leaves: Sequence[str] = LEAVES, **options,
) -> dict[str, Tensor]:  # fmt: skip
    """Compare every output and gradient of op with its reference in fp64; return what op gave."""
    plain_options = {k: v for k, v in options.items() if k not in ONLY_OURS}
    compute, exact = dtype_of(tensors, leaves), double(tensors)
    how = {"upstream": upstream, "frozen": frozen, "leaves": leaves, "rounded": compute}
    got = evaluate(op, tensors, **how, **options)
    plain = evaluate(reference, tensors, **how, **plain_options)
    truth = evaluate(reference, exact, **how, **plain_options)
    compare(got, plain, truth, tensors, compute, largest_logit(exact, **options))
    return got


def compare(got, plain, truth, tensors: Mapping[str, Any], compute: torch.dtype, logits: float = 0.0) -> None:
    """The results of an op, of its reference, and of that in fp64: dtypes, and errors."""
    assert got.keys() == plain.keys() == truth.keys()
    for name in truth:
        expected = tensors[name[2:]].dtype if name[:2] == "d_" else plain[name].dtype
        assert got[name].dtype == expected, f"{name} is {got[name].dtype}, expected {expected}"
        assert_within_plain_error(name, got[name], plain[name], truth[name], compute, logits)


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """Each of `expected` is in `got`; without a tolerance, to the bit."""
    for name, x in expected.items():
        how = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got[name], x, msg=lambda m, name=name: f"{name}: {m}", equal_nan=True, **how)


check_cross_entropy = functools.partial(check, linear_cross_entropy, linear_cross_entropy_reference)
check_divergence = functools.partial(check, linear_divergence, linear_divergence_reference)


def under_autocast(op, dtype: torch.dtype):
    """`op` within autocast to `dtype`, on the device of its first tensor."""

    def run(**tensors):
        with torch.autocast(next(iter(tensors.values())).device.type, dtype):
            return op(**tensors)

    return run
