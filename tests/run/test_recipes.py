"""The recipes from the command line on tiny models: what is written, what it says, and what is refused before."""

import contextlib
import io
import json
import math
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from commands import call, done, end_of, metrics, refused, save_models, settings, without_report, write_rows
from planted import PLACES, Plant
from processes import run_on
from quick_cases import slow_but
from safetensors.torch import load_file
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.config.run_config import load_run_config
from liger_trainer.extras.report.html import _notes_on
from liger_trainer.extras.report.tables import read_run, training_facts
from liger_trainer.extras.students.drop_layers import drop_layers
from liger_trainer.run import models as models_of_runs
from liger_trainer.run import recipe
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.samples import held_out_prompts, measure
from liger_trainer.trainers.finite_report import is_finite
from liger_trainer.trainers.sft_trainer import LigerTrainer

SETTINGS = settings(num_sample_completions=2, max_new_tokens=4)
TEACHER = "teacher_model_name_or_path: teacher\n"


def chat(i: int, answer: str | None = None) -> dict:
    answer = answer if answer is not None else f"w{i} w{i + 1} w{i + 2}"
    question = " ".join(WORDS[i : i + 3])
    return {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one tokenizer, and one of the same size whose tokenizer has two words exchanged."""
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, "student", "teacher", num_hidden_layers=4)
    save_models(folder, "stranger")
    table = json.loads((folder / "stranger" / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["w3"], vocabulary["w5"] = vocabulary["w5"], vocabulary["w3"]
    (folder / "stranger" / "tokenizer.json").write_text(json.dumps(table))
    return folder


def fill(folder: Path, models: Path) -> None:
    """A folder with models, rows and a configuration."""
    for name in ("student", "teacher", "stranger"):
        (folder / name).symlink_to(models / name)
    write_rows(folder / "rows.jsonl", map(chat, range(20)))
    (folder / "run.yaml").write_text(SETTINGS)


@pytest.fixture(scope="module")
def tuned(models, tmp_path_factory):
    """SETTINGS, run once: the folder, and what was printed."""
    folder, out = tmp_path_factory.mktemp("tuned"), io.StringIO()
    fill(folder, models)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        without_report(patch)
        assert end_of("run", "run.yaml") == 0
    return folder, " ".join(out.getvalue().split())


@pytest.fixture
def run(models, tmp_path, monkeypatch, capsys):
    """Run the command line in such a folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    fill(tmp_path, models)

    def run_main(settings: str, *overrides: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(settings)
        code, out, err = call(capsys, "run", "run.yaml", *overrides)
        return code, " ".join(out.split()), err  # lines wrap anywhere

    return run_main


def test_sft_writes_model_tokenizer_configuration_and_metrics(tuned, models):
    folder, out = tuned
    written = metrics(folder / "out")
    assert written["after"]["loss"] < written["before"]["loss"]
    assert math.isclose(written["after"]["perplexity"], math.exp(written["after"]["loss"]), rel_tol=1e-4)
    assert written["data"]["train_rows"] == 16 and written["data"]["form"] == "prompt-completion"
    counted = {name: (rows["rows"], rows["rows_dropped"]) for name, rows in written["rows"].items()}
    assert counted == {"train": (16, 0), "eval": (4, 0)}
    assert written["training"]["steps"] == 3 and written["training"]["tokens"] > 0
    assert written["training"]["peak_memory_mib"] > 100 and written["training"]["tokens_per_second"] > 0
    assert set(written["seconds"]) == {"load", "measure_before", "train", "save", "measure_after"}
    assert [entry["step"] for entry in written["log_history"] if "loss" in entry] == [1, 2, 3]
    assert {"torch", "trl", "liger-trainer", "python"} <= written["versions"].keys()
    assert len(written["completions"]) == 2 and written["completions"][0]["teacher"] is None
    assert "before and after training" in out and "token accuracy" in out and "tokens/s" in out
    assert "max_steps" in out and "run.yaml:4" in out  # the effective configuration

    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert model.config.use_cache
    start = AutoModelForCausalLM.from_pretrained(models / "student")
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder / "out").get_vocab() == tiny_tokenizer().get_vocab()


def test_the_reported_loss_is_that_of_trl(tuned, monkeypatch):
    """The saved model, evaluated by TRL's own trainer on the same held-out rows, has the loss that was written."""
    monkeypatch.chdir(tuned[0])
    config = load_run_config("run.yaml")
    data, args = load_run_datasets(config), config.training_args()
    model = AutoModelForCausalLM.from_pretrained("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    trainer = SFTTrainer(model, args, train_dataset=data.train, eval_dataset=data.test, processing_class=tokenizer)
    assert math.isclose(trainer.evaluate()["eval_loss"], metrics(Path("out"))["after"]["loss"], rel_tol=1e-5)


def test_distillation_of_a_thinned_student_full_and_lora(run, tmp_path):
    """The first measurement and completions are those of the layer-dropped copy, untouched by adapters or training."""
    out, _ = done(run(SETTINGS + TEACHER, "model_name_or_path=teacher", "keep_every_nth_layer=2", "max_steps=6"))
    assert "forward KL (nats/token)" in out and "agreement@1" in out and "teacher: " in out
    full = metrics(tmp_path / "out")
    assert full["recipe"] == "distill" and 0 < full["after"]["forward_kl"] < 0.95 * full["before"]["forward_kl"]
    assert full["before"]["teacher_perplexity"] == pytest.approx(full["after"]["teacher_perplexity"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
    logged = [entry for entry in full["log_history"] if "forward_kl" in entry]
    assert len(logged) == 6 and all(entry["loss"] == pytest.approx(entry["forward_kl"], rel=1e-4) for entry in logged)

    layers = ("model_name_or_path=teacher", "keep_layers=[0,3]", "output_dir=lora")
    lora = ("use_peft=true", "lora_target_modules=all-linear", "lora_r=4")
    assert run(SETTINGS + TEACHER, *layers, *lora)[0] == 0
    adapted = metrics(tmp_path / "lora")
    for name in ("forward_kl", "reverse_kl", "student_perplexity"):
        assert adapted["before"][name] == pytest.approx(full["before"][name], rel=1e-5)
    for kind in ("before", "teacher"):
        assert [c[kind] for c in adapted["completions"]] == [c[kind] for c in full["completions"]]
    assert all(isinstance(completion["teacher"], str) for completion in full["completions"])
    assert adapted["after"]["forward_kl"] != pytest.approx(adapted["before"]["forward_kl"], rel=1e-3)
    assert adapted["training"]["trainable_parameters"] < full["training"]["trainable_parameters"]

    # merged: the thinned base exists nowhere else, so the adapters are part of the saved model
    saved = AutoModelForCausalLM.from_pretrained("lora")
    base = drop_layers(AutoModelForCausalLM.from_pretrained("teacher"), keep=[0, 3])
    assert type(saved) is type(base) and not (tmp_path / "lora" / "adapter_config.json").exists()
    assert torch.equal(saved.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert not torch.equal(saved.model.layers[1].mlp.up_proj.weight, base.model.layers[1].mlp.up_proj.weight)


def test_the_written_configuration_runs_again_with_the_same_result(run, tuned, tmp_path):
    again = (tuned[0] / "out" / "config.yaml").read_text()
    assert run(again, "output_dir=again")[0] == 0
    first, second = metrics(tuned[0] / "out"), metrics(tmp_path / "again")
    assert first["after"]["loss"] == pytest.approx(second["after"]["loss"], rel=1e-6)
    assert first["data"] == second["data"] and first["completions"] == second["completions"]


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        ({"messages": chat(3)["prompt"] + chat(3)["completion"]}, "w3 w4 w5", "w3 w4 w5"),
        ({"text": "w1 w2 w3 w4 w5 w6"}, "w1 w2 w3", "w4 w5 w6"),
        ({"input_ids": tiny_tokenizer()("w1 w2 w3 w4")["input_ids"]}, "w1 w2", "w3 w4"),
        ({"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]}, "w1 w2", "w3"),
        ({"prompt": "w1 w2", "completion": " w3"}, "w1 w2", " w3"),
    ],
)
def test_the_prompts_of_each_form_of_rows(models, tmp_path, monkeypatch, row, prompt, reference):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, models)
    write_rows(tmp_path / "rows.jsonl", [row] * 3)
    config, tokenizer = load_run_config("run.yaml"), tiny_tokenizer()
    (prepared,) = held_out_prompts(config, load_run_datasets(config), tokenizer)
    assert (prepared.text, prepared.reference) == (prompt, reference)
    assert prompt in tokenizer.decode(prepared.input_ids)


def test_rows_without_a_supervised_token_are_counted(run, tmp_path):
    rows = [chat(i) for i in range(16)]
    for i in (0, 5):
        rows[i]["prompt"][0]["content"] = " ".join(WORDS[:40])  # fills max_length: nothing of the answer is left
    write_rows(tmp_path / "train" / "train.jsonl", rows)
    write_rows(tmp_path / "train" / "test.jsonl", map(chat, range(20, 24)))
    out, _ = done(run(SETTINGS.replace("holdout_fraction: 0.2\n", ""), "dataset_name=train"))
    assert [rows["rows_dropped"] for rows in metrics(tmp_path / "out")["rows"].values()] == [2, 0]
    assert "rows dropped │ 2 │ 0" in out


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [(("max_length=3",), 4, "supervised token"),
     (("dataloader_drop_last=true", "per_device_train_batch_size=999"), 2, "leaves no batch of the train rows: there"),
     (("dataloader_drop_last=true", "per_device_eval_batch_size=999"), 2, "leaves no batch of the eval rows: there a"),
     (("lora_target_modules=[nothing]", "use_peft=true"), 2, "has no module called 'nothing'")],
)  # fmt: skip
def test_what_is_seen_with_the_weights_is_a_message_too(run, overrides, code, message):
    refused(run(SETTINGS, *overrides), code, message)


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        ("~dataset_name", 2, "dataset_name: missing"),
        ("max_steps=0", 2, "max_steps: expected a number of at least 1, or -1 for num_train_epochs, got 0"),
        ("model_name_or_path=./missing", 2, "model_name_or_path: no such directory: ./missing"),
        ("model_name_or_path=outputs/smollm2/sft_task", 2, "`liger-trainer run smollm2/sft_task` makes it"),
        ("model_name_or_path=rows", 2, "model_name_or_path: rows cannot be read as a model directory"),
        ("model_name_or_path=tiny/none", 2, "tiny/none cannot be read as a model directory (no folder in "),
        ("dataset_text_field=words dataset_name=other.jsonl", 4, "the rows have: text"),
        ("dataset_name=null.jsonl", 4, "null.jsonl:1: column 'completion': expected text, as in the other"),
        ("eos_token=<end>", 2, "eos_token: '<end>' is not in the vocabulary"),
        ("keep_layers=[0,9]", 2, "keep_layers: expected indices from 0 to 3"),
        ("keep_every_nth_layer=5", 2, "keep_every_nth_layer: expected at most 4"),
        ("chat_template_path=missing.jinja", 2, "chat_template_path: no such file"),
        ("chat_template_path=none dataset_name=other.jsonl", 2, "chat_template_path: none: no chat template can be r"),
        ("model_name_or_path=endless dataset_name=other.jsonl", 2, "has no end-of-sequence token, which ends rows of"),
        ("output_dir=student", 2, "output_dir: student is also model_name_or_path"),
        ("output_dir=rows.jsonl", 2, "output_dir: rows.jsonl is not a directory that can be written to"),
        ("load_best_model_at_end=true eval_strategy=epoch", 2, "needs checkpoints where evaluations are"),
        ("resume_from_checkpoint=true", 2, "resume_from_checkpoint: no checkpoint in out"),
        ("resume_from_checkpoint=checkpoint-9", 2, "resume_from_checkpoint: no such directory"),
        ('teacher_model_name_or_path=teacher losses=[{"type":"klx"}]', 2, "losses: [0].type: expected one of forward"),
        ("teacher_model_name_or_path=stranger", 2, "different tokenizers: 2 of 64 shared ids differ; "
         "id 3 is 'w3' for the student and 'w5' for the teacher"),
        ("model_name_or_path=plain", 2, "this tokenizer has no chat template; set chat_template_path"),
        # on a network's file system the rights of a folder may allow what its server refuses
        ("output_dir=refused", 2, "is not a directory that can be written to (Permission denied)"),
    ],
)  # fmt: skip
def test_bad_input_is_told_before_weights_are_loaded(run, tmp_path, monkeypatch, overrides, code, message):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    if "refused" in overrides:
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    elif "plain" in overrides:
        shutil.copytree(tmp_path / "student", tmp_path / "plain")
        (tmp_path / "plain" / "chat_template.jinja").unlink()
    elif "endless" in overrides:
        shutil.copytree(tmp_path / "student", tmp_path / "endless")
        AutoTokenizer.from_pretrained("endless", eos_token=None).save_pretrained("endless")
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')

    (tmp_path / "null.jsonl").write_text('{"prompt": "a", "completion": null}\n{"prompt": "a", "completion": "b"}\n')
    refused(run(SETTINGS, *overrides.split()), code, message)
    assert not (tmp_path / "out").exists()


def test_evaluations_on_the_way_and_the_best_model(run, tuned, tmp_path):
    """The tokens are those of the training, though what is logged last is of an evaluation."""
    often = ["eval_strategy=steps", "save_strategy=steps", "eval_steps=1", "save_steps=1"]
    often += ["load_best_model_at_end=true"]
    done(run(SETTINGS, *often, "logging_steps=2", "metric_for_best_model=perplexity"))
    training = metrics(tmp_path / "out")["training"]
    assert training["tokens"] == metrics(tuned[0] / "out")["training"]["tokens"] > 0
    assert training["tokens_per_second"] > 0
    code, _, err = run(SETTINGS, *often, "metric_for_best_model=perplexitty", "output_dir=other")
    assert code == 2 and "metric_for_best_model: expected one of" in err and "perplexity" in err
    for options in ("null", "{bogus: 1}"):
        said = run(
            SETTINGS, "lr_scheduler_type=cosine_with_min_lr", f"lr_scheduler_kwargs={options}", "output_dir=other"
        )
        refused(said, 2, "lr_scheduler_kwargs: cosine_with_min_lr: ")
    if not find_spec("bitsandbytes"):
        refused(run(SETTINGS, "optim=lion_8bit", "output_dir=other"), 2, "optim: lion_8bit: ", "bitsandbytes")


def test_a_padded_vocabulary_is_no_other_tokenizer(run, tmp_path):
    tiny_model("llama", vocab_size=80, num_hidden_layers=1).save_pretrained(tmp_path / "padded")
    wider = tiny_tokenizer()
    wider.add_tokens(["extra"])
    wider.save_pretrained(tmp_path / "padded")
    out, _ = done(run(SETTINGS, "teacher_model_name_or_path=padded", "max_steps=1"))
    assert "64 tokens, the same in both" in out and "1 token that only the teacher has" in out
    assert "rows skipped" in out and "skipped for" not in out and "images" not in out


def test_an_earlier_run_is_not_overwritten_unasked(run, tuned, tmp_path):
    """Resuming would go on from its checkpoint with the highest step, and save_total_limit would keep that."""
    shutil.copytree(tuned[0] / "out", tmp_path / "out")
    refused(run(SETTINGS), 2, "holds a finished run", "overwrite_output_dir=true")
    assert metrics(tmp_path / "out") == metrics(tuned[0] / "out")
    (tmp_path / "out" / "metrics.json").unlink()
    earlier = tmp_path / "out" / "checkpoint-9"
    earlier.mkdir()
    refused(run(SETTINGS), 2, "out holds checkpoint-9 of an earlier run; set resume_from_checkpoint=true")
    code, _, err = run(SETTINGS, "overwrite_output_dir=true", "model_name_or_path=out/checkpoint-9")
    assert code == 2 and "out/checkpoint-9 is also model_name_or_path" in err and earlier.is_dir()
    assert run(SETTINGS, "overwrite_output_dir=true", "max_steps=1")[0] == 0
    assert metrics(tmp_path / "out")["training"]["steps"] == 1 and not earlier.exists()


def test_files_of_no_run_are_not_replaced_unasked(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    (out / "notes.txt").write_text("mine")
    refused(run(SETTINGS), 2, "out holds README.md, which no run wrote", "overwrite_output_dir=true")
    assert (out / "README.md").read_text() == "mine"
    once = (SETTINGS, "max_steps=1", "save_strategy=no")
    assert run(*once, "overwrite_output_dir=true")[0] == 0
    (out / "metrics.json").unlink()  # as if it had been killed
    assert run(*once)[0] == 0 and (out / "notes.txt").read_text() == "mine"


def test_two_processes_train_as_one(run, tuned, tmp_path):
    """The first evaluation must not keep Trainer from averaging gradients over the processes."""
    rows = ("per_device_train_batch_size=2", "per_device_eval_batch_size=2")
    logs = run_on(2, "command_ranks.py", "none", "run", "run.yaml", "output_dir=two", "ddp_backend=gloo", *rows)
    assert all(log.endswith("exit code 0\n") for log in logs), logs
    one, two = metrics(tuned[0] / "out"), metrics(tmp_path / "two")
    assert two["training"]["processes"] == 2 and two["training"]["tokens"] == one["training"]["tokens"]
    for name in ("loss", "grad_norm"):
        logged = [[entry[name] for entry in written["log_history"] if name in entry] for written in (one, two)]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert two["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-5)
    assert "".join(logs).count("before and after training") == 1


def test_wrong_rows_are_left_out_and_counted(run, tmp_path):
    wrong = [{"prompt": "w1", "completion": True}, {"prompt": "w1"}, {"prompt": "w1", "completion": 3}]
    write_rows(tmp_path / "rows.jsonl", [*wrong, *map(chat, range(17))])
    refused(run(SETTINGS), 4, "Wrong rows: 3.")
    out, _ = done(run(SETTINGS, "bad_rows=skip", "max_steps=1"))
    assert "rows skipped 3" in out.replace("│ ", "").replace(" │", "")
    data = metrics(tmp_path / "out")["data"]
    assert data["rows_skipped"] == 3 and data["train_rows"] + data["test_rows"] == 17
    ((kind, rows),) = data["rows_skipped_for"].items()
    assert "column 'completion': expected text" in kind and rows == "3 rows: rows.jsonl:1-3"
    assert any("3 wrong rows were left out" in note for note in _notes_on(read_run(tmp_path / "out")))


def larger_tokenizer(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["x1", "x2"])
    tokenizer.save_pretrained(folder)


def cut(size: int):
    def harm(folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:size])

    return harm


def half_a_bin(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut(-100), "cut off or damaged"),
        (cut(0), "cut off or damaged"),
        (half_a_bin, "cut off or damaged"),
        (larger_tokenizer, "has ids up to 65, but the model has 64 tokens; beyond them are 'x1', 'x2'"),
    ],
)
def test_a_broken_model_is_one_message(run, tmp_path, harm, message):
    shutil.copytree(tmp_path / "student", tmp_path / "broken")
    harm(tmp_path / "broken")
    refused(run(SETTINGS, "model_name_or_path=broken"), 2, message, "model_name_or_path")
    assert not (tmp_path / "out").exists()
    if harm is not larger_tokenizer:  # a teacher may have more tokens than it shares
        refused(run(SETTINGS + TEACHER, "teacher_model_name_or_path=broken"), 2, message)


def test_a_training_that_diverges_ends_with_the_checkpoint_before(run, tmp_path):
    diverging = ("learning_rate=1e30", "max_grad_norm=0", "max_steps=4", "save_strategy=steps", "save_steps=1")
    code, _, err = run(SETTINGS, *diverging, "logging_strategy=no")
    assert code == 5 and "Traceback" not in err
    step = int(re.search(r"In step (\d) the", err)[1])
    assert f"liger-trainer resume out --checkpoint checkpoint-{step - 1}\n" in err
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))[-1] == f"checkpoint-{step - 1}"
    assert not (tmp_path / "out" / "metrics.json").exists()


def plant(patch, place: str, step: int) -> None:
    train = LigerTrainer.train
    patch.setattr(LigerTrainer, "train", lambda self, **how: (Plant(self, place, step), train(self, **how))[1])


@pytest.mark.parametrize("place", slow_but(PLACES, "loss", "teacher"))
def test_planted_nan_ends_the_command_and_its_advice_finishes_the_run(run, tmp_path, monkeypatch, capsys, place):
    """With `logging_steps=500`, where nothing is logged before the end."""
    train = LigerTrainer.train
    plant(monkeypatch, place, 4)
    short = ("max_steps=5", "logging_steps=500", "save_strategy=steps", "save_steps=1", "eval_strategy=no")
    code, _, err = run(SETTINGS + TEACHER, *short)
    assert code == 5 and "Traceback" not in err and "In step 4 " in err
    saved = checkpoints_in(tmp_path / "out")
    assert [path.name for path in saved] == [f"checkpoint-{step}" for step in (1, 2, 3)] and all(map(is_finite, saved))
    monkeypatch.setattr(LigerTrainer, "train", train)
    done(call(capsys, *re.search(r"liger-trainer (resume out --checkpoint checkpoint-3)\n", err)[1].split()))
    assert metrics(tmp_path / "out")["training"]["resumed_at"] == 3


def test_the_report_counts_steps_that_are_left_out(run, tmp_path, monkeypatch):
    plant(monkeypatch, "loss", 2)
    with pytest.warns(UserWarning, match="In step 2 .* left out"):
        code, _, err = run(SETTINGS, "on_non_finite=skip_step", "logging_nan_inf_filter=true")
    assert code == 0 and "logging_nan_inf_filter: left out: a loss is logged as it is" in err
    written = metrics(tmp_path / "out")
    assert written["training"]["skipped_steps"] == 1
    assert [entry["skipped_steps"] for entry in written["log_history"] if "skipped_steps" in entry][-1] == 1
    assert training_facts(read_run(tmp_path / "out"))["skipped steps"] == "1"


def test_a_metric_of_the_trained_model_that_is_nan_is_the_exit_code_and_in_the_metrics(run, tmp_path, monkeypatch):
    def last_is_nan(trainer, *how):
        result = measure(trainer, *how)
        wrong = {"loss": math.nan} if trainer.state.global_step else {}
        return replace(result, metrics=result.metrics | wrong)

    monkeypatch.setattr(recipe, "measure", last_is_nan)
    refused(run(SETTINGS), 5, "the trained model's loss is NaN")
    assert metrics(tmp_path / "out")["after"]["loss"] == "nan"


def test_a_training_that_begins_again_with_smaller_batches_is_measured_once(run, tmp_path, monkeypatch):
    measured, step, full = [], LigerTrainer.training_step, []

    def out_of_memory_once(self, *args, **kwargs):
        if self.state.global_step == 1 and not full:
            full.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, *args, **kwargs)

    def counted(*args, **kwargs):
        measured.append(measure(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr(LigerTrainer, "training_step", out_of_memory_once)
    monkeypatch.setattr(recipe, "measure", counted)
    _, err = done(run(SETTINGS, "auto_find_batch_size=true", "max_steps=2", "learning_rate=1e-2"))
    assert full
    assert "begins again with the weights as they are by then" in err
    before = metrics(tmp_path / "out")["before"]
    assert len(measured) == 2 and before["loss"] == measured[0].metrics["loss"]


def test_an_adapter_names_its_base_so_that_it_is_found_from_elsewhere(run, tmp_path, monkeypatch):
    """The configuration names it by a relative path."""
    done(run(SETTINGS, "use_peft=true", "max_steps=1"))
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tmp_path / "student")
    monkeypatch.chdir(tmp_path / "student")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize("engine, where", [(DistributedType.NO, "auto"), (DistributedType.MULTI_GPU, None)])
def test_only_a_process_without_a_launcher_spreads_a_model_over_gpus(run, monkeypatch, engine, where):
    """A launcher's single process, say of a resumed run, would train by DDP, which takes no model that is spread."""
    state = SimpleNamespace(distributed_type=engine, num_processes=1, device=torch.device("cuda", 0))
    monkeypatch.setattr(models_of_runs, "PartialState", lambda: state)
    assert models_of_runs._device_map(load_run_config("run.yaml", [])) == where
