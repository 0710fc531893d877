"""Group the tokens of two tokenizations of one text into spans: the shortest stretches that are whole tokens to both.

Where both tokenizers have a cut behind the same text, a span ends and the next begins. Where only one has, its tokens
are merged until both have: "un|believ|able" and "unbeliev|able" make the spans "unbeliev" and "able". A character that
is split over tokens, such as an emoji over its bytes, is never cut. After the alignment of chunks in Minixhofer et al.
2025, arXiv:2503.20083, and that of byte offsets in TRL's GOLDTrainer.

Some tokenizers do not keep the text as it is: they drop white space, or case, accents and ligatures. Such texts are
followed side by side. White space and control characters that only one side has are passed over, and so are special
tokens: tokens that write nothing else are in no span. Where the texts differ beyond that, alignment ends.

Rows are compared by run, the k-th stretch of supervised tokens with the k-th, like `text_alignment.aligned`. Behind the
whole text of a run, the first special tokens of both sides make a span of their own: either model ends the answer.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

from .text_alignment import TextRun

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
    our_end, their_end = special_token(student), special_token(teacher)
    if same_text and our_end is not None and their_end is not None:
        yield Span((our_end, our_end + 1), (their_end, their_end + 1))


def special_token(run: TextRun) -> int | None:
    """Return the index, in its row, of the first token behind the text that writes nothing; None without one. White
    space may stand between, and behind it."""
    if run.front and not run.text:
        return None  # white space alone, which counts as nothing, too
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
    sizes = ((m, n) for m in range(1, len(one) + 1) for n in range(1, len(other) + 1))
    same = [(m, n) for m, n in sizes if _plain(one[:m]) == _plain(other[:n])]
    return min(same, key=sum, default=None)


def _plain(text: str) -> str:
    """Return a text without case, accents, ligatures, white space and control characters."""
    characters = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in characters if unicodedata.category(c)[0] not in "MZC")
