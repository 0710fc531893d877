"""The curves of a report: which charts there are, where their points lie, and what they show under the pointer."""

import itertools
import math
import re

import pytest

from liger_trainer.extras.report.drawing import (
    CHARTS,
    SMOOTHED_FROM,
    _running_mean,
    charts_of,
    draw,
    lines_of,
    points,
    reading,
)
from liger_trainer.extras.report.tables import before_and_after, read_run

VALUE = r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4" style="[^"]*"><title>([^<]*)</title>'


def values_shown(svg: str) -> list[tuple[float, float, str]]:
    """Where values are shown under the pointer, and how."""
    return [(float(x), float(y), text) for x, y, text in re.findall(VALUE, svg)]


def test_points_show_their_values(logged):
    (drawing,) = draw([logged([{"step": step, "odd_metric": step / 3} for step in range(1, 21)])])
    shown = values_shown(drawing.svg)
    assert [text for *_, text in shown] == [f"training {step / 3:.5g} at step {step}" for step in range(1, 21)]
    (path,) = re.findall(r'<path d="(M [^"]*)"[^>]*stroke: var\(--s1\)', drawing.svg)
    drawn = [[float(number) for number in point.split()] for point in re.split("[ML]", path)[1:]]
    assert [[x, y] for x, y, _ in shown] == [pytest.approx(place, abs=0.06) for place in drawn]


def test_a_share_is_drawn_from_0_to_100(logged):
    (drawing,) = draw([logged([{"step": step, "gpu_utilization": 97.0} for step in (1, 2)])])
    ticks = re.findall(r"text-anchor: end[^>]*>([^<]*)<", drawing.svg)
    assert (ticks[0], ticks[-1]) == ("0", "100")


def test_what_a_loss_and_a_metric_share_has_one_chart(logged):
    logs = [
        {"step": step, "loss": 1.5 / step, "loss/forward_kl": 1.0 / step, "forward_kl": 1.0 / step,
         "kd_loss": 1.0 / step, "loss/ce": 0.5 / step}
        for step in range(1, 9)
    ]  # fmt: skip
    assert [chart.name for chart in charts_of([logged(logs)])] == ["loss", "loss_ce", "kd_loss", "forward_kl"]
    warmer = [{**log, "loss/forward_kl": 0.9 * log["forward_kl"]} for log in logs]  # at another temperature
    assert [chart.name for chart in charts_of([logged(warmer)])][1] == "loss_forward_kl"
    only = [{name: value for name, value in log.items() if name != "loss/ce"} for log in logs]
    assert [chart.name for chart in charts_of([logged(only)])] == ["loss", "forward_kl"]


def test_of_many_points_some_show_their_values(logged):
    logs = [{"step": step, "loss": 1 / step} for step in range(1, 1001)]
    (drawing,) = draw([logged([*logs, *({"step": step, "eval_loss": 1 / step} for step in (123, 456))])])
    shown = [text for *_, text in values_shown(drawing.svg)]
    assert 100 < len(shown) <= 124 and shown[0] == "training 1 at step 1"
    assert shown[-3:] == ["training 0.001 at step 1,000", "held out 0.0081301 at step 123",
                          "held out 0.002193 at step 456"]  # fmt: skip


@pytest.mark.parametrize("trained, evaluated, color, markers", [(0, 40, 2, 40), (1, 2, 1, 1 + 1)])
def test_evaluations_and_single_values_are_points(logged, trained, evaluated, color, markers):
    """A line of one point would not show. Where there are two, the legend has a marker too."""
    logs = [{"step": step + 1, name: 1 / (step + 1)} for name, count in (("loss", trained), ("eval_loss", evaluated))
            for step in range(count)]  # fmt: skip
    (drawing,) = draw([logged(logs)])
    use = rf'<use href="#loss-m\w+" x="[^"]*" y="[^"]*" style="fill: var\(--s{color}\)'
    assert len(re.findall(use, drawing.svg)) == markers


def label_starts(svg: str) -> dict[str, float]:
    """Where the labels left of the y axis begin in the page's units; below 0 they are cut."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    starts = {}
    for attributes, text in re.findall(r"<text ([^>]*text-anchor: end[^>]*)>([^<]*)</text>", svg):
        size, end = (float(re.findall(name, attributes)[0]) for name in (r"font-size: ([\d.]+)px", r' x="([-\d.]+)"'))
        starts[text] = end - TextPath((0, 0), text, size=size, prop=FontProperties("DejaVu Sans")).get_extents().x1
    return starts


@pytest.mark.parametrize("low, high", [(2, 18), (0.00075, 0.0023)])
def test_the_labels_of_an_axis_are_whole(logged, low, high):
    """Under a legend the axis is lower than matplotlib assumes at first, and then other ticks might fit."""
    run = logged([{"step": step, "loss": low + (high - low) * step / 40} for step in range(41)])
    (drawing,) = draw([run, run], ["one", "two"])
    starts = label_starts(drawing.svg)
    assert len(starts) >= 3 and min(starts.values()) > 0, starts
    ticks = [float(text) for text in starts]
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


def test_points_are_those_of_the_log(make, logged):
    run = read_run(make("first"))
    steps, values = points(run, "eval_forward_kl")
    assert steps == [0, 5, 10, 15, 20] and values == [math.exp(-step / 10) + 0.1 for step in steps]
    pairs = [(1, 3.0), (1, "nan"), (0, 9), (1, 2.0), (None, 7.0), (2, True)]  # of a step logged twice the later counts
    assert points(logged([{"step": step, "loss": loss} for step, loss in pairs]), "loss") == ([0, 1], [9.0, 2.0])
    train, held_out, teacher = lines_of(next(c for c in CHARTS if c.metric == "student_perplexity"), [run])
    assert (train.label, held_out.label, teacher.label) == ("training", "held out", "teacher")
    assert teacher.values == [7.0] * 5 and len(train.steps) == 20
    assert len({line.color for line in (train, held_out, teacher)}) == 3


def test_what_is_logged_by_two_names_is_shown_once(logged):
    """Unless a run has the one name alone: then it is what they can be compared by."""
    values = {"perplexity": 9.0, "student_perplexity": 9.0, "forward_kl": 1.0}
    distilled = logged([{"step": step, **values} for step in (1, 2)], before=values, after=values)
    assert [chart.metric for chart in charts_of([distilled])] == ["forward_kl", "student_perplexity"]
    assert [row.label for row in before_and_after(distilled).rows] == ["forward KL (nats/token)", "student perplexity"]
    tuned = logged([{"step": step, "perplexity": 8.0} for step in (1, 2)])
    assert "perplexity" in {chart.metric for chart in charts_of([distilled, tuned])}


def test_terms_of_the_loss_follow_it_and_the_unknown_comes_last(logged):
    names = ["odd/one", "loss/ce", "loss", "eval_loss/jsd", "schedule/temperature", "entropy"]
    charts = charts_of([logged([{"step": step, **dict.fromkeys(names, 1.0)} for step in (1, 2)])])
    titles = ["Loss", "Loss: ce", "Loss: jsd", "Entropy (nats/token)", "Odd: one", "Schedule: temperature"]
    assert [chart.title for chart in charts] == titles and charts[1].name == "loss_ce"


def test_powers_of_ten_are_as_far_from_each_other(logged):
    (drawing,) = draw([logged([{"step": step, "loss": 10.0**-step} for step in range(5)])])
    heights = [y for _, y, _ in values_shown(drawing.svg)]
    assert [b - a for a, b in itertools.pairwise(heights)] == [pytest.approx(heights[1] - heights[0], abs=0.2)] * 4
    assert drawing.note == "logarithmic" and heights[1] > heights[0]


def test_long_curves_have_a_running_mean(logged):
    mean = _running_mean([float(i % 2) for i in range(9)], 2)
    assert (mean[0], mean[-1]) == (0, 0)  # windows stay centred: the ends are not drawn towards the mean
    assert mean[1] == pytest.approx(1 / 3) and mean[4] == pytest.approx(2 / 5)
    logs = [{"step": step, "loss": 1 + step / 1000} for step in range(SMOOTHED_FROM)]
    assert "running mean" in reading([logged(logs)]) and reading([logged(logs[1:])]) == ""
