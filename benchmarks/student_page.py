"""The page of `benchmarks.students`: means over the seeds, 95 % confidence intervals, differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

from .report import join_versions, table
from .student_ways import BASE, FORMATS, INSTRUCTION, SIZES, WAYS

PACKAGES = ("torch", "triton", "transformers", "trl")
METRICS = {
    "forward_kl": ("forward KL", 3, -1),
    "reverse_kl": ("reverse KL", 3, -1),
    "agreement_at_1": ("agreement@1", 3, 1),
    "student_perplexity": ("perplexity", 1, -1),
}  # their titles, digits, and 1 where more is better
# The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
COMPARED = (BASE, "on_policy", "drawn", "answers", "both")
Runs = dict[str, dict[str, Any]]


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of the mean, t s / √n; None for less than two values."""
    count = len(values)
    if not 2 <= count <= len(STUDENT_T) + 1:
        return None
    return STUDENT_T[count - 2] * stdev(values) / math.sqrt(count)


def interval(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return the mean, and ± half the width of its interval."""
    if not values:
        return ""
    half = half_width(values)
    center = f"{mean(values):{sign}.{digits}f}"
    return center if half is None else f"{center} ± {half:.{digits}f}"


def paired(runs: Runs, way: str, base: str, metric: str) -> list[float]:
    """Return `way` minus `base` for each seed of both, where they had equally many neighbours."""
    ours, theirs = runs.get(way, {}), runs.get(base, {})
    both = [seed for seed in ours if seed in theirs and ours[seed].get("beside") == theirs[seed].get("beside")]
    pairs = [(ours[seed]["held_out"].get(metric), theirs[seed]["held_out"].get(metric)) for seed in both]
    return [a - b for a, b in pairs if a is not None and b is not None]


def verdict(differences: Sequence[float], better: int) -> str:
    """Say whether the interval of paired differences leaves 0 out, and on which side."""
    half = half_width(differences)
    if half is None:
        return ""
    center = mean(differences) * better
    return "better" if center > half else "worse" if center < -half else "not told apart"


def values(runs: Runs, way: str, metric: str) -> list[float]:
    return [run["held_out"][metric] for run in runs.get(way, {}).values() if metric in run["held_out"]]


def page(content: dict[str, Any]) -> str:
    """Return the Markdown of what the .json holds."""
    runs: Runs = content["runs"]
    parts = [_head(content), *_ways(runs), *_sizes(runs, content), *_quantised(runs, content)]
    parts += [*_privileged(runs, content), *_failures(content)]
    seconds = content["conditions"]["train_seconds"]
    time = f"{seconds / 60:g} minutes" if seconds > 90 and seconds % 60 == 0 else f"{seconds:g} seconds"
    return "\n".join([f"# Better students, in the same {time}", "", *parts]).rstrip() + "\n"


def _head(content: dict[str, Any]) -> str:
    conditions, setup = content["conditions"], content.get("setup", {})
    every = [run for seeds in content["runs"].values() for run in seeds.values()]
    beside = sorted({run["beside"] for run in every})
    lines = []
    for call in content.get("calls", []):
        lines += [f"- {call['device']}, {call['date']}, commit {call['commit']}: `{call['command']}`"]
        lines += [f"- {join_versions(call['packages'])}"] if call is content["calls"][-1] else []
    lines += [
        f"- Each training has {conditions['train_seconds']:g} seconds of wall-clock time, beside "
        f"{' or '.join(map(str, beside)) or 'no'} others that start at the same moment and share the device: that is "
        "what equal time means here. Loading and measuring are not counted; stages of one run share its seconds. The "
        "learning rate rises for 5 % of the time, and falls as half a cosine over the rest.",
        f"- SmolLM2-135M-Instruct teaches, on docstrings of the Python standard library, 16 rows of up to 256 tokens a "
        f"step. Every student is measured by `liger-trainer eval` on {setup.get('rows', 0)} held-out rows against the "
        "teacher as it was. KLs in nats a token.",
        "- Mean over the seeds ± half of the 95 % confidence interval (Student's t); no interval for one seed.",
        "",
    ]
    return "\n".join(lines)


def _measured(runs: Runs, way: str) -> list[str]:
    return [interval(values(runs, way, metric), digits) for metric, (_, digits, _) in METRICS.items()]


def _cost(runs: Runs, way: str) -> list[str]:
    each = list(runs[way].values())
    stages = zip(*(run["steps"] for run in each), strict=True)
    steps = " + ".join(f"{mean(stage):,.0f}" for stage in stages)
    return [steps, f"{mean(run['tokens'] for run in each):,.0f}", str(len(each))]


def _titles() -> list[str]:
    return [title for title, _, _ in METRICS.values()]


def _ways(runs: Runs) -> list[str]:
    present = [way for way in COMPARED if way in runs]
    if not present:
        return []
    rows = [[WAYS[way].title, *_measured(runs, way), *_cost(runs, way)] for way in present]
    lines = ["## Ways, with the same student size", ""]
    lines += table(["", *_titles(), "steps", "tokens learned from", "seeds"], rows)
    others = [way for way in present if way != BASE]
    if BASE in runs and others:
        lines += ["", "Less one stage, paired by seed; better and worse where the interval leaves 0 out:", ""]
        lines += table(["", *_titles()], [[WAYS[way].title, *_differences(runs, way, BASE)] for way in others])
    return [*lines, "", *_students(runs, present), ""]


def _differences(runs: Runs, way: str, base: str) -> list[str]:
    cells = []
    for metric, (_, digits, better) in METRICS.items():
        differences = paired(runs, way, base, metric)
        judged = verdict(differences, better)
        cells.append(interval(differences, digits, "+") + (f", {judged}" if judged else ""))
    return cells


def _students(runs: Runs, present: Iterable[str]) -> list[str]:
    sizes = {way: next(iter(runs[way].values()))["parameters"] for way in present}
    both = f"; depth and width together: {sizes['both']:,}" if "both" in sizes else ""
    if BASE not in sizes:
        return []
    return [
        f"The student of one stage keeps every second layer and the last of the teacher's, {sizes[BASE]:,} "
        f"parameters{both}. Half of the layers leave much to learn, so that ways differ by more than their noise."
    ]


def _sizes(runs: Runs, content: dict[str, Any]) -> list[str]:
    rows = []
    for size in SIZES:
        speed = _tokens_per_second(content, f"distilled_{size}")
        for way in (f"distilled_{size}", f"tuned_{size}"):
            if way in runs:
                parameters = next(iter(runs[way].values()))["parameters"]
                rows.append([WAYS[way].title, f"{parameters:,}", *_measured(runs, way), speed, *_cost(runs, way)])
    if not rows:
        return []
    lines = ["## Smaller students: quality and speed", ""]
    if "chart" in content:
        lines += [f"![what students lose against how fast they write]({content['chart']})", ""]
    lines += table(["", "parameters", *_titles(), "tokens/s", "steps", "tokens learned from", "seeds"], rows)
    pairs = [(f"distilled_{size}", f"tuned_{size}") for size in SIZES]
    pairs = [(ours, theirs) for ours, theirs in pairs if ours in runs and theirs in runs]
    lines += ["", "Distilled less fine-tuned, paired by seed:", ""]
    lines += table(["", *_titles()], [[WAYS[a].title, *_differences(runs, a, b)] for a, b in pairs])
    teacher = _tokens_per_second(content, "teacher")
    alone = f" The teacher writes {teacher}." if teacher else ""
    return [
        *lines, "",
        "Tokens/s: one text at a time, transformers' own `generate`, the models in turns, alone on the device; median "
        "and quartiles of texts; a fine-tuned student is as fast as the distilled one of its size."
        f"{alone} Layers are kept evenly spaced. The smallest also keeps a third "
        "of each MLP's units (`init-student`): the embeddings alone are 0.21 of the teacher.", "",
    ]  # fmt: skip


def _tokens_per_second(content: dict[str, Any], model: str) -> str:
    speed = content["speed"].get(model)
    return f"{speed['tokens_per_second']:.1f} ({speed['p25']:.1f} to {speed['p75']:.1f})" if speed else ""


def _quantised(runs: Runs, content: dict[str, Any]) -> list[str]:
    """Say what formats lose, and what training with them wins back."""
    rows = []
    for way in (f"quantised_{qat}" for qat in FORMATS):
        if way not in runs or way not in content["before"]:
            continue
        before = content["before"][way]
        won = [1 - value / before["forward_kl"] for value in values(runs, way, "forward_kl")]
        alone = [f"{before[name]:.3f}" for name in ("forward_kl", "agreement_at_1")]
        trained = [interval(values(runs, way, name), 3) for name in ("forward_kl", "agreement_at_1")]
        rows.append([WAYS[way].title, *alone, *trained, interval(won, 2), *_cost(runs, way)])
    if not rows:
        return []
    titles = ["", "forward KL", "agreement@1", "trained: forward KL", "agreement@1", "won back"]
    return [
        "## Quantised students", "",
        "The teacher's own weights, quantised (`qat`), and trained as such by the teacher as it was. Won back: the "
        "share of the forward KL that quantising has cost.", "",
        *table([*titles, "steps", "tokens learned from", "seeds"], rows), "",
    ]  # fmt: skip


def _privileged(runs: Runs, content: dict[str, Any]) -> list[str]:
    each = list(runs.get("privileged", {}).values())
    if not each:
        return []
    before = content["before"]
    rows = [
        [who, f"{before[name]['share']:.2f}", "", ""]
        for who, name in (("teacher, not asked", "plain"), ("teacher, asked", "prompted"))
        if name in before
    ]
    drift = [interval(values(runs, "privileged", metric), 3) for metric in ("forward_kl", "agreement_at_1")]
    rows.append(["student, not asked", interval([run["followed"]["share"] for run in each], 2), *drift])
    answers = [f"- {' '.join(answer.split())}" for answer in each[0]["followed"]["answers"]]
    return [
        "## A privileged prompt", "",
        f"The teacher reads \"{INSTRUCTION}\" before each prompt, the student, which starts as the same model, does "
        "not; it learns on its own completions. Followed: share of 24 held-out questions that are answered in Spanish, "
        "by their commonest words. Drift: the held-out docstrings, without the prompt for either.", "",
        *table(["", "followed", "drift: forward KL", "drift: agreement@1"], rows), "",
        *(["Answers of the student:", "", *answers, ""] if answers else []),
    ]  # fmt: skip


def _failures(content: dict[str, Any]) -> list[str]:
    if not content["failures"]:
        return []
    return ["## Not measured", "", *(f"- {name}: {why}" for name, why in content["failures"].items()), ""]
