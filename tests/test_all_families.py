"""Every causal-LM family of transformers that can be built tiny: loss and gradients, fused and patched, are its own."""

import copy
import warnings

import pytest
import torch
from families import VOCAB, build
from tiny import assert_same_gradients, named_gradients
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.deferred import DeferredLogits, MaterializedLogitsWarning
from liger_trainer.errors import ConfigError
from liger_trainer.fused import FusedLoss, _warn_once
from liger_trainer.patching import NothingToPatch, PatchOptions, patch

pytestmark = pytest.mark.slow


def relative_error(got, want):
    norms = [sum(g.double().square().sum() for g in grads).sqrt().item() for grads in (got, want)]
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(got, want, strict=True)).sqrt().item()
    assert norms[1] > 0
    return difference / norms[1]


def run(model):
    """Outputs and gradients of one batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = labels[1, -2:] = -100
    torch.manual_seed(1)
    outputs = model(input_ids=ids, labels=labels)
    return outputs, named_gradients(model, outputs.loss)


def differences(got, want):
    """In words, how outputs and gradients differ, "" if they do not: 1e-4 on the loss and on all gradients together."""
    errors = [
        abs(got[0].loss.item() / want[0].loss.item() - 1),
        relative_error(list(got[1].values()), list(want[1].values())),
    ]
    if not max(errors) <= 1e-4 or any(error != error for error in errors):
        return f"loss and gradients differ by {errors}"
    try:
        assert_same_gradients(got[1], want[1], 1e-3)
    except AssertionError as e:
        return str(e).partition("\n")[0]
    return ""


def outcome(model):
    """How the fused loss of a model compares with its own: "equal", "wrong ...", "warns ...", or why it was skipped."""
    try:
        want = run(copy.deepcopy(model))
    except Exception as e:
        return f"skipped: does not train: {type(e).__name__} {str(e)[:80]}"
    try:
        FusedLoss(model)
    except ConfigError as e:
        return f"refused: {e}"
    _warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MaterializedLogitsWarning)
        got = run(model)
        caught = [str(w.message) for w in caught if w.category is MaterializedLogitsWarning]
    wrong = differences(got, want)
    if wrong:
        return f"wrong: {wrong}"
    if caught:
        return f"warns: {caught[0]}"
    logits = got[0].logits
    return "equal" if isinstance(logits, DeferredLogits) else f"warns: {type(logits).__name__} without a word"


# Families that stay exact but store logits, and say so: decoders that compute the cross-entropy themselves, and one
# that cuts its padding off the logits.
STORE_LOGITS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
    "plbart", "trocr", "whisper", "xlm", "inkling2_text",
}  # fmt: skip


def test_every_family_that_can_be_built():
    outcomes = {}
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model = build(model_type, class_name)
        try:
            outcomes[model_type] = f"skipped: {model}" if isinstance(model, str) else outcome(model)
        except Exception as e:
            outcomes[model_type] = f"wrong: {type(e).__name__} {str(e)[:200]}"
    kinds = {}
    for model_type, result in outcomes.items():
        kinds.setdefault(result.split(":")[0], []).append(model_type)
        if result != "equal":
            print(f"{model_type}: {result}")
    print({kind: len(families) for kind, families in kinds.items()})
    assert {family: outcomes[family] for family in kinds.get("wrong", [])} == {}
    assert {family: outcomes[family] for family in kinds.get("warns", []) if family not in STORE_LOGITS} == {}
    assert len(kinds["equal"]) >= 100


OPTION_OF = {
    "RMSNorm": "rms_norm", "LayerNorm": "layer_norm", "SwiGLU": "swiglu", "SwiGLU experts": "swiglu", "GEGLU": "geglu",
    "GEGLU experts": "geglu", "ReLU2": "relu2", "rope": "rope", "QK norm + rope": "rope",
    "fused loss": "fused_linear_cross_entropy",
}  # fmt: skip


def patched_outcomes(model):
    """By option, and "all": "equal" or "wrong ...". In words, if the plain model does not train."""
    try:
        want = run(copy.deepcopy(model))
    except Exception as e:
        return f"skipped: does not train: {type(e).__name__} {str(e)[:80]}"
    nothing = dict.fromkeys(vars(PatchOptions()), False)
    outcomes, options = {}, {"all": {}}
    while options:
        part, flags = options.popitem()
        try:
            with patch(model, flags) as patched, warnings.catch_warnings():
                warnings.simplefilter("ignore", MaterializedLogitsWarning)
                if part == "all":
                    swapped = {OPTION_OF[kind] for kind in patched.report.swapped}
                    options = {option: {**nothing, option: True} for option in swapped}
                wrong = differences(run(model), want)
            outcomes[part] = f"wrong: {wrong}" if wrong else "equal"
        except NothingToPatch:
            outcomes[part] = "nothing"
    if differences(run(model), want):
        outcomes["undone"] = "wrong"
    return outcomes


def test_every_family_patched_as_a_whole_and_part_by_part():
    wrong, counts, trained = {}, {}, 0
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model = build(model_type, class_name, experts="grouped_mm")
        outcomes = model if isinstance(model, str) else patched_outcomes(model)
        if isinstance(outcomes, str):
            print(f"{model_type}: {outcomes}")
            continue
        trained += 1
        for part, result in outcomes.items():
            counts[part] = counts.get(part, 0) + (result == "equal")
            if result != "equal":
                wrong[f"{model_type}, {part}"] = result
    print(trained, counts)
    assert wrong == {}
    assert trained >= 120 and counts["all"] == trained
    assert counts["rms_norm"] >= 85 and counts["swiglu"] >= 60 and counts["rope"] >= 60
