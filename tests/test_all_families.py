"""Every causal-LM family of transformers that can be built tiny: fused loss and gradients equal the plain model's."""

import copy
import warnings

import pytest
import torch
from families import VOCAB, build
from tiny import named_gradients
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.deferred import DeferredLogits, MaterializedLogitsWarning
from liger_trainer.errors import ConfigError
from liger_trainer.fused import FusedLoss, _warn_once

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chunked_torch")]


def relative_error(got, want):
    norms = [sum(g.double().square().sum() for g in grads).sqrt().item() for grads in (got, want)]
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(got, want, strict=True)).sqrt().item()
    assert norms[1] > 0
    return difference / norms[1]


def outcome(model):
    """How the fused loss of a model compares with its own: "equal", "wrong ...", "warns ...", or why it was skipped."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = labels[1, -2:] = -100
    batch = {"input_ids": ids, "labels": labels}
    plain = copy.deepcopy(model)
    try:
        torch.manual_seed(1)
        want = plain(**batch)
        gradients = named_gradients(plain, want.loss)
    except Exception as e:
        return f"skipped: does not train: {type(e).__name__} {str(e)[:80]}"
    try:
        FusedLoss(model)
    except ConfigError as e:
        return f"refused: {e}"
    _warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MaterializedLogitsWarning)
        torch.manual_seed(1)
        got = model(**batch)
        fused = named_gradients(model, got.loss)
        caught = [str(w.message) for w in caught if w.category is MaterializedLogitsWarning]
    errors = [
        abs(got.loss.item() / want.loss.item() - 1),
        relative_error(list(fused.values()), list(gradients.values())),
    ]
    if max(errors) > 1e-4 or not max(errors) == max(errors):
        return f"wrong: loss and gradients differ by {errors}"
    if caught:
        return f"warns: {caught[0]}"
    return "equal" if isinstance(got.logits, DeferredLogits) else f"warns: {type(got.logits).__name__} without a word"


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
