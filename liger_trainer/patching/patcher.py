"""`patch(model)`: our kernels and the fused loss in one model object.

What each part replaces is recognised by structure, in a file of its own, and proved on a miniature before anything is
swapped. Nothing but the given object is touched; `undo()` gives it back as it was.
"""

import copy
import dataclasses
import inspect
import pickle
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..common.replacements import Replacements
from ..errors import ConfigError
from ..losses.cross_entropy import stored_logits_loss
from ..losses.fused_forward import FusedLoss, check_loss, has_trl_head
from ..losses.model_parts import output_module
from ..losses.spec import LossOptions
from .attention import patch_attention
from .lora import patch_lora
from .mlps import patch_mlps
from .norms import patch_norms

_MARK = "_liger_patched"
_NO_LOSS_FUNCTION = (
    "the model's forward does not call `loss_function`: it computes the loss itself, from stored logits, or none"
)
# Each is given (model, options, replacements, report), recognises its kind of layer by structure and swaps it. Those
# that compute several layers at once come before those that take the layers one by one.
PARTS: tuple[Callable[..., None], ...] = (patch_attention, patch_norms, patch_mlps, patch_lora)


@dataclass(frozen=True)
class PatchOptions:
    """What to replace. The names are those of transformers' `liger_kernel_config`.

    Attributes:
        rope: rotary embedding, together with the norms of queries and keys where the model has them.
        rms_norm: RMSNorm layers.
        layer_norm: LayerNorm layers.
        swiglu: MLPs and experts gated by SiLU.
        geglu: MLPs and experts gated by GELU.
        relu2: MLPs with squared ReLU.
        lora: linear layers and MLPs with plain LoRA adapters.
        fused_linear_cross_entropy: the loss from hidden states, without stored logits.
        cross_entropy: the loss's kernel on stored logits, for code that wants both. Not with the fused one.
    """

    rope: bool = True
    rms_norm: bool = True
    layer_norm: bool = True
    swiglu: bool = True
    geglu: bool = True
    relu2: bool = True
    lora: bool = True
    fused_linear_cross_entropy: bool = True
    cross_entropy: bool = False

    def __post_init__(self) -> None:
        for option, value in vars(self).items():
            if not isinstance(value, bool):
                raise ConfigError(f"The option {option} of a patch must be true or false, got {value!r}.")
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ConfigError(
                "cross_entropy works on stored logits, and fused_linear_cross_entropy stores none: choose one. "
                "Pass fused_linear_cross_entropy=False to have cross_entropy."
            )

    @classmethod
    def of(cls, flags: Mapping[str, bool] | None) -> "PatchOptions":
        """From `liger_kernel_config`. cross_entropy=True alone turns the fused loss off.

        Raises:
            ConfigError: a name that is no option.
        """
        flags = dict(flags or {})
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(flags) - set(known))
        if unknown:
            raise ConfigError(f"Unknown patch options: {', '.join(unknown)}. There are {', '.join(known)}.")
        if flags.get("cross_entropy"):
            flags.setdefault("fused_linear_cross_entropy", False)
        return cls(**flags)


@dataclass
class PatchReport:
    """What was swapped in a model, and what was left alone although it looked as if it could have been."""

    model: str
    swapped: Counter[str] = field(default_factory=Counter)  # "RMSNorm": 57
    left_alone: dict[str, str] = field(default_factory=dict)  # class or function: why

    def swap(self, kind: str, count: int = 1) -> None:
        self.swapped[kind] += count

    def leave(self, name: str, why: str) -> None:
        self.left_alone.setdefault(name, why)

    def __str__(self) -> str:
        """`qwen3: QK norm + rope 28, RMSNorm 57, SwiGLU 28, fused loss. Left alone: none.`"""
        swapped = ", ".join(kind if count == 1 else f"{kind} {count}" for kind, count in self.swapped.items())
        left = "; ".join(f"{name} ({why})" for name, why in self.left_alone.items())
        return f"{self.model}: {swapped or 'nothing'}. Left alone: {left or 'none'}."


class NothingToPatch(ConfigError):
    """A model in which nothing is found to replace. Its `report` says what was left alone."""

    def __init__(self, report: PatchReport, options: PatchOptions):
        super().__init__(_nothing(report, options))
        self.report = report


class Patched:
    """A patched model's record: what was replaced, and the way back. As a context manager it undoes on leaving.

    Attributes:
        model: what was patched.
        options: what was asked for.
        report: what was done.
        fused: the fused loss, or None where it was not asked for or the model's loss is another.
    """

    def __init__(self, model: Any, options: PatchOptions, loss: LossOptions | None = None):
        self.options, self.report = options, PatchReport(_name(model))
        self.fused: FusedLoss | None = None
        self.model, self._replacements = model, Replacements()
        try:
            for part in PARTS:
                part(model, options, self._replacements, self.report)
            self._patch_loss(loss)
        except BaseException:
            self.undo()
            raise
        if not self.report.swapped:
            self.undo()
            raise NothingToPatch(self.report, options)
        self._replacements.set(model, "_replicate_for_data_parallel", _refuse_data_parallel)
        for name, guard in _GUARDS.items():
            self._replacements.set(model, name, types.MethodType(guard, model))
        setattr(model, _MARK, self)

    def _patch_loss(self, loss: LossOptions | None) -> None:
        wanted = self.options.cross_entropy or self.options.fused_linear_cross_entropy
        if wanted and loss is None and not _calls_loss_function(self.model):
            self.report.leave("loss", _NO_LOSS_FUNCTION)
            return
        try:
            if self.options.cross_entropy:
                check_loss(self.model)
                self._replacements.set(self.model, "_loss_function", stored_logits_loss)
                self.report.swap("cross-entropy")
            elif self.options.fused_linear_cross_entropy:
                self._fuse(loss)
        except ConfigError as error:
            self.report.leave("loss", str(error))

    def _fuse(self, loss: LossOptions | None) -> None:
        if loss is None and has_trl_head(self.model):
            raise ConfigError("a trainer of TRL computes it from the hidden states already")
        if loss is None and output_module(self.model) is None:
            raise ConfigError("the model has no output embeddings, so its logits are stored")
        self.fused = FusedLoss(self.model, loss)
        self.report.swap("fused loss")

    def fuse(self, loss: LossOptions) -> FusedLoss:
        """The fused loss with a trainer's options, on top of whatever has wrapped the model's forward since.

        Raises:
            ConfigError: the model's loss is another than the causal-LM cross-entropy.
        """
        if self.fused is not None:
            self.fused.undo()
            self.fused = None
            del self.report.swapped["fused loss"]
        self._fuse(loss)
        assert self.fused is not None
        return self.fused

    def undo(self) -> None:
        """Give the model back as it was, object for object. Doing it twice does nothing."""
        if self.fused is not None:
            self.fused.undo()
            self.fused = None
        self._replacements.undo()
        vars(self.model).pop(_MARK, None)

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch(model: Any, options: PatchOptions | Mapping[str, bool] | None = None, **flags: bool) -> Patched:
    """Replace layers and loss of one model object by our kernels.

    Args:
        model: a transformers model, or a PEFT model around one. It may be on the meta device, spread by `device_map`,
            and wrapped by PEFT before or after.
        options: what to replace; everything by default. `flags` are the same options by keyword.

    Returns:
        The record. A model that is already patched with these options gives its record again.

    Raises:
        ConfigError: what is no model, or one that torch.compile or DDP has wrapped; an unknown option; options that
            exclude each other; a model patched with other options; a model in which nothing is found to replace.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"patch takes a model that is loaded, got {model!r:.80}. "
            "AutoLigerKernelForCausalLM.from_pretrained loads one and patches it."
        )
    if "_orig_mod" in model._modules or isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"patch takes the model itself, not the {type(model).__name__} around it, which hides its loss: "
            "patch first, then compile or wrap."
        )
    if not isinstance(options, PatchOptions):
        options = PatchOptions.of({**(options or {}), **flags})
    elif flags:
        raise ConfigError("Give options or keywords, not both.")
    base, done = base_of(model), patched_record(model)
    if done is None:
        return Patched(base, options)
    if done.options != options:
        raise ConfigError(
            f"This {type(base).__name__} is patched with {done.options}. Undo that before: patched.undo()."
        )
    return done


def patched_record(model: Any) -> Patched | None:
    """The record of a model that is patched, None for another. PEFT models are those that they wrap."""
    return vars(base_of(model)).get(_MARK)


def base_of(model: Any) -> Any:
    """The model that a PEFT model wraps; another is its own base."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refuse_data_parallel() -> None:
    """In place of `_replicate_for_data_parallel`: the replicas would run forwards that are bound to the original."""
    raise ConfigError(
        "A patched model does not run under nn.DataParallel, which Trainer uses when one process sees several GPUs. "
        "Launch with `torchrun` or `accelerate launch`, or show the process one GPU with CUDA_VISIBLE_DEVICES."
    )


def _refuse_to_pickle(model: Any, protocol: Any = None) -> None:
    """In place of `__reduce_ex__`, which pickle asks of the object before any of its weights."""
    raise pickle.PicklingError(
        f"A patched {type(model).__name__} cannot be pickled, as torch.save(model), copy.copy(model) and spawned "
        "processes do: its forwards are functions made in this process. Save it with model.save_pretrained(...) or "
        "torch.save(model.state_dict(), ...), or undo the patch first: patched.undo(). copy.deepcopy(model) works."
    )


def _deep_copy(model: Any, memo: dict[int, Any]) -> Any:
    """In place of `__deepcopy__`: what it would be, which asks for `__reduce_ex__` too. The copy is guarded as well."""
    for name in _GUARDS:
        delattr(model, name)
    try:
        clone = copy.deepcopy(model, memo)
    finally:
        _guard(model)
    _guard(clone)
    return clone


def _guard(model: Any) -> None:
    for name, guard in _GUARDS.items():
        setattr(model, name, types.MethodType(guard, model))


_GUARDS = {"__reduce_ex__": _refuse_to_pickle, "__deepcopy__": _deep_copy}


def _name(model: Any) -> str:
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__


def _calls_loss_function(model: Any) -> bool:
    """Whether the forward of the model's class, or one that it extends, uses `self.loss_function`."""
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in type(model).__mro__ if "forward" in vars(base))
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def _nothing(report: PatchReport, options: PatchOptions) -> str:
    wanted = ", ".join(name for name, value in vars(options).items() if value)
    left = "; ".join(f"{name}: {why}" for name, why in report.left_alone.items())
    return (
        f"Nothing was found to patch in {report.model} for {wanted or 'no option'}. "
        + (f"Left alone: {left}. " if left else "")
        + (f"`liger-trainer doctor {report.model}` says more; " if report.model in CONFIG_MAPPING else "")
        + "the options are "
        + f"{', '.join(f.name for f in dataclasses.fields(options))}."
    )
