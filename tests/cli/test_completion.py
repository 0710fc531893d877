"""What the shell offers behind the command, asked for as bash and zsh ask."""

import pytest
from commands import call


@pytest.fixture
def offered(monkeypatch, capsys, tmp_path):
    """Complete a line: for bash its words as bash splits them, for zsh the line as it is."""
    monkeypatch.chdir(tmp_path)

    def complete(*words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setattr("sys.argv", ["liger-trainer"])
        monkeypatch.setenv("_LIGER_TRAINER_COMPLETE", f"complete_{shell}")
        line = " ".join(("liger-trainer", *words))
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
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


def test_keys_in_the_form_that_was_begun(offered):
    assert offered("run", "x", "per_device_") == ["per_device_train_batch_size=", "per_device_eval_batch_size="]
    assert offered("run", "x", "max_st") == ["max_steps=", "max_steps=-1"]  # two, so that no space follows
    assert offered("run", "x", "--max_st") == ["--max_steps"]
    assert offered("resume", "x", "--chec") == ["--checkpoint"]
    assert offered("preview", "x", "max_steps=3", "~lora_al") == ["~lora_alpha"]
    assert offered("cache", "capture", "x", "teacher_lo") == ["teacher_load_in_4bit=", "teacher_load_in_8bit="]


def test_values_of_keys_with_few(offered):
    assert offered("run", "x", "packing", "=", "t") == ["true"]
    assert offered("run", "x", "packing", "=") == ["false", "true"]
    assert offered("run", "x", "--lr_scheduler_type", "cosine_w") == [
        "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    ]  # fmt: skip
    assert "packing=true" in " ".join(offered("run", "x", "packing=t", shell="zsh"))
    assert "packing=false" not in " ".join(offered("run", "x", "packing=t", shell="zsh"))
