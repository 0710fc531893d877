"""What distillation does with a teacher in this process: its dtype, layers, vocabulary, logits and metrics."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from .deferred import DeferredLogits, deferred_logits
from .errors import ConfigError
from .fused import TokenLossOutput
from .patching import NothingToPatch, Patched, PatchOptions, announce, base_of, patched_record

logger = logging.getLogger(__name__)


def teacher_dtype(args: TrainingArguments) -> str:
    """That of the run, for a teacher loaded from its path."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


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


def shared_vocabulary(student: Any, teacher: Any, tokenizer: Any) -> int:
    """The size of the real vocabulary that both heads cover. What is padded beyond it takes no part in the loss.

    Raises:
        ConfigError: the student or the teacher lacks tokens of it.
    """
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    real = check_student_vocabulary(student, max(tokenizer.get_vocab().values()) + 1)
    if sizes[1] < real:
        raise ConfigError(
            f"The teacher knows {sizes[1]} tokens, but the student's tokenizer has {real}: they do not share a "
            "vocabulary. Use a teacher with the same tokenizer."
        )
    if max(sizes) > real:
        logger.warning("Vocabulary: %d of the student's %d and the teacher's %d rows take part.", real, *sizes)
    return real


def check_student_vocabulary(student: Any, real: int) -> int:
    """`real`, the number of tokens, if the student has them all. Raises ConfigError otherwise."""
    size = student.get_output_embeddings().weight.shape[0]
    if size < real:
        raise ConfigError(
            f"The student knows {size} tokens, but the tokenizer has {real}: resize its embeddings, or pass "
            "the tokenizer that belongs to it."
        )
    return real


def teacher_logits(call: Callable[..., Any], base: Any, *args: Any, **inputs: Any) -> DeferredLogits | Tensor:
    """The deferred logits of `call(*args, **inputs)`, a teacher around `base`: hidden states, and how its head goes
    on. Without gradient."""
    with torch.no_grad(), deferred_logits(base):
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
        "teacher_perplexity": -outputs.teacher_log_probs,
        "teacher_entropy": outputs.teacher_entropy,
    }
    return {name: value for name, value in values.items() if value is not None}
