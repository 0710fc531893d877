"""Kinds of teachers by losses: a server and caches teach what the live teacher does where they know all of it."""

import contextlib
from typing import Any

import pytest
from caches import STEP, captured, config, teacher_model, trainer_of
from served import served
from tiny import VOCAB, completions
from trainings import assert_same_step, distill, measured

from liger_trainer.kernels.divergence_kinds import KINDS as DIVERGENCES
from liger_trainer.teachers.cache.store import read_index

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

TEST = completions(6, seed=4)
KL_AND_CE = [{"type": "forward_kl", "weight": 0.8}, {"type": "ce", "weight": 0.25}]
EVERY = [{"type": name, "weight": weight} for name, weight in (("forward_kl", 0.7), ("reverse_kl", 0.3), ("ce", 0.4))]
LOSSES: dict[str, dict[str, Any]] = {
    "forward KL": {},
    "forward KL and labels": {"losses": KL_AND_CE},
    "at another temperature": {"losses": KL_AND_CE, "temperature": 2.0},
    "reverse KL": {"beta": 1.0},
    "hot reverse KL": {"beta": 1.0, "kd_temperature": 3.0},
    "JSD": {"beta": 0.3},
    "mix": {"losses": EVERY, "kd_temperature": 2.0, "label_smoothing_factor": 0.1},
    "all": {"losses": [{"type": kind} for kind in DIVERGENCES] + [{"type": "ce", "weight": 0.3}], "beta": 0.4},
    "skewed, total variation": {
        "losses": [{"type": "skew_kl"}, {"type": "skew_reverse_kl"}, {"type": "tvd"}],
        "temperature": 0.7,
    },
    "skewed, one measured": {
        "losses": [{"type": "skew_kl", "weight": 0.5}, {"type": "tvd", "weight": 0.0}], "skew_alpha": 0.3,
    },
    "TAID": {"taid": {"start": 0.4}, "losses": [{"type": "symmetric_kl"}]},
    "schedules": {"schedules": {"temperature": {"from": 4.0, "to": 1.0}, "forward_kl_weight": {"to": 0.0}}},
    "scheduled weights": {"losses": [{"type": "forward_kl"}, {"type": "reverse_kl"}],
                          "schedules": {"forward_kl_weight": {"from": 0.0, "to": 1.0}}},
}  # fmt: skip
# Of each kind: how near it comes, what it does not know, and its losses, the slow ones behind the others.
SERVER, TOPK, HIDDEN = "server", "the likeliest tokens", "hidden states"
KINDS: dict[str, tuple[float, tuple[str, ...], list[str], list[str]]] = {
    SERVER: (
        1e-4, ("entropy", "reverse_kl", "jsd"), ["forward KL and labels", "JSD", "all"],
        ["reverse KL", "skewed, one measured", "scheduled weights"],
    ),
    TOPK: (2e-3, ("reverse_kl", "jsd"), ["forward KL", "at another temperature", "all"], []),
    HIDDEN: (
        1e-6, (), ["forward KL", "mix", "TAID"],
        ["hot reverse KL", "JSD", "all", "skewed, total variation", "schedules"],
    ),
}  # fmt: skip
CASES = [
    pytest.param(kind, losses, marks=[pytest.mark.slow] * (losses in slow))
    for kind, (_, _, quick, slow) in KINDS.items()
    for losses in (*quick, *slow)
]


@pytest.fixture(scope="module")
def teacher_of(tmp_path_factory):
    """Given a kind, the options of a run that it teaches, as a context. One capture serves all losses."""
    folder = tmp_path_factory.mktemp("kinds")

    def cached(kind: str, options: dict) -> dict:
        hidden = kind == HIDDEN
        how: dict = {"cache_entries": VOCAB, "cache_bits": 16, "cache_tail_draws": 0}
        if hidden:
            how = {"cache_kind": "hidden", "cache_tail_draws": None}
        of_one_temperature = {"temperature": options.get("temperature", 1.0)} if not hidden else {}
        place = folder / f"{kind} {of_one_temperature}"
        if not place.exists():
            captured(place, test=TEST, mib=2048, cache_shard_mb=1, **how, **of_one_temperature)
            assert len(read_index(place).shards) > 3
        return {"teacher": "cache", "teacher_cache_dir": str(place), **how}

    @contextlib.contextmanager
    def of(kind: str, options: dict):
        if kind != SERVER:
            yield cached(kind, options)
            return
        with served(teacher_model()) as server:
            yield {"teacher": "server", "teacher_server_base_url": server.url, "teacher_server_model": "tiny",
                   "teacher_server_top_k": VOCAB, "teacher_server_retries": 0}  # fmt: skip

    return of


@pytest.mark.parametrize(("kind", "losses"), CASES)
def test_every_loss_is_the_live_teachers(kind, losses, teacher_of):
    """In evaluation and training, in loss, gradients and logs."""
    tolerance, unknown, *_ = KINDS[kind]
    options = {**LOSSES[losses], **STEP}
    live = distill(teacher=teacher_model(), eval_data=TEST, **options)
    expected = measured(live.evaluate())
    names = {name for name in expected if not any(word in name for word in unknown)}
    if kind == TOPK and losses == "at another temperature":
        names.discard("eval_forward_kl")  # which is of temperature 1
    with teacher_of(kind, options) as taught_by:
        trainer = trainer_of(config(None, **{"cache_tail_draws": None, **options, **taught_by}), test=TEST)
        assert trainer.teacher is None
        evaluated = measured(trainer.evaluate())
        assert ("eval_forward_kl" in evaluated) == ("eval_forward_kl" in names)
        for name in names:
            assert evaluated[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
        of_step = {name.removeprefix("eval_") for name in names} - {"jsd"}
        logs = assert_same_step(trainer, live, tolerance, {*of_step, *(["grad_norm"] if kind == HIDDEN else [])})
    assert not any(f"teacher_{word}" in logs or word in logs for word in unknown if word != "entropy")
    assert {"loss", "kd_loss", "ce_loss", "agreement_at_1", "teacher_perplexity", "num_tokens"} <= of_step
