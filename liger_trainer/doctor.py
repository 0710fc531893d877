"""What `patch` would swap in a model and what it would leave alone, found from its configuration, without weights."""

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .errors import ConfigError
from .patching import NothingToPatch, Patched, PatchOptions, PatchReport

# The kinds of a report (`PatchReport.swapped`) by the column of the table that they stand in.
COLUMNS = {
    "norms": ("RMSNorm", "LayerNorm"),
    "MLP": ("SwiGLU", "GEGLU", "ReLU2", "SwiGLU experts", "GEGLU experts", "LoRA MLP"),
    "rope": ("rope", "QK norm + rope"),
    "head": ("fused loss",),
}


@dataclass(frozen=True)
class Diagnosis:
    """A family's report, or in words why its model could not be built."""

    family: str
    class_name: str
    report: PatchReport | None = None
    problem: str = ""


def config_of(model: str) -> Any:
    """The configuration of a model: of a directory or a cached hub id its own, of a model type the default one.

    Raises:
        ConfigError: neither.
    """
    if model in CONFIG_MAPPING and not os.path.isdir(model):
        try:
            return CONFIG_MAPPING[model]()
        except Exception as error:  # each family has checks of its own
            raise ConfigError(f"{model} has no default configuration: {_words(error)}") from None
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
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
    """What `patch` does to the causal LM of a configuration, built on the meta device.

    Raises:
        ConfigError: transformers has no causal LM for it, or cannot build it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each family has checks of its own
        if str(error).startswith("Unrecognized configuration class"):  # and all that there are
            raise ConfigError(
                f"transformers {transformers.__version__} has no causal LM for a {type(config).__name__}. "
                "patch(model) takes any model, and its report says what was found."
            ) from None
        raise ConfigError(f"The causal LM of a {type(config).__name__} cannot be built: {_words(error)}") from None
    try:
        with Patched(model, options or PatchOptions()) as patched:
            return patched.report
    except NothingToPatch as nothing:
        return nothing.report


def diagnose_all() -> list[Diagnosis]:
    """Every causal-LM family of the installed transformers, with its default configuration."""
    diagnoses = []
    for family, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            found = Diagnosis(family, class_name, diagnose(config_of(family)))
        except ConfigError as error:
            found = Diagnosis(family, class_name, problem=str(error))
        diagnoses.append(found)
    return diagnoses


def cells(report: PatchReport) -> dict[str, str]:
    """What is swapped, by column; empty where nothing is."""
    return {
        column: ", ".join(kind for kind in kinds if report.swapped[kind]).replace("fused loss", "fused")
        for column, kinds in COLUMNS.items()
    }


def family_of(config: Any) -> str:
    return f"{config.model_type}, {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, 'no causal LM')}"


def markdown_report(report: PatchReport) -> str:
    """One model's report."""
    swapped = [f"| {kind} | {count} |" for kind, count in report.swapped.items()]
    left = [f"| {_cell(name)} | {_cell(why)} |" for name, why in report.left_alone.items()]
    lines = ["| layer | instances |", "|---|---|", *swapped]
    return "\n".join(lines + (["", "| left alone | why |", "|---|---|", *left] if left else [])) + "\n"


def markdown(diagnoses: Iterable[Diagnosis]) -> str:
    """The families' table, and the layers that are left alone with the reasons."""
    diagnoses = list(diagnoses)
    built = [d for d in diagnoses if d.report is not None]
    lines = [
        f"| family | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
        *(f"| {d.family} | {' | '.join(cells(d.report).values())} |" for d in built if d.report is not None),
        "",
        "## Left alone",
        "",
        "Layers that look like ours and compute something else, or cannot be replaced.",
        "",
        "| layer | why | families |",
        "|---|---|---|",
        *(f"| {name} | {why} | {', '.join(families)} |" for (name, why), families in _left_alone(built).items()),
    ]
    if len(built) < len(diagnoses):
        lines += ["", "## Not built", "", "Families whose default configuration does not make a causal LM.", ""]
        lines += ["| family | why |", "|---|---|"]
        lines += [f"| {d.family} | {_cell(d.problem)} |" for d in diagnoses if d.report is None]
    return "\n".join(lines) + "\n"


def _left_alone(diagnoses: Iterable[Diagnosis]) -> dict[tuple[str, str], list[str]]:
    left: dict[tuple[str, str], list[str]] = {}
    for diagnosis in diagnoses:
        assert diagnosis.report is not None
        for name, why in diagnosis.report.left_alone.items():
            left.setdefault((_cell(name), _cell(why)), []).append(diagnosis.family)
    return dict(sorted(left.items()))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def document(diagnoses: Iterable[Diagnosis]) -> str:
    """docs/models.md."""
    diagnoses = list(diagnoses)
    built = [d for d in diagnoses if d.report is not None]
    counts = {column: sum(bool(cells(d.report)[column]) for d in built if d.report is not None) for column in COLUMNS}
    return "\n".join(
        [
            "# Models",
            "",
            "What [`patch`](patching.md) swaps in each causal-LM family of transformers "
            f"{transformers.__version__}, with the family's default",
            "configuration. There is no list of models in the code: layers are found by structure, and proved before "
            "they are swapped. The",
            "page is what this command prints:",
            "",
            "```bash",
            "liger-trainer doctor --all --markdown",
            "```",
            "",
            f"Of {len(diagnoses)} families {len(built)} can be built from their default configuration. Swapped are the "
            f"norms of {counts['norms']}, the MLPs or experts of {counts['MLP']},",
            f"the rotary functions of {counts['rope']}, and the loss, which no longer stores logits, of "
            f"{counts['head']}.",
            "",
            markdown(diagnoses),
        ]
    )
