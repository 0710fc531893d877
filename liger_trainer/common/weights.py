"""Load models and adapters only from files that have all of their weights, and no others.

transformers and PEFT draw missing weights at random, leave unexpected ones out, and only warn. Here that is an error
which names the tensors.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from ..errors import ConfigError

ALLOW_MISSING_WEIGHTS = (
    "Load models from files that lack weights, or have others: those missing or of another shape are drawn at random."
)
SHOWN = 5  # names of each kind in a message
# causal masks: GPT-2, GPT-Neo and GPT-J once saved them beside their weights
MASKS = re.compile(r"\.(attn|attention)\.(masked_)?bias$")


class DamagedWeightsError(ConfigError):
    """A file of weights is cut off or damaged."""


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model that writes text: AutoModelForCausalLM, or that for images.

    Some families have a causal LM of their text alone beside the model that reads images; the files say which it is.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.model_type
    causal, seeing = (
        names.get(kind) for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )
    wanted = (config.architectures or [causal or seeing])[0]
    return AutoModelForImageTextToText if wanted == seeing and wanted != causal else AutoModelForCausalLM


def load_whole(
    load: Callable[..., Any], name: Any, *args: Any, allow_missing_weights: bool = False, **options: Any
) -> Any:
    """Return the model `load(name, *args, **options)`, checked to have each of its weights from the files.

    A tied weight is not missing where the files have its partner. What the model's class allows to be missing, or to be
    left out, is allowed here too.

    Args:
        load: a `from_pretrained` of transformers, or a function that passes its keywords on, such as TRL's
            `create_model_from_path`.
        allow_missing_weights: take the files as they are. Weights that are missing or of another shape are drawn at
            random, and unexpected tensors are left out.
        **options: for `load`. `ignore_mismatched_sizes` allows other shapes alone.

    Returns:
        The model; with `output_loading_info=True` the model and transformers' record of what was loaded.

    Raises:
        ConfigError: the files lack weights of the model, have some of another shape, or have others; or one is damaged.
    """
    any_shape, with_info = options.pop("ignore_mismatched_sizes", False), options.pop("output_loading_info", False)
    try:
        model, info = load(name, *args, **options, output_loading_info=True, ignore_mismatched_sizes=True)
    except (SafetensorError, EOFError, UnpicklingError) as error:
        raise DamagedWeightsError(_cut_off(name, error)) from error
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):  # of a .bin file
            raise DamagedWeightsError(_cut_off(name, error)) from error
        if "automatic conversion of the weights" not in str(error):
            raise
        raise ConfigError(
            f"{name}: some weights of the model cannot be made of the tensors in its files: some are missing or of "
            "another shape, such as those of one expert. transformers' report above says which. Get the files anew."
        ) from error
    wrong = "; ".join(_differences(info, any_shape))
    if wrong and not allow_missing_weights:
        raise ConfigError(
            f"{name}: its files do not have the weights of a {type(model).__name__}: {wrong}. Get the files anew, or "
            "mend the config.json beside them. Set allow_missing_weights to true if that is meant: what is missing or "
            "of another shape is then drawn at random, what is not of the model left out."
        )
    return (model, info) if with_info else model


def _cut_off(name: Any, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{name}: a file of its weights is cut off or damaged ({reason}). Get the files anew."


def _differences(info: Mapping[str, Any], any_shape: bool) -> Iterator[str]:
    reshaped = [
        f"{key} ({tuple(there)} in the files, {tuple(here)} in the model)"
        for key, there, here in info["mismatched_keys"]
        if not any_shape
    ]
    strange = [key for key in info["unexpected_keys"] if not MASKS.search(key)]
    kinds = {"missing": info["missing_keys"], "of another shape": reshaped, "not of the model": strange}
    return (f"{kind}: {named(names)}" for kind, names in kinds.items() if names)


def named(names: Iterable[str]) -> str:
    """Return the first names in order, and how many there are."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN else "")
