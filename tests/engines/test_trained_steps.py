"""A step of each trainer by FSDP2 in two processes, against the same step in one. DDP: test_distill_trainer.py."""

import pytest
import torch
from engines.trained_steps import OBJECTIVES, STEPS, step
from processes import run_on
from tiny import assert_same_gradients


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "results.pt"
    run_on(2, "engines/trained_steps.py", path)
    return torch.load(path)


@pytest.fixture(scope="module")
def one_process():
    return {objective: step(objective, 8, 1) for objective in OBJECTIVES}


@pytest.mark.parametrize(("engine", "objective", "variant"), STEPS)
def test_a_step_in_two_processes_is_that_of_one(two_processes, one_process, engine, objective, variant):
    got, want = two_processes[engine, objective, variant], one_process[objective]
    assert_same_gradients(got["gradients"], want["gradients"])
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    for name, value in want["logs"].items():
        if name not in ("entropy", "mean_token_accuracy"):  # as TRL, means over micro-batches
            assert got["logs"][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(("engine", "objective", "variant"), STEPS)
def test_weights_are_shared_out_layer_by_layer(two_processes, engine, objective, variant):
    got = two_processes[engine, objective, variant]
    no_model = "cached" in objective or "self" in objective or objective in ("tied ce", "lora", "stock flag")
    has_model = not no_model and "teacher" not in variant
    assert got["layers"] == (0 if engine == "ddp" else 2)
    assert got["teacher_layers"] == (2 if has_model and engine != "ddp" else 0)


def test_adapters_are_computed_by_our_ops(two_processes):
    """PEFT's forward runs where the base is the teacher, without adapters, and nowhere else."""
    assert {step: got["by_peft"] for step, got in two_processes.items() if "lora" in step[1]} == {
        step: 0 for step in STEPS if "lora" in step[1]
    }


@pytest.mark.parametrize("kind", ["cached", "cached hidden"])
def test_processes_capture_the_files_of_one(two_processes, one_process, kind):
    assert two_processes["fsdp2", kind, ""]["files"] == one_process[kind]["files"]


def test_a_teacher_that_differs_between_processes_is_not_sharded(two_processes):
    assert "not the same in all processes" in two_processes["teachers that differ"]
