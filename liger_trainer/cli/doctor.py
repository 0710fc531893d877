"""`doctor`, `env` and `selfcheck`: what `patch` would swap, what is installed, and whether the ops are right."""

import dataclasses
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigError
from ._shared import AsJson, quieten

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from rich.console import Console

    from ..extras.doctor import Diagnosis
    from ..extras.selfcheck import CheckResult
    from ..patching.patcher import PatchReport


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model's directory, a hub id in the cache, a demo: name, or a model type such as llama.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every class with a causal-LM head of the installed transformers.")
    ] = False,
) -> None:
    """Print what patch would swap in a model and what it would leave alone. Loads no weights and needs no GPU."""
    if (model is None) == (not every):
        raise ConfigError("doctor takes a model or --all: liger-trainer doctor llama, liger-trainer doctor --all.")
    # transformers warns of nearly every default configuration.
    _silence()
    from ..extras.doctor import config_of, diagnose, diagnose_all, family_of, not_recognised

    if model is not None:
        config = config_of(model)
        _print(diagnose(config), family_of(config))
    else:
        _print_all(diagnose_all())
    missed = not_recognised()
    if missed:
        _print_missed(missed)


def _print_missed(missed: dict[str, str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("not recognised", "what follows")
    for what, consequence in missed.items():
        table.add_row(escape(what), escape(consequence))
    Console().print(table)


def _silence() -> None:
    """Silence transformers' comments on default configurations. A family that can't be built is shown anyway."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore", module=r"transformers\b")
    logging.set_verbosity_error()


def _print(report: "PatchReport", title: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("layer", "instances", title=title, title_justify="left")
    for kind, count in report.swapped.items():
        table.add_row(kind, str(count))
    console = Console()
    console.print(table)
    if not report.left_alone:
        console.print("Left alone: none.")
        return
    table = Table("left alone", "why")
    for name, why in report.left_alone.items():
        table.add_row(escape(name), escape(why))
    console.print(table)


def _print_all(diagnoses: "list[Diagnosis]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..extras.doctor import COLUMNS, IMAGES, cells

    table = Table("family or class", *COLUMNS, IMAGES, "left alone")
    for found in diagnoses:
        if found.report is None:
            table.add_row(found.name, *([""] * (len(COLUMNS) + 1)), escape(found.problem))
        else:
            left = ", ".join(found.report.left_alone)
            table.add_row(found.name, *cells(found.report).values(), escape(left))
    Console().print(table)


# `env`: the installed versions, the GPU, and what is missing for which purpose.
NEEDED = (
    "torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "typer", "rich", "PyYAML",
    "jinja2", "matplotlib",
)  # fmt: skip
OPTIONAL = {
    "triton": "the kernels on a GPU; comes with CUDA builds of torch",
    "bitsandbytes": "load_in_4bit, load_in_8bit and the 8-bit optimizers",
    "deepspeed": "deepspeed: and the zero configurations of accelerate",
    "fla-core": "gated delta rules (Qwen3.5, Qwen3-Next) at speed, and packed; `pip install fla-core einops`",
    "flash-attn": "attn_implementation: flash_attention_2",
    "kernels": "attn_implementation: kernels-community/...",
    "liger-kernel": "LinkedIn's kernels; ours do not need it",
    "tensorboard": "report_to: tensorboard",
    "trackio": "report_to: trackio",
    "wandb": "report_to: wandb",
}


def env(as_json: AsJson = False) -> None:
    """Print versions, the GPU, and which optional packages are missing. Please add it to a bug report."""
    from ..run.launch import device_facts

    facts = {
        "liger-trainer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "needed": {name: _version(name) for name in NEEDED},
        "optional": {name: _version(name) for name in OPTIONAL},
        "device": device_facts(),
        "launched": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ},
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_versions(facts)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print_versions(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    device = facts["device"]
    table = Table(show_header=False, box=None)
    for name in ("liger-trainer", "python", "platform", "executable"):
        table.add_row(name, facts[name])
    for index, gpu in enumerate(device["gpus"]):
        table.add_row(f"GPU {index}", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute {gpu['compute_capability']}")
    if not device["gpus"]:
        table.add_row("GPU", f"none that torch sees (CUDA of this torch: {device['cuda'] or 'none'})")
    table.add_row("bf16 on a GPU", "yes" if device["bf16"] else "no")
    table.add_row("CPU threads", str(device["cpu_threads"]))
    table.add_row("kernels run by", device["kernels"])
    for name, version in facts["needed"].items():
        table.add_row(name, version or "[red]missing[/red]")
    for name, version in facts["optional"].items():
        table.add_row(name, version or f"not installed; for {OPTIONAL[name]}")
    for name, value in facts["launched"].items():
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)


# `selfcheck`: compare the gradients of the ops with plain torch, on this device.
DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("liger-trainer", "torch", "triton", "transformers", "trl", "peft", "accelerate")


def selfcheck(
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help=f"{', '.join(DTYPES)}; may be given twice. Default: fp32 and bf16."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cuda, cuda:1, cpu. Default: the GPU.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check outputs and gradients of every op, and of small patched models, on this device. Exit code 1: one is off."""
    # Before torch is imported.
    wrong = sorted(set(dtype or ()) - set(DTYPES))
    if wrong:
        raise ConfigError(f"--dtype: expected {', '.join(DTYPES)}, got {', '.join(wrong)}.")
    quieten()
    import torch

    from ..extras.selfcheck import default_dtypes, run_checks, runs_kernels

    place = _device(device)
    dtypes = tuple(getattr(torch, name) for name in dtype) if dtype else default_dtypes(place)
    results = list(_shown(run_checks(place, dtypes)))
    facts = _facts(place, runs_kernels(place))
    if as_json:
        typer.echo(json.dumps({**facts, "passes": _passes(results), "checks": [_plain(r) for r in results]}, indent=2))
    else:
        _print_checks(facts, results)
    if not _passes(results):
        raise typer.Exit(1)


def _device(name: str | None) -> "torch.device":
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        # A device may be named and not be there: only using it tells.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, or not in this build or machine
        raise ConfigError(f"--device {name}: {str(error).partition(chr(10))[0]}") from None
    return device


def _passes(results: "list[CheckResult]") -> bool:
    return all(result.passes and result.sees_one_percent for result in results)


def _shown(results: "Iterator[CheckResult]") -> "Iterator[CheckResult]":
    """Yield the results, and show progress on stderr."""
    from rich.console import Console

    # On stderr, since stdout may be JSON.
    with Console(stderr=True).status("Checking") as status:
        for result in results:
            status.update(f"Checking: {result.name}, {result.dtype} done")
            yield result


def _facts(device: "torch.device", kernels: bool) -> dict[str, Any]:
    import torch

    from ..kernels.runtime import is_interpreted, launch_table
    from ..run.launch import device_facts, versions

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


def _plain(result: "CheckResult") -> dict[str, Any]:
    return {**dataclasses.asdict(result), "passes": result.passes, "sees_one_percent": result.sees_one_percent}


def _print_checks(facts: dict[str, Any], results: "list[CheckResult]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

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


def _print_summary(console: "Console", facts: dict[str, Any], results: "list[CheckResult]") -> None:
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


def _for_an_issue(facts: dict[str, Any], results: "list[CheckResult]") -> str:
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


def _detail(result: "CheckResult") -> str:
    return "; ".join(
        f"{c.tensor} is off by {c.error:.2e} of {c.bound:.2e} allowed, {c.factor:.2e} of {c.factor_bound:.2e} along it"
        for c in result.comparisons
        if not c.passes
    )
