"""A teacher with another tokenizer, for an `alm` loss: how likely it finds spans of the student's text.

What it reads is prepared as for `uld` (cross_tokenizer.py). Completions that the student has just sampled are written
again in the teacher's tokens, behind what the teacher reads as their prompt.
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from trl import is_conversational

from ...common.console import announce
from ...errors import ConfigError, DataError
from ...kernels.linear_alm import linear_alm, stored_alm, sum_of_spans
from ...kernels.linear_log_probs import linear_log_probs, stored_log_probs
from ...kernels.types import RowSelection
from ...losses.answers import stored
from ...losses.deferred_logits import DeferredLogits
from ...losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Logits, LossOptions, TeacherAnswer
from ...patching.patcher import base_of
from ...teachers.base import DistillHost
from ...teachers.row_keys import DocumentCollator, row_key, supervised_tokens
from ...teachers.vocabulary import end_tokens, tokenizer_size
from .teacher import IDS, CrossTokenizerTeacher, TeacherRows
from .text_alignment import TextRun, runs

# Group the tokens of two tokenizations of one text into spans: the shortest stretches that are whole tokens to both.
#
# Where both tokenizers have a cut behind the same text, a span ends and the next begins. Where only one has, its
# tokens are merged until both have: "un|believ|able" and "unbeliev|able" make the spans "unbeliev" and "able". A
# character that is split over tokens, such as an emoji over its bytes, is never cut. After the alignment of chunks in
# Minixhofer et al. 2025, arXiv:2503.20083, and TRL's GOLDTrainer, for byte offsets.
#
# Some tokenizers do not keep the text as it is: they drop white space, or case, accents and ligatures. Such texts are
# followed side by side. White space and control characters that only one side has are passed over, and so are special
# tokens: tokens that write nothing else are in no span. Where the texts differ beyond that, alignment ends.
#
# Rows are compared by run, the k-th stretch of supervised tokens with the k-th, like `text_alignment.aligned`. Behind
# the whole text of a run, the first special tokens of both sides make a span of their own: either model ends the
# answer.


LONGEST_SPELLING = 4  # characters by which one side may write what the other writes in fewer, such as a ligature
Places = list[int | None]
"""For each place of a text, how much text both sides have written up to there; None where they cannot be compared."""


class Span(NamedTuple):
    """The tokens of one span: indices in the rows of both, first and behind the last."""

    student: tuple[int, int]
    teacher: tuple[int, int]


def aligned_spans(student: Sequence[TextRun], teacher: Sequence[TextRun]) -> list[Span]:
    """Return the spans of a row, in order. A row's first token is never predicted, so it is in none.

    The student's row may have been cut, and so have fewer runs. With more than the teacher's, nothing is compared.
    """
    if len(student) > len(teacher):
        return []
    spans = (span for pair in zip(student, teacher, strict=False) for span in _of_runs(*pair))
    return [span for span in spans if span.student[0] > 0 and span.teacher[0] > 0]


def _of_runs(student: TextRun, teacher: TextRun) -> Iterator[Span]:
    places = followed(student.text, teacher.text)
    ours, theirs = _cuts(student, places[0]), _cuts(teacher, places[1])
    for start, end in pairwise(sorted(ours.keys() & theirs.keys())):
        yield Span(
            (student.first + ours[start][1], student.first + ours[end][0]),
            (teacher.first + theirs[start][1], teacher.first + theirs[end][0]),
        )
    same_text = places[0][-1] is not None and places[0][-1] == places[1][-1]
    # the ends of both answers are one span, though the tokens are written differently
    our_end, their_end = special_token(student), special_token(teacher)
    if same_text and our_end is not None and their_end is not None:
        yield Span((our_end, our_end + 1), (their_end, their_end + 1))


def special_token(run: TextRun) -> int | None:
    """Return the index, in its row, of the first token behind the text that writes nothing; None without one. White
    space may stand between, and behind it."""
    if run.front and not run.text:
        return None  # only white space, which counts as nothing, too
    size = len(run.text.rstrip())
    cuts = [-1 if cut is None else cut for cut in run.cuts]
    after = (i for i, (cut, behind) in enumerate(pairwise(cuts)) if cut == behind >= size)
    return next((run.first + i for i in after), None)


def _cuts(run: TextRun, places: Places) -> dict[int, tuple[int, int]]:
    """Return {text of both before it: (first, last) cut there}. Between the two are tokens that only this side has."""
    cuts: dict[int, tuple[int, int]] = {}
    for index, cut in enumerate(run.cuts):
        place = None if cut is None else places[cut]
        if place is not None:
            cuts[place] = (cuts.get(place, (index,))[0], index)
    return cuts


def followed(one: str, other: str) -> tuple[Places, Places]:
    """Return, for each place of two texts from 0 to their lengths, how much text both have written up to there."""
    # most texts are equal: only what follows is compared in steps
    same = len(commonprefix([one, other]))
    places: tuple[Places, Places] = ([*range(same + 1)], [*range(same + 1)])
    for side, text in zip(places, (one, other), strict=True):
        side += [None] * (len(text) - same)
    i = j = written = same
    while (step := _step(one[i : i + LONGEST_SPELLING], other[j : j + LONGEST_SPELLING])) is not None:
        for place, text, at, by in ((places[0], one, i, step[0]), (places[1], other, j, step[1])):
            if by and not all(step) and unicodedata.combining(text[at]):
                place[at] = None  # an accent that one side drops belongs to the letter before it
        i, j = i + step[0], j + step[1]
        written += all(step)
        places[0][i] = places[1][j] = written
    return places


def _step(one: str, other: str) -> tuple[int, int] | None:
    """Return how many characters of either text to go on by; None where neither text goes on, or they part."""
    if one and other and (one[0] == other[0] or one[0].isspace() and other[0].isspace()):
        return 1, 1
    if one and not _plain(one[0]):
        return 1, 0
    if other and not _plain(other[0]):
        return 0, 1
    # spellings of different lengths, such as a ligature and its letters
    sizes = ((m, n) for m in range(1, len(one) + 1) for n in range(1, len(other) + 1))
    same = [(m, n) for m, n in sizes if _plain(one[:m]) == _plain(other[:n])]
    return min(same, key=sum, default=None)


def _plain(text: str) -> str:
    """Return a text without case, accents, ligatures, white space and control characters."""
    characters = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in characters if unicodedata.category(c)[0] not in "MZC")


SPANS, PROMPT = "teacher_spans", "teacher_prompt_size"  # columns
INPUT_IDS, MASK, LABELS, THEIRS, OURS = (
    f"alm_{name}" for name in ("input_ids", "attention_mask", "labels", "teacher_spans", "spans")
)  # in a batch
PROBE = "a"  # a completion, where only the tokens behind one matter


@dataclass(frozen=True)
class SpanRow:
    """What the teacher reads in the place of a row, and its spans.

    Attributes:
        spans: four numbers for each span: the first of its tokens among the supervised ones of the student's row, how
            many they are, the first of its tokens in input_ids, how many they are.
        prompt: how many of input_ids come before the first supervised one.
        tokens: how many supervised tokens the student's row has.
    """

    input_ids: list[int]
    spans: list[int]
    prompt: int
    tokens: int

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        numbers = iter(self.spans)
        return zip(numbers, numbers, numbers, numbers, strict=True)


def _span_row(input_ids: list[int], spans: list[int], prompt: int, labels: list[int]) -> SpanRow:
    return SpanRow(input_ids, spans, prompt, supervised_tokens(labels))


class SpanRows(TeacherRows):
    """`TeacherRows`, and the teacher's prompts by the student's."""

    def __init__(self) -> None:
        super().__init__([IDS, SPANS, PROMPT, "labels"], _span_row)
        self._prompts: dict[bytes, tuple[int, int]] = {}

    def add(self, rows: Dataset, name: str) -> None:
        for index, row in enumerate(rows.select_columns(["input_ids", "labels", PROMPT])):
            ids: list[int] = row["input_ids"][: _prompt_size(row["labels"])]  # pyright: ignore
            if ids and row[PROMPT]:  # pyright: ignore[reportCallIssue, reportArgumentType]
                self._prompts[row_key(ids, ids)] = (len(self._datasets), index)
        super().add(rows, name)

    def prompt(self, ids: list[int]) -> list[int]:
        """Return what the teacher reads as this prompt of the student's.

        Raises:
            DataError: it is of no row that was prepared.
        """
        place = self._prompts.get(row_key(ids, ids))
        if place is None:
            raise DataError(
                f"A prompt of {len(ids)} tokens, beginning with {ids[:8]}, is of no row that the trainer prepared, so "
                "what the teacher reads in its place is not known. Give its text to the trainer as train_dataset or "
                "eval_dataset."
            )
        row: SpanRow = self.at(*place)
        return row.input_ids[: row.prompt]


# The loss of a batch by approximate likelihood matching. Formulas: kernels/linear_alm.py.


class AlmAnswer(TeacherAnswer):
    """A teacher's log-likelihoods of spans of the student's tokens.

    No dataclass: engines look into these, and FSDP2 would round the log-likelihoods to bf16.

    Args:
        spans: (batch, length) int64. For each position in a span, the first token's position, as an index into
            batch * length; negative: in no span. A position is in the span of the token that it predicts.
        log_prob: (batch, length) fp32, of each span, at the position of its first token.
        partners: (batch, length) int64, the teacher's position for the first of each span; negative: none.
    """

    def __init__(self, spans: Tensor, log_prob: Tensor, partners: Tensor):
        self.spans, self.log_prob, self.partners = spans, log_prob, partners

    @property
    def shape(self) -> torch.Size:
        return self.spans.shape

    @property
    def teacher_positions(self) -> Tensor:
        return self.partners

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return alm_weight * ALM + ce_weight * CE. Tokens in no span have only cross-entropy."""
        how = options.for_teacher()
        spans, teacher = (x.flatten().to(targets.labels.device) for x in (self.spans, self.log_prob))
        # a drafting head predicts all tokens of a span or but the first, and then there is no likelihood of the span
        spans = spans.masked_fill(targets.labels[spans.clamp(min=0)] == IGNORE_INDEX, -1)
        common: dict[str, Any] = {"alm_weight": how.alm_weight, "ce_weight": how.ce_weight, "tau": how.alm_tau}
        if isinstance(student, DeferredLogits):
            result = linear_alm(
                **student.operands(), labels=targets.labels, spans=spans, teacher_log_prob=teacher,
                vocab_size=how.vocab_size, **targets.for_ops(), **common,
            )  # fmt: skip
        else:
            # somebody has read the logits: they are stored, and the loss is of them
            logits = student.flatten(0, -2)[:, : how.vocab_size].float()
            result = stored_alm(
                logits, targets.labels, spans, teacher, num_items=targets.num_items, token_weight=targets.weights,
                **common,
            )  # fmt: skip
        # metrics are averaged over all tokens, those outside of spans with 0
        inside = (spans >= 0).to(result.alm.dtype)
        parts = {"spans/share": inside, "spans/student_nll": -result.log_prob * inside, "spans/teacher_nll": -teacher}
        return BatchLoss.of_term("alm", how.alm_weight, result, parts)


def teacher_log_probs(logits: Logits, labels: Tensor, rows: RowSelection, vocab_size: int) -> Tensor:
    """Return the log-probability (documents * length,) fp32 of each label under a teacher's logits; 0 where ignored.

    Args:
        logits: (documents, length, V).
        labels: (documents, length) int64, the token that each position predicts, or IGNORE_INDEX.
        rows: the labelled positions.
        vocab_size: of the teacher's tokenizer, where its head is padded beyond.
    """
    flat = labels.flatten()
    with torch.no_grad():
        if isinstance(logits, DeferredLogits):
            operands = logits.operands()
            # without gradients: the teacher is not trained
            return linear_log_probs(**operands, labels=flat, rows=rows, vocab_size=vocab_size).log_prob
        return stored_log_probs(stored(logits).flatten(0, -2)[:, :vocab_size].float(), flat, IGNORE_INDEX).log_prob


class SpanTeacher(CrossTokenizerTeacher):
    """A causal LM with another tokenizer, which knows the likelihood of text.

    Raises:
        ConfigError: as `CrossTokenizerTeacher`; rows of nothing but prompts that are streamed.
        DataError: no text is whole tokens to both.
    """

    loss_type = "alm"
    knows_new_tokens = True
    rows: SpanRows
    _ending: list[int] | None = None
    _ends: Sequence[int] = ()

    def new_rows(self) -> SpanRows:
        return SpanRows()

    def aligned_row(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return partial(_aligned_row, tokenizer=self.student_tokenizer, teacher_tokenizer=self.tokenizer)

    def _read_by_teacher(self, raw: Dataset, formatting_func: Any) -> Dataset:
        read = super()._read_by_teacher(raw, formatting_func)
        if self._ending is None:
            row: dict[str, Any] = read[0]
            self._ending = _ending(row["input_ids"], runs(row["input_ids"], row["labels"], self.tokenizer)[0])
        return read

    def see_prompts(self, dataset: Any, name: str, read: Callable[[Any], list[list[int]]], *, tokenizer: Any) -> None:
        if not isinstance(dataset, Dataset):
            raise ConfigError(f"alm needs the text of all rows at first, and the {name} dataset is streamed.")
        self.student_tokenizer, first = tokenizer, dataset[0]
        if self._ending is None:
            # any completion shows which tokens end one
            answer = [{"role": "assistant", "content": PROBE}] if is_conversational(first) else PROBE
            self._read_by_teacher(Dataset.from_list([{**first, "completion": answer}]), None)
        ours, theirs = read(tokenizer), read(self.tokenizer)
        rows = {"input_ids": ours, "labels": [[IGNORE_INDEX] * len(ids) for ids in ours], IDS: theirs}
        rows |= {SPANS: [[] for _ in ours], PROMPT: [len(ids) for ids in theirs]}
        self.rows.add(Dataset.from_dict(rows), name)

    def report(self, aligned: Dataset, prepared: Dataset, name: str) -> None:
        tokens = sum(supervised_tokens(labels) for labels in prepared["labels"])
        numbers = aligned[SPANS][:]
        inside, spans = sum(sum(row[1::4]) for row in numbers), sum(len(row) // 4 for row in numbers)
        announce(
            f"alm: {inside:,} of {tokens:,} supervised tokens ({inside / max(tokens, 1):.1%}) of the {name} dataset "
            f"are in {spans:,} spans of text, whole tokens to student and teacher."
        )
        if not spans:
            raise DataError(
                f"No text of the {name} dataset is whole tokens to both student and teacher, so alm has nothing to "
                "compare: do both chat templates write the same text for the completions, in as many parts?"
            )

    def collator(self, collator: Any) -> "SpanCollator":
        return SpanCollator(collator, self.rows)

    def sampled_collator(self, collator: Any) -> "SpanCollator":
        return SpanCollator(collator, self.rows, self.sampled_row)

    def prepare(self, trainer: DistillHost) -> int:
        self._ends = end_tokens(base_of(trainer.student), trainer.tokenizer)
        return super().prepare(trainer)

    def sampled_row(self, ids: list[int], labels: list[int]) -> SpanRow:
        """Return what the teacher reads in the place of a prompt with a sampled completion, and their spans."""
        prompt = self.rows.prompt(ids[: _prompt_size(labels)])
        (run,) = runs(ids, labels, self.student_tokenizer)
        # A completion may stop behind a special token that is no end, where max_completion_length cuts it.
        ending = (self._ending or []) if ids[-1] in self._ends else []
        completion = self._continued(prompt, run.front + run.text) + ending
        row = {
            "input_ids": ids, "labels": labels, IDS: prompt + completion,
            "teacher_labels": [IGNORE_INDEX] * len(prompt) + completion,
        }  # fmt: skip
        aligned = self.aligned_row()(row)
        return SpanRow(aligned[IDS], aligned[SPANS], aligned[PROMPT], supervised_tokens(labels))

    def _continued(self, prompt: list[int], text: str) -> list[int]:
        """Return the tokens of a text behind a prompt; those of the text by itself where the two would merge."""

        def ids_of(text: str) -> list[int]:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        before = self.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # tokenized with the prompt, since a token at the seam may differ
        both = ids_of(before + text)
        return both[len(prompt) :] if both[: len(prompt)] == prompt else ids_of(text)

    def answer(self, inputs: dict[str, Any]) -> AlmAnswer:
        ids, mask, labels, theirs, ours = (inputs.pop(name) for name in (INPUT_IDS, MASK, LABELS, THEIRS, OURS))
        rows = RowSelection(labels)  # before the model runs, so that the host need not wait
        logits = self.logits(input_ids=ids, attention_mask=mask, use_cache=False)
        with self._accelerator.autocast():
            log_probs = teacher_log_probs(logits, labels, rows, tokenizer_size(self.tokenizer))
        theirs = theirs.flatten()
        in_spans = sum_of_spans(log_probs, theirs, ours.numel())
        return AlmAnswer(ours, in_spans.view(ours.shape), _first_places(theirs, ours.numel()).view(ours.shape))


def _first_places(spans: Tensor, size: int) -> Tensor:
    """Return (size,) with the first index at which `spans` has each number; -1 where it has not."""
    places = torch.arange(len(spans), device=spans.device)
    none = torch.full((size,), len(spans), device=spans.device)
    first = none.scatter_reduce(0, spans.clamp(min=0), places.where(spans >= 0, len(spans)), "amin")
    return first.where(first < len(spans), -1)


def _prompt_size(labels: Sequence[int]) -> int:
    """Return how many tokens come before the first supervised one: all where there is none."""
    return next((index for index, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))


def _ending(ids: list[int], run: TextRun) -> list[int]:
    """Return the tokens with which a run ends, behind its text: from the first special one on."""
    size, token = len(run.starts), special_token(run)
    return [] if token is None else ids[token : run.first + size]


def _aligned_row(row: dict[str, Any], tokenizer: Any, teacher_tokenizer: Any) -> dict[str, Any]:
    labels, read = row["labels"], row[IDS]
    student = runs(row["input_ids"], labels, tokenizer)
    spans = aligned_spans(student, runs(read, row["teacher_labels"], teacher_tokenizer))
    numbers = {token: i for i, token in enumerate(i for i in range(1, len(labels)) if labels[i] != IGNORE_INDEX)}
    spans = [span for span in spans if span.student[0] in numbers]
    prompt = _prompt_size(row["teacher_labels"])
    return {
        SPANS: [x for (a, b), (c, d) in spans for x in (numbers[a], b - a, c, d - c)],
        IDS: read[: max([prompt, *(span.teacher[1] for span in spans)])],
        PROMPT: prompt,
    }


class SpanCollator(DocumentCollator):
    """Add what the teacher reads, and the spans.

    `alm_input_ids`, `alm_attention_mask` and `alm_labels` (documents, length'), padded on the right: the labels are the
    tokens of spans, each at the position that predicts it. `alm_spans` (batch, length) and `alm_teacher_spans`
    (documents, length'): for each position that predicts a token of a span, the student's position of the span's first
    one, as an index into batch * length; -1 for none.

    Args:
        sampled: makes the row of token ids and labels that were not prepared; None: they are refused.
    """

    def __init__(self, collator: Any, rows: SpanRows, sampled: Callable[[list[int], list[int]], SpanRow] | None = None):
        super().__init__(
            collator,
            "is none that the trainer prepared, so what the teacher reads in its place is not known. Give its text to "
            "the trainer as train_dataset or eval_dataset.",
        )
        self.rows, self._sampled = rows, sampled

    def look_up(self, key: bytes, tokens: int) -> SpanRow | None:
        return self.rows.find(key)

    def _answer(self, ids: Any, labels: Any) -> SpanRow:
        if self._sampled is not None:
            return self._sampled(list(ids), list(labels))
        return super()._answer(ids, labels)

    def columns(self, answers: list[SpanRow], predicts: Tensor) -> dict[str, Any]:
        length = max([1, *(len(row.input_ids) for row in answers)])
        ids = torch.zeros(max(len(answers), 1), length, dtype=torch.int64)
        mask, labels, theirs = torch.zeros_like(ids), torch.full_like(ids, IGNORE_INDEX), torch.full_like(ids, -1)
        mask[:, 0] = 1  # a row of nothing but padding would have no attention
        places, before = predicts.flatten().nonzero()[:, 0].tolist(), 0
        ours = [-1] * predicts.numel()
        for number, row in enumerate(answers):
            read = torch.tensor(row.input_ids, dtype=torch.int64)
            ids[number, : len(read)], mask[number, : len(read)] = read, 1
            for first, count, their_first, their_count in row.each():
                span = places[before + first]
                for place in places[before + first : before + first + count]:
                    ours[place] = span
                at = slice(their_first - 1, their_first - 1 + their_count)
                labels[number, at] = read[their_first : their_first + their_count]
                theirs[number, at] = span
            before += row.tokens
        spans = torch.tensor(ours, dtype=torch.int64).view(predicts.shape)
        return {INPUT_IDS: ids, MASK: mask, LABELS: labels, THEIRS: theirs, OURS: spans}
