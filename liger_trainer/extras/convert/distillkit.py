"""DistillKit 1.0: a teacher in the same process, behind vLLM, or in logits that it captured."""

import re
from collections.abc import Iterator
from typing import Any

from . import ALL, Default, ForeignConfig, NotHere, Settings, Tool
from .rows import datasets_of

_TYPES = {
    "kl": "forward_kl", "jsd": "jsd", "tvd": "tvd", "cross_entropy": "ce", "hs_mse": "hidden_mse",
    "hs_cosine": "hidden_cosine",
}  # fmt: skip
_CAPTURED = (
    "logits captured with DistillKit become a cache of ours first: `liger-trainer cache import CONFIG --from "
    "distillkit --records FOLDER --compression FILE`, with the folder of its Parquet files and this file."
)
_REST = "what is beyond the listed tokens counts as one more outcome here, whatever this says."
_LEGACY = "logits in DistillKit's legacy compression are not read; sample them again with its sample_logits_vllm."


def _losses(value: Any, source: ForeignConfig) -> Settings:
    """Read the losses. DistillKit divides by the sum of the weights."""
    # here weights are taken as they are, so they are divided before
    total = sum(entry["weight"] for entry in value)
    kept, temperatures, here = [], set(), {}
    sparse = source.get("teacher.kind", "hf") != "hf"
    for at in source.entries("loss_functions"):
        function, weight = source.take(f"{at}.function"), source.take(f"{at}.weight")
        temperature = source.take(f"{at}.temperature", 1.0)
        if function not in _TYPES:
            source.note(f"no counterpart to {function}; left out, the others keep their weights.", at)
            continue
        kind = _TYPES[function]
        # which layers are compared is told once for all losses there
        hidden = _layers(source) if kind.startswith("hidden_") else {}
        kept.append({"type": kind, "weight": round(weight / total, 6), **hidden})
        if kind != "ce" and not hidden:
            temperatures.add(temperature)
            if sparse:
                source.take(f"{at}.missing_probability_handling")
                source.note(_REST, f"{at}.missing_probability_handling")
        # DistillKit's JSD has no parameter: its mixture is half and half
        if kind == "jsd":
            here["beta"] = 0.5
    if sparse and temperatures - {1.0}:
        source.note("such log-probabilities are of temperature 1, and so are the losses here.")
    # a server's and a file's log-probabilities cannot be heated afterwards
    temperatures = set() if sparse else temperatures
    if len(temperatures) > 1:
        source.note(f"one temperature for all losses here; they had {sorted(temperatures)}, the highest is taken.")
    if temperatures:
        here["temperature"] = max(temperatures)
    if not kept:
        raise NotHere(f"none of these losses exists here; known are {', '.join(_TYPES)}.")
    return {"losses": kept, **here}


def _layers(source: ForeignConfig) -> Settings:
    """Read pairs of layers. DistillKit counts in transformers' hidden_states, which begin with the embeddings."""
    given = source.take("layer_mapping", "all")
    found: Settings = {"projector": True} if source.take("force_hidden_state_projection") else {}
    if given == "all":
        source.note("blocks are spread uniformly, one to one where both models have as many.", "layer_mapping")
        return {"layers": "uniform", **found}
    if any(0 in pair for pair in given):
        raise NotHere("layer_mapping names the embeddings (0); only blocks are compared here.")
    # blocks are counted from 0 here, without the embeddings
    return {"layers": [[own - 1, other - 1] for own, other in given], **found}


def _kind(value: Any, source: ForeignConfig) -> Settings:
    if value == "dataset":
        source.note(_CAPTURED)
        return {"teacher": "cache", "teacher_cache_dir": "teacher_cache"}
    if value not in ("hf", "vllm"):
        raise NotHere("expected hf, vllm or dataset.")
    return {"teacher": "server"} if value == "vllm" else {}


def _url(value: Any, source: ForeignConfig) -> Settings:
    """Add the version of the protocol, as DistillKit itself does."""
    # with or without /v1 at its end
    return {"teacher_server_base_url": value.rstrip("/").removesuffix("/v1") + "/v1"}


def _api_key(value: Any, source: ForeignConfig) -> Settings:
    # a key that the file takes from the environment itself
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


def _rows(value: Any, source: ForeignConfig) -> Settings:
    at = source.reading
    path = source.take(f"{at}.repo_id") or source.take(f"{at}.disk_path")
    return datasets_of(
        [{"path": path, "name": source.take(f"{at}.config_name"), "split": source.take(f"{at}.split")}], source
    )


def _evaluation(value: Any, source: ForeignConfig) -> Settings:
    """Return the held-out split of the same dataset."""
    # here a run has one dataset with two splits
    at, train = source.reading, source.get("dataset.train_dataset", {})
    for key in ("repo_id", "disk_path", "config_name"):
        if source.take(f"{at}.{key}") != train.get(key):
            raise NotHere("held-out rows come from the same dataset; put both splits into one directory.")
    split = source.take(f"{at}.split")
    return {"dataset_test_split": split} if split else {}


def _options(key: str) -> Any:
    """Read keywords of `from_pretrained`."""

    def function(value: Any, source: ForeignConfig) -> Settings:
        # all of them, whatever their names: transformers checks them
        options = source.take(source.reading, {})
        return {key: {"dtype" if name == "torch_dtype" else name: item for name, item in options.items()}}

    return function


def _attention(value: Any, source: ForeignConfig) -> Settings:
    """Read the switch that sets the dtype of the student too."""
    # flash-attn runs in 16 bits only
    return {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"} if value else {}


def _defaults(source: ForeignConfig) -> Iterator[Default]:
    yield "teacher", "distill", "recipe"
    yield "loss_functions", [{"type": "ce", "weight": 0.5}, {"type": "forward_kl", "weight": 0.5}], "losses"
    if source.get("use_flash_attention", True):
        yield "use_flash_attention", "bfloat16", "dtype"
    if source.get("teacher.kind") == "vllm":
        yield "teacher.timeout", 120.0, "teacher_server_timeout"
        yield "teacher.max_retries", 3, "teacher_server_retries"
    elif source.get("teacher.path") and not source.get("teacher.kwargs", {}).keys() & {"torch_dtype", "dtype"}:
        source.note(
            "no dtype is named for the teacher: transformers 4 loads it in float32, 5 in its files' dtype; here it "
            "has the run's, see teacher_dtype.",
            "teacher.kwargs",
        )


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "DistillKit adds the end-of-text token to a chat whose template does not end with it; here it is not added."
    yield (
        "Of conversations with from and value, DistillKit leaves out other roles than system, human and gpt; here they "
        "are an error where the chat template does not know them."
    )
    if source.get("teacher.kind", "hf") == "hf":
        yield "Rows are tokenized by the student's tokenizer and chat template; DistillKit takes the teacher's."


_FROZEN = "train adapters instead, with use_peft and lora_target_modules."

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
        "dataset.seed": "data_seed",
        "dataset.num_eval_samples": "max_eval_rows",
    },
    values={
        "loss_functions": _losses,
        "teacher.kind": _kind,
        "teacher.base_url": _url,
        "teacher.api_key": _api_key,
        "teacher.top_k": _top_k,
        "dataset.train_dataset": _rows,
        "dataset.eval_dataset": _evaluation,
        "use_flash_attention": _attention,
        "teacher.kwargs": _options("teacher_model_init_kwargs"),
        "model_kwargs": _options("model_init_kwargs"),
    },
    unneeded={
        "dataset.prepared_dataset_path": "prepared rows are kept by datasets' own cache.",
        "teacher.logprob_compressor*": "`liger-trainer cache import` reads it in this file.",
        "model_auto_class": "the class of the model is found by its configuration.",
        "loss_functions.*.missing_probability_handling": "the teacher's whole distribution is compared.",
        "loss_functions.*.sparse_chunk_length": "divergences are always computed in chunks.",
    },
    unsupported={
        "layer_mapping": "has no effect: loss_functions compares no hidden states.",
        "force_hidden_state_projection": "has no effect: loss_functions compares no hidden states.",
        "teacher.legacy_logit_compression.*": _LEGACY,
        "teacher.vocab_size": "the cache of captured logits has it.",
        "teacher.*": "only a teacher in the same process: teacher_model_name_or_path and teacher_model_init_kwargs.",
        "functionary_packing": "set `packing: true`.",
        "frozen_modules": _FROZEN,
        "frozen_res": _FROZEN,
        "resize_embeddings_to_multiple_of": "vocabularies that are padded differently are compared as they are.",
        "dataset.prepacked": "rows that are tokenized need the column input_ids and `packing: false`.",
        "dataset.num_samples": "shorten the dataset itself, or set max_steps.",
        "dataset.eos_label_token_ids": "replace these tokens in the rows.",
        "*dataset.revision": "rows are read at the newest revision; download that one, and name its files.",
    },
    passes={"training_args.": ALL},
    nulls=True,
    defaults=_defaults,
    differences=_differences,
)
