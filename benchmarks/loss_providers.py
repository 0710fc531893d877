"""Who computes the fused losses: a provider turns a case into a function of its tensors, importing the peer then.

The functions take hidden, weight and labels by name, and for a divergence teacher_hidden and teacher_weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .loss_cases import BETA, Case
from .reference import IGNORE_INDEX
from .suite import Provider

LossFunction = Callable[..., Tensor]


def our_cross_entropy(case: Case, **options) -> LossFunction:
    from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options).loss


def our_divergence(case: Case, **options) -> LossFunction:
    from liger_trainer.kernels.linear_divergence import linear_divergence

    options = {"kind": case.kind, "beta": BETA[case.kind], **options}
    return lambda hidden, weight, labels, teacher_hidden, teacher_weight: (
        linear_divergence(hidden, weight, teacher_hidden, teacher_weight, labels=labels, **options).loss
    )


def ours(case: Case, **options) -> LossFunction:
    return our_divergence(case, **options) if case.is_divergence else our_cross_entropy(case, **options)


def eager(case: Case) -> LossFunction:
    return case.plain


def compiled(case: Case) -> LossFunction:
    return torch.compile(case.plain, dynamic=False)


def liger_cross_entropy(case: Case) -> LossFunction:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def liger_large_chunks(case: Case) -> LossFunction:
    """Liger with chunks 16 times as large, the fastest setting its authors report."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    values = {"ignore_index": IGNORE_INDEX, "chunk_mem_const": 16}
    parameters = list(inspect.signature(LigerFusedLinearCrossEntropyFunction.forward).parameters.values())
    rest = [values.get(p.name, p.default) for p in parameters[4:]]  # after ctx, input, weight, target
    return lambda hidden, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *rest)[0]


def _liger_divergence(loss: Callable[..., Tensor]) -> LossFunction:
    return lambda hidden, weight, labels, teacher_hidden, teacher_weight: loss(
        hidden, weight, teacher_hidden, teacher_weight, labels
    )


def liger_chunked(case: Case) -> LossFunction:
    """Liger's chunked loss: `compiled=True`, 1024 tokens a chunk, by default; hard loss switched off."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return _liger_divergence(LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA[case.kind]))


def liger_fused_jsd(case: Case) -> LossFunction:
    from liger_kernel.transformers import LigerFusedLinearJSD

    return _liger_divergence(LigerFusedLinearJSD(jsd_beta=BETA[case.kind]))


def trl_cross_entropy(case: Case) -> LossFunction:
    """As the model forward that `trl.trainer.utils.add_fused_lm_head` installs for SFTTrainer calls it."""
    from trl.kernels import ChunkedLogProbFunction

    outputs = ("log_probs", "entropy", "is_top1")

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        valid = labels != IGNORE_INDEX
        log_prob, *_ = ChunkedLogProbFunction.apply(
            hidden[valid], weight, None, labels[valid], 1.0, 32768, None, 1.0, outputs
        )
        return -log_prob.sum() / valid.sum().clamp(min=1)

    return loss


def trl_divergence(case: Case) -> LossFunction:
    """As the loss of `trl.DistillationTrainer` calls it: supervised positions only."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hidden, weight, labels, teacher_hidden, teacher_weight) -> Tensor:
        valid = labels != IGNORE_INDEX
        per_token, _ = ChunkedDivergenceFunction.apply(
            hidden[valid], weight, None, teacher_hidden[valid], teacher_weight, None, BETA[case.kind]
        )
        return per_token.sum() / valid.sum().clamp(min=1)

    return loss


def cut_cross_entropy(case: Case) -> LossFunction:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels)


def quack(case: Case) -> LossFunction:
    """QuACK's chunked loss, by its scaled-exp kernels where they serve: bf16 on Hopper, V a multiple of 128."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, labels: chunked_linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE_INDEX
    )


def torch_native(case: Case) -> LossFunction:
    """Use torch's own op, with the chunking that it chooses; from torch 2.13 on."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORE_INDEX)


our_divergence_fp32 = partial(our_divergence, logits_dtype=torch.float32)
our_recompute = partial(our_cross_entropy, recompute=True)

CE = ("ce",)
KD = tuple(BETA)
ALL = (*CE, *KD)
PROVIDERS = (
    Provider("ours", "ours", ours, ALL, ALL, ours=True),
    Provider("ours_fp32", "ours, fp32 logits", our_divergence_fp32, KD, KD, ours=True),
    Provider("ours_recompute", "ours, recomputed", our_recompute, CE, CE, ours=True),
    *(
        Provider(f"ours_{mb}mb", f"ours in {mb} MiB", partial(ours, workspace_mb=mb), ALL, default, ours=True)
        for mb, default in ((256, CE), (512, ()), (1024, ()))
    ),
    Provider("eager", "torch eager", eager, ALL, ALL),
    Provider("compile", "torch.compile", compiled, ALL, ("ce", "forward_kl")),
    Provider("liger", "Liger", liger_cross_entropy, CE, CE),
    Provider("liger_c16", "Liger, chunk_mem_const=16", liger_large_chunks, CE, CE),
    Provider("liger_chunked", "Liger chunked loss", liger_chunked, KD, KD),
    Provider("liger_jsd", "LigerFusedLinearJSD", liger_fused_jsd, KD, KD),
    Provider("trl", "TRL", trl_cross_entropy, CE, CE),
    Provider("trl", "TRL", trl_divergence, KD, KD),
    Provider("cce", "Cut Cross-Entropy", cut_cross_entropy, CE, ()),
    Provider("quack", "QuACK", quack, CE, ()),
    Provider("torch", "torch's linear_cross_entropy", torch_native, CE, ()),
)
