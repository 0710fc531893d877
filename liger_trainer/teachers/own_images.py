"""A teacher whose processor draws images otherwise than its student's: it reads rows that its own processor made.

Images of another size, or cut into other tiles, stand for another number of tokens, so positions differ. Learned tokens
are the same text for both, so the teacher's answer about the n-th learned token of a row is moved to the place of the
student's n-th. TRL's collator makes both batches.
"""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin

from ..common.weights import adapter_at
from ..errors import ConfigError, DataError
from ..losses.spec import IGNORE_INDEX

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

OF_TEACHER, PLACES = "teacher_reads/", "teacher_reads/places"  # of keys in a batch


def processor_of(model: Any, revision: str | None = None, **options: Any) -> ProcessorMixin | None:
    """Return the processor next to a model (a directory, a hub id, or a model loaded from either); None without one.

    For adapters that were saved without one it is their base's.

    Args:
        options: for `AutoProcessor.from_pretrained`, such as trust_remote_code.
    """
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    if not name:
        return None
    try:
        processor = AutoProcessor.from_pretrained(
            name, revision=revision or "main", local_files_only=not isinstance(model, str), **options
        )
    except (OSError, ValueError, KeyError, ImportError):
        processor = None
    if isinstance(processor, ProcessorMixin):
        return processor
    adapter = adapter_at(name, revision) if isinstance(model, str) else None
    return None if adapter is None else processor_of(adapter.base, adapter.revision, **options)


def take_processor(teacher: Any, processor: Any) -> None:
    """Give a teacher the processor that it has instead of the one next to its model.

    Raises:
        ConfigError: it is none, or the teacher is no single model in this process.
    """
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(
            f"teacher_processor: expected a processor of images and text, got {type(processor).__name__}."
        )
    if not hasattr(teacher, "processor_beside"):
        raise ConfigError("teacher_processor is of one teacher, a model in this process. Leave it out.")
    teacher.processor = processor


def same_image_processing(one: Any, other: Any) -> bool:
    """Return whether two processors make the same of images: pixels, tiles, placeholders."""
    return type(one) is type(other) and _drawing(one) == _drawing(other)


def _drawing(processor: Any) -> dict[str, Any]:
    # What decides how many placeholders an image gets. Chat templates may differ: a teacher that draws alike reads the
    # student's rows.
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str)}
    return {**plain, "chat_template": None, "image_processor": processor.image_processor.to_dict()}


def collator_of_images(collator: Any) -> "DataCollatorForVisionLanguageModeling | None":
    """Return TRL's collator of images, which others may have been put around; None where there is none."""
    while hasattr(collator, "collator"):
        collator = collator.collator
    # where nobody has imported TRL's module, none is one
    theirs = getattr(sys.modules.get("trl.trainer.sft_trainer"), "DataCollatorForVisionLanguageModeling", ())
    return collator if isinstance(collator, theirs) else None


@dataclass
class OwnImages:
    """A collator that adds what the teacher reads: keys that begin with `OF_TEACHER`, and `PLACES`.

    `PLACES` is (batch, length) int64: for each position before a learned token, the teacher's position before it.

    Args:
        collator: the student's.
        of_teacher: TRL's, with the teacher's processor.

    Raises:
        DataError: the learned tokens of a row are others for the teacher.
    """

    collator: Any
    of_teacher: "DataCollatorForVisionLanguageModeling"

    @classmethod
    def around(cls, collator: Any, processor: Any) -> "OwnImages":
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        inner = collator_of_images(collator)
        assert inner is not None
        template = None
        if inner.assistant_only_loss and not has_generation_markers(processor.chat_template):
            template = get_training_chat_template(processor)
        theirs = replace(inner, processor=processor, chat_template=template, max_length=None)
        return cls(collator, theirs)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        theirs: Any = self.of_teacher([dict(row) for row in rows])  # copies, since both collators get these rows
        batch = self.collator(rows)
        labels = theirs.pop("labels")
        placeholder = placeholder_of(self.of_teacher.processor)
        labels = labels.masked_fill(labels == placeholder, IGNORE_INDEX)
        places = torch.zeros_like(batch["labels"])
        for row, (learned, of_teacher) in enumerate(zip(batch["labels"], labels, strict=True)):
            here, there = _learned(learned), _learned(of_teacher)
            # The teacher's row may be longer, where the student's was cut; what both learn must begin alike.
            if len(there) < len(here) or not torch.equal(learned[here], of_teacher[there[: len(here)]]):
                raise DataError(
                    f"The processors of student and teacher write what is learned of a row as {len(here)} and "
                    f"{len(there)} tokens that are not the same. Learn only the answers: rows of prompt and "
                    "completion, or assistant_only_loss: true. Images and their marks are never in an answer."
                )
            places[row, here - 1] = there[: len(here)] - 1
        return {**batch, **{f"{OF_TEACHER}{name}": value for name, value in theirs.items()}, PLACES: places}


def placeholder_of(processor: Any) -> int:
    """Return the token that a processor writes for each feature of an image."""
    of_tokenizer = getattr(processor.tokenizer, "image_token_id", None)  # Gemma 3's processor names the image's start
    return processor.image_token_id if of_tokenizer is None else of_tokenizer


def _learned(labels: Tensor) -> Tensor:
    """Return the positions of learned tokens (n,), without the first of the row, which nothing predicts."""
    positions = (labels != IGNORE_INDEX).nonzero().flatten()
    return positions[positions > 0]


def own_inputs(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor] | None:
    """Take what the teacher reads out of a batch: its inputs and the places; None where it reads the student's."""
    places = inputs.pop(PLACES, None)
    if places is None:
        return None
    names = [name for name in inputs if name.startswith(OF_TEACHER)]
    return {name.removeprefix(OF_TEACHER): inputs.pop(name) for name in names}, places


def at_student_positions(logits: Any, places: Tensor) -> Any:
    """Return the teacher's logits at the student's positions (batch, length); those before learned tokens count."""
    rows = torch.arange(len(places), device=places.device)[:, None]
    return logits[rows, places]
