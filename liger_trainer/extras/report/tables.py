"""What a report tells: runs as they are on disk, and tables of them.

A table has a column for every run, so that one run and several share the code.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ...common.checkpoints import checkpoints_in
from ...common.files import BEFORE, CONFIG, DEFAULTS, METRICS, STATE
from ...config.yaml_reader import inline
from ...errors import ConfigError, CorruptError
from ...run.metric_rows import (
    DISTILL_ROWS,
    OTHER_TOKENS_ROWS,
    SFT_ROWS,
    MetricRow,
    change,
    duration,
    figure,
    shown_rows,
)

# Read the directory of a run for reports: metrics.json if it is finished, else its newest checkpoint.


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # a later version may have written more


class Completion(_Record):
    """A held-out prompt and its completions."""

    prompt: str
    reference: str | None = None
    teacher: str | None = None
    before: str | None = None
    after: str | None = None


class SetTo(_Record):
    """A setting that was given, or differs from its default."""

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
    settings: dict[str, SetTo] = {}  # given, or other than the defaults; of an unfinished run, what config.yaml sets
    log_history: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    completions: list[Completion] = []
    data: dict[str, Any] = {}
    rows: dict[str, dict[str, int]] = {}
    training: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    patched: dict[str, Patch] = {}
    models: dict[str, dict[str, Any]] = {}  # student and teacher: parameters, dtype
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
    before = measured.get("metrics", {}) if isinstance(measured, dict) else {}
    known = {"finished": False, "steps": state.get("global_step", 0), "max_steps": state.get("max_steps")}
    return _run(newest / STATE, {**known, "log_history": state["log_history"], "before": before, **common})


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
        chosen, _, defaults = text.partition(f"\n{DEFAULTS}\n")
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


def count(value: Any) -> str:
    """Write an integer with thousands separators; anything else as `shown`."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)


def memory(mib: float) -> str:
    """Write MiB, from 10 GiB on GiB."""
    return f"{mib / 1024:,.1f} GiB" if mib >= 10240 else f"{mib:,.0f} MiB"


def shown(value: Any) -> str:
    """Write a setting as YAML does; a list of plain values with commas."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else inline(value)


def teacher_text(values: Mapping[str, Any], named: Callable[[str], str] = str) -> str | None:
    """Say who teaches in a configuration; None if it names nobody.

    Args:
        values: keys of a configuration, `teachers` as a list or as JSON.
        named: writes the name of a model.
    """
    several = values.get("teachers")
    if several:
        entries = json.loads(several) if isinstance(several, str) else several
        return ", ".join(teacher_text(entry, named) or named(entry["name"]) for entry in entries)
    if values.get("teacher") == "self":
        return "itself without its adapters"
    if values.get("teacher") == "server":
        model = values.get("teacher_server_model")
        return f"{named(model)} on a server" if model else "a server"
    name = values.get("teacher_model_name_or_path")
    return named(name) if name else "a cache" if values.get("teacher") == "cache" else None


MORE_ROWS = (
    MetricRow("kd_loss", "distillation loss", better="lower"),
    MetricRow("ce_loss", "cross-entropy (nats/token)", better="lower"),
    MetricRow("teacher_entropy", "teacher's entropy (nats/token)"),
)
NEVER_EQUAL = {"output_dir", "run_name", "logging_dir"}  # keys that differ between any two runs and change nothing
_NOT_COMPARED = {"loss", "kd_loss", "loss/alm", "loss/uld"}  # each distillation minimises another loss
_LOST = ("rows_dropped", "rows_truncated", "supervised_tokens_lost")


@dataclass(frozen=True)
class Cell:
    text: str
    more: str = ""
    tone: str = ""  # best, good, bad or lost; the page colours it


@dataclass(frozen=True)
class TableRow:
    label: str
    cells: list[Cell]
    lost: bool = False


@dataclass(frozen=True)
class Grid:
    """A table; `columns` starts with the name of the column of labels."""

    rows: list[TableRow]
    columns: list[str] = field(default_factory=list)
    title: str = ""
    numbers: bool = False


def latest(run: RunRecord) -> tuple[dict[str, float], int | None]:
    """Return the metrics after training; of an unfinished run, those of its newest evaluation, and its step."""
    if run.finished:
        return run.after, None
    for entry in reversed(run.log_history):
        metrics = {key.removeprefix("eval_"): number(value) for key, value in entry.items() if key.startswith("eval_")}
        if metrics:
            return {name: value for name, value in metrics.items() if value is not None}, int(entry.get("step", 0))
    return {}, None


def distills(runs: Sequence[RunRecord]) -> bool:
    """Whether any run has a teacher."""
    of_teacher = {"forward_kl", *(row.metric for row in OTHER_TOKENS_ROWS)}
    return any(not of_teacher.isdisjoint({**run.before, **latest(run)[0]}) for run in runs)


def rows_of(runs: Sequence[RunRecord]) -> tuple[MetricRow, ...]:
    """Return the metrics that any of the runs has; those that the runs were about come first. The distillation loss is
    left out where it is all of the loss."""
    of_teacher = (*OTHER_TOKENS_ROWS, *DISTILL_ROWS)
    order = (*of_teacher, *SFT_ROWS) if distills(runs) else (*SFT_ROWS, *of_teacher)
    measured = [metrics for run in runs for metrics in (run.before, latest(run)[0]) if "kd_loss" in metrics]
    apart = any(figure(metrics["kd_loss"], 4) != figure(metrics.get("loss"), 4) for metrics in measured)
    more = [row for row in MORE_ROWS if row.metric != "kd_loss" or apart]
    return shown_rows((*order, *more), [{**run.before, **latest(run)[0]} for run in runs])


def tone(row: MetricRow, old: float | None, new: float | None) -> str:
    """Return "good" or "bad" for a change, or nothing."""
    if row.better is None or old is None or new is None or old == new or math.isnan(old) or math.isnan(new):
        return ""
    return "good" if (new < old) == (row.better == "lower") else "bad"


def before_and_after(run: RunRecord) -> Grid:
    """Return the held-out metrics of one run, and how they changed."""
    after, step = latest(run)
    rows = []
    for row in rows_of([run]):
        old, new = run.before.get(row.metric), after.get(row.metric)
        moved = Cell(change(old, new), tone=tone(row, old, new))
        rows.append(TableRow(row.title, [Cell(figure(old, row.digits)), Cell(figure(new, row.digits)), moved]))
    return Grid(rows, ["metric", "before", "after" if step is None else f"at step {step}", "change"], numbers=True)


def side_by_side(runs: Sequence[RunRecord], labels: Sequence[str]) -> Grid:
    """Return the held-out metrics of several runs, before and after training; the best of each row is marked."""
    rows, comparable = [], of_the_same_tokens(runs)
    for row in rows_of(runs):
        values = [latest(run)[0].get(row.metric) for run in runs]
        best = best_of(row, values) if comparable and not (distills(runs) and row.metric in _NOT_COMPARED) else None
        cells = []
        for run, value in zip(runs, values, strict=True):
            old = run.before.get(row.metric)
            came = f"from {figure(old, row.digits)}" if old is not None and value is not None else ""
            cells.append(Cell(figure(value, row.digits), came, "best" if value is not None and value == best else ""))
        rows.append(TableRow(row.title, cells))
    steps = [latest(run)[1] for run in runs]
    columns = [label if step is None else f"{label} (step {step})" for label, step in zip(labels, steps, strict=True)]
    return Grid(rows, ["metric", *columns], numbers=True)


def best_of(row: MetricRow, values: Sequence[float | None]) -> float | None:
    """Return the best value of a row; None if neither direction is better, or all are equal."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if row.better is None or len(set(finite)) < 2:
        return None
    return min(finite) if row.better == "lower" else max(finite)


def of_the_same_rows(runs: Sequence[RunRecord]) -> bool:
    """Whether the runs have the same rows, as far as is known: an unfinished run does not say."""
    return len({run.data["sha256"] for run in runs if "sha256" in run.data}) < 2


def of_the_same_tokens(runs: Sequence[RunRecord]) -> bool:
    """Whether held-out metrics are means over the same tokens, as far as is known: the same part of the same rows."""
    told = {(run.data.get("learned"), run.rows.get("eval", {}).get("supervised_tokens")) for run in runs if run.data}
    return of_the_same_rows(runs) and len(told) < 2


def facts(
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    facts_of: Callable[[RunRecord], dict[str, str]],
    title: str = "",
    numbers: bool = False,
) -> Grid:
    """Return a table of facts with a column for each run that has any."""
    by_run = {label: facts for run, label in zip(runs, labels, strict=True) if (facts := facts_of(run))}
    keys = dict.fromkeys(key for facts in by_run.values() for key in facts)
    rows = [TableRow(key, [Cell(facts.get(key, "")) for facts in by_run.values()]) for key in keys]
    return Grid(rows, ["", *by_run] if len(runs) > 1 else [], title, numbers)


def training_facts(run: RunRecord) -> dict[str, str]:
    formats: dict[str, Callable[[Any], str]] = {"seconds": duration, "peak_memory_mib": memory}
    names = {"seconds": "time", "peak_memory_mib": "peak memory", "peak_memory_of": "peak memory of"}
    return {
        names.get(key, key.replace("_", " ")): formats.get(key, count)(value) for key, value in run.training.items()
    }


def data_facts(run: RunRecord) -> dict[str, str]:
    known = {key: value for key, value in run.data.items() if value not in (None, {})}  # a file has no licence
    return {key.replace("_", " ").replace("sha256", "SHA-256"): count(value) for key, value in known.items()}


def environment_facts(run: RunRecord) -> dict[str, str]:
    place = dict(run.environment)
    facts = {"device": str(run.training.get("device", "")), "platform": str(place.pop("platform", ""))}
    for index, gpu in enumerate(place.pop("gpus", None) or []):
        name, memory_gib, compute = (gpu.get(key) for key in ("name", "memory_gib", "compute_capability"))
        facts[f"GPU {index}"] = f"{name}, {memory_gib} GiB, compute {compute}"
    facts |= {key.replace("_", " "): shown(value) for key, value in place.items()}
    return {key: value for key, value in {**facts, **run.versions}.items() if value}


def parts_of_the_time(run: RunRecord) -> dict[str, str]:
    return {key.replace("_", " "): duration(seconds) for key, seconds in run.seconds.items()}


def prepared_rows(runs: Sequence[RunRecord], labels: Sequence[str]) -> Grid:
    """Return the counts of the tokenized rows, with a column for each split of each run."""
    columns = [
        (f"{label}: {split}" if len(runs) > 1 else split, counts)
        for run, label in zip(runs, labels, strict=True)
        for split, counts in run.rows.items()
    ]
    rows = []
    for key in dict.fromkeys(key for _, counts in columns for key in counts):
        values = [counts.get(key) for _, counts in columns]
        cells = [Cell("" if value is None else count(value)) for value in values]
        rows.append(TableRow(key.replace("_", " "), cells, key in _LOST and any(values)))
    return Grid(rows, ["rows, tokenized", *(name for name, _ in columns)], numbers=True)


def settings(run: RunRecord, title: str = "") -> Grid:
    """Return the settings that were given or differ from the defaults, and where each was set."""
    rows = [TableRow(key, [Cell(shown(to.value)), Cell(to.set_by)]) for key, to in run.settings.items()]
    return Grid(rows, ["setting", "value", "set by"], title)


def differences(runs: Sequence[RunRecord], labels: Sequence[str]) -> Grid:
    """Return the keys whose values differ between the runs, defaults included."""
    keys = dict.fromkeys(key for run in runs for key in run.effective)
    missing = object()
    rows = []
    for key in keys:
        values = [run.effective.get(key, missing) for run in runs]
        if key not in NEVER_EQUAL and any(value != values[0] for value in values):
            rows.append(TableRow(key, [Cell("" if value is missing else shown(value)) for value in values]))
    return Grid(rows, ["setting", *labels])


def patches(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterable[Grid]:
    """Yield a table of swapped and untouched layers for each model. Runs that agree share a table."""
    runs_of: dict[tuple, list[str]] = {}
    for run, label in zip(runs, labels, strict=True):
        for role, patch in run.patched.items():
            key = (role, patch.model, tuple(patch.swapped.items()), tuple(patch.left_alone.items()), patch.cuda_graphs)
            runs_of.setdefault(key, []).append(label)
    for (role, model, swapped, left, graphs), where in runs_of.items():
        rows = [TableRow(kind, [Cell(str(number))]) for kind, number in swapped]
        rows += [TableRow(name, [Cell("left alone", why)]) for name, why in left]
        rows += [TableRow("CUDA graphs", [Cell(graphs.removeprefix("CUDA graphs: "))])] if graphs else []
        suffix = f" of {', '.join(where)}" if len(runs) > 1 else ""
        yield Grid(rows, ["layer", "instances"], f"{role.capitalize()}{suffix}: {model}")
