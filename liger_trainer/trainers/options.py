"""The fields of LigerConfig and LigerDistillConfig by what they are about, and what they exclude. Imports no torch."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from ..common.options import HTTP, Condition, OptionValues, equals, on, option
from ..teachers.config import SAMPLES

ALLOW_MISSING_WEIGHTS = (
    "Load models from files that lack weights, or have others: those missing or of another shape are drawn at random."
)
ALPACA_PROMPTS = ("instruction", "stanford", "stanford_text")


AUTO, MODEL = "auto", "model"
GRAPHS, GENERATE = "graphs", "generate"


@dataclass
class RowsConfig:
    """What is learned of rows, besides TRL's `assistant_only_loss` and `completion_only_loss`.

    Args:
        supervised_part: what is learned of each message, or of each answer with `assistant_only_loss`: "message", all
            of it with its header, or "content", from its content to the end of its turn. Any chat template will do, if
            it renders a message alike whatever follows. Default: every token, or what the template marks as generated.
        alpaca_prompt: what becomes of a row of Alpaca. "instruction": the user's message is the instruction, with the
            input on the next line. "stanford": it is Stanford Alpaca's prompt around the two. "stanford_text": that
            prompt and the output are plain text, without a chat template.
        allow_unwritten_fields: learn chats whose tools, tool calls or thoughts the chat template leaves out, without
            them. Default: such a row is an error.
        weight_column: the column with each training row's weight, a number of at least 0. It multiplies the loss of
            the row's tokens; the divisor stays the number of supervised tokens (trainers/row_preparation.py).
    """

    supervised_part: str | None = option(
        None,
        "Learn of each message (with assistant_only_loss, of each answer) all with its header, or from the content to "
        "the end of the turn; works with chat templates that mark nothing.",
        choices=["message", "content"],
        conflicts=[
            (
                equals("supervised_part", "message") & ~on("assistant_only_loss"),
                "without `assistant_only_loss: true` the whole of every message is learned anyway.",
            ),
            (
                on("supervised_part") & SAMPLES,
                "does not go with completions that are sampled, which begin behind the header of an answer; leave it "
                "out.",
            ),
        ],
    )
    alpaca_prompt: str = option(
        "instruction",
        "Of Alpaca's rows the user's message is the instruction and the input, or Stanford Alpaca's prompt around "
        "them; or that prompt is plain text.",
        choices=ALPACA_PROMPTS,
    )
    allow_unwritten_fields: bool = option(
        False,
        "Learn chats without the fields that the chat template leaves out (tools, tool_calls, reasoning_content, "
        "thinking, ...); otherwise they are an error of the data.",
    )
    weight_column: str | None = option(
        None,
        "Column with a number of at least 0 for each training row, which multiplies the loss of its tokens; what the "
        "loss is divided by stays the number of tokens. Evaluations are not weighted.",
        conflicts=[
            (
                on("weight_column") & SAMPLES,
                "does not go with completions that are sampled, which belong to no row; leave one of them out.",
            ),
        ],
    )


@dataclass
class ImagesConfig:
    """What is learned of rows with images, and which part of a vision-language model.

    Args:
        learn_image_tokens: learn the tokens that hold the places of an image too, where labels have them. TRL's
            collator puts them there when every token of a chat is learned. Default: they are left out, in fine-tuning
            and in distillation. With TRL's own SFTConfig labels stay as TRL makes them.
    """

    learn_image_tokens: bool = option(
        False,
        "Learn the tokens that hold the places of an image too, as TRL does where every token of a chat is learned.",
    )
    freeze_vision_tower: bool = option(
        False,
        "Train nothing of a vision-language model's vision tower, adapters included, and run it without gradients.",
    )


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

    What the texts of the fields leave open:

    Args:
        lmbda: the other micro-batches take the completions of the dataset, or with `seq_kd` the teacher's.
        max_completion_length: the most tokens that are sampled. (`max_new_tokens` of a recipe is the length of the
            completions that are shown, another thing.)
        top_p, top_k, min_p, repetition_penalty: as in transformers' GenerationConfig. The sampling temperature is
            `temperature`.
        generation_kwargs: further fields of GenerationConfig, or of SamplingParams with vLLM; they go before the ones
            above.
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
    sampler: str = option(
        AUTO,
        "What samples in this process: CUDA graphs of the model's steps, transformers' generate, or auto: graphs on a "
        "GPU for models that allow it.",
        choices=[AUTO, GRAPHS, GENERATE],
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

    def unused_fields(self, sampled: bool) -> Iterator[str]:
        """The fields that are set and that nothing reads, each with the reason."""
        for item in fields(SamplingConfig):
            why = without_effect(item.name, sampled, self.use_vllm)
            if why and getattr(self, item.name) != item.default:
                yield f"{item.name} {why}"


ALWAYS, NEVER = "always", "never"
FAST = "fast"
MEMORY = {FAST: 0, "balanced": 2, "lean": 1}  # in every n-th decoder layer gate and up are made again; 0: in none


def _checkpoints(options: OptionValues) -> bool:
    """transformers 5.23 calls gradient_checkpointing activation_checkpointing; what has the new name counts."""
    renamed = options.values.get("activation_checkpointing")
    return bool(options["gradient_checkpointing"] if renamed is None else renamed)


_CHECKPOINTS = Condition(
    ("gradient_checkpointing",),
    _checkpoints,
    (~equals("gradient_checkpointing", False) & ~equals("activation_checkpointing", False)).rule,
)
_REMAKES = equals("memory", *(name for name in MEMORY if name != FAST))


@dataclass
class StepConfig:
    """How a step is computed. None of these fields changes what is learned.

    Args:
        attention: what reads rows in which several documents stand (packing, padding-free batches). "auto": attention
            over each document by its length, for models that run PyTorch's or eager attention; other
            implementations, such as flash_attention_2, stay. "model": the model's own implementation in any case,
            which masks the row with a matrix of its length squared.
        cuda_graphs: whether decoder layers, of student and teacher, are recorded in CUDA graphs and replayed, so that
            the GPU does not wait for the host. "auto": where the layers are small enough to profit and nothing is
            against it. "always": layers of any size; what is against it is an error. "never".
        memory: in how many decoder layers gate(x) and up(x) of the MLP, the largest tensors of a layer, are made again
            in the backward instead of being kept. "fast": in none. "balanced": in every second. "lean": in all. Where
            no MLP can, that is an error. Experts of a mixture keep theirs.
        vocab_parallel: whether the rows of the output head, of student and teacher, stay on their ranks under FSDP2
            while the loss is computed. "auto": where that moves fewer numbers than gathering the head, and nothing is
            against it. "always": what is against it is an error. "never". See docs/extras.md.
    """

    attention: str = option(
        AUTO,
        "What reads packed rows: auto takes each document by its length where the model runs sdpa or eager attention; "
        "model leaves the model's own attention, whose mask is as large as the row's length squared.",
        choices=[AUTO, MODEL],
    )
    cuda_graphs: str = option(
        AUTO,
        "Record the decoder layers of student and teacher in CUDA graphs once a shape comes again: auto where they are "
        "small enough that the GPU would wait for the host; always; never.",
        choices=[AUTO, ALWAYS, NEVER],
    )
    memory: str = option(
        FAST,
        "Make the MLP's gate(x) and up(x) again in the backward instead of keeping them: fast in no decoder layer; "
        "balanced in every second; lean in all.",
        choices=MEMORY,
        conflicts=[
            (
                _REMAKES & _CHECKPOINTS,
                "has no effect with gradient_checkpointing, which makes whole layers again; set it to false.",
            ),
            (_REMAKES & on("torch_compile"), "has no effect with torch_compile, which decides that itself."),
        ],
    )
    vocab_parallel: str = option(
        NEVER,
        "Keep the rows of the output head on their ranks under FSDP2, and combine the loss over the ranks: auto where "
        "that moves less than gathering the head; always; never.",
        choices=[AUTO, ALWAYS, NEVER],
    )


QAT, TRAINS_HEAD = on("qat"), on("mtp_loss_weight")
INT4, INT8, NVFP4 = "int4", "int8", "nvfp4"


@dataclass
class QatConfig:
    """Quantisation-aware training.

    Args:
        qat: the format of torchao in which the linear layers will be used. Each step computes with the quantised
            weights and moves the weights behind them, which are what is saved. "int4": groups of `qat_group_size`
            inputs; "int8": a scale for each output; "nvfp4": groups of 16 with scales in fp8, emulated.
        qat_group_size: see `qat`.
    """

    qat: str | None = option(
        None,
        "Compute each step with the linear layers' weights as torchao quantises them, and train the weights behind "
        "them, which are what is saved.",
        choices=[INT4, INT8, NVFP4],
    )
    qat_group_size: int = option(32, "Weights of an output that share a scale.", needs=equals("qat", INT4), ge=1)


@dataclass
class MtpConfig:
    """The head for multi-token prediction that a model's files have beside it (Qwen3.5's, DeepSeek-V3's).

    Args:
        mtp_loss_weight: the head is trained beside the model, which learns what it would without: its loss, times this
            weight, has no gradient with respect to the model, and is no part of the loss that is logged. See
            docs/extras.md.
    """

    mtp_loss_weight: float = option(
        0.0,
        "Train the head for multi-token prediction in the model's files beside the model, by its loss times this, "
        "0.1 or so; 0: leave it as it was.",
        ge=0,
        conflicts=[
            (TRAINS_HEAD & SAMPLES, "does not go with completions that are sampled; leave one of them out."),
            (TRAINS_HEAD & QAT, "does not go with qat, which would quantise the head; leave one of them out."),
            (TRAINS_HEAD & on("torch_compile"), "does not go with torch_compile; set it to false."),
            (
                TRAINS_HEAD & equals("vocab_parallel", AUTO, ALWAYS),
                "does not go with vocab_parallel, which is FSDP2's; leave it out.",
            ),
        ],
    )


ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit")  # bitsandbytes' AdamW in `optim`
# They change weights while gradients are still being computed.
UPDATING_IN_BACKWARD = (
    "lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
    "apollo_adamw_layerwise",
)  # fmt: skip


def updating_in_backward(args: Any) -> str | None:
    """Return the name of the optimizer of TrainingArguments if it updates weights in its backward."""
    optim = str(getattr(args.optim, "value", args.optim))
    return optim if optim in UPDATING_IN_BACKWARD else None


STOP, SKIP = "stop", "skip_step"
POLICIES = (STOP, SKIP)


@dataclass
class NonFiniteConfig:
    """What is done about a loss, gradient norm, weight or teacher that is NaN or infinite."""

    on_non_finite: str = option(
        STOP,
        "At a loss, gradient or weight that is NaN or infinite: stop, or skip_step, which leaves such steps out.",
        choices=POLICIES,
        conflicts=[
            (
                equals("on_non_finite", SKIP) & equals("optim", *UPDATING_IN_BACKWARD),
                "skip_step leaves the optimizer's step out, but this optimizer updates weights in its backward; choose "
                "another `optim`, or stop.",
            )
        ],
    )


def check_policy(policy: str) -> str:
    """Return the policy. Raise ValueError for one that is not known."""
    if policy not in POLICIES:
        raise ValueError(f"on_non_finite must be one of {', '.join(POLICIES)}, got {policy!r}.")
    return policy


# Which way a metric is better: for the best checkpoint, early stopping, and learning rates that follow evaluations.
# transformers takes the greater value for the better one unless the name ends in "loss", and lowers the learning rate
# on a plateau as if less were better in any case.


_LESS = r"loss|loss/\w+|\w+_loss|perplexity|student_perplexity|student_nll|forward_kl|reverse_kl|jsd"
_MORE = r"mean_token_accuracy|agreement_at_1|mtp_accepted"
_NEITHER = r"mtp_share|entropy|teacher_entropy|teacher_perplexity|teacher_nll|num_tokens"
# The last one of them in a name: in front stand eval_, the name of a dataset or of a kind of token.
_METRIC = re.compile(rf"(?:^|.*?[_/])(?:(?P<neither>{_NEITHER})|(?P<more>{_MORE})|(?P<less>{_LESS}))")
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def greater_is_better(metric: str | None) -> bool | None:
    """Return which way a metric of the trainers is better; None for one that is neither, and for others' metrics."""
    found = _METRIC.fullmatch(metric or "")
    return None if found is None or found["neither"] else bool(found["more"])


def is_neither(metric: str | None) -> bool:
    """Return whether it is a metric of the trainers of which neither more nor less is better."""
    found = _METRIC.fullmatch(metric or "")
    return found is not None and found["neither"] is not None


def choose_direction(args: Any) -> None:
    """Set `greater_is_better`, where it is None, for a metric of the trainers.

    Raises:
        ValueError: neither more nor less of it is better.
    """
    metric = args.metric_for_best_model
    if args.greater_is_better is not None or metric is None:
        return
    if is_neither(metric):
        raise ValueError(f"metric_for_best_model: {no_direction(metric)}")
    args.greater_is_better = greater_is_better(metric)


def no_direction(metric: str) -> str:
    """Return what is said about a metric that is no better high than low."""
    return f"neither more nor less of {metric} is better. Say which is meant: greater_is_better, true or false."


def correct_guess(args: Any) -> None:
    """Set `greater_is_better` to false where transformers has guessed it true, in arguments that are not ours.

    Warns, since such arguments do not tell a guess from a choice.
    """
    metric = args.metric_for_best_model
    guess = metric is not None and not metric.endswith("loss")
    if guess and args.greater_is_better and greater_is_better(metric) is False:
        args.greater_is_better = False
        warnings.warn(
            f"metric_for_best_model: transformers takes more {metric} for the better; less is, so greater_is_better is "
            "set to False. To choose the highest all the same, set it in a LigerConfig or LigerDistillConfig.",
            stacklevel=3,
        )


def follow_direction(args: Any) -> None:
    """Have a learning rate that follows evaluations follow `greater_is_better`, unless `mode` is given."""
    if args.lr_scheduler_type in FOLLOW_EVALUATIONS:
        mode = "max" if args.greater_is_better else "min"
        args.lr_scheduler_kwargs = {"mode": mode, **(args.lr_scheduler_kwargs or {})}
