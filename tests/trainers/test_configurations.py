"""Configurations of the trainers: values that are refused, key by key, and what is decided where nothing is said."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import save_models
from tiny import completions, texts, tiny_model, tiny_tokenizer, train_args
from trainings import a_teacher, distill, sft
from trl import SFTTrainer
from trl.experimental.gkd import GKDConfig

from liger_trainer import DistillationCallback, LigerConfig, LigerDistillConfig, LigerTrainer
from liger_trainer.trainers import config as sft_config
from liger_trainer.trainers.options import greater_is_better, is_neither

KD, SFT = LigerDistillConfig, LigerConfig
KL, CE = {"type": "forward_kl"}, {"type": "ce"}
CACHE = {"teacher": "cache", "teacher_cache_dir": "x"}
SAMPLED = "does not go with completions that are sampled"
VALUES: list[tuple[Any, dict[str, Any], str]] = [
    # losses
    (KD, {"beta": 1.5}, "beta: expected a number of at most 1, got 1.5"),
    (KD, {"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
    (KD, {"temperature": float("inf")}, "temperature: expected a finite number, got inf"),
    (KD, {"kd_temperature": 0.0}, "temperature: expected"),
    (KD, {"temperature": -1.0, "kd_temperature": 1.0}, "temperature: expected"),
    (KD, {"losses": [{**CE, "weight": 0}]}, "every weight is 0, so nothing would be learned"),
    (KD, {"loss_type": "dft"}, "loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'"),
    (KD, {"losses": []}, r"losses must be a list such as .*, got \[\]"),
    (KD, {"losses": ["ce"]}, "Each of losses needs a type out of forward_kl, reverse_kl, jsd, .*; got 'ce'"),
    (KD, {"losses": [{"type": "kl"}]}, "Each of losses needs a type out of .*; got {'type': 'kl'}"),
    (KD, {"losses": [{**CE, "beta": 1.0}]}, "losses: ce: beta: unknown key. Known: type, weight"),
    (KD, {"losses": [{**CE, "weight": "much"}]}, "losses: ce: weight: expected a number, got 'much'"),
    (KD, {"losses": [CE, CE]}, "losses names ce twice"),
    (KD, {"kd_temperature": 2.0, "losses": [CE]}, "kd_temperature: has no effect: nothing in the loss"),
    (KD, {"label_smoothing_factor": 0.1}, "label_smoothing_factor: has no effect: it is of the cross-entropy"),
    (partial(DistillationCallback, "x"), {"beta": 2.0}, "beta"),
    (partial(DistillationCallback, "x"), {"temperature": 0.0}, "temperature"),
    (partial(DistillationCallback, "x"), {"losses": [{"type": "no_kl"}]}, "type"),
    # teachers
    (KD, {"teacher": "self", "teacher_tokenizer_name_or_path": "d"}, "teacher_tokenizer_name_or_path: has no effect"),
    (KD, {"verify_teacher_cache": True}, "verify_teacher_cache: has no effect without `teacher: cache`"),
    # sampling
    (KD, {"top_p": 0.0}, "top_p: expected a number above 0, got 0.0"),
    (KD, {"top_k": -1}, "top_k: expected a number of at least 0"),
    (KD, {"max_completion_length": 0}, "max_completion_length: expected a number of at least 1, got 0"),
    (KD, {"max_completion_length": None}, "max_completion_length: expected an integer, got null"),
    (KD, {"vllm_mode": "remote"}, "vllm_mode: expected one of colocate, server, got 'remote'"),
    (KD, {**CACHE, "lmbda": 0.1}, "a cache knows the completions in the rows"),
    (KD, {"lmbda": 1.0, "losses": [KL, CE]}, "ce in losses has no effect: it is of given completions, not of the st"),
    # rows
    (KD, {"weight_column": "weight", "lmbda": 0.5}, f"weight_column: {SAMPLED}"),
    (KD, {"supervised_part": "content", "lmbda": 0.5}, f"supervised_part: {SAMPLED}"),
    (SFT, {"supervised_part": "message"}, "supervised_part: without `assistant_only_loss: true`"),
    (SFT, {"supervised_part": "header"}, "supervised_part: expected one of message, content"),
    # steps
    (SFT, {"memory": "balanced", "gradient_checkpointing": True}, "^memory: has no effect with gradient_checkpointin"),
    (SFT, {"memory": "balanced", "torch_compile": True}, "^memory: has no effect with torch_compile"),
    (SFT, {"memory": "small"}, "^memory: expected one of fast, balanced, lean"),
    (SFT, {"cuda_graphs": "on"}, "cuda_graphs: expected one of auto, always, never"),
    (SFT, {"on_non_finite": "ignore"}, "on_non_finite: expected one of stop, skip_step, got 'ignore'"),
    (SFT, {"on_non_finite": "skip_step", "optim": "lomo"}, "on_non_finite: skip_step leaves the optimizer's step out"),
    *((config, {"metric_for_best_model": "entropy"},
       "metric_for_best_model: neither more nor less of entropy is better") for config in (SFT, KD)),
]  # fmt: skip


@pytest.mark.parametrize("config, options, message", VALUES, ids=lambda x: str(x)[:50] if isinstance(x, dict) else "")
def test_values_that_are_refused(config, options, message):
    make = partial(train_args, config) if config in (KD, SFT) else config
    with pytest.raises(ValueError, match=message):
        make(**options)


# Whether a training computes in bf16 where nobody said so: the device decides


@pytest.mark.parametrize(
    ("has", "options", "expected"),
    [
        (True, {}, True), (False, {}, False), (True, {"fp16": True}, False), (True, {"use_cpu": True}, False),
        (False, {"bf16": True}, True), (True, {"bf16": False}, False),
    ],
)  # fmt: skip
def test_the_device_decides_where_nothing_is_set(monkeypatch, has, options, expected):
    monkeypatch.setattr(sft_config, "is_torch_bf16_gpu_available", lambda: has)
    args = SimpleNamespace(**{"bf16": None, "fp16": False, "use_cpu": False, **options})
    sft_config.choose_bf16(args)
    assert args.bf16 is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU, TRL's default is an error")
@pytest.mark.parametrize("config", [LigerConfig, LigerDistillConfig])
def test_a_configuration_without_bf16_on_a_cpu(config, tmp_path):
    assert config(output_dir=str(tmp_path)).bf16 is False
    assert config(output_dir=str(tmp_path), bf16=True, use_cpu=True).bf16 is True


def test_a_trainer_without_arguments_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = texts(8)
    save_models(tmp_path / "some", "model")
    trainer = LigerTrainer("some/model", train_dataset=rows)
    assert isinstance(trainer.args, LigerConfig) and trainer.args.output_dir == "model-SFT"
    assert trainer.train_dataset.num_rows == len(rows)
    short = train_args(LigerConfig, max_steps=1)
    trainer = LigerTrainer(tiny_model("llama_tied"), short, None, rows, processing_class=tiny_tokenizer())
    assert trainer.args is short and trainer.train().metrics["train_loss"] > 0


# Which way metrics are better, for what chooses by them

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
