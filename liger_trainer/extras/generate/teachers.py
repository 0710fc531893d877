"""Who samples: a model of this process, in CUDA graphs or by `generate`, or a server of `/v1/completions`."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from ...common.weights import load_merged
from ...errors import ConfigError
from ...secrets import remember_settings
from ...teachers.fingerprints import sampled_fingerprint
from ...teachers.vocabulary import end_tokens
from ...trainers.decoder import Decoder, ModelSampler
from ...trainers.rows import AllowedIds
from ..teachers.connection import Connection, ConnectionOptions, key_in
from .options import GenerateOptions

Tokens = list[int]
BYTES_PER_TOKEN = 64  # of a server's answer; a token of text is a few, escaped up to 6 bytes a character


class Answer(NamedTuple):
    """A sampled text, its tokens with the one that ended it, and whether one did."""

    text: str
    tokens: int
    finished: bool


Ask = Callable[[Sequence[Tokens], int, int, Sequence[int]], list[Answer]]
"""Called with prompts, a seed, the most tokens to sample, and tokens that end a text besides the model's own."""


class LocalTeacher:
    """A model that is loaded here: on the GPUs if there are any, spread over them if it needs several."""

    def __init__(self, path: str, tokenizer: Any, options: GenerateOptions):
        where: Any = {"device_map": "auto"} if torch.cuda.is_available() else {}
        dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        try:
            self._model: Any = load_merged(
                AutoModelForCausalLM.from_pretrained, path, dtype=dtype, revision=options.revision or "main",
                trust_remote_code=options.trust_remote_code, **where,
            )  # fmt: skip
        except ConfigError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"TEACHER: {path} cannot be loaded: {error}") from error
        self._model.eval()
        self._tokenizer, self._options = tokenizer, options
        # prompts of a batch are padded; masks hide which token it is
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        _check_context(self._model, options)
        self._writable, self._decoder = AllowedIds(max(tokenizer.get_vocab().values()) + 1), Decoder()

    @property
    def fingerprint(self) -> str | None:
        return sampled_fingerprint(self._model.state_dict().items())

    def ask(self, prompts: Sequence[Tokens], seed: int, most: int, ends: Sequence[int] = ()) -> list[Answer]:
        stops = sorted({*end_tokens(self._model, self._tokenizer), *ends})
        sampled = self._sampler(most, stops).sample(self._model, prompts, seed)
        return [self._answer(ids, new, stops) for ids, new in zip(prompts, sampled, strict=True)]

    def _answer(self, prompt: Tokens, sampled: Tokens, stops: Sequence[int]) -> Answer:
        # else max_new_tokens ended it
        finished = bool(sampled) and sampled[-1] in stops
        return Answer(self._text(prompt, sampled[:-1] if finished else sampled), len(sampled), finished)

    def _sampler(self, most: int, stops: list[int]) -> ModelSampler:
        greedy = self._options.temperature == 0
        args: Any = SimpleNamespace(
            # 0 is no temperature for `generate`; do_sample says it
            max_completion_length=most, temperature=1.0 if greedy else self._options.temperature,
            top_p=self._options.top_p, top_k=self._options.top_k, min_p=None, repetition_penalty=1.0,
            cache_implementation=None, generation_batch_size=None,
            generation_kwargs={"eos_token_id": stops, **({"do_sample": False, "top_k": None} if greedy else {})},
        )  # fmt: skip
        return ModelSampler(args, self._tokenizer, self._writable, self._decoder)

    def _text(self, prompt: Tokens, sampled: Tokens) -> str:
        """Return what the tokens add to the prompt's text: some tokenizers write a word's space before it."""
        # the prompt may change where its last token is written otherwise next to another: then the sampled tokens by
        # themselves
        before = self._tokenizer.decode(prompt, skip_special_tokens=True)
        whole = self._tokenizer.decode([*prompt, *sampled], skip_special_tokens=True)
        return (
            whole.removeprefix(before)
            if whole.startswith(before)
            else self._tokenizer.decode(sampled, skip_special_tokens=True)
        )


def _check_context(model: Any, options: GenerateOptions) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    asked = options.max_prompt_tokens + options.max_new_tokens
    if most is not None and asked > most:
        raise ConfigError(
            f"max_prompt_tokens + max_new_tokens is {asked:,}, and the teacher reads at most {most:,} tokens. "
            "Lower one of them."
        )


class ServedTeacher:
    """A server of `/v1/completions`, such as vLLM's: prompts go out as token ids, each request with its own seed.

    Only fields that every such server knows are sent; `top_k` and `stop_token_ids`, which vLLM and others add, where
    they are needed.
    """

    fingerprint = None

    def __init__(self, teacher: str, options: GenerateOptions):
        assert options.teacher_server_base_url is not None
        remember_settings("teacher_server_base_url", options.teacher_server_base_url)
        self._options = options
        self._server = Connection(
            ConnectionOptions(
                url=options.teacher_server_base_url,
                model=options.teacher_server_model or teacher,
                timeout=options.teacher_server_timeout,
                retries=options.teacher_server_retries,
                concurrency=options.teacher_server_concurrency,
                api_key=key_in(options.teacher_server_api_key_env),
            )
        )

    def ask(self, prompts: Sequence[Tokens], seed: int, most: int, ends: Sequence[int] = ()) -> list[Answer]:
        def one(numbered: tuple[int, Tokens]) -> Answer:
            number, ids = numbered
            request = self._request(ids, seed + number, most, ends)
            return self._answer(self._server.post(request, 2**20 + most * BYTES_PER_TOKEN))

        return self._server.for_each(one, enumerate(prompts))

    def _request(self, ids: Tokens, seed: int, most: int, ends: Sequence[int]) -> dict[str, Any]:
        options = self._options
        request = {
            "model": self._server.options.model, "prompt": ids, "max_tokens": most, "seed": seed % 2**31,
            "temperature": options.temperature, "top_p": options.top_p,
        }  # fmt: skip
        if options.top_k:
            request["top_k"] = options.top_k
        if ends:
            request["stop_token_ids"] = list(ends)
        return request

    def _answer(self, answer: Any) -> Answer:
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            finished = {"stop": True, "length": False}[choice["finish_reason"]]
            return Answer(_writable(str(choice["text"])), int(usage.get("completion_tokens") or 0), finished)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._server.endpoint} answers in another form than /v1/completions has: expected a text and the "
                f"finish_reason stop or length ({type(error).__name__}: {error}): {self._server.quoted(str(answer))}"
            ) from None


def _writable(text: str) -> str:
    """Return the text without halves of surrogate pairs, which JSON can hold and files cannot."""
    return text.encode(errors="replace").decode()
