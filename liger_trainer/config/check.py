"""Checks a configuration as a whole: names, types, what is missing, what does not go together. All findings at once."""

import difflib
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .. import plugins
from ..common.files import EXPECTED, SUFFIXES, hint_of_folder, is_path, kind_of_file
from ..common.options import OptionValues, complaints, did_you_mean, read
from ..errors import ConfigError
from ..kernels.divergence_kinds import REMOVED as REMOVED_KINDS
from ..losses.plan import FIELDS, plan_of, without_effect
from ..secrets import SECRET
from .conflicts import (
    CALLED,
    FORMER,
    GONE,
    REFUSED,
    REMOVED,
    SHARDED,
    TWO_STAGES,
    conflicts,
    notices,
    renamed,
    unknown_engine,
)
from .run_options import RECIPES
from .schema import Schema
from .yaml_reader import COMMAND_LINE, DROPPED, Finding, Setting, inline, parse_overrides, read_settings

RECIPE_DEFAULT = "recipe default"


@dataclass(frozen=True)
class Checked:
    """The outcome: values with defaults, the settings among them, what is wrong and what should be known."""

    recipe: str
    schema: Schema
    values: dict[str, Any]
    settings: dict[str, Setting]
    problems: list[Finding]
    notices: list[Finding]


def check(
    text: str, label: str, overrides: Sequence[str], schema: Schema, allow_env: bool = False, paths: bool = False
) -> Checked:
    """Check the YAML `text`, called `label` in messages, with the command line's `overrides`.

    Args:
        allow_env: let `env` set what makes programs run other code.
        paths: also look whether the files and folders are there that it names.

    Raises:
        ConfigError: `text` is not valid YAML or no mapping.
    """
    given, problems = read_settings(text, label)
    words = parse_overrides(list(overrides))
    problems += [*words.findings, *_override(given, words.values, label)]
    told: list[Finding] = []
    given = _present_names(given, problems, told)
    # Which keys there are depends on the recipe, so it is guessed even from what is misspelt.
    recipe = _recipe(given, problems)
    checked = _check_settings(given, recipe, label, schema, allow_env, paths)
    return replace(checked, problems=[*problems, *checked.problems], notices=[*told, *checked.notices])


def _check_settings(
    given: Mapping[str, Setting], recipe: str, label: str, schema: Schema, allow_env: bool, paths: bool
) -> Checked:
    """Check settings with names of today as one run of `recipe`."""
    problems: list[Finding] = []
    keys = schema.of(recipe).keys
    known = {key: setting for key, setting in given.items() if key in keys}
    problems += _unknown(given, schema, recipe)
    problems += _wrong_types(known, keys)
    problems += _missing(given, recipe, label)
    for key, setting in given.items():
        if SECRET in repr(setting.value):  # a run wrote it down without the secret
            message = f"a secret was left out here ({SECRET}); give it again on the command line: {key}=..."
            problems.append(Finding(setting.where, key, message))

    # A key that is wrong by itself is left out of all checks of several keys: one mistake, one message.
    wrong = {problem.key for problem in problems}
    settings = {key: Setting(read(setting.value, keys[key].rule), setting.where) for key, setting in known.items()}
    values = {key: deepcopy(spec.default) for key, spec in keys.items()}
    values.update({key: setting.value for key, setting in settings.items()})
    values["recipe"] = recipe  # also where it is inferred
    for key, value in _recipe_defaults(values, settings, label):
        values[key], settings[key] = value, Setting(value, RECIPE_DEFAULT)
    options = OptionValues(values, known.keys())
    if recipe != "sft" and wrong.isdisjoint(FIELDS):
        problems += _no_loss(values, settings, label)
    for key, message in conflicts(options, wrong):
        problems.append(Finding(settings[key].where if key in settings else label, key, message))
    if "env" in known and not allow_env:
        problems += variables_not_allowed(known["env"])
    if paths:
        problems += missing_paths({key: setting for key, setting in known.items() if key not in wrong}, label)
    if paths and "accelerate_config" in settings and "accelerate_config" not in wrong:
        engine = settings["accelerate_config"]
        message = None if engine.value is None else unknown_engine(engine.value)
        problems += [Finding(engine.where, "accelerate_config", message)] if message else []
    if "report_to" in settings and "report_to" not in wrong:
        message = unknown_tracker(settings["report_to"].value)
        problems += [Finding(settings["report_to"].where, "report_to", message)] if message else []
    told = [] if problems else list(notices(known, keys, recipe))
    return Checked(recipe, schema, values, settings, problems, told)


def _override(given: dict[str, Setting], words: Mapping[str, Setting], label: str) -> Iterator[Finding]:
    """Put the command line's settings over those of the file; `~key` takes one out."""
    in_file = tuple(given)
    for key, setting in words.items():
        # A key with the value DROPPED is one that the command line takes out: `~key`.
        if setting.value is not DROPPED:
            given[key] = setting
        elif key in given:
            del given[key]
        else:
            yield Finding(setting.where, f"~{key}", f"{label} does not set it.{did_you_mean(key, in_file)}")


def _present_names(given: dict[str, Setting], problems: list[Finding], told: list[Finding]) -> dict[str, Setting]:
    """The settings with names of today; those that nothing reads any more are left out."""
    present = {}
    for key, setting in given.items():
        if key in GONE:
            told.append(Finding(setting.where, key, f"left out: {GONE[key]}."))
        elif key in FORMER:
            now, setting, notice = renamed(key, setting)
            if now in given:
                message = f"is the former name of {now}, which is set too; leave one of them out."
                problems.append(Finding(setting.where, key, message))
            else:
                present[now] = setting
                told.append(Finding(setting.where, key, notice))
        else:
            present[key] = setting
    return present


def _recipe(given: dict[str, Setting], problems: list[Finding]) -> str:
    """The recipe that is said, or nearest to what is said, or, if nothing is, by whether there is a teacher."""
    said = given["recipe"].value if "recipe" in given else None
    if said == TWO_STAGES:
        problems.append(Finding(given["recipe"].where, "recipe", f"{said} was removed: {REMOVED['second_stage']}"))
        return "distill"
    close = difflib.get_close_matches(said, RECIPES, n=1) if isinstance(said, str) else []
    teacher = any(key.startswith("teacher") and setting.value is not None for key, setting in given.items())
    return close[0] if close else "distill" if teacher else "sft"


def _unknown(given: Mapping[str, Setting], schema: Schema, recipe: str) -> Iterator[Finding]:
    """Keys that do not exist, and keys that exist in TRL but would do nothing here."""
    keys = schema.of(recipe).keys
    for key, setting in given.items():
        message = None
        if key in keys:
            if key in REFUSED and setting.value != keys[key].default:
                message = f"not supported: {REFUSED[key]}."
        elif key in schema.keys:
            message = "belongs to `recipe: distill`; this is `recipe: sft`."
        elif key in REMOVED:
            message = f"was removed: {REMOVED[key]}"
        elif key in CALLED:
            message = f"unknown key. It is called {CALLED[key]} here."
        else:
            message = f"unknown key.{did_you_mean(key, keys)}"
        if message:
            yield Finding(setting.where, key, message)


def _wrong_types(settings: Mapping[str, Setting], keys: Mapping[str, Any]) -> Iterator[Finding]:
    for key, setting in settings.items():
        rule = keys[key].rule
        for path, message in complaints(read(setting.value, rule), rule):
            steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
            # complaints knows only what is allowed; what was allowed once gets the reason.
            for kind, instead in REMOVED_KINDS.items():
                if key == "losses" and f"'{kind}'" in message:
                    message = f"{kind} was removed: {instead}."
            yield Finding(setting.place(path), key, f"{steps}: {message}" if steps else message)


def _no_loss(values: Mapping[str, Any], settings: Mapping[str, Setting], label: str) -> Iterator[Finding]:
    """What is wrong with the loss that the settings describe together, beyond the type of each."""
    try:
        for key, message in without_effect(plan_of(values), values, settings):
            yield Finding(settings[key].where, key, message)
    except ValueError as error:
        message = str(error)
        key = message.partition(" ")[0].rstrip(":")
        key = key if key in FIELDS else "losses"
        where = settings[key].where if key in settings else label
        yield Finding(where, key, message.removeprefix(f"{key}: "))


def _missing(given: Mapping[str, Setting], recipe: str, label: str) -> Iterator[Finding]:
    def absent(key: str) -> bool:
        return key not in given or given[key].value in (None, "", [])

    if absent("model_name_or_path"):
        yield Finding(label, "model_name_or_path", "missing; expected a model directory, a hub id or a demo: name.")
    if absent("dataset_name") and absent("datasets"):
        yield Finding(label, "dataset_name", "missing; expected a file, a directory, a hub id or a demo: name.")
    elsewhere = "teacher" in given and given["teacher"].value != "model" or not absent("teachers")
    if recipe != "sft" and absent("teacher_model_name_or_path") and not elsewhere:
        message = "missing; a distillation needs a teacher (or set recipe: sft)."
        yield Finding(label, "teacher_model_name_or_path", message)


def _recipe_defaults(
    values: Mapping[str, Any], settings: Mapping[str, Setting], label: str
) -> Iterator[tuple[str, Any]]:
    """Where our recipes differ from TRL, for keys that were not given.

    `bf16` stays open unless it cannot be: TRL's default is true everywhere, which is an error on a CPU, and only torch
    knows the GPU (`RunConfig.on_this_machine`).
    """
    if values["output_dir"] is None:
        yield "output_dir", str(Path("outputs", Path(label).parent.name, Path(label).stem))
    # fp16 excludes bf16, and without a GPU TRL's default, true, is an error.
    if values["bf16"] is None and (values["fp16"] or values["use_cpu"]):
        yield "bf16", False
    if "num_sample_completions" not in settings and SHARDED.holds(OptionValues(values, ())):
        yield "num_sample_completions", 0


# What a configuration names outside itself: files and folders on this machine, and variables of the environment.
ALLOW_ENV, API_KEY = "--allow-env", "teacher_server_api_key_env"
PATHS = (
    "model_name_or_path", "teacher_model_name_or_path", "teacher_tokenizer_name_or_path", "dataset_name",
    "chat_template_path", "resume_from_checkpoint",
)  # fmt: skip
_IN_A_LIST = {"datasets": ("data_files", "data_dir"), "teachers": ("teacher_model_name_or_path",)}
# Variables that choose among what is installed, and none that names a program, a library or compiled code to load.
_ALLOWED = re.compile(
    # Hugging Face's libraries: where files lie, what is printed, which server is asked
    r"HF_(?!MODULES_CACHE)\w+|HUGGINGFACE_HUB_\w+|(TRANSFORMERS|DATASETS|DIFFUSERS)_(VERBOSITY|CACHE|OFFLINE)"
    r"|TOKENIZERS_PARALLELISM|TRL_EXPERIMENTAL_SILENCE|LIGER_TRAINER_\w+"
    # trackers: project, names, server, login
    r"|(WANDB|MLFLOW|COMET|NEPTUNE|CLEARML|TRACKIO|SWANLAB|DVCLIVE)_[A-Z]\w*|TENSORBOARD_LOGGING_DIR"
    # which devices, how many threads, how memory is taken, what is logged
    r"|(CUDA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG"
    r"|NVIDIA_TF32_OVERRIDE|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|PYTORCH_MPS_HIGH_WATERMARK_RATIO|TORCH_LOGS"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|RAYON|POLARS|VECLIB_MAXIMUM)_(NUM_|MAX_)?THREADS|RAYON_NUM_THREADS"
    # how processes talk to each other, and to the network
    r"|TORCH_NCCL_\w+|(NCCL|GLOO)_SOCKET_IFNAME|NCCL_(DEBUG(_SUBSYS|_FILE)?|TIMEOUT|ALGO|PROTO|P2P_(DISABLE|LEVEL)"
    r"|SHM_DISABLE|IB_(DISABLE|HCA|TIMEOUT|GID_INDEX|TC|SL)|NET_GDR_LEVEL|CUMEM_ENABLE|NVLS_ENABLE|BUFFSIZE"
    r"|(MIN|MAX)_(NCHANNELS|CTAS)|NTHREADS|ASYNC_ERROR_HANDLING|BLOCKING_WAIT|CROSS_NIC|TOPO_DUMP_FILE)"
    r"|(HTTPS?|ALL|NO)_PROXY|PYTHON(HASHSEED|UNBUFFERED|FAULTHANDLER|IOENCODING|UTF8)",
    re.IGNORECASE,
)


def missing_paths(settings: Mapping[str, Setting], label: str = "") -> Iterator[Finding]:
    """Yield the settings that name a file or folder which is not there, or an adapter where a whole model is needed.

    Demos and the endings of files with rows are looked at too. What may be a hub id is not looked for."""
    for key, setting in settings.items():
        for path, value in _names(key, setting.value):
            found = Path(value).expanduser()
            if value.startswith(plugins.DEMO):
                try:
                    demos = plugins.load(plugins.DEMO)
                    demos.demo_key(value, demos.DEMO_DATASETS if key == "dataset_name" else demos.DEMO_MODELS)
                except ConfigError as error:
                    yield Finding(setting.place(path), key, str(error))
            elif is_path(value) and not found.exists():
                yield Finding(
                    setting.place(path), key, f"no such file or folder: {value}{hint_of_folder(label, value)}"
                )
            elif key == "dataset_name" and found.is_file() and kind_of_file(found) not in SUFFIXES:
                yield Finding(setting.place(path), key, f"{found.name}: expected {EXPECTED}.")
            elif (
                key == "model_name_or_path"
                and (found / "adapter_config.json").is_file()
                and not (found / "config.json").is_file()
            ):
                advice = f"merge it first: {shlex.join(['liger-trainer', 'merge', value, 'MERGED'])}"
                yield Finding(setting.place(path), key, f"{value} is an adapter, no whole model; {advice}.")


def _names(key: str, value: Any) -> Iterator[tuple[tuple, str]]:
    if key in PATHS and isinstance(value, str):
        yield (), value
    # Parts of a mixture and of several teachers name files of their own.
    for index, entry in enumerate(value if key in _IN_A_LIST and isinstance(value, list) else ()):
        for name in _IN_A_LIST[key] if isinstance(entry, dict) else ():
            listed = entry.get(name)
            for item in listed if isinstance(listed, list) else [listed]:
                if isinstance(item, str):
                    yield (index, name), item


def variables_not_allowed(env: Setting) -> Iterator[Finding]:
    """Yield the variables of `env` by which a file that was only meant to be trained with could start a program."""
    for name in env.value if isinstance(env.value, dict) else ():
        if not _ALLOWED.fullmatch(str(name)):
            message = (
                f"{name} is none of the variables that a configuration may set: those of trackers, of Hugging Face's "
                "libraries and of NCCL, devices, threads, memory and proxies. Others can make programs run other code. "
                f"Set it in the shell, or add {ALLOW_ENV} to the command line."
            )
            yield Finding(env.place((name,)), "env", message)


def needs_trust(settings: Mapping[str, Setting]) -> Iterator[Finding]:
    """Yield the settings that run code of a model or of the hub, or send a variable of this machine to a server. A
    configuration that lies in a folder does not decide them, since nobody named it."""
    for key, setting in settings.items():
        if setting.where != COMMAND_LINE and _is_trusting(key, setting.value):
            risk = "send a key to a server" if key == API_KEY else "run code that a model or the hub brings"
            message = (
                f"{setting.value!r} can {risk}. A configuration that was found in a folder does not decide that: if "
                f"you trust it, add {key}=... to the command line."
            )
            yield Finding(setting.where, key, message)


def _is_trusting(key: str, value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("{"):  # JSON, as TRL takes keywords too
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            return False  # no keywords either
    if isinstance(value, dict):
        return any(_is_trusting(str(name), item) for name, item in value.items())
    if isinstance(value, list):
        return any(_is_trusting(key, item) for item in value)
    if key in ("attn_implementation", "experts_implementation"):  # owner/name is code of the hub
        return "/" in str(value)
    return key in ("trust_remote_code", "use_kernels", API_KEY) and bool(value)


# The trackers of `report_to`: which there are, and whether what they need is installed. Imports none of them.
# name in transformers: the packages it needs, each as the modules of which one must be there
TRACKERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "azure_ml": (("azureml",),),
    "clearml": (("clearml",),),
    "codecarbon": (("codecarbon",),),
    "comet_ml": (("comet_ml",),),
    "dagshub": (("dagshub",), ("mlflow",)),
    "dvclive": (("dvclive",),),
    "flyte": (("flytekit",),),
    "kubeflow": (),  # its environment tells it where to report
    "mlflow": (("mlflow",),),
    "neptune": (("neptune",),),
    "swanlab": (("swanlab",),),
    "tensorboard": (("tensorboard", "tensorboardX"),),
    "trackio": (("trackio",),),
    "wandb": (("wandb",),),
}
NO_NAMES = ("all", "none")  # every one that is installed, and no tracker


def tracker_names(report_to: str | Sequence[str] | None) -> list[str]:
    """The names in a value of `report_to`; `all` and `none`, which stand for every one or no one, are no names."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    return [] if len(names) == 1 and names[0] in NO_NAMES else names


def unknown_tracker(report_to: Any) -> str | None:
    """What is wrong with a value of `report_to`, in words: a name that is none of a tracker."""
    for name in tracker_names(report_to):
        if name in NO_NAMES:
            return f"{name!r} cannot be combined with other trackers."
        if name not in TRACKERS:
            return f"expected {', '.join(TRACKERS)}, all or none, got {name!r}.{did_you_mean(name, TRACKERS)}"
    return None


# The package that a value needs, one of those named.
_BY_VALUE: dict[tuple[str, Any], tuple[str, ...]] = {
    ("load_in_4bit", True): ("bitsandbytes",),
    ("load_in_8bit", True): ("bitsandbytes",),
    ("teacher_load_in_4bit", True): ("bitsandbytes",),
    ("teacher_load_in_8bit", True): ("bitsandbytes",),
    # transformers falls back to the hub's kernels
    ("attn_implementation", "flash_attention_2"): ("flash-attn", "kernels"),
    ("attn_implementation", "flash_attention_3"): ("flash-attn-3", "kernels"),
}


def not_installed(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values need a package that is not installed, each with what to do about it."""
    for name in tracker_names(values["report_to"]):
        for modules in TRACKERS[name]:
            if not any(importlib.util.find_spec(module) for module in modules):
                advice = f"pip install {modules[0].replace('_', '-')}, or report_to=none"
                yield "report_to", f"{name} needs {modules[0]}, which is not installed: {advice}."
    for (key, value), packages in _BY_VALUE.items():
        if values.get(key) == value and not any(map(_has, packages)):
            needed = " or ".join(packages)
            yield key, f"{inline(value)} needs {needed}, which is not installed: pip install {packages[0]}."


def _has(package: str) -> bool:
    # By the package's record: a folder called `kernels`, such as ours, could be imported under that name.
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Of what transformers has under these names, and PEFT for every model, no model needs to be asked.
_FOR_EVERY_MODEL: dict[str, tuple[Any, ...]] = {
    "attn_implementation": (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "lora_target_modules": (None, "all-linear", ["all-linear"]),
    "lora_modules_to_save": (None, []),
}


def judged_by_the_model(values: Mapping[str, Any]) -> list[str]:
    """The keys whose values are names that only the installed transformers and the model can judge."""
    adapted = ("attn_implementation", *(key for key in _FOR_EVERY_MODEL if values["use_peft"]))
    return [key for key, known in _FOR_EVERY_MODEL.items() if key in adapted and values[key] not in known]
