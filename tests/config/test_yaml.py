"""Reading YAML and the words of a command line: what is accepted, and what hostile or broken input is told."""

import json
import re
import time

import pytest

from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.yaml_reader import DROPPED, MAX_VALUES, parse_overrides, read_settings
from liger_trainer.errors import ConfigError

LETTERS = "abcdefghijklmnopqrst"
LISTS = "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip(LETTERS, LETTERS[1:], strict=False))
MERGES = LISTS.replace("[", "{<<: [").replace("]", "]}")


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("a: 1\nb: [1\nc: 2\n", "run.yaml:3:2: "),
        ("- a\n", "run.yaml: expected `key: value` lines, got a YAML sequence"),
        ("a: &a [x, x]\n" + LISTS, f"run.yaml:9:4: more than {MAX_VALUES:,} values."),  # billion laughs
        ("a: &a {x: 1}\n" + MERGES, f"run.yaml:9:12: more than {MAX_VALUES:,} values."),
        ("a: 1\nb: &b [*b]\n", "run.yaml:2:4: an alias to what it is in."),
        ("a: " + "[" * 5000, "run.yaml:1:53: more than 50 levels inside each other."),
        ("".join(f"a{i}: &a{i} [{f'*a{i - 1}' if i else 0}]\n" for i in range(99)), "more than 50 levels inside"),
        ("a: 1\nb: x\0y\n", r"run.yaml:2:5: the character '\x00' is not allowed in YAML."),
        ("a: !!python/object/apply:os.system [ls]\n", "run.yaml:1:4: could not determine a constructor"),
        ("a: 1\nb: !!timestamp x\n", "run.yaml:2:4: no value of type timestamp."),
        ("a: !!bool x\n", "run.yaml:1:4: no value of type bool."),
        ("a: " + "9" * 6000, "run.yaml: not valid YAML: Exceeds the limit"),
    ],
    ids="open-list no-mapping laughs merges self-alias brackets chain nul tag no-time no-switch digits".split(),
)
def test_what_cannot_be_read_is_refused_at_once(text, complaint):
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_settings(text, "run.yaml")
    assert complaint in str(caught.value)
    assert time.process_time() - start < 5  # a second on an idle machine


def test_a_file_that_is_no_text_too_large_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, message in ((b"\xff\xfe\x00", "cannot be read as UTF-8 text"), (b"#" * 200_000, "larger than 100 kB")):
        (tmp_path / "run.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_run_config("run.yaml")
    with pytest.raises(ConfigError, match="neither a file nor a built-in configuration. Did you mean smollm2/sft"):
        load_run_config("smollm2/sft_ful")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3/sft_lora", "qwen3/sft_lora_0.6b or qwen3/sft_lora_1.7b or"),  # the size is left out
        ("./qwen3/sft_lora", "qwen3/sft_lora_0.6b or qwen3/sft_lora_1.7b or"),
        ("mine.yml", "mine.yaml?"),
        ("mine", "mine.yaml?"),
        ("./mien.yaml", "mine.yaml?"),
        ("deep/mine", "deep/mine.yaml?"),
    ],
)
def test_what_is_nearly_a_name_is_suggested(tmp_path, monkeypatch, name, meant):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "deep"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.yaml").write_text("recipe: sft\n")
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean {meant}")):
        load_run_config(name)


def test_a_tab_is_called_one():
    with pytest.raises(ConfigError, match="run.yaml:2:1: a tab stands here; YAML is indented with spaces"):
        read_settings("a:\n\tb: 1\n", "run.yaml")


def test_keys_given_twice_and_keys_that_are_no_names():
    parsed = read_settings("a: 1\na: 2\n1: 2\nb: {c: 1, c: 2}\n", "run.yaml")
    assert parsed.values["a"].value == 2
    assert [str(finding) for finding in parsed.findings] == [
        "run.yaml:2: the key 'a' is given twice, first on line 1.",
        "run.yaml:4: the key 'c' is given twice, first on line 4.",
        "run.yaml:3: expected a name before the colon, got 1.",
    ]


def test_forms_of_overrides():
    words = "a=b=c --x 1 --modules q v --flag --neg -1 --rate=2e-4 none=null lora-r=4 x=[1,2] --list u v ~gone".split()
    parsed = parse_overrides(words)
    assert parsed.findings == []
    assert {key: setting.value for key, setting in parsed.values.items()} == {
        "a": "b=c", "x": [1, 2], "modules": ["q", "v"], "flag": True, "neg": -1, "rate": 2e-4, "none": None,
        "lora_r": 4, "list": ["u", "v"], "gone": DROPPED,
    }  # fmt: skip


def test_text_of_an_argument_is_kept_whole():
    words = [
        "a=exp #2",
        "--b",
        "#1",
        "c=&c",
        "d=x\ny",
        "e='q #1' # said",
        "f=1e-4 # low",
        "g=null # none",
        "h=a#b",
        "i= x ",
    ]
    assert [setting.value for setting in parse_overrides(words).values.values()] == [
        "exp #2", "#1", "&c", "x\ny", "q #1", 1e-4, None, "a#b", "x",
    ]  # fmt: skip


def test_json_escapes_of_one_character_are_one():
    text = json.dumps({"a": "\U0001f98a é", "\U0001f98a": [1]})
    assert {key: setting.value for key, setting in read_settings(text, "run.json")[0].items()} == json.loads(text)


@pytest.mark.parametrize(
    "word, advice",
    [
        ("lonely", "expected key=value"), ("=1", "expected key=value"), ("a=[1,", "put it in quotes: 'a=...'"),
        ("a=@b", "put it in quotes: a='\"...\"'"), ("a={b:1}", "a colon is followed by a space"),
        ("a=&a [*a]", "is no YAML value"), ("a=" + "[" * 5000, "is no YAML value"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_override(word, advice):
    (finding,) = parse_overrides([word, "b=1"]).findings
    assert str(finding).startswith("command line: ") and advice in str(finding)
