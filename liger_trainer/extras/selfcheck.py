"""Check the outputs and gradients of the ops and of a small patched model, on the user's own device.

The truth is plain torch in fp64 on the same numbers. An op passes if the error of each output and gradient is at most
twice plain torch's in the op's dtype, plus a floor of a few roundings. Two errors are bounded: the distance to
the truth, and its part along the truth, where roundings cancel and a wrong factor does not. Each comparison is repeated
with an error of 1 % planted in the op's result, to show that it would be seen.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.runtime import use_triton
from ..patching.patcher import patch
from . import op_checks
from .selfcheck_cases import CHECKS, Check, Draw, Outputs

# A few roundings of the dtype, for cases in which plain torch happens to be exact.
FLOOR = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of the distance
PLANTED = 0.01


@dataclass(frozen=True)
class Comparison:
    """One output ("out0") or gradient ("d_x") of a check, with its errors relative to the truth, in L2."""

    tensor: str
    error: float  # error, bound: the distance to the truth, and its limit
    bound: float
    factor: float  # factor, factor_bound: the part along the truth, and its limit
    factor_bound: float
    plain: float  # the distance of plain torch
    sees_one_percent: bool  # whether it fails with 1 % planted

    @property
    def share(self) -> float:
        """The larger of the two errors, each as a share of its bound."""
        share = max(self.error / self.bound, self.factor / self.factor_bound)
        return share if math.isfinite(share) else math.inf

    @property
    def passes(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True)
class CheckResult:
    """A check in one dtype. `failure` is the error that the op raised."""

    name: str
    dtype: str
    comparisons: tuple[Comparison, ...] = ()
    failure: str = ""
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        return not self.failure and all(c.passes for c in self.comparisons)

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its bound, or furthest beyond it."""
        return max(self.comparisons, key=lambda comparison: comparison.share, default=None)

    @property
    def sees_one_percent(self) -> bool:
        """Whether at least one of its tensors shows an error of 1 %."""
        return any(c.sees_one_percent for c in self.comparisons)


def default_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return fp32, and the dtype that models are trained in on the device."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32, torch.float16
    return torch.float32, torch.bfloat16


def all_checks() -> tuple[Check, ...]:
    """Return the checks of every op of the package."""
    return (*CHECKS, *op_checks.CHECKS)


def run_checks(
    device: torch.device, dtypes: Sequence[torch.dtype], checks: Sequence[Check] | None = None
) -> Iterator[CheckResult]:
    """Yield the result of each check in each dtype, and of a small model of each family in MODELS."""
    for dtype in dtypes:
        for check in all_checks() if checks is None else checks:
            yield _result(check.name, dtype, lambda check=check, dtype=dtype: _compare(check, device, dtype))
        for family in MODELS:
            yield _result(
                f"patched {family}", dtype, lambda family=family, dtype=dtype: _compare_model(family, device, dtype)
            )


def runs_kernels(device: torch.device) -> bool:
    """Whether the ops launch Triton kernels on the device; otherwise torch computes them."""
    return use_triton(torch.empty(1, device=device))


def _result(name: str, dtype: torch.dtype, compare: Callable[[], list[Comparison]]) -> CheckResult:
    start, short = time.perf_counter(), str(dtype).removeprefix("torch.")
    try:
        comparisons, failure = tuple(compare()), ""
    except Exception as error:  # a kernel that does not compile must not hide the others
        comparisons, failure = (), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return CheckResult(name, short, comparisons, failure, round(time.perf_counter() - start, 3))


def _compare(check: Check, device: torch.device, dtype: torch.dtype) -> list[Comparison]:
    drawn = {name: x.to(dtype) if x.is_floating_point() else x for name, x in check.tensors(Draw()).items()}
    tensors = {name: x.to(device) for name, x in drawn.items()}
    # From the rounded numbers, so that rounding the inputs is no error of the op.
    double = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    got = _outputs_and_gradients(check.op, tensors, check.leaves)
    plain = _outputs_and_gradients(check.plain, tensors, check.leaves)
    truth = _outputs_and_gradients(check.plain, double, check.leaves)
    return [_comparison(name, got[name], plain[name], truth[name], dtype) for name in truth]


def _outputs_and_gradients(
    function: Callable[..., Outputs], tensors: dict[str, Tensor], leaves: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return outputs by number and gradients by leaf. Gradients of outputs are random, the same in each call."""
    inputs = {name: x.detach().clone().requires_grad_(name in leaves) for name, x in tensors.items()}
    result = function(**inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    values = {f"out{i}": x.detach() for i, x in enumerate(outputs)}
    if not leaves:
        return values
    # A new generator: the upstream gradients are the same for op, plain and truth.
    draw, trained = Draw(), [x for x in outputs if x.requires_grad]
    upstream = [draw(*x.shape).to(x.device, x.dtype) if x.dim() else torch.ones_like(x) for x in trained]
    gradients = torch.autograd.grad(trained, [inputs[name] for name in leaves], upstream)
    return values | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}


def _comparison(name: str, got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> Comparison:
    if got.shape != truth.shape:
        raise ValueError(f"{name} is {tuple(got.shape)}, expected {tuple(truth.shape)}.")
    (distance, along), limits = _errors(plain, truth), FLOOR[dtype]
    bounds = 2 * distance + limits, 2 * along + limits / 2

    def compared(x: Tensor, sees_one_percent: bool) -> Comparison:
        error, factor = _errors(x, truth)
        return Comparison(name, error, bounds[0], factor, bounds[1], distance, sees_one_percent)

    # A check that this passes could not see a wrong factor of 1 % either.
    planted = compared(got.double() * (1 + PLANTED), False)
    return compared(got, not planted.passes)


def _errors(x: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return (distance, its part along the truth), both relative to the truth."""
    # A truth of zeros would divide by zero.
    length, difference = truth.norm().clamp(min=1e-30), x.double() - truth
    along = (difference * truth).sum() / length**2
    return (difference.norm() / length).item(), along.abs().item()


# small models that have each kind of attention and norm that is patched
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
MODELS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}


def _compare_model(family: str, device: torch.device, dtype: torch.dtype) -> list[Comparison]:
    import transformers

    # The same weights for each family and dtype.
    torch.manual_seed(0)
    config = getattr(transformers, MODELS[family])(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).to(device)
    patched, double = copy.deepcopy(model), copy.deepcopy(model).double()
    patch(patched)
    ids = Draw().integers(SIZES["vocab_size"], 2, 32).to(device)
    got, plain, truth = (_loss_and_gradients(each, ids) for each in (patched, model, double))
    return [_comparison(name, got[name], plain[name], truth[name], dtype) for name in truth]


def _loss_and_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the loss, and the gradients of all weights in one vector."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), "gradients": torch.cat([p.grad.flatten() for p in model.parameters()])}
