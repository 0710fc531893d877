"""Rows as the trainers prepare them: checked and counted, for training, or without a model to train."""

# transformers types its Trainer's model and args more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers import LlamaConfig, LlamaForCausalLM

from ..common.console import announce
from ..common.replacements import replaced
from ..common.signals import end_workers_with_this_process
from ..compat.sft_trainer import RowsTrainer, SFTTrainer
from ..errors import ConfigError, DataError
from ..losses.model_parts import embedding_rows, head_rows, output_module
from ..teachers.row_keys import DocumentCollator, check_known, column_names, documents, row_key, rows_with
from ..teachers.vocabulary import end_tokens
from .chat_template import (
    ChatCheck,
    check_as_read,
    check_chats,
    check_part,
    fit_arguments,
    has_masked_messages,
    marked_template,
    template_for_training,
)
from .config import LigerDistillConfig
from .given_datasets import datasets_in_messages
from .host import RowsHost
from .rows import IdsAsRead, LargestIds, RowFacts, check_ids, count_rows, has_only_prompts

# `weight_column`: rows that count more or less than others.
# The loss of a batch is sum_i w(i) l(i) / N, where l(i) is the loss of token i, w(i) the weight of its row, and N the
# number of supervised tokens of the global batch, weighted or not. So a row's share of the gradient does not depend on
# the rows that it is batched with, weights of 1 change nothing, and weights of 2 are a loss of twice the size.


TOKEN_WEIGHTS = "token_weights"  # in a batch, see `WeightCollator`
TRAIN = "train"


class RowWeights:
    """The weights of the training rows, by the content of each row: TRL's packing keeps no column.

    Evaluations are not weighted, so that they can be compared.

    Args:
        column: has numbers of at least 0.
        strategy: of packing, for messages.
    """

    def __init__(self, column: str, strategy: str | None):
        self._column, self._strategy = column, strategy
        self.of: dict[bytes, float] = {}

    def read(self, dataset: Dataset, name: str, cut: slice) -> None:
        """Take the weights of tokenized rows before they are packed.

        Args:
            cut: what truncation leaves of a row.

        Raises:
            DataError: no such column; a value that is no weight; equal rows with different weights; only zeros.
        """
        if name != TRAIN:
            for document in documents(dataset.select_columns(["input_ids", "labels"])):
                self.of.setdefault(row_key(document.input_ids[cut], document.labels[cut]), 1.0)
            return
        for value, document in rows_with(self._column, dataset, "weight_column", "training"):
            weight = self._weight(value, document.row)
            key = row_key(document.input_ids[cut], document.labels[cut])
            if self.of.setdefault(key, weight) != weight:
                raise DataError(
                    f"Row {document.row} of the training dataset, beginning with {document.input_ids[:8].tolist()}, "
                    f"stands in it twice, with the weights {self.of[key]:g} and {weight:g}. Equal rows need one weight."
                )
        if not any(self.of.values()):
            raise DataError(f"Every row of the training dataset has weight 0 in {self._column!r}: nothing is learned.")

    def _weight(self, value: Any, row: int) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= torch.finfo(torch.float32).max:
            raise DataError(
                f"Row {row} of the training dataset has {value!r} in {self._column!r}; expected a number of at least 0 "
                "that fp32 holds."
            )
        return float(value)

    def check(self, prepared: Any) -> None:
        """Raise ConfigError where rows were not read, or packing has cut them so that they are not found again."""
        check_known(prepared if self.of else None, self.of, "weight_column", self._strategy)


class WeightCollator(DocumentCollator):
    """Add `token_weights` (batch, length) fp32, the weight of each position that predicts a token; 0 elsewhere."""

    def __init__(self, collator: Any, weights: RowWeights):
        super().__init__(collator, "is of no dataset that the trainer prepared, so its weight is not known.")
        self._weights = weights

    def look_up(self, key: bytes, tokens: int) -> torch.Tensor | None:
        weight = self._weights.of.get(key)
        return None if weight is None else torch.full((tokens,), weight)

    def columns(self, answers: list[torch.Tensor], predicts: torch.Tensor) -> dict[str, Any]:
        weights = torch.zeros(predicts.shape)
        if answers:
            weights[predicts] = torch.cat(answers)
        return {TOKEN_WEIGHTS: weights}


class RowPreparation:
    """A trainer's rows: it checks and counts them, and leaves out those with nothing to learn, before TRL packs them.

    Args:
        trainer: before its `__init__`. While TRL prepares rows, it reads `chat_template` and `args` of it. Its method
            `read_rows` is shown the rows of each dataset before they are cut.
        call: the arguments of `SFTTrainer`. Their datasets are brought into the form of messages.

    Attributes:
        facts: counts of each dataset's rows; a stream has none.
        largest_ids: the largest token id and label of each row, by dataset.
    """

    def __init__(self, trainer: RowsHost, call: inspect.BoundArguments):
        end_workers_with_this_process()
        self._trainer = trainer
        self.facts: dict[str, RowFacts] = {}
        self.largest_ids: dict[str, LargestIds] = {}
        self._sizes: dict[str, int] = {}  # of the ids in streams, see `limit_streams`
        self._last_special: int | None = None  # among the last tokens that the first training row has learned
        config: Any = call.arguments.get("args")
        prepared = (getattr(config, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
        check_evaluated(call.arguments.get("eval_dataset"), not prepared)
        train = call.arguments.get("train_dataset")
        if not prepared:
            _check_type("train_dataset", train)
        tokens = isinstance(train, Dataset | IterableDataset) and {*column_names(train)}
        self._masked = tokens and tokens >= {"input_ids", "completion_mask"}
        call.arguments.update(datasets_in_messages(call.arguments, config))
        self._config = config
        self._part: str | None = getattr(config, "supervised_part", None)
        self._allow_unwritten: bool = getattr(config, "allow_unwritten_fields", False)
        self._only_answers: bool = getattr(config, "assistant_only_loss", False)
        if self._part is not None:
            check_part(self._part, call.arguments["train_dataset"], config.completion_only_loss)

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Within the context SFTTrainer accepts `assistant_only_loss` without marks in the chat template.

        `supervised_part` finds the answers of any template, so the flag is off while SFTTrainer constructs itself.

        Raises:
            ConfigError: the template marks no answers, and `supervised_part` is not set.
        """
        if self._part is not None and self._only_answers:
            with replaced(self._config, assistant_only_loss=False):
                yield
            return
        # TRL reads the mask of tokenized rows only where it is asked to
        asked = self._masked and getattr(self._config, "completion_only_loss", False) is None
        try:
            with replaced(self._config, completion_only_loss=True) if asked else nullcontext():
                yield
        except ValueError as error:
            if not self._only_answers or "chat template is not training-compatible" not in str(error):
                raise
            raise ConfigError(
                "assistant_only_loss: this model's chat template does not mark the answers. Set supervised_part to "
                "content too, which finds them with any template."
            ) from error

    def warn_of_other_end(self, model: Any, tokenizer: Any) -> None:
        """Say so where the training rows end with a special token by which a completion of the model does not end."""
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        ends = end_tokens(model, tokenizer)
        if self._last_special is None or self._last_special in ends:
            return
        end, *known = (repr(tokenizer.convert_ids_to_tokens(token)) for token in (self._last_special, *ends))
        announce(
            f"the training rows end with {end}, but what the model writes ends with {' or '.join(known) or 'nothing'}: "
            f"the model would learn to write {end}, but would not stop there. To make it stop, set eos_token to {end}."
        )

    @contextmanager
    def _marked_parts(self, dataset: Any, tokenizer: Any, args: Any) -> Iterator[None]:
        """Have TRL learn what `supervised_part` and marks of messages say, by a chat template for this preparation."""
        # tokens come again to be packed
        if "input_ids" in column_names(dataset) or not (self._part or has_masked_messages(dataset)):
            yield
            return
        trainer = self._trainer
        if self._part is not None:
            check_part(self._part, dataset, trainer.completion_only_loss)
        template = trainer.chat_template if self._part is None else None
        template = marked_template(template or template_for_training(tokenizer), self._part, self._only_answers)
        with replaced(trainer, chat_template=template), replaced(args, assistant_only_loss=True):
            yield

    def prepare(self, prepare, dataset, processing_class, args, packing, formatting_func, dataset_name) -> Any:
        """Check chats, tokenize, leave out rows without a supervised token, then let TRL cut and pack the rest.

        prepare: `_prepare_dataset` of TRL. The arguments are its.
        """
        if formatting_func is None and has_only_prompts(dataset):
            chats = " To learn its messages, take the column prompt out." if "messages" in column_names(dataset) else ""
            raise DataError(
                f"The {dataset_name} dataset has prompts and no completions, so there is nothing to learn from. Add "
                f"completions, or distil with lmbda=1.0 or seq_kd, by which they are sampled.{chats}"
            )
        with self._marked_parts(dataset, processing_class, args):
            if formatting_func is None:
                dataset = self.check_chats(dataset, processing_class, dataset_name)
            try:
                return self._prepared(prepare, dataset, processing_class, args, packing, formatting_func, dataset_name)
            except TemplateError as error:
                raise DataError(
                    f"The chat template refuses a row of the {dataset_name} dataset: {error.message}."
                ) from error

    def _prepared(self, prepare, dataset, processing_class, args, packing, formatting_func, dataset_name) -> Any:
        if not isinstance(dataset, Dataset):
            check = IdsAsRead(dataset_name, self._sizes)
            tokens = "input_ids" in column_names(dataset)
            dataset = dataset.filter(check, with_indices=True) if tokens else dataset
            made = prepare(dataset, processing_class, args, packing, formatting_func, dataset_name)
            if packing:
                check = replace(check, name=f"packed {dataset_name}")
            return made if tokens else made.filter(check, with_indices=True)
        # First only tokenized: rows can be counted only before they are cut, shuffled and packed. TRL reads what it
        # does from args, so they are changed and put back.
        with replaced(args, max_length=None, shuffle_dataset=False):
            tokenized: Any = prepare(dataset, processing_class, args, False, formatting_func, dataset_name)
        self.largest_ids.setdefault(dataset_name, LargestIds.of(tokenized))
        length, mode = kept_length(args, packing)
        facts, places = count_rows(tokenized, length, mode)
        kept = tokenized if len(places) == len(tokenized) else tokenized.select(places)
        self.facts[dataset_name] = facts
        part = slice(-length, None) if length is not None and mode == "keep_end" else slice(length)
        self._trainer.read_rows(tokenized, kept, dataset_name, part)
        if not len(kept):
            raise DataError(
                f"No row of the {dataset_name} dataset has a supervised token within max_length={args.max_length}: "
                "every label is masked. Check the completions, the chat template's generation markers, or max_length."
            )
        if dataset_name == TRAIN:
            _say_what_is_lost(facts, args.max_length)
        if dataset_name == TRAIN and {"input_ids", "labels"} <= set(kept.column_names):
            self._last_special = last_special(kept[0], getattr(processing_class, "tokenizer", processing_class))
        prepared: Any = prepare(kept, processing_class, args, packing, formatting_func, dataset_name)
        self.facts[dataset_name] = replace(facts, sequences=len(prepared))
        return prepared

    def check_chats(self, dataset: Any, tokenizer: Any, name: str) -> Any:
        """Return rows whose tool calls are as the trainer's template writes them. A stream is checked as it is read.

        Raises:
            DataError: a row of chat messages that the template cannot render, or not all of.
        """
        template, place = self._trainer.chat_template, f"row {{}} of the {name} dataset".format
        options = self._allow_unwritten, self._only_answers
        if isinstance(dataset, IterableDataset):
            check = ChatCheck(tokenizer, template, place, *options)
            dataset = check_as_read(dataset, check, getattr(self._config, "dataset_text_field", "text"))
        else:
            check_chats(dataset, tokenizer, template, place, *options)
        return fit_arguments(dataset, tokenizer, template)

    def check_ids(self, model: Any) -> None:
        """Raise DataError where rows have token ids that a model does not have; of a stream, when they are read."""
        self.limit_streams("input_ids", embedding_rows(model))
        for name, rows in self.named_datasets().items():
            # Those with skip_prepare_dataset did not pass through _prepare_dataset.
            if name not in self.largest_ids and isinstance(rows, Dataset) and "input_ids" in rows.column_names:
                self.largest_ids[name] = LargestIds.of(rows)
        check_ids(self.largest_ids, "tokens", embedding_rows(model), "the model has")
        if output_module(model) is not None:
            self.limit_streams("labels", head_rows(model))
            check_ids(self.largest_ids, "labels", head_rows(model), "the model's head has")

    def limit_streams(self, column: str, size: int) -> None:
        """Have rows of streams, when they are read, hold no other ids in a column than 0 to size - 1."""
        self._sizes[column] = min(size, self._sizes.get(column, size))

    def named_datasets(self) -> dict[str, Any]:
        """Return the training rows as "train" and the evaluation datasets by their names, or as "eval"."""
        train, tests = self._trainer.train_dataset, self._trainer.eval_dataset
        tests = tests if isinstance(tests, Mapping) else {"eval": tests}
        return {name: rows for name, rows in {"train": train, **tests}.items() if rows is not None}


LOST = 0.05  # share of the supervised tokens from which on the loss of them is announced


def _say_what_is_lost(facts: RowFacts, max_length: int | None) -> None:
    """Announce that much of what should be learned lies beyond `max_length`, and which length would keep all."""
    lost, all_of_them = facts.supervised_tokens_lost, facts.supervised_tokens + facts.supervised_tokens_lost
    if lost > LOST * all_of_them:
        announce(
            f"max_length={max_length} leaves out {lost:,} of the {all_of_them:,} supervised tokens of the training "
            f"rows ({lost / all_of_them:.0%}); the longest row has {facts.longest_row:,} tokens."
        )


def last_special(row: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the special token at the end of what is learned of a row; a template may put a line break behind it."""
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    added, named = getattr(tokenizer, "added_tokens_decoder", {}), tokenizer.all_special_ids
    ends = (token for token in reversed(learned[-3:]) if token in named or getattr(added.get(token), "special", False))
    return next(ends, None)


def check_evaluated(dataset: Any, to_be_prepared: bool = True) -> None:
    """Check what is given to be evaluated.

    Args:
        dataset: a dataset, or several by name; None for none.
        to_be_prepared: whether the trainer prepares its rows; else it may be any dataset of torch.

    Raises:
        ConfigError: a dataset by the name that the training rows have, here and in the logs.
        DataError: something else than a dataset of rows that can be prepared.
    """
    if isinstance(dataset, Mapping) and "train" in dataset:
        raise ConfigError(
            "eval_dataset: 'train' is the name of the training rows; give this dataset another, such as 'seen'. To "
            "evaluate on one split of a DatasetDict, pass that split."
        )
    if to_be_prepared:
        of = " in a dict" if isinstance(dataset, Mapping) else ""
        for rows in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
            _check_type("eval_dataset", rows, ", or a dict of them by name", of)


def _check_type(what: str, rows: Any, more: str = "", of: str = "") -> None:
    """Raise DataError for rows that are given as something else than a dataset; TRL says what None is."""
    if not isinstance(rows, Dataset | IterableDataset | None):
        raise DataError(
            f"{what}: expected a Dataset or an IterableDataset of datasets{more}, got {type(rows).__name__}{of}. Make "
            "one of rows by Dataset.from_list(rows), of columns by Dataset.from_dict(columns), of a frame by "
            "Dataset.from_pandas(frame), of a generator by IterableDataset.from_generator(function), of files by "
            "load_dataset; of a DatasetDict take one split."
        )


def kept_length(args: Any, packing: bool) -> tuple[int | None, str]:
    """Return how many tokens of a row are kept, None for all, and whether "keep_start" or "keep_end"."""
    # Packing by best fit cuts ends off, whatever truncation_mode says; the other ways of packing cut nothing off.
    uncut = packing and args.packing_strategy != "bfd"
    return None if uncut else args.max_length, "keep_start" if packing else args.truncation_mode


@dataclass(frozen=True)
class PreparedRows:
    """Datasets as the trainer prepares them, and the tokenizer as it leaves it."""

    datasets: dict[str, Dataset]
    tokenizer: Any
    largest_ids: dict[str, LargestIds]


class Preparation(RowsTrainer):
    """The trainer's preparation of rows without its model. Rows do not depend on one, so a tiny one stands in."""

    def __init__(self, args: LigerDistillConfig, **kwargs: Any):
        sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        processing = kwargs["processing_class"]
        vocabulary = max(getattr(processing, "tokenizer", processing).get_vocab().values()) + 1
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        stand_in = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **dict.fromkeys(sizes.split(), 1), **special))
        call = inspect.signature(SFTTrainer).bind(stand_in, args, **kwargs)
        self.row_preparation = RowPreparation(self, call)
        with self.row_preparation.accepted():
            super().__init__(*call.args, **call.kwargs)

    def prepare_rows(self, prepare: Callable[..., Any], *rows: Any) -> Any:
        return self.row_preparation.prepare(prepare, *rows)

    def read_rows(self, tokenized: Dataset, kept: Dataset, dataset_name: str, part: slice) -> None:
        """See `LigerTrainer.read_rows`. Nobody reads them here."""


def prepare_rows(
    args: LigerDistillConfig, tokenizer: Any, train: Dataset, test: Dataset | dict[str, Dataset] | None = None
) -> PreparedRows:
    """Return what `LigerDistillTrainer` would make of these rows: template, masks, truncation, packing."""
    args = _without_model(args)
    args.output_dir = args.teacher_cache_dir  # the trainer makes the directory
    trainer: Any = Preparation(args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    rows = trainer.row_preparation
    return PreparedRows(rows.named_datasets(), trainer.processing_class, rows.largest_ids)


def rows_for_reading(
    args: LigerDistillConfig, dataset: Dataset, tokenizer: Any, formatting_func: Callable | None
) -> Dataset:
    """Return the rows as a model of another tokenizer than the student's reads them: whole, in order."""
    args = _without_model(args)
    args.packing, args.shuffle_dataset, args.max_length = False, False, None
    args.chat_template_path = args.eos_token = args.pad_token = None  # these are the student's
    trainer: Any = Preparation(
        args, train_dataset=dataset, processing_class=copy.deepcopy(tokenizer), formatting_func=formatting_func
    )
    return trainer.train_dataset


def _without_model(args: LigerDistillConfig) -> LigerDistillConfig:
    """Return a copy of the arguments without those that are about the model."""
    args = copy.copy(args)
    args.model_init_kwargs, args.gradient_checkpointing, args.push_to_hub = None, False, False
    return args
