"""What `LigerDistillTrainer` asks of a teacher, wherever it comes from: models, a cache, a server, the student.

A kind of teacher is a class: it is made from the trainer's arguments before anything is loaded, looks at the prepared
rows, is put beside the student once that exists, and then answers for each batch.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from datasets import Dataset

from ..losses.spec import Logits
from ..losses.teacher_answer import TeacherAnswer

Cut = Callable[[np.ndarray], np.ndarray]
"""What truncation or packing leaves of the token ids, or labels, of a row."""


TeacherArguments = Any
"""A `LigerDistillConfig`, which lies above: `TeacherConfig`, and the arguments of a trainer."""


class DistillHost(Protocol):
    """What a teacher is told about the trainer that it teaches in."""

    args: Any
    train_dataset: Any
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
