"""Check the outputs and gradients of the ops and of a small patched model, on the user's own device.

The truth is plain torch in fp64 on the same numbers. An op passes if the error of each output and gradient is at most
twice plain torch's in the op's dtype, plus a floor of a few roundings. Two errors are bounded: the distance to
the truth, and its part along the truth, where roundings cancel and a wrong factor does not. Each comparison is repeated
with an error of 1 % planted in the op's result, to show that it would be seen.
"""

import copy
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..errors import ConfigError
from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.jsd import jsd, jsd_reference
from ..kernels.kl_div import kl_div
from ..kernels.linear_alm import linear_alm, linear_alm_reference
from ..kernels.linear_uld import linear_uld, linear_uld_reference
from ..kernels.runtime import is_interpreted, launch_table, use_triton
from ..kernels.tvd import tvd, tvd_reference
from ..patching.patcher import patch
from ..run.launch import device_facts, versions
from .selfcheck_cases import (
    CHECKS,
    EPS,
    HEAD_LEAVES,
    Check,
    Draw,
    Outputs,
    Tensors,
    drawn_head,
    drawn_weight,
    loss_of,
    normed,
    plain_rms_norm,
)

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
    return (*CHECKS, *OF_EXTRAS)


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


# What `liger-trainer selfcheck` prints: its checks in a table, what they come to, and a block for an issue.


PACKAGES = ("liger-trainer", "torch", "triton", "transformers", "trl", "peft", "accelerate")


def device_of(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        # A device may be named and not be there: only using it tells.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, or not in this build or machine
        raise ConfigError(f"--device {name}: {str(error).partition(chr(10))[0]}") from None
    return device


def shown(results: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """Yield the results, and show progress on stderr."""
    # On stderr, since stdout may be JSON.
    with Console(stderr=True).status("Checking") as status:
        for result in results:
            status.update(f"Checking: {result.name}, {result.dtype} done")
            yield result


def all_pass(results: list[CheckResult]) -> bool:
    return all(result.passes and result.sees_one_percent for result in results)


def facts_of(device: torch.device, kernels: bool) -> dict[str, Any]:
    how = "torch, without kernels" if not kernels else "Triton's interpreter" if is_interpreted() else "Triton kernels"
    gpu = {}
    if device.type == "cuda":
        gpu = device_facts()["gpus"][torch.cuda.current_device() if device.index is None else device.index]
    return {
        "device": gpu.get("name", str(device)),
        "compute_capability": gpu.get("compute_capability"),
        "ops_run_by": how,
        "launch_table": launch_table(device) if kernels and not is_interpreted() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: number for name, number in versions().items() if name in PACKAGES},
    }


def plain(result: CheckResult) -> dict[str, Any]:
    return {**dataclasses.asdict(result), "passes": result.passes, "sees_one_percent": result.sees_one_percent}


def print_checks(facts: dict[str, Any], results: list[CheckResult]) -> None:
    console, table = Console(highlight=False), Table(box=None, pad_edge=False)
    for column in ("op", "dtype", "tensors", "worst", "distance", "allowed", ""):
        right = column in ("tensors", "distance", "allowed")
        table.add_column(column, justify="right" if right else "left", no_wrap=column not in ("op", "worst"))
    for result in results:
        worst, verdict = result.worst, "ok" if result.passes else "[red]wrong[/red]"
        if worst is None:
            table.add_row(result.name, result.dtype, "", escape(result.failure), "", "", verdict)
            continue
        errors = f"{worst.error:.1e}", f"{worst.bound:.1e}"
        table.add_row(result.name, result.dtype, str(len(result.comparisons)), worst.tensor, *errors, verdict)
    console.print(table)
    _print_summary(console, facts, results)


def _print_summary(console: Console, facts: dict[str, Any], results: list[CheckResult]) -> None:
    compared = [comparison for result in results for comparison in result.comparisons]
    seen, wrong = sum(c.sees_one_percent for c in compared), [r for r in results if not r.passes]
    blind = [r for r in results if r.passes and not r.sees_one_percent]
    console.print(
        f"{len(compared)} outputs and gradients of {len(results)} checks were compared with fp64; each may be off by "
        f"twice what plain torch is, and a few roundings. A planted error of 1 % was seen in {seen} of them.",
        soft_wrap=True,
    )
    for result in wrong:
        console.print(f"Wrong: {result.name} in {result.dtype}. {result.failure or _detail(result)}", style="red")
    for result in blind:
        console.print(f"Proves nothing: {result.name} in {result.dtype} would have passed with 1 % more.", style="red")
    if not wrong and not blind:
        console.print("Everything is right.", style="green")
    console.print("\nTo paste into an issue:\n")
    console.print(_for_an_issue(facts, results), soft_wrap=True, markup=False)


def _for_an_issue(facts: dict[str, Any], results: list[CheckResult]) -> str:
    """Return a block of Markdown: the machine, what computes there, and which checks do not pass."""
    capability = facts["compute_capability"]
    dtypes = ", ".join(dict.fromkeys(result.dtype for result in results))
    failed = [r for r in results if not (r.passes and r.sees_one_percent)]
    lines = [
        f"liger-trainer selfcheck: {len(results) - len(failed)} of {len(results)} checks pass, in {dtypes}",
        f"device       {facts['device']}" + (f", compute {capability}" if capability else ""),
        f"ops run by   {facts['ops_run_by']}",
        f"launches     {facts['launch_table']}" if facts["launch_table"] else "",
        f"platform     {facts['platform']}, Python {facts['python']}",
        "versions     " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        *(f"fails        {r.name}, {r.dtype}: {r.failure or _detail(r) or 'sees no error of 1 %'}" for r in failed),
    ]
    return "\n".join(["```text", *filter(None, lines), "```"])


def _detail(result: CheckResult) -> str:
    return "; ".join(
        f"{c.tensor} is off by {c.error:.2e} of {c.bound:.2e} allowed, {c.factor:.2e} of {c.factor_bound:.2e} along it"
        for c in result.comparisons
        if not c.passes
    )


# The ops of extras, in the table of selfcheck_cases.py.


def _distributions(log_target: bool, log_input: bool = True) -> Callable[[Draw], Tensors]:
    def tensors(draw: Draw) -> Tensors:
        student, teacher = (draw(draw.sizes.rows, draw.sizes.vocab, std=2.0) for _ in range(2))
        return {
            "input": student.log_softmax(-1) if log_input else student.softmax(-1),
            "target": teacher.log_softmax(-1) if log_target else teacher.softmax(-1),
        }

    return tensors


def _other_vocabulary(draw: Draw) -> Tensors:
    s = draw.sizes
    # The teacher of another tokenizer has another number of tokens.
    fewer = s.vocab - s.vocab // 11
    teacher = {"teacher_hidden": draw(s.rows, s.inner), "teacher_weight": drawn_weight(draw, fewer, s.inner, 2.0)}
    return {**drawn_head(draw), **teacher}


def _spans(draw: Draw) -> Tensors:
    """A student's head, spans of three rows, and how likely a teacher finds them."""
    head = drawn_head(draw)
    rows = torch.arange(draw.sizes.rows, device=head["labels"].device)
    return {**head, "spans": rows - rows % 3, "teacher_log_prob": -4 * draw(draw.sizes.rows).abs()}


OF_EXTRAS: tuple[Check, ...] = (
    Check(
        "add_rms_norm", partial(add_rms_norm, eps=EPS),
        lambda x, residual, weight: (plain_rms_norm(x + residual, weight), x + residual),
        normed("x", "residual"), ("x", "residual", "weight"),
    ),
    Check(
        "kl_div", kl_div, lambda input, target: F.kl_div(input, target, reduction="batchmean"),
        _distributions(log_target=False), ("input",),
    ),
    Check("jsd", jsd, jsd_reference, _distributions(log_target=True), ("input",)),
    Check("tvd", tvd, tvd_reference, _distributions(log_target=False, log_input=False), ("input",)),
    Check(
        "linear_uld", loss_of(linear_uld, ce_weight=0.1), loss_of(linear_uld_reference, ce_weight=0.1),
        _other_vocabulary, HEAD_LEAVES,
    ),
    Check(
        "linear_alm", loss_of(linear_alm, ce_weight=0.1), loss_of(linear_alm_reference, ce_weight=0.1), _spans,
        HEAD_LEAVES,
    ),
)  # fmt: skip
