"""Recipes on rows with images: files beside the dataset, what is refused, and what a run writes."""

import io
import json
import random
import re
from pathlib import Path

import pytest
from commands import call, done, refused, settings, without_report, write_rows
from commands import metrics as written
from PIL import Image
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision import drawn, vision_model, vision_processor

from liger_trainer.run.data.row_checks import image_problem

SETTINGS = settings(num_sample_completions=2, max_new_tokens=3, max_length=None, per_device_train_batch_size=2)
LORA = ("use_peft=true", "lora_target_modules=all-linear")
FAMILY = "gemma3"  # whose processor transformers can read without torchvision


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        vision_model(FAMILY, seed=seed, num_hidden_layers=2 + 2 * seed).save_pretrained(folder / name)
        vision_processor(FAMILY).save_pretrained(folder / name)
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    for name in ("student", "teacher"):
        Path(name).symlink_to(models / name)
    (tmp_path / "run.yaml").write_text(SETTINGS)
    return tmp_path


def fill(folder, rows, count=10):
    """Rows in a folder of their own, with their images beside them."""
    rng = random.Random(0)
    (folder / "data" / "pictures").mkdir(parents=True)
    for i in range(count):
        drawn(rng).save(folder / "data" / "pictures" / f"{i}.png")
    write_rows(folder / "data" / "rows.jsonl", map(rows, range(count)))
    return "dataset_name=data/rows.jsonl"


def answers(i):
    answer = [{"role": "assistant", "content": " ".join(WORDS[i : i + 3])}]
    return {"image": f"pictures/{i}.png", "prompt": [{"role": "user", "content": WORDS[i]}], "completion": answer}


def llava(i):
    human = f"<image>\n{WORDS[i]}" if i % 2 else WORDS[i]  # half of the rows leave the place open
    return {"image": f"pictures/{i}.png", "conversations": [
        {"from": "human", "value": human}, {"from": "gpt", "value": " ".join(WORDS[i : i + 3])}]}  # fmt: skip


def parted(i):
    part = {"type": "image", "text": None}, {"type": "text", "text": WORDS[i]}
    content = [{"role": "user", "content": [*part, part[0]]}, {"role": "assistant", "content": [part[1]]}]
    return {"images": [f"pictures/{i}.png", f"pictures/{i - 1 if i else 1}.png"], "messages": content}


@pytest.mark.parametrize(
    "rows", [pytest.param(answers, marks=pytest.mark.slow), llava, pytest.param(parted, marks=pytest.mark.slow)]
)
def test_fine_tuning_on_files_of_images(folder, rows, capsys):
    out, _ = done(call(capsys, "run", "run.yaml", fill(folder, rows)))
    found = written(folder / "out")
    assert found["data"]["images"] == ("images" if rows is parted else "image")
    assert all(("[image]" in text["prompt"]) == (rows is not answers) for text in found["completions"])
    assert len(found["completions"]) == 2 and found["after"]["loss"] < found["before"]["loss"]
    AutoModelForImageTextToText.from_pretrained(folder / "out")
    assert AutoProcessor.from_pretrained(folder / "out").image_processor is not None


def test_distillation_with_a_frozen_tower_and_adapters(folder, capsys):
    changes = ("teacher_model_name_or_path=teacher", *LORA, "freeze_vision_tower=true")
    done(call(capsys, "run", "run.yaml", fill(folder, answers), *changes))
    found = written(folder / "out")
    assert found["after"]["kd_loss"] > 0 and found["completions"][0]["teacher"] is not None
    adapters = json.loads((folder / "out" / "adapter_config.json").read_text())
    assert "vision_tower" in adapters["exclude_modules"]


def test_validate_preview_estimate_and_a_student_of_fewer_layers(folder, capsys):
    rows = fill(folder, answers)
    assert call(capsys, "validate", "run.yaml", rows)[0] == 0
    out, _ = done(call(capsys, "preview", "run.yaml", rows))
    assert "<image_soft_token> x 4" in out
    done(call(capsys, "estimate", "run.yaml", rows, "max_length=64"))
    changes = ("model_name_or_path=teacher", "student_num_layers=2", "student_output_dir=made")
    done(call(capsys, "init-student", "run.yaml", rows, *changes))
    assert AutoModelForImageTextToText.from_pretrained(folder / "made").config.text_config.num_hidden_layers == 2
    assert AutoProcessor.from_pretrained(folder / "made").image_processor is not None
    done(call(capsys, "run", "run.yaml", rows, "model_name_or_path=made"))
    done(call(capsys, "eval", "out"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"image": "pictures/none.png"}, "an image is not there, got data/pictures/none.png"),
        ({"image": "rows.jsonl"}, "an image cannot be read, got .*rows.jsonl"),
        ({"image": None}, "column 'image': expected an image, got null"),
        ({"image": 3}, "column 'image': expected images, each the path of a file or bytes and path"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]}, "got 1 for 0"),
    ],
)
def test_rows_that_cannot_be_read(folder, capsys, changes, words):
    code, _, err = call(capsys, "run", "run.yaml", fill(folder, lambda i: {**answers(i), **changes}))
    assert code == 4 and re.search(words, " ".join(err.split())), err


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_file_that_was_cut_off_is_a_wrong_row(form):
    image = Image.effect_noise((96, 96), 90).convert("RGB")
    image.save(file := io.BytesIO(), form)
    whole = file.getvalue()
    assert image_problem({"image": {"bytes": whole, "path": None}}) is None
    assert "truncated" in str(image_problem({"image": {"bytes": whole[: len(whole) * 2 // 3], "path": None}}))


@pytest.mark.parametrize(
    "changes, words",
    [(("packing=true", "max_length=64"), "packing does not go with rows that have images"),
     (("model_name_or_path=text",), "no processor for them")],
)  # fmt: skip
def test_models_and_settings_for_text(folder, capsys, changes, words):
    tiny_model("llama").save_pretrained(folder / "text")
    tiny_tokenizer().save_pretrained(folder / "text")
    refused(call(capsys, "run", "run.yaml", fill(folder, answers), *changes), 2, words)


def test_adapters_are_merged_into_a_model_with_its_processor(folder, capsys):
    rows = fill(folder, answers)
    done(call(capsys, "run", "run.yaml", rows, *LORA))
    done(call(capsys, "merge", "out", "merged"))
    AutoModelForImageTextToText.from_pretrained(folder / "merged")
    assert AutoProcessor.from_pretrained(folder / "merged").image_processor is not None
