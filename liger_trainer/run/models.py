"""Open and load the models of a run: first everything that can be checked without weights, then the weights."""

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedType, PartialState
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.quantization_config import Mxfp4Config
from trl import get_quantization_config

from .. import plugins
from ..common.console import announce
from ..common.options import did_you_mean
from ..common.weights import adapter_at, auto_class, check_mergeable, load_whole
from ..compat.quantizers import experts_in_4_bits, packed_experts
from ..config.conflicts import is_sharded
from ..config.schema import built_in_configs
from ..errors import ConfigError
from ..losses.plan import plan_of
from ..plugins import DEMO
from ..teachers.config import OF_ONE_TEACHER, entries_of
from ..teachers.vocabulary import Vocabulary, compare_tokenizers, teacher_tokenizer, tokenizer_of
from ..trainers.chat_template import check_chats
from ..trainers.student import names_of_modules
from .data.datasets import RunData

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


@dataclass(frozen=True)
class ModelFiles:
    """A model with its configuration and tokenizer; no weights yet."""

    key: str  # the configuration key that named it
    path: str  # directory or hub id, with a demo name resolved
    revision: str | None
    config: PreTrainedConfig
    tokenizer: Any  # None for a teacher that was saved without one
    processor: Any = None  # for rows with images (`with_processor`)

    @property
    def processing(self) -> Any:
        """What makes the model's inputs of a row: the processor, or the tokenizer for rows of text."""
        return self.tokenizer if self.processor is None else self.processor

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has; its tokenizer may have fewer."""
        return self.config.get_text_config(decoder=True).vocab_size


def open_model(config: "RunConfig", key: str) -> ModelFiles:
    """Read the configuration and the tokenizer of the model named by `key`. A teacher may come without a tokenizer.

    Raises:
        ConfigError: no such model, or files in it that transformers cannot read; the student is an adapter, or has no
            module that the settings name.
    """
    name = config[key]
    try:
        path = plugins.load(DEMO).resolve_model(name) if name.startswith(DEMO) else name
    except ConfigError as error:
        raise config.error(key, str(error)) from None
    # transformers would ask the hub for it, and say only that there is no such repository.
    looks_local = name.startswith((".", "~", "/")) or name.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        run = name.removeprefix("outputs/")
        maker = f"; `liger-trainer run {run}` makes it" if run in built_in_configs() else ""
        raise config.error(key, f"no such directory: {name}{maker}")
    revision = config["model_revision" if key == "model_name_or_path" else "teacher_model_revision"]
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": config["trust_remote_code"]}
    path, of_student = os.path.expanduser(path), key == "model_name_or_path"
    # A student must be whole, since its layers are patched and trained; a teacher is merged when it is loaded.
    adapter = adapter_at(path, revision)
    if adapter is not None and of_student:
        raise config.error(key, f"{adapter}.")
    try:
        if adapter is not None:
            # Before anything is downloaded for it.
            check_mergeable(adapter.kind)
            model_config = AutoConfig.from_pretrained(
                adapter.base, **{**options, "revision": adapter.revision or "main"}
            )
        else:
            model_config = AutoConfig.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options) if of_student else tokenizer_of(path, **options)
    except ConfigError as error:
        raise config.error(key, str(error)) from None
    except (OSError, ValueError, KeyError, ImportError) as error:
        missing = isinstance(error, OSError) and not Path(path).is_dir()
        where = f" (no folder in {Path.cwd()})" if missing else ""
        raise config.error(key, f"{name} cannot be read as a model directory{where} or hub id: {error}") from None
    if of_student:
        check_names(config, path, model_config)
    return ModelFiles(key, path, revision, model_config, tokenizer)


def with_processor(config: "RunConfig", files: ModelFiles, data: RunData) -> ModelFiles:
    """Return the files with the model's processor where the rows have images.

    Raises:
        ConfigError: the model takes no images, or has no processor that can be read here.
    """
    if data.facts.images is None:
        return files
    options = {"revision": files.revision or "main", "trust_remote_code": config["trust_remote_code"]}
    try:
        processor = AutoProcessor.from_pretrained(files.path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:  # such as for torchvision
        reason = " ".join(str(error).split())
        raise config.error(files.key, f"the rows have images, and its processor cannot be read: {reason}") from None
    if not isinstance(processor, ProcessorMixin):
        reason = f"the rows have images (column {data.facts.images}), and {files.path} has no processor for them."
        raise config.error(files.key, f"{reason} Name a vision-language model.")
    return replace(files, tokenizer=processor.tokenizer, processor=processor)


def open_teachers(config: "RunConfig") -> dict[str, tuple["RunConfig", ModelFiles]]:
    """Return the models that teach, by name, each with the configuration of its entry in `teachers`.

    A single teacher has the name "".

    Raises:
        ConfigError: as `open_model`.
    """
    key = "teacher_model_name_or_path"
    if not config["teachers"]:
        if not config[key]:
            return {}
        return {"": (config, open_model(config, key))}
    entries = config["teachers"]
    args = SimpleNamespace(
        **{**config.values, "teachers": json.loads(entries) if isinstance(entries, str) else entries}
    )
    opened = {}
    for entry in entries_of(args):
        if entry.args.teacher == "model":
            entry_config = replace(
                config, values={**config.values, **{name: getattr(entry.args, name) for name in OF_ONE_TEACHER}}
            )
            try:
                opened[entry.name] = entry_config, open_model(entry_config, key)
            except ConfigError as error:
                raise config.error("teachers", f"{entry.name}: {error}") from None
    return opened


def check_student(config: "RunConfig", files: ModelFiles, data: RunData) -> None:
    """Check that model, data and settings fit together, as far as it shows without weights.

    Raises:
        ConfigError: chat rows without a chat template, layers that the model does not have, unknown tokens, a tokenizer
            with more tokens than the model.
        DataError: a row with a role that the chat template does not know, or that it refuses.
    """
    template = config["chat_template_path"]
    if template is not None and template.endswith((".jinja", ".j2")) and not Path(template).is_file():
        raise config.error("chat_template_path", f"no such file: {template}")
    template_text = _template_text(config)
    # Columns of prompts hold text or messages, all rows the same: the form check has seen to that.
    chat = data.facts.form == "messages" or isinstance(data.train[0].get("prompt"), list)
    if chat and template is None and not files.processing.chat_template:
        reason = "the rows are chat messages and this tokenizer has no chat template; set chat_template_path."
        raise config.error(files.key, reason)
    if chat and data.facts.images is None:  # a template of images renders no message before it has them
        for split, rows in (("train", data.train), ("test", data.test)):
            allow = config["allow_unwritten_fields"]
            check_chats(rows, files.tokenizer, template_text, partial(data.place, split), allow)
    vocabulary = files.tokenizer.get_vocab()
    size = files.vocab_size
    # Such an id would be read beyond the end of the embedding: an illegal memory access on a GPU, with no name in it.
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= size)
    if beyond:
        raise config.error(
            files.key,
            f"the tokenizer of {files.path} has ids up to {beyond[-1][0]}, but the model has {size} tokens; beyond them"
            f" are {', '.join(repr(token) for _, token in beyond[:3])}. Use the model's own tokenizer, or resize the "
            "model's embeddings and save it.",
        )
    for key in ("eos_token", "pad_token"):
        if config[key] is not None and config[key] not in vocabulary:
            raise config.error(key, f"{config[key]!r} is not in the vocabulary of {files.path}.")
    pads = files.tokenizer.pad_token or config["pad_token"]
    if not (files.tokenizer.eos_token or config["eos_token"]) and not (
        pads and (chat or data.facts.form == "input_ids")
    ):
        what = "has no end-of-sequence token, which ends rows of text and pads where there is no pad_token"
        raise config.error(files.key, f"the tokenizer of {files.path} {what}; set eos_token.")
    layers = files.config.get_text_config(decoder=True).num_hidden_layers
    step, kept = config["keep_every_nth_layer"], config["keep_layers"]
    if step is not None and step > layers:
        raise config.error("keep_every_nth_layer", f"expected at most {layers}, the layers there are, got {step}.")
    if kept is not None and (not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= layers):
        expected = f"expected indices from 0 to {layers - 1}, each once and ascending"
        raise config.error("keep_layers", f"{expected}, got {kept}.")


def check_names(config: "RunConfig", path: str, model_config: PreTrainedConfig | None) -> None:
    """Check `attn_implementation`, and the modules that adapters are put on, against the model without its weights.

    transformers and PEFT would refuse a wrong name when they have loaded the weights. Where several modules are named,
    and only some of them are wrong, PEFT says nothing.

    Args:
        model_config: None leaves the modules unchecked.

    Raises:
        ConfigError: there is no such attention, or the model has no such module.
    """
    attention = config["attn_implementation"]
    known = ["eager", *AttentionInterface().valid_keys()]
    if attention is not None and attention not in known and "/" not in attention:  # a kernel of the hub
        named_by_users = [name for name in known if not name.startswith("liger_")]  # packing sets ours by itself
        hint = did_you_mean(attention, named_by_users)
        raise config.error(
            "attn_implementation", f"expected one of {', '.join(named_by_users)}, got {attention!r}.{hint}"
        )
    named = {key: names_of_modules(config[key]) for key in _MODULES if config["use_peft"]}
    named = {key: names for key, names in named.items() if names and names not in ("all-linear", ["all-linear"])}
    if not named or model_config is None or config["trust_remote_code"]:
        return
    with torch.device("meta"):  # no weights, only names
        modules = [name for name, _ in auto_class(model_config).from_config(model_config).named_modules() if name]
    last = sorted({last for name in modules if not (last := name.rpartition(".")[2]).isdigit()})
    for key, names in named.items():
        for name in [names] if isinstance(names, str) else names:
            with contextlib.suppress(re.error):  # text is a pattern, and may be none
                pattern = name if isinstance(names, str) else rf"(.*\.)?{re.escape(name)}"
                if any(re.fullmatch(pattern, module) for module in modules):
                    continue
            hint = did_you_mean(name, ["all-linear", *last]) or f" It has {', '.join(last)}."
            raise config.error(key, f"{path} has no module called {name!r}.{hint}")


_MODULES = "lora_target_modules", "lora_modules_to_save"


def config_at_hand(config: "RunConfig") -> PreTrainedConfig | None:
    """Return the configuration of `model_name_or_path` if it is on this machine, else None."""
    try:
        name = config["model_name_or_path"]
        path = plugins.load(DEMO).model_at_hand(name) if name.startswith(DEMO) else os.path.expanduser(name)
        return AutoConfig.from_pretrained(path, revision=config["model_revision"] or "main", local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):  # what is wrong with it is said where it is needed
        return None


def _template_text(config: "RunConfig") -> str | None:
    """Return the chat template of `chat_template_path`, a file or a model; None if it is not set."""
    path = config["chat_template_path"]
    if path is None:
        return None
    if path.endswith((".jinja", ".j2")):
        return Path(path).read_text(encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config["trust_remote_code"])
        return tokenizer.get_chat_template()
    except (OSError, ValueError) as error:
        raise config.error("chat_template_path", f"{path}: no chat template can be read there: {error}") from None


def check_same_tokenizer(config: "RunConfig", student: ModelFiles, teacher: ModelFiles) -> Vocabulary | None:
    """Compare the tokens of student and teacher, id by id: see `compare_tokenizers`.

    Returns:
        None with `uld` or `alm`, which compare models of different tokenizers.

    Raises:
        ConfigError: an id means different tokens, or `teacher_tokenizer_name_or_path` has no tokenizer.
    """
    if plan_of(config.values).other_tokens:
        return None
    try:
        named = config["teacher_tokenizer_name_or_path"]
        of_teacher = teacher.tokenizer if named is None else teacher_tokenizer(teacher.path, named)
        return compare_tokenizers(student.tokenizer, of_teacher)
    except ConfigError as error:
        raise config.error("teacher_model_name_or_path", str(error)) from None


def load_student(config: "RunConfig", files: ModelFiles) -> PreTrainedModel:
    """Load the model to train as TRL would load it, and drop the layers that the configuration leaves out.

    Call it after `config.training_args()`, which sets up the devices.

    Raises:
        ConfigError: missing or broken weights, an option that this model or installation does not know, a key of
            `init-student`.
    """
    for key in ("student_num_layers", "student_intermediate_size"):
        if config[key] is not None:
            raise config.error(
                key,
                "takes a measurement, which a run does not make. Make the student with `liger-trainer init-student`, "
                f"name its directory in model_name_or_path, and take this key out (~{key}).",
            )
    return load_base(config, files)


def load_base(config: "RunConfig", files: ModelFiles) -> PreTrainedModel:
    """Load a model without the layers that the configuration leaves out.

    Raises:
        ConfigError: missing or broken weights, an option that this model or installation does not know.
    """
    model = load_weights(config, files)
    if config.drops_layers():
        kept = {"keep_every_nth": config["keep_every_nth_layer"], "keep": config["keep_layers"]}
        model = plugins.load("keep_layers").drop_layers(model, **kept)
    return model


def load_original(config: "RunConfig", files: ModelFiles) -> PreTrainedModel:
    """Load the model that a student is made from: not quantised, on the CPU, in the dtype of its files by default.

    Raises:
        ConfigError: as `load_student`.
    """
    # Layers and units are chosen and cut from full weights; the student may be quantised when it is trained.
    changes: dict[str, Any] = {"quantization_config": None, "device_map": None}
    if not config.given("dtype") and "dtype" not in config.init_kwargs("model_init_kwargs"):
        changes["dtype"] = "auto"
    return load_weights(config, files, **changes)


def load_weights(config: "RunConfig", files: ModelFiles, **changes: Any) -> PreTrainedModel:
    """Call `from_pretrained` with the options of the configuration, and `changes`.

    Raises:
        ConfigError: missing or broken weights, an option that this model or installation does not know.
    """
    model_args = config.model_args()
    options: dict[str, Any] = {
        "revision": files.revision,
        "trust_remote_code": config["trust_remote_code"],
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "device_map": _device_map(config),
        "allow_missing_weights": config["allow_missing_weights"],
    }
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        options["quantization_config"] = quantization
    options.update(config.init_kwargs("model_init_kwargs"))
    options.update(changes)
    # Engines that share weights out cannot split packed ones.
    packs = config["use_peft"] and not is_sharded(config.values)
    stored = getattr(files.config, "quantization_config", None) or {}
    if packs and stored.get("quant_method") == "mxfp4" and "quantization_config" not in options:
        options["quantization_config"] = Mxfp4Config(dequantize=True)  # keeps the class of the experts
    # What is no dtype of torch stays text, for transformers to refuse.
    if isinstance(options["dtype"], str) and options["dtype"] != "auto":
        options["dtype"] = getattr(torch, options["dtype"], options["dtype"])
    try:
        with experts_in_4_bits() if packs else contextlib.nullcontext():
            model = load_whole(auto_class(files.config).from_pretrained, files.path, **options)
    except ConfigError as error:
        raise config.error(files.key, str(error)) from error
    except (OSError, ValueError, TypeError, ImportError) as error:
        key = config.named_in(str(error)) if files.key == "model_name_or_path" else None
        raise config.error(key or files.key, f"{config[files.key]} cannot be loaded: {error}") from error
    packed = packed_experts(model)
    if packed:
        size = sum(weight.codes.nbytes + weight.scales.nbytes for weight in packed)
        announce(f"Experts stay in 4 bits: {sum(map(len, packed)) // 2} experts in {size / 1e9:.2f} GB.")
    return model


def _device_map(config: "RunConfig") -> str | None:
    """Load straight onto the GPU if one process has it; a student that loses layers is built on the CPU."""
    if config.values.get("teacher") == "cache":  # the cache is compared with the rows before the GPU is used
        return None
    # `auto` with several processes would spread the model of each over all GPUs; so it would the model of one that a
    # launcher has started, next to GPUs that are not its own.
    state = PartialState()
    unlaunched = state.distributed_type == DistributedType.NO
    on_gpu = state.device is not None and state.device.type not in ("cpu", "mps")
    return "auto" if unlaunched and on_gpu and not config.drops_layers() else None
