"""The fused linear losses side by side, for tests of what all of them promise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_checks import random_inputs, random_pair
from torch import Tensor

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence, linear_divergence_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from liger_trainer.kernels.linear_uld import linear_uld, linear_uld_reference


class Loss(NamedTuple):
    op: Callable
    reference: Callable
    inputs: Callable[..., dict[str, Tensor]]  # (n, h, v, **options)
    options: dict[str, Any]


def random_sparse(n: int, h: int, v: int, **how: Any) -> dict[str, Tensor]:
    tensors = random_inputs(n, h, v, **how)
    generator = torch.Generator().manual_seed(9)
    ids = torch.rand(n, v, generator=generator).argsort(-1)[:, :4]
    log_probs = torch.randn(n, 5, generator=generator).log_softmax(-1)[:, :4]
    device = tensors["hidden"].device
    return tensors | {"ids": ids.to(device), "log_probs": log_probs.to(device)}


def random_uld(n: int, h: int, v: int, **how: Any) -> dict[str, Tensor]:
    """A teacher of another vocabulary, whose rows are those of the same place."""
    student, seed = random_inputs(n, h, v, **how), how.pop("seed", 0)
    teacher = random_inputs(n, h + 1, v + 5, **how | {"seed": seed + 1})
    return student | {f"teacher_{k}": x for k, x in teacher.items() if k != "labels"}


LOSSES = {
    "cross_entropy": Loss(
        linear_cross_entropy, linear_cross_entropy_reference, random_inputs,
        {"scale": 0.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True},
    ),
    "divergence": Loss(
        linear_divergence, linear_divergence_reference, lambda n, h, v, **how: random_pair(n, h, h + 1, v, **how),
        {"kind": {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}, "beta": 0.3, "temperature": 1.5, "softcap": 7.0,
         "scale": 1.2, "ce_weight": 0.4, "z_loss": 0.02, "label_smoothing": 0.1},
    ),
    "sparse": Loss(
        linear_sparse_divergence, linear_sparse_divergence_reference, random_sparse,
        {"temperature": 1.5, "softcap": 7.0, "scale": 0.8, "ce_weight": 0.4},
    ),
    "uld": Loss(
        linear_uld, linear_uld_reference, random_uld,
        {"temperature": 1.5, "softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "ce_weight": 0.4, "uld_weight": 1.5,
         "label_smoothing": 0.1},
    ),
}  # fmt: skip
