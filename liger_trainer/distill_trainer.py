"""LigerDistillTrainer: a student learns a teacher's next-token distributions on the tokens of a dataset."""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model

from .cached_teacher import CachedTeacher
from .distill_config import LigerDistillConfig
from .errors import ConfigError
from .fused import TokenLossOutput
from .losses import LossOptions
from .teacher import (
    check_student_vocabulary,
    patch_layers,
    per_token_values,
    shared_vocabulary,
    teacher_dtype,
    teacher_logits,
)
from .trainer import LigerTrainer


class LigerDistillTrainer(LigerTrainer):
    """Knowledge distillation on dataset completions, with fused divergences; full or LoRA students.

    Everything that TRL's SFTTrainer does with data (chat templates, packing, completion and assistant masks) applies.
    The teacher sees the same tokens as the student, under the same shift and mask. It is frozen, in eval mode, and no
    part of the student's checkpoint. Its layers are patched as the student's are.

    Args:
        model: the student, as for `trl.SFTTrainer`.
        teacher_model: a causal LM, or its directory or hub id. Default: `args.teacher_model_name_or_path`. With
            `args.teacher="cache"` it is not loaded, only compared with the one that the cache was captured from.
        args: `LigerDistillConfig`.
        **kwargs: as for `trl.SFTTrainer`.

    Attributes, besides LigerTrainer's: `teacher`, and `teacher_patched`, its record of replacements or None where its
    layers have nothing to replace; both None with a cache, which is `cached_teacher`.

    Logs, besides LigerTrainer's: kd_loss (the weighted divergences at the loss's temperature), ce_loss, forward_kl and
    reverse_kl (nats per token, at temperature 1), agreement_at_1, student_perplexity, teacher_perplexity,
    teacher_entropy. From a cache there is no reverse_kl, and forward_kl only at temperature 1 (docs/cache.md).

    Raises:
        ConfigError: no teacher, the student as its own teacher, a student or teacher that lacks tokens of the
            vocabulary, `compute_loss_func`, or sequence parallelism; a cache that belongs to other data, settings or
            another teacher.
        CorruptError: a damaged cache.
    """

    _tag_names = ["trl", "liger-trainer", "distillation"]
    _name = "Distillation"

    def __init__(self, model, teacher_model: PreTrainedModel | str | None = None, args=None, **kwargs):
        if not isinstance(args, LigerDistillConfig):
            raise ConfigError(f"args must be a LigerDistillConfig, got {type(args).__name__}.")
        teacher_model = teacher_model if teacher_model is not None else args.teacher_model_name_or_path
        if teacher_model is None and args.teacher == "model":
            raise ConfigError("No teacher was given: pass teacher_model, or set teacher_model_name_or_path in args.")
        if teacher_model is model and not isinstance(model, str):
            raise ConfigError("The student cannot be its own teacher: its weights would move under the teacher.")
        if kwargs.get("compute_loss_func") is not None:
            raise ConfigError("compute_loss_func would take the place of distillation. Use LigerTrainer with it.")
        self._shared_vocab: int | None = None
        self.cached_teacher = CachedTeacher(args, teacher_model) if args.teacher == "cache" else None
        if self.cached_teacher is not None and kwargs.get("data_collator") is not None:
            raise ConfigError("data_collator: a teacher cache is laid out by TRL's own collator. Leave it out.")
        super().__init__(model, args, **kwargs)
        if self._shards_sequences():
            raise ConfigError("Distillation does not support sequence parallelism (sp_size > 1): set sp_size to 1.")
        self.teacher: Any = None
        self.teacher_patched = None
        if self.cached_teacher is not None:
            student = self.accelerator.unwrap_model(self.model)
            self._shared_vocab = check_student_vocabulary(student, self.cached_teacher.vocab_size)
            self.data_collator = self.cached_teacher.collator(self.data_collator)
        else:
            assert teacher_model is not None
            teacher = load_teacher(teacher_model, args)
            self.teacher_patched = patch_layers(teacher, self.patched.options, "teacher")
            self.teacher = self._prepare_teacher(teacher)
        self.fused.options = self._loss_options()
        if args.disable_dropout:
            _disable_dropout(self.accelerator.unwrap_model(self.model))

    def _loss_options(self) -> LossOptions:
        distillation = self.args.distillation(self._shared_vocab)
        return LossOptions(label_smoothing=self.args.label_smoothing_factor, distillation=distillation)

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        prepared = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        if self.cached_teacher is not None:
            self.cached_teacher.check(prepared, dataset_name, processing_class)
        return prepared

    def _prepare_teacher(self, teacher: PreTrainedModel) -> nn.Module:
        student = self.accelerator.unwrap_model(self.model)
        self._shared_vocab = shared_vocabulary(student, teacher, self._tokenizer)
        teacher.requires_grad_(False).eval()
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator)
        if self.is_fsdp_enabled:
            return cast(nn.Module, prepare_fsdp(teacher, self.accelerator))
        return self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def _teacher_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The teacher's deferred logits for the batch: its hidden states, and how its head goes on. Or its records."""
        if self.cached_teacher is not None:
            return {"teacher_logits": self.cached_teacher.take_from(inputs)}
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
        base = self.accelerator.unwrap_model(self.teacher)
        return {"teacher_logits": teacher_logits(self.teacher, base, **inputs)}

    def _per_token(self, outputs: TokenLossOutput) -> dict[str, Tensor]:
        return {**per_token_values(outputs), "entropy": outputs.entropy}


def _disable_dropout(model: nn.Module) -> None:
    """In dropout modules, and where attention keeps a probability for the functional form."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


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
