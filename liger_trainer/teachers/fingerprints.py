"""Fingerprints of rows, tokenizers, chat templates, configurations and weights, for teacher caches and checkpoints."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..common.weights import ADAPTER, adapter_at
from ..compat.models import name_or_path
from ..errors import ConfigError
from ..patching.patcher import base_of

LABEL = "name"  # for people, not compared: a dataset or a model may move
# Fields of a configuration that say where and how a model was loaded or what it returns, not what it computes.
_NOT_THE_MODEL = frozenset(
    "_name_or_path transformers_version architectures dtype torch_dtype quantization_config use_cache return_dict "
    "pad_token_id bos_token_id eos_token_id initializer_range router_aux_loss_coef id2label label2id "
    "base_model_name_or_path revision inference_mode peft_version auto_mapping task_type init_lora_weights".split()
)
_CHUNK = 2**26  # bytes of a weight on a GPU that are copied at a time
_SAMPLE = 1500  # elements of a weight, or up to twice as many


def rows_fingerprint(dataset: Dataset) -> str:
    """Hash all columns of the rows, in order, whatever their layout in memory. About two seconds per GB."""
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(1000):
        columns: Any = table
        for name in sorted(columns.column_names):
            digest.update(f"{name} {len(columns)}\n".encode())
            _digest_column(digest, columns[name].combine_chunks())
    return digest.hexdigest()


def _digest_column(digest: Any, array: Any) -> None:
    # Lengths and values are hashed as int64: datasets stores the same numbers in several widths, chunks and kinds of
    # lists, by how the rows were made.
    if pa.types.is_integer(array.type) and not array.null_count:
        digest.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False), dtype="<i8").data)
    elif (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)) and not array.null_count:
        digest.update(np.diff(array.offsets.to_numpy()).astype("<i8").data)
        _digest_column(digest, array.flatten())
    else:
        digest.update(json.dumps(array.to_pylist(), sort_keys=True, ensure_ascii=False, default=str).encode())


def data_fingerprint(keys: Iterable[bytes]) -> str:
    """Hash a set of row keys, whatever their order."""
    digest = hashlib.sha256()
    for key in sorted(set(keys)):
        digest.update(key)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash vocabulary, merges, added tokens and how text is split; not padding and truncation, which calls change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        content = {"vocabulary": tokenizer.get_vocab(), "added": sorted(map(str, tokenizer.added_tokens_decoder))}
    else:
        content = json.loads(backend.to_str())
        content.pop("padding", None)
        content.pop("truncation", None)
    return _json_sha256(content)


def template_fingerprint(tokenizer: Any) -> str | None:
    """Hash the chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else _json_sha256(template)


def _json_sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sampled_fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Hash evenly spaced elements of each weight, rounded to bfloat16.

    This takes milliseconds for any model on any device, and does not depend on the dtype that it was loaded in. None
    where this process does not hold the weights, or there are none.
    """
    weights = list(weights)
    if not weights or any(w.is_meta or w.numel() == 0 or isinstance(w, DTensor) for _, w in weights):
        return None
    try:
        return _weights_sha256((f"{name} {tuple(weight.shape)}", _sample(weight)) for name, weight in weights)
    except NotImplementedError:  # a class of tensors that cannot be cut, as some quantised ones
        return None


def _sample(weight: Tensor) -> Tensor:
    # An odd step: a power of two, as widths often are, would see only a few columns.
    sample = weight.detach().flatten()[:: weight.numel() // _SAMPLE | 1]
    return sample.to(torch.bfloat16) if sample.is_floating_point() else sample


def teacher_fingerprint(teacher: nn.Module | str, args: Any) -> str:
    """Hash a model in memory, or the files of a named one at its `teacher_model_revision` and `gguf_file`."""
    if not isinstance(teacher, str):  # as it is in memory: another dtype gives another hash
        return _weights_sha256(sorted(teacher.state_dict().items()))
    gguf_file = (args.teacher_model_init_kwargs or {}).get("gguf_file")
    return files_fingerprint(teacher, args.teacher_model_revision, gguf_file)


def files_fingerprint(name: str, revision: str | None = None, gguf_file: str | None = None) -> str:
    """Hash the weights in a model directory or a hub id's local files, however they are split into files; of adapters
    with their settings and their base.

    The files are read once; no model is built and little memory is needed.

    Raises:
        ConfigError: the weights are not on this machine.
    """
    folder = _folder(name, revision)
    # Adapters are nothing without their base, whose weights may have changed under the same name.
    if gguf_file is None and (adapter := adapter_at(folder)) is not None:
        settings = _settings(json.loads((folder / ADAPTER).read_text(encoding="utf-8")))
        parts = [
            settings,
            files_fingerprint(adapter.base, adapter.revision),
            _files_sha256(folder, sorted(folder.glob("adapter_model.*"))),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _files_sha256(folder, weight_files(folder) if gguf_file is None else [folder / gguf_file])


def _files_sha256(folder: Path, files: list[Path]) -> str:
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"No weights were found in {folder} (safetensors, .bin or .gguf).")
    # By tensors and not by files, so that a model which is saved in other shards stays the same. GGUF packs them in its
    # own way, so there the files are hashed.
    if files[0].suffix == ".safetensors":
        return _weights_sha256(_safetensors(files))
    if files[0].suffix == ".bin":
        states = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
        return _weights_sha256(sorted((name, tensor) for state in states for name, tensor in state.items()))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read weights from, in its order of preference."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if (folder / stem).is_file():
            return [folder / stem]
    candidates = (sorted(folder.glob(f"*.{end}")) for end in ("safetensors", "bin", "gguf"))
    return next((files for files in candidates if files), [])


def _folder(name: str, revision: str | None) -> Path:
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(f"The weights of {name} are not on this machine, so they cannot be compared.") from None


def shortened(value: Any) -> str:
    """Return a value as messages show it: only the beginning of a SHA-256."""
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def _safetensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    opened = [safe_open(file, framework="pt") for file in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no dictionary
    for name in sorted(where):
        yield name, where[name].get_tensor(name)


def _weights_sha256(weights: Iterable[tuple[str, Any]]) -> str:
    """Hash names, dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        if not isinstance(tensor, Tensor):
            continue  # quantised layers may keep settings in their state dict
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        for chunk in data.split(_CHUNK) if data.numel() else ():
            digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()


def describe_tokenizer(tokenizer: Any, template_of: Any) -> dict[str, Any]:
    """Return what identifies a tokenizer in a checkpoint; the chat template is `template_of`'s."""
    return {
        "vocabulary": tokenizer_fingerprint(tokenizer),
        "chat template": template_fingerprint(template_of) or "none",
    }


def describe_model(model: Any) -> dict[str, Any]:
    """Return what identifies a model in a checkpoint, without its weights."""
    base = base_of(model)
    adapters = getattr(model, "peft_config", {})
    return {
        LABEL: name_or_path(base.config) or None,
        "class": type(base).__name__,
        "config": _settings(base.config.to_dict()),
        "adapters": ", ".join(sorted(adapters)) or "none",
        **{f"adapter {name}": _settings(config.to_dict()) for name, config in adapters.items()},
    }


def describe_frozen_model(model: Any) -> dict[str, Any]:
    """Return what identifies a model that does not train: as `describe_model`, with a sample of its weights."""
    return {**describe_model(model), "weights": sampled_fingerprint(model.named_parameters())}


def _settings(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the part of a configuration that decides what the model computes; dropout and outputs may change."""
    return {
        str(name): _settings(value) if isinstance(value, Mapping) else _plain(value)
        for name, value in config.items()
        if name not in _NOT_THE_MODEL and "drop" not in str(name) and not str(name).startswith("output_")
    }


def _plain(value: Any) -> str:
    return json.dumps(sorted(value, key=str) if isinstance(value, set | frozenset) else value, default=str)
