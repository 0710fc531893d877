"""LLaMA-Factory: supervised fine-tuning, full or LoRA, also of quantized weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from . import ForeignConfig, NotHere, Settings, Tool
from .rows import adapter_modules, chat_column, datasets_of, share_or_number, when_true

_KERNELS = "the layers and the loss are fused anyway."
_TABLE = "dataset_info.json"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}


def _stage(value: Any, source: ForeignConfig) -> Settings:
    if value != "sft":
        raise ConfigError(f"{source.places['stage']}: stage: only sft converts, got {value!r}.")
    return {}


def _method(value: Any, source: ForeignConfig) -> Settings:
    if value not in ("lora", "full"):
        raise NotHere("expected lora or full; choose what is trained with lora_target_modules.")
    return {}  # _defaults sets what it means


def _names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value)
    return [name.strip() for name in names]


def _datasets(value: Any, source: ForeignConfig) -> Settings:
    """Read datasets by name, as dataset_info.json describes them if it is where the configuration says."""
    folder = Path(source.get("dataset_dir", "data"))
    found = [path for path in (Path(source.label).parent / folder / _TABLE, folder / _TABLE) if path.is_file()]
    known = json.loads(found[0].read_text(encoding="utf-8")) if found else {}
    entries, chats = [], False
    for name in _names(value):
        about = known.get(name, {})
        if "file_name" in about:
            entries.append({"path": str(found[0].parent / about["file_name"])})
        else:
            entries.append({"path": about.get("hf_hub_url", name), "name": about.get("subset")})
        if not about:
            source.note(f"{name} is a name in {_TABLE}, which was not found; put its file or hub id here.")
        chats = chats or not about or about.get("formatting", "alpaca") != "alpaca"
        _columns(name, about, source)
    return {**datasets_of(entries, source), **_supervised(chats, source)}


def _columns(name: str, about: dict[str, Any], source: ForeignConfig) -> None:
    """Note columns that won't be found by name, and which parts of Alpaca rows only LLaMA-Factory learns."""
    columns = about.get("columns", {})
    if about.get("formatting", "alpaca") != "alpaca":
        chat_column(columns.get("messages"), name, source)
        return
    for key, here in _ALPACA.items():
        if columns.get(key) not in (None, here):
            source.note(f"{name}: the column {columns[key]} must be called {here}.")
    if columns.get("history"):
        source.note(f"{name}: the answers in {columns['history']} are context here; LLaMA-Factory learns them too.")


def _supervised(chats: bool, source: ForeignConfig) -> Settings:
    """Supervise all answers; with mask_history only the last, with train_on_prompt everything."""
    if source.get("mask_history"):
        return {"last_turn_only": True}
    if source.get("train_on_prompt"):
        return {"completion_only_loss": False}
    return {"assistant_only_loss": True} if chats else {}


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "What the chat template writes after an answer, such as a line break, is supervised as the template marks it."
    yield "Of a row longer than max_length the end is cut off; LLaMA-Factory cuts ends of its questions and answers."


def _quantized(value: Any, source: ForeignConfig) -> Settings:
    if not value:
        return {}
    if value not in (4, 8):
        raise NotHere("expected 4 or 8 bits.")
    return {f"load_in_{value}bit": True}


def _attention(value: Any, source: ForeignConfig) -> Settings:
    words = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
    if value in (None, "auto"):
        return {}
    if value not in words:
        raise NotHere(f"expected one of {', '.join(words)}, auto.")
    return {"attn_implementation": words[value]}


def _template(value: Any, source: ForeignConfig) -> Settings:
    if value:
        source.note("the chat template of the model's own tokenizer is used; another one with chat_template_path.")
    return {}


def _checkpointing_off(value: Any, source: ForeignConfig) -> Settings:
    return {"gradient_checkpointing": not value}


def _shared_packing(value: Any, source: ForeignConfig) -> Settings:
    return {"packing": True, "packing_strategy": "bfd"} if value else {}


def _defaults(source: ForeignConfig) -> Settings:
    """Set LLaMA-Factory's defaults where they differ from TRL's."""
    here: Settings = {"recipe": "sft", "learning_rate": 5e-5, "max_length": 2048}
    if source.get("bf16") or source.get("pure_bf16"):
        here["dtype"] = "bfloat16"
    if source.get("finetuning_type", "lora") == "lora":
        rank = source.get("lora_rank", 8)
        here |= {"use_peft": True, "lora_r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0}
        here["lora_target_modules"] = "all-linear"
    return here


TOOL = Tool(
    name="LLaMA-Factory",
    names={
        "cutoff_len": "max_length",
        "preprocessing_num_workers": "dataset_num_proc",
        "lora_rank": "lora_r",
        "lora_alpha": "lora_alpha",
    },
    values={
        "stage": _stage,
        "finetuning_type": _method,
        "lora_target": lambda value, source: adapter_modules(value, source) if value else {},
        "dataset": _datasets,
        "dataset_dir": lambda value, source: {},
        "additional_target": lambda value, source: {"lora_modules_to_save": _names(value)} if value else {},
        "val_size": share_or_number,
        "quantization_bit": _quantized,
        "quantization_type": lambda value, source: {"bnb_4bit_quant_type": value} if value else {},
        "double_quantization": when_true(use_bnb_nested_quant=True),
        "flash_attn": _attention,
        "template": _template,
        "disable_gradient_checkpointing": _checkpointing_off,
        "neat_packing": _shared_packing,
        **dict.fromkeys(("train_on_prompt", "mask_history"), lambda value, source: {}),  # read together with dataset
        "use_dft_loss": when_true(loss_type="dft"),
        "pure_bf16": when_true(bf16=True),
    },
    unneeded={
        "do_train": "a run trains.",
        "do_eval": "a run is always evaluated.",
        "overwrite_cache": "datasets renews its cache by itself.",
        "plot_loss": "metrics.json has the curves.",
        "enable_liger_kernel": _KERNELS,
        "use_unsloth": _KERNELS,
        "quantization_method": "bitsandbytes, as here.",
        "use_fast_tokenizer": "tokenizers are fast where there is a fast one.",
        "dataloader_num_workers": "rows are tokenized before training starts.",
    },
    unsupported={
        "max_samples": "shorten the dataset itself, or set max_steps.",
        "eval_dataset": "rows are held out of the training rows; see holdout_fraction and dataset_test_split.",
        "adapter_name_or_path": "merge that adapter first: liger-trainer merge RUN_DIR OUT.",
        "rope_scaling": "set it in the model's config.json.",
        "freeze_trainable_layers": "train adapters instead, with use_peft and lora_target_modules.",
        "predict_with_generate": "a run completes num_sample_completions prompts.",
    },
    passes=("",),
    defaults=_defaults,
    differences=_differences,
)
