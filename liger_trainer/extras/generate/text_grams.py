"""Words and word n-grams of texts, their hashes, and MinHash for near duplicates."""

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

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
        candidates = sorted({number for band in _bands(signature) for number in self._bands.get(band, ())})
        return next((i for i in candidates if (self._signatures[i] == signature).mean() >= self._threshold), None)

    def add(self, signature: np.ndarray) -> None:
        for band in _bands(signature):
            self._bands.setdefault(band, []).append(len(self._signatures))
        self._signatures.append(signature)


def _bands(signature: np.ndarray) -> Iterator[tuple[int, bytes]]:
    for start in range(0, PERMUTATIONS, BAND):
        yield start, signature[start : start + BAND].tobytes()
