"""The curves of a report: which charts there are, where their points lie, and what they show under the pointer."""

import itertools
import math
import re

import pytest
from quick_cases import slow_but

from liger_trainer.run.reports.drawing import (
    CHARTS,
    SMOOTHED_FROM,
    _running_mean,
    axes_of,
    charts_of,
    draw,
    lines_of,
    points,
    reading,
)
from liger_trainer.run.reports.tables import before_and_after, duration, read_run

STRIP = (
    r'<g><rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/><path d="M([\d.]+) [\d.V]+"/>'
    r"((?:<circle [^>]*/>)+)<text ([^>]*)>(.*?)</text></g>"
)


def strips(svg: str) -> list[tuple[list[float], float, list[list[float]], list[str]]]:
    """The strips that show values: left edge, top, width, height; the rule; its points; its texts."""
    drawn = []
    for *box, rule, circles, _, text in re.findall(STRIP, svg):
        centers = [list(map(float, c)) for c in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', circles)]
        drawn.append(([float(x) for x in box], float(rule), centers, re.findall(r"<tspan[^>]*>([^<]*)<", text)))
    return drawn


@pytest.mark.parametrize("axis", slow_but(["step", "tokens", "time"], "tokens"))
def test_points_show_their_values(logged, axis):
    """Over each point lies a strip, next to its neighbours' without a gap; its circle is where the line has it."""
    logs, tokens, seconds = [], 0.0, 0.0
    for step in range(1, 21):  # more tokens and a lower speed from step to step
        tokens, speed = tokens + 10.0 * step, 1000.0 / (20 + step)
        logs.append({"step": step, "odd_metric": step / 3, "num_tokens": tokens, "tokens_per_second": speed})
    (drawing,) = [each for each in draw([logged(logs)]) if each.name == "odd_metric"]
    shown, expected = strips(drawing.svgs[axis]), []
    for step in range(1, 21):
        seconds += step * (20 + step) / 100
        expected.append(
            [f"step {step}, {5 * step * (step + 1):,} tokens, {duration(seconds)}", f"training {step / 3:.5g}"]
        )
    assert [texts for *_, texts in shown] == expected
    (path,) = re.findall(r'<path d="(M [^"]*)"[^>]*stroke: var\(--s1\)', drawing.svgs[axis])
    drawn = [[float(number) for number in point.split()] for point in re.split("[ML]", path)[1:]]
    right = None
    for (box, rule, circles, _), place in zip(shown, drawn, strict=True):
        assert circles == [pytest.approx(place, abs=0.06)] and rule == pytest.approx(place[0], abs=0.06)
        assert box[0] <= rule <= box[0] + box[2] and (right is None or box[0] == pytest.approx(right, abs=0.11))
        right = box[0] + box[2]
    progress = {"step": [step - 1 for step in range(1, 21)], "tokens": [5 * s * (s + 1) - 10 for s in range(1, 21)]}
    progress["time"] = [sum(k * (20 + k) for k in range(2, step + 1)) for step in range(1, 21)]
    width = drawn[-1][0] - drawn[0][0]
    there = [(x - drawn[0][0]) / width for x, _ in drawn]
    assert there == pytest.approx([far / progress[axis][-1] for far in progress[axis]], abs=1e-3)


def test_evaluations_between_logs_have_their_place(logged):
    """Tokens from the evaluation itself; time at the speed of the log that it lies in; behind the last log, on."""
    logs = [
        {"step": 0, "eval_loss": 3.0, "eval_num_tokens": 0.0},
        {"step": 10, "loss": 2.0, "num_tokens": 100.0, "tokens_per_second": 10.0},
        {"step": 14, "eval_loss": 1.5, "eval_num_tokens": 150.0},
        {"step": 20, "loss": 1.0, "num_tokens": 300.0, "tokens_per_second": 40.0},
        {"step": 30, "eval_loss": 0.5},
    ]
    train, held_out = lines_of(CHARTS[0], [logged(logs)])
    assert (train.tokens, train.seconds) == ([100.0, 300.0], [10.0, 15.0])
    assert held_out.tokens == pytest.approx([0.0, 150.0, 550.0])
    assert held_out.seconds == pytest.approx([0.0, 11.25, 15.0 + 250.0 / 40.0])


def test_a_share_is_drawn_from_0_to_100(logged):
    (drawing,) = draw([logged([{"step": step, "gpu_utilization": 97.0} for step in (1, 2)])])
    ticks = re.findall(r"text-anchor: end[^>]*>([^<]*)<", drawing.svgs["step"].partition('class="values"')[0])
    assert (ticks[0], ticks[-1]) == ("0", "100")


def test_curves_are_over_what_all_runs_logged(make):
    full = read_run(make("full"))

    def of(*left_out, only=None):
        logs = [{k: v for k, v in e.items() if k not in left_out and k in (only or e)} for e in full.log_history]
        return full.model_copy(update={"log_history": logs})

    slow, bare = of("tokens_per_second"), of("tokens_per_second", "num_tokens")
    assert [axes_of(runs) for runs in ([full], [full, slow], [full, bare])] == [
        ["step", "tokens", "time"], ["step", "tokens"], ["step"]
    ]  # fmt: skip
    (both,) = draw([of(only={"step", "odd_metric", "num_tokens"})] * 2, ["one", "two"])
    assert list(both.svgs) == ["step", "tokens"]
    assert strips(both.svgs["step"])[-1][3] == ["step 20, 1,280 tokens", "one 6.6667", "two 6.6667"]


def test_metrics_of_the_same_points_share_a_chart(logged):
    logs = [
        {"step": step, "loss": 2.0 / step, "loss/forward_kl": 1.0 / step, "forward_kl": 1.0 / step,
         "kd_loss": 1.0 / step, "loss/ce": 0.5 / step, "eval_kd_loss": 3.0}
        for step in range(1, 9)
    ]  # fmt: skip
    assert {drawing.name: (drawing.title, drawing.note) for drawing in draw([logged(logs)])} == {
        "loss": ("Loss", ""),
        "forward_kl": ("Forward KL (nats/token)", ""),
        "loss_ce": ("Loss: ce", ""),
        "kd_loss": ("Distillation loss", ""),  # it has an evaluation too
    }


def test_curves_that_look_the_same_share_a_chart(logged):
    """Averages over batches differ a little in training; where evaluations agree, they are of one quantity."""
    logs = []
    for step in range(20):
        value = math.exp(-step / 5)
        near, far = value + 0.05 * (-1) ** step, value + 0.2 * (-1) ** step
        logs.append({"step": step, "loss": value, "kd_loss": near, "far": far, "near": near, "odd": value * 2})
        logs.append({"step": step, "eval_loss": value, "eval_kd_loss": value, "eval_far": value})
    drawings = {drawing.name: drawing.note for drawing in draw([logged(logs)])}
    assert drawings == {"loss": "the same curve: Distillation loss", "far": "", "near": "", "odd": ""}


def test_of_many_points_some_show_their_values(logged):
    logs = [{"step": step, "loss": 1 / step, "num_tokens": step} for step in range(1, 1001)]
    (drawing,) = draw([logged([*logs, *({"step": step, "eval_loss": 1 / step} for step in (123, 456))])])
    shown = [texts for *_, texts in strips(drawing.svgs["step"])]
    assert 40 < len(shown) <= 64 and shown[0][0] == "step 1, 1 tokens" and shown[-1][0] == "step 1,000, 1,000 tokens"
    assert ["step 123, 123 tokens", "training 0.0081301", "held out 0.0081301"] in shown


def test_places_that_are_near_share_a_strip(logged):
    """Each value then says its step; a strip without width could not be pointed at."""
    logs = [{"step": step, "loss": 1 / step} for step in (1, 1000, 2000)] + [{"step": 1001, "eval_loss": 0.5}]
    (drawing,) = draw([logged(logs)])
    shown = strips(drawing.svgs["step"])
    assert [texts for *_, texts in shown] == [
        ["step 1", "training 1"],
        ["training 0.001 at step 1,000", "held out 0.5 at step 1,001"],
        ["step 2,000", "training 0.0005"],
    ]
    assert len(shown[1][2]) == 2 and min(box[2] for box, *_ in shown) > 1


@pytest.mark.parametrize("trained, evaluated, color, markers", [(0, 40, 2, 40), (1, 2, 1, 1 + 1)])
def test_evaluations_and_single_values_are_points(logged, trained, evaluated, color, markers):
    """A line of one point would not show. Where there are two, the legend has a marker too."""
    logs = [{"step": step + 1, name: 1 / (step + 1)} for name, count in (("loss", trained), ("eval_loss", evaluated))
            for step in range(count)]  # fmt: skip
    (drawing,) = draw([logged(logs)])
    use = rf'<use href="#loss-step-m\w+" x="[^"]*" y="[^"]*" style="fill: var\(--s{color}\)'
    assert list(drawing.svgs) == ["step"] and len(re.findall(use, drawing.svgs["step"])) == markers


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
    starts = label_starts(drawing.svgs["step"])
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
    heights = [place for *_, [(_, place)], _ in strips(drawing.svgs["step"])]
    assert [b - a for a, b in itertools.pairwise(heights)] == [pytest.approx(heights[1] - heights[0], abs=0.2)] * 4
    assert drawing.note == "logarithmic" and heights[1] > heights[0]


def test_long_curves_have_a_running_mean(logged):
    mean = _running_mean([float(i % 2) for i in range(9)], 2)
    assert (mean[0], mean[-1]) == (0, 0)  # windows stay centred: the ends are not drawn towards the mean
    assert mean[1] == pytest.approx(1 / 3) and mean[4] == pytest.approx(2 / 5)
    logs = [{"step": step, "loss": 1 + step / 1000} for step in range(SMOOTHED_FROM)]
    assert "running mean" in reading([logged(logs)]) and reading([logged(logs[1:])]) == ""
