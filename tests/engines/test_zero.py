"""A step of each trainer by DeepSpeed in two processes, against the same step in one.

Run as a script, it is one of the two, without a GPU; see splits.py.
"""

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import forget
from engines.projector_training import trained_projectors
from processes import finish, outcome_of
from safetensors.torch import load_file
from splits import one_step
from test_non_finite import outcome
from tiny import WORDS, assert_same_gradients, completions, tiny_model, tiny_tokenizer, train_args
from tool_runs import attempt
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig

import liger_trainer
from liger_trainer import LigerTrainer
from liger_trainer.trainers.finite_guard import FiniteGuard

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install -e ".[deepspeed]"'
)
FAMILIES = {f"tied {objective}": "llama_tied" for objective in ("ce", "kd", "self", "callback")}  # llama otherwise
RESUMED = (3, "tied ce", "resumed")
STEPS = [  # stage, objective, variant
    (2, "ce", ""), (2, "lora kd", ""), (2, "self", ""),
    (3, "tied ce", "evaluated"), (3, "tied ce", "named"), (3, "lora", ""), (3, "lora", "recomputed"),
    (3, "lora kd", ""), (3, "kd", "evaluated"), (3, "tied kd", "named"), (3, "tied self", ""),
    (3, "tied self", "recomputed"), (3, "hidden, one width", ""), (3, "stock flag", ""), (3, "cached", ""),
    (3, "weighted", ""), (3, "on_policy", ""), (3, "lora on_policy", ""), (3, "seq_kd", ""),
    (2, "callback", ""), (3, "callback", ""), (3, "tied callback", "evaluated"), (3, "callback", "recomputed"),
    (2, "ce", "offloaded"), (3, "lora kd", "offloaded"), (2, "hidden", ""), (3, "hidden", ""),
]  # fmt: skip
NON_FINITE = [  # stage, policy, where there is NaN
    (0, "skip_step", "loss"), (2, "skip_step", "loss"), (3, "skip_step", "loss"), (3, "stop", "loss"),
    (3, "stop", "weight"),
]  # fmt: skip
OPTIONS = {
    "": {},
    "evaluated": {"eval_on_start": True},
    "named": {"named": True},
    "recomputed": {"gradient_checkpointing": True},
    "offloaded": {},
}


def settings(stage: int, variant: str = "") -> dict:
    """DeepSpeed's, by which ZeRO-3 partitions every parameter, however small, and saves whole ones."""
    zero: dict = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if variant == "offloaded":
        zero |= {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")[: stage - 1]}
    return {
        "zero_optimization": {**zero, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip


@contextlib.contextmanager
def recorded() -> Iterator[dict]:
    """Record the gradients that DeepSpeed's optimizer gets in the last step, by name, the norm that we watch, and the
    stage."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_grad

    taken: dict = {"gradients": {}}
    step = DeepSpeedEngine.step

    def recording(engine, *args, **kwargs):
        trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        taken["gradients"] = {name: safe_get_full_grad(p).clone() for name, p in trained}
        taken["stage"] = engine.zero_optimization_stage()
        return step(engine, *args, **kwargs)

    def record_norm(guard, norm):
        taken["norm"] = float(norm)

    with (
        mock.patch.object(DeepSpeedEngine, "step", recording),
        mock.patch.object(FiniteGuard, "record_norm", record_norm),
    ):
        yield taken


def forget_all() -> None:
    """Let the next training arguments of this process choose engine and settings again."""
    forget()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def zero_step(stage: int, objective: str, variant: str) -> dict:
    forget_all()
    family, objective = FAMILIES.get(objective, "llama"), objective.removeprefix("tied ")
    with recorded() as taken:
        results = one_step(objective, 2, 2, family=family, deepspeed=settings(stage, variant), **OPTIONS[variant])
    return results | taken | {"gradients": results["gradients"] | taken["gradients"]}


def non_finite(stage: int, policy: str, place: str) -> dict:
    forget_all()
    return outcome(policy, "adamw_torch", place, deepspeed=settings(stage))


def projectors_of_zero3(output_dir: Path, resume: bool) -> dict:
    forget_all()
    return trained_projectors(output_dir, resume=resume, deepspeed=settings(3))


def preferred(stage: int) -> dict:
    """Train a step by ORPO, without and with `enable()`. Return both losses, the gradients, and what is said."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # warns that it may change

    answers = {"chosen": completions(8)["completion"], "rejected": completions(8, seed=9)["completion"]}
    rows = Dataset.from_dict({"prompt": completions(8)["prompt"], **answers})
    taken: dict = {"losses": [], "gradients": []}
    for switch in (liger_trainer.disable, liger_trainer.enable):
        forget_all()
        switch()
        with warnings.catch_warnings(record=True) as told, recorded() as of_step:
            warnings.simplefilter("always")
            args = train_args(ORPOConfig, max_steps=1, max_length=64, deepspeed=settings(stage))
            trainer = ORPOTrainer(tiny_model(), args, train_dataset=rows, processing_class=tiny_tokenizer())
            trainer.train()
        taken["losses"].append(next(log["loss"] for log in trainer.state.log_history if "loss" in log))
        taken["gradients"].append(of_step["gradients"])
    liger_trainer.disable()
    return taken | {"told": [str(w.message) for w in told if w.category is liger_trainer.MaterializedLogitsWarning]}


def resumed_steps(output_dir: Path) -> dict:
    """Train four steps by ZeRO-3, then the last two again from the checkpoint after the second. Return both."""
    losses, saved = [], []
    for checkpoint in (None, str(output_dir / "checkpoint-2")):
        forget_all()
        args = train_args(
            SFTConfig, output_dir=str(output_dir), max_steps=4, save_strategy="steps", save_steps=2,
            learning_rate=1e-2, deepspeed=settings(3),
        )  # fmt: skip
        common = {"train_dataset": completions(), "processing_class": tiny_tokenizer()}
        trainer = LigerTrainer(tiny_model("llama_tied"), args, **common)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(output_dir / "saved"))
        torch.distributed.barrier()
        losses.append({log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log})
        saved.append(load_file(output_dir / "saved" / "model.safetensors"))
    return {"losses": losses, "saved": saved}


@functools.cache
def one_process(objective):
    family = FAMILIES.get(objective, "llama")
    return one_step(objective.removeprefix("tied "), 8, 1, family=family, eval_on_start=True)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return outcome_of(2, "../engines/test_zero.py", tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize(("stage", "objective", "variant"), STEPS)
def test_a_step_in_two_processes_is_that_of_one(two_processes, stage, objective, variant):
    got, want = two_processes[stage, objective, variant], one_process(objective)
    assert got["stage"] == stage
    assert_same_gradients(got["gradients"], want["gradients"])
    if objective != "stock flag":  # of which nobody watches the numbers
        of_student = [gradient for name, gradient in want["gradients"].items() if not name.startswith("projectors.")]
        norm = torch.stack([gradient.norm() for gradient in of_student]).norm()
        assert got["norm"] == pytest.approx(float(norm), rel=1e-5)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    for name, value in want["logs"].items():
        if name not in ("entropy", "mean_token_accuracy"):  # as TRL, means over micro-batches
            assert got["logs"][name] == pytest.approx(value, rel=1e-5), name
    assert got["by_peft"] == 0
    if variant == "evaluated":
        assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("case", [case for case in NON_FINITE if case[0] and "skip_step" in case], ids=str)
def test_all_ranks_leave_out_a_step_as_deepspeed_does(two_processes, case):
    outcome = two_processes[case]
    assert not outcome["message"] and outcome["step"] == 4 and outcome["finite"]
    assert outcome["skipped"] == 1 and len(outcome["warnings"]) == 1


@pytest.mark.parametrize(("case", "words"), [
    ((3, "stop", "loss"), ["In step 2 on ranks 1 the loss and the gradient norm are", "The weights are finite still"]),
    ((3, "stop", "weight"), ["In step 2 on ranks 0, 1 the loss", "Weights: model.embed_tokens.weight"]),
    ((0, "skip_step", "loss"), ["In step 2 on ranks 1 the loss", "DeepSpeed did not leave the step out"]),
], ids=str)  # fmt: skip
def test_all_ranks_stop_at_numbers_that_are_not_finite(two_processes, case, words):
    assert all(word in two_processes[case]["message"] for word in words), two_processes[case]["message"]
    assert two_processes[case]["step"] <= 3


@pytest.mark.parametrize("stage", [2, 3])
def test_orpo_is_that_of_trl_and_says_where_it_stores_logits(two_processes, stage):
    taken = two_processes["orpo", stage]
    assert taken["losses"][1] == pytest.approx(taken["losses"][0], rel=1e-5)
    assert_same_gradients(*reversed(taken["gradients"]))
    assert [("ZeRO-3 frees the output head" in told) for told in taken["told"]] == [True] * (stage == 3)


def test_projectors_are_trained_and_resumed_as_by_the_students_optimizer(two_processes, tmp_path):
    want, (got, resumed) = trained_projectors(tmp_path), two_processes["projectors"]
    assert_same_gradients(got["projectors"], want["projectors"])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert all(torch.equal(resumed["projectors"][name], weight) for name, weight in got["projectors"].items())


def test_a_training_goes_on_from_its_checkpoint_and_saves_plain_weights(two_processes):
    (want, got), saved = (two_processes[RESUMED][name] for name in ("losses", "saved"))
    assert want[4] < want[1] - 0.1 and {step: want[step] for step in (3, 4)} == {step: got[step] for step in (3, 4)}
    before = tiny_model("llama_tied").state_dict()
    for name, weight in saved[0].items():
        assert torch.equal(saved[1][name], weight) and weight.shape == before[name].shape


ACCELERATE = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, zero3_init_flag: true, zero3_save_16bit_model: true}
mixed_precision: 'no'
"""
CONFIG = """
recipe: distill
model_name_or_path: student
teacher_model_name_or_path: teacher
dataset_name: rows.jsonl
holdout_fraction: 0.25
output_dir: out
losses: [{type: forward_kl}, {type: ce, weight: 0.5}]
max_steps: 4
save_steps: 2
per_device_train_batch_size: 2
learning_rate: 0.01
bf16: false
use_cpu: true
report_to: none
accelerate_config: zero3.yaml
num_processes: 2
"""


@pytest.mark.slow  # DeepSpeed compiles its collectives for the CPU, once
def test_a_run_goes_on_from_its_checkpoint_and_saves_a_plain_model(tmp_path):
    for name, model in (("student", tiny_model()), ("teacher", tiny_model("gemma2", seed=5))):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    rows = [{"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i : i + 5])} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "zero3.yaml").write_text(ACCELERATE)
    (tmp_path / "run.yaml").write_text(CONFIG)

    def weights_after(*command):
        done = attempt("liger-trainer", *command, cwd=tmp_path, DS_ACCELERATOR="cpu")
        assert done.returncode == 0, done.stdout
        return AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()

    want = weights_after("run", "run.yaml")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    for name in ("model.safetensors", "metrics.json"):  # by which a run is finished
        (tmp_path / "out" / name).unlink()
    got, before = weights_after("resume", "out"), tiny_model().state_dict()
    assert all(torch.equal(got[name], weight) for name, weight in want.items())
    assert not all(torch.equal(got[name], weight) for name, weight in before.items())


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    os.environ.pop("ACCELERATE_USE_CPU")  # accelerate would take it for a wish to leave DeepSpeed out
    import deepspeed

    with mock.patch.dict(deepspeed.ops.__compatible_ops__, clear=True):  # compiles nothing
        steps: dict = {case: zero_step(*case) for case in STEPS}
        steps |= {case: non_finite(*case) for case in NON_FINITE}
        steps |= {("orpo", stage): preferred(stage) for stage in (2, 3)}
        steps[RESUMED] = resumed_steps(Path(sys.argv[2]))
        steps["projectors"] = [projectors_of_zero3(Path(sys.argv[2], "projectors"), again) for again in (False, True)]
    finish(steps, sys.argv[1])
