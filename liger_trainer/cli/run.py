"""`run` and `resume`: train as a configuration says, here or through accelerate's launcher."""

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..secrets import redact
from ._shared import Config, Overrides, RunDir, out_of_memory, quieten_deprecations, show_notices

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

TAKES_LESS = (
    "What takes less, in this order: gradient_checkpointing=true, a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps, a smaller max_length, use_peft=true."
)


def run(context: typer.Context, config: Config, overrides: Overrides = None) -> None:
    """Train as CONFIG says, sft or distill, full or LoRA. What follows -- goes to accelerate launch."""
    start(config, overrides or [], ["run", config, *(overrides or [])], context.obj or [])


def resume(
    context: typer.Context,
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Go on from this checkpoint instead of the newest.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on though data, tokenizer, model or teacher have changed since.")
    ] = False,
) -> None:
    """Go on with an interrupted run from its newest checkpoint, with the settings it was started with."""
    from ..run.checkpoints import resumption

    config, settings = resumption(run_dir, checkpoint, overrides or [], force)
    start(config, settings, ["run", config, *settings], context.obj or [])


def start(config: str, overrides: list[str], command: list[str], launcher: list[str]) -> None:
    """Check a configuration and run it, in this process or, if anything is said to the launcher, as its children.

    Raises:
        ConfigError, DataError, DoesNotFitError, Interrupted: as the recipes do.
    """
    from ..config.run_config import load_run_config
    from ..config.trackers import not_installed
    from ..run.launch import is_launched, launch, launcher_arguments

    checked = load_run_config(config, overrides)
    missing = not_installed(checked["report_to"])
    if missing is not None:
        raise checked.error("report_to", missing)
    launcher = [*launcher_arguments(checked), *launcher] if launcher or not is_launched() else []
    if launcher:
        launch(launcher, command)
    show_notices(checked)
    if not checked.schema.is_of_installed():  # from here on TRL is imported anyway
        checked = load_run_config(config, overrides, exact=True)
    _run_recipe(checked)


def _run_recipe(config: "RunConfig") -> None:
    _quieten()
    words, sys.argv = sys.argv, [redact(word) for word in sys.argv]  # some trackers send the command line
    try:
        with out_of_memory(TAKES_LESS):
            importlib.import_module(f"liger_trainer.recipes.{config.recipe}").main(config.on_this_machine())
    except KeyboardInterrupt:  # outside training; there, `training.train` saves a checkpoint first
        typer.echo(f"liger-trainer: interrupted; what is in {config['output_dir']} is kept.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        sys.argv = words


def _quieten() -> None:
    """Leave out what the reader of a run cannot act on. Errors and our own warnings are never filtered."""
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    quieten_deprecations()
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")

    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()  # of loading and saving; the one of training stays
