"""Before and after: the held-out metrics as a table, and completions of held-out prompts side by side."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, Trainer
from trl import prepare_multimodal_messages

from ..common.console import is_main_process, visible
from ..compat.deepspeed import is_partitioned, shape_of
from ..losses.model_parts import device_of, known_positions
from ..patching.patcher import base_of
from ..trainers.chat_template import ANSWERS, fitting
from ..trainers.decoder import Decoder
from ..trainers.rows import text_prompt_ids
from .data.datasets import RunData
from .data.row_checks import images_of
from .metric_rows import MetricRow

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

TEXT_PROMPT_TOKENS = 32  # a row of plain text or token ids has no prompt, so its start is taken


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt as text and as tokens, with the answer in the dataset."""

    text: str
    input_ids: list[int]
    reference: str | None
    # what a model reads besides the tokens: tensors of the prompt's images, (1, length) types of its tokens
    images: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One prompt with the completion of each model; `teacher` is None without a teacher."""

    prompt: str
    reference: str | None
    before: str
    after: str
    teacher: str | None = None


@dataclass(frozen=True)
class Measurement:
    """A student at one moment: its held-out metrics, named without `eval_`, and its completions."""

    metrics: dict[str, float]
    texts: list[str]


@dataclass(frozen=True)
class ModelFacts:
    """A model of a run: how many parameters it has, and in which dtype."""

    parameters: int
    dtype: str


def model_facts(model: Any) -> ModelFacts:
    """Return the facts about a model of transformers or PEFT; weights in 4 bits count as they do unpacked."""
    # num_parameters counts what is there: under ZeRO-3 nothing, but it knows the size of packed 4-bit weights.
    partitioned = any(map(is_partitioned, model.parameters()))
    count = sum(shape_of(p).numel() for p in model.parameters()) if partitioned else model.num_parameters()
    return ModelFacts(count, str(model.dtype).removeprefix("torch."))


def measure(trainer: Trainer, prompts: Sequence[Prompt], max_new_tokens: int) -> Measurement:
    """Evaluate on the held-out rows and complete the prompts, with adapters as they are now."""
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return Measurement(metrics, complete(trainer.model, tokenizer, prompts, max_new_tokens))


def compare(
    prompts: Sequence[Prompt], before: Measurement, after: Measurement, teacher: Sequence[str] | None = None
) -> list[Completion]:
    """Return the completions of each prompt, side by side."""
    return [
        Completion(prompt.text, prompt.reference, before.texts[i], after.texts[i], teacher[i] if teacher else None)
        for i, prompt in enumerate(prompts)
    ]


def held_out_prompts(config: "RunConfig", data: RunData, processing: Any, count: int | None = None) -> list[Prompt]:
    """Return so many prompts, from rows spread evenly over the held-out rows.

    Args:
        processing: the tokenizer, or, for rows with images, the processor.
        count: default: what `num_sample_completions` says.

    Call it after the trainer is made: it may change the chat template. A prompt longer than `max_length` keeps its end.
    """
    wanted: int = config["num_sample_completions"] if count is None else count
    count, form = min(wanted, len(data.test)), data.facts.form
    rows = [data.test[i * len(data.test) // count] for i in range(count)]
    if data.facts.images is not None:
        return [_prompt_with_images(row, form, processing, config["dataset_text_field"]) for row in rows]
    prompts = [_prompt(row, form, processing, config["dataset_text_field"]) for row in rows]
    # TRL cuts rows to max_length too. Of a prompt the end matters, where the question is.
    limit = config["max_length"]
    return [Prompt(p.text, p.input_ids[-limit:] if limit else p.input_ids, p.reference) for p in prompts]


def in_other_tokens(
    prompts: Sequence[Prompt], config: "RunConfig", data: RunData, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the same prompts for a model with another tokenizer, in its chat template."""
    if data.facts.form != "text":
        return held_out_prompts(config, data, tokenizer)
    return [Prompt(p.text, tokenizer(p.text)["input_ids"], p.reference) for p in prompts]  # cut as the student's were


def _prompt(row: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase, text_field: str) -> Prompt:
    if form in ("text", "input_ids"):
        ids = row["input_ids"] if form == "input_ids" else tokenizer(row[text_field])["input_ids"]
        cut = min(TEXT_PROMPT_TOKENS, max(1, len(ids) // 2))
        return Prompt(_decode(tokenizer, ids[:cut]), list(ids[:cut]), _decode(tokenizer, ids[cut:]))
    if form in ("prompt", "prompt-completion") and isinstance(row["prompt"], str):
        return Prompt(row["prompt"], text_prompt_ids(row["prompt"], tokenizer), row.get("completion"))
    messages, answer = _asked_and_answered(row, form)
    messages = fitting(messages, tokenizer)
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options: dict[str, Any] = row.get("chat_template_kwargs") or {}
    rendered: Any = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True, **options
    )
    ids = rendered["input_ids"]
    return Prompt(_text_of(messages[-1:]), ids, _text_of(answer) if answer else None)


def _asked_and_answered(row: dict[str, Any], form: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages of a prompt, and those of its answer."""
    if form in ("prompt", "prompt-completion"):
        return row["prompt"], row.get("completion")
    messages = row["messages"]
    turns = [i for i, message in enumerate(messages) if message["role"] in ANSWERS and i > 0]
    # The last answer is what the model has to write; a chat without one is a prompt as a whole.
    cut = turns[-1] if turns else len(messages)
    return messages[:cut], messages[cut:]


def _prompt_with_images(row: dict[str, Any], form: str, processor: Any, text_field: str) -> Prompt:
    images = images_of(row)
    if form == "text" or isinstance(row.get("prompt"), str):
        text, answer = (row[text_field], None) if form == "text" else (row["prompt"], row["completion"])
        # TRL adds no special tokens to plain text with images either.
        inputs = processor(images=images or None, text=[text], add_special_tokens=False, return_tensors="pt")
    else:
        messages, reply = _asked_and_answered(row, form)
        text, answer = _text_of(messages[-1:]), _text_of(reply) if reply else None
        inputs = processor.apply_chat_template(
            prepare_multimodal_messages(messages, images=images), add_generation_prompt=True, tokenize=True,
            return_dict=True, return_tensors="pt", **(row.get("chat_template_kwargs") or {}),
        )  # fmt: skip
    others = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    return Prompt(text, inputs["input_ids"][0].tolist(), answer, others)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _text_of(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(_text(message.get("content") or "") for message in messages)


def _text(content: Any) -> str:
    """Return a message's content, of parts the text."""
    if isinstance(content, list):
        return " ".join(part.get("text") or f"[{part.get('type')}]" for part in content)
    return str(content)


def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> list[str]:
    """Return greedy completions, made one prompt at a time, so that nothing is padded.

    Args:
        model: a transformers or PEFT model; it is left in the mode it was in.
    """
    settings = _greedy(model, tokenizer, max_new_tokens)
    silent = None if is_main_process() else True  # None: where there is no terminal
    # Learned positions end somewhere, and an index beyond them fails on the device.
    device, positions, decoder = device_of(model), known_positions(base_of(model)), Decoder(gathers=False)
    texts = []
    for prompt in tqdm(prompts, "completing prompts", leave=False, disable=silent, dynamic_ncols=True):
        tokens, most = prompt.input_ids, max_new_tokens
        if positions is not None:  # the end of a longer prompt, and what can be written behind it
            tokens = tokens[-max(1, positions - max_new_tokens) :]
            most = min(max_new_tokens, positions - len(tokens))
        images = {name: value.to(device) for name, value in prompt.images.items()}
        (answer,) = decoder.complete(model, [tokens], settings, seed=0, most_tokens=most, **images)
        texts.append(_decode(tokenizer, answer))
    return texts


def texts_of(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_new_tokens: int, decoder: Decoder,
    at_once: int,
) -> list[str]:  # fmt: skip
    """Return greedy completions of prompts without images, `at_once` of them together."""
    settings, tokens = _greedy(model, tokenizer, max_new_tokens), [prompt.input_ids for prompt in prompts]
    return [_decode(tokenizer, ids) for ids in decoder.complete(model, tokens, settings, seed=0, at_once=at_once)]


def _greedy(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> GenerationConfig:
    # It may name several tokens, such as the end of a turn and of a text; a tokenizer knows one.
    stop = model.generation_config.eos_token_id if model.generation_config else None
    return GenerationConfig(
        # Greedy, so that before and after differ by training and not by chance.
        do_sample=False,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=tokenizer.eos_token_id if stop is None else stop,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )


def complete_by_each(
    models: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> list[str] | None:
    """Return the completion of each prompt. Of several models, each has a line that begins with its name.

    Returns:
        None without a model.
    """
    texts = [complete(model, tokenizer, prompts, max_new_tokens) for model in models.values()]
    if len(texts) < 2:
        return texts[0] if texts else None
    return [
        "\n".join(f"{name}: {text}" for name, text in zip(models, each, strict=True))
        for each in zip(*texts, strict=True)
    ]


def comparison_table(rows: Sequence[MetricRow], before: dict[str, float], after: dict[str, float]) -> Table:
    """Return the held-out metrics before and after training, with the relative change."""
    table = Table(title="Held-out rows, before and after training", title_justify="left")
    table.add_column("metric")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for row in rows:
        old, new = before[row.metric], after[row.metric]
        table.add_row(row.title, f"{old:.{row.digits}f}", f"{new:.{row.digits}f}", _change(old, new))
    return table


def _change(old: float, new: float) -> str:
    # A share of nothing, or of NaN, has no meaning.
    if not (math.isfinite(old) and math.isfinite(new)) or old == 0:
        return ""
    return f"{(new - old) / abs(old):+.1%}"


def print_completions(console: Console, completions: Sequence[Completion]) -> None:
    """Print each prompt with its completions in a panel."""
    for completion in completions:
        parts = [Text(visible(completion.prompt), style="bold")]
        for title in ("teacher", "before", "after"):
            text = getattr(completion, title)
            if text is not None:
                parts.append(Text.assemble((f"{title}: ", "cyan"), visible(text) or "(nothing)"))
        console.print(Panel(Group(*parts), title="held-out prompt", title_align="left"))
