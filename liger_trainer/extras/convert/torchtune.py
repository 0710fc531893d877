"""torchtune: recipes for one device or several, full and LoRA, fine-tuning and knowledge distillation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import Default, ForeignConfig, NotHere, NotNeeded, Settings, Tool
from .rows import NO_EVAL_ROWS, OTHER_ROWS, chat_columns, datasets_of, learned_alike, optimizer

_ATTENTION = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}
_CHATS = ("chat_dataset", "slimorca_dataset")
_ALPACA = ("alpaca_dataset", "alpaca_cleaned_dataset")
_TEXTS = {
    "text_completion_dataset": "text",
    "wikitext_dataset": "page",
    "cnn_dailymail_articles_dataset": "article",
}
_ANSWERS: Settings = {"assistant_only_loss": True, "supervised_part": "message"}  # torchtune masks whole messages
_NO_FILES = "transformers finds the files of a model by its directory."
_HF_FORMAT = "only directories in Hugging Face's format are read; name one in model_name_or_path."
_CHUNKS = "the loss is always computed in chunks, without logits."
_SHARDING = "sharding is accelerate's: `accelerate_config: fsdp2`."
_ROWS = "rows are read as they are, as prompt and completion, messages or text."
_RECIPE = "only supervised fine-tuning and distillation have a recipe."
_OWN_CONFIG = "the model's own config.json says how it is built, and lora_target_modules what adapters train."
_WEIGHTS = "the weights of the model's directory are taken."


def _component(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _model(value: Any, source: ForeignConfig) -> Settings:
    name = _component(value)
    if not name.startswith(("lora_", "qlora_")):
        raise NotNeeded(_OWN_CONFIG)
    rank, alpha = source.take("model.lora_rank", 8), source.take("model.lora_alpha", 16)
    adapter: Settings = {"use_peft": True, "lora_r": rank, "lora_alpha": alpha}
    adapter["lora_dropout"] = source.take("model.lora_dropout", 0.0)
    modules = [_ATTENTION.get(module, module) for module in source.take("model.lora_attn_modules", [])]
    modules += _MLP if source.take("model.apply_lora_to_mlp") else []
    # torchtune calls it output
    modules += ["lm_head"] if source.take("model.apply_lora_to_output") else []
    # torchtune names modules by its own classes, which differ from transformers' names in one
    adapter["lora_target_modules"] = modules
    quantized = name.startswith("qlora_") or source.take("model.quantize_base")
    return {**adapter, "load_in_4bit": True, "use_bnb_nested_quant": True} if quantized else adapter


def _precision(value: Any, source: ForeignConfig) -> Settings:
    """Read the dtype; torchtune keeps the weights themselves in it."""
    if value not in (None, "bf16", "fp16", "fp32"):
        raise NotHere("expected bf16, fp16 or fp32.")
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[value or "fp32"]
    return {"dtype": dtype, "bf16": value == "bf16", "fp16": value == "fp16"}


def _clipping(value: Any, source: ForeignConfig) -> Settings:
    # 0 switches clipping off here; left out it would be 1.0
    return {"max_grad_norm": 0.0 if value is None else value}


def _steps(value: Any, source: ForeignConfig) -> Settings:
    if value is None:
        return {}
    source.note("where an epoch has fewer steps, torchtune ends after the epochs; here max_steps counts.")
    # max_steps counts over the whole run, torchtune's number in each epoch
    return {"max_steps": round(value * source.get("epochs", 1))}


def _schedule(value: Any, source: ForeignConfig) -> Settings:
    words = {
        "get_cosine_schedule_with_warmup": "cosine",
        "get_linear_schedule_with_warmup": "linear",
        "get_constant_schedule_with_warmup": "constant_with_warmup",
    }
    if _component(value) not in words:
        raise NotHere(f"expected one of {', '.join(words)}.")
    return {"lr_scheduler_type": words[_component(value)]}


def _distillation(value: Any, source: ForeignConfig) -> Settings:
    """Read (1 - kd_ratio) cross-entropy + kd_ratio divergence."""
    name, ratio = _component(value).replace("WithChunkedOutputLoss", "Loss"), source.take("kd_ratio", 0.5)
    # the forward KL's share
    symmetric = source.take("kd_loss.sym_kd_ratio", 0.5)
    weights = {
        "ForwardKLLoss": {"forward_kl": ratio},
        "ReverseKLLoss": {"reverse_kl": ratio},
        "SymmetricKLLoss": {"forward_kl": ratio * symmetric, "reverse_kl": ratio * (1 - symmetric)},
    }
    if name not in weights:
        raise NotHere(f"expected one of {', '.join(weights)}, or their forms with chunked output.")
    # torchtune weighs cross-entropy with what is left of kd_ratio
    losses = {**weights[name], "ce": 1 - ratio}
    return {"losses": [{"type": kind, "weight": round(weight, 6)} for kind, weight in losses.items() if weight]}


def _datasets(value: Any, source: ForeignConfig) -> Settings:
    entries, learned = [], {}
    for at in source.entries("dataset"):
        name, where = _component(source.take(f"{at}._component_")), source.take(f"{at}.source")
        if where is None and name not in _DATASETS:
            raise NotHere("a dataset of your own code; write its rows to a file and name it in dataset_name.")
        keys = {"name": "name", "split": "split", "data_dir": "data_dir", "data_files": "data_files"}
        entry = {ours: source.take(f"{at}.{theirs}") for ours, theirs in keys.items()}
        # builders with a fixed dataset name no source
        entries.append({"path": where or _DATASETS[name], **entry})
        learned[at] = {**_supervised(at, name, source), "packing": source.take(f"{at}.packed", False)}
    return {**datasets_of(entries, source), **learned_alike(learned, source)}


def _supervised(at: str, name: str, source: ForeignConfig) -> Settings:
    """Supervise Alpaca's prompt unless train_on_input says otherwise, but not other datasets' prompts."""
    if name in _TEXTS:
        return {"dataset_text_field": source.take(f"{at}.column", _TEXTS[name])}
    # torchtune's own defaults: Alpaca's builders learn the prompt, the others mask it
    on_prompt = source.take(f"{at}.train_on_input", name in _ALPACA)
    if name in _CHATS:
        style = source.take(f"{at}.conversation_style", "sharegpt" if name == "slimorca_dataset" else "openai")
        column = source.take(f"{at}.conversation_column", "conversations" if style == "sharegpt" else "messages")
        fields = ("from", "value") if style == "sharegpt" else ("role", "content")
        chat_columns({f"{at}.conversation_column": column, f"{at}.conversation_style": fields}, source)
        return {} if on_prompt else _ANSWERS
    if name not in _ALPACA:
        source.note(OTHER_ROWS, at)
        return {"completion_only_loss": False} if on_prompt else {}
    return {"alpaca_prompt": "stanford", "completion_only_loss": False, **({} if on_prompt else _ANSWERS)}


def _differences(source: ForeignConfig) -> Iterator[str]:
    listed = source.get("dataset")
    entries = listed if isinstance(listed, list) else [listed]
    names = {_component(entry.get("_component_", "")): entry for entry in entries if isinstance(entry, dict)}
    if source.get("dtype") != "fp32" and _component(source.get("model._component_", "")).startswith("lora_"):
        yield "Adapters are kept in fp32 here, in torchtune in its dtype."
    if names.keys() & _TEXTS:
        yield "Of a text longer than max_length the rest is cut off; packed ones go on in the next row of torchtune."
    chats = {name: entry for name, entry in names.items() if name not in _TEXTS}
    if not chats:
        return
    if any(name not in (*_CHATS, *_ALPACA) and not entry.get("train_on_input") for name, entry in chats.items()):
        yield "torchtune supervises the header before an answer too, such as <|im_start|>assistant; here it is context."
    yield "The chat template is the tokenizer's; it may begin with a system prompt, torchtune's do not."


def _optimizer(value: Any, source: ForeignConfig) -> Settings:
    here, fused = optimizer(value, source), source.take("optimizer.fused")
    return {"optim": "adamw_torch_fused"} if here["optim"] == "adamw_torch" and fused else here


def _betas(value: Any, source: ForeignConfig) -> Settings:
    return {"adam_beta1": value[0], "adam_beta2": value[1]}


def _tracker(value: Any, source: ForeignConfig) -> Settings:
    # by the names of torchtune's classes
    words = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "CometLogger": "comet_ml"}
    name = _component(value)
    if name not in (*words, "DiskLogger", "StdoutLogger"):
        raise NotHere("a logger of your own; see report_to.")
    # logs in files and on the terminal come with every run
    return {"report_to": words.get(name, "none")}


def _device(value: Any, source: ForeignConfig) -> Settings:
    if value not in ("cuda", "cpu"):
        raise NotHere("expected cuda or cpu.")
    return {"use_cpu": value == "cpu"}


def _seed(value: Any, source: ForeignConfig) -> Settings:
    if value is None:
        raise NotNeeded("torchtune draws a seed then; here it is 42, so that a run can be had again.")
    return {"seed": value}


def _resumed(value: Any, source: ForeignConfig) -> Settings:
    if value:
        raise NotHere("checkpoints of torchtune cannot be continued; name their directory in model_name_or_path.")
    return {}


def _validation(value: Any, source: ForeignConfig) -> Settings:
    return {"eval_strategy": "steps", "eval_steps": value} if value else {}


def _path(key: str) -> Any:
    def function(value: Any, source: ForeignConfig) -> Settings:
        return {key: str(Path(value))} if value else {}

    return function


_DEFAULTS: tuple[Default, ...] = (
    ("clip_grad_norm", 0.0, "max_grad_norm"),
    ("tokenizer.max_seq_len", None, "max_length"),
    ("lr_scheduler", "constant", "lr_scheduler_type"),
    ("enable_activation_checkpointing", False, "gradient_checkpointing"),
    ("dtype", False, "bf16"),  # fp32
    ("save_every_n_steps", "epoch", "save_strategy"),
)
_OF_ADAMW: tuple[Default, ...] = (
    ("optimizer.weight_decay", 0.01, "weight_decay"),
    ("optimizer.lr", 1e-3, "learning_rate"),
)


def _defaults(source: ForeignConfig) -> Iterator[Default]:
    if "teacher_checkpointer.checkpoint_dir" in source.nodes:
        yield "teacher_checkpointer", "distill", "recipe"
    yield from _DEFAULTS
    yield from _OF_ADAMW if "AdamW" in str(source.get("optimizer._component_")) else ()
    if source.get("batch_size"):
        yield "batch_size_val", source.get("batch_size"), "per_device_eval_batch_size"


TOOL = Tool(
    name="torchtune",
    names={
        "output_dir": "output_dir",
        "batch_size": "per_device_train_batch_size",
        "batch_size_val": "per_device_eval_batch_size",
        "epochs": "num_train_epochs",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "optimizer.lr": "learning_rate",
        "optimizer.weight_decay": "weight_decay",
        "optimizer.eps": "adam_epsilon",
        "lr_scheduler.num_warmup_steps": "warmup_steps",
        "enable_activation_checkpointing": "gradient_checkpointing",
        "enable_activation_offloading": "activation_offloading",
        "compile": "torch_compile",
        "log_every_n_steps": "logging_steps",
        "checkpointer.keep_last_n_checkpoints": "save_total_limit",
        "model.use_dora": "use_dora",
        "loss.label_smoothing": "label_smoothing_factor",
        "metric_logger.project": "project",
        "metric_logger.name": "run_name",
    },
    values={
        "checkpointer.checkpoint_dir": _path("model_name_or_path"),
        "teacher_checkpointer.checkpoint_dir": _path("teacher_model_name_or_path"),
        "model._component_": _model,
        "dtype": _precision,
        "clip_grad_norm": _clipping,
        "max_steps_per_epoch": _steps,
        "optimizer._component_": _optimizer,
        "optimizer.betas": _betas,
        "lr_scheduler._component_": _schedule,
        "kd_loss._component_": _distillation,
        "dataset": _datasets,
        "tokenizer.max_seq_len": lambda value, source: {"max_length": value},
        "metric_logger._component_": _tracker,
        "device": _device,
        "seed": _seed,
        "shuffle": lambda value, source: {"train_sampling_strategy": "random" if value else "sequential"},
        "resume_from_checkpoint": _resumed,
        "run_val_every_n_steps": _validation,
    },
    unneeded={
        **{
            f"*checkpointer.{key}": _NO_FILES
            for key in ("checkpoint_files", "checkpoint_files.*", "model_type", "output_dir", "safe_serialization")
        },
        "tokenizer._component_": "the tokenizer of the model's directory is used.",
        "tokenizer.*path": "the tokenizer of the model's directory is used.",
        "tokenizer.merges_file": "the tokenizer of the model's directory is used.",
        "tokenizer.special_tokens_path": "the tokenizer of the model's directory is used.",
        "*loss.num_output_chunks": _CHUNKS,
        "metric_logger.log_dir": "logs are in output_dir.",
        "log_level": "see log_level of transformers.",
        "log_peak_memory_stats": "peak memory is always reported.",
        "low_cpu_ram": "models are loaded so anyway.",
        "memory_efficient_fsdp_wrap": "accelerate wraps each decoder layer.",
        "save_adapter_weights_only": "a run with adapters saves only them.",
        "profiler.*": "there is no profiler in a run.",
    },
    same={
        "*checkpointer._component_": (re.compile(r".*FullModelHFCheckpointer"), _HF_FORMAT),
        "teacher_model._component_": (re.compile(r".*\.(?!q?lora_)\w+"), "merge the teacher's adapter first."),
        "loss._component_": (
            re.compile(r".*(CEWithChunkedOutputLoss|LinearCrossEntropyLoss|nn\.CrossEntropyLoss)"),
            _RECIPE,
        ),
        "*loss.ignore_index": ((-100,), "tokens that are not learned have the label -100."),
        "tokenizer.truncation_type": (("right",), "set truncation_mode."),
        "lr_scheduler.num_cycles": ((0.5,), "see lr_scheduler_kwargs."),
    },
    unsupported={
        "checkpointer.*": _WEIGHTS,
        "teacher_checkpointer.*": _WEIGHTS,
        "optimizer_in_bwd": "choose another optimizer in `optim`, such as lomo.",
        "tokenizer.prompt_template": "the chat template of the model's tokenizer is used; see chat_template_path.",
        "custom_sharded_layers": _SHARDING,
        "fsdp_cpu_offload": _SHARDING,
        "fsdp_reshard_after_forward": _SHARDING,
        "tensor_parallel_*": _SHARDING,
        "data_parallel_*": _SHARDING,
        "model.*": _OWN_CONFIG,
        "teacher_model.*": "the teacher's own config.json says how it is built.",
        "collate_fn": "batches are padded by the trainer.",
        "dataset.*": _ROWS,
        "val_dataset.*": NO_EVAL_ROWS,
        "dataset_val.*": NO_EVAL_ROWS,
        "policy_model.*": _RECIPE,
        "ref_*checkpointer.*": _RECIPE,
    },
    defaults=_defaults,
    differences=_differences,
)
