"""Captures of the tiny teacher, and trainers that learn from them."""

from pathlib import Path

import pytest
import torch
from commands import call, settings
from tiny import chats, completions, texts, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.teachers.row_keys import documents
from liger_trainer.trainers import capture as cache_capture
from liger_trainer.trainers.row_preparation import prepare_rows

FORMS = {  # of the rows that a cache is looked up for: the data, and how a trainer prepares them
    "rows": (completions, {}),
    "packed": (completions, {"packing": True, "max_length": 48}),
    "packed, cut": (completions, {"packing": True, "max_length": 9}),
    "fragments": (texts, {"packing": True, "packing_strategy": "bfd_split", "max_length": 9}),
    "wrapped": (texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "padding-free": (completions, {"padding_free": True, "max_length": None}),
    "assistant": (chats, {"assistant_only_loss": True}),
    "assistant, packed": (chats, {"assistant_only_loss": True, "packing": True, "max_length": 64}),
    "whole rows": (completions, {"completion_only_loss": False}),
    "end": (completions, {"max_length": 7, "truncation_mode": "keep_end"}),
}
STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.0, "bf16": False}


def teacher_model():
    return tiny_model("gemma2", seed=5, hidden_size=48)  # with a softcap


def other_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w1000"])
    return tokenizer


def config(folder, **options) -> LigerDistillConfig:
    """Without draws from the rest, unless it says so."""
    cache = {"teacher": "cache", "teacher_cache_dir": folder and str(folder), "cache_tail_draws": 0}
    return train_args(LigerDistillConfig, **{**cache, **options})


def captured(folder, data=None, test=None, teacher=None, mib=cache_capture.MIB, **options):
    """Capture, and the configuration that was captured with. With few bytes to a MiB there are several shards."""
    args = config(folder, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_capture, "MIB", mib)
        cache_capture.capture(teacher or teacher_model(), args, tiny_tokenizer(), data or completions(), test)
    return args


def trainer_of(args, data=None, test=None, student=None, teacher=None, tokenizer=None, **kwargs):
    return LigerDistillTrainer(
        student or tiny_model(), args=args, teacher_model=teacher, train_dataset=data or completions(),
        eval_dataset=test, processing_class=tokenizer or tiny_tokenizer(), **kwargs,
    )  # fmt: skip


def keys_of(args, data=None):
    return [d.key for d in documents(prepare_rows(args, tiny_tokenizer(), data or completions()).datasets["train"])]


def logits_by_hand(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def end_of(capsys, *words: str) -> tuple[int, str]:
    code, out, err = call(capsys, *words)
    return code, " ".join((out + err).split())


# A run that distils `student` from the teacher cache in `cache`.
CACHED_RUN = settings(
    recipe="distill", teacher="cache", teacher_cache_dir="cache", num_sample_completions=1, max_new_tokens=2
)
