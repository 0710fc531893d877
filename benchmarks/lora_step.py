"""A LoRA training step of a whole model: PEFT alone, PEFT with Liger-Kernel, PEFT with our patch.

    python -m benchmarks.lora_step --output DIR       # on a GPU: DIR/lora-step.json and .md
    python -m benchmarks.lora_step --tiny             # small enough for a CPU: does it still work

Each provider has a process of its own, since Liger patches module globals; they take turns on the device. First a gate:
loss and adapter gradients of every provider against the plain model in fp32 on a short batch. Ours must err at most
twice as much as PEFT alone, else no time is reported. Then, per case, rounds in which each provider in turn runs one
untimed step and STEPS timed ones: forward, backward, fused AdamW on the adapters.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .processes import Benchmark, main
from .shapes import random_model
from .workers import Worker, apply_liger, apply_ours

RANK, ALPHA, B_STD = 16, 32, 0.02
BATCH, LENGTH, GATE_LENGTH = 4, 2048, 512
ROUNDS, STEPS = 3, 2
SECONDS = 120  # no round but a case's first starts later than this after the start
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel")
SHAPES = ("Llama-3.2-1B", "Qwen3-1.7B")
# How adapters over a bf16 base are kept, and whether the step runs under autocast.
MODES = {
    "fp32 adapters": (torch.float32, False),  # PEFT's default
    "fp32 adapters, autocast": (torch.float32, True),  # as transformers.Trainer and TRL run it with bf16=True
    "bf16 adapters": (torch.bfloat16, False),  # autocast_adapter_dtype=False
}
PROVIDERS = {"peft": "PEFT", "liger": "PEFT + Liger-Kernel", "ours": "PEFT + liger-trainer"}


@dataclass(frozen=True)
class Case:
    shape: str
    mode: str
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"{self.shape}, {self.mode}{', gradient checkpointing' * self.checkpointing}"


def cases_of(shape: str) -> list[Case]:
    return [Case(shape, mode) for mode in MODES] + [Case(shape, "fp32 adapters, autocast", checkpointing=True)]


class LoraWorker(Worker):
    """Steps of the adapters of a model."""

    steps = STEPS
    autocast = False
    targets: ClassVar[dict[str, Any]] = {"target_modules": "all-linear"}
    tiny_sizes: ClassVar[dict[str, Any]] = {}  # beside those of `shapes.TINY`

    def make(self, shape: str) -> None:
        from peft import LoraConfig, get_peft_model

        base = random_model(shape, self.tiny, self.device, **(self.tiny_sizes if self.tiny else {}))
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, **self.targets)
        model: Any = get_peft_model(base, lora).train()
        self.model = model
        self.initial: dict[str, torch.Tensor] = {}  # the adapters' values
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # values that bf16 holds too, and B not zero, so that every gradient counts
                parameter.data = parameter.data.float()
                if "lora_B" in name:
                    parameter.data.normal_(std=B_STD)
                self.initial[name] = parameter.data.bfloat16()
        length = 32 if self.tiny else LENGTH
        self.batch = self.random_ids(base.config.vocab_size, BATCH, length)
        self.gate_batch = self.batch[:1, : 16 if self.tiny else GATE_LENGTH]
        if self.provider == "liger":
            apply_liger(base)
        elif self.provider == "ours":
            apply_ours(self.model)

    @contextlib.contextmanager
    def prepared(self, case: Case) -> Iterator[None]:
        """Give the adapters their first values, in the case's dtype, and a fresh optimizer."""
        dtype, self.autocast = MODES[case.mode]
        adapters = self._adapters()
        for parameter, value in zip(adapters, self.initial.values(), strict=True):
            parameter.data, parameter.grad = value.to(dtype, copy=True), None
        self.optimizer = torch.optim.AdamW(adapters, lr=1e-6, fused=self.device == "cuda")
        if case.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        yield
        self.optimizer = None

    def _adapters(self) -> list[torch.nn.Parameter]:
        parameters = dict(self.model.named_parameters())
        return [parameters[name] for name in self.initial]

    def in_fp32(self, shape: str) -> None:
        with self.prepared(Case(shape, "fp32 adapters")):
            self.model.float()

    def loss_of(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return self.model(input_ids=ids, labels=ids).loss

    def take_results(self, loss: torch.Tensor) -> dict[str, Any]:
        """Return the loss and the gradients of all adapters, taken off the model."""
        gradients = [parameter.grad.float().flatten() for parameter in self._adapters() if parameter.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "gradients": torch.cat(gradients).cpu()}


BENCHMARK = Benchmark(
    name="lora-step",
    title="A LoRA training step",
    what=f"Rank {RANK} on all linear layers, bf16 base, {{batch}}x{{length}} tokens, sdpa; forward, backward and "
    f"AdamW. Median of {{rounds}} interleaved rounds of {STEPS} steps; peak MiB above weights and optimizer. Errors: "
    "relative, of loss and adapter gradients, against fp32 on a shorter batch.",
    doc=__doc__,
    worker=LoraWorker,
    shapes=SHAPES,
    providers=PROVIDERS,
    reference="peft",
    packages=PACKAGES,
    batch=lambda tiny: {"batch": BATCH, "length": 32 if tiny else LENGTH},
    columns=("ms", "MiB", "of ours: time", "memory", "loss error", "gradient error"),
    cases_of=cases_of,
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
