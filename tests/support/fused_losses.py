"""The fused linear losses in one table, with the forms of each, for tests of what all of them promise."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_checks import random_inputs, random_pair
from torch import Tensor

from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_alm import linear_alm, linear_alm_reference
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence, linear_divergence_reference
from liger_trainer.kernels.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from liger_trainer.kernels.linear_uld import linear_uld, linear_uld_reference

EACH = {kind: 0.2 + 0.1 * i for i, kind in enumerate(KINDS)}
MIX = {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}
CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.02}


class Loss(NamedTuple):
    op: Callable
    reference: Callable
    inputs: Callable[..., dict[str, Tensor]]  # (n, h, v, **options)
    options: dict[str, Any]  # what it knows, all at once
    forms: dict[str, dict[str, Any]]  # options one by one
    values: int = 0  # how many the loss has for each token; 0: it is their mean

    def upstream(self, n: int) -> float | Tensor:
        """A gradient of the loss of n tokens, none of it 1."""
        return torch.linspace(-1.5, 3.0, self.values * n) if self.values else 3.0

    def takes(self, *names: str) -> bool:
        return set(names) <= inspect.signature(self.op).parameters.keys()


class Values(NamedTuple):
    loss: Tensor  # what has the upstream gradient
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logit: Tensor


def differentiable(op: Callable, entropy: bool) -> Callable:
    """`linear_log_probs` with the values that get a gradient as its loss: log-probabilities, behind them entropies."""

    @functools.wraps(op)
    def run(**inputs: Any) -> Values:
        out = op(**inputs)
        loss = torch.cat([out.log_prob, out.entropy]) if entropy else out.log_prob
        return Values(loss, *out[:3], out.log_prob if out.mean_logit is None else out.mean_logit)

    return run


def teacher_log_probs(n: int, v: int, seed: int = 1, spread: float = 2.0) -> Tensor:
    """(n, v) fp64"""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, v, generator=generator, dtype=torch.float64) * spread).log_softmax(-1)


def likeliest(log_p: Tensor, k: int, device: Any = None) -> dict[str, Tensor]:
    """A cache of the likeliest k."""
    log_probs, ids = log_p.topk(k, -1)
    return {"ids": ids.to(device), "log_probs": log_probs.float().to(device)}


def drawn(log_p: Tensor, draws: int, device: Any = None, seed: int = 2) -> dict[str, Tensor]:
    """A cache of ids drawn from the teacher, repeated ones counted, the rest of a row padded."""
    sample = torch.multinomial(log_p.exp(), draws, True, generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros_like(log_p).scatter_add_(1, sample, torch.ones_like(sample, dtype=log_p.dtype))
    count, ids = counts.topk(min(draws, log_p.shape[1]), -1)
    return {"ids": ids.where(count > 0, -1).to(device), "log_probs": (count / draws).log().float().to(device)}


def random_sparse(
    n: int, h: int, v: int, *, k: int = 4, cache: Callable = likeliest, labels: bool = True, **how: Any
) -> dict[str, Tensor]:
    tensors = random_inputs(n, h, v, **how)
    tensors |= cache(teacher_log_probs(n, v), min(k, v), tensors["hidden"].device)
    if not labels:
        del tensors["labels"]
    return tensors


def sparse_on_gpu(n: int, h: int, v: int, k: int, **how: Any) -> dict[str, Tensor]:
    """A teacher of k tokens a row, the label among them, 7919 apart and so distinct."""
    tensors = random_inputs(n, h, v, device="cuda", **how)
    assert v % 7919 and k < v
    log_probs = torch.randn(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).log_softmax(-1)
    ids = (tensors["labels"].clamp(min=0)[:, None] + 7919 * torch.arange(k, device="cuda")) % v
    return tensors | {"ids": ids, "log_probs": log_probs - 0.1}


def random_uld(
    n: int, h: int, v: int, *, teacher_v: int | None = None, m: int | None = None, labels: bool = True, **how: Any
) -> dict[str, Tensor]:
    """A teacher of another vocabulary. Its rows are those of the same place, or m: some have no partner or the same."""
    student, seed = random_inputs(n, h, v, **how), how.pop("seed", 0)
    rows = n if m is None else m
    teacher = random_inputs(rows, h + 1, v + 5 if teacher_v is None else teacher_v, **how | {"seed": seed + 1})
    tensors = student | {f"teacher_{k}": x for k, x in teacher.items() if k != "labels"}
    if m is not None:
        partners = torch.randint(-1, m, (n,), generator=torch.Generator().manual_seed(seed))
        partners[: min(n, 1)] = -1
        tensors["partners"] = partners.to(student["hidden"].device)
    if not labels:
        del tensors["labels"]
    return tensors


def random_spans(n: int = 9, h: int = 12, v: int = 37, *, dtype: Any = torch.float32, seed: int = 0, **how: Any):
    """Spans of one to three rows; rows without a label, and some others, are in none."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_inputs(n, h, v, seed=seed, dtype=dtype, **how)
    device = tensors["hidden"].device
    spans, labelled, row = torch.full((n,), -1), (tensors["labels"] != -100).tolist(), 0
    while row < n:
        size = min(int(torch.randint(1, 4, (), generator=generator)), n - row)
        if all(labelled[row : row + size]) and row != 2:
            spans[row : row + size] = row
        row += size
    of_teacher = -5 * torch.rand(n, generator=generator)  # also at rows where it is not read
    return tensors | {"spans": spans.to(device), "teacher_log_prob": of_teacher.to(device, dtype)}


SCALES = {
    "scale": {"scale": 0.5}, "softcap": {"softcap": 5.0}, "T 2": {"temperature": 2.0}, "T 0.5": {"temperature": 0.5},
}  # fmt: skip
UNSCALED = {"T 4 unscaled": {"temperature": 4.0, "scale_by_temperature_squared": False}}
AT_ONCE = {"temperature": 1.5, "softcap": 7.0, "scale": 0.8, "ce_weight": 0.4, "num_items": 7}
DIVERGENCES = {
    **SCALES, **UNSCALED, **{kind: {"kind": kind} for kind in KINDS},
    **{
        f"{kind}, all": {"kind": kind, "temperature": 2.0, "alpha": 0.3, "teacher_share": 0.4, "beta": 0.3,
                         "softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "teacher_scale": 1.2, **CE}
        for kind in ("jsd", "skew_kl", "skew_reverse_kl", "tvd")
    },
    "jsd 0.1": {"kind": "jsd", "beta": 0.1}, "jsd 0.9": {"kind": "jsd", "beta": 0.9}, "mix": {"kind": MIX, "beta": 0.3},
    "each": {"kind": EACH, "beta": 0.3}, "each at T 0.5": {"kind": EACH, "temperature": 0.5},
    "each at T 4": {"kind": EACH, "temperature": 4.0, "alpha": 0.2}, "with ce": {"kind": "jsd", **CE},
    "only ce": {"kind": {"forward_kl": 0.0}, "ce_weight": 1.0}, "teacher_scale": {"teacher_scale": 1.5},
    "teacher_softcap": {"teacher_softcap": 4.0}, "T 2 with ce": {"temperature": 2.0, "ce_weight": 0.5},
    "smoothing": {"ce_weight": 0.5, "label_smoothing": 0.2}, "z_loss": {"ce_weight": 0.5, "z_loss": 0.05},
}  # fmt: skip
OUTCOMES = {"beta": 0.3, "alpha": 0.2}
SPARSE = {
    **SCALES, **UNSCALED, "": {}, "ce": {"ce_weight": 0.5}, "T 2 with ce": {"temperature": 2.0, "ce_weight": 0.5},
    "none": {"tail": "none"}, "none, all": {"tail": "none", **AT_ONCE},
    **{kind: {"kind": kind} for kind in KINDS if kind != "forward_kl"},
    **{f"{kind}, all": {"kind": kind, **AT_ONCE, **OUTCOMES} for kind in KINDS if kind != "forward_kl"},
    "mix": {"kind": {"forward_kl": 0.5, "reverse_kl": 0.7, "tvd": -0.2, "symmetric_kl": 0.4, "jsd": 0.0}, "beta": 0.3,
            "ce_weight": 0.2},
}  # fmt: skip
LOG_PROBS = SCALES | {"": {}, "mean logits": {"mean_logits": True}}
LOSSES = {
    "cross_entropy": Loss(
        linear_cross_entropy, linear_cross_entropy_reference, random_inputs,
        {"scale": 0.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True},
        SCALES | {"": {}, "smoothing": {"label_smoothing": 0.2}, "z_loss": {"z_loss": 0.03}, "dft": {"dft": True},
                  "num_items": {"num_items": 7}},
    ),
    "divergence": Loss(
        linear_divergence, linear_divergence_reference, lambda n, h, v, **how: random_pair(n, h, h + 1, v, **how),
        {"kind": MIX, "beta": 0.3, "temperature": 1.5, "softcap": 7.0, "teacher_softcap": 9.0, "scale": 1.2, **CE},
        DIVERGENCES,
    ),
    "sparse": Loss(
        linear_sparse_divergence, linear_sparse_divergence_reference, random_sparse,
        {k: x for k, x in AT_ONCE.items() if k != "num_items"}, SPARSE,
    ),
    "uld": Loss(
        linear_uld, linear_uld_reference, random_uld,
        {"temperature": 1.5, "softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "teacher_scale": 1.2,
         "ce_weight": 0.4, "uld_weight": 1.5, "label_smoothing": 0.1},
        {**SCALES, **UNSCALED, "": {}, "caps": {"softcap": 5.0, "teacher_softcap": 3.0},
         "weights": {"uld_weight": 0.7, "ce_weight": 0.5}, "smoothing": {"ce_weight": 0.5, "label_smoothing": 0.2},
         "only ce": {"uld_weight": 0.0, "ce_weight": 0.5}},
    ),
}  # fmt: skip
# Those whose loss is the sum of each token's, with a gradient that is made in the backward.
OF_TOKENS = {
    "alm": Loss(
        linear_alm, linear_alm_reference, random_spans,
        {"alm_weight": 1.5, "ce_weight": 0.4, "tau": 20.0, "scale": 0.8, "softcap": 7.0},
        {"": {}, "raw likelihoods": {"tau": 1.0}, "small tau": {"tau": 0.3}, "ce": {"ce_weight": 0.5},
         "only ce": {"alm_weight": 0.0, "ce_weight": 1.0}, "num_items": {"num_items": 3}},
    ),
    **{
        name: Loss(
            differentiable(linear_log_probs, entropy), differentiable(linear_log_probs_reference, entropy),
            random_inputs, {"scale": 1.7, "softcap": 6.0, "temperature": 1.3, "mean_logits": True},
            LOG_PROBS if entropy else {"": {}},
            values=1 + entropy,
        )
        for name, entropy in (("log_probs", False), ("entropy", True))
    },
}  # fmt: skip
EVERY = LOSSES | OF_TOKENS
# Log-probabilities without entropies differ only where the head is frozen.
DISTINCT = {name: loss for name, loss in EVERY.items() if name != "log_probs"}
