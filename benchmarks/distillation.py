"""How good each way of distilling is: the demo's student, trained in many ways from one start, over several seeds.

The arms differ in their loss, or in where their teacher comes from, alone: student, rows, order, schedule and number of
steps are the same; where the student samples, the tokens are its own. Every student is measured on the held-out rows
against the teacher itself.

    python -m benchmarks.distillation --seeds 0 1 2 --jobs 6 per_device_train_batch_size=32 max_steps=200
    python -m benchmarks.distillation --arms ce forward_kl --seeds 0 max_steps=20
"""

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from .report import git_commit, join_versions, slug, table, write

CONFIG = "smollm2/distill_layerdrop"
METRICS = {
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "agreement_at_1": "agreement@1",
    "student_perplexity": "perplexity",
}


@dataclass(frozen=True)
class Arm:
    """A way to train: its settings, and those of the cache that it is trained from."""

    title: str
    settings: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()


LIVE = "forward_kl"  # what the caches stand beside
ARMS = {
    "ce": Arm("cross-entropy (SFT)", ("losses=[{type: ce}]",)),
    LIVE: Arm("forward KL"),
    "reverse_kl": Arm("reverse KL", ("beta=1.0",)),
    "jsd": Arm("JSD, beta 0.5", ("beta=0.5",)),
    "kl_ce": Arm("forward KL + 0.5 CE", ("losses=[{type: forward_kl}, {type: ce, weight: 0.5}]",)),
    "skew_kl": Arm("skew KL, alpha 0.1", ("losses=[{type: skew_kl}]",)),
    "taid": Arm("forward KL, TAID from 0.4", ("taid={start: 0.4}",)),
    "cache_top64": Arm(
        "forward KL, cache of 64 likeliest and the rest",
        (),
        ("cache_kind=topk", "cache_entries=64", "cache_tail_draws=0"),
    ),
    "cache_top64_32": Arm(
        "forward KL, cache of 64 likeliest and 32 draws from the rest",
        (),
        ("cache_kind=topk", "cache_entries=64", "cache_tail_draws=32"),
    ),
    "cache_hidden": Arm("forward KL, cache of hidden states", ("cache_kind=hidden",), ("cache_kind=hidden",)),
    "cache_12": Arm("forward KL, cache of 12 draws", (), ("cache_kind=sampled", "cache_entries=12")),
    "on_policy_half": Arm("forward KL, half on-policy", ("lmbda=0.5", "max_completion_length=48")),
    "on_policy": Arm("forward KL, on-policy", ("lmbda=1.0", "max_completion_length=48")),
}


@dataclass(frozen=True)
class Cache:
    """What a capture took."""

    folder: str
    bytes_per_token: float  # on disk, keys and headers with it
    seconds: float


@dataclass(frozen=True)
class Result:
    """One trained student: its held-out metrics against the live teacher, and metrics.json of its run."""

    held_out: dict[str, float]
    run: dict[str, Any]


Results = dict[str, list[Result]]


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Send what is printed to a file; an error quotes the end of it."""
    with path.open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            yield
        except BaseException as error:
            log.flush()
            raise RuntimeError(f"{path.stem}: {error!r}\n{path.read_text()[-2000:]}") from None


def capture(arm: str, overrides: list[str], folder: Path) -> Cache:
    """Write the cache of an arm."""
    from liger_trainer.cli.cache import capture as command

    where, start = folder / f"cache-{arm}", time.perf_counter()
    with _logged(folder / f"cache-{arm}.log"):
        alone: Any = SimpleNamespace(obj=None)  # no arguments for a launcher
        command(alone, CONFIG, [f"teacher_cache_dir={where}", *overrides, *ARMS[arm].cache])
    index = json.loads((where / "index.json").read_text())
    size = sum(shard["bytes"] for shard in index["shards"])
    _release()
    return Cache(str(where), size / index["tokens"], time.perf_counter() - start)


def run(arm: str, seed: int, overrides: list[str], cache: Cache | None, folder: Path) -> Result:
    """Train one arm with one seed, and measure the student against the teacher."""
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.recipes import distill

    output = folder / f"{arm}-{seed}"
    with _logged(folder / f"{arm}-{seed}.log"):
        settings = settings_of(arm, seed, output, overrides, cache)
        distill.main(load_run_config(CONFIG, settings, exact=True).on_this_machine())
        metrics = json.loads((output / "metrics.json").read_text())
        held_out = metrics["after"] if cache is None else measure(output, seed, overrides)
    _release()
    print(f"{arm}, seed {seed}: {held_out['forward_kl']:.4f}", file=sys.stderr, flush=True)
    return Result(held_out, metrics)


def _release() -> None:
    """Free the memory: other processes share the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def settings_of(arm: str, seed: int, output: Path, overrides: list[str], cache: Cache | None) -> list[str]:
    settings = [f"seed={seed}", f"output_dir={output}", "num_sample_completions=0", *overrides, *ARMS[arm].settings]
    if cache is not None:
        settings += ["teacher=cache", f"teacher_cache_dir={cache.folder}"]
    return settings


def measure(student: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """The held-out metrics of a trained student beside the live teacher."""
    from liger_trainer import LigerDistillTrainer
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.run.data.datasets import load_run_datasets
    from liger_trainer.run.models import load_student, open_model

    settings = [f"model_name_or_path={student}", "~keep_every_nth_layer", f"output_dir={student}", f"seed={seed}"]
    config = load_run_config(CONFIG, [*overrides, *settings], exact=True).on_this_machine()
    data, files = load_run_datasets(config), open_model(config, "model_name_or_path")
    trainer = LigerDistillTrainer(
        load_student(config, files),
        teacher_model=open_model(config, "teacher_model_name_or_path").path,
        args=config.training_args(),
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=files.tokenizer,
    )
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def run_all(options: argparse.Namespace, overrides: list[str]) -> tuple[Results, dict[str, Cache]]:
    """Return what finishes within `options.seconds`. The longest arms start first, so that none runs alone at the end.

    A failure is reported and left out: of twelve processes that share a device, one may run out of memory.
    """
    context = multiprocessing.get_context("spawn")
    devices = context.Queue()
    for number in range(options.jobs):
        devices.put(number % options.gpus)
    deadline = time.monotonic() + options.seconds
    arms = sorted(options.arms, key=list(ARMS).index, reverse=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        ProcessPoolExecutor(options.jobs, context, _take_device, (devices,)) as pool,
    ):
        folder = Path(name)
        captures = {pool.submit(capture, arm, overrides, folder): arm for arm in arms if ARMS[arm].cache}
        runs = {
            pool.submit(run, arm, seed, overrides, None, folder): (arm, seed)
            for arm in arms
            if not ARMS[arm].cache
            for seed in options.seeds
        }
        caches = {}
        with contextlib.suppress(TimeoutError):
            for future in as_completed(captures, timeout=_left(deadline)):
                arm = captures[future]
                if _succeeded(future, f"capture of {arm}"):
                    caches[arm] = cache = future.result()
                    runs |= {pool.submit(run, arm, s, overrides, cache, folder): (arm, s) for s in options.seeds}
        finished, rest = wait(runs, timeout=_left(deadline))
        done = {runs[future]: future.result() for future in finished if _succeeded(future, f"{runs[future]}")}
        if rest or not all(future.done() for future in captures):
            _stop(pool)
    results = {arm: [done[arm, seed] for seed in options.seeds if (arm, seed) in done] for arm in options.arms}
    return {arm: each for arm, each in results.items() if each}, caches


def _left(deadline: float) -> float | None:
    return None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())


def _succeeded(future: Future[Any], what: str) -> bool:
    if (error := future.exception()) is not None:
        print(f"{what}: {error}", file=sys.stderr, flush=True)
    return error is None


def _take_device(devices: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(devices.get())
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free is free for the others


def _stop(pool: ProcessPoolExecutor) -> None:
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def page(results: Results, caches: dict[str, Cache], command: str) -> str:
    """Markdown: where it was measured, then mean and range over the seeds, then tokens, speed, memory and cache."""
    everything = [result for each in results.values() for result in each]
    first = everything[0].run
    training, versions, data = first["training"], first["versions"], first["data"]
    packages = join_versions({name: versions[name] for name in ("python", "torch", "transformers", "trl")})
    # a cache does not determine all of them
    before = [result.run["before"] for arm, each in results.items() if arm not in caches for result in each]
    lines = [
        f"- {training['device']}, {date.today().isoformat()}, commit {git_commit()}",
        f"- `{command}`: {training['steps']} steps",
        f"- {packages}",
        f"- {data['test_rows']} held-out rows, measured against the teacher itself; nats per token; mean (least to "
        f"most) of {max(map(len, results.values()))} seeds. tokens/s: of a device that runs share",
        "",
    ]
    rows = [["nothing yet", *_spreads(before), "", "", "", ""]] if before else []
    live = mean(result.held_out["forward_kl"] for result in results[LIVE]) if LIVE in results else None
    seeds = max(map(len, results.values()))
    rows += [_row(arm, each, caches.get(arm), live, seeds) for arm, each in results.items()]
    head = ["trained with", *METRICS.values(), "tokens", "tokens/s", "peak memory, MiB", "cache"]
    return "\n".join([*lines, *table(head, rows)]) + "\n"


def _row(arm: str, each: list[Result], cache: Cache | None, live: float | None, seeds: int) -> list[str]:
    speed = mean(result.run["training"]["tokens_per_second"] for result in each)
    memory = max(result.run["training"]["peak_memory_mib"] for result in each)
    tokens = mean(result.run["training"]["tokens"] for result in each)
    about = ""
    if cache is not None:
        about = f"{cache.bytes_per_token:.0f} bytes/token, captured in {cache.seconds:.0f} s"
        if live is not None:
            about += f"; KL {mean(r.held_out['forward_kl'] for r in each) / live - 1:+.1%} beside the live teacher's"
    measured = _spreads([result.held_out for result in each])
    title = ARMS[arm].title + (f" ({len(each)} of {seeds} seeds)" if len(each) < seeds else "")
    return [title, *measured, f"{tokens:,.0f}", f"{speed:,.0f}", f"{memory:,.0f}", about]


def _spreads(measured: list[dict[str, float]]) -> list[str]:
    columns = [[metrics[name] for metrics in measured] for name in METRICS]
    return [f"{mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes; speed is that of a shared machine then")
    parser.add_argument("--gpus", type=int, default=1, help="that the processes are spread over")
    parser.add_argument("--seconds", type=float, default=math.inf, help="what is not done by then is left out")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options, overrides = parser.parse_known_args()
    results, caches = run_all(options, overrides)
    if not results:
        sys.exit("No run came to its end.")
    chosen = "" if options.arms == list(ARMS) else f" --arms {' '.join(options.arms)}"
    gpus = f" --gpus {options.gpus}" if options.gpus > 1 else ""
    limit = f" --seconds {options.seconds:g}" if math.isfinite(options.seconds) else ""
    seeds = " ".join(map(str, options.seeds))
    words = f"{chosen} --seeds {seeds} --jobs {options.jobs}{gpus}{limit} {shlex.join(overrides)}"
    text = page(results, caches, f"python -m benchmarks.distillation{words}".strip())
    device = results[next(iter(results))][0].run["training"]["device"]
    heading = "# Ways to distil, from one start\n\n"
    write(options.output / f"distillation-{slug(device)}", _content(results, caches), heading + text)
    print(text)


def _content(results: Results, caches: dict[str, Cache]) -> dict[str, Any]:
    """Leave out what is the same in each run, and its folder."""
    kept = ("training", "seconds", "before", "versions")
    runs = {
        arm: [{"held_out": result.held_out, **{name: result.run[name] for name in kept}} for result in each]
        for arm, each in results.items()
    }
    return {"runs": runs, "caches": {arm: {**asdict(cache), "folder": None} for arm, cache in caches.items()}}


if __name__ == "__main__":
    main()
