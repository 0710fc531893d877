"""AutoLigerKernelForCausalLM: transformers' AutoModelForCausalLM, patched."""

import dataclasses
from typing import Any

from transformers import AutoModelForCausalLM

from ..common.console import announce
from ..common.weights import load_whole
from .options import ALIASES, PatchOptions
from .patcher import patch

FLAGS = (*(field.name for field in dataclasses.fields(PatchOptions)), *ALIASES)


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
    return PatchOptions.of({name: kwargs.pop(name) for name in FLAGS if name in kwargs})


def _patch(model: Any, options: PatchOptions) -> None:
    announce(str(patch(model, options).report))
