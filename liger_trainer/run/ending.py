"""The last lines of a run: the verdict, and three commands that go on from here."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..config.yaml_reader import setting
from .reports.html import verdict
from .results import RunResults

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

STYLES = {"good": "green", "bad": "red", "": "yellow"}


def print_ending(console: Console, config: "RunConfig", results: RunResults, output_dir: Path) -> None:
    """Print the verdict of a run and what can be done next."""
    models = {name: asdict(facts) for name, facts in results.models.items()}
    judged = verdict(results.recipe, results.before, results.after, models)
    if judged is not None:
        console.print(judged.text, style=STYLES[judged.tone], highlight=False, soft_wrap=True)
    commands = next_commands(output_dir, adapter=(output_dir / "adapter_config.json").is_file())
    width = max(map(len, commands))
    console.print("Next:", highlight=False)
    for command, what in commands.items():
        console.print(f"  {command:<{width}}  # {what}", highlight=False, markup=False, soft_wrap=True)


def next_commands(output_dir: Path, adapter: bool) -> dict[str, str]:
    """Return three commands, each with what it does."""

    def line(*words: str) -> str:
        return shlex.join(["liger-trainer", *words])

    run, name = str(output_dir), output_dir.resolve().name
    above = output_dir / ".." if output_dir.name in ("", "..") else output_dir.parent
    if adapter:
        last = line("merge", run, str(above / f"{name}-merged")), "adapter and base as one model"
    else:
        other = setting("output_dir", above / f"{name}-2")
        last = line("run", str(output_dir / "config.yaml"), other, "learning_rate=1e-4"), "again, with a change"
    return {
        line("chat", run): "talk to it",
        line("eval", run): "more metrics on the held-out rows, with calibration",
        last[0]: last[1],
    }
