"""Schedules and TAID: the values over the steps, that the loss follows them, evaluations, what is refused."""

import math

import pytest
import torch
from tiny import completions, tiny_model, train_args
from trainings import distill, logged, trained

from liger_trainer import DistillationCallback, LigerDistillConfig
from liger_trainer.errors import ConfigError
from liger_trainer.losses.plan import plan_of
from liger_trainer.losses.schedules import Schedule, Taid
from liger_trainer.trainers.loss_schedule import TaidShare

MIX = [{"type": "jsd", "weight": 0.5, "beta": 0.4}, {"type": "skew_kl"}, {"type": "ce", "weight": 0.25}]


def make(**options):
    options = {"losses": MIX, "beta": 0.4, "learning_rate": 0.0, **options}
    return distill(None, tiny_model("phi", seed=5), completions(4), completions(4, seed=3), **options)


@pytest.mark.parametrize(
    "schedule, values",
    [
        (Schedule(1.0, 3.0), [1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0]),
        (Schedule(1.0, 3.0, steps=4), [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0, 3.0]),
        (Schedule(1.0, 3.0, steps=0.5, warmup_steps=2), [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]),
        (Schedule(2.0, 0.0, "cosine"), [1 + math.cos(math.pi * i / 8) for i in range(9)]),
        (Schedule(0.0, 0.8, "constant", 4), [0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (Schedule(0.0, 0.8, "constant", 0.25), [0.0, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
    ],
)
def test_values_over_eight_steps(schedule, values):
    assert [schedule.at(step, 8) for step in range(9)] == pytest.approx(values, abs=1e-12)
    assert schedule.at(8, 8) == schedule.end


def test_what_is_not_said_comes_from_the_configuration():
    plan = plan_of({"losses": MIX, "kd_temperature": 4.0, "schedules": {
        "temperature": {"to": 1.0}, "ce_weight": {"kind": "constant", "warmup_steps": 0.1},
    }})  # fmt: skip
    assert plan.schedules["temperature"] == Schedule(4.0, 1.0)
    assert plan.schedules["ce_weight"] == Schedule(0.0, 0.25, "constant", 0.1)


SCHEDULES = {
    "temperature": {"from": 1.0, "to": 3.0},
    "beta": {"to": 0.8, "kind": "cosine"},
    "skew_alpha": {"from": 0.0, "to": 0.6},
    "jsd_weight": {"kind": "constant", "warmup_steps": 4},
    "ce_weight": {"to": 0.0},
}


def fixed(step, steps):
    """The options that a run without schedules would have for the loss of one step."""
    plan = plan_of({"losses": MIX, "beta": 0.4, "schedules": SCHEDULES})
    at = plan.at(step, steps)
    losses = [{**MIX[0], "weight": at["jsd_weight"], "beta": at["beta"]}, MIX[1], {**MIX[2], "weight": at["ce_weight"]}]
    return {"losses": losses, **{name: at[name] for name in ("temperature", "beta", "skew_alpha")}}


def test_the_loss_of_each_step_is_that_of_a_run_with_its_values():
    trainer = make(schedules=SCHEDULES, max_steps=4, eval_strategy="steps", eval_steps=2)
    first = trainer.evaluate()["eval_loss"]
    losses = logged(trained(trainer))
    for step in (1, 3):
        assert losses[step] == pytest.approx(logged(trained(make(max_steps=1, **fixed(step, 4))))[0], rel=1e-5), step
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3  # steps are told apart
    plan = trainer.args.loss_plan()
    assert logged(trainer, "schedule/beta") == [plan.at(step, 4)["beta"] for step in range(4)]
    # Evaluations have the final values at all times.
    end = make(**fixed(4, 4)).evaluate()["eval_loss"]
    assert [first, *logged(trainer, "eval_loss")] == pytest.approx([end] * 3, rel=1e-5) and abs(end - losses[0]) > 1e-2
    assert not any(name.startswith("eval_schedule") for log in trainer.state.log_history for name in log)


def test_a_schedule_leaves_what_distil_changes_alone():
    trainer = make(schedules={"temperature": {"to": 3.0}}, max_steps=2)
    trainer.distil(ce_weight=0.9)
    trainer.train()
    assert trainer.distillation.ce_weight == 0.9 and trainer.distillation.temperature == 2.0
    assert trainer.fused.eval_options.distillation.ce_weight == 0.9


def test_lmbda_is_set_for_the_step_whose_batches_are_made_next():
    trainer = make(schedules={"lmbda": {"from": 0.0, "to": 1.0}}, max_steps=4, max_completion_length=4, losses=None)
    seen, batches = [], trainer.get_batch_samples
    trainer.get_batch_samples = lambda *args: seen.append(trainer.lmbda) or batches(*args)
    trainer.train()
    assert seen[:4] == logged(trainer, "schedule/lmbda") == [0.0, 0.25, 0.5, 0.75]


def share_by_hand(losses, taid, steps):
    """t before each step, by the formulas of the paper, where the loss of the step before is not known yet."""
    t, momentum, shares = taid.start, 0.0, []
    for step in range(steps):
        if step >= 3:
            change = (losses[step - 3] - losses[step - 2]) / losses[step - 3]
            momentum = taid.beta * momentum + (1 - taid.beta) * change
            t += taid.alpha * torch.sigmoid(torch.tensor(momentum, dtype=torch.float64)).item() * (1 - t)
        t = min(taid.end, max(t, taid.start + (taid.end - taid.start) * step / steps))
        shares.append(t)
    return shares


@pytest.mark.parametrize("taid", [Taid(), Taid(alpha=0.4, beta=0.5), Taid(0.1, 0.7, alpha=0.9, beta=0.9)])
def test_the_adaptive_share_follows_the_paper(taid):
    losses = [2.0, 1.5, 1.6, 1.1, 1.0, 0.2, 0.9, 0.8, 0.8, 0.4]
    share, got = TaidShare(taid), []
    for step, loss in enumerate(losses):
        got.append(share.at(step, len(losses)))
        for tokens, more in ((3.0, 0.5), (5.0, -0.5)):  # two micro-batches, of different means
            sums = torch.tensor([loss * tokens + more, tokens], dtype=torch.float64)
            share.add(*sums)
        share.close()
    assert got == pytest.approx(share_by_hand(losses, taid, len(losses)), rel=1e-12)
    assert got == sorted(got) and max(got) <= taid.end


def test_taid_in_a_training_follows_its_loss():
    taid = {"start": 0.2, "alpha": 0.9, "beta": 0.3}
    trainer = make(losses=None, beta=0.0, taid=taid, max_steps=6, learning_rate=3e-3, gradient_accumulation_steps=2,
                   per_device_train_batch_size=2)  # fmt: skip
    losses = logged(trained(trainer), "kd_loss")
    want = share_by_hand(losses, Taid(0.2, alpha=0.9, beta=0.3), 6)
    assert logged(trainer, "schedule/teacher_share") == pytest.approx(want, rel=1e-6)
    assert losses[0] < 0.5 * logged(trainer, "forward_kl")[0]  # held against a mixture, measured against the teacher
    assert trainer.fused.eval_options.distillation.teacher_share == 1.0
    assert logged(trained(trainer), "schedule/teacher_share")[0] == 0.2  # from the start


def test_a_loss_that_is_not_finite_leaves_the_share_as_it_is():
    share = TaidShare(Taid(alpha=0.5))
    for loss in (1.0, math.nan, 0.5, 1e9, math.inf):
        share.add(torch.tensor(loss), torch.tensor(1.0))
        share.close()
    values = [share.at(0, 10) for _ in range(2)]
    assert all(0.4 < value < 1.0 for value in values)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"schedules": {"temprature": {"to": 1}}}, "'temprature' is no scalar of this loss; .* mean temperature"),
        ({"schedules": {"beta": {"to": 0.5}}}, "'beta' is no scalar of this loss; it has temperature"),
        ({"schedules": {"ce_weight": {"to": 0.5}}}, "'ce_weight' is no scalar"),
        ({"schedules": {"temperature": {"too": 1}}}, "schedules: temperature.too: unknown key. Did you mean to?"),
        ({"schedules": {"temperature": {}}}, "temperature: to is missing, without which a linear schedule changes"),
        ({"schedules": {"temperature": {"kind": "constant"}}}, "warmup_steps is missing, without which a constant"),
        ({"schedules": {"temperature": {"to": 0}}}, "schedules: temperature: expected a number above 0, got 0"),
        ({"schedules": {"temperature": {"kind": "constant", "warmup_steps": 5}}}, "expected a number above 0, got 0.0"),
        ({"schedules": {"temperature": {"to": 2, "kind": "step"}}}, "kind: expected one of linear, cosine, constant"),
        ({"schedules": {"temperature": {"to": 2, "steps": 2.5}}}, "steps: expected whole steps or a share below 1"),
        ({"schedules": {"temperature": {"to": 2, "steps": 5, "warmup_steps": 5}}}, "warmup_steps must be below steps"),
        ({"schedules": {"temperature": {"to": 2, "kind": "constant", "warmup_steps": 5, "steps": 9}}},
         "steps has no effect on a constant schedule"),
        ({"beta": 0.5, "schedules": {"beta": {"to": 1.0}}}, "schedules: beta: expected a number below 1, got 1.0"),
        ({"losses": MIX, "schedules": {"beta": {"to": 0.0}}}, "schedules: beta: expected a number above 0, got 0.0"),
        ({"schedules": [1]}, "schedules must be a mapping"),
        ({"taid": {"begin": 0.4}}, "taid: begin: unknown key"),
        ({"taid": {"start": 0.9, "end": 0.5}}, "the teacher's share rises; start is 0.9, end 0.5"),
        ({"taid": {"beta": 1.0}}, "taid: beta: expected a number below 1"),
        ({"taid": {"adaptive": False, "alpha": 0.1}}, "alpha and beta have no effect with adaptive: false"),
        ({"taid": {}, "losses": [{"type": "ce"}]}, "losses has none of them"),
        ({"taid": {}, "teacher": "cache"}, "taid: it mixes logits of the whole vocabulary, which teacher: cache does"),
        ({"losses": [{"type": "forward_kl"}, {"type": "hidden_mse"}], "teacher": "server"},
         "losses: hidden_mse needs the teacher's model; teacher: server has none"),
        ({"losses": [{"type": "forward_kl"}, {"type": "tvd", "weight": 0}], "teacher": "cache"},
         "losses: a teacher cache with draws from the rest determines only the forward KL.*asks for forward_kl, tvd"),
        ({"schedules": {"temperature": {"to": 2.0}}, "teacher": "cache"}, "what teacher: cache answers is of one temp"),
        ({"schedules": {"forward_kl_weight": {"to": 0.0}}, "teacher": "cache"}, "must stay above 0 with draws"),
    ],
)  # fmt: skip
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        plan_of(fields)
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **fields)


def test_the_callback_refuses_an_adaptive_share():
    with pytest.raises(ConfigError, match="Set adaptive to false, or use LigerDistillTrainer"):
        DistillationCallback("some/teacher", taid={})
