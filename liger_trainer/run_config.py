"""From a YAML file and the command line to a checked configuration, and from that to the arguments of the trainers.

Keys are TRL's and transformers' own; a value on the command line goes before the file, the file before the defaults of
our recipes, those before TRL's. Everything wrong is reported at once, each with the line it stands on.
"""

import difflib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .config_source import Setting, find_config, parse_overrides, read_settings
from .errors import ConfigError

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, SFTConfig

    from .config_schema import Key, Schema

RECIPES = ("sft", "distill")
RECIPE_DEFAULT = "recipe default"
Problem = tuple[str, str]
"""A key and what is wrong with it."""
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}


@dataclass(frozen=True)
class RunConfig:
    """A configuration in which every key is known and every value has the right type.

    `values` holds every key of the recipe, defaults included; `settings` only those that were given or that a recipe
    default sets, with their origin; `overrides` the arguments of the command line as they came.
    """

    source: str
    recipe: str
    values: dict[str, Any]
    settings: dict[str, Setting] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def given(self, key: str) -> bool:
        """Whether the user set this key, in the file or on the command line."""
        return key in self.settings and self.settings[key].where != RECIPE_DEFAULT

    def error(self, key: str, message: str) -> ConfigError:
        """A ConfigError about one key, with the place it was set."""
        where = self.settings[key].where if key in self.settings else self.source
        return ConfigError(f"{where}: {key}: {message}")

    def drops_layers(self) -> bool:
        """Whether the student is made from model_name_or_path by leaving out layers."""
        return self["keep_every_nth_layer"] is not None or self["keep_layers"] is not None

    def changes(self) -> dict[str, tuple[Any, str]]:
        """The settings that differ from the defaults of TRL and ours: key -> (value, where it was set)."""
        keys = _schema(self.recipe).keys
        return {
            key: (_without_secrets(key, self.values[key]), setting.where)
            for key, setting in self.settings.items()
            if self.values[key] != keys[key].default
        }

    @contextmanager
    def refusals(self, who: str) -> Iterator[None]:
        """Turn what TRL, transformers or peft say about unsuitable settings into a ConfigError."""
        try:
            yield
        except (ValueError, TypeError, ImportError, RuntimeError) as error:  # one of them for a tracker not installed
            if type(error).__name__ == "OutOfMemoryError":  # torch's, a RuntimeError too
                raise
            raise ConfigError(f"{self.source}: {who} refuses these settings: {error}") from error

    def training_args(self) -> "SFTConfig":
        """SFTConfig or LigerDistillConfig, from the keys that were set.

        `model_init_kwargs` and `resume_from_checkpoint` are left out: models are loaded by `liger_trainer.loading`,
        and the recipe hands the checkpoint to `train()`.

        Raises:
            ConfigError: the arguments contradict each other, or the hardware cannot do what they ask for.
        """
        elsewhere = ("model_init_kwargs", "resume_from_checkpoint")
        schema = _schema(self.recipe)
        return self._build(schema.training_class, "training", elsewhere)

    def model_args(self) -> "ModelConfig":
        """TRL's ModelConfig, from which `get_peft_config` and `get_quantization_config` read."""
        from trl import ModelConfig

        return self._build(ModelConfig, "model")

    def mixture_args(self) -> "DatasetMixtureConfig":
        """TRL's DatasetMixtureConfig, for `datasets:`."""
        from trl import DatasetMixtureConfig

        return self._build(DatasetMixtureConfig, "mixture")

    def _build(self, cls: type, section: str, elsewhere: tuple[str, ...] = ()) -> Any:
        keys = _schema(self.recipe).keys
        chosen = {k: deepcopy(self.values[k]) for k in self.settings if keys[k].section == section}
        with self.refusals(cls.__name__):
            return cls(**{k: v for k, v in chosen.items() if k not in elsewhere})

    def init_kwargs(self, key: str) -> dict[str, Any]:
        """`model_init_kwargs` or `teacher_model_init_kwargs` as a dict; JSON text is accepted as in TRL."""
        value = self.values[key] or {}
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise self.error(key, f"expected a mapping, got text that is no JSON: {error}") from None
        return dict(value)

    def to_yaml(self) -> str:
        """The effective configuration: what was set as YAML that can be run again, every other key as a comment."""
        keys = _schema(self.recipe).keys
        chosen = {k: _without_secrets(k, self.values[k]) for k in self.settings}
        chosen["recipe"] = self.recipe
        rest = {k: v for k, v in self.values.items() if k not in chosen and keys[k].default == v}
        text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=120)
        defaults = yaml.safe_dump(_plain(rest), sort_keys=False, allow_unicode=True, width=120)
        return text + "\n# Defaults in effect:\n" + "".join(f"# {line}\n" for line in defaults.splitlines())


def load_run_config(name: str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read and check a configuration. Loads no model and no data; instantiates no arguments.

    Args:
        name: path of a YAML file, or a built-in name such as "smollm2/distill_layerdrop".
        overrides: "key=value", or "--key" followed by "value".

    Raises:
        ConfigError: every problem found, one a line, each as "file:line: key: expected ..., got ...".
    """
    text, label = find_config(name)
    settings = read_settings(text, label)
    settings.update(parse_overrides(list(overrides)))
    _export_env(settings.pop("env", None))
    recipe = _recipe(settings)
    schema = _schema(recipe)
    known = {k: s for k, s in settings.items() if k in schema.keys}
    problems = [*_unknown(settings, schema, recipe), *_wrong_types(known, schema), *_missing(known, recipe)]
    if not problems:
        values = schema.model(**{k: s.value for k, s in known.items()}).model_dump()
        for key, value in _recipe_defaults(values, known, label).items():
            values[key], known[key] = value, Setting(value, RECIPE_DEFAULT)
        config = RunConfig(label, recipe, {**values, "recipe": recipe}, known, tuple(overrides))
        problems = list(_contradictions(config))
        if not problems:
            return config
    raise _report(label, settings, problems)


def _schema(recipe: str) -> "Schema":
    from .config_schema import schema_of  # imports TRL: seconds, so not for `ls` and not for a YAML syntax error

    return schema_of(recipe)


def _export_env(setting: Setting | None) -> None:
    """TRL's `env:` mapping: environment variables of the run."""
    if setting is None:
        return
    if not isinstance(setting.value, dict):
        raise ConfigError(f"{setting.where}: env: expected a mapping of names to values, got {_got(setting.value)}.")
    for name, value in setting.value.items():
        os.environ[str(name)] = str(value)


def _recipe(settings: dict[str, Setting]) -> str:
    setting = settings.get("recipe")
    if setting is None:
        teacher = any(k.startswith("teacher") and s.value is not None for k, s in settings.items())
        return "distill" if teacher else "sft"
    if setting.value not in RECIPES:
        hint = _did_you_mean(setting.value, RECIPES)
        expected = f"expected one of {', '.join(RECIPES)}, got {_got(setting.value)}.{hint}"
        raise ConfigError(f"{setting.where}: recipe: {expected}")
    return setting.value


def _report(label: str, settings: dict[str, Setting], problems: list[Problem]) -> ConfigError:
    order = {key: position for position, key in enumerate(settings)}
    lines = []
    for key, message in sorted(problems, key=lambda problem: order.get(problem[0], len(order))):
        where = settings[key].where if key in settings else label
        lines.append(f"{where}: {key}: {message}")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems in {label}:\n" + "\n".join(f"  {line}" for line in lines))


def _unknown(settings: dict[str, Setting], schema: "Schema", recipe: str) -> Iterator[Problem]:
    """Keys that do not exist, and keys that exist in TRL but would do nothing here."""
    from .config_schema import LAUNCHER_KEYS, REFUSED, RENAMED

    for key, setting in settings.items():
        if key in schema.keys:
            if key in REFUSED and setting.value != schema.keys[key].default:
                yield key, f"not supported: {REFUSED[key]}."
        elif key in LAUNCHER_KEYS:
            yield key, "belongs to the launcher: `accelerate launch ... -m liger_trainer run CONFIG`."
        elif recipe == "sft" and key in _schema("distill").keys:
            yield key, "belongs to `recipe: distill`; this is `recipe: sft`."
        elif key in RENAMED:
            yield key, f"unknown key. It is called {RENAMED[key]} here."
        else:
            yield key, f"unknown key.{_did_you_mean(key, schema.keys)}"


def _wrong_types(settings: dict[str, Setting], schema: "Schema") -> Iterator[Problem]:
    from pydantic import ValidationError

    try:
        schema.model(**{k: s.value for k, s in settings.items()})
    except ValidationError as error:
        reported = set()
        for detail in error.errors():
            key = str(detail["loc"][0])
            if key not in reported:  # a union reports each of its members
                yield key, _mismatch(dict(detail), settings[key].value, schema.keys[key])
            reported.add(key)


def _mismatch(detail: dict[str, Any], value: Any, spec: "Key") -> str:
    if spec.section == "mixture" and len(detail["loc"]) > 1:
        inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"][1:])
        return f"{inside}: {detail['msg']}, got {_got(detail['input'])}."
    limit = _LIMITS.get(detail["type"])
    if limit:
        return f"expected a number {limit[1]} {detail['ctx'][limit[0]]:g}, got {value}."
    if detail["type"] == "finite_number":
        return f"expected a finite number, got {value}."
    hint = _did_you_mean(value, spec.choices)
    if isinstance(value, float) and value.is_integer() and "an integer" in spec.expects:
        hint = f" Write {int(value)}."
    return f"expected {spec.expects}, got {_got(value)}.{hint}"


def _got(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "text", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"


def _did_you_mean(word: Any, options: Any) -> str:
    close = difflib.get_close_matches(word, list(options), n=1) if isinstance(word, str) else []
    return f" Did you mean {close[0]}?" if close else ""


def _missing(settings: dict[str, Setting], recipe: str) -> Iterator[Problem]:
    def absent(key: str) -> bool:
        return key not in settings or settings[key].value in (None, "", [])

    if absent("model_name_or_path"):
        yield "model_name_or_path", "missing; expected a model directory, a hub id or a demo: name."
    if absent("dataset_name") and absent("datasets"):
        yield "dataset_name", "missing; expected a file, a directory, a hub id or a demo: name."
    if recipe == "distill" and absent("teacher_model_name_or_path"):
        yield "teacher_model_name_or_path", "missing; a distillation needs a teacher (or set recipe: sft)."


def _recipe_defaults(values: dict[str, Any], settings: dict[str, Setting], label: str) -> dict[str, Any]:
    """Where our recipes differ from TRL, for keys that were not given."""
    defaults: dict[str, Any] = {}
    if values["output_dir"] is None:
        defaults["output_dir"] = str(Path("outputs", Path(label).parent.name, Path(label).stem))
    if values["bf16"] is None:
        # TRL's default is true everywhere, which is an error on a CPU
        defaults["bf16"] = not values["fp16"] and not values["use_cpu"] and _gpu_has_bf16()
    if "num_sample_completions" not in settings and _is_sharded(values):
        defaults["num_sample_completions"] = 0
    if "logging_nan_inf_filter" not in settings:
        defaults["logging_nan_inf_filter"] = False  # a NaN loss is shown as NaN, not as 0.0
    return defaults


def _is_sharded(values: dict[str, Any]) -> bool:
    launched = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    return bool(values["fsdp"] or values["deepspeed"] or any(os.environ.get(name) == "true" for name in launched))


def _gpu_has_bf16() -> bool:
    from transformers.utils import is_torch_bf16_gpu_available

    return is_torch_bf16_gpu_available()


def _contradictions(config: RunConfig) -> Iterator[Problem]:
    """Settings that are fine alone and wrong, or without effect, together."""
    given = {k for k in config.settings if config.given(k)}
    lora = sorted(k for k in given if k.startswith("lora_") or k in ("use_rslora", "use_dora"))
    if lora and "use_peft" not in given:
        yield lora[0], "has no effect without `use_peft: true` (or say `use_peft: false` to ignore it)."
    for key in ("load_in_4bit", "load_in_8bit"):
        if config[key] and not config["use_peft"]:
            yield key, "quantized weights cannot be trained; add `use_peft: true` to train adapters on them."
    for key in sorted(given & {"bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"}):
        if "load_in_4bit" not in given:
            yield key, "has no effect without `load_in_4bit: true`."
    if config["keep_every_nth_layer"] is not None and config["keep_layers"] is not None:
        yield "keep_layers", "give either keep_every_nth_layer or keep_layers, not both."
    if config["dataset_name"] and config["datasets"]:
        yield "datasets", "give either dataset_name or datasets, not both."
    if "dataset_test_split" in given and "holdout_fraction" in given:
        yield "holdout_fraction", "has no effect beside dataset_test_split; leave one of them out."
    if "test_split_size" in given and not config["datasets"]:
        yield "test_split_size", "belongs to `datasets`; with dataset_name use holdout_fraction."
    if (config["packing"] or config["eval_packing"]) and config["max_length"] is None:
        yield "max_length", "expected the length of a packed row in tokens, got null with packing on."
    if config["padding_free"] and not config["packing"] and config["max_length"] is not None:
        yield "padding_free", "without packing it does not enforce max_length; set `max_length: null`."
    if config["num_sample_completions"] and _is_sharded(config.values):
        yield "num_sample_completions", "expected 0: a sharded model is not sampled from."
    if config["use_liger_kernel"] and importlib.util.find_spec("liger_kernel") is None:
        yield "use_liger_kernel", "needs the package liger-kernel. The loss is fused without it: leave the key out."
    for key in ("deepspeed", "fsdp_config", "accelerator_config"):
        value = config[key]
        if isinstance(value, str) and not value.startswith("{") and not Path(value).is_file():
            yield key, f"no such file: {value}"


def _without_secrets(key: str, value: Any) -> Any:
    if key == "hub_token" and value:
        return None
    if key.endswith("_init_kwargs") and isinstance(value, dict):
        return {k: v for k, v in value.items() if k != "token"}
    return _plain(value)


def _plain(value: Any) -> Any:
    """The same value in types YAML knows."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
