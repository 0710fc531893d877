"""Every class with a causal-LM head that can be built tiny: loss and gradients, fused and patched, are its own."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from families import VOCAB, build, build_class
from labelled import batches
from steps import only
from tiny import assert_same_gradients, named_gradients
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from docs.models_page import NOT_COMPARED
from liger_trainer.errors import MaterializedLogitsWarning
from liger_trainer.extras import doctor
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.fused_forward import _warn_once
from liger_trainer.patching.patcher import NothingToPatch, patch

pytestmark = pytest.mark.slow


def relative_error(got, want):
    norms = [sum(g.double().square().sum() for g in grads).sqrt().item() for grads in (got, want)]
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(got, want, strict=True)).sqrt().item()
    assert norms[1] > 0
    return difference / norms[1]


def run(model, batch=None):
    """Outputs and gradients of one batch."""
    torch.manual_seed(1)
    outputs = model(**(batch or text()))
    return outputs, named_gradients(model, outputs.loss)


def text():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


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


# Families whose fused loss stays exact but stores logits, and says so: a head that is more than a linear map.
STORE_LOGITS = {"dory"}


OPTION_OF = {
    "gated RMSNorm": "rms_norm", 
    "RMSNorm": "rms_norm", "LayerNorm": "layer_norm", "SwiGLU": "swiglu", "SwiGLU experts": "swiglu", "GEGLU": "geglu",
    "GEGLU experts": "geglu", "ReLU2": "relu2", "GELU MLP": "gelu", "rope": "rope", "QK norm + rope": "rope",
    "tower attention": "towers", "patch embedding": "towers", "placeholders": "towers",
    "causal conv": "hybrids", "Mamba-2 scan": "hybrids",
    "shared input": "linear", "fused loss": "fused_linear_cross_entropy",
}  # fmt: skip


def patched_outcomes(model):
    """By option, and "all": "equal" or "wrong ..."; and "logits": whether the fused loss leaves them deferred, "none"
    where there is no such loss. In words, if the plain model does not train."""
    try:
        want = run(model)  # not a copy: BigBird replaces its attention when it sees the first batch
    except Exception as e:
        return f"skipped: does not train: {type(e).__name__} {str(e)[:80]}"
    outcomes, options = {"logits": "none"}, {"all": {}}
    while options:
        part, flags = options.popitem()
        _warn_once.cache_clear()
        try:
            with patch(model, flags) as patched, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", MaterializedLogitsWarning)
                if part == "all":
                    swapped = {OPTION_OF[kind] for kind in patched.report.swapped}
                    options = {option: only(option) for option in swapped}
                    assert {"fused loss", "loss"} & {*patched.report.swapped, *patched.report.left_alone}
                got = run(model)
            wrong = differences(got, want)
            outcomes[part] = f"wrong: {wrong}" if wrong else "equal"
            if part == "fused_linear_cross_entropy":
                stored = any(w.category is MaterializedLogitsWarning for w in caught)
                deferred = isinstance(got[0].logits, DeferredLogits) and not stored
                outcomes["logits"] = "deferred" if deferred else "stored"
        except NothingToPatch:
            outcomes[part] = "nothing"
    if differences(run(model), want):
        outcomes["undone"] = "wrong"
    return outcomes


def test_every_family_patched_as_a_whole_and_part_by_part():
    wrong, counts, stored, trained = {}, Counter(), set(), 0
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model = build(model_type, class_name, experts="grouped_mm")
        outcomes = model if isinstance(model, str) else patched_outcomes(model)
        if isinstance(outcomes, str):
            print(f"{model_type}: {outcomes}")
            continue
        trained += 1
        logits = outcomes.pop("logits")
        counts[logits] += 1
        if logits == "stored":
            stored.add(model_type)
        for part, result in outcomes.items():
            counts[part] += result == "equal"
            if result != "equal":
                wrong[f"{model_type}, {part}"] = result
    print(trained, counts, stored)
    assert wrong == {} and stored <= STORE_LOGITS and counts["deferred"] >= 100
    assert trained >= 120 and counts["all"] == trained
    assert counts["rms_norm"] >= 85 and counts["swiglu"] >= 60 and counts["rope"] >= 60


def first_that_trains(model):
    """(name of the batch, batch, outputs and gradients), or in words why the plain model trains on none."""
    reasons = []
    for name, batch in batches(model).items():
        try:
            want = run(copy.deepcopy(model), batch)
        except Exception as e:  # each class has checks of its own
            reasons.append(f"{name}: {type(e).__name__} {' '.join(str(e).split())[:80]}")
            continue
        if want[0].loss is not None and want[0].loss.isfinite():
            return name, batch, want
    return f"does not train: {reasons[0]}"


def differences_in_double(model, plain, batch):
    """The same in fp64: tiny random models may magnify what another order of fp32 sums rounds otherwise."""
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    return differences(run(model.double(), batch), run(plain.double(), batch))


def compared(class_name):
    """How the patched model compares: "equal, fused", "equal, left alone", "wrong ...", or why it is not compared."""
    model = build_class(class_name, experts="grouped_mm")
    first = model if isinstance(model, str) else first_that_trains(model)
    if isinstance(first, str):
        return f"not compared: {first}"
    name, batch, want = first
    plain = copy.deepcopy(model)
    try:
        patched = patch(model)
    except NothingToPatch as nothing:
        return "equal, left alone" if "loss" in nothing.report.left_alone else "wrong: no word about the loss"
    with patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        wrong = differences(run(model, batch), want) and differences_in_double(model, plain, batch)
        fused = "fused loss" in patched.report.swapped
        if not fused and "loss" not in patched.report.left_alone:
            wrong = wrong or "no word about the loss"
    return f"wrong: {name}: {wrong}" if wrong else f"equal, {'fused' if fused else 'left alone'}"


def test_every_other_class_with_labels_as_its_documentation_has_them():
    outcomes = {name: compared(name) for name in doctor.other_classes()}
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    kinds = {kind: [n for n, o in outcomes.items() if o.startswith(kind)] for kind in ("equal, fused", "equal, left")}
    print({kind: len(names) for kind, names in kinds.items()}, len(outcomes))
    assert {name: outcome for name, outcome in outcomes.items() if outcome.startswith("wrong")} == {}
    assert {name for name, outcome in outcomes.items() if outcome.startswith("not compared")} <= NOT_COMPARED.keys()
    assert len(kinds["equal, fused"]) >= 80 and len(kinds["equal, left"]) >= 55
