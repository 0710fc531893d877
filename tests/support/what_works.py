"""Print a row of the table of versions in docs/recipes.md: what trains two steps with the releases installed here."""

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable
from importlib.metadata import version

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_model, tiny_tokenizer

import liger_trainer
from liger_trainer.errors import LigerTrainerError

LIBRARIES = "torch", "transformers", "trl", "peft", "accelerate", "datasets"
TEACHER = functools.partial(tiny_model, num_hidden_layers=1)
ROWS = Dataset.from_list([{"text": f"w{i % 9} w{i % 7} w3 w4"} for i in range(16)])


def stock(folder: str, **how) -> float:
    """Train two steps by an unmodified transformers.Trainer."""
    ids = torch.arange(3, 13)
    args = transformers.TrainingArguments(
        folder, max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        use_liger_kernel=how.pop("flag", False), per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = transformers.Trainer(tiny_model(), args, train_dataset=[{"input_ids": ids, "labels": ids}] * 4, **how)
    trainer.train()
    return trainer.state.log_history[-1]["train_loss"]


def patched(folder: str) -> float:
    model, ids = tiny_model(), torch.arange(3, 13)[None]
    with liger_trainer.patch(model) as record:
        assert "fused loss" in record.report.swapped
        return model(ids, labels=ids).loss.item()


def flag(folder: str) -> float:
    liger_trainer.enable()
    try:
        return stock(folder, flag=True)
    finally:
        liger_trainer.disable()


def callback(folder: str) -> float:
    distilled = liger_trainer.DistillationCallback(TEACHER(), losses=[{"type": "forward_kl"}])
    return stock(folder, callbacks=[distilled])


def trained(trainer: transformers.Trainer) -> float:
    trainer.train()
    return trainer.state.log_history[-1]["train_loss"]


def fine_tuning(folder: str) -> float:
    args = liger_trainer.LigerConfig(
        folder, max_steps=2, report_to="none", save_strategy="no", packing=True, max_length=32, disable_tqdm=True
    )
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    return trained(liger_trainer.LigerTrainer(tiny_model(), args, train_dataset=ROWS, peft_config=lora,
                                              processing_class=tiny_tokenizer()))  # fmt: skip


def distillation(folder: str) -> float:
    args = liger_trainer.LigerDistillConfig(
        folder, max_steps=2, report_to="none", save_strategy="no", max_length=32, disable_tqdm=True
    )
    return trained(liger_trainer.LigerDistillTrainer(tiny_model(), TEACHER(), args, train_dataset=ROWS,
                                                     processing_class=tiny_tokenizer()))  # fmt: skip


def tried(part: Callable[[str], float]) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            return "yes" if part(folder) > 0 else "no: loss 0"
        except LigerTrainerError:
            return "no, and says why"
        except Exception as error:
            return f"no: {type(error).__name__}: {str(error).splitlines()[0][:80]}"


if __name__ == "__main__":
    parts = patched, flag, callback, fine_tuning, distillation
    print("|", " | ".join([*(version(name).partition("+")[0] for name in LIBRARIES), *map(tried, parts)]), "|")
