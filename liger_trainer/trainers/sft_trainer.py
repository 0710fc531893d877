"""LigerTrainer: TRL's SFTTrainer with our layers and fused loss. Same constructor, data and logs; no stored logits."""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer import sft_trainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import create_model_from_path

from ..common.console import announce
from ..common.replacements import Replacements
from ..common.weights import load_whole
from ..errors import ConfigError, DataError
from ..losses.model_parts import embedding_rows, head_rows, output_module
from ..losses.spec import LossOptions
from ..losses.token_output import TokenLossOutput
from ..patching.patcher import Patched, PatchOptions, base_of, patched_record
from .chat_rows import check_chats, datasets_in_messages
from .evaluation_rows import EvaluationOfEachRow
from .resume_check import ResumeCheck
from .rows import RowFacts, count_rows
from .token_ids import LargestIds, check_ids
from .token_metrics import TokenCount, TokenMetrics, remember_tokens


class LigerTrainer(EvaluationOfEachRow):
    """Supervised fine-tuning with our layers, and the loss computed from hidden states, in training and evaluation.

    Takes what `trl.SFTTrainer` takes and logs what it logs (loss, entropy, mean_token_accuracy, num_tokens, aux_loss),
    and perplexity; in evaluation each is a mean over tokens, equal on any number of processes, where TRL's are over
    batches. `label_smoothing_factor` and `loss_type="dft"` are part of the fused loss. `compute_metrics` gets
    logits from a second forward. `compute_loss_func` gets them too, and takes the place of the fused loss.

    The model's layers are patched whether `use_liger_kernel` is set or not, and `liger_kernel_config` says which; a
    model that was patched before keeps its layers. Adapters on `lm_head`, which TRL refuses, are part of the loss.

    Attributes:
        patched: the record of what was replaced; `trainer.patched.undo()` gives the model back.
        fused: the fused loss on the model; `trainer.fused.undo()` takes it off.
        row_facts: what was counted in each dataset's rows: dropped, truncated, tokens (`RowFacts`). Not of a stream.
        skipped_rows: rows without any supervised token, by dataset; they were left out.

    Raises:
        ConfigError: the model's loss cannot be replaced; a model that is given by its name has weights that its files
            lack, and `model_init_kwargs` no `allow_missing_weights`; an unknown or impossible option in
            `liger_kernel_config`; an evaluation dataset that is named "train".
        DataError: no row of a dataset has a supervised token; one has a token id that the model does not have, or a
            role that the chat template does not know.
    """

    _tag_names = ["trl", "sft", "liger-trainer"]

    def __init__(self, *args, **kwargs):
        self.row_facts: dict[str, RowFacts] = {}
        self.largest_ids: dict[str, LargestIds] = {}
        bound = inspect.signature(SFTTrainer).bind_partial(*args, **kwargs)
        given = bound.arguments
        check_names(given.get("eval_dataset"))
        options = _take_flag(given.get("args"))
        given.update(datasets_in_messages(given, given.get("args")))
        with warnings.catch_warnings(), _loading_and_adapters(given.get("args")):
            # TRL announces a slower path for label smoothing; here it is part of the fused loss.
            warnings.filterwarnings("ignore", message="`label_smoothing_factor` is deprecated", category=FutureWarning)
            super().__init__(*bound.args, **bound.kwargs)
        self._check_rows()
        self._resume_check = ResumeCheck(self)
        self._token_metrics = {"train": TokenMetrics(), "eval": TokenMetrics()}
        self._eval_prefix = "eval"
        self.patched = _patch(base_of(self.model), options, self._loss_options())
        self.fused = self.patched.fused
        self.add_callback(TokenCount(self))
        announce(str(self.patched.report))

    def _loss_options(self) -> LossOptions:
        return LossOptions(label_smoothing=self.args.label_smoothing_factor, dft=self.args.loss_type == "dft")

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """TRL's preparation, with the roles of chats checked, and with rows that have nothing to learn counted and left
        out, packed or not."""
        if formatting_func is None:
            check_chats(dataset, processing_class, self.chat_template, f"row {{}} of the {dataset_name} dataset".format)
        if not isinstance(dataset, Dataset):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        max_length, shuffles = args.max_length, args.shuffle_dataset
        args.max_length, args.shuffle_dataset = None, False
        try:
            tokenized = super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)
            assert isinstance(tokenized, Dataset)
        finally:
            args.max_length, args.shuffle_dataset = max_length, shuffles
        self.largest_ids.setdefault(dataset_name, LargestIds.of(tokenized))
        kept = self._learnable(tokenized, args, packing, dataset_name)
        if not len(kept):
            raise DataError(
                f"No row of the {dataset_name} dataset has a supervised token within max_length={max_length}: "
                "every label is masked. Check the completions, the chat template's generation markers, or max_length."
            )
        prepared = super()._prepare_dataset(kept, processing_class, args, packing, formatting_func, dataset_name)
        assert isinstance(prepared, Dataset)
        self.row_facts[dataset_name] = replace(self.row_facts[dataset_name], sequences=len(prepared))
        return prepared

    def _check_rows(self) -> None:
        self.check_ids(base_of(self.model))

    def check_ids(self, model: Any) -> None:
        """Raise DataError where rows have token ids that a model does not have. Streams cannot be looked through."""
        tests = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"eval": self.eval_dataset}
        for name, rows in {"train": self.train_dataset, **tests}.items():  # those that were not prepared here
            if name not in self.largest_ids and isinstance(rows, Dataset) and "input_ids" in rows.column_names:
                self.largest_ids[name] = LargestIds.of(rows)
        check_ids(self.largest_ids, "tokens", embedding_rows(model), "the model has")
        if output_module(model) is not None:
            check_ids(self.largest_ids, "labels", head_rows(model), "the model's head has")

    def _learnable(self, tokenized: Dataset, args, packing: bool, dataset_name: str) -> Dataset:
        """The rows with a supervised token within what truncation or packing will leave of them."""
        self.row_facts[dataset_name], kept = count_rows(tokenized, *kept_length(args, packing))
        return tokenized if len(kept) == len(tokenized) else tokenized.select(kept)

    @property
    def skipped_rows(self) -> dict[str, int]:
        return {name: facts.rows_dropped for name, facts in self.row_facts.items()}

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        check_names(eval_dataset)
        self._eval_prefix = metric_key_prefix
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        output.metrics.update(self._means("eval", f"{metric_key_prefix}_"))  # which evaluate() logs
        return output

    def evaluation_loop(self, *args, **kwargs):
        self._forget("eval")
        return super().evaluation_loop(*args, **kwargs)

    @property
    def tokens_trained(self) -> int:
        """Of all ranks, since the training began, in the process that it was resumed from too. Waits for the device."""
        return int(self._total_train_tokens)

    def begin_counting(self, tokens: int) -> None:
        """For a training that begins after this many tokens."""
        self._forget("train")
        self._total_train_tokens = tokens

    def _forget(self, mode: str) -> None:
        """What was counted in a training or an evaluation that did not come to its log."""
        self._token_metrics[mode] = TokenMetrics()
        self._metrics[mode].clear()

    def prediction_step(self, *args, **kwargs):
        # Before training, transformers has accelerate put autocast around the model only if it has prepared no other
        # one yet, such as a teacher.
        with self.accelerator.autocast():
            return super().prediction_step(*args, **kwargs)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, force_resume: bool = False):
        """As of `trl.SFTTrainer`. A checkpoint whose training was begun with other data, another tokenizer, student or
        teacher is refused with a ConfigError that says what differs; `force_resume` goes on from it with a warning."""
        self._resume_check.begin(resume_from_checkpoint, force_resume)
        self._unprepare()
        return super().train(
            resume_from_checkpoint=resume_from_checkpoint, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval
        )

    def teacher_fingerprints(self) -> dict[str, Any]:
        """What a teacher is known by in checkpoints, under "teacher"; empty without one."""
        return {}

    def _unprepare(self) -> None:
        """Undo what an evaluation before training did to the model: accelerate takes a model that was prepared for
        evaluation for one that is ready to train, and every process would train on its own gradients."""
        prepared = getattr(self.model, "_is_accelerate_prepared", False) and self.model_wrapped is self.model
        if prepared and self.accelerator.num_processes > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            own = vars(self.model)
            if "_original_forward" in own:  # below autocast; accelerate's unwrap_model would go on below the fused loss
                self.model.forward = own.pop("_original_forward")
            del self.model._is_accelerate_prepared

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._shards_sequences() or (self.compute_loss_func is not None and self.model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._own_loss()
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        if self.compute_loss_func is not None:
            return self._evaluate_given_loss(model, inputs, return_outputs, num_items_in_batch)
        teacher_inputs = self._teacher_inputs(inputs)
        outputs = model(
            **inputs, **teacher_inputs, fused_lm_head=True, num_items_in_batch=num_items_in_batch,
            num_processes=self._averaged_over(),
        )  # fmt: skip
        if getattr(outputs, "token_loss", None) is None:
            raise ConfigError(
                f"The model's forward was replaced after this {type(self).__name__} was made, as by an SFTTrainer of "
                "the same model, and does not return the fused loss. Make the other trainer when this one is done."
            )
        outputs = outputs.in_fp32()
        self._record(inputs, outputs, num_items_in_batch)
        loss = outputs.token_loss
        if self.aux_loss_enabled:
            # A mean over the micro-batch, where the tokens' loss is already a share of the whole batch.
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        if not return_outputs:
            return loss
        with torch.no_grad():  # for compute_metrics: the logits, in a pass of their own, as TRL does
            return loss, model(**{name: value for name, value in inputs.items() if name != "labels"})

    def _own_loss(self) -> None:
        """This trainer's loss on the model, where another trainer of the same model has put its own on since."""
        record = patched_record(base_of(self.model))
        if record is not None and record.fused not in (None, self.fused):
            self.patched, self.fused = record, record.fuse(self._loss_options())

    def _save_checkpoint(self, model, trial):
        remember_tokens(self.state, self.tokens_trained)
        self._resume_check.remember()
        super()._save_checkpoint(model, trial)

    def _teacher_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _averaged_over(self) -> int:
        """Of how many ranks the gradients are averaged, where num_items_in_batch counts the tokens of all."""
        if not self.args.average_tokens_across_devices:
            return 1
        return self.accelerator.num_processes // self.get_tp_size()

    def _record(self, inputs: dict[str, Any], outputs: TokenLossOutput, num_items: Tensor | float | None) -> None:
        """Add a micro-batch to the metrics, without waiting for the device."""
        sums = {name: value.sum(dtype=torch.float64) for name, value in self._per_token(outputs).items()}
        if not self.model.training:
            return self._record_evaluated(outputs, sums, num_items)
        read = _num_tokens(inputs).to(outputs.label_mask.device)  # a model spread over devices ends on another
        local = torch.stack([*sums.values(), _count(outputs.label_mask), _count(outputs.is_top1), read])
        *totals, tokens, correct, seen = self.accelerator.reduce(local, "sum").unbind()
        self._add("train", dict(zip(sums, totals, strict=True)), tokens)
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
        """In evaluation everything is a mean over tokens, so that it does not depend on how rows are batched: the loss
        too, and the auxiliary loss of a micro-batch counts as often as it has tokens."""
        tokens = _count(outputs.label_mask)
        sums["mean_token_accuracy"] = _count(outputs.is_top1)
        items = tokens if num_items is None else num_items / self._averaged_over()
        sums["loss"] = outputs.token_loss.double() * items
        if self.aux_loss_enabled:
            sums["aux_loss"] = outputs.aux_loss.double() * tokens
            if self.compute_loss_func is None:
                sums["loss"] = sums["loss"] + self.router_aux_loss_coef * sums["aux_loss"]
        local = torch.stack([*sums.values(), tokens])
        counted = local if self.evaluated_rows else torch.zeros_like(local)
        *totals, tokens = self.accelerator.reduce(counted, "sum").unbind()
        self._add("eval", dict(zip(sums, totals, strict=True)), tokens)
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]

    def _evaluate_given_loss(self, model, inputs, return_outputs, num_items):
        """`compute_loss_func` on real logits, measured with the fused pass."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = self.compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=num_items)
        measured = model(**inputs, fused_lm_head=True).in_fp32()
        measured.token_loss = loss
        self._record(inputs, measured, num_items)
        return (loss, outputs) if return_outputs else loss

    def _add(self, mode: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        """A micro-batch's sums over the tokens of all ranks."""
        self._token_metrics[mode].add(totals, tokens)

    def _per_token(self, outputs: TokenLossOutput) -> dict[str, Tensor]:
        """What is averaged over tokens. `entropy` is logged as TRL does, as a mean of means."""
        return {"perplexity": -outputs.log_probs, "entropy": outputs.entropy}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self._of_training(logs) else "eval"
        logs.update(self._means(mode, "" if mode == "train" else f"{self._eval_prefix}_"))
        super().log(logs, start_time)

    def _of_training(self, logs: dict[str, float]) -> bool:
        """A callback may have generated between a step and its log, and left the model in eval mode."""
        return "loss" in logs or self.model.training

    def _means(self, mode: str, prefix: str) -> dict[str, float]:
        """Averages since the last log, TRL's too, which would be logged as those of any evaluation."""
        means = self._token_metrics[mode].flush()
        for name, values in self._metrics[mode].items():
            means[name] = sum(map(float, values)) / len(values)
        self._metrics[mode].clear()
        return {f"{prefix}{name}": value for name, value in means.items()}


def check_names(eval_dataset: Any) -> None:
    """Raise ConfigError for an evaluation dataset by the name that the training rows have, here and in the logs."""
    if isinstance(eval_dataset, Mapping) and "train" in eval_dataset:
        raise ConfigError(
            "eval_dataset: 'train' is the name of the training rows; give this dataset another, such as 'seen'. To "
            "evaluate on one split of a DatasetDict, pass that split."
        )


def kept_length(args: Any, packing: bool) -> tuple[int | None, str]:
    """How many tokens of a row are kept, None for all, and whether "keep_start" or "keep_end"."""
    # packing by best fit cuts ends off, whatever truncation_mode says; the other ways of packing cut nothing off
    uncut = packing and args.packing_strategy != "bfd"
    return None if uncut else args.max_length, "keep_start" if packing else args.truncation_mode


def _take_flag(args: Any) -> PatchOptions | None:
    """What `liger_kernel_config` asks for, None without. The flag is switched off: transformers and TRL would serve it
    with liger-kernel, or refuse it."""
    config = getattr(args, "liger_kernel_config", None)
    if getattr(args, "use_liger_kernel", False):
        args.use_liger_kernel = False
    if config is None:
        return None
    options = PatchOptions.of(config)
    if not options.fused_linear_cross_entropy:
        raise ConfigError(
            "The trainers of liger_trainer compute their loss from hidden states; with "
            f"liger_kernel_config={dict(config)} there would be no such loss. Take fused_linear_cross_entropy and "
            "cross_entropy out of it, or use TRL's SFTTrainer with liger_trainer.enable()."
        )
    return options


def _patch(model: Any, options: PatchOptions | None, loss: LossOptions) -> Patched:
    """Layers and the fused loss; a model that is patched already keeps its layers, and gets this loss on top."""
    done = patched_record(model)
    if done is None:
        done = Patched(model, options or PatchOptions(), loss)
    elif done.options.cross_entropy:
        raise ConfigError(
            "The model was patched with cross_entropy=True before, so its loss wants stored logits, and this trainer "
            "stores none. Patch it without cross_entropy, or leave the patching to the trainer."
        )
    elif options in (None, replace(done.options, fused_linear_cross_entropy=True)):
        done.fuse(loss)
    else:
        raise ConfigError(
            f"liger_kernel_config asks for {options}, but the model was patched with {done.options} before. "
            "Leave one of the two away."
        )
    if done.fused is None:
        reason = done.report.left_alone["loss"]
        done.undo()
        raise ConfigError(reason)
    return done


@contextlib.contextmanager
def _loading_and_adapters(args: Any) -> Iterator[None]:
    """What differs while SFTTrainer is constructed. A model that is given by its name has all its weights in its files.

    SFTTrainer refuses adapters on `lm_head`, which its own head would leave out of the loss; ours computes them. So no
    layer counts as an adapter in its module, where nothing else asks for one."""
    replacements, allowed = Replacements(), getattr(args, "allow_missing_weights", False)

    def load(name: str, **options: Any) -> Any:
        return load_whole(create_model_from_path, name, **{"allow_missing_weights": allowed, **options})

    replacements.set(sft_trainer, "create_model_from_path", load)
    if hasattr(sft_trainer, "BaseTunerLayer"):
        replacements.set(sft_trainer, "BaseTunerLayer", _NoLayer)
    try:
        yield
    finally:
        replacements.undo()


class _NoLayer:
    """Nothing is an instance of it."""


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


def _num_tokens(inputs: dict[str, Any]) -> Tensor:
    """Tokens of the micro-batch, without padding. Padding-free batches carry no attention mask."""
    if "attention_mask" in inputs:
        return _count(inputs["attention_mask"])
    return torch.tensor(inputs["input_ids"].numel(), dtype=torch.float64, device=inputs["input_ids"].device)
