"""DistillationCallback: distillation inside an unmodified `transformers.Trainer` or `trl.SFTTrainer`."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ..common.console import announce
from ..common.replacements import replaced
from ..errors import ConfigError
from ..losses.fused_forward import FusedLoss, LossOfOneForward
from ..losses.model_parts import head_rows
from ..losses.plan import SKEW_ALPHA, plan_of, without_effect
from ..losses.spec import Logits, LossOptions, TokenLossOutput, distillation_of
from ..patching.packing.packed_attention import KIND
from ..patching.packing.packed_rows import PackedRows
from ..patching.patcher import Patched, PatchOptions, base_of, patched_record
from ..plugins import load
from ..teachers.base import check_apart, patch_layers, teacher_logits
from ..teachers.fingerprints import describe_frozen_model
from ..teachers.model import check_alike, load_frozen, shard, teacher_dtype
from ..teachers.vocabulary import compare_tokenizers, tokenizer_of, with_heads
from .finite_guard import FiniteGuard
from .finite_report import norm_of_gradients
from .loaders import real_tokens
from .loss_schedule import LossSchedule
from .metrics import TokenMetrics, per_token_values
from .options import STOP, check_policy, correct_guess, follow_direction


class DistillationCallback(TrainerCallback):
    """`Trainer(..., callbacks=[DistillationCallback(teacher)])`: the student learns the teacher's distributions.

    While training lasts, the model's loss is the distillation loss, in training steps and evaluations, divided as the
    trainer divides its own, and both models' layers are patched. Afterwards the student is as it was before. The
    teacher stays frozen, in eval mode, and on the student's device.

    Args:
        teacher: a causal LM, or its directory or hub id, loaded when training begins.
        losses, beta, skew_alpha, temperature, schedules, taid, scale_loss_by_temperature_squared: as in
            `LigerDistillConfig`, but no adaptive `taid`, and no hidden-state losses that learn projectors.
        teacher_model_init_kwargs: keywords for the `from_pretrained` of a teacher that is loaded, such as dtype
            (default: the run's) and revision.
        on_non_finite: as in `LigerDistillConfig`.

    Attributes:
        distillation: the loss.
        finite: the guard that watches for numbers that are not finite, once training has begun. Pass callbacks that ask
            for checkpoints before this one: it sees those that later ones ask for when they are saved, and renames
            one whose state is not finite.
        teacher: the teacher, once training has begun.

    Adds to the logs what `LigerDistillTrainer` logs about the teacher; docs/patching.md says whom they reach.

    Raises:
        ValueError: a value out of range, or a loss that is not known.
        NonFiniteError: in training, as `LigerTrainer` does.
        ConfigError: when training begins, arguments that a callback cannot serve (`refuse` lists them), a teacher that
            shares the student's weights, different vocabularies; in the first step, a trainer that computes its loss
            outside of the model.
    """

    def __init__(
        self, teacher: PreTrainedModel | str, *, losses: list[dict[str, Any]] | None = None, beta: float = 0.0,
        temperature: float = 1.0, scale_loss_by_temperature_squared: bool = True,
        teacher_model_init_kwargs: dict[str, Any] | None = None, skew_alpha: float = SKEW_ALPHA,
        schedules: dict[str, Any] | None = None, taid: dict[str, Any] | None = None, on_non_finite: str = STOP,
    ):  # fmt: skip
        self._plan = plan_of({"losses": losses, "beta": beta, "temperature": temperature, "skew_alpha": skew_alpha,
                              "schedules": schedules, "taid": taid})  # fmt: skip
        for key, message in without_effect(self._plan, {}, () if skew_alpha == SKEW_ALPHA else ("skew_alpha",)):
            raise ValueError(f"{key}: {message}")
        if name := self._plan.other_tokens:
            raise ConfigError(
                f"DistillationCallback: {name} needs the text of the rows, for the teacher's tokenizer, and a "
                "callback sees only tokens. Use LigerDistillTrainer."
            )
        if self._plan.taid is not None and self._plan.taid.adaptive:
            raise ConfigError(
                "DistillationCallback: taid that adapts to the loss has a state that a callback cannot put into the "
                "trainer's checkpoints. Set adaptive to false, or use LigerDistillTrainer."
            )
        if teacher_model_init_kwargs and not isinstance(teacher, str):
            raise ConfigError(
                "teacher_model_init_kwargs is about a teacher that is loaded by its name, but a model was given. Load "
                "it that way, or pass its name."
            )
        self._on_non_finite = check_policy(on_non_finite)
        self.finite: FiniteGuard | None = None
        self._schedule = LossSchedule(self._plan)
        self.distillation = distillation_of(self._plan, scale_loss_by_temperature_squared)
        self._loss: _DistillationLoss | None = None
        self.teacher: Any = None if isinstance(teacher, str) else teacher
        self._engine: Any = None  # DeepSpeed's, around the teacher
        self._path = teacher if isinstance(teacher, str) else None
        self._init_kwargs = teacher_model_init_kwargs or {}
        self._metrics = {"train": TokenMetrics(), "eval": TokenMetrics()}
        self._accelerator: Any = None
        self._undo = contextlib.ExitStack()

    def on_init_end(self, args, state, control, **kwargs) -> None:
        correct_guess(args)
        follow_direction(args)

    def on_train_begin(self, args, state, control, model: Any = None, processing_class: Any = None, **kwargs) -> None:
        correct_guess(args)  # where the callback was added to a trainer that was there
        self.undo()  # after a training that was interrupted, or begun again with a smaller batch
        self._accelerator = Accelerator()  # shares the state of the trainer's
        refuse(args, self._accelerator)
        finite = FiniteGuard(self._accelerator, self._on_non_finite)
        finite.on_train_begin(args, state, control, model=model, **kwargs)
        student = base_of(self._accelerator.unwrap_model(model))
        self.teacher = self._load_teacher(args, student)
        vocab_size = _vocabulary(student, self.teacher, processing_class)
        self.distillation = replace(self.distillation, vocab_size=vocab_size)
        self.teacher.requires_grad_(False).eval()
        hidden = self._hidden_losses(student)
        with contextlib.ExitStack() as undo:
            packs = getattr(args, "packing", False) or getattr(args, "padding_free", False)
            rows = PackedRows(certain=packs and getattr(args, "packing_strategy", "bfd") != "wrapped")
            record = _patch_until(undo, student, PatchOptions(), "student", rows)
            self._place_teacher(undo, record.options if record else PatchOptions(), rows)
            if record is not None and record.fused is not None:
                undo.enter_context(record.fused.paused())
            options = LossOptions(distillation=self.distillation)
            self._loss = _DistillationLoss(student, options, self._ask_teacher, self._record, hidden)
            undo.callback(self._loss.undo)
            # the filter puts the mean of the losses before in place of one that is NaN
            undo.enter_context(replaced(args, logging_nan_inf_filter=False))
            self._undo = undo.pop_all()
        self.finite = finite
        self._set_loss({})
        self._metrics = {"train": TokenMetrics(), "eval": TokenMetrics()}

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        changes = self._schedule.changes(state)
        if changes:
            self._set_loss(changes)

    def _set_loss(self, changes: dict[str, Any]) -> None:
        assert self._loss is not None
        self.distillation = replace(self.distillation, **changes)
        self._schedule.set_loss(self._loss, LossOptions(distillation=self.distillation))

    def on_pre_optimizer_step(self, args, state, control, model: Any = None, optimizer: Any = None, **kwargs) -> None:
        assert self.finite is not None
        self.finite.record_norm(norm_of_gradients(model, optimizer, args.device))
        self.finite.on_pre_optimizer_step(args, state, control, optimizer=optimizer, **kwargs)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        assert self.finite is not None
        self.finite.on_optimizer_step(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.finite is not None
        self.finite.on_step_end(args, state, control)
        self.finite.remember(state)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        assert self.finite is not None
        self.finite.on_epoch_end(args, state, control)

    def on_save(self, args, state, control, **kwargs) -> None:
        assert self.finite is not None
        self.finite.on_save(args, state, control)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        assert self.finite is not None
        self.finite.on_train_end(args, state, control)
        self.undo()

    def undo(self) -> None:
        """Give the student its own loss and layers back. Call it after a training that ended in an error."""
        self._undo.close()

    def on_log(self, args, state, control, logs: dict[str, float] | None = None, **kwargs) -> None:
        """Add the averages since the last log to it, and to the trainer's history, where it is the last entry."""
        logs = {} if logs is None else logs
        mode, prefix = _mode_and_prefix(logs)
        if mode is None or self._accelerator is None:
            return
        averages = self._metrics[mode].flush(lambda sums: self._accelerator.reduce(sums, "sum"))
        averages = {f"{prefix}{name}": value for name, value in averages.items()}
        averages |= (
            {**self._schedule.logged, **(self.finite.logged() if self.finite else {})} if mode == "train" else {}
        )
        for entry in (logs, state.log_history[-1]):
            entry.update(averages)

    def _hidden_losses(self, student: Any) -> Any:
        if not self._plan.of("hidden"):
            return None
        hidden = load("hidden").HiddenLosses(self._plan.of("hidden"), student, base_of(self.teacher))
        if any(True for _ in hidden.parameters()):
            raise ConfigError(
                "DistillationCallback: these hidden-state losses learn projectors, which the trainer would neither "
                "train nor save: the widths differ, or projector is set. Use LigerDistillTrainer."
            )
        return hidden

    def _load_teacher(self, args: TrainingArguments, student: Any) -> Any:
        teacher = self.teacher
        if teacher is None:
            assert self._path is not None
            device_map = None if is_deepspeed_zero3_enabled() else {"": student.device}
            where = {"dtype": teacher_dtype(args), "device_map": device_map}
            return load_frozen(self._path, **{**where, **self._init_kwargs})
        check_apart(student, teacher)
        placed = getattr(teacher, "hf_device_map", None) is not None or getattr(teacher, "is_quantized", False)
        by_deepspeed = self._accelerator.distributed_type == DistributedType.DEEPSPEED
        return teacher if placed or by_deepspeed else teacher.to(student.device)

    def _place_teacher(self, undo: contextlib.ExitStack, options: PatchOptions, rows: PackedRows) -> None:
        """Patch the teacher, and have the trainer's engine hold its weights as it holds the student's."""
        if self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            if self._engine is None:  # it gathers the layers as they are patched, so they stay so
                check_alike(describe_frozen_model(self.teacher), "teacher")
                patch_layers(self.teacher, options, "teacher", rows)
                from trl.models.utils import prepare_deepspeed  # nothing else here needs TRL

                self._engine = prepare_deepspeed(self.teacher, self._accelerator)
            return
        _patch_until(undo, self.teacher, options, "teacher", rows)
        if self._accelerator.is_fsdp2 and not isinstance(self.teacher, FSDPModule):
            check_alike(describe_frozen_model(self.teacher), "teacher")
            shard(self.teacher, self._accelerator)

    def _ask_teacher(self, *args, **inputs) -> Logits:
        """Return the teacher's logits for what the student was called with."""
        if inputs.get("inputs_embeds") is not None:
            raise ConfigError(
                "The student was called with inputs_embeds, as prompt learning of PEFT does. The teacher reads token "
                "ids: train LoRA adapters instead, here or with LigerDistillTrainer."
            )
        inputs = {k: v for k, v in inputs.items() if v is not None and not k.startswith(("output_", "return_"))}
        # accelerate puts autocast around the student's forward, below ours; the teacher needs it too.
        with self._accelerator.autocast():
            called = self.teacher if self._engine is None else self._engine
            return teacher_logits(called, self.teacher, *args, **{**inputs, "use_cache": False})

    def _record(self, mode: str, outputs: TokenLossOutput, inputs: dict[str, Any]) -> None:
        counts = outputs.label_mask if mode == "train" else real_tokens(outputs.label_mask)
        values = per_token_values(outputs).items()
        sums = {name: value.masked_fill(~counts, 0).sum(dtype=torch.float64) for name, value in values}
        self._metrics[mode].add(sums, counts.sum(dtype=torch.float64))
        if mode == "train" and self.finite is not None:
            self.finite.record_teacher(sums)
            self.finite.record_loss(outputs.loss, inputs)


class _DistillationLoss(FusedLoss):
    """The fused loss of a student that asks its teacher itself: a stock trainer hands no teacher's logits on."""

    def __init__(
        self, model: Any, options: LossOptions, ask_teacher: Callable[..., Logits],
        record: Callable[[str, TokenLossOutput, dict[str, Any]], None], hidden: Any,
    ):  # fmt: skip
        super().__init__(model, options)
        self._ask_teacher, self._record, self._hidden = ask_teacher, record, hidden
        self._inputs: dict[str, Any] = {}  # of the pass at hand

    def forward(self, model, *args, labels=None, shift_labels=None, fused_lm_head=False, skip_logits=None, **kwargs):
        num_items = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        if labels is None and shift_labels is None:
            if model.training and torch.is_grad_enabled():
                raise ConfigError(
                    "The model was called without labels in training: the loss is computed outside of it, by "
                    "compute_loss_func or a trainer's own, and would not be distilled. Leave that out, or use "
                    "LigerDistillTrainer."
                )
            return self.forward_without_loss(model)(*args, **num_items, **kwargs)
        if fused_lm_head and num_items:
            raise ConfigError(
                "DistillationCallback is for transformers.Trainer and trl.SFTTrainer. This trainer, such as "
                "LigerTrainer, takes its loss from the model in another way: use LigerDistillTrainer."
            )
        with contextlib.nullcontext() if self._hidden is None else self._hidden.of_teacher() as hidden_pass:
            logits = self._ask_teacher(*args, **kwargs)
        self._inputs = kwargs
        outputs = super().forward(
            model, *args, labels=labels, shift_labels=shift_labels, teacher_logits=logits, hidden_pass=hidden_pass,
            fused_lm_head=fused_lm_head, skip_logits=skip_logits, **num_items, **kwargs,
        )  # fmt: skip
        if fused_lm_head:
            # SFTTrainer computes -log_probs.sum() / num_items and keeps num_items to itself. Our loss is a mean over
            # the labels here, so put in the place of each log-probability it adds up to the sum.
            outputs.log_probs = -outputs.token_loss * outputs.label_mask
        return outputs

    def after_pass(self, model: Any, outputs: Any, loss: LossOfOneForward) -> None:
        self._record("train" if model.training else "eval", loss.token_output(outputs), self._inputs)


def refuse(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Raise ConfigError for training arguments with which a callback would distil wrongly, or not at all."""
    distributed = accelerator.distributed_type
    use = "Use LigerDistillTrainer"
    # a launcher tells only the accelerator
    parallel = getattr(args, "parallelism_config", None) or getattr(accelerator, "parallelism_config", None)
    reasons = {
        "loss_type": (
            (getattr(args, "loss_type", None) or "nll") != "nll",  # None: ms-swift's own default
            "it weighs the cross-entropy of fine-tuning. Set loss_type='nll', as LigerDistillTrainer needs it too",
        ),
        "label_smoothing_factor": (
            args.label_smoothing_factor != 0,
            f"the trainer computes such a loss outside of the model. {use}, whose loss includes it",
        ),
        "DataParallel": (
            args.n_gpu > 1,
            "one process sees several GPUs. Launch one for each with torchrun, for LigerDistillTrainer too",
        ),
        "FSDP1 or Megatron-LM": (
            distributed in (DistributedType.FSDP, DistributedType.MEGATRON_LM) and not accelerator.is_fsdp2,
            f"the teacher would have to be sharded by the trainer's engine, out of reach. {use}, or FSDP2",
        ),
        "parallelism_config": (
            parallel is not None and parallel.total_size != parallel.dp_replicate_size * parallel.dp_shard_size,
            f"models or sequences that are split over devices are out of reach. {use}, if it is not for sequences",
        ),
        "torch_compile": (args.torch_compile, f"the model is compiled before a callback can patch it. {use}"),
    }
    for name, (refused, why) in reasons.items():
        if refused:
            raise ConfigError(f"DistillationCallback does not work with {name}: {why}.")


def _vocabulary(student: Any, teacher: Any, processing_class: Any) -> int | None:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if hasattr(tokenizer, "get_vocab"):
        shared = with_heads(compare_tokenizers(tokenizer, tokenizer_of(teacher)), student, teacher)
        if shared.student_only:
            raise ConfigError(
                f"The student's tokenizer has tokens that the teacher's has not ({shared.named_student_only}), and a "
                "callback cannot see whether the rows use them. Use LigerDistillTrainer, which looks."
            )
        announce(f"vocabulary: {shared}")
        return shared.size
    sizes = [head_rows(model) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"The student's head has {sizes[0]} rows and the teacher's {sizes[1]}. Pass the tokenizer to the trainer "
            "as processing_class: it says which of them are padding. LigerDistillTrainer asks for it too."
        )
    return None


def _patch_until(
    undo: contextlib.ExitStack, model: Any, options: PatchOptions, name: str, rows: PackedRows
) -> Patched | None:
    """Patch the layers of a model that is not patched, and its attention over packed rows, until `undo`."""
    before = patched_record(model)
    packed = before is not None and KIND in before.report.swapped
    record = patch_layers(model, options, name, rows)
    if record is not None and not packed:
        undo.callback(record.undo if before is None else record.unpack_attention)
    return record


def _mode_and_prefix(logs: dict[str, float]) -> tuple[str | None, str]:
    """Return whether a training step or an evaluation was logged, or None, and the prefix of its names."""
    if "loss" in logs:
        return "train", ""
    prefixes = [name.removesuffix("runtime") for name in logs if name.endswith("_runtime")]
    return ("eval", prefixes[0]) if prefixes and prefixes != ["train_"] else (None, "")
