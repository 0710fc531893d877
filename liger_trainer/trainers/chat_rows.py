"""Rows of ShareGPT and of Alpaca as the messages that chat templates know, and a check that the template knows them.

ShareGPT's `conversations` become `messages`, with the roles user and assistant for its human and gpt: every token is
learned, as TRL learns messages, unless `assistant_only_loss` is set. Alpaca's `instruction` and `input` become
`prompt`, its `output` becomes `completion`: the completion alone is learned, unless `completion_only_loss` is false.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from trl.data_utils import get_dataset_column_names

from ..errors import ConfigError, DataError

ROLES = {"human": "user", "gpt": "assistant"}
BASIC_ROLES = ("system", "user", "assistant")
ALPACA = ("instruction", "output")
ALPACA_OPTIONAL = ("input", "system", "history")
_READ = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def in_messages(dataset: Any, text_field: str = "text") -> Any:
    """Rows of ShareGPT as messages, and of Alpaca as prompt and completion; rows of other forms as they are.

    Args:
        dataset: a Dataset or an IterableDataset.
        text_field: a column of plain text, which is read instead of `instruction` and `output` where there is one.
    """
    if not isinstance(dataset, Dataset | IterableDataset):  # TRL refuses it by name
        return dataset
    columns = set(get_dataset_column_names(dataset))
    if columns & {"input_ids", "prompt", "messages"}:
        return dataset
    if "conversations" in columns:
        return dataset.map(_messages, remove_columns=sorted(columns & {"conversations", "system"}))
    if columns >= {*ALPACA} and text_field not in columns:
        return dataset.map(_prompt_and_completion, remove_columns=sorted(columns & {*ALPACA, *ALPACA_OPTIONAL}))
    return dataset


def datasets_in_messages(arguments: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The datasets among a trainer's arguments, as `in_messages` makes them; none with a function that formats rows.
    TRL decides by the columns what is learned, so it has to be given these."""
    if arguments.get("formatting_func") is not None:
        return {}
    text_field = getattr(args, "dataset_text_field", "text")

    def read(dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: read(part) for name, part in dataset.items()}
        return in_messages(dataset, text_field)

    return {
        name: read(arguments[name]) for name in ("train_dataset", "eval_dataset") if arguments.get(name) is not None
    }


def split_last(dataset: Any) -> Any:
    """Rows of messages as a prompt and the last message as its completion; rows with a prompt as they are."""

    def split(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}

    dataset = in_messages(dataset)
    columns = set(get_dataset_column_names(dataset))
    if "messages" not in columns or "prompt" in columns:
        return dataset
    return dataset.map(split, remove_columns="messages")


def _messages(row: dict[str, Any]) -> dict[str, Any]:
    messages = [_renamed(message) for message in row["conversations"]]
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages = [_message("system", row["system"]), *messages]
    return {"messages": messages}


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    names = ("from", "value") if "from" in message else ("role", "content")
    role: str = message[names[0]]
    rest = {key: value for key, value in message.items() if key not in names}
    return {**_message(ROLES.get(role, role), message[names[1]]), **rest}


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _prompt_and_completion(row: dict[str, Any]) -> dict[str, Any]:
    prompt = [_message("system", row["system"])] if row.get("system") else []
    for question, answer in row.get("history") or []:
        prompt += [_message("user", question), _message("assistant", answer)]
    asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return {"prompt": [*prompt, _message("user", asked)], "completion": [_message("assistant", row["output"])]}


def check_chats(dataset: Any, tokenizer: Any, template: str | None, place: Callable[[int], str]) -> None:
    """Check the roles of every row, and render one row of each sequence of roles. Streams, tokens and plain text pass.

    Args:
        dataset: rows with `messages` or `prompt`.
        template: instead of the tokenizer's own.
        place: where row i stands.

    Raises:
        ConfigError: the template is not one.
        DataError: a role that the template does not know, which it would write as text; or a row that it refuses.
    """
    if not isinstance(dataset, Dataset) or "input_ids" in dataset.column_names:
        return
    if not (template or tokenizer.chat_template):  # TRL says so
        return
    columns = [column for column in _READ if column in dataset.column_names]
    known, seen = None, set()
    for index, row in enumerate(dataset.select_columns(columns) if columns else ()):
        messages = _all_messages(row)
        if messages is None:
            return
        known = known or {*BASIC_ROLES, *_roles_of(template or tokenizer.chat_template)}
        roles = tuple(message["role"] for message in messages)
        if roles in seen:
            continue
        seen.add(roles)
        problem = _unknown(roles, known) or _refusal(row, messages, tokenizer, template)
        if problem:
            raise DataError(f"{place(index)}: {problem}")


def _all_messages(row: Any) -> list[dict[str, Any]] | None:
    messages = row.get("messages") or row.get("prompt")
    return [*messages, *(row.get("completion") or [])] if isinstance(messages, list) else None


def _unknown(roles: tuple[str, ...], known: set[str]) -> str | None:
    for role in roles:
        if role not in known:
            others = ", ".join(sorted(known))
            return (
                f"the chat template does not know the role {role!r}; it knows {others} (human and gpt of ShareGPT are "
                "read as user and assistant). Rename the role, or set chat_template_path to a template that has it."
            )
    return None


def _refusal(row: Any, messages: list[dict[str, Any]], tokenizer: Any, template: str | None) -> str | None:
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options = row.get("chat_template_kwargs") or {}
    try:
        tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **options)
    except TemplateError as error:
        return f"the chat template refuses the row: {error}"
    return None


def _roles_of(template: str | dict[str, str]) -> set[str]:
    """What a template compares a role with."""
    if isinstance(template, dict):
        return set().union(*map(_roles_of, template.values()))
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from None
    found = (*tree.find_all(nodes.Compare), *tree.find_all(nodes.Test))
    texts = (const.value for node in found if _of_role(node) for const in node.find_all(nodes.Const))
    return {text for text in texts if isinstance(text, str)} - {"role"}


def _of_role(node: nodes.Node) -> bool:
    """Whether `message.role`, `message["role"]` or a variable named after it is part of a comparison."""
    names = [found.attr for found in node.find_all(nodes.Getattr)] + [found.name for found in node.find_all(nodes.Name)]
    keys = [found.arg.value for found in node.find_all(nodes.Getitem) if isinstance(found.arg, nodes.Const)]
    return "role" in keys or any("role" in name for name in names)
