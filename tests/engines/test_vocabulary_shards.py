"""Heads whose rows lie on several ranks: loss, gradients and per-token values are those of one rank with all tokens."""

import math

import pytest
import torch
from engines.vocabulary_shards import cases
from processes import outcome_of

from liger_trainer.kernels._linear_loss import Execution
from liger_trainer.kernels._ranks import VocabParallel
from liger_trainer.kernels._vocab_parallel import chunk_rows


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request):
    return outcome_of(request.param, "engines/vocabulary_shards.py")


@pytest.mark.parametrize("part", ["loss", "values", "gradients"])
@pytest.mark.parametrize("name", [name for name, *_ in cases()], ids=" ".join)
def test_shards_give_what_one_rank_gives(results, name, part):
    errors = results[name]
    assert errors[torch.float64, "shards", part] < 1e-10
    assert errors[torch.float32, "shards", part] <= 2 * errors[torch.float32, "alone", part] + 2e-6


def test_ranks_may_divide_by_different_numbers_of_items(results):
    assert max(results["own means"].values()) < 1e-10


@pytest.mark.parametrize("what", ["upstream", "label"])
def test_what_cannot_be_computed_is_nan(results, what):
    assert results["checks"][what] == 0


class Ranks(VocabParallel):
    """Ranks without processes."""

    size, rank = 4, 1


def test_a_chunk_fits_the_workspace():
    ranks = Ranks(None, 0, 256_000)
    rows = chunk_rows(ranks, 2, 4096 * 8, Execution(workspace_mb=512))
    assert rows % 256 == 0
    assert rows * (64_000 * 2 + 4096 * 8) <= 512 * 2**20 < (rows + 256) * (64_000 * 2 + 4096 * 8)


@pytest.mark.parametrize("describe, message", [
    (lambda: VocabParallel(None, 0, 8, tokens="shared"), "replicated, sharded"),
    (lambda: VocabParallel(None, 0, 8, tokens="replicated", average=True), "average is for sharded tokens"),
    (lambda: Ranks(None, 6, 8).check(torch.zeros(4, 2), False), "rows 6 to 10 of a head of 8 rows"),
    (lambda: Ranks(None, 0, 8).check(torch.zeros(4, 2), True), "overwrite_hidden has no place"),
])  # fmt: skip
def test_impossible_descriptions_are_refused(describe, message):
    with pytest.raises(ValueError, match=message):
        describe()


def test_columns_of_a_shared_vocabulary():
    held = [Ranks(None, first, 10).columns(7, 3) for first in (0, 3, 6, 9)]
    assert held == [3, 3, 1, 0]
    assert math.ceil(10 / 4) == Ranks(None, 0, 10).widest
