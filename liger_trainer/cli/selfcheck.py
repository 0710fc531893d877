"""`selfcheck`: compare the gradients of the ops with plain torch, on this device."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ._shared import AsJson

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from rich.console import Console

    from ..tools.selfcheck import CheckResult

DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("liger-trainer", "torch", "triton", "transformers")


def selfcheck(
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help=f"{', '.join(DTYPES)}; may be given twice. Default: fp32 and bf16."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cuda, cuda:1, cpu. Default: the GPU.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check outputs and gradients of every op, and of small patched models, on this device. Exit code 1: one is off."""
    wrong = sorted(set(dtype or ()) - set(DTYPES))
    if wrong:
        raise ConfigError(f"--dtype: expected {', '.join(DTYPES)}, got {', '.join(wrong)}.")
    from .run import _quieten

    _quieten()
    import torch

    from ..tools.selfcheck import default_dtypes, run_checks, runs_kernels

    place = _device(device)
    dtypes = tuple(getattr(torch, name) for name in dtype) if dtype else default_dtypes(place)
    results = list(_shown(run_checks(place, dtypes)))
    facts = _facts(place, runs_kernels(place))
    if as_json:
        typer.echo(json.dumps({**facts, "passes": _passes(results), "checks": [_plain(r) for r in results]}, indent=2))
    else:
        _print(facts, results)
    if not _passes(results):
        raise typer.Exit(1)


def _device(name: str | None) -> "torch.device":
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, or not in this build or machine
        raise ConfigError(f"--device {name}: {str(error).partition(chr(10))[0]}") from None
    return device


def _passes(results: "list[CheckResult]") -> bool:
    return all(result.passes and result.sees_one_percent for result in results)


def _shown(results: "Iterator[CheckResult]") -> "Iterator[CheckResult]":
    """Yield the results, and show progress on stderr."""
    from rich.console import Console

    with Console(stderr=True).status("Checking") as status:
        for result in results:
            status.update(f"Checking: {result.name}, {result.dtype} done")
            yield result


def _facts(device: "torch.device", kernels: bool) -> dict[str, Any]:
    import torch

    from ..kernels.runtime import is_interpreted
    from ..run.environment import versions

    how = "torch, without kernels" if not kernels else "Triton's interpreter" if is_interpreted() else "Triton kernels"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "ops_run_by": how,
        "versions": {name: number for name, number in versions().items() if name in PACKAGES},
    }


def _plain(result: "CheckResult") -> dict[str, Any]:
    return {**dataclasses.asdict(result), "passes": result.passes, "sees_one_percent": result.sees_one_percent}


def _print(facts: dict[str, Any], results: "list[CheckResult]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, table = Console(highlight=False), Table(box=None, pad_edge=False)
    for column in ("op", "dtype", "tensors", "worst", "distance", "allowed", ""):
        right = column in ("tensors", "distance", "allowed")
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "op")
    for result in results:
        worst, verdict = result.worst, "ok" if result.passes else "[red]wrong[/red]"
        if worst is None:
            table.add_row(result.name, result.dtype, "", escape(result.failure), "", "", verdict)
            continue
        errors = f"{worst.error:.1e}", f"{worst.bound:.1e}"
        table.add_row(result.name, result.dtype, str(len(result.comparisons)), worst.tensor, *errors, verdict)
    console.print(table)
    _print_summary(console, facts, results)


def _print_summary(console: "Console", facts: dict[str, Any], results: "list[CheckResult]") -> None:
    compared = [comparison for result in results for comparison in result.comparisons]
    seen, wrong = sum(c.sees_one_percent for c in compared), [r for r in results if not r.passes]
    blind = [r for r in results if r.passes and not r.sees_one_percent]
    numbers = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    console.print(f"{facts['device']}, {facts['ops_run_by']}; {numbers}", soft_wrap=True)
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


def _detail(result: "CheckResult") -> str:
    return "; ".join(
        f"{c.tensor} is off by {c.error:.2e} of {c.bound:.2e} allowed, {c.factor:.2e} of {c.factor_bound:.2e} along it"
        for c in result.comparisons
        if not c.passes
    )
