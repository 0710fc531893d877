"""One training step through the trainers, by DDP and FSDP2 of accelerate, in one of two processes; see splits.py."""

import contextlib
import sys

import torch
from engines.fsdp2_on_cpu import fsdp2
from splits import one_step

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


def step(objective, *split, evaluated=False):
    return one_step(objective.removeprefix("tied "), *split, evaluated, OBJECTIVES[objective])


def main(path):
    results = {}
    for engine, objective in STEPS:
        with ENGINES[engine]():
            # An evaluation before training: transformers prepares no model for FSDP2 then, and loses DDP in its own.
            evaluated = engine == "ddp" and objective not in ("stock flag", "callback")
            results[engine, objective] = step(objective, 2, 2, evaluated=evaluated)
    if torch.distributed.get_rank() == 0:
        torch.save(results, path)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
