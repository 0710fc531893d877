"""A patched model trains as the plain one does: 32 steps in fp32, same losses, logits and weights."""

import copy
from dataclasses import asdict

import pytest

from benchmarks import convergence
from benchmarks.convergence import FLOOR, LEARNING_RATE, MODELS, SMOLLM2, STEPS, Distance, build, compare, train
from liger_trainer import patch


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mini_models(name):
    model = build(name, tiny=True)
    plain = train(copy.deepcopy(model), STEPS, 2, 64, LEARNING_RATE[0])
    report = patch(model).report
    patched = train(model, STEPS, 2, 64, LEARNING_RATE[0])
    assert plain.losses[-1] < 0.95 * plain.losses[0], "it learns nothing: nothing is compared"
    assert max(asdict(Distance.between(patched, plain)).values()) < FLOOR, report


@pytest.mark.slow
def test_real_weights():
    distances, report = compare(build(SMOLLM2), STEPS, 1, 32, LEARNING_RATE[1])
    assert max(asdict(distances["patched from plain"]).values()) < FLOOR, report


@pytest.mark.parametrize("name", ["qwen3"])
def test_how_batches_are_split_changes_roundings_alone(name):
    """Or else the bound that plain runs give to patched ones would be none."""
    model = build(name, tiny=True)
    four, two = (train(copy.deepcopy(model), 4, 2, 32, LEARNING_RATE[0], parts) for parts in (4, 2))
    assert max(asdict(Distance.between(two, four)).values()) < FLOOR


def test_the_page_says_whether_patched_is_within_twice_plain():
    distances, report = compare(build("llama", tiny=True), 4, 2, 32, LEARNING_RATE[0])
    assert convergence.is_within(distances)
    far = {**distances, "patched from plain": Distance(1.0, 0.0, 0.0)}
    assert not convergence.is_within(far)
    results = {
        name: {"distances": {kind: asdict(x) for kind, x in each.items()}, "within": within, "report": report}
        for name, each, within in (("llama", distances, True), ("other", far, False))
    }
    page = convergence.page(results, "the command", "CPU")
    assert "| other | patched from plain | 1.0e+00 | 0.0e+00 | 0.0e+00 | **no** |" in page
    assert "| llama | patched from plain |" in page and page.count("| yes |") == 1
