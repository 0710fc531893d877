"""LigerTrainer beside SFTTrainer on the same data: what is logged, what is stored, what is left out."""

import contextlib
import copy
import json
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from quick_cases import slow_but
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
)  # fmt: skip
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config
from trl.trainer import sft_trainer

from liger_trainer import LigerDistillConfig, LigerTrainer, patch
from liger_trainer.errors import ConfigError, DataError, MaterializedLogitsWarning
from liger_trainer.patching.patcher import patched_record
from liger_trainer.trainers.row_preparation import prepare_rows
from liger_trainer.trainers.student import undo_evaluation

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

COMPARED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "grad_norm")

STEPS = 4
RUNS = {
    "completion_only": ("llama_tied", completions, {}),
    "packing_bfd": ("llama_tied", completions, {"packing": True, "max_length": 24}),
    "packing_bfd_split": ("llama", texts, {"packing": True, "max_length": 10, "packing_strategy": "bfd_split"}),
    "padding_free": ("llama_tied", completions, {"padding_free": True, "max_length": None}),
    "assistant_only_loss": ("llama_tied", chats, {"assistant_only_loss": True}),
    "label_smoothing": ("llama_tied", completions, {"label_smoothing_factor": 0.1, "gradient_checkpointing": True}),
    "dft": ("llama_tied", completions, {"loss_type": "dft"}),
    "accumulation": ("llama", completions, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    # in one batch: SFTTrainer averages over batches
    "evaluation": ("llama", completions, {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 9}),
    "lora": ("llama", texts, {"max_length": 9, "peft_config": LoraConfig(target_modules="all-linear", r=4)}),
    "experts": ("mixtral", completions, {"gradient_accumulation_steps": 2, "router_aux_loss_coef": 0.2}),
    "experts without aux_loss": ("mixtral", completions, {"router_aux_loss_coef": 0.0}),
    "softcap": ("gemma2", completions, {}),
}


def train(cls, model, data, eval_data=None, peft_config=None, **options):
    args = train_args(SFTConfig, **{"max_steps": STEPS, **options})
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
    assert steps == STEPS


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow)], ids=str
)
def test_dropout_of_adapters(options):
    """Masks that torch's seed decides, with and without layers that run a second time in the backward."""
    runs = []
    for dropout, checkpoints in ((0.3, False), (0.3, True), (0.0, False)):
        adapters = LoraConfig(target_modules="all-linear", r=4, lora_dropout=dropout)
        model = tiny_model("llama")
        trainer = train(LigerTrainer, model, texts(), None, adapters, gradient_checkpointing=checkpoints, **options)
        assert not [name for name in trainer.patched.report.left_alone if "LoRA" in name]
        runs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    assert len(runs[2]) == STEPS and runs[0] != pytest.approx(runs[2], rel=1e-6)


@pytest.mark.parametrize(
    "run",
    slow_but(RUNS, "completion_only", "packing_bfd", "assistant_only_loss", "accumulation", "evaluation", "lora"),
)
def test_the_same_logs_as_sfttrainer(run):
    family, dataset, options = RUNS[run]
    data = dataset()
    eval_data = data.select(range(9)) if "eval_strategy" in options else None
    ours, trls = (
        train(cls, tiny_model(family, max_position_embeddings=256), data, eval_data, **copy.deepcopy(options))
        for cls in (LigerTrainer, SFTTrainer)
    )
    assert_same_logs(ours, trls)
    logs = [log for log in ours.state.log_history if "loss" in log]
    assert len({log["loss"] for log in logs}) == STEPS  # something is learned
    assert ("aux_loss" in logs[0]) == (run == "experts")
    if run == "accumulation":  # averages start anew after each log
        assert [log["perplexity"] for log in logs] == pytest.approx([math.exp(log["loss"]) for log in logs], rel=1e-4)
    if eval_data is not None:
        assert sum("eval_loss" in log for log in ours.state.log_history) == 2
    for (name, got), want in zip(ours.model.named_parameters(), trls.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        assert got.requires_grad == (run != "lora" or "lora_" in name)


def test_tokens_are_counted_through_checkpoints(tmp_path):
    options = {"max_steps": 5, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2}

    def tokens(cls=LigerTrainer, checkpoint=None, folder="run"):
        trainer = make(cls, output_dir=str(tmp_path / folder), **options)
        for _ in range(2):  # a second training begins anew
            trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
            counted = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
            yield counted

    whole = next(tokens())
    assert len(whole) == 2 and list(tokens()) == [whole, whole]
    assert next(tokens(checkpoint="run/checkpoint-2")) == next(tokens(checkpoint="run/checkpoint-4")) == whole
    next(tokens(SFTTrainer, folder="trl"))  # whose checkpoint has the tokens of its last log alone
    first, last = next(tokens(checkpoint="trl/checkpoint-4"))
    assert first == whole[0] and first < last < whole[1]


def make(cls=LigerTrainer, model=None, data=None, eval_data=None, arguments=None, **options):
    return cls(
        model or tiny_model(), args=train_args(SFTConfig, **options), train_dataset=data or completions(),
        eval_dataset=eval_data, processing_class=tiny_tokenizer(), **(arguments or {}),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_in_evaluation_tokens_count_the_same_in_any_batch(family):
    """Only the auxiliary loss is defined by the batch."""
    whole, parts = (
        make(model=tiny_model(family), eval_data=completions(10, seed=5), per_device_eval_batch_size=size).evaluate()
        for size in (10, 3)
    )
    aux = whole.pop("eval_aux_loss", 0.0), parts.pop("eval_aux_loss", 0.0)
    for metrics, loss in zip((whole, parts), aux, strict=True):
        metrics["eval_loss"] -= 0.3 * loss  # the model's own coefficient
        assert metrics["eval_loss"] == pytest.approx(math.log(metrics["eval_perplexity"]), rel=1e-6)
    assert bool(aux[0]) == (family == "mixtral")
    for name in ("eval_loss", "eval_perplexity", "eval_entropy", "eval_mean_token_accuracy"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-6), name


def test_each_evaluation_dataset_has_its_own_metrics():
    parts = {"long": completions(8, seed=1), "short": completions(5, seed=2)}
    trainer = make(eval_data=parts, max_steps=1, eval_strategy="steps", eval_steps=1)
    got = trainer.evaluate()
    for name, rows in parts.items():
        want = make(eval_data=rows).evaluate()
        for metric in ("loss", "perplexity", "entropy", "mean_token_accuracy", "num_tokens"):
            assert got[f"eval_{name}_{metric}"] == want[f"eval_{metric}"], (name, metric)
    assert "eval_perplexity" not in got and "eval_entropy" not in got
    trainer.train()
    assert {"eval_long_perplexity", "eval_short_perplexity"} <= {
        name for log in trainer.state.log_history for name in log
    }


def test_predict_has_the_metrics_of_its_rows():
    trainer = make(eval_data=completions(6, seed=2))
    want = trainer.evaluate()
    rows = make(eval_data=completions(9, seed=1)).eval_dataset
    metrics = trainer.predict(rows).metrics
    assert metrics["test_perplexity"] == make(eval_data=rows).evaluate()["eval_perplexity"] != want["eval_perplexity"]
    assert "test_entropy" in metrics and "eval_entropy" not in metrics
    again = trainer.evaluate()
    for name in ("eval_perplexity", "eval_entropy", "eval_mean_token_accuracy"):
        assert again[name] == want[name], name


def test_an_evaluation_that_was_broken_off_leaves_nothing_behind():
    trainer = make(eval_data=completions(12, seed=2))
    want, step = trainer.evaluate(), trainer.prediction_step
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    trainer.prediction_step = broken
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(completions(12, seed=7))
    trainer.prediction_step = step
    again = trainer.evaluate()
    assert all(again[f"eval_{name}"] == want[f"eval_{name}"] for name in ("perplexity", "entropy"))


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


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 32}, {"label_smoothing_factor": 0.1}],
                         ids=["packing", "label_smoothing"])  # fmt: skip
def test_no_logits_of_a_batch_exist_in_train_or_eval(options, monkeypatch):
    trainer = make(data=texts(), eval_data=texts(8, seed=3), max_steps=1, **options)
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
        trainer = make(cls, max_steps=1, arguments={"compute_loss_func": compute_loss_func})
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert shapes[0][-1] == VOCAB
    for name in ("loss", "entropy", "mean_token_accuracy"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-5)


# Layers


@pytest.fixture(scope="module")
def trls():
    return train(SFTTrainer, tiny_model(), completions())


def test_layers_are_patched_and_one_line_says_so(capsys):
    trainer = make()
    assert trainer.patched is patched_record(trainer.model) and trainer.fused is trainer.patched.fused
    assert {"RMSNorm", "SwiGLU", "rope", "fused loss"} <= set(trainer.patched.report.swapped)
    assert capsys.readouterr().out.count(f"liger-trainer: {trainer.patched.report}\n") == 1
    trainer.patched.undo()
    assert all("forward" not in vars(layer) for layer in trainer.model.modules() if layer is not trainer.model)


def test_liger_kernel_config_says_what_is_replaced():
    trainer = make(liger_kernel_config={"rms_norm": False})
    assert "RMSNorm" not in trainer.patched.report.swapped and "SwiGLU" in trainer.patched.report.swapped


def test_the_flag_simply_works(monkeypatch, trls):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # whose import is an error
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use_liger_kernel.*")
        ours = train(LigerTrainer, tiny_model(), completions(), use_liger_kernel=True)
    assert_same_logs(ours, trls)
    assert ours.patched is patched_record(ours.model) and ours.patched.report.swapped["RMSNorm"] == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rms_norms": True}, "Unknown patch options: rms_norms. There are rope"),
        ({"fused_linear_cross_entropy": False}, "compute their loss from hidden states.*SFTTrainer"),
        ({"cross_entropy": True}, "compute their loss from hidden states.*SFTTrainer"),
    ],
)
def test_options_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make(liger_kernel_config=config)


def test_a_model_that_was_patched_before_keeps_its_layers(trls):
    model = tiny_model()
    record = patch(model, swiglu=False)
    trainer = train(LigerTrainer, model, completions())
    assert trainer.patched is record and trainer.fused is record.fused
    assert "SwiGLU" not in record.report.swapped and record.report.swapped["fused loss"] == 1
    assert_same_logs(trainer, trls)
    with pytest.raises(ConfigError, match="was patched with .* before"):
        make(model=model, liger_kernel_config={"swiglu": True})
    record.undo()
    assert all("forward" not in vars(layer) for layer in model.modules() if layer is not model)


def test_a_model_that_was_patched_with_the_loss_on_stored_logits_is_refused_as_it_is():
    model = tiny_model()
    record = patch(model, cross_entropy=True)
    with pytest.raises(ConfigError, match="was patched with cross_entropy=True before.*without cross_entropy"):
        make(model=model)
    assert record.report.swapped["cross-entropy"] == 1 and patched_record(model) is record


def test_trainers_of_one_model_take_turns():
    """The loss is on the model, and each trainer's is its own."""
    options = {"smooth": {"label_smoothing_factor": 0.3}, "plain": {}}
    model, alone = tiny_model(), {}
    for name, more in options.items():
        alone[name] = make(eval_data=completions(4, 3), **more).evaluate()["eval_loss"]
    assert alone["smooth"] != pytest.approx(alone["plain"], rel=1e-3)
    first, second = (make(model=model, eval_data=completions(4, 3), **more) for more in options.values())
    for _ in range(2):
        assert first.evaluate()["eval_loss"] == alone["smooth"] and second.evaluate()["eval_loss"] == alone["plain"]
    assert first.patched is second.patched and first.patched.fused is second.fused
    make(SFTTrainer, model=model)
    with pytest.raises(ConfigError, match="was replaced after this LigerTrainer was made, as by an SFTTrainer"):
        second.evaluate()


# Adapters on the head, which TRL refuses


@contextlib.contextmanager
def stored_or_not():
    """Where the head is not fused, its logits are stored: the loss is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        yield


def head_adapter():
    return LoraConfig(target_modules=["lm_head", "q_proj"], r=4, lora_alpha=32, init_lora_weights=False)


def test_adapters_on_the_head_are_part_of_the_loss():
    torch.manual_seed(0)
    trainer = make(arguments={"peft_config": head_adapter()})
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.patched.undo()
    truth = double_copy(trainer.model)
    truth.get_base_model().forward = type(truth.get_base_model()).forward.__get__(truth.get_base_model())
    want = truth(**batch).loss
    names = [name for name, p in truth.named_parameters() if "lm_head.lora" in name]
    gradients = torch.autograd.grad(want, [truth.get_parameter(name) for name in names])

    trainer = make(model=trainer.model)
    with stored_or_not():
        loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    with stored_or_not(), trainer.model.disable_adapter(), torch.no_grad():
        assert abs(trainer.compute_loss(trainer.model, dict(batch)) - want) > 0.05
    loss.backward()
    assert len(names) == 2
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(trainer.model.get_parameter(name).grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_one_module_in_trls_model_arguments_gets_adapters():
    """ModelConfig makes text of the list, which PEFT takes for a pattern of whole paths."""
    adapters: Any = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj"], lora_r=2))
    trainer = make(arguments={"peft_config": adapters})
    names = {
        name.split(".lora_")[0].rpartition(".")[2] for name, p in trainer.model.named_parameters() if p.requires_grad
    }
    assert names == {"q_proj"} and adapters.target_modules == "q_proj"


def test_trl_still_refuses_them():
    from peft.tuners.tuners_utils import BaseTunerLayer

    make()
    assert sft_trainer.BaseTunerLayer is BaseTunerLayer
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        make(SFTTrainer, arguments={"peft_config": head_adapter()})
    with pytest.raises(ConfigError):
        make(liger_kernel_config={"nope": True})
    assert sft_trainer.BaseTunerLayer is BaseTunerLayer


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


def test_an_evaluation_dataset_is_not_called_as_the_training_rows_are(tmp_path):
    named = {"train": completions(4)}
    with pytest.raises(ConfigError, match="'train' is the name of the training rows"):
        make(eval_data=named)
    with pytest.raises(ConfigError, match="'train' is the name of the training rows"):
        make().evaluate(named)
    with pytest.raises(ConfigError, match="'train' is the name of the training rows"):
        prepare_rows(
            train_args(LigerDistillConfig, teacher_cache_dir=str(tmp_path)), tiny_tokenizer(), **named, test=named
        )


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


@pytest.mark.parametrize("what", ["one process", "fsdp", "processes"])
def test_an_evaluation_before_training_leaves_nothing_on_the_model_of_several_processes(monkeypatch, what):
    """What accelerate did for it is undone, so that training prepares the model anew; nowhere else is there a need."""
    args, data = train_args(SFTConfig, bf16=True, max_steps=1), completions()
    trainer = LigerTrainer(tiny_model(), args=args, train_dataset=data, processing_class=tiny_tokenizer())
    before = trainer.model.forward
    trainer.evaluate(trainer.train_dataset)
    assert trainer.model.forward != before and trainer.model._is_accelerate_prepared
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 1 if what == "one process" else 2)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", what == "fsdp")
    undo_evaluation(trainer)
    undone = what == "processes"
    assert (trainer.model.forward == before) == undone
    assert hasattr(trainer.model, "_is_accelerate_prepared") != undone
    monkeypatch.undo()
    trainer.train()


PUBLISHED = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}  # against transformers' rules


@pytest.mark.parametrize("by_name", [True, False])
def test_a_generation_config_as_published_is_saved_as_it_is(by_name, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(PUBLISHED))
    given = str(tmp_path / "model")
    trainer = make(model=given if by_name else type(model).from_pretrained(given), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert PUBLISHED.items() <= saved.items()


def test_a_generation_config_that_cannot_be_saved_is_refused_before_training():
    model = tiny_model()
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ConfigError, match="generation_config could not be saved with the trained model: .*-1"):
        make(model=model)


LONG = Dataset.from_list([{"text": "w1 " * n} for n in (3, 30, 5)])


@pytest.mark.parametrize("case", ["whole", "padded", "stream"])
def test_rows_beyond_the_positions_of_a_table_are_refused(case):
    model = tiny_model("gpt2", max_position_embeddings=24)
    rows, options = LONG, {"max_length": 64, "max_steps": 1}
    if case == "padded":
        rows, options = LONG.select([0, 2, 2]), {"pad_to_multiple_of": 32, **options}
    if case == "stream":
        rows = LONG.to_iterable_dataset()
    with pytest.raises(ConfigError, match="max_length is 64, .* has (31|32|64) tokens, but the model has 24 positions"):
        make(data=rows, model=model, **options)
    make(data=rows, model=model, max_length=24, max_steps=1).train()


def test_a_model_that_computes_its_positions_has_no_such_limit():
    make(data=LONG, model=tiny_model(max_position_embeddings=24), max_length=64, max_steps=1).train()
