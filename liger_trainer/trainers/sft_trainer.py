"""LigerTrainer: TRL's SFTTrainer with our layers and fused loss. Same constructor, data and logs; no stored logits."""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

import inspect
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ..common.console import announce
from ..common.files import as_name
from ..compat.sft_trainer import (
    DataCollatorForLanguageModeling,
    DataCollatorForVisionLanguageModeling,
    SFTTrainer,
    with_lengths,
)
from ..errors import ConfigError
from ..losses.model_parts import output_module
from ..losses.spec import IGNORE_INDEX, LossOptions, TokenLossOutput, TokenWeights
from ..patching.packing.document_mask import documents_come_along, padded_on_the_right
from ..patching.packing.packed_rows import PackedRows, patch_packed_attention
from ..patching.patcher import base_of, patched_record
from ..plugins import QUANTISED, TrainerPlugin, load, of_trainer
from .checkpoint_guard import CheckpointGuard, ResumeCheck, public_files, public_report
from .config import LigerConfig, LigerDistillConfig
from .finite_guard import FiniteGuard
from .images import check_settings, freeze_tower, tower_without_gradients, with_image_collator, without_adapters
from .loaders import EvaluationRows, by_seed, endless, tell_epoch, warn_of_epochs
from .metrics import StepMetrics, TokenCount, count, num_tokens, remember_tokens, widen_notebook_table
from .one_launch_adamw import OneLaunchStep
from .options import ADAMW_8BIT, AUTO, FAST, MEMORY, STOP, correct_guess, follow_direction
from .row_preparation import TOKEN_WEIGHTS, RowPreparation, RowWeights, WeightCollator, check_evaluated
from .rows import check_positions
from .step_graphs import PADDING, reduce_host_work
from .student import (
    check_adapters,
    check_no_prefix,
    check_savable,
    check_trains,
    patch_student,
    patched_sft_module,
    pop_liger_options,
    undo_evaluation,
    with_names_of_modules,
)


def _last_name(model: Any) -> str:
    """Return the last part of a model's name, for the folder of a trainer without arguments."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return name.rstrip("/").rpartition("/")[2]


class LigerTrainer(SFTTrainer):
    """Supervised fine-tuning with our layers, and the loss computed from hidden states, in training and evaluation.

    Takes what `trl.SFTTrainer` takes. Logs what it logs (loss, entropy, mean_token_accuracy, num_tokens, aux_loss) and
    perplexity too. In evaluation each metric is a mean over tokens, the same on any number of processes, where TRL's
    are means over batches; perplexity is the exponential of such a mean. `label_smoothing_factor` and `loss_type="dft"`
    are part of the fused loss. `compute_metrics` gets logits from a second forward. `compute_loss_func` gets logits
    too, and takes the place of the fused loss.

    The model's layers are patched whether `use_liger_kernel` is set or not, and `liger_kernel_config` says which; a
    model that was patched before keeps its layers. Adapters on `lm_head`, which TRL refuses, are part of the loss.

    Args, besides SFTTrainer's:
        on_non_finite: what is done about a loss, gradient norm, weight or teacher that is NaN or infinite: "stop", or
            "skip_step", which leaves such steps out. Default: `args.on_non_finite`, else "stop".

    Attributes:
        finite: the guard that watches for them; `trainer.finite.skipped` counts the steps left out.
        patched: the record of what was replaced; `trainer.patched.undo()` gives the model back.
        packed_rows: what is known of rows that hold several documents; None where the model's own attention reads all.
        fused: the fused loss on the model; `trainer.fused.undo()` takes it off.
        graph_reports: after a training, what was done about CUDA graphs, by model.
        row_facts: counts of each dataset's rows: dropped, truncated, tokens (`RowFacts`). A stream has none.
        row_weights: the weights of the rows; None without `args.weight_column`.
        quantised: what holds the weights behind quantised ones; None without `args.qat`.
        resumed_from: the checkpoint that the last `train` went on from; None from the beginning.
        checkpoint_files: further small files of every checkpoint, by name.
        skipped_rows: rows without any supervised token, by dataset; they were left out.

    Raises:
        ConfigError: the model's loss cannot be replaced; documents that are packed into one row would see one another
            in the model's layers; a model given by its name lacks weights in its files, and
            `model_init_kwargs` has no `allow_missing_weights`; an unknown or impossible option in
            `liger_kernel_config`; an evaluation dataset that is named "train".
        DataError: no row of a dataset has a supervised token; a row has a token id that the model does not have, or a
            role that the chat template does not know.
        NonFiniteError: in training, numbers that are not finite; on all ranks, before a checkpoint of them is written.
    """

    _tag_names = ["trl", "sft", "liger-trainer"]
    resumed_from: Path | None = None
    _flos_per_token: float | None = None
    _eval_prefix = "eval"  # of the metrics that are logged now, if they are an evaluation's

    def __init__(self, *args, on_non_finite: str | None = None, **kwargs):
        # Before SFTTrainer's own, which loads the model, makes adapters and prepares the rows.
        call = inspect.signature(SFTTrainer).bind_partial(*args, **kwargs)
        given, config = call.arguments, call.arguments.get("args")
        given["model"] = as_name(given.get("model"))
        if config is None:  # TRL would make an SFTConfig, whose bf16 is an error on a CPU
            config = given["args"] = LigerConfig(f"{_last_name(given.get('model'))}-SFT")
        check_settings(given.get("train_dataset"), config)  # of images, which raw rows show
        if not isinstance(config, (LigerConfig, LigerDistillConfig)):
            correct_guess(config)
        follow_direction(config)
        freezes = getattr(config, "freeze_vision_tower", False)
        if given.get("peft_config") is not None:
            adapters = with_names_of_modules(given["peft_config"])
            given["peft_config"] = without_adapters(adapters, given.get("model")) if freezes else adapters
        for plugin in of_trainer(config, base_of(given.get("model"))):
            plugin.before_model(given.get("model"))  # before anything copies quantised numbers
        options = pop_liger_options(config)  # off the arguments: Trainer would apply liger-kernel
        # What prepares rows, and what the overridden methods use, is there before SFTTrainer calls them.
        column: str | None = getattr(config, "weight_column", None)
        self.row_weights = None if column is None else RowWeights(column, config.packing_strategy)
        self.row_preparation, self.evaluation_rows = RowPreparation(self, call), EvaluationRows(self)
        self.row_facts, self.largest_ids = self.row_preparation.facts, self.row_preparation.largest_ids
        self.checkpoint_guard = CheckpointGuard(self)
        self.checkpoint_files = self.checkpoint_guard.files
        with warnings.catch_warnings(), patched_sft_module(config, given.get("model")), self.row_preparation.accepted():
            # TRL announces a slower path for label smoothing; here it is part of the fused loss.
            # And PEFT asks for checkpointing by the name of before transformers 5.23.
            warnings.filterwarnings("ignore", "`(label_smoothing_factor|is_gradient_checkpointing)`", FutureWarning)
            super().__init__(*call.args, **call.kwargs)
        check_savable(self.model, self.processing_class)
        check_adapters(self.model, self.args)
        self._leave_out(freezes)  # now there are adapters, and no optimizer yet
        # Collators from the inside out. This one is around TRL's own. TRL's own configuration knows no such field, and
        # its labels stay as they are.
        self.data_collator = with_image_collator(
            with_lengths(self.data_collator), base_of(self.model), getattr(config, "learn_image_tokens", True)
        )
        self.check_rows()
        check_positions(self.row_preparation.named_datasets(), self.args, base_of(self.model), "the model")
        self._check_parallelism()  # looks at the collator's type, so before the next one is around it
        self._weigh_rows()
        # nothing is patched yet: the weights before training tell trainings apart
        self._resume_check, self.graph_reports = ResumeCheck(self), dict[str, str]()
        if self.args.dataloader_pin_memory:  # else each batch would wait until the GPU has done the step before
            self.accelerator.dataloader_config.non_blocking = True
        # transformers would log the mean of the losses before in place of one that is NaN, and wait for each to look
        self.args.logging_nan_inf_filter = False
        self.finite = FiniteGuard(self.accelerator, on_non_finite or getattr(config, "on_non_finite", STOP))
        self.add_callback(self.finite)  # our first callback: the others read numbers that it has judged
        self.step_metrics, self.one_launch = StepMetrics(self), OneLaunchStep(self)
        for plugin in self.plugins():
            plugin.before_patch(self)
        # The layers after PEFT's and TRL's wraps of forward, which `undo` must keep; before accelerate's.
        self.patched = patch_student(base_of(self.model), options, self.loss_options(), getattr(config, "memory", FAST))
        self.fused = self.patched.fused
        self.packed_rows = self._packed_rows(getattr(config, "attention", AUTO))
        if self.packed_rows is not None and self.packed_rows.certain:
            check_no_prefix(self.accelerator.unwrap_model(self.model))
        patch_packed_attention(base_of(self.model), self.patched, self.packed_rows)
        if self.shards_sequences():
            load("parallelism_config").slice_documents(self)  # around the collator, once attention knows documents
        for callback in (self.checkpoint_guard, TokenCount(self)):
            self.add_callback(callback)
        widen_notebook_table(self)
        for plugin in self.plugins():
            plugin.after_init(self)
        announce(str(self.patched.report))

    def _check_parallelism(self) -> None:
        if getattr(self.accelerator, "parallelism_config", None) is not None:
            load("parallelism_config").check_slices(self)
        if self.shards_sequences():  # else transformers would take the loss for a mean over the micro-batch
            self.model_accepts_loss_kwargs = True

    def _leave_out(self, tower: bool) -> None:
        """Train nothing of the vision tower, if `tower`, and add no auxiliary loss where there are no experts."""
        if tower:
            freeze_tower(self.model)
        text_config = base_of(self.model).config.get_text_config()
        if getattr(text_config, "num_local_experts", None) == 0:  # a dense model of a mixture's class: Granite 4.0
            self.aux_loss_enabled = text_config.output_router_logits = False

    # rows, before training

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        prepare = super()._prepare_dataset
        return self.row_preparation.prepare(
            prepare, dataset, processing_class, args, packing, formatting_func, dataset_name
        )

    def check_rows(self) -> None:
        """Raise DataError where rows have ids that the student does not have; say so where they end otherwise."""
        self.row_preparation.check_ids(base_of(self.model))
        self.row_preparation.warn_of_other_end(base_of(self.model), self.processing_class)

    def read_rows(self, tokenized: Dataset, kept: Dataset, dataset_name: str, part: slice) -> None:
        """Look at the rows of a dataset before they are cut and packed; the row weights do.

        Args:
            tokenized, kept: all rows, and those with a supervised token.
            part: which tokens of a row truncation or packing will leave.
        """
        if self.row_weights is not None:
            self.row_weights.read(kept, dataset_name, part)

    @property
    def skipped_rows(self) -> dict[str, int]:
        return {name: facts.rows_dropped for name, facts in self.row_facts.items()}

    def _weigh_rows(self) -> None:
        """Have the collator give each token the weight of its row."""
        if self.row_weights is None:
            return
        if self.compute_loss_func is not None:
            raise ConfigError("weight_column: compute_loss_func knows no weights. Leave it out.")
        if not isinstance(self.data_collator, DataCollatorForLanguageModeling):
            raise ConfigError("data_collator: rows with weights are batched by TRL's own. Leave it out.")
        self.row_weights.check(self.train_dataset)
        self.data_collator = WeightCollator(self.data_collator, self.row_weights)

    def _packed_rows(self, attention: str) -> PackedRows | None:
        """Return what is known of rows that hold several documents; None: the model's own attention reads them all.

        Raises:
            ConfigError: documents of evaluation rows would see one another.
        """
        one_sequence_each = self._pads_on_the_right() and not self.padding_free
        if one_sequence_each and self.args.eval_packing and self.args.packing_strategy != "wrapped":
            raise ConfigError(
                "eval_packing: TRL's collator tells nobody where the documents of a row end unless the training rows "
                "are packed too, so documents would see one another in evaluations. Leave it out, or set packing or "
                "padding_free."
            )
        if one_sequence_each and (attention != AUTO or self.args.torch_compile or self.shards_sequences()):
            return None
        return PackedRows(attention == AUTO, certain=self.padding_free, sliced=self.shards_sequences())

    def _pads_on_the_right(self) -> bool:
        """Return whether batches are TRL's own, or another collator adds to them. A subclass may pad elsewhere."""
        collator = self.data_collator
        while hasattr(collator, "collator"):
            collator = collator.collator
        return type(collator) in (DataCollatorForLanguageModeling, DataCollatorForVisionLanguageModeling)

    # one step, in the order in which transformers calls it

    def _get_num_items_in_batch(self, batch_samples, device):
        if self.shards_sequences() and "shift_labels" in batch_samples[0]:
            local = torch.stack([(batch["shift_labels"] != IGNORE_INDEX).sum() for batch in batch_samples]).sum()
            items = self.accelerator.reduce(local.to(device), "sum")
        else:
            items = super()._get_num_items_in_batch(batch_samples, device)
        # an integer: FSDP casts the floating inputs of a model, and in bf16 4,088 tokens are 4,096
        return items.long() if isinstance(items, Tensor) else items

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.finite.record_loss(loss, inputs)
        # transformers logs the mean over all ranks, of which those with slices of a row add up
        return loss * self._ranks_summed() if self.shards_sequences() else loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss; with `return_outputs` also the model's outputs, which have no gradient.

        What a subclass returns in place of it is the loss that is logged.
        """
        self._padding_tokens, weights = inputs.pop(PADDING, 0), inputs.pop(TOKEN_WEIGHTS, None)
        if self.compute_loss_func is not None and self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.use_own_loss()
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        if self.compute_loss_func is not None:
            return self._evaluate_user_loss(model, inputs, return_outputs, num_items_in_batch)
        by_lengths = self.packed_rows is not None and self.packed_rows.by_lengths and "cu_seq_lens_q" in inputs
        with padded_on_the_right(self._pads_on_the_right()), documents_come_along(by_lengths):
            more = self.teacher_inputs(inputs)
            for plugin in self.plugins():
                more |= plugin.of_batch(self, inputs)
            if weights is not None and self.model.training:
                more["token_weights"] = TokenWeights(weights)
            outputs = model(
                **inputs, **more, fused_lm_head=True, num_items_in_batch=num_items_in_batch,
                num_processes=self._averaged_ranks(),
            )  # fmt: skip
        if getattr(outputs, "token_loss", None) is None:
            raise ConfigError(
                f"The model's forward was replaced after this {type(self).__name__} was made, as by an SFTTrainer of "
                "the same model or another trainer.model, or kept from before, and does not return the fused loss. "
                "Make the other trainer when this one is done, or a trainer of the other model."
            )
        outputs = outputs.in_fp32()
        self._record(inputs, outputs, num_items_in_batch)
        loss = outputs.token_loss
        if self.aux_loss_enabled:
            # It is a mean over the micro-batch; the tokens' loss is divided by the tokens of the whole batch.
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        if not return_outputs:
            return loss
        with torch.no_grad():  # for compute_metrics: the logits, in another pass, as TRL does
            return loss, model(**{name: value for name, value in inputs.items() if name != "labels"})

    def _averaged_ranks(self) -> int:
        """Return how many ranks' gradients are averaged. `num_items_in_batch` counts the tokens of all these ranks."""
        if self.accelerator.num_processes == 1 or not self.args.average_tokens_across_devices:
            return 1
        return self.accelerator.num_processes // (self.get_tp_size() * self._ranks_summed())

    def _ranks_summed(self) -> int:
        """Return how many ranks' gradients are summed, since they have slices of one row."""
        return load("parallelism_config").ranks_summed(self) if self.shards_sequences() else 1

    def _evaluate_user_loss(self, model, inputs, return_outputs, num_items):
        """Compute `compute_loss_func` on real logits, and the metrics in a fused pass."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = self.compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=num_items)
        self._record(inputs, model(**inputs, fused_lm_head=True).in_fp32(), num_items)
        return (loss, outputs) if return_outputs else loss

    def _record(self, inputs: dict[str, Any], outputs: TokenLossOutput, num_items: Tensor | float | None) -> None:
        """Add a micro-batch to the metrics, without waiting for the device."""
        sums = {name: value.sum(dtype=torch.float64) for name, value in self.per_token(outputs).items()}
        if not self.model.training:
            return self._record_evaluated(outputs, sums, num_items)
        # layers that are spread over several devices end on another one than the inputs are on
        read = (num_tokens(inputs) - self._padding_tokens).to(outputs.label_mask.device)
        self.finite.record_teacher(sums)
        local = torch.stack([*sums.values(), count(outputs.label_mask), count(outputs.is_top1), read])
        *totals, tokens, correct, seen = self.accelerator.reduce(local, "sum").unbind()
        self.add_metrics("train", dict(zip(sums, totals, strict=True)), tokens)
        entropy = totals[list(sums).index("entropy")]
        self._metrics["train"]["entropy"].append(entropy / tokens.clamp(min=1))
        self._metrics["train"]["mean_token_accuracy"].append(correct / tokens.clamp(min=1))
        self._total_train_tokens = self._total_train_tokens + seen / self._tp_size
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        if self.aux_loss_enabled:
            self._metrics["train"]["aux_loss"].append(self.accelerator.reduce(outputs.aux_loss.detach(), "mean"))

    def _record_evaluated(
        self, outputs: TokenLossOutput, sums: dict[str, Tensor], num_items: Tensor | float | None
    ) -> None:
        """Add a micro-batch of an evaluation, all as sums over tokens, so that the means do not depend on batching.

        The auxiliary loss is one number for a micro-batch, so it is weighted by the tokens of that.
        """
        tokens = count(outputs.label_mask)
        sums["mean_token_accuracy"] = count(outputs.is_top1)
        self.evaluation_rows.items = tokens if num_items is None else num_items / self._averaged_ranks()
        if self.aux_loss_enabled:
            sums["aux_loss"] = outputs.aux_loss.double() * tokens
        local = torch.stack([*sums.values(), tokens])
        counted = local if self.evaluation_rows.rows else torch.zeros_like(local)
        *totals, tokens = self.accelerator.reduce(counted, "sum").unbind()
        self.add_metrics("eval", dict(zip(sums, totals, strict=True)), tokens)
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]

    def _clip_grad_norm(self, model):
        norm = self.one_launch.norm_before_step(model)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is None:  # nothing is clipped
            grad_norm = self.one_launch.norm_before_step(model)
        norm = super()._get_grad_norm(model, grad_norm)
        self.finite.record_norm(norm)
        return norm

    def floating_point_ops(self, inputs):
        ids = inputs.get("input_ids")
        if ids is None or getattr(self.model, "main_input_name", None) != "input_ids":
            return super().floating_point_ops(inputs)
        per_token = self._flos_per_token  # transformers would count all parameters again for each micro-batch
        if per_token is None:
            per_token = self._flos_per_token = super().floating_point_ops(inputs) / ids.numel()
        return round(per_token * ids.numel())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.logs_training(logs) else "eval"
        if "loss" in logs:
            logs.update(self.finite.logged())
            self.step_metrics.add_log(logs["loss"])
        logs.update(self.step_metrics.means(mode, "" if mode == "train" else f"{self._eval_prefix}_"))
        super().log(logs, start_time)

    def logs_training(self, logs: dict[str, float]) -> bool:
        """Return whether these logs are of training."""
        # A callback may have generated between a step and its log, and left the model in eval mode.
        return "loss" in logs or self.model.training

    # an evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        if not isinstance(eval_dataset, str):  # the name of one that the trainer has
            check_evaluated(eval_dataset, not self._skip_prepare_dataset)
        self._eval_prefix = metric_key_prefix
        with public_report(self.args):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not self.is_in_train:  # there, checkpoints and the end of training wait for it
            self.settle()
        return metrics

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        # evaluate() has these from its log
        output.metrics.update(self.step_metrics.means("eval", f"{metric_key_prefix}_"))
        return output

    def evaluation_loop(self, *args, **kwargs):
        self.step_metrics.drop("eval")
        for plugin in self.plugins():
            plugin.check(self)
        with self.evaluation_rows.counted():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        # Before training, transformers has accelerate put autocast around the model only if it has prepared no other
        # one yet, such as a teacher.
        with self.accelerator.autocast():
            inputs = self.evaluation_rows.without_repeated(inputs, prediction_loss_only)
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # a training

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, force_resume: bool = False):
        """Train as `trl.SFTTrainer` does.

        With `resume_from_checkpoint=True` it goes on from the newest checkpoint that is whole; a path that is not whole
        is refused with a CorruptError. A checkpoint whose training started with other data, another tokenizer, student
        or teacher is refused with a ConfigError that says what differs; with `force_resume` it is only a warning. While
        it trains, and saves checkpoints, no other process may train in `output_dir`.
        """
        check_trains(self.model)
        lock = self.checkpoint_guard.folder_locked(trial) if self.args.save_strategy != "no" else nullcontext()
        with lock, reduce_host_work(self), tower_without_gradients(self.model), public_report(self.args):
            checkpoint = self.checkpoint_guard.choose(resume_from_checkpoint)
            self.resumed_from = None if checkpoint is None else Path(checkpoint)
            self._resume_check.begin(checkpoint, force_resume)
            undo_evaluation(self)
            for plugin in self.plugins():
                plugin.check(self)
            warn_of_epochs(self)
            output = super().train(
                resume_from_checkpoint=checkpoint, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval
            )
        self.settle()
        return output

    def get_optimizer_cls_and_kwargs(self, args, model=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        ours = load("adamw_8bit").chosen(self, args, model) if args.optim in ADAMW_8BIT else None
        return ours or super().get_optimizer_cls_and_kwargs(args, model)

    def create_optimizer(self, *args, **kwargs):
        given = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        self.optimizer = optimizer if given is not None else self.one_launch.of(optimizer)
        return self.optimizer

    def _get_train_sampler(self, *args, **kwargs):
        return by_seed(super()._get_train_sampler(*args, **kwargs), self.args)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        make = super()._get_dataloader
        if is_training:
            return make(endless(dataset), description, batch_size, sampler_fn, True, **kwargs)
        return self.evaluation_rows.loader(make, dataset, description, batch_size, sampler_fn, **kwargs)

    def _run_epoch(self, **kwargs):
        tell_epoch(kwargs["train_dataloader"], kwargs["epoch"])
        return super()._run_epoch(**kwargs)

    def _finalize_training(self, *args, **kwargs):
        self.step_metrics.add_rest()
        return super()._finalize_training(*args, **kwargs)

    @property
    def tokens_trained(self) -> int:
        """Tokens of all ranks since training started, before a resume too. Waits for the device."""
        return int(self._total_train_tokens)

    # what Trainer saves and reads back; checkpoint_guard.py says why each is changed

    def _save_checkpoint(self, model, trial):
        self.settle()
        # the guard has checked this step, unless a callback behind it has asked for the checkpoint
        self.finite.check(self.state, and_moments=True)
        self.finite.remember(self.state)
        remember_tokens(self.state, self.tokens_trained)
        self._resume_check.remember()
        with self.checkpoint_guard.staged(trial):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir=None, _internal_call=False):
        with self.checkpoint_guard.files_hold():
            super().save_model(output_dir, _internal_call)
        if self.args.should_save and not self.checkpoint_guard.is_staging:  # a checkpoint is read back into this model
            from ..common.mtp_head import keep_mtp_head

            if kept := keep_mtp_head(self.model, Path(output_dir or self.args.output_dir or "")):
                announce(kept)

    def _save(self, output_dir=None, state_dict=None):
        with public_files(self.args):
            super()._save(output_dir, state_dict)
        for plugin in self.plugins():
            plugin.saved(self, Path(output_dir or self.args.output_dir or ""))

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self.checkpoint_guard.is_staging:  # else it is pushed once it has its name
            with public_files(self.args):  # it saves the arguments too, and needs their token
                super()._push_from_checkpoint(checkpoint_folder)

    def _get_output_dir(self, trial):
        return self.checkpoint_guard.folder(super()._get_output_dir(trial))

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args):
        with self.checkpoint_guard.best_found_again():
            begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        # Trainer would make one more epoch of a training that has made all its steps
        return begun if self.state.global_step < max_steps else (num_train_epochs, 0)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.checkpoint_guard.load(super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        self.checkpoint_guard.load_optimizer(super()._load_optimizer_and_scheduler, checkpoint)

    def _load_best_model(self):
        self.checkpoint_guard.load_best(super()._load_best_model)

    def _issue_warnings_after_load(self, load_result):
        if not self.checkpoint_guard.load_again(load_result):
            super()._issue_warnings_after_load(load_result)

    # what the collaborators ask

    def plugins(self) -> list[TrainerPlugin]:
        """Return the extras that this trainer has."""
        model = base_of(self.model)
        return of_trainer(self.args, model, output_module(model))

    @property
    def quantised(self) -> Any:
        """Return what holds the weights behind the model's quantised ones (`qat`); None where it has none."""
        return getattr(base_of(self.model), QUANTISED, None)

    def shards_sequences(self) -> bool:
        """Return whether each rank trains on slices of rows, as DeepSpeed's Ulysses cuts them."""
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return parallelism is not None and parallelism.sp_enabled

    # what LigerDistillTrainer does otherwise

    def loss_options(self) -> LossOptions:
        """Return the options of this trainer's fused loss."""
        return LossOptions(label_smoothing=self.args.label_smoothing_factor, dft=self.args.loss_type == "dft")

    def use_own_loss(self) -> None:
        """Put this trainer's loss, and its MLPs, back on the model where another trainer of it has replaced them."""
        record = patched_record(base_of(self.model))
        if record is not None and record.fused not in (None, self.fused):
            self.patched, self.fused = record, record.fuse(self.loss_options())
            record.remake_mlps(MEMORY[getattr(self.args, "memory", FAST)])

    def teacher_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what the student's forward gets besides the batch."""
        return {}

    def per_token(self, outputs: TokenLossOutput) -> dict[str, Tensor]:
        """Return what is averaged over tokens. In training, `entropy` is logged as TRL does, as a mean of means."""
        return {"perplexity": -outputs.log_probs, "entropy": outputs.entropy, **(outputs.parts or {})}

    def add_metrics(self, mode: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        """Add a micro-batch's sums over the tokens of all ranks; `mode` is "train" or "eval"."""
        self.step_metrics.add(mode, totals, tokens)

    def restart_metrics(self, tokens: int) -> None:
        """Start a training's metrics from the start, after `tokens` tokens of an earlier process."""
        self.step_metrics.restart(tokens)

    def frozen_models(self) -> dict[str, Any]:
        """Return the models besides the student that run in each step, by name."""
        return {}

    def teacher_fingerprints(self) -> dict[str, Any]:
        """Return what identifies a teacher in checkpoints, under "teacher"; empty without one."""
        return {}

    def settle(self) -> None:
        """Return once everything that a teacher has answered is known to be sound, or raise."""
