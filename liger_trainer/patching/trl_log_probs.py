"""The fused head of TRL's trainers (DPO, KTO, GRPO, RLOO, SFT), with `linear_log_probs` in place of TRL's function.

Those trainers call `model(..., labels=..., fused_lm_head=True)`, whose forward (`trl.trainer.utils.add_fused_lm_head`)
runs the backbone, chooses the labelled positions and hands hidden states, head and labels to one function. That
function alone is replaced, so labels, masks, autocast, adapters, auxiliary losses and engines stay TRL's.
"""

import inspect
import warnings
from typing import Any

import trl
import trl.trainer.utils
from torch import Tensor

from ..common.replacements import Replacements
from ..kernels.linear_log_probs import linear_log_probs

_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

Scores = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def replace_trl_log_probs(replacements: Replacements) -> None:
    """Have TRL's fused head call `linear_log_probs`.

    A release of TRL whose head calls another function keeps it, with a warning that says so.
    """
    stock = getattr(trl.trainer.utils, _NAME, None)
    if stock is None or tuple(inspect.signature(stock.forward).parameters)[1:] != _PARAMETERS:
        warnings.warn(
            f"The fused head of TRL {trl.__version__} calls another function than that of TRL 1.16, which "
            "liger_trainer.enable() replaces: its preference and RL trainers keep TRL's own.",
            stacklevel=3,
        )
        return
    replacements.set(trl.trainer.utils, _NAME, FusedLogProbs(stock))


class FusedLogProbs:
    """Stands in for TRL's autograd function, which is called by its `apply`.

    Args:
        stock: TRL's own, for weights that DeepSpeed ZeRO-3 has partitioned: it gathers them again in the backward.
    """

    def __init__(self, stock: Any):
        self._stock = stock

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> Scores:  # fmt: skip
        """Return TRL's five values (N,) of labels that are all in use; None for those that `outputs` leaves out."""
        if hasattr(weight, "ds_id"):
            return self._stock.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        head: dict[str, Any] = {
            "hidden": hidden, "weight": weight, "labels": targets, "bias": bias, "softcap": final_logit_softcapping,
            "scale": logit_scale, "ignore_index": None,
        }  # fmt: skip
        values = linear_log_probs(**head, temperature=temperature, mean_logits="mean_logits" in outputs)
        return (
            values.log_prob,
            values.entropy if "entropy" in outputs else None,
            _log_sum_of_squares(head, temperature, values.log_prob) if "log_sum_sq_probs" in outputs else None,
            values.mean_logit,
            values.is_top1 if "is_top1" in outputs else None,
        )


def _log_sum_of_squares(head: dict[str, Any], temperature: float, log_prob: Tensor) -> Tensor:
    """Return log sum_v p_v^2 (N,), which WPO weights by, without gradient.

    p_v^2 / sum p^2 is the distribution at half the temperature, so one more pass with the labels gives the sum.
    """
    fixed: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in head.items()
    }
    return 2 * log_prob.detach() - linear_log_probs(**fixed, temperature=temperature / 2).log_prob
