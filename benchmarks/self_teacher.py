"""What the student's own base as teacher (`teacher: self`) saves when LoRA learns a narrow task, and what it costs.

Every arm trains the same adapters of the demo's model on sums, with the same rows, order and steps; the arms
differ in the weight of the forward KL to the model without its adapters beside the cross-entropy. Afterwards the
student is measured on sums that were held out, and, for what it was not trained on, on the demo's held-out questions:
how far it has drifted from its base there.

    python -m benchmarks.self_teacher --seeds 0 1 2 --jobs 9
    python -m benchmarks.self_teacher --seeds 0 --weights 0 1 --steps 5 --batch 2 --rows 8 --output outputs
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from .report import git_commit, join_versions, provenance, slug, table, write

MODEL, OTHER_ROWS = "demo:smollm2-135m-instruct", "python_docstrings"
TRAINED, LARGEST = 4000, 999  # sums to train on, and the largest number in them
METRICS = {
    "narrow_ce_loss": "sums: loss",
    "narrow_mean_token_accuracy": "sums: token accuracy",
    "other_forward_kl": "elsewhere: KL(base, tuned)",
    "other_reverse_kl": "elsewhere: KL(tuned, base)",
    "other_agreement_at_1": "elsewhere: agreement@1",
    "other_student_perplexity": "elsewhere: perplexity",
}


@dataclass(frozen=True)
class Job:
    """One run: a weight of the KL, 0 for none, and a seed."""

    weight: float
    seed: int
    steps: int
    batch: int
    rows: int  # of each kind to measure on


@dataclass(frozen=True)
class Result:
    """`measured` are METRICS; `base_perplexity` is of the untuned model elsewhere; peak_mib is None without a GPU."""

    job: Job
    measured: dict[str, float]
    base_perplexity: float
    seconds: float
    peak_mib: float | None
    device: str


def sums(n: int, seed: int) -> list[dict[str, Any]]:
    """Chats of one question and its answer."""
    rng = random.Random(seed)
    pairs = [(rng.randint(0, LARGEST), rng.randint(0, LARGEST)) for _ in range(n)]
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "completion": [{"role": "assistant", "content": f"{a} + {b} = {a + b}"}],
        }
        for a, b in pairs
    ]


def run(job: Job) -> Result:
    """Train and measure, in a process of its own."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig

    from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer
    from liger_trainer.run.data.demo_dataset import demo_dataset
    from liger_trainer.run.data.demo_model import resolve_model

    gpu = torch.cuda.is_available()
    path = resolve_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    set_seed(job.seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    student = get_peft_model(model, adapters)
    train, narrow = Dataset.from_list(sums(TRAINED, job.seed)), Dataset.from_list(sums(job.rows, -1))
    other = demo_dataset(OTHER_ROWS).test.select(range(job.rows))

    with tempfile.TemporaryDirectory() as folder:

        def arguments(cls: type, **options: Any) -> Any:
            return cls(
                output_dir=folder, max_steps=job.steps, per_device_train_batch_size=job.batch, learning_rate=5e-4,
                per_device_eval_batch_size=16, lr_scheduler_type="cosine", warmup_steps=10, seed=job.seed, bf16=gpu,
                max_length=256, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
                logging_steps=50, **options,
            )  # fmt: skip

        rows = {"train_dataset": train, "processing_class": tokenizer}
        if job.weight:
            losses = [{"type": "ce"}, {"type": "forward_kl", "weight": job.weight}]
            trainer: Any = LigerDistillTrainer(
                student, args=arguments(LigerDistillConfig, teacher="self", losses=losses), **rows
            )
        else:
            trainer = LigerTrainer(student, args=arguments(SFTConfig), **rows)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**20 if gpu else None
        judge: Any = LigerDistillTrainer(
            student,
            args=arguments(LigerDistillConfig, teacher="self"),
            eval_dataset={"narrow": narrow, "other": other},
            **rows,
        )
        evaluated = {
            name.replace("eval", kind, 1): value
            for kind, rows_of_kind in judge.eval_dataset.items()
            for name, value in judge.evaluate(rows_of_kind).items()
        }
    print(f"weight {job.weight:g}, seed {job.seed}: {evaluated['other_forward_kl']:.4f}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    measured = {name: evaluated[name] for name in METRICS}
    return Result(job, measured, evaluated["other_teacher_perplexity"], round(seconds, 2), peak, device)


def run_all(jobs: Sequence[Job], workers: int) -> list[Result]:
    """Run each job in a process of its own, `workers` at a time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        return list(pool.map(run, jobs))


def page(results: Sequence[Result], command: str) -> str:
    first = results[0]
    packages = join_versions(provenance(("torch", "transformers", "trl", "peft"))["packages"])
    weights = sorted({result.job.weight for result in results})
    alone = _memory([result for result in results if result.job.weight == weights[0]])
    lines = [
        "# The student's own base as teacher, beside plain LoRA fine-tuning",
        "",
        f"- {first.device}, {date.today().isoformat()}, commit {git_commit()}, {packages}",
        f"- `{command}`",
        f"- LoRA (r 16, all linear layers) of SmolLM2-135M-Instruct on sums, {first.job.steps} steps of "
        f"{first.job.batch} rows. Measured on {first.job.rows} other sums, and elsewhere: {first.job.rows} held-out "
        f"questions about Python, where the base has perplexity {first.base_perplexity:.3f}",
        f"- mean (least to most) of {len({r.job.seed for r in results})} seeds; KL in nats per token; seconds "
        "of processes that share the device",
        "",
    ]
    rows = []
    for weight in weights:
        arm = [result for result in results if result.job.weight == weight]
        columns = [_spread([result.measured[name] for result in arm]) for name in METRICS]
        memory = _memory(arm)
        extra = f" ({memory / alone - 1:+.1%})" if memory and alone and weight != weights[0] else ""
        columns += [f"{memory:,.0f}{extra}" if memory else "", f"{max(r.seconds for r in arm):.0f}"]
        rows.append([f"{weight:g}{' (plain fine-tuning)' if not weight else ''}", *columns])
    head = ["weight of the KL to the base", *METRICS.values(), "peak memory, MiB", "seconds, longest"]
    return "\n".join([*lines, *table(head, rows)]) + "\n"


def _memory(results: Sequence[Result]) -> float | None:
    return max((result.peak_mib for result in results if result.peak_mib is not None), default=None)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.3, 1.0], help="of the KL; 0: plain SFT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", type=int, default=256, help="rows of each kind that are measured")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options = parser.parse_args(arguments)
    jobs = [Job(w, s, options.steps, options.batch, options.rows) for s in options.seeds for w in options.weights]
    results = run_all(jobs, min(options.jobs, len(jobs)))
    text = page(results, f"python -m benchmarks.self_teacher {_words(options)}")
    write(options.output / f"self-teacher-{slug(results[0].device)}", [asdict(result) for result in results], text)
    print(text)


def _words(options: argparse.Namespace) -> str:
    """Return the options that the results depend on, as they were given."""
    values = {name: getattr(options, name) for name in ("seeds", "weights", "steps", "batch", "rows", "jobs")}
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return " ".join(f"--{name} {' '.join(f'{x:g}' for x in each)}" for name, each in lists.items())


if __name__ == "__main__":
    main()
