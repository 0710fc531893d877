"""The fused linear losses side by side, for tests of what all of them promise."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from kernel_checks import random_inputs, random_pair
from torch import Tensor

from liger_trainer.kernels import linear_cross_entropy, linear_divergence, linear_sparse_divergence


class Loss(NamedTuple):
    op: Callable
    reference: Callable
    inputs: Callable[..., dict[str, Tensor]]  # (n, h, v, **options)
    module: ModuleType
    rows: str  # what launches the row kernels there
    options: dict[str, Any]


def random_sparse(n: int, h: int, v: int, **how: Any) -> dict[str, Tensor]:
    tensors = random_inputs(n, h, v, **how)
    generator = torch.Generator().manual_seed(9)
    ids = torch.rand(n, v, generator=generator).argsort(-1)[:, :4]
    log_probs = torch.randn(n, 5, generator=generator).log_softmax(-1)[:, :4]
    device = tensors["hidden"].device
    return tensors | {"ids": ids.to(device), "log_probs": log_probs.to(device)}


LOSSES = {
    "cross_entropy": Loss(
        linear_cross_entropy.linear_cross_entropy, linear_cross_entropy.linear_cross_entropy_reference, random_inputs,
        linear_cross_entropy, "whole_rows",
        {"scale": 0.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True},
    ),
    "divergence": Loss(
        linear_divergence.linear_divergence, linear_divergence.linear_divergence_reference,
        lambda n, h, v, **how: random_pair(n, h, h + 1, v, **how), linear_divergence, "divergence_rows",
        {"kind": {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}, "beta": 0.3, "temperature": 1.5, "softcap": 7.0,
         "scale": 1.2, "ce_weight": 0.4, "z_loss": 0.02, "label_smoothing": 0.1},
    ),
    "sparse": Loss(
        linear_sparse_divergence.linear_sparse_divergence, linear_sparse_divergence.linear_sparse_divergence_reference,
        random_sparse, linear_sparse_divergence, "sparse_rows",
        {"temperature": 1.5, "softcap": 7.0, "scale": 0.8, "ce_weight": 0.4},
    ),
}  # fmt: skip
