"""Messages as people write them, and what trainers and chat templates take: parts, marks, tool calls, nulls.

Mappings whose keys differ from row to row are kept as JSON: in Arrow's own mappings each would get the keys of all
others, with null.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Features, Json, List
from datasets.features.features import register_feature

from ..errors import DataError

MASKED = "train"  # false: nothing of the message is learned; `tidy` writes it
MARKS = ("weight", "loss_weight", "train", "training", "loss")
"""Fields of a message that say whether it is learned: of OpenAI, LLaMA-Factory, axolotl and ms-swift."""
TEXT_PARTS = ("text", "input_text", "output_text")
_CHATS = ("messages", "prompt", "completion")
_PROBE = {"liger": "probe"}
Render = Callable[[list[dict[str, Any]]], str]


@dataclass(repr=False)
class JsonAsWritten(Json):
    """datasets' `Json`, with Python's own reader: the one it has reads 0.3 as 0.30000000000000004."""

    _type: str = field(default="JsonAsWritten", init=False, repr=False)

    def encode_example(self, example_data):
        return super().encode_example(example_data) if isinstance(example_data, str) else as_json(example_data)

    def decode_example(self, example_data, token_per_repo_id=None):
        return None if example_data is None else json.loads(example_data)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*register_feature.*experimental")
    register_feature(JsonAsWritten, "JsonAsWritten")

CHAT = List(JsonAsWritten())


def as_json(value: Any) -> str | None:
    """Return what a column of `JsonAsWritten` stores; None stays None."""
    return None if value is None else json.dumps(value)


def encoded(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """Return a row for a map that writes these features, which would write numbers with ten decimals."""

    def written(value: Any, feature: Any) -> Any:
        if isinstance(feature, Json):
            return as_json(value)
        whole = isinstance(feature, List) and isinstance(feature.feature, Json)
        return [as_json(item) for item in value] if whole and value is not None else value

    return {name: written(value, features.get(name)) for name, value in row.items()}


def exact(feature: Any) -> Any:
    """Return a feature with `JsonAsWritten` in the place of each `Json`."""
    if isinstance(feature, Json):
        return JsonAsWritten()
    if isinstance(feature, List):
        return List(exact(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        parts = {name: exact(part) for name, part in feature.items()}
        return Features(parts) if isinstance(feature, Features) else parts
    return feature


def without_nulls(value: Any, feature: Any) -> Any:
    """Return a value without the keys that Arrow has filled in: in its mappings, other than in JSON, null is absent.

    A message's content stays, null or not.
    """
    if isinstance(feature, dict) and isinstance(value, dict):
        parts = {key: without_nulls(part, feature.get(key)) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None or key == "content"}
    if isinstance(feature, List) and isinstance(value, list):
        return [without_nulls(part, feature.feature) for part in value]
    return value


def is_plain(features: Any) -> bool:
    """Return whether every row is messages of role and text and nothing besides."""
    if features is None or not {"system", "tools", "chat_template_kwargs"}.isdisjoint(features):
        return False
    return all(_plain_column(features[name]) for name in _CHATS if name in features)


def _plain_column(feature: Any) -> bool:
    entries = feature.feature if isinstance(feature, List) else None
    if isinstance(entries, dict):
        return set(entries) == {"role", "content"} and getattr(entries["content"], "dtype", None) == "string"
    return getattr(feature, "dtype", None) == "string"


def tidy(row: dict[str, Any], images: bool) -> dict[str, Any]:
    """Return the chat columns of a row, with contents as text, `train` for all marks, and `system` as first message.

    Args:
        images: whether the row has images, whose places are parts of a content.

    Raises:
        DataError: see `message_problem`.
    """
    new: dict[str, Any] = {}
    for name in _CHATS:
        messages = row.get(name)
        if not isinstance(messages, list):
            continue
        for message in messages:
            problem = message_problem(message, images)
            if problem:
                raise DataError(f"column {name!r}: {problem}")
        new[name] = [_tidy_message(message, images) for message in messages]
    first = next((new[name] for name in ("messages", "prompt") if name in new), None)
    if first is not None and row.get("system") and not (first and first[0].get("role") == "system"):
        first.insert(0, {"role": "system", "content": row["system"]})
    if "chat_template_kwargs" in row:
        new["chat_template_kwargs"] = row["chat_template_kwargs"] or {}
    return new


def _tidy_message(message: dict[str, Any], images: bool) -> dict[str, Any]:
    content, kept = message.get("content"), {key: value for key, value in message.items() if key not in MARKS}
    if isinstance(content, list) and not images:
        kept["content"] = "".join(part if isinstance(part, str) else part["text"] for part in content)
    marks = [message[mark] for mark in MARKS if message.get(mark) is not None]
    return {**kept, MASKED: all(marks)} if marks else kept


def message_problem(message: Any, images: bool, content: str = "content") -> str | None:
    """Return what is wrong with a message's marks or the parts of its content, or None."""
    if not isinstance(message, dict):
        return f"expected messages of role and content, got {message!r:.80}"
    for mark in MARKS:
        value = message.get(mark)
        if value is not None and (not isinstance(value, (bool, int, float)) or value not in (0, 1)):
            return (
                f"a message has {mark!r}, which says whether it is learned: expected 0 or 1, false or true (numbers "
                f"between are for whole rows: weight_column), got {value!r:.40}"
            )
    parts = message.get(content)
    if not isinstance(parts, (str, list, type(None))):
        return f"expected content as text or as parts of text, got {parts!r:.80}"
    for part in parts if isinstance(parts, list) and not images else ():
        kind = part.get("type") if isinstance(part, dict) else None
        text = isinstance(part, str) or (kind in TEXT_PARTS and isinstance(part.get("text"), str))
        if not text:
            return f"expected content as text or as parts of text, got a part {kind or part!r:.80}"
    return None


def no_answer(messages: list[dict[str, Any]], others: tuple[str, ...], last: bool = False) -> str | None:
    """Return why no message of a chat can be learned where only answers are, or None.

    Args:
        others: the roles that answer nothing.
        last: whether only the last answer is learned, which needs a message before it.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] not in others]
    if last and answers and answers[-1] == 0:
        return "only the last answer is to be learned, but there is none with a message before it"
    learned = [i for i in answers if messages[i].get(MASKED) is not False]
    if answers and not learned:
        return "only answers are to be learned, but each of this chat is marked as not to be learned"
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return None if learned else f"only answers are to be learned, but the chat has none, got the roles {roles}"


def arguments_wanted(render: Render) -> type | None:
    """Return how a template wants the arguments of a tool call: dict, str (JSON text), or None for either.

    Args:
        render: returns the text of messages.
    """

    def fails(arguments: Any, wrong: str) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return wrong in render([{"role": "user", "content": "probe"}, answer])
        except Exception:  # however it fails, it does not take them
            return True

    text = json.dumps(_PROBE)
    text_fails, mapping_fails = fails(text, json.dumps(text)[1:-1]), fails(_PROBE, str(_PROBE))
    if text_fails == mapping_fails:
        return None
    return dict if text_fails else str


def with_arguments(messages: list[dict[str, Any]], wanted: type) -> list[dict[str, Any]]:
    """Return messages whose tool calls have their arguments as a mapping (dict) or as JSON text (str).

    Raises:
        DataError: text that is no JSON where a mapping is wanted.
    """

    def fitted(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if isinstance(function, dict):
            return {**call, "function": fitted(function)}
        given = call.get("arguments")
        if given is None or isinstance(given, wanted):
            return call
        if wanted is str:
            return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
        try:
            return {**call, "arguments": json.loads(given)}
        except (ValueError, TypeError):
            raise DataError(
                f"the chat template writes a tool call's arguments as JSON; expected a mapping or JSON text, got "
                f"{given!r:.80}"
            ) from None

    return [
        {**message, "tool_calls": [fitted(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
