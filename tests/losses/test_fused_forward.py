"""The fused loss on whole models: loss and every gradient against the model's own forward in fp64."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from plain_models import assert_equals_plain, deferred_of, relative_error, without_labels
from quick_cases import by_turns
from tiny import (
    FAMILIES,
    VOCAB,
    assert_same_gradients,
    divergence_by_hand,
    double_copy,
    gradients,
    masked_batch,
    named_gradients,
    padding_free_batch,
    shift_labels_of,
    tiny_model,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl.trainer.utils import add_fused_lm_head

from liger_trainer.errors import ConfigError, MaterializedLogitsWarning
from liger_trainer.kernels import _triton
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import deferred_logits
from liger_trainer.losses.fused_forward import FusedLoss, _warn_once
from liger_trainer.losses.spec import Distillation, LossOptions

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

CASES = {
    "masked": masked_batch,
    "padding_free": padding_free_batch,
    "shift_labels": lambda: {**masked_batch(), "shift_labels": shift_labels_of(masked_batch()["labels"])},
    "num_items": lambda: {**masked_batch(), "num_items_in_batch": 57},
    "num_items_tensor": lambda: {**masked_batch(), "num_items_in_batch": torch.tensor(57)},
}


@pytest.mark.parametrize(
    "family, case",
    # every family, and every form of a batch with two families
    [*((family, "masked") for family in FAMILIES), *((f, case) for f in ("llama", "gemma2") for case in CASES)],
)
def test_loss_and_every_gradient_equal_the_plain_model(family, case):
    model = tiny_model(family)
    truth = double_copy(model)
    FusedLoss(model)
    outputs, _ = assert_equals_plain(model, truth, CASES[case]())
    assert isinstance(outputs.logits, DeferredLogits)


@pytest.mark.parametrize("family", FAMILIES)
def test_called_like_trl_it_returns_the_fields_of_trl(family):
    model = tiny_model(family)
    trl = copy.deepcopy(model)
    add_fused_lm_head(trl, outputs=("log_probs", "entropy", "is_top1"))
    FusedLoss(model)
    for batch in (CASES["masked"](), CASES["shift_labels"](), CASES["num_items"]()):
        got, want = model(**batch, fused_lm_head=True), trl(**batch, fused_lm_head=True)
        torch.testing.assert_close(got.loss, want.loss)
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(got[name], want[name].detach(), rtol=1e-5, atol=1e-6)
            assert not got[name].requires_grad
        assert torch.equal(got.is_top1, want.is_top1.bool())
        assert torch.equal(got.label_mask, want.label_mask)
        if family == "mixtral":
            torch.testing.assert_close(got.aux_loss, want.aux_loss)
            torch.testing.assert_close(got.loss, got.token_loss + 0.3 * got.aux_loss)
        else:
            assert got.aux_loss is None and got.loss == got.token_loss


def smoothed(logits, labels, num_items):
    total = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum")
    return total / (num_items or (labels != -100).sum())


def weighed_by_probability(logits, labels, num_items):
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return ((-nll).exp().detach() * nll).sum() / (num_items or (labels != -100).sum())


@pytest.mark.parametrize(
    "family, options, formula, num_items",
    [
        ("llama_tied", {"label_smoothing": 0.2}, smoothed, None),
        ("gemma2", {"label_smoothing": 0.2}, smoothed, 57),
        ("phi", {"label_smoothing": 0.2}, smoothed, None),
        ("llama", {"dft": True}, weighed_by_probability, None),
        ("gemma2", {"dft": True}, weighed_by_probability, 57),
    ],
)
def test_options_equal_their_formulas(family, options, formula, num_items):
    model, batch = tiny_model(family), masked_batch()
    truth = double_copy(model)
    logits = truth(**without_labels(batch)).logits
    want = formula(logits.flatten(0, 1), shift_labels_of(batch["labels"]).flatten(), num_items)
    FusedLoss(model, LossOptions(**options))
    assert_equals_plain(model, truth, {**batch, "num_items_in_batch": num_items}, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_bf16_autocast_it_is_as_close_to_the_truth_as_the_plain_model(family):
    model, batch = tiny_model(family), masked_batch()
    truth, plain = double_copy(model), copy.deepcopy(model)
    want = named_gradients(truth, truth(**batch).loss)
    FusedLoss(model)
    errors = []
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(**batch).loss
        errors.append(relative_error(m, loss, want))
        assert loss.dtype == torch.float32
        assert abs(loss.item() - truth(**batch).loss.item()) < 0.02 * abs(loss.item())
    assert errors[0] <= 1.3 * errors[1]


def test_the_triton_kernels_give_the_same(kernels, monkeypatch):
    how = Distillation({"forward_kl": 0.5, "jsd": 0.5}, ce_weight=0.5, temperature=2.0)
    batch, results = masked_batch(), []
    for interpreted in (False, True):
        monkeypatch.setattr(_triton, "INTERPRETED", interpreted)
        student, teacher = tiny_model("gemma2"), tiny_model("phi", seed=3)
        FusedLoss(student, LossOptions(distillation=how, label_smoothing=0.1))
        for options in ({}, {"teacher_logits": deferred_of(teacher, batch)}):
            loss = student(**batch, **options).loss
            results.append((loss, named_gradients(student, loss)))
    for (plain, want), (loss, got) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
        assert_same_gradients(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_labels_nothing_changes(family):
    model, batch = tiny_model(family), without_labels(masked_batch())

    def said():
        tokens = model.generate(batch["input_ids"][:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        return model(**batch).logits, tokens

    with torch.no_grad():
        want, fused = said(), FusedLoss(model)
        model(**masked_batch())
        assert all(map(torch.equal, said(), want))
    fused.undo()
    assert isinstance(model(**masked_batch()).logits, torch.Tensor)


def test_outputs_logits_read_later_are_the_real_logits():
    model, batch = tiny_model("gemma2"), masked_batch()
    with torch.no_grad():
        real = model(**without_labels(batch)).logits
    FusedLoss(model)
    logits = model(**batch).logits
    assert logits.shape == real.shape and logits.dtype == real.dtype
    torch.testing.assert_close(logits.detach(), real)
    assert torch.equal(logits.argmax(-1), real.argmax(-1))
    torch.testing.assert_close(torch.softmax(logits, -1).detach(), real.softmax(-1))


def test_the_loss_of_a_copy_is_its_own_and_asks_the_same_teacher():
    model = tiny_model()
    loss: Any = FusedLoss(model)
    loss.teacher = tiny_model()
    clone = copy.deepcopy(model)
    of_clone = [x for x in vars(clone).values() if isinstance(x, FusedLoss)]
    assert len(of_clone) == 1 and of_clone[0] is not loss and of_clone[0].model is clone
    assert vars(of_clone[0])["teacher"] is loss.teacher
    of_clone[0].undo()
    assert "forward" not in vars(clone) and "forward" in vars(model)


def test_what_it_changes_on_a_model_and_gives_back():
    model, batch = tiny_model(), masked_batch()
    signature, loss_function = inspect.signature(model.forward), model.loss_function
    fused = FusedLoss(model)
    assert inspect.signature(model.forward) == signature
    for ids in (batch["input_ids"], batch["input_ids"] + VOCAB):  # after a forward, and after an error in one
        with contextlib.suppress(IndexError):
            model(**{**batch, "input_ids": ids})
            assert ids is batch["input_ids"]
        assert "forward" not in vars(model.lm_head) and model.loss_function is loss_function
    fused.undo()
    assert "forward" not in vars(model)
    add_fused_lm_head(model)
    before = vars(model)["forward"]
    fused = FusedLoss(model)
    assert vars(model)["forward"] is not before
    fused.undo()
    assert vars(model)["forward"] is before


def own_loss(logits, labels, vocab_size, **kwargs):
    return logits.sum()


class OwnLoss(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids)


def test_a_loss_of_the_models_own_is_refused_and_stays():
    model, batch = tiny_model(), masked_batch()
    model.loss_function = own_loss
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has its own loss \(own_loss\)"):
        FusedLoss(model)
    model = tiny_model()
    fused = FusedLoss(model)
    model.loss_function = own_loss
    with pytest.raises(ConfigError, match="its own loss"):
        model(**batch)
    fused.undo()
    assert vars(model)["_loss_function"] is own_loss
    assert model(**batch).loss.item() == model(**batch).logits.sum().item()
    model = OwnLoss(tiny_model().config)
    FusedLoss(model)
    with pytest.raises(ConfigError, match="OwnLoss does not compute its loss through `loss_function`"):
        model(input_ids=batch["input_ids"], labels=batch["labels"], fused_lm_head=True)


def test_the_causal_lm_loss_set_on_the_model_is_still_set_after_a_forward():
    model = tiny_model("llama")
    model.loss_function = ForCausalLMLoss  # as models do whose class name stands for another loss
    FusedLoss(model)
    model(**masked_batch())
    assert vars(model)["_loss_function"] is ForCausalLMLoss


def test_logits_of_another_length_than_the_labels_are_refused():
    model, batch = tiny_model(), masked_batch()
    FusedLoss(model)
    with pytest.raises(ValueError, match=r"Logits are \(3, 4, 64\), but labels are \(3, 11\)"):
        model(**batch, logits_to_keep=4)


def test_a_batch_without_labels_gives_zero_and_no_gradient():
    model, batch = tiny_model(), masked_batch()
    FusedLoss(model)
    outputs = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}, fused_lm_head=True)
    assert outputs.loss.item() == 0
    assert all(not g.any() for g in named_gradients(model, outputs.loss).values())


# Distillation

KINDS = {
    "forward_kl": Distillation({"forward_kl": 1.0}),
    "reverse_kl": Distillation({"reverse_kl": 1.0}),
    "jsd": Distillation({"jsd": 1.0}, beta=0.3),
    "mix": Distillation({"forward_kl": 0.6, "jsd": 0.5}, beta=0.7, ce_weight=0.25),
}
PAIRS = {
    # A teacher of another family, size and vocabulary: another cap, and a head padded beyond the vocabulary.
    "gemma2_padded": ("llama_tied", "gemma2", {"hidden_size": 48, "vocab_size": VOCAB + 8}, None),
    "student_padded": ("gemma2", "phi", {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}, 60),
    "granite": ("qwen3", "granite", {"hidden_size": 24, "num_hidden_layers": 1}, None),
    "llama": ("phi", "llama", {}, 61),
}


def with_temperature(distillation, temperature, vocab=None):
    return Distillation(distillation.weights, distillation.beta, distillation.ce_weight, temperature, vocab_size=vocab)


def distillation_by_hand(student_logits, teacher_logits, labels, how):
    keep = shift_labels_of(labels).flatten()
    vocab = min(student_logits.shape[-1], teacher_logits.shape[-1], how.vocab_size or VOCAB)
    s, t = (x.double().flatten(0, 1)[keep != -100, :vocab] for x in (student_logits, teacher_logits))
    soft = sum(w * divergence_by_hand(s, t, kind, how.temperature, how.beta) for kind, w in how.weights.items())
    hard = torch.nn.functional.cross_entropy(s, keep[keep != -100], reduction="none")
    return (how.temperature**2 * soft + how.ce_weight * hard).mean()


@pytest.mark.parametrize(("how", "pair"), by_turns([*((kind, 2.0) for kind in KINDS), ("mix", 1.0)], PAIRS))
def test_distillation_equals_the_definition_on_real_logits(pair, how):
    kind, temperature = how
    student_family, teacher_family, overrides, vocab = PAIRS[pair]
    student, teacher = tiny_model(student_family), tiny_model(teacher_family, seed=7, **overrides)
    how = with_temperature(KINDS[kind], temperature, vocab)
    batch = masked_batch(vocab=vocab or VOCAB)
    labels = batch.pop("labels")
    truth = double_copy(student)
    with torch.no_grad():
        teacher_logits = double_copy(teacher)(**batch).logits
    want = distillation_by_hand(truth(**batch).logits, teacher_logits, labels, how)
    FusedLoss(student, LossOptions(distillation=how))
    deferred = deferred_of(teacher, batch)
    assert isinstance(deferred, DeferredLogits)
    got = student(**batch, labels=labels, teacher_logits=deferred).loss
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    assert_same_gradients(named_gradients(student, got), named_gradients(truth, want))


def test_no_gradient_reaches_a_teacher_that_requires_one():
    student, teacher, batch = tiny_model(), tiny_model("phi", seed=3), masked_batch()
    FusedLoss(student, LossOptions(distillation=KINDS["mix"]))
    with deferred_logits(teacher):
        logits = teacher(**without_labels(batch)).logits
    student(**batch, teacher_logits=logits).loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert student.lm_head.weight.grad.any()


@pytest.mark.parametrize(
    "family, kind",
    [*((family, "jsd") for family in FAMILIES), ("llama", "forward_kl"), ("llama", "reverse_kl")],
)
def test_a_student_equal_to_its_teacher_has_loss_and_gradient_zero(family, kind):
    overrides = {"output_router_logits": False} if family == "mixtral" else {}
    student, batch = tiny_model(family, **overrides), masked_batch()
    teacher = copy.deepcopy(student)
    FusedLoss(student, LossOptions(distillation=with_temperature(KINDS[kind], 2.0)))
    outputs = student(**batch, teacher_logits=deferred_of(teacher, batch), fused_lm_head=True)
    assert outputs.loss.item() == 0
    assert outputs.agrees[outputs.label_mask].all() and not outputs.forward_kl.any()
    assert all(not g.any() for g in named_gradients(student, outputs.loss).values())


def test_real_teacher_logits_take_the_plain_path_to_the_same_loss():
    student, teacher, batch = tiny_model("gemma2"), tiny_model("phi", seed=3), masked_batch()
    batch["num_items_in_batch"] = 23
    fused = FusedLoss(student, LossOptions(distillation=KINDS["mix"]))
    with torch.no_grad():
        real, deferred = teacher(**without_labels(masked_batch())).logits, deferred_of(teacher, batch)
    want = named_gradients(student, student(**batch, teacher_logits=deferred).loss)
    with pytest.warns(MaterializedLogitsWarning, match="Gemma2ForCausalLM computes its logits for a distillation loss"):
        loss = student(**batch, teacher_logits=real).loss
    assert_same_gradients(named_gradients(student, loss), want)
    fused.options = LossOptions()
    with pytest.raises(ValueError, match="loss has no distillation part"):
        student(**batch, teacher_logits=deferred)


def test_families_are_what_they_are_said_to_be():
    """So that a changed default of transformers cannot empty the cases above."""
    heads = {name: tiny_model(name).get_output_embeddings() for name in FAMILIES}
    assert heads["phi"].bias is not None and heads["phi"].bias.any()
    tied = tiny_model("llama_tied")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = tiny_model("llama")
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    expected = {"gemma2": (1.0, 2.0), "gemma3": (1.0, 1.5), "granite": (0.4, None), "cohere": (0.25, None)}
    for name, (scale, softcap) in expected.items():
        model = tiny_model(name)
        logits = deferred_of(model, masked_batch())
        assert logits.scale == pytest.approx(scale) and logits.softcap == softcap
    assert AutoModelForCausalLM.from_config(tiny_model("mixtral").config).config.output_router_logits


class Divided(LlamaForCausalLM):
    """Divides the sum over the tokens by a number that it chose."""

    divisor: Any = 3

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids, attention_mask=attention_mask)[0])
        divisor = self.divisor(labels) if callable(self.divisor) else self.divisor
        loss = self.loss_function(logits, labels, VOCAB, num_items_in_batch=divisor)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("divisor", [3, 2.5, torch.tensor(7), lambda labels: len(labels)])
@pytest.mark.parametrize("callers", [None, 11])
def test_a_divisor_that_the_model_gives_is_used(divisor, callers):
    model, batch = Divided(tiny_model().config), masked_batch()
    model.divisor = divisor if not callable(divisor) else staticmethod(divisor)
    given = {} if callers is None else {"num_items_in_batch": callers}
    want = model(**batch).loss
    FusedLoss(model)
    torch.testing.assert_close(model(**batch, **given).loss, want)


class Checkpointed(LlamaForCausalLM):
    """Checkpoints its head and its loss together, so as to keep no logits."""

    reentrant, chunks = False, 1

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        def loss_of(hidden, labels):
            return self.loss_function(self.lm_head(hidden), labels, self.config.vocab_size, **kwargs)

        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        parts = zip(hidden.chunk(self.chunks), labels.chunk(self.chunks), strict=True)
        losses = [checkpoint(loss_of, *part, use_reentrant=self.reentrant) for part in parts]
        return CausalLMOutputWithPast(loss=sum(losses) / self.chunks)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_model_may_checkpoint_its_head_and_loss(reentrant, chunks):
    model = Checkpointed(tiny_model().config)
    model.reentrant, model.chunks = reentrant, chunks
    truth, batch = double_copy(model), masked_batch()
    FusedLoss(model)
    _warn_once.cache_clear()
    with pytest.warns(MaterializedLogitsWarning, match="the model checkpoints its output head"):
        got, want = model(**batch).loss, truth(**batch).loss
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=0)
    got.backward()
    want.backward()
    assert_same_gradients(gradients(model), gradients(truth))


def test_what_a_checkpointed_loss_cannot_have_is_refused():
    batch = masked_batch()
    for options, given in ((LossOptions(label_smoothing=0.1), {}), (LossOptions(), {"fused_lm_head": True})):
        model = Checkpointed(tiny_model().config)
        FusedLoss(model, options)
        with warnings.catch_warnings(action="ignore"):
            with pytest.raises(ConfigError, match="computes its loss inside of a checkpoint"):
                model(**batch, **given)


class Scores(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


OUTPUTS: dict[str, tuple[Callable, Callable]] = {
    "tuple": (lambda out: (out.loss, out.logits), lambda got: got),
    "list": (lambda out: [out.loss, out.logits], lambda got: got),
    "named tuple": (lambda out: Scores(out.loss, out.logits), lambda got: (got.loss, got.logits)),
    "dict": (dict, lambda got: (got["loss"], got["logits"])),
    "object": (lambda out: SimpleNamespace(loss=out.loss, logits=out.logits), lambda got: (got.loss, got.logits)),
}


@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("grad", [True, False])
def test_outputs_are_of_the_form_that_the_model_returns(form, grad):
    make, read = OUTPUTS[form]

    class OfItsOwn(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return make(super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels))

    model, batch = OfItsOwn(tiny_model().config).eval(), masked_batch()
    with torch.set_grad_enabled(grad):
        want = model(**batch)
        FusedLoss(model)
        got, tokens = model(**batch), model(**batch, fused_lm_head=True)
        assert type(got) is type(want)
        (loss, logits), (true_loss, true_logits) = read(got), read(want)
        torch.testing.assert_close((loss, logits.clone(), tokens.loss), (true_loss, true_logits, true_loss))
        model(**batch, skip_logits=True)


@pytest.mark.parametrize("skip", [True, False])
def test_logits_that_were_skipped_can_be_read_without_gradients(skip):
    model, batch = tiny_model().eval(), masked_batch()
    with torch.no_grad():
        want = model(**batch).logits
        FusedLoss(model)
        torch.testing.assert_close(model(**batch, skip_logits=skip).logits.clone(), want)


def test_transforms_of_torch_func_are_refused_and_weights_of_others_are_not():
    model, batch = tiny_model(), {"input_ids": torch.arange(9)[None], "labels": torch.arange(9)[None]}
    others = {name: 2 * weight.detach() for name, weight in model.named_parameters()}
    want = torch.func.functional_call(model, others, (), batch).loss
    FusedLoss(model)
    assert torch.func.functional_call(model, others, (), batch).loss == pytest.approx(want.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="Llama.* is patched, and torch.func's .*patched.undo"):
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (), batch).loss)(others)


def test_whoever_asks_the_per_token_values_for_logits_is_told_why_there_are_none():
    model, ids = tiny_model(), torch.arange(9)[None]
    FusedLoss(model)
    outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert not hasattr(outputs, "attentions") and outputs.jsd is None
    with pytest.raises(AttributeError, match="no 'logits', which this loss never stores: .* transformers' Trainer"):
        outputs.logits  # noqa: B018


def test_threads_share_a_model():
    """One is in the middle of a pass with labels while others score, infer, and come to an end."""
    model, batch = tiny_model().eval(), masked_batch()
    plain = without_labels(batch)
    with torch.no_grad():
        want, logits = model(**batch).loss, model(**plain).logits
    FusedLoss(model)
    seen, head = [], model.lm_head

    def others(module, args):
        handle.remove()  # once
        with ThreadPoolExecutor(1) as pool:
            pool.submit(score).result()

    @torch.no_grad()
    def score():
        seen.extend((model(**batch).loss, model(**plain).logits, head(torch.zeros(1, 32))))

    handle = head.register_forward_pre_hook(others)
    got = model(**batch)
    torch.testing.assert_close((got.loss, *seen[:2]), (want, want, logits))
    assert type(seen[2]) is torch.Tensor and isinstance(got.logits, DeferredLogits)
    assert "forward" not in vars(head) and "_loss_function" not in vars(model)
