"""The command line: `liger-trainer run CONFIG [key=value ...]` and `liger-trainer ls`."""

import importlib
import os
import sys
from typing import Annotated

import typer

from .errors import LigerTrainerError

app = typer.Typer(
    help="Fused SFT and knowledge distillation from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=OVERRIDES)
def run(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, or a name that `liger-trainer ls` lists.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE | --KEY VALUE]...", help="Settings that go before those of CONFIG."),
    ] = None,
) -> None:
    """Train as CONFIG says: sft or distill, full or LoRA, on a CPU or a GPU."""
    from .run_config import load_run_config

    settings = load_run_config(config, overrides or [])
    _quieten()
    try:
        importlib.import_module(f"liger_trainer.recipes.{settings.recipe}").main(settings)
    except KeyboardInterrupt:  # outside training; there, `training.train` saves a checkpoint first
        typer.echo(f"liger-trainer: interrupted; what is in {settings['output_dir']} is kept.", err=True)
        raise typer.Exit(130) from None


@app.command()
def ls() -> None:
    """List the built-in configurations."""
    from .config_source import built_in_configs

    for name, resource in built_in_configs().items():
        first = resource.read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"{name:<28} {first.removeprefix('#').strip()}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors a user can cause are a message and an exit code (2 configuration, 4 data)."""
    try:
        app(args=arguments, standalone_mode=True)
    except LigerTrainerError as error:
        print(f"liger-trainer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _quieten() -> None:
    """Leave out what the reader of a run cannot act on. Errors and our own warnings are never filtered."""
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # deprecations between transformers, TRL and peft, which the names in a YAML file cannot avoid
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft)\b")
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")

    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()  # of loading and saving; the one of training stays
