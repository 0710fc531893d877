"""Training rows come in the same order where a training is resumed, and those of a stream fill each step."""

import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset
from quick_cases import by_turns
from tiny import WORDS
from torch.utils.data import DataLoader
from trainings import logged, sft, trained
from transformers import Trainer

from liger_trainer import LigerTrainer
from liger_trainer.trainers.loaders import EndlessStream

ROWS = Dataset.from_list([{"prompt": WORDS[i], "completion": f" {WORDS[i + 24]}" * (i % 9 + 1)} for i in range(24)])


class Watched(LigerTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        self.seen.append((self.state.global_step, inputs["input_ids"][:, 0].tolist()))
        return super().training_step(model, inputs, *args, **kwargs)


def train(folder, rows: Any, resume=None, **options) -> Any:
    trainer = sft(data=rows, cls=Watched, output_dir=str(folder), **{"save_strategy": "steps", **options})
    trainer.seen = []
    return trained(trainer, resume)


def assert_resumes(folder, last: int, rows: Any, **options) -> Any:
    """Train to the end, and once more from the checkpoint before: the same rows and weights."""
    whole = train(folder, rows, **options)
    shutil.rmtree(folder / f"checkpoint-{last}")
    resumed = train(folder, rows, resume=True, **options)
    begun = resumed.seen[0][0]
    assert begun > 0 and resumed.seen == [step for step in whole.seen if step[0] >= begun]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    return whole


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance", "random"])
def test_an_epoch_goes_on_with_the_rows_that_it_has_not_shown(tmp_path, strategy):
    options = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 4, "save_steps": 9}
    whole = assert_resumes(tmp_path, 12, ROWS, train_sampling_strategy=strategy, **options)
    orders = [[row for step, batch in whole.seen if step // 6 == epoch for row in batch] for epoch in (0, 1)]
    assert orders[0] != orders[1] and all(set(Counter(order).values()) == {1} for order in orders)


@pytest.mark.parametrize(("accumulation", "shuffles"), by_turns([1, 2, 3], [False, True]))
def test_a_stream_that_begins_again_fills_each_step_and_goes_on(tmp_path, accumulation, shuffles):
    rows = ROWS.select(range(10)).to_iterable_dataset()
    rows = rows.shuffle(seed=3, buffer_size=10) if shuffles else rows
    options = {"max_steps": 8, "per_device_train_batch_size": 2, "learning_rate": 0.0, "save_steps": 5}
    whole = assert_resumes(tmp_path, 8, rows, gradient_accumulation_steps=accumulation, **options)
    assert Counter(step for step, _ in whole.seen) == dict.fromkeys(range(8), accumulation)
    first = [row for _, batch in whole.seen for row in batch]
    passes = [first[at : at + 10] for at in range(0, len(first) - 9, 10)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert len(passes) == 1 or shuffles == (passes[0] != passes[1])
    assert max(logged(whole)) < 1.6 * min(logged(whole))


def test_a_pass_without_rows_ends_a_stream():
    assert list(EndlessStream([])) == []
    once = iter([1, 2])
    assert list(EndlessStream(once)) == [1, 2]


def test_an_epoch_of_a_stream_is_the_whole_training_and_that_is_said(tmp_path):
    with pytest.warns(UserWarning, match="save_strategy: a stream has no length"):
        train(tmp_path, ROWS.to_iterable_dataset(), max_steps=1, save_strategy="epoch")


def test_the_sampler_of_several_processes_is_told_the_epoch(tmp_path, monkeypatch):
    """Trainer does not reach it once it skips batches, so that a resumed epoch would have the order of the first."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    trainer = train(tmp_path, ROWS, max_steps=1, save_strategy="no")
    sampler = BatchRebalanceSampler(list(range(24)), effective_batch_size=4, dp_size=2, grad_accum=1, rank=1)
    loader: Any = prepare_data_loader(
        DataLoader(list(range(24)), batch_sampler=sampler), num_processes=2, process_index=1, put_on_device=False
    )
    loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0  # as Trainer does
    seen = []
    monkeypatch.setattr(
        Trainer, "_run_epoch", lambda self, **given: seen.extend(skip_first_batches(given["train_dataloader"], 1))
    )
    trainer._run_epoch(train_dataloader=loader, epoch=1)
    got = torch.cat(seen).tolist()
    sampler.set_epoch(1)
    assert got == [row for batch in list(sampler)[1:] for row in batch]
    sampler.set_epoch(0)
    assert got != [row for batch in list(sampler)[1:] for row in batch]


LOST = "leaves out 33 of the 135 supervised tokens of the training rows (24%); the longest row has 11 tokens."


@pytest.mark.parametrize("max_length, said", [(6, [f"liger-trainer: max_length=6 {LOST}"]), (10, [])])
def test_supervised_tokens_beyond_max_length_are_announced(capsys, max_length, said):
    """Where they are more than one in twenty: of 10 tokens, two rows' last one is left out."""
    sft(data=ROWS, max_length=max_length)
    assert [line for line in capsys.readouterr().out.splitlines() if "max_length" in line] == said
