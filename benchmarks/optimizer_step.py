"""What clipping and AdamW take over all weights of a model: torch's functions and ours, interleaved.

    python -m benchmarks.optimizer_step
    python -m benchmarks.optimizer_step --tiny --rounds 3    # on a CPU: it runs, its times mean nothing

Weights, gradients and moments are in bf16. The GPU sleeps while the host launches, so the times are the GPU's own.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_trainer.kernels.gradient_norm import gradient_norm
from liger_trainer.trainers.one_launch_adamw import OneLaunchAdamW

from .measure import Roofline, Spread, Stopwatch, interleave, release_memory
from .report import join_versions, provenance, slug, table, write
from .shapes import config_of

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen3-1.7B")
MOST = 1.0  # max_grad_norm
ASLEEP = 20_000_000  # cycles: longer than any of these takes to launch
BYTES = {"norm": 2, "step": 14, "both": 16}  # a weight, where each number is read and written once


def random_weights(shape: str, device: torch.device, tiny: bool) -> list[nn.Parameter]:
    """Return the weights of a model, random, with random gradients."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = [p.shape for p in AutoModelForCausalLM.from_config(config_of(shape, tiny)).parameters()]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    params = [nn.Parameter(torch.randn(x, device=device, dtype=dtype) * 0.02) for x in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def calls_of(params: list[nn.Parameter]) -> dict[str, Callable[[], object]]:
    """Return what is timed. Each optimizer has its own moments; both move the same weights."""
    options: dict[str, Any] = {"lr": 1e-5, "fused": True}
    plain, ours = torch.optim.AdamW(params, **options), OneLaunchAdamW(params, **options)
    grads: list[Tensor] = [p.grad for p in params if p.grad is not None]

    def step_of_ours() -> None:
        ours.clip(gradient_norm(grads), MOST)
        ours.step()

    def step_of_torch() -> None:
        nn.utils.clip_grad_norm_(params, MOST)
        plain.step()

    return {
        "norm, torch": lambda: nn.utils.get_total_norm(grads), "norm, ours": lambda: gradient_norm(grads),
        "step, torch": plain.step, "step, ours": ours.step,
        "both, torch": step_of_torch, "both, ours": step_of_ours,
    }  # fmt: skip


def measure(shape: str, rounds: int, tiny: bool) -> tuple[int, dict[str, list[float]]]:
    """Return the number of weights, and milliseconds of each call."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = random_weights(shape, device, tiny)
    calls, stopwatch = calls_of(params), Stopwatch(device, ASLEEP)
    interleave(calls, stopwatch, 2)
    times = interleave(calls, stopwatch, rounds)
    return sum(p.numel() for p in params), times


def page(results: dict[str, tuple[int, dict[str, list[float]]]], limits: Roofline, command: str) -> tuple[dict, str]:
    """Return all numbers, and the page."""
    where = provenance(("torch", "triton", "transformers", "liger-trainer"))
    rows = []
    for shape, (weights, times) in results.items():
        for what, who in (name.split(", ") for name in times):
            own = times[f"{what}, {who}"]
            spread, ratio = Spread.of(own), Spread.of_ratios(own, times[f"{what}, ours"])
            floor = BYTES[what] * weights / limits.copy_gbs / 1e6
            cells = f"{spread.median:.3f} ({spread.p25:.3f} to {spread.p75:.3f})", f"{ratio.median:.2f}"
            rows.append([shape, what, who, *cells, f"{floor / spread.median:.2f}"])
    lines = [
        "# The optimizer's step",
        "",
        f"- {where['device']}, {where['date']}, commit {where['commit']}, {join_versions(where['packages'])}",
        f"- `{command}`",
        f"- Measured limit: copy {limits.copy_gbs:.0f} GB/s",
        "",
        "All weights of a model in bf16, random, with random gradients. norm: that of all gradients,",
        "`get_total_norm` and `gradient_norm`. step: AdamW alone, torch's fused one and",
        "[ours](../how-it-works.md#the-optimizers-step). both: a step with clipping, torch's `clip_grad_norm_` and its",
        "fused AdamW, and ours, which clips on the way. ms: median (quartiles). Roofline: of the time in which a copy",
        "moves the numbers that must be read and written.",
        "",
        *table(("weights of", "what", "who", "ms", "of ours", "roofline"), rows),
    ]
    return {**where, "copy_gbs": limits.copy_gbs, "ms": {k: v[1] for k, v in results.items()}}, "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = Roofline.measure(Stopwatch(device), device)
    results = {}
    for shape in MODELS:
        results[shape] = measure(shape, options.rounds, options.tiny)
        release_memory()
    command = f"python -m benchmarks.optimizer_step --rounds {options.rounds}{' --tiny' * options.tiny}"
    numbers, text = page(results, limits, command)
    write(options.output / f"optimizer-step-{slug(numbers['device'])}", numbers, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
