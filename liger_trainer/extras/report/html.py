"""`liger-trainer report`: one HTML file about a run, or about several side by side, and its curves as PNGs.

The file contains its styles and drawings, runs no script and loads nothing. Imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ...common.files import REPORT, refuse_links, write_atomically
from ...run.metric_rows import Verdict, change, duration, figure, parameters, verdict
from ...secrets import redact
from .drawing import SERIES, Drawing, draw, points, reading
from .tables import (
    Completion,
    Grid,
    RunRecord,
    before_and_after,
    best_of,
    count,
    data_facts,
    differences,
    environment_facts,
    facts,
    latest,
    memory,
    names,
    of_the_same_rows,
    of_the_same_tokens,
    parts_of_the_time,
    patches,
    prepared_rows,
    read_runs,
    rows_of,
    settings,
    side_by_side,
    teacher_text,
    tone,
    training_facts,
)

WRITTEN_BY = "Written by liger-trainer"  # in the footer


@dataclass(frozen=True)
class File:
    """A text that unfolds."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    tables: list[Grid] = field(default_factory=list)
    lead: str = ""
    side_by_side: bool = False
    files: list[File] = field(default_factory=list)


def write_report(runs: Sequence[RunRecord], output: Path) -> Path:
    """Write the report and, next to it, the curves: to `plots/`, or to `NAME_plots/` for a report called NAME.html.

    Raises:
        ConfigError: the report is to lie in a run's folder, in which a link leads elsewhere.
        OSError: they cannot be written.
    """
    if any(output.parent.resolve() == run.path.resolve() for run in runs):
        refuse_links(output.parent)
    drawings = draw(runs, names(runs))
    page = render(runs, drawings)
    plots = output.parent / ("plots" if output.stem == "report" else f"{output.stem}_plots")
    output.parent.mkdir(parents=True, exist_ok=True)
    if drawings:
        plots.mkdir(exist_ok=True)
    for drawing in drawings:
        write_atomically(plots / f"{drawing.name}.png", drawing.png)
    write_atomically(output, redact(page))
    return output


def report_run(run_dir: Path) -> None:
    """Write the report of one run into its folder."""
    write_report(read_runs([run_dir]), run_dir / REPORT)


def is_report(path: Path) -> bool:
    """Return whether a file is a report."""
    return path.is_file() and WRITTEN_BY in path.read_text(errors="replace")


def render(runs: Sequence[RunRecord], drawings: Sequence[Drawing]) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("liger_trainer.extras.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    labels = names(runs)
    samples = list(_samples(runs, labels))
    run, judged = runs[0], None if len(runs) == 1 else _comparison(runs, labels)
    if len(runs) == 1 and run.finished:
        judged = verdict(run.recipe, run.before, run.after, run.models, run.data.get("test_rows"))
    return environment.get_template("report.html.jinja").render(
        title=labels[0] if len(runs) == 1 else f"{len(runs)} runs compared",
        several=len(runs) > 1,
        runs=[_header(run, label, index) for index, (run, label) in enumerate(zip(runs, labels, strict=True))],
        notes=_notes(runs, labels),
        verdict=judged,
        cards=list(_cards(runs[0])) if len(runs) == 1 else [],
        figures=drawings,
        samples=samples,
        sections=list(_sections(runs, labels, drawings, bool(samples))),
        footer=f"{WRITTEN_BY} {__version__} from " + ", ".join(str(run.path) for run in runs),
    )


def _header(run: RunRecord, label: str, index: int) -> dict[str, Any]:
    state = {"text": "finished", "tone": ""}
    if not run.finished:
        limit = f" of {run.max_steps:,}" if run.max_steps else ""
        state = {"text": f"unfinished: step {run.steps:,}{limit}", "tone": "open"}
    details = [run.config, run.finished_at and run.finished_at.replace("T", " ").replace("+00:00", " UTC")]
    model = run.effective.get("model_name_or_path")
    teacher = teacher_text(run.effective)
    details += [model and f"model {model}", teacher and f"teacher {teacher}"]
    badges = [{"text": run.recipe, "tone": ""}] if run.recipe else []
    return {
        "name": label,
        "color": index % len(SERIES) + 1,
        "badges": [*badges, state],
        "facts": [text for text in details if text],
    }


def _notes(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[str]:
    """Return what a reader should know first; a note that several runs share appears once."""
    concerned: dict[str, list[str]] = {}
    for run, label in zip(runs, labels, strict=True):
        for note in _notes_on(run):
            concerned.setdefault(note, []).append(label)
    notes = [note if len(names) == len(runs) else f"{', '.join(names)}: {note}" for note, names in concerned.items()]
    if not of_the_same_rows(runs):
        notes.append("The runs do not have the same rows (their SHA-256 differ): held-out metrics do not compare.")
    elif not of_the_same_tokens(runs):
        notes.append(
            "The runs learn different parts of the same rows (see `learned` and `supervised tokens` below): held-out "
            "metrics are means over what is learned, so they do not compare."
        )
    return notes


def _notes_on(run: RunRecord) -> Iterator[str]:
    data = run.data
    if not run.finished:
        yield f"Not finished: the curves come from the newest checkpoint, at step {run.steps:,}."
    if skipped := data.get("rows_skipped"):
        kinds = "; ".join(f"{kind}: {rows}" for kind, rows in data.get("rows_skipped_for", {}).items())
        yield f"{count(skipped)} wrong rows were left out (bad_rows: skip). {kinds}."
    if seen := data.get("test_rows_seen_in_training"):
        yield (
            f"{count(seen)} of {count(data.get('test_rows'))} held-out rows are training rows too, word for word: the "
            "held-out metrics are in part those of rows that were trained on."
        )
    if repeated := data.get("train_rows_repeated"):
        yield f"{count(repeated)} of {count(data.get('train_rows'))} training rows repeat an earlier one."
    for split, name in (("train", "training"), ("eval", "held-out")):
        rows = run.rows.get(split, {})
        if cut := rows.get("rows_truncated"):
            lost, learned = rows.get("supervised_tokens_lost", 0), rows.get("supervised_tokens", 0)
            share = f" ({lost / (lost + learned):.1%})" if lost + learned else ""
            yield (
                f"{count(cut)} of {count(rows.get('rows'))} {name} rows are longer than max_length; "
                f"{count(lost)} supervised tokens{share} lie beyond it."
            )
        if dropped := rows.get("rows_dropped"):
            yield f"{count(dropped)} {name} rows have no supervised token left and were left out."


def _comparison(runs: Sequence[RunRecord], labels: Sequence[str]) -> Verdict | None:
    """Say which of several runs is the best by the first metric of the table; None where they do not compare."""
    row = next((row for row in rows_of(runs) if row.better), None)
    if row is None or not of_the_same_tokens(runs):
        return None
    values = [latest(run)[0].get(row.metric) for run in runs]
    best = best_of(row, values)
    if best is None:
        return None
    shown = [(label, figure(value, row.digits)) for label, value in zip(labels, values, strict=True)]
    first = values.index(best)
    others = ", ".join(f"{label} {value}" for i, (label, value) in enumerate(shown) if i != first and value)
    word = "lowest" if row.better == "lower" else "highest"
    name = row.title.partition(" (")[0]
    label, value = shown[first]
    return Verdict(f"{label} has the {word} {name} on the held-out rows: {value} ({others}).", "")


def _cards(run: RunRecord) -> Iterator[dict[str, str]]:
    after, step = latest(run)
    for row in [row for row in rows_of([run]) if row.better and row.metric in after][:4]:
        old, new = run.before.get(row.metric), after[row.metric]
        name, _, unit = row.title.partition(" (")
        yield {
            "name": name[0].upper() + name[1:] + ("" if step is None else f", step {step}"),
            "value": figure(new, row.digits),
            "unit": unit.removesuffix(")"),
            "more": f"from {figure(old, row.digits)}" if old is not None else "",
            "change": change(old, new),
            "tone": tone(row, old, new),
        }
    yield from _cost_cards(run)


def _cost_cards(run: RunRecord) -> Iterator[dict[str, str]]:
    facts = run.training

    def card(name: str, value: str, more: str) -> dict[str, str]:
        number, _, unit = value.partition(" ")
        return {"name": name, "value": number, "unit": unit, "more": more, "change": "", "tone": ""}

    if "tokens_per_second" in facts:
        per_second = f"{facts['tokens_per_second']:,.0f}"
        yield card("Speed", f"{per_second} tokens/s", f"{facts.get('tokens', 0):,} tokens in all")
    _, busy = points(run, "gpu_utilization")
    if busy:
        yield card("GPU utilisation", f"{sum(busy) / len(busy):.0f} %", "mean of the logs")
    if "peak_memory_mib" in facts:
        yield card("Peak memory", memory(facts["peak_memory_mib"]), str(facts.get("peak_memory_of", "")))
    if "seconds" in facts:
        text = duration(facts["seconds"])
        since = facts.get("resumed_at", 0)
        steps = f"{run.steps:,} steps, {facts.get('epochs', 0):g} epochs"
        steps = f"{run.steps - since:,} steps since step {since:,}" if since else steps
        yield {"name": "Training", "value": text, "unit": "", "more": steps, "change": "", "tone": ""}
    if "parameters" in facts:
        trained = facts.get("trainable_parameters", 0)
        yield card("Parameters", parameters(facts["parameters"]), f"{trained:,} trained")
    student, teacher = run.models.get("student"), run.models.get("teacher")
    small, large = (facts["parameters"] if facts else 0 for facts in (student, teacher))
    if small and large:
        sizes = f"{parameters(small)} of the teacher's {parameters(large)}"
        yield card("Compression", f"{large / small:.3g} times", sizes)


def _samples(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each prompt with the texts of every run; a text that all runs share (teacher, before) appears once."""
    prompts = dict.fromkeys(sample.prompt for run in runs for sample in run.completions)
    for prompt in prompts:
        samples: list[tuple[int, Completion]] = []
        for index, run in enumerate(runs):
            samples += [(index, sample) for sample in run.completions if sample.prompt == prompt][:1]
        answers = []
        for kind, title in (
            ("reference", "in the data"),
            ("teacher", "teacher"),
            ("before", "before"),
            ("after", "after"),
        ):
            texts = [(index, text) for index, sample in samples if (text := getattr(sample, kind)) is not None]
            apart = len(runs) > 1 and (kind == "after" or len({text for _, text in texts}) > 1)
            for index, text in texts if apart else texts[:1]:
                label = f"{title}: {labels[index]}" if apart else title
                color = index % len(SERIES) + 1 if apart else 0
                answers.append({"kind": kind, "label": label, "color": color, "text": text or "(nothing)"})
        yield {"prompt": prompt, "answers": answers}


def _sections(
    runs: Sequence[RunRecord], labels: Sequence[str], drawings: Sequence[Drawing], samples: bool
) -> Iterator[Section]:
    one = runs[0] if len(runs) == 1 else None
    if rows_of(runs):
        table = before_and_after(one) if one else side_by_side(runs, labels)
        lead = (
            "On the held-out rows."
            if one
            else "On the held-out rows, after training. Bold: the best of a row, where runs compare."
        )
        yield Section("metrics", "Before and after" if one else "Metrics side by side", [table], lead)
    if drawings:
        yield Section("curves", "Curves", lead=reading(runs))
    if samples:
        yield Section("samples", "Sample completions", lead="Greedy, of held-out prompts.")
    data = facts(runs, labels, data_facts)
    tables = [table for table in (data, prepared_rows(runs, labels)) if table.rows]
    if tables:
        yield Section("data", "Data", tables)
    yield _configuration(runs, labels)
    patched = list(patches(runs, labels))
    if patched:
        yield Section("layers", "Layers swapped", patched, side_by_side=True)
    spent = [
        facts(runs, labels, training_facts, "Training"),
        facts(runs, labels, parts_of_the_time, "Time of each part"),
    ]
    spent = [table for table in spent if table.rows]
    if spent:
        yield Section("cost", "Cost", spent, side_by_side=bool(one))
    place = facts(runs, labels, environment_facts)
    if place.rows:
        yield Section("environment", "Environment", [place])


def _configuration(runs: Sequence[RunRecord], labels: Sequence[str]) -> Section:
    tables = [settings(run, "" if len(runs) == 1 else label) for run, label in zip(runs, labels, strict=True)]
    lead = "What was set, or differs from the defaults of TRL and liger-trainer."
    if len(runs) > 1:
        lead = "What differs between the runs, then what was set for each, or differs from the defaults."
        tables = [differences(runs, labels), *tables]
    files = [
        File("config.yaml, with every default in effect" + ("" if len(runs) == 1 else f": {label}"), run.config_text)
        for run, label in zip(runs, labels, strict=True)
        if run.config_text
    ]
    return Section("configuration", "Configuration", [table for table in tables if table.rows], lead, files=files)
