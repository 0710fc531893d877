"""torchtune: recipes for one device or several, full and LoRA, fine-tuning and knowledge distillation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import ForeignConfig, NotHere, Settings, Tool
from .rows import BUILDERS, OTHER_ROWS, chat_column, optimizer

_ATTENTION = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
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


def _component(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _model(value: Any, source: ForeignConfig) -> Settings:
    name = _component(value)
    if not name.startswith(("lora_", "qlora_")):
        return {}
    adapter: Settings = {"use_peft": True, "lora_r": source.get("model.lora_rank", 8)}
    adapter["lora_alpha"] = source.get("model.lora_alpha", 16)
    adapter["lora_dropout"] = source.get("model.lora_dropout", 0.0)
    modules = [_ATTENTION.get(module, module) for module in source.get("model.lora_attn_modules", [])]
    modules += _MLP if source.get("model.apply_lora_to_mlp") else ()
    modules += ("lm_head",) if source.get("model.apply_lora_to_output") else ()
    adapter["lora_target_modules"] = modules
    return {**adapter, "load_in_4bit": True} if name.startswith("qlora_") else adapter


def _precision(value: Any, source: ForeignConfig) -> Settings:
    """Read the dtype; torchtune keeps the weights themselves in it."""
    if value not in ("bf16", "fp16", "fp32"):
        raise NotHere("expected bf16, fp16 or fp32.")
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[value]
    return {"dtype": dtype, "bf16": value == "bf16", "fp16": value == "fp16"}


def _clipping(value: Any, source: ForeignConfig) -> Settings:
    return {"max_grad_norm": 0.0 if value is None else value}


def _steps(value: Any, source: ForeignConfig) -> Settings:
    return {} if value is None else {"max_steps": round(value * source.get("epochs", 1))}


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
    name, ratio = _component(value).replace("WithChunkedOutputLoss", "Loss"), source.get("kd_ratio", 0.5)
    symmetric = source.get("kd_loss.sym_kd_ratio", 0.5)
    weights = {
        "ForwardKLLoss": {"forward_kl": ratio},
        "ReverseKLLoss": {"reverse_kl": ratio},
        "SymmetricKLLoss": {"forward_kl": ratio * symmetric, "reverse_kl": ratio * (1 - symmetric)},
    }
    if name not in weights:
        raise NotHere(f"expected one of {', '.join(weights)}, or their forms with chunked output.")
    losses = {**weights[name], "ce": 1 - ratio}
    return {"losses": [{"type": kind, "weight": round(weight, 6)} for kind, weight in losses.items() if weight]}


def _dataset(value: Any, source: ForeignConfig) -> Settings:
    name, where = _component(value), source.get("dataset.source")
    if where is None and name not in _DATASETS:
        raise NotHere("a dataset of your own code; write its rows to a file and name it in dataset_name.")
    files = source.get("dataset.data_files")
    files = files if isinstance(files, list) else [files]
    if len(files) > 1:
        raise NotHere("several data_files; put them into one directory, and name that in dataset_name.")
    named = files[0] if where in BUILDERS.values() and files[0] is not None else where or _DATASETS[name]
    return {"dataset_name": named, **_supervised(name, source)}


def _supervised(name: str, source: ForeignConfig) -> Settings:
    """Supervise Alpaca's prompt unless train_on_input says otherwise, but not that of other datasets."""
    on_prompt = source.get("dataset.train_on_input", name in _ALPACA)
    if name in _TEXTS:
        return {"dataset_text_field": source.get("dataset.column", _TEXTS[name])}
    if name in _CHATS:
        chat_column(source.get("dataset.conversation_column"), "dataset", source)
        return {} if on_prompt else _ANSWERS
    if name not in _ALPACA:
        source.note(OTHER_ROWS)
        return {"completion_only_loss": False} if on_prompt else {}
    return {"alpaca_prompt": "stanford", "completion_only_loss": False, **({} if on_prompt else _ANSWERS)}


def _differences(source: ForeignConfig) -> Iterator[str]:
    name = _component(source.get("dataset._component_", ""))
    if not name or name in _TEXTS:
        return
    if name not in (*_CHATS, *_ALPACA) and not source.get("dataset.train_on_input"):
        yield "torchtune supervises the header before an answer too, such as <|im_start|>assistant; here it is context."
    yield "The chat template is that of the model's tokenizer; it may begin with a system prompt, torchtune's do not."


def _optimizer(value: Any, source: ForeignConfig) -> Settings:
    here = optimizer(value, source)
    return {"optim": "adamw_torch_fused"} if here["optim"] == "adamw_torch" and source.get("optimizer.fused") else here


def _betas(value: Any, source: ForeignConfig) -> Settings:
    return {"adam_beta1": value[0], "adam_beta2": value[1]}


def _tracker(value: Any, source: ForeignConfig) -> Settings:
    words = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "CometLogger": "comet_ml"}
    return {"report_to": words.get(_component(value), "none")}


def _device(value: Any, source: ForeignConfig) -> Settings:
    return {"use_cpu": True} if value == "cpu" else {}


def _resumed(value: Any, source: ForeignConfig) -> Settings:
    if value:
        raise NotHere("checkpoints of torchtune cannot be continued; name their directory in model_name_or_path.")
    return {}


def _validation(value: Any, source: ForeignConfig) -> Settings:
    return {"eval_strategy": "steps", "eval_steps": value} if value else {}


def _said_elsewhere(value: Any, source: ForeignConfig) -> Settings:
    return {}


def _defaults(source: ForeignConfig) -> Settings:
    """Set torchtune's defaults where they differ from TRL's."""
    return {
        "recipe": "distill" if "teacher_checkpointer.checkpoint_dir" in source.values else "sft",
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "max_length": None,
        "lr_scheduler_type": "constant",
        **({"weight_decay": 0.01} if "AdamW" in str(source.get("optimizer._component_")) else {}),
    }


def _path(key: str) -> Any:
    def function(value: Any, source: ForeignConfig) -> Settings:
        return {key: str(Path(value))} if value else {}

    return function


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
        "dataset.packed": "packing",
        "dataset.split": "dataset_train_split",
        "enable_activation_checkpointing": "gradient_checkpointing",
        "enable_activation_offloading": "activation_offloading",
        "compile": "torch_compile",
        "seed": "seed",
        "log_every_n_steps": "logging_steps",
        "model.use_dora": "use_dora",
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
        "dataset._component_": _dataset,
        "tokenizer.max_seq_len": lambda value, source: {"max_length": value},
        "metric_logger._component_": _tracker,
        "device": _device,
        "resume_from_checkpoint": _resumed,
        "run_val_every_n_steps": _validation,
        **dict.fromkeys(
            (
                "model.lora_rank",
                "model.lora_alpha",
                "model.lora_dropout",
                "model.lora_attn_modules",
                "model.apply_lora_to_mlp",
                "model.apply_lora_to_output",
                "optimizer.fused",
                "kd_ratio",
                "kd_loss.sym_kd_ratio",
                "dataset.source",
                "dataset.data_files",
                "dataset.train_on_input",
                "dataset.column",
                "dataset.conversation_column",
                "dataset.conversation_style",
            ),
            _said_elsewhere,
        ),
    },
    unneeded={
        "checkpointer.": _NO_FILES,
        "teacher_checkpointer.": _NO_FILES,
        "teacher_model.": _NO_FILES,
        "tokenizer.": "the tokenizer of the model's directory is used.",
        "loss.": "the cross-entropy is always computed in chunks, without logits.",
        "kd_loss.": "the divergence is always computed in chunks, without logits.",
        "shuffle": "training rows are always shuffled.",
        "metric_logger.log_dir": "logs are in output_dir.",
        "log_level": "see log_level of transformers.",
        "log_peak_memory_stats": "peak memory is always reported.",
        "save_adapter_weights_only": "a run with adapters saves them alone.",
        "profiler.": "there is no profiler in a run.",
    },
    unsupported={
        "optimizer_in_bwd": "choose another optimizer in `optim`, such as lomo.",
        "custom_sharded_layers": "sharding is accelerate's: `accelerate_config: fsdp2`.",
        "fsdp_cpu_offload": "sharding is accelerate's: `accelerate_config: fsdp2`.",
        "dataset.": "rows are read as prompt and completion, messages or text.",
        "val_dataset.": "rows are held out of the training rows; see holdout_fraction and dataset_test_split.",
        "dataset_val.": "rows are held out of the training rows; see holdout_fraction and dataset_test_split.",
    },
    defaults=_defaults,
    differences=_differences,
)
