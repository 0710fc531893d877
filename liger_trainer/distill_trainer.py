"""LigerDistillTrainer: a student learns a teacher's next-token distributions on the tokens of a dataset."""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import disable_dropout_in_model

from .cached_teacher import CachedTeacher
from .distill_config import LigerDistillConfig
from .errors import ConfigError
from .fused import TokenLossOutput
from .loss_progress import LossProgress
from .losses import LossOptions
from .model_teacher import ModelTeacher
from .patching import Patched
from .self_teacher import SelfTeacher
from .teacher import per_token_values
from .teachers import Teacher
from .trainer import LigerTrainer


class LigerDistillTrainer(LigerTrainer):
    """Knowledge distillation on dataset completions, with fused divergences; full or LoRA students.

    Everything that TRL's SFTTrainer does with data (chat templates, packing, completion and assistant masks) applies.
    The teacher sees the same tokens as the student, under the same shift and mask. It is frozen, in eval mode, and no
    part of the student's checkpoint. Its layers are patched as the student's are.

    Args:
        model: the student, as for `trl.SFTTrainer`.
        teacher_model: a causal LM, or its directory or hub id. Default: `args.teacher_model_name_or_path`. With
            `args.teacher="cache"` it is not loaded, only compared with the one that the cache was captured from; with
            "self" and "server" there is none to give.
        args: `LigerDistillConfig`.
        **kwargs: as for `trl.SFTTrainer`.

    Attributes, besides LigerTrainer's:
        teaching: the teacher as the trainer asks it; of a class of its own for each of `args.teacher`.
        teacher: the teacher's model, and `teacher_patched` its record of replacements or None where its layers have
            nothing to replace; both None where the teacher is no model of its own.
        distillation: the loss; `distil` changes it.

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
        if teacher_model is model and not isinstance(model, str):
            raise ConfigError("The student cannot be its own teacher: its weights would move under the teacher.")
        if kwargs.get("compute_loss_func") is not None:
            raise ConfigError("compute_loss_func would take the place of distillation. Use LigerTrainer with it.")
        self.teaching = teacher_of(args, teacher_model)
        if args.teacher == "cache" and kwargs.get("data_collator") is not None:
            raise ConfigError("data_collator: a teacher cache is laid out by TRL's own collator. Leave it out.")
        self.distillation = args.distillation()
        super().__init__(model, args, **kwargs)
        if self._shards_sequences():
            raise ConfigError("Distillation does not support sequence parallelism (sp_size > 1): set sp_size to 1.")
        self.data_collator = self.teaching.collator(self.data_collator)
        vocab_size = self.teaching.prepare(self)
        self.progress = LossProgress(self, args.loss_plan())
        self.add_callback(self.progress)
        self.distil(vocab_size=vocab_size)
        if args.disable_dropout:
            _disable_dropout(self.student)

    @property
    def student(self) -> Any:
        """The model that learns, without what wraps it for several processes."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def teacher(self) -> Any:
        return self.teaching.model

    @property
    def teacher_patched(self) -> Patched | None:
        return self.teaching.patched

    def distil(self, **changes: Any) -> None:
        """Go on with another loss: fields of `Distillation`, such as `temperature` or `ce_weight`. Evaluations too,
        except for what a schedule changes: it has its final value there."""
        self.distillation = replace(self.distillation, **changes)
        self.fused.options = self._loss_options()
        final = replace(self.distillation, **self.progress.final)
        self.fused.eval_options = replace(self.fused.options, distillation=final)

    def _loss_options(self) -> LossOptions:
        return LossOptions(label_smoothing=self.args.label_smoothing_factor, distillation=self.distillation)

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        prepared = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        self.teaching.check(prepared, dataset_name, processing_class)
        return prepared

    def _add(self, mode: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        super()._add(mode, totals, tokens)
        if mode == "train":
            self.progress.seen(totals, tokens)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and "loss" in logs:
            logs.update(self.progress.logged)
        super().log(logs, start_time)

    def _teacher_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        hidden = self.progress.hidden
        if hidden is None:
            return {"teacher_logits": self.teaching.answer(inputs)}
        with hidden.of_teacher() as hidden_pass:
            return {"teacher_logits": self.teaching.answer(inputs), "hidden_pass": hidden_pass}

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.progress.average_gradients()
        return loss

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        self.progress.join(optimizer)
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.progress.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.progress.load(checkpoint)

    def _per_token(self, outputs: TokenLossOutput) -> dict[str, Tensor]:
        return {**per_token_values(outputs), "entropy": outputs.entropy}


def _disable_dropout(model: nn.Module) -> None:
    """In dropout modules, and where attention keeps a probability for the functional form."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


def teacher_of(args: LigerDistillConfig, teacher_model: PreTrainedModel | str | None) -> Teacher:
    """The teacher that `args.teacher` names. Raises ConfigError where it is not given, or its cache does not fit."""
    if args.teacher == "cache":
        return CachedTeacher(args, teacher_model)
    if args.teacher != "model" and teacher_model is not None:
        raise ConfigError(f"teacher={args.teacher!r} takes no model: leave teacher_model and its name in args out.")
    if args.teacher == "self":
        return SelfTeacher()
    if teacher_model is None:
        raise ConfigError("No teacher was given: pass teacher_model, or set teacher_model_name_or_path in args.")
    return ModelTeacher(args, teacher_model)
