"""Does a student learn as much from a teacher cache as from the teacher? The demo's student, over several seeds.

Each run is `liger-trainer run smollm2/distill_layerdrop`; the arms differ in where the teacher comes from alone, so
student, rows, order, schedule and number of tokens are the same. A cache is captured once for all seeds. Every trained
student is then measured on the held-out rows against the teacher itself.

    python -m benchmarks.cache_quality --seeds 0 1 2 --jobs 3 per_device_train_batch_size=32 max_steps=500
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from .report import git_commit

CONFIG = "smollm2/distill_layerdrop"
LIVE = "the teacher itself"
ARMS = {
    LIVE: (),
    "cache, 64 likeliest and the rest, 8 bits": ("cache_kind=topk", "cache_entries=64", "cache_bits=8"),
    "cache, 64 likeliest and the rest, 16 bits": ("cache_kind=topk", "cache_entries=64", "cache_bits=16"),
    "cache, 12 draws": ("cache_kind=sampled", "cache_entries=12"),
}
METRICS = {
    "forward_kl": "forward KL, nats/token",
    "reverse_kl": "reverse KL, nats/token",
    "agreement_at_1": "agreement@1",
    "student_perplexity": "perplexity",
}


@dataclass(frozen=True)
class Cache:
    """What a capture took."""

    folder: str
    bytes_per_token: float  # on disk, keys and headers with it
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """One trained student: its held-out metrics against the live teacher, and metrics.json of its run."""

    held_out: dict[str, float]
    run: dict[str, Any]


Results = dict[str, list[Result]]


def liger_trainer(*words: str) -> None:
    """Run the command line. RuntimeError, with its last words, if it failed."""
    command = [sys.executable, "-m", "liger_trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")


def capture(arm: str, overrides: list[str], folder: Path) -> Cache:
    """Write the cache of an arm."""
    where, start = folder / f"cache-{list(ARMS).index(arm)}", time.perf_counter()
    liger_trainer("cache", CONFIG, f"teacher_cache_dir={where}", *overrides, *ARMS[arm])
    seconds = time.perf_counter() - start
    index = json.loads((where / "index.json").read_text())
    size = sum(shard["bytes"] for shard in index["shards"])
    return Cache(str(where), size / index["tokens"], index["tokens"], seconds)


def run(arm: str, seed: int, overrides: list[str], cache: Cache | None, folder: Path) -> Result:
    """Train one arm with one seed, and measure the student against the teacher."""
    output = folder / f"{list(ARMS).index(arm)}-{seed}"
    teacher = [] if cache is None else ["teacher=cache", f"teacher_cache_dir={cache.folder}", *ARMS[arm]]
    liger_trainer(
        "run", CONFIG, f"seed={seed}", f"output_dir={output}", "num_sample_completions=0", *overrides, *teacher
    )
    measured = folder / f"{output.name}.json"
    command = [sys.executable, "-m", "benchmarks.cache_quality", "--measure", str(output), "--output", str(measured)]
    done = subprocess.run([*command, f"seed={seed}", *overrides], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {arm}, seed {seed}: {done.stderr[-2000:]}")
    print(f"{arm}, seed {seed}: done", file=sys.stderr, flush=True)
    return Result(json.loads(measured.read_text()), json.loads((output / "metrics.json").read_text()))


def measure(student: str, overrides: list[str]) -> dict[str, float]:
    """The held-out metrics of a trained student beside the live teacher."""
    from liger_trainer import LigerDistillTrainer
    from liger_trainer.data import load_run_datasets
    from liger_trainer.loading import load_student, open_model
    from liger_trainer.run_config import load_run_config

    settings = [f"model_name_or_path={student}", "~keep_every_nth_layer", f"output_dir={student}"]
    config = load_run_config(CONFIG, [*overrides, *settings], exact=True).on_this_machine()
    data, files = load_run_datasets(config), open_model(config, "model_name_or_path")
    args: Any = config.training_args()
    trainer = LigerDistillTrainer(
        load_student(config, files),
        teacher_model=open_model(config, "teacher_model_name_or_path").path,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=files.tokenizer,
    )
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def run_all(seeds: list[int], jobs: int, overrides: list[str]) -> tuple[Results, dict[str, Cache]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        caches = {arm: capture(arm, overrides, Path(folder)) for arm in ARMS if arm != LIVE}
        futures = {
            arm: [pool.submit(run, arm, seed, overrides, caches.get(arm), Path(folder)) for seed in seeds]
            for arm in ARMS
        }
        return {arm: [future.result() for future in started] for arm, started in futures.items()}, caches


def table(results: Results, caches: dict[str, Cache], command: str) -> str:
    """Markdown: where it was measured, then mean and range over the seeds, beside the live teacher's, and the cost."""
    first = results[LIVE][0].run
    training, versions, data = first["training"], first["versions"], first["data"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "trl"))
    live = mean(result.held_out["forward_kl"] for result in results[LIVE])
    lines = [
        f"- {training['device']}, {date.today().isoformat()}, commit {os.environ.get('BENCH_COMMIT') or git_commit()}",
        f"- `{command}`: {training['steps']} steps, {training['tokens']:,} tokens a run",
        f"- {packages}",
        f"- {data['test_rows']} held-out rows, measured against the teacher itself; mean (least to most) of "
        f"{len(results[LIVE])} seeds",
        "",
        "| trained from | "
        + " | ".join(METRICS.values())
        + " | forward KL beside the teacher's | bytes/token | capture, s | tokens/s | peak memory, MiB |",
        "|---" * (len(METRICS) + 6) + "|",
    ]
    for arm, each in results.items():
        columns = [[result.held_out[name] for result in each] for name in METRICS]
        spreads = " | ".join(f"{mean(c):.4f} ({min(c):.4f} to {max(c):.4f})" for c in columns)
        beside = f"{mean(columns[0]) / live - 1:+.1%}" if arm != LIVE else ""
        cache = caches.get(arm)
        cost = f"{cache.bytes_per_token:.0f} | {cache.seconds:.0f}" if cache else "|"
        speed = mean(result.run["training"]["tokens_per_second"] for result in each)
        memory = max(result.run["training"]["peak_memory_mib"] for result in each)
        lines.append(f"| {arm} | {spreads} | {beside} | {cost} | {speed:,.0f} | {memory:,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; speed is that of a shared machine then")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    parser.add_argument("--measure", metavar="STUDENT", help=argparse.SUPPRESS)  # one student, in a process of its own
    options, overrides = parser.parse_known_args()
    if options.measure:
        options.output.write_text(json.dumps(measure(options.measure, overrides)))
        return
    results, caches = run_all(options.seeds, options.jobs, overrides)
    shared = f" --jobs {options.jobs}" if options.jobs > 1 else ""
    seeds = " ".join(map(str, options.seeds))
    command = f"python -m benchmarks.cache_quality --seeds {seeds}{shared} {shlex.join(overrides)}".strip()
    text = table(results, caches, command)
    name = "cache-quality-" + re.sub(r"[^a-z0-9]+", "-", results[LIVE][0].run["training"]["device"].lower()).strip("-")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{name}.md").write_text("# Distillation from a cache beside the teacher itself\n\n" + text)
    content: dict[str, Any] = {arm: [asdict(result) for result in each] for arm, each in results.items()}
    content["caches"] = {arm: {**asdict(cache), "folder": None} for arm, cache in caches.items()}
    (options.output / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(text)


if __name__ == "__main__":
    main()
