"""Heads for multi-token prediction: weights of a model that transformers leaves in its files.

Qwen3.5, DeepSeek-V3, GLM-4.5 and others have layers that predict a further token, with which servers draft. The classes
of transformers skip them (`_keys_to_ignore_on_load_unexpected`), so a model that was loaded and saved has lost them.
Here a saved model gets them back, byte by byte, from the files that it was loaded from.

Source    Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..compat.models import name_or_path
from .files import write_atomically

ONE_FILE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-mtp.safetensors"
RENAMED = "model-00001-of-00001.safetensors"  # loaders that find ONE_FILE do not look into the index
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


def keep_mtp_head(model: nn.Module | None, folder: Path) -> str | None:
    """Add the tensors that were not loaded into `model` to the files of the whole model in `folder`.

    Returns:
        What there is to say; None if the model's files have no such head, or those in `folder` are an adapter's.

    Raises:
        OSError: files cannot be written.
    """
    patterns = [p for p in getattr(type(model), "_keys_to_ignore_on_load_unexpected", None) or () if _is_of_head(p)]
    saved = dict(_weights_in(folder))
    config: Any = getattr(model, "config", None)
    if not patterns or not saved or SHARD in saved.values():
        return None
    try:
        tensors = _head(config, folder, patterns, saved)
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # the model itself is saved
        return f"The head for multi-token prediction in {name_or_path(config)} is not kept: {error}"
    if not tensors:
        return None
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    is_one = set(saved.values()) == {ONE_FILE}
    places = {key: RENAMED if is_one else file for key, file in saved.items()} | dict.fromkeys(tensors, SHARD)
    size = sum((folder / file).stat().st_size for file in {*saved.values(), SHARD})
    write_atomically(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2))
    if is_one:  # last, so that the folder has a whole model all the time
        (folder / ONE_FILE).rename(folder / RENAMED)
    return (
        f"The head for multi-token prediction in {name_or_path(config)} is kept as it was ({len(tensors)} tensors): it "
        "was not trained, so fewer of its drafts may be accepted."
    )


def _head(config: Any, folder: Path, patterns: list[str], saved: dict[str, str]) -> dict[str, Tensor]:
    """Return the head's tensors in the files that a model was loaded from, if there are any.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: the files cannot be read.
        ValueError: the model is of another size now.
    """
    source = _folder_of(config)
    if source is None or source.resolve() == folder.resolve():
        return {}
    layers = {layer for key in saved if (layer := _layer_of(key))}
    head = {
        key: file
        for key, file in _weights_in(source)
        if any(re.search(pattern, key) for pattern in patterns) and key not in saved and _layer_of(key) not in layers
    }
    if head and _sizes(json.loads((source / "config.json").read_text())) != _sizes(config.to_dict()):
        raise ValueError("hidden size, vocabulary or layers have changed.")
    tensors = {}
    for file in set(head.values()):
        with safe_open(source / file, framework="pt") as weights:
            tensors |= {key: weights.get_tensor(key) for key, where in head.items() if where == file}
    return tensors


def _is_of_head(pattern: str) -> bool:
    """Whether it is a pattern of such heads: others are of towers that a model of text leaves out."""
    return "mtp" in pattern or "layers" in pattern


def _layer_of(key: str) -> str | None:
    """Return the part of a name up to a layer's number: patterns for models of one depth match layers of others."""
    found = re.match(r"(?!.*mtp).*?layers\.\d+\.", key)
    return found and found[0]


def _weights_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of the weights in a folder, each with its file."""
    if (folder / ONE_FILE).is_file():
        with safe_open(folder / ONE_FILE, framework="pt") as weights:
            yield from ((key, ONE_FILE) for key in weights.keys())  # noqa: SIM118  it is no dict
    elif (folder / INDEX).is_file():
        yield from json.loads((folder / INDEX).read_text())["weight_map"].items()


def _folder_of(config: Any) -> Path | None:
    """Return the folder that a model was loaded from, if it is on this machine."""
    name = name_or_path(config)
    if Path(name).is_dir():
        return Path(name)
    found = (
        try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None)) if name else None
    )
    return Path(found).parent if isinstance(found, str) else None


def _sizes(config: dict[str, Any]) -> tuple[Any, ...]:
    text = config.get("text_config") or config
    return tuple(text.get(name) for name in _SIZES)
