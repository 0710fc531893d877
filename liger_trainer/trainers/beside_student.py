"""The teacher's forward beside the student's: on a stream of its own, until the loss needs both.

Layers of small models leave part of a GPU idle, as a product's last wave of tiles does, and optimizers leave its
arithmetic idle. Kernels of the other model fill it. It begins once the layers of both are in CUDA graphs: their memory
is apart anyway, and the host has both models' launches sent before the first is done.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.replacements import Replacements
from ..losses.deferred_logits import DeferredLogits
from ..losses.dense import DenseAnswer
from ..losses.spec import Logits
from ..losses.teacher_answer import TeacherAnswer
from ..patching.cuda_graphs import GraphedLayers
from ..teachers.model import ModelTeacher
from ..teachers.placement import stays


class AnswersBeside:
    """Takes the place of `ModelTeacher.answer`. What it returns makes the stream of the loss wait for the teacher.

    What the teacher reads lives until the loss is computed, which waits for it. The memory of what it makes goes to its
    own stream alone, once the student's has read it.

    Packed rows are answered before the student begins: both models read one table of their documents, which the first
    of them makes.

    Args:
        trainer: whose teacher answers.
        layers: those of student and teacher.
    """

    def __init__(self, trainer: Any, layers: Sequence[GraphedLayers]):
        self._trainer, self._layers = trainer, layers
        self._answer, self._get = trainer.teaching.answer, trainer.get_batch_samples
        self._stream = torch.cuda.Stream()
        self._fetched: Any = None
        self._versions: set[tuple[int, int]] = set()  # id and version of each tensor that was fetched

    def __call__(self, inputs: dict[str, Any]) -> Logits | TeacherAnswer:
        if not self._applies(inputs):
            return self._answer(inputs)
        main = torch.cuda.current_stream()
        if not self._are_as_fetched(inputs):
            self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            logits = self._answer(inputs)
        read_by_loss = logits.hidden if isinstance(logits, DeferredLogits) else logits
        if read_by_loss.is_cuda:
            read_by_loss.record_stream(main)
        return DenseAnswer(logits, ready=self._stream.record_event())

    def _applies(self, inputs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled() or "cu_seq_lens_q" in inputs:  # evaluations run the student's layers as they are
            return False
        return all(layers.have_graphs_of(inputs["input_ids"].shape) for layers in self._layers)

    def _are_as_fetched(self, inputs: dict[str, Any]) -> bool:
        """Return whether nothing else has made these inputs, or written into them."""
        return all(not t.is_inference() and (id(t), t._version) in self._versions for t in _tensors_in(inputs))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the trainer's: copy the batches of a step to the GPU on the teacher's stream.

        Its forward then waits for nothing of the step before, and runs beside that one's optimizer, which moves memory.
        """
        self._fetched, self._versions = None, set()
        if self._trainer.writes_completions:  # with the student's weights, as the step before leaves them
            return self._get(*args, **kwargs)
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._fetched = self._get(*args, **kwargs)
        main.wait_stream(self._stream)
        for tensor in _tensors_in(self._fetched):
            if tensor.is_cuda:
                tensor.record_stream(main)
            if not tensor.is_inference():
                self._versions.add((id(tensor), tensor._version))
        return self._fetched


def answer_beside(trainer: Any, layers: Sequence[GraphedLayers], replacements: Replacements) -> None:
    """Have the teacher of a trainer answer beside the student, and beside the step before where that is safe."""
    answers = AnswersBeside(trainer, layers)
    replacements.set(trainer.teaching, "answer", answers)
    if leaves_teacher_alone(trainer):
        replacements.set(trainer, "get_batch_samples", answers.get_batch_samples)


def can_answer_beside(trainer: Any) -> bool:
    """Return whether the teacher of a trainer is one model on the student's GPU that reads its batch, and its logits
    are all that the loss is made of."""
    teaching = getattr(trainer, "teaching", None)
    if type(teaching) is not ModelTeacher or teaching.draws_by is not None:
        return False
    return trainer.progress.hidden is None and not stays(trainer.args) and not trainer.shards_sequences()


def leaves_teacher_alone(trainer: Any) -> bool:
    """Return whether only code that is known runs between two steps: a callback or a trainer of the user's may write
    the teacher's weights."""
    kinds = [type(trainer), *map(type, trainer.callback_handler.callbacks)]
    return all(kind.__module__.split(".")[0] in ("transformers", "liger_trainer") for kind in kinds)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part)
