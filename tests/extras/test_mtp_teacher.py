"""The head for multi-token prediction learns from the teacher what the model learns one token on, as in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import captured
from mtp_heads import Definition, head_of, save_with_head
from peft import LoraConfig
from tiny import (
    VOCAB,
    FirstGradients,
    assert_same_gradients,
    completions,
    divergence_by_hand,
    double_copy,
    kl,
    tiny_model,
)
from trainings import a_teacher, distill, logged, trained

from liger_trainer.errors import ConfigError
from liger_trainer.teachers.cache.store import TeacherCache
from liger_trainer.teachers.row_keys import row_key

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
WEIGHT, BETA, TEMPERATURE, CE = 0.3, 0.3, 2.0, 0.25
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": CE}]
HOW: dict[str, Any] = {
    "losses": LOSSES, "beta": BETA, "temperature": TEMPERATURE, "mtp_loss_weight": WEIGHT, "max_steps": 1,
    "shuffle_dataset": False, "per_device_train_batch_size": 8, "learning_rate": 0.0,
}  # fmt: skip
Answers = Callable[[Any], dict[float, torch.Tensor]]  # of a row: weight and (tokens - 2, V) logits for each teacher


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("head") / "source")


def of_model(model: Any, row: Any) -> torch.Tensor:
    """What a teacher knows of the third token of a row and those behind it."""
    with torch.no_grad():
        return model.double()(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, 1:-1, :VOCAB]


def assert_as_defined(source: Path, trainer: Any, rows: Any, divergence_of: Callable[[Any, Any], Any]) -> None:
    """After a step over all rows, loss and gradients of the head are those of the definition.

    Args:
        divergence_of: of a row and its supervised drafts, summed.
    """
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FirstGradients))
    truth, total, ce, tokens = Definition(source), 0.0, 0.0, 0
    for row in rows:
        labels = torch.tensor(row["labels"])[2:]
        keep = labels != -100
        drafts = truth.drafts(row["input_ids"])[keep]
        row_ce = torch.nn.functional.cross_entropy(drafts, labels[keep], reduction="sum")
        total, ce = total + divergence_of({**row, "keep": keep}, drafts) + CE * row_ce, ce + row_ce.item()
        tokens += int(keep.sum())
    supervised = sum(label != -100 for row in rows for label in row["labels"][1:])
    assert logged(trainer, "mtp_loss") == [pytest.approx(ce / tokens, rel=1e-5)]
    assert logged(trainer, "mtp_share") == [pytest.approx(tokens / supervised)]
    assert not logged(trainer, "mtp_accepted"), "which is about the model, not about its teacher"
    want = {name: WEIGHT * gradient for name, gradient in truth.gradients(total / supervised).items()}
    assert_same_gradients(head_of(callback.values), want, rtol=1e-4)


def step(source: Path, teacher: Any, data: Any, **options) -> Any:
    return trained(distill(str(source), teacher, data, callbacks=[FirstGradients()], **{**HOW, **options}))


def mixed(answers: Answers) -> Callable[[Any, Any], Any]:
    def divergence_of(row, drafts):
        total = 0.0
        for weight, logits in answers(row).items():
            parts = [
                share * divergence_by_hand(drafts, logits[row["keep"]], kind, TEMPERATURE, BETA).sum()
                for kind, share in (("forward_kl", 1.0), ("jsd", 0.5))
            ]
            total = total + weight * TEMPERATURE**2 * sum(parts)
        return total

    return divergence_of


def rows_without_packing(source: Path, data: Any, **options) -> Any:
    return distill(str(source), a_teacher(), data, **options).train_dataset


FORMS: dict[str, dict[str, Any]] = {
    "rows": {},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "packed": {"packing": True, "max_length": 40},
    "padding-free": {"padding_free": True, "max_length": None},
    "checkpointed": {"gradient_checkpointing": True},
    "adapters": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_teaches(source, form):
    data, teacher = completions(8), a_teacher()
    trainer = step(source, teacher, data, **FORMS[form])
    assert (len(trainer.train_dataset) < 8) == (form == "packed")
    plain = double_copy(a_teacher())
    assert_as_defined(
        source, trainer, rows_without_packing(source, data), mixed(lambda row: {1.0: of_model(plain, row)})
    )


@pytest.mark.parametrize("packed", [{}, {"packing": True, "max_length": 40}], ids=["rows", "packed"])
def test_the_second_token_of_a_document_is_of_no_draft(source, packed):
    """The first token's label is of no position, the second's of none of the head's."""
    data, plain = completions(8), double_copy(a_teacher())
    rows = rows_without_packing(source, data, completion_only_loss=False)
    trainer = step(source, a_teacher(), data, completion_only_loss=False, max_grad_norm=0.0, **packed)
    assert logged(trainer, "mtp_share")[0] < 1
    # transformers before 5.24 counts a row's first label in the divisor
    batches = [trainer.data_collator(list(trainer.train_dataset))]
    scale = sum(len(row["labels"]) - 1 for row in rows) / int(
        trainer._get_num_items_in_batch(batches, trainer.args.device)
    )
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FirstGradients))
    callback.values = {name: value / scale for name, value in callback.values.items()}
    assert_as_defined(source, trainer, rows, mixed(lambda row: {1.0: of_model(plain, row)}))


def test_the_model_without_its_adapters(source):
    data = completions(8)
    trainer = step(source, "self", data, peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
    own = Definition(source).model
    assert_as_defined(source, trainer, trainer.train_dataset, mixed(lambda row: {1.0: of_model(own, row)}))


WEIGHTS = {"one": 0.7, "two": 1.5}


@pytest.mark.parametrize("routed", [False, True], ids=["by weight", "by row"])
def test_several_teachers(source, routed):
    names = ["one", "two", "two", "one", "two", "one", "one", "two"]
    data = completions(8).add_column("domain", names)
    models = {"one": a_teacher(), "two": tiny_model("llama", seed=6)}
    plain = {name: double_copy(model) for name, model in models.items()}
    how: dict[str, Any] = {"teachers": [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()]}
    if routed:
        how |= {"teacher_column": "domain", "packing": True, "max_length": 40}
    trainer = step(source, models, data, **how)
    rows = [{**row, "domain": name} for row, name in zip(rows_without_packing(source, data), names, strict=True)]

    def answers(row):
        return {WEIGHTS[n]: of_model(m, row) for n, m in plain.items() if not routed or n == row["domain"]}

    assert_as_defined(source, trainer, rows, mixed(answers))


PACKED = {"packing": True, "max_length": 40}


@pytest.mark.parametrize("form", [{}, PACKED], ids=["rows", "packed"])
def test_a_cache_of_hidden_states(source, tmp_path, form):
    data, plain = completions(8), double_copy(a_teacher())
    cache = {"cache_kind": "hidden", "cache_tail_draws": None}
    captured(tmp_path / "c", data, teacher=a_teacher(), **cache, **form)
    trainer = step(source, "cache", data, teacher_cache_dir=str(tmp_path / "c"), **cache, **form)
    assert_as_defined(
        source, trainer, rows_without_packing(source, data), mixed(lambda row: {1.0: of_model(plain, row)})
    )


@pytest.mark.parametrize("form", [{}, PACKED], ids=["rows", "packed"])
def test_a_cache_of_the_likeliest_tokens(source, tmp_path, form):
    """Of its own records, each of which is about the same token as the draft."""
    data, kind = completions(8), {"cache_entries": 6, "cache_tail_draws": 0}
    captured(tmp_path / "c", data, teacher=a_teacher(), **kind, **form)
    losses = [{"type": "forward_kl"}, {"type": "ce", "weight": CE}]
    how = {"losses": losses, "beta": 0.0, "temperature": 1.0}
    trainer = step(source, "cache", data, teacher_cache_dir=str(tmp_path / "c"), **kind, **form, **how)
    cache = TeacherCache(tmp_path / "c")

    def divergence_of(row, drafts):
        records = cache.records(row_key(row["input_ids"], row["labels"]))
        entries, q = cache.format.decode(records), drafts.log_softmax(-1)
        ids, p = entries.ids.long(), entries.log_probs.double()
        rest = q.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        unlisted = torch.log1p(-p.exp().sum(-1, keepdim=True))
        return kl(torch.cat([p, unlisted], -1), torch.cat([q.gather(-1, ids), rest], -1)).sum()

    assert_as_defined(source, trainer, rows_without_packing(source, data), divergence_of)


def test_an_evaluation_counts_the_drafts_that_the_model_accepts(source):
    """Not those that its teacher would."""
    data = completions(8)
    trainer = distill(str(source), a_teacher(), data, data, **HOW)
    truth, agreeing, tokens = Definition(source), 0, 0
    for row in trainer.train_dataset:
        keep = torch.tensor(row["labels"])[2:] != -100
        greedy = of_model(truth.model, row).argmax(-1)
        agreeing += int((truth.drafts(row["input_ids"]).argmax(-1) == greedy)[keep].sum())
        tokens += int(keep.sum())
    assert trainer.evaluate()["eval_mtp_accepted"] == pytest.approx(agreeing / tokens)


def test_losses_that_say_nothing_of_tokens_are_refused(source):
    losses = [{"type": "hidden_mse"}, {"type": "forward_kl", "weight": 0.0}]
    with pytest.raises(ConfigError, match="mtp_loss_weight does not go with losses between hidden states alone"):
        distill(str(source), a_teacher(), completions(8), losses=losses, mtp_loss_weight=WEIGHT)
