"""A step of each trainer by FSDP2 in two processes, against the same step in one. DDP: test_distill_trainer.py.

Run as a script, it is one of two processes; see splits.py.
"""

import contextlib
import functools
import sys
from pathlib import Path

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from engines.projector_training import trained_projectors
from processes import finish, outcome_of
from splits import one_step
from tiny import assert_same_gradients, texts, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError

ENGINES = {
    "ddp": contextlib.nullcontext,
    "fsdp2": fsdp2,
    "fsdp2, kept gathered": lambda: fsdp2(reshard_after_forward=False),
    "fsdp2, loaded by rank 0": lambda: fsdp2(cpu_ram_efficient_loading=True),
}
OBJECTIVES = {
    "tied ce": "llama_tied", "tied kd": "llama_tied", "mix": "llama", "lora": "llama", "lora kd": "llama",
    "stock flag": "llama", "tied self": "llama_tied", "hidden, one width": "llama", "hidden": "llama",
    "callback": "llama", "cached": "llama", "cached hidden": "llama", "on_policy": "llama",
    "tied lora on_policy": "llama_tied", "tied on_policy in graphs": "llama_tied", "seq_kd": "llama",
    "weighted": "llama",
}  # fmt: skip
OPTIONS = {"": {}, "recomputed": {"gradient_checkpointing": True}, "whole teacher": {"teacher_device": "cpu"}}
# The other objectives by DDP are in splits.py. The head is what FSDP2 treats differently, so its variants take tied and
# adapted heads.
STEPS = [
    *(("fsdp2", objective, "") for objective in OBJECTIVES),
    ("fsdp2, kept gathered", "on_policy", ""), ("fsdp2, kept gathered", "tied ce", ""),
    ("fsdp2, kept gathered", "lora kd", ""),
    ("fsdp2, loaded by rank 0", "tied kd", ""), ("fsdp2, loaded by rank 0", "lora kd", ""),
    ("fsdp2", "lora", "recomputed"), ("fsdp2", "tied self", "recomputed"), ("fsdp2", "tied kd", "whole teacher"),
    ("ddp", "tied kd", "whole teacher"), ("ddp", "lora", "recomputed"),
]  # fmt: skip
# What FSDP2 does in its own ways; the others, which it does as DDP does in splits.py, are slow.
QUICK = [
    *(("fsdp2", objective, "") for objective in (
        "tied ce", "tied kd", "hidden", "lora kd", "stock flag", "callback", "cached", "tied lora on_policy",
        "tied on_policy in graphs",
    )),
    ("fsdp2, kept gathered", "on_policy", ""), ("fsdp2, loaded by rank 0", "tied kd", ""),
    ("fsdp2", "lora", "recomputed"), ("fsdp2", "tied kd", "whole teacher"),
]  # fmt: skip


def step(objective, *split, **how):
    return one_step(objective.removeprefix("tied "), *split, family=OBJECTIVES[objective], **how)


def refusal():
    """What is said where each process has another teacher to shard."""
    with fsdp2(), pytest.raises(ConfigError) as refused:
        teacher = tiny_model(seed=torch.distributed.get_rank())
        args = train_args(LigerDistillConfig)
        LigerDistillTrainer(
            tiny_model(), teacher_model=teacher, args=args, train_dataset=texts(), processing_class=tiny_tokenizer()
        )
    return str(refused.value)


def main(path, speed):
    results = {}
    for engine, objective, variant in STEPS:
        if ((engine, objective, variant) in QUICK) != (speed == "quick"):
            continue
        with ENGINES[engine]():
            named = ("rank 0" in engine and "lora" not in objective) or "teacher" in variant
            results[engine, objective, variant] = step(objective, 2, 2, named=named, **OPTIONS[variant])
    if speed == "quick":
        results["teachers that differ"] = refusal()
        results["projectors"] = []
        for resume in (False, True):
            with fsdp2(state_dict_type="FULL_STATE_DICT"):
                results["projectors"].append(trained_projectors(Path(path).parent / "out", nan_in=2, resume=resume))
    finish(results, path)


one_process = functools.cache(lambda objective: step(objective, 8, 1))


of_speed = functools.cache(lambda speed: outcome_of(2, "../engines/test_trained_steps.py", speed))


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


if __name__ == "__main__":
    main(*sys.argv[1:])
