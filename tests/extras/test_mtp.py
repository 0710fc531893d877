"""The head for multi-token prediction trained beside a model, compared with its definition in plain torch, in fp64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from mtp_heads import Definition, head_of, save_with_head, stored_head
from peft import PromptTuningConfig
from safetensors.torch import load_file, save_file
from tiny import VOCAB, FirstGradients, assert_same_gradients, completions, texts, tiny_model, tiny_tokenizer
from torch import nn
from trainings import distill, logged, sft, trained, weights_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, modeling_layers

from liger_trainer import LigerConfig
from liger_trainer.common.mtp_head import ONE_FILE
from liger_trainer.errors import ConfigError, NonFiniteError

RUN: dict[str, Any] = {"config": LigerConfig, "max_length": 24, "max_steps": 2, "train_sampling_strategy": "sequential"}
WEIGHT = 0.3


def with_a_tower(source: Path, folder: Path) -> Path:
    """The same weights in files of a model that reads images, of which a model of text can be loaded."""
    text = json.loads((source / "config.json").read_text())
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights = {
        name if name.startswith(("mtp.", "lm_head.")) else name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(source / ONE_FILE).items()
    }
    before = load_file(folder / ONE_FILE)
    assert before.keys() >= {name for name in weights if not name.startswith("mtp.")}
    save_file(before | weights, folder / ONE_FILE, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("attention") / "source")


def by_definition(folder: Path, rows: list[tuple[list[int], list[int]]], count: int | None = None) -> Any:
    """The head's loss over rows of tokens and labels, its gradients, its tokens, and how many drafts agree."""
    truth, total, tokens, agreeing = Definition(folder), torch.zeros((), dtype=torch.float64), 0, 0
    for row, wanted in rows:
        logits, labels = truth.drafts(row), torch.tensor(wanted)[2:]
        with torch.no_grad():
            greedy = truth.model(torch.tensor([row]), use_cache=False).logits[0, 1:-1].argmax(-1)
        keep = labels != -100
        total = total + F.cross_entropy(logits[keep], labels[keep], reduction="sum")
        tokens += int(keep.sum())
        agreeing += int((logits.argmax(-1) == greedy)[keep].sum())
    loss = total / (count or tokens)
    return loss.item() * (count or tokens) / tokens, truth.gradients(loss), tokens, agreeing


def rows_of(trainer: Any) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def divisor_of(trainer: Any) -> int:
    """What a step over all rows divides by, as Trainer counts: before transformers 5.24 a row's first label too."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    return int(trainer._get_num_items_in_batch([batch], trainer.args.device))


def one_step(source, data=None, make=sft, **options) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer that has made a step over all its four rows, and the gradients of it."""
    first = FirstGradients()
    options = {"per_device_train_batch_size": 4, **RUN, "max_steps": 1, "mtp_loss_weight": WEIGHT, **options}
    trainer = make(str(source), data=data or completions(4), callbacks=[first], **options)
    return trained(trainer), first.values


@pytest.mark.parametrize(
    "options",
    [
        {}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, {"gradient_checkpointing": True},
        {"padding_free": True, "max_length": None, "completion_only_loss": False}, {"completion_only_loss": False},
    ],
    ids=["rows", "accumulated", "checkpointed", "packed whole rows", "whole rows"],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_definition(source, options):
    trainer, gradients = one_step(source, **options)
    rows = rows_of(trainer)
    count = sum(label != -100 for _, labels in rows for label in labels[1:])
    loss, want, tokens, _ = by_definition(source, rows, divisor_of(trainer))
    assert logged(trainer, "mtp_loss") == [pytest.approx(loss, rel=1e-5)] and loss > 1
    assert logged(trainer, "mtp_share") == [pytest.approx(tokens / count)]
    assert (tokens < count) == ("completion_only_loss" in options)
    assert_same_gradients(head_of(gradients), {name: WEIGHT * g for name, g in want.items()}, rtol=1e-4)


def test_the_head_is_that_of_transformers(source):
    """MtpModel reads the same files and runs the head to draft."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    theirs = modeling_layers.MtpModel.from_pretrained(model)
    ids = torch.randint(VOCAB - 8, (2, 9))
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        drafts = theirs.forward_layer(0, states[:, :-1], torch.arange(8)[None], None, input_ids=ids[:, 1:])
        logits = model.lm_head(drafts)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()).item()
    rows = [(row.tolist(), row.tolist()) for row in ids]
    assert by_definition(source, rows)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("make", [sft, distill], ids=["sft", "distill"])
def test_the_model_learns_what_it_would_without_the_head(source, make):
    how = {name: value for name, value in RUN.items() if make is sft or name != "config"}
    trainers = [
        trained(make(str(source), data=completions(8), mtp_loss_weight=weight, **how)) for weight in (WEIGHT, 0.0)
    ]
    ours, plain = map(weights_of, trainers)
    assert not head_of(plain) and head_of(ours)
    assert all(torch.equal(ours[name], weight) for name, weight in plain.items())
    assert logged(trainers[0]) == logged(trainers[1])
    assert logged(trainers[0], "mtp_loss") and not logged(trainers[1], "mtp_loss")
    before = head_of(stored_head(source))
    assert all(not torch.equal(weight, before[name]) for name, weight in head_of(ours).items())


def test_layers_without_attention_are_passed_over(tmp_path):
    folder = save_with_head(tmp_path / "source", ["linear_attention", "full_attention", "linear_attention"])
    trainer, gradients = one_step(folder, texts(4))
    assert trainer.model.mtp.layers["0"].self_attn.config is trainer.model.config, "which says what attention runs"
    loss, want, *_ = by_definition(folder, rows_of(trainer), divisor_of(trainer))
    assert logged(trainer, "mtp_loss") == [pytest.approx(loss, rel=1e-5)]
    assert_same_gradients(head_of(gradients), {name: WEIGHT * g for name, g in want.items()}, rtol=1e-4)


def test_weights_of_rows_count(source):
    data = Dataset.from_list([{**row, "w": w} for row, w in zip(completions(4), (0.0, 0.0, 2.0, 0.0), strict=True)])
    trainer, gradients = one_step(source, data, weight_column="w")
    _, want, *_ = by_definition(source, rows_of(trainer)[2:3], divisor_of(trainer))
    assert_same_gradients(head_of(gradients), {name: 2 * WEIGHT * g for name, g in want.items()}, rtol=1e-4)


def test_an_evaluation_counts_the_drafts_that_agree(source, tmp_path):
    data = texts(4)
    options = RUN | {"max_steps": 12, "learning_rate": 2e-2, "output_dir": str(tmp_path), "mtp_loss_weight": WEIGHT}
    trainer = trained(sft(str(source), data=data, eval_data=data, **options))
    metrics = trainer.evaluate()
    trainer.save_model()
    loss, _, tokens, agreeing = by_definition(tmp_path, rows_of(trainer))
    assert metrics["eval_mtp_accepted"] == pytest.approx(agreeing / tokens) and 0.1 < agreeing / tokens < 1
    assert metrics["eval_mtp_loss"] == pytest.approx(loss, rel=1e-4)
    assert "eval_mtp_accepted" not in sft(str(source), data=data, eval_data=data, **RUN).evaluate()


def test_a_resumed_training_of_a_model_of_text_in_files_of_one_with_images(source, tmp_path):
    """Files have other names for all weights but the head's."""
    source = with_a_tower(source, tmp_path / "source")
    options = {**RUN, "max_steps": 4, "mtp_loss_weight": WEIGHT, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (
        trained(
            sft(AutoModelForCausalLM.from_pretrained(source), data=completions(8), output_dir=str(tmp_path), **options),
            checkpoint,
        )
        for checkpoint in (None, str(tmp_path / "checkpoint-2"))
    )
    want = weights_of(whole)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(resumed).items())
    checkpoint = load_file(tmp_path / "checkpoint-4" / ONE_FILE)
    assert all(torch.equal(checkpoint[f"mtp.{name}"], weight) for name, weight in head_of(want).items())
    assert "model.language_model.norm.weight" in checkpoint


def test_a_later_trainer_without_the_key_leaves_the_head_as_it_is(source, tmp_path):
    first = trained(sft(str(source), data=completions(8), mtp_loss_weight=WEIGHT, **RUN))
    before = {name: weight.clone() for name, weight in first.model.mtp.state_dict().items()}
    second = trained(sft(first.model, data=completions(8), output_dir=str(tmp_path), **RUN))
    second.save_model()
    assert not logged(second, "mtp_loss")
    assert not any(p.requires_grad for p in second.model.mtp.parameters()), "DDP would wait for their gradients"
    assert all(torch.equal(weight, before[name]) for name, weight in head_of(stored_head(tmp_path)).items())
    trained(first)
    assert not any(torch.equal(weight, before[name]) for name, weight in first.model.mtp.state_dict().items())


def test_a_part_of_the_models_own_with_the_heads_name_is_left_alone(source):
    model = tiny_model()
    model.mtp = nn.Linear(2, 2)
    sft(model, data=completions(4), eval_data=completions(4), **RUN).evaluate()
    assert model.mtp.weight.requires_grad
    with pytest.raises(ConfigError, match="a part of its own called mtp"):
        sft(model, data=completions(4), mtp_loss_weight=WEIGHT, **RUN)


REFUSED = {
    "prompts that are trained": {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
    "compute_loss_func": {"compute_loss_func": lambda outputs, labels, **how: outputs.logits.sum()},
    "an optimizer that was made before": {"optimizers": (torch.optim.SGD([nn.Parameter(torch.ones(1))]), None)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_go_with_is_refused(source, reason):
    with pytest.raises(ConfigError, match=f"mtp_loss_weight does not go with {reason}"):
        sft(str(source), mtp_loss_weight=WEIGHT, **RUN, **REFUSED[reason])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qat": "int4"}, "would quantise"), ({"torch_compile": True}, "torch_compile"),
        ({"vocab_parallel": "always"}, "FSDP2's"), ({"mtp_loss_weight": -0.1}, "of at least 0"),
    ],
)  # fmt: skip
def test_options_that_clash_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=f"mtp_loss_weight: .*{message}"):
        LigerConfig(str(tmp_path), use_cpu=True, **{"mtp_loss_weight": WEIGHT, **options})


def test_a_loss_of_the_head_that_is_infinite_stops_the_training(source):
    trainer = sft(str(source), data=completions(4), mtp_loss_weight=WEIGHT, **RUN)
    with torch.no_grad():
        trainer.model.mtp.norm.weight.fill_(1e38)
    with pytest.raises(NonFiniteError, match="In step 1 the loss and the gradient norm are not finite"):
        trainer.train()
