"""The fields of LigerDistillConfig about completions that are sampled in training, in TRL's names."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from ..common.options import HTTP, option

NOTHING_SAMPLED = (
    "has no effect: the completions in the rows are distilled, nothing is generated in training. With `lmbda: 1.0` the "
    "student samples them."
)
WITHOUT_VLLM = "has no effect without `use_vllm: true`."


_NOT_SHOWN = "sampled completions are not logged; their length and the metrics on them are"
# Fields of TRL's DistillationConfig that nothing here reads, and why.
ELSEWHERE = {
    "chat_template_kwargs": "put them into a column chat_template_kwargs of the rows",
    "ds3_gather_for_generation": "models that DeepSpeed splits are not sampled from",
    "log_completions": _NOT_SHOWN,
    "log_unique_prompts": _NOT_SHOWN,
    "max_tool_calling_iterations": "tools are not called in training",
    "num_completions_to_print": _NOT_SHOWN,
}


def without_effect(name: str, sampled: bool, vllm: bool) -> str | None:
    """Why nothing reads this field where completions are sampled or not, by vLLM or not; None where something does."""
    if not sampled:
        return NOTHING_SAMPLED
    return WITHOUT_VLLM if name.startswith("vllm_") and not vllm else None


@dataclass
class SamplingConfig:
    """Whose completions are distilled, and how they are sampled. See docs/on-policy.md.

    Args:
        lmbda: the share of micro-batches whose completions the student samples (on-policy), in [0, 1]. The others take
            the completions of the dataset.
        seq_kd: the teacher samples the completions of those others.
        max_completion_length: the most tokens that are sampled. (`max_new_tokens` of a recipe is the length of the
            completions that are shown, another thing.)
        top_p, top_k, min_p, repetition_penalty: as in transformers' GenerationConfig. The sampling temperature is
            `temperature`.
        generation_kwargs: further fields of GenerationConfig, or of SamplingParams with vLLM; they go before the ones
            above.
        cache_implementation: transformers' cache for generation.
        generation_batch_size: prompts of a process that are completed at once. Default: all of an optimizer step.
        use_vllm, vllm_*: as in TRL's DistillationConfig: vLLM samples for the student, through TRL's VLLMGeneration.
    """

    lmbda: float = option(0.0, "Share of micro-batches whose completions the student samples.", ge=0, le=1)
    seq_kd: bool = option(False, "The other micro-batches take completions that the teacher samples.")
    max_completion_length: int = option(512, "Most tokens of a completion that is sampled in training.", ge=1)
    top_p: float = option(1.0, "Sample from the likeliest tokens that make up this probability.", gt=0, le=1)
    top_k: int = option(0, "Sample from so many likeliest tokens; 0: from all.", ge=0)
    min_p: float | None = option(None, "Least probability of a token, relative to the likeliest.", ge=0, le=1)
    repetition_penalty: float = option(1.0, "Above 1 makes tokens that have occurred less likely.", gt=0)
    generation_kwargs: dict[str, Any] | str | None = option(
        None, "Further fields of GenerationConfig, or of vLLM's SamplingParams."
    )
    cache_implementation: str | None = option(None, "transformers' kind of cache for generation.")
    generation_batch_size: int | None = option(
        None, "Prompts completed at once on a process; default: all of an optimizer step.", ge=1
    )
    use_vllm: bool = option(False, "vLLM samples for the student; needs vllm.")
    vllm_mode: str = option("colocate", "In this process, or on a server.", choices=["colocate", "server"])
    vllm_model_impl: str = option("vllm", "vLLM's implementation of the model: vllm or transformers.")
    vllm_enable_sleep_mode: bool = option(False, "vLLM gives its memory back while the student trains.")
    vllm_structured_outputs_regex: str | None = option(None, "Completions match this regular expression.")
    vllm_server_base_url: str | None = option(None, "Address of the server, in place of host and port.", text=HTTP)
    vllm_server_host: str = option("0.0.0.0", "Host of the server.")
    vllm_server_port: int = option(8000, "Port of the server.", ge=0)
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server.", gt=0)
    vllm_group_port: int = option(51216, "Port over which weights are sent to the server.", ge=0)
    vllm_gpu_memory_utilization: float = option(0.3, "Share of the GPU's memory for vLLM.", gt=0, le=1)
    vllm_max_model_length: int | None = option(None, "Most tokens of prompt and completion in vLLM.", ge=1)
    vllm_tensor_parallel_size: int = option(1, "GPUs that vLLM spreads the student over.", ge=1)

    def in_vain(self, sampled: bool) -> Iterator[str]:
        """The fields that are set and that nothing reads, each with the reason."""
        for item in fields(SamplingConfig):
            why = without_effect(item.name, sampled, self.use_vllm)
            if why and getattr(self, item.name) != item.default:
                yield f"{item.name} {why}"
