"""Report what `patch` would swap in a model and what it would not, from its configuration, without weights."""

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)

from ..compat import all_missed
from ..compat.models import GATE, new_model
from ..compat.recognitions import check_all
from ..errors import ConfigError
from ..kernels.runtime import SLOW_LAUNCHES, unknown_launcher
from ..patching.patcher import NothingToPatch, Patched, PatchOptions, PatchReport
from ..patching.vision import counting_forward, embed_patches
from ..plugins import DEMO
from ..trainers.images import vision_tower
from .demo import CONFIG, demo_key

# column of the table -> kinds of a report (`PatchReport.swapped`)
COLUMNS = {
    "norms": ("RMSNorm", "gated RMSNorm", "LayerNorm"),
    "MLP": ("SwiGLU", "GEGLU", "ReLU2", "GELU MLP", "LoRA MLP"),
    "rope": ("rope", "QK norm + rope"),
    "experts": ("SwiGLU experts", "GEGLU experts", "LoRA experts", "frozen experts"),
    "head": ("fused loss",),
}
ATTENTION_OF_TOWERS = "tower attention"
IMAGES = "images"  # the last column: what is swapped in the part that reads them
LAYERS = tuple(kind for column, kinds in COLUMNS.items() if column != "head" for kind in kinds)

# classes with a causal-LM head by model type, asked after the causal LMs
_OTHERS = (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)  # fmt: skip
_TRANSDUCERS = ("ForCTC", "ForRNNT", "ForTDT")  # they generate, but align their labels with frames of speech


@dataclass(frozen=True)
class Diagnosis:
    """The report of a family's causal LM or of another class, or the reason why it could not be built."""

    family: str
    class_name: str
    report: PatchReport | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The family of a causal LM, the class of another model."""
        return self.family if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.family) == self.class_name else self.class_name


def config_of(model: str) -> Any:
    """Return the configuration of a directory, a cached hub id or a demo model, or the default one of a model type.

    Raises:
        ConfigError: `model` is none of them.
    """
    if model.startswith(DEMO) and demo_key(model):
        return LlamaConfig(**CONFIG)  # its directory is built by the first run, which may be later
    if model in CONFIG_MAPPING and not os.path.isdir(model):
        try:
            return CONFIG_MAPPING[model]()
        except Exception as error:  # each family has its own checks
            raise ConfigError(f"{model} has no default configuration: {_words(error)}") from None
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, and those of the hub's client
        close = difflib.get_close_matches(model, list(CONFIG_MAPPING), 3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ConfigError(
            f"{model!r} is no directory with a config.json, no model in the hub's cache and no model type of "
            f"transformers {transformers.__version__}.{hint} ({_words(error).partition('. ')[0]})"
        ) from None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def diagnose(config: Any, options: PatchOptions | None = None) -> PatchReport:
    """Report what `patch` does to the model of a configuration (`class_of`), built on the meta device.

    Raises:
        ConfigError: transformers has no class with a causal-LM head for it, or cannot build it.
    """
    name = class_of(config)
    if name is None or name == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return _diagnosis_of(config, AutoModelForCausalLM.from_config, options)
    return _diagnosis_of(config, functools.partial(new_model, getattr(transformers, name)), options)


def _diagnosis_of(config: Any, build: Any, options: PatchOptions | None = None) -> PatchReport:
    try:
        # Shapes only: the largest families would not fit into memory.
        with torch.device("meta"):
            model = build(config)
    except Exception as error:  # each family has its own checks
        if str(error).startswith("Unrecognized configuration class"):  # the message lists every class
            raise ConfigError(
                f"transformers {transformers.__version__} has no causal LM for a {type(config).__name__}. "
                "patch(model) takes any model, and its report says what was found."
            ) from None
        raise ConfigError(f"The model of a {type(config).__name__} cannot be built: {_words(error)}") from None
    report = _report_of(model, options or PatchOptions())
    # Its layers are patched by themselves: no labels reach them, so there is no loss to fuse.
    tower = vision_tower(model)
    if tower is not None:
        report.tower = _report_of(tower[1], replace(options or PatchOptions(), fused_linear_cross_entropy=False))
    return report


def _report_of(model: Any, options: PatchOptions) -> PatchReport:
    try:
        with Patched(model, options) as patched:
            # An attention is one where its rotation is swapped. Linear layers show in the layer around them.
            layers = (x for x in model.modules() if x is not model and not hasattr(x, "in_features"))
            swapped = (x for x in layers if _computes(x, "forward") or _computes(x, GATE))
            patched.report.classes = {type(layer).__name__ for layer in swapped}
            return patched.report
    except NothingToPatch as nothing:
        return nothing.report


def _computes(layer: Any, method: str) -> bool:
    """Whether a method of ours computes the layer, and does not only run the layer's own."""
    ours = getattr(vars(layer).get(method), "__func__", None)
    return ours not in (None, counting_forward, embed_patches)


def class_of(config: Any) -> str | None:
    """Return the class of the checkpoint if it has a causal-LM head, else the model type's."""
    for name in config.architectures or ():
        if _has_causal_lm_head(getattr(transformers, name, None)):
            return name
    names = (mapping.get(config.model_type) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_OTHERS))
    return next((name for name in names if name), None)


def other_classes() -> list[str]:
    """Name the classes of transformers with a causal-LM head that AutoModelForCausalLM does not make."""
    # AutoModelForCausalLM is asked first, so that each class is reported once.
    causal_lms = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    classes = [name for name in dir(transformers) if name[:1].isupper() and name not in causal_lms]
    return [name for name in classes if _has_causal_lm_head(getattr(transformers, name))]  # imports every model


def _has_causal_lm_head(model_class: Any) -> bool:
    """Whether models of the class generate tokens and learn from labels."""
    if not (inspect.isclass(model_class) and issubclass(model_class, PreTrainedModel)):
        return False
    name = model_class.__name__
    if not issubclass(model_class, GenerationMixin) or name.endswith(("PreTrainedModel", *_TRANSDUCERS)):
        return False
    return "labels" in inspect.signature(model_class.forward).parameters


def diagnose_all() -> list[Diagnosis]:
    """Diagnose every class with a causal-LM head, with its default configuration: families first, then the others."""
    # Classes share families, such as a model of text and one that also reads images.
    found = []
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.append(_tried(family, name, partial(config_of, family), AutoModelForCausalLM.from_config))
    for name in other_classes():
        other: Any = getattr(transformers, name)
        found.append(_tried(other.config_class.model_type, name, other.config_class, partial(new_model, other)))
    return found


def _tried(family: str, class_name: str, config: Callable[[], Any], build: Any) -> Diagnosis:
    try:
        return Diagnosis(family, class_name, _diagnosis_of(config(), build))
    except Exception as error:  # a configuration checks itself too
        return Diagnosis(family, class_name, problem=str(error) if isinstance(error, ConfigError) else _words(error))


def not_recognised() -> dict[str, str]:
    """Try all that is recognised in other libraries on those that are installed.

    Returns:
        what is not, each with what follows of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caller tells
        check_all()
    launcher = unknown_launcher()
    return {**all_missed(), **({launcher: SLOW_LAUNCHES} if launcher else {})}


def cells(report: PatchReport) -> dict[str, str]:
    """Return what is swapped, by column; empty if nothing is, and under images where the model reads none."""
    cells = {
        column: ", ".join(kind for kind in kinds if report.swapped[kind]).replace("fused loss", "fused")
        for column, kinds in COLUMNS.items()
    }
    tower = report.tower
    kinds = () if tower is None else (kind for kind in (*LAYERS, ATTENTION_OF_TOWERS) if tower.swapped[kind])
    of_tower = "" if tower is None else ", ".join(kinds) or "nothing"
    return {**cells, IMAGES: of_tower}


def family_of(config: Any) -> str:
    return f"{config.model_type}, {class_of(config) or 'no causal LM'}"


def print_missed(missed: dict[str, str]) -> None:
    table = Table("not recognised", "what follows")
    for what, consequence in missed.items():
        table.add_row(escape(what), escape(consequence))
    Console().print(table)


def print_report(report: PatchReport, title: str) -> None:
    table = Table("layer", "instances", title=title, title_justify="left")
    for kind, count in report.swapped.items():
        table.add_row(kind, str(count))
    console = Console()
    console.print(table)
    if not report.left_alone:
        console.print("Left alone: none.")
        return
    table = Table("left alone", "why")
    for name, why in report.left_alone.items():
        table.add_row(escape(name), escape(why))
    console.print(table)


def print_all(diagnoses: list[Diagnosis]) -> None:
    table = Table("family or class", *COLUMNS, IMAGES, "left alone")
    for found in diagnoses:
        if found.report is None:
            table.add_row(found.name, *([""] * (len(COLUMNS) + 1)), escape(found.problem))
        else:
            left = ", ".join(found.report.left_alone)
            table.add_row(found.name, *cells(found.report).values(), escape(left))
    Console().print(table)
