"""A patched model trains as the plain one does, 32 steps in fp32."""

import copy
import json
from dataclasses import asdict

import pytest

from benchmarks import convergence as trained
from benchmarks.convergence import FLOOR, LEARNING_RATE, MODELS, SMOLLM2, STEPS, Distance, build, train
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
    distances, report = trained.compare(build(SMOLLM2), STEPS, 1, 32, LEARNING_RATE[1])
    assert max(asdict(distances["patched from plain"]).values()) < FLOOR, report


def test_the_page_says_whether_patched_is_within_twice_plain(tmp_path, capsys):
    assert trained.main(["llama", "--tiny", "--steps", "4", "--output", str(tmp_path)]) == 0
    (page,) = (path.read_text() for path in tmp_path.glob("convergence-*.md"))
    assert "| llama | patched from plain |" in page and page.count("| yes |") == 2
    (written,) = (json.loads(path.read_text()) for path in tmp_path.glob("convergence-*.json"))
    distances = {kind: Distance(**values) for kind, values in written["llama"]["distances"].items()}
    assert trained.is_within(distances)
    assert not trained.is_within({**distances, "patched from plain": Distance(1.0, 0.0, 0.0)})
