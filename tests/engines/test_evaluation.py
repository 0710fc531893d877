"""Evaluation on 1, 2 and 3 processes: every metric is that of one, whatever accelerate fills the last batch with.

Run as a script, one of several processes evaluates each of CASES.
"""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import WORDS, completions, tiny_model, tiny_tokenizer, train_args
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer import DistillationCallback, LigerDistillConfig, LigerDistillTrainer, LigerTrainer

ROWS = (5, 10, 17)
BATCH = 4  # 8 and 12 rows a step: the rows that fill it up are many, few, and more than there are
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]
KD = {"losses": LOSSES, "beta": 0.3, "temperature": 2.0}
OF_A_TEACHER = ("kd_loss", "ce_loss", "_kl", "agreement_at_1", "student_perplexity", "teacher_perplexity",
                "teacher_entropy", "loss/jsd")  # fmt: skip
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
    return tiny_model("gemma2", seed=seed, hidden_size=48)


def sft(model=None, rows=rows_of, wrap=lambda rows: rows, config=SFTConfig, given=None, **options):
    data = {str(n): wrap(rows(n)) for n in ROWS}
    options = {"per_device_eval_batch_size": BATCH, **options}
    return LigerTrainer(
        model or tiny_model(), args=train_args(config, **options), train_dataset=rows(8), eval_dataset=data,
        processing_class=tiny_tokenizer(), **(given or {}),
    )  # fmt: skip


def distill(model=None, rows=rows_of, **options):
    args = {"per_device_eval_batch_size": BATCH, "eval_packing": False, **KD, **options}
    return LigerDistillTrainer(
        tiny_model(), teacher_model=model or teacher(), args=train_args(LigerDistillConfig, **args),
        train_dataset=rows(8), eval_dataset={str(n): rows(n) for n in ROWS}, processing_class=tiny_tokenizer(),
    )  # fmt: skip


def evaluated(trainer):
    return trainer.evaluate()


def routed(**options):
    entries = [{"name": name, "weight": 1.0} for name in ("math", "code")]
    return distill({"math": teacher(), "code": teacher(7)}, teachers=entries, teacher_column="domain", **options)


def streamed(rows):
    return rows.to_iterable_dataset(num_shards=5)


def loss_of_logits(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"rows": len(hits), "accuracy": hits[prediction.label_ids[:, 1:] != -100].mean(),
            "tokens": (prediction.inputs != -100).sum(), "order": (np.arange(len(hits)) * prediction.inputs[:, 0]).sum()}  # fmt: skip


def with_logits(**options):
    given = {"compute_metrics": accuracy}
    return sft(given=given, include_for_metrics=["inputs"], eval_do_concat_batches=True, **options)


def predicted(trainer):
    """The metrics, and the rows' labels in their order."""
    found = {}
    for name, rows in trainer.eval_dataset.items():
        output = trainer.predict(rows)
        labels = [row[row != -100].tolist() for row in output.label_ids]
        found |= {f"{name}_{metric}": value for metric, value in output.metrics.items()}
        found |= {f"{name}_labels": labels, f"{name}_sum": output.predictions[output.label_ids != -100].sum().item()}
    return found


def while_training(trainer):
    """What an evaluation in training logs, of a callback."""
    trainer.train()
    metrics = {k: v for log in trainer.state.log_history for k, v in log.items() if k.startswith("eval_")}
    # the trainer's own, over batches and over what accelerate repeats
    return {k: v for k, v in metrics.items() if k.endswith(OF_A_TEACHER)}


def called_back(cls, config, rows, **options):
    args = {"max_steps": 1, "learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1,
            "per_device_eval_batch_size": BATCH, **options}  # fmt: skip
    return cls(
        tiny_model(), args=train_args(config, **args), train_dataset=rows(24), processing_class=tiny_tokenizer(),
        eval_dataset={str(n): rows(n) for n in ROWS}, callbacks=[DistillationCallback(teacher(), **KD)],
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()) if cls is Trainer else None,
    )  # fmt: skip


def tokenized(n):
    return distill(rows=lambda _: rows_of(n)).train_dataset.select_columns(["input_ids", "labels"])


HOW = "accelerator_config"
CASES = {
    "sft": lambda: evaluated(sft()),
    "padding_free": lambda: evaluated(sft(padding_free=True, max_length=None)),
    "packing": lambda: evaluated(sft(packing=True, max_length=24)),
    "label_smoothing": lambda: evaluated(sft(label_smoothing_factor=0.1)),
    "moe": lambda: evaluated(sft(tiny_model("mixtral"))),
    "compute_loss_func": lambda: evaluated(sft(tiny_model("mixtral"), given={"compute_loss_func": loss_of_logits})),
    "group_by_length": lambda: evaluated(sft(train_sampling_strategy="group_by_length")),
    "workers": lambda: evaluated(sft(dataloader_num_workers=2)),
    "split_batches": lambda: evaluated(sft(per_device_eval_batch_size=12, **{HOW: {"split_batches": True}})),
    "even_batches": lambda: evaluated(sft(**{HOW: {"even_batches": False}})),
    "dispatch_batches": lambda: evaluated(sft(rows=even_rows, **{HOW: {"dispatch_batches": True}})),
    "stream": lambda: evaluated(sft(wrap=streamed, **{HOW: {"dispatch_batches": False}}, max_steps=1)),
    "stream_dispatched": lambda: evaluated(sft(rows=even_rows, wrap=streamed, max_steps=1)),
    "compute_metrics": lambda: evaluated(with_logits()),
    "compute_metrics_dispatched": lambda: evaluated(with_logits(rows=even_rows, **{HOW: {"dispatch_batches": True}})),
    "predict": lambda: predicted(sft()),
    "kd": lambda: evaluated(distill()),
    "kd_padding_free": lambda: evaluated(distill(padding_free=True, max_length=None)),
    "hidden": lambda: evaluated(distill(losses=[*LOSSES, {"type": "hidden_mse", "weight": 0.3, "layers": "last"}])),
    "teachers": lambda: evaluated(routed()),
    "on_policy": lambda: evaluated(distill(rows=prompts, lmbda=1.0, max_completion_length=6,
                                           generation_kwargs={"do_sample": False})),
    "callback_sft": lambda: while_training(called_back(SFTTrainer, SFTConfig, rows_of)),
    "callback_padding_free": lambda: while_training(
        called_back(SFTTrainer, SFTConfig, rows_of, padding_free=True, max_length=None)
    ),
    "callback_packing": lambda: while_training(
        called_back(SFTTrainer, SFTConfig, rows_of, packing=True, max_length=24)
    ),
    "callback_dispatched": lambda: while_training(
        called_back(SFTTrainer, SFTConfig, even_rows, **{HOW: {"dispatch_batches": True}})
    ),
    "callback_split": lambda: while_training(
        called_back(SFTTrainer, SFTConfig, rows_of, per_device_eval_batch_size=12, per_device_train_batch_size=12,
                    **{HOW: {"split_batches": True}})
    ),
    "callback_trainer": lambda: while_training(called_back(Trainer, TrainingArguments, tokenized)),
}  # fmt: skip


def prompts(n):
    return rows_of(n).remove_columns(["completion", "domain"])


def results():
    found = {}
    for name, case in CASES.items():
        metrics = case()
        found[name] = {k: v for k, v in metrics.items() if not k.endswith(TIMES) and k != "epoch"}
    return found


def launch(processes: int, out: Path) -> list[dict]:
    """What each of several processes found."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    tests = Path(__file__).parents[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
    }  # fmt: skip
    files = [out / f"{rank}.pt" for rank in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(file)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    try:
        output = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(output)
    return [torch.load(file) for file in files]


if __name__ == "__main__":
    import traceback
    found = {}
    only = sys.argv[2:] 
    for name, case in CASES.items():
        if only and name not in only: continue
        try:
            found[name] = {k: v for k, v in case().items() if not k.endswith(TIMES) and k != "epoch"}
        except BaseException:
            print("FAILED", name, flush=True)
            traceback.print_exc()
    torch.save(found, sys.argv[1])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
