"""`apply_liger_kernel_to_<family>()` for every causal LM of transformers, with the names and flags of Liger-Kernel.

The functions are made on import, one for each model type that transformers maps to a causal LM, or else to a model that
reads images and writes text: import
`apply_liger_kernel_to_llama` from here or from `liger_trainer`. With `model` they patch that object. Without, they
patch the models of the family that are constructed from then on, in whatever way: the constructor of the model's class
is wrapped until `undo()`, and no layer's class is touched. To learn which options a family has layers for, its skeleton
is patched: a few layers of the default configuration, on the meta device.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ...common.console import announce
from ...common.replacements import Replacements
from ...common.weights import load_whole
from ...errors import ConfigError
from ...patching.options import ALIASES, PatchOptions, PatchReport, canonical
from ...patching.patcher import Patched, base_of, patch, patched_record

PREFIX = "apply_liger_kernel_to_"
_CLASSES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
# by the suffix of the function, "gpt_sw3": "gpt-sw3"
FAMILIES = {model_type.replace("-", "_"): model_type for model_type in _CLASSES}
# The kinds in a report, one of which shows that an option has had an effect.
KINDS = {
    "rope": ("rope", "QK norm + rope"),
    "rms_norm": ("RMSNorm", "gated RMSNorm", "QK norm + rope"),
    "layer_norm": ("LayerNorm",),
    "swiglu": ("SwiGLU", "SwiGLU experts"),
    "geglu": ("GEGLU", "GEGLU experts"),
    "relu2": ("ReLU2", "ReLU2 experts"),
    "gelu": ("GELU MLP",),
    "linear": ("shared input",),
    "lora": ("LoRA linear", "LoRA MLP", "LoRA experts", "frozen experts"),
    "towers": ("tower attention", "patch embedding", "placeholders"),
    "hybrids": ("causal conv", "delta rule", "Mamba-2 scan"),
    "fused_linear_cross_entropy": ("fused loss",),
    "cross_entropy": ("cross-entropy", "fused loss"),  # a model with either loss can have the other
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SKELETON_LAYERS = 4

_wrapped: dict[type, "FamilyPatch"] = {}  # by the class whose constructor is wrapped


class FamilyPatch:
    """Patches the models of a family when they are constructed, until `undo()`; as a context manager, until it exits.

    Models that it has patched stay patched.

    Attributes:
        family: the model type.
        options: what is replaced.
    """

    def __init__(self, family: str, options: PatchOptions, wanted: tuple[str, ...]):
        self.family, self.options, self._wanted = family, options, wanted
        self._class, self._replacements = _model_class(family), Replacements()
        if self._class in _wrapped:  # the last call counts
            _wrapped[self._class].undo()
        self.redo()

    def redo(self) -> None:
        """Take `undo()` back: patch the models that are constructed from now on."""
        construct = self._class.__init__

        @functools.wraps(construct)
        def __init__(model, *args, **kwargs):
            construct(model, *args, **kwargs)
            if type(model) is self._class:  # a subclass's constructor has not ended yet
                announce(str(_patched_as_wanted(model, self.options, self._wanted).report))

        self._replacements.set(self._class, "__init__", __init__)
        _wrapped[self._class] = self

    def undo(self) -> None:
        """Leave the models that are constructed from now on as they are. Doing it twice does nothing."""
        if _wrapped.get(self._class) is self:
            del _wrapped[self._class]
            self._replacements.undo()

    def __enter__(self) -> "FamilyPatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply_to_family(family: str, flags: Mapping[str, bool], model: Any = None) -> FamilyPatch | Patched:
    """Do what `apply_liger_kernel_to_<family>(**flags, model=model)` promises.

    Raises:
        ConfigError: an unknown flag; a flag set to True for which the family, or the model, has nothing; a model of
            another family.
    """
    flags = canonical(flags)
    options, wanted = PatchOptions.of(flags), tuple(name for name, value in flags.items() if value)
    if model is None:
        report = skeleton_report(family) if wanted else None
        if report is not None:
            _check_wanted(report, wanted)
        return FamilyPatch(family, options, wanted)
    base = base_of(model)
    of_type = getattr(getattr(base, "config", None), "model_type", None)
    if of_type != family and not isinstance(base, _model_class(family)):
        raise ConfigError(
            f"{PREFIX}{family.replace('-', '_')} got a {type(base).__name__} ({of_type}). patch(model) takes any model."
        )
    return _patched_as_wanted(base, options, wanted)


def _apply_liger_kernel_to_instance(model: Any, **flags: bool) -> Patched:
    """Patch one model. Code for Liger-Kernel imports the function by this name."""
    return patch(model, flags)


def _apply_liger_kernel(model_type: str, **flags: bool) -> FamilyPatch:
    """Patch the models of a type that are constructed from now on, by Liger-Kernel's name of the function.

    Raises:
        ConfigError: a type that is no causal LM of transformers (Liger-Kernel logs that and does nothing), or as
            `apply_to_family`.
    """
    if model_type not in _CLASSES:
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal LM of type {model_type!r}. "
            "patch(model) takes any model."
        )
    handle = apply_to_family(model_type, flags)
    assert isinstance(handle, FamilyPatch)
    return handle


@functools.cache
def skeleton_report(family: str) -> PatchReport | None:
    """Return the report for a model of the default configuration, None if that is not enough to make a model."""
    config_class: Any = CONFIG_MAPPING[family]
    model_class = _model_class(family)
    names = {*inspect.signature(config_class.__init__).parameters, *dir(config_class), *config_class.attribute_map}
    few = {name: _SKELETON_LAYERS for name in _LAYERS if name in names}
    with _plain(model_class):
        for sizes in (few, {}):  # some check that the length of their lists is the number of layers
            try:
                with torch.device("meta"):
                    model = model_class(config_class(**sizes))
            except Exception:  # each family checks its configuration in its own way
                continue
            return patch(model).report
    return None


@contextlib.contextmanager
def _plain(model_class: type) -> Iterator[None]:
    """Within the context, leave new models of the class unpatched."""
    active = _wrapped.get(model_class)
    if active is not None:
        active.undo()
    try:
        yield
    finally:
        if active is not None:
            active.redo()


def _patched_as_wanted(model: Any, options: PatchOptions, wanted: tuple[str, ...]) -> Patched:
    """Patch the model. If it has nothing for an option that was set to True, raise ConfigError and undo that."""
    before = patched_record(model)
    patched = patch(model, options)
    try:
        _check_wanted(patched.report, wanted)
    except ConfigError:
        if before is None:
            patched.undo()
        raise
    return patched


def _check_wanted(report: PatchReport, wanted: tuple[str, ...]) -> None:
    has = [name for name, kinds in KINDS.items() if any(kind in report.swapped for kind in kinds)]
    missing = [f"{name}=True" for name in wanted if name not in has]
    if missing:
        raise ConfigError(
            f"{report.model} has nothing for {', '.join(missing)}. It has something for {', '.join(has)}. "
            + (f"Left alone: {report.reasons}. " if report.left_alone else "")
            + "Leave the flag out; if your own configuration has such layers, pass model=."
        )


def _model_class(family: str) -> Any:
    return getattr(transformers, _CLASSES[family])


@functools.cache
def _function(suffix: str) -> Callable[..., FamilyPatch | Patched]:
    family = FAMILIES[suffix]

    def apply(*, model: Any = None, **flags: bool) -> FamilyPatch | Patched:
        return apply_to_family(family, flags, model)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=value, annotation=bool) for name, value in vars(PatchOptions()).items()
    ]
    parameters.append(inspect.Parameter("model", keyword, default=None, annotation=Any))
    apply.__signature__ = inspect.Signature(parameters, return_annotation=FamilyPatch | Patched)  # type: ignore
    apply.__name__ = apply.__qualname__ = PREFIX + suffix
    apply.__doc__ = f"""Patch one {_CLASSES[family]}, or all that are constructed from now on.

    Args:
        rope, rms_norm, ...: see `PatchOptions`. A default takes what there is; one given as True must find something.
        model: the one to patch. Without it, the models constructed later are patched, until `undo()`.

    Returns:
        The model's record (`Patched`), or without a model a `FamilyPatch`. Both have `undo()`.

    Raises:
        ConfigError: an unknown flag, one for which there is nothing, or a model of another family.
    """
    return apply


# by the model type, "gpt-sw3"
MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _function(suffix) for suffix, model_type in FAMILIES.items()}


def __getattr__(name: str) -> Any:
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in FAMILIES:
        return _function(name.removeprefix(PREFIX))
    if name.startswith(PREFIX):
        raise AttributeError(
            f"transformers {transformers.__version__} has no causal LM {name.removeprefix(PREFIX)!r}. It has "
            f"{', '.join(FAMILIES)}. patch(model) takes any model."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(PREFIX + suffix for suffix in FAMILIES)})


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """AutoModelForCausalLM whose `from_pretrained` and `from_config` patch the model before they return it.

    Keywords that are options of a patch (see `PatchOptions`) say what to replace, everything by default. With
    `allow_missing_weights=True` the files may lack weights of the model, or have others. All other keywords go to
    transformers. `patch(model)` with the same options returns the model's record, with `report` and `undo()`.

    Raises:
        ConfigError: options that exclude each other, a model without anything to replace, or files that do not have
            the model's weights.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs) -> Any:
        options = _take_options(kwargs)
        loaded = load_whole(super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)
        _patch(loaded[0] if isinstance(loaded, tuple) else loaded, options)  # a tuple with output_loading_info=True
        return loaded

    @classmethod
    def from_config(cls, config, **kwargs) -> Any:
        options = _take_options(kwargs)
        model = super().from_config(config, **kwargs)
        _patch(model, options)
        return model


def _take_options(kwargs: dict[str, Any]) -> PatchOptions:
    flags = (*(field.name for field in dataclasses.fields(PatchOptions)), *ALIASES)
    return PatchOptions.of({name: kwargs.pop(name) for name in flags if name in kwargs})


def _patch(model: Any, options: PatchOptions) -> None:
    announce(str(patch(model, options).report))
