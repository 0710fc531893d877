"""Captures of the tiny teacher, and trainers that learn from them."""

from pathlib import Path

import torch
from commands import call, settings
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.teachers.row_keys import documents
from liger_trainer.trainers.capture import capture
from liger_trainer.trainers.row_preparation import prepare_rows


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


def captured(folder, data=None, test=None, teacher=None, **options):
    """Capture, and the configuration that was captured with."""
    args = config(folder, **options)
    capture(teacher or teacher_model(), args, tiny_tokenizer(), data or completions(), test)
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
    """Exit code of a command, and all that it printed as one line."""
    code, out, err = call(capsys, *words)
    return code, " ".join((out + err).split())


# A run that distils `student` from the teacher cache in `cache`.
CACHED_RUN = settings(
    recipe="distill", teacher="cache", teacher_cache_dir="cache", num_sample_completions=1, max_new_tokens=2
)
