"""Evaluation on several processes: each row counts once, as on one.

accelerate gives all processes as many batches, of as many rows, and fills the last ones with rows from the beginning,
which would count twice. Here the dataset fills them itself, so that it is known which rows are repeated: they are left
out of their batch, and where nothing else is in it, one stays for the processes to keep step, and counts nothing.
"""

# As in sft_trainer.py:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import recursively_apply
from datasets import Dataset as HubDataset
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, SequentialSampler
from trl.trainer.sft_trainer import SFTTrainer

REPEATED = "rows_are_repeated"  # a key of a batch of which nothing counts


class Repeated(NamedTuple):
    """In the place of a row: one that fills a batch."""

    row: Any


class FilledRows(Dataset):
    """The rows of a dataset, and beyond its end the first one again."""

    def __init__(self, rows: Any, multiple: int):
        self.rows = rows
        # accelerate asks for it, and finds nothing left to fill or to drop
        self.total_dataset_length = len(rows) + -len(rows) % multiple

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place] if place < len(self) else Repeated(self.rows[0])

    def __getitems__(self, places: list[int]) -> list[Any]:
        there = [place for place in places if place < len(self)]
        at_once = getattr(self.rows, "__getitems__", None) if there else None
        rows = [self.rows[place] for place in there] if at_once is None else at_once(there)
        return [*rows, *(self[place] for place in places[len(there) :])]


class FilledSampler(Sampler[int]):
    """The order of a sampler of `rows`, then the places beyond their end."""

    def __init__(self, sampler: Any, rows: FilledRows):
        self.sampler, self.rows = sampler, rows

    def __len__(self) -> int:
        return self.rows.total_dataset_length

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from range(len(self.rows), len(self))


class FilledStream(IterableDataset):
    """The rows of a stream, and then its first one again."""

    def __init__(self, rows: Any, multiple: int):
        self.rows, self.multiple = rows, multiple

    def __getattr__(self, name: str) -> Any:  # set_epoch, a generator: as far as the stream has them
        if name == "rows":
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        count, first = 0, None
        for count, row in enumerate(self.rows, 1):
            first = row if count == 1 else first
            yield row
        for _ in range(-count % self.multiple):
            yield Repeated(first)


class CollatorOfEachOnce:
    """A collator's batch of the rows that are not repeated; one of a repeated row, marked REPEATED, where all are."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, rows: list[Any]) -> Any:
        counted = [row for row in rows if not isinstance(row, Repeated)]
        if counted:
            return self.collator(counted)
        batch = self.collator([rows[0].row])
        batch[REPEATED] = True
        return batch


def rows_that_count(rows: int) -> int:
    """How many of this process's batch of `rows` are not repeated, by what accelerate says of its own loaders: it
    fills up the last batch alone, from the end of what all processes have."""
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows
    shard = getattr(state.active_dataloader, "batch_sampler", None)
    index = getattr(shard, "process_index", PartialState().process_index)  # less where processes share a batch
    return min(max(state.remainder - index * rows, 0), rows)


def tokens_that_count(mask: Tensor) -> Tensor:
    """`mask` (batch, length) of the tokens of a batch, without those of rows with which accelerate fills it: for a
    trainer whose loader is its own. Warns where nothing says which rows these are."""
    state = GradientState()
    loader: Any = state.active_dataloader
    if PartialState().num_processes == 1 or not state.end_of_dataloader or loader._drop_last:
        return mask
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and len(mask) != loader.total_batch_size // shard.num_processes:
        count = _tokens_behind_one_another(loader, shard)
        if count is not None:
            return mask & (torch.arange(mask.shape[1], device=mask.device) < count)
    elif not isinstance(loader.dataset, IterableDatasetShard):
        return mask & (torch.arange(len(mask), device=mask.device) < rows_that_count(len(mask)))[:, None]
    warnings.warn(
        "accelerate fills the last batch of this evaluation with rows from its beginning, and does not say which, so "
        "the teacher's metrics count them twice. Use LigerDistillTrainer, or one process.",
        stacklevel=2,
    )
    return mask


def _tokens_behind_one_another(loader: Any, shard: BatchSamplerShard) -> int | None:
    """How many tokens of this process's last batch are of rows that are not repeated, where the collator lays rows out
    without padding; None where their order is not that of the dataset."""
    if not isinstance(getattr(shard.batch_sampler, "sampler", None), SequentialSampler):
        return None
    rows, size = loader.dataset, loader.total_batch_size // shard.num_processes
    first = len(rows) - (loader.remainder or loader.total_batch_size) + shard.process_index * size
    return sum(len(rows[place]["input_ids"]) for place in range(first, min(first + size, len(rows))))


class EvaluationOfEachRow(SFTTrainer):
    """SFTTrainer with evaluations in which each row is once, on any number of processes. See the top of this file.

    Attributes:
        evaluated_rows: of the batch at hand, how many count. Rows that are laid out behind one another are one.
    """

    evaluated_rows = 1
    _loss_only = True

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        make, stream = super()._get_dataloader, isinstance(dataset, IterableDataset)
        if is_training or not self._fills_batches(stream):
            return make(dataset, description, batch_size, sampler_fn, is_training, **kwargs)
        multiple = batch_size * (1 if self.accelerator.split_batches else self.accelerator.num_processes)
        if stream:
            loader = make(FilledStream(dataset, multiple), description, batch_size, None, **kwargs)
        else:
            if isinstance(dataset, HubDataset):
                dataset = self._remove_unused_columns(dataset, description=description)
            sampler = (sampler_fn and sampler_fn(dataset)) or SequentialSampler(dataset)
            rows = FilledRows(dataset, multiple)
            loader = make(rows, description, batch_size, lambda _: FilledSampler(sampler, rows), **kwargs)
        loader.base_dataloader.collate_fn = CollatorOfEachOnce(loader.base_dataloader.collate_fn)
        return loader

    def _fills_batches(self, stream: bool) -> bool:
        """Where one process reads for all, accelerate cuts up what it has batched; where the rest is dropped, none is
        repeated."""
        dispatched = self.accelerator.dispatch_batches
        alone = self.accelerator.num_processes == 1 or self._shards_sequences()
        return not (alone or self.args.dataloader_drop_last or (stream if dispatched is None else dispatched))

    def _shards_sequences(self) -> bool:
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return parallelism is not None and parallelism.sp_enabled

    def evaluation_loop(self, *args, **kwargs):
        if self.accelerator.num_processes > 1 and not self._shards_sequences():
            self.gather_function = self._gather_once
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        self._loss_only = prediction_loss_only
        if not self._shards_sequences():  # whose batches are parts of rows
            inputs = self._without_repeated(inputs)
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _without_repeated(self, inputs: Any) -> Any:
        """The batch with nothing to learn in rows that are repeated. Where all are, none counts: it stays as it is."""
        labels = inputs["labels"]
        self.evaluated_rows = 0 if inputs.pop(REPEATED, False) else rows_that_count(len(labels))
        if self.evaluated_rows in (0, len(labels)):
            return inputs
        labels = labels.clone()
        labels[self.evaluated_rows :] = -100
        return {**inputs, "labels": labels}

    def _gather_once(self, data: Any) -> Any:
        """The rows of all processes that count."""
        accelerator = self.accelerator
        if self._loss_only:  # for transformers' mean of the batches' losses, which is not the one that is logged
            return accelerator.gather(data)
        own: Any = recursively_apply(lambda x: x[: self.evaluated_rows], data)
        counts: Any = accelerator.gather(torch.tensor([self.evaluated_rows], device=accelerator.device))
        ends = list(enumerate(counts.tolist()))
        padded = accelerator.gather(accelerator.pad_across_processes(own, dim=0, pad_index=-100))
        return recursively_apply(lambda x: torch.cat([x.chunk(len(ends))[i][:n] for i, n in ends]), padded)
