"""DistillKit 1.0: a teacher in the same process, behind vLLM, or in logits that it captured."""

import re
from collections.abc import Iterator
from typing import Any

from . import ForeignConfig, NotHere, Settings, Tool

_TYPES = {
    "kl": "forward_kl", "jsd": "jsd", "tvd": "tvd", "cross_entropy": "ce", "hs_mse": "hidden_mse",
    "hs_cosine": "hidden_cosine",
}  # fmt: skip
_CAPTURED = (
    "logits captured with DistillKit become a cache of ours first: `liger-trainer cache import CONFIG --from "
    "distillkit --records FOLDER --compression FILE`, with the folder of its Parquet files and this file."
)
_LEGACY = "logits in DistillKit's legacy compression are not read; sample them again with its sample_logits_vllm."


def _losses(value: Any, source: ForeignConfig) -> Settings:
    """Read the losses. DistillKit divides by the sum of the weights."""
    total = sum(entry["weight"] for entry in value)
    kept, missing, temperatures, here = [], [], set(), {}
    for entry in value:
        kind = _TYPES.get(entry["function"])
        if kind is None:
            missing.append(entry["function"])
            continue
        hidden = _layers(source) if kind.startswith("hidden_") else {}
        kept.append({"type": kind, "weight": round(entry["weight"] / total, 6), **hidden})
        if kind != "ce" and not hidden:
            temperatures.add(entry.get("temperature") or 1.0)
        if kind == "jsd":
            here["beta"] = 0.5
    if missing:
        known = ", ".join(_TYPES)
        source.note(f"no counterpart to {', '.join(missing)}; left out, the others keep their weights. Known: {known}.")
    if source.get("teacher.kind") in ("vllm", "dataset"):
        if temperatures - {1.0}:
            source.note("such log-probabilities are of temperature 1, and so are the losses here.")
        source.note(
            "what is beyond the listed tokens counts as one more outcome here, whatever missing_probability_handling "
            "says."
        )
        temperatures = set()
    if len(temperatures) > 1:
        source.note(f"one temperature for all losses here; they had {sorted(temperatures)}, the highest is taken.")
    if temperatures:
        here["temperature"] = max(temperatures)
    if not kept:
        raise NotHere(f"none of these losses exists here; known are {', '.join(_TYPES)}.")
    return {"losses": kept, **here}


def _layers(source: ForeignConfig) -> Settings:
    """Read pairs of layers. DistillKit counts in transformers' hidden_states, which begin with the embeddings."""
    given = source.get("layer_mapping", "all")
    found: Settings = {"layers": "uniform" if given == "all" else [[own - 1, other - 1] for own, other in given]}
    if given == "all":
        source.note("layer_mapping: all: blocks are spread uniformly, one to one where both models have as many.")
    elif any(0 in pair for pair in given):
        raise NotHere("layer_mapping names the embeddings (0); blocks alone are compared here.")
    return {**found, **({"projector": True} if source.get("force_hidden_state_projection") else {})}


def _with_losses(value: Any, source: ForeignConfig) -> Settings:
    """Check keys that `_losses` reads."""
    listed = source.get("loss_functions") or []
    if value and not any(entry.get("function", "").startswith("hs_") for entry in listed):
        raise NotHere("has no effect: loss_functions compares no hidden states.")
    return {}


def _kind(value: Any, source: ForeignConfig) -> Settings:
    if value == "dataset":
        source.note(_CAPTURED)
        return {"teacher": "cache", "teacher_cache_dir": "teacher_cache"}
    if value not in ("hf", "vllm"):
        raise NotHere("expected hf, vllm or dataset.")
    return {"teacher": "server"} if value == "vllm" else {}


def _url(value: Any, source: ForeignConfig) -> Settings:
    """Add the version of the protocol, as DistillKit itself does."""
    return {"teacher_server_base_url": value.rstrip("/").removesuffix("/v1") + "/v1"}


def _api_key(value: Any, source: ForeignConfig) -> Settings:
    variable = re.fullmatch(r"\$\{(\w+)\}", value or "")
    if variable:
        return {"teacher_server_api_key_env": variable[1]}
    if value:
        source.note(
            "a key is in no file here: put it into an environment variable, and name that in "
            "teacher_server_api_key_env."
        )
    return {}


def _top_k(value: Any, source: ForeignConfig) -> Settings:
    if value and source.get("teacher.kind") != "vllm":
        raise NotHere("the divergence is taken over the whole vocabulary.")
    return {"teacher_server_top_k": value} if value else {}


def _evaluation(value: Any, source: ForeignConfig) -> Settings:
    """Return the held-out split of the same dataset."""
    name = source.reading.rpartition(".")[0]
    for key in ("repo_id", "disk_path"):
        if source.get(f"{name}.{key}") != source.get(f"dataset.train_dataset.{key}"):
            raise NotHere("held-out rows come from the same dataset; put both splits into one directory.")
    return {"dataset_test_split": value} if source.reading.endswith(".split") and value else {}


def _options(key: str) -> Any:
    """Read keywords of `from_pretrained`."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        return {key: {"dtype" if name == "torch_dtype" else name: item for name, item in (value or {}).items()}}

    return function


def _attention(value: Any, source: ForeignConfig) -> Settings:
    return {"attn_implementation": "flash_attention_2"} if value else {}


def _defaults(source: ForeignConfig) -> Settings:
    losses = [{"type": "ce", "weight": 0.5}, {"type": "forward_kl", "weight": 0.5}]
    server = {"teacher_server_timeout": 120.0, "teacher_server_retries": 3}
    return {
        "recipe": "distill",
        **({} if "loss_functions" in source.values else {"losses": losses}),
        **(server if source.get("teacher.kind") == "vllm" else {}),
    }


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "DistillKit adds the end-of-text token to a chat whose template does not end with it; here it is not added."
    yield (
        "Of conversations with from and value, DistillKit leaves out other roles than system, human and gpt; here they "
        "are an error where the chat template does not know them."
    )


TOOL = Tool(
    name="DistillKit",
    names={
        "model": "model_name_or_path",
        "teacher.path": "teacher_model_name_or_path",
        "teacher.model": "teacher_server_model",
        "teacher.timeout": "teacher_server_timeout",
        "teacher.max_retries": "teacher_server_retries",
        "output_path": "output_dir",
        "sequence_length": "max_length",
        "project_name": "project",
        "trust_remote_code": "trust_remote_code",
        "dataset.train_dataset.repo_id": "dataset_name",
        "dataset.train_dataset.disk_path": "dataset_name",
        "dataset.train_dataset.config_name": "dataset_config",
        "dataset.train_dataset.split": "dataset_train_split",
        "dataset.seed": "data_seed",
        "dataset.num_eval_samples": "max_eval_rows",
    },
    values={
        "loss_functions": _losses,
        "layer_mapping": _with_losses,
        "force_hidden_state_projection": _with_losses,
        "teacher.kind": _kind,
        "teacher.base_url": _url,
        "teacher.api_key": _api_key,
        "teacher.top_k": _top_k,
        "dataset.eval_dataset.repo_id": _evaluation,
        "dataset.eval_dataset.disk_path": _evaluation,
        "dataset.eval_dataset.split": _evaluation,
        "use_flash_attention": _attention,
        "teacher.kwargs": _options("teacher_model_init_kwargs"),
        "model_kwargs": _options("model_init_kwargs"),
    },
    unneeded={
        "dataset.prepared_dataset_path": "prepared rows are kept by datasets' own cache.",
        "teacher.logprob_compressor": "`liger-trainer cache import` reads it in this file.",
        "teacher.logprob_compressor.": "`liger-trainer cache import` reads it in this file.",
        "model_auto_class": "the class of the model is found by its configuration.",
    },
    unsupported={
        "teacher.legacy_logit_compression.": _LEGACY,
        "teacher.": "only a teacher in the same process: teacher_model_name_or_path and teacher_model_init_kwargs.",
        "functionary_packing": "set `packing: true`.",
        "frozen_modules": "train adapters instead, with use_peft and lora_target_modules.",
        "frozen_res": "train adapters instead, with use_peft and lora_target_modules.",
        "resize_embeddings_to_multiple_of": "vocabularies that are padded differently are compared as they are.",
        "dataset.prepacked": "rows that are tokenized need the column input_ids and `packing: false`.",
        "dataset.num_samples": "shorten the dataset itself, or set max_steps.",
        "dataset.eos_label_token_ids": "replace these tokens in the rows.",
    },
    passes=("training_args.",),
    defaults=_defaults,
    differences=_differences,
)
