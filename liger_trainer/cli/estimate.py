"""`estimate`: memory, tokens and steps of a run, before it starts."""

import dataclasses
import json
from typing import Annotated

import typer

from ..errors import DoesNotFitError
from ._shared import AsJson, Config, Overrides, checked

GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help='Compare with this GPU, "H100 80GB", or this memory, 24GB; default: the one here.'
    ),
]


def estimate(config: Config, overrides: Overrides = None, gpu: GpuName = None, as_json: AsJson = False) -> None:
    """Estimate memory by part, tokens and steps of a run. Needs no weights and no GPU. Exit code 3: it does not fit."""
    from rich.console import Console

    from ..extras.estimate.engine import choose
    from ..extras.estimate.estimator import estimate as run
    from ..extras.estimate.estimator import gpu_named, present_gpu
    from ..extras.estimate.report import print_estimate

    # A wrong name is told before the simulation, which takes seconds.
    named = gpu_named(gpu) if gpu is not None else None
    settings = checked(config, overrides)

    with Console(stderr=True).status("Simulating a step without data"):
        compared = named or present_gpu()
        choice = choose(settings, compared)
        found = run(choice.config, compared)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        if choice.why:
            typer.echo(f"accelerate_config: auto is {choice.why}")
        print_estimate(found)
    # None without a GPU to compare with: then nothing does not fit.
    if found.fits is False:
        assert found.gpu is not None
        usable = f"{found.gpu.usable_mib:,} MiB of {found.gpu.name} can be used"
        raise DoesNotFitError(f"{found.source} needs {found.peak_mib:,.0f} MiB; {usable}.")
