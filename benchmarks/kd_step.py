"""A whole distillation step: teacher's forward, student's forward and backward, forward KL, fused AdamW.

    python -m benchmarks.kd_step --output DIR        # on a GPU: DIR/kd-step.json and .md
    python -m benchmarks.kd_step --tiny              # small enough for a CPU: does it still work

Each provider has a process of its own, since Liger patches module globals; they take turns on the device. First a gate:
loss, gradient norm and a sample of the gradients of every provider in bf16 against the plain models in fp32, on the
batch that is measured. Ours may err at most twice as much as the plain models in bf16, else no time is reported. The
loss's memory is what the loss and its gradients for hidden states and head need at most above what is there before.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import compiled
from .processes import Benchmark, main

ROWS, TOKENS = 8, 8192
ROUNDS, STEPS = 4, 3
SECONDS = 100  # no round but the first starts later than this after the start
MIB = 2**20
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel")
QWEN3 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
# name: (configuration class, sizes of the student, sizes of the teacher)
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-0.6B from Qwen3-1.7B": (
        "Qwen3Config",
        {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936},
        {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936},
    ),
}
PROVIDERS = {
    "plain": "transformers, torch loss", "plain_compiled": "transformers, compiled torch loss",
    "trl": "transformers, TRL's fused loss", "liger": "Liger-Kernel, its chunked loss", "ours": "liger-trainer",
}  # fmt: skip
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of hidden states and head of the student, then of the teacher: (N, H), (V, H), (N, Ht), (V, Ht)."""


def stored_logits_loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    student = (hidden @ weight.T).float().log_softmax(-1)
    teacher = (teacher_hidden @ teacher_weight.T).float().log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def loss_of(provider: str) -> Loss:
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


class Worker(compiled.Worker):
    """One provider, in its own process: both models, and steps of the student."""

    def __init__(self, provider: str, tiny: bool):
        super().__init__(provider, tiny)
        self.teacher: Any = None
        self.optimizer: Any = None
        self.host: dict[int, Tensor] = {}  # where weights are while others have their turn
        self.loss_mib: float | None = None

    def build(self, shape: str) -> float:
        """Make both models and the batch. Returns a number that depends on every weight."""
        self.model = self.teacher = self.optimizer = self.loss_mib = None
        self.host = {}
        gc.collect()
        config_name, *sizes = SHAPES[shape]
        self.model, self.teacher = (self._made(config_name, seed, size) for seed, size in enumerate(sizes))
        self.teacher.requires_grad_(False).eval()
        generator = torch.Generator().manual_seed(1)
        length = 16 if self.tiny else TOKENS // ROWS
        ids = torch.randint(self.model.config.vocab_size, (ROWS, length), generator=generator)
        self.ids = ids.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=self.device == "cuda")
        self.loss = loss_of(self.provider)
        self._patch()
        total = sum(p.double().sum().item() for m in (self.model, self.teacher) for p in m.parameters())
        self._park()
        return total

    def _made(self, config_name: str, seed: int, sizes: dict[str, Any]) -> Any:
        import transformers

        tiny = {**compiled.TINY, "hidden_size": 64 * (1 + seed)} if self.tiny else {}
        config = getattr(transformers, config_name)(**{**compiled.COMMON, **sizes, **tiny})
        torch.manual_seed(seed)
        with torch.device(self.device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()

    def gate(self, path: str) -> dict[str, float]:
        with self._on_the_device():
            return super().gate(path)

    @contextlib.contextmanager
    def _on_the_device(self) -> Iterator[None]:
        """Both models are there for as long: those of all providers, and a step, would not fit."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self.device)
        try:
            yield
        finally:
            self._park()

    def _park(self) -> None:
        """Into pinned memory, which is as fast as the link."""
        self.optimizer.state.clear()
        for model in (self.model, self.teacher):
            model.zero_grad(set_to_none=True)
        for tensor in self._tensors() if self.device == "cuda" else ():
            if id(tensor) not in self.host:
                self.host[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            tensor.data = self.host[id(tensor)].copy_(tensor.data)
        gc.collect()
        self._empty_cache()

    def _tensors(self) -> Iterator[Tensor]:
        for model in (self.model, self.teacher):
            yield from model.parameters()
            yield from model.buffers()

    def _patch(self) -> None:
        if self.provider == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            for model in (self.model, self.teacher):
                _apply_liger_kernel_to_instance(model=model)
        elif self.provider == "ours":
            from liger_trainer.losses.spec import Distillation, LossOptions
            from liger_trainer.patching.patcher import Patched, PatchOptions

            record = Patched(self.model, PatchOptions(), LossOptions(distillation=Distillation()))
            print(record.report, file=sys.stderr)
            Patched(self.teacher, PatchOptions(fused_linear_cross_entropy=False))

    def _loss(self, ids: Tensor, share: float = 1.0) -> Tensor:
        loss = (self._as_the_trainer(ids) if self.provider == "ours" else self._from_hidden(ids)) * share
        loss.backward()
        return loss.detach()

    def _as_the_trainer(self, ids: Tensor) -> Tensor:
        from liger_trainer.teachers.base import teacher_logits

        logits = teacher_logits(self.teacher, self.teacher, input_ids=ids)
        return self.model(input_ids=ids, labels=ids, teacher_logits=logits, fused_lm_head=True).loss

    def _from_hidden(self, ids: Tensor) -> Tensor:
        return self.loss(*self._heads(ids))

    def _heads(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        return hidden, self.model.lm_head.weight, taught, self.teacher.lm_head.weight

    def truth(self, shape: str, path: str) -> None:
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self.device, torch.float32)
        super().truth(shape, path)

    def _loss_memory(self) -> float | None:
        """MiB, of models that are on the device. Measured once."""
        if self.device != "cuda" or self.loss_mib is not None:
            return self.loss_mib
        with torch.no_grad():
            hidden, weight, *teacher = self._heads(self.ids)
        hidden = hidden.detach().requires_grad_()
        self.loss(hidden, weight, *teacher).backward()  # compiles
        hidden.grad = self.model.lm_head.weight.grad = None
        self._empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.loss(hidden, weight, *teacher).backward()
        self.loss_mib = (torch.cuda.max_memory_allocated() - before) / MIB
        self.model.zero_grad(set_to_none=True)
        return self.loss_mib

    def measure(self, shape: str) -> dict[str, Any]:
        """Milliseconds of STEPS steps, peak MiB above weights and optimizer and of the loss alone, and the loss."""
        cuda = self.device == "cuda"
        with self._on_the_device():
            loss_mib = self._loss_memory()
            loss = self._step()[1]  # untimed
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            ms = [self._step()[0] for _ in range(STEPS)]
            peak = (torch.cuda.max_memory_allocated() - before) / MIB if cuda else None
        return {"ms": ms, "peak_mib": peak, "loss_mib": loss_mib, "loss": loss}

    def _step(self) -> tuple[float, float]:
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        loss = self._loss(self.ids)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize()
        return 1e3 * (time.perf_counter() - start), loss.item()


BENCHMARK = Benchmark(
    name="kd-step",
    title="A whole distillation step",
    what="Forward KL at every position of {tokens} tokens in bf16, sdpa, random weights. Median of {rounds} "
    f"interleaved rounds of {STEPS} steps; peak MiB of the step above weights and optimizer, and of the loss with its "
    "gradients alone. Errors: relative, against fp32; gradients by a sample.",
    doc=__doc__,
    worker=Worker,
    shapes=list(SHAPES),
    providers=PROVIDERS,
    reference="plain",
    packages=PACKAGES,
    batch=lambda tiny: {"tokens": "few" if tiny else TOKENS},
    columns=("ms", "of ours: time", "MiB", "loss, MiB", "of ours: loss", "loss error", "gradient error"),
    check=compiled.check,
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
