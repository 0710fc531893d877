"""The command line. Each command is a function in `liger_trainer.cli`, registered here with one line."""

import importlib.resources
import sys
from typing import Annotated

import typer

from .. import __version__
from ..common.console import guarded_output, is_main_process
from ..errors import ConfigError, Interrupted, LigerTrainerError
from ..secrets import remember_words
from . import (
    cache,
    chat,
    check,
    configs,
    convert,
    doctor,
    estimate,
    evaluate,
    generate,
    init_student,
    merge,
    report,
    run,
)
from ._shared import OVERRIDES

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"liger-trainer {__version__}")
        raise typer.Exit


def skill() -> None:
    """Print a skill for coding agents, in Markdown: how to make, check and run a configuration."""
    file = importlib.resources.files("liger_trainer.cli").joinpath("SKILL.md")
    typer.echo(file.read_text(encoding="utf-8"), nl=False)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fused SFT and knowledge distillation from one YAML file."""


app.command("ls")(configs.ls)
app.command("cat")(configs.cat)
app.command("cp")(configs.cp)
app.command("new")(configs.new)
app.command("validate", context_settings=OVERRIDES)(check.validate)
app.command("config", context_settings=OVERRIDES)(check.config)
app.command("preview", context_settings=OVERRIDES)(check.preview)
app.command("run", context_settings=OVERRIDES)(run.run)
app.command("resume", context_settings=OVERRIDES)(run.resume)
app.command("estimate", context_settings=OVERRIDES)(estimate.estimate)
app.command("init-student", context_settings=OVERRIDES)(init_student.init_student)
app.command("generate", context_settings=OVERRIDES)(generate.generate)
app.command("eval", context_settings=OVERRIDES)(evaluate.evaluate)
app.command("report")(report.report)
app.command("chat")(chat.chat)
app.command("merge")(merge.merge)
app.command("convert")(convert.convert)
app.command("env")(doctor.env)
app.command("doctor")(doctor.doctor)
app.command("selfcheck")(doctor.selfcheck)
app.command("schema")(check.schema)
app.command("skill")(skill)
app.add_typer(cache.app, name="cache")

# Commands that pass arguments after `--` to accelerate's launcher. They find them in `context.obj`.
LAUNCHING = ("run", "resume", "cache")
# Commands of earlier versions, and what to do instead.
REMOVED = {
    "hub-kernels": "the kernels are ops of the installed package, `from liger_trainer.kernels.rms_norm import rms_norm`"
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Turn an error that users can cause into a message and its exit code."""
    # Everything below prints through it, tracebacks too.
    with guarded_output():
        given = sys.argv[1:] if arguments is None else list(arguments)
        remember_words(given)
        _main(given)


def _main(arguments: list[str]) -> None:
    # What follows -- is accelerate's; typer would take it for arguments of ours.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours, launcher = arguments[:end], arguments[end + 1 :]
    try:
        # typer would only say that there is no such command.
        if ours and ours[0] in REMOVED:
            raise ConfigError(f"{ours[0]} was removed: {REMOVED[ours[0]]}.")
        if launcher and (not ours or ours[0] not in LAUNCHING):
            raise ConfigError(f"only {', '.join(LAUNCHING)} take arguments for a launcher after --; got {launcher}.")
        app(args=ours, prog_name="liger-trainer", obj=launcher, standalone_mode=True)
    except LigerTrainerError as error:
        if is_main_process() or not isinstance(error, Interrupted):  # which all processes raise
            print(f"liger-trainer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        if "home directory" not in str(error):  # of pathlib, about a path of the configuration or the command line
            raise
        print("liger-trainer: a path begins with ~ and a name, and no user of this name has a home.", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
