"""`doctor`, `env` and `selfcheck`: what `patch` would swap, what is installed, and whether the ops are right."""

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

    from ..extras.selfcheck import CheckResult


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
    from ..extras.doctor import (
        config_of,
        diagnose,
        diagnose_all,
        family_of,
        not_recognised,
        print_all,
        print_missed,
        print_report,
    )

    if model is not None:
        config = config_of(model)
        print_report(diagnose(config), family_of(config))
    else:
        print_all(diagnose_all())
    missed = not_recognised()
    if missed:
        print_missed(missed)


def _silence() -> None:
    """Silence transformers' comments on default configurations. A family that can't be built is shown anyway."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore", module=r"transformers\b")
    logging.set_verbosity_error()


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
    from ..extras.selfcheck_report import all_pass, facts_of, plain, print_checks

    place = _device(device)
    dtypes = tuple(getattr(torch, name) for name in dtype) if dtype else default_dtypes(place)
    results = list(_shown(run_checks(place, dtypes)))
    facts = facts_of(place, runs_kernels(place))
    if as_json:
        typer.echo(json.dumps({**facts, "passes": all_pass(results), "checks": [plain(r) for r in results]}, indent=2))
    else:
        print_checks(facts, results)
    if not all_pass(results):
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


def _shown(results: "Iterator[CheckResult]") -> "Iterator[CheckResult]":
    """Yield the results, and show progress on stderr."""
    from rich.console import Console

    # On stderr, since stdout may be JSON.
    with Console(stderr=True).status("Checking") as status:
        for result in results:
            status.update(f"Checking: {result.name}, {result.dtype} done")
            yield result
