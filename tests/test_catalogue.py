"""The built-in configurations: each is well-formed, valid, and trains for two steps on a tiny random model of its
architecture, with rows of the columns that its dataset has."""

import importlib
import json
import math
import re
import zlib
from pathlib import Path

import pytest
import transformers
import yaml
from datasets import Dataset, DatasetDict
from tiny import SIZES, VOCAB, chats, completions, tiny_tokenizer
from trl import get_quantization_config
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from liger_trainer.cli import main
from liger_trainer.config_source import built_in_configs
from liger_trainer.launching import launcher_arguments
from liger_trainer.run_config import RunConfig, load_run_config

pytestmark = pytest.mark.usefixtures("chunked_torch")

NAMES = list(built_in_configs())
# model id: (its architecture here, the file of TRL with its chat template where TRL can mark the answers in it)
MODELS = {
    "demo:smollm2-135m-instruct": ("llama", None),
    "google/gemma-3-1b-it": ("gemma3_text", "gemma3"),
    "google/gemma-3-4b-it": ("gemma3", "gemma3"),
    "ibm-granite/granite-3.3-2b-instruct": ("granite", None),
    "ibm-granite/granite-3.3-8b-instruct": ("granite", None),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", None),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", None),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", None),
    "microsoft/Phi-4-mini-instruct": ("phi3", None),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", None),
    "Qwen/Qwen3-0.6B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-1.7B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-4B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-8B": ("qwen3", "qwen3"),
}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
GEMMA = {"head_dim": 8, "sliding_window": 8}
# architecture: (configuration class, options beside SIZES), as in the models above in what changes the code that runs
ARCHITECTURES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "rope_theta": 500000.0}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3TextConfig", GEMMA),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4,
            "image_token_index": VOCAB - 6, "boi_token_index": VOCAB - 7, "eoi_token_index": VOCAB - 8,
        },
    ),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": None}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.1}),
}  # fmt: skip


def _ultrachat() -> DatasetDict:
    rows = chats(16)
    columns = {"prompt": [row["messages"][0]["content"] for row in rows], "messages": rows["messages"]}
    splits = ("train_sft", "test_sft", "train_gen", "test_gen")
    return DatasetDict({split: Dataset.from_dict(columns) for split in splits})


# dataset id: tiny rows with its splits and its columns, as far as they matter
DATASETS = {
    "demo:python_docstrings": lambda: DatasetDict(train=completions(16), test=completions(4, seed=1)),
    "HuggingFaceH4/ultrachat_200k": _ultrachat,
    "trl-lib/Capybara": lambda: DatasetDict(
        train=chats(16).add_column("source", ["made up"] * 16),
        test=chats(4, seed=1).add_column("source", ["made up"] * 4),
    ),
}
SMALL = [
    "max_steps=2", "max_length=48", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
    "per_device_eval_batch_size=2", "max_eval_rows=2", "num_sample_completions=1", "max_new_tokens=2",
    "logging_steps=1", "save_strategy=no", "use_cpu=true", "disable_tqdm=true",
]  # fmt: skip
QUANTIZED = ("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")  # kernels of bitsandbytes


def source_of(name: str) -> str:
    return built_in_configs()[name].read_text(encoding="utf-8")


def _saved_tokenizer(folder: Path, template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    if template is not None:
        file = Path(transformers.__file__).parents[1] / "trl" / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The directory that stands in for a model id or a dataset id; each is made once."""
    root = tmp_path_factory.mktemp("tiny")

    def directory(name: str) -> str:
        folder = root / name.replace("/", "--").replace(":", "--")
        if folder.exists():
            return str(folder)
        if name in DATASETS:
            DATASETS[name]().save_to_disk(str(folder))
            return str(folder)
        architecture, template = MODELS[name]
        class_name, options = ARCHITECTURES[architecture]
        sizes = {**SIZES, "num_hidden_layers": 3}
        options = {**options, "text_config": {**sizes, **GEMMA}} if "text_config" in options else {**sizes, **options}
        transformers.set_seed(zlib.crc32(name.encode()))
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**options))
        model.save_pretrained(folder)
        _saved_tokenizer(folder, template)
        return str(folder)

    return directory


def stand_ins(config: RunConfig, tiny, folder: Path) -> list[str]:
    """The settings that put tiny models and rows in place of the real ones, and nothing else of the file's choices."""
    changes = [*SMALL, f"output_dir={folder / 'out'}"]
    for key in ("model_name_or_path", "teacher_model_name_or_path", "dataset_name"):
        if config.values.get(key) is not None:
            changes.append(f"{key}={tiny(config[key])}")
    if config.given("teacher_cache_dir"):
        changes.append(f"teacher_cache_dir={folder / 'cache'}")
    return changes + [f"~{key}" for key in (*QUANTIZED, "dataset_config") if config.given(key)]


def test_the_catalogue_is_there():
    families = {name.partition("/")[0] for name in NAMES}
    assert families == {"gemma3", "granite", "llama3", "mistral", "phi4", "qwen3", "smollm2"}
    for size in ("0.6b", "1.7b"):
        kinds = ("sft_full", "sft_lora", "distill_full", "distill_lora", "distill_cached")
        assert {f"qwen3/{kind}_{size}" for kind in kinds} <= set(NAMES)
    used = [load_run_config(name) for name in NAMES]
    assert {config["model_name_or_path"] for config in used} <= MODELS.keys()
    assert {config["dataset_name"] for config in used} <= DATASETS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_opens_with_what_it_is_what_it_needs_and_the_command(name):
    what, needs, command = source_of(name).splitlines()[:3]
    assert re.match(r"# (Distil|Fine-tune) \S", what) and len(what) <= 120
    assert re.match(r"# Needs \S", needs) and len(needs) <= 120
    cached = "_cached" in name
    expected = f"liger-trainer run {name}"
    assert command == (f"# liger-trainer cache {name} && {expected}" if cached else f"# {expected}")
    config = load_run_config(name)
    assert config.recipe == name.partition("/")[2].partition("_")[0]
    assert config["output_dir"] == f"outputs/{name}"
    assert (config["teacher"] == "cache") == cached if config.recipe == "distill" else not cached


@pytest.mark.parametrize("name", NAMES)
def test_tokens_a_step_are_those_the_comment_says(name):
    said = re.search(r"# ([\d x]+) = ([\d,]+) tokens a step", source_of(name))
    if not name.startswith("smollm2/"):
        assert said
    if said:
        config = load_run_config(name)
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes", "max_length")
        factors = [config[key] for key in keys if config[key] is not None]
        assert factors == [int(factor) for factor in said[1].split(" x ")]
        assert math.prod(factors) == int(said[2].replace(",", ""))


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


def test_answers_are_told_from_questions_only_where_trl_knows_the_template(tiny):
    for name in NAMES:
        config = load_run_config(name)
        template = MODELS[config["model_name_or_path"]][1]
        assert config["assistant_only_loss"] == (template is not None), name
        if template is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(tiny(config["model_name_or_path"]))
            assert not has_generation_markers(tokenizer.chat_template)
            assert has_generation_markers(get_training_chat_template(tokenizer))


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_on_a_tiny_model(name, tiny, tmp_path, capsys):
    changes = stand_ins(load_run_config(name), tiny, tmp_path)
    config = load_run_config(name, changes)
    if config.recipe == "distill" and config["teacher"] == "cache":
        with pytest.raises(SystemExit) as stopped:
            main(["cache", name, *changes])
        assert not stopped.value.code, capsys.readouterr().err
    importlib.import_module(f"liger_trainer.recipes.{config.recipe}").main(config.on_this_machine())
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert written["training"]["steps"] == 2
    assert written["before"]["loss"] != written["after"]["loss"]
    assert (tmp_path / "out" / "adapter_config.json").exists() == (config["use_peft"] and not config.drops_layers())
    trained = written["training"]["trainable_parameters"] / written["training"]["parameters"]
    assert (trained < 1) == config["use_peft"]
