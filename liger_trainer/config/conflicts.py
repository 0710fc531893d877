"""Keys beyond their types: names from elsewhere, keys without effect, and keys that do not go together."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..common.options import (
    Condition,
    Conflict,
    OptionValues,
    clashes,
    conflicts_of,
    did_you_mean,
    equals,
    given,
    on,
    without,
)
from ..losses.plan import LossConfig
from ..teachers.config import CACHE, PLACEMENT, SAMPLES, SELF, TeacherConfig, is_its_own_teacher, teacher_problems
from ..trainers.options import (
    ELSEWHERE,
    FOLLOW_EVALUATIONS,
    QAT,
    TRAINS_HEAD,
    ImagesConfig,
    MtpConfig,
    NonFiniteConfig,
    QatConfig,
    RowsConfig,
    SamplingConfig,
    StepConfig,
    greater_is_better,
    is_neither,
    no_direction,
    without_effect,
)
from .run_options import RunOptions
from .schema import Key
from .yaml_reader import Finding, Setting

# Which engine `accelerate_config` names: known before anything is launched, so that conflicts are said then.


LAUNCHED = "LIGER_TRAINER_LAUNCHED"  # id of the launching process, a colon, and the folder of its ranks
DDP = {"ddp": "multi_gpu"}  # the name that users know, and TRL's
CHOSEN, DDP_NAME, FSDP2_NAME = "auto", "ddp", "fsdp2"  # the first becomes one of the others when a run is launched


def is_launched() -> bool:
    """Whether this process was started by a launcher: by ours, by torchrun, which sets RANK, or by accelerate."""
    return any(name in os.environ for name in (LAUNCHED, "RANK", "ACCELERATE_MIXED_PRECISION"))


def accelerate_names() -> dict[str, Path]:
    """Return the files of accelerate that TRL brings along, by name."""
    trl = importlib.util.find_spec("trl")  # does not import it
    folder = Path(trl.origin).parent / "accelerate_configs" if trl and trl.origin else Path()
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return files | {ours: files[theirs] for ours, theirs in DDP.items() if theirs in files}


def accelerate_file(name: str) -> Path | None:
    """Return the file that a value of `accelerate_config` means, None where it is neither a file nor a name."""
    path = Path(name).expanduser()
    return path if path.is_file() else accelerate_names().get(name)


def unknown_engine(name: str) -> str | None:
    """Return what is wrong with a value of `accelerate_config`, None for `auto`, a file, or the name of one."""
    if name == CHOSEN or accelerate_file(name) is not None:
        return None
    names = [CHOSEN, *sorted(accelerate_names())]
    return f"expected a file or one of {', '.join(names)}, got {name!r}.{did_you_mean(name, names)}"


@cache
def engine_of(name: str) -> str | None:
    """Return ddp, fsdp1, fsdp2, zero0 to zero3, or None for one process and for what cannot be read."""
    file = accelerate_file(name)
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # said where the file is used
    if not isinstance(content, dict):
        return None
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        return f"fsdp{(content.get('fsdp_config') or {}).get('fsdp_version', 1)}"
    if kind == "DEEPSPEED":
        return f"zero{(content.get('deepspeed_config') or {}).get('zero_stage', 2)}"
    return "ddp" if kind.startswith("MULTI_") else None


def launches(*engines: str) -> Condition:
    """The condition that `accelerate_config` will launch one of these; what a launcher chose is in its environment."""

    def holds(options: OptionValues) -> bool:
        name = options["accelerate_config"]
        return isinstance(name, str) and not is_launched() and engine_of(name) in engines

    return Condition(("accelerate_config",), holds)


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
# Keys of earlier versions, and what does the same.
TWO_STAGES = "distill_two_stage"
REMOVED = {
    "second_stage": "run the second stage by itself, from what the first has saved: `liger-trainer run CONFIG "
    "output_dir=FIRST`, then `liger-trainer run CONFIG model_name_or_path=FIRST lmbda=0.5 learning_rate=1e-5` (merge "
    "adapters in between: `liger-trainer merge`).",
    "teacher_correction": "fine-tune the teacher by itself first: `liger-trainer run CONFIG recipe=sft "
    "model_name_or_path=TEACHER output_dir=CORRECTED`, then name CORRECTED in teacher_model_name_or_path.",
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
    "logging_dir": "trackers choose their own; TENSORBOARD_LOGGING_DIR under `env` sets tensorboard's",
    "logging_nan_inf_filter": "a loss is logged as it is; `on_non_finite` says what is done about one that is NaN",
    **dict.fromkeys(
        ("num_draft_prompts", "draft_tokens", "draft_temperature"),
        "drafts are no longer measured; transformers' `generate(assistant_model=student)` writes with them",
    ),
    "save_safetensors": "weights are always saved as safetensors",
    "use_mps_device": "an Apple GPU is used where there is one",
}
NO_FP16 = "a CPU does not train in fp16, and would train in fp32 without a word; leave fp16 out."
ITSELF = (
    "is the student too, which so agrees with it from the first step on and learns nothing: name a larger model, or "
    "leave layers of the student out, `keep_every_nth_layer: 2`."
)
# what makes a student another model than its teacher, or has it learn from more than that
_APART = (
    "keep_", "student_", "losses", "qat", "teacher_prompt", "load_in_", "teacher_load_in_", "model_revision",
    "teacher_model_revision",
)  # fmt: skip
DEFAULT_LMBDA = "not given: the completions in the rows, `0.0`. TRL's trainer lets the student sample, `1.0`."
DEFAULT_BETA = "not given: forward KL (0.0). TRL's DistillationTrainer would take reverse KL, `beta: 1.0`."


def _launched_with(engine: str) -> Condition:
    return Condition((), lambda options: os.environ.get(f"ACCELERATE_USE_{engine}") == "true")


_LAUNCHES_DEEPSPEED, _LAUNCHES_FSDP = launches("zero0", "zero1", "zero2", "zero3"), launches("fsdp1", "fsdp2")
_DEEPSPEED = on("deepspeed") | _launched_with("DEEPSPEED") | _LAUNCHES_DEEPSPEED
_FSDP = on("fsdp") | _launched_with("FSDP") | _LAUNCHES_FSDP
# each process holds only a part of the weights: by the settings or the launcher's environment, or once it is launched
_IS_SHARDED = on("fsdp") | on("deepspeed") | (_launched_with("FSDP") | _launched_with("DEEPSPEED"))
SHARDED = _IS_SHARDED | _LAUNCHES_FSDP | _LAUNCHES_DEEPSPEED


def is_sharded(values: Mapping[str, Any]) -> bool:
    """Whether each process holds only a part of the weights, by the settings or by the launcher's environment."""
    return _IS_SHARDED.holds(OptionValues(values, ()))


def _names_hidden(options: OptionValues) -> bool:
    terms = options["losses"] if isinstance(options["losses"], list) else []
    return any(isinstance(term, Mapping) and str(term.get("type", "")).startswith("hidden_") for term in terms)


def _is_missing_file(key: str) -> Condition:
    def holds(options: OptionValues) -> bool:
        value = options[key]
        return isinstance(value, str) and not value.lstrip().startswith("{") and not Path(value).is_file()

    return Condition((key,), holds)


_LORA = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type "
    "use_rslora use_dora"
).split()
_PEFT = given("use_peft", words="`use_peft: true` (or say `use_peft: false` to ignore it)")
_FOUR_BITS = given("load_in_4bit", words="`load_in_4bit: true`")
_OWN_TEACHER = Condition(("teacher", "teachers"), lambda options: is_its_own_teacher(options.values))
_DROPS_LAYERS = on("keep_every_nth_layer") | on("keep_layers")

_EVALUATES = equals("eval_strategy", "steps", "epoch")
_SAVES_WHEN_EVALUATING = (equals("eval_strategy", "steps") & ~equals("save_strategy", "no", "epoch", "best")) | (
    equals("eval_strategy", "epoch") & equals("save_strategy", "epoch")
)
_NO_DIRECTION = Condition(
    ("metric_for_best_model", "greater_is_better"),
    lambda options: options["greater_is_better"] is None and is_neither(options["metric_for_best_model"]),
)

# Conflicts of keys that are TRL's, and of ours with these. Ours among themselves are declared with each option.
_OF_TRL = (
    *(without(key, _PEFT) for key in _LORA),
    *(without(key, _FOUR_BITS) for key in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")),
    *(Conflict(key, on(key) & ~on("use_peft"),
        "quantized weights cannot be trained; add `use_peft: true` to train adapters on them.")
        for key in ("load_in_4bit", "load_in_8bit")),
    Conflict("load_in_8bit", on("load_in_8bit") & on("load_in_4bit"),
        "give either load_in_4bit or load_in_8bit, not both."),
    Conflict("qat", QAT & on("use_peft"),
        "adapters leave the base as it is; train them on packed weights with load_in_4bit, or leave use_peft out."),
    Conflict("qat", QAT & SHARDED,
        "does not go with FSDP or DeepSpeed, which shard weights; use ddp."),
    Conflict("mtp_loss_weight", TRAINS_HEAD & SHARDED,
        "does not go with FSDP or DeepSpeed, which shard the model's parts; use ddp."),
    *(Conflict(key, on(key) & equals("accelerate_config", CHOSEN),
        "names the engine already, which `accelerate_config: auto` would choose; give only one of them.")
        for key in ("fsdp", "deepspeed")),
    Conflict("num_machines", Condition(("num_machines",), lambda options: (options["num_machines"] or 1) > 1)
        & equals("accelerate_config", CHOSEN),
        "with `accelerate_config: auto` each machine would choose an engine by its own memory; name ddp or fsdp2."),
    Conflict("datasets", on("datasets") & on("dataset_name"), "give either dataset_name or datasets, not both."),
    Conflict("test_split_size", given("test_split_size") & ~on("datasets"),
        "belongs to `datasets`; with dataset_name use holdout_fraction."),
    Conflict("max_steps", equals("max_steps", 0),
        "expected a number of at least 1, or -1 for num_train_epochs, got 0. `liger-trainer eval CONFIG` measures a "
        "model without training it."),
    Conflict("max_length", (on("packing") | on("eval_packing")) & equals("max_length", None),
        "expected the length of a packed row in tokens, got null with packing on."),
    Conflict("eval_packing",
        on("eval_packing") & ~on("packing") & ~on("padding_free") & ~equals("packing_strategy", "wrapped"),
        "without `packing: true` or `padding_free: true` TRL's collator tells nobody where the documents of a row end, "
        "so they would see one another; leave it out, or pack the training rows too."),
    Conflict("padding_free", on("padding_free") & ~on("packing") & ~equals("max_length", None),
        "without packing it does not enforce max_length; set `max_length: null`."),
    Conflict("fp16", on("fp16") & on("bf16"), "give either bf16 or fp16, not both."),
    Conflict("fp16", on("fp16") & on("use_cpu"), NO_FP16),
    # transformers refuses these too, but only when it builds its arguments, after seconds of imports
    *(Conflict(key, given(key) & on(key) & ~on("dataloader_num_workers"),
        "has no effect without workers; set dataloader_num_workers to 1 or more.")
        for key in ("dataloader_prefetch_factor", "dataloader_persistent_workers")),
    Conflict("activation_offloading", on("activation_offloading") & on("use_cpu"),
        "takes activations from a GPU's memory to the CPU's, and there is no GPU; leave it out."),
    Conflict("lr_scheduler_type", equals("lr_scheduler_type", *FOLLOW_EVALUATIONS) & ~_EVALUATES,
        "{value} follows the evaluations; set eval_strategy to steps or epoch."),
    Conflict("metric_for_best_model", _NO_DIRECTION, no_direction("{value}")),
    Conflict("load_best_model_at_end",
        on("load_best_model_at_end") & ~_SAVES_WHEN_EVALUATING & ~equals("save_strategy", "best"),
        "needs checkpoints where evaluations are; set save_strategy and eval_strategy to the same."),
    *(Conflict(f"{what}_steps", equals(f"{what}_steps", 0) & when,
        f"expected a number above 0 with `{what}_strategy: steps`, got 0.")
        for what, when in (("logging", ~equals("logging_strategy", "no", "epoch")),
                           ("save", ~equals("save_strategy", "no", "epoch", "best")))),
    *(Conflict(key, on(key) & SAMPLES,
        "completions are sampled for rows one by one; set it to false, or lmbda to 0.0 and seq_kd to false.")
        for key in ("packing", "padding_free")),
    *(Conflict(key, _is_missing_file(key), "no such file: {value}")
        for key in ("deepspeed", "fsdp_config", "accelerator_config")),
)  # fmt: skip
# Conflicts of our keys that do not hold in Python, where a teacher may be a model in memory.
_OF_A_FILE = (
    Conflict("num_sample_completions", on("num_sample_completions") & SHARDED,
        "expected 0: a sharded model is not sampled from."),
    Conflict("teacher", SELF & ~on("use_peft"),
        "self is the student without its adapters; add `use_peft: true` to train adapters."),
    Conflict("losses", Condition(("losses",), _names_hidden) & launches("fsdp1"),
        "hidden-state losses do not work with FSDP1; use ddp, fsdp2 or zero3, or leave them out."),
    Conflict("teacher", SELF & launches("fsdp1"),
        "self does not work with FSDP1; use fsdp2, or name the base in teacher_model_name_or_path."),
    *(Conflict(key, on(key) & _OWN_TEACHER,
        "the base that teaches would lack these layers too; leave `teacher: self` out and name the whole model in "
        "teacher_model_name_or_path.")
        for key in ("keep_every_nth_layer", "keep_layers")),
    *(Conflict(key, on(key) & (on("teacher_prompt") | on("teacher_prompt_column")),
        "teacher_prompt goes before each single row; set it to false.")
        for key in ("packing", "eval_packing", "padding_free")),
    without("teacher_cache_dir", CACHE),
    without("teacher_column", given("teachers", words="`teachers`, among which it chooses")),
    *(Conflict(key, on(key) & _DEEPSPEED, "does not go with DeepSpeed, which decides where the teacher's weights are.")
        for key in PLACEMENT[1:]),
    Conflict("teacher_offload", on("teacher_offload") & _FSDP,
        "does not go with FSDP, which shares the teacher's weights out over the processes."),
    Conflict("cache_bits", given("cache_bits") & equals("cache_kind", "sampled"),
        "has no effect with `cache_kind: sampled`: draws have no log-probabilities."),
    Conflict("optim", equals("optim", "adamw_8bit", "adamw_bnb_8bit") & launches("fsdp2"),
        "needs all weights on each GPU; use ddp, or adamw_torch_fused, whose moments FSDP2 shares out too."),
    Conflict("lmbda", SAMPLES & launches("fsdp1"),
        "a model that FSDP1 splits is not sampled from; take it and seq_kd out, or train with fsdp2 or ddp."),
    Conflict("use_vllm", on("use_vllm") & _DROPS_LAYERS,
        "vLLM would load model_name_or_path with all its layers; make the student with `liger-trainer init-student` "
        "and name its directory."),
)  # fmt: skip
_DECLARED = (
    RunOptions, ImagesConfig, LossConfig, MtpConfig, NonFiniteConfig, QatConfig, RowsConfig, SamplingConfig, StepConfig,
    TeacherConfig,
)  # fmt: skip
# Conflicts with `init-student`; a run may have what they are about.
STUDENT_KEYS = ("keep_every_nth_layer", "keep_layers", "student_num_layers", "student_intermediate_size")
_OF_INIT_STUDENT = (
    Conflict("student_num_layers", ~(_DROPS_LAYERS | on("student_num_layers") | on("student_intermediate_size")),
        f"nothing says what the student keeps: set one of {', '.join(STUDENT_KEYS)}."),
    *(Conflict(key, on(key), f"init-student runs in one process; take it out with ~{key}.")
        for key in ("fsdp", "deepspeed")),
)  # fmt: skip
CONFLICTS = (*(conflict for cls in _DECLARED for conflict in conflicts_of(cls)), *_OF_TRL, *_OF_A_FILE)


def conflicts(options: OptionValues, wrong: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield the conflicts in a configuration, as key and message, but those that involve a key in `wrong`."""
    yield from clashes(options, CONFLICTS, wrong)
    if "teacher" in options.values and wrong.isdisjoint(("teachers", "teacher_column", *PLACEMENT)):
        yield from teacher_problems(options.values)


def init_student_conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what `init-student` cannot do of a configuration that a run could, as key and message."""
    return clashes(OptionValues(values, ()), _OF_INIT_STUDENT)


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
    schedules = settings["schedules"].value if "schedules" in settings else None
    sampled = sampled or isinstance(schedules, Mapping) and "lmbda" in schedules
    vllm = "use_vllm" in settings and bool(settings["use_vllm"].value)
    for key, setting in settings.items():
        if setting.value == keys[key].default:
            continue
        if keys[key].section == "elsewhere":
            yield Finding(setting.where, key, f"has no effect: {ELSEWHERE.get(key, 'nothing here reads it')}.")
        elif keys[key].section == "sampling" and (message := without_effect(key, sampled, vllm)):
            yield Finding(setting.where, key, message)
    if "auto_find_batch_size" in settings and settings["auto_find_batch_size"].value:
        message = "after running out of memory a training begins again with the weights as they are by then."
        yield Finding(settings["auto_find_batch_size"].where, "auto_find_batch_size", message)
    if "eval_steps" in settings and ("eval_strategy" not in settings or settings["eval_strategy"].value == "no"):
        yield Finding(settings["eval_steps"].where, "eval_steps", "has no effect without `eval_strategy: steps`.")
    if "metric_for_best_model" in settings:
        yield from _direction(settings["metric_for_best_model"], settings.get("greater_is_better"))
    # a distillation by nothing but its teacher is a file of TRL's, where beta has another default
    teacher = settings.get("teacher_model_name_or_path")
    if teacher is not None and recipe == "distill" and "recipe" not in settings:
        if not {"beta", "losses"} & settings.keys():
            yield Finding(teacher.where, "beta", DEFAULT_BETA)
        if not sampled and "lmbda" not in settings:
            yield Finding(teacher.where, "lmbda", DEFAULT_LMBDA)
    student = settings.get("model_name_or_path")
    if teacher is None or student is None or recipe != "distill" or any(key.startswith(_APART) for key in settings):
        return
    if teacher.value == student.value:
        yield Finding(teacher.where, "teacher_model_name_or_path", ITSELF)


def _direction(metric: Setting, given: Setting | None) -> Iterator[Finding]:
    """Say which way a metric of the trainers is better, and whether the settings choose by the other."""
    known, chosen = greater_is_better(metric.value), None if given is None else given.value
    if known is None or chosen == known:
        return
    words = ("less", "lowest"), ("more", "highest")
    (better, best), (_, other) = words[known], words[not known]
    what = f"the {other} is chosen, as greater_is_better says" if chosen is not None else f"the {best} is chosen"
    yield Finding(metric.where, "metric_for_best_model", f"{better} {metric.value} is better: {what}.")
