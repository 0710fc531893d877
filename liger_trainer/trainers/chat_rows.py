"""Rows of ShareGPT and of Alpaca as the messages that chat templates know, and a check that the template knows them.

ShareGPT's `conversations` become `messages`, with the roles user and assistant for its human and gpt: every token is
learned, as TRL learns messages, unless `assistant_only_loss` is set. Alpaca's `instruction` and `input` become
`prompt`, its `output` becomes `completion`: the completion alone is learned, unless `completion_only_loss` is false.
Stanford Alpaca's prompt may be written around instruction and input (`RowsConfig.alpaca_prompt`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError, TemplateSyntaxError
from trl.data_utils import get_dataset_column_names, is_conversational

from ..common.limits import LimitExceeded, limited
from ..errors import ConfigError, DataError

ROLES = {"human": "user", "gpt": "assistant"}
BASIC_ROLES = ("system", "user", "assistant")
NO_ANSWERS = ("system", "developer", "user", "tool")  # any other role may be a model's
IMAGE = "<image>"  # stands for an image in LLaVA's conversations
ALPACA = ("instruction", "output")
ALPACA_OPTIONAL = ("input", "system", "history")
_READ = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
NO_ROLE = "no-such-role"
RENDER_SECONDS, RENDER_MIB = 10.0, 2048.0
"""A row takes milliseconds. A template that takes more has no end, or makes a text that nobody can read."""


_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def in_messages(dataset: Any, text_field: str = "text", alpaca_prompt: str = "instruction") -> Any:
    """Return rows of ShareGPT as messages, of Alpaca as prompt and completion, and rows of other forms as they are.

    Args:
        dataset: a Dataset or an IterableDataset.
        text_field: a column of plain text, which is read instead of `instruction` and `output` where there is one.
        alpaca_prompt: see `RowsConfig`.

    Raises:
        DataError: a row of Alpaca is to be plain text, and has a system prompt or a history.
    """
    if not isinstance(dataset, Dataset | IterableDataset):  # TRL's refusal names the type
        return dataset
    columns = set(get_dataset_column_names(dataset))
    if columns & {"input_ids", "prompt", "messages"}:
        return dataset
    if "conversations" in columns:
        return dataset.map(_messages, remove_columns=sorted(columns & {"conversations", "system"}))
    if columns >= {*ALPACA} and text_field not in columns:
        read = sorted(columns & {*ALPACA, *ALPACA_OPTIONAL})
        return dataset.map(_prompt_and_completion, fn_kwargs={"form": alpaca_prompt}, remove_columns=read)
    return dataset


def datasets_in_messages(arguments: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the datasets among a trainer's arguments as `in_messages` makes them; none with a `formatting_func`.

    TRL decides by the columns what is learned, so it has to get these.
    """
    if arguments.get("formatting_func") is not None:
        return {}
    text_field, prompt = getattr(args, "dataset_text_field", "text"), getattr(args, "alpaca_prompt", "instruction")

    def read(dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: read(part) for name, part in dataset.items()}
        return in_messages(dataset, text_field, prompt)

    return {
        name: read(arguments[name]) for name in ("train_dataset", "eval_dataset") if arguments.get(name) is not None
    }


def split_last(dataset: Any) -> Any:
    """Return rows of messages as a prompt and the last answer as its completion; rows with a prompt as they are.

    Messages behind the last answer are left out: it cannot see them, and they are not learned.

    Raises:
        DataError: a row without an answer, or with nothing before it.
    """

    def split(row: dict[str, Any], index: int) -> dict[str, Any]:
        messages = row["messages"]
        answers = [place for place, message in enumerate(messages) if message["role"] not in NO_ANSWERS]
        if not answers or answers[-1] == 0:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"row {index}: only the last answer is to be learned, but there is none with a message before it; the "
                f"roles are: {roles or 'none'}. Take the row out, or learn all messages."
            )
        return {"prompt": messages[: answers[-1]], "completion": [messages[answers[-1]]]}

    dataset = in_messages(dataset)
    columns = set(get_dataset_column_names(dataset))
    if "messages" not in columns or "prompt" in columns:
        return dataset
    return dataset.map(split, with_indices=True, remove_columns="messages")


def _messages(row: dict[str, Any]) -> dict[str, Any]:
    messages = [_renamed(message) for message in row["conversations"]]
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages = [_message("system", row["system"]), *messages]
    images = row["images"] if "images" in row else [row["image"]] if "image" in row else None
    return {"messages": messages if images is None else _with_places(messages, len(images or []))}


def _with_places(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages in parts. Images that no text has a place for stand at the start of the user's first message."""
    parted: list[dict[str, Any]] = [{**message, "content": _parts(message["content"])} for message in messages]
    if not any(IMAGE in message["content"] for message in messages):
        first = next((message for message in parted if message["role"] == "user"), None)
        if first is not None:
            first["content"] = [{"type": "image", "text": None}] * images + first["content"]
    return parted


def _parts(text: str) -> list[dict[str, Any]]:
    """Return a content of LLaVA, whose text says where images are, in parts."""
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image", "text": None}] if index else []
        parts += [{"type": "text", "text": piece.strip("\n")}] if piece.strip() else []
    return parts


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    names = ("from", "value") if "from" in message else ("role", "content")
    role: str = message[names[0]]
    rest = {key: value for key, value in message.items() if key not in names}
    return {**_message(ROLES.get(role, role), message[names[1]]), **rest}


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _prompt_and_completion(row: dict[str, Any], form: str) -> dict[str, Any]:
    if form == "instruction":
        asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    else:
        asked = (_WITH_INPUT if row.get("input") else _WITHOUT_INPUT).format_map(row)
    if form == "stanford_text":
        if row.get("system") or row.get("history"):
            raise DataError(
                "alpaca_prompt: stanford_text has no place for the system prompt or the history of a row; take "
                f"stanford. The row's instruction is: {row['instruction']!r:.80}"
            )
        return {"prompt": asked + "\n", "completion": row["output"]}
    prompt = [_message("system", row["system"])] if row.get("system") else []
    for question, answer in row.get("history") or []:
        prompt += [_message("user", question), _message("assistant", answer)]
    return {"prompt": [*prompt, _message("user", asked)], "completion": [_message("assistant", row["output"])]}


def check_part(part: str, dataset: Any, completion_only: bool | None) -> None:
    """Raise ConfigError where `supervised_part` cannot mark what it says in these rows."""
    row = next(iter(dataset))
    if not is_conversational(row):
        raise ConfigError(f"supervised_part: needs rows of chat messages; the rows have {', '.join(row)}.")
    if part == "message" and "completion" in row and completion_only is not False:
        raise ConfigError(
            "supervised_part: message: the header of a completion ends its prompt, which is not learned. Set "
            "completion_only_loss to false too: the answers, with their headers, are still all that is learned."
        )


def check_chats(dataset: Any, tokenizer: Any, template: str | None, place: Callable[[int], str]) -> None:
    """Check the roles of every row, and render one row of each sequence of roles. Streams, tokens and plain text pass.

    Args:
        dataset: rows with `messages` or `prompt`.
        template: instead of the tokenizer's own.
        place: names row i in an error.

    Raises:
        ConfigError: the template is not one, or does not come to an end.
        DataError: a role that the template does not know, which it would write as text; or a row that it refuses.
    """
    if not isinstance(dataset, Dataset) or "input_ids" in dataset.column_names:
        return
    if not (template or tokenizer.chat_template):  # TRL refuses it
        return
    columns = [column for column in _READ if column in dataset.column_names]
    seen: set[tuple[str, ...]] = set()
    for index, row in enumerate(dataset.select_columns(columns) if columns else ()):
        messages = _all_messages(row)
        if messages is None:
            return
        roles = tuple(message["role"] for message in messages)
        if roles in seen:
            continue
        seen.add(roles)
        try:
            problem = _problem(row, messages, tokenizer, template)
        except LimitExceeded as error:
            raise ConfigError(
                f"{place(index)}: the chat template does not come to an end: rendering the row {error}. Set "
                "chat_template_path to another template."
            ) from None
        if problem:
            raise DataError(f"{place(index)}: {problem}")


def _all_messages(row: Any) -> list[dict[str, Any]] | None:
    messages = row.get("messages") or row.get("prompt")
    return [*messages, *(row.get("completion") or [])] if isinstance(messages, list) else None


def _problem(row: Any, messages: list[dict[str, Any]], tokenizer: Any, template: str | None) -> str | None:
    """Return why the template cannot render a row, or None."""

    def rendered(messages: list[dict[str, Any]]) -> str:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        options = row.get("chat_template_kwargs") or {}
        with limited(RENDER_SECONDS, RENDER_MIB):
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **options
            )  # fmt: skip

    unknown = next((role for role in _special_roles(messages) if not _knows(role, messages, rendered)), None)
    if unknown is not None:
        return (
            f"the chat template does not know the role {unknown!r}: it renders it as it renders any other name (human "
            "and gpt of ShareGPT are read as user and assistant). Rename the role, or set chat_template_path to a "
            "template that has it."
        )
    try:
        rendered(messages)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from None
    except (TemplateError, ArithmeticError, RecursionError, MemoryError) as error:  # Jinja's sandbox, among others
        return f"the chat template refuses the row: {error}"
    return None


def _special_roles(messages: list[dict[str, Any]]) -> list[str]:
    return [role for role in dict.fromkeys(message["role"] for message in messages) if role not in BASIC_ROLES]


def _knows(role: str, messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Return whether a template does something else with a role than with a name that it cannot know."""
    renamed = [{**message, "role": NO_ROLE} if message["role"] == role else message for message in messages]
    try:
        text = rendered(messages)
    except (TemplateError, ArithmeticError, RecursionError, MemoryError):  # the row is refused, in other words
        return True
    try:
        without = rendered(renamed)
    except LimitExceeded:
        raise
    except Exception:  # however it fails, the template tells the two apart
        return True
    # Templates may write a role in capitals.
    return without.casefold().replace(NO_ROLE, role.casefold()) != text.casefold()
