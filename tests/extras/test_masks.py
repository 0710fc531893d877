"""A converted configuration supervises the tokens that the other tool supervises: three rows a case, token by token.

What torchtune, axolotl, LLaMA-Factory and DistillKit do was recorded from the tools (`foreign_configs/masks.json`); TRL
is asked here.
"""

import importlib
import json
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from foreign_masks import CASES, GOLDEN, MESSAGES, PAIRS, SPECIAL, TEXT, Case, marked, mask_tokenizer
from tiny import tiny_model
from trl import SFTConfig, SFTTrainer
from trl.experimental.utils import DataCollatorForChatML

from liger_trainer.config.run_config import load_run_config
from liger_trainer.extras.convert import Converted, convert
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.models import check_student, open_model
from liger_trainer.trainers.row_preparation import Preparation

RECORDED = json.loads(GOLDEN.read_text(encoding="utf-8"))
BEHIND = SPECIAL[1]  # torchtune ends each row with this token, and does not supervise it


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(vocab_size=300).config.save_pretrained("model")
    mask_tokenizer().save_pretrained("model")
    return tmp_path


def converted(tool: str, text: str, folder: Path) -> Converted:
    return convert(
        text, str(folder / "theirs.yaml"), importlib.import_module(f"liger_trainer.extras.convert.{tool}").TOOL
    )


def supervised_here(result: Converted, folder: Path) -> list[str]:
    """The rows as the trainer of the converted run prepares them, in the order of the file."""
    (folder / "my.yaml").write_text(result.to_yaml())
    run = ("output_dir=out", "use_cpu=true", "bf16=false", "report_to=none", "model_name_or_path=model", "lmbda=0")
    distilled = result.settings["recipe"] == "distill"
    config = load_run_config("my.yaml", run if distilled else run[:-1])
    data, files = load_run_datasets(config), open_model(config, "model_name_or_path")
    check_student(config, files, data)
    args = config.training_args()
    args.gradient_checkpointing = False
    trainer = Preparation(args, train_dataset=data.train, eval_dataset=data.test, processing_class=files.tokenizer)
    places = [
        data.place(split, i) for split, rows in (("train", data.train), ("test", data.test)) for i in range(len(rows))
    ]
    rows = [*named(trainer.train_dataset), *named(trainer.eval_dataset)]
    return [row for _, row in sorted(zip(places, rows, strict=True))]


def named(dataset) -> list[str]:
    tokenizer = mask_tokenizer()
    return [
        marked(
            [
                (tokenizer.decode([i], skip_special_tokens=False), label != -100)
                for i, label in zip(row["input_ids"], row["labels"], strict=True)
            ]
        )
        for row in dataset
    ]


def written(case: Case, folder: Path) -> str:
    """The rows in a file, and the configuration that names it."""
    rows = folder / "rows.json"
    if "disk_path" in case.config:
        Dataset.from_list(case.rows).save_to_disk(rows := folder / "rows")
    else:
        rows.write_text(json.dumps(case.rows))
    if case.about is not None:
        table = {"rows": {"file_name": rows.name, **case.about}}
        (folder / "dataset_info.json").write_text(json.dumps(table))
    return case.config.replace("ROWS", str(rows))


@pytest.mark.parametrize(("tool", "name"), [(tool, name) for tool, cases in CASES.items() for name in cases])
def test_the_tool_and_the_run_that_it_becomes_supervise_the_same_tokens(tool, name, folder):
    case = CASES[tool][name]
    result = converted(tool, written(case, folder), folder)
    ours, theirs = supervised_here(result, folder), RECORDED[tool]["rows"][name]
    assert len(theirs) == 3 and ours == [row.removesuffix(BEHIND) for row in theirs]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, MESSAGES),
        ({}, PAIRS),
        ({}, TEXT),
        ({"assistant_only_loss": True}, MESSAGES),
        ({"assistant_only_loss": True}, PAIRS),
        ({"completion_only_loss": False}, PAIRS),
    ],
)
def test_trl(options, rows, folder):
    (folder / "rows.json").write_text(json.dumps(rows))
    args = SFTConfig(output_dir="out", use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **options)
    trainer = SFTTrainer(
        tiny_model(vocab_size=300), args=args, train_dataset=Dataset.from_list(rows), processing_class=mask_tokenizer()
    )
    text = yaml.safe_dump({"model_name_or_path": "model", "dataset_name": "rows.json", **options})
    assert supervised_here(converted("trl", text, folder), folder) == named(trainer.train_dataset)


def test_the_collator_of_trls_gkd(folder):
    (folder / "rows.json").write_text(json.dumps(MESSAGES))
    theirs = []
    for row in MESSAGES:
        batch = DataCollatorForChatML(mask_tokenizer())([row])
        theirs.append({name: batch[name][0].tolist() for name in ("input_ids", "labels")})
    settings = {"model_name_or_path": "model", "teacher_model_name_or_path": "model", "dataset_name": "rows.json"}
    result = converted("trl", yaml.safe_dump({**settings, "lmbda": 0.5}), folder)
    assert supervised_here(result, folder) == named(theirs)
