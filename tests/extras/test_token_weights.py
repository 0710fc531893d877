"""`weight_column` where logits are stored: the loss is each token's own, times its weight, for every kind of answer."""

import pytest
import torch

from liger_trainer.extras.cross_tokenizer.teacher import UldAnswer
from liger_trainer.losses.answers import DenseAnswer, cross_entropy_loss
from liger_trainer.losses.sparse_answer import SparseAnswer, TokenTargets
from liger_trainer.losses.spec import BatchTargets, Distillation, LossOptions, TokenWeights


def sparse(logits: torch.Tensor) -> SparseAnswer:
    top, shape = logits.log_softmax(-1).topk(5, -1), logits.shape[:-1]
    ids, zeros = top.indices.int(), torch.zeros(shape)
    return SparseAnswer(TokenTargets(ids, top.values, ids[..., 0], zeros, None, zeros), "bucket", logits.shape[-1])


def uld(logits: torch.Tensor) -> UldAnswer:
    partners = torch.arange(logits[..., 0].numel()).view(logits.shape[:-1])
    return UldAnswer(logits, partners, logits.shape[-1])


ANSWERS = {
    "ce": (None, LossOptions()),
    "dense": (DenseAnswer, LossOptions(distillation=Distillation({"jsd": 0.5, "tvd": 1.0}, ce_weight=0.3))),
    "sparse": (sparse, LossOptions(distillation=Distillation({"forward_kl": 1.0}, ce_weight=0.3))),
    "uld": (uld, LossOptions(distillation=Distillation({}, uld_weight=0.7, ce_weight=0.3))),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_stored_logits_are_weighted_too(name):
    """The loss is each token's own, times its weight, whatever the others weigh."""
    answer_of, options = ANSWERS[name]
    student, teacher = torch.randn(2, 2, 5, 16) * 3
    labels, weights = torch.randint(16, (2, 5)), torch.rand(2, 5)
    labels[0, 2] = -100

    def loss(weights):
        targets = BatchTargets.of(labels, None, 7.0, weights=None if weights is None else TokenWeights(weights))
        if answer_of is None:
            return cross_entropy_loss(student, targets, options).loss
        return answer_of(teacher).for_targets(targets).loss(student, targets, options).loss

    alone = torch.stack([loss(one.view(2, 5)) for one in torch.eye(10)])
    assert float(loss(weights)) == pytest.approx(float((alone * weights.flatten()).sum()), rel=1e-4)
    assert float(alone.sum()) == pytest.approx(float(loss(None)), rel=1e-4)
    nothing = [1, 4, 9]  # before the ignored label, and at the ends
    assert [i for i, x in enumerate(alone.tolist()) if x == 0] == nothing
