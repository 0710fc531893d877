"""Completions by models of this process: in CUDA graphs where a model can be served, else by transformers' `generate`.

Whatever wants a model to write asks a `Decoder`: sampling in training, the completions that a run shows, `chat`,
`generate`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedTokenizerBase
from trl.trainer.utils import pad

from ..common.console import announce
from ..common.replacements import replaced
from ..compat.deepspeed import whole_for_many_passes
from ..compat.modules import is_of_fsdp2, without_some_hooks
from ..errors import ConfigError
from ..losses.model_parts import device_of
from ..patching.graphs.recorder import CudaRecorder
from ..patching.patcher import base_of
from ..plugins import load
from ..teachers.vocabulary import end_tokens
from .config import LigerDistillConfig
from .options import AUTO, GENERATE, GRAPHS
from .rows import AllowedIds

Tokens = list[int]


class NotServed(Exception):
    """These completions are sampled by `generate`. The message says why."""


def until_the_end(tokens: Sequence[int], ends: Sequence[int]) -> Tokens:
    """Return the tokens up to and with the first that ends a completion."""
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: first + 1])


class Decoder:
    """Completes prompts. What is recorded for a model is kept for its next prompts.

    Args:
        sampler: see `SamplingConfig`.
        autocast: the context of a run's mixed precision, entered once for all tokens, so that weights are cast once.
        gathers: put all weights that FSDP2 or ZeRO-3 share out in place for the time, for many tokens. Without, a model
            that is larger than a GPU can write a few by `generate`.
    """

    def __init__(
        self, sampler: str = AUTO, autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        gathers: bool = True,
    ):  # fmt: skip
        self._sampler, self._autocast, self._gathers = sampler, autocast, gathers
        # by the model: settings, the most tokens of a completion, and what decodes; None: generate does
        self._rollouts: dict[int, tuple[dict[str, Any], int, Any]] = {}

    def complete(
        self, model: Any, prompts: Sequence[Tokens], settings: GenerationConfig, seed: int,
        at_once: int | None = None, most_tokens: int | None = None, streamer: Any = None, **images: Tensor,
    ) -> list[Tokens]:  # fmt: skip
        """Return a completion for each prompt, with the token that ended it.

        Args:
            model: a transformers or PEFT model, unwrapped. Afterwards its modules are in the modes they were in.
            prompts: token ids, none empty.
            settings: all that is asked for; nothing is taken from the model's own generation config.
            seed: for the draws; the process's own random numbers stay as they were.
            at_once: prompts that are completed together; default: all of them.
            most_tokens: of a completion, at most `settings.max_new_tokens`, which is the default. Graphs stay as they
                are where only this changes.
            streamer: transformers' object that gets the tokens of a single prompt as they come.
            images: what the model reads besides a single prompt's tokens.

        Raises:
            ConfigError: `sampler: graphs` with a model that cannot be served.
        """
        device, ends = device_of(model), settings.eos_token_id
        most = min(most_tokens or settings.max_new_tokens, settings.max_new_tokens)
        completions: list[Tokens] = []
        with (
            seeded(seed, device), in_eval_mode(model), no_router_logits(model),
            # or it would take what the settings leave open from the model's own, such as beams or a penalty
            replaced(base_of(model), generation_config=GenerationConfig()),
            _gathered(model) if self._gathers else contextlib.nullcontext(), torch.no_grad(), self._autocast(),
        ):  # fmt: skip
            rollouts = self._rollouts_of(model, settings, device)
            if rollouts is not None:
                try:
                    return rollouts.complete(prompts, seed, at_once, most, _teller(streamer, prompts))
                except NotServed as reason:
                    self._refuse(model, settings, str(reason))
            size = at_once or len(prompts)
            with replaced(settings, max_new_tokens=most):
                for at in range(0, len(prompts), size):
                    completions += _generated(model, prompts[at : at + size], settings, device, streamer, images)
        return [until_the_end(tokens, ends if isinstance(ends, list) else [ends]) for tokens in completions]

    def _rollouts_of(self, model: Any, settings: GenerationConfig, device: torch.device) -> Any:
        """Return what decodes for a model in CUDA graphs, None where `generate` does."""
        if self._sampler == GENERATE or (self._sampler == AUTO and device.type != "cuda"):
            return None
        # graphs hold how tokens are drawn, and a length up to which they may be asked for less
        chosen = _but_length(settings)
        known = self._rollouts.get(id(model))
        if known is None or known[0] != chosen or known[1] < settings.max_new_tokens:
            try:
                recorder = CudaRecorder if device.type == "cuda" else None
                made = load("rollouts").Rollouts(model, settings, recorder)
                self._rollouts[id(model)] = chosen, settings.max_new_tokens, made
            except NotServed as reason:
                self._refuse(model, settings, str(reason))
        return self._rollouts[id(model)][2]

    def _refuse(self, model: Any, settings: GenerationConfig, reason: str) -> None:
        if self._sampler == GRAPHS:
            raise ConfigError(f"sampler: graphs does not go with this model: {reason}.")
        _announce_once(
            f"completions of {type(base_of(model)).__name__} are sampled by generate, not in CUDA graphs: {reason}."
        )
        self._rollouts[id(model)] = _but_length(settings), settings.max_new_tokens, None


# a run has several decoders, each of which would say it of the same model
_announce_once = functools.cache(announce)


def _but_length(settings: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in settings.to_diff_dict().items() if name != "max_new_tokens"}


class ModelSampler:
    """Samples from models of this process as the configuration says (`Decoder`).

    Args:
        args: the sampling fields and `temperature`.
        tokenizer: for the padding and end-of-sequence tokens.
        writable: the tokens that are sampled; heads are padded beyond them.
        decoder: keeps what is recorded for a model; default: one for `args.sampler`.
    """

    def __init__(
        self, args: LigerDistillConfig, tokenizer: PreTrainedTokenizerBase, writable: AllowedIds,
        decoder: Decoder | None = None,
    ):  # fmt: skip
        self._args, self._tokenizer, self._writable = args, tokenizer, writable
        self._decoder = decoder or Decoder(args.sampler)

    def sample(self, model: Any, prompts: Sequence[Tokens], seed: int, most_tokens: int | None = None) -> list[Tokens]:
        """Sample a completion for each prompt, with the token that ended it.

        Args:
            model: a transformers or PEFT model, unwrapped. Afterwards its modules are in the modes they were in.
            prompts: token ids, none empty.
            seed: for the draws; the process's own random numbers stay as they were.
            most_tokens: of a completion, at most `max_completion_length`, which is the default.

        Raises:
            ConfigError: `generation_kwargs` that GenerationConfig does not take, or that ask for several completions;
                `sampler: graphs` with a model that cannot be served.
        """
        at_once = self._args.generation_batch_size
        return self._decoder.complete(model, prompts, self.settings(model), seed, at_once, most_tokens)

    def settings(self, model: Any) -> GenerationConfig:
        args = self._args
        assert not isinstance(args.generation_kwargs, str)  # transformers parses JSON in its dict fields
        chosen = {
            "do_sample": True, "use_cache": True, "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty, "cache_implementation": args.cache_implementation,
            "pad_token_id": self._tokenizer.pad_token_id, "bos_token_id": self._tokenizer.bos_token_id,
            "eos_token_id": end_tokens(model, self._tokenizer), "disable_compile": True,
        }  # fmt: skip
        settings = GenerationConfig()
        unknown = settings.update(**{**chosen, **(args.generation_kwargs or {})})
        settings.suppress_tokens = sorted({*self._writable.others(model), *(settings.suppress_tokens or ())}) or None
        if unknown:
            raise ConfigError(f"generation_kwargs: GenerationConfig has no {', '.join(sorted(unknown))}.")
        if (settings.num_return_sequences or 1) != 1:
            raise ConfigError("generation_kwargs: num_return_sequences must be 1, a completion for each prompt.")
        return settings


def _teller(streamer: Any, prompts: Sequence[Tokens]) -> Callable[[Tokens, bool], None] | None:
    """Return what hands a completion on to transformers' streamer, which wants the prompt first and then each token."""
    if streamer is None:
        return None
    told = 0

    def tell(completion: Tokens, ended: bool) -> None:
        nonlocal told
        if not told:
            streamer.put(torch.tensor(prompts))
        for token in completion[told:]:
            streamer.put(torch.tensor([token]))
        told = len(completion)
        if ended:
            streamer.end()

    return tell


def _generated(
    model: Any, prompts: Sequence[Tokens], settings: GenerationConfig, device: torch.device, streamer: Any,
    images: dict[str, Tensor],
) -> list[Tokens]:  # fmt: skip
    """Complete prompts by `generate`: padded on the left, with a KV cache."""
    # on the left, so that what is written stands behind each prompt
    rows = [torch.tensor(prompt) for prompt in prompts]
    padding: Any = settings.pad_token_id
    ids = pad(rows, padding_value=padding, padding_side="left")
    mask = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="left")
    sequences = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=settings, streamer=streamer,
        **images,
    )  # fmt: skip
    return sequences[:, ids.shape[1] :].tolist()


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and gradient checkpointing, which transformers' layers do only in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _gathered(model: Any) -> Iterator[None]:
    """Have all weights in place for all tokens where FSDP2 or ZeRO-3 shares them out.

    Else each token would gather them again, and ranks whose completions end earlier would leave the others waiting.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        with whole_for_many_passes(model):
            yield
        return
    try:
        for unit in units:
            unit.unshard()
        # Its hooks would only wait for what is there, and a graph records no host that waits.
        with without_some_hooks(model.modules(), lambda key, hook: is_of_fsdp2(hook)):
            yield
    finally:
        for unit in units:
            unit.reshard()


def no_router_logits(model: Any) -> contextlib.AbstractContextManager[None]:
    """Have a mixture of experts return no router logits.

    With them it computes its auxiliary loss in each forward, and transformers 5.23 cannot for a batch with padding and
    a KV cache: the mask is longer than the tokens of the pass.
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return contextlib.nullcontext()
    return replaced(config, output_router_logits=False)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the CPU's and this device's random numbers for a while; afterwards they go on as before."""
    devices = [] if device.type in ("cpu", "mps") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(seed)
        yield
