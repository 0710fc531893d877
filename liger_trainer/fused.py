"""A causal LM that computes its loss without storing logits.

`FusedLoss(model)` wraps the forward of one model object. Called with labels, that model runs its own forward with
deferred logits and with the fused loss in place of its loss function; called without, nothing changes. `undo()` takes
it off again.
"""

# ModelOutput wants a default for every field:
# pyright: reportAssignmentType=false
import functools
import types
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from .deferred import DeferredLogits, MaterializedLogitsWarning, deferred_logits
from .errors import ConfigError
from .kernels.cross_entropy import CrossEntropy
from .kernels.linear_divergence import LinearDivergence
from .losses import Logits, LossOptions, Targets, batch_loss


@dataclass
class TokenLossOutput(ModelOutput):
    """What a model with a fused loss returns when called with `fused_lm_head=True`, TRL's protocol, plus distillation.

    Per-token fields are (batch, length - 1), or (batch, length) with `shift_labels`; fp32, in nats, 0 where ignored,
    and without gradient. Those about a teacher are None without one.
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


class FusedLoss:
    """The fused loss of one model. See the top of this file.

    Args:
        model: a transformers causal LM; the base model of a PEFT model.
        options: smoothing, distillation.

    Raises:
        ConfigError: the model's loss is not the causal-LM cross-entropy, so replacing it would change the objective.
    """

    def __init__(self, model: Any, options: LossOptions | None = None):
        if model.loss_function is not ForCausalLMLoss:
            own = getattr(model.loss_function, "__name__", "unnamed")
            raise ConfigError(
                f"{type(model).__name__} has a loss of its own ({own}); the fused losses replace the causal-LM "
                "cross-entropy only."
            )
        self.model = model
        self.options = options or LossOptions()
        self._replaced = vars(model).get("forward")

        @functools.wraps(type(model).forward)  # Trainer and generate read the signature
        def forward(model, *args, **kwargs):  # the one called: a deep copy of the model is another
            return self._forward(model, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def undo(self) -> None:
        """Give the model back the forward that it had."""
        if self._replaced is None:
            vars(self.model).pop("forward", None)
        else:
            self.model.forward = self._replaced

    def _forward(
        self, model: Any, *args, labels: Tensor | None = None, shift_labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None, teacher_logits: Logits | None = None,
        fused_lm_head: bool = False, **kwargs,
    ):  # fmt: skip
        if labels is None and shift_labels is None:
            return type(model).forward(model, *args, **kwargs)
        targets = Targets.of(labels, shift_labels, num_items_in_batch)
        loss = _LossFunction(targets, self.options, teacher_logits)
        model.loss_function = loss
        try:
            with deferred_logits(model) as obstacle:
                if obstacle is not None:
                    _warn_once(f"{type(model).__name__} stores the logits of the whole batch: {obstacle}.")
                outputs = type(model).forward(model, *args, labels=shift_labels if labels is None else labels, **kwargs)
        finally:
            del model._loss_function
        if not fused_lm_head:
            return outputs
        if loss.result is None:
            raise ConfigError(f"{type(model).__name__} does not compute its loss through `loss_function`.")
        return _token_output(outputs, loss.result, targets)


class _LossFunction:
    """Takes the place of `model.loss_function` for one forward, and keeps the per-token values."""

    def __init__(self, targets: Targets, options: LossOptions, teacher: Logits | None):
        self._targets, self._options, self._teacher = targets, options, teacher
        self.result: CrossEntropy | LinearDivergence | None = None

    def __call__(self, logits: DeferredLogits | Tensor, *_, **__) -> Tensor:
        self.result = batch_loss(logits, self._targets, self._options, self._teacher)
        return self.result.loss.clone()  # mixtures of experts add their auxiliary loss in place


def _token_output(outputs: Any, result: CrossEntropy | LinearDivergence, targets: Targets) -> TokenLossOutput:
    per_token = targets.per_token
    output = TokenLossOutput(
        loss=outputs["loss"],
        token_loss=result.loss,
        log_probs=per_token(result.log_prob),
        entropy=per_token(result.entropy),
        is_top1=per_token(result.is_top1),
        label_mask=per_token(targets.labels != -100),
        aux_loss=outputs.get("aux_loss"),
    )
    if isinstance(result, LinearDivergence):
        output.divergence = per_token(result.divergence)
        output.forward_kl, output.reverse_kl = per_token(result.forward_kl), per_token(result.reverse_kl)
        output.agrees = per_token(result.agrees)
        output.teacher_log_probs = per_token(result.teacher_log_prob)
        output.teacher_entropy = per_token(result.teacher_entropy)
    return output


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, MaterializedLogitsWarning, stacklevel=4)
