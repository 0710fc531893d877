"""The divergences compared with TRL's losses: values and gradients, at every beta that its trainers know by name."""

import pytest
import torch

from liger_trainer.kernels.linear_divergence import linear_divergence

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
N, STUDENT, TEACHER, VOCAB = 12, 6, 5, 40


@pytest.fixture(params=["torch", "triton"], autouse=True)
def path(request) -> None:
    if request.param == "triton":
        request.getfixturevalue("kernels")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    labels = torch.randint(VOCAB, (N,), generator=generator)
    labels[::4] = -100
    return {
        "hidden": normal(N, STUDENT).requires_grad_(),
        "weight": normal(VOCAB, STUDENT).requires_grad_(),
        "teacher_hidden": normal(N, TEACHER),
        "teacher_weight": normal(VOCAB, TEACHER),
        "labels": labels,
    }


def assert_same(tensors, theirs: torch.Tensor, **options) -> None:
    ours = linear_divergence(**tensors, **options).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    leaves = [tensors["hidden"], tensors["weight"]]
    for mine, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta, temperature", zip(BETAS, [0.5, 1.0, 2.0, 1.0, 0.5], strict=True))
def test_generalized_jsd_loss(tensors, beta, temperature):
    """Of GKDTrainer. It doesn't multiply by the temperature squared."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="this TRL has no GKDTrainer")
    student = tensors["hidden"] @ tensors["weight"].t()
    teacher = tensors["teacher_hidden"] @ tensors["teacher_weight"].t()
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels=tensors["labels"][None], beta=beta, temperature=temperature
    )
    assert_same(tensors, theirs, kind="jsd", beta=beta, temperature=temperature, scale_by_temperature_squared=False)


@pytest.mark.parametrize("beta, num_items", zip(BETAS, [None, 17, None, 17, None], strict=True))
def test_loss_of_distillation_trainer(tensors, beta, num_items):
    """Of hidden states, over the positions that a mask leaves, for either normaliser."""
    module = pytest.importorskip("trl.trainer.distillation_trainer", reason="this TRL has no DistillationTrainer")
    if not hasattr(module, "_chunked_divergence_loss"):
        pytest.skip("this TRL computes its loss elsewhere")
    theirs, *_ = module._chunked_divergence_loss(
        tensors["hidden"][None], tensors["teacher_hidden"][None], tensors["weight"], tensors["teacher_weight"],
        (tensors["labels"] != -100).int()[None], beta=beta, num_items_in_batch=num_items,
        student_logit_scale=0.7, teacher_logit_scale=1.3, student_final_logit_softcapping=5.0, temperature=2.0,
    )  # fmt: skip
    assert_same(
        tensors, theirs, kind="jsd", beta=beta, num_items=num_items, scale=0.7, teacher_scale=1.3, softcap=5.0,
        temperature=2.0, scale_by_temperature_squared=False,
    )  # fmt: skip
