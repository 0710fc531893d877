"""A LoRA training step of a mixture of experts: adapters on all linear layers and on the stacked experts.

    python -m benchmarks.moe_step --output DIR       # on a GPU: DIR/moe-step.json and .md
    python -m benchmarks.moe_step --tiny             # small enough for a CPU: does it still work

As lora_step.py, with the sizes of Qwen3-30B-A3B and 4 of its 48 layers: PEFT alone merges the adapters of 128 experts
into a copy of their weights at each forward. The gate's truth is PEFT in fp32.
"""

import sys
from dataclasses import replace
from typing import Any, ClassVar

from .lora_step import BENCHMARK as LORA
from .lora_step import RANK, STEPS, Case, LoraWorker
from .processes import main

SHAPE = "Qwen3-30B-A3B, 4 layers"


def cases_of(shape: str) -> list[Case]:
    autocast = "fp32 adapters, autocast"
    return [Case(shape, autocast), Case(shape, autocast, checkpointing=True), Case(shape, "bf16 adapters")]


class MoeWorker(LoraWorker):
    targets: ClassVar[dict[str, Any]] = {
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    tiny_sizes: ClassVar[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


BENCHMARK = replace(
    LORA,
    name="moe-step",
    title="A LoRA training step of a mixture of experts",
    what=f"Rank {RANK} on all linear layers and on the stacked experts, bf16 base, {{batch}}x{{length}} tokens, sdpa; "
    f"forward, backward and AdamW. Median of {{rounds}} interleaved rounds of {STEPS} steps; peak MiB above weights "
    "and optimizer. Errors: relative, of loss and adapter gradients, against fp32 on a shorter batch.",
    doc=__doc__,
    worker=MoeWorker,
    shapes=(SHAPE,),
    cases_of=cases_of,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
