"""axolotl: supervised fine-tuning, full, LoRA and QLoRA."""

import re
from collections.abc import Iterator
from typing import Any

from ...trainers.options import INT4, INT8, NVFP4
from . import OF_TRANSFORMERS, Default, ForeignConfig, NotHere, NotNeeded, Settings, Tool
from .rows import (
    FUSED,
    NO_EVAL_ROWS,
    OTHER_ROWS,
    chat_columns,
    datasets_of,
    learned_alike,
    share_or_number,
    when_true,
)

_TEXTS = ("completion", "pretrain")
_STANFORD = ("alpaca", "alpaca:instruct", "alpaca_instruct", "alpaca_instruct.load")
_LOGPROBS = (
    "axolotl distils from log-probabilities in the rows or from a server; name a teacher in teacher_model_name_or_path."
)
_SHARDING = "sharding is accelerate's: `accelerate_config: fsdp2`, or one of its files."
_LEARNED = "changes what is learned there, and nothing here."
_TEMPLATE = "a template of axolotl; the tokenizer's own is used. Or save one as .jinja: chat_template_path."
_DIVIDED = "a run is divided by accelerate: see accelerate_config, and num_processes."


def _datasets(value: Any, source: ForeignConfig) -> Settings:
    entries, learned = [], {}
    for at in source.entries("datasets") if value else []:
        learned[at] = _supervised(at, source)
        keys = ("path", "name", "split", "data_files")
        entries.append({key: source.take(f"{at}.{key}") for key in keys})
    return {**datasets_of(entries, source), **learned_alike(learned, source)} if entries else {}


def _kind(entry: Any) -> str:
    """Return chat, alpaca, text, tokens or other."""
    kind = entry.get("type") if isinstance(entry, dict) else entry
    if kind is None:
        return "tokens"
    if not isinstance(kind, str):
        return "other"
    if kind in _TEXTS:
        return "text"
    if kind == "chat_template" or kind.startswith("sharegpt"):
        return "chat"
    return "alpaca" if kind.startswith("alpaca") and not kind.endswith(("load_qa", "load_camel_ai")) else "other"


def _supervised(at: str, source: ForeignConfig) -> Settings:
    """Supervise the answers of a chat and the output of Alpaca; with train_on_inputs prompts too, but no header."""
    kind = _kind(source.nodes[at])
    name = source.take(f"{at}.type") if isinstance(source.get(f"{at}.type"), str) else None
    if kind == "text":
        text = source.take(f"{at}.field")
        return {"dataset_text_field": text} if text else {}
    on_prompt = kind != "tokens" and source.take("train_on_inputs")
    if kind == "chat":
        # the former name of chats, with other columns
        old = str(name).startswith("sharegpt")
        role, content, column = ("from", "value", "conversations") if old else ("role", "content", "messages")
        properties = f"{at}.message_property_mappings"
        role = source.take(f"{at}.message_field_role") or source.take(f"{properties}.role", role)
        content = source.take(f"{at}.message_field_content") or source.take(f"{properties}.content", content)
        column = source.take(f"{at}.field_messages", column)
        chat_columns({f"{at}.field_messages": column, properties: (role, content)}, source)
        # axolotl learns what is said, and no headers
        return {"supervised_part": "content"} if on_prompt else {"assistant_only_loss": True}
    if kind == "other":
        source.note(OTHER_ROWS, f"{at}.type")
    if kind == "alpaca" and name not in _STANFORD:
        source.note(
            f"{name} writes another prompt around these rows than Stanford Alpaca's, which is taken here.", f"{at}.type"
        )
    # as text, not as chat: axolotl puts no chat template around Alpaca's rows
    prompt = {"alpaca_prompt": "stanford_text"} if kind == "alpaca" else {}
    return {**prompt, **({"completion_only_loss": False} if on_prompt else {})}


def _differences(source: ForeignConfig) -> Iterator[str]:
    listed = source.get("datasets")
    kinds = {_kind(entry) for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, dict)}
    if "text" in kinds:
        yield "Of a text longer than max_length the rest is cut off; axolotl makes further rows of it."
    if kinds - {"text"} and source.get("excess_length_strategy", "drop") == "drop":
        yield "Of a row longer than max_length the rest is cut off; axolotl leaves such a row out."
    if source.get("warmup_steps") is None and source.get("warmup_ratio") is None:
        yield "The rate is warmed up over 3 % of the steps; axolotl does so for 100 steps at most."


def _adapter(value: Any, source: ForeignConfig) -> Settings:
    if not value:
        return {}
    if value not in ("lora", "qlora"):
        raise NotHere("expected lora or qlora.")
    if value == "lora":
        return {"use_peft": True, "load_in_8bit": source.take("load_in_8bit", False)}
    if not source.take("load_in_4bit"):
        source.note("axolotl asks for load_in_4bit: true with qlora; here it is set.")
    double = source.take("bnb_config_kwargs.bnb_4bit_use_double_quant")
    double = source.take("bnb_4bit_use_double_quant", True if double is None else double)
    return {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": double}


def _all_linear(value: Any, source: ForeignConfig) -> Settings:
    return {"lora_target_modules": "all-linear"} if value else {}


def _half(name: str, dtype: str) -> Any:
    """Read bf16 and fp16: true, false, auto or full. They set the dtype of the weights, too."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        if not value or value == "false":
            return {name: False} if value is False else {}
        # axolotl tests bf16 first
        if name == "fp16" and source.get("bf16") in (True, "full"):
            raise NotNeeded("bf16 goes before it.")
        if value == "auto":  # then the recipe asks the GPU
            return {} if source.get("fp16") else {"dtype": dtype}
        if value == "full":  # only the weights, without autocast
            return {name: False, "dtype": dtype, f"{name}_full_eval": True}
        return {name: True, "dtype": dtype}

    return function


def _old_half(value: Any, source: ForeignConfig) -> Settings:
    if source.get("bf16"):
        raise NotNeeded("bf16 says it.")
    return {"bf16": True, "dtype": "bfloat16"} if value else {}


def _checkpointing(value: Any, source: ForeignConfig) -> Settings:
    if value in ("offload", "offload_disk"):
        return {"gradient_checkpointing": True, "activation_offloading": True}
    return {"gradient_checkpointing": bool(value)}


def _every(what: str, per_epoch: bool = False) -> Any:
    """Read a number of steps, or a number per epoch, which becomes a share of all steps."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        if not value:
            return {}
        # axolotl also evaluates at its first step
        start = _evaluated(source) if what == "eval" else {}
        if per_epoch and value == 1:
            return {f"{what}_strategy": "epoch", **start}
        # transformers reads a number below 1 as a share of all steps
        steps = round(1 / (value * source.get("num_epochs", 1)), 6) if per_epoch else value
        return {f"{what}_strategy": "steps", f"{what}_steps": steps, **start}

    return function


def _evaluated(source: ForeignConfig) -> Settings:
    if not (source.get("val_set_size") or source.get("test_datasets")):
        raise NotNeeded("without held-out rows axolotl evaluates nothing in training.")
    return {"eval_on_start": True}


def _strategy(value: Any, source: ForeignConfig) -> Settings:
    return {"eval_strategy": value, **_evaluated(source)} if value and value != "no" else {}


def _accumulated(value: Any, source: ForeignConfig) -> Settings:
    """Read the size of a whole batch of a process."""
    if not value or source.get("gradient_accumulation_steps"):
        return {}
    # axolotl's batch_size is what one process reads between two updates
    return {"gradient_accumulation_steps": value // source.get("micro_batch_size", 1)}


def _tracker(value: Any, source: ForeignConfig) -> Settings:
    # transformers takes the project only from the environment
    return {"report_to": "wandb", "env": {"WANDB_PROJECT": value}} if value else {}


def _template(value: Any, source: ForeignConfig) -> Settings:
    written = source.take("chat_template_jinja")
    path = written if value in (None, "jinja") else value
    if not path or str(path).startswith("tokenizer_default"):
        return {}
    if str(path).endswith((".jinja", ".j2")):
        return {"chat_template_path": path}
    raise NotHere(_TEMPLATE)


def _qat(value: Any, source: ForeignConfig) -> Settings:
    """Read quantisation of the weights; quantised activations have no counterpart."""
    weights = str(source.take("qat.weight_dtype")).removeprefix("torch.")
    if (
        weights not in (INT4, INT8, NVFP4)
        or source.take("qat.activation_dtype")
        or source.take("qat.quantize_embedding")
    ):
        raise NotHere("expected weight_dtype int4, int8 or nvfp4, and neither activation_dtype nor quantize_embedding.")
    return {"qat": weights, **({"qat_group_size": source.take("qat.group_size", 32)} if weights == INT4 else {})}


def _sharded(value: Any, source: ForeignConfig) -> Settings:
    version = source.take("fsdp_version") or source.take("fsdp_config.fsdp_version")
    if not value:
        return {}
    source.note(f"{_SHARDING} What fsdp_config says in detail goes into such a file.")
    return {"accelerate_config": "fsdp2" if version == 2 else "fsdp1"}


def _pushed(value: Any, source: ForeignConfig) -> Settings:
    # axolotl's own defaults for a model that it pushes
    private = {"hub_private_repo": True, "hub_always_push": True}
    return {"hub_model_id": value, "push_to_hub": True, **private} if value else {}


_DEFAULTS: tuple[Default, ...] = (
    ("sequence_len", 512, "max_length"),
    ("micro_batch_size", 1, "per_device_train_batch_size"),
    ("num_epochs", 1, "num_train_epochs"),
    ("learning_rate", 5e-5, "learning_rate"),
    ("lr_scheduler", "cosine", "lr_scheduler_type"),
    ("gradient_checkpointing", False, "gradient_checkpointing"),
    ("save_strategy", "epoch", "save_strategy"),
    ("save_total_limit", 4, "save_total_limit"),
    ("average_tokens_across_devices", False, "average_tokens_across_devices"),  # not among its keys
)


def _defaults(source: ForeignConfig) -> Iterator[Default]:
    yield from _DEFAULTS
    yield "eval_batch_size", source.get("micro_batch_size", 1), "per_device_eval_batch_size"
    if source.get("warmup_steps") is None and source.get("warmup_ratio") is None:
        yield "warmup_ratio", 0.03, "warmup_steps"
    if source.get("bf16") is None and not source.get("fp16"):  # auto
        yield "bf16", "bfloat16", "dtype"
    if source.get("adapter"):
        yield "lora_dropout", 0.0, "lora_dropout"


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
        "peft_use_rslora": "use_rslora",
        "peft_use_dora": "use_dora",
        "wandb_name": "run_name",
        "special_tokens.pad_token": "pad_token",
        "special_tokens.eos_token": "eos_token",
        "dataset_processes": "dataset_num_proc",
        "optimizer": "optim",
        "bnb_4bit_quant_type": "bnb_4bit_quant_type",
        "bnb_config_kwargs.bnb_4bit_quant_type": "bnb_4bit_quant_type",
    },
    values={
        "datasets": _datasets,
        "adapter": _adapter,
        "lora_target_modules": lambda value, source: {"lora_target_modules": value} if value else {},
        "lora_target_linear": _all_linear,
        "val_set_size": share_or_number,
        "bf16": _half("bf16", "bfloat16"),
        "bfloat16": _old_half,
        "fp16": _half("fp16", "float16"),
        "tf32": when_true(tf32=True),
        "gradient_checkpointing": _checkpointing,
        "activation_offloading": when_true(activation_offloading=True),
        "attn_implementation": lambda value, source: {"attn_implementation": value} if value else {},
        "flash_attention": when_true(attn_implementation="flash_attention_2"),
        "sdp_attention": when_true(attn_implementation="sdpa"),
        "eager_attention": when_true(attn_implementation="eager"),
        "batch_size": _accumulated,
        "eval_strategy": _strategy,
        "evaluation_strategy": _strategy,
        "evals_per_epoch": _every("eval", per_epoch=True),
        "eval_steps": _every("eval"),
        "save_strategy": lambda value, source: {"save_strategy": value} if value else {},
        "saves_per_epoch": _every("save", per_epoch=True),
        "save_steps": _every("save"),
        "hub_model_id": _pushed,
        "use_tensorboard": when_true(report_to="tensorboard"),
        "wandb_project": _tracker,
        "chat_template": _template,
        "chat_template_jinja": _template,
        "group_by_length": when_true(train_sampling_strategy="group_by_length"),
        "fsdp": _sharded,
        "qat": _qat,
    },
    unneeded={
        "tokenizer_type": "the tokenizer of the model's directory is used.",
        "processor_type": "the processor of the model's directory is used.",
        "dataset_prepared_path": "prepared rows are kept by datasets' own cache.",
        "datasets.*.ds_type": "the ending of a file says its form: .json, .jsonl, .csv, .parquet or .txt.",
        "pad_to_sequence_len": "rows are padded to the longest of their batch, or packed.",
        "sample_packing_eff_est": "rows are packed before training, so that nothing is estimated.",
        "total_num_tokens": "rows are counted before training.",
        "strict": "every key is checked.",
        "save_safetensors": "weights are always saved as safetensors.",
        "low_cpu_mem_usage": "transformers always loads weights so.",
        **dict.fromkeys(
            (
                "cut_cross_entropy",
                "flash_attn_cross_entropy",
                "flash_attn_fuse_mlp",
                "flash_attn_rms_norm",
                "liger_rope",
                "liger_rms_norm",
                "liger_glu_activation",
                "liger_swiglu",
                "liger_layer_norm",
                "liger_fused_linear_cross_entropy",
                "liger_cross_entropy",
                "lora_mlp_kernel",
                "lora_qkv_kernel",
                "lora_o_kernel",
                "lora_embedding_kernel",
                "use_kernels",
            ),
            FUSED,
        ),
        "wandb_watch": "weights and biases of a run are not uploaded.",
    },
    same={
        "model_type": (
            re.compile(r"\w*ForCausalLM|AutoModelForImageTextToText|\w*ForConditionalGeneration"),
            "only language models have a recipe.",
        ),
        "plugins": (
            re.compile(r"(\[|, |'axolotl\.integrations\.(liger|cut_cross_entropy|kernels)\.\w+'|\])*"),
            "of plugins, those for kernels are not needed; the others are not here.",
        ),
        "load_in_4bit": ((False,), "axolotl quantises to 4 bits with `adapter: qlora` only."),
        "load_in_8bit": ((False,), "axolotl quantises to 8 bits with `adapter: lora` only."),
        "train_on_inputs": ((False,), "these rows have no prompts."),
        "excess_length_strategy": (("drop", "truncate"), "rows that are too long are cut off."),
        "shuffle_merged_datasets": ((True,), "rows are drawn in an order of their own in each epoch."),
        "datasets.*.chat_template": (re.compile("tokenizer_default.*"), _TEMPLATE),
        "datasets.*.roles_to_train": ((["assistant"], ["gpt"]), _LEARNED),
        "datasets.*.train_on_eos": (("turn",), _LEARNED),
        "datasets.*.train_on_eot": (("turn",), _LEARNED),
        "datasets.*.drop_system_message": ((False,), "take the system messages out of the rows."),
        "datasets.*.roles.user": ((["human", "user"], ["user", "human"], ["user"]), "rename the roles in the rows."),
        "datasets.*.roles.assistant": (
            (["gpt", "assistant"], ["assistant", "gpt"], ["assistant"]),
            "rename the roles in the rows.",
        ),
        "datasets.*.roles.system": ((["system"],), "rename the roles in the rows."),
        "datasets.*.roles.tool": ((["tool"],), "rename the roles in the rows."),
        "datasets.*.field_tools": (("tools",), "the column must be called tools."),
        "datasets.*.field_thinking": (("reasoning_content",), "messages must have it as reasoning_content."),
    },
    unsupported={
        "datasets.*.conversation": "a template of axolotl; the tokenizer's own is used.",
        "datasets.*.message_field_training*": "name the rows' weights in weight_column, or split the rows.",
        "datasets.*.trust_remote_code": "datasets no longer runs code of a dataset.",
        "datasets.*.revision": "rows are read at the newest revision; download that one, and name its files.",
        "datasets.*.shards*": "name a part of the split: `datasets: [{path: ..., split: 'train[:10%]'}]`.",
        "qat.group_size": "only int4 has groups.",
        "kd_*": _LOGPROBS,
        "fsdp_config": _SHARDING,
        "fsdp_config.*": _SHARDING,
        "fsdp_version": _SHARDING,
        "*_parallel_size": _DIVIDED,
        "sequence_parallel_degree": _DIVIDED,
        "dp_*_size": _DIVIDED,
        "test_datasets": NO_EVAL_ROWS,
        "test_datasets.*": NO_EVAL_ROWS,
        "lora_model_dir": "merge that adapter first: liger-trainer merge RUN_DIR OUT.",
        "lora_fan_in_fan_out": "PEFT finds it out by the layer.",
        "gptq*": "a model that is quantised already says so in its config.json.",
        "rl": "only supervised fine-tuning and distillation have a recipe.",
        "reward_model": "only supervised fine-tuning and distillation have a recipe.",
        "process_reward_model": "only supervised fine-tuning and distillation have a recipe.",
        "special_tokens": "only eos_token and pad_token can be set.",
        "special_tokens.*": "only eos_token and pad_token can be set.",
        "loss_watchdog_*": "a loss is not watched.",
        "early_stopping_patience": "a run ends with its last step.",
        "unfrozen_parameters": "train adapters instead, with use_peft and lora_target_modules.",
        "wandb_entity": "set WANDB_ENTITY under `env`.",
        "wandb_log_model": "set WANDB_LOG_MODEL under `env`.",
    },
    passes={"": OF_TRANSFORMERS},
    defaults=_defaults,
    differences=_differences,
)
