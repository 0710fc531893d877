"""Tiny random models and rows in place of the real ones that configurations name: the same architectures, the same
columns and splits, the chat templates that TRL knows."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import transformers
from byte_level import byte_level
from datasets import Dataset, DatasetDict
from tiny import SIZES, VOCAB, WORDS, chats, completions, tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils

from liger_trainer.common.weights import auto_class
from liger_trainer.config.run_config import RunConfig

# model id: (its architecture here, TRL's name for a chat template as its own if answers are marked in it, or TRL can)
MODELS = {
    "demo:smollm2-135m-instruct": ("llama", None),
    "google/gemma-4-E2B-it": ("gemma4", None),
    "google/gemma-4-E4B-it": ("gemma4", None),
    "LiquidAI/LFM2-1.2B": ("lfm2", "lfm2"),
    "LiquidAI/LFM2-2.6B": ("lfm2", "lfm2"),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", "lfm2_training"),  # ChatML with marks
    "google/gemma-3-1b-it": ("gemma3_text", "gemma3"),
    "google/gemma-3-4b-it": ("gemma3", "gemma3"),
    "ibm-granite/granite-4.0-1b": ("granitemoehybrid", None),
    "ibm-granite/granite-4.0-h-micro": ("granite hybrid", None),
    "ibm-granite/granite-4.0-micro": ("granitemoehybrid", None),
    "openai/gpt-oss-20b": ("gpt_oss", "gptoss"),
    "outputs/smollm2/sft_task": ("llama", None),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", None),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", None),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", None),
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": ("mistral3", None),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": ("mistral3", None),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", None),
    "Qwen/Qwen3.5-0.8B": ("qwen3_5", "qwen3_5_nothink"),
    "Qwen/Qwen3.5-2B": ("qwen3_5", "qwen3_5_nothink"),
    "Qwen/Qwen3.5-4B": ("qwen3_5", "qwen3_5_think"),
    "Qwen/Qwen3.5-9B": ("qwen3_5", "qwen3_5_think"),
    "Qwen/Qwen3-0.6B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-1.7B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-4B": ("qwen3", "qwen3"),
    "Qwen/Qwen3-8B": ("qwen3", "qwen3"),
}
LAYERS = {**SIZES, "num_hidden_layers": 3}
BYTE_LEVEL = {"vocab_size": 512, "pad_token_id": None, "eos_token_id": None}  # of a class that reads no other tokenizer
GEMMA = {"head_dim": 8, "sliding_window": 8}
GRANITE = {
    **LAYERS, "shared_intermediate_size": LAYERS["intermediate_size"], "num_local_experts": 0, "num_experts_per_tok": 0,
    "position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "logits_scaling": 8.0, "embedding_multiplier": 12.0, "tie_word_embeddings": True,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
# architecture: (configuration class, its options): those of the models above that change which code runs
ARCHITECTURES = {
    "llama": ("LlamaConfig", {**LAYERS, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2Config", {**LAYERS, "layer_types": ["conv", "full_attention", "conv"]}),
    "smollm3": ("SmolLM3Config", {**LAYERS, "no_rope_layer_interval": 2}),
    "qwen3": ("Qwen3Config", {**LAYERS, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True,
            "text_config": {
                **LAYERS, **BYTE_LEVEL, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "tie_word_embeddings": True,
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14,
                "out_hidden_size": LAYERS["hidden_size"], "num_position_embeddings": 16,
            },
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", {**LAYERS, **GEMMA}),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**LAYERS, **GEMMA}, "vision_config": VISION, "mm_tokens_per_image": 4,
            "image_token_index": VOCAB - 6, "boi_token_index": VOCAB - 7, "eoi_token_index": VOCAB - 8,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None,
            "text_config": {
                **LAYERS, **GEMMA, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 4, "use_double_wide_mlp": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 8, "patch_size": 8, "position_embedding_size": 16,
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**LAYERS, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": True,
            "text_config": {**LAYERS, "model_type": "ministral3", "head_dim": 8, "tie_word_embeddings": True},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}, "image_token_index": VOCAB - 6,
        },
    ),
    "mistral": ("MistralConfig", {**LAYERS, "head_dim": 8, "sliding_window": None}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**GRANITE, "layer_types": ["full_attention"] * 3}),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        {**GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
}  # fmt: skip


def _byte_level() -> PreTrainedTokenizerFast:
    words = [" ".join([*WORDS, "user", "assistant"])] * 4
    size = BYTE_LEVEL["vocab_size"] - 1
    return byte_level(words, size, ("<|im_end|>", "<|im_start|>", "<think>", "</think>"))


def _capybara() -> DatasetDict:
    splits = {"train": chats(16), "test": chats(4, seed=1)}
    return DatasetDict({name: rows.add_column("source", ["made up"] * len(rows)) for name, rows in splits.items()})


def _ultrachat() -> DatasetDict:
    rows = chats(16)
    columns = {"prompt": [row["messages"][0]["content"] for row in rows], "messages": rows["messages"]}
    splits = ("train_sft", "test_sft", "train_gen", "test_gen")
    return DatasetDict({split: Dataset.from_dict(columns) for split in splits})


def _prompts() -> DatasetDict:
    def asked(row):
        return {"prompt": [{"role": "user", "content": row["prompt"]}], "solution": row["completion"]}

    splits = {"train": completions(16), "test": completions(4, seed=1)}
    return DatasetDict({name: rows.map(asked, remove_columns=["completion"]) for name, rows in splits.items()})


# dataset id: rows with its splits, and with its columns as far as they matter
DATASETS = {
    "demo:python_docstrings": lambda: DatasetDict(train=completions(16), test=completions(4, seed=1)),
    "reasoning_gym:chain_sum": lambda: DatasetDict(train=completions(16), test=completions(4, seed=1)),
    "HuggingFaceH4/ultrachat_200k": _ultrachat,
    "trl-lib/Capybara": _capybara,
    "trl-lib/DeepMath-103K": _prompts,
    "trl-lib/ultrafeedback-prompt": lambda: _prompts().remove_columns("solution"),
}
SHORT = (
    "max_steps=2", "max_length=48", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
    "per_device_eval_batch_size=2", "max_eval_rows=2", "num_sample_completions=1", "max_new_tokens=2",
    "logging_steps=1", "save_strategy=no", "use_cpu=true", "disable_tqdm=true",
)  # fmt: skip
LEFT_OUT = (  # kernels of bitsandbytes; a part of a dataset of the hub; what is asked of generated rows
    "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "dataset_config", "task_config",
)  # fmt: skip
UNPACKED = ("qwen3_5",)  # which packs with fla-core, which tests need not have


class StandIns:
    """Directories below `root` that stand in for models and datasets by id, each made when it is first asked for."""

    def __init__(self, root: Path):
        self.root = root

    def path(self, name: str) -> str:
        folder = self.root / name.replace("/", "--").replace(":", "--")
        if not folder.exists():
            if name in DATASETS:
                DATASETS[name]().save_to_disk(str(folder))
            else:
                self._make_model(name, folder)
        return str(folder)

    def _make_model(self, name: str, folder: Path) -> None:
        architecture, template = MODELS[name]
        class_name, options = ARCHITECTURES[architecture]
        transformers.set_seed(zlib.crc32(name.encode()))  # another model for each name
        config = getattr(transformers, class_name)(**options)
        model = auto_class(config).from_config(config)
        model.save_pretrained(folder)
        tokenizer = tiny_tokenizer() if config.get_text_config().vocab_size == VOCAB else _byte_level()
        if template is not None:
            tokenizer.chat_template = getattr(chat_template_utils, f"{template}_chat_template")
        tokenizer.save_pretrained(folder)

    def changes(self, config: RunConfig, folder: Path) -> list[str]:
        """The settings that make a run of `config` short, on these models and rows, with its files below `folder`.
        All else is what the configuration says."""
        return [*SHORT, *self._names(config), *self._files(config, folder)]

    def _names(self, config: RunConfig) -> Iterator[str]:
        for key in ("model_name_or_path", "teacher_model_name_or_path", "dataset_name"):
            if config.values.get(key) in (*MODELS, *DATASETS):
                yield f"{key}={self.path(config[key])}"
        if (config["keep_every_nth_layer"] or 0) > LAYERS["num_hidden_layers"]:
            yield "keep_every_nth_layer=2"
        if max(config["keep_layers"] or [0]) >= LAYERS["num_hidden_layers"]:
            yield "keep_layers=[0,2]"
        if config.given("max_completion_length"):
            yield "max_completion_length=4"
        if config.given("cache_entries"):
            yield "cache_entries=16"  # so that there is a rest to draw from
        yield from (f"~{key}" for key in LEFT_OUT if config.given(key))
        if MODELS[config["model_name_or_path"]][0] in UNPACKED:
            yield "packing=false"
        if config["accelerate_config"] == "fsdp2":
            yield "num_sample_completions=0"  # a sharded model is not sampled from

    def _files(self, config: RunConfig, folder: Path) -> Iterator[str]:
        yield f"output_dir={folder / 'out'}"
        if config.given("teacher_cache_dir"):
            yield f"teacher_cache_dir={folder / 'cache'}"
