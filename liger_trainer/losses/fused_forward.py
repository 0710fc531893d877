"""A causal LM that computes its loss without storing logits.

`FusedLoss(model)` wraps the forward of one model object. Called with labels, that model runs its own forward with
deferred logits and with the fused loss in place of its loss function; called without, nothing changes. `undo()` takes
it off again.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from ..common.replacements import own_attribute, replaced, replaced_in_this_thread, without_replacement
from ..compat.models import LOSS_FUNCTION
from ..compat.recognitions import calls_loss_function, forward_below_trl_head, has_transformers_forward
from ..compat.torch_internals import is_transformed
from ..errors import ConfigError, MaterializedLogitsWarning
from .answers import as_teacher_answer, cross_entropy_loss
from .deferred_logits import DeferredLogits, settled
from .deferring_head import Checkpoints, LazyLogits, deferred_logits
from .model_parts import gather_head_for_pass, output_module, sharded_head
from .spec import (
    IGNORE_INDEX,
    BatchLoss,
    BatchTargets,
    Logits,
    LossOptions,
    TeacherAnswer,
    TokenLossOutput,
    TokenWeights,
    check_lengths,
    token_output,
)

_NUMBERS = itertools.count()  # of the losses that were made in this process


class FusedLoss:
    """The fused loss of one model. See the top of this file.

    A wrapper that the model's forward already has, such as accelerate's autocast, is kept and called. Only TRL's fused
    head is passed over, since this forward answers its protocol.

    Args:
        model: a transformers causal LM; the base model of a PEFT model.
        options: smoothing, distillation.

    Raises:
        ConfigError: the model's loss is not the causal-LM cross-entropy, so replacing it would change the objective;
            or it computes its loss in another way.
    """

    def __init__(self, model: Any, options: LossOptions | None = None):
        check_loss(model)
        if has_transformers_forward(type(model)) and not calls_loss_function(type(model)):
            raise _calls_no_loss(type(model).__name__)
        self.model = model
        self.options = options or LossOptions()
        self.eval_options: LossOptions | None = None  # for evaluations, where they differ
        self._active = True
        self._keywords = _keywords(type(model).forward)
        self._replaced = vars(model).get("forward")
        self._inner = _without_trl_head(self._replaced)

        # A function bound to the model, and not a method of this object: accelerate rewraps `forward.__func__`, dynamo
        # traces only functions, and a deep copy of the model calls this function with itself. What computes the loss is
        # an attribute of the model, so that the copy has its own.
        self._place = place = f"_liger_trainer_loss_{next(_NUMBERS)}"

        @functools.wraps(type(model).forward)  # Trainer and generate read the signature
        def forward(model, *args, **kwargs):
            own = getattr(model, place, self)
            if is_transformed():
                raise ConfigError(
                    f"{type(model).__name__} is patched, and torch.func's transforms (grad, vmap, jvp) go through no "
                    "kernel. Use torch.autograd, or undo the patch before: patched.undo()."
                )
            if not own._active:
                return own.forward_without_loss(model)(*args, **kwargs)
            return own.forward(model, *args, **kwargs)

        self._function = forward
        model.forward = types.MethodType(forward, model)
        setattr(model, place, self)
        gather_head_for_pass(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedLoss":
        """Return the loss of a copied model. It has the same options, and asks the same teacher, if any."""
        memo[id(self)] = clone = copy.copy(self)
        for name in ("model", "_replaced", "_inner"):
            setattr(clone, name, copy.deepcopy(getattr(self, name), memo))
        return clone

    def undo(self) -> None:
        """Give the model its forward back. Where ours has been wrapped since, it stays and only passes calls on."""
        self._active = False
        current = vars(self.model).get("forward")
        if getattr(current, "__func__", None) is not self._function:
            return
        delattr(self.model, self._place)
        if self._replaced is None:
            del self.model.forward
        else:
            self.model.forward = self._replaced

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Within the context calls are only passed on, so that another fused loss can stand above this one."""
        return replaced(self, _active=False)

    def without_cross_entropy(self) -> contextlib.AbstractContextManager[None]:
        """Within the context the loss is what the teacher says of the labels, and they are not learned themselves."""
        changed = {
            name: options and replace(options, distillation=replace(options.for_teacher(), ce_weight=0.0))
            for name, options in (("options", self.options), ("eval_options", self.eval_options))
        }
        return replaced(self, **changed)

    def forward_without_loss(self, model: Any) -> Callable:
        """Return what `model` runs without this loss: its class's forward, or what has replaced that."""
        if self._inner is None:
            return functools.partial(type(model).forward, model)
        if isinstance(self._inner, types.MethodType):
            return functools.partial(self._inner.__func__, model)
        return self._inner

    def forward(
        self, model: Any, *args, labels: Tensor | None = None, shift_labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None, num_processes: int = 1,
        teacher_logits: Logits | TeacherAnswer | None = None, hidden_pass: Any = None,
        mtp_pass: Any = None, token_weights: TokenWeights | None = None, fused_lm_head: bool = False,
        skip_logits: bool | None = None, **kwargs,
    ):  # fmt: skip
        """Run `model` with this loss in place of the model's. A subclass may add to what it takes."""
        # the callable, so that this call adds no frame between model and loss
        forward_without_loss = self.forward_without_loss(model)
        if labels is None and shift_labels is None:  # whoever computes a loss outside needs the logits
            return forward_without_loss(*args, **kwargs)
        if num_items_in_batch is not None and num_processes > 1:
            # not divided by the trainer: FSDP2 casts arguments to bf16, which would round a fraction
            num_items_in_batch = num_items_in_batch / num_processes
        targets = BatchTargets.of(labels, shift_labels, num_items_in_batch, weights=token_weights)
        if (head := sharded_head(output_module(model))) is not None:
            head.start_counting_rows(targets.rows)
        options = self.options if model.training or self.eval_options is None else self.eval_options
        loss = LossOfOneForward(type(model).__name__, targets, options, teacher_logits, hidden_pass, mtp_pass)
        kwargs.update(self._loss_arguments(labels, shift_labels, num_items_in_batch))
        recording = contextlib.nullcontext() if hidden_pass is None else hidden_pass.recording()
        noting = contextlib.nullcontext() if mtp_pass is None else mtp_pass.recording(targets, teacher_logits)
        with _as_loss_function(model, loss), recording, noting, deferred_logits(model) as deferred:
            outputs = forward_without_loss(*args, **kwargs)
        if deferred.why_not_deferred is not None:
            _report_stored_logits(type(model).__name__, deferred.why_not_deferred)
        self.after_pass(model, outputs, loss)
        return loss.token_output(outputs) if fused_lm_head else _with_readable_logits(outputs, bool(skip_logits))

    def _loss_arguments(self, labels: Tensor | None, shift_labels: Tensor | None, num_items: Any) -> dict[str, Any]:
        """Return what the model's own forward gets of them: it may make targets, or a second loss, itself."""
        arguments = {"labels": labels}
        if shift_labels is not None and (labels is None or not self._takes("shift_labels")):
            arguments["labels"] = shift_labels
        others = {"shift_labels": shift_labels}
        if getattr(self.model, "accepts_loss_kwargs", True):  # Trainer's rule, too
            others["num_items_in_batch"] = num_items
        return arguments | {k: value for k, value in others.items() if value is not None and self._takes(k)}

    def _takes(self, name: str) -> bool:
        return self._keywords is None or name in self._keywords

    def after_pass(self, model: Any, outputs: Any, loss: "LossOfOneForward") -> None:
        """Do nothing. A subclass may read the per-token values of every pass by `loss.token_output(outputs)`."""


@contextlib.contextmanager
def _as_loss_function(model: Any, loss: "LossOfOneForward") -> Iterator[None]:
    """Within the context, `loss` is the model's loss function."""
    if own_attribute(model, LOSS_FUNCTION) is not None:  # perhaps since the fused loss was put on the model
        check_loss(model)
    with replaced_in_this_thread(model, LOSS_FUNCTION, loss, ForCausalLMLoss):
        yield


class LossCall(NamedTuple):
    """One call of the loss function within a forward."""

    result: BatchLoss
    targets: BatchTargets
    value: Tensor  # what the model got


class LossOfOneForward:
    """Takes the place of `model.loss_function` for one forward, and keeps what each call computed.

    The targets are those that the model hands over, as transformers' `ForCausalLMLoss` takes them. Mostly these are the
    caller's labels, whose targets were made before the backbone ran. The rows of others are counted when they come,
    which waits for the device.

    Args:
        model_name: for messages.
        targets: those of the caller's labels.
    """

    def __init__(
        self, model_name: str, targets: BatchTargets, options: LossOptions, teacher: Logits | TeacherAnswer | None,
        hidden: Any = None, mtp: Any = None,
    ):  # fmt: skip
        self._model_name, self._targets, self._options = model_name, targets, options
        self._hidden, self._mtp = hidden, mtp
        self._answer = None if teacher is None else as_teacher_answer(teacher).for_targets(targets)
        self._calls: list[LossCall] = []
        self._checkpoints, self._is_checkpointed = Checkpoints(), False

    def __call__(
        self, logits: Logits, labels: Tensor | None = None, vocab_size: int | None = None,
        num_items_in_batch: float | Tensor | None = None, ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None, **others,
    ) -> Tensor:  # fmt: skip
        if self._checkpoints.began():
            self._check_plain(num_items_in_batch)
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)  # pyright: ignore[reportArgumentType]
        logits, targets = settled(logits), self._targets
        num_items = targets.num_items if num_items_in_batch is None else num_items_in_batch
        if ignore_index != IGNORE_INDEX or not targets.match_labels(labels, shift_labels):
            targets = self._matching_targets(BatchTargets.of(labels, shift_labels, num_items, ignore_index), logits)
        targets = targets.to(logits.device).divided_by(num_items)
        check_lengths(targets, logits, *([] if self._answer is None else [self._answer]))
        if self._answer is None:
            result = cross_entropy_loss(logits, targets, self._options)
        else:
            result = self._answer.loss(logits, targets, self._options)
        if self._hidden is not None and self._answer is not None:
            how = self._options.for_teacher()
            result = self._hidden.added_to(result, targets, how, self._answer.teacher_positions)
        if self._mtp is not None:
            result = self._mtp.added_to(result, logits, self._options)
        value = result.loss.clone()  # mixtures of experts add their auxiliary loss in place
        self._calls.append(LossCall(result, targets, value))
        return value

    def _check_plain(self, num_items: Any) -> None:
        """Raise ConfigError unless the loss is the one that the backward of a checkpoint will find in its place."""
        self._is_checkpointed = True
        asked = any(x is not None for x in (self._answer, self._hidden, self._mtp, self._targets.weights))
        undivided = num_items is None and self._targets.num_items is not None
        if asked or undivided or replace(self._options, distillation=None) != LossOptions():
            raise ConfigError(
                f"{self._model_name} computes its loss inside of a checkpoint, which computes it again in the backward "
                "as the plain cross-entropy. A teacher, another head, weights, label smoothing, DFT or a divisor that "
                "the model does not hand on cannot be part of it: take the checkpoint off the loss."
            )

    def _matching_targets(self, made: BatchTargets, logits: Logits) -> BatchTargets:
        """Return targets that the model made, if they can be compared with the teacher's answer.

        An answer is about the tokens of the caller's labels, unless it covers all tokens. So are weights.
        """
        answer, callers = self._answer, self._targets
        if answer is None and callers.weights is None:
            return made
        if made.shape == callers.shape and torch.equal(made.labels, callers.labels.to(made.labels.device)):
            return callers
        if callers.weights is not None:
            raise ConfigError(
                f"{self._model_name} makes its own targets, {tuple(made.shape)}, of labels {tuple(callers.shape)}: "
                "the weights of their tokens cannot be aligned with them. Leave weight_column out."
            )
        assert answer is not None
        if answer.covers_all_tokens and answer.shape[:-1] == logits.shape[:-1] == made.shape:
            return made
        raise ConfigError(
            f"{self._model_name} does not learn the labels that it is given one position on, as a causal LM does: it "
            f"makes targets {tuple(made.shape)} of labels {tuple(callers.shape)}. What this teacher knows of the "
            "labels cannot be aligned with them. Train this model on only its labels."
        )

    def token_output(self, outputs: Any) -> TokenLossOutput:
        """Return the per-token values of the pass that returned `outputs`.

        Raises:
            ConfigError: the model did not call its loss function, or its loss has other parts than this one.
        """
        if self._is_checkpointed:
            raise ConfigError(
                f"{self._model_name} computes its loss inside of a checkpoint, so there are no values for each token. "
                "Take the checkpoint off the loss, or train with transformers' Trainer."
            )
        if not self._calls:
            raise _calls_no_loss(self._model_name)
        call, outputs = self._calls[-1], _by_name(outputs)
        if len(self._calls) > 1 or _has_extra_loss(outputs, call.value):
            raise ConfigError(
                f"The loss of {self._model_name} has other parts than its labels' tokens', so per-token values "
                "do not make it up. Train it with transformers' Trainer, which takes the model's loss as it is."
            )
        return token_output(outputs, call.result, call.targets, self._options)


def _calls_no_loss(model_name: str) -> ConfigError:
    return ConfigError(
        f"{model_name} does not compute its loss through `loss_function`, in whose place the fused loss is. Train it "
        "with TRL's or transformers' own trainer."
    )


def _by_name(outputs: Any) -> Mapping[str, Any]:
    """Return loss and auxiliary loss by name of whatever a model has returned; the first of a tuple is its loss."""
    if isinstance(outputs, dict):
        return outputs
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        return {"loss": outputs[0]}
    return {name: getattr(outputs, name, None) for name in ("loss", "aux_loss")}


def _has_extra_loss(outputs: Any, tokens_loss: Tensor) -> bool:
    """Whether the model's loss is more than its tokens' and the auxiliary one that it names."""
    loss = outputs["loss"]
    if outputs.get("aux_loss") is not None or loss is tokens_loss:
        return False
    # 1e-2: a model may have cast its loss to bf16, which rounds by up to 0.4 %. To compare waits for the device, so it
    # is done only where the model does not return the very tensor that it was given.
    return not torch.allclose(loss.detach().float(), tokens_loss.detach().float().to(loss.device), rtol=1e-2)


def _keywords(forward: Callable) -> set[str] | None:
    """Return the names of a forward's parameters, None if it takes any keyword."""
    parameters = inspect.signature(forward).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(parameters)


def has_trl_head(model: Any) -> bool:
    """Whether a trainer of TRL has put its own fused head on the model."""
    return forward_below_trl_head(vars(model).get("forward")) is not None


def _without_trl_head(forward: Any) -> Callable | None:
    """Return a replaced forward without TRL's fused head; None for the class's own forward."""
    original = forward_below_trl_head(forward)
    if original is None:
        return forward
    class_forward = getattr(type(getattr(original, "__self__", None)), "forward", None)
    return None if getattr(original, "__func__", original) is class_forward else original


def check_loss(model: Any) -> None:
    """Raise ConfigError where replacing the model's loss would change the objective."""
    function = without_replacement(model.loss_function)
    if function is not ForCausalLMLoss:
        name = getattr(function, "__name__", "unnamed")
        raise ConfigError(
            f"{type(model).__name__} has its own loss ({name}); the fused losses replace the causal-LM "
            "cross-entropy only."
        )


def _with_readable_logits(outputs: Any, skip: bool) -> Any:
    """Make logits a tensor where that costs little: see `_readable`.

    Args:
        skip: nobody is expected to read them. With gradients they are dropped, without they are computed if need be.
    """
    drop = skip and torch.is_grad_enabled()
    if hasattr(outputs, "_fields"):  # a named tuple keeps all of its fields
        return type(outputs)(*(_readable(x, skip) for x in outputs))
    if isinstance(outputs, tuple):
        return tuple(_readable(x, skip) for x in outputs if not (drop and isinstance(x, DeferredLogits)))
    if not isinstance(outputs, dict):  # an object of the model's own, whose logits compute themselves
        return outputs
    if drop:
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
    if isinstance(outputs.get("logits"), DeferredLogits):
        outputs["logits"] = _readable(outputs["logits"], skip)
    return outputs


def _readable(value: Any, skip: bool) -> Any:
    """Return logits that are real already, or are few and without gradient, as that tensor; others without gradient as
    one that fills itself, which loops can gather."""
    if not isinstance(value, DeferredLogits) or (torch.is_grad_enabled() and not value.stored):
        return value
    if value.stored or (not skip and value.is_cheap):
        value.become_real()
        return value.compute()
    return LazyLogits.of(value)


@torch.compiler.assume_constant_result  # warns when a graph is traced, and no part of it
def _report_stored_logits(model_name: str, why: str) -> None:
    _warn_once(f"{model_name} stores the logits of the whole batch: {why}.")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, MaterializedLogitsWarning, stacklevel=5)
