"""Load models and adapters only from files that have all of their weights, and no others; merge adapters.

transformers and PEFT draw missing weights at random, leave unexpected ones out, and only warn. Here that is an error
which names the tensors.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import AdaptionPromptConfig, PeftModel, PromptLearningConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME as ADAPTER
from peft.utils import load_peft_weights
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.peft_utils import find_adapter_config_file

from ..compat.deepspeed import is_partitioned, shape_of
from ..compat.modules import accelerate_hook
from ..errors import ConfigError, CorruptError

SHOWN = 5  # names of each kind in a message
# causal masks: GPT-2, GPT-Neo and GPT-J once saved them with their weights
MASKS = re.compile(r"\.(attn|attention)\.(masked_)?bias$")


class DamagedWeightsError(ConfigError):
    """A file of weights is cut off or damaged."""


def refuse_meta(argument: str, model: nn.Module) -> None:
    """Raise ConfigError for a model whose weights are nowhere: no hook of accelerate's and no FSDP brings them."""
    elsewhere = "ACCELERATE_USE_FSDP" in os.environ or any(map(accelerate_hook, model.modules()))
    empty = [] if elsewhere else [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty:
        raise ConfigError(
            f"{argument}: expected a {type(model).__name__} with weights, but {len(empty)} of them are on the meta "
            f"device, which holds none ({empty[0]}). Load them, or make the model outside of torch.device('meta')."
        )


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model that writes text: AutoModelForCausalLM, or that for images.

    Some families have a causal LM that reads only text, and a model that reads images; the files say which it is.
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
        **options: for `load`. `ignore_mismatched_sizes` allows only other shapes.

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
            "another shape, such as those of one expert. transformers' report above says which. Get the files again."
        ) from error
    wrong = "; ".join(_differences(info, any_shape))
    if wrong and not allow_missing_weights:
        raise ConfigError(
            f"{name}: its files do not have the weights of a {type(model).__name__}: {wrong}. Get the files again, or "
            "mend the config.json next to them. Set allow_missing_weights to true if that is meant: what is missing or "
            "of another shape is then drawn at random, what is not of the model left out."
        )
    return (model, info) if with_info else model


def _cut_off(name: Any, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{name}: a file of its weights is cut off or damaged ({reason}). Get the files again."


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


# Adapters of PEFT as they lie on disk: put on their base, and merged into it.
#
# `merged` is the only function here that merges. It compares logits before and after, since PEFT adds a product to a
# matrix that embedding and head share, and warns.
UNREADABLE = (SafetensorError, EOFError, UnpicklingError)
# |merged - adapter's| / |adapter's| of the logits. In half precision each merged weight is rounded once; in 4 and 8
# bits PEFT quantises the sum again.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
OF_QUANTISED = 0.4
# what a file has of an embedding or a head, and which axis is the vocabulary
WHOLE = {"weight": 0, "base_layer.weight": 0, "token_adapter.base_layer.weight": 0}
PRODUCTS = {"lora_embedding_A": 1, "lora_B.weight": 0}


@dataclass(frozen=True)
class Adapter:
    """An adapter without its base: a directory or hub id, and the base that its configuration names."""

    name: str
    base: str
    revision: str | None  # of the base
    kind: str  # PEFT's name of it, such as LORA

    def __str__(self) -> str:
        merge = f"liger-trainer merge {self.name} MERGED"
        if not Path(self.name).is_dir():
            merge = f"hf download {self.name} --local-dir ADAPTER, then liger-trainer merge ADAPTER MERGED"
        return f"{self.name} is an adapter ({ADAPTER}) of {self.base}, no whole model; merge it first: {merge}"


def adapter_at(name: Any, revision: str | None = None) -> Adapter | None:
    """Return the adapter that a directory or hub id holds, if there is no whole model in it; None where it holds none.

    Raises:
        ConfigError: its configuration does not name the base.
        CorruptError: its configuration cannot be read.
    """
    try:
        found = find_adapter_config_file(str(name), revision=revision)
    except (OSError, ValueError):  # no name that a hub could have
        return None
    folder = Path(str(name))
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    whole = (folder / "config.json").is_file() and any(not x.name.startswith("adapter_model") for x in weights)
    if found is None or whole:
        return None
    try:
        config = json.loads(Path(found).read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
    except (ValueError, AttributeError, OSError) as error:
        raise CorruptError(f"{name}: {ADAPTER} cannot be read: {error}") from None
    if not (base and isinstance(base, str)):
        raise ConfigError(f"{name} is an adapter, and its {ADAPTER} does not name its base model.")
    return Adapter(str(name), base, config.get("revision"), str(config.get("peft_type")))


def check_mergeable(kind: str) -> None:
    """Raise ConfigError for adapters that put tokens, keys or values in front of a row: no weight can hold them."""
    of = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)  # pyright: ignore[reportArgumentType] - a str, too
    if of is not None and issubclass(of, PromptLearningConfig | AdaptionPromptConfig):
        raise ConfigError(
            f"{kind} is no change of weights, so it cannot be merged into its base, nor teach. `chat` and `eval` read "
            "such adapters; train LoRA if you need a whole model."
        )


def load_merged(load: Callable[..., Any], name: str, **options: Any) -> Any:
    """Return the model of a directory or hub id as `load_whole` does; of an adapter, merged into its base.

    There is one copy of the weights at any time.

    Raises:
        ConfigError: as `load_whole`, `with_adapter` and `merged`; the base of an adapter is quantised.
    """
    adapter = adapter_at(name, options.get("revision"))
    if adapter is None:
        return load_whole(load, name, **options)
    check_mergeable(adapter.kind)
    try:
        base = load_whole(load, adapter.base, **{**options, "revision": adapter.revision or "main"})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is an adapter, and its base {adapter.base} cannot be loaded: {error}") from error
    if getattr(base, "hf_quantizer", None) is not None:
        raise ConfigError(f"{adapter}. Here it would be added to quantised weights, which would be quantised again.")
    return merged(with_adapter(base, name, options.get("revision")))


def with_adapter(model: Any, name: str | Path, revision: str | None = None) -> Any:
    """Return a PEFT model: `model` with the whole adapter that was saved in a directory, or lies on a hub.

    Where the adapter's file has embeddings of another number of tokens, those of the model are resized.

    Raises:
        ConfigError: the file lacks weights that the adapter's configuration asks for, or is of another base.
        CorruptError: the file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            _fit_vocabulary(model, str(name), revision)
            return PeftModel.from_pretrained(model, str(name), revision=revision)
    except UserWarning as error:
        missing = re.findall(r"'([^' ]+\.[^' ]+)'", str(error))
        raise ConfigError(
            f"{name} has no weights for some layers of {model.name_or_path}: it was trained on another base, or on "
            "one that dropped layers (a run that drops layers saves the merged model itself, in its output_dir), or "
            f"its file is not whole. Missing: {named(missing)}."
        ) from None
    except UNREADABLE as error:
        raise CorruptError(f"{name}: the adapter's weights cannot be read: {error}") from error
    except ConfigError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} is not an adapter of {model.name_or_path}: {_words(error)}") from error


def _fit_vocabulary(model: Any, name: str, revision: str | None) -> None:
    """Resize the embeddings to those that the adapter was trained on.

    PEFT saves resized embeddings with the adapter, and cannot load them into a base as it was before.
    """
    rows, tied = shape_of(model.get_input_embeddings().weight)[0], _tied(model)
    path_of = {module: path for path, module in model.named_modules()}
    paths = [path_of.get(module, "") for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    of_hub: dict[str, Any] = {"revision": revision} if revision else {}
    weights = load_peft_weights(name, device="cpu", **of_hub)
    whole, products = ([_rows_in(weights, path, axes) for path in paths] for axes in (WHOLE, PRODUCTS))
    wanted = next((n for n in (*whole, *products) if n is not None), rows)
    if wanted == rows:
        file = Path(find_adapter_config_file(name, revision=revision) or "")
        config = json.loads(file.read_text(encoding="utf-8"))
        listed = config.get("trainable_token_indices") or config.get("token_indices") or []
        lists = listed.values() if isinstance(listed, dict) else [listed]  # by layer, or of the embedding
        tokens = {token for each in lists for token in each}
        wanted = max([rows, *(token + 1 for token in tokens)])
        saved = tied and set(range(rows, wanted)) <= tokens
    else:
        saved = any(whole) if tied else all(whole)
    if wanted == rows:
        return
    if not saved:
        raise ConfigError(
            f"{name} was trained on a model of {wanted} tokens, {model.name_or_path} has {rows}, and the adapter's "
            "file does not have all of the embeddings that were added. Resize the base as it was for training, save "
            "it, and name it as the base (merge: --base)."
        )
    model.resize_token_embeddings(wanted, mean_resizing=False)


def _rows_in(weights: Mapping[str, Tensor], path: str, axes: Mapping[str, int]) -> int | None:
    found = (x.shape[axes[end]] for end in axes for key, x in weights.items() if key.endswith(f".{path}.{end}"))
    return next(found, None)


def merged(model: Any) -> Any:
    """Return the model that a PEFT model computes, with its active adapters added to the weights, in place.

    Where embedding and head are one matrix and the adapters change them differently, each gets its own. Nothing else is
    copied. Logits are not compared where FSDP2 or ZeRO-3 shards the weights: what they wrapped is not what is merged.

    Raises:
        ConfigError: such adapters cannot be merged, have NaN weights, or the merged model's logits differ from those
            with the adapter.
    """
    kinds = " and ".join(sorted({config.peft_type.value for config in model.peft_config.values()}))
    for config in model.peft_config.values():
        check_mergeable(config.peft_type.value)
    base, training = model.get_base_model(), model.training
    model.eval()
    ids, sharded = _probe(base), any(isinstance(p, DTensor) or is_partitioned(p) for p in base.parameters())
    expected, tied = None if sharded else logits_of(base, ids), _untie(base)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
            plain = model.merge_and_unload(safe_merge=not sharded)
    except (ValueError, RuntimeError, AttributeError) as error:  # such as NaN weights, or a kind that PEFT cannot merge
        raise ConfigError(f"{kinds} cannot be merged: {_words(error)}") from error
    if tied:
        _tie_if_alike(plain)
    quantised = getattr(plain, "hf_quantizer", None) is not None
    if expected is not None:
        check_alike(logits_of(plain, ids), expected, OF_QUANTISED if quantised else TOLERANCE.get(plain.dtype, 0.1))
    return plain.train(training)


def check_alike(got: Tensor, expected: Tensor, tolerance: float, what: str = "merged") -> None:
    """Raise ConfigError unless |got - expected| <= tolerance * |expected|; both are logits of a few rows."""
    error = ((got - expected).norm() / expected.norm()).item()
    if not error <= tolerance:  # NaN too
        raise ConfigError(
            f"the {what} model is not the adapter's: its logits differ by {error:.2g} of their size, and rounding "
            f"explains {tolerance:.2g}. Use the adapter on its base, and please report its {ADAPTER}."
        )


@torch.no_grad()
def logits_of(model: Any, ids: Tensor | None = None) -> Tensor:
    """Return the logits (2, tokens, V) of a few rows in fp32, on the CPU."""
    ids = _probe(model) if ids is None else ids
    return model(input_ids=ids.to(model.device)).logits.float().cpu()


def _probe(base: Any) -> Tensor:
    """Return two rows of token ids: some of all, the last, and those that are trained one by one; no placeholder."""
    config = base.config.get_text_config(decoder=True)
    ids = set(torch.linspace(0, config.vocab_size - 1, 12).long().tolist())
    for module in base.modules():
        if isinstance(module, TrainableTokensLayer):
            ids |= {token for tokens in module.token_indices.values() for token in tokens[:8]}
    placeholders = {value for key, value in vars(base.config).items() if re.search(r"_token_(id|index)$", key)}
    special = {value for value in placeholders if isinstance(value, int)}
    row = sorted(ids - special) or sorted(ids)
    return torch.tensor([row, row[::-1]])


def _inner(module: Any) -> Any:
    """Return the layer below PEFT's."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def _ends(model: Any) -> Iterator[Any]:
    yield from (model.get_input_embeddings(), model.get_output_embeddings())


def _tied(model: Any) -> bool:
    inputs, outputs = (getattr(_inner(end), "weight", None) for end in _ends(model))
    return inputs is not None and inputs is outputs


def _untie(base: Any) -> bool:
    """Give the head its own matrix if adapters change it or the embedding; return whether that was done."""
    if not _tied(base) or not any(isinstance(end, BaseTunerLayer | AuxiliaryTrainingWrapper) for end in _ends(base)):
        return False
    head = _inner(base.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    return True


def _tie_if_alike(plain: Any) -> None:
    """Share the matrix again where adapters changed both in the same way; else have the configuration say so."""
    inputs, outputs = _ends(plain)
    alike = torch.allclose(inputs.weight, outputs.weight, rtol=1e-5, atol=1e-5 * inputs.weight.abs().max().item())
    if alike:
        outputs.weight = inputs.weight
    plain.config.tie_word_embeddings = alike
    if not alike:
        plain.config.get_text_config(decoder=True).tie_word_embeddings = False
    plain.all_tied_weights_keys = plain.get_expanded_tied_weights_keys(all_submodels=True)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
