"""`liger-trainer preview`: rows as the model will see them, prepared by the trainer itself, without weights."""

import copy
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from rich.console import Console
from rich.text import Text

from ..common.console import visible
from ..losses.model_parts import placeholder_ids
from ..trainers.images import ImageCollator
from ..trainers.row_preparation import Preparation
from ..trainers.rows import RowFacts, count_each, has_only_prompts, prepare_prompts

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..run.data.datasets import RunData
    from ..run.models import ModelFiles

SUPERVISED, OTHER = "bold green", "dim"
MARKS = ("⟦", "⟧")  # around supervised text if there are no colours
ROW = "liger_trainer_row"  # a column that travels through the preparation: the row's index in the dataset

EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens as text; all are supervised or none is."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class SeenRow:
    """A row of the prepared training set. The loss is taken on supervised tokens."""

    place: str  # where the row comes from; of a packed row, how many documents it holds
    documents: list[list[Piece]]
    tokens: int
    supervised: int
    tokens_cut: int | None  # beyond `max_length`; None for packed rows, whose documents cannot be traced back
    supervised_cut: int | None


@dataclass(frozen=True)
class Preview:
    rows: list[SeenRow]
    facts: dict[str, RowFacts]


class _Followed(Preparation):
    """Preparation that follows each row from the dataset, with its counts before it is cut."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.uncut: dict[str, dict[int, tuple[int, int]]] = {}
        super().__init__(*args, **kwargs)

    def prepare_rows(self, prepare, dataset, processing_class, args, packing, formatting_func, dataset_name):
        dataset = dataset.add_column(ROW, list(range(len(dataset))))
        if formatting_func is None and has_only_prompts(dataset):  # completions are sampled in training
            prompts, facts = prepare_prompts(dataset, processing_class, args, self.chat_template, dataset_name, ROW)
            self.row_preparation.facts[dataset_name] = facts
            lengths = map(len, prompts["input_ids"])
            self.uncut[dataset_name] = {row: (length, 0) for row, length in zip(prompts[ROW], lengths, strict=True)}
            return prompts
        return super().prepare_rows(prepare, dataset, processing_class, args, packing, formatting_func, dataset_name)

    def read_rows(self, tokenized: Dataset, kept: Dataset, dataset_name: str, part: slice) -> None:
        tokens, supervised, _ = count_each(tokenized, None)
        counts = zip(tokens.tolist(), supervised.tolist(), strict=True)
        self.uncut[dataset_name] = dict(zip(tokenized[ROW], counts, strict=True))


def preview(config: "RunConfig", data: "RunData", files: "ModelFiles", count: int) -> Preview:
    """Return the first `count` rows of the prepared training set, and counts over all rows.

    Raises:
        ConfigError: TRL refuses the settings.
        DataError: no row has a supervised token.
    """
    args: Any = copy.copy(config.training_args())
    # There is no model: nothing may be loaded, wrapped or pushed.
    args.model_init_kwargs, args.gradient_checkpointing, args.push_to_hub = None, False, False
    args.use_liger_kernel, args.report_to = False, []
    with tempfile.TemporaryDirectory() as folder, config.refusals("the trainer"):
        args.output_dir = folder  # the trainer makes the directory
        trainer: Any = _Followed(
            args, train_dataset=data.train, eval_dataset=data.test, processing_class=files.processing
        )
    prepared = trainer.train_dataset
    some = range(min(count, len(prepared)))
    if data.facts.images is not None:
        placeholders = placeholder_ids(files.config)
        collator = ImageCollator(trainer.data_collator, placeholders, config["learn_image_tokens"])
        return Preview(
            [_seen_with_images(collator, prepared[i], files.tokenizer, data.place("train", i)) for i in some], {}
        )
    rows = [_seen(trainer, prepared[index], data) for index in some]
    return Preview(rows, trainer.row_preparation.facts)


def _seen_with_images(collator: ImageCollator, row: dict[str, Any], tokenizer: Any, place: str) -> SeenRow:
    """Show the placeholders of each image as one, with their number."""
    batch = collator([row])
    ids, supervised = batch["input_ids"][0].tolist(), (batch["labels"][0] != -100).tolist()
    supervised[0] = False  # the first token is not predicted
    marks = "|".join(map(re.escape, tokenizer.convert_ids_to_tokens(collator.placeholders)))
    runs = re.compile(rf"({marks})(?:\s?\1)+")
    pieces = [
        Piece(runs.sub(lambda run: f"{run[1]} x {run[0].count(run[1])}", piece.text), piece.supervised)
        for piece in _pieces(tokenizer, ids, supervised)
    ]
    return SeenRow(place, [pieces], len(ids), sum(supervised), None, None)


def _seen(trainer: Any, row: dict[str, Any], data: "RunData") -> SeenRow:
    length = len(row["input_ids"])
    batch = trainer.data_collator([row])
    ids = batch["input_ids"][0, :length].tolist()
    supervised = (batch["labels"][0, :length] != -100).tolist()
    supervised[0] = False  # the first token is not predicted
    lengths = row.get("seq_lengths") or [length]
    documents, start = [], 0
    for size in lengths:
        end = start + size
        documents.append(list(_pieces(trainer.processing_class, ids[start:end], supervised[start:end])))
        start = end
    place, tokens_cut, supervised_cut = f"{len(lengths)} document{'s' * (len(lengths) != 1)}, packed", None, None
    if ROW in row:
        tokens, learned = trainer.uncut["train"][row[ROW]]
        place, tokens_cut, supervised_cut = data.place("train", row[ROW]), tokens - length, learned - sum(supervised)
    return SeenRow(place, documents, length, sum(supervised), tokens_cut, supervised_cut)


def _pieces(tokenizer: Any, ids: list[int], supervised: list[bool]) -> Iterator[Piece]:
    """Yield the text of each stretch of tokens that are all supervised or all not."""
    start, before = 0, ""
    for end in range(1, len(ids) + 1):
        if end < len(ids) and supervised[end] == supervised[start]:
            continue
        # A stretch decoded by itself may lose its leading space, so texts of prefixes are subtracted.
        text = tokenizer.decode(ids[:end], **EXACT)
        separate = not text.startswith(before)  # the stretch before ended within a character
        piece = tokenizer.decode(ids[start:end], **EXACT) if separate else text[len(before) :]
        yield Piece(piece, supervised[start])
        start, before = end, text


def print_row(console: Console, row: SeenRow) -> None:
    """Print a row, its supervised tokens coloured, or between marks where there are no colours."""
    told = f"{row.place}: {row.tokens:,} tokens, {row.supervised:,} supervised"
    if row.tokens_cut:
        told += f"; {row.tokens_cut:,} beyond max_length, {row.supervised_cut:,} of them supervised"
    console.print(Text(f"\n── {told}", "cyan"), soft_wrap=True)
    # Without colours, as in a pipe, supervised text needs marks to be seen.
    colours = console.color_system is not None and not console.no_color
    for number, document in enumerate(row.documents):
        if number:
            console.print(Text(f"── document {number + 1}", "cyan"))
        text = Text()
        for piece in document:
            shown = visible(piece.text)
            marked = shown if colours or not piece.supervised else shown.join(MARKS)
            text.append(marked, SUPERVISED if piece.supervised else OTHER)
        console.print(text, soft_wrap=True)
