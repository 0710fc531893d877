"""The teacher's forward beside the student's: on a stream of its own, until the loss needs both.

Layers of small models leave part of a GPU idle, as a product's last wave of tiles does. Kernels of the other model fill
it. It begins once the layers of both are in CUDA graphs: their memory is apart anyway, and the host has both models'
launches sent before the first is done.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..losses.deferred_logits import DeferredLogits
from ..losses.dense import DenseAnswer
from ..losses.spec import Logits
from ..losses.teacher_answer import TeacherAnswer
from ..patching.cuda_graphs import GraphedLayers
from ..teachers.model import ModelTeacher
from ..teachers.placement import stays


class AnswersBeside:
    """Takes the place of `ModelTeacher.answer`. What it returns makes the stream of the loss wait for the teacher.

    What the teacher reads lives until the loss is computed, which waits for it. What it makes is used again by its own
    stream alone, which waits for the student's first, or once the student's has read it.

    Packed rows are answered before the student begins: both models read one table of their documents, which the first
    of them makes.

    Args:
        teaching: the teacher.
        layers: those of student and teacher.
    """

    def __init__(self, teaching: ModelTeacher, layers: Sequence[GraphedLayers]):
        self._answer, self._layers = teaching.answer, layers
        self._stream = torch.cuda.Stream()

    def __call__(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        if not self._applies(inputs):
            return self._answer(inputs)
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            logits = self._answer(inputs)
        read_by_loss = logits.hidden if isinstance(logits, DeferredLogits) else logits
        if read_by_loss.is_cuda:
            read_by_loss.record_stream(main)  # expandable segments would be unmapped when their own stream is done
        return DenseAnswer(logits, ready=self._stream.record_event())

    def _applies(self, inputs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled() or "cu_seq_lens_q" in inputs:  # evaluations run the student's layers as they are
            return False
        return all(layers.have_graphs_of(inputs["input_ids"].shape) for layers in self._layers)


def can_answer_beside(trainer: Any) -> bool:
    """Return whether the teacher of a trainer is one model on the student's GPU that reads its batch, and its logits
    are all that the loss is made of."""
    teaching = getattr(trainer, "teaching", None)
    if type(teaching) is not ModelTeacher or teaching.draws_by is not None:
        return False
    return trainer.progress.hidden is None and not stays(trainer.args) and not trainer.shards_sequences()
