"""Read the directory of a run for reports: metrics.json if it is finished, else its newest checkpoint."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ...common.checkpoints import checkpoints_in
from ...common.files import BEFORE, CONFIG, METRICS, STATE
from ...errors import ConfigError, CorruptError


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Completion(_Record):
    """A held-out prompt and its completions."""

    prompt: str
    reference: str | None = None
    teacher: str | None = None
    before: str | None = None
    after: str | None = None


class SetTo(_Record):
    """A setting that differs from its default."""

    value: Any
    set_by: str


class Patch(_Record):
    """Layers that were swapped in a model (kind: instances), and those that were not (name: reason)."""

    model: str
    swapped: dict[str, int]
    left_alone: dict[str, str]
    cuda_graphs: str | None = None


class RunRecord(_Record):
    """A run on disk. Fields that an older version or an unfinished run did not write are empty.

    KLs, losses and entropies are in nats per token.
    """

    path: Path
    finished: bool
    steps: int  # taken; of an unfinished run, at its newest checkpoint
    max_steps: int | None = None
    recipe: str | None = None
    config: str | None = None  # the name of the configuration that was run
    config_text: str = ""  # config.yaml
    effective: dict[str, Any] = {}  # every key with its value, defaults included
    settings: dict[str, SetTo] = {}  # what differs from the defaults; of an unfinished run, what config.yaml sets
    log_history: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    completions: list[Completion] = []
    data: dict[str, Any] = {}
    rows: dict[str, dict[str, int]] = {}
    training: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    patched: dict[str, Patch] = {}
    models: dict[str, dict[str, Any]] = {}  # student and teacher: parameters, dtype, tokens_per_second
    versions: dict[str, str] = {}
    environment: dict[str, Any] = {}
    finished_at: str | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read each run. Raises ConfigError if a directory is given twice."""
    places = [path.expanduser().resolve() for path in paths]
    twice = next((path for path in places if places.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is given twice.")
    return [read_run(path.expanduser()) for path in paths]


def read_run(path: Path) -> RunRecord:
    """Read the run whose output directory is `path`.

    Raises:
        ConfigError: no such directory, or neither metrics.json nor a checkpoint in it.
        CorruptError: one of its files cannot be parsed, or has another form than expected.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; expected the output_dir of a run.")
    text, chosen, defaults = _config(path / CONFIG)
    common = {"path": path, "config_text": text, "effective": {**defaults, **chosen}}
    if (path / METRICS).is_file():
        content = _json(path / METRICS)
        if isinstance(content, dict):
            training = content.get("training")
            steps = training.get("steps", 0) if isinstance(training, dict) else 0
            derived = {"finished": True, "steps": steps, "max_steps": steps, "settings": _set_in_file(chosen)}
            return _run(path / METRICS, {**derived, **content, **common})
        raise CorruptError(f"{path / METRICS}: expected a JSON object, got {type(content).__name__}.")
    return _unfinished(path, {"recipe": chosen.get("recipe"), "settings": _set_in_file(chosen), **common})


def _unfinished(path: Path, common: dict[str, Any]) -> RunRecord:
    """Read the newest checkpoint, or `path` itself if it is a checkpoint or was written by `save_state`."""
    states = [folder for folder in [*checkpoints_in(path), path] if (folder / STATE).is_file()]
    if not states:
        raise ConfigError(
            f"{path} holds neither {METRICS}, which a finished run has, nor a checkpoint with {STATE}, which an "
            "unfinished one has once it saved; expected the output_dir of a run."
        )
    newest = states[-1]
    state = _json(newest / STATE)
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise CorruptError(f"{newest / STATE}: expected the state of a Trainer, with its log_history.")
    measured = _json(newest / BEFORE) if (newest / BEFORE).is_file() else {}
    return _run(
        newest / STATE,
        {
            "finished": False,
            "steps": state.get("global_step", 0),
            "max_steps": state.get("max_steps"),
            "log_history": state["log_history"],
            "before": measured.get("metrics", {}) if isinstance(measured, dict) else {},
            **common,
        },
    )


def _run(source: Path, content: dict[str, Any]) -> RunRecord:
    try:
        return RunRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptError(f"{source}: {where}: {first['msg']} (got {first['input']!r:.60}).") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {error}") from None


def _set_in_file(chosen: dict[str, Any]) -> dict[str, Any]:
    return {str(key): {"value": value, "set_by": CONFIG} for key, value in chosen.items() if key != "recipe"}


def _config(path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return config.yaml as text, the keys that it sets, and the defaults, which stand in its comments."""
    if not path.is_file():
        return "", {}, {}
    try:
        text = path.read_text(encoding="utf-8")
        chosen, _, defaults = text.partition("\n# Defaults in effect:\n")
        commented = "\n".join(line.removeprefix("# ") for line in defaults.splitlines())
        return text, dict(yaml.safe_load(chosen) or {}), dict(yaml.safe_load(commented) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise CorruptError(f"{path} cannot be read: {error}") from None


def number(value: Any) -> float | None:
    """Return a number of a log; None if it is missing or not finite (JSON has no NaN, which is written as text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def names(runs: Sequence[RunRecord]) -> list[str]:
    """Name each run by its directory, with as many folders above it as the runs need to differ."""
    parts = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(path[-length:]) for path in parts]
        if len(set(short)) == len(short):
            break
    return short
