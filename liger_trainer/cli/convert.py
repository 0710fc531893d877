"""`convert`: turn another tool's configuration into ours."""

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.schema import find_config
from ..errors import ConfigError
from ._shared import Force, write_new

if TYPE_CHECKING:
    from ..extras.convert import Converted


class ForeignTool(StrEnum):
    """The tools that have a table in `liger_trainer.extras.convert`."""

    trl = "trl"
    torchtune = "torchtune"
    axolotl = "axolotl"
    distillkit = "distillkit"
    llamafactory = "llamafactory"


def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file of the other tool.", show_default=False)],
    origin: Annotated[ForeignTool, typer.Option("--from", help="The tool it was written for.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT", help="Write to this file instead of the terminal.")
    ] = None,
    force: Force = False,
) -> None:
    """Convert a configuration. List what has no counterpart here, and as comments at the end of the result."""
    from ..config.run_config import check_text
    from ..extras.convert import convert as read

    text, label = find_config(file)
    # A table for each tool, imported only when it is asked for.
    converted = read(text, label, importlib.import_module(f"liger_trainer.extras.convert.{origin}").TOOL)
    written = converted.to_yaml()
    if out is None:
        typer.echo(written, nl=False)
    else:
        write_new(out, written, force)
    _tell(converted)
    try:
        # After it was written: what needs a hand is easier to mend in a file.
        check_text(written, str(out or "the result"))
    except ConfigError as error:
        raise ConfigError(f"The result needs a hand. {error}") from None


def _tell(converted: "Converted") -> None:
    print(f"liger-trainer: {len(converted.settings)} settings from {converted.label}", file=sys.stderr)
    for line in converted.supervised:
        print(f"  {line}", file=sys.stderr)
    for title, findings in (("not converted", converted.lost), ("to check", converted.notes)):
        for finding in findings:
            print(f"  {title}: {finding}", file=sys.stderr)
