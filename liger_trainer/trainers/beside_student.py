"""The teacher's forward beside the student's: on a stream of its own, until the loss needs both.

Layers of small models leave part of a GPU idle, as a product's last wave of tiles does. Kernels of the other model fill
it. It begins once the teacher's layers are in CUDA graphs: their memory is apart anyway, and the host has both models'
launches sent before the first is done.
"""

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
    """

    def __init__(self, teaching: ModelTeacher, layers: GraphedLayers):
        self._answer, self._layers = teaching.answer, layers
        self._stream = torch.cuda.Stream()

    def __call__(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        trains = torch.is_grad_enabled()  # evaluations run the student's layers as they are
        if not trains or not self._layers.are_recorded or "cu_seq_lens_q" in inputs:
            return self._answer(inputs)
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            logits = self._answer(inputs)
        read_by_loss = logits.hidden if isinstance(logits, DeferredLogits) else logits
        if read_by_loss.is_cuda:
            read_by_loss.record_stream(main)  # expandable segments would be unmapped when their own stream is done
        return DenseAnswer(logits, ready=self._stream.record_event())


def can_answer_beside(trainer: Any) -> bool:
    """Return whether the teacher of a trainer is one model on the student's GPU that reads its batch, and its logits
    are all that the loss is made of."""
    teaching = getattr(trainer, "teaching", None)
    if type(teaching) is not ModelTeacher or teaching.draws_by is not None:
        return False
    return trainer.progress.hidden is None and not stays(trainer.args) and not trainer.shards_sequences()
