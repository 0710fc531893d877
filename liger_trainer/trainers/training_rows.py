"""Training rows in an order that a resumed training goes on with.

transformers groups rows by length in an order that no seed decides, so a resumed epoch has another one. And it takes
`max_steps` for the length of a stream: where the stream is shorter, micro-batches that are left over at its end are
added to the next step with a divisor of their own, and a resumed training begins it again at another row.
"""

# As in sft_trainer.py:
# pyright: reportAttributeAccessIssue=false

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length
from trl.trainer.sft_trainer import SFTTrainer


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


class ReproducibleRows(SFTTrainer):
    """SFTTrainer whose training rows come in the same order where it is resumed. See the top of this file."""

    def train(self, *args, **kwargs):
        if self.train_dataset is not None and not has_length(self.train_dataset):
            kinds = [name for name in ("eval", "save", "logging") if getattr(self.args, f"{name}_strategy") == "epoch"]
            if kinds:
                warnings.warn(
                    f"{', '.join(f'{name}_strategy' for name in kinds)}: a stream has no length, so its epoch is the "
                    "whole training, however often it begins again. Use steps.",
                    stacklevel=2,
                )
        return super().train(*args, **kwargs)

    def _get_train_sampler(self, *args, **kwargs):
        sampler, seed = super()._get_train_sampler(*args, **kwargs), self.args.data_seed
        if type(sampler) is not LengthGroupedSampler:
            return sampler
        return GroupedByLength(sampler, self.args.seed if seed is None else seed)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        if is_training and isinstance(dataset, IterableDataset) and not has_length(dataset):
            dataset = EndlessStream(dataset)
        rows: Any = dataset
        return super()._get_dataloader(rows, description, batch_size, sampler_fn, is_training, **kwargs)

    def _run_epoch(self, **kwargs):
        # transformers does not reach the batch sampler of `batch_rebalance` in the shard of a process, once it skips
        sampler: Any = getattr(kwargs["train_dataloader"], "batch_sampler", None)  # none of Ulysses' adapter
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(kwargs["epoch"])
        return super()._run_epoch(**kwargs)
