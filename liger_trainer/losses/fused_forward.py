"""A causal LM that computes its loss without storing logits.

`FusedLoss(model)` wraps the forward of one model object. Called with labels, that model runs its own forward with
deferred logits and with the fused loss in place of its loss function; called without, nothing changes. `undo()` takes
it off again.
"""

# ModelOutput wants a default for every field:
# pyright: reportAssignmentType=false
import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from ..errors import ConfigError, MaterializedLogitsWarning
from ..kernels.cross_entropy import CrossEntropy, cross_entropy
from ..kernels.linear_divergence import LinearDivergence
from .batch_loss import TeacherAnswer, batch_loss, terms_of
from .deferred_logits import DeferredLogits, deferred_logits
from .hidden_states import HiddenPass
from .lazy_logits import LazyLogits
from .multi_teacher import SeveralTargets, TeacherShares
from .sparse import SparseDistillation
from .spec import IGNORE_INDEX, MEASURED_JSD, LossOptions, Targets
from .uld import UldAnswer, UldDistillation


@dataclass
class TokenLossOutput(ModelOutput):
    """What a model with a fused loss returns when called with `fused_lm_head=True`, TRL's protocol, plus distillation.

    Per-token fields are (batch, length - 1), or (batch, length) with `shift_labels`; fp32, in nats, 0 where ignored,
    and without gradient. Those about a teacher are None without one, and where it is not known well enough.
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
    by_teacher: dict[str, Tensor] = None  # "name/forward_kl" and "name/share", of several teachers
    uncast: "Uncast" = None

    def in_fp32(self) -> "TokenLossOutput":
        """The output as it was before an engine cast it, as FSDP2 does to its `output_dtype`."""
        if self.uncast is None or self.token_loss.dtype == self.uncast.values["token_loss"].dtype:
            return self
        return TokenLossOutput(**self.uncast.values)


class Uncast:
    """The values of an output where the casts of engines, which look into mappings and dataclasses, do not reach."""

    def __init__(self, output: TokenLossOutput):
        self.values = dict(output)


Knowledge = TeacherAnswer | TeacherShares
LossResult = CrossEntropy | LinearDivergence | SparseDistillation | UldDistillation
# The field of the output, and that of the result; a sparse teacher does not determine all of them.
_OF_A_TEACHER = {
    "divergence": "divergence", "forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "agrees": "agrees",
    "teacher_log_probs": "teacher_log_prob", "teacher_entropy": "teacher_entropy",
}  # fmt: skip


class FusedLoss:
    """The fused loss of one model. See the top of this file.

    What wraps the model's forward already, such as accelerate's autocast, is kept and called; TRL's fused head alone is
    passed over, since this forward answers its protocol.

    Args:
        model: a transformers causal LM; the base model of a PEFT model.
        options: smoothing, distillation.

    Raises:
        ConfigError: the model's loss is not the causal-LM cross-entropy, so replacing it would change the objective.
    """

    def __init__(self, model: Any, options: LossOptions | None = None):
        check_loss(model)
        self.model = model
        self.options = options or LossOptions()
        self.eval_options: LossOptions | None = None  # where an evaluation is to use other ones
        self._active = True
        self._keywords = _keywords(type(model).forward)
        self._replaced = vars(model).get("forward")
        self._inner = _without_trl_head(self._replaced)

        @functools.wraps(type(model).forward)  # Trainer and generate read the signature
        def forward(model, *args, **kwargs):  # the one called: a deep copy of the model is another
            if not self._active:
                return self._own_forward(model, *args, **kwargs)
            return self._forward(model, *args, **kwargs)

        self._function = forward
        model.forward = types.MethodType(forward, model)

    def undo(self) -> None:
        """Give the model back the forward that it had. Where that has been wrapped since, ours only passes calls on."""
        self._active = False
        current = vars(self.model).get("forward")
        if getattr(current, "__func__", None) is not self._function:
            return
        if self._replaced is None:
            del self.model.forward
        else:
            self.model.forward = self._replaced

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context calls are only passed on, so that another fused loss can stand above this one."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def _own_forward(self, model: Any, *args, **kwargs) -> Any:
        if self._inner is None:
            return type(model).forward(model, *args, **kwargs)
        if isinstance(self._inner, types.MethodType):
            return self._inner.__func__(model, *args, **kwargs)
        return self._inner(*args, **kwargs)

    def _forward(
        self, model: Any, *args, labels: Tensor | None = None, shift_labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None, num_processes: int = 1,
        teacher_logits: Knowledge | None = None, hidden_pass: HiddenPass | None = None, fused_lm_head: bool = False,
        skip_logits: bool | None = None, **kwargs,
    ):  # fmt: skip
        if labels is None and shift_labels is None:  # whoever computes a loss outside needs the logits
            return self._own_forward(model, *args, **kwargs)
        set_on_model = getattr(model, "_loss_function", None)
        if set_on_model is not None:  # perhaps since this was made
            check_loss(model)
        if num_items_in_batch is not None and num_processes > 1:  # divided here: engines round what comes as a fraction
            num_items_in_batch = num_items_in_batch / num_processes
        targets = Targets.of(labels, shift_labels, num_items_in_batch)
        options = self.options if model.training or self.eval_options is None else self.eval_options
        loss = LossOfOneForward(type(model).__name__, targets, options, teacher_logits, hidden_pass)
        kwargs.update(self._of_loss(labels, shift_labels, num_items_in_batch))
        model.loss_function = loss
        try:
            recording = contextlib.nullcontext() if hidden_pass is None else hidden_pass.recording()
            with recording, deferred_logits(model) as forward:
                outputs = self._own_forward(model, *args, **kwargs)
        finally:
            del model._loss_function
            if set_on_model is not None:
                model._loss_function = set_on_model
        if forward.obstacle is not None:
            _report_stored_logits(type(model).__name__, forward.obstacle)
        self._seen(model, outputs, loss)
        if not fused_lm_head:
            return _with_readable_logits(outputs, bool(skip_logits))
        output = token_output(model, outputs, loss)
        if not torch.compiler.is_compiling():
            output.uncast = Uncast(output)
        return output

    def _of_loss(self, labels: Tensor | None, shift_labels: Tensor | None, num_items: Any) -> dict[str, Any]:
        """What the model's own forward is given of them: it may make targets, or a second loss, of its own."""
        given = {"labels": labels}
        if shift_labels is not None and (labels is None or not self._takes("shift_labels")):
            given["labels"] = shift_labels
        others = {"shift_labels": shift_labels}
        if getattr(self.model, "accepts_loss_kwargs", True):  # Trainer's rule, too
            others["num_items_in_batch"] = num_items
        return given | {name: value for name, value in others.items() if value is not None and self._takes(name)}

    def _takes(self, name: str) -> bool:
        return self._keywords is None or name in self._keywords

    def _seen(self, model: Any, outputs: Any, loss: "LossOfOneForward") -> None:
        """For a subclass that wants the per-token values of every pass: `token_output` makes them of these."""


def _keywords(forward: Callable) -> set[str] | None:
    """The names of what a forward takes, None for any."""
    parameters = inspect.signature(forward).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(parameters)


def stored_logits_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int | None = None,
    num_items_in_batch: float | Tensor | None = None, ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None, **kwargs,
) -> Tensor:  # fmt: skip
    """transformers' `ForCausalLMLoss` by the kernel of `cross_entropy`: without a copy of the logits in fp32.

    Args:
        logits: (batch, length, V).
        labels: (batch, length), shifted here. `shift_labels` are shifted already.
        num_items_in_batch: what the sum is divided by. Default: the labels in use.
        vocab_size, kwargs: what a model's forward passes on. Not used.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2), flat, num_items=num_items_in_batch, ignore_index=ignore_index).loss


def has_trl_head(model: Any) -> bool:
    """Whether a trainer of TRL has put its own fused head on the model."""
    return _trl_original(vars(model).get("forward")) is not None


def _trl_original(forward: Any) -> Any:
    """What the forward of `trl.trainer.utils.add_fused_lm_head` calls for everything else; None for another forward."""
    function = getattr(forward, "__func__", None)
    if function is None or function.__globals__.get("__name__") != "trl.trainer.utils":
        return None
    return inspect.getclosurevars(function).nonlocals["original_forward"]


def _without_trl_head(forward: Any) -> Callable | None:
    """The replaced forward below TRL's fused head; None for the class's own."""
    original = _trl_original(forward)
    if original is None:
        return forward
    of_class = getattr(type(getattr(original, "__self__", None)), "forward", None)
    return None if getattr(original, "__func__", original) is of_class else original


def check_loss(model: Any) -> None:
    """Raise ConfigError where replacing the model's loss would change the objective."""
    if model.loss_function is not ForCausalLMLoss:
        own = getattr(model.loss_function, "__name__", "unnamed")
        raise ConfigError(
            f"{type(model).__name__} has a loss of its own ({own}); the fused losses replace the causal-LM "
            "cross-entropy only."
        )


def _with_readable_logits(outputs: Any, skip: bool) -> Any:
    """Outputs without logits where nobody will read them, and without gradients as a tensor, to be gathered."""
    if isinstance(outputs, tuple):
        kept = (x for x in outputs if not (skip and isinstance(x, DeferredLogits)))
        return tuple(_readable(x) for x in kept)
    if skip:
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
    if isinstance(outputs.get("logits"), DeferredLogits):
        outputs["logits"] = _readable(outputs["logits"])
    return outputs


def _readable(value: Any) -> Any:
    lazy = isinstance(value, DeferredLogits) and not torch.is_grad_enabled()
    return LazyLogits.of(value) if lazy else value


class LossOfOneForward:
    """Takes the place of `model.loss_function` for one forward, and keeps the per-token values.

    The targets are those that the model hands over, as transformers' `ForCausalLMLoss` takes them. Mostly these are the
    caller's labels, whose targets were made before the backbone ran. Of others the rows are counted now, which waits
    for the device.

    Args:
        model_name: for messages.
        targets: of the caller's labels.
    """

    def __init__(
        self, model_name: str, targets: Targets, options: LossOptions, teacher: Knowledge | None,
        hidden: HiddenPass | None = None,
    ):  # fmt: skip
        self.targets, self.options, self._hidden = targets, options, hidden
        self._model_name, self._of_caller, self.parts = model_name, targets, 0
        self._teacher = SeveralTargets(targets, teacher) if isinstance(teacher, TeacherShares) else teacher
        self.result: LossResult | None = None
        self.value: Tensor | None = None
        self.by_teacher: Mapping[str, Tensor] | None = None

    def __call__(
        self, logits: DeferredLogits | Tensor, labels: Tensor | None = None, vocab_size: int | None = None,
        num_items_in_batch: float | Tensor | None = None, ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None, **_,
    ) -> Tensor:  # fmt: skip
        if isinstance(logits, DeferredLogits) and logits.stored:
            logits = logits.compute()
        targets = self._of_caller
        if ignore_index != IGNORE_INDEX or not targets.made_of(labels, shift_labels):
            items = num_items_in_batch if targets.num_items is None else targets.num_items
            targets = self._beside_teacher(Targets.of(labels, shift_labels, items, ignore_index), logits)
        self.parts += 1
        self.targets = targets.to(logits.device)
        self.result = self._loss(logits)
        self.value = self.result.loss.clone()  # mixtures of experts add their auxiliary loss in place
        return self.value

    def _loss(self, logits: DeferredLogits | Tensor) -> LossResult:
        if isinstance(self._teacher, SeveralTargets):
            shared = self._teacher.loss(logits, self.options)
            result, self.by_teacher = shared.result, shared.by_teacher
        else:
            result = batch_loss(logits, self.targets, self.options, self._teacher)
        if self._hidden is not None and self.options.distillation is not None:
            partners = self._teacher.partners if isinstance(self._teacher, UldAnswer) else None
            result = self._hidden.added_to(result, self.targets, self.options.distillation, partners)
        return result

    def _beside_teacher(self, made: Targets, logits: DeferredLogits | Tensor) -> Targets:
        """Targets that the model made, where they can be held against the teacher's answer, which is about the tokens
        of the caller's labels unless it has logits for all tokens."""
        teacher, given = self._teacher, self._of_caller
        if teacher is None:
            return made
        if made.shape == given.shape and torch.equal(made.labels, given.labels.to(made.labels.device)):
            return given
        if isinstance(teacher, (DeferredLogits, Tensor)) and teacher.shape[:-1] == logits.shape[:-1] == made.shape:
            return made
        raise ConfigError(
            f"{self._model_name} does not learn the labels that it is given one position on, as a causal LM does: it "
            f"makes targets {tuple(made.shape)} of labels {tuple(given.shape)}. What this teacher knows of the labels "
            "cannot be aligned with them. Train this model on its labels alone."
        )


def token_output(model: Any, outputs: Any, loss: LossOfOneForward) -> TokenLossOutput:
    """The per-token values of one pass. Raises ConfigError where the model did not call its loss function."""
    result, targets, per_token = loss.result, loss.targets, loss.targets.per_token
    if result is None:
        raise ConfigError(f"{type(model).__name__} does not compute its loss through `loss_function`.")
    if loss.parts > 1 or _adds_to(loss, outputs):
        raise ConfigError(
            f"The loss of {type(model).__name__} has other parts than that of its labels' tokens, so per-token values "
            "do not make it up. Train it with transformers' Trainer, which takes the model's loss as it is."
        )
    output = TokenLossOutput(
        loss=outputs["loss"],
        token_loss=result.loss,
        log_probs=per_token(result.log_prob),
        entropy=per_token(result.entropy),
        is_top1=per_token(result.is_top1),
        label_mask=per_token(targets.labels != -100),
        aux_loss=outputs.get("aux_loss"),
    )
    for name, field in _OF_A_TEACHER.items():
        value = getattr(result, field, None)
        if value is not None:
            setattr(output, name, per_token(value))
    how = loss.options.distillation
    if how is not None and not isinstance(result, CrossEntropy):
        if how.terms:
            output.terms = {name: per_token(x) for name, x in terms_of(result, how).items()}
        if MEASURED_JSD in result.terms:
            output.jsd = per_token(result.terms[MEASURED_JSD])
    if loss.by_teacher is not None:
        output.by_teacher = {name: per_token(value) for name, value in loss.by_teacher.items()}
    return output


def _adds_to(loss: LossOfOneForward, outputs: Any) -> bool:
    """Whether the model's loss is more than that of its tokens and the auxiliary one that it names."""
    whole, part = outputs["loss"], loss.value
    assert part is not None
    if outputs.get("aux_loss") is not None or whole is part:
        return False
    return not torch.allclose(whole.detach().float(), part.detach().float().to(whole.device), rtol=1e-2)


@torch.compiler.assume_constant_result  # said when a graph is traced, and no part of it
def _report_stored_logits(model_name: str, obstacle: str) -> None:
    _warn_once(f"{model_name} stores the logits of the whole batch: {obstacle}.")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, MaterializedLogitsWarning, stacklevel=5)
