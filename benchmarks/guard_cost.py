"""What the guard against numbers that are not finite costs, in blocks of one training with it and without it by turns.

    python -m benchmarks.guard_cost
    python -m benchmarks.guard_cost --tiny --blocks 2    # on a CPU: it runs, its times mean nothing

The training is that of `benchmarks.trainer_step`, sft-qwen3-0.6b, through LigerTrainer. The clock waits for the device
at the ends of a block, so a block has the time of its steps whatever runs ahead within it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .report import join_versions, provenance, slug, table, write
from .trainer_cases import CASES, Plan, make_rows
from .trainer_providers import PROVIDERS, make_ours, prepare

BLOCK, WARMUP = 10, 4  # steps of a block; blocks that are not timed, while CUDA graphs are recorded
CASE = next(case for case in CASES if case.name == "sft-qwen3-0.6b")
OURS = next(provider for provider in PROVIDERS["SFT"] if provider.name == "ours")
METHODS = (
    "record_teacher", "record_loss", "record_norm", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_epoch_end", "check",
)  # fmt: skip


def measure(blocks: int, tiny: bool) -> dict[str, list[float]]:
    """Return milliseconds of a step, for each block with the guard and each without it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(WARMUP * BLOCK, (2 * blocks + 1) * BLOCK, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(CASE, OURS, tiny, device, folder, make_rows(CASE, plan, tiny), plan.steps)
        trainer = make_ours(run)
        times = _time_blocks(trainer)
        trainer.train()
    return times


def _time_blocks(trainer: Any) -> dict[str, list[float]]:
    """Add a callback that switches the guard at each end of a block and fills the lists that are returned."""
    from transformers import TrainerCallback

    times: dict[str, list[float]] = {"with": [], "without": []}
    start = 0.0

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        nonlocal start
        if state.global_step % BLOCK or state.global_step < WARMUP * BLOCK:
            return
        now = _synchronized()
        off = "record_loss" in vars(trainer.finite)
        if state.global_step > (WARMUP + 1) * BLOCK:  # the first block fills what runs ahead
            times["without" if off else "with"].append(1e3 * (now - start) / BLOCK)
        _switch(trainer.finite, on=off)
        start = _synchronized()

    trainer.add_callback(type("Blocks", (TrainerCallback,), {"on_step_end": on_step_end})())
    return times


def _switch(guard: Any, on: bool) -> None:
    """Put methods that do nothing over those of a guard, or take them away."""
    for name in METHODS:
        vars(guard).pop(name, None) if on else setattr(guard, name, lambda *_, **__: None)


def _synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def page(times: dict[str, list[float]], command: str) -> tuple[dict[str, Any], str]:
    """Return all numbers, and the page."""
    where = provenance(("torch", "triton", "transformers", "trl", "accelerate", "liger-trainer"))
    ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
    cells = [[f"{value:.2f}" for value in statistics.quantiles(times[which], n=4)] for which in ("without", "with")]
    cells.append([f"{value - 1:+.2%}" for value in statistics.quantiles(ratios, n=4)])
    rows = [[name, *row] for name, row in zip(("without, ms", "with, ms", "neighbours compared"), cells, strict=True)]
    lines = [
        "# What the guard costs",
        "",
        f"- {where['device']}, {where['date']}, commit {where['commit']}, {join_versions(where['packages'])}",
        f"- `{command}`",
        f"- {CASE}, through LigerTrainer, optimizer included. One training, {len(ratios)} blocks of {BLOCK} steps with",
        "  the [guard](../reliability.md#numbers-that-are-not-finite) and as many without it, by turns.",
        "",
        *table(("a step", "lower quartile", "median", "upper quartile"), rows),
    ]
    return {**where, "ms": times, "ratios": ratios}, "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where the guard costs 1 % of a step or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="of each kind")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options = parser.parse_args(arguments)
    command = f"python -m benchmarks.guard_cost --blocks {options.blocks}{' --tiny' * options.tiny}"
    numbers, text = page(measure(options.blocks, options.tiny), command)
    write(options.output / f"guard-cost-{slug(numbers['device'])}", numbers, text)
    print(text)
    return int(statistics.median(numbers["ratios"]) >= 1.01)


if __name__ == "__main__":
    sys.exit(main())
