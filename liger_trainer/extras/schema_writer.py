"""Makes the schema of configurations: the keys, read from the dataclasses of TRL, transformers and ours; and the page
of them. Nothing is instantiated: `SFTConfig.__post_init__` looks for devices. `config.schema` reads the result.
"""

import dataclasses
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import trl
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

from ..common.options import LIMIT_NAMES, Rule, declared, limits_of, on
from ..config.conflicts import CONFLICTS, GONE
from ..config.run_options import LaunchOptions, RunOptions
from ..config.schema import FILE, SECTIONS, Schema, from_json, installed_versions, shipped_schema
from ..losses.plan import entry_rule
from ..losses.schedules import SCHEDULES, TAID
from ..teachers.config import DTYPES, ENTRY_KEYS
from ..trainers.config import LigerDistillConfig
from ..trainers.options import (
    ImagesConfig,
    MtpConfig,
    NonFiniteConfig,
    QatConfig,
    RowsConfig,
    SamplingConfig,
    StepConfig,
)

# their descriptions are ours to ship
OWN = ("run", "launch", "rows", "images", "step", "qat", "mtp", "non_finite", "distillation", "sampling")
# Limits of keys that are TRL's and transformers': their dataclasses declare none.
_AT_LEAST_ONE = (
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length lora_r lora_alpha "
    "dataset_num_proc save_total_limit torch_empty_cache_steps eval_accumulation_steps ddp_timeout ddp_bucket_cap_mb "
    "pad_to_multiple_of"
)
_NOT_NEGATIVE = (
    "learning_rate warmup_steps weight_decay max_grad_norm dataloader_num_workers logging_steps eval_steps save_steps "
    "eval_delay neftune_noise_alpha router_aux_loss_coef"
)
LIMITS: dict[str, dict[str, float]] = {
    **{name: {"ge": 1} for name in _AT_LEAST_ONE.split()},
    **{name: {"ge": 0} for name in _NOT_NEGATIVE.split()},
    **{name: {"ge": 0, "le": 2**32 - 1} for name in ("seed", "data_seed")},  # NumPy's
    **{name: {"ge": 0, "lt": 1} for name in ("adam_beta1", "adam_beta2")},
    "adam_epsilon": {"gt": 0},  # 0 makes NaN of weights without gradients
    "num_train_epochs": {"gt": 0},
    "max_steps": {"ge": -1},
    "lora_dropout": {"ge": 0, "lt": 1},
    "label_smoothing_factor": {"ge": 0, "lt": 1},
    "test_split_size": {"gt": 0, "lt": 1},
}
# PEFT knows more tasks, and no trainer here trains them.
CHOICES = {
    "lora_task_type": ["CAUSAL_LM"],
    "torch_compile_mode": ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
}
_ENTRY_TYPES = {
    "name": {"type": "string"},
    "teacher": {"enum": ["model", "self"]},
    "weight": {"type": "number", "exclusiveMinimum": 0},
    "routes": {"type": "array", "items": {"type": ["string", "integer"]}},
    "teacher_model_init_kwargs": {"type": ["object", "string"]},
    "teacher_dtype": {"enum": list(DTYPES)},
    **{name: {"type": "boolean"} for name in ("teacher_load_in_4bit", "teacher_load_in_8bit", "teacher_offload")},
}
# no shell stands between a file and its values, and YAML makes tabs of "\\t"
_PATH: Rule = {
    "type": ["string", "null"], "pattern": r"^(?!.*(\$[\w{]|\{\{))[^\x00-\x1f]+$",
    "patternErrorMessage": "a path without control characters, and without variables, which nothing replaces here",
}  # fmt: skip
# other than annotated: `all-linear`, and `true` for the newest checkpoint, as TRL reads YAML; the parts of a loss
RULES: dict[str, Rule] = {
    "lora_target_modules": {"type": ["array", "string", "null"], "items": {"type": "string"}},
    "lora_target_parameters": {"type": ["array", "string", "null"], "items": {"type": "string"}},
    "resume_from_checkpoint": {"type": ["string", "boolean", "null"]},
    "teachers": {
        "type": ["array", "string", "null"],
        "items": {
            "type": "object",
            "properties": {name: _ENTRY_TYPES.get(name, {"type": "string"}) for name in ENTRY_KEYS},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    **dict.fromkeys(("output_dir", "student_output_dir", "teacher_cache_dir"), _PATH),
    "env": {
        "type": ["object", "null"],
        "additionalProperties": {
            "type": ["string", "integer", "number", "boolean"],
            "pattern": r"^[^\x00]*$",
            "patternErrorMessage": "text without null characters",
        },
    },
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        {
            "type": ["object", "string", "null"],
            "additionalProperties": False,
            "properties": dict.fromkeys(
                ("use_reentrant", "preserve_rng_state", "debug", "early_stop"), {"type": "boolean"}
            )
            | {"determinism_check": {"enum": ["default", "none"]}},
        },
    ),
    "include_num_input_tokens_seen": {"enum": [False, True, "no", "all", "non_padding"]},
    "optim_args": {
        "type": ["string", "null"],
        "pattern": r"^\s*(\w+\s*=[^,]*(,\s*\w+\s*=[^,]*)*)?$",
        "patternErrorMessage": "names and values such as a=1,b=2",
    },
    "pad_to_multiple_of": {
        "type": ["integer", "string", "null"],
        "minimum": 1,
        "pattern": r"^(auto|\d+)$",
        "patternErrorMessage": "an integer, auto or null",
    },
    "losses": {"type": ["array", "string", "null"], "items": entry_rule()},
    "schedules": SCHEDULES,
    "taid": TAID,
}
# of every key whose name ends so, beside its type
_KWARGS: Rule = {"pattern": r"^\s*\{", "patternErrorMessage": "a mapping, or JSON text of one"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}


def json_schema(descriptions: bool = False) -> dict[str, Any]:
    """The JSON Schema of a configuration, from the installed TRL and transformers.

    Args:
        descriptions: with the help texts that TRL and transformers give their fields, and ours.
    """
    properties = {}
    for section, fields in _fields().items():
        for item, hint in fields:
            properties[item.name] = _property(item, hint, section, descriptions or section in OWN)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of liger-trainer",
        "x-generated-from": installed_versions(),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **_conflicts(set(properties)),
    }


def _conflicts(known: set[str]) -> dict[str, Any]:
    """The conflicts that an editor can see, as JSON Schema: `dependentRequired`, and `if` and `then`."""
    needed: dict[str, list[str]] = {}
    conditions = []
    for conflict in CONFLICTS:
        if conflict.when.rule is None or not known.issuperset(conflict.reads):
            continue
        if conflict.needs:
            needed.setdefault(conflict.key, []).append(conflict.needs)
        elif conflict.missing:
            conditions.append({"if": conflict.when.rule, "then": on(conflict.key).rule})
        else:
            refusal: Rule = {"not": {}, "errorMessage": f"{conflict.key}: {conflict.message}"}
            if _requires(conflict.when.rule, conflict.key):  # an editor then marks this line
                refusal = {"properties": {conflict.key: refusal}}
            conditions.append({"if": conflict.when.rule, "then": refusal})
    return {"dependentRequired": needed, "allOf": conditions}


def _requires(rule: Rule, key: str) -> bool:
    return key in rule.get("required", ()) or any(_requires(part, key) for part in rule.get("allOf", ()))


def _fields() -> dict[str, list[tuple[dataclasses.Field, Any]]]:
    """Fields with their types by section, each name once; those that only one recipe has apart."""
    classes = {
        "run": RunOptions, "launch": LaunchOptions, "model": ModelConfig, "dataset": ScriptArguments,
        "mixture": DatasetMixtureConfig, "rows": RowsConfig, "images": ImagesConfig, "step": StepConfig,
        "qat": QatConfig, "mtp": MtpConfig, "non_finite": NonFiniteConfig, "training": SFTConfig,
        "distillation": LigerDistillConfig, "sampling": SamplingConfig,
    }  # fmt: skip
    # Not every TRL has it at this place.
    if hasattr(trl, "DistillationConfig"):
        classes["elsewhere"] = trl.DistillationConfig
    apart = {"distillation": {item.name for item in dataclasses.fields(SamplingConfig)}}  # inherited, and listed later
    seen: set[str] = set()
    fields = {}
    for section in SECTIONS:
        if section in classes:
            hints = get_type_hints(classes[section])
            new = [item for item in dataclasses.fields(classes[section]) if item.name not in {*seen, *GONE}]
            new = [item for item in new if item.name not in apart.get(section, ())]
            seen.update(item.name for item in new)
            fields[section] = [(item, hints[item.name]) for item in new]
    return fields


def _property(item: dataclasses.Field, hint: Any, section: str, described: bool) -> Rule:
    default = item.default if item.default_factory is MISSING else item.default_factory()
    choices = CHOICES.get(item.name) or declared(item).get("choices") or item.metadata.get("choices") or ()
    rule = dict(RULES.get(item.name) or _rule(hint, choices))
    rule |= _KWARGS if item.name.endswith("_kwargs") else {}
    rule |= limits_of(item) or {LIMIT_NAMES[name]: limit for name, limit in LIMITS.get(item.name, {}).items()}
    text = item.metadata.get("help") if described else None
    return {
        **rule,
        **({"description": text} if text else {}),
        "default": default.value if isinstance(default, Enum) else default,
        "x-section": section,
    }


def _rule(hint: Any, choices: Iterable[str] = ()) -> Rule:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    options = [*choices] or [
        member.value for enum in members if isinstance(enum, type) and issubclass(enum, Enum) for member in enum
    ]
    if options:
        return {"enum": [*options, *([None] if type(None) in members else [])]}
    # int | None becomes ["integer", "null"], list[str] also what is in it.
    rule: Rule = {"type": []}
    for member in members:
        kind, inside = _type(member)
        rule["type"].append(kind)
        rule.update(inside)
    rule["type"] = list(dict.fromkeys(rule["type"]))
    if len(rule["type"]) == 1:
        rule["type"] = rule["type"][0]
    return rule


def _type(member: Any) -> tuple[str, Rule]:
    """The JSON type of one member of a union, and what that says about the inside."""
    if member in _TYPES:
        return _TYPES[member], {}
    origin, arguments = get_origin(member), get_args(member)
    if origin is list or member is list:
        return "array", {"items": _rule(arguments[0])} if arguments and arguments[0] is not Any else {}
    if origin is dict:
        return "object", {"additionalProperties": _rule(arguments[1])} if arguments[1] is not Any else {}
    if origin is Literal:
        return _TYPES[type(arguments[0])], {}
    if isinstance(member, type) and dataclasses.is_dataclass(member):
        hints = get_type_hints(member)
        fields = dataclasses.fields(member)
        return "object", {
            "properties": {item.name: _rule(hints[item.name]) for item in fields},
            "required": [f.name for f in fields if f.default is MISSING and f.default_factory is MISSING],
            "additionalProperties": False,
        }
    return "object", {}  # a class that is built from a mapping, such as ParallelismConfig


def schema_text(document: Mapping[str, Any]) -> str:
    """The document as JSON with a line a key, so that a change of one key is a change of one line."""
    properties = document["properties"]
    lines = [f"    {json.dumps(name)}: {json.dumps(rule, ensure_ascii=False)}" for name, rule in properties.items()]
    conditions = [f"    {json.dumps(rule, ensure_ascii=False)}" for rule in document["allOf"]]
    apart = ("properties", "allOf")
    head = json.dumps({k: v for k, v in document.items() if k not in apart}, indent=2, ensure_ascii=False)
    return (
        head.removesuffix("\n}")
        + ',\n  "properties": {\n' + ",\n".join(lines)
        + '\n  },\n  "allOf": [\n' + ",\n".join(conditions) + "\n  ]\n}\n"
    )  # fmt: skip


@lru_cache
def installed_schema() -> Schema:
    """The schema of the installed TRL and transformers. Imports them."""
    return from_json(json_schema())


# What `liger-trainer schema --write` renews in a checkout: schema.json, and docs/configs.md with every key.


def markdown() -> str:
    """docs/configs.md: every key of the shipped schema with type and default, by where it comes from."""
    schema = shipped_schema()
    versions = " and ".join(f"{package} {number}" for package, number in schema.versions.items())
    tables = "\n".join(_tables())
    return f"""# Keys of a configuration

<!-- Written by `liger-trainer schema --write`; do not edit. -->

Every key that `liger-trainer run` knows, with {versions}. `liger-trainer config` prints them
with their effective values and where each was set; `liger-trainer schema` prints this as JSON Schema,
and with `--describe` also the texts that the installed TRL and transformers have for theirs. How values
are given, and what is accepted in addition to these names: [the command line](cli.md).
{tables}
"""


def _tables() -> Iterator[str]:
    for section, title in SECTIONS.items():
        keys = {name: key for name, key in shipped_schema().keys.items() if key.section == section}
        if not keys:
            continue
        described = any(key.description for key in keys.values())
        yield from ("", f"## {title[0].upper()}{title[1:]}", "")
        if section == "sampling":
            yield from ("With `lmbda` above 0 or `seq_kd`; otherwise reported as without effect.", "")
        if section == "elsewhere":
            yield from ("Accepted, so that files of TRL run, and reported as without effect.", "")
        yield "| key | value | default |" + (" meaning |" if described else "")
        yield "|---|---|---|" + ("---|" if described else "")
        for name, key in keys.items():
            expects = key.expects if len(key.expects) < 120 else f"{key.expects[:100].rpartition(',')[0]}, ..."
            default = json.dumps(key.default, ensure_ascii=False)
            meaning = f" {key.description} |" if described else ""
            yield f"| `{name}` | {expects} | `{default}` |{meaning}"


def write(root: Path) -> list[Path]:
    """Write both files into the checkout at `root`, and return their paths."""
    schema, reference = root / "liger_trainer" / "config" / FILE, root / "docs" / "configs.md"
    schema.write_text(schema_text(json_schema()), encoding="utf-8")
    # The page below is written from the schema that was just written.
    shipped_schema.cache_clear()
    reference.write_text(markdown(), encoding="utf-8")
    return [schema, reference]
