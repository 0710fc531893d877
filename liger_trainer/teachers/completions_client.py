"""A client of `/v1/completions` that asks for the likeliest tokens at each place of prompts given as token ids.

Two forms of the same question:

    vllm   `prompt_logprobs: k`, vLLM's own; per place {token id: {"logprob": x}}
    echo   `echo: true, logprobs: k` with `return_tokens_as_token_ids: true`; per place {"token_id:123": x}

Both send back the token that stands at each place among the others, so an answer about other tokens than
those that were sent is found out. One token is generated and not looked at: not every server takes `max_tokens: 0`.

The standard library's HTTP client does it: huggingface_hub brings one of two others, by its version.
"""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, NonFiniteError, TeacherServerError

logger = logging.getLogger(__name__)
PASSING = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which another attempt makes sense
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts; each is twice the one before
SHOWN = 300  # characters of an answer in a message
TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class ServerOptions:
    """How a server is asked. `url` ends before `/completions`."""

    url: str
    model: str
    protocol: str  # "vllm" or "echo"
    top_k: int
    timeout: float = 60.0  # seconds of silence
    retries: int = 5
    concurrency: int = 16
    api_key: str | None = None


class Question(NamedTuple):
    """A prompt, and the places in it, from 1, whose tokens' distributions are wanted."""

    ids: list[int]
    places: list[int]


class TopTokens(NamedTuple):
    """Of n places: the likeliest tokens, likeliest first, and the token that stands there."""

    ids: np.ndarray  # (n, K) int32
    log_probs: np.ndarray  # (n, K) fp32, natural
    label_log_prob: np.ndarray  # (n,) fp32


class CompletionsServer:
    """Answers questions, several at a time.

    Raises, when asked:
        ConfigError: the server refuses, speaks another protocol, gives fewer tokens than it was asked for, read other
            tokens than were sent, or gives numbers that are no log-probabilities.
        NonFiniteError: it gives NaN.
        TeacherServerError: it cannot be reached, or fails, after all attempts.
    """

    def __init__(self, options: ServerOptions, pause: Callable[[float], None] = time.sleep):
        self.options, self._pause = options, pause
        self.endpoint = options.url.rstrip("/") + "/completions"

    def ask(self, questions: Sequence[Question]) -> list[TopTokens]:
        """In the order of the questions. The first error ends them all."""
        if not questions:
            return []
        pool = ThreadPoolExecutor(min(self.options.concurrency, len(questions)))
        try:
            return list(pool.map(self._ask, questions))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, question: Question) -> TopTokens:
        answer = self._answer(json.dumps(self._request(question.ids)).encode())
        read = _read_vllm if self.options.protocol == "vllm" else _read_echo
        try:
            places = read(answer["choices"][0], question)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self.endpoint} answers in another form than teacher_server_protocol: {self.options.protocol} has "
                f"({type(error).__name__}: {error}): {_shown(answer)}"
            ) from None
        return self._top_tokens(places, question)

    def _request(self, ids: list[int]) -> dict[str, Any]:
        common = {"model": self.options.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        if self.options.protocol == "vllm":
            return {**common, "prompt_logprobs": self.options.top_k}
        return {**common, "echo": True, "logprobs": self.options.top_k, "return_tokens_as_token_ids": True}

    def _answer(self, body: bytes) -> Any:
        """The parsed answer to a request, after as many attempts as it takes."""
        for attempt in range(self.options.retries + 1):
            try:
                return self._parsed(self._sent(body))
            except _Passing as error:
                if attempt == self.options.retries:
                    attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    raise TeacherServerError(f"The teacher's server {self.endpoint}, {attempts}: {error}") from None
                seconds = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) if error.after is None else error.after
                logger.warning("%s: %s; again in %.1f s", self.endpoint, error, seconds)
                self._pause(seconds)
        raise AssertionError("unreachable")

    def _sent(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.options.api_key is not None:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        request = urllib.request.Request(self.endpoint, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.options.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip()
            message = f"HTTP {error.code} {error.reason}: {said[:SHOWN]}"
            if error.code in PASSING:
                raise _Passing(message, _seconds(error.headers.get("Retry-After"))) from None
            raise ConfigError(f"The teacher's server {self.endpoint} refuses: {message}") from None
        except TimeoutError:
            raise _Passing(f"no answer within {self.options.timeout:g} s") from None
        except urllib.error.URLError as error:
            silent = isinstance(error.reason, TimeoutError)
            raise _Passing(f"no answer within {self.options.timeout:g} s" if silent else str(error.reason)) from None
        except (http.client.HTTPException, OSError) as error:
            raise _Passing(f"the answer broke off: {type(error).__name__}: {error}") from None

    def _parsed(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            shown = text[:SHOWN].decode(errors="replace")
            raise ConfigError(f"The teacher's server {self.endpoint} answers with no JSON: {shown}") from None

    def _top_tokens(self, places: list[dict[int, float]], question: Question) -> TopTokens:
        k = self.options.top_k
        ids, log_probs = np.empty((len(places), k), np.int32), np.empty((len(places), k), np.float32)
        labels = np.empty(len(places), np.float32)
        for row, (place, known) in enumerate(zip(question.places, places, strict=True)):
            if len(known) < k:
                raise ConfigError(
                    f"The teacher's server {self.endpoint} gives {len(known)} tokens for one place where {k} were "
                    "asked for. Lower teacher_server_top_k, or raise the server's limit (vLLM: --max-logprobs)."
                )
            likeliest = sorted(known.items(), key=lambda item: -item[1])[:k]
            ids[row], log_probs[row] = zip(*likeliest, strict=True)
            labels[row] = known[question.ids[place]]
        self._check_log_probs(log_probs)
        return TopTokens(ids, log_probs, labels)

    def _check_log_probs(self, log_probs: np.ndarray) -> None:
        if np.isnan(log_probs).any():
            raise NonFiniteError(f"The teacher's server {self.endpoint} gives NaN for a log-probability.")
        mass = np.exp(log_probs.astype(np.float64)).sum(-1).max(initial=0.0)
        if not mass <= 1.01:  # bf16 logits are normalised no better
            raise ConfigError(
                f"The teacher's server {self.endpoint} gives probabilities that add up to {mass:.3g}: these are no "
                "log-probabilities over the vocabulary (vLLM: leave --logprobs-mode at raw_logprobs)."
            )


class _Passing(Exception):
    """A failure that may not come again. `after`: seconds that the server wants to be left alone."""

    def __init__(self, message: str, after: float | None = None):
        super().__init__(message)
        self.after = after


def _seconds(retry_after: str | None) -> float | None:
    """Of a header, where it is a number; it may be a date too."""
    try:
        return min(max(float(retry_after or ""), 0.0), 2 * LONGEST_PAUSE)
    except ValueError:
        return None


def _read_vllm(choice: Any, question: Question) -> list[dict[int, float]]:
    given, sent = choice["prompt_logprobs"], question.ids
    _check_tokens(sent, choice.get("prompt_token_ids"), len(given))
    for place in range(1, len(sent)):
        if str(sent[place]) not in given[place]:
            raise ConfigError(_other_tokens(f"at place {place} stands another token than {sent[place]}"))
    return [{int(token): float(entry["logprob"]) for token, entry in given[place].items()} for place in question.places]


def _read_echo(choice: Any, question: Question) -> list[dict[int, float]]:
    given = choice["logprobs"]
    n = len(question.ids)
    tokens = [_token_id(token) for token in given["tokens"][:n]]
    _check_tokens(question.ids, tokens, len(tokens))
    own, places = given["token_logprobs"], []
    for place in question.places:
        known = {_token_id(token): float(x) for token, x in given["top_logprobs"][place].items()}
        places.append({question.ids[place]: float(own[place]), **known})
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


def _other_tokens(how: str) -> str:
    return (
        f"The teacher's server read other tokens than it was sent: {how}. It must take token ids as they are, without "
        "a token put before them and without cutting them off."
    )


def _token_id(token: str) -> int:
    if not token.startswith(TOKEN_ID):
        raise ValueError(f"tokens must be named by their ids, as {TOKEN_ID}123, got {token!r}")
    return int(token.removeprefix(TOKEN_ID))


def _shown(answer: Any) -> str:
    text = json.dumps(answer)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
