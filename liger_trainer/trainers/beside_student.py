"""The teacher's forward beside the student's: on a stream of its own, until the loss needs both.

Layers of small models leave part of a GPU idle, as a product's last wave of tiles does. Kernels of the other model fill
it. Only layers in CUDA graphs run so: their memory is apart anyway, and the host has both models' launches sent before
the first is done.
"""

from typing import Any

import torch

from ..losses.dense import DenseAnswer
from ..losses.spec import Logits
from ..losses.teacher_answer import TeacherAnswer
from ..patching.cuda_graphs import GraphedLayers
from ..teachers.model import ModelTeacher
from ..teachers.placement import stays


class AnswersBeside:
    """Takes the place of `ModelTeacher.answer`. What it returns makes the stream of the loss wait for the teacher.

    Memory stays sound without a word to the allocator. What the teacher reads lives until the loss is computed, which
    waits for it. What it makes is freed and used again by its own stream alone, which waits for the student's first.
    """

    def __init__(self, teaching: ModelTeacher, layers: GraphedLayers):
        self._answer, self._layers = teaching.answer, layers
        self._stream = torch.cuda.Stream()

    def __call__(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        if not self._layers.are_recorded:
            return self._answer(inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            logits = self._answer(inputs)
        return DenseAnswer(logits, ready=self._stream.record_event())


def can_answer_beside(trainer: Any) -> bool:
    """Return whether the teacher of a trainer is one model on the student's GPU that reads its batch, and its logits
    are all that the loss is made of."""
    teaching = getattr(trainer, "teaching", None)
    if type(teaching) is not ModelTeacher or teaching.draws_by is not None:
        return False
    return trainer.progress.hidden is None and not stays(trainer.args) and not trainer.shards_sequences()
