"""The fields of LigerDistillConfig about the loss. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from ..common.options import option

SKEW_ALPHA = 0.1


@dataclass
class LossConfig:
    """What a student minimises; docs/losses.md.

    Args:
        beta: 0 is the forward KL, 1 the reverse KL, between lies the generalised JSD, as in TRL's DistillationConfig.
        losses: replaces `beta` when given: a list such as
            `[{"type": "forward_kl", "weight": 1.0}, {"type": "ce", "weight": 0.1}]`. docs/losses.md has the types, and
            what their entries take beside a weight (default 1).
        skew_alpha: the share of the other side in skew_kl and skew_reverse_kl.
        schedules: {name: {from, to, kind, warmup_steps, steps}} of temperature, beta, skew_alpha, lmbda or the weight
            of a loss, `<type>_weight`.
        taid: the teacher's share in what the student is held against: {start, end, adaptive, alpha, beta}, see
            `schedules.Taid`; {} for the defaults.
        temperature: divides both models' logits in the divergences, and the logits that completions are sampled from.
        kd_temperature: the temperature of the divergences, where it is to be another than that of sampling.
        scale_loss_by_temperature_squared: multiply the divergences by temperature^2 (Hinton et al. 2015).
    """

    beta: float = option(
        0.0, "0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence.", ge=0, le=1
    )
    losses: list[dict[str, Any]] | str | None = option(
        None, "Weighted losses instead of beta, e.g. [{type: forward_kl}, {type: ce, weight: 0.1}]."
    )
    skew_alpha: float = option(SKEW_ALPHA, "Share of the other side in the mixture of the skewed KLs.", ge=0, lt=1)
    schedules: dict[str, Any] | str | None = option(
        None, "Scalars of the loss that change, e.g. {temperature: {to: 1.0, kind: cosine}}."
    )
    taid: dict[str, Any] | str | None = option(
        None, "Teacher's share, rising with the steps: {start, end, adaptive, alpha, beta}."
    )
    temperature: float = option(1.0, "Divides the logits in the divergences, and those that are sampled from.", gt=0)
    kd_temperature: float | None = option(None, "Temperature of the divergences; default: temperature.", gt=0)
    scale_loss_by_temperature_squared: bool = option(True, "Multiply the divergences by temperature squared.")
