"""Pair the positions of two tokenizations of one row: those with the same text before them.

Two tokenizers cut a completion at different places. Where both have a cut, either model has read the same text and is
about to continue it, so that their next-token distributions can be compared. Counting positions instead, as the ULD
paper does, compares distributions after different texts from the first difference on.

A row's supervised tokens are compared by run: the k-th run of supervised tokens on one side with the k-th on the other,
such as an assistant's k-th answer. White space at the front of a run and special tokens are ignored, so the ends of two
chat templates match too. Where several positions of one side stand behind the same text, the first pairs with the
other side's first.
"""

import os.path
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that end within a character


@dataclass(frozen=True)
class TextRun:
    """Supervised tokens that follow one another.

    Attributes:
        first: the index of the first token in its row.
        text: the text of all of them.
        starts: for each token, how many characters stand before it; None within a character.
        end: how many characters stand behind the last token: all; None within a character.
        front: the white space before `text`.
    """

    first: int
    text: str
    starts: tuple[int | None, ...]
    end: int | None
    front: str

    @property
    def cuts(self) -> tuple[int | None, ...]:
        """For each cut between tokens, from before the first to behind the last, the characters before it."""
        return (*self.starts, self.end)

    def places(self, common: int) -> dict[int, list[int]]:
        """Return {characters before: positions that predict the token there}, up to `common` characters."""
        places: dict[int, list[int]] = defaultdict(list)
        for index, start in enumerate(self.starts, self.first):
            if start is not None and start <= common and index > 0:  # the first token of a row is never predicted
                places[start].append(index - 1)
        return places


def runs(input_ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[TextRun]:
    """Return the runs of supervised tokens in a row; labels are -100 where nothing is predicted."""
    result, start = [], None
    for index in range(len(labels) + 1):
        supervised = index < len(labels) and labels[index] != -100
        if supervised and start is None:
            start = index
        elif not supervised and start is not None:
            result.append(_run(start, input_ids[start:index], tokenizer))
            start = None
    return result


def _run(first: int, ids: Sequence[int], tokenizer: Any) -> TextRun:
    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    text, starts, window, read = "", [], 0, 0
    for index in range(len(ids)):
        starts.append(len(text) if read == index else None)
        # Decode together with the tokens before: decoders treat the first token of a text differently.
        decoded = decode(ids[window : index + 1])
        if decoded.endswith(UNFINISHED):
            continue
        before = decode(ids[window:read])
        same = len(os.path.commonprefix([before, decoded]))
        if same < len(before):  # the token changes how those before it are written
            text = text[: len(text) - len(before) + same]
            starts = [None if start is None or start > len(text) else start for start in starts]
            starts[index] = None
        text += decoded[same:]
        window, read = read, index + 1
    # templates differ in the white space before an answer
    front = len(text) - len(text.lstrip())
    cuts = [None if cut is None else max(0, cut - front) for cut in [*starts, len(text) if read == len(ids) else None]]
    return TextRun(first, text[front:], tuple(cuts[:-1]), cuts[-1], text[:front])


def aligned(student: Sequence[TextRun], teacher: Sequence[TextRun]) -> dict[int, int]:
    """Return {student's position: teacher's position}; nothing where the two have different numbers of runs, unless
    the student's row has fewer because it was cut within a run that begins as the teacher's does."""
    # max_length may have cut answers off the student's row
    was_cut = 0 < len(student) < len(teacher) and teacher[len(student) - 1].text.startswith(student[-1].text)
    if len(student) != len(teacher) and not was_cut:
        return {}
    pairs: dict[int, int] = {}
    for student_run, teacher_run in zip(student, teacher, strict=False):
        common = len(os.path.commonprefix([student_run.text, teacher_run.text]))
        teacher_places = teacher_run.places(common)
        for start, positions in student_run.places(common).items():
            pairs.update(zip(positions, teacher_places.get(start, ()), strict=False))
    return pairs


def partners(student_labels: Sequence[int], pairs: dict[int, int]) -> list[int]:
    """Return, for each supervised token of a row, the teacher's position that predicts it; -1 for none."""
    return [pairs.get(index - 1, -1) for index in range(1, len(student_labels)) if student_labels[index] != -100]
