"""`use_vllm`: vLLM samples for the student in training, through TRL's `VLLMGeneration`."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..patching.patcher import base_of
from ..teachers.vocabulary import end_tokens
from ..trainers.config import LigerDistillConfig
from ..trainers.decoder import Tokens, until_the_end
from ..trainers.rows import AllowedIds


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

    def sample(self, prompts: Sequence[Tokens], step: int, most_tokens: int) -> list[Tokens]:
        """Sample a completion of at most so many tokens for each prompt, with the weights after `step` steps."""
        if step != self._step:
            self.engine.sync_weights()
            self._step = step
        self.engine.max_completion_length = most_tokens
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
