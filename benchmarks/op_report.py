"""Results of the second suite as JSON and Markdown. When the gate has refused, neither holds any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from .op_run import OpCaseResult, OpResult, Timing
from .report import Header, header_lines, number, refusal, row, spread, table_head

METHOD = """\
Forward and backward apart, in one process, providers interleaved in an order drawn anew each round. On a GPU each pass
is captured in a CUDA graph, the forward with autograd on, and replayed with L2 flushed before it and so many sets of
operands in one replay that none of them is still in L2: the kernels' time alone. A pass marked `*` is timed by events
around launches from Python, where the provider waits for the device and so cannot be captured, or where a step needs
more memory than graphs should keep; its ratio is to ours timed in that way too. On a CPU all is wall clock.

Times are medians (quartiles) in microseconds. Ratio: time over ours, paired by round, so above 1 is slower than ours.
Both: the sum, round by round. Floor: the time of the bytes that any implementation must read and write at the measured
rate of a copy, or of the matrix products at theirs. Memory, in MiB above the operands: the peak of a step, outputs and
gradients included; and what lies between its passes beside the outputs. Cost of calling: wall time of forward and
backward of 512 tokens, called through autograd from Python, ten in a row. Errors: relative L2 distance from plain torch
on the same operands in fp32 without TF32 (in fp64 for fp32 operands, and on a CPU); `!` marks more than the bound,
which is twice the error of plain torch in the operands' dtype plus a floor. Ours must stay within it, and must not wait
for the device."""


def case_data(outcome: OpCaseResult, timed: bool) -> dict:
    case = outcome.case
    return {
        "name": case.name,
        "op": case.kind,
        "tokens": case.tokens,
        "width": case.width,
        "heads": case.heads,
        "transposed": case.transposed,
        "hidden_size": case.hidden_size,
        "dtype": _dtype(outcome),
        "grad_output": case.grad_output,
        "bytes": outcome.bytes,
        "floor_us": outcome.floor_us if timed else {},
        "not_run": outcome.not_run,
        "error_bound": outcome.bound,
        "providers": [_provider_data(outcome, result, timed) for result in outcome.results],
    }


def _provider_data(outcome: OpCaseResult, result: OpResult, timed: bool) -> dict:
    data = {
        "name": result.provider.name,
        "failure": result.failure,
        "errors": result.errors,
        "beyond_bound": result.beyond_bound,
        "writes_into": result.writes_into,
        "waits_in": result.waits,
    }
    if timed and result.passes:
        for name, timing in result.passes.items():
            data[name] = {
                **asdict(timing),
                "gbs": outcome.bytes[name] / timing.us.median / 1e3,
                "fraction_of_limit": outcome.floor_us[name] / timing.us.median,
            }
        data["not_captured"] = result.not_captured
        data["memory_mib"] = result.held and asdict(result.held)
        data["host"] = result.host and asdict(result.host)
    return data


def markdown(header: Header, cases: Sequence[OpCaseResult], violations: Sequence[str]) -> str:
    sections = ["# Ops beside their peers", header_lines(header), METHOD]
    if violations:
        sections.append(refusal(violations))
    else:
        sections += [_times(cases), _memory(cases), _host(cases)]
    sections += [_details(outcome, timed=not violations) for outcome in cases]
    return "\n\n".join(section for section in sections if section) + "\n"


def _titles(cases: Sequence[OpCaseResult]) -> dict[str, str]:
    providers = {result.provider.name: result.provider for outcome in cases for result in outcome.results}
    return {x.name: x.title for x in sorted(providers.values(), key=lambda x: not x.ours)}


def _times(cases: Sequence[OpCaseResult]) -> str:
    titles = _titles(cases)
    lines = ["## Time of the kernels", "", "Median us (ratio to ours); of ours also the share of the limit.", ""]
    lines += table_head(["case", "pass", "floor us", "ours at", *titles.values()])
    for outcome in cases:
        results = {result.provider.name: result for result in outcome.results}
        for name, floor in outcome.floor_us.items():
            ours = results["ours"].passes.get(name) if "ours" in results else None
            share = f"{floor / ours.us.median:.0%}" if ours else ""
            cells = [_cell(results.get(title), name) for title in titles]
            lines.append(row([outcome.case.name, name, number(floor), share, *cells]))
    return "\n".join(lines)


def _cell(result: OpResult | None, name: str) -> str:
    if result is None:
        return ""
    if name not in result.passes:
        return "out of memory" if result.failure == "out of memory" else "failed"
    return _timing(result.passes[name]) + (" !" if result.beyond_bound else "")


def _timing(timing: Timing) -> str:
    ratio = f" ({timing.ratio.median:.2f})" if timing.ratio else ""
    return number(timing.us.median) + ("*" if timing.method == "events" else "") + ratio


def _memory(cases: Sequence[OpCaseResult]) -> str:
    titles = _titles(cases)
    weighed = [x for x in cases if any(result.held for result in x.results)]
    if not weighed:
        return ""
    lines = ["## Memory", "", "Peak of a step / kept between its passes, MiB.", ""]
    lines += table_head(["case", *titles.values()])
    for outcome in weighed:
        held = {result.provider.name: result.held for result in outcome.results}
        cells = [f"{x.peak:.0f} / {x.between:.0f}" if (x := held.get(name)) else "" for name in titles]
        lines.append(row([outcome.case.name, *cells]))
    return "\n".join(lines)


def _host(cases: Sequence[OpCaseResult]) -> str:
    measured = [x for x in cases if any(result.host for result in x.results)]
    if not measured:
        return ""
    titles = {name: title for name, title in _titles(measured).items() if name != "compile"}
    lines = ["## Cost of calling", "", "Wall time of forward and backward, 512 tokens: median us (ratio to ours).", ""]
    lines += table_head(["case", *titles.values()])
    for outcome in measured:
        host = {result.provider.name: result.host for result in outcome.results}
        cells = [_timing(x) if (x := host.get(name)) else "" for name in titles]
        lines.append(row([outcome.case.name, *cells]))
    return "\n".join(lines)


def _details(outcome: OpCaseResult, timed: bool) -> str:
    lines = [f"### {outcome.case.name}", "", _sentence(outcome)]
    if outcome.not_run:
        return "\n".join([*lines, "", f"Not run: {outcome.not_run}."])
    times = ["forward us (quartiles)", "backward us (quartiles)", "forward ratio", "backward ratio"] if timed else []
    lines += ["", *table_head(["provider", *times, *(f"{name} error" for name in outcome.bound)])]
    for result in outcome.results:
        if result.failure:
            lines.append(row([result.provider.title, result.failure]))
            continue
        cells = _pass_cells(result) if timed else []
        lines.append(row([result.provider.title, *cells, *_error_cells(result.errors, outcome.bound)]))
    lines.append(row(["bound for ours", *[""] * len(times), *_error_cells(outcome.bound, outcome.bound)]))
    return "\n".join([*lines, *_notes(outcome)])


def _pass_cells(result: OpResult) -> list[str]:
    passes = [result.passes[name] for name in ("forward", "backward")]
    ratios = [spread(x.ratio, ".3f") if x.ratio else "" for x in passes]
    return [*(spread(x.us, ".1f") + ("*" if x.method == "events" else "") for x in passes), *ratios]


def _error_cells(errors: dict[str, float], bound: dict[str, float]) -> list[str]:
    return [f"{errors[name]:.1e}{'' if errors[name] <= limit else ' !'}" for name, limit in bound.items()]


def _notes(outcome: OpCaseResult) -> list[str]:
    """What the tables do not say of a provider: what it writes over, where it waits, why it was not captured."""
    lines = []
    for result in outcome.results:
        notes = [f"writes into {', '.join(result.writes_into)}"] if result.writes_into else []
        notes += [f"waits for the device in the {' and the '.join(result.waits)}"] if result.waits else []
        notes += [f"could not be captured ({result.not_captured})"] if result.not_captured else []
        if notes:
            lines.append(f"- {result.provider.title} {'; '.join(notes)}.")
    return ["", *lines] if lines else []


def _dtype(outcome: OpCaseResult) -> str:
    return str(outcome.case.dtype).removeprefix("torch.")


def _sentence(outcome: OpCaseResult) -> str:
    case = outcome.case
    parts = [f"{case.kind}, {case.tokens} tokens"]
    parts += [f"{case.width} wide"] if case.width else [f"{case.heads[0]} and {case.heads[1]} heads of 128"]
    parts += ["heads outermost, as a view"] if case.transposed else []
    parts += [f"hidden size {case.hidden_size}"] if case.op.products else []
    parts += [f"grad_output {case.grad_output:g}"] if case.op.is_loss else []
    moved = [f"{name} {size / 1e6:.1f} MB" for name, size in outcome.bytes.items()]
    return ", ".join([*parts, _dtype(outcome)]) + "." + (f" Must move: {', '.join(moved)}." if moved else "")
