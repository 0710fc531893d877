"""Folders of finished runs as they are on disk, for tests of reports."""

import math

import yaml


def log_history(steps: int, scale: float = 1.0) -> list[dict]:
    """A log a step, an evaluation every five, as the trainers write them."""
    logs = []
    for step in range(steps + 1):
        kl = scale * math.exp(-step / 10) + 0.1
        metrics = {"kd_loss": kl, "forward_kl": kl, "agreement_at_1": 1 - kl / 2}
        metrics["student_perplexity"] = math.exp(9 * kl)
        if step % 5 == 0:
            told = {"loss": kl, **metrics, "teacher_perplexity": 7.0, "runtime": 1.0, "samples_per_second": 9.0}
            logs.append({**{f"eval_{name}": value for name, value in told.items()}, "epoch": 0.1 * step, "step": step})
        if step:
            more = {"grad_norm": 2.0, "learning_rate": 1e-4, "num_tokens": 64.0 * step, "tokens_per_second": 100.0}
            logs.append({"loss": kl, **metrics, **more, "odd_metric": step / 3, "epoch": 0.1 * step, "step": step})
    return [*logs, {"train_runtime": 3.0, "train_loss": 1.0, "total_flos": 1e9, "epoch": 1.0, "step": steps}]


def content(scale: float = 1.0) -> dict:
    """metrics.json of a finished distillation."""
    return {
        "recipe": "distill",
        "config": "mine.yaml",
        "before": {"forward_kl": 1.1, "agreement_at_1": 0.25, "student_perplexity": 12345678.0, "loss": 1.2},
        "after": {"forward_kl": 0.1534 * scale, "agreement_at_1": 0.5 / scale, "student_perplexity": 9.5,
                  "loss": 0.2 * scale},
        "completions": [
            {
                "prompt": "What is <b>bold</b> & <script>alert(1)</script>?",
                "reference": "the reference",
                "before": "gibberish",
                "after": f"better by {scale}",
                "teacher": "what the teacher says",
            }
        ],
        "data": {"name": "rows.jsonl", "train_rows": 1000, "test_rows": 48, "sha256": "ab" * 32,
                 "test_rows_seen_in_training": 7, "train_rows_repeated": 3},
        "rows": {"train": {"rows": 1000, "rows_dropped": 2, "rows_truncated": 30, "tokens": 9000,
                           "supervised_tokens": 900, "supervised_tokens_lost": 100, "sequences": 998}},
        "patched": {"student": {"model": "llama", "swapped": {"RMSNorm": 33, "fused loss": 1},
                                "left_alone": {"OddMLP": "its gate is unknown"},
                                "cuda_graphs": "CUDA graphs: 28 layers of the student"}},
        "settings": {"learning_rate": {"value": 0.0002, "set_by": "mine.yaml:7"},
                     "max_steps": {"value": 20, "set_by": "command line"}},
        "training": {"steps": 20, "epochs": 0.5, "tokens": 12345, "seconds": 200.0, "tokens_per_second": 61.7,
                     "peak_memory_mib": 2048.0, "peak_memory_of": "GPU memory", "device": "H100", "processes": 1,
                     "trainable_parameters": 1000, "parameters": 134515008},
        "seconds": {"load": 7.5, "train": 200.0},
        "log_history": log_history(20, scale),
        "versions": {"torch": "2.13.0", "liger-trainer": "0.1"},
        "environment": {"platform": "Linux-x",
                        "gpus": [{"name": "H100", "memory_gib": 79.6, "compute_capability": "9.0"}]},
        "finished_at": "2026-11-22T10:00:00+00:00",
    }  # fmt: skip


def config_text(**values) -> str:
    """config.yaml as a run writes it: what was set, and the defaults as comments."""
    chosen = {"recipe": "distill", "model_name_or_path": "small", "learning_rate": 2e-4, "output_dir": "out", **values}
    rest = {"seed": 42, "packing": False, "lora_r": 16}
    defaults = "".join(
        f"# {line}\n" for line in yaml.safe_dump({k: v for k, v in rest.items() if k not in values}).splitlines()
    )
    return f"{yaml.safe_dump(chosen)}\n# Defaults in effect:\n{defaults}"
