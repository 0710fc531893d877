"""Ranks that share a head, or count their labels together: which rows each has, and what they sum up.

The losses over such heads are in _vocab_parallel.py, which is imported when one is computed.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both. None in builds of torch without collectives.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
TOKENS = ("replicated", "sharded")


class RankSums(Protocol):
    """Sums and maxima over the ranks that share a vocabulary, in place."""

    def sum_(self, x: Tensor) -> Tensor: ...
    def max_(self, x: Tensor) -> Tensor: ...


def counts_of_ranks(mine: Tensor, group: Any) -> Tensor:
    """Return (ranks, 2) from each rank's (count, alpha) in fp64."""
    of_ranks = mine.new_empty(2 * dist.get_world_size(group))
    all_gather(of_ranks, mine, group=group)
    return of_ranks.view(-1, 2)


@dataclass(frozen=True)
class VocabParallel:
    """How a head's rows lie on the ranks of a group: the `weight` of an op holds rows first, first + 1, ... of `vocab`.

    Args:
        group: the ranks; together they hold each row once, and call the op with the same options.
        first: how many rows the ranks before this one hold.
        vocab: rows of the whole head.
        tokens: "replicated" where all ranks have the same tokens, "sharded" where each has its own.
        average: divide the gradients of weight, bias and low-rank terms by the number of ranks, as FSDP does when it
            reduces a gradient.

    Raises:
        ValueError: unknown `tokens`, or `average` with replicated tokens.
    """

    group: Any
    first: int
    vocab: int
    tokens: str = "sharded"
    average: bool = False

    def __post_init__(self):
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens must be one of {', '.join(TOKENS)}, got {self.tokens!r}.")
        if self.average and self.tokens == "replicated":
            raise ValueError("average is for sharded tokens: with replicated ones every rank has the whole gradient.")

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def widest(self) -> int:
        """Return a number of columns that no rank exceeds: all ranks must choose the same chunks."""
        return -(-self.vocab // self.size)

    def columns(self, vocab: int, held: int) -> int:
        """Return how many of the `held` rows of this rank are among the first `vocab` of the whole head."""
        return max(0, min(held, vocab - self.first))

    def slice_of(self, whole: Tensor, held: int) -> Tensor:
        """Return this rank's rows of a tensor that every rank holds as a whole."""
        return whole[self.first : self.first + held]

    def sum_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.SUM, self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def check(self, weight: Tensor, overwrite_hidden: bool) -> None:
        """Raise ValueError where the shard does not fit into the head, or an option does not go with sharded heads."""
        if self.first < 0 or self.first + weight.shape[0] > self.vocab:
            raise ValueError(
                f"weight holds rows {self.first} to {self.first + weight.shape[0]} of a head of "
                f"{self.vocab} rows (VocabParallel.first and .vocab): these must lie within it."
            )
        if overwrite_hidden:
            raise ValueError("overwrite_hidden has no place with a head that is sharded over ranks: leave it out.")
        if torch.compiler.is_compiling():
            raise ValueError(
                "A head that is sharded over ranks cannot be traced by torch.compile: its collectives depend on the "
                "number of labels. Call the loss outside of it, or gather the head."
            )

    def check_teacher(self, teacher: "VocabParallel", vocab: int, held: int, teacher_held: int) -> None:
        """Raise ValueError where the ranks' rows of the teacher's head are not the same as those of the student's.

        vocab: of the loss. held, teacher_held: rows on this rank.
        """
        ours = slice(self.first, self.first + self.columns(vocab, held))
        theirs = slice(teacher.first, teacher.first + teacher.columns(vocab, teacher_held))
        alike = ours == theirs or ours.start == ours.stop and theirs.start == theirs.stop
        ranks, of_teacher = (dist.get_process_group_ranks(side.group) for side in (self, teacher))
        if not alike or ranks != of_teacher or self.tokens != teacher.tokens:
            raise ValueError(
                "Student and teacher must lie alike on the ranks of one group: this rank holds rows "
                f"{ours.start} to {ours.stop} of the student's head and {theirs.start} to {theirs.stop} of the "
                "teacher's. Gather the teacher's head, and leave out teacher_parallel."
            )

    def run(self, build: Any, sides: Any, *call: Any) -> tuple[Tensor, Tensor]:
        """Compute a loss whose head lies on the ranks: see `parallel_loss`. Only who needs it loads that file."""
        from ._vocab_parallel import parallel_loss

        return parallel_loss(self, build, sides, *call)
