"""Trainings that `benchmarks.many_gpus` measures on several GPUs, and the arithmetic of a token in each.

A GPU's batch is the same however many GPUs there are, so a step's batch grows with them. Everything is shared out by
TRL's fsdp2.yaml: weights, gradients and optimizer of the student, and the teacher's weights. Trained weights are kept
in fp32 and computed with in bf16, as FSDP2 does it, on one GPU too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .shapes import config_of
from .trainer_cases import SPECIAL, Case, Plan
from .trainer_providers import PROVIDERS, REFERENCE, Provider, variant

PLAN = Plan(4, 10, 2)
TINY_LAYERS = 2
PUBLISHED = (
    "torchtitan's own numbers for Llama-3.1-8B on 8 H100 with 96 GB at 500 W, 2 rows of 8192 tokens a GPU, selective "
    "checkpointing: 5,762 tokens/s a GPU and 82.4 GiB, 6,667 and 77.0 with torch.compile, 8,532 and 76.8 with "
    "torch.compile and float8 ([its page](https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md))."
)


@dataclass(frozen=True)
class ManyCase(Case):
    """A training on several GPUs; `rows` are those of one GPU.

    Attributes:
        layers, teacher_layers: of the models, where they have fewer than their shapes.
        selective: only every second layer is checkpointed.
        providers: names of those that run without being named.
        note: stands under the case's table.
    """

    layers: int | None = None
    teacher_layers: int | None = None
    selective: bool = False
    providers: tuple[str, ...] = (REFERENCE, "ours")
    note: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        if self.selective:
            text += " of every second layer"
        for shape, layers in ((self.shape, self.layers), (self.teacher, self.teacher_layers)):
            text += f", {layers} layers of {shape}" if layers else ""
        return text

    def on(self, gpus: int) -> ManyCase:
        """Return the case with the rows of all GPUs."""
        return replace(self, rows=self.rows * gpus)

    def cut(self, layers: int | None, teacher_layers: int | None) -> ManyCase:
        """Return the case with at most so many layers."""
        return replace(
            self,
            layers=_at_most(layers, self.layers, self.shape),
            teacher_layers=_at_most(teacher_layers, self.teacher_layers, self.teacher),
        )

    def student_config(self, tiny: bool) -> Any:
        return config_of(self.shape, tiny, **SPECIAL, **layer_options(self.layers, tiny))

    def teacher_config(self, tiny: bool) -> Any:
        return config_of(self.teacher, tiny, **SPECIAL, **layer_options(self.teacher_layers, tiny))


def _at_most(limit: int | None, layers: int | None, shape: str | None) -> int | None:
    """Return the layers of a model, None for those of its shape."""
    if limit is None or shape is None:
        return layers
    return limit if limit < (layers or config_of(shape, False).num_hidden_layers) else layers


def layer_options(layers: int | None, tiny: bool) -> dict[str, int]:
    """Return options of `config_of`."""
    return {"num_hidden_layers": TINY_LAYERS} if tiny else {"num_hidden_layers": layers} if layers else {}


LLAMA, QWEN = "Llama-3-8B", "Qwen3-1.7B"
HEADS = "ours:vocab_parallel=always"
CASES = (
    ManyCase(
        "sft-llama-3-8b", LLAMA, 1, 8192, checkpointing=True, selective=True,
        providers=(REFERENCE, "trl_compiled", "ours"), note=PUBLISHED,
    ),
    ManyCase(
        "sft-llama-3-8b-2-rows", LLAMA, 2, 8192, checkpointing=True, selective=True, note=PUBLISHED, default=False,
        providers=(REFERENCE, "trl_compiled", "ours"),
    ),
    ManyCase(
        "kd-llama-3-8b-70b", LLAMA, 1, 4096, teacher="Llama-3-70B", teacher_layers=24, checkpointing=True,
        providers=(REFERENCE, "ours", HEADS),
    ),
    ManyCase("sft-qwen3-1.7b", QWEN, 2, 2048),
    ManyCase("lora-qwen3-1.7b", QWEN, 2, 2048, lora_dropout=0.0),
    ManyCase("kd-qwen3-1.7b-8b", QWEN, 2, 2048, teacher="Qwen3-8B", checkpointing=True),
)  # fmt: skip


def providers_of(case: ManyCase) -> dict[str, Provider]:
    """Return all that can run a case, by name."""
    known = {provider.name: provider for provider in PROVIDERS[case.kind]}
    return {**known, HEADS: variant({"vocab_parallel": "always"})[case.kind]}


# What is computed and moved


@dataclass(frozen=True)
class Weights:
    """Numbers of a model's weights, and of the products of its attention for a token.

    Attributes:
        layers: in decoder layers.
        head: of the output head, which computes.
        rest: of embeddings that only look up, and the last norm.
        attention: multiplications and additions of a forward, over all layers, without the causal half taken off.
    """

    layers: int
    head: int
    rest: int
    attention: int

    @classmethod
    def of(cls, config: Any, length: int) -> Weights:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(math.prod(p.shape) for p in model.parameters())
        layers = sum(math.prod(p.shape) for p in model.get_decoder().layers.parameters())
        head = math.prod(model.get_output_embeddings().weight.shape)
        heads = config.num_attention_heads * config.head_dim
        return cls(layers, head, total - layers - head, 4 * config.num_hidden_layers * heads * length)

    @property
    def all(self) -> int:
        return self.layers + self.head + self.rest

    @property
    def forward(self) -> int:
        """Operations of a token's forward."""
        return 2 * (self.layers + self.head) + self.attention


@dataclass(frozen=True)
class Work:
    """What a training does for a token, and what FSDP2 moves in a step.

    Attributes:
        flops: the model's, as torchtitan counts them: two for each weight of a product in the forward, four in the
            backward (two where the weight is frozen), and attention's, without its causal half taken off. What
            checkpointing computes again is no part of it.
        recomputed: what checkpointing computes again.
        gathered, reduced: numbers that all GPUs together gather and reduce in a step, each as bf16: layers for the
            forward and for the backward, the rest and a teacher once; gradients of what is trained.
    """

    flops: int
    recomputed: int
    gathered: int
    reduced: int

    @classmethod
    def of(cls, case: ManyCase, length: int, tiny: bool, trained: int) -> Work:
        """`trained`: the number of trained weights."""
        student = Weights.of(case.student_config(tiny), length)
        teacher = Weights.of(case.teacher_config(tiny), length) if case.teacher else Weights(0, 0, 0, 0)
        products = student.layers + student.head
        if case.lora_dropout is None:
            flops = 3 * student.forward
        else:
            flops = 4 * products + 3 * student.attention + 6 * trained
        again = 2 * student.layers + student.attention
        return cls(
            flops=flops + teacher.forward,
            recomputed=again // (2 if case.selective else 1) if case.checkpointing else 0,
            gathered=2 * student.layers + student.head + student.rest + teacher.all,
            reduced=trained,
        )


def base_of(values: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the value of the fewest GPUs, which efficiencies refer to."""
    return min(values, default=None)
