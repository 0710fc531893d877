"""`merge --gguf`: llama.cpp's converter is found and called, or said to be missing before any work.

The converter here is a script that takes llama.cpp's arguments and does with the model what theirs begins with: read
its configuration and weights.
"""

import json
import subprocess
from pathlib import Path

import pytest

from liger_trainer.errors import ConfigError
from liger_trainer.extras.merge import CONVERTER, find_converter, write_gguf

SCRIPT = """
import argparse, json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("--outfile", type=Path, required=True)
parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0", "auto"])
given = parser.parse_args()
config = json.loads((given.model / "config.json").read_text())
given.outfile.write_bytes(b"GGUF" + config["model_type"].encode())
if config["model_type"] == "strange":
    raise NotImplementedError("Model StrangeForCausalLM is not supported")
"""


@pytest.fixture
def converter(tmp_path, monkeypatch) -> Path:
    """A checkout of llama.cpp, which LLAMA_CPP_DIR names."""
    (tmp_path / "llama.cpp").mkdir()
    path = tmp_path / "llama.cpp" / CONVERTER
    path.write_text(SCRIPT)
    monkeypatch.setenv("LLAMA_CPP_DIR", str(path.parent))
    return path


def model(folder: Path, model_type: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_the_file_is_the_converter_s(converter, tmp_path):
    target = tmp_path / "student.gguf"
    write_gguf(model(tmp_path / "merged", "llama"), target, find_converter())
    assert target.read_bytes() == b"GGUFllama"


def test_what_fails_leaves_no_file_and_the_converter_s_reason(converter, tmp_path):
    target = tmp_path / "student.gguf"
    with pytest.raises(ConfigError, match="StrangeForCausalLM is not supported The merged model is in"):
        write_gguf(model(tmp_path / "merged", "strange"), target, find_converter())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "merged"]


def test_it_is_found_on_path_too(converter, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP_DIR")
    monkeypatch.setenv("PATH", str(converter.parent))
    with pytest.raises(ConfigError, match="is not on PATH"):  # it cannot be executed
        find_converter()
    converter.chmod(0o755)
    assert find_converter() == converter


def test_where_it_is_missing_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=f"not in {tmp_path}, which LLAMA_CPP_DIR names. Clone llama.cpp"):
        find_converter()


def test_a_converter_that_cannot_start_is_an_error(converter, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 3, "", ""))
    with pytest.raises(ConfigError, match="it ended with 3"):
        write_gguf(tmp_path, tmp_path / "student.gguf", converter)
