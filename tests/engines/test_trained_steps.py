"""A step of each trainer by FSDP2 in two processes, against the same step in one. DDP: test_distill_trainer.py."""

import functools

import pytest
import torch
from engines.projector_training import trained_projectors
from engines.trained_steps import QUICK, STEPS, step
from processes import outcome_of
from tiny import assert_same_gradients

one_process = functools.cache(lambda objective: step(objective, 8, 1))


of_speed = functools.cache(lambda speed: outcome_of(2, "engines/trained_steps.py", speed))


def two_processes(*case):
    """The step of a case, which is run with all that are as quick."""
    return of_speed("quick" if case in QUICK else "slow")[case]


CASES = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in STEPS]


@pytest.mark.parametrize(("engine", "objective", "variant"), CASES)
def test_a_step_in_two_processes_is_that_of_one(engine, objective, variant):
    got, want = two_processes(engine, objective, variant), one_process(objective)
    assert_same_gradients(got["gradients"], want["gradients"])
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    for name, value in want["logs"].items():
        if name not in ("entropy", "mean_token_accuracy"):  # as TRL, means over micro-batches
            assert got["logs"][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(("engine", "objective", "variant"), CASES)
def test_weights_are_shared_out_layer_by_layer(engine, objective, variant):
    got = two_processes(engine, objective, variant)
    no_model = "cached" in objective or "self" in objective or objective in ("tied ce", "lora", "stock flag")
    has_model = not no_model and "teacher" not in variant
    assert got["layers"] == (0 if engine == "ddp" else 2)
    assert got["teacher_layers"] == (2 if has_model and engine != "ddp" else 0)


@pytest.mark.parametrize(("engine", "objective", "variant"), [case for case in CASES if "lora" in case.values[1]])
def test_adapters_are_computed_by_our_ops(engine, objective, variant):
    """PEFT's forward runs where the base is the teacher, without adapters, and nowhere else."""
    assert two_processes(engine, objective, variant)["by_peft"] == 0


@pytest.mark.parametrize("kind", ["cached", pytest.param("cached hidden", marks=pytest.mark.slow)])
def test_processes_capture_the_files_of_one(kind):
    assert two_processes("fsdp2", kind, "")["files"] == one_process(kind)["files"]


def test_projectors_are_trained_and_resumed_as_by_the_students_optimizer(tmp_path):
    want, (got, resumed) = trained_projectors(tmp_path, nan_in=2), of_speed("quick")["projectors"]
    assert got["skipped"] == want["skipped"] == 1
    assert_same_gradients(got["projectors"], want["projectors"])
    assert {step: got["losses"][step] for step in (1, 3, 4)} == pytest.approx(
        {step: want["losses"][step] for step in (1, 3, 4)}, rel=1e-5
    )
    assert all(torch.equal(resumed["projectors"][name], weight) for name, weight in got["projectors"].items())


def test_a_teacher_that_differs_between_processes_is_not_sharded():
    assert "not the same in all processes" in of_speed("quick")["teachers that differ"]
