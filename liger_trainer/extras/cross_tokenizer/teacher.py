"""A teacher with another tokenizer: it reads the same rows in its own tokens and chat template. The one for `uld`.

Rows are prepared a second time with its tokenizer and aligned with the student's by text. As with a teacher cache, a
row is found again by its key, after any shuffling and packing; the teacher reads the documents of a packed row one by
one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedModel
from trl import is_conversational
from trl.data_utils import is_conversational_from_value

from ...common.console import announce
from ...errors import ConfigError, DataError
from ...kernels.linear_uld import linear_uld, stored_uld, uld_reference
from ...losses.answers import stored
from ...losses.deferred_logits import DeferredLogits
from ...losses.model_parts import head_rows
from ...losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Distillation, Logits, LossOptions, TeacherAnswer
from ...teachers.base import DistillHost
from ...teachers.config import TeacherConfig
from ...teachers.factory import RowsForReading
from ...teachers.fingerprints import describe_tokenizer
from ...teachers.model import ModelTeacher
from ...teachers.row_keys import DocumentCollator, row_key, supervised_tokens
from ...teachers.vocabulary import check_student_vocabulary, options_of_teacher, teacher_tokenizer, tokenizer_size
from .text_alignment import aligned, partners, runs

ROW, IDS, PARTNERS = "liger_row", "teacher_input_ids", "teacher_partners"  # columns
INPUT_IDS, MASK, IN_BATCH = "uld_input_ids", "uld_attention_mask", "uld_partners"  # in a batch
PrepareRows = Callable[[Any, bool], Any]
"""The trainer's own preparation of a dataset, packed or not."""


# The loss of a batch by universal logit distillation. Formulas: kernels/linear_uld.py.


@dataclass(frozen=True)
class UldAnswer(TeacherAnswer):
    """A teacher's logits of the teacher's tokens, and which of them belong to the positions of the student's batch."""

    logits: Logits  # (rows, length, Vt)
    partners: Tensor  # (batch, length of the student) int64: index into rows * length, negative: none
    vocab_size: int  # of the teacher's tokenizer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.partners.shape, self.vocab_size))

    @property
    def teacher_positions(self) -> Tensor:
        return self.partners

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return uld_weight * ULD + ce_weight * CE. Tokens without a partner have only cross-entropy."""
        how, partners = options.for_teacher(), self.partners.flatten()
        common = {
            "labels": targets.labels, "uld_weight": how.uld_weight, "ce_weight": how.ce_weight,
            "label_smoothing": options.label_smoothing,
        }  # fmt: skip
        if isinstance(student, DeferredLogits) and isinstance(self.logits, DeferredLogits):
            result = linear_uld(
                **student.operands(), **self.logits.operands("teacher_"), partners=partners,
                vocab_size=how.vocab_size, teacher_vocab_size=self.vocab_size, temperature=how.temperature,
                scale_by_temperature_squared=how.scale_by_temperature_squared, **targets.for_ops(), **common,
            )  # fmt: skip
        else:
            s, t = (stored(logits).flatten(0, -2).float() for logits in (student, self.logits))
            # a head may be padded beyond its tokenizer
            s = s[:, : how.vocab_size]
            uld = _distances(s, t[:, : self.vocab_size], partners, targets, how)
            common |= {"num_items": targets.num_items, "token_weight": targets.weights}
            result = stored_uld(s, uld, **common)
        return BatchLoss.of_term("uld", how.uld_weight, result)


def _distances(s: Tensor, t: Tensor, partners: Tensor, targets: BatchTargets, how: Distillation) -> Tensor:
    """Return the (N,) distances of logits that are stored."""
    aligned = (partners >= 0) & (targets.labels != IGNORE_INDEX)
    distances = uld_reference(s[aligned], t[partners[aligned]], how.temperature)
    factor = how.temperature**2 if how.scale_by_temperature_squared else 1.0
    # the rows without a partner have distance 0
    return s.new_zeros(s.shape[0]).masked_scatter(aligned, factor * distances)


class CrossTokenizerTeacher(ModelTeacher):
    """A causal LM with another tokenizer: `teacher_tokenizer_name_or_path`, or the one in the model's folder.

    Attributes:
        loss_type: of the losses, the one that it is for.

    Raises:
        ConfigError: no tokenizer is known; rows are streamed, tokenized already, or lose their beginnings.
    """

    loss_type = "uld"
    knows_new_tokens = False

    def __init__(self, args: TeacherConfig, teacher: PreTrainedModel | str, rows_for_reading: RowsForReading):
        self._rows_for_reading = rows_for_reading
        super().__init__(args, teacher)
        if args.packing and args.packing_strategy != "bfd" or args.truncation_mode != "keep_start":
            raise ConfigError(
                f"{self.loss_type} finds each row's text again in the teacher's tokens, so rows must begin with their "
                "own beginning: set packing_strategy to 'bfd' and truncation_mode to 'keep_start'."
            )
        tokenizer = teacher_tokenizer(teacher, **options_of_teacher(teacher, args))
        if tokenizer is None:
            raise ConfigError(
                f"{self.loss_type} needs the teacher's tokenizer, and the teacher's folder has none: name it in "
                "teacher_tokenizer_name_or_path."
            )
        self.tokenizer: Any = tokenizer
        self.student_tokenizer: Any = None
        self.rows = self.new_rows()

    def new_rows(self) -> "TeacherRows":
        """Return an empty store of what is kept of each row."""
        return TeacherRows([IDS, PARTNERS], TeacherRow)

    def aligned_row(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return a function of a row's input_ids, labels, teacher_input_ids and teacher_labels, which makes the columns
        of the store."""
        return partial(_aligned_row, tokenizer=self.student_tokenizer, teacher_tokenizer=self.tokenizer)

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        return None

    def fingerprints(self) -> dict[str, Any]:
        return {**super().fingerprints(), "tokenizer": describe_tokenizer(self.tokenizer, self.tokenizer)}

    def prepare_dataset(
        self, prepare: PrepareRows, dataset: Any, packing: bool, name: str, *, tokenizer: Any, formatting_func: Any
    ) -> Any:
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                f"{self.loss_type} needs the text of all rows at first, and the {name} dataset is streamed."
            )
        if "input_ids" in dataset.column_names:
            raise ConfigError(
                f"{self.loss_type} needs the text of the rows, for the teacher's tokenizer, and the {name} dataset is "
                "tokenized already."
            )
        self.student_tokenizer = tokenizer
        # preparing may drop rows: their numbers say which are left
        numbered = dataset.add_column(ROW, list(range(len(dataset))))  # pyright: ignore[reportCallIssue]
        # unpacked at first: rows are aligned one by one
        prepared = prepare(numbered, False)
        self.rows.add(self._aligned_with_teacher(prepared, numbered, name, formatting_func), name)
        prepared = prepared.remove_columns(ROW)
        return prepare(prepared, True) if packing else prepared

    def _aligned_with_teacher(self, prepared: Dataset, raw: Dataset, name: str, formatting_func: Any) -> Dataset:
        """Return, for each prepared row, its tokens and labels and what the teacher reads in its place."""
        theirs = self._read_by_teacher(raw.select(prepared[ROW]), formatting_func).select_columns(
            ["input_ids", "labels", ROW]
        )
        left = sorted(set(prepared[ROW]) - set(theirs[ROW]))
        if left:  # nothing in these rows is supervised for the teacher
            nothing = {"input_ids": [[] for _ in left], "labels": [[] for _ in left], ROW: left}
            theirs = concatenate_datasets([theirs, Dataset.from_dict(nothing, features=theirs.features)])
        # in the order of the student's rows, which preparing may have changed
        place = {row: index for index, row in enumerate(theirs[ROW])}
        theirs = theirs.select([place[row] for row in prepared[ROW]]).select_columns(["input_ids", "labels"])
        pairs = concatenate_datasets(
            [
                prepared.select_columns(["input_ids", "labels"]),
                theirs.rename_columns({"input_ids": IDS, "labels": "teacher_labels"}),
            ],
            axis=1,
        )
        aligned = pairs.map(
            self.aligned_row(),
            remove_columns=["teacher_labels"],
            num_proc=self._args.dataset_num_proc,
            desc=f"Aligning the {name} dataset with the teacher's tokens",
        )
        self.report(aligned, prepared, name)
        return aligned

    def _read_by_teacher(self, raw: Dataset, formatting_func: Any) -> Dataset:
        if is_conversational_from_value(raw[0]) or is_conversational(raw[0]):
            self._check_template()
        return self._rows_for_reading(self._args, raw, self.tokenizer, formatting_func)

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "The rows are chat messages, and the teacher's tokenizer has no chat template. Name one that has in "
                "teacher_tokenizer_name_or_path, or give rows of plain prompts and completions."
            )

    def report(self, aligned: Dataset, prepared: Dataset, name: str) -> None:
        """Say how much of a dataset is compared. Raises DataError for nothing."""
        tokens = sum(supervised_tokens(labels) for labels in prepared["labels"])
        paired = sum(partner >= 0 for row in aligned[PARTNERS] for partner in row)
        announce(
            f"uld: {paired:,} of {tokens:,} supervised tokens ({paired / max(tokens, 1):.1%}) of the {name} dataset "
            "begin where one of the teacher's does."
        )
        if not paired:
            raise DataError(
                f"No supervised token of the {name} dataset begins where one of the teacher's does, so uld has "
                "nothing to compare: do both chat templates write the same text for the completions, in as many parts?"
            )

    def collator(self, collator: Any) -> DocumentCollator:
        return CrossTokenizerCollator(collator, self.rows)

    def vocabulary_size(self, trainer: DistillHost, teacher: Any) -> int:
        """Return the number of the student's tokens: ids are not compared."""
        size, rows = tokenizer_size(self.tokenizer), head_rows(teacher)
        # a teacher whose head lacks tokens has another tokenizer than this
        if rows < size:
            raise ConfigError(f"The teacher knows {rows} tokens, but its tokenizer has {size}: name its own tokenizer.")
        return check_student_vocabulary(trainer.student, tokenizer_size(trainer.tokenizer))

    def longest_row(self, tokens: int) -> int:
        return self.rows.longest

    def answer(self, inputs: dict[str, Any]) -> Any:
        ids, mask, in_batch = (inputs.pop(name) for name in (INPUT_IDS, MASK, IN_BATCH))
        logits = self.logits(input_ids=ids, attention_mask=mask, use_cache=False)
        return UldAnswer(logits, in_batch, tokenizer_size(self.tokenizer))


def _aligned_row(row: dict[str, Any], tokenizer: Any, teacher_tokenizer: Any) -> dict[str, Any]:
    student_runs = runs(row["input_ids"], row["labels"], tokenizer)
    teacher_runs = runs(row[IDS], row["teacher_labels"], teacher_tokenizer)
    positions = partners(row["labels"], aligned(student_runs, teacher_runs))
    # The teacher need not read beyond the last position that it is asked about.
    return {PARTNERS: positions, IDS: row[IDS][: max(positions, default=-1) + 1]}


@dataclass(frozen=True)
class TeacherRow:
    """What the teacher reads in the place of a row, and its position there for each supervised token of the row."""

    input_ids: list[int]
    partners: list[int]


class TeacherRows:
    """What the teacher reads, by the keys of the student's rows.

    Args:
        columns: what is kept of each row.
        make: makes what `find` returns of their values.
    """

    def __init__(self, columns: list[str], make: Callable[..., Any]):
        self._columns, self._make = columns, make
        self._datasets: list[Dataset] = []
        self._places: dict[bytes, tuple[int, int]] = {}

    def add(self, rows: Dataset, name: str) -> None:
        """Add rows with input_ids, labels and the columns that are kept."""
        for index, row in enumerate(rows.select_columns(["input_ids", "labels"])):
            self._places[row_key(row["input_ids"], row["labels"])] = (len(self._datasets), index)  # pyright: ignore
        self._datasets.append(rows.select_columns(self._columns))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return max((len(ids) for dataset in self._datasets for ids in dataset[IDS]), default=0)

    def find(self, key: bytes) -> Any:
        """Return what is kept of a row; None where its key is not known."""
        place = self._places.get(key)
        return None if place is None else self.at(*place)

    def at(self, dataset: int, index: int) -> Any:
        row = self._datasets[dataset][index]
        return self._make(*(row[column] for column in self._columns))


class CrossTokenizerCollator(DocumentCollator):
    """Add what the teacher reads: `uld_input_ids` and `uld_attention_mask` (documents, length), padded on the right,
    and `uld_partners` (batch, length): for each position that predicts a token, the teacher's position as an index into
    documents * length; -1 for none."""

    def __init__(self, collator: Any, rows: TeacherRows):
        super().__init__(
            collator,
            "is none that the trainer prepared, so what the teacher reads in its place is not known. Give its text to "
            "the trainer as train_dataset or eval_dataset.",
        )
        self.rows = rows

    def look_up(self, key: bytes, tokens: int) -> TeacherRow | None:
        return self.rows.find(key)

    def columns(self, answers: list[TeacherRow], predicts: torch.Tensor) -> dict[str, Any]:
        length = max([1, *(len(row.input_ids) for row in answers)])
        ids = torch.zeros(max(len(answers), 1), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1  # a row of nothing but padding would have no attention
        places: list[int] = []
        for number, row in enumerate(answers):
            size = len(row.input_ids)
            ids[number, :size], mask[number, :size] = torch.tensor(row.input_ids, dtype=torch.int64), 1
            places += [-1 if partner < 0 else number * length + partner for partner in row.partners]
        in_batch = torch.full(predicts.shape, -1)
        in_batch[predicts] = torch.tensor(places, dtype=torch.int64)
        return {INPUT_IDS: ids, MASK: mask, IN_BATCH: in_batch}
