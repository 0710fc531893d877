"""Training rows in an order that a resumed training goes on with.

transformers groups rows by length in an order that no seed decides, so a resumed epoch has another one. And it takes
`max_steps` for the length of a stream: where the stream is shorter, micro-batches that are left over at its end are
added to the next step with a divisor of their own, and a resumed training begins it again at another row.
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length


class GroupedByLength(LengthGroupedSampler):
    """Rows of about the same length together, in an order that seed and epoch decide."""

    def __init__(self, sampler: LengthGroupedSampler, seed: int):
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class EndlessStream(IterableDataset):
    """The rows of a stream again and again, with the order of a next epoch each time. Ends where a pass has none."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        # accelerate asks for a generator where the stream has one. An epoch is told to each pass, here
        if name in ("rows", "set_epoch"):
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(epoch)
            empty = True
            for row in self.rows:
                empty = False
                yield row
            if empty:
                return


def warn_of_epochs(trainer: Any) -> None:
    """Warn, in `trainer.train`, of what is asked for at the end of each epoch of a stream, which has no end."""
    if trainer.train_dataset is not None and not has_length(trainer.train_dataset):
        kinds = [name for name in ("eval", "save", "logging") if getattr(trainer.args, f"{name}_strategy") == "epoch"]
        if kinds:
            warnings.warn(
                f"{', '.join(f'{name}_strategy' for name in kinds)}: a stream has no length, so its epoch is the "
                "whole training, however often it begins again. Use steps.",
                stacklevel=3,
            )


def by_seed(sampler: Any, args: Any) -> Any:
    """Return a sampler of training rows, with an order that the seed decides where it groups rows by length."""
    if type(sampler) is not LengthGroupedSampler:
        return sampler
    return GroupedByLength(sampler, args.seed if args.data_seed is None else args.data_seed)


def endless(rows: Any) -> Any:
    """Return training rows, a stream as one that begins again and again."""
    return EndlessStream(rows) if isinstance(rows, IterableDataset) and not has_length(rows) else rows


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the batch sampler of `batch_rebalance`.

    transformers does not reach it in the shard of a process, once it skips batches.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)  # none of Ulysses' adapter
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
