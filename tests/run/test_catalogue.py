"""The built-in configurations are well-formed and valid. One of each kind and family trains for two steps on a tiny
random model of its architecture, with rows of the columns that its dataset has; `-m slow` trains the others."""

import importlib
import math
import re
from pathlib import Path

import pytest
import yaml
from commands import end_of, metrics, without_report
from quick_cases import slow_but
from stand_ins import DATASETS, MODELS, StandIns
from transformers import AutoTokenizer
from trl import get_quantization_config
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.schema import built_in_configs, needs_of
from liger_trainer.run.launch import launcher_arguments

NAMES = list(built_in_configs())
TRAINED = {
    "gemma3/distill_cached_1b", "gemma3/sft_qlora_4b", "gemma4/distill_lora_e2b", "gpt-oss/sft_lora_20b",
    "granite4/sft_full_micro", "lfm2/distill_full_1.2b", "llama3/distill_full_1b", "ministral3/sft_full_3b",
    "mistral/distill_lora_7b", "qwen3.5/distill_full_0.8b", "qwen3/distill_on_policy_0.6b",
    "smollm2/distill_layerdrop", "smollm2/distill_pruned", "smollm2/distill_task", "smollm2/sft_task",
    "smollm3/sft_lora_3b",
}  # fmt: skip


def kind(name: str) -> str:
    """`distill_lora` of `qwen3/distill_lora_0.6b`: the name without the size and the number of GPUs."""
    return re.sub(r"(_e?[\d.]+b|(_h)?_micro)?(_\dgpu)?$", "", name.partition("/")[2])


def source_of(name: str) -> str:
    return built_in_configs()[name].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand-ins"))


FAMILIES = "gemma3 gemma4 gpt-oss granite4 lfm2 llama3 ministral3 mistral qwen3 qwen3.5 smollm2 smollm3"


def test_the_catalogue_is_there():
    assert {name.partition("/")[0] for name in NAMES} == set(FAMILIES.split())
    for size in ("0.6b", "1.7b"):
        kinds = ("sft_full", "sft_lora", "distill_full", "distill_lora", "distill_cached", "distill_on_policy")
        assert {f"qwen3/{kind}_{size}" for kind in kinds} <= set(NAMES)
    used = [load_run_config(name) for name in NAMES]
    assert {config["model_name_or_path"] for config in used} <= MODELS.keys()
    assert {config["dataset_name"] for config in used} <= DATASETS.keys()
    for part in (lambda name: name.partition("/")[0], kind):
        assert {part(name) for name in TRAINED} == {part(name) for name in NAMES}


def test_the_table_of_the_documentation_has_all_of_them():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    head, *rows = [line for line in page.splitlines() if re.match(r"\| (family|`[a-z0-9.-]+`) \|.*\|.*\|.*\|", line)]
    kinds = [cell.strip(" `") for cell in head.strip("|").split("|")[1:]]
    listed = set()
    for row in rows:
        family, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
        for kind, cell in zip(kinds, cells, strict=True):
            listed |= {
                f"{family}/{kind}_{size.lower().replace('-', '_')}"
                for size in re.findall(r"E?[\d.]+[BM]|(?:H-)?micro", cell)
            }
    several = {re.sub(r"_\dgpu$", "", name) for name in NAMES}
    smallest = {f"smollm2/{name}_135m" for name in ("sft_full", "sft_lora", "distill_lora", "distill_cached")}
    smallest |= {f"smollm2/distill_{kind}_135m" for kind in ("full", "on_policy")}  # full: those of layers left out
    assert listed == {name for name in several if not name.startswith("smollm2/")} | smallest


@pytest.mark.parametrize("name", NAMES)
def test_a_file_opens_with_what_it_is_what_it_needs_and_the_command_and_is_valid(name):
    what, needs, command = source_of(name).splitlines()[:3]
    assert re.match(r"# (Distil|Fine-tune) \S", what) and len(what) <= 120
    promised = needs_of(source_of(name))
    assert promised is not None and len(needs) <= 120
    assert promised.gpus == (0 if name.startswith("smollm2/") else load_run_config(name)["num_processes"] or 1)
    cached, expected = "_cached" in name, f"liger-trainer run {name}"
    assert command == (f"# liger-trainer cache {name} && {expected}" if cached else f"# {expected}")
    config = load_run_config(name)
    assert config.recipe == name.partition("/")[2].partition("_")[0]
    assert config["output_dir"] == f"outputs/{name}"
    assert (config["teacher"] == "cache") == cached if config.recipe == "distill" else not cached
    args = load_run_config(name, ["use_cpu=true"]).on_this_machine().training_args()
    assert args.output_dir == config["output_dir"] and args.bf16 is False and config.source == f"{name}.yaml"

    comment = re.search(r"# ([\d x]+) = ([\d,]+) (tokens|prompts) a step", source_of(name))
    if not name.startswith("smollm2/"):
        assert comment
    if comment:  # what a step holds
        keys = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"]
        keys += ["max_length"] if comment[3] == "tokens" else []
        factors = [config[key] for key in keys if config[key] is not None]
        assert factors == [int(factor) for factor in comment[1].split(" x ")]
        assert math.prod(factors) == int(comment[2].replace(",", ""))


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("gpu")])
def test_several_gpus_are_left_to_the_launcher(name):
    config = load_run_config(name)
    count = re.search(r"_(\d)gpu$", name)[1]
    arguments = launcher_arguments(config)
    assert arguments[arguments.index("--num_processes") + 1] == count
    accelerate = yaml.safe_load(Path(arguments[arguments.index("--config_file") + 1]).read_text())
    assert accelerate["distributed_type"] == ("FSDP" if "share weights" in source_of(name) else "MULTI_GPU")


@pytest.mark.parametrize("name", [name for name in NAMES if "qlora" in name])
def test_4_bit_weights(name, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.48.0")  # of bitsandbytes
    quantization = get_quantization_config(load_run_config(name).model_args())
    assert quantization.load_in_4bit and quantization.bnb_4bit_quant_type == "nf4"
    assert str(quantization.bnb_4bit_compute_dtype) == "torch.bfloat16"


def test_answers_are_told_from_questions_only_where_trl_knows_the_template_or_it_marks_them(stand_ins):
    for name in NAMES:
        config = load_run_config(name)
        template = MODELS[config["model_name_or_path"]][1]
        answered = config["dataset_name"] in ("HuggingFaceH4/ultrachat_200k", "trl-lib/Capybara")
        assert config["assistant_only_loss"] == (answered and template is not None), name
        if template is not None:
            tokenizer = AutoTokenizer.from_pretrained(stand_ins.path(config["model_name_or_path"]))
            assert has_generation_markers(get_training_chat_template(tokenizer) or tokenizer.chat_template)


@pytest.mark.parametrize("name", slow_but(NAMES, *TRAINED))
def test_two_steps_on_a_tiny_model(name, stand_ins, tmp_path, capsys, monkeypatch):
    without_report(monkeypatch)
    changes = stand_ins.changes(load_run_config(name), tmp_path)
    config = load_run_config(name, changes)
    if config.recipe == "distill" and config["teacher"] == "cache":
        assert end_of("cache", name, *changes) == 0, capsys.readouterr().err
    importlib.import_module(f"liger_trainer.recipes.{config.recipe}").main(config.on_this_machine())
    written = metrics(tmp_path / "out")
    assert written["training"]["steps"] == 2
    assert written["before"]["loss"] != written["after"]["loss"]
    assert (tmp_path / "out" / "adapter_config.json").exists() == (config["use_peft"] and not config.drops_layers())
    trained = written["training"]["trainable_parameters"] / written["training"]["parameters"]
    assert (trained < 1) == (config["use_peft"] or config["freeze_vision_tower"])
