"""Keys beyond their types: names from elsewhere, keys without effect, and keys that do not go together."""

import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..teachers.config import FILES, OF_ONE_KIND, PLACEMENT, is_its_own_teacher, teacher_problems
from ..trainers.sampling_config import ELSEWHERE, without_effect
from .schema import Key
from .settings import Finding, Setting

# Known to TRL and transformers, but without effect in these recipes: refused when set to anything but the default.
REFUSED = {
    "dataset_streaming": "every row is checked, counted and hashed before training, so a stream is not supported",
    "streaming": "every row is checked, counted and hashed before training, so a stream is not supported",
    "ignore_bias_buffers": "no trainer reads it",
    "do_predict": "a run ends with an evaluation on the held-out rows; there is no prediction pass",
    "include_for_metrics": "it feeds a compute_metrics function, and a run has none",
    "batch_eval_metrics": "it feeds a compute_metrics function, and a run has none",
    "parallelism_config": "it comes from the launcher: `liger-trainer run CONFIG -- --config_file FILE`",
}
# What people type, and what it is called. Not accepted: these were never names of TRL or transformers.
CALLED = {
    "batch_size": "per_device_train_batch_size",
    "dataset": "dataset_name",
    "epochs": "num_train_epochs",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "model": "model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
    "tokenizer_name_or_path": "model_name_or_path, where the tokenizer is read from",
}
# Names that TRL and transformers gave up: accepted, with a notice.
FORMER = {
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "train_sampling_strategy",
    "max_seq_length": "max_length",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_token": "hub_token",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
}
# What TRL and transformers once read and no longer do: left out, with a notice.
GONE = {
    "dataset_batch_size": "rows are tokenized in batches of datasets' own size",
    "include_tokens_per_second": "tokens per second are always counted",
    "logging_dir": "trackers choose their own; TENSORBOARD_LOGGING_DIR under `env` sets that of tensorboard",
    "logging_nan_inf_filter": "a loss is logged as it is; `on_non_finite` says what is done about one that is NaN",
    "save_safetensors": "weights are always saved as safetensors",
    "use_mps_device": "an Apple GPU is used where there is one",
}
DEFAULT_LMBDA = "not given: the completions in the rows, `0.0`. TRL's trainer lets the student sample, `1.0`."
DEFAULT_BETA = "not given: forward KL (0.0). TRL's DistillationTrainer would take reverse KL, `beta: 1.0`."


@dataclass(frozen=True)
class View:
    """Values with defaults filled in, and which keys were given."""

    values: Mapping[str, Any]
    given: Set[str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


@dataclass(frozen=True)
class Conflict:
    """Settings that are fine alone and wrong, or without effect, together.

    Reported at `key` when `wrong` holds, unless one of the keys in `reads` has been complained about already.
    """

    key: str
    reads: tuple[str, ...]
    wrong: Callable[[View], bool]
    message: str


def is_sharded(values: Mapping[str, Any]) -> bool:
    """Whether each process holds only a part of the weights, by the settings or by the launcher's environment."""
    launched = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    return bool(values["fsdp"] or values["deepspeed"] or any(os.environ.get(name) == "true" for name in launched))


def _samples(v: View) -> bool:
    """Whether completions are sampled in training. Nothing else has these keys than a distillation."""
    return bool(v.values.get("lmbda") or v.values.get("seq_kd")) or "lmbda" in (v.values.get("schedules") or ())


def _without(key: str, needed: str, also: str = "") -> Conflict:
    message = f"has no effect without `{needed}: true`{also}."
    return Conflict(key, (key, needed), lambda v: key in v.given and needed not in v.given, message)


def _unreadable(key: str) -> Conflict:
    def wrong(v: View) -> bool:
        value = v[key]
        return isinstance(value, str) and not value.lstrip().startswith("{") and not Path(value).is_file()

    return Conflict(key, (key,), wrong, "no such file: {value}")


_LORA = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type "
    "use_rslora use_dora"
).split()
_BITSANDBYTES = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
CONFLICTS = (
    *(_without(key, "use_peft", " (or say `use_peft: false` to ignore it)") for key in _LORA),
    *(
        Conflict(
            key,
            (key, "use_peft"),
            lambda v, key=key: v[key] and not v["use_peft"],
            "quantized weights cannot be trained; add `use_peft: true` to train adapters on them.",
        )
        for key in ("load_in_4bit", "load_in_8bit")
    ),
    *(_without(key, "load_in_4bit") for key in _BITSANDBYTES),
    _without("force_resume", "resume_from_checkpoint"),
    Conflict(
        "load_in_8bit",
        ("load_in_8bit", "load_in_4bit"),
        lambda v: v["load_in_8bit"] and v["load_in_4bit"],
        "give either load_in_4bit or load_in_8bit, not both.",
    ),
    Conflict(
        "keep_layers",
        ("keep_layers", "keep_every_nth_layer"),
        lambda v: v["keep_every_nth_layer"] is not None and v["keep_layers"] is not None,
        "give either keep_every_nth_layer or keep_layers, not both.",
    ),
    Conflict(
        "student_num_layers",
        ("student_num_layers", "keep_layers", "keep_every_nth_layer"),
        lambda v: (
            v["student_num_layers"] is not None
            and (v["keep_every_nth_layer"] is not None or v["keep_layers"] is not None)
        ),
        "chooses layers by their measured importance; leave keep_every_nth_layer and keep_layers out.",
    ),
    Conflict(
        "datasets",
        ("datasets", "dataset_name"),
        lambda v: bool(v["dataset_name"] and v["datasets"]),
        "give either dataset_name or datasets, not both.",
    ),
    Conflict(
        "holdout_fraction",
        ("holdout_fraction", "dataset_test_split"),
        lambda v: {"dataset_test_split", "holdout_fraction"} <= v.given,
        "has no effect beside dataset_test_split; leave one of them out.",
    ),
    Conflict(
        "test_split_size",
        ("test_split_size", "datasets"),
        lambda v: "test_split_size" in v.given and not v["datasets"],
        "belongs to `datasets`; with dataset_name use holdout_fraction.",
    ),
    Conflict(
        "max_steps",
        ("max_steps",),
        lambda v: v["max_steps"] == 0,
        "expected a number of at least 1, or -1 for num_train_epochs, got 0. `liger-trainer eval CONFIG` measures a "
        "model without training it.",
    ),
    Conflict(
        "max_length",
        ("max_length", "packing", "eval_packing"),
        lambda v: (v["packing"] or v["eval_packing"]) and v["max_length"] is None,
        "expected the length of a packed row in tokens, got null with packing on.",
    ),
    Conflict(
        "padding_free",
        ("padding_free", "packing", "max_length"),
        lambda v: v["padding_free"] and not v["packing"] and v["max_length"] is not None,
        "without packing it does not enforce max_length; set `max_length: null`.",
    ),
    Conflict(
        "fp16",
        ("fp16", "bf16"),
        lambda v: bool(v["fp16"] and v["bf16"]),
        "give either bf16 or fp16, not both.",
    ),
    Conflict(
        "optim",
        ("optim", "on_non_finite"),
        lambda v: v["on_non_finite"] == "skip_step" and any(x in str(v["optim"]) for x in ("lomo", "layerwise")),
        "{value} updates weights in its backward, so no step can be left out; set `on_non_finite: stop`.",
    ),
    Conflict(
        "num_sample_completions",
        ("num_sample_completions", "fsdp", "deepspeed"),
        lambda v: bool(v["num_sample_completions"] and is_sharded(v.values)),
        "expected 0: a sharded model is not sampled from.",
    ),
    Conflict(
        "teacher",
        ("teacher", "use_peft"),
        lambda v: v.values.get("teacher") == "self" and not v["use_peft"],
        "self is the student without its adapters; add `use_peft: true` to train adapters.",
    ),
    Conflict(
        "teacher",
        ("teacher", "fsdp", "deepspeed"),
        lambda v: v.values.get("teacher") == "self" and is_sharded(v.values),
        "self does not work with FSDP or DeepSpeed; name the base in teacher_model_name_or_path instead.",
    ),
    *(
        Conflict(
            key,
            (key, "teacher", "teachers"),
            lambda v, key=key: v[key] is not None and is_its_own_teacher(v.values),
            "the base that teaches would lack these layers too; leave `teacher: self` out and name the whole model in "
            "teacher_model_name_or_path.",
        )
        for key in ("keep_every_nth_layer", "keep_layers")
    ),
    *(
        Conflict(
            key,
            (key, "teacher"),
            lambda v, key=key: key in v.given and v["teacher"] in ("self", "server"),
            "has no effect with `teacher: self` or `server`: nothing is loaded.",
        )
        for key in (*FILES[:3], *PLACEMENT)
    ),
    Conflict(
        "teacher_tokenizer_name_or_path",
        ("teacher_tokenizer_name_or_path", "teacher"),
        lambda v: "teacher_tokenizer_name_or_path" in v.given and v["teacher"] == "self",
        "has no effect with `teacher: self`: it is the student's.",
    ),
    *(
        Conflict(
            key,
            (key, "teacher"),
            lambda v, key=key, kind=kind: key in v.given and v["teacher"] != kind,
            f"has no effect without `teacher: {kind}`.",
        )
        for key, kind in {**OF_ONE_KIND, "teacher_cache_dir": "cache"}.items()
    ),
    *(
        Conflict(
            key,
            (key, "teacher"),
            lambda v, key=key: v.values.get("teacher") == "server" and not v[key],
            "missing; `teacher: server` needs it.",
        )
        for key in ("teacher_server_base_url", "teacher_server_model")
    ),
    Conflict(
        "teacher_column",
        ("teacher_column", "teachers"),
        lambda v: "teacher_column" in v.given and not v["teachers"],
        "has no effect without `teachers`, among which it chooses.",
    ),
    Conflict(
        "teachers",
        ("teachers", "teacher"),
        lambda v: bool(v.values.get("teachers")) and v["teacher"] != "model",
        "are models; leave `teacher` out. One of them may be `teacher: self`.",
    ),
    Conflict(
        "teachers",
        ("teachers", "teacher_model_name_or_path"),
        lambda v: bool(v.values.get("teachers")) and v["teacher_model_name_or_path"] is not None,
        "give either teachers or teacher_model_name_or_path, not both.",
    ),
    *(
        Conflict(
            key,
            (key, "fsdp", "deepspeed"),
            lambda v, key=key: bool(v.values.get(key)) and is_sharded(v.values),
            "does not go with FSDP or DeepSpeed, which decide where the teacher's weights are.",
        )
        for key in PLACEMENT[1:]
    ),
    Conflict(
        "teacher",
        ("teacher", "teacher_cache_dir"),
        lambda v: v.values.get("teacher") == "cache" and not v["teacher_cache_dir"],
        "a cache needs teacher_cache_dir, the directory that `liger-trainer cache CONFIG` writes.",
    ),
    Conflict(
        "cache_bits",
        ("cache_bits", "cache_kind"),
        lambda v: "cache_bits" in v.given and v["cache_kind"] == "sampled",
        "has no effect with `cache_kind: sampled`: draws have no log-probabilities.",
    ),
    Conflict(
        "cache_tail_draws",
        ("cache_tail_draws", "cache_kind"),
        lambda v: "cache_tail_draws" in v.given and v["cache_kind"] == "sampled",
        "are of `cache_kind: topk`, beyond its likeliest tokens; with `sampled`, cache_entries are drawn.",
    ),
    Conflict(
        "cache_tail_draws",
        ("cache_entries", "cache_tail_draws"),
        lambda v: bool(v.values.get("cache_tail_draws")) and (v["cache_entries"] or 64) + v["cache_tail_draws"] > 1024,
        "a cache holds at most 1,024 entries a token, cache_entries and cache_tail_draws together.",
    ),
    *(
        Conflict(
            key,
            (key, "lmbda", "seq_kd"),
            lambda v, key=key: v[key] and _samples(v),
            "completions are sampled for rows one by one; set it to false, or lmbda to 0.0 and seq_kd to false.",
        )
        for key in ("packing", "padding_free")
    ),
    Conflict(
        "teacher",
        ("teacher", "lmbda", "seq_kd"),
        lambda v: v.values.get("teacher") == "cache" and _samples(v),
        "a cache knows the completions in the rows alone; leave lmbda and seq_kd out, or take the teacher itself.",
    ),
    Conflict(
        "lmbda",
        ("lmbda", "seq_kd", "fsdp"),
        lambda v: _samples(v) and bool(v["fsdp"] or os.environ.get("ACCELERATE_USE_FSDP") == "true"),
        "a model that FSDP splits is not sampled from; take it and seq_kd out, or train without FSDP.",
    ),
    Conflict(
        "use_vllm",
        ("use_vllm", "keep_every_nth_layer", "keep_layers"),
        lambda v: (
            bool(v.values.get("use_vllm")) and (v["keep_every_nth_layer"] is not None or v["keep_layers"] is not None)
        ),
        "vLLM would load model_name_or_path with all its layers; make the student with `liger-trainer init-student` "
        "and name its directory.",
    ),
    *(_unreadable(key) for key in ("deepspeed", "fsdp_config", "accelerator_config")),
)


def conflicts(view: View, wrong: Set[str]) -> Iterator[tuple[str, str]]:
    """The conflicts in a configuration, as key and message; those that involve a key in `wrong` are left out."""
    for conflict in CONFLICTS:
        if wrong.isdisjoint(conflict.reads) and conflict.wrong(view):
            yield conflict.key, conflict.message.format(value=view[conflict.key])
    if "teacher" in view.values and wrong.isdisjoint(("teachers", "teacher_column", *PLACEMENT)):
        yield from teacher_problems(view.values)


def renamed(key: str, setting: Setting) -> tuple[str, Setting, str]:
    """A setting under its present name: key, setting, and the notice about it. `key` must be in FORMER."""
    now, value = FORMER[key], setting.value
    if key == "group_by_length":
        value = "group_by_length" if value else "random"
    hint = " (a number below 1 is a share of the steps)" if key == "warmup_ratio" else ""
    return now, Setting(value, setting.where, setting.inside), f"the former name of {now}{hint}."


def notices(settings: Mapping[str, Setting], keys: Mapping[str, Key], recipe: str) -> Iterator[Finding]:
    """What is accepted and should be known, of keys that are in the schema."""
    sampled = any(key in settings and settings[key].value for key in ("lmbda", "seq_kd"))
    sampled = sampled or "lmbda" in _mapping(settings, "schedules")
    vllm = "use_vllm" in settings and bool(settings["use_vllm"].value)
    for key, setting in settings.items():
        if setting.value == keys[key].default:
            continue
        if keys[key].section == "elsewhere":
            yield Finding(setting.where, key, f"has no effect: {ELSEWHERE.get(key, 'nothing here reads it')}.")
        elif keys[key].section == "sampling" and (message := without_effect(key, sampled, vllm)):
            yield Finding(setting.where, key, message)
    # a distillation by nothing but its teacher is a file of TRL's, where beta has another default
    teacher = settings.get("teacher_model_name_or_path")
    if teacher is not None and recipe == "distill" and "recipe" not in settings:
        if not {"beta", "losses"} & settings.keys():
            yield Finding(teacher.where, "beta", DEFAULT_BETA)
        if not sampled and "lmbda" not in settings:
            yield Finding(teacher.where, "lmbda", DEFAULT_LMBDA)


def _mapping(settings: Mapping[str, Setting], key: str) -> Mapping[str, Any]:
    value = settings[key].value if key in settings else None
    return value if isinstance(value, Mapping) else {}
