"""Runs of TRL's trainers of distillation, made again by ours from TRL's own arguments: step by step, equal.

Where TRL is right the two are equal. Where it is not (GKDTrainer on-policy divides by the number of other tokens, and
its temperature never reaches the loss) the test says by how much they differ.
"""

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from tiny import VOCAB, chats, completions, tiny_model, tiny_tokenizer, train_args
from trainings import batches_of, logged, trained
from transformers import GenerationMixin, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError
from liger_trainer.extras.from_trl import from_trl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EOS = VOCAB - 3


class Weights(TrainerCallback):
    """The loss of every step, unrounded, and the weights after it."""

    def __init__(self):
        self.losses, self.weights = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(flat(model))


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def trainer_of(trainer_class, args, dataset, **kwargs):
    return trainer_class(
        tiny_model(), teacher_model=tiny_model("qwen3", seed=5), args=args, train_dataset=dataset,
        processing_class=tiny_tokenizer(), **kwargs,
    )  # fmt: skip


def run(trainer_class, args, dataset):
    steps = Weights()
    trainer_of(trainer_class, args, dataset, callbacks=[steps]).train()
    return steps


def arguments(cls, **options):
    return train_args(cls, **{"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, **options})


def assert_the_same_run(theirs, args_class, rows, rtol=1e-5, **options):
    """The run of TRL's trainer, and ours of the same arguments."""
    want, got = (run(cls, arguments(args_class, **options), rows) for cls in (theirs, LigerDistillTrainer))
    assert len(got.losses) == len(want.losses) >= 3
    assert got.losses == pytest.approx(want.losses, rel=rtol)
    start = flat(tiny_model())
    for ours, theirs in zip(got.weights, want.weights, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * (theirs - start).norm()


# GKDTrainer


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.1, "temperature": 4.0}, {"beta": 0.0, "gradient_accumulation_steps": 2},
     {"beta": 1.0, "max_length": 9}],
    ids=["temperature", "accumulation", "truncation"],
)  # fmt: skip
def test_gkd_on_the_datasets_completions(options):
    """Only the last message is learned, by both; rows too long lose their beginning."""
    assert_the_same_run(GKDTrainer, GKDConfig, chats(), lmbda=0.0, **options)


def test_gkds_temperature_is_that_of_sampling_alone():
    """In TRL 1.16 it has no effect on the loss. Its run is ours; with kd_temperature it has."""
    args = {t: arguments(GKDConfig, lmbda=0.0, max_steps=1, temperature=t) for t in (0.5, 4.0)}
    cold, hot = (run(GKDTrainer, args[t], chats()).losses for t in args)
    assert cold == hot
    assert run(LigerDistillTrainer, args[4.0], chats()).losses == pytest.approx(hot, rel=1e-5)
    meant, given = from_trl(args[4.0], {"train_dataset": chats()})
    meant.kd_temperature = None
    assert abs(run(LigerDistillTrainer, meant, given["train_dataset"]).losses[0] / hot[0] - 1) > 0.05


def answers(monkeypatch):
    """`generate` as a function of the prompt's real tokens, of different lengths, some cut off: the same for all."""

    def generate(self, input_ids, attention_mask, generation_config, return_dict_in_generate=False, **kwargs):
        made = torch.full((len(input_ids), generation_config.max_new_tokens), VOCAB - 4)
        for i, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            prompt = ids[mask]
            length = int(prompt.sum()) % 7 + 1
            tokens = (prompt.sum() + torch.arange(length) * (1 + prompt[-1] % 5)) % (VOCAB - 5)
            tokens = torch.cat([tokens, torch.tensor([EOS])])[: made.shape[1]]
            made[i, : len(tokens)] = tokens
        sequences = torch.cat([input_ids, made], 1)
        return type("Generated", (), {"sequences": sequences}) if return_dict_in_generate else sequences

    monkeypatch.setattr(GenerationMixin, "generate", generate)


@pytest.mark.parametrize("options", [{"lmbda": 1.0}, {"lmbda": 0.0, "seq_kd": True}], ids=["student", "teacher"])
def test_gkd_on_sampled_completions_divides_by_the_number_of_other_tokens(options, monkeypatch):
    """TRL 1.16 counts the labels of the dataset, and sums over what was sampled. Ours is the mean over what it sums;
    the two losses, and gradients, differ by exactly that factor."""
    answers(monkeypatch)
    options = {"max_new_tokens": 3, "max_steps": 2, "max_grad_norm": 0.0, **options}

    def counted(**options):
        trainer = trainer_of(LigerDistillTrainer, arguments(GKDConfig, learning_rate=0.0, **options), chats())
        seen = batches_of(trainer)
        return logged(trained(trainer)), [int((batch["labels"] != -100).sum()) for batch in seen]

    (ours, sampled), (_, given) = counted(**options), counted(max_steps=2, lmbda=0.0)
    theirs = run(GKDTrainer, arguments(GKDConfig, learning_rate=0.0, **options), chats())
    factors = [n / m for n, m in zip(sampled, given, strict=True)]
    assert all(abs(factor - 1) > 0.05 for factor in factors)
    assert theirs.losses == pytest.approx([x * f for x, f in zip(ours, factors, strict=True)], rel=1e-5)

    if "seq_kd" not in options:
        one = arguments(GKDConfig, **{**options, "max_steps": 1})
        ours, theirs = (
            run(cls, one, chats()).weights[0] - flat(tiny_model()) for cls in (LigerDistillTrainer, GKDTrainer)
        )
        assert (theirs - factors[0] * ours).norm() <= 1e-4 * theirs.norm()


# DistillationTrainer


def prompts(n=16):
    return completions(n).remove_columns("completion")


def chat_prompts(n=16):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in prompts(n)["prompt"]])


GREEDY = {"generation_kwargs": {"do_sample": False}, "max_completion_length": 7}
TWO_BATCHES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "shuffle_dataset": False}


@pytest.mark.parametrize(
    "options, rows",
    [
        ({"beta": 0.3, **TWO_BATCHES}, prompts()), ({"beta": 0.0, "temperature": 2.0}, chat_prompts()),
        ({"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}, chat_prompts()),
    ],
    ids=["accumulation", "temperature", "adam"],
)  # fmt: skip
def test_distillation_trainer_on_the_students_own_greedy_completions(options, rows):
    """Nothing is stubbed: each trainer's student writes for itself, greedily, from weights that have moved."""
    options = {**options, **GREEDY, "shuffle_dataset": False}
    assert_the_same_run(DistillationTrainer, DistillationConfig, rows, 1e-4, **options)


def test_distillation_trainer_on_completions_of_different_lengths(monkeypatch):
    answers(monkeypatch)
    assert_the_same_run(DistillationTrainer, DistillationConfig, prompts(), max_completion_length=5, **TWO_BATCHES)


def test_an_evaluation_on_prompts_alone():
    theirs, ours = (
        trainer_of(cls, arguments(DistillationConfig, **GREEDY), prompts(4), eval_dataset=prompts(4), tools=None)
        for cls in (DistillationTrainer, LigerDistillTrainer)
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


# Arguments


def test_what_the_arguments_become():
    ours, _ = from_trl(arguments(DistillationConfig, beta=0.4, temperature=0.8, vllm_server_port=81, seed=3), {})
    want = {
        "beta": 0.4, "temperature": 0.8, "kd_temperature": None, "lmbda": 1.0, "max_length": None, "seed": 3,
        "scale_loss_by_temperature_squared": False, "vllm_server_port": 81, "max_completion_length": 512, "bf16": False,
        "learning_rate": 0.1, "optim": "sgd", "train_sampling_strategy": "random", "logging_steps": 1,
    }  # fmt: skip
    assert {name: getattr(ours, name) for name in want} == want
    plain, _ = from_trl(DistillationConfig("out", bf16=False, use_cpu=True), {})
    assert (plain.beta, plain.learning_rate, plain.logging_steps) == (1.0, 1e-6, 10)  # TRL's defaults, not ours
    ours, _ = from_trl(arguments(GKDConfig, max_new_tokens=33, seq_kd=True, packing=False, hub_token="secret"), {})
    want = {
        "beta": 0.5, "temperature": 0.9, "kd_temperature": 1.0, "lmbda": 0.5, "seq_kd": True, "max_length": 1024,
        "max_completion_length": 33, "disable_dropout": True, "truncation_mode": "keep_end", "hub_token": "secret",
    }  # fmt: skip
    assert {name: getattr(ours, name) for name in want} == want
    assert type(ours) is LigerDistillConfig and ours.accelerator_config == arguments(GKDConfig).accelerator_config


@pytest.mark.parametrize(
    "cls, options, message",
    [
        (DistillationConfig, {"chat_template_kwargs": {"enable_thinking": False}},
         "DistillationConfig.chat_template_kwargs={'enable_thinking': False} has no counterpart: put them into a"),
        (DistillationConfig, {"log_completions": True}, "log_completions=True has no counterpart: sampled completions"),
        (DistillationConfig, {"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False has no"),
        (GKDConfig, {"loss_type": "dft"}, "GKDConfig: loss_type='dft' weighs"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_here(cls, options, message):
    with pytest.raises(ConfigError) as error:
        from_trl(arguments(cls, **options), {})
    assert message in str(error.value)


@dataclass
class OneMore(DistillationConfig):
    """A TRL to come."""

    brand_new: int = 0


def test_tools_are_refused_and_a_field_that_nobody_knows():
    with pytest.raises(ConfigError, match="tools are not called in training"):
        from_trl(arguments(DistillationConfig), {"tools": [print]})
    assert from_trl(arguments(OneMore), {})[0].lmbda == 1.0
    with pytest.raises(ConfigError, match="OneMore.brand_new=1 has no counterpart here"):
        from_trl(arguments(OneMore, brand_new=1), {})


def test_rows_of_gkd_keep_their_datasets():
    given = {"train_dataset": chats(2), "eval_dataset": {"a": chats(3), "b": completions(2)}}
    _, ours = from_trl(arguments(GKDConfig), given)
    assert [m["role"] for m in ours["train_dataset"][0]["prompt"]] == ["user", "assistant", "user"]
    assert ours["eval_dataset"]["b"].column_names == ["prompt", "completion"]
    assert len(ours["eval_dataset"]["a"][0]["completion"]) == 1
