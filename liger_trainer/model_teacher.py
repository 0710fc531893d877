"""`teacher: model`: a causal LM in this process, frozen and in eval mode, whose layers are patched too."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from .distill_config import LigerDistillConfig
from .errors import ConfigError
from .losses import Logits
from .patching import announce
from .teacher import patch_layers, teacher_dtype, teacher_logits
from .teachers import Teacher, without_labels
from .vocabulary import Vocabulary, compare_tokenizers, options_of_teacher, teacher_tokenizer, with_heads

if TYPE_CHECKING:
    from .distill_trainer import LigerDistillTrainer


class ModelTeacher(Teacher):
    """A model, or its directory or hub id, which is loaded when the student is there."""

    def __init__(self, args: LigerDistillConfig, teacher: PreTrainedModel | str):
        self._args, self._teacher = args, teacher
        self._accelerator: Any = None
        self._vocabulary: Vocabulary | None = None
        self._rows, self._padding_is_beyond = 0, False

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        self._shared(tokenizer).check_rows(dataset, name)

    def prepare(self, trainer: "LigerDistillTrainer") -> int:
        self._accelerator = trainer.accelerator
        teacher = load_teacher(self._teacher, self._args)
        self.patched = patch_layers(teacher, trainer.patched.options, "teacher")
        vocab_size = self.vocabulary_size(trainer, teacher)
        teacher.requires_grad_(False).eval()
        self.model = self._placed(teacher, trainer)
        return vocab_size

    def vocabulary_size(self, trainer: "LigerDistillTrainer", teacher: Any) -> int:
        """Of the tokens that student and teacher share."""
        vocabulary = with_heads(self._shared(trainer.tokenizer), trainer.student, teacher)
        announce(f"vocabulary: {vocabulary}")
        alone = vocabulary.student_only
        if alone and getattr(self._args, "samples", False):
            raise ConfigError(
                f"The student's tokenizer has tokens that the teacher's has not ({vocabulary.named_student_only})"
                ", and completions that the student samples may hold them. Set lmbda to 0.0 and seq_kd to false, or "
                "use a teacher that knows them."
            )
        self._rows = teacher.get_input_embeddings().weight.shape[0]
        self._padding_is_beyond = any(i >= self._rows for i in alone)  # of such tokens rows hold the padding alone
        return vocabulary.size

    def _shared(self, tokenizer: Any) -> Vocabulary:
        if self._vocabulary is None:
            of_teacher = teacher_tokenizer(self._teacher, **options_of_teacher(self._teacher, self._args))
            self._vocabulary = compare_tokenizers(tokenizer, of_teacher)
        return self._vocabulary

    def _placed(self, teacher: PreTrainedModel, trainer: "LigerDistillTrainer") -> nn.Module:
        if trainer.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self._accelerator)
        if trainer.is_fsdp_enabled:
            return cast(nn.Module, prepare_fsdp(teacher, self._accelerator))
        return self._accelerator.prepare_model(teacher, evaluation_mode=True)

    def answer(self, inputs: dict[str, Any]) -> Logits:
        """Deferred: its hidden states, and how its head goes on."""
        read = without_labels(inputs)
        if self._padding_is_beyond:
            read["input_ids"] = read["input_ids"].clamp(max=self._rows - 1)
        return teacher_logits(self.model, self._accelerator.unwrap_model(self.model), **read)

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
