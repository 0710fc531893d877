"""Who samples completions in training: transformers' `generate` on a model of this process, or vLLM."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, PreTrainedTokenizerBase
from trl.trainer.utils import pad

from ..common.console import announce
from ..common.replacements import replaced
from ..compat.deepspeed import whole_for_many_passes
from ..errors import ConfigError
from ..losses.model_parts import device_of
from ..patching.graphs.recorder import CudaRecorder
from ..patching.patcher import base_of
from ..teachers.vocabulary import end_tokens
from .config import LigerDistillConfig
from .options import AUTO, GENERATE, GRAPHS
from .rollouts import NotServed, Rollouts
from .rows import AllowedIds

Tokens = list[int]


def until_the_end(tokens: Sequence[int], ends: Sequence[int]) -> Tokens:
    """Return the tokens up to and with the first that ends a completion."""
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: first + 1])


class ModelSampler:
    """Samples by `generate`: left-padded prompts, KV cache, eval mode, no gradients.

    Args:
        args: the sampling fields and `temperature`.
        tokenizer: for the padding and end-of-sequence tokens.
        writable: the tokens that are sampled; heads are padded beyond them.
        autocast: the context of the run's mixed precision, entered once for all tokens, so that weights are cast once.
        reshards: whether FSDP2 frees gathered weights after a forward pass; see `_gathered`.
    """

    def __init__(
        self, args: LigerDistillConfig, tokenizer: PreTrainedTokenizerBase, writable: AllowedIds,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext, reshards: bool = True,
    ):  # fmt: skip
        self._args, self._tokenizer, self._writable, self._autocast = args, tokenizer, writable, autocast
        self._reshards = reshards
        self._rollouts: dict[int, tuple[Any, Rollouts | None]] = {}  # by the model: settings; None: generate samples

    def sample(self, model: Any, prompts: Sequence[Tokens], seed: int) -> list[Tokens]:
        """Sample a completion for each prompt, with the token that ended it.

        Args:
            model: a transformers or PEFT model, unwrapped. Afterwards its modules are in the modes they were in.
            prompts: token ids, none empty.
            seed: for the draws; the process's own random numbers stay as they were.

        Raises:
            ConfigError: `generation_kwargs` that GenerationConfig does not take, or that ask for several completions.
        """
        settings, device = self.settings(model), device_of(model)
        size = self._args.generation_batch_size or len(prompts)
        ends = settings.eos_token_id
        completions: list[Tokens] = []
        with (
            seeded(seed, device), in_eval_mode(model), no_router_logits(model), nothing_by_default(model),
            _gathered(model, self._reshards), torch.no_grad(), self._autocast(),
        ):  # fmt: skip
            rollouts = self._rollouts_of(model, settings, device)
            if rollouts is not None:
                try:
                    return rollouts.complete(prompts, seed, self._args.generation_batch_size)
                except NotServed as reason:
                    self._refuse(model, settings, str(reason))
            for at in range(0, len(prompts), size):
                completions += self._complete(model, prompts[at : at + size], settings, device)
        return [until_the_end(tokens, ends if isinstance(ends, list) else [ends]) for tokens in completions]

    def _rollouts_of(self, model: Any, settings: GenerationConfig, device: torch.device) -> Rollouts | None:
        """Return what decodes for a model in CUDA graphs, None where `generate` samples for it."""
        wanted = self._args.sampler
        if wanted == GENERATE or (wanted == AUTO and device.type != "cuda"):
            return None
        chosen = settings.to_diff_dict()
        if self._rollouts.get(id(model), (None,))[0] != chosen:
            try:
                recorder = CudaRecorder if device.type == "cuda" else None
                self._rollouts[id(model)] = chosen, Rollouts(model, settings, recorder)
            except NotServed as reason:
                self._refuse(model, settings, str(reason))
        return self._rollouts[id(model)][1]

    def _refuse(self, model: Any, settings: GenerationConfig, reason: str) -> None:
        if self._args.sampler == GRAPHS:
            raise ConfigError(f"sampler: graphs does not go with this model: {reason}.")
        announce(
            f"completions of {type(base_of(model)).__name__} are sampled by generate, not in CUDA graphs: {reason}."
        )
        self._rollouts[id(model)] = settings.to_diff_dict(), None

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

    def _complete(
        self, model: Any, prompts: Sequence[Tokens], settings: GenerationConfig, device: torch.device
    ) -> list[Tokens]:
        rows = [torch.tensor(prompt) for prompt in prompts]
        padding: Any = self._tokenizer.pad_token_id
        ids = pad(rows, padding_value=padding, padding_side="left")
        mask = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="left")
        sequences = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=settings)
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


def nothing_by_default(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Have `generate` do what its settings say and no more.

    What they leave open it would take from the model's own generation config, such as beams or a penalty.
    """
    return replaced(base_of(model), generation_config=GenerationConfig())


@contextlib.contextmanager
def _gathered(model: Any, reshards: bool) -> Iterator[None]:
    """Have FSDP2 gather a model's weights in the first forward pass, or ZeRO-3 before it, and keep them for all tokens.

    Else each token would gather them again, and ranks whose completions end earlier would leave the others waiting.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        with whole_for_many_passes(model):
            yield
        return
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    # `generate` calls the model within a PEFT model and not the root, whose own weights would stay shards.
    register_fsdp_forward_method(model, "generate")
    try:
        yield
    finally:
        del model.generate
        for unit in units:
            unit.set_reshard_after_forward(reshards, recurse=False)
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


class VLLMSampler:
    """Samples for the student by TRL's `VLLMGeneration`, in this process or on a server.

    Weights that have moved are sent over first; a patched model's parameters keep their names.

    Raises:
        ConfigError: vllm is not installed; when sampling, it gave a token that is not among `writable`.
    """

    def __init__(
        self, args: LigerDistillConfig, model: Any, accelerator: Any, tokenizer: PreTrainedTokenizerBase,
        writable: AllowedIds,
    ):  # fmt: skip
        from trl.generation import vllm_generation

        if not vllm_generation.is_vllm_available():
            raise ConfigError("use_vllm: vllm is not installed. `pip install trl[vllm]`, or set use_vllm to false.")
        self._ends, self._step = end_tokens(model, tokenizer), -1
        self.engine = vllm_generation.VLLMGeneration(
            model=model, accelerator=accelerator, processing_class=tokenizer,
            **_vllm_options(args, writable.others(base_of(accelerator.unwrap_model(model)))),
        )  # fmt: skip
        self._writable = writable

    def sample(self, prompts: Sequence[Tokens], step: int) -> list[Tokens]:
        """Sample a completion for each prompt with the weights after `step` optimizer steps."""
        if step != self._step:
            self.engine.sync_weights()
            self._step = step
        sampled = self.engine.generate(prompts=list(prompts), images=None, num_generations=1)[1]
        completions = [until_the_end(tokens, self._ends) for tokens in sampled]
        strange = {token for tokens in completions for token in tokens if token not in self._writable}
        if strange:
            raise ConfigError(
                f"vLLM sampled the token {min(strange)}, which student and teacher do not share, though a logit_bias "
                "of -100 was asked for. Leave logit_bias and whatever undoes it out of generation_kwargs, or set "
                "use_vllm to false."
            )
        return completions


BAN = -100.0  # the lowest that vLLM's server takes; of two equal logits the banned one is drawn once in 10^43


def _vllm_options(args: LigerDistillConfig, banned: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of VLLMGeneration, which are TRL's fields without `vllm_`."""
    assert not isinstance(args.generation_kwargs, str)
    extra = dict(args.generation_kwargs or {})
    if banned:
        extra["logit_bias"] = {**(extra.get("logit_bias") or {}), **dict.fromkeys(banned, BAN)}
    named = {
        name.removeprefix("vllm_"): value for name, value in vars(args).items() if name.startswith("vllm_")
    }  # mode, model_impl, server_port, ...
    plain = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        **named,
        **{name: getattr(args, name) for name in plain},
        "max_num_seqs": rows * args.vllm_tensor_parallel_size,
        "trust_remote_code": args.trust_remote_code,
        "generation_kwargs": extra,
        "logprobs": None,
    }
