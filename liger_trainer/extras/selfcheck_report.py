"""What `liger-trainer selfcheck` prints: its checks in a table, what they come to, and a block for an issue."""

import dataclasses
import platform
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from ..kernels.runtime import is_interpreted, launch_table
from ..run.launch import device_facts, versions
from .selfcheck import CheckResult

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
