"""axolotl: supervised fine-tuning, full, LoRA and QLoRA."""

from collections.abc import Iterator
from typing import Any

from ...trainers.qat_config import INT4, INT8, NVFP4
from . import ForeignConfig, NotHere, Settings, Tool
from .rows import (
    OTHER_ROWS,
    adapter_modules,
    chat_column,
    datasets_of,
    optimizer,
    share_or_number,
    when_true,
)

_TEXTS = ("completion", "pretrain")
_OTHER_COLUMNS = ("load_qa", "load_camel_ai")
_WHAT_IS_LEARNED = {  # in chats; the first values are axolotl's defaults, which mean the same as ours
    "roles_to_train": (None, ["assistant"], ["gpt"]),
    "train_on_eos": (None, "turn"),
    "train_on_eot": (None, "turn"),
    "message_field_training": (None,),
    "message_field_training_detail": (None,),
    "drop_system_message": (None, False),
    "roles": (None,),
}
_KERNELS = "the layers and the loss are fused anyway."
_LOGPROBS = (
    "axolotl distils from log-probabilities in the rows or from a server; name a teacher in teacher_model_name_or_path."
)
_SHARDING = "sharding is accelerate's: `accelerate_config: fsdp2`, or one of its files."


def _datasets(value: Any, source: ForeignConfig) -> Settings:
    entries, here = [], {}
    for entry in value or []:
        here.update(_supervised(entry, source))
        files = entry.get("data_files")
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        if isinstance(files, list):
            raise NotHere("several data_files of one dataset; join them, or list them as datasets of their own.")
        path = files or entry["path"]
        entries.append({"path": path, "name": entry.get("name"), "split": entry.get("split")})
    return {**datasets_of(entries, source), **here} if entries else {}


def _kind(entry: dict[str, Any]) -> str:
    """Return chat, alpaca, text or other."""
    kind = entry.get("type")
    if kind == "chat_template" or kind in _TEXTS:
        return "text" if kind in _TEXTS else "chat"
    alpaca = isinstance(kind, str) and kind.startswith("alpaca") and not kind.endswith(_OTHER_COLUMNS)
    return "alpaca" if alpaca else "other"


def _supervised(entry: dict[str, Any], source: ForeignConfig) -> Settings:
    """Supervise the answers of a chat and the output of Alpaca; with train_on_inputs prompts too, but no header."""
    kind, on_prompt = _kind(entry), source.get("train_on_inputs")
    if kind == "text":
        return {"dataset_text_field": entry["field"]} if entry.get("field") else {}
    if kind == "chat":
        chat_column(entry.get("field_messages"), entry["path"], source)
        for key, like_here in _WHAT_IS_LEARNED.items():
            if entry.get(key) not in like_here:
                source.note(f"{entry['path']}: {key}: {entry[key]!r} changes what is learned there, and nothing here.")
        return {"supervised_part": "content"} if on_prompt else {"assistant_only_loss": True}
    if kind == "other":
        source.note(f"{entry['path']}: {OTHER_ROWS}")
    prompt = {"alpaca_prompt": "stanford_text"} if kind == "alpaca" else {}
    return {**prompt, **({"completion_only_loss": False} if on_prompt else {})}


def _differences(source: ForeignConfig) -> Iterator[str]:
    listed = source.get("datasets")
    kinds = {_kind(entry) for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, dict)}
    if "text" in kinds:
        yield "Of a text longer than max_length the rest is cut off; axolotl makes further rows of it."
    if kinds - {"text"} and source.get("excess_length_strategy", "drop") == "drop":
        yield "Of a row longer than max_length the rest is cut off; axolotl leaves such a row out."


def _adapter(value: Any, source: ForeignConfig) -> Settings:
    if not value:
        return {}
    if value not in ("lora", "qlora"):
        raise NotHere("expected lora or qlora.")
    return {"use_peft": True, **({"load_in_4bit": True} if value == "qlora" else {})}


def _all_linear(value: Any, source: ForeignConfig) -> Settings:
    return {"lora_target_modules": "all-linear"} if value else {}


def _half(name: str, dtype: str) -> Any:
    """Read bf16 and fp16: true, false, auto or full. They set the dtype of the weights, too."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        if not value or value == "false":
            return {name: False} if value is False else {}
        left_open = value == "auto"  # then the recipe asks the GPU
        return {"dtype": dtype} if left_open else {name: True, "dtype": dtype}

    return function


def _checkpointing(value: Any, source: ForeignConfig) -> Settings:
    if value in ("offload", "offload_disk"):
        return {"gradient_checkpointing": True, "activation_offloading": True}
    return {"gradient_checkpointing": bool(value)}


def _per_epoch(what: str) -> Any:
    """Turn evaluations or checkpoints per epoch into a share of all steps."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        if not value:
            return {f"{what}_strategy": "no"} if value == 0 else {}
        if value == 1:
            return {f"{what}_strategy": "epoch"}
        return {f"{what}_strategy": "steps", f"{what}_steps": round(1 / (value * source.get("num_epochs", 1)), 6)}

    return function


def _tracker(value: Any, source: ForeignConfig) -> Settings:
    return {"report_to": "wandb", "env": {"WANDB_PROJECT": value}} if value else {}


def _template(value: Any, source: ForeignConfig) -> Settings:
    if not value or value == "tokenizer_default":
        return {}
    if str(value).endswith((".jinja", ".j2")):
        return {"chat_template_path": value}
    raise NotHere("a template of axolotl; the tokenizer's own is used. Or save one as .jinja: chat_template_path.")


def _qat(value: Any, source: ForeignConfig) -> Settings:
    """Read quantisation of the weights alone; that of activations has no counterpart."""
    weights = str(value.get("weight_dtype")).removeprefix("torch.")
    if weights not in (INT4, INT8, NVFP4) or value.get("activation_dtype") or value.get("quantize_embedding"):
        raise NotHere("expected weight_dtype int4, int8 or nvfp4, and neither activation_dtype nor quantize_embedding.")
    return {"qat": weights, **({"qat_group_size": value.get("group_size", 32)} if weights == INT4 else {})}


def _sharded(value: Any, source: ForeignConfig) -> Settings:
    if not value:
        return {}
    version = source.get("fsdp_version") or source.get("fsdp_config", {}).get("fsdp_version")
    source.note(f"{_SHARDING} What fsdp_config says in detail goes into such a file.")
    return {"accelerate_config": "fsdp2" if version == 2 else "fsdp1"}


def _defaults(source: ForeignConfig) -> Settings:
    """Set axolotl's defaults where they differ from TRL's."""
    warmup = {} if {"warmup_steps", "warmup_ratio"} & source.values.keys() else {"warmup_steps": 0.03}
    return {
        "recipe": "sft",
        "max_length": 512,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "gradient_checkpointing": False,
        **({"lora_dropout": 0.0} if source.get("adapter") else {}),
        **warmup,
    }


TOOL = Tool(
    name="axolotl",
    names={
        "base_model": "model_name_or_path",
        "revision_of_model": "model_revision",
        "sequence_len": "max_length",
        "sample_packing": "packing",
        "eval_sample_packing": "eval_packing",
        "micro_batch_size": "per_device_train_batch_size",
        "eval_batch_size": "per_device_eval_batch_size",
        "num_epochs": "num_train_epochs",
        "lr_scheduler": "lr_scheduler_type",
        "adam_beta1": "adam_beta1",
        "adam_beta2": "adam_beta2",
        "peft_use_rslora": "use_rslora",
        "peft_use_dora": "use_dora",
        "wandb_name": "run_name",
        "special_tokens.pad_token": "pad_token",
        "special_tokens.eos_token": "eos_token",
        "dataset_processes": "dataset_num_proc",
        "dataset_num_proc": "dataset_num_proc",
        "trust_remote_code": "trust_remote_code",
        "saves_total_limit": "save_total_limit",
    },
    values={
        "datasets": _datasets,
        "adapter": _adapter,
        "lora_target_linear": _all_linear,
        "lora_target_modules": lambda value, source: adapter_modules(value, source) if value else {},
        "val_set_size": share_or_number,
        "bf16": _half("bf16", "bfloat16"),
        "fp16": _half("fp16", "float16"),
        "gradient_checkpointing": _checkpointing,
        "flash_attention": when_true(attn_implementation="flash_attention_2"),
        "sdp_attention": when_true(attn_implementation="sdpa"),
        "eager_attention": when_true(attn_implementation="eager"),
        "optimizer": lambda value, source: optimizer(value, source) if value else {},
        "evals_per_epoch": _per_epoch("eval"),
        "saves_per_epoch": _per_epoch("save"),
        "wandb_project": _tracker,
        "chat_template": _template,
        "train_on_inputs": lambda value, source: {},  # read together with datasets
        "group_by_length": when_true(train_sampling_strategy="group_by_length"),
        "fsdp": _sharded,
        "qat": _qat,
        "fsdp_version": lambda value, source: {},
        "load_in_4bit": when_true(load_in_4bit=True),
        "load_in_8bit": when_true(load_in_8bit=True),
    },
    unneeded={
        "model_type": "the class of the model is found by its configuration.",
        "tokenizer_type": "the tokenizer of the model's directory is used.",
        "dataset_prepared_path": "prepared rows are kept by datasets' own cache.",
        "pad_to_sequence_len": "rows are padded to the longest of their batch, or packed.",
        "strict": "every key is checked.",
        "plugins": _KERNELS,
        "liger_rope": _KERNELS,
        "liger_rms_norm": _KERNELS,
        "liger_glu_activation": _KERNELS,
        "liger_swiglu": _KERNELS,
        "liger_layer_norm": _KERNELS,
        "liger_fused_linear_cross_entropy": _KERNELS,
        "liger_cross_entropy": _KERNELS,
        "lora_mlp_kernel": _KERNELS,
        "lora_qkv_kernel": _KERNELS,
        "lora_o_kernel": _KERNELS,
        "wandb_watch": "weights and biases of a run are not uploaded.",
    },
    unsupported={
        "kd_trainer": _LOGPROBS,
        "kd_alpha": _LOGPROBS,
        "kd_ce_alpha": _LOGPROBS,
        "kd_temperature": _LOGPROBS,
        "kd_online_server_base_url": _LOGPROBS,
        "kd_online_topk": _LOGPROBS,
        "fsdp_config": _SHARDING,
        "lora_model_dir": "merge that adapter first: liger-trainer merge RUN_DIR OUT.",
        "rl": "only supervised fine-tuning and distillation have a recipe.",
        "special_tokens.": "only eos_token and pad_token can be set.",
        "loss_watchdog_threshold": "a loss is not watched.",
        "loss_watchdog_patience": "a loss is not watched.",
        "early_stopping_patience": "a run ends with its last step.",
        "wandb_entity": "set WANDB_ENTITY under `env`.",
        "wandb_log_model": "set WANDB_LOG_MODEL under `env`.",
    },
    passes=("",),
    defaults=_defaults,
    differences=_differences,
)
