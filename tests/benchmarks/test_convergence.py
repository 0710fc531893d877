"""A patched model trains as the plain one does: 32 steps in fp32, same losses, logits and weights."""

import copy
from dataclasses import asdict

import pytest

from benchmarks.convergence import FLOOR, LEARNING_RATE, MODELS, SMOLLM2, STEPS, Distance, build, compare, train


@pytest.mark.parametrize("name", MODELS)
def test_mini_models(name):
    distances, report = compare(build(name, tiny=True), STEPS, 2, 64, LEARNING_RATE[0])
    assert max(asdict(distances["patched from plain"]).values()) < FLOOR, report


@pytest.mark.slow
def test_real_weights():
    distances, report = compare(build(SMOLLM2), STEPS, 1, 32, LEARNING_RATE[1])
    assert max(asdict(distances["patched from plain"]).values()) < FLOOR, report


@pytest.mark.parametrize("name", MODELS)
def test_how_batches_are_split_changes_roundings_alone(name):
    """Or else the bound that plain runs give to patched ones would be none."""
    model = build(name, tiny=True)
    whole, other = (train(copy.deepcopy(model), 4, 2, 32, LEARNING_RATE[0], parts) for parts in (4, 2))
    assert max(asdict(Distance.between(other, whole)).values()) < FLOOR
