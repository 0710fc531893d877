"""What a provider does in its own process: build a model, pass the gate, and take timed steps."""

from __future__ import annotations

import gc
import sys
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from .measure import MIB, release_memory

SAMPLE = 4096  # gradients of each parameter that are compared one by one


class Worker(ABC):
    """One provider: a model, its batch, and steps of it. `optimizer` steps too, unless it is None."""

    steps: ClassVar[int]  # that are timed in a row

    def __init__(self, provider: str, tiny: bool):
        self.provider, self.tiny = provider, tiny
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = None
        self.optimizer: Any = None
        self.batch = self.gate_batch = torch.empty(0)

    def build(self, shape: str) -> float:
        """Make the model and its batch. Return a number that depends on every weight."""
        self.model = self.optimizer = None
        torch.compiler.reset()
        gc.collect()  # cycles of an earlier model would count as weights of this one
        self.batch = self.gate_batch = torch.empty(0)
        self.make(shape)
        return sum(p.double().sum().item() for p in self.parameters())

    @abstractmethod
    def make(self, shape: str) -> None:
        """Set model and batches."""

    def parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def random_ids(self, vocab_size: int, rows: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(vocab_size, (rows, length), generator=generator).to(self.device)

    def prepared(self, case: Any) -> AbstractContextManager[None]:
        """Return the context in which a case's steps run."""
        return nullcontext()

    def in_fp32(self, shape: str) -> None:
        self.model.float()

    @abstractmethod
    def loss_of(self, ids: torch.Tensor) -> torch.Tensor: ...

    def forward_backward(self, ids: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        loss = self.loss_of(ids) * share
        loss.backward()
        return loss.detach()

    def truth(self, shape: str, path: str) -> None:
        """Write the results of the model in fp32 to `path`, and build the model anew afterwards."""
        torch.backends.cuda.matmul.allow_tf32 = False
        self.in_fp32(shape)
        rows = self.gate_batch  # one by one, to save memory; they have equally many labels
        loss = torch.stack([self.forward_backward(row[None], 1 / len(rows)) for row in rows]).sum()
        torch.save(self.take_results(loss), path)
        self.build(shape)
        release_memory()

    def gate(self, case: Any, path: str) -> dict[str, float]:
        """Return the relative errors of a step."""
        truth = torch.load(path)
        with self.prepared(case):
            results = self.take_results(self.forward_backward(self.gate_batch))
        release_memory()
        errors = {name: abs(results[name] / want - 1) for name, want in truth.items() if name != "gradients"}
        want = truth["gradients"]
        return {**errors, "gradients": ((results["gradients"] - want).norm() / want.norm()).item()}

    def take_results(self, loss: torch.Tensor) -> dict[str, Any]:
        """Return loss, norm of all gradients and a sample of each parameter's; take the gradients off the model."""
        norms, samples = [], []
        for parameter in self.model.parameters():
            gradient = parameter.grad.flatten()
            norms.append(gradient.double().norm() if self.device == "cpu" else gradient.float().norm().double())
            samples.append(gradient[:: max(1, gradient.numel() // SAMPLE)].float())
        self.model.zero_grad(set_to_none=True)
        norm = torch.stack(norms).norm()
        return {"loss": loss.item(), "gradient norm": norm.item(), "gradients": torch.cat(samples).cpu()}

    def measure(self, case: Any) -> dict[str, Any]:
        """Return milliseconds of some steps, peak MiB above weights and optimizer, and the loss of the first step."""
        cuda = self.device == "cuda"
        with self.prepared(case):
            extra = self.measure_more()
            base = torch.cuda.memory_allocated() if cuda else 0
            loss = self._step()[1]  # untimed
            states = self.optimizer.state.values() if self.optimizer else ()
            base += sum(x.nbytes for state in states for x in state.values())
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            ms = [self._step()[0] for _ in range(self.steps)]
            peak = (torch.cuda.max_memory_allocated() - base) / MIB if cuda else None
        release_memory()  # the next provider needs it
        return {"ms": ms, "peak_mib": peak, "loss": loss, **extra}

    def measure_more(self) -> dict[str, Any]:
        return {}

    def _step(self) -> tuple[float, float]:
        self._synchronize()
        start = time.perf_counter()
        loss = self.forward_backward(self.batch)
        if self.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        self.model.zero_grad(set_to_none=True)
        return elapsed, loss.item()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def apply_liger(*models: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    for model in models:
        _apply_liger_kernel_to_instance(model=model)


def apply_ours(model: Any) -> None:
    from liger_trainer.patching.patcher import patch

    print(patch(model).report, file=sys.stderr)
