"""Files of TRL's users, run unchanged; a run that is interrupted, resumed and merged. On tiny models and rows."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from commands import call, done, end_of, metrics, refused, save_models, without_report, write_rows
from held_folders import held_by_a_child
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_trainer.common.checkpoints import MANIFEST, TRAINER_STATE, checkpoints_in, damage
from liger_trainer.common.files import BEFORE, STATE
from liger_trainer.errors import ConfigError, CorruptError
from liger_trainer.run.launch import resumption
from liger_trainer.run.train_loop import check_checkpoint

# as for `trl sft --config sft.yaml`, written over the years: names that TRL and transformers have given up among them
TRL_SFT = """
# Model arguments
model_name_or_path: student
torch_dtype: float32
attn_implementation: eager
use_peft: true
lora_r: 4
lora_alpha: 8
lora_target_modules:
  - q_proj
  - v_proj
# Data training arguments
dataset_name: rows.jsonl
max_seq_length: 32
# SFT trainer config
bf16: false
use_cpu: true
do_eval: true
eval_strategy: steps
eval_steps: 2
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: "3e-2"
logging_steps: 1
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 4
per_device_train_batch_size: 2
report_to: none
save_strategy: steps
save_steps: 2
save_safetensors: true
seed: 7
packing: no
use_liger_kernel: true
output_dir: out
"""
# as for `trl distillation --config distillation.yaml`
TRL_DISTILLATION = """
model_name_or_path: student
teacher_model_name_or_path: teacher
dataset_name: rows.jsonl
learning_rate: 1.0e-3
max_steps: 1
per_device_train_batch_size: 4
max_completion_length: 16
temperature: 0.9
top_p: 0.95
beta: 1.0
log_completions: true
bf16: false
use_cpu: true
max_length: 32
output_dir: distilled
"""
QUICK = ("num_sample_completions=1", "max_new_tokens=2")  # otherwise the files as they are


def row(i: int) -> dict:
    question, answer = " ".join(WORDS[i : i + 3]), " ".join(WORDS[i + 3 : i + 6])
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models, rows and the two files."""
    folder = tmp_path_factory.mktemp("trl")
    save_models(folder, "student", "teacher")
    write_rows(folder / "rows.jsonl", map(row, range(20)))
    (folder / "sft.yaml").write_text(TRL_SFT)
    (folder / "distillation.yaml").write_text(TRL_DISTILLATION)
    return folder


@pytest.fixture
def cli(folder, monkeypatch, capsys):
    """The command line in that folder: exit code, stdout in one line, stderr."""
    monkeypatch.chdir(folder)
    without_report(monkeypatch)

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, err = call(capsys, *arguments)
        return code, " ".join(out.split()), err

    return run


@pytest.fixture(scope="module")
def trained(folder):
    """The run of sft.yaml, in out/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        without_report(patch)
        assert end_of("run", "sft.yaml", *QUICK) == 0
    return folder / "out"


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of that run, as it was when it was interrupted after its last checkpoint."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    return tmp_path / "run"


def test_a_trl_sft_file_runs_unchanged(trained, cli):
    written = metrics(trained)
    assert written["recipe"] == "sft" and written["training"]["steps"] == 4
    assert written["after"]["loss"] < written["before"]["loss"]
    assert [path.name for path in checkpoints_in(trained)] == ["checkpoint-2", "checkpoint-4"]
    assert (trained / "adapter_config.json").is_file() and not (trained / "model.safetensors").exists()
    assert 0 < written["training"]["trainable_parameters"] < written["training"]["parameters"]
    out, err = done(cli("validate", "sft.yaml"))
    assert "sft.yaml is valid: recipe sft, 30 settings." in out
    assert [line.split(": ", 2)[2] for line in err.splitlines()] == [
        "sft.yaml:4: torch_dtype: the former name of dtype.",
        "sft.yaml:14: max_seq_length: the former name of max_length.",
        "sft.yaml:28: warmup_ratio: the former name of warmup_steps (a number below 1 is a share of the steps).",
        "sft.yaml:34: save_safetensors: left out: weights are always saved as safetensors.",
    ]


def test_a_trl_distillation_file_runs_unchanged(cli, folder):
    _, err = done(cli("run", "distillation.yaml", *QUICK))
    written = metrics(folder / "distilled")
    assert written["recipe"] == "distill" and written["training"]["steps"] == 1
    assert {"reverse_kl"} <= written["after"].keys()
    for key in ("max_completion_length", "top_p"):
        assert f"{key}: has no effect: the completions in the rows are distilled" in err
    assert "log_completions: has no effect: sampled completions are not logged" in err
    assert "lmbda: not given: the completions in the rows" in err


def test_a_merged_adapter_is_the_adapted_model(trained, cli, folder):
    out, _ = done(cli("merge", "out", "merged"))
    assert "with the adapter of out merged in" in out and "torch.float32" in out
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    adapted = AutoModelForCausalLM.from_pretrained(trained)
    ids = torch.arange(12)[None]
    expected, base = adapted(ids).logits, AutoModelForCausalLM.from_pretrained(folder / "student")(ids).logits
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - base).abs().max() > 1e-2  # the adapter does something
    assert not (folder / "merged" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(folder / "merged").get_vocab() == tiny_tokenizer().get_vocab()
    assert cli("merge", "out", "merged")[0] == 2  # it is there
    code, _, err = cli("merge", "out", "again", "--gguf", "student.gguf")
    assert code == 2 and "convert_hf_to_gguf.py is not on PATH" in err and not (folder / "again").exists()
    out, _ = done(cli("merge", "out", "merged", "--force", "--dtype", "bfloat16"))
    assert AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="auto").dtype == torch.bfloat16


def test_what_cannot_be_merged(trained, cli, folder, copy):
    tiny_model("llama_tied", num_hidden_layers=5).save_pretrained(folder / "deep")
    for words, message in (
        (["student"], "student holds no adapter"),
        ([copy.parent], f"There is one in {copy}."),
        (["out", "--dtype", "int8"], "--dtype: expected float32"),
        (["out", "--base", "./nowhere"], "./nowhere cannot be loaded"),
        (["out", "--base", "deep"], "has no weights for some layers of deep"),
    ):
        source, *options = words
        refused(cli("merge", source, "m1", *options), 2, message)
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    refused(cli("merge", copy, "m1"), 6, "the adapter's weights cannot be read")
    assert not (folder / "m1").exists()


def test_merge_replaces_a_model_and_nothing_else(trained, cli, folder):
    for path, text in (("notes/a.txt", "kept"), ("run/config.json", "{}"), ("run/config.yaml", "{}")):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    tiny_model("llama_tied").save_pretrained(folder / "model")  # a model, and not of a merge
    assert cli("merge", "out", "edited")[0] == 0
    (folder / "edited" / "mine.txt").touch()
    refusals = {
        "run": "run holds what no merge wrote (config.json, config.yaml)", "out": "out is the adapter itself",
        ".": ". holds the adapter itself", "student": "student is the base",
        "notes": "notes holds what no merge wrote (a.txt)", "notes/a.txt": "a.txt is a file",
        "model": "model holds what no merge wrote (config.json",
        "edited": "edited holds what no merge wrote (mine.txt)",
    }  # fmt: skip
    before = sorted(folder.rglob("*"))
    for name, message in refusals.items():
        refused(cli("merge", "out", name, "--force"), 2, message)
    assert sorted(folder.rglob("*")) == before and (folder / "notes/a.txt").read_text() == "kept"


def test_resume_goes_on_with_the_settings_of_the_start(trained, cli, copy, folder):
    shutil.rmtree(copy / "checkpoint-4")
    done(cli("resume", copy))
    resumed, whole = metrics(copy), metrics(trained)
    assert (resumed["training"]["steps"], resumed["training"]["resumed_at"]) == (4, 2)
    for part in ("before", "after"):
        assert resumed[part]["loss"] == pytest.approx(whole[part]["loss"], rel=1e-6)
    assert resumed["completions"] == whole["completions"]
    counted = {log["step"]: log["num_tokens"] for log in whole["log_history"] if "num_tokens" in log}
    assert resumed["training"]["tokens"] == whole["training"]["tokens"] == counted[4]
    rate, seconds = resumed["training"]["tokens_per_second"], resumed["training"]["seconds"]
    assert rate * seconds == pytest.approx(counted[4] - counted[2], rel=0.2)
    assert "resume_from_checkpoint: " not in (copy / "config.yaml").read_text().partition("# Defaults")[0]

    refused(cli("resume", copy), 2, "is finished", "max_steps=...")
    done(cli("resume", copy, "max_steps=5"))
    assert metrics(copy)["training"]["steps"] == 5
    for setting in ("max_steps=3", "learning_rate=1"):
        refused(cli("resume", copy, setting), 2, "nothing is left to train")
    assert metrics(copy)["training"]["steps"] == 5


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def strip_manifest(checkpoint: Path) -> None:
    """Make a checkpoint one of an earlier version."""
    (checkpoint / MANIFEST).unlink()
    state = json.loads((checkpoint / STATE).read_text())
    del state["stateful_callbacks"][TRAINER_STATE]["manifest"]
    (checkpoint / STATE).write_text(json.dumps(state))


def test_resume_takes_the_newest_whole_checkpoint_and_says_what_it_passes_over(trained, copy, cli):
    flip(copy / "checkpoint-4" / "adapter_model.safetensors")
    with pytest.warns(
        UserWarning, match=r"checkpoint-4 is damaged and is not used: adapter_model.safetensors is not what was wri"
    ):
        code, _, err = cli("resume", copy)
    assert code == 0, err
    assert metrics(copy)["training"]["resumed_at"] == 2 and metrics(copy)["before"] == metrics(trained)["before"]
    assert (copy / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def test_resume_refuses_a_damaged_checkpoint_that_is_asked_for(copy, cli):
    weights = copy / "checkpoint-4" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    flip(weights)
    code, _, err = cli("resume", copy, "--checkpoint", "checkpoint-4")
    assert code == 6 and "checkpoint-4 is damaged: adapter_model.safetensors is not what was written" in err
    assert f"The newest whole one: {copy / 'checkpoint-2'}" in err
    weights.write_bytes(whole[:-3])
    with pytest.raises(CorruptError, match=f"has {len(whole) - 3} bytes instead of"):  # before anything is loaded
        check_checkpoint({"resume_from_checkpoint": str(copy / "checkpoint-4")})
    _, settings = resumption(copy, "checkpoint-2", ["seed=1"])
    assert settings == [f"output_dir={copy}", "seed=1", f"resume_from_checkpoint={copy / 'checkpoint-2'}"]
    shutil.rmtree(copy / "checkpoint-2")
    with pytest.raises(CorruptError, match="no checkpoint in .* is whole:\n  checkpoint-4: adapter"):
        check_checkpoint({"resume_from_checkpoint": True, "output_dir": str(copy)})
    with pytest.raises(ConfigError, match="expected one of checkpoint-4, got 'checkpoint-9'"):
        resumption(copy, "checkpoint-9", [])
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        resumption(copy / "nowhere", None, [])


def test_resume_runs_a_models_code_only_where_that_is_said_again(copy):
    with (copy / "config.yaml").open("a") as file:
        file.write("\ntrust_remote_code: true\n")
    with pytest.raises(ConfigError, match=r"yaml:\d+: trust_remote_code: .* add trust_remote_code=... to the com"):
        resumption(copy, None, [])
    assert "trust_remote_code=true" in resumption(copy, None, ["trust_remote_code=true"])[1]


WEIGHTS = "adapter_model.safetensors"


def test_resume_finishes_what_was_killed_after_the_last_step(trained, copy, cli):
    """Between the last checkpoint and metrics.json: nothing is left to train, but to save and to measure."""
    (copy / WEIGHTS).unlink()
    done(cli("resume", copy))
    resumed, whole = metrics(copy), metrics(trained)
    assert resumed["before"] == whole["before"] and resumed["after"]["loss"] == whole["after"]["loss"]
    assert (resumed["training"]["steps"], resumed["training"]["resumed_at"]) == (4, 4)
    assert (copy / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def test_resume_starts_a_run_that_was_killed_before_its_first_checkpoint(trained, copy, cli):
    for checkpoint in checkpoints_in(copy):
        shutil.rmtree(checkpoint)
    _, err = done(cli("resume", copy, "--force"))
    assert "no checkpoint in" in err and "starts from the beginning" in err
    assert (copy / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def test_a_folder_in_which_a_run_trains_is_refused_to_another(copy, cli):
    with held_by_a_child(copy) as child:
        for command in (("resume", copy), ("run", "sft.yaml", f"output_dir={copy}", "overwrite_output_dir=true")):
            refused(cli(*command), 2, f"{copy} is in use by process {child} on ")


def test_a_missing_measurement_before_training_is_said(copy, cli):
    checkpoint = copy / "checkpoint-4"
    assert BEFORE in json.loads((checkpoint / MANIFEST).read_text())["files"]
    strip_manifest(checkpoint)
    (checkpoint / BEFORE).unlink()
    with pytest.warns(UserWarning, match="before training is missing: .*'before' is the model after step 4"):
        assert cli("resume", copy)[0] == 0


def test_every_kind_of_damage_is_seen(copy):
    """Without a manifest, by names, sizes and headers."""
    checkpoint = copy / "checkpoint-4"
    strip_manifest(checkpoint)
    assert damage(checkpoint) is None
    for name, harm, told in (
        ("trainer_state.json", lambda path: path.unlink(), "trainer_state.json is missing"),
        ("trainer_state.json", lambda path: path.write_text("{"), "trainer_state.json cannot be read"),
        ("adapter_model.safetensors", lambda path: path.unlink(), "it holds no weights"),
        ("adapter_model.safetensors", lambda path: path.write_bytes(b""), "is cut off: 0 bytes"),
        ("adapter_model.safetensors", lambda path: path.write_bytes(b"\x05" + bytes(12)), "has no safetensors header"),
        ("adapter_model.safetensors", lambda path: path.write_bytes(path.read_bytes() + b"x"), "instead of"),
        ("optimizer.pt", lambda path: path.unlink(), "optimizer.pt is missing"),
        ("rng_state.pth", lambda path: path.unlink(), "rng_state.pth is missing"),
        ("optimizer.pt", lambda path: path.write_bytes(path.read_bytes()[:-30]), "optimizer.pt is cut off"),
    ):
        before = (checkpoint / name).read_bytes()
        harm(checkpoint / name)
        assert told in (damage(checkpoint) or "nothing")
        (checkpoint / name).write_bytes(before)
    assert zipfile.is_zipfile(checkpoint / "optimizer.pt") and damage(checkpoint) is None
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert damage(checkpoint) == "model-1.safetensors is missing"
