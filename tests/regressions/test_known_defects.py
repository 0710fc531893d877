"""What is, or was, wrong with distillation in other trainers, one test each that it is not so here.

Proved elsewhere, against numbers of their own:
- loss and gradient grow with gradient accumulation; gradients are divided by the tokens twice; DDP divides by the
  number of processes twice: test_distill_trainer.py, test_micro_batches_equal_one_batch and
  test_two_processes_equal_one, for every objective
- the value is multiplied by T^2 and the gradient is not: tests/kernels/test_linear_losses.py, test_gradcheck and
  test_temperature_squared_multiplies_the_divergence
- the denominator counts tokens of the dataset where the student's own are summed: test_on_policy.py,
  test_a_step_is_on_the_students_own_completions_with_its_own_tokens_as_denominator
- a padded vocabulary is refused: test_vocabulary.py, test_padding_and_added_tokens_just_work_and_are_told
- a softcap or a scale of logits is ignored by the fused loss: test_fused_models.py,
  test_distillation_equals_the_definition_on_real_logits, for families that have one
- entries of a teacher divided by their sum without a word: test_oracle.py shows what comes of it; there is no such loss
"""

import math
from typing import Any

import pytest
import torch
from tiny import VOCAB, completions, named_gradients, tiny_model, tiny_tokenizer, train_args
from transformers import TrainerCallback

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import NonFiniteError
from liger_trainer.losses.fused_forward import FusedLoss
from liger_trainer.losses.plan import LOSS_TYPES
from liger_trainer.losses.spec import LossOptions
from liger_trainer.teachers.base import teacher_logits

# where they are given
pytestmark = pytest.mark.filterwarnings("ignore::liger_trainer.MaterializedLogitsWarning")

DIVERGENCES = [name for name, kind in LOSS_TYPES.items() if kind.family == "divergence"]
PROMPT, ANSWER = 3, 3  # tokens of each


def loss_of(kind: str) -> list[dict[str, Any]]:
    """`losses` with one entry; only a jsd has no beta of its own."""
    return [{"type": kind, "beta": 0.5} if kind == "jsd" else {"type": kind}]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (1, PROMPT + ANSWER + 2), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[:, PROMPT : PROMPT + ANSWER] = ids[:, PROMPT : PROMPT + ANSWER]  # what follows the answer is masked too
    return {"input_ids": ids, "labels": labels}


def student(**config) -> Any:
    """A model with the fused loss that a configuration describes."""
    model = tiny_model()
    how = train_args(LigerDistillConfig, **config).distillation()
    FusedLoss(model, LossOptions(distillation=how))
    return model


def taught(model, teacher=None, change=None, **inputs) -> torch.Tensor:
    """The loss against a teacher, whose logits are changed first."""
    inputs = inputs or batch()
    teacher = teacher or tiny_model(seed=5)
    logits = teacher(input_ids=inputs["input_ids"]).logits.detach()
    return model(**inputs, teacher_logits=logits if change is None else change(logits), fused_lm_head=True).loss


def test_the_mask_is_shifted_as_the_labels_are():
    """DistillKit 1.0 masks unshifted logits by the labels: the answer's first token is never learnt, and the position
    behind its end is."""
    model = student()
    want = taught(model)
    for position in range(PROMPT + ANSWER + 2):

        def change(logits, position=position):
            logits = logits.clone()
            logits[:, position] = logits[:, position].flip(-1)
            return logits

        moved = abs(float((taught(model, change=change) - want).detach()))
        predicts_the_answer = PROMPT - 1 <= position < PROMPT + ANSWER - 1
        assert (moved > 1e-4) == predicts_the_answer, position


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "stored"])
def test_the_loss_is_no_cross_entropy_unless_asked_for(deferred):
    """TRL's Liger path trained 0.5 CE + 0.5 JSD for months. By default the labels say which tokens, and no more."""
    model, inputs, teacher = student(), batch(), tiny_model(seed=5)

    def loss(labels):
        given = {"input_ids": inputs["input_ids"]}
        answer = teacher_logits(teacher, teacher, **given) if deferred else teacher(**given).logits.detach()
        return model(**given, labels=labels, teacher_logits=answer, fused_lm_head=True).loss

    other = torch.where(inputs["labels"] == -100, -100, (inputs["labels"] + 1) % VOCAB)
    want, got = (named_gradients(model, loss(labels)) for labels in (inputs["labels"], other))
    assert loss(other).item() == loss(inputs["labels"]).item() > 0.1
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert sum(float(value.norm()) for value in want.values()) > 0.1


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_temperature_changes_loss_and_gradient(kind):
    """TRL 1.16's GKDTrainer uses it for sampling alone."""
    gradients = []
    for temperature in (1.0, 4.0):
        model = student(losses=loss_of(kind), temperature=temperature, scale_loss_by_temperature_squared=False)
        loss = taught(model)
        gradients.append((float(loss), torch.cat([x.flatten() for x in named_gradients(model, loss).values()])))
    (cold, cold_gradient), (hot, hot_gradient) = gradients
    assert hot < 0.7 * cold and hot_gradient.norm() < 0.7 * cold_gradient.norm()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_padded_vocabulary_is_cut_off_and_not_filled(kind):
    """ms-swift 4.6 fills the narrower side with the other's logits, where the padding of real models is not small."""
    small, large = tiny_model(seed=5), tiny_model(seed=5, vocab_size=VOCAB + 8)
    with torch.no_grad():
        large.load_state_dict({**large.state_dict(), **{
            name: torch.cat([value, 9 * torch.ones(8, *value.shape[1:])]) if len(value) == VOCAB else value
            for name, value in small.state_dict().items()
        }})  # fmt: skip
    results = []
    for teacher in (small, large):
        model = student(losses=loss_of(kind))
        loss = taught(model, teacher)
        results.append((loss, torch.cat([x.flatten() for x in named_gradients(model, loss).values()])))
    torch.testing.assert_close(*(loss for loss, _ in results))
    torch.testing.assert_close(*(gradient for _, gradient in results))


class Poison(TrainerCallback):
    """NaN in a weight, from the second step on."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            with torch.no_grad():
                model.get_output_embeddings().weight[0] = math.nan


def test_nan_ends_the_training():
    """transformers' Trainer logs 0.0 from then on, to the end of the run, and saves NaN. More: test_finite_guard.py."""
    trainer = LigerDistillTrainer(
        tiny_model(), teacher_model=tiny_model(seed=5), args=train_args(LigerDistillConfig, max_steps=3),
        train_dataset=completions(8), processing_class=tiny_tokenizer(), callbacks=[Poison()],
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="In step 2 the loss, the gradient norm and the weights are not finite"):
        trainer.train()


def test_misspelled_options_are_refused():
    """DistillKit 1.0 takes `temprature` and `layer_maping` in silence."""
    for losses in ([{"type": "forward_kl", "wieght": 2.0}], [{"type": "hidden_mse", "layer_maping": "last"}]):
        with pytest.raises(ValueError, match=next(key for key in losses[0] if key not in ("type", "weight"))):
            train_args(LigerDistillConfig, losses=losses)
    with pytest.raises(TypeError, match="temprature"):
        train_args(LigerDistillConfig, temprature=2.0)
