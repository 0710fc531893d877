"""A client of `/v1/completions` that asks for the likeliest tokens at each place of prompts given as token ids.

Two forms of the same question:

    vllm   `prompt_logprobs: k`, vLLM's own; per place {token id: {"logprob": x}}
    echo   `echo: true, logprobs: k` with `return_tokens_as_token_ids: true`; per place {"token_id:123": x}

Both also send back the token at each place, so the client notices when the server read other tokens than it was sent.
One token is generated and ignored: not every server takes `max_tokens: 0`.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, NonFiniteError
from .connection import Connection, ConnectionOptions

BYTES_PER_ENTRY = 512  # vLLM writes about 80 for a token and its log-probability
TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class ServerOptions(ConnectionOptions):
    """How a server is asked."""

    protocol: str = field(kw_only=True)  # "vllm" or "echo"
    top_k: int = field(kw_only=True)


class Question(NamedTuple):
    """A prompt, and the places in it, from 1, whose tokens' distributions are wanted."""

    ids: list[int]
    places: list[int]


class TopTokens(NamedTuple):
    """The answer for n places: the K likeliest tokens, likeliest first, and the token that stands there."""

    ids: np.ndarray  # (n, K) int32
    log_probs: np.ndarray  # (n, K) fp32, natural
    label_log_prob: np.ndarray  # (n,) fp32


class CompletionsServer(Connection):
    """Ask a server questions, several at a time.

    Raises, when asked:
        ConfigError: the server refuses or redirects, speaks another protocol, gives fewer tokens than it was asked for,
            read other tokens than were sent, or gives numbers that are no log-probabilities.
        NonFiniteError: it gives NaN.
        TeacherServerError: it cannot be reached, or fails, after all attempts.
    """

    options: ServerOptions

    def __init__(self, options: ServerOptions, pause: Callable[[float], None] = time.sleep):
        super().__init__(options, pause)

    def ask(self, questions: Sequence[Question]) -> list[TopTokens]:
        """Return the answers in the order of the questions. The first error ends them all."""
        return self.for_each(self._ask, questions)

    def ask_each(self, question: Question) -> dict[str, TopTokens]:
        """Return every server's answer to one question, by the servers' names."""
        answers = self.for_each(lambda server: self._ask(question, server), self.servers)
        return {server.name: answer for server, answer in zip(self.servers, answers, strict=True)}

    def _ask(self, question: Question, only: Any = None) -> TopTokens:
        entries = (len(question.ids) + 1) * (self.options.top_k + 1)
        answer = self.post(self._request(question.ids), 2**20 + entries * BYTES_PER_ENTRY, only)
        read = _read_vllm if self.options.protocol == "vllm" else _read_echo
        try:
            places = read(answer["choices"][0], question)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self.endpoint} answers in another form than teacher_server_protocol: {self.options.protocol} has "
                f"({type(error).__name__}: {error}): {self.quoted(json.dumps(answer))}"
            ) from None
        return self._top_tokens(places, question)

    def _request(self, ids: list[int]) -> dict[str, Any]:
        common = {"model": self.options.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        if self.options.protocol == "vllm":
            return {**common, "prompt_logprobs": self.options.top_k}
        return {**common, "echo": True, "logprobs": self.options.top_k, "return_tokens_as_token_ids": True}

    def _top_tokens(self, places: list[dict[int, float]], question: Question) -> TopTokens:
        k = self.options.top_k
        ids, log_probs = np.empty((len(places), k), np.int32), np.empty((len(places), k), np.float32)
        labels = np.empty(len(places), np.float32)
        for row, (place, entries) in enumerate(zip(question.places, places, strict=True)):
            if len(entries) < k:
                raise ConfigError(
                    f"The teacher's server {self.endpoint} gives {len(entries)} tokens for one place where {k} were "
                    "asked for. Lower teacher_server_top_k, or raise the server's limit (vLLM: --max-logprobs)."
                )
            likeliest = sorted(entries.items(), key=lambda item: -item[1])[:k]
            ids[row], log_probs[row] = zip(*likeliest, strict=True)
            labels[row] = entries[question.ids[place]]
        self._check_log_probs(log_probs)
        return TopTokens(ids, log_probs, labels)

    def _check_log_probs(self, log_probs: np.ndarray) -> None:
        if np.isnan(log_probs).any():
            raise NonFiniteError(f"The teacher's server {self.endpoint} gives NaN for a log-probability.")
        if np.isneginf(log_probs).all(-1).any():
            raise ConfigError(
                f"The teacher's server {self.endpoint} gives -inf for every token of a place: these are no "
                "log-probabilities over the vocabulary."
            )
        mass = np.exp(log_probs.astype(np.float64)).sum(-1).max(initial=0.0)
        if not mass <= 1.01:  # bf16 logits are normalised no better
            raise ConfigError(
                f"The teacher's server {self.endpoint} gives probabilities that add up to {mass:.3g}: these are no "
                "log-probabilities over the vocabulary (vLLM: leave --logprobs-mode at raw_logprobs)."
            )


def _read_vllm(choice: Any, question: Question) -> list[dict[int, float]]:
    listed, sent = choice["prompt_logprobs"], question.ids
    _check_tokens(sent, choice.get("prompt_token_ids"), len(listed))
    for place in range(1, len(sent)):
        if str(sent[place]) not in listed[place]:
            raise ConfigError(_other_tokens(f"at place {place} stands another token than {sent[place]}"))
    return [
        {int(token): float(entry["logprob"]) for token, entry in listed[place].items()} for place in question.places
    ]


def _read_echo(choice: Any, question: Question) -> list[dict[int, float]]:
    listed = choice["logprobs"]
    tokens = [_token_id(token) for token in listed["tokens"][: len(question.ids)]]  # the generated token is behind them
    _check_tokens(question.ids, tokens, len(tokens))
    places = []
    for place in question.places:
        likeliest = {_token_id(token): float(x) for token, x in listed["top_logprobs"][place].items()}
        # Some servers list the token that stands here only where it is among the likeliest.
        places.append({question.ids[place]: float(listed["token_logprobs"][place]), **likeliest})
    return places


def _check_tokens(sent: list[int], read: list[int] | None, places: int) -> None:
    if read is not None and read != sent:
        differs = next(
            (i for i, (a, b) in enumerate(zip(sent, read, strict=False)) if a != b), min(len(sent), len(read))
        )
        raise ConfigError(
            _other_tokens(f"{len(sent)} were sent and {len(read)} read; they differ from place {differs} on")
        )
    if places != len(sent):
        raise ConfigError(_other_tokens(f"{len(sent)} were sent and {places} read"))


def _other_tokens(difference: str) -> str:
    return (
        f"The teacher's server read other tokens than it was sent: {difference}. It must take token ids as they are, "
        "without a token put before them and without cutting them off."
    )


def _token_id(token: str) -> int:
    if not token.startswith(TOKEN_ID):
        raise ValueError(f"tokens must be named by their ids, as {TOKEN_ID}123, got {token!r}")
    return int(token.removeprefix(TOKEN_ID))
