"""Evaluation on 1, 2 and 3 processes: every metric is one process's, whatever accelerate fills the last batch with.

Run as a script, it is one of several processes and evaluates the cases that it is told.
"""

import functools
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import trainings
from datasets import Dataset
from processes import run_on
from tiny import WORDS, completions, tiny_model, tiny_tokenizer, train_args
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer import DistillationCallback

ROWS = (5, 10, 17)
BATCH = 4  # 8 and 12 rows a step: the rows that fill it up are many, few, and more than there are
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]
KD = {"losses": LOSSES, "beta": 0.3, "temperature": 2.0}
OF_A_TEACHER = ("kd_loss", "ce_loss", "_kl", "agreement_at_1", "student_perplexity", "teacher_perplexity",
                "teacher_entropy", "loss/jsd")  # fmt: skip
HIDDEN = {"type": "hidden_mse", "weight": 0.3, "layers": "last"}
TIMES = ("runtime", "per_second", "preparation_time")


def rows_of(n, names=("math", "code")):
    rng = random.Random(n)
    return completions(n, seed=n).add_column("domain", [rng.choice(names) for _ in range(n)])


def even_rows(n):
    """Of one length, as accelerate wants them where one process reads for all."""
    rng = random.Random(n)
    return Dataset.from_list([{"prompt": " ".join(rng.choices(WORDS, k=4)),
                               "completion": " " + " ".join(rng.choices(WORDS, k=5))} for _ in range(n)])  # fmt: skip


def teacher(seed=5):
    return trainings.a_teacher(seed=seed)


def data_of(rows, wrap=lambda rows: rows):
    return {"data": rows(8), "eval_data": {str(n): wrap(rows(n)) for n in ROWS}, "per_device_eval_batch_size": BATCH}


def sft(model=None, rows=rows_of, wrap=lambda rows: rows, **options):
    return trainings.sft(model, **{**data_of(rows, wrap), **options})


def distill(model=None, rows=rows_of, **options):
    return trainings.distill(None, model or teacher(), **{**data_of(rows), "eval_packing": False, **KD, **options})


def routed(**options):
    entries = [{"name": name, "weight": 1.0} for name in ("math", "code")]
    return distill({"math": teacher(), "code": teacher(7)}, teachers=entries, teacher_column="domain", **options)


def prompts(n):
    return rows_of(n).remove_columns(["completion", "domain"])


def streamed(rows):
    return rows.to_iterable_dataset(num_shards=5)


def loss_of_logits(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"rows": len(hits), "accuracy": hits[prediction.label_ids[:, 1:] != -100].mean(),
            "in_order": (np.arange(len(hits)) * prediction.inputs[:, 0]).sum()}  # fmt: skip


def with_logits(**options):
    return sft(compute_metrics=accuracy, include_for_metrics=["inputs"], **options)


def predicted(trainer):
    """The metrics, and the rows' labels in their order."""
    found = {}
    for name, rows in trainer.eval_dataset.items():
        output = trainer.predict(rows)
        labels = [row[row != -100].tolist() for row in output.label_ids]
        found |= {f"{name}_{metric}": value for metric, value in output.metrics.items()}
        found |= {f"{name}_labels": labels, f"{name}_sum": output.predictions[output.label_ids != -100].sum().item()}
    return found


def called_back(cls, config, rows, **options):
    """What an evaluation in training adds to the log. The rest is the trainer's own, with what is repeated."""
    args = {"max_steps": 1, "learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1,
            "per_device_eval_batch_size": BATCH, **options}  # fmt: skip
    trainer = cls(
        tiny_model(), args=train_args(config, **args), train_dataset=rows(24), processing_class=tiny_tokenizer(),
        eval_dataset={str(n): rows(n) for n in ROWS}, callbacks=[DistillationCallback(teacher(), **KD)],
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()) if cls is Trainer else None,
    )  # fmt: skip
    trainer.train()
    logged = {name: x for log in trainer.state.log_history for name, x in log.items() if name.startswith("eval_")}
    return {name: x for name, x in logged.items() if name.endswith(OF_A_TEACHER)}


def warned_of_unknown_rows():
    """Whether the callback says that it cannot tell which rows are repeated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called_back(SFTTrainer, SFTConfig, rows_of, padding_free=True, max_length=None,
                    train_sampling_strategy="group_by_length")  # fmt: skip
    return any("accelerate fills" in str(warning.message) for warning in caught)


def tokenized(n):
    return distill(rows=lambda _: rows_of(n)).train_dataset.select_columns(["input_ids", "labels"])


SPLIT, UNEVEN, DISPATCHED, SHARDED = (
    {"accelerator_config": {name: value}}
    for name, value in (
        ("split_batches", True), ("even_batches", False), ("dispatch_batches", True), ("dispatch_batches", False),
    )
)  # fmt: skip
PADDING_FREE = {"padding_free": True, "max_length": None}
CASES = {
    # LigerTrainer, and how rows come into batches
    "padded": lambda: sft().evaluate(),
    "padding_free": lambda: sft(**PADDING_FREE).evaluate(),
    "packing": lambda: sft(packing=True, max_length=24).evaluate(),
    "group_by_length": lambda: sft(train_sampling_strategy="group_by_length").evaluate(),
    "workers": lambda: sft(dataloader_num_workers=2).evaluate(),
    "split_batches": lambda: sft(per_device_eval_batch_size=12, **SPLIT).evaluate(),
    "even_batches": lambda: sft(**UNEVEN).evaluate(),
    "dispatch_batches": lambda: sft(rows=even_rows, **DISPATCHED).evaluate(),
    "stream": lambda: sft(wrap=streamed, max_steps=1, **SHARDED).evaluate(),
    "stream_dispatched": lambda: sft(rows=even_rows, wrap=streamed, max_steps=1).evaluate(),
    # whatever is measured
    "aux_loss": lambda: sft(tiny_model("mixtral")).evaluate(),
    "label_smoothing": lambda: sft(label_smoothing_factor=0.1).evaluate(),
    "compute_loss_func": lambda: sft(tiny_model("mixtral"), compute_loss_func=loss_of_logits).evaluate(),
    "compute_metrics": lambda: with_logits().evaluate(),
    "compute_metrics_dispatched": lambda: with_logits(rows=even_rows, **DISPATCHED).evaluate(),
    "predict": lambda: predicted(sft()),
    # a teacher's
    "kd": lambda: distill().evaluate(),
    "kd_padding_free": lambda: distill(**PADDING_FREE).evaluate(),
    "hidden": lambda: distill(losses=[*LOSSES, HIDDEN]).evaluate(),
    "by_teacher": lambda: routed().evaluate(),
    "sampled": lambda: distill(rows=prompts, lmbda=1.0, max_completion_length=6, losses=LOSSES[:2]).evaluate(),
    # a callback's, in trainers that repeat rows
    "callback": lambda: called_back(SFTTrainer, SFTConfig, rows_of),
    "callback_in_trainer": lambda: called_back(Trainer, TrainingArguments, tokenized),
    "callback_padding_free": lambda: called_back(SFTTrainer, SFTConfig, rows_of, **PADDING_FREE),
    "callback_packing": lambda: called_back(SFTTrainer, SFTConfig, rows_of, packing=True, max_length=24),
    "callback_dispatched": lambda: called_back(SFTTrainer, SFTConfig, even_rows, **DISPATCHED),
    "callback_split": lambda: called_back(
        SFTTrainer, SFTConfig, rows_of, per_device_train_batch_size=12, per_device_eval_batch_size=12, **SPLIT
    ),
}
QUICK = {  # what every run takes; the others take minutes
    "even_batches", "dispatch_batches", "predict", "kd_padding_free", "callback",
}  # fmt: skip
RUNS = {  # processes, and what they evaluate
    "three": (3, QUICK), "two": (2, set(CASES)), "three, the others": (3, set(CASES) - QUICK),
}  # fmt: skip


@functools.cache
def result(case):
    """The metrics, without times."""
    return {metric: x for metric, x in CASES[case]().items() if metric != "epoch" and not metric.endswith(TIMES)}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What each of the processes of a run measures."""

    @functools.cache
    def of(run):
        folder, (processes, cases) = tmp_path_factory.mktemp(run), RUNS[run]
        run_on(processes, "../engines/test_evaluation.py", folder, *sorted(cases))
        return [torch.load(file) for file in sorted(folder.glob("*.pt"))]

    return of


@pytest.mark.parametrize(
    "run, case",
    [
        pytest.param(run, case, marks=() if run == "three" else pytest.mark.slow)
        for run, (_, cases) in RUNS.items() for case in CASES if case in cases
    ],
)  # fmt: skip
def test_metrics_are_those_of_one_process(several, run, case):
    want, found = result(case), several(run)
    assert {name.split("_")[0 if case == "predict" else 1] for name in want} == {str(n) for n in ROWS}
    assert len(found) == RUNS[run][0]
    for got in found:
        assert got[case].keys() == want.keys()
        for name, value in want.items():
            assert got[case][name] == (value if isinstance(value, list) else pytest.approx(value, rel=1e-6)), name


def test_the_callback_says_where_it_counts_rows_twice(several):
    assert not warned_of_unknown_rows() and all(got["warned"] for got in several("three"))


if __name__ == "__main__":
    measured = {case: result(case) for case in sys.argv[2:]}
    measured["warned"] = warned_of_unknown_rows()
    torch.save(measured, Path(sys.argv[1], f"{os.environ['RANK']}.pt"))
    torch.distributed.destroy_process_group()
