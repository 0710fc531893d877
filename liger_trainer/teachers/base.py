"""What `LigerDistillTrainer` asks of a teacher, wherever it comes from: models, a cache, a server, the student.

A kind of teacher is a class: it is made from the trainer's arguments before anything is loaded, looks at the prepared
rows, is put beside the student once that exists, and then answers for each batch.
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
from ..losses.deferred_logits import DeferredLogits, deferred_logits
from ..losses.spec import Logits
from ..losses.teacher_answer import TeacherAnswer
from ..patching.patcher import NothingToPatch, Patched, PatchOptions, base_of, patched_record

_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")

Cut = Callable[[np.ndarray], np.ndarray]
"""What truncation or packing leaves of the token ids, or labels, of a row."""


class DistillHost(Protocol):
    """What a teacher is told about the trainer that it teaches in."""

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


class Teacher(ABC):
    """One kind of teacher. Refusals are ConfigErrors, as early as the reason shows.

    Attributes:
        model: the teacher's model, as it is called; None where none is in this process.
        patched: the record of what was replaced in it, or None.
        knows_new_tokens: whether it can answer about tokens that are in no dataset.
        tokenizer: its own, where it does not read the student's tokens; else None.
        reads: once it is prepared, how many of the student's token ids it can read; None for all.
        unshared: once it is prepared, ids that only one of the two tokenizers has.
    """

    model: Any = None
    patched: Any = None
    knows_new_tokens = True
    tokenizer: Any = None
    reads: int | None = None
    unshared: frozenset[int] = frozenset()

    def prepare_dataset(
        self, prepare: Callable[[Any, bool], Any], dataset: Any, packing: bool, name: str, *, tokenizer: Any,
        formatting_func: Any,
    ) -> Any:  # fmt: skip
        """What the trainer's own `prepare(dataset, packing)` makes of the rows, seen on the way by the teacher."""
        prepared = prepare(dataset, packing)
        self.check(prepared, name, tokenizer)
        return prepared

    def read_rows(self, dataset: Dataset, name: str, cut: Cut) -> None:
        """The tokenized rows of a dataset with all their columns, before they are cut to length and packed."""
        return None

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        """Whether it can teach a prepared dataset, made with this tokenizer. Before any model is loaded."""
        return None

    def collator(self, collator: Any) -> Any:
        """The trainer's collator, with what the answers need beside it."""
        return collator

    def fingerprints(self) -> dict[str, Any]:
        """What it is known by in checkpoints, once it is prepared: by name, text or again a dictionary."""
        return {}

    @abstractmethod
    def prepare(self, trainer: DistillHost) -> int:
        """Take the place beside the student. Returns the size of the vocabulary that both share."""

    @abstractmethod
    def answer(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        """Its knowledge at the positions of a batch, without gradient. What only it needs is taken out of `inputs`."""

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        """Models that can generate as the teacher while the context lasts, by the teachers' names; "" for an only one.
        Empty where none is in this process."""
        yield {} if self.model is None else {"": self.model}


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """What a teacher reads of a batch."""
    return {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}


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
