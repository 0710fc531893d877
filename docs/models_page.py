"""Prints docs/models.md: what `patch` swaps in each class of transformers."""

import warnings
from collections.abc import Iterable

import transformers
from transformers.utils import logging

from liger_trainer.extras.doctor import COLUMNS, IMAGES, Diagnosis, cells, diagnose_all

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


def page(diagnoses: Iterable[Diagnosis]) -> str:
    """Return docs/models.md."""
    diagnoses = list(diagnoses)
    families = [d for d in diagnoses if d.name == d.family]
    others = [d for d in diagnoses if d.name != d.family]
    counted = [*_counted("families", families), *_share_left_alone(families)]
    counted += _counted("other classes with a causal-LM head", others)
    return f"""# Models

What [`patch`](patching.md) swaps in each causal-LM family of transformers {transformers.__version__}, with the family's default
configuration. There is no list of models in the code: layers are found by structure, and proved before they are swapped. The
page is what `python docs/models_page.py` prints in a checkout; `liger-trainer doctor --all` prints its tables.

{chr(10).join(counted)}

{markdown(diagnoses)}"""  # noqa: E501


def _share_left_alone(diagnoses: list[Diagnosis]) -> list[str]:
    reports = [d.report for d in diagnoses if d.report is not None]
    swapped = set().union(*(report.classes for report in reports))
    left = {name for report in reports for name in report.left_alone if name != "loss"} - swapped
    total = len(swapped) + len(left)
    return [
        f"These families have {total} classes of norms, MLPs, experts, convolutions and attention with a rotation: "
        f"{len(left)} ({100 * len(left) / max(total, 1):.0f} %) are left alone."
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


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"transformers\b")  # it warns of nearly every default configuration
    logging.set_verbosity_error()
    print(page(diagnose_all()), end="")
