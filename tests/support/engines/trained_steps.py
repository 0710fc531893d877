"""One training step through the trainers, by accelerate's engines, in one of two processes; see splits.py."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from engines.projector_training import trained_projectors
from processes import finish
from splits import one_step
from tiny import texts, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError

ENGINES = {
    "ddp": contextlib.nullcontext,
    "fsdp2": fsdp2,
    "fsdp2, kept gathered": lambda: fsdp2(reshard_after_forward=False),
    "fsdp2, loaded by rank 0": lambda: fsdp2(cpu_ram_efficient_loading=True),
}
OBJECTIVES = {
    "tied ce": "llama_tied", "tied kd": "llama_tied", "mix": "llama", "lora": "llama", "lora kd": "llama",
    "stock flag": "llama", "tied self": "llama_tied", "hidden, one width": "llama", "hidden": "llama",
    "callback": "llama", "cached": "llama", "cached hidden": "llama", "on_policy": "llama",
    "tied lora on_policy": "llama_tied", "seq_kd": "llama", "weighted": "llama",
}  # fmt: skip
OPTIONS = {
    "": {},
    "recomputed": {"gradient_checkpointing": True},
    "whole teacher": {"teacher_device": "cpu"},
}
# The other objectives by DDP are in splits.py. The head is what FSDP2 treats differently, so its variants take tied and
# adapted heads.
STEPS = [
    *(("fsdp2", objective, "") for objective in OBJECTIVES),
    ("fsdp2, kept gathered", "on_policy", ""), ("fsdp2, kept gathered", "tied ce", ""),
    ("fsdp2, kept gathered", "lora kd", ""),
    ("fsdp2, loaded by rank 0", "tied kd", ""), ("fsdp2, loaded by rank 0", "lora kd", ""),
    ("fsdp2", "lora", "recomputed"), ("fsdp2", "tied self", "recomputed"), ("fsdp2", "tied kd", "whole teacher"),
    ("ddp", "tied kd", "whole teacher"), ("ddp", "lora", "recomputed"),
]  # fmt: skip
# What FSDP2 does in ways of its own; the others, which it does as DDP does in splits.py, are slow.
QUICK = [
    *(("fsdp2", objective, "") for objective in (
        "tied ce", "tied kd", "hidden", "lora kd", "stock flag", "callback", "cached", "tied lora on_policy",
    )),
    ("fsdp2, kept gathered", "on_policy", ""), ("fsdp2, loaded by rank 0", "tied kd", ""),
    ("fsdp2", "lora", "recomputed"), ("fsdp2", "tied kd", "whole teacher"),
]  # fmt: skip


def step(objective, *split, **how):
    return one_step(objective.removeprefix("tied "), *split, family=OBJECTIVES[objective], **how)


def refusal():
    """What is said where each process has a teacher of its own to shard."""
    with fsdp2(), pytest.raises(ConfigError) as refused:
        teacher = tiny_model(seed=torch.distributed.get_rank())
        args = train_args(LigerDistillConfig)
        LigerDistillTrainer(
            tiny_model(), teacher_model=teacher, args=args, train_dataset=texts(), processing_class=tiny_tokenizer()
        )
    return str(refused.value)


def main(path, speed):
    results = {}
    for engine, objective, variant in STEPS:
        if ((engine, objective, variant) in QUICK) != (speed == "quick"):
            continue
        with ENGINES[engine]():
            named = ("rank 0" in engine and "lora" not in objective) or "teacher" in variant
            results[engine, objective, variant] = step(objective, 2, 2, named=named, **OPTIONS[variant])
    if speed == "quick":
        results["teachers that differ"] = refusal()
        results["projectors"] = []
        for resume in (False, True):
            with fsdp2(state_dict_type="FULL_STATE_DICT"):
                results["projectors"].append(trained_projectors(Path(path).parent / "out", nan_in=2, resume=resume))
    finish(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
