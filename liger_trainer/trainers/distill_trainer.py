"""LigerDistillTrainer: a student learns a teacher's next-token distributions on the tokens of a dataset."""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

import shlex
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..common.checkpoints import checkpoints_in
from ..common.files import CONFIG, as_name
from ..compat.sft_trainer import is_conversational
from ..errors import ConfigError, TeacherServerError
from ..losses.spec import LossOptions, TokenLossOutput
from ..patching.patcher import Patched, base_of
from ..plugins import load
from ..teachers.factory import GivenTeacher, make_teacher
from ..teachers.model import ModelTeacher
from ..teachers.own_images import take_processor
from .config import LigerDistillConfig
from .host import DistillTrainerHost
from .images import check_settings
from .loss_schedule import LossState
from .metrics import per_token_values
from .on_policy import SOURCE, STUDENT, OnPolicy, PromptCollator
from .options import correct_guess
from .row_preparation import rows_for_reading
from .rows import (
    GENERATION_PROMPT,
    asked,
    check_ids,
    check_positions,
    check_prompts,
    has_only_prompts,
    prepare_prompts,
    prompt_ids,
    with_generation_prompts,
)
from .sft_trainer import LigerTrainer
from .student import check_prompt_learning, disable_dropout


class LigerDistillTrainer(LigerTrainer):
    """Knowledge distillation with fused divergences, of full or LoRA students.

    The completions are those of a dataset, or the student or the teacher samples them.

    Everything that TRL's SFTTrainer does with data (chat templates, packing, completion and assistant masks) applies.
    The teacher sees the same tokens as the student, under the same shift and mask. It is frozen, in eval mode, and no
    part of the student's checkpoint. Its layers are patched as the student's are.

    Args:
        model: the student, as for `trl.SFTTrainer`.
        teacher_model: a causal LM, or its directory or hub id. Default: `args.teacher_model_name_or_path`. With
            `args.teacher="cache"` it is not loaded, only compared with the one that the cache was captured from; with
            "self" and "server" there is none to give. Several: a dictionary of them by name, see `args.teachers`.
        teacher_processor: for rows with images, the processor of one teacher that is a model. Where it draws them
            otherwise than the student's, the teacher reads its own rows (docs/vision.md). Default: the one next to the
            teacher, or next to `args.teacher_tokenizer_name_or_path`; without one, it reads the student's rows.
        args: `LigerDistillConfig`, or the `DistillationConfig` or `GKDConfig` of TRL, whose run is then this one's
            (docs/on-policy.md).
        **kwargs: as for `trl.SFTTrainer`.

    Attributes, besides LigerTrainer's:
        teaching: the teacher as the trainer asks it; each `args.teacher` has a class.
        teacher: the teacher's model; None where it has none, and where there are several, which are in
            `teaching.models`. `teacher_model` is the same, as in TRL's trainers.
        teacher_patched: the record of replacements in the teacher; None without a model, or with nothing to replace.
        distillation: the loss; `distil` changes it.
        lmbda: the share of micro-batches whose completions the student samples, from the next optimizer step on.
        max_completion_length: the most tokens of a completion, from the next optimizer step on.
        prompts_alone: the names of the datasets that have prompts and no completions.

    Logs, besides LigerTrainer's: kd_loss (the weighted divergences at the loss's temperature), ce_loss, forward_kl and
    reverse_kl (nats per token, at temperature 1), agreement_at_1, student_perplexity (LigerTrainer's perplexity, by the
    name that goes with teacher_perplexity), teacher_perplexity, teacher_entropy. With completions that are sampled
    in training: on_policy_share, completion_length, sampled_tokens_per_second, and where some are and some are not,
    each metric of the teacher also as on_policy/... and off_policy/.... From a cache of tokens there is no
    reverse_kl, and forward_kl only at temperature 1 (docs/cache.md).

    Raises:
        ConfigError: no teacher, the student as its own teacher, a student or teacher that lacks tokens of the
            vocabulary, or `compute_loss_func`; with sequence parallelism, a teacher that is no single model; a cache
            that belongs to other data, settings or another teacher.
        CorruptError: a damaged cache.
    """

    _tag_names = ["trl", "liger-trainer", "distillation"]
    _name = "Distillation"

    def __init__(
        self, model, teacher_model: GivenTeacher = None, args: Any = None, teacher_processor: Any = None, **kwargs
    ):
        # Before LigerTrainer's: its __init__ prepares the rows, which the teacher sees, and puts our loss on the model.
        of_trl = not isinstance(args, LigerDistillConfig)
        if of_trl:
            if args is not None:
                correct_guess(args)
            args, kwargs = load("from_trl").from_trl(args, kwargs)
        teacher_model = as_name(teacher_model) if teacher_model is not None else args.teacher_model_name_or_path
        if teacher_model is model and not isinstance(model, str):
            raise ConfigError("The student cannot be its own teacher: its weights would move under the teacher.")
        if kwargs.get("compute_loss_func") is not None:
            raise ConfigError("compute_loss_func would take the place of distillation. Use LigerTrainer with it.")
        check_settings(kwargs.get("train_dataset"), args)  # of images, before a teacher is loaded
        self.teaching = make_teacher(args, teacher_model, rows_for_reading)
        if teacher_processor is not None:
            take_processor(self.teaching, teacher_processor)
        if args.teacher == "cache" and kwargs.get("data_collator") is not None:
            raise ConfigError("data_collator: a teacher cache is laid out by TRL's own collator. Leave it out.")
        self.distillation = args.distillation()
        self.lmbda, self.max_completion_length = args.lmbda, args.max_completion_length
        self.prompts_alone = set[str]()
        self._late_chats = False  # whether the rows are chats whose generation prompts were not prepared
        super().__init__(model, args, **kwargs)
        # Now the collator is there, and the layers are patched.
        check_teacher_of_slices(self, samples=bool(args.samples or self.prompts_alone))
        if args.teacher != "self":  # which wants adapters that can be switched off
            check_prompt_learning(self.student)
        self._prepare_teacher()
        if args.disable_dropout:
            disable_dropout(self.student)
        # Its completions are batched by the collator inside the teacher's.
        self._on_policy = OnPolicy(self, self._rows_collator) if args.samples or self.prompts_alone else None
        if not of_trl:  # whose own defaults are set here
            for message in args.unused_fields(sampled=self._on_policy is not None):
                warnings.warn(message, stacklevel=2)
        self._source: str | None = None  # who wrote the completions of the micro-batch at hand, where some are sampled

    def _prepare_teacher(self) -> None:
        """Have the teacher check rows and student, and put its loss on the student."""
        if self._skip_prepare_dataset:  # which has kept the rows from the teacher: it sees what can be read of them
            for name, rows in self.row_preparation.named_datasets().items():
                readable = isinstance(rows, Dataset) and {"input_ids", "labels"} <= set(rows.column_names)
                seen = rows if readable and self.args.teacher_column is None else None
                self.teaching.check(seen, name, self.tokenizer)
        self._rows_collator, self.data_collator = self.data_collator, self.teaching.collator(self.data_collator)
        if self.args.samples:
            self.data_collator = PromptCollator(self.data_collator)
        vocab_size = self.teaching.prepare(self)  # loads it where it is a name; compares vocabularies
        self._check_rows_of_both(vocab_size)
        if self.args.teacher != "self":
            with self.teaching.live() as models:
                for name, model in models.items():
                    whose, read = f"the teacher {name}".rstrip(), self.teaching.longest_row
                    check_positions(self.row_preparation.named_datasets(), self.args, base_of(model), whose, read)
        # Before there is an optimizer, which gets its projectors.
        self.loss_state = LossState(self, self.args.loss_plan())
        self.add_callback(self.loss_state)
        if self.loss_state.hidden is not None:
            self.add_callback(self.loss_state.hidden)
        self.distil(vocab_size=vocab_size)

    # rows, before training

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        self.teaching.see(dataset, processing_class, dataset_name)
        if formatting_func is None and has_only_prompts(dataset):
            dataset = self.row_preparation.check_chats(dataset, processing_class, dataset_name)
            return self._prepare_prompts(dataset, processing_class, args, dataset_name)

        def prepare(rows, packing):
            counted = self.row_facts.pop(dataset_name, None)
            make = super(LigerDistillTrainer, self)._prepare_dataset
            prepared: Any = make(rows, processing_class, args, packing, formatting_func, dataset_name)
            if counted is not None:  # rows that were prepared before, and are packed now
                self.row_facts[dataset_name] = replace(counted, sequences=len(prepared))
            return prepared

        how = {"tokenizer": processing_class, "formatting_func": formatting_func}
        prepared = self.teaching.prepare_dataset(prepare, dataset, packing, dataset_name, **how)
        if dataset_name != "train":
            return prepared
        if args.samples:
            check_prompts(prepared)
        columns = set(next(iter(prepared)))
        if formatting_func is not None or columns.isdisjoint({"prompt", "messages"}):  # tokens, text or packed rows
            return prepared
        self._late_chats = not args.samples and is_conversational(next(iter(prepared)))
        return self._with_generation_prompts(prepared, processing_class, args) if args.samples else prepared

    def read_rows(self, tokenized: Dataset, kept: Dataset, dataset_name: str, part: slice) -> None:
        super().read_rows(tokenized, kept, dataset_name, part)
        self.teaching.read_rows(kept, dataset_name, lambda tokens: tokens[part])

    def check_rows(self) -> None:
        """Do nothing yet: where the tokenizers differ, the teacher's refusal says more (`_check_rows_of_both`)."""

    def _check_rows_of_both(self, vocab_size: int) -> None:
        super().check_rows()
        check_ids(self.largest_ids, "labels", vocab_size, "the vocabulary that student and teacher share has")
        self.row_preparation.limit_streams("labels", vocab_size)
        if self.teaching.reads is not None:
            self.row_preparation.limit_streams("input_ids", self.teaching.reads)
            check_ids(self.largest_ids, "tokens", self.teaching.reads, "the teacher has")

    def _with_generation_prompts(self, prepared: Any, tokenizer: Any, args: Any) -> Any:
        template = self.chat_template
        rows = with_generation_prompts(prepared, tokenizer, args, template)

        def read(reader: Any) -> list[list[int]]:
            if reader is tokenizer:
                return rows[GENERATION_PROMPT][:]
            return prompt_ids(prepared.map(lambda row: asked(row, tokenizer, template)), reader, None, None)

        self.teaching.see_prompts(rows, "train", read, tokenizer=tokenizer)
        return rows

    def _prepare_prompts(self, dataset, processing_class, args, dataset_name):
        """Prepare rows without completions. In evaluation the student writes them; in training all must be sampled."""
        if dataset_name == "train" and (args.lmbda < 1 or "lmbda" in (args.schedules or {})) and not args.seq_kd:
            raise ConfigError(
                "The training rows have prompts and no completions: set lmbda to 1.0, and the student samples them, or "
                "seq_kd, and the teacher samples what the student does not. Or add a column completion."
            )
        self.prompts_alone.add(dataset_name)

        def read(reader: Any) -> list[list[int]]:
            template = self.chat_template if reader is processing_class else None
            return prompt_ids(dataset, reader, template, args.dataset_num_proc)

        self.teaching.see_prompts(dataset, dataset_name, read, tokenizer=processing_class)
        column = args.teacher_column
        prepared, facts = prepare_prompts(dataset, processing_class, args, self.chat_template, dataset_name, column)
        if column is not None:  # the teachers look at it, and the rows go on without it
            if isinstance(prepared, Dataset):
                self.teaching.read_rows(prepared, dataset_name, lambda tokens: tokens)
            self.teaching.check(prepared, dataset_name, processing_class)
            prepared = prepared.remove_columns(column)
        if facts is not None:
            self.row_facts[dataset_name] = facts
        return prepared

    # one step: completions are sampled, the teacher answers, the loss moves along its plan

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Sample completions for the micro-batches of an optimizer step, before transformers counts their tokens."""
        if self.lmbda == 0 and not self.args.seq_kd and self._on_policy is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._late_chats:
            raise ConfigError(
                "lmbda was 0.0 when the chats were prepared, so how their template asks for an answer is not known: "
                "start with schedules of lmbda, or with a small one."
            )
        batches = self._sampling().replace(list(islice(epoch_iterator, num_batches)))
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _sampling(self) -> OnPolicy:
        if self._on_policy is None:  # lmbda has risen since, or an evaluation was given only prompts
            self._on_policy = OnPolicy(self, self._rows_collator)
        return self._on_policy

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.loss_state.hidden is not None and self.accelerator.sync_gradients:
            self.loss_state.hidden.average_gradients()
        return loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        self._source = inputs.pop(SOURCE, None)
        self.use_own_loss()
        assert self.fused is not None
        # What the student has just written is no label: to learn it would only make the student surer of itself.
        with self.fused.without_cross_entropy() if self._source == STUDENT else nullcontext():
            return super().compute_loss(model, inputs, *args, **kwargs)

    def teacher_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        hidden = self.loss_state.hidden
        if hidden is None:
            return {"teacher_logits": self.teaching.answer(inputs)}
        with hidden.of_teacher() as hidden_pass:
            return {"teacher_logits": self.teaching.answer(inputs), "hidden_pass": hidden_pass}

    def per_token(self, outputs: TokenLossOutput) -> dict[str, Tensor]:
        return {**super().per_token(outputs), **per_token_values(outputs)}

    def add_metrics(self, mode: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        super().add_metrics(mode, totals, tokens)
        if mode == "train":
            self.loss_state.add_micro_batch(totals, tokens)
        if mode == "train" and self._source is not None:
            self._sampling().add_metrics(self._source, totals, tokens)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.logs_training(logs) and self._on_policy is not None:
            logs.update(self._on_policy.flush())
        if "loss" in logs:
            logs.update(self.loss_state.logged)
        super().log(logs, start_time)

    # the loss

    def distil(self, **changes: Any) -> None:
        """Go on with another loss. `changes` are fields of `Distillation`, such as `temperature` or `ce_weight`.

        Evaluations change too, except for what a schedule moves: there it has its final value.
        """
        self.distillation = replace(self.distillation, **changes)
        assert self.fused is not None
        self.loss_state.set_loss(self.fused, self.loss_options())

    def loss_options(self) -> LossOptions:
        return LossOptions(label_smoothing=self.args.label_smoothing_factor, distillation=self.distillation)

    def use_own_loss(self) -> None:
        before = self.fused
        super().use_own_loss()
        if self.fused is not before:
            self.distil()

    # an evaluation, and a training

    def prediction_step(self, model, inputs, *args, **kwargs):
        if self.prompts_alone - {"train"} and not bool((inputs["labels"] != -100).any()):
            self.evaluation_rows.sampled += 1
            inputs = self._sampling().replace_in_eval(inputs, self.evaluation_rows.sampled)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except TeacherServerError as error:
            raise TeacherServerError(f"{error} {save_and_hint(self)}") from error

    def settle(self) -> None:
        self.teaching.settle()

    def restart_metrics(self, tokens: int) -> None:
        super().restart_metrics(tokens)
        if self._on_policy is not None:
            self._on_policy.flush()

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.loss_state.hidden is not None:
            self.loss_state.hidden.add_projectors(optimizer)
        return optimizer

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if GENERATION_PROMPT not in self._signature_columns:
            self._signature_columns.append(GENERATION_PROMPT)

    # checkpoints

    def teacher_fingerprints(self) -> dict[str, Any]:
        return {"teacher": {"kind": self.args.teacher, **self.teaching.fingerprints()}}

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.loss_state.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loss_state.load(checkpoint)

    def _load_best_model(self):
        super()._load_best_model()
        if self.loss_state.hidden is not None:
            self.loss_state.hidden.load_best(str(self.state.best_model_checkpoint))

    # the models

    @property
    def student(self) -> Any:
        """Return the model that learns, without its wrapper for several processes."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def teacher(self) -> Any:
        return self.teaching.model

    @property
    def teacher_model(self) -> Any:
        """Return `teacher`, under the name that it has in TRL's trainers."""
        return self.teacher

    @property
    def teacher_patched(self) -> Patched | None:
        return self.teaching.patched

    def frozen_models(self) -> dict[str, Any]:
        # the student, with its adapters off, is a teacher too, but has its own graphs
        with self.teaching.live() as models:
            frozen = {f"teacher {name}".rstrip(): model for name, model in models.items()}
        return {name: model for name, model in frozen.items() if not any(p.requires_grad for p in model.parameters())}


def save_and_hint(trainer: DistillTrainerHost) -> str:
    """Save a checkpoint after the last whole step, unless there is one, and return how to go on from it.

    With several processes nothing is saved: the others are in the middle of a step and know nothing of it.
    """
    args, step = trainer.args, trainer.state.global_step
    folder = Path(str(args.output_dir))
    checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if step > 0 and args.world_size == 1 and not checkpoint.is_dir():
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.control = trainer.callback_handler.on_save(args, trainer.state, trainer.control)
    saved = checkpoints_in(folder)
    if not saved:
        return "No step was taken, so nothing was saved." if step == 0 else "No checkpoint was saved."
    by_command = (folder / CONFIG).is_file()
    how = shlex.join(["liger-trainer", "resume", str(folder)]) if by_command else "train(resume_from_checkpoint=True)"
    return f"Training stopped after step {step}; {saved[-1]} is saved. When the server is back, go on: {how}"


def check_teacher_of_slices(trainer: DistillTrainerHost, samples: bool) -> None:
    """Raise ConfigError where a teacher would not know whole rows, or completions are sampled from slices."""
    if not trainer.shards_sequences():
        return
    if type(trainer.teaching) is not ModelTeacher:
        raise ConfigError(
            "Sequence parallelism (sp_size > 1) knows one teacher: a model that reads the student's tokens. Others "
            "look their answers up by whole rows."
        )
    if samples:
        raise ConfigError("Sequence parallelism (sp_size > 1) samples no completions: of a prompt, a rank has a slice.")
