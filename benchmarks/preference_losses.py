"""DPO's and GRPO's losses from hidden states, as `benchmarks.preference_step` measures them beside each other.

A provider turns a case into a function of its tensors, importing the peer then. All but Liger-Kernel give the
log-probability of each token, from which the loss is the same few lines; Liger-Kernel's losses are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BETA, KL_WEIGHT, CLIP, TEMPERATURE = 0.1, 0.04, 0.2, 0.9  # DPO's; GRPO's
IGNORED = -100

Tensors = dict[str, Tensor]
Scorer = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (N, H), weight (V, H), labels (N,): log-probs (N,)


@dataclass(frozen=True)
class Case:
    """A loss on sequences of a shape. frozen: the head gets no gradient, as with adapters."""

    loss: str  # "DPO" or "GRPO"
    hidden: int
    vocab: int
    frozen: bool
    sequences: int = 8
    length: int = 1024

    def __str__(self) -> str:
        head = "frozen head" if self.frozen else "trained head"
        return f"{self.loss}, H {self.hidden}, V {self.vocab}, {head}, {self.sequences} x {self.length}"

    @property
    def temperature(self) -> float:
        return TEMPERATURE if self.loss == "GRPO" else 1.0


def make_tensors(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Return hidden states, head, labels, and what the loss compares with. The first quarter of a row is its prompt."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

    rows = case.sequences, case.length
    labels = torch.randint(case.vocab, rows, generator=generator, device=device)
    weight = normal(case.vocab, case.hidden)
    hidden = normal(*rows, case.hidden, std=1.5 / case.hidden**0.5)
    hidden += weight[labels] * (4.0 / case.hidden)  # labels that the model finds likely, as sampled ones are
    labels[:, : case.length // 4] = IGNORED
    tensors = {"hidden": hidden, "weight": weight, "labels": labels}
    if case.loss == "DPO":
        # near the model, so that the loss is not flat, nor its gradient a matter of bf16's rounding of long sums
        near = hidden + normal(*rows, case.hidden, std=0.02 / case.hidden**0.5)
        return {**tensors, "reference_hidden": near, "reference_weight": weight}
    with torch.no_grad():
        now = reference_log_probs(tensors, case)
    noise = {name: now + torch.randn(rows, generator=generator, device=device) * 0.3 for name in ("old", "reference")}
    return {**tensors, **noise, "advantages": torch.randn(case.sequences, generator=generator, device=device)}


def reference_log_probs(tensors: Tensors, case: Case) -> Tensor:
    """Return log-probabilities (sequences, length) from stored logits, a sequence at a time; 0 where ignored."""
    rows = [
        _stored(case)(hidden, tensors["weight"], labels)
        for hidden, labels in zip(tensors["hidden"], tensors["labels"], strict=True)
    ]
    return torch.stack(rows)


def dpo(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return DPO's loss of rows that are chosen in the first half, rejected in the second."""
    chosen, rejected = (log_probs - reference).sum(-1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def grpo(log_probs: Tensor, tensors: Tensors) -> Tensor:
    """Return GRPO's loss with clipping and the KL to the reference, a mean over the labelled tokens."""
    labelled = tensors["labels"] != IGNORED
    ratio, advantages = (log_probs - tensors["old"]).exp(), tensors["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    gap = tensors["reference"] - log_probs
    return ((KL_WEIGHT * (gap.exp() - gap - 1) - gain) * labelled).sum() / labelled.sum()


def loss_from(scorer: Scorer, case: Case) -> Callable[[Tensors], Tensor]:
    """Return the case's loss from a function of per-token log-probabilities."""

    def scores(tensors: Tensors, prefix: str = "") -> Tensor:
        hidden, labels = tensors[f"{prefix}hidden"], tensors["labels"]
        return scorer(hidden.flatten(0, 1), tensors[f"{prefix}weight"], labels.flatten()).view(labels.shape)

    def loss(tensors: Tensors) -> Tensor:
        if case.loss == "GRPO":
            return grpo(scores(tensors), tensors)
        with torch.no_grad():
            reference = scores(tensors, "reference_")
        return dpo(scores(tensors), reference)

    return loss


def _stored(case: Case) -> Scorer:
    def scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_probs = F.log_softmax(F.linear(hidden, weight).float() / case.temperature, -1)
        picked = log_probs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        return picked.where(labels != IGNORED, 0)

    return scores


def stored_logits(case: Case) -> Callable[[Tensors], Tensor]:
    return loss_from(_stored(case), case)


def trl(case: Case) -> Callable[[Tensors], Tensor]:
    """As the forward that `trl.trainer.utils.add_fused_lm_head` installs calls it, with the trainer's outputs."""
    from trl.kernels import ChunkedLogProbFunction

    return loss_from(_compacted(ChunkedLogProbFunction, case), case)


def ours(case: Case) -> Callable[[Tensors], Tensor]:
    """As `trl` calls it after `liger_trainer.enable()`."""
    from trl.kernels import ChunkedLogProbFunction

    from liger_trainer.patching.trl_losses import FusedLogProbs

    return loss_from(_compacted(FusedLogProbs(ChunkedLogProbFunction), case), case)


def _compacted(function, case: Case) -> Scorer:
    dpo_outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    wanted = dpo_outputs if case.loss == "DPO" else ("log_probs", "entropy")

    def scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        valid = labels != IGNORED
        outputs = wanted if torch.is_grad_enabled() else ("log_probs",)
        picked, *_ = function.apply(
            hidden[valid], weight, None, labels[valid], case.temperature, 32768, None, 1.0, outputs
        )
        return picked.new_zeros(valid.shape).masked_scatter(valid, picked)

    return scores


def liger(case: Case) -> Callable[[Tensors], Tensor]:
    """Liger-Kernel's chunked losses with their defaults, compiled on a GPU."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss

    compiled = torch.cuda.is_available()
    if case.loss == "DPO":
        preference = LigerFusedLinearDPOLoss(beta=BETA, compiled=compiled)
        return lambda t: preference(
            t["weight"], t["hidden"], t["labels"], ref_input=t["reference_hidden"], ref_weight=t["reference_weight"]
        )[0]
    policy = LigerFusedLinearGRPOLoss(
        beta=KL_WEIGHT, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="bnpo", temperature=TEMPERATURE,
        compiled=compiled,
    )  # fmt: skip
    return lambda t: policy(
        t["hidden"], t["weight"], t["labels"].clamp(min=0), (t["labels"] != IGNORED).long(), t["advantages"],
        ref_per_token_logps=t["reference"], old_per_token_logps=t["old"],
    )[0]  # fmt: skip


PROVIDERS: dict[str, tuple[str, Callable[[Case], Callable[[Tensors], Tensor]]]] = {
    "ours": ("ours", ours),
    "trl": ("TRL's chunked head", trl),
    "liger": ("Liger's chunked loss", liger),
    "stored": ("stored logits", stored_logits),
}
