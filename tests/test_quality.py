"""The table of distillation beside fine-tuning: what stands in it, and what a failed run leaves."""

import pytest

from benchmarks import quality


def metrics_of(forward_kl: float, tokens_per_second: float = 100.0) -> dict:
    measured = {"forward_kl": forward_kl, "reverse_kl": 1.0, "agreement_at_1": 0.5, "student_perplexity": 20.0}
    return {
        "before": {**measured, "forward_kl": 14.0},
        "after": measured,
        "training": {
            "device": "CPU, 2 threads", "steps": 7, "tokens": 1234, "peak_memory_mib": 2048.4,
            "tokens_per_second": tokens_per_second,
        },
        "versions": {"python": "3", "torch": "2", "transformers": "5", "trl": "1"},
        "data": {"test_rows": 64},
        "seconds": {"load": 1.0, "train": 9.4},
    }  # fmt: skip


def test_the_table_holds_mean_and_range_over_seeds():
    runs = {"forward KL": [metrics_of(2.0, 90.0), metrics_of(3.0, 110.0)], "SFT": [metrics_of(4.0), metrics_of(4.5)]}
    text = quality.table(runs, "python -m benchmarks.quality")
    assert "| forward KL | 2.500 (2.000 to 3.000) |" in text and "| SFT | 4.250 (4.000 to 4.500) |" in text
    assert "| nothing yet | 14.000 (14.000 to 14.000) |" in text
    assert "| 100 | 2,048 | 10 |" in text
    assert "7 steps, 1,234 tokens a run" in text


def test_arms_differ_in_their_losses_alone(monkeypatch, tmp_path):
    commands = []

    def remember(command, **_):
        commands.append(command[command.index("run") + 1 :])
        return quality.subprocess.CompletedProcess(command, 1, "", "config: wrong")

    monkeypatch.setattr(quality.subprocess, "run", remember)
    for arm in quality.ARMS:
        with pytest.raises(RuntimeError, match="exit code 1\nconfig: wrong"):
            quality.run(arm, 5, ["max_steps=3"], tmp_path)
    distilled, tuned = ([word for word in words if not word.startswith("output_dir=")] for words in commands)
    assert [word for word in tuned if word not in distilled] == ["losses=[{type: ce}]"]
    assert {"seed=5", "max_steps=3"} <= set(distilled) and set(distilled) <= set(tuned)
