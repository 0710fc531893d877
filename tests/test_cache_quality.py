"""The table of caches beside the live teacher: what stands in it, and that the arms differ in their teacher alone."""

import json

import pytest
from test_quality import metrics_of

from benchmarks import cache_quality
from benchmarks.cache_quality import ARMS, LIVE, Cache, Result


def result_of(forward_kl: float) -> Result:
    run = metrics_of(9.0)
    return Result({**run["after"], "forward_kl": forward_kl}, run)


def test_the_table_sets_each_cache_beside_the_teacher():
    cached = list(ARMS)[1]
    results = {LIVE: [result_of(0.8), result_of(1.2)], cached: [result_of(1.0), result_of(1.06)]}
    text = cache_quality.table(results, {cached: Cache("x", 197.4, 10**6, 61.6)}, "the command")
    assert f"| {LIVE} | 1.0000 (0.8000 to 1.2000) |" in text
    assert f"| {cached} | 1.0300 (1.0000 to 1.0600) |" in text
    assert "| +3.0% | 197 | 62 | 100 | 2,048 |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "rows of one width"


def test_arms_differ_in_their_teacher_alone(monkeypatch, tmp_path):
    commands = []

    def remember(command, **_):
        commands.append(command)
        return cache_quality.subprocess.CompletedProcess(command, 1, "", "config: wrong")

    monkeypatch.setattr(cache_quality.subprocess, "run", remember)
    for arm in ARMS:
        cache = None if arm == LIVE else Cache("folder", 1.0, 1, 1.0)
        with pytest.raises(RuntimeError, match="exit code 1\nconfig: wrong"):
            cache_quality.run(arm, 5, ["max_steps=3"], cache, tmp_path)
    live, *cached = ([word for word in words if not word.startswith("output_dir=")] for words in commands)
    for words, settings in zip(cached, list(ARMS.values())[1:], strict=True):
        assert words == [*live, "teacher=cache", "teacher_cache_dir=folder", *settings]


def test_a_capture_is_measured_by_what_it_left(monkeypatch, tmp_path):
    def write(command, **_):
        where = next(word.partition("=")[2] for word in command if word.startswith("teacher_cache_dir="))
        (tmp_path / where).mkdir()
        index = {"tokens": 10, "shards": [{"bytes": 700}, {"bytes": 300}]}
        (tmp_path / where / "index.json").write_text(json.dumps(index))
        return cache_quality.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cache_quality.subprocess, "run", write)
    cache = cache_quality.capture("cache, 12 draws", [], tmp_path)
    assert cache.bytes_per_token == 100 and cache.tokens == 10
