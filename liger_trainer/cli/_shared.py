"""Arguments, their completion in the shell, and output that several commands share."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.console import is_main_process
from ..errors import ConfigError, DoesNotFitError

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

YAML = (".yaml", ".yml")


def config_names(incomplete: str) -> list[str]:
    """Return what the shell offers for CONFIG: built-in configurations, YAML files and folders that begin so."""
    from ..config.schema import built_in_configs

    folder, start = Path(incomplete).parent, incomplete.rpartition("/")[2]
    if incomplete.endswith("/"):
        folder = Path(incomplete)
    names = [name for name in built_in_configs() if name.startswith(incomplete)]
    shown = incomplete.removesuffix(start)
    try:
        inside = sorted(folder.expanduser().iterdir())
    except OSError:
        inside = []
    for path in inside:
        if path.name.startswith(start) and not path.name.startswith("."):
            if path.is_dir():
                names.append(f"{shown}{path.name}/")
            elif path.suffix in YAML:
                names.append(f"{shown}{path.name}")
    return names


# for commands that take settings: whatever typer doesn't know is one
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, or a name that `liger-trainer ls` lists.",
        autocompletion=config_names,
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE | --KEY VALUE | ~KEY",
        help="Settings that go before those of CONFIG; ~KEY takes one out.",
        show_default=False,
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def show_notices(config: "RunConfig") -> None:
    """Print the configuration's notices on stderr, from the first process only."""
    if is_main_process():
        for notice in config.notices:
            print(f"liger-trainer: note: {notice}", file=sys.stderr)


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a new file, or overwrite one with `force`. Create the folders above it.

    Raises:
        ConfigError: if it exists without `force`, or can't be written.
    """
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another name or add --force.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None


def quieten_deprecations() -> None:
    """Hide deprecation warnings between transformers, TRL and peft, which no setting of ours can avoid."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft)\b")


def quieten() -> None:
    """Hide messages that the reader of a run can't act on. Errors and our own warnings are never hidden."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    quieten_deprecations()
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")

    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()  # of loading and saving; the one of training stays


def checked(config: str, overrides: list[str] | None, *first: str) -> "RunConfig":
    """Return a configuration that is checked by the installed TRL, its notices shown and other messages hidden.

    Args:
        first: settings that go before those of the user.
    """
    from ..config.run_config import load_run_config

    settings = load_run_config(config, [*first, *(overrides or [])], exact=True)
    show_notices(settings)
    quieten()
    return settings


@contextmanager
def out_of_memory(advice: str) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into a DoesNotFitError that says what takes less memory."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # compared by name: torch may not be imported yet
            raise
        raise DoesNotFitError(f"out of memory: {str(error).partition(chr(10))[0]}\n{advice}") from error
