"""LLaMA-Factory: supervised fine-tuning, full or LoRA, also of quantized weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from . import OF_TRANSFORMERS, Default, ForeignConfig, NotHere, NotNeeded, Settings, Tool
from .rows import (
    ALPACA,
    FUSED,
    NO_EVAL_ROWS,
    chat_columns,
    datasets_of,
    learned_alike,
    one_line,
    share_or_number,
    when_true,
)

_TABLE = "dataset_info.json"
_DTYPES = {"bf16": "bfloat16", "pure_bf16": "bfloat16", "fp16": "float16"}
_TAGS = "rename the roles in the rows."
_PREFERENCE = "only supervised fine-tuning and distillation have a recipe, and these rows are of preferences."
_PREDICTION = "a run completes num_sample_completions prompts, greedily."
_PARTS = "train adapters instead, with use_peft and lora_target_modules."


def _stage(value: Any, source: ForeignConfig) -> Settings:
    if value != "sft":
        raise ConfigError(f"{source.places['stage']}: stage: only sft converts, got {value!r}.")
    return {}


def _method(value: Any, source: ForeignConfig) -> Settings:
    if value not in ("lora", "full"):
        raise NotHere("expected lora or full; choose what is trained with lora_target_modules.")
    return {}  # _defaults sets what it means


def _names(value: Any) -> list[str]:
    return one_line(value) if isinstance(value, str) else list(value)


def _modules(value: Any, source: ForeignConfig) -> Settings:
    names = _names(value or [])
    return {"lora_target_modules": "all-linear" if names == ["all"] else names} if names else {}


def _datasets(value: Any, source: ForeignConfig) -> Settings:
    """Read datasets by name, as dataset_info.json describes them if it is where the configuration says."""
    folder = Path(source.take("dataset_dir", "data"))
    # LLaMA-Factory looks from where it is started: from the file, or from here
    found = [path for path in (Path(source.label).parent / folder / _TABLE, folder / _TABLE) if path.is_file()]
    known = json.loads(found[0].read_text(encoding="utf-8")) if found else {}
    entries, learned = [], {}
    for name in _names(value):
        at, about = f"{_TABLE}.{name}", known.get(name)
        # ONLINE: every name is a dataset on the hub
        if about is None and str(folder) != "ONLINE":
            source.note(f"{name} is a name in {_TABLE}, which was not found; put its file or hub id here.")
        # its keys are then converted, or reported, like those of the configuration
        source.add(at, about or {"hf_hub_url": name}, str(found[0]) if found else source.label)
        entries.append(_entry(name, at, found[0].parent if found else folder, source))
        learned[at] = _supervised(about is None or _is_chat(at, source), source)
    return {**datasets_of(entries, source), **learned_alike(learned, source)}


def _entry(name: str, at: str, folder: Path, source: ForeignConfig) -> dict[str, Any]:
    """Return where the rows of an entry of dataset_info.json are."""
    hub, file = source.take(f"{at}.hf_hub_url"), source.take(f"{at}.file_name")
    if not (hub or file):
        source.note("its rows are neither in a file nor on Hugging Face's hub; name where they are here.", at)
    path = hub or (str(folder / file) if file else name)
    if source.get(f"{at}.folder"):
        source.note("only this folder of the dataset is read: data_dir.", f"{at}.folder")
    keys = {"name": "subset", "split": "split", "data_dir": "folder"}
    return {"path": path, **{ours: source.take(f"{at}.{theirs}") for ours, theirs in keys.items()}}


def _is_chat(at: str, source: ForeignConfig) -> bool:
    """Whether an entry is about chats; note columns that won't be found by name, and answers that are not learned."""
    # dataset_info.json maps its names to the columns of the file
    columns = f"{at}.columns"
    if source.take(f"{at}.formatting", "alpaca") != "alpaca":
        column = source.take(f"{columns}.messages", "conversations")
        fields = source.take(f"{at}.tags.role_tag", "from"), source.take(f"{at}.tags.content_tag", "value")
        chat_columns({f"{columns}.messages": column, f"{at}.tags": fields}, source)
        return True
    for key, here in ALPACA.items():
        name = source.take(f"{columns}.{key}", here)
        if name != here:
            source.note(f"the column {name} must be called {here}.", f"{columns}.{key}")
    if source.get(f"{columns}.history"):
        source.note("these answers are context here; LLaMA-Factory learns them too.", f"{columns}.history")
    return False


def _supervised(chats: bool, source: ForeignConfig) -> Settings:
    """Supervise all answers; with mask_history only the last, with train_on_prompt everything."""
    if source.get("mask_history"):
        # mask_history counts even with train_on_prompt
        return {"last_turn_only": True}
    if source.get("train_on_prompt"):
        return {"completion_only_loss": False}
    return {"assistant_only_loss": True} if chats else {}


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "What the chat template writes after an answer, such as a line break, is supervised as the template marks it."
    yield "Of a row longer than max_length the end is cut off; LLaMA-Factory cuts ends of its questions and answers."
    yield f"Columns input, system, history and tools are read where rows have them, there where {_TABLE} names them."
    if source.get("packing") or source.get("neat_packing"):
        yield "A packed row has max_length tokens; in LLaMA-Factory it has one fewer."


def _quantized(value: Any, source: ForeignConfig) -> Settings:
    # taken in any case: it has no effect without quantisation
    double = source.take("double_quantization")
    if not value:
        return {}
    if value not in (4, 8):
        raise NotHere("expected 4 or 8 bits.")
    return {"load_in_8bit": True} if value == 8 else {"load_in_4bit": True, "use_bnb_nested_quant": double is not False}


def _attention(value: Any, source: ForeignConfig) -> Settings:
    # what LLaMA-Factory calls them
    words = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
    if value in (None, "auto"):
        return {}
    return {"attn_implementation": words.get(value, value)}


def _template(value: Any, source: ForeignConfig) -> Settings:
    if value:
        source.note("the chat template of the model's own tokenizer is used; another one with chat_template_path.")
    return {}


def _packing(value: Any, source: ForeignConfig) -> Settings:
    if value and not source.get("neat_packing"):
        source.note("documents of a packed row do not see each other here; in LLaMA-Factory only with neat_packing.")
    return {"packing": bool(value)}


def _frozen(value: Any, source: ForeignConfig) -> Settings:
    if value is False:
        return {}
    raise NotNeeded("see freeze_vision_tower under To check.")


_DEFAULTS: tuple[Default, ...] = (
    ("learning_rate", 5e-5, "learning_rate"),
    ("cutoff_len", 2048, "max_length"),
    ("bf16", False, "bf16"),
)


def _defaults(source: ForeignConfig) -> Iterator[Default]:
    yield from _DEFAULTS
    half = next((dtype for key, dtype in _DTYPES.items() if source.get(key)), None)
    if source.get("finetuning_type", "lora") == "full":  # weights that are trained are kept in fp32
        yield "pure_bf16", "bfloat16" if source.get("pure_bf16") else "float32", "dtype"
    else:
        yield "bf16", half or "auto", "dtype"
    if source.get("finetuning_type", "lora") == "lora":
        rank = source.get("lora_rank", 8)
        yield "finetuning_type", True, "use_peft"
        yield "lora_rank", 8, "lora_r"
        # LLaMA-Factory's default depends on the rank
        yield "lora_alpha", 2 * rank, "lora_alpha"
        yield "lora_dropout", 0.0, "lora_dropout"
        yield "lora_target", "all-linear", "lora_target_modules"
    if source.get("freeze_vision_tower") is not False:
        source.note(
            "of a model that reads images, LLaMA-Factory trains neither the vision tower nor the projector. For such a "
            "model set freeze_vision_tower: true, and name modules of the language model in lora_target_modules.",
            "freeze_vision_tower",
        )


TOOL = Tool(
    name="LLaMA-Factory",
    names={
        "cutoff_len": "max_length",
        "preprocessing_num_workers": "dataset_num_proc",
        "lora_rank": "lora_r",
        "quantization_type": "bnb_4bit_quant_type",
        "overwrite_output_dir": "overwrite_output_dir",
    },
    values={
        "stage": _stage,
        "finetuning_type": _method,
        "lora_target": _modules,
        "lora_alpha": lambda value, source: {"lora_alpha": value} if value else {},
        "dataset": _datasets,
        "additional_target": lambda value, source: {"lora_modules_to_save": _names(value)} if value else {},
        "val_size": share_or_number,
        "quantization_bit": _quantized,
        "flash_attn": _attention,
        "template": _template,
        "disable_gradient_checkpointing": lambda value, source: {"gradient_checkpointing": not value},
        "disable_shuffling": when_true(train_sampling_strategy="sequential"),
        "packing": _packing,
        "neat_packing": when_true(packing=True),
        **dict.fromkeys(("train_on_prompt", "mask_history"), lambda value, source: {}),  # read together with dataset
        "use_dft_loss": when_true(loss_type="dft"),
        "pure_bf16": lambda value, source: {},  # read with the dtype
        "freeze_vision_tower": _frozen,
        "freeze_multi_modal_projector": _frozen,
    },
    unneeded={
        "do_eval": "a run is always evaluated.",
        "overwrite_cache": "datasets renews its cache by itself.",
        "preprocessing_batch_size": "rows are tokenized in batches of datasets' own size.",
        "plot_loss": "metrics.json has the curves.",
        "enable_liger_kernel": FUSED,
        "use_unsloth": FUSED,
        "use_v1_kernels": FUSED,
        "use_fast_tokenizer": "tokenizers are fast where there is a fast one.",
        "use_reentrant_gc": "gradients are the same either way.",
        "include_effective_tokens_per_second": "tokens per second are always counted.",
        f"{_TABLE}.*_hub_url": "of hubs, only Hugging Face's is read.",
        "media_dir": "files of images are looked for in the folder of the rows.",
    },
    same={
        "do_train": ((True,), "a run trains."),
        "quantization_method": (re.compile("bnb|bitsandbytes"), "only bitsandbytes quantises here."),
        "infer_backend": (("hf", "huggingface"), _PREDICTION),
        "ignore_pad_token_for_loss": ((True,), "padding is never learned."),
        "freeze_language_model": ((False,), _PARTS),
        "mix_strategy": (("concat",), "rows of all datasets are taken once."),
        f"{_TABLE}.*.ranking": ((False,), _PREFERENCE),
        f"{_TABLE}.*.columns.system": (("system",), "the column must be called system."),
        f"{_TABLE}.*.columns.tools": (("tools",), "the column must be called tools."),
        f"{_TABLE}.*.columns.images": (("images",), "the column must be called images."),
        f"{_TABLE}.*.tags.user_tag": (("human", "user"), _TAGS),
        f"{_TABLE}.*.tags.assistant_tag": (("gpt", "assistant"), _TAGS),
        f"{_TABLE}.*.tags.system_tag": (("system",), _TAGS),
    },
    unsupported={
        "max_samples": "shorten the dataset itself, or set max_steps.",
        "eval_dataset": NO_EVAL_ROWS,
        "streaming": "every row is checked before training, so a stream is not supported.",
        "adapter_name_or_path": "merge that adapter first: liger-trainer merge RUN_DIR OUT.",
        "rope_scaling": "set it in the model's config.json.",
        "freeze_*": _PARTS,
        "predict_with_generate": _PREDICTION,
        "max_length": "LLaMA-Factory's max_length is the length of predictions; the length of rows is cutoff_len.",
        "max_new_tokens": _PREDICTION,
        "do_sample": _PREDICTION,
        "do_predict": _PREDICTION,
        f"{_TABLE}.*.num_samples": "shorten the dataset itself, or name a part of the split.",
        f"{_TABLE}.*.columns.chosen": _PREFERENCE,
        f"{_TABLE}.*.columns.rejected": _PREFERENCE,
        f"{_TABLE}.*.columns.kto_tag": _PREFERENCE,
        f"{_TABLE}.*.tags.*": _TAGS,
    },
    passes={"": OF_TRANSFORMERS},
    nulls=True,
    defaults=_defaults,
    differences=_differences,
)
