"""Do trainings by our trainers go as those by TRL's do? Their losses, step by step, on a real model and real rows.

SmolLM2-135M-Instruct, or half of its layers, on docstrings of the Python standard library. In each case TRL's trainer
sets the curve, with each seed; ours trains in each way that is quicker or takes less memory, on the same rows in the
same order. How far rounding alone carries a training apart is shown by TRL's trainer with eager attention. How far it
lies from another order of the rows is the spread: the mean distance of TRL's curves with two seeds.

    python -m benchmarks.curves                              # on a GPU: docs/results/curves-<device>.md and .json
    python -m benchmarks.curves --ways ours --seeds 0 1 2    # ours and TRL's alone
    python -m benchmarks.curves --cases packed --tiny        # small enough for a CPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from .crew import Task, context_for, run_together
from .report import join_versions, provenance, slug, table, without_output, write

MODEL, ROWS = "demo:smollm2-135m-instruct", "python_docstrings"
PACKAGES = ("torch", "triton", "transformers", "trl", "peft")
SHOWN = (1, 10, 25, 50, 100)  # steps whose losses the table has
BASE = "TRL"


@dataclass(frozen=True)
class Way:
    """A way to train: TRL's trainer, or ours with options of its configuration."""

    title: str
    ours: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"


PLAIN, EAGER = Way(BASE, ours=False), Way(f"{BASE}, eager attention", ours=False, attention="eager")
OURS, LEAN = Way("ours"), Way("ours, memory: lean", options={"memory": "lean"})
CHECKPOINTED = Way("ours, gradient checkpointing", options={"gradient_checkpointing": True})
WITHOUT_GRAPHS = Way("ours, cuda_graphs: never", options={"cuda_graphs": "never"})


@dataclass(frozen=True)
class Case:
    """What is trained; the first way sets the curve."""

    title: str
    ways: tuple[Way, ...]
    packing: bool = False
    lora: bool = False
    distils: bool = False


CASES = {
    "full": Case("Half of the layers, all weights", (PLAIN, EAGER, OURS, WITHOUT_GRAPHS, LEAN, CHECKPOINTED)),
    "packed": Case("Half of the layers, all weights, packed rows", (PLAIN, EAGER, OURS, LEAN), packing=True),
    "lora": Case("All layers, LoRA r 16 on all linear ones", (PLAIN, EAGER, OURS, LEAN), lora=True),
    "kd": Case("Half of the layers from all, forward KL", (PLAIN, EAGER, OURS, LEAN), distils=True),
}
WAYS = list(dict.fromkeys(way.title for case in CASES.values() for way in case.ways))


@dataclass(frozen=True)
class Plan:
    """What all trainings have in common."""

    steps: int = 100
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-4


def train(case: Case, way: Way, seed: int, plan: Plan, tiny: bool, rows: Path) -> dict[str, Any]:
    """Train in a process of its own, and return losses and gradient norms of all steps, and what was done."""
    from transformers import set_seed

    set_seed(seed)
    trainer = _trainer(case, way, seed, plan, tiny, rows)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    done = [str(trainer.patched.report), *trainer.graph_reports.values()] if way.ours else []
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "done": done,
    }


def _trainer(case: Case, way: Way, seed: int, plan: Plan, tiny: bool, rows: Path) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    from liger_trainer.run.data.demo_model import resolve_model

    gpu = torch.cuda.is_available()
    options = {
        "output_dir": str(rows.parent / "out"), "per_device_train_batch_size": plan.rows,
        "max_steps": plan.steps, "seed": seed,
        "learning_rate": plan.learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": 5, "bf16": gpu,
        "max_length": plan.length, "packing": case.packing, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False, **way.options,
    }  # fmt: skip
    student = _model(way.attention, tiny, halved=not case.lora)
    given: dict[str, Any] = {
        "train_dataset": Dataset.from_dict({"input_ids": json.loads(rows.read_text())}),
        "processing_class": AutoTokenizer.from_pretrained(resolve_model(MODEL)),
    }
    if case.lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if not case.distils:
        from trl import SFTConfig, SFTTrainer

        from liger_trainer import LigerConfig, LigerTrainer

        kind, config = (LigerTrainer, LigerConfig) if way.ours else (SFTTrainer, SFTConfig)
        return kind(student, args=config(**options), **given)
    return _distillation(way, student, _model(way.attention, tiny, halved=False), options, given)


def _distillation(way: Way, student: Any, teacher: Any, options: dict[str, Any], given: dict[str, Any]) -> Any:
    """Return a trainer by forward KL: ours, or TRL's GKDTrainer where it never samples."""
    teacher.requires_grad_(False).eval()
    if way.ours:
        from liger_trainer import LigerDistillConfig, LigerDistillTrainer

        args = LigerDistillConfig(**options, losses=[{"type": "forward_kl"}])
        return LigerDistillTrainer(student, teacher_model=teacher, args=args, **given)
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=given["processing_class"].pad_token_id)
    args = GKDConfig(**options, lmbda=0.0, beta=0.0)
    return GKDTrainer(student, teacher_model=teacher, args=args, data_collator=collator, **given)


def _model(attention: str, tiny: bool, halved: bool) -> Any:
    """Return the demo model, or every second of its layers and the last; `tiny`: one of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from liger_trainer.run.data.demo_model import resolve_model
    from liger_trainer.run.drop_layers import drop_layers

    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
        config = AutoConfig.for_model("llama", **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    else:
        how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
        model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), **how)
    return drop_layers(model, keep_every_nth=2) if halved else model


def write_rows(path: Path, plan: Plan, tiny: bool) -> None:
    """Write rows of token ids: whole chats, all tokens of which are learned from."""
    from transformers import AutoTokenizer

    from liger_trainer.run.data.demo_dataset import demo_dataset
    from liger_trainer.run.data.demo_model import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    chats = demo_dataset(ROWS).train.select(range(200 if tiny else 4000))
    whole = [[*chat["prompt"], *chat["completion"]] for chat in chats]
    ids = tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    path.write_text(json.dumps([row[: plan.length] for row in ids]))


# What is made of the curves


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean distance of two curves."""
    return mean(abs(x - y) for x, y in zip(a, b, strict=True))


def spread(curves: Sequence[Sequence[float]]) -> float:
    """Return the mean distance of any two; NaN for one alone."""
    pairs = [distance(a, b) for a, b in itertools.combinations(curves, 2)]
    return mean(pairs) if pairs else math.nan


def page(content: dict[str, Any]) -> str:
    """Return the Markdown of what the .json holds."""
    plan, versions = content["plan"], join_versions(content["packages"])
    lines = [
        "# Curves of the loss, beside TRL's", "",
        f"- {content['device']}, {content['date']}, commit {content['commit']}, {versions}",
        f"- `{content['command']}`",
        f"- SmolLM2-135M-Instruct, fp32 weights and bf16 autocast on a GPU; {plan['steps']} steps of {plan['rows']} "
        f"rows of up to {plan['length']} tokens; AdamW, learning rate {plan['learning_rate']:g}, cosine",
        "- distance: of a step's loss from that of TRL's trainer with the same seed, mean over steps and seeds, and "
        "the largest; spread: the mean distance of TRL's curves with two seeds. Norm: the largest relative distance "
        "of the first gradient norm",
        "",
    ]  # fmt: skip
    for name, case in CASES.items():
        runs = content["runs"].get(name, {})
        if BASE in runs:
            lines += [f"## {case.title}", "", *_table(case, runs, plan["steps"]), ""]
    failures = [f"- {name}: {reason}" for name, reason in content["failures"].items()]
    return "\n".join([*lines, *(["## Failed", "", *failures, ""] if failures else [])])


def _table(case: Case, runs: dict[str, dict[str, Any]], steps: int) -> list[str]:
    shown = [step for step in SHOWN if step <= steps]
    base = runs[BASE]
    wide = spread([run["losses"] for run in base.values()])
    rows = []
    for way in case.ways:
        pairs = [(run, base[seed]) for seed, run in runs.get(way.title, {}).items() if seed in base]
        if not pairs:
            continue
        losses = " / ".join(f"{pairs[0][0]['losses'][step - 1]:.3f}" for step in shown)
        if way.title == BASE:
            rows.append([BASE, losses, "", "", "", ""])
            continue
        apart = mean(distance(run["losses"], other["losses"]) for run, other in pairs)
        most = max(abs(x - y) for run, other in pairs for x, y in zip(run["losses"], other["losses"], strict=True))
        norm = max(abs(run["norms"][0] / other["norms"][0] - 1) for run, other in pairs)
        judged = ["", ""] if math.isnan(wide) else [f"{wide:.1e}", "yes" if apart <= wide else "**no**"]
        rows.append([way.title, losses, f"{apart:.1e}, {most:.1e}", f"{norm:.1e}", *judged])
    return table(["", f"loss, steps {' / '.join(map(str, shown))}", "distance", "norm", "spread", "within"], rows)


def trainings(cases: Sequence[str], ways: Sequence[str]) -> dict[str, tuple[str, Way]]:
    """Return case and way of each training of a seed, by title: TRL's, and those that are named."""
    return {
        f"{name}, {way.title}": (name, way)
        for name in cases for way in CASES[name].ways if way.title in (BASE, *ways)
    }  # fmt: skip


def _measure(options: argparse.Namespace, plan: Plan, content: dict[str, Any]) -> Iterator[None]:
    """Train in all ways, those of one seed at once; yield when a seed is done."""
    deadline, context = time.monotonic() + options.time_limit, context_for("benchmarks.preload_trainers")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rows = Path(folder, "rows.json")
        write_rows(rows, plan, options.tiny)
        keys = trainings(options.cases, options.ways)
        for seed in options.seeds:
            tasks: dict[str, Task] = {
                title: (train, (CASES[name], way, seed, plan, options.tiny, rows))
                for title, (name, way) in keys.items()
            }

            def done(title: str, result: Any, failure: str | None, seed: int = seed) -> None:
                print(f"seed {seed}, {title}: {failure or result['losses'][-1]}", file=sys.stderr, flush=True)
                name, way = keys[title]
                if failure is None:
                    content["runs"].setdefault(name, {}).setdefault(way.title, {})[str(seed)] = result
                else:
                    content["failures"][f"{title}, seed {seed}"] = failure

            run_together(tasks, context, Path(folder, str(seed)), deadline, done)
            yield


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"beside {BASE}: {WAYS[1:]}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the trainings of one run at once")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds; what is not done then has failed")
    parser.add_argument("--tiny", action="store_true", help="random weights and few steps: does it still work")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    options = parser.parse_args(arguments)
    plan = Plan(4, 2, 64) if options.tiny else Plan()
    content: dict[str, Any] = {
        **provenance(PACKAGES), "plan": vars(plan), "runs": {}, "failures": {},
        "command": f"python -m benchmarks.curves {shlex.join(without_output(arguments))}".strip(),
    }  # fmt: skip
    for _ in _measure(options, plan, content):
        write(options.output / f"curves-{slug(content['device'])}", content, page(content))
    print(page(content))


if __name__ == "__main__":
    main()
