"""An output head whose rows stay on their ranks beside one that is gathered as FSDP2 does it: memory and time a rank.

    torchrun --nproc_per_node 2 -m benchmarks.vocab_parallel            # GPUs, NCCL
    torchrun --nproc_per_node 2 -m benchmarks.vocab_parallel --smoke    # tiny shapes on a CPU, gloo

Every rank has tokens of its own and 1/W of the rows. `gathered`: all-gather the rows, compute the loss, reduce-scatter
the gradient. `parallel`: docs/extras.md. Both are compared with fp32 on a smaller head before any is
timed; a case whose error is more than twice the gathered head's has no time.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_trainer.kernels.linear_cross_entropy import VocabParallel, linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence

# renamed in torch 2.13
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LOSSES = ("ce", "forward_kl", "jsd")


@dataclass
class Shapes:
    vocab: int
    hidden: int
    tokens: int  # of a rank
    repeats: int


FULL, CHECKED = Shapes(256_000, 4096, 8192, 5), Shapes(32_000, 1024, 1024, 1)
SMOKE, SMOKE_CHECKED = Shapes(96, 16, 24, 1), Shapes(64, 16, 12, 1)


@dataclass
class Problem:
    """The tensors of one rank; a loss is divided by the tokens of all ranks, over their number, as trainers do."""

    hidden: Tensor  # (N, H)
    rows: Tensor  # (V / W, H)
    labels: Tensor
    teacher_hidden: Tensor
    teacher_rows: Tensor
    vocab: int

    @classmethod
    def of(cls, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> "Problem":
        rank, size = dist.get_rank(), dist.get_world_size()
        n, width, held = shapes.tokens, shapes.hidden, shapes.vocab // size
        generator = torch.Generator(device).manual_seed(rank)

        def random(*shape: int, scale: float) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

        labels = torch.randint(shapes.vocab, (n,), generator=generator, device=device)
        labels[: n // 4] = -100
        hidden = random(n, width, scale=1.0).requires_grad_()
        rows = random(held, width, scale=2 / width**0.5).requires_grad_()
        teacher = random(n, width, scale=1.0), random(held, width, scale=2 / width**0.5)
        return cls(hidden, rows, labels, *teacher, shapes.vocab)

    @property
    def num_items(self) -> float:
        return 0.75 * len(self.labels)

    def to(self, dtype: torch.dtype) -> "Problem":
        hidden, rows = (x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.rows))
        return Problem(
            hidden, rows, self.labels, self.teacher_hidden.to(dtype), self.teacher_rows.to(dtype), self.vocab
        )


def loss_of(kind: str, problem: Problem, weight: Tensor, teacher_weight: Any, parallel: VocabParallel | None) -> Tensor:
    common = {"num_items": problem.num_items, "parallel": parallel}
    if kind == "ce":
        return linear_cross_entropy(problem.hidden, weight, problem.labels, **common).loss
    return linear_divergence(
        problem.hidden, weight, problem.teacher_hidden, teacher_weight(), kind=kind, labels=problem.labels,
        teacher_parallel=parallel, **common,
    ).loss  # fmt: skip


def gathered_weight(rows: Tensor) -> Tensor:
    whole = rows.new_empty(rows.shape[0] * dist.get_world_size(), rows.shape[1])
    all_gather(whole, rows.detach())
    return whole


def gathered(kind: str, problem: Problem) -> Tensor:
    """Return the loss; the gradients lie in problem.hidden and problem.rows."""
    weight = gathered_weight(problem.rows).requires_grad_()
    loss = loss_of(kind, problem, weight, functools.partial(gathered_weight, problem.teacher_rows), None)
    loss.backward()
    assert weight.grad is not None
    share = torch.empty_like(problem.rows)
    reduce_scatter(share, weight.grad.div_(dist.get_world_size()))
    problem.rows.grad = share
    return loss.detach()


def parallel(kind: str, problem: Problem) -> Tensor:
    held = problem.rows.shape[0]
    shard = VocabParallel(dist.group.WORLD, dist.get_rank() * held, problem.vocab, "sharded", average=True)
    loss = loss_of(kind, problem, problem.rows, lambda: problem.teacher_rows, shard)
    loss.backward()
    return loss.detach()


WAYS: dict[str, Callable[[str, Problem], Tensor]] = {"gathered": gathered, "parallel": parallel}


def errors(kind: str, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return by way the largest relative error of loss and gradients over the ranks, against the gathered in fp32."""
    truth = Problem.of(shapes, device, dtype).to(torch.float32)
    want = results(truth, gathered(kind, truth))
    largest = {}
    for name, way in WAYS.items():
        problem = Problem.of(shapes, device, dtype)
        got = results(problem, way(kind, problem))
        worst = max(((x.float() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        largest[name] = worst.item()
    return largest


def results(problem: Problem, loss: Tensor) -> list[Tensor]:
    assert problem.hidden.grad is not None and problem.rows.grad is not None
    return [loss, problem.hidden.grad, problem.rows.grad]


def measured(way: Callable, kind: str, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return (peak MiB above the tensors of the problem, median ms) of the slowest rank."""
    problem, times, peak = Problem.of(shapes, device, dtype), [], 0.0
    for i in range(shapes.repeats + 1):
        problem.hidden.grad = problem.rows.grad = None
        before = synchronized(device)
        start = time.perf_counter()
        way(kind, problem)
        after = synchronized(device)
        if i:  # the first compiles
            times.append((time.perf_counter() - start) * 1000)
            peak = max(peak, (after[1] - before[0]) / 2**20)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    slowest = torch.tensor([peak, statistics.median(times) if times else 0.0], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest[0].item(), slowest[1].item()


def synchronized(device: torch.device) -> tuple[int, int]:
    """Wait for all ranks and return (allocated, peak) bytes."""
    dist.barrier()
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--losses", nargs="+", default=LOSSES, choices=LOSSES)
    args = parser.parse_args()
    cuda = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    dtype, (shapes, checked) = (torch.bfloat16, (FULL, CHECKED)) if cuda else (torch.float32, (SMOKE, SMOKE_CHECKED))

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    say(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}, {shapes}\n")
    say("| loss | head | error | peak MiB a rank | ms |\n|---|---|---|---|---|")
    for kind in args.losses:
        of_way = errors(kind, checked, device, dtype)
        for way, call in WAYS.items():
            if not of_way[way] <= 2 * of_way["gathered"] + 1e-5:
                say(f"| {kind} | {way} | {of_way[way]:.1e} | wrong | |")
                continue
            peak, ms = measured(call, kind, shapes, device, dtype)
            say(f"| {kind} | {way} | {of_way[way]:.1e} | {peak:.0f} | {ms:.1f} |")
            if cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
