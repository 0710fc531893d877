"""What a trainer asks of a teacher: a model, a cache, a server, or the student itself.

Each kind of teacher is a class. It is made from the trainer's arguments before anything is loaded, checks the prepared
rows, takes its place once the student exists, and then answers for each batch.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from ..common.console import announce
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits, settled
from ..losses.deferring_head import deferred_logits
from ..losses.spec import Logits, TeacherAnswer
from ..patching.packing.packed_rows import PackedRows, patch_packed_attention
from ..patching.patcher import NothingToPatch, Patched, PatchOptions, base_of, patched_record

_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")

Cut = Callable[[np.ndarray], np.ndarray]
"""Cuts the token ids or the labels of a row as truncation will."""


class DistillHost(Protocol):
    """What a teacher may read of its trainer in `prepare`. It does not keep the trainer."""

    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    @property
    def accelerator(self) -> Any: ...
    @property
    def student(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def patched(self) -> Any: ...
    @property
    def packed_rows(self) -> PackedRows | None: ...
    def shards_sequences(self) -> bool: ...


class Teacher(ABC):
    """One kind of teacher. It refuses what cannot work with a ConfigError, as early as possible.

    Attributes:
        model: the teacher's model; None where this process has none.
        patched: the record of what was replaced in it, or None.
        knows_new_tokens: whether it can answer about tokens that are in no dataset, such as sampled ones.
        tokenizer: the teacher's own, where it does not read the student's tokens; else None.
        reads: after `prepare`, how many of the student's token ids it can read; None for all.
        unshared: after `prepare`, ids that only one of the two tokenizers has.
        processor: the teacher's, in place of the one next to its model; None where none was given.
        draws_by: the processor that makes rows only for the teacher; None where it reads the student's.
    """

    model: Any = None
    patched: Any = None
    knows_new_tokens = True
    tokenizer: Any = None
    reads: int | None = None
    unshared: frozenset[int] = frozenset()
    processor: Any = None
    draws_by: Any = None

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        """Look at the rows of a dataset as they came, before they are tokenized with this tokenizer."""
        return None

    def prepare_dataset(
        self, prepare: Callable[[Any, bool], Any], dataset: Any, packing: bool, name: str, *, tokenizer: Any,
        formatting_func: Any,
    ) -> Any:  # fmt: skip
        """Return the rows as the trainer's own `prepare(dataset, packing)` makes them, after checking them."""
        prepared = prepare(dataset, packing)
        self.check(prepared, name, tokenizer)
        return prepared

    def see_prompts(self, dataset: Any, name: str, read: Callable[[Any], list[list[int]]], *, tokenizer: Any) -> None:
        """Look at rows of only prompts, which `read(tokenizer)` makes token ids of, with this tokenizer or its own."""
        return None

    def read_rows(self, dataset: Dataset, name: str, cut: Cut) -> None:
        """Look at the tokenized rows of a dataset, with all columns, before they are cut to length and packed."""
        return None

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        """Raise where it cannot teach a prepared dataset, made with this tokenizer. No model is loaded yet."""
        return None

    def collator(self, collator: Any) -> Any:
        """Return the trainer's collator, or one around it that adds what `answer` needs."""
        return collator

    def sampled_collator(self, collator: Any) -> Any:
        """Return TRL's collator, or one around it, for rows whose completions have just been sampled. What it makes
        replaces what `collator` made of the dataset's rows."""
        return collator

    def fingerprints(self) -> dict[str, Any]:
        """Return what identifies it in checkpoints, after `prepare`: {name: text or a dictionary of the same form}."""
        return {}

    @abstractmethod
    def prepare(self, trainer: DistillHost) -> int:
        """Get ready to answer, now that the student exists. Return the size of the vocabulary that both share."""

    @abstractmethod
    def answer(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        """Its knowledge at the positions of a batch, without gradient. What only it needs is taken out of `inputs`."""

    def longest_row(self, tokens: int) -> int:
        """Return how many tokens it reads of the longest row, of which the student reads so many."""
        return tokens

    def settle(self) -> None:
        """Return once all that it has answered is known to be sound, or raise. Called before anything is saved."""
        return None

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        """Yield models that can generate as the teacher within the context, by the teachers' names; "" for a single
        one. Empty where this process has none."""
        yield {} if self.model is None else {"": self.model}


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a batch that a teacher reads."""
    # With labels its forward would compute a loss too, which nobody reads.
    return {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}


def check_writes(teacher: Any) -> None:
    """Raise ConfigError for what is given as a teacher's model and has no output head."""
    head = getattr(base_of(teacher), "get_output_embeddings", None)
    if not callable(head) or head() is None:
        raise ConfigError(
            f"teacher_model: expected a causal language model with an output head, or the name of one, got a "
            f"{type(teacher).__name__}."
        )


def check_apart(student: Any, teacher: Any) -> None:
    """Raise ConfigError where a teacher is the student, or made of weights that are trained."""
    # Weights that both share may stand still, as the base under a student's adapters does.
    moving = {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
    if base_of(teacher) is base_of(student) or any(id(parameter) in moving for parameter in teacher.parameters()):
        raise ConfigError(
            "The student cannot be its own teacher: its weights would move under the teacher. Load the teacher as "
            "a separate model; for adapters on their frozen base, LigerDistillTrainer has teacher='self'."
        )


def patch_layers(
    model: PreTrainedModel, options: PatchOptions, name: str, rows: PackedRows | None = None
) -> Patched | None:
    """Patch the layers of a model, not its loss, and return the record; None where nothing can be patched.

    A model that is patched already keeps its patches.

    Args:
        rows: packed rows that the model will read; None: there are none.

    Raises:
        ConfigError: packed documents would see one another in this model.
    """
    record = before = patched_record(model)
    reason = None
    if record is None:
        try:
            record = Patched(base_of(model), replace(options, fused_linear_cross_entropy=False))
        except NothingToPatch as error:
            reason = error
    patch_packed_attention(base_of(model), record, rows)
    # A model that was patched before has been announced then.
    if record is not before or reason is not None:
        announce(f"{name}: {reason or record and record.report}")
    return record


def teacher_logits(call: Callable[..., Any], base: Any, *args: Any, **inputs: Any) -> DeferredLogits | Tensor:
    """Return the deferred logits of `call(*args, **inputs)`, where `call` wraps the model `base`. No gradient.

    Raises:
        ConfigError: an encoder-decoder gets no decoder inputs (a student makes them from its labels).
    """
    config = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False) and not any(name in inputs for name in _OF_DECODER):
        raise ConfigError(
            f"The teacher, a {type(base).__name__}, gets no labels, from which it would make the input of its decoder. "
            "Have the data collator add decoder_input_ids to the batch: both models then read the same."
        )
    # `outlive`: the loss reads the head when this pass is over, and FSDP2 and ZeRO-3 have freed what they gathered.
    with torch.no_grad(), deferred_logits(base, outlive=True):
        outputs: Any = call(*args, **inputs)
        logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        return settled(outputs[0] if logits is None else logits)  # of a tuple without labels the first
