"""Which samples become rows: each is dropped by the first filter that it fails, and counted there."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .options import GenerateOptions
from .text_grams import NearDuplicates, ngrams, repetition, stable_hash, words

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
        # code or formulas may be signs alone; these count as one word
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
