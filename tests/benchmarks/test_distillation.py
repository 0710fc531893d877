"""The benchmark of ways to distil: what stands in its table, what its arms differ in, and what a failed run leaves."""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import distillation
from benchmarks.distillation import ARMS, LIVE, Cache, Result
from liger_trainer.config.run_config import load_run_config


def result_of(forward_kl: float, tokens_per_second: float = 100.0) -> Result:
    measured = {"forward_kl": forward_kl, "reverse_kl": 1.0, "agreement_at_1": 0.5, "student_perplexity": 20.0}
    run = {
        "before": {**measured, "forward_kl": 14.0},
        "training": {
            "device": "CPU, 2 threads", "steps": 7, "tokens": 1234, "peak_memory_mib": 2048.4,
            "tokens_per_second": tokens_per_second,
        },
        "versions": {"python": "3", "torch": "2", "transformers": "5", "trl": "1"},
        "data": {"test_rows": 64},
        "seconds": {"load": 1.0, "train": 9.4},
    }  # fmt: skip
    return Result(measured, run)


def test_the_table_holds_mean_and_range_over_seeds_and_sets_caches_beside_the_teacher():
    results = {
        "ce": [result_of(2.0, 90.0), result_of(3.0, 110.0)],
        LIVE: [result_of(0.8), result_of(1.2)],
        "cache_12": [result_of(1.0), result_of(1.06)],
    }
    text = distillation.page(results, {"cache_12": Cache("x", 77.4, 61.6)}, "the command")
    assert "| cross-entropy (SFT) | 2.500 (2.000 to 3.000) |" in text
    assert "| nothing yet | 14.000 (14.000 to 14.000) |" in text
    assert "| 1,234 | 100 | 2,048 |  |" in text
    assert "77 bytes/token, captured in 62 s; KL +3.0% beside the live teacher's |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1, "rows of one width"


def test_the_settings_of_every_arm_are_valid_and_differ_in_the_arm_alone(tmp_path):
    common = distillation.settings_of(LIVE, 5, tmp_path, ["max_steps=3"], None)
    for name, arm in ARMS.items():
        cache = Cache(str(tmp_path), 1.0, 1.0) if arm.cache else None
        settings = distillation.settings_of(name, 5, tmp_path, ["max_steps=3"], cache)
        load_run_config(distillation.CONFIG, settings)
        cached = ["teacher=cache", f"teacher_cache_dir={tmp_path}"] if cache else []
        assert settings == [*common, *arm.settings, *cached]
    assert len({(arm.settings, arm.cache) for arm in ARMS.values()}) == len(ARMS)


def test_a_run_that_fails_says_why(tmp_path: Path):
    with pytest.raises(RuntimeError, match="ce-0: ConfigError.*no_such_key"):
        distillation.run("ce", 0, ["no_such_key=1"], None, tmp_path)
    with pytest.raises(RuntimeError, match="cache-cache_12: ConfigError.*no_such_key"):
        distillation.capture("cache_12", ["no_such_key=1"], tmp_path)


def test_a_run_that_fails_costs_no_other(monkeypatch, capsys):
    """Without processes: what is run is replaced."""
    fails = {("ce", 1), ("cache_12", None)}

    def instead(of):
        if of in fails:
            raise RuntimeError(f"{of} failed")
        return Cache("x", 1.0, 1.0) if of[1] is None else result_of(1.0)

    class Pool(ThreadPoolExecutor):
        def __init__(self, jobs, *_):
            super().__init__(1)

    monkeypatch.setattr(distillation, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(distillation, "run", lambda arm, seed, *_: instead((arm, seed)))
    monkeypatch.setattr(distillation, "capture", lambda arm, *_: instead((arm, None)))
    options = argparse.Namespace(jobs=1, gpus=1, seconds=math.inf, seeds=[0, 1], arms=["ce", "cache_top64", "cache_12"])
    results, caches = distillation.run_all(options, [])
    assert {arm: len(each) for arm, each in results.items()} == {"ce": 1, "cache_top64": 2}
    assert caches.keys() == {"cache_top64"}
    assert capsys.readouterr().err.count("failed") == 2
    assert "cache of 64 likeliest" in distillation.page({"cache_top64": results["cache_top64"]}, caches, "")  # alone
