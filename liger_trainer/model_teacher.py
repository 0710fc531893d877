"""`teacher: model`: a causal LM in this process, frozen and in eval mode, whose layers are patched too."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from .distill_config import LigerDistillConfig
from .losses import Logits
from .teacher import patch_layers, shared_vocabulary, teacher_dtype, teacher_logits
from .teachers import Teacher, without_labels

if TYPE_CHECKING:
    from .distill_trainer import LigerDistillTrainer


class ModelTeacher(Teacher):
    """A model, or its directory or hub id, which is loaded when the student is there."""

    def __init__(self, args: LigerDistillConfig, teacher: PreTrainedModel | str):
        self._args, self._teacher = args, teacher
        self._accelerator: Any = None

    def prepare(self, trainer: "LigerDistillTrainer") -> int:
        self._accelerator = trainer.accelerator
        teacher = load_teacher(self._teacher, self._args)
        self.patched = patch_layers(teacher, trainer.patched.options, "teacher")
        vocab_size = shared_vocabulary(trainer.student, teacher, trainer.tokenizer)
        teacher.requires_grad_(False).eval()
        self.model = self._placed(teacher, trainer)
        return vocab_size

    def _placed(self, teacher: PreTrainedModel, trainer: "LigerDistillTrainer") -> nn.Module:
        if trainer.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self._accelerator)
        if trainer.is_fsdp_enabled:
            return cast(nn.Module, prepare_fsdp(teacher, self._accelerator))
        return self._accelerator.prepare_model(teacher, evaluation_mode=True)

    def answer(self, inputs: dict[str, Any]) -> Logits:
        """Deferred: its hidden states, and how its head goes on."""
        return teacher_logits(self.model, self._accelerator.unwrap_model(self.model), **without_labels(inputs))

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        yield {"": self._accelerator.unwrap_model(self.model)}


def load_teacher(teacher: PreTrainedModel | str, args: LigerDistillConfig) -> PreTrainedModel:
    if not isinstance(teacher, str):
        return teacher
    assert not isinstance(args.teacher_model_init_kwargs, str)  # transformers parses JSON in its dict fields
    kwargs = dict(args.teacher_model_init_kwargs or {})
    if args.teacher_model_revision is not None:
        kwargs["revision"] = args.teacher_model_revision
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    kwargs.setdefault("dtype", teacher_dtype(args))
    return create_model_from_path(teacher, **kwargs)
