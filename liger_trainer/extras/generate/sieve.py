"""Which samples become rows: each is dropped by the first filter that it fails, and counted there."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .options import GenerateOptions

# Words and word n-grams of texts, their hashes, and MinHash for near duplicates.


# Chinese, Japanese and Korean are written without spaces: there each character counts as a word
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
PERMUTATIONS, BAND = 128, 4


def words(text: str) -> list[str]:
    """Return the words of a text in small letters, without punctuation."""
    return _WORD.findall(text.lower())


def ngrams(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Yield the runs of n words; the whole text where it has fewer."""
    for start in range(max(1, len(tokens) - n + 1) if tokens else 0):
        yield tuple(tokens[start : start + n])


def stable_hash(gram: Sequence[str]) -> int:
    """Return a hash of 64 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(gram).encode(), digest_size=8).digest(), "little")


def repetition(tokens: Sequence[str], n: int = 4) -> float:
    """Return the share of n-grams that occurred before in the same text (as in MassiveText, arXiv:2112.11446)."""
    grams = list(ngrams(tokens, n))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class NearDuplicates:
    """Texts by MinHash (Broder 1997) with locality-sensitive hashing (Indyk and Motwani 1998).

    A text takes 128 hashes of 32 bits. Two texts are compared where 4 of them in a row are equal, and are near
    duplicates where the share of equal hashes, which estimates the Jaccard similarity of their n-grams with a standard
    error of at most 0.044, reaches the threshold.
    """

    def __init__(self, threshold: float, n: int = 5):
        self._threshold, self._n = threshold, n
        # a fixed seed: the same texts are duplicates in every run
        rng = np.random.default_rng(0x11)
        self._factors = rng.integers(0, 2**63, (PERMUTATIONS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = rng.integers(0, 2**64, (PERMUTATIONS, 1), dtype=np.uint64)
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def signature(self, tokens: Sequence[str]) -> np.ndarray:
        """Return the MinHash signature (128,) uint32 of a text, which must have a word."""
        hashes = np.array([stable_hash(gram) for gram in set(ngrams(tokens, self._n))], dtype=np.uint64)
        mixed = self._factors * hashes + self._offsets  # modulo 2**64
        return (mixed >> np.uint64(32)).astype(np.uint32).min(axis=1)

    def like(self, signature: np.ndarray) -> int | None:
        """Return the number of the first text added that is a near duplicate, or None."""
        # sorted: the first row that is alike, whatever the order of a set
        candidates = sorted({number for band in _bands(signature) for number in self._bands.get(band, ())})
        return next((i for i in candidates if (self._signatures[i] == signature).mean() >= self._threshold), None)

    def add(self, signature: np.ndarray) -> None:
        for band in _bands(signature):
            self._bands.setdefault(band, []).append(len(self._signatures))
        self._signatures.append(signature)


def _bands(signature: np.ndarray) -> Iterator[tuple[int, bytes]]:
    for start in range(0, PERMUTATIONS, BAND):
        yield start, signature[start : start + BAND].tobytes()


FILTERS = {
    "empty prompt": "the teacher drew no text for a prompt",
    "unfinished prompt": "a drawn prompt did not end within max_prompt_tokens",
    "long prompt": "longer than max_prompt_tokens",
    "empty": "a completion without text",
    "unfinished": "cut off at max_new_tokens",
    "short": "fewer words than min_completion_words",
    "repetition": "a greater share of repeated word 4-grams than max_repetition",
    "held-out overlap": "shares held_out_ngram words in a row with a held-out row",
    "duplicate": "equal to an earlier row but for case, spaces and punctuation",
    "near duplicate": "as similar to an earlier row as near_duplicates says",
}
SHOWN = 160  # characters of an example


@dataclass(frozen=True)
class Sample:
    """What the teacher answered to one prompt.

    Attributes:
        prompt: chat messages, or text.
        completion: None where nothing was sampled, for the reason `dropped`.
        tokens: sampled, with those of a drawn prompt.
    """

    prompt: list[dict[str, Any]] | str
    completion: str | None
    tokens: int = 0
    finished: bool = True
    dropped: str | None = None

    def texts(self) -> list[str]:
        """Return the texts of the messages but the system's, and of the completion."""
        prompt = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        texts = [text for message in prompt if message["role"] != "system" for text in _strings(message.get("content"))]
        return [*texts, self.completion or ""]

    def shown(self) -> str:
        """Return its end in short, for an example."""
        texts = [" ".join(text.split()) for text in self.texts()[-2:]]
        text = " → ".join(text if len(text) <= SHOWN else text[: SHOWN - 3] + "..." for text in texts)
        return text.removesuffix(" → ").strip() or "(nothing)"


@dataclass
class Sieve:
    """Judges samples in order; what it keeps later ones are compared with.

    Attributes:
        kept: of each sample, 1 or 0.
        rows: how many are kept.
        tokens: sampled, those of dropped samples too.
        dropped: samples by filter.
        examples: of each filter that dropped something, the first.
    """

    options: GenerateOptions
    held_out: frozenset[int] = frozenset()
    kept: bytearray = field(default_factory=bytearray)
    rows: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._near = NearDuplicates(self.options.near_duplicates)
        self._seen: set[bytes] = set()

    def judge(self, sample: Sample) -> str | None:
        """Return the filter that drops a sample, or None: it is kept."""
        reason = sample.dropped or self._reason(sample)
        self.kept.append(reason is None)
        self.rows += reason is None
        self.tokens += sample.tokens
        if reason is not None:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self.examples.setdefault(reason, sample.shown())
        return reason

    def _reason(self, sample: Sample) -> str | None:
        completion = sample.completion or ""
        if not completion.strip():
            return "empty"
        if not sample.finished and not self.options.keep_unfinished:
            return "unfinished"
        answer = words(completion)
        # code or formulas may be nothing but signs; these count as one word
        if max(len(answer), 1) < self.options.min_completion_words:
            return "short"
        if repetition(answer) > self.options.max_repetition:
            return "repetition"
        if self.held_out and any(h in self.held_out for text in sample.texts() for h in self._grams(text)):
            return "held-out overlap"
        return self._repeated(sample)

    def _grams(self, text: str) -> Iterable[int]:
        return (stable_hash(gram) for gram in ngrams(words(text), self.options.held_out_ngram))

    def _repeated(self, sample: Sample) -> str | None:
        """Compare with the rows before, and remember the sample if it is like none."""
        # texts of nothing but signs have no words, and must not all be equal
        parts = [words(text) or text.split() for text in sample.texts()]
        key = hashlib.sha256("\x1e".join("\x1f".join(part) for part in parts).encode()).digest()
        if key in self._seen:
            return "duplicate"
        if self.options.near_duplicates < 1:
            signature = self._near.signature([word for part in parts for word in part])
            if self._near.like(signature) is not None:
                return "near duplicate"
            self._near.add(signature)
        self._seen.add(key)
        return None


def grams_of(rows: Iterable[dict[str, Any]], n: int) -> frozenset[int]:
    """Return the hashes of all word n-grams of the texts in rows."""
    return frozenset(stable_hash(gram) for row in rows for text in _strings(row) for gram in ngrams(words(text), n))


def _strings(value: Any) -> list[str]:
    """Return the texts in a row or message, but for roles and what tools look like."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("role", "type", "tools") for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []
