"""LigerTrainer beside SFTTrainer on the same data: what is logged, what is stored, what is left out."""

import contextlib
import math
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import (
    VOCAB,
    WORDS,
    chats,
    completions,
    double_copy,
    largest_vocabulary_tensor,
    shift_labels_of,
    texts,
    tiny_model,
    tiny_tokenizer,
    train_args,
)
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerTrainer
from liger_trainer.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.usefixtures("chunked_torch"),
    pytest.mark.filterwarnings("error::liger_trainer.deferred.MaterializedLogitsWarning"),
]

COMPARED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "grad_norm")

RUNS = {
    "padding": (texts, {}),
    "completion_only": (completions, {}),
    "packing_bfd": (completions, {"packing": True, "max_length": 24}),
    "packing_bfd_split": (texts, {"packing": True, "max_length": 10, "packing_strategy": "bfd_split"}),
    "packing_wrapped": (texts, {"packing": True, "max_length": 24, "packing_strategy": "wrapped"}),
    "padding_free": (completions, {"padding_free": True, "max_length": None}),
    "truncated": (texts, {"max_length": 9}),
    "assistant_only_loss": (chats, {"assistant_only_loss": True}),
    "label_smoothing": (completions, {"label_smoothing_factor": 0.1}),
    "dft": (completions, {"loss_type": "dft"}),
    "accumulation": (completions, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    "checkpointing": (texts, {"gradient_checkpointing": True}),
    "eval_during_training": (completions, {"eval_strategy": "steps", "eval_steps": 10}),
}


def train(cls, model, data, eval_data=None, peft_config=None, **options):
    args = train_args(SFTConfig, **{"max_steps": 20, **options})
    trainer = cls(
        model, args=args, train_dataset=data, eval_dataset=eval_data, processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip
    with quiet():
        trainer.train()
    return trainer


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def assert_same_logs(ours, trls, compared=COMPARED):
    names = {f"{prefix}{name}" for name in compared for prefix in ("", "eval_")}
    steps = 0
    for got, want in zip(ours.state.log_history, trls.state.log_history, strict=True):
        expected = {name: value for name, value in want.items() if name in names}
        steps += "loss" in expected
        for name, value in expected.items():
            digits = 1e-4 if name == "grad_norm" else 1e-5
            assert got[name] == pytest.approx(value, rel=digits, abs=1e-6), (want["step"], name)
    assert steps == 20


@pytest.mark.parametrize("run", RUNS)
def test_the_same_logs_as_sfttrainer_over_20_steps(run):
    dataset, options = RUNS[run]
    data = dataset()
    eval_data = data.select(range(9)) if "eval_strategy" in options else None
    ours, trls = (
        train(cls, tiny_model("llama_tied", max_position_embeddings=256), data, eval_data, **options)
        for cls in (LigerTrainer, SFTTrainer)
    )
    assert_same_logs(ours, trls)
    losses = [log["loss"] for log in ours.state.log_history if "loss" in log]
    assert abs(losses[0] - losses[-1]) > 0.1 * losses[0]  # something was learnt
    if eval_data is not None:
        assert sum("eval_loss" in log for log in ours.state.log_history) == 2
    for got, want in zip(ours.model.parameters(), trls.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_same_logs_with_lora():
    data = completions()
    config = LoraConfig(target_modules="all-linear", r=4)
    ours, trls = (train(cls, tiny_model(), data, peft_config=config) for cls in (LigerTrainer, SFTTrainer))
    assert_same_logs(ours, trls)
    trained = {name for name, p in ours.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_logs_with_a_mixture_of_experts(accumulation):
    options = {"gradient_accumulation_steps": accumulation, "router_aux_loss_coef": 0.2}
    data = completions()
    ours, trls = (train(cls, tiny_model("mixtral"), data, **options) for cls in (LigerTrainer, SFTTrainer))
    assert_same_logs(ours, trls)
    assert ours.state.log_history[0]["aux_loss"] > 0


def test_the_same_logs_with_the_auxiliary_loss_switched_off():
    data = completions()
    ours, trls = (
        train(cls, tiny_model("mixtral"), data, router_aux_loss_coef=0.0) for cls in (LigerTrainer, SFTTrainer)
    )
    assert_same_logs(ours, trls)
    assert "aux_loss" not in ours.state.log_history[0]


@pytest.mark.parametrize("family", ["gemma2", "phi"])
def test_the_same_logs_with_a_softcap_and_with_a_bias(family):
    data = completions()
    ours, trls = (train(cls, tiny_model(family), data) for cls in (LigerTrainer, SFTTrainer))
    assert_same_logs(ours, trls)


def test_averages_start_anew_after_each_log():
    trainer = train(LigerTrainer, tiny_model(), texts(), gradient_accumulation_steps=2)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 20
    for log in logs:
        assert log["perplexity"] == pytest.approx(math.exp(log["loss"]), rel=1e-4)


def make(cls=LigerTrainer, model=None, data=None, eval_data=None, arguments=None, **options):
    return cls(
        model or tiny_model(), args=train_args(SFTConfig, **options), train_dataset=data or completions(),
        eval_dataset=eval_data, processing_class=tiny_tokenizer(), **(arguments or {}),
    )  # fmt: skip


def test_evaluate_before_train_gives_what_sfttrainer_gives():
    eval_data = completions(10, seed=5)
    got, want = (make(cls, eval_data=eval_data).evaluate() for cls in (LigerTrainer, SFTTrainer))
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"):
        assert got[name] == pytest.approx(want[name], rel=1e-5), name


def token_nll(model, trainer, dataset):
    """(sum, count) of the supervised tokens' negative log-likelihood, row by row, on real logits in fp64."""
    truth = double_copy(model)
    nll, count = 0.0, 0
    for row in dataset:
        labels = shift_labels_of(torch.tensor([row["labels"]]))[0]
        with torch.no_grad():
            logits = truth(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        nll += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += (labels != -100).sum().item()
    return nll, count


def test_perplexity_is_of_the_mean_over_tokens():
    model = tiny_model()
    trainer = make(model=model, eval_data=completions(11, seed=5), learning_rate=0.0, num_train_epochs=1, max_steps=-1,
                   logging_strategy="epoch")  # fmt: skip
    nll, count = token_nll(tiny_model(), trainer, trainer.eval_dataset)
    assert trainer.evaluate()["eval_perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    trainer.train()
    nll, count = token_nll(tiny_model(), trainer, trainer.train_dataset)
    assert trainer.state.log_history[-2]["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)


# What is stored


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 32}, {"label_smoothing_factor": 0.1}],
                         ids=["padding", "packing", "label_smoothing"])  # fmt: skip
def test_no_logits_of_a_batch_exist_in_train_or_eval(options, monkeypatch):
    trainer = make(data=texts(), eval_data=texts(8, seed=3), max_steps=2, **options)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        trainer.train()
        trainer.evaluate()
    assert 0 < seen.rows <= 8


def test_the_watch_over_logits_sees_them(monkeypatch):
    trainer = make(SFTTrainer, data=texts(), max_steps=1, label_smoothing_factor=0.1)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen, quiet():
        trainer.train()
    assert seen.rows >= 4 * 8


def test_compute_metrics_gets_logits():
    seen = {}

    def compute_metrics(prediction):
        seen["shape"] = prediction.predictions.shape
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[prediction.label_ids[:, 1:] != -100].mean()}

    trainer = make(data=completions(), eval_data=completions(8, 3), arguments={"compute_metrics": compute_metrics},
                   per_device_eval_batch_size=8)  # fmt: skip
    metrics = trainer.evaluate()
    assert seen["shape"][0] == 8 and seen["shape"][-1] == VOCAB
    without = make(eval_data=completions(8, 3), per_device_eval_batch_size=8).evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_perplexity"):
        assert metrics[name] == without[name], name
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"], rel=1e-6)


def test_compute_loss_func_gets_logits():
    shapes = []

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        shapes.append(outputs.logits.shape)
        assert isinstance(outputs.logits, torch.Tensor)
        return outputs.logits.float().square().mean()

    logs = []
    for cls in (LigerTrainer, SFTTrainer):
        trainer = make(cls, max_steps=2, arguments={"compute_loss_func": compute_loss_func})
        trainer.train()
        logs.append(trainer.state.log_history[1])
    assert shapes[0][-1] == VOCAB
    for name in ("loss", "entropy", "mean_token_accuracy"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-5)


def test_undo_takes_the_fused_loss_off():
    trainer = make()
    trainer.fused.undo()
    batch = next(iter(trainer.get_train_dataloader()))
    assert isinstance(trainer.model(**batch).logits, torch.Tensor)


# Rows that are left out


def row(words, start=0):
    return " ".join(WORDS[start : start + words])


def with_prompts(*lengths):
    """Rows of (prompt, completion) words."""
    return Dataset.from_list([{"prompt": row(p), "completion": " " + row(c, 10)} for p, c in lengths])


@pytest.mark.parametrize("packing", [False, True])
def test_rows_without_supervised_tokens_are_counted_and_left_out(packing):
    # With the end token, completions are one token longer; 8 tokens are kept.
    data = with_prompts((2, 3), (8, 3), (7, 3), (9, 9), (1, 1))
    trainer = make(data=data, eval_data=with_prompts((20, 2), (2, 2)), max_length=8, packing=packing, max_steps=1)
    assert trainer.skipped_rows == {"train": 2, "eval": 1}
    if not packing:
        assert sorted(len(ids) for ids in trainer.train_dataset["input_ids"]) == [3, 6, 8]


def test_what_is_kept_depends_on_the_truncated_end():
    data = with_prompts((8, 1), (2, 2))
    assert make(data=data, max_length=6).skipped_rows == {"train": 1}
    assert make(data=data, max_length=6, truncation_mode="keep_end").skipped_rows == {"train": 0}
    # What is left is one supervised token in front, which nothing predicts.
    only_first = Dataset.from_list(
        [{"input_ids": [1, 2, 3], "labels": [1, -100, -100]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    )
    assert make(data=only_first).skipped_rows == {"train": 1}


def test_split_and_wrapped_packing_keep_what_lies_beyond_max_length():
    data = with_prompts((9, 3), (2, 3))
    for strategy in ("bfd_split", "wrapped"):
        trainer = make(data=data, max_length=8, packing=True, packing_strategy=strategy)
        assert trainer.skipped_rows == {"train": 0}


def test_a_dataset_given_to_evaluate_is_treated_alike():
    trainer = make(max_length=8)
    metrics = trainer.evaluate(with_prompts((9, 1), (2, 2)))
    assert trainer.skipped_rows["eval"] == 1 and math.isfinite(metrics["eval_loss"])


def test_no_row_left_is_an_error():
    message = r"No row of the train dataset has a supervised token within max_length=4: .*Check the completions"
    with pytest.raises(DataError, match=message):
        make(data=with_prompts((4, 2), (5, 1)), max_length=4)
    with pytest.raises(DataError, match="No row of the eval dataset"):
        make(eval_data=with_prompts((4, 2)), data=with_prompts((1, 2)), max_length=4)


def test_rows_are_counted_in_a_stream_by_trl():
    stream = completions().to_iterable_dataset()
    trainer = make(data=stream, max_steps=2)
    trainer.train()
    assert trainer.skipped_rows == {} and math.isfinite(trainer.state.log_history[0]["loss"])


def test_a_model_with_another_loss_is_refused():
    model = tiny_model()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(ConfigError, match="has a loss of its own"):
        make(model=model)
