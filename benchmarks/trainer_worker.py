"""What a process of `benchmarks.trainer_step` does: make a trainer, and watch its own loop from a callback.

The clock waits for the device only at the ends of the timed steps; between them it leaves events in the stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .measure import MIB
from .report import join_versions
from .trainer_cases import ON_POLICY, TINY_PLAN, Case, Plan, length_of, make_rows
from .trainer_providers import TRAINERS, Provider, draw_adapters, prepare, unsloth_site

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events


@dataclass
class Measured:
    """What a provider did in a case. Lists have an entry a step; MiB are the allocator's; None where there is no GPU.

    Attributes:
        losses, norms: of all steps before the traced ones; norms of gradients, before they are clipped.
        rows: of the same steps: tokens, without padding, and a sum of some of their ids.
        ms: of the timed steps, on the device's clock.
        seconds: of all timed steps together, on the host's clock.
        tokens, padded_tokens: of all timed steps, without and with padding.
        busy_ms, kernels: of a traced step: time in which anything ran on the device, and the kernels that ran.
        traced_ms: of timed steps with the same rows as the traced ones.
        reserved_mib: the most that the process held in the timed steps, weights_mib of it for weights. What is in use
            at a time would leave out the memory of CUDA graphs, which nobody holds between two replays.
        allocated_mib: the most that was in use at a time.
        notes: what the trainer says of itself.
        graphed: whether layers were in CUDA graphs.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    busy_ms: float | None = None
    kernels: float | None = None
    traced_ms: float = 0.0
    reserved_mib: float | None = None
    weights_mib: float = 0.0
    allocated_mib: float | None = None
    notes: str = ""
    graphed: bool = False


class TrainerWorker:
    """A process for one row of the table."""

    def __init__(self, provider: str, tiny: bool):
        if provider.startswith("unsloth"):  # before transformers, which it changes
            sys.path[:0] = unsloth_site()
            os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # which it sends over the network
            os.environ.setdefault("UNSLOTH_FORCE_VENDORED_FLA", "1")  # as where fla-core is not installed for ours
            import unsloth  # noqa: F401 # pyright: ignore[reportMissingImports]
        self.provider, self.tiny = provider, tiny

    def load(self) -> None:
        """Import what takes seconds, before anything is timed."""
        import peft  # noqa: F401
        import trl.trainer.sft_trainer  # noqa: F401

        if self.provider.startswith("ours"):
            import liger_trainer.trainers.distill_trainer  # noqa: F401

    def run(self, case: Case, provider: Provider) -> Measured:
        """Train, and return what was measured."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan = TINY_PLAN if self.tiny else case.plan
        with tempfile.TemporaryDirectory() as folder, enabled(provider):
            rows = make_rows(case, plan, self.tiny)
            run = prepare(case, provider, self.tiny, device, folder, rows, plan.steps)
            trainer = TRAINERS[provider.trainer](run)
            draw_adapters(trainer.model)
            sampled = case.rows * length_of(case, self.tiny) if case.method in ("GRPO", ON_POLICY) else None
            measured = train(trainer, plan, folder, case.layout != "padded", sampled)
        measured.notes = notes_of(trainer, provider)
        print(f"{provider.title}: {measured.notes}", file=sys.stderr, flush=True)
        return measured


@contextlib.contextmanager
def enabled(provider: Provider) -> Iterator[None]:
    """Within, TRL's trainers use our loss, if the provider wants that."""
    if not provider.enables:
        yield
        return
    import liger_trainer

    liger_trainer.enable()
    try:
        yield
    finally:
        liger_trainer.disable()


def train(trainer: Any, plan: Plan, folder: str, alike: bool, tokens: int | None = None) -> Measured:
    """Train by a plan, and return what was measured.

    Args:
        alike: whether all steps do the same work.
        tokens: of a step, where they are not in its rows, since most of them are sampled.
    """
    from transformers import TrainerCallback

    watch = Watch(trainer, plan, folder, tokens)
    events = type("Events", (TrainerCallback,), {"on_step_end": lambda self, *_, **__: watch.end_step()})
    trainer.add_callback(events())
    trainer.train()
    return watch.measured(alike)


def notes_of(trainer: Any, provider: Provider) -> str:
    """Return what was replaced in the model.

    Raises:
        RuntimeError: Liger-Kernel replaced nothing.
    """
    if provider.trainer == "ours":
        return str(trainer.patched.report)
    if provider.trainer == "unsloth":  # what its own folder has
        return join_versions({name: version(name) for name in ("unsloth", "unsloth_zoo", "trl", "transformers")})
    if not provider.uses_liger:
        return ""
    names = [
        type(m).__name__ for m in trainer.model.modules() if "liger_kernel" in getattr(m.forward, "__module__", "")
    ]
    if not names:
        raise RuntimeError("use_liger_kernel=True replaced no layer")
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


@dataclass
class CountingCollator:
    """A collator that counts. Ours look for TRL's below it, by its attribute `collator`."""

    collator: Any
    tokens: int | None
    batches: list[tuple[int, int, int]]  # tokens without and with padding, a sum of ids

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        ids = [ids_of(row) for row in rows]
        batch = self.collator(rows)
        real = self.tokens or sum(map(len, ids))
        padded = batch["input_ids"].numel() if "input_ids" in batch else real
        self.batches.append((real, padded, sum(row[0] + row[len(row) // 2] + row[-1] for row in ids)))
        return batch


def ids_of(row: dict[str, Any]) -> list[int]:
    """Return the tokens of a row: of a pair both, with the prompt of each; of a prompt the numbers in its words."""
    if "input_ids" in row:
        return row["input_ids"]
    if "prompt_ids" in row:
        return [*row["prompt_ids"], *row["chosen_ids"], *row["prompt_ids"], *row["rejected_ids"]]
    return [int(word[1:]) for word in row["prompt"].split()]


class Watch:
    """Steps of a trainer: their losses, gradient norms, rows and times; a trace of the last ones."""

    def __init__(self, trainer: Any, plan: Plan, folder: str, tokens: int | None = None):
        self.trainer, self.path, self.tokens = trainer, Path(folder) / "trace.json", tokens
        self.warmup, self.timed, self.traced = plan.warmup, plan.timed, plan.traced
        self.micro = trainer.args.gradient_accumulation_steps
        self.cuda = trainer.args.device.type == "cuda"
        self.steps = 0
        self.marks: list[Any] = []
        self.start = self.seconds = 0.0
        self.reserved: float | None = None
        self.allocated: float | None = None
        self.profiler: Any = None
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.batches: list[tuple[int, int, int]] = []
        self._listen()

    def _listen(self) -> None:
        """Keep what each step returns. Nothing here reads a tensor of the device."""
        step, get = self.trainer.training_step, self.trainer._get_grad_norm

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self.losses.append(loss.detach())
            return loss

        def get_grad_norm(*args: Any, **kwargs: Any) -> Any:
            norm = get(*args, **kwargs)
            self.norms.append(norm.detach())
            return norm

        self.trainer.training_step = training_step
        self.trainer._get_grad_norm = get_grad_norm
        self.trainer.data_collator = CountingCollator(self.trainer.data_collator, self.tokens, self.batches)

    def end_step(self) -> None:
        self.steps += 1
        after = self.steps - self.warmup
        if after == 0:
            self._begin()
        if 0 <= after <= self.timed:
            self._mark()
        if after == self.timed:
            self._end()
        if after == self.timed + self.traced and self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))

    def _mark(self) -> None:
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def _begin(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the warm-up needed and the steps do not
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def _end(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        if self.cuda:
            self.reserved = torch.cuda.max_memory_reserved() / MIB
            self.allocated = torch.cuda.max_memory_allocated() / MIB
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()

    def measured(self, alike: bool) -> Measured:
        """Return all of it. `alike`: whether all steps do the same work.

        Raises:
            RuntimeError: the trainer took other steps than these.
        """
        until = self.warmup + self.timed
        micro_batches = self.steps * self.micro
        if self.steps != until + self.traced or (len(self.losses), len(self.norms)) != (micro_batches, self.steps):
            raise RuntimeError(
                f"expected {until + self.traced} steps, got {self.steps}, "
                f"{len(self.losses)} losses and {len(self.norms)} norms"
            )
        pairs = zip(self.marks, self.marks[1:], strict=False)
        ms = [before.elapsed_time(mark) if self.cuda else 1e3 * (mark - before) for before, mark in pairs]
        same = ms if alike else ms[-self.traced :]
        counts = [batch[:2] for batch in self.batches[self.warmup * self.micro : until * self.micro]]
        steps = [self.batches[step * self.micro : (step + 1) * self.micro] for step in range(until)]
        busy, kernels = read_trace(self.path, self.traced) if self.cuda else (None, None)
        return Measured(
            losses=torch.stack(self.losses[: until * self.micro]).float().view(until, -1).sum(1).tolist(),
            norms=torch.stack([whole(norm) for norm in self.norms[:until]]).float().tolist(),
            rows=[summed((real, ids) for real, _, ids in step) for step in steps],
            ms=ms, seconds=self.seconds, tokens=sum(real for real, _ in counts),
            padded_tokens=sum(padded for _, padded in counts), busy_ms=busy, kernels=kernels,
            traced_ms=sum(same) / len(same), reserved_mib=self.reserved, weights_mib=weights_of(self.trainer) / MIB,
            allocated_mib=self.allocated,
        )  # fmt: skip


def summed(rows: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums over micro-batches, or ranks: tokens, and ids by place, since another order is other rows."""
    places = list(enumerate(rows, 1))
    return sum(tokens for _, (tokens, _) in places), sum(place * ids for place, (_, ids) in places)


def weights_of(trainer: Any) -> int:
    """Return the bytes of the student's weights and of the teacher's that this process holds."""
    models = (trainer.model, *teachers_of(trainer))
    return sum(held(tensor).nbytes for model in models for tensor in (*model.parameters(), *model.buffers()))


def teachers_of(trainer: Any) -> list[Any]:
    teachers = (getattr(trainer, name, None) for name in ("teacher", "teacher_model"))  # ours has both names for one
    return list({id(model): model for model in teachers if model is not None}.values())


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: its share, where FSDP2 shares it out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor. The processes that share it out call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def read_trace(path: Path, steps: int) -> tuple[float, float]:
    """Return the milliseconds of a step in which something ran on the device, and its kernels.

    Raises:
        RuntimeError: nothing ran.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in ON_DEVICE]
    kernels = sum(event["cat"] == "kernel" for event in events)
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    return covered((event["ts"], event["ts"] + event["dur"]) for event in events) / 1e3 / steps, kernels / steps


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans: what runs at the same time as something else is not counted again."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
