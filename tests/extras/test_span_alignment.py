"""Which tokens of two tokenizations make one span: of real tokenizers of three kinds, and of text they spell unlike."""

import functools
import itertools
import random
import unicodedata

import pytest
from byte_level import CODE
from tokenizers_of_kinds import bpe, unigram, word_piece

from liger_trainer.extras.cross_tokenizer.spans import aligned_spans, followed, special_token
from liger_trainer.extras.cross_tokenizer.text_alignment import runs

KINDS = {"bpe": bpe, "other bpe": functools.partial(bpe, CODE), "wordpiece": word_piece, "unigram": unigram}
KEEPS_TEXT = ("bpe", "other bpe", "unigram")
PIECES = [
    "the cat", "Don't", "(Yes, I do.)", "naïve", "日本語", "🙂", "👩‍👩‍👧", "\n\n",
    "  ", "\t", "return x + 1", "w1 w2", "é",
]  # fmt: skip


@functools.cache
def tokenizer(kind: str):
    return KINDS[kind]()


def row(kind: str, text: str, prompt: str = "the", end: bool = True) -> tuple[list[int], list[int]]:
    """Token ids and labels: a prompt, and a supervised text with the end of a text behind it."""
    reader = tokenizer(kind)
    before, ids = (reader(x, add_special_tokens=False)["input_ids"] for x in (prompt, text))
    ids = ids + [reader.eos_token_id] * end
    return before + ids, [-100] * len(before) + ids


def spans_of(text: str, ours: str, theirs: str, **options) -> list[tuple[str, str]]:
    """The text of the tokens of each span, as either side decodes it by itself."""
    rows = [row(kind, text, **options) for kind in (ours, theirs)]
    spans = aligned_spans(*(runs(*pair, tokenizer(kind)) for pair, kind in zip(rows, (ours, theirs), strict=True)))
    return [
        tuple(
            tokenizer(kind).decode(ids[start:end])
            for kind, (ids, _), (start, end) in zip((ours, theirs), rows, span, strict=True)
        )
        for span in spans
    ]


def mixed(seed: int) -> str:
    rng = random.Random(seed)
    return "w" + "".join(rng.choice(["", " "]) + rng.choice(PIECES) for _ in range(rng.randint(1, 7)))


@pytest.mark.parametrize("ours, theirs", [*itertools.permutations(KEEPS_TEXT, 2)])
def test_spans_are_the_shortest_text_that_is_whole_tokens_to_both(ours, theirs):
    for seed in range(25):
        text = unicodedata.normalize("NFC", mixed(seed))
        rows = [row(kind, text) for kind in (ours, theirs)]
        spans = aligned_spans(*(runs(*pair, tokenizer(kind)) for pair, kind in zip(rows, (ours, theirs), strict=True)))
        cuts = []
        for kind, (ids, labels) in zip((ours, theirs), rows, strict=True):
            start = sum(label == -100 for label in labels)
            written = [tokenizer(kind).decode(ids[start:n], skip_special_tokens=True) for n in range(start, len(ids))]
            cuts.append([x for x in written if not x.endswith("\ufffd")])
        both = sorted(set(cuts[0]) & set(cuts[1]), key=len)
        assert len(spans) == len(both)  # one between each two cuts, and the end
        for place, side in enumerate((ours, theirs)):
            ids, labels = rows[place]
            start = sum(label == -100 for label in labels)
            ends = [tokenizer(side).decode(ids[start : span[place][1]], skip_special_tokens=True) for span in spans]
            assert ends == [*both[1:], text]
            assert [span[place][0] for span in spans][1:] == [span[place][1] for span in spans][:-1]
            assert spans[-1][place] == (len(ids) - 1, len(ids))


@pytest.mark.parametrize("kind", KEEPS_TEXT)
def test_a_tokenizer_that_loses_white_space_and_case(kind):
    text = "Don't you see?\n\n  (Yes, I DO.)"
    got = spans_of(text, kind, "wordpiece")
    assert got == [pair[::-1] for pair in spans_of(text, "wordpiece", kind)]
    *spans, end = [["".join(x.replace("##", "").split()).lower() for x in pair] for pair in got]
    assert end[1] == "[end]" and all(mine == other for mine, other in spans)
    assert "".join(mine for mine, _ in spans) == "".join(text.split()).lower()
    words = [cut for cut in tokenizer("wordpiece").tokenize(text) if not cut.startswith("##")]
    assert len(words) <= len(spans)  # a cut between words is one to both


def test_accents_stay_with_their_letters():
    decomposed = unicodedata.normalize("NFD", "né à")
    assert spans_of(decomposed, "bpe", "unigram")[:-1] == [("n", "n"), ("e\u0301", "é"), (" ", ""), ("a\u0300", "à")]
    assert "e\u0301" in dict(spans_of(decomposed, "bpe", "wordpiece"))


def test_what_a_tokenizer_does_not_know_ends_the_comparison():
    assert spans_of("see 日本 w1", "bpe", "wordpiece") == [("see", "see")]


def test_ends_of_a_text():
    """An end is compared with an end, if all text before it was, and both write one."""
    assert spans_of("w1", "bpe", "unigram")[-1] == ("<|end|>", "[END]")
    assert spans_of("w1", "bpe", "unigram", end=False)[-1] != ("<|end|>", "[END]")
    ours, theirs = row("bpe", "w1 w"), row("unigram", "w1 w2")
    spans = aligned_spans(runs(*ours, tokenizer("bpe")), runs(*theirs, tokenizer("unigram")))
    assert all(span.student[1] < len(ours[0]) for span in spans)
    (run,) = runs(*row("bpe", "w1"), tokenizer("bpe"))
    assert special_token(run) == len(row("bpe", "w1")[0]) - 1
    (cut,) = runs(*row("bpe", "w1", end=False), tokenizer("bpe"))
    assert special_token(cut) is None
    (half,) = runs([5, *tokenizer("bpe")("🙂").input_ids[:2]], [-100, 1, 1], tokenizer("bpe"))
    assert half.end is None and half.text == ""


def test_the_first_token_of_a_row_is_in_no_span():
    ids = [tokenizer(kind)("w1 w2 w3").input_ids for kind in ("bpe", "other bpe")]
    sides = [runs(x, x, tokenizer(kind)) for x, kind in zip(ids, ("bpe", "other bpe"), strict=True)]
    spans = aligned_spans(*sides)
    assert spans and all(span.student[0] > 0 and span.teacher[0] > 0 for span in spans)


def test_runs_of_a_row_that_was_cut():
    reader = tokenizer("bpe")
    one, two = ([7, *reader(text).input_ids] for text in ("w1", "w2"))
    labels = [-100, *one[1:], -100, *two[1:]]
    both = runs(one + two, labels, reader)
    assert len(both) == 2
    assert aligned_spans(both[:1], both) == aligned_spans(both[:1], both[:1]) != []
    assert aligned_spans(both, both[:1]) == []


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("abc", "abc", [0, 1, 2, 3]),
        ("a  b", "a b", [0, 1, 2, 2, 3]),
        ("a\nb", "a b", [0, 1, 2, 3]),
        ("Straße", "strasse", [0, 1, 2, 3, 4, 5, 6]),
        ("ﬁx", "fix", [0, 1, 2]),
        ("a\u200db", "ab", [0, 1, 1, 2]),
        ("axb", "ayb", [0, 1, None, None]),
        ("ab", "", [0, None, None]),
        (" a", "a", [0, 0, 1]),
    ],
)
def test_texts_that_are_spelt_unlike(one, other, same):
    assert followed(one, other)[0] == same and followed(other, one)[1] == same
