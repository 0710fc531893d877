"""`teacher: model`: a causal LM, frozen and in eval mode, whose layers are patched too."""

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import prepare_deepspeed

from ..common.console import announce
from ..errors import ConfigError
from ..losses.model_parts import device_of, embedding_rows, placeholder_ids, reads_images
from ..losses.spec import Logits
from ..patching.packing.packed_rows import SlicedRows, patch_packed_attention, why_not_sliced
from ..patching.patcher import base_of
from .base import DistillHost, Teacher, check_apart, patch_layers, teacher_logits, without_labels
from .config import TeacherConfig
from .fingerprints import describe_frozen_model
from .own_images import OwnImages, collator_of_images, draws_alike, moved, own_inputs, processor_of
from .placement import Carrier, check_alike, check_processes, load_teacher, shard, stays, stream_weights
from .vocabulary import (
    Vocabulary,
    announce_other_template,
    compare_tokenizers,
    options_of_teacher,
    teacher_tokenizer,
    with_heads,
)


class ModelTeacher(Teacher):
    """A model, or its directory or hub id, which is loaded once the student exists.

    Args:
        args: where the teacher comes from and where it lives.
        teacher: the model or its name.
        name: for messages.
    """

    def __init__(self, args: TeacherConfig, teacher: PreTrainedModel | str, name: str = "teacher"):
        self._args, self._teacher, self._name = args, teacher, name
        self._accelerator: Any = None
        self._carry = Carrier()
        self._vocabulary: Vocabulary | None = None
        self._padding_is_beyond = False
        self._fingerprints: dict[str, Any] = {}
        self._sees_images = False
        self._sliced: SlicedRows | None = None

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        if name == "train" and self.tokenizer is None:
            of_teacher = teacher_tokenizer(self._teacher, **options_of_teacher(self._teacher, self._args))
            announce_other_template(dataset, tokenizer, of_teacher, self._name)

    def collator(self, collator: Any) -> Any:
        """Return a collator that makes the teacher's rows too, where its processor draws images otherwise."""
        images = collator_of_images(collator)
        if images is None:
            return collator
        self._sees_images, own = True, self.processor_beside()
        if own is None or draws_alike(images.processor, own):
            return collator
        if self._args.loss_plan().of("hidden"):
            raise ConfigError(
                f"The processor of the {self._name} draws images otherwise than the student's, so their hidden states "
                "stand at other positions. Leave the losses on hidden states out."
            )
        announce(f"{self._name}: its own processor draws the images.")
        self.draws_by = own
        return OwnImages.around(collator, own)

    def processor_beside(self) -> Any:
        """Return the teacher's processor: the one that was given, or the one beside the model; None without one."""
        if self.processor is not None:
            return self.processor
        options = options_of_teacher(self._teacher, self._args)
        named, _ = options.pop("named"), options.pop("gguf_file", None)
        return processor_of(self._teacher if named is None else named, **options)

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        self._shared(tokenizer).check_rows(dataset, name)

    def prepare(self, trainer: DistillHost) -> int:
        self._accelerator = trainer.accelerator
        fsdp, deepspeed = trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled
        check_processes(self._args, self._accelerator.num_processes, fsdp, deepspeed)
        teacher = load_teacher(self._teacher, self._args)
        check_apart(trainer.student, teacher)
        self._check_images(trainer.student, teacher)
        self._fingerprints = describe_frozen_model(teacher)  # before its weights are sharded or streamed
        if (fsdp or deepspeed) and not stays(self._args):
            check_alike(self._fingerprints, self._name)
        if self._args.teacher_offload:
            announce(f"{self._name}: its layers are not patched: their weights are streamed.")
            patch_packed_attention(base_of(teacher), None, trainer.packed_rows)
        else:
            self.patched = patch_layers(teacher, trainer.patched.options, self._name, trainer.packed_rows)
        self._sliced = self._of_slices(teacher) if trainer.shards_sequences() else None
        vocab_size = self.vocabulary_size(trainer, teacher)
        teacher.requires_grad_(False).eval()
        self.model = self._placed(teacher, trainer)
        return vocab_size

    def _of_slices(self, teacher: Any) -> SlicedRows:
        reason = why_not_sliced(base_of(teacher))
        if reason is not None:
            raise ConfigError(f"Sequence parallelism (sp_size > 1), {self._name}: {reason}.")
        return SlicedRows(base_of(teacher))

    def _check_images(self, student: Any, teacher: Any) -> None:
        if not self._sees_images:
            return
        if not reads_images(base_of(teacher)):
            raise ConfigError(
                f"The rows have images, and the {self._name}, a {type(base_of(teacher)).__name__}, takes none: it "
                "would read placeholders in their place. Take a vision-language teacher."
            )
        theirs, ours = placeholder_ids(base_of(teacher).config), placeholder_ids(base_of(student).config)
        if theirs != ours and self.draws_by is None:
            raise ConfigError(
                f"Student and {self._name} put images in the place of other tokens ({ours} and {theirs}), and the "
                "teacher's processor is not known. Pass it as teacher_processor, or name it in "
                "teacher_tokenizer_name_or_path."
            )

    def fingerprints(self) -> dict[str, Any]:
        return self._fingerprints

    def vocabulary_size(self, trainer: DistillHost, teacher: Any) -> int:
        """Return how many tokens student and teacher share."""
        vocabulary = with_heads(self._shared(trainer.tokenizer), trainer.student, teacher)
        announce(f"vocabulary: {vocabulary}")
        self.unshared, self.reads = vocabulary.unshared, embedding_rows(teacher)
        # `check` refused rows with tokens of the student alone; only padding may be one of them.
        self._padding_is_beyond = any(i >= self.reads for i in vocabulary.student_only)
        return vocabulary.size

    def _shared(self, tokenizer: Any) -> Vocabulary:
        if self._vocabulary is None:
            of_teacher = teacher_tokenizer(self._teacher, **options_of_teacher(self._teacher, self._args))
            self._vocabulary = compare_tokenizers(tokenizer, of_teacher)
        return self._vocabulary

    def _placed(self, teacher: PreTrainedModel, trainer: DistillHost) -> nn.Module:
        if trainer.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self._accelerator)
        if trainer.is_fsdp_enabled and not stays(self._args):
            return shard(teacher, self._accelerator, like=base_of(trainer.student))
        if not stays(self._args):
            return self._accelerator.prepare_model(teacher, evaluation_mode=True)
        if self._args.teacher_offload:
            stream_weights(teacher, self._accelerator.device)
        return teacher

    def answer(self, inputs: dict[str, Any]) -> Logits:
        """Return deferred logits: hidden states, and the head that makes logits of them."""
        own = own_inputs(inputs)
        if own is not None:
            return moved(self.logits(**own[0]), own[1])
        read = without_labels(inputs)
        if self._padding_is_beyond and self.reads is not None:
            read["input_ids"] = read["input_ids"].clamp(max=self.reads - 1)
        slices = self._sliced if "shift_labels" in inputs else None  # evaluations read whole rows
        with contextlib.nullcontext() if slices is None else slices.gathered():
            return self.logits(**read)

    def logits(self, **read: Any) -> Logits:
        """Return the logits on the device of `input_ids`, wherever the teacher lives."""
        base = self._accelerator.unwrap_model(self.model)
        if not stays(self._args):
            return teacher_logits(self.model, base, **read)
        here, there = read["input_ids"].device, device_of(base)
        with self._accelerator.autocast():
            logits = teacher_logits(base, base, **send_to_device(read, there))
        return logits if there == here else self._carry(logits, here)

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        yield {"": self._accelerator.unwrap_model(self.model)}
