"""Heads for multi-token prediction: weights of a model that transformers leaves in its files.

Qwen3.5, DeepSeek-V3, GLM-4.5 and others have layers that predict a further token, with which servers draft. The classes
of transformers skip them (`_keys_to_ignore_on_load_unexpected`), so a model that was loaded and saved has lost them.
Here a saved model gets them back, byte by byte, from the files that it was loaded from. An index names its own files
and one more. A single one gets another name then: by its first transformers would read it without the index. A head
that is trained is part of the model, and saved with it or beside its adapter (extras/mtp.py).

Source    Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..compat.models import name_or_path
from ..plugins import MTP
from .files import is_path, write_atomically

ONE_FILE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-mtp.safetensors"
ONE_OF_SEVERAL = "model-00001-of-00001.safetensors"  # which `save_pretrained` deletes when it saves there again
# copies that a head may have of the model's parts, by its own names; and what returns these
COPIES = {"embed_tokens.weight": "get_input_embeddings", "shared_head.head.weight": "get_output_embeddings"}
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


def keep_mtp_head(model: nn.Module | None, folder: Path, trained: Path | None = None) -> str | None:
    """Add the tensors that were not loaded into `model` to the files of the whole model in `folder`.

    Args:
        trained: a file that may be there, beside an adapter, of a head that was trained with it.

    Returns:
        What there is to say, also where the head cannot be read or written; None if there is none, the model has it,
        as one that trains it does, or the files in `folder` are an adapter's.
    """
    config: Any = getattr(model, "config", None)
    if not _patterns(model) or not name_or_path(config) or isinstance(getattr(model, MTP, None), nn.Module):
        return None
    head = f"The head for multi-token prediction in {name_or_path(config)}"
    try:
        saved = _weights_in(folder, ONE_FILE, INDEX)
        tensors = head_in_files(model, folder) if saved else {}
        if not tensors:
            return None
        was_trained = trained is not None and trained.is_file()
        if trained is not None and was_trained:
            tensors |= load_file(trained) | _copies(model, tensors)
        save_file(tensors, folder / SHARD, metadata={"format": "pt"})
        size = sum((folder / file).stat().st_size for file in {*saved.values(), SHARD})
        places = {name: ONE_OF_SEVERAL if file == ONE_FILE else file for name, file in saved.items()}
        index = {"metadata": {"total_size": size}, "weight_map": places | dict.fromkeys(tensors, SHARD)}
        write_atomically(folder / INDEX, json.dumps(index, indent=2))
        if ONE_FILE in saved.values():
            (folder / ONE_FILE).replace(folder / ONE_OF_SEVERAL)
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # the model itself is saved
        return f"{head} is not kept: {error}"
    if was_trained:
        return f"{head} is kept as it was trained beside the adapter ({len(tensors)} tensors)."
    return f"{head} is kept as it was ({len(tensors)} tensors): untrained, so fewer of its drafts may be accepted."


def _copies(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a head's tensors that copy parts of the model, as these are in the model now."""
    parts = {name: COPIES[end] for name in tensors for end in COPIES if name.endswith(f".{end}")}
    return {n: getattr(model, part)().weight.detach().clone().to(tensors[n].dtype) for n, part in parts.items()}


def head_in_files(model: Any, other_than: Path | None = None) -> dict[str, Tensor]:
    """Return the head's tensors in the files that a model was loaded from, if there are any in another folder.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: the files cannot be read.
        ValueError: they are not found; they are quantised; the model is of another size now.
    """
    config = model.config
    if not _patterns(model):
        return {}
    source = _folder_of(name_or_path(config), getattr(config, "_commit_hash", None))
    if source is None:
        raise ValueError("if there is one; its files are not found.")
    if other_than is not None and source.resolve() == other_than.resolve():
        return {}
    return head_in_folder(model, source)


def head_in_folder(model: Any, source: Path) -> dict[str, Tensor]:
    """Return the tensors of the head of such a model in a folder: beside an adapter, or in the files of a whole model.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: as `head_in_files`.
    """
    if (source / SHARD).is_file() and not any((source / name).is_file() for name in (INDEX, ONE_FILE)):
        return load_file(source / SHARD)
    config, patterns = model.config, _patterns(model)
    stored = json.loads((source / "config.json").read_text(encoding="utf-8"))
    depth = (stored.get("text_config") or stored).get("num_hidden_layers", 0)
    head = {
        key: file
        for key, file in _weights_in(source, INDEX, ONE_FILE).items()
        if any(re.search(pattern, key) for pattern in patterns) and ("mtp" in key or _layer_of(key) >= depth)
    }
    if head and stored.get("quantization_config"):
        raise ValueError("it is stored quantised.")
    if head and _sizes(stored) != _sizes(config.to_dict()):
        raise ValueError("hidden size, vocabulary or layers have changed.")
    tensors = {}
    for file in set(head.values()):
        with safe_open(source / file, framework="pt") as weights:
            tensors |= {key: weights.get_tensor(key) for key, where in head.items() if where == file}
    return tensors


def _patterns(model: Any) -> list[str]:
    """Return what the names of such heads may match. Others are of towers that a model of text leaves out."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [pattern for pattern in ignored if "mtp" in pattern or "layers" in pattern]


def _layer_of(key: str) -> int:
    """Return a layer's number in a name, -1 without one: heads come behind the layers that a model counts."""
    found = re.search(r"layers\.(\d+)\.", key)
    return int(found[1]) if found else -1


def _weights_in(folder: Path, *names: str) -> dict[str, str]:
    """Return the names of the weights in a folder, each with its file, by the first of ONE_FILE and INDEX there."""
    for name in names:
        if (folder / name).is_file():
            if name == INDEX:
                return json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            with safe_open(folder / ONE_FILE, framework="pt") as weights:
                return dict.fromkeys(weights.keys(), ONE_FILE)
    return {}


def _folder_of(name: str, revision: str | None) -> Path | None:
    """Return the folder that a model was loaded from: itself, or in the hub's cache of this machine."""
    if Path(name).is_dir():
        return Path(name)
    found = None if is_path(name) else try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _sizes(config: dict[str, Any]) -> tuple[Any, ...]:
    text = config.get("text_config") or config
    return tuple(text.get(name) for name in _SIZES)
