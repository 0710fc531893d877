"""A step of each trainer by DeepSpeed in two processes, against the same step in one."""

import functools
import json
import shutil

import pytest
import torch
from engines.projector_training import trained_projectors
from engines.zero_ranks import FAMILIES, NON_FINITE, RESUMED, STEPS
from processes import run_on
from splits import one_step
from tiny import WORDS, assert_same_gradients, tiny_model, tiny_tokenizer
from tool_runs import attempt
from transformers import AutoModelForCausalLM

pytest.importorskip("deepspeed", reason='needs DeepSpeed: pip install -e ".[deepspeed]"')


@functools.cache
def one_process(objective):
    family = FAMILIES.get(objective, "llama")
    return one_step(objective.removeprefix("tied "), 8, 1, family=family, eval_on_start=True)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    run_on(2, "engines/zero_ranks.py", folder / "results.pt", folder / "out")
    return torch.load(folder / "results.pt")


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
