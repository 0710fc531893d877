"""A check that the chat template knows what rows hold, and tool calls as it takes them."""

import json
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError, TemplateSyntaxError
from trl.data_utils import get_dataset_column_names, is_conversational

from ..common.signals import LimitExceeded, limited
from ..errors import ConfigError, DataError
from .chat_rows import BASIC_ROLES, CHAT_COLUMNS_READ, KEPT, NO_ANSWERS
from .messages import arguments_wanted, encoded, is_plain, no_answer, with_arguments

NO_ROLE = "no-such-role"
_WRITTEN = ("tools", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields that say what an answer is, or what it may call. A template that leaves them out teaches another answer."""
REFUSALS = (
    TemplateError, ArithmeticError, RecursionError, MemoryError, TypeError, ValueError, LookupError, AttributeError
)  # fmt: skip
"""What a template raises where a row is not as it expects; some are of Python's operators in it."""
RENDER_SECONDS, RENDER_MIB = 10.0, 2048.0
"""A row takes milliseconds. A template that takes more has no end, or makes a text that nobody can read."""


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


def check_chats(
    dataset: Any,
    tokenizer: Any,
    template: str | None,
    place: Callable[[int], str],
    allow_unwritten: bool = False,
    only_answers: bool = False,
) -> None:
    """Check the roles of every row, and render one row of each sequence of messages. Streams, tokens, plain text pass.

    Args:
        dataset: rows with `messages` or `prompt`.
        template: instead of the tokenizer's own.
        place: names row i in an error.
        allow_unwritten: whether rows may have fields that the template does not write.
        only_answers: whether nothing but answers is learned.

    Raises:
        ConfigError: the template is not one, or does not come to an end.
        DataError: a role that the template does not know, which it would write as text; a field that it leaves out; a
            row that it refuses; a chat without an answer where only answers are learned.
    """
    if not isinstance(dataset, Dataset) or "input_ids" in dataset.column_names:
        return
    if not (template or tokenizer.chat_template):  # TRL refuses it
        return
    columns = [column for column in CHAT_COLUMNS_READ if column in dataset.column_names]
    seen: set[Any] = set()
    known: set[str] = set(_WRITTEN) if allow_unwritten else set()
    wanted: list[type | None] = []
    rows: Any = dataset.select_columns(columns) if columns else ()
    for index, row in enumerate(rows):
        messages = _all_messages(row)
        if messages is None:
            return
        reason = _empty_message(messages)
        if reason is None and only_answers and set(row) & {"messages", "completion"}:
            reason = no_answer(messages, NO_ANSWERS)
        if reason:
            raise DataError(f"{place(index)}: {reason}.")
        kind = (*map(_kind, messages), bool(row.get("tools")))
        if kind in seen:
            continue
        seen.add(kind)
        try:
            rendered = _renderer(row, tokenizer, template)
            if any(message.get("tool_calls") for message in messages):
                wanted = wanted or [arguments_wanted(_renderer({}, tokenizer, template))]
                messages = with_arguments(messages, wanted[0]) if wanted[0] else messages
            problem = _problem(messages, rendered) or _unwritten(row, messages, rendered, tokenizer, template, known)
        except LimitExceeded as error:
            raise ConfigError(
                f"{place(index)}: the chat template does not come to an end: rendering the row {error}. Set "
                "chat_template_path to another template."
            ) from None
        except DataError as error:
            problem = str(error)
        if problem:
            raise DataError(f"{place(index)}: {problem}")


def _empty_message(messages: list[dict[str, Any]]) -> str | None:
    """Return which message says nothing: it has no content, and neither calls nor thoughts."""
    roles = [
        message["role"]
        for message in messages
        if not any(message[key] for key in {*message} - {"role", "content"}) and message.get("content") is None
    ]
    return f"expected text, got a message of {roles[0]} without any content" if roles else None


def _kind(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of a message decides how a template takes it."""
    fields = (key for key, value in message.items() if value and key not in ("role", "content"))
    return message["role"], type(message.get("content")), *sorted(fields)


def fit_arguments(dataset: Any, tokenizer: Any, template: str | None) -> Any:
    """Return rows whose tool calls have arguments as the template writes them: mappings, or JSON text."""
    if not isinstance(dataset, Dataset | IterableDataset) or not (template or tokenizer.chat_template):
        return dataset
    columns = set(get_dataset_column_names(dataset))
    if "input_ids" in columns or not columns & KEPT or is_plain(dataset.features):
        return dataset
    wanted = arguments_wanted(_renderer({}, tokenizer, template))
    if wanted is None:
        return dataset
    after = dataset.features if isinstance(dataset, Dataset) else None

    def fit(row: Any) -> dict[str, Any]:
        chats = {name: row[name] for name in ("messages", "prompt", "completion") if isinstance(row.get(name), list)}
        new = {name: with_arguments(messages, wanted) for name, messages in chats.items()}
        return new if after is None else encoded(new, after)

    options: dict[str, Any] = {} if after is None else {"features": after}
    return dataset.map(fit, **options)


def fitting(messages: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return messages with the arguments of tool calls as the tokenizer's own chat template writes them."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    wanted = arguments_wanted(_renderer({}, tokenizer, None))
    return with_arguments(messages, wanted) if wanted else messages


def _all_messages(row: Any) -> list[dict[str, Any]] | None:
    messages = row.get("messages") or row.get("prompt")
    return [*messages, *(row.get("completion") or [])] if isinstance(messages, list) else None


def _renderer(row: Any, tokenizer: Any, template: str | None) -> Callable[[list[dict[str, Any]]], str]:
    """Return what renders messages with the tools and options of a row."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options = row.get("chat_template_kwargs") or {}

    def rendered(messages: list[dict[str, Any]]) -> str:
        with limited(RENDER_SECONDS, RENDER_MIB):
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **options
            )  # fmt: skip

    return rendered


def _problem(messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str]) -> str | None:
    """Return why the template cannot render a row, or None."""
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
    except REFUSALS as error:
        return f"the chat template refuses the row: {error}"
    return None


def _unwritten(
    row: Any, messages: list[dict[str, Any]], rendered: Callable, tokenizer: Any, template: str | None, known: set[str]
) -> str | None:
    """Return which field of a row the template leaves out, or None; add those that it writes to `known`."""
    fields = [field for field in _WRITTEN if field not in known]
    for field in fields:
        if field == "tools":
            untooled = _renderer(_without(row, field), tokenizer, template)
            lacks = row.get("tools") and _same(messages, rendered, messages, untooled)
        else:
            having = [i for i, message in enumerate(messages) if message.get(field)]
            if not having:
                continue
            some = messages[: having[-1] + 1]  # thoughts of earlier answers may be left out when others follow
            lacks = _same(some, rendered, [_without(message, field) for message in some], rendered)
        if lacks:
            return (
                f"the chat template does not write {field!r}: the row would be learned without it. Set "
                "chat_template_path to a template that has it, take the field out, or set allow_unwritten_fields: true."
            )
        if field != "tools" or row.get("tools"):
            known.add(field)
    return None


def _without(mapping: Any, field: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != field}


def _same(messages: Any, rendered: Callable, others: Any, rendered_others: Callable) -> bool:
    try:
        return rendered(messages) == rendered_others(others)
    except LimitExceeded:
        raise
    except Exception:  # however it fails, the template tells the two apart
        return False


def _special_roles(messages: list[dict[str, Any]]) -> list[str]:
    return [role for role in dict.fromkeys(message["role"] for message in messages) if role not in BASIC_ROLES]


def _knows(role: str, messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Return whether a template does something else with a role than with a name that it cannot know."""
    renamed = [{**message, "role": NO_ROLE} if message["role"] == role else message for message in messages]
    try:
        text = rendered(messages)
    except REFUSALS:  # the row is refused, in other words
        return True
    try:
        without = rendered(renamed)
    except LimitExceeded:
        raise
    except Exception:  # however it fails, the template tells the two apart
        return True
    # Templates may write a role in capitals.
    return without.casefold().replace(NO_ROLE, role.casefold()) != text.casefold()
