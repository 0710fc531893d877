"""`doctor`, `env` and `selfcheck`: what `patch` would swap, what is installed, and whether the ops are right."""

import json
from typing import Annotated

import typer

from ..errors import ConfigError
from ._shared import AsJson, quieten


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


def env(as_json: AsJson = False) -> None:
    """Print versions, the GPU, and which optional packages are missing. Please add it to a bug report."""
    from ..extras.installed import facts_of, print_facts

    facts = facts_of()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)


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

    from ..extras.selfcheck import (
        all_pass,
        default_dtypes,
        device_of,
        facts_of,
        plain,
        print_checks,
        run_checks,
        runs_kernels,
        shown,
    )

    place = device_of(device)
    dtypes = tuple(getattr(torch, name) for name in dtype) if dtype else default_dtypes(place)
    results = list(shown(run_checks(place, dtypes)))
    facts = facts_of(place, runs_kernels(place))
    if as_json:
        typer.echo(json.dumps({**facts, "passes": all_pass(results), "checks": [plain(r) for r in results]}, indent=2))
    else:
        print_checks(facts, results)
    if not all_pass(results):
        raise typer.Exit(1)
