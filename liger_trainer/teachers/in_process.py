"""What distillation does with a teacher in this process: its dtype, layers, logits and metrics."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from ..common.console import announce
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits, deferred_logits
from ..losses.fused_forward import TokenLossOutput
from ..patching.patcher import NothingToPatch, Patched, PatchOptions, base_of, patched_record

_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


def teacher_dtype(args: TrainingArguments) -> str:
    """That of the run, for a teacher loaded from its path."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def check_apart(student: Any, teacher: Any) -> None:
    """Raise ConfigError where a teacher is the student, or made of weights that are trained."""
    moving = {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
    if base_of(teacher) is base_of(student) or any(id(parameter) in moving for parameter in teacher.parameters()):
        raise ConfigError(
            "The student cannot be its own teacher: its weights would move under the teacher. Load the teacher as "
            "a model of its own; for adapters beside their frozen base, LigerDistillTrainer has teacher='self'."
        )


def patch_layers(model: PreTrainedModel, options: PatchOptions, name: str) -> Patched | None:
    """The layers of a model, without its loss. One that is patched already stays so; None if nothing is found."""
    done = patched_record(model)
    if done is not None:
        return done
    try:
        done = Patched(base_of(model), replace(options, fused_linear_cross_entropy=False))
    except NothingToPatch as error:
        announce(f"{name}: {error}")
        return None
    announce(f"{name}: {done.report}")
    return done


def teacher_logits(call: Callable[..., Any], base: Any, *args: Any, **inputs: Any) -> DeferredLogits | Tensor:
    """The deferred logits of `call(*args, **inputs)`, a teacher around `base`: hidden states, and how its head goes
    on. Without gradient.

    Raises:
        ConfigError: an encoder-decoder without the tokens of its decoder, which a student makes of its labels.
    """
    config = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False) and not any(name in inputs for name in _OF_DECODER):
        raise ConfigError(
            f"The teacher, a {type(base).__name__}, is asked without labels, of which it would make the input of its "
            "decoder. Have the data collator add decoder_input_ids to the batch: both models then read the same."
        )
    with torch.no_grad(), deferred_logits(base, outlive=True):
        return call(*args, **inputs).logits


def per_token_values(outputs: TokenLossOutput) -> dict[str, Tensor]:
    """What distillation logs, to be averaged over tokens; without what the teacher does not determine."""
    values = {
        "kd_loss": outputs.divergence,
        "ce_loss": -outputs.log_probs,
        "forward_kl": outputs.forward_kl,
        "reverse_kl": outputs.reverse_kl,
        "agreement_at_1": outputs.agrees,
        "student_perplexity": -outputs.log_probs,
        "teacher_perplexity": None if outputs.teacher_log_probs is None else -outputs.teacher_log_probs,
        "teacher_entropy": outputs.teacher_entropy,
        "jsd": outputs.jsd,
        **{f"loss/{name}": value for name, value in (outputs.terms or {}).items()},
        **(outputs.by_teacher or {}),
    }
    return {name: value for name, value in values.items() if value is not None}
