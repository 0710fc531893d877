"""What the shell offers behind the command, asked for as bash asks."""

import pytest
from commands import call


@pytest.fixture
def offered(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def complete(*words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["liger-trainer"])
        monkeypatch.setenv("_LIGER_TRAINER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(("liger-trainer", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return call(capsys)[1].split()

    return complete


def test_names_of_configurations_and_files(offered, tmp_path):
    (tmp_path / "qwen.yaml").touch()
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "mine.yml").touch()
    (tmp_path / "quotes.txt").touch()
    assert {"qwen3/sft_lora_0.6b", "qwen3/sft_lora_8b"} <= set(offered("run", "qwen3/sft_lora"))
    assert all(name.startswith("qwen3/sft_lora") for name in offered("run", "qwen3/sft_lora"))
    assert {"qwen.yaml", "quick/", "qwen3/sft_full_0.6b"} <= set(offered("validate", "q"))
    assert "quotes.txt" not in offered("validate", "q") and "quotes.txt" not in offered("cat", "q")
    assert offered("config", "quick/") == ["quick/mine.yml"]
    assert offered("config", str(tmp_path / "qw")) == [str(tmp_path / "qwen.yaml")]
    assert offered("config", "nowhere/x") == []
