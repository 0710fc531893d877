"""What loads rows: training rows in an order that a resume keeps, and evaluations that count each row once.

accelerate gives all processes the same number of batches and rows, and fills the last ones with rows from the start of
the dataset, which would count twice. Here the dataset fills them itself and marks these rows as repeated. The collator
leaves them out of their batch. Where a batch has no other rows, one stays, so that the processes keep in step, and it
counts nothing.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import recursively_apply
from datasets import Dataset as HubDataset
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from ..common.replacements import replaced
from ..compat.trainers import drops_last_rows, without_unused_columns
from .host import TrainerHost
from .metrics import TokenMetrics

# transformers groups rows by length in an order that no seed decides, so a resumed epoch has another one. And it takes
# `max_steps` for the length of a stream: where the stream is shorter, micro-batches that are left over at its end are
# added to the next step with another divisor, and a resumed training begins it again at another row.


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


class _Stream(IterableDataset):
    """A stream around another one. It has the attributes of that one, except those in `hidden`."""

    hidden: tuple[str, ...] = ()

    def __init__(self, rows: Any):
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        # accelerate asks for set_epoch and for a generator where the stream has them. A copy is asked before it has
        # any rows.
        if name == "rows" or name in self.hidden:
            raise AttributeError(name)
        return getattr(self.rows, name)


class EndlessStream(_Stream):
    """The rows of a stream again and again, with the order of a next epoch each time. Ends where a pass has none."""

    hidden = ("set_epoch",)  # each pass is told its epoch here

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


def warn_of_epochs(trainer: TrainerHost) -> None:
    """Warn where something is to be done at the end of each epoch of a stream: such an epoch has no end."""
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


REPEATED = "rows_are_repeated"  # the key that marks a batch in which nothing counts


class Repeated(NamedTuple):
    """A row that only fills a batch."""

    row: Any


class PaddedRows(Dataset):
    """The rows of a dataset, and beyond its end the first one again."""

    def __init__(self, rows: Any, multiple: int):
        self.rows = rows
        # accelerate asks for it in place of len(), and sees nothing left to fill or to drop
        self.total_dataset_length = len(rows) + -len(rows) % multiple

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place] if place < len(self) else Repeated(self.rows[0])

    def __getitems__(self, places: list[int]) -> list[Any]:
        within = [place for place in places if place < len(self)]
        fetch = getattr(self.rows, "__getitems__", None) if within else None
        rows = [self.rows[place] for place in within] if fetch is None else fetch(within)
        return [*rows, *(self[place] for place in places[len(within) :])]


class PaddedSampler(Sampler[int]):
    """The order of a sampler of `rows`, then the places beyond their end."""

    def __init__(self, sampler: Any, rows: PaddedRows):
        self.sampler, self.rows = sampler, rows

    def __len__(self) -> int:
        return self.rows.total_dataset_length

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from range(len(self.rows), len(self))


class PaddedStream(_Stream):
    """The rows of a stream, and then the first one until the last batch is full."""

    def __init__(self, rows: Any, multiple: int):
        super().__init__(rows)
        self.multiple = multiple

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        count, first = 0, None
        for count, row in enumerate(self.rows, 1):
            first = row if count == 1 else first
            yield row
        for _ in range(-count % self.multiple):
            yield Repeated(first)


class RealRowsCollator:
    """Collate the rows that are not repeated. Where all are, collate one of them and mark the batch REPEATED."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, rows: list[Any]) -> Any:
        counted = [row for row in rows if not isinstance(row, Repeated)]
        if counted:
            return self.collator(counted)
        batch = self.collator([rows[0].row])
        batch[REPEATED] = True
        return batch


def real_rows(rows: int) -> int:
    """Return how many of this process's batch of `rows` are not repeated, for a loader that accelerate fills.

    accelerate repeats rows only in the last batch, after the rows that are left for all processes together.
    """
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows
    shard = getattr(state.active_dataloader, "batch_sampler", None)
    index = getattr(shard, "process_index", PartialState().process_index)  # less where processes share a batch
    return min(max(state.remainder - index * rows, 0), rows)


def real_tokens(mask: Tensor) -> Tensor:
    """Return the `mask` (batch, length) of tokens without the rows with which accelerate fills a batch.

    This is for trainers with their own loaders, under a callback. Warns where nothing says which rows these are.
    """
    state = GradientState()
    loader: Any = state.active_dataloader
    if PartialState().num_processes == 1 or not state.end_of_dataloader or drops_last_rows(loader):
        return mask
    shard = getattr(loader, "batch_sampler", None)
    # As many rows as the loader asked for are padded rows. Where there are fewer, several lie end to end in one; which
    # these are is known only where accelerate's sampler gives each process its batches.
    if isinstance(shard, BatchSamplerShard) and len(mask) != loader.total_batch_size // shard.num_processes:
        count = _tokens_behind_one_another(loader, shard)
        if count is not None:
            return mask & (torch.arange(mask.shape[1], device=mask.device) < count)
    elif not isinstance(loader.dataset, IterableDatasetShard):
        return mask & (torch.arange(len(mask), device=mask.device) < real_rows(len(mask)))[:, None]
    warnings.warn(
        "accelerate fills the last batch of this evaluation with rows from its beginning, and does not say which, so "
        "the teacher's metrics count them twice. Use LigerDistillTrainer, or one process.",
        stacklevel=2,
    )
    return mask


def _tokens_behind_one_another(loader: Any, shard: BatchSamplerShard) -> int | None:
    """Count the tokens of rows that are not repeated in this process's last batch, where it has no padding.

    Returns None where the rows are not in the dataset's order.
    """
    if not isinstance(getattr(shard.batch_sampler, "sampler", None), SequentialSampler):
        return None
    rows, size = loader.dataset, loader.total_batch_size // shard.num_processes
    first = len(rows) - (loader.remainder or loader.total_batch_size) + shard.process_index * size
    return sum(len(rows[place]["input_ids"]) for place in range(first, min(first + size, len(rows))))


class EvaluationRows:
    """A trainer's evaluations, in which each row counts once. See the top of this file.

    Attributes:
        rows: how many rows of the current batch count. Rows that are not padded lie end to end and are one row.
        sampled: how many batches of this evaluation, in this process, have completions that the student sampled.
        items: over how many tokens the loss of the current batch is a mean; None where they were not counted.
    """

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer
        self.rows, self.sampled = 1, 0
        self.items: Tensor | float | None = None
        self._loss_only = True
        self._losses = TokenMetrics()

    def loader(self, make: Callable[..., Any], dataset: Any, description: str, batch_size: int, sampler_fn: Any, **how):
        """Return the loader that Trainer would `make`, whose repeated rows are left out of their batches."""
        stream = isinstance(dataset, IterableDataset)
        if not self._repeats_rows(stream):
            return make(dataset, description, batch_size, sampler_fn, False, **how)
        accelerator = self._trainer.accelerator
        multiple = batch_size * (1 if accelerator.split_batches else accelerator.num_processes)
        if stream:
            loader = make(PaddedStream(dataset, multiple), description, batch_size, None, **how)
        else:
            if isinstance(dataset, HubDataset):
                dataset = without_unused_columns(self._trainer, dataset, description)
            sampler = (sampler_fn and sampler_fn(dataset)) or SequentialSampler(dataset)
            rows = PaddedRows(dataset, multiple)
            loader = make(rows, description, batch_size, lambda _: PaddedSampler(sampler, rows), **how)
        loader.base_dataloader.collate_fn = RealRowsCollator(loader.base_dataloader.collate_fn)
        return loader

    def _repeats_rows(self, stream: bool) -> bool:
        """Return whether rows would be repeated, and can be marked."""
        accelerator = self._trainer.accelerator
        # Where one process reads for all, accelerate cuts its batches up: nothing can be marked.
        dispatched = accelerator.dispatch_batches
        one_process, drops = accelerator.num_processes == 1, self._trainer.args.dataloader_drop_last
        return not (one_process or drops or (stream if dispatched is None else dispatched))

    def counted(self) -> AbstractContextManager[None]:
        """Return a context for one evaluation, in which repeated rows are not gathered and losses are added up.

        The loss of a batch is what `prediction_step` returns. A subclass may change it, so the method is wrapped, and
        the loss is taken from what it returns.
        """
        if self._trainer.accelerator.num_processes > 1:
            self._trainer.gather_function = self._gather_once
        self._losses, self.sampled = TokenMetrics(), 0
        step = partial(self._with_returned_loss, self._trainer.prediction_step)
        return replaced(self._trainer, prediction_step=step)

    def _with_returned_loss(self, prediction_step: Callable[..., Any], *args, **kwargs) -> Any:
        self.items = None
        loss, *rest = prediction_step(*args, **kwargs)
        if loss is not None and self.items is not None:  # else transformers' mean over rows stands
            items = torch.as_tensor(self.items, dtype=torch.float64, device=loss.device)
            sums = loss.detach().double() * items, items
            total, items = sums if self.rows else map(torch.zeros_like, sums)
            self._losses.add({"loss": total}, items)
        return loss, *rest

    def returned_loss(self) -> dict[str, float]:
        """Return the mean of the losses since the last call, over the tokens of all ranks; empty without any."""
        over_ranks: Any = partial(self._trainer.accelerator.reduce, reduction="sum")
        return self._losses.flush(over_ranks)

    def without_repeated(self, inputs: Any, loss_only: bool) -> Any:
        """Return the batch with the labels of repeated rows taken out. A batch that has no other rows stays as it is,
        and counts nothing.

        loss_only: whether nothing of the batch is gathered but its loss.
        """
        self._loss_only = loss_only
        labels = inputs["labels"]
        self.rows = 0 if inputs.pop(REPEATED, False) else real_rows(len(labels))
        if self.rows in (0, len(labels)):
            return inputs
        labels = labels.clone()
        labels[self.rows :] = -100
        return {**inputs, "labels": labels}

    def _gather_once(self, data: Any) -> Any:
        """Gather the rows that count from all processes."""
        accelerator = self._trainer.accelerator
        if self._loss_only:  # transformers' mean of the batches' losses; our log replaces it
            return accelerator.gather(data)
        local: Any = recursively_apply(lambda x: x[: self.rows], data)
        counts: Any = accelerator.gather(torch.tensor([self.rows], device=accelerator.device))
        ends = list(enumerate(counts.tolist()))
        padded = accelerator.gather(accelerator.pad_across_processes(local, dim=0, pad_index=-100))
        return recursively_apply(lambda x: torch.cat([x.chunk(len(ends))[i][:n] for i, n in ends]), padded)
