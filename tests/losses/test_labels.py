"""Labels that a model shifts, moves or splits itself: the targets are those that the model hands to its loss."""

import copy
import functools
import re

import pytest
import torch
from families import build_class
from labelled import batches
from plain_models import without_labels
from tiny import VOCAB, assert_same_gradients, masked_batch, named_gradients, shift_labels_of, tiny_model, train_args
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import liger_trainer
from liger_trainer import DistillationCallback, patch
from liger_trainer.errors import ConfigError, MaterializedLogitsWarning
from liger_trainer.kernels.types import RowSelection
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import deferred_logits
from liger_trainer.losses.fused_forward import FusedLoss, _warn_once
from liger_trainer.losses.sparse_answer import SparseAnswer, TokenTargets
from liger_trainer.losses.spec import Distillation, LossOptions
from liger_trainer.patching.patcher import NothingToPatch, patched_record

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

# Whose labels are not those that the loss shifts, and the batch that shows it.
OWN_TARGETS = {
    "MoonshineForConditionalGeneration": "speech, time last",  # the decoder's input is shifted, the labels are not
    "MoonshineStreamingForConditionalGeneration": "speech",
    "CohereAsrForConditionalGeneration": "speech",
    "Florence2ForConditionalGeneration": "text",
    "PPFormulaNetForConditionalGeneration": "text and image",
    "GitForCausalLM": "special",  # logits of the image are cut off, and the labels are shifted
    "CsmForConditionalGeneration": "special",  # the first codebook's labels; a second model adds its own loss
}
# Whose labels are, though they read more than text.
CALLERS_TARGETS = {"Qwen2_5_VLForConditionalGeneration": "text", "Blip2ForConditionalGeneration": "special"}
# Which do as Moonshine, or Qwen2.5-VL, does.
AS_OTHERS = (
    "MoonshineStreamingForConditionalGeneration", "CohereAsrForConditionalGeneration",
    "Florence2ForConditionalGeneration", "Blip2ForConditionalGeneration",
)  # fmt: skip


@functools.cache
def built(class_name):
    model = build_class(class_name)
    assert not isinstance(model, str), model
    return model


def model_and_batch(class_name, kind=None):
    model = copy.deepcopy(built(class_name))
    return model, batches(model)[kind or {**OWN_TARGETS, **CALLERS_TARGETS}[class_name]]


def moonshine():
    return model_and_batch("MoonshineForConditionalGeneration", "speech")


def loss_and_gradients(model, batch):
    torch.manual_seed(0)
    outputs = model(**batch)
    return outputs, named_gradients(model, outputs.loss)


def assert_same(got, want, rtol=1e-4):
    torch.testing.assert_close(got[0].loss, want[0].loss, rtol=1e-5, atol=0)
    assert_same_gradients(got[1], want[1], rtol)


@pytest.mark.parametrize(
    "class_name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in AS_OTHERS)) for name in (*OWN_TARGETS, *CALLERS_TARGETS)],
)
def test_loss_and_every_gradient_equal_the_plain_model(class_name):
    model, batch = model_and_batch(class_name, "speech" if class_name.startswith("Moonshine") else None)
    given = [batch]
    if getattr(model, "accepts_loss_kwargs", True):
        given.append({**batch, "num_items_in_batch": torch.tensor(57)})
    want = [loss_and_gradients(model, one) for one in given]
    with patch(model) as patched:
        assert "fused loss" in patched.report.swapped
        for one, expected in zip(given, want, strict=True):
            got = loss_and_gradients(model, one)
            assert isinstance(got[0].logits, DeferredLogits)
            assert_same(got, expected)


LEFT_ALONE = {
    "T5ForConditionalGeneration": ("text", "does not call `loss_function`"),
    "BartForConditionalGeneration": ("text", "does not call `loss_function`"),
    "HiggsAudioV2ForConditionalGeneration": ("special", "no output embeddings"),  # two heads, a loss of several parts
    "T5GemmaForConditionalGeneration": ("text", r"its own loss \(ForMaskedLMLoss\)"),
}


@pytest.mark.parametrize("class_name", LEFT_ALONE)
def test_a_head_that_is_left_alone_is_reported(class_name):
    kind, why = LEFT_ALONE[class_name]
    model, batch = model_and_batch(class_name, kind)
    want = loss_and_gradients(copy.deepcopy(model), batch)
    try:
        report = patch(model).report
    except NothingToPatch as nothing:
        report = nothing.report
    assert "fused loss" not in report.swapped
    assert re.search(why, report.left_alone["loss"])
    assert_same(loss_and_gradients(model, batch), want)


def test_a_model_that_rules_tokens_out_in_place_trains():
    model, batch = model_and_batch("ChameleonForConditionalGeneration", "text")
    want = loss_and_gradients(copy.deepcopy(model), batch)
    FusedLoss(model)
    with pytest.warns(MaterializedLogitsWarning, match="for assignment to some of them"):
        got = loss_and_gradients(model, batch)
    assert_same(got, want)
    torch.testing.assert_close(got[0].logits, want[0].logits)


def test_a_loss_of_several_parts_is_their_sum():
    model, batch = model_and_batch("HiggsAudioV2ForConditionalGeneration", "special")
    model.text_lm_head = torch.nn.Linear(64, model.config.vocab_size, bias=False)
    want = loss_and_gradients(copy.deepcopy(model), batch)
    FusedLoss(model)
    _warn_once.cache_clear()
    with pytest.warns(MaterializedLogitsWarning, match="the model has no output embeddings"):
        assert_same(loss_and_gradients(model, batch), want)
    # and such a loss, like the one of a second model which adds its own, has no per-token values
    second, its_batch = model_and_batch("CsmForConditionalGeneration")
    FusedLoss(second)
    for of, rows in ((model, batch), (second, its_batch)):
        with pytest.raises(ConfigError, match=f"{type(of).__name__} has other parts"):
            of(**rows, fused_lm_head=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ignore_index_of_the_caller(family):
    model, batch = tiny_model(family), masked_batch()
    batch["labels"][batch["labels"] == -100] = 7
    batch["ignore_index"] = 7
    want = loss_and_gradients(copy.deepcopy(model), batch)
    FusedLoss(model)
    assert_same(loss_and_gradients(model, batch), want)
    outputs = model(**batch, fused_lm_head=True)
    assert torch.equal(outputs.label_mask, batch["labels"][:, 1:] != 7)


def test_shifted_labels_reach_a_model_that_knows_them():
    """GIT cuts its logits otherwise where the labels are shifted already."""
    for class_name in ("GitForCausalLM", "PPFormulaNetForConditionalGeneration"):
        model, batch = model_and_batch(class_name)
        batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        want = loss_and_gradients(copy.deepcopy(model), batch)
        FusedLoss(model)
        assert_same(loss_and_gradients(model, batch), want)


def test_per_token_values_follow_the_labels_in_use():
    model, batch = moonshine()
    labels = batch["labels"]
    logits = copy.deepcopy(model)(**batch).logits
    FusedLoss(model)
    outputs = model(**batch, fused_lm_head=True)
    want = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    assert torch.equal(outputs.label_mask, labels != -100)
    torch.testing.assert_close(outputs.log_probs, want.where(labels != -100, 0).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.loss, -want[labels != -100].mean())

    model, batch = model_and_batch("GitForCausalLM")
    FusedLoss(model)
    assert torch.equal(model(**batch, fused_lm_head=True).label_mask, batch["labels"][:, 1:] != -100)


def test_rows_of_the_callers_labels_are_counted_once_and_before_the_backbone(monkeypatch):
    model, batch, seen = tiny_model(), masked_batch(), []
    FusedLoss(model)
    model.model.register_forward_pre_hook(lambda *_: seen.append("backbone"))
    init = RowSelection.__init__
    monkeypatch.setattr(RowSelection, "__init__", lambda *a, **k: seen.append("rows") or init(*a, **k))
    for options in ({}, {"shift_labels": shift_labels_of(batch["labels"])}, {"num_items_in_batch": 57}):
        seen.clear()
        model(**batch, **options)
        assert seen == ["rows", "backbone"]


# Trainers


class Rows(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.rows = [{name: x[i % len(x)] for name, x in batch.items()} for i in range(8)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def losses_of(model, batch, callbacks=(), **options):
    trainer = Trainer(
        model, train_args(TrainingArguments, **{"max_steps": 2, "seed": 1, **options}), train_dataset=Rows(batch),
        eval_dataset=Rows(batch), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return [log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history if "train_loss" not in log]


@pytest.mark.parametrize(
    "class_name, options",
    [
        ("MoonshineForConditionalGeneration", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("GitForCausalLM", {}),
        pytest.param("Florence2ForConditionalGeneration", {}, marks=pytest.mark.slow),
    ],
)
def test_use_liger_kernel_trains_the_same(class_name, options):
    model, batch = model_and_batch(class_name, "speech" if class_name.startswith("Moonshine") else None)
    plain = copy.deepcopy(model)
    liger_trainer.enable()
    try:
        got = losses_of(model, batch, use_liger_kernel=True, **options)
    finally:
        liger_trainer.disable()
    record = patched_record(model)
    assert record is not None and record.fused is not None
    assert got == pytest.approx(losses_of(plain, batch, **options), rel=1e-5)


# Distillation


def shifted_right(labels):
    return torch.nn.functional.pad(labels.clamp(min=0)[:, :-1], (1, 0), value=1)


def test_a_model_that_shifts_its_labels_learns_from_a_teacher_that_reads_the_same():
    (student, batch), (teacher, _) = moonshine(), moonshine()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(0.7)
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = shifted_right(labels)
    with torch.no_grad():
        p = teacher(**batch).logits.log_softmax(-1)
    q, keep = copy.deepcopy(student)(**batch).logits.log_softmax(-1), labels != -100
    want = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)[keep].mean()
    FusedLoss(student, LossOptions(distillation=Distillation()))
    with torch.no_grad(), deferred_logits(teacher):
        logits = teacher(**batch).logits
    outputs = student(**batch, labels=labels, teacher_logits=logits, fused_lm_head=True)
    torch.testing.assert_close(outputs.loss, want, rtol=1e-4, atol=0)
    assert torch.equal(outputs.label_mask, keep)


def test_a_callback_refuses_a_decoder_that_would_read_other_tokens_than_its_students():
    (student, batch), (teacher, _) = moonshine(), moonshine()
    with pytest.raises(ConfigError, match="a MoonshineForConditionalGeneration, gets no labels.*decoder_input"):
        losses_of(student, batch, [DistillationCallback(teacher)], max_steps=1)
    batch["decoder_input_ids"] = shifted_right(batch["labels"])
    losses = losses_of(moonshine()[0], batch, [DistillationCallback(moonshine()[0])], max_steps=1)
    assert losses[0] == pytest.approx(0, abs=1e-6)


def test_targets_that_a_teacher_cannot_be_aligned_with_are_refused_by_name():
    student, batch = model_and_batch("GitForCausalLM")
    with pytest.raises(
        ConfigError, match=r"GitForCausalLM does not learn the labels .* targets \(4, 11\) of labels \(4, 12\)"
    ):
        losses_of(student, batch, [DistillationCallback(copy.deepcopy(student))])
    student, batch = moonshine()
    FusedLoss(student, LossOptions(distillation=Distillation()))
    with pytest.raises(ConfigError, match="MoonshineForConditionalGeneration does not learn the labels"):
        student(**batch, teacher_logits=cached(batch["labels"]))


def cached(labels):
    """A teacher known at two tokens a position, as a cache knows it."""
    ids = torch.stack([labels.clamp(min=0), labels.clamp(min=0) + 1], dim=-1) % VOCAB
    of_token = torch.zeros(labels.shape)
    targets = TokenTargets(
        ids=ids, log_probs=torch.full(ids.shape, 0.3).log(), unnamed=of_token, top_ids=ids[..., 0],
        label_log_prob=of_token, entropy=of_token,
    )  # fmt: skip
    return SparseAnswer(targets, "bucket", VOCAB)


class Moving(LlamaForCausalLM):
    """Hands its loss labels of equal values in another tensor, as a model spread over devices does."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels=labels.clone(), **kwargs)


def test_labels_that_the_model_moved_keep_the_teacher_aligned():
    plain, batch = tiny_model(), masked_batch()
    moving = copy.deepcopy(plain)
    moving.__class__ = Moving
    results = []
    for model in (plain, moving):
        FusedLoss(model, LossOptions(distillation=Distillation()))
        results.append(model(**batch, teacher_logits=cached(shift_labels_of(batch["labels"])), fused_lm_head=True))
    torch.testing.assert_close(results[1].loss, results[0].loss)
    torch.testing.assert_close(results[1].forward_kl, results[0].forward_kl)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_of_fewer_bits_are_learned_as_others(dtype):
    model, batch = tiny_model(), masked_batch()
    FusedLoss(model)
    want = model(**batch).loss
    assert model(**{**batch, "labels": batch["labels"].to(dtype)}).loss == want
    assert model(**without_labels(batch), shift_labels=shift_labels_of(batch["labels"]).to(dtype)).loss == want
