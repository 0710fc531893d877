"""`run` and `resume`: train as a configuration says, in this process or through accelerate's launcher."""

import importlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..secrets import redact
from ._shared import Config, Overrides, RunDir, out_of_memory, quieten, show_notices

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

TAKES_LESS = (
    "What takes less, in this order: gradient_checkpointing=true, a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps, a smaller max_length, use_peft=true."
)


def run(context: typer.Context, config: Config, overrides: Overrides = None) -> None:
    """Train as CONFIG says, sft or distill, full or LoRA. Arguments after -- go to accelerate launch."""
    start(config, overrides or [], ["run", config, *(overrides or [])], context.obj or [])


def resume(
    context: typer.Context,
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Continue from this checkpoint instead of the newest whole one.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Continue even if data, tokenizer, model or teacher have changed since.")
    ] = False,
) -> None:
    """Continue an interrupted run from its newest whole checkpoint, with the settings it was started with."""
    from ..run.launch import resumption

    config, settings = resumption(run_dir, checkpoint, overrides or [], force)
    start(config, settings, ["run", config, *settings], context.obj or [])


def start(config: str, overrides: list[str], command: list[str], launcher: list[str]) -> None:
    """Check a configuration and run it: in this process, or as the launcher's children if it gets arguments.

    Raises:
        ConfigError, DataError, DoesNotFitError, Interrupted: as in the recipes.
    """
    from ..common.signals import handling, interrupt
    from ..run.launch import as_rank

    try:
        # Until training begins a signal of a scheduler ends the run like Ctrl-C.
        with as_rank(), handling(interrupt):
            _start(config, overrides, command, launcher)
    except KeyboardInterrupt:  # outside training, or a second one: `train_loop.train` saves a checkpoint first
        typer.echo("liger-trainer: interrupted. Nothing in output_dir was removed.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


def _start(config: str, overrides: list[str], command: list[str], launcher: list[str]) -> None:
    from ..common.console import announce
    from ..config.check import not_installed
    from ..config.conflicts import CHOSEN, is_launched
    from ..config.run_config import load_run_config
    from ..run.launch import launch, launcher_arguments

    checked = load_run_config(config, overrides)
    # transformers looks when it loads the weights, or makes the trainer.
    for key, missing in not_installed(checked.values):
        raise checked.error(key, missing)
    if checked["accelerate_config"] == CHOSEN and not is_launched():
        if launcher:
            raise checked.error(
                "accelerate_config",
                "auto decides what the launcher is told, and so do the arguments after --: name ddp or fsdp2, or set "
                "num_processes and the like in the configuration.",
            )
        from ..extras.estimate.engine import choose

        # Its processes, and a run that resumes, get the engine by name.
        choice = choose(checked)
        checked, overrides = choice.config, [*overrides, *choice.settings]
        command = [*command, *choice.settings]
        if choice.why:
            announce(f"accelerate_config: auto is {choice.why}")
    launcher = [*launcher_arguments(checked), *launcher] if launcher or not is_launched() else []
    if launcher:
        launch(launcher, command, checked["use_cpu"])
    show_notices(checked)
    if not checked.schema.is_of_installed():  # TRL is needed from here on anyway, so the installed one can check
        checked = load_run_config(config, overrides, exact=True)
    _run_recipe(checked)


def _run_recipe(config: "RunConfig") -> None:
    quieten()
    words, sys.argv = sys.argv, [redact(word) for word in sys.argv]  # some trackers send the command line
    try:
        with out_of_memory(TAKES_LESS):
            # By its name, so that a recipe is a file that one can copy.
            importlib.import_module(f"liger_trainer.recipes.{config.recipe}").main(config.on_this_machine())
    finally:
        sys.argv = words
