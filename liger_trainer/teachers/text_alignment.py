"""Which positions of two tokenizations of one row belong together: those before which the same text has been written.

Two tokenizers cut a completion at different places. Where both have a cut, either model has read the same text and is
about to continue it, so that their next-token distributions can be compared. Counting positions instead, as the ULD
paper does, compares distributions after different texts from the first difference on.

A row's supervised tokens are compared by run: the k-th stretch of supervised tokens of one side with the k-th of the
other, such as an assistant's k-th answer. White space at the front of a run, and special tokens, count for nothing, so
the ends of two chat templates meet too. Where several positions of a side stand behind the same text, the first belongs
to the first.
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
        first: the index of the first in its row.
        text: of all of them.
        starts: for each, how much of the text stands before it; None within a character.
    """

    first: int
    text: str
    starts: tuple[int | None, ...]

    def places(self, common: int) -> dict[int, list[int]]:
        """{characters before: positions that predict the tokens there}, where no more than `common` are."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, start in enumerate(self.starts, self.first):
            if start is not None and start <= common and index > 0:  # the first token of a row is never predicted
                found[start].append(index - 1)
        return found


def runs(input_ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[TextRun]:
    """Of a row's token ids and labels, -100 where nothing is predicted."""
    found, start = [], None
    for index in range(len(labels) + 1):
        supervised = index < len(labels) and labels[index] != -100
        if supervised and start is None:
            start = index
        elif not supervised and start is not None:
            found.append(_run(start, input_ids[start:index], tokenizer))
            start = None
    return found


def _run(first: int, ids: Sequence[int], tokenizer: Any) -> TextRun:
    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    text, starts, window, read = "", [], 0, 0
    for index in range(len(ids)):
        starts.append(len(text) if read == index else None)
        # behind what was read before, since decoders treat the first token of a text in their own ways
        whole = decode(ids[window : index + 1])
        if not whole.endswith(UNFINISHED):
            text += whole[len(decode(ids[window:read])) :]
            window, read = read, index + 1
    front = len(text) - len(text.lstrip())
    return TextRun(first, text[front:], tuple(None if start is None else max(0, start - front) for start in starts))


def aligned(student: Sequence[TextRun], teacher: Sequence[TextRun]) -> dict[int, int]:
    """{student's position: teacher's position}; none where the two have different numbers of runs."""
    if len(student) != len(teacher):
        return {}
    found: dict[int, int] = {}
    for own, other in zip(student, teacher, strict=True):
        common = len(os.path.commonprefix([own.text, other.text]))
        theirs = other.places(common)
        for start, positions in own.places(common).items():
            found.update(zip(positions, theirs.get(start, ()), strict=False))
    return found


def partners(student_labels: Sequence[int], pairs: dict[int, int]) -> list[int]:
    """For each supervised token of a row, in order, the teacher's position that predicts it; -1: none."""
    return [pairs.get(index - 1, -1) for index in range(1, len(student_labels)) if student_labels[index] != -100]
