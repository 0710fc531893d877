"""Rows that two processes share, each with a slice, by DeepSpeed's Ulysses: the step of one process on whole rows."""

import functools
import importlib.util

import pytest
from engines.sequence_ranks import OF_FOUR, REFUSED, STEPS, sequence_step
from processes import outcome_of
from tiny import assert_same_gradients

BY_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed, which runs without a GPU: pip install it"
)

of_one_process = functools.cache(sequence_step)


@functools.cache
def taken(part, ranks=2):
    """What processes did of one part of the cases."""
    return outcome_of(ranks, "engines/sequence_ranks.py", part)


def assert_same(got, want, scale=1.0):
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["metrics"] == pytest.approx(want["metrics"], rel=1e-5)
    assert_same_gradients({name: gradient / scale for name, gradient in got["gradients"].items()}, want["gradients"])


@BY_DEEPSPEED
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_slices_make_the_step_of_whole_rows(case):
    """Loss, gradients, metrics and evaluation. transformers' own loss has the gradients of both ranks, added up, where
    ZeRO-3 does not average them."""
    got, want = taken("two")[case], of_one_process(*case[1:])
    assert_same(got, want, scale=2.0 if case[:2] == (2, "stock flag") else 1.0)
    assert got["logs"] == pytest.approx(want["logs"], rel=1e-5)


@BY_DEEPSPEED
@pytest.mark.slow  # four processes
@pytest.mark.parametrize("case", OF_FOUR, ids=str)
def test_two_pairs_of_ranks_share_the_rows_out(case):
    assert_same(taken("four", 4)[case], of_one_process(*case[1:]))


@BY_DEEPSPEED
@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_would_compute_otherwise_is_refused(name):
    words = REFUSED[name][2]
    assert words in taken("two")[name]


@pytest.mark.parametrize("case, words", [
    (("ce", "cp_size"), "cp_size > 1) is not supported"), (("kd", "cp_size"), "cp_size > 1) is not supported"),
    (("ce", "sp_size", "dp_shard_size"), "only DeepSpeed cuts rows into slices"),
])  # fmt: skip
def test_other_engines_are_refused(case, words):
    assert words in taken("without")[case]
