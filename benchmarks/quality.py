"""Does distillation beat fine-tuning on the same tokens? The demo's student, trained both ways over several seeds.

Each run is `liger-trainer run smollm2/distill_layerdrop`; the arms differ in `losses` alone, so student, rows, order,
schedule and number of tokens are the same. Held-out rows are measured against the teacher before and after.

    python -m benchmarks.quality --seeds 0 1 2 --jobs 3 per_device_train_batch_size=32 max_steps=500
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from .report import git_commit

CONFIG = "smollm2/distill_layerdrop"
ARMS = {"forward KL": (), "cross-entropy (SFT)": ("losses=[{type: ce}]",)}
METRICS = {
    "forward_kl": "forward KL, nats/token",
    "reverse_kl": "reverse KL, nats/token",
    "agreement_at_1": "agreement@1",
    "student_perplexity": "perplexity",
}
Runs = dict[str, list[dict[str, Any]]]
"""The metrics.json of each seed, by arm."""


def run(arm: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train one arm with one seed and return its metrics.json. RuntimeError, with its last words, if it failed."""
    output = folder / f"{list(ARMS).index(arm)}-{seed}"
    settings = [f"seed={seed}", f"output_dir={output}", "num_sample_completions=0", *overrides, *ARMS[arm]]
    command = [sys.executable, "-m", "liger_trainer", "run", CONFIG, *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arm}, seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    print(f"{arm}, seed {seed}: done", file=sys.stderr, flush=True)
    return json.loads((output / "metrics.json").read_text())


def run_all(seeds: list[int], jobs: int, overrides: list[str]) -> Runs:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        futures = {arm: [pool.submit(run, arm, seed, overrides, Path(folder)) for seed in seeds] for arm in ARMS}
        return {arm: [future.result() for future in started] for arm, started in futures.items()}


def table(runs: Runs, command: str) -> str:
    """Markdown: where it was measured, then mean and range over the seeds, then speed and memory."""
    everything = [result for results in runs.values() for result in results]
    first = everything[0]
    training, versions, data = first["training"], first["versions"], first["data"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "trl"))
    lines = [
        f"- {training['device']}, {date.today().isoformat()}, commit {git_commit()}",
        f"- `{command}`: {training['steps']} steps, {training['tokens']:,} tokens a run",
        f"- {packages}",
        f"- {data['test_rows']} held-out rows; mean (least to most) of {len(runs[next(iter(runs))])} seeds",
        "",
        "| trained with | " + " | ".join(METRICS.values()) + " | tokens/s | peak memory, MiB | seconds |",
        "|---" * (len(METRICS) + 4) + "|",
        "| nothing yet | " + _spreads([result["before"] for result in everything]) + " | | | |",
    ]
    for arm, results in runs.items():
        speed = mean(result["training"]["tokens_per_second"] for result in results)
        memory = max(result["training"]["peak_memory_mib"] for result in results)
        seconds = max(sum(result["seconds"].values()) for result in results)
        after = _spreads([result["after"] for result in results])
        lines.append(f"| {arm} | {after} | {speed:,.0f} | {memory:,.0f} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _spreads(measured: list[dict[str, float]]) -> str:
    columns = [[metrics[name] for metrics in measured] for name in METRICS]
    return " | ".join(f"{mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; speed is that of a shared machine then")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options, overrides = parser.parse_known_args()
    runs = run_all(options.seeds, options.jobs, overrides)
    shared = f" --jobs {options.jobs}" if options.jobs > 1 else ""
    seeds = " ".join(map(str, options.seeds))
    text = table(runs, f"python -m benchmarks.quality --seeds {seeds}{shared} {shlex.join(overrides)}".strip())
    device = runs[next(iter(runs))][0]["training"]["device"]
    name = "quality-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{name}.md").write_text("# Distillation beside fine-tuning on the same tokens\n\n" + text)
    (options.output / f"{name}.json").write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")
    print(text)


if __name__ == "__main__":
    main()
