"""What a model with a fused loss returns where a trainer asks for per-token values."""

# ModelOutput wants a default for every field:
# pyright: reportAssignmentType=false
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .spec import IGNORE_INDEX, BatchTargets, LossOptions
from .teacher_answer import BatchLoss


@dataclass
class TokenLossOutput(ModelOutput):
    """The output of a call with `fused_lm_head=True`, TRL's protocol, and what distillation adds to it.

    Per-token fields are (batch, length - 1), or (batch, length) with `shift_labels`; fp32, in nats, 0 where ignored,
    and without gradient. Those about a teacher are None without one, and where its answer does not determine them.
    """

    loss: Tensor = None  # scalar: the tokens' loss, and a mixture of experts' auxiliary loss where asked for
    token_loss: Tensor = None  # scalar: the tokens' part
    log_probs: Tensor = None
    entropy: Tensor = None
    is_top1: Tensor = None
    label_mask: Tensor = None
    aux_loss: Tensor = None
    divergence: Tensor = None
    forward_kl: Tensor = None
    reverse_kl: Tensor = None
    agrees: Tensor = None
    teacher_log_probs: Tensor = None
    teacher_entropy: Tensor = None
    jsd: Tensor = None  # at temperature 1 and beta 0.5, where `Distillation.measure_jsd` asks for it
    terms: dict[str, Tensor] = None  # by type of loss, of a `Distillation` that lists them
    parts: dict[str, Tensor] = None  # see `BatchLoss`
    uncast: "Uncast" = None

    def in_fp32(self) -> "TokenLossOutput":
        """Return the output as it was before an engine cast it, as FSDP2 does to its `output_dtype`."""
        if self.uncast is None or self.token_loss.dtype == self.uncast.values["token_loss"].dtype:
            return self
        return TokenLossOutput(**self.uncast.values)


class Uncast:
    """The values of an output where the casts of engines, which look into mappings and dataclasses, do not reach."""

    def __init__(self, output: TokenLossOutput):
        self.values = dict(output)


def token_output(outputs: Any, result: BatchLoss, targets: BatchTargets, options: LossOptions) -> TokenLossOutput:
    """Return the per-token values of one pass, whose model returned `outputs`."""

    def laid_out(values: Tensor | None) -> Any:
        return None if values is None else targets.per_token(values)

    def each(values: Mapping[str, Tensor] | None) -> Any:
        return None if values is None else {name: targets.per_token(value) for name, value in values.items()}

    output = TokenLossOutput(
        loss=outputs["loss"],
        token_loss=result.loss,
        log_probs=laid_out(result.log_prob),
        entropy=laid_out(result.entropy),
        is_top1=laid_out(result.is_top1),
        label_mask=laid_out(targets.labels != IGNORE_INDEX),
        aux_loss=outputs.get("aux_loss"),
        divergence=laid_out(result.divergence),
        forward_kl=laid_out(result.forward_kl),
        reverse_kl=laid_out(result.reverse_kl),
        agrees=laid_out(result.agrees),
        teacher_log_probs=laid_out(result.teacher_log_prob),
        teacher_entropy=laid_out(result.teacher_entropy),
        jsd=laid_out(result.jsd),
        terms=each(_listed_terms(result, options)),
        parts=each(result.parts),
    )
    if not torch.compiler.is_compiling():
        output.uncast = Uncast(output)
    return output


def _listed_terms(result: BatchLoss, options: LossOptions) -> dict[str, Tensor] | None:
    """Return the values of the terms that `losses` lists, by type: without weight, and T^2 times if the loss is."""
    how = options.distillation
    if how is None or not how.terms or result.terms is None:
        return None
    values = {"ce": -result.log_prob, **result.terms}
    return {name: values[name] for name in how.terms if name in values}
