"""One declaration of an option serves Python, YAML and the JSON schema: they refuse the same settings."""

import json
from dataclasses import dataclass

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser
from trl import ModelConfig, TrlParser

from liger_trainer.common.options import OptionValues, check_values, clashes, conflicts_of, option
from liger_trainer.config.conflicts import CONFLICTS
from liger_trainer.config.run_config import check_text
from liger_trainer.config.schema import built_in_configs, shipped_schema, shipped_text
from liger_trainer.config.yaml_reader import parse_yaml
from liger_trainer.errors import ConfigError
from liger_trainer.losses.plan import LossConfig
from liger_trainer.teachers.config import TeacherConfig
from liger_trainer.trainers.config import LigerConfig, LigerDistillConfig
from liger_trainer.trainers.options import SamplingConfig

EDITOR = jsonschema.Draft202012Validator(json.loads(shipped_text()))
NEEDED = {"model_name_or_path": "m", "dataset_name": "d", "recipe": "distill", "teacher_model_name_or_path": "t"}
# a value other than the default of every key that a conflict looks at
VALUES = {
    "boolean": [True, False], "integer": [1, 0], "number": [0.5], "string": ["x"], "array": [[0]], "object": [{"a": 1}],
    "null": [None],
}  # fmt: skip
READ = sorted({key for conflict in CONFLICTS if conflict.when.rule for key in conflict.reads})


def values_of(key: str) -> list:
    rule = shipped_schema().keys[key].rule
    if "enum" in rule:
        return rule["enum"]
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    return [value for kind in kinds for value in VALUES[kind]]


@pytest.mark.parametrize("families", [("smollm2", "gemma3"), pytest.param("", marks=pytest.mark.slow)])
def test_the_schema_is_valid_and_accepts_every_built_in_configuration(families):
    """By default those of two families, which have all kinds."""
    EDITOR.check_schema(EDITOR.schema)
    for name, resource in built_in_configs().items():
        if name.startswith(families):
            assert not list(EDITOR.iter_errors(parse_yaml(resource.read_text()))), name


def documents() -> st.SearchStrategy[dict]:
    settings_of = st.sampled_from([(key, value) for key in READ for value in values_of(key)])
    return st.lists(settings_of, max_size=6, unique_by=lambda setting: setting[0]).map(dict)


@settings(max_examples=100, deadline=None)
@given(documents())
@example({"teacher": "cache", "teacher_cache_dir": None})
def test_an_editor_sees_the_conflicts_that_the_check_finds(document):
    defaults = {key: spec.default for key, spec in shipped_schema().keys.items()} | {"num_sample_completions": 0}
    found = set(clashes(OptionValues({**defaults, **document}, document.keys()), [c for c in CONFLICTS if c.when.rule]))
    editor = jsonschema.Draft202012Validator({k: EDITOR.schema[k] for k in ("dependentRequired", "allOf")})
    assert bool(found) == (not editor.is_valid(document)), (document, found)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"teacher_server_top_k": 8}, "teacher_server_top_k: has no effect without `teacher: server`."),
        ({"teacher": "cache"}, "teacher_cache_dir: missing; `teacher: cache` needs it."),

        ({"cache_bits": 8.0}, "cache_bits: expected one of 8, 16, got 8.0 (a number). Write 8."),
        ({"teacher_load_in_4bit": True, "teacher_load_in_8bit": True}, "give either teacher_load_in_4bit or"),
        ({"lmbda": 1.5}, "lmbda: expected a number of at most 1, got 1.5."),
        ({"top_p": 0.0}, "top_p: expected a number above 0"),
        ({"generation_batch_size": 0}, "of at least 1, got 0"),
        ({"cache_bits": 4}, "cache_bits: expected one of 8, 16, got 4 (an integer)."),
        ({"cache_shard_mb": 1.5}, "cache_shard_mb: expected an integer, got 1.5 (a number)."),
        ({"top_k": True}, "top_k: expected an integer, got true."),
        ({"cache_entries": 2.0}, "cache_entries: expected an integer or null, got 2.0 (a number). Write 2."),
        ({"vllm_server_base_url": "localhost:1"}, "vllm_server_base_url: expected an address such as http://"),
        ({"temperature": 2.0, "teacher": "server", "teacher_server_model": "m",
          "teacher_server_base_url": "http://[::1]:80/v1"}, "temperature: a server's log-probabilities are of temp"),

        ({"cache_entries": 1000, "cache_tail_draws": 25}, "cache_tail_draws: a cache holds at most 1,024"),
        ({"cache_kind": "sampled", "cache_tail_draws": 1}, "cache_tail_draws: are of `cache_kind: topk`"),
    ],
)  # fmt: skip
def test_python_and_yaml_refuse_in_the_same_words(options, message):
    with pytest.raises(ValueError) as python:
        LigerDistillConfig(use_cpu=True, bf16=False, **options)
    assert message in str(python.value)
    named = {**NEEDED, **({"teacher_model_name_or_path": None} if "teacher" in options else {})}
    with pytest.raises(ConfigError) as file:
        check_text(yaml.safe_dump({**named, **options}), "run.yaml")
    assert message in str(file.value)


def test_integers_without_limits_are_integers_in_python_too():
    @dataclass
    class Options:
        seed: int | None = option(None, "Any integer.")
        layers: list[int] | None = option(None, "Not looked at.")

    check_values({"seed": -3, "layers": [1]}, Options)
    for wrong in (1.5, True, "3"):
        with pytest.raises(ValueError, match="^seed: expected an integer or null, got "):
            check_values({"seed": wrong}, Options)


def test_as_many_draws_as_a_cache_holds():
    for entries, draws in ((1000, 24), (1024, 0)):
        LigerDistillConfig(use_cpu=True, bf16=False, cache_entries=entries, cache_tail_draws=draws)


def test_every_declared_option_is_a_key_with_a_meaning():
    for cls in (LossConfig, SamplingConfig, TeacherConfig):
        declared = {conflict.key for conflict in conflicts_of(cls)}
        assert declared <= shipped_schema().keys.keys()
        assert all(shipped_schema().keys[name].description for name in cls.__dataclass_fields__)


SCRIPT = ["--output_dir", "out", "--model_name_or_path", "m", "--use_cpu"]
TYPED = {
    "--on_non_finite skip_step": {"on_non_finite": "skip_step"},
    "--teacher_cache_dir rows --teacher cache": {"teacher_cache_dir": "rows"},
    '--schedules {"temperature":{"to":2.0}}': {"schedules": {"temperature": {"to": 2.0}}},
    '--losses [{"type":"forward_kl","weight":2}]': {"losses": [{"type": "forward_kl", "weight": 2}]},
    "--lmbda 0.5 --seq_kd false --generation_batch_size 3": {"lmbda": 0.5, "generation_batch_size": 3},
}


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("words", TYPED)
def test_scripts_that_parse_their_command_line_take_our_configurations(parser, words):
    configurations = (LigerDistillConfig, LigerConfig) if "non_finite" in words else (LigerDistillConfig,)
    for configuration in configurations:
        arguments = parser((configuration, ModelConfig))
        config, model = arguments.parse_args_into_dataclasses([*SCRIPT, *words.split()])
        assert {name: getattr(config, name) for name in TYPED[words]} == TYPED[words]
        assert model.model_name_or_path == "m" and "weight_column" in arguments.format_help()


def test_what_an_option_declares_holds_on_such_a_command_line():
    with pytest.raises(ValueError, match="on_non_finite: expected one of stop, skip_step"):
        HfArgumentParser(LigerConfig).parse_args_into_dataclasses([*SCRIPT[:2], "--use_cpu", "--on_non_finite", "x"])
