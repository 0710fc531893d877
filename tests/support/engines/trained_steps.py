"""One training step through the trainers, by DDP and FSDP2 of accelerate, in one of two processes; see splits.py."""

import contextlib
import sys

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from splits import STOCK, one_step
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
    "ce": "llama", "tied ce": "llama_tied", "tied kd": "llama_tied", "mix": "llama", "lora": "llama",
    "lora kd": "llama", "stock flag": "llama", "callback": "llama",
}  # fmt: skip
STEPS = [
    (engine, objective)
    for engine in ENGINES
    for objective in OBJECTIVES
    if engine == "ddp" or objective != "callback"  # which refuses FSDP by name
]


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


def main(path):
    results = {}
    for engine, objective in STEPS:
        with ENGINES[engine]():
            # An evaluation before training: transformers prepares no model for FSDP2 then, and loses DDP in its own.
            evaluated = engine == "ddp" and objective not in STOCK
            named = "rank 0" in engine and "lora" not in objective
            results[engine, objective] = step(objective, 2, 2, evaluated=evaluated, named=named)
    results["teachers that differ"] = refusal()
    if torch.distributed.get_rank() == 0:
        torch.save(results, path)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
