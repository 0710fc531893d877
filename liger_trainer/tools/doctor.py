"""Report what `patch` would swap in a model and what it would not, from its configuration, without weights."""

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
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

from .. import plugins
from ..compat import all_missed
from ..compat.models import GATE, new_model
from ..compat.recognitions import check_all
from ..errors import ConfigError
from ..kernels.runtime import SLOW_LAUNCHES, unknown_launcher
from ..patching.patcher import NothingToPatch, Patched, PatchOptions, PatchReport
from ..patching.vision import counting_forward, embed_patches
from ..plugins import DEMO
from ..trainers.images import vision_tower
from .estimate.step_spec import DEMO_CONFIG

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

# Classes that no test compares with stock transformers, and why; one test fails if another joins them.
_DEFAULTS = "no small configuration is known: parts of it must fit each other"
_SIZE = "its default configuration stays too large when it is shrunk"
_TIMM = "compared only where timm is installed; equal then"
NOT_COMPARED = {
    "Apertus1p5ForConditionalGeneration": _DEFAULTS,
    **dict.fromkeys(("BarkCausalModel", "BarkCoarseModel", "BarkSemanticModel"), "transformers has no training for it"),
    "Dots3NoteForConditionalGeneration": _DEFAULTS,
    "FastVlmForConditionalGeneration": _TIMM,
    "FunAsrNanoForConditionalGeneration": _DEFAULTS,
    "GradiumPhononTTSForConditionalGeneration": _DEFAULTS,
    "Granite4VisionForConditionalGeneration": _DEFAULTS,
    "InklingForConditionalGeneration": "compared only where scipy is installed; equal then",
    "Llama4ForConditionalGeneration": "its own forward fails in transformers 5.24: it asks for image_outputs",
    "MuseSparkForConditionalGeneration": _SIZE,
    "Nemotron3_5TranscribeForConditionalGeneration": _SIZE,
    "PerceptionLMForConditionalGeneration": _TIMM,
    "Pix2StructForConditionalGeneration": "its own forward fails on a batch: its mask does not broadcast over heads",
    "PocketTTSForConditionalGeneration": _DEFAULTS,
    "Qwen3OmniMoeTalkerForConditionalGeneration": "its constructor reads attributes that its configuration lacks",
    "RagTokenForGeneration": _SIZE,
    "VibeVoiceForConditionalGeneration": _SIZE,
}


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
    if model.startswith(DEMO) and plugins.load(DEMO).demo_key(model):
        return LlamaConfig(**DEMO_CONFIG)  # its directory is built by the first run, which may be later
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


def markdown_of_missed(missed: dict[str, str]) -> str:
    """Write what `not_recognised` returns; empty if that is nothing."""
    rows = [f"| {_cell(what)} | {_cell(consequence)} |" for what, consequence in missed.items()]
    return "\n".join(["", "| not recognised | what follows |", "|---|---|", *rows, ""]) if rows else ""


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


def markdown_report(report: PatchReport) -> str:
    """Write the report of one model."""
    swapped = [f"| {kind} | {count} |" for kind, count in report.swapped.items()]
    left = [f"| {_cell(name)} | {_cell(why)} |" for name, why in report.left_alone.items()]
    lines = ["| layer | instances |", "|---|---|", *swapped]
    return "\n".join(lines + (["", "| left alone | why |", "|---|---|", *left] if left else [])) + "\n"


def markdown(diagnoses: Iterable[Diagnosis]) -> str:
    """Write the tables of families and of other classes, and the layers that stay as they are, with the reasons."""
    diagnoses = list(diagnoses)
    built = [d for d in diagnoses if d.report is not None]
    families, others = [d for d in built if d.name == d.family], [d for d in built if d.name != d.family]
    lines = [*_table("family", families), ""]
    if others:
        lines += ["## Other classes with a causal-LM head", "", _OF_OTHERS, "", *_table("class", others), ""]
    lines += [
        "## Left alone",
        "",
        "Layers that look like ours and compute something else, or cannot be replaced.",
        "",
        "| layer | why | families and classes |",
        "|---|---|---|",
        *(f"| {name} | {why} | {', '.join(names)} |" for (name, why), names in _left_alone(built).items()),
    ]
    if len(built) < len(diagnoses):
        lines += ["", "## Not built", "", "What cannot be built from its default configuration.", ""]
        lines += ["| family or class | why |", "|---|---|"]
        lines += [f"| {d.name} | {_cell(d.problem)} |" for d in diagnoses if d.report is None]
    unproved = [f"| {d.name} | {NOT_COMPARED[d.name]} |" for d in diagnoses if d.name in NOT_COMPARED]
    if unproved:
        lines += ["", "## Not compared", "", _OF_UNPROVED, "", "| class | why |", "|---|---|", *unproved]
    return "\n".join(lines) + "\n"


_OF_OTHERS = (
    "Encoder-decoders, speech, images and text: what writes token after token and learns from labels, and is none of "
    "the above. The\nfused loss has the targets that the model's forward makes of its labels, shifted there or not."
)

_OF_UNPROVED = (
    "The rest of the other classes are built small, and their loss and gradients are compared with stock transformers, "
    "fused or left alone."
)


def _table(column: str, diagnoses: Iterable[Diagnosis]) -> list[str]:
    rows = (f"| {d.name} | {' | '.join(cells(d.report).values())} |" for d in diagnoses if d.report is not None)
    return [f"| {column} | {' | '.join((*COLUMNS, IMAGES))} |", f"|---|{'---|' * (len(COLUMNS) + 1)}", *rows]


def _left_alone(diagnoses: Iterable[Diagnosis]) -> dict[tuple[str, str], list[str]]:
    left: dict[tuple[str, str], list[str]] = {}
    for diagnosis in diagnoses:
        assert diagnosis.report is not None
        for name, why in diagnosis.report.left_alone.items():
            left.setdefault((_cell(name), _cell(why)), []).append(diagnosis.name)
    return dict(sorted(left.items()))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def document(diagnoses: Iterable[Diagnosis]) -> str:
    """Write docs/models.md."""
    diagnoses = list(diagnoses)
    families = [d for d in diagnoses if d.name == d.family]
    others = [d for d in diagnoses if d.name != d.family]
    counted = [*_counted("families", families), *_share_left_alone(families)]
    counted += _counted("other classes with a causal-LM head", others)
    return f"""# Models

What [`patch`](patching.md) swaps in each causal-LM family of transformers {transformers.__version__}, with the family's default
configuration. There is no list of models in the code: layers are found by structure, and proved before they are swapped. The
page is what this command prints:

```bash
liger-trainer doctor --all --markdown
```

{chr(10).join(counted)}

{markdown(diagnoses)}"""  # noqa: E501


def _share_left_alone(diagnoses: list[Diagnosis]) -> list[str]:
    reports = [d.report for d in diagnoses if d.report is not None]
    swapped = set().union(*(report.classes for report in reports))
    left = {name for report in reports for name in report.left_alone if name != "loss"} - swapped
    total = len(swapped) + len(left)
    return [
        f"These families have {total} classes of norms, MLPs, experts and attention with a rotation: {len(left)} "
        f"({100 * len(left) / max(total, 1):.0f} %) are left alone."
    ]


def _counted(what: str, diagnoses: list[Diagnosis]) -> list[str]:
    built = [d for d in diagnoses if d.report is not None]
    all_cells = [cells(d.report) for d in built if d.report is not None]
    counts = {column: sum(bool(each[column]) for each in all_cells) for column in (*COLUMNS, IMAGES)}
    gated = sum(bool(each["MLP"] or each["experts"]) for each in all_cells)
    images = f" {counts[IMAGES]} of them read images: the last column." if counts[IMAGES] else ""
    return [
        f"Of {len(diagnoses)} {what} {len(built)} can be built from their default configuration. Swapped are the "
        f"norms of {counts['norms']}, the MLPs or experts of {gated},",
        f"the rotary functions of {counts['rope']}, and the loss, which no longer stores logits, of {counts['head']}."
        f"{images}",
    ]
