"""`validate`, `config`, `schema` and `preview`: check and show a configuration without training."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ._shared import AsJson, Config, Overrides, checked, show_notices

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


def validate(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration and its paths. Show every mistake at once, with its line. Load no weights and no data."""
    from ..config.check import judged_by_the_model, not_installed
    from ..config.run_config import load_run_config

    # Not `exact`: TRL is imported only if something seems wrong.
    found = load_run_config(config, overrides or [], paths=True)
    show_notices(found)
    if names := judged_by_the_model(found.values):
        from ..run.models import check_names, config_at_hand  # which import torch

        name, model_config = found["model_name_or_path"], config_at_hand(found)
        check_names(found, name, model_config)
        for key in names if model_config is None else ():
            if key != "attn_implementation":
                unchecked = found.error(key, f"not checked: {name} is not on this machine; a run checks it first.")
                typer.echo(f"liger-trainer: note: {unchecked}", err=True)
    # No mistakes: another machine may train.
    for key, missing in not_installed(found.values):
        typer.echo(f"liger-trainer: note: {found.error(key, missing)}", err=True)
    given = sum(found.given(key) for key in found.settings)
    typer.echo(f"{found.source} is valid: recipe {found.recipe}, {given} settings.")


def config(
    config: Config,
    overrides: Overrides = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from TRL's defaults and ours.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the effective configuration and where each value was set. The output is a valid configuration."""
    from ..config.run_config import load_run_config

    found = load_run_config(config, overrides or [])
    show_notices(found)
    if diff:
        rows = {"recipe": (found.recipe, _origin(found, "recipe")), **found.changes(given=False)}
    else:  # explicit settings first, then defaults, each in the order they came
        keys = dict.fromkeys(["recipe", *found.settings, *found.values])
        rows = {key: (found.shown(key), _origin(found, key)) for key in keys}
    if as_json:
        document = {key: {"value": value, "set_by": where} for key, (value, where) in rows.items()}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from ..config.yaml_reader import inline

    # Defaults stay comments: as explicit settings they could contradict others.
    lines = {
        key: f"{'# ' if where.startswith('default') else ''}{key}: {inline(value)}"
        for key, (value, where) in rows.items()
    }
    width = min(max(map(len, lines.values()), default=0), 60)
    for key, line in lines.items():
        typer.echo(f"{line:<{width}}  # {rows[key][1]}")


def _origin(config: "RunConfig", key: str) -> str:
    if key in config.settings:
        return config.settings[key].where
    if key == "recipe":
        return "by whether a teacher is named"
    if key == "bf16" and config[key] is None:
        return "default: whether the GPU has it"
    return "default"


def schema(
    describe: Annotated[
        bool, typer.Option("--describe", help="Use the installed TRL and transformers, with their help texts.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="In a checkout: renew liger_trainer/config/schema.json and docs/configs.md.")
    ] = False,
) -> None:
    """Print the JSON Schema of configurations, for editors."""
    from ..config.schema import shipped_text

    if write:
        # An installed package has no docs to renew.
        root = Path(__file__).parents[2]
        if not (root / "pyproject.toml").is_file():
            raise ConfigError(f"schema --write: {root} is not a checkout of liger-trainer.")
        from ..extras.schema_writer import write as write_files

        for path in write_files(root):
            typer.echo(f"Wrote {path}")
    elif describe:
        from ..extras.schema_writer import json_schema, schema_text

        typer.echo(schema_text(json_schema(descriptions=True)), nl=False)
    else:
        typer.echo(shipped_text(), nl=False)


def preview(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Training rows to print.")] = 3,
) -> None:
    """Print training rows as the model will see them, supervised tokens coloured. Count what is cut. No weights."""
    settings = checked(config, overrides).on_this_machine()
    from rich.console import Console

    from ..extras.preview import preview as prepare
    from ..extras.preview import print_row
    from ..run.data.datasets import load_run_datasets
    from ..run.models import check_student, open_model, with_processor
    from ..run.results import print_data, print_rows

    console = Console(highlight=False)
    # The same checks as a run makes, in the same order, so that the same mistakes show.
    files = open_model(settings, "model_name_or_path")
    data = load_run_datasets(settings, files.vocab_size)
    files = with_processor(settings, files, data)
    check_student(settings, files, data)
    with console.status("Tokenizing rows"):
        seen = prepare(settings, data, files, rows)
    print_data(console, data.facts)
    if seen.facts:  # rows with images are prepared batch by batch, and not counted
        print_rows(console, seen.facts)
    for row in seen.rows:
        print_row(console, row)
    if settings.recipe == "distill" and (settings["lmbda"] or settings["seq_kd"]):
        told = "In training completions are sampled too (lmbda, seq_kd); these are the rows' own."
        if data.facts.form == "prompt":
            told = "In training completions are sampled for these prompts (lmbda, seq_kd)."
        console.print(f"\n{told}", style="yellow")
