"""Requests to servers of `/v1/completions`: several at a time, each with as many attempts as it takes."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx
import numpy as np

from ...errors import ConfigError, NonFiniteError, TeacherServerError
from ...secrets import SECRET, redact, remember

logger = logging.getLogger(__name__)
TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which another attempt makes sense
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts; each is twice the one before
LONGEST_RETRY_AFTER = 60.0  # seconds; a server that asks for more is asked again after these
SHOWN = 300  # characters of an answer in a message


@dataclass(frozen=True)
class ConnectionOptions:
    """Where a server is, or several are that serve the same model, and how patient their client is. Each `url` ends
    before `/completions`."""

    url: str | Sequence[str]
    model: str
    timeout: float = 60.0  # seconds of silence
    retries: int = 5
    concurrency: int = 16
    api_key: str | None = None


class _Server:
    """One of the servers, and how it does: what is under way there, and until when it gets no requests."""

    def __init__(self, url: str):
        try:
            self.url = httpx.URL(url.rstrip("/") + "/completions")
        except httpx.InvalidURL as error:
            raise ConfigError(f"teacher_server_base_url is not a URL: {error}.") from None
        self.name = _shown_url(self.url)
        self.under_way, self.spared_until = 0, 0.0


class Connection:
    """Servers of `/v1/completions`. Each request goes to the one with the fewest under way.

    Where one fails, another gets the request at once, and the one that failed no further ones for a while, unless all
    have failed. An attempt is over when every server has failed.

    Raises:
        ConfigError: the address is not a URL; when asked, the server refuses or redirects.
        TeacherServerError: when asked, it cannot be reached, or fails, after all attempts.
    """

    def __init__(self, options: ConnectionOptions, pause: Callable[[float], None] = time.sleep):
        self.options, self._pause = options, pause
        urls = [options.url] if isinstance(options.url, str) else list(options.url)
        if len(set(urls)) < len(urls):
            raise ConfigError("teacher_server_base_url names a server twice: each of them may come once.")
        self.servers = [_Server(url) for url in urls]
        self._lock, self._asked = threading.Lock(), threading.local()
        # Redirects are never followed: they would carry the prompts, and perhaps the key, to another host.
        self._client = httpx.Client(
            headers={} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"},
            timeout=options.timeout,
            limits=httpx.Limits(max_connections=options.concurrency),
            follow_redirects=False,
        )

    @property
    def endpoint(self) -> str:
        """The server that this thread asked last, for messages; all of them, before it has asked any."""
        return getattr(self._asked, "name", None) or ", ".join(server.name for server in self.servers)

    def for_each(self, ask: Callable[[Any], Any], questions: Iterable[Any]) -> list[Any]:
        """Return the answers in the order of the questions, asked several at a time. The first error ends them all."""
        questions = list(questions)
        if not questions:
            return []
        # made for each batch, so that nothing outlives it: an error would else leave threads that still ask
        pool = ThreadPoolExecutor(min(self.options.concurrency, len(questions)))
        try:
            return list(pool.map(ask, questions))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, request: dict[str, Any], most: int, only: _Server | None = None) -> Any:
        """Return the parsed answer, after as many attempts as it takes.

        Args:
            most: bytes; a longer answer is refused, as it would fill the memory.
            only: the one server to ask; None: any of them.
        """
        servers = self.servers if only is None else [only]
        for attempt in range(self.options.retries + 1):
            try:
                return self._from_any(servers, request, most)
            except _TransientError as error:
                if attempt == self.options.retries:
                    attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    others = f" The other {len(servers) - 1} failed too." if len(servers) > 1 else ""
                    raise TeacherServerError(
                        f"The teacher's server {self.endpoint}, {attempts}: {error}{others}"
                    ) from None
                seconds = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) if error.after is None else error.after
                logger.warning("%s: %s; again in %.1f s", self.endpoint, error, seconds)
                self._pause(seconds)
        raise AssertionError("unreachable")

    def _from_any(self, servers: Sequence[_Server], request: dict[str, Any], most: int) -> Any:
        """Return the answer of the first server that has one. Raises what the last one failed by."""
        left = list(servers)
        while True:
            server = self._taken(left)
            try:
                return self._sent(server, request, most)
            except _TransientError as error:
                left.remove(server)
                # also where it did not ask for a pause: the others are tried first
                server.spared_until = time.monotonic() + (LONGEST_PAUSE if error.after is None else error.after)
                if not left:
                    raise
                logger.warning("%s: %s; another server is asked", server.name, error)
            finally:
                with self._lock:
                    server.under_way -= 1

    def _taken(self, servers: Sequence[_Server]) -> _Server:
        """Choose one that is not being spared, if there is one, with the fewest requests under way, and count this."""
        with self._lock:
            now = time.monotonic()
            server = min(servers, key=lambda each: (each.spared_until > now, each.under_way))
            server.under_way += 1
        self._asked.name = server.name
        return server

    def quoted(self, text: str | bytes) -> str:
        """Shorten what a server said, and hide the key: some servers quote it."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        if self.options.api_key:
            text = text.replace(self.options.api_key, SECRET)
        text = redact(text).strip()
        return text if len(text) <= SHOWN else text[:SHOWN] + " ..."

    def _sent(self, server: _Server, request: dict[str, Any], most: int) -> Any:
        try:
            with self._client.stream("POST", server.url, json=request) as response:
                content = self._body(response, request, most)
        except httpx.TimeoutException:
            raise _TransientError(f"no answer within {self.options.timeout:g} s") from None
        except httpx.RequestError as error:
            raise _TransientError(self.quoted(f"{type(error).__name__}: {error}")) from None
        if not response.is_success:
            raise self._refusal(response, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise _TransientError(f"the answer is no JSON: {self.quoted(content)}") from None

    def _body(self, response: httpx.Response, request: dict[str, Any], most: int) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > most:
                raise ConfigError(
                    f"The teacher's server {self.endpoint} answers with more than {most:,} bytes to a prompt of "
                    f"{len(request['prompt'])} tokens: this is no answer to the question."
                )
        return bytes(content)

    def _refusal(self, response: httpx.Response, content: bytes) -> Exception:
        message = f"HTTP {response.status_code} {response.reason_phrase}: {self.quoted(content)}"
        if response.status_code in TRANSIENT:
            return _TransientError(message, _retry_after(response.headers.get("Retry-After")))
        if response.has_redirect_location:
            target = _shown_url(response.url.join(response.headers["Location"]))
            return ConfigError(
                f"The teacher's server {self.endpoint} redirects to {target} (HTTP {response.status_code}). Redirects "
                "are not followed: if you trust that server, set teacher_server_base_url to it."
            )
        return ConfigError(f"The teacher's server {self.endpoint} refuses: {message}")


class _TransientError(Exception):
    """A failure that may not come again. `after`: seconds that the server wants to be spared."""

    def __init__(self, message: str, after: float | None = None):
        super().__init__(message)
        self.after = after


def _retry_after(header: str | None) -> float | None:
    """Read a `Retry-After` header, seconds or an HTTP date, as seconds from now; None where it is neither."""
    try:
        seconds = float(header or "")
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    if seconds != seconds:  # "nan" is a float, and no pause
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _shown_url(url: httpx.URL) -> str:
    """Return a URL for messages, without user, password and query."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


def key_in(variable: str | None) -> str | None:
    """Return the API key that an environment variable holds; None without a name.

    Raises:
        ConfigError: there is no such variable, or it is empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # a key read from a file often ends with a newline
    if not key:
        raise ConfigError(f"teacher_server_api_key_env: the environment variable {variable} is not set.")
    remember(key)
    return key


# A client of `/v1/completions` that asks for the likeliest tokens at each place of prompts given as token ids.
#
# Two forms of the same question:
#
# vllm   `prompt_logprobs: k`, vLLM's own; per place {token id: {"logprob": x}}
# echo   `echo: true, logprobs: k` with `return_tokens_as_token_ids: true`; per place {"token_id:123": x}
#
# Both also send back the token at each place, so the client notices when the server read other tokens than it was sent.
# One token is generated and ignored: not every server takes `max_tokens: 0`.


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

    def ask(self, questions: Sequence[Question]) -> list[TopTokens]:
        """Return the answers in the order of the questions. The first error ends them all."""
        return self.for_each(self._ask, questions)

    def ask_each(self, question: Question) -> dict[str, TopTokens]:
        """Return every server's answer to one question, by the servers' names."""
        answers = self.for_each(lambda server: self._ask(question, server), self.servers)
        return {server.name: answer for server, answer in zip(self.servers, answers, strict=True)}

    def _ask(self, question: Question, only: Any = None) -> TopTokens:
        entries = (len(question.ids) + 1) * (self.options.top_k + 1)
        # more than that is no answer, and would fill the memory before it is parsed
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
        self._check_log_probs(log_probs)  # a server that gives logits, or scores of its sampler, shows here
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
