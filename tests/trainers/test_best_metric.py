"""Which way metrics are better, for what chooses by them."""

import pytest
from tiny import completions, train_args
from trainings import a_teacher, distill, sft
from trl import SFTTrainer
from trl.experimental.gkd import GKDConfig

from liger_trainer import DistillationCallback, LigerConfig, LigerDistillConfig
from liger_trainer.trainers.best_metric import greater_is_better, is_neither

LESS = "loss eval_loss perplexity eval_rows_forward_kl reverse_kl kd_loss jsd loss/alm law/forward_kl spans/student_nll"
FOLLOW = {"eval_data": completions(4, seed=1), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}


def test_each_metric_has_its_direction():
    assert {name for name in LESS.split() if greater_is_better(name) is not False} == set()
    assert greater_is_better("eval_agreement_at_1") and greater_is_better("rows_mean_token_accuracy")
    assert [greater_is_better(name) for name in ("accuracy", "f1", "market_share", None)] == [None] * 4
    assert is_neither("entropy") and is_neither("eval_teacher_perplexity") and not is_neither("accuracy")


@pytest.mark.parametrize("config", [LigerConfig, LigerDistillConfig])
def test_our_configurations_choose_by_it(config):
    def chosen(metric, **options):
        return train_args(config, metric_for_best_model=metric, **options).greater_is_better

    assert chosen("forward_kl") is False and chosen("eval_rows_perplexity") is False
    assert chosen("perplexity", greater_is_better=True) is True and chosen("accuracy") is True
    with pytest.raises(ValueError, match="metric_for_best_model: neither more nor less of entropy is better"):
        chosen("entropy")
    assert chosen("entropy", greater_is_better=False) is False


@pytest.mark.parametrize("scheduler", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("metric", "mode"), [("mean_token_accuracy", "max"), ("perplexity", "min"), (None, "min"), ("accuracy", "max")]
)
def test_learning_rates_that_follow_evaluations_follow_it(scheduler, metric, mode):
    trainer = sft(config=LigerConfig, **FOLLOW, metric_for_best_model=metric, lr_scheduler_type=scheduler)
    trainer.create_optimizer_and_scheduler(2)
    assert trainer.lr_scheduler.mode == mode


def test_a_guess_of_transformers_is_corrected_and_said():
    for make, metric in (
        (sft, "perplexity"),
        (lambda **options: distill(config=GKDConfig, **options), "forward_kl"),
        (lambda **options: sft(cls=SFTTrainer, callbacks=[DistillationCallback(a_teacher())], **options), "forward_kl"),
    ):
        with pytest.warns(UserWarning, match=f"transformers takes more {metric} for the better"):
            trainer = make(metric_for_best_model=metric, **FOLLOW)
        assert not trainer.args.greater_is_better
