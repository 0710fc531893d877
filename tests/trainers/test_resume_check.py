"""A training goes on from a checkpoint with the data, tokenizer, model and teacher it was begun with, unless forced."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import end_of, save_models, settings, without_report, write_rows
from peft import LoraConfig
from quick_cases import slow_but
from tiny import CHAT_TEMPLATE, completions, texts, tiny_model, tiny_tokenizer, train_args
from trainings import distill, sft
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from liger_trainer import LigerDistillConfig
from liger_trainer.common.checkpoints import MANIFEST, TRAINER_STATE, WITH_MANIFEST, checkpoints_in
from liger_trainer.common.files import STATE
from liger_trainer.errors import ConfigError
from liger_trainer.trainers.capture import capture
from liger_trainer.trainers.checkpoint_guard import KEY

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj", "v_proj"]},
    "distill": {"teacher_model_name_or_path": "teacher", "gradient_accumulation_steps": 2},
}


def row(i: int) -> dict:
    return {"messages": [{"role": "user", "content": f"w{i} w{i + 1}"}, {"role": "assistant", "content": f"w{i + 2}"}]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs, of 4 steps each, with their models and rows."""
    folder = tmp_path_factory.mktemp("runs")
    save_models(folder, "student", "teacher")
    write_rows(folder / "rows.jsonl", [row(i) for i in range(20)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        without_report(patch)
        for name, more in KINDS.items():
            Path(f"{name}.yaml").write_text(settings(output_dir=name, **SAVING, **more))
            assert end_of("run", f"{name}.yaml") == 0
    return folder


@pytest.fixture
def place(runs, tmp_path, monkeypatch):
    """A copy of the folder, with the runs as they were when they were interrupted after step 2."""
    folder = tmp_path / "place"
    shutil.copytree(runs, folder)
    for name in KINDS:
        shutil.move(folder / name / "metrics.json", folder / f"{name}.json")
        shutil.rmtree(folder / name / "checkpoint-4")
    monkeypatch.chdir(folder)
    without_report(monkeypatch)
    return folder


def reverse():
    lines = Path("rows.jsonl").read_text().splitlines()
    Path("rows.jsonl").write_text("\n".join(reversed(lines)) + "\n")


def reword():
    """Another template, which gives the same tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{# the same #}" + CHAT_TEMPLATE
    tokenizer.save_pretrained("student")


def swap_tokens():
    file = Path("student/tokenizer.json")
    table = json.loads(file.read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["w55"], vocabulary["w56"] = vocabulary["w56"], vocabulary["w55"]  # of which the rows have none
    file.write_text(json.dumps(table))


def replace(name: str, **changes):
    def change():
        shutil.rmtree(name)
        tiny_model("llama_tied", **{"seed": 7, **changes}).save_pretrained(name)
        tiny_tokenizer().save_pretrained(name)

    return change


CHANGES = {  # the run, what is done to it, and what is said of it
    "rows, template and model": ("full", [reverse, replace("student"), reword], [], [
        "train dataset (rows.jsonl): sha256 ", "eval dataset (rows.jsonl)", "tokenizer: chat template ",
        "model (student): weights before training "]),
    "base": ("lora", [replace("student")], [], ["model (student): frozen weights "]),
    "name": ("full", [], ["model_name_or_path=teacher"], ["model (student, now teacher): weights before training "]),
    "rope and vocabulary": (
        "full", [replace("student", seed=0, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), swap_tokens],
        [], ["model (student): config.rope_parameters.rope_theta 10000.0 there, 500000.0 now\n",
             "tokenizer: vocabulary "]),
    "alpha": ("lora", [], ["lora_alpha=99"], ["model (student): adapter default.lora_alpha 32 there, 99 now\n"]),
    "teacher": ("distill", [replace("teacher")], [], ["teacher (teacher): weights "]),
    "kind": ("distill", [], ["~teacher_model_name_or_path", "teacher=self", "use_peft=true"], ["teacher (teacher): "
             "kind model there, self now"]),
    "length": ("full", [], ["max_length=4"], ["train dataset (rows.jsonl): sha256 "]),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(CHANGES, "rows, template and model", "base", "alpha", "teacher", "kind"))
def test_what_has_changed_is_named_and_refused(place, capsys, name):
    run, changes, words, said = CHANGES[name]
    for change in changes:
        change()
    assert end_of("resume", run, *words) == 2
    err = capsys.readouterr().err
    assert f"{run}/checkpoint-2 was saved by a training that started with something else:" in err
    assert all(f"\n  {line}" in err for line in said), err
    parts = [line for line in err.splitlines() if line.startswith("  ")]
    assert len(parts) == len(said) or name in ("length", "kind"), parts
    assert f"liger-trainer resume {run} --checkpoint checkpoint-2 --force" in err
    assert [path.name for path in checkpoints_in(place / run)] == ["checkpoint-2"]


def test_a_forced_run_goes_on_and_is_then_a_run_of_what_it_went_on_with(place, capsys):
    run, [change], _, said = CHANGES["base"]
    change()
    with pytest.warns(UserWarning, match="although these differ") as caught:
        assert end_of("resume", run, "--force", "max_steps=3") == 0
    assert said[0] in str([w.message for w in caught])
    assert "force_resume: " not in (place / run / "config.yaml").read_text().partition("# Defaults")[0]
    capsys.readouterr()
    assert end_of("resume", run, "max_steps=4") == 0, capsys.readouterr().err
    assert end_of("validate", "full.yaml", "force_resume=true") == 2
    assert "force_resume: has no effect without `resume_from_checkpoint: true`" in capsys.readouterr().err


@pytest.mark.parametrize("run", KINDS)
def test_what_is_untouched_goes_on_to_the_same_weights(place, runs, run):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(something else|does not say)")
        assert end_of("run", f"{run}.yaml", "resume_from_checkpoint=true") == 0
    name = "adapter_model.safetensors" if run == "lora" else "model.safetensors"
    assert (place / run / name).read_bytes() == (runs / run / name).read_bytes()
    states = [json.loads((folder / run / "checkpoint-4" / STATE).read_text()) for folder in (place, runs)]
    assert states[0]["stateful_callbacks"][TRAINER_STATE] == states[1]["stateful_callbacks"][TRAINER_STATE]


def test_what_may_change_is_no_difference(place, capsys):
    shutil.move("student", "moved")
    shutil.move("rows.jsonl", "elsewhere.jsonl")
    words = ("max_steps=6", "logging_steps=2", "learning_rate=1e-3", "weight_decay=0.1", "eval_strategy=steps",
                "per_device_train_batch_size=2", "gradient_accumulation_steps=2", "attn_implementation=eager",
                "dtype=bfloat16", "model_name_or_path=moved", "dataset_name=elsewhere.jsonl")  # fmt: skip
    assert end_of("resume", "full", *words) == 0, capsys.readouterr().err
    assert end_of("resume", "distill", *words, "teacher_dtype=bfloat16") == 0, capsys.readouterr().err


def test_a_checkpoint_from_before_goes_on_with_one_warning(place, capsys):
    file = place / "full" / "checkpoint-2" / STATE
    state = json.loads(file.read_text())
    for name in (KEY, WITH_MANIFEST):
        del state["stateful_callbacks"][TRAINER_STATE][name]
    file.write_text(json.dumps(state))
    (file.parent / MANIFEST).unlink()
    reverse()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert end_of("resume", "full") == 0, capsys.readouterr().err
    assert sum("does not record what its training started with" in str(w.message) for w in caught) == 1


# In Python


def make(tmp_path, model=None, data=None, **options) -> Any:
    return sft(model, data, output_dir=str(tmp_path / "out"), **SAVING, **options)


def resumed(trainer, tmp_path, **options):
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"), **options)
    return trainer.model.state_dict()


def test_a_trainer_refuses_other_rows_unless_forced(tmp_path):
    rows, tests = completions(), {"easy": completions(4, seed=1), "hard": completions(4, seed=2)}
    make(tmp_path, eval_data=tests).train()
    with pytest.raises(ConfigError, match=r"(?s)train dataset: sha256 \w+... there, .*force_resume=True") as refused:
        resumed(make(tmp_path, data=rows.select(range(23, -1, -1))), tmp_path)
    assert "liger-trainer resume" not in str(refused.value)
    with pytest.raises(ConfigError, match="train dataset: rows 24 there, 23 now"):
        make(tmp_path, data=rows.select(range(23))).train(True)  # the newest
    with pytest.raises(ConfigError, match="hard dataset: sha256") as refused:  # those of evaluations by their names
        resumed(make(tmp_path, eval_data={**tests, "hard": tests["easy"]}), tmp_path)
    assert "easy" not in str(refused.value)
    for same in ({**tests, "new": completions(4, seed=3)}, None):
        resumed(make(tmp_path, eval_data=same), tmp_path)
    with pytest.warns(UserWarning, match="although these differ: train dataset: rows 24 there, 23 now"):
        resumed(make(tmp_path, data=rows.select(range(23))), tmp_path, force_resume=True)


def test_a_model_that_trained_in_this_process_is_the_one_it_was(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = make(tmp_path, model)
    trainer.train()
    want = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    again = [make(tmp_path, model), trainer, make(tmp_path, str(tmp_path / "model"))]
    for each in again:
        got = resumed(each, tmp_path)
        assert all(torch.equal(got[name], want[name]) for name in want)
    tiny_model(seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="weights before training"):
        resumed(make(tmp_path, str(tmp_path / "model")), tmp_path)


def test_a_model_that_is_loaded_from_the_checkpoint_goes_on(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    make(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base")).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    for _ in range(2):  # the second time from a checkpoint that this training has saved again
        trainer = make(tmp_path, LlamaForCausalLM.from_pretrained(checkpoint))
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 4
    trainer = make(tmp_path, LlamaForCausalLM.from_pretrained(checkpoint))
    with pytest.raises(ConfigError, match="weights before training"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))


def test_what_is_drawn_at_random_and_is_in_the_checkpoint_may_differ(tmp_path):
    """A model made from its configuration, and the rows of new tokens; but not what adapters are trained on."""
    make(tmp_path / "a").train()
    resumed(make(tmp_path / "a", tiny_model(seed=1)), tmp_path / "a")

    tiny_model().save_pretrained(tmp_path / "model")
    lora = LoraConfig(target_modules=["q_proj"], r=2)

    def grown(folder, peft):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model.resize_token_embeddings(70)
        return make(tmp_path / folder, model, peft_config=peft)

    for folder, peft in (("b", None), ("c", lora)):
        grown(folder, peft).train()
        resumed(grown(folder, peft), tmp_path / folder)
    with pytest.raises(ConfigError, match="frozen weights"):
        resumed(make(tmp_path / "c", tiny_model(seed=1, vocab_size=70), peft_config=lora), tmp_path / "c")


def test_of_a_stream_everything_but_its_rows_is_compared(tmp_path):
    make(tmp_path, data=texts().to_iterable_dataset()).train()
    resumed(make(tmp_path, data=texts(seed=1).to_iterable_dataset()), tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template .* there, none now"):
        resumed(make(tmp_path, data=texts().to_iterable_dataset(), processing_class=tokenizer), tmp_path)


def taught(tmp_path, teacher=None, **options) -> Any:
    data = completions().add_column("who", ["a", "b"] * 12)
    return distill(None, teacher, data, output_dir=str(tmp_path / "out"), **SAVING, **options)


def test_several_teachers(tmp_path):
    one, other = (tiny_model(seed=seed) for seed in (5, 6))
    taught(tmp_path, {"a": one, "b": other}, teacher_column="who").train()
    resumed(taught(tmp_path, {"a": one, "b": other}, teacher_column="who"), tmp_path)
    for teachers, options, said in (
        ({"a": other, "b": one}, {"teacher_column": "who"}, "teacher a.weights .* now, teacher b.weights .* now"),
        ({"b": other, "c": one}, {}, "teachers a, b there, b, c now"),
    ):
        with pytest.raises(ConfigError, match=f"teacher: {said}"):
            resumed(taught(tmp_path, teachers, **options), tmp_path)


def test_completions_may_be_sampled_from_a_checkpoint_on(tmp_path):
    taught(tmp_path, tiny_model(seed=5)).train()
    resumed(taught(tmp_path, tiny_model(seed=5), lmbda=1.0, max_completion_length=4), tmp_path)


@pytest.mark.parametrize("kind", ["topk", pytest.param("hidden", marks=pytest.mark.slow)])
def test_another_cache(tmp_path, kind):
    def options(name):
        return {"teacher": "cache", "teacher_cache_dir": str(tmp_path / name), "cache_kind": kind}

    for seed, name in ((5, "one"), (6, "other")):
        capture(tiny_model(seed=seed), train_args(LigerDistillConfig, **options(name)), tiny_tokenizer(), completions())
    taught(tmp_path, **options("one")).train()
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    resumed(taught(tmp_path, **options("moved")), tmp_path)
    with pytest.raises(ConfigError, match=r"teacher \(.*one, now .*other\): fingerprints.teacher \w+... there"):
        resumed(taught(tmp_path, **options("other")), tmp_path)
