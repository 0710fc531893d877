"""From a YAML file and the command line to a checked configuration, and from that to the arguments of the trainers.

Keys are TRL's and transformers' own; a value on the command line goes before the file, the file before the defaults of
our recipes, those before TRL's. Everything wrong is reported at once, each with the line it stands on. Checking imports
neither torch nor TRL.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import yaml

from .. import plugins
from ..common.files import DEFAULTS
from ..errors import ConfigError, LigerTrainerError
from ..secrets import names_a_secret, redact, redacted, remember_settings
from .check import ALLOW_ENV, RECIPE_DEFAULT, check, needs_trust
from .schema import Schema, find_config, shipped_schema
from .yaml_reader import Finding, Setting, in_order

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, SFTConfig


# What other libraries call a key in their errors.
_CALLED_OTHERWISE = {
    "flashattention": ("attn_implementation",),
    "bitsandbytes": ("load_in_4bit", "load_in_8bit"),
    "target modules": ("lora_target_modules",),
    "huggingface.co": ("push_to_hub",),
}
_NO_WORDS = ("bf16", "fp16", "tf32", "optim")


@dataclass(frozen=True)
class RunConfig:
    """A configuration in which every key is known and every value has the right type.

    `values` holds every key of the recipe, defaults included; `settings` only those that were given or that a recipe
    default sets, with their origin; `overrides` the arguments of the command line as they came; `notices` what is
    accepted and should be known.
    """

    source: str
    recipe: str
    values: dict[str, Any]
    settings: dict[str, Setting] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    notices: tuple[Finding, ...] = ()
    schema: Schema = field(default_factory=shipped_schema, repr=False, compare=False)

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

    def shown(self, key: str) -> Any:
        """A value as it may be printed and written: in types that YAML knows, without secrets."""
        # An enum or a path is no type of YAML, and would be written as a tag that no safe reader takes.
        value = _plain(self.values[key])
        if isinstance(value, str) and names_a_secret(key):
            return None
        if isinstance(value, dict) and key == "env":  # a variable with half of its value would be wrong
            value = {name: item for name, item in value.items() if redact(str(item)) == str(item)}
        return redacted(value)

    def changes(self, given: bool = True) -> dict[str, tuple[Any, str]]:
        """The settings that differ from the defaults of TRL and ours, and those `given`: key -> (value, where)."""
        keys = self.schema.keys
        return {
            key: (self.shown(key), setting.where)
            for key, setting in self.settings.items()
            if self.values[key] != keys[key].default or (given and key != "recipe" and self.given(key))
        }

    def on_this_machine(self) -> "RunConfig":
        """With what only the machine can tell: whether the GPU has `bf16`, if that was left open. Imports torch."""
        if self["bf16"] is not None:
            return self
        from transformers.utils import is_torch_bf16_gpu_available

        known = is_torch_bf16_gpu_available()
        settings = {**self.settings, "bf16": Setting(known, RECIPE_DEFAULT)}
        return replace(self, values={**self.values, "bf16": known}, settings=settings)

    @contextmanager
    def refusals(self, who: str) -> Iterator[None]:
        """Turn what TRL, transformers or peft say about unsuitable settings into a ConfigError."""
        try:
            yield
        except LigerTrainerError as error:
            key, _, rest = str(error).partition(": ")
            # Our trainers begin with the key, and do not know in which file it stands.
            if type(error) is ConfigError and key in self.settings and rest:
                raise self.error(key, rest) from error
            raise
        except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:  # no tracker; the hub, for a push
            if type(error).__name__ == "OutOfMemoryError":  # torch's, a RuntimeError too
                raise
            key = self.named_in(str(error))
            if key in ("bf16", "bf16_full_eval") and "setup doesn't support bf16" in str(error):
                # transformers' advice, use_cpu, is of no use to who has forgotten that there is no such GPU here.
                advice = f"leave {key} out; bf16 is switched on by itself where a GPU has it"
                raise self.error(key, f"no GPU here computes in bf16: {advice}.") from error
            if key is not None:
                raise self.error(key, f"{who} refuses this: {error}") from error
            raise ConfigError(f"{self.source}: {who} refuses these settings: {error}") from error

    def named_in(self, message: str) -> str | None:
        """Return the key of this configuration that another library's error is about; None if it names none."""
        found: dict[str, int] = {}  # where in the message
        for key in filter(self.given, self.settings):
            names = [word for word, keys in _CALLED_OTHERWISE.items() if key in keys and self[key]]
            # A key without an underscore, such as `packing` or `seed`, may be a word of the sentence.
            names += [key] if "_" in key or key in _NO_WORDS else []
            places = [place.start() for name in names if (place := re.search(rf"\b{name}", message, re.I))]
            if places:
                found[key] = min(places)
        return min(found, key=found.__getitem__, default=None)

    def training_args(self) -> "SFTConfig":
        """LigerConfig or LigerDistillConfig, from the keys that were set.

        `model_init_kwargs` and `resume_from_checkpoint` are left out: models are loaded by `liger_trainer.run.models`,
        and the recipe hands the checkpoint to `train()`.

        Raises:
            ConfigError: the arguments contradict each other, or the hardware cannot do what they ask for.
        """
        if self.recipe != "sft":
            from ..trainers.config import LigerDistillConfig as training_class
        else:
            from ..trainers.config import LigerConfig as training_class
        elsewhere = ("model_init_kwargs", "resume_from_checkpoint")
        sections = ("rows", "images", "step", "qat", "mtp", "non_finite", "training", "distillation", "sampling")
        # Commands ask the machine themselves; this is for who makes the arguments directly.
        args = self.on_this_machine()._build(training_class, sections, elsewhere)
        if self.recipe != "sft":
            args.allow_missing_weights = self["allow_missing_weights"]  # a key of every recipe
        return args

    def model_args(self) -> "ModelConfig":
        """TRL's ModelConfig, from which `get_peft_config` and `get_quantization_config` read."""
        from trl import ModelConfig

        from ..trainers.student import names_of_modules

        args = self._build(ModelConfig, ("model",))
        args.lora_target_modules = names_of_modules(args.lora_target_modules)
        args.lora_target_parameters = names_of_modules(args.lora_target_parameters)
        return args

    def mixture_args(self) -> "DatasetMixtureConfig":
        """TRL's DatasetMixtureConfig, for `datasets:`."""
        from trl import DatasetMixtureConfig

        return self._build(DatasetMixtureConfig, ("mixture",))

    def _build(self, cls: type, sections: tuple[str, ...], elsewhere: tuple[str, ...] = ()) -> Any:
        keys = self.schema.keys
        # A copy: TRL and transformers change lists and mappings that they are given.
        chosen = {k: deepcopy(self.values[k]) for k in self.settings if keys[k].section in sections}
        with self.refusals(cls.__name__):
            return cls(**{k: v for k, v in chosen.items() if k not in elsewhere})

    def init_kwargs(self, key: str) -> dict[str, Any]:
        """`model_init_kwargs` or others of that kind as a dict; JSON text is accepted as in TRL."""
        value = self.values[key] or {}
        return dict(json.loads(value) if isinstance(value, str) else value)

    def to_yaml(self) -> str:
        """The effective configuration: what was set as YAML that can be run again, every other key as a comment.

        How this start of the run came about is left out: the checkpoint it went on from, and leave to overwrite.
        """
        keys = self.schema.of(self.recipe).keys
        # A folder that is resumed must not resume again from the checkpoint of an earlier start.
        of_this_start = ("resume_from_checkpoint", "force_resume", "overwrite_output_dir")
        chosen = {k: self.shown(k) for k in self.settings if k not in of_this_start}
        chosen["recipe"] = self.recipe
        rest = {k: self.shown(k) for k, v in self.values.items() if k not in chosen and keys[k].default == v}
        text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=120)
        defaults = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True, width=120)
        return text + f"\n{DEFAULTS}\n" + "".join(f"# {line}\n" for line in defaults.splitlines())


def load_run_config(
    name: str, overrides: Iterable[str] = (), exact: bool = False, paths: bool = False, found: bool = False
) -> RunConfig:
    """Read and check a configuration, and set the variables of its `env`.

    Loads no model and no data; instantiates no arguments.

    Args:
        name: path of a YAML file, or a built-in name such as "smollm2/distill_pruned".
        overrides: "key=value", or "--key" followed by "value", or "~key" to take a key out of the file; "--allow-env"
            lets `env` set what makes programs run other code, such as PYTHONPATH.
        exact: know the keys of the installed TRL and transformers also where they are not the ones the package was
            made with. They are then imported; without `exact` only if something seems wrong.
        paths: also look whether the files and folders are there that it names.
        found: it lies in the folder that was named. Its `env` is not set, and what runs code of a model or of the hub
            counts from the command line only.

    Raises:
        ConfigError: every problem found, one a line, each as "file:line: key: expected ..., got ...".
    """
    text, label = find_config(name)
    return check_text(text, label, overrides, exact, paths, found)


def check_text(
    text: str, label: str, overrides: Iterable[str] = (), exact: bool = False, paths: bool = False, found: bool = False
) -> RunConfig:
    """`load_run_config` for a configuration at hand as text; `label` names it in messages."""
    overrides = tuple(overrides)
    shipped = shipped_schema()
    same = shipped.is_of_installed()
    settings, allow_env = [word for word in overrides if word != ALLOW_ENV], ALLOW_ENV in overrides
    # The shipped schema needs no import of TRL, which takes seconds. It may be wrong only where another TRL is
    # installed: then what it refuses is judged again by that one.
    if same or not exact:
        checked = check(text, label, settings, shipped, allow_env, paths)
    if not same and (exact or checked.problems):
        installed = plugins.load("schema").installed_schema()  # which imports TRL
        checked = check(text, label, settings, installed, allow_env, paths)
    for key, setting in checked.settings.items():
        # Before anything is printed: a message may quote a value.
        remember_settings(key, setting.value)
    problems = [*checked.problems, *(needs_trust(checked.settings) if found else ())]
    if problems:
        raise _report(label, problems)
    # Now, since libraries read their variables when they are imported.
    for variable, value in (checked.values["env"] or {}).items() if not found else ():
        os.environ[str(variable)] = str(value)
    notices = tuple(in_order(checked.notices))
    return RunConfig(label, checked.recipe, checked.values, checked.settings, overrides, notices, checked.schema)


def _report(label: str, problems: list[Finding]) -> ConfigError:
    lines = [str(problem) for problem in in_order(problems)]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems in {label}:\n" + "\n".join(f"  {line}" for line in lines))


def _plain(value: Any) -> Any:
    """The same value in types YAML knows."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
