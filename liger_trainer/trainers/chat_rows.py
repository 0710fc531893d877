"""Rows of ShareGPT and of Alpaca as the messages that chat templates know, and chats as trainers take them.

ShareGPT's `conversations` become `messages`, with the roles user and assistant for its human and gpt: every token is
learned, as TRL learns messages, unless `assistant_only_loss` is set. Alpaca's `instruction` and `input` become
`prompt`, its `output` becomes `completion`: only the completion is learned, unless `completion_only_loss` is false.
Stanford Alpaca's prompt may be written around instruction and input (`RowsConfig.alpaca_prompt`).

Messages are read as people write them: with parts, marks, tool calls and nulls. Mappings whose keys differ from row to
row are kept as JSON: in Arrow's own mappings each would get the keys of all others, with null.
"""

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from datasets import Dataset, Features, IterableDataset, Json, List, Value
from datasets.features.features import register_feature

from ..errors import DataError
from ..teachers.row_keys import column_names
from .images import COLUMNS

MASKED = "train"  # false: nothing of the message is learned; `tidy` writes it
MARKS = ("weight", "loss_weight", "train", "training", "loss")
"""Fields of a message that say whether it is learned: of OpenAI, LLaMA-Factory, axolotl and ms-swift."""
TEXT_PARTS = ("text", "input_text", "output_text")
CHATS = ("messages", "prompt", "completion")


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
        # Of a list of messages each item is written by itself, as Arrow stores them.
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
    return all(_plain_column(features[name]) for name in CHATS if name in features)


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
    for name in CHATS:
        messages = row.get(name)
        if not isinstance(messages, list):
            continue
        for message in messages:
            problem = message_problem(message, images)
            if problem:
                raise DataError(f"column {name!r}: {problem}")
        new[name] = [_tidy_message(message, images) for message in messages]
    first = next((new[name] for name in ("messages", "prompt") if name in new), None)
    # A column that some tools keep next to the turns. A chat that opens with a system message has its own.
    if first is not None and row.get("system") and not (first and first[0].get("role") == "system"):
        first.insert(0, {"role": "system", "content": row["system"]})
    if "chat_template_kwargs" in row:
        new["chat_template_kwargs"] = row["chat_template_kwargs"] or {}
    problem = tools_problem(row.get("tools"))
    if problem:
        raise DataError(problem)
    if isinstance(row.get("tools"), str) and not json.loads(row["tools"] or "[]"):  # text of no tools is not empty
        new["tools"] = None
    return new


def _tidy_message(message: dict[str, Any], images: bool) -> dict[str, Any]:
    content, kept = message.get("content"), {key: value for key, value in message.items() if key not in MARKS}
    if isinstance(content, list) and not images:
        kept["content"] = "".join(part if isinstance(part, str) else part["text"] for part in content)
    marks = [message[mark] for mark in MARKS if message.get(mark) is not None]
    return {**kept, MASKED: all(marks)} if marks else kept


def message_problem(message: Any, images: bool, content: str = "content") -> str | None:
    """Return what is wrong with a message's marks or the parts of its content, or None."""
    if not isinstance(message, dict) or (content == "content" and not isinstance(message.get("role"), str)):
        shares = isinstance(message, dict) and "from" in message
        hint = ". Name the column conversations, and it is read as ShareGPT's" if shares else ""
        return f"expected messages of role and content, got {message!r:.80}{hint}"
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


def tools_problem(tools: Any) -> str | None:
    """Return what is wrong with a row's tools, or None. Some datasets have them as JSON text, empty where are none."""
    try:
        read = json.loads(tools or "[]") if isinstance(tools, str) else tools
    except ValueError:
        read = tools
    if read is None or isinstance(read, list):
        return None
    return f"column 'tools': expected a list of tools, or JSON text of one, got {tools!r:.80}"


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


ROLES = {"human": "user", "gpt": "assistant"}
BASIC_ROLES = ("system", "user", "assistant")
NO_ANSWERS = ("system", "developer", "user", "tool")  # any other role may be a model's
IMAGE = "<image>"  # stands for an image in LLaVA's conversations
ALPACA = ("instruction", "output")
ALPACA_OPTIONAL = ("input", "system", "history")
PAIRS = (("chosen", "rejected"), ("rejected_response",), ("rejected_messages",), ("response_j", "response_k"))
VERDICTS = ("label", "kto_tag")
ALIKE = "expected both as text, or both as lists of messages"
_EXTRA = ("tools", "chat_template_kwargs")
CHAT_COLUMNS_READ = ("messages", "prompt", "completion", *_EXTRA)
READ = {*CHAT_COLUMNS_READ, "conversations", *ALPACA, *ALPACA_OPTIONAL, *COLUMNS}
KEPT = {"messages", "prompt"}


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
    """Return rows of ShareGPT as messages, of Alpaca as prompt and completion, and chats as templates take them.

    Of a chat, text in parts is joined, a column `system` becomes the first message, marks of messages become `train`
    (`MARKS`), and nulls that Arrow has filled in are left out. Rows with images keep their parts.

    Args:
        dataset: a Dataset or an IterableDataset.
        text_field: a column of plain text, which is read instead of `instruction` and `output` where there is one.
        alpaca_prompt: see `RowsConfig`.

    Raises:
        DataError: rows are for preferences, or have tools in a column `functions`; a row of Alpaca is to be plain text,
            and has a system prompt or a history; a message has parts that are no text, or a mark that is neither 0 nor
            1.
    """
    if not isinstance(dataset, Dataset | IterableDataset):  # of rows that are not prepared
        return dataset
    columns = set(column_names(dataset))
    if "input_ids" in columns:
        return dataset
    check_preferences(dataset, text_field if text_field != "text" else None)
    check_tools(columns)
    convert, removed = _conversion(columns, text_field, alpaca_prompt)
    images = not columns.isdisjoint(COLUMNS)
    # Nothing to do, so the rows stay as they are: a map would write them all once more, and change their fingerprint.
    if convert is None and (is_plain(dataset.features) or (images and "system" not in columns)):
        return dataset
    if convert is None and not isinstance(dict(next(iter(dataset), {})).get(removed[0]), list):  # plain text
        return dataset
    before = dataset.features
    # A cast changes only how JSON is read back, before the map below reads it.
    if before is not None and exact(before) != before:
        dataset = dataset.cast(exact(before))
    after = _features_of_chats(before, alpaca_prompt, removed) if isinstance(dataset, Dataset) else None

    def read(row: Any, index: int) -> dict[str, Any]:
        row = {name: row[name] if before is None else without_nulls(row[name], before[name]) for name in columns & READ}
        try:
            new = {} if convert is None else convert(row)
            new = {**{name: row[name] for name in _EXTRA if name in row}, **new}
            new.update(tidy({**row, **new}, images))
        except DataError as error:
            raise DataError(f"row {index}: {error}") from None
        return new if after is None else encoded(new, after)

    options: dict[str, Any] = {} if after is None else {"features": after}
    return dataset.map(read, with_indices=True, remove_columns=sorted(columns & {*removed, "system"} - KEPT), **options)


def _conversion(columns: set[str], text_field: str, alpaca_prompt: str) -> tuple[Callable | None, tuple[str, ...]]:
    """Return what makes a chat of a row, if it is none yet, and the columns that it is made of."""
    for name in ("messages", "prompt"):
        if name in columns:
            return None, (name,)
    if "conversations" in columns:
        return _messages, ("conversations",)
    if columns >= {*ALPACA} and text_field not in columns:
        return partial(_prompt_and_completion, form=alpaca_prompt), (*ALPACA, *ALPACA_OPTIONAL)
    return None, ("messages",)


def _features_of_chats(before: Any, alpaca_prompt: str, removed: tuple[str, ...]) -> Features:
    """Return the features of rows that `in_messages` makes of rows with the features `before`."""
    after: Any = Features(
        {name: exact(feature) for name, feature in before.items() if name not in {*removed, "system"}}
    )
    text = alpaca_prompt == "stanford_text" and removed[0] == ALPACA[0]
    made = {"conversations": ("messages",), ALPACA[0]: ("prompt", "completion")}.get(removed[0], ())
    for name in (*made, *removed, "completion"):
        if name in made or (name in before and name in CHAT_COLUMNS_READ):
            after[name] = Value("string") if text else CHAT
    if isinstance(before.get("tools"), List):
        after["tools"] = CHAT
    if "chat_template_kwargs" in before:
        after["chat_template_kwargs"] = JsonAsWritten()
    return after


def check_preferences(dataset: Any, text_field: str | None = None) -> None:
    """Raise DataError for rows that say which of two answers is better, or whether one is good.

    Args:
        text_field: a column that was named to be learned as text; where the rows have it, nothing else is read.
    """
    columns = set(column_names(dataset))
    if text_field in columns or "input_ids" in columns:
        return
    # By the names of columns, whatever they hold: an answer that was rejected looks like any other.
    pairs = next((pair for pair in PAIRS if columns.issuperset(pair)), None)
    if pairs is not None:
        _refuse_preferences(pairs, "DPOTrainer")
    answers = bool(columns & {"completion", "messages", "conversations", "output"})
    # A label may be anything else too, so a verdict is a column of this name with true or false, or 1 and 0, in it.
    verdict = next((name for name in VERDICTS if answers and name in columns), None)
    if verdict is not None:
        said = [row.get(verdict) for row in islice(dataset, 50)]
        if isinstance(next(iter(said), None), bool) or set(map(str, said)) == {"0", "1"}:
            _refuse_preferences((verdict,), "KTOTrainer")


def _refuse_preferences(columns: tuple[str, ...], trainer: str) -> None:
    plural = len(columns) > 1
    raise DataError(
        f"the rows have the column{'s' * plural} {' and '.join(columns)}: they are for preferences, and fine-tuning "
        f"would learn bad answers like good ones. TRL's {trainer} takes them (docs/preference.md). To learn their "
        f"answers all the same, keep the good ones and take the column{'s' * plural} out."
    )


def check_tools(columns: Iterable[str]) -> None:
    """Raise DataError for chats whose tools are in a column that no chat template reads."""
    columns = set(columns)
    if "functions" in columns and "tools" not in columns and columns & {"messages", "conversations", "prompt"}:
        raise DataError(
            "the rows have a column functions, OpenAI's older form of tools, which no chat template reads. Give them a "
            'column tools, with {"type": "function", "function": ...} around each, and tool_calls for function_call. '
            "To learn the chats without their tools, take the column out."
        )


def with_system(dataset: Any) -> Any:
    """Return rows whose column `system_prompt` is called `system`, as it is read; where both are there, as they are."""
    names = {*column_names(dataset)}
    called_so = "system_prompt" in names and "system" not in names and names & {"conversations", "instruction", *CHATS}
    return dataset.rename_column("system_prompt", "system") if called_so else dataset


def split_last(dataset: Any) -> Any:
    """Return rows of messages as a prompt and the last answer as its completion; rows with a prompt as they are.

    Messages behind the last answer are left out: it cannot see them, and they are not learned.

    Raises:
        DataError: a row without an answer, or with nothing before it.
    """

    def split(row: Any, index: int) -> dict[str, Any]:
        messages = row["messages"]
        answers = [place for place, message in enumerate(messages) if message["role"] not in NO_ANSWERS]
        if not answers or answers[-1] == 0:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"row {index}: only the last answer is to be learned, but there is none with a message before it; the "
                f"roles are: {roles or 'none'}. Take the row out, or learn all messages."
            )
        pair = {"prompt": messages[: answers[-1]], "completion": [messages[answers[-1]]]}
        return pair if after is None else encoded(pair, after)

    dataset = in_messages(dataset)
    columns = set(column_names(dataset))
    if "messages" not in columns or "prompt" in columns:
        return dataset
    after = None
    if isinstance(dataset, Dataset):
        parts = dataset.features["messages"]
        after = Features({**{name: f for name, f in dataset.features.items() if name != "messages"}})
        after.update(prompt=parts, completion=parts)
    options: dict[str, Any] = {} if after is None else {"features": after}
    return dataset.map(split, with_indices=True, remove_columns="messages", **options)


def _messages(row: dict[str, Any]) -> dict[str, Any]:
    messages, turns = [], row["conversations"]
    for message in turns if isinstance(turns, list) else [turns]:
        if not isinstance(message, dict) or not ({"from", "value"} <= {*message} or {"role", "content"} <= {*message}):
            raise DataError(f"column 'conversations': expected turns of from and value, got {message!r:.80}")
        names = ("from", "value") if "from" in message else ("role", "content")
        role, content = (message[name] for name in names)
        rest = {key: value for key, value in message.items() if key not in names}
        messages.append({"role": ROLES.get(role, role), "content": content, **rest})
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


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _prompt_and_completion(row: dict[str, Any], form: str) -> dict[str, Any]:
    for name in (*ALPACA, "input", "system"):
        if not isinstance(row.get(name), str | None):
            raise DataError(f"column {name!r}: expected text, got {row[name]!r:.80}")
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
