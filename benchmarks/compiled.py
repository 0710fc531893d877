"""Forward and backward of a whole model: plain and patched, each eager and under torch.compile, and Liger-Kernel.

    python -m benchmarks.compiled --output DIR       # on a GPU: DIR/compiled.json and .md
    python -m benchmarks.compiled --tiny             # small enough for a CPU: does it still work

Each provider has a process of its own; they take turns on the device. First a gate: loss, gradient norm and a sample of
the gradients of every provider in bf16 against the plain model in fp32, on the batch that is measured. Ours may err at
most twice as much as the plain model in bf16, else no time is reported. Compilation happens there, all at once. Then
rounds in which each provider in turn runs one untimed step and STEPS timed ones.
"""

import sys
from typing import Any

import torch

from .processes import Benchmark, main
from .shapes import random_model
from .workers import Worker, apply_liger, apply_ours

TOKENS = 8192
ROUNDS, STEPS = 4, 4
SECONDS = 125  # no round but a shape's first starts later than this after the start
PACKAGES = ("torch", "triton", "transformers", "liger-kernel")
ROWS = {"Qwen3-0.6B": 8, "Llama-3.2-1B": 4}  # of the batch
PROVIDERS = {
    "plain": "transformers", "plain_compiled": "transformers, torch.compile", "liger": "Liger-Kernel",
    "ours": "liger-trainer", "ours_compiled": "liger-trainer, torch.compile",
}  # fmt: skip


class ModelWorker(Worker):
    """Forward and backward of a model, compiled or not."""

    steps = STEPS

    def make(self, shape: str) -> None:
        self.call: Any = None
        self.model = self.call = random_model(shape, self.tiny, self.device)
        rows = ROWS[shape]
        length = 16 if self.tiny else TOKENS // rows
        self.batch = self.gate_batch = self.random_ids(self.model.config.vocab_size, rows, length)
        if self.provider == "liger":
            apply_liger(self.model)
        elif self.provider.startswith("ours"):
            apply_ours(self.model)
        if self.provider.endswith("compiled"):
            self.call = torch.compile(self.model, dynamic=False, backend="aot_eager" if self.tiny else "inductor")

    def loss_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.call(input_ids=ids, labels=ids).loss


BENCHMARK = Benchmark(
    name="compiled",
    title="Whole models, with and without torch.compile",
    what="Forward and backward in bf16, {tokens} tokens, sdpa, random weights. Median of {rounds} interleaved rounds "
    f"of {STEPS} steps; peak MiB above weights, gradients included. Errors: relative, against the plain model in fp32; "
    "gradients by a sample.",
    doc=__doc__,
    worker=ModelWorker,
    shapes=list(ROWS),
    providers=PROVIDERS,
    reference="plain",
    packages=PACKAGES,
    batch=lambda tiny: {"tokens": "few" if tiny else TOKENS},
    columns=("ms", "MiB", "loss error", "norm error", "gradient error"),
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
