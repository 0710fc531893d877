"""A whole distillation step: teacher's forward, student's forward and backward, forward KL, fused AdamW.

    python -m benchmarks.kd_step --output DIR        # on a GPU: DIR/kd-step.json and .md
    python -m benchmarks.kd_step --tiny              # small enough for a CPU: does it still work

Each provider has a process of its own, since Liger patches module globals; they take turns on the device. First a gate:
loss, gradient norm and a sample of the gradients of every provider in bf16 against the plain models in fp32, on the
batch that is measured. Ours may err at most twice as much as the plain models in bf16, else no time is reported. The
loss's memory is what the loss and its gradients for hidden states and head need at most above what is there before.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .measure import MIB, release_memory
from .processes import Benchmark, main
from .shapes import random_model
from .workers import Worker, apply_liger

ROWS, TOKENS = 8, 8192
ROUNDS, STEPS = 4, 3
SECONDS = 100  # no round but the first starts later than this after the start
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel")
SHAPES = {"Qwen3-0.6B from Qwen3-1.7B": ("Qwen3-0.6B", "Qwen3-1.7B")}  # name: (student, teacher)
PROVIDERS = {
    "plain": "transformers, torch loss", "plain_compiled": "transformers, compiled torch loss",
    "trl": "transformers, TRL's fused loss", "liger": "Liger-Kernel, its chunked loss", "ours": "liger-trainer",
}  # fmt: skip
# From hidden states and head of the student, then of the teacher: (N, H), (V, H), (N, Ht), (V, Ht).
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def stored_logits_loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    student = (hidden @ weight.T).float().log_softmax(-1)
    teacher = (teacher_hidden @ teacher_weight.T).float().log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def loss_function(provider: str) -> Loss:
    """The loss alone, from hidden states."""
    if provider == "ours":
        from liger_trainer.kernels.linear_divergence import linear_divergence

        return lambda *heads: linear_divergence(*heads).loss
    if provider == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
        return lambda h, w, t, u: loss(h, w, t, u, torch.zeros(len(h), dtype=torch.long, device=h.device))
    if provider == "trl":
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        return lambda h, w, t, u: _chunked_divergence_loss(
            h[None], t[None], w, u, torch.ones(1, len(h), device=h.device), beta=0.0
        )[0]
    return torch.compile(stored_logits_loss, dynamic=False) if provider == "plain_compiled" else stored_logits_loss


class DistillWorker(Worker):
    """Both models, and steps of the student."""

    steps = STEPS

    def __init__(self, provider: str, tiny: bool):
        super().__init__(provider, tiny)
        self.teacher: Any = None
        self.host: dict[int, Tensor] = {}  # the weights, while other providers have their turn
        self.loss_mib: float | None = None

    def build(self, shape: str) -> float:
        self.teacher = self.loss_mib = None
        self.host = {}
        total = super().build(shape)
        self._park()
        return total

    def make(self, shape: str) -> None:
        self.model, self.teacher = (
            random_model(name, self.tiny, self.device, seed, **({"hidden_size": 64 * (1 + seed)} if self.tiny else {}))
            for seed, name in enumerate(SHAPES[shape])
        )
        self.teacher.requires_grad_(False).eval()
        length = 16 if self.tiny else TOKENS // ROWS
        self.batch = self.gate_batch = self.random_ids(self.model.config.vocab_size, ROWS, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=self.device == "cuda")
        self.loss = loss_function(self.provider)
        if self.provider == "liger":
            apply_liger(self.model, self.teacher)
        elif self.provider == "ours":
            self._patch()

    def _patch(self) -> None:
        from liger_trainer.losses.spec import Distillation, LossOptions
        from liger_trainer.patching.patcher import Patched, PatchOptions

        record = Patched(self.model, PatchOptions(), LossOptions(distillation=Distillation()))
        print(record.report, file=sys.stderr)
        Patched(self.teacher, PatchOptions(fused_linear_cross_entropy=False))

    def parameters(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.teacher.parameters()]

    @contextlib.contextmanager
    def prepared(self, case: Any) -> Iterator[None]:
        """Keep the models on the device for as long: those of all providers, and a step, would not fit."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self.device)
        try:
            yield
        finally:
            self._park()

    def _park(self) -> None:
        """Move the weights into pinned memory, which is as fast as the link."""
        self.optimizer.state.clear()
        for model in (self.model, self.teacher):
            model.zero_grad(set_to_none=True)
        for tensor in self._tensors() if self.device == "cuda" else ():
            if id(tensor) not in self.host:
                self.host[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            tensor.data = self.host[id(tensor)].copy_(tensor.data)
        release_memory()

    def _tensors(self) -> Iterator[Tensor]:
        for model in (self.model, self.teacher):
            yield from model.parameters()
            yield from model.buffers()

    def in_fp32(self, shape: str) -> None:
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self.device, torch.float32)

    def loss_of(self, ids: Tensor) -> Tensor:
        if self.provider != "ours":
            return self.loss(*self._heads(ids))
        from liger_trainer.teachers.base import teacher_logits

        logits = teacher_logits(self.teacher, self.teacher, input_ids=ids)  # as the trainer does
        return self.model(input_ids=ids, labels=ids, teacher_logits=logits, fused_lm_head=True).loss

    def _heads(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.teacher.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        return hidden, self.model.lm_head.weight, teacher, self.teacher.lm_head.weight

    def measure_more(self) -> dict[str, Any]:
        if self.device == "cuda" and self.loss_mib is None:
            self.loss_mib = self._loss_memory()
        return {"loss_mib": self.loss_mib}

    def _loss_memory(self) -> float:
        """Return the peak MiB of the loss alone, with its gradients."""
        with torch.no_grad():
            hidden, weight, *teacher = self._heads(self.batch)
        hidden = hidden.detach().requires_grad_()
        self.loss(hidden, weight, *teacher).backward()  # compiles
        hidden.grad = self.model.lm_head.weight.grad = None
        release_memory()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.loss(hidden, weight, *teacher).backward()
        peak = torch.cuda.max_memory_allocated() - before
        self.model.zero_grad(set_to_none=True)
        return peak / MIB


BENCHMARK = Benchmark(
    name="kd-step",
    title="A whole distillation step",
    what="Forward KL at every position of {tokens} tokens in bf16, sdpa, random weights. Median of {rounds} "
    f"interleaved rounds of {STEPS} steps; peak MiB of the step above weights and optimizer, and of the loss with its "
    "gradients alone. Errors: relative, against fp32; gradients by a sample.",
    doc=__doc__,
    worker=DistillWorker,
    shapes=list(SHAPES),
    providers=PROVIDERS,
    reference="plain",
    packages=PACKAGES,
    batch=lambda tiny: {"tokens": "few" if tiny else TOKENS},
    columns=("ms", "of ours: time", "MiB", "loss, MiB", "of ours: loss", "loss error", "gradient error"),
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
