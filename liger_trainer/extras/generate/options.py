"""The options of `generate`. Imports no torch."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from ...common.options import (
    HTTP,
    OptionValues,
    Rule,
    check_options,
    clashes,
    complaints,
    conflicts_of,
    declared,
    did_you_mean,
    given,
    limits_of,
    option,
    read,
)
from ...config.yaml_reader import DROPPED, parse_overrides
from ...errors import ConfigError

DRAWN_ROWS = 1000
"""Rows that are kept where the prompts are drawn and `num_rows` is not set."""
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SERVER, _PROMPTS, _HELD_OUT = given("teacher_server_base_url"), given("prompts"), given("held_out")


@dataclass(frozen=True)
class GenerateOptions:
    """How data is sampled from a teacher, and which of it is kept. See docs/extras.md.

    Raises:
        ValueError: a value is beyond its limits, or does nothing next to the others.
    """

    prompts: str | None = option(
        None,
        "Where prompts come from: a file, a directory, a hub id or a demo: name. Default: the teacher draws them "
        "from its chat template's empty user turn.",
    )
    prompts_split: str = option("train", "Split of `prompts`.", needs=_PROMPTS)
    prompt_column: str | None = option(
        None,
        "Column with the prompts, text or chat messages; default: prompt, messages, conversations, instruction, or "
        "the only one.",
        needs=_PROMPTS,
    )
    system_prompt: str | None = option(None, "System message put before each prompt, and kept in the rows.")
    plain: bool = option(
        False, "Text prompts are continued as they are, though the teacher has a chat template.", needs=_PROMPTS
    )
    num_rows: int | None = option(
        None, f"Stop with so many rows kept; default: all prompts, or {DRAWN_ROWS} rows of drawn ones.", ge=1
    )
    completions_per_prompt: int = option(1, "Completions of each prompt.", ge=1, needs=_PROMPTS)
    max_new_tokens: int = option(512, "Most tokens of a completion.", ge=1)
    max_prompt_tokens: int = option(1024, "Longer prompts are left out; drawn ones end here.", ge=1)
    temperature: float = option(1.0, "Of sampling; 0 takes the likeliest token each time.", ge=0)
    top_p: float = option(1.0, "Sample from the likeliest tokens that make up this probability.", gt=0, le=1)
    top_k: int = option(0, "Sample from so many likeliest tokens; 0: from all.", ge=0)
    seed: int = option(42, "Seed of all draws.", ge=0)
    batch_size: int = option(16, "Prompts completed at once; what an interruption loses at most.", ge=1)

    keep_unfinished: bool = option(False, "Keep completions that were cut off at max_new_tokens.")
    min_completion_words: int = option(1, "Drop completions with fewer words.", ge=1)
    max_repetition: float = option(
        0.3, "Drop completions with a greater share of word 4-grams that occurred in them before.", ge=0, le=1
    )
    near_duplicates: float = option(
        0.8, "Drop rows whose word 5-grams have this Jaccard similarity with an earlier row's; 1: only equal ones.",
        ge=0.5, le=1,
    )  # fmt: skip
    held_out: str | None = option(
        None, "Drop rows that share words with the held-out rows of this configuration, a YAML file or built-in name."
    )
    held_out_ngram: int = option(
        13, "So many words in a row that a row must not share with them.", ge=1, needs=_HELD_OUT
    )

    revision: str | None = option(None, "Revision of the teacher on the hub.")
    trust_remote_code: bool = option(False, "Run code that comes with the teacher.")
    dtype: str = option(
        "auto", "dtype of the teacher's weights; auto: as in its files.",
        choices=("auto", "bfloat16", "float16", "float32"),
        conflicts=[(given("dtype") & _SERVER, "has no effect with a server.")],
    )  # fmt: skip
    teacher_server_base_url: str | None = option(
        None, "The teacher answers at this address, such as http://localhost:8000/v1; TEACHER is then its tokenizer.",
        text=HTTP,
    )  # fmt: skip
    teacher_server_model: str | None = option(None, "Name of the model on its server; default: TEACHER.", needs=_SERVER)
    teacher_server_api_key_env: str | None = option(
        None, "Environment variable that holds the server's API key.", needs=_SERVER
    )
    teacher_server_timeout: float = option(600.0, "Seconds that the server may be silent.", gt=0, needs=_SERVER)
    teacher_server_retries: int = option(
        5, "Further attempts after a failure that may pass.", ge=0, le=100, needs=_SERVER
    )
    teacher_server_concurrency: int = option(16, "Requests to the server at a time.", ge=1, le=256, needs=_SERVER)

    def __post_init__(self) -> None:
        check_options(self, GenerateOptions)

    def deciding(self) -> dict[str, Any]:
        """Return what decides the rows: all but where the server is and how patient its client is."""
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if key not in _OF_THE_CONNECTION}


_OF_THE_CONNECTION = tuple(
    f"teacher_server_{name}" for name in ("base_url", "api_key_env", "timeout", "retries", "concurrency")
)


def read_options(arguments: Iterable[str]) -> GenerateOptions:
    """Return the options that a command line sets: `key=value`, `--key value`.

    Raises:
        ConfigError: every option that is unknown, has a value of another type or beyond its limits, or does nothing.
    """
    # the same reader as for a run's overrides: one way to write a value
    parsed = parse_overrides(list(arguments))
    problems = [str(finding) for finding in parsed.findings]
    fields = {item.name: item for item in dataclasses.fields(GenerateOptions)}
    values: dict[str, Any] = {}
    for key, setting in parsed.values.items():
        if key not in fields:
            problems.append(f"{key}: unknown option of generate.{did_you_mean(key, fields)}")
        # `~key` takes a key out of a configuration file
        elif setting.value is DROPPED:
            problems.append(f"~{key}: generate reads no file that it could be taken out of.")
        else:
            rule = _rule(fields[key])
            values[key] = read(setting.value, rule)
            problems += [f"{key}: {message}" for _, message in complaints(values[key], rule)]
    defaults = {name: item.default for name, item in fields.items()}
    options = OptionValues({**defaults, **values}, values.keys())
    # conflicts only between values that are right: a wrong one would be told twice
    if not problems:
        problems += [f"{key}: {message}" for key, message in clashes(options, conflicts_of(GenerateOptions))]
    if problems:
        raise ConfigError("\n".join(problems))
    return GenerateOptions(**values)


def _rule(item: dataclasses.Field) -> Rule:
    if declared(item)["choices"]:
        return {"enum": list(declared(item)["choices"])}
    # types themselves, since this file does not postpone annotations
    annotation: Any = item.type
    # `str | None` has arguments, `str` has none
    kinds = [_KINDS[kind] for kind in (get_args(annotation) or (annotation,)) if kind in _KINDS]
    return {"type": [*kinds, "null"] if item.default is None else kinds, **limits_of(item)}
