"""What a chat template makes of rows: a check that it knows what they hold, tool calls as it takes them, and marks.

Marks say which parts of messages are learned. They are made from any template that renders messages one by one.
"""

import json
import re
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError, TemplateSyntaxError
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import is_conversational

from ..common.signals import LimitExceeded, limited
from ..errors import ConfigError, DataError
from ..teachers.row_keys import column_names
from .chat_rows import (
    ALIKE,
    BASIC_ROLES,
    CHAT_COLUMNS_READ,
    KEPT,
    MASKED,
    NO_ANSWERS,
    encoded,
    is_plain,
    no_answer,
)

NO_ROLE = "no-such-role"
_WRITTEN = ("content", "tools", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields that say what an answer is, or what it may call. A template that leaves them out teaches another answer."""
REFUSALS = (
    TemplateError, ArithmeticError, RecursionError, MemoryError, TypeError, ValueError, LookupError, AttributeError
)  # fmt: skip
"""What a template raises where a row is not as it expects; some are of Python's operators in it."""
_PROBE = {"liger": "probe"}
Render = Callable[[list[dict[str, Any]]], str]
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
    columns = [column for column in CHAT_COLUMNS_READ if column in dataset.column_names]
    check = ChatCheck(tokenizer, template, place, allow_unwritten, only_answers)
    rows: Any = dataset.select_columns(columns) if columns else ()
    for index, row in enumerate(rows):
        messages = _chat(row, place(index))
        if not isinstance(messages, list):
            return
        check(row, messages, index)


class ChatCheck:
    """Checks chats one by one, and renders one of each sequence of messages. Its arguments are `check_chats`'."""

    def __init__(
        self, tokenizer: Any, template: str | None, place: Callable[[int], str], allow_unwritten: bool,
        only_answers: bool,
    ):  # fmt: skip
        self._tokenizer, self._template, self.place, self._only_answers = tokenizer, template, place, only_answers
        self._seen: set[Any] = set()
        self._known: set[str] = set(_WRITTEN) if allow_unwritten else set()
        self._wanted: list[type | None] = []

    def __call__(self, row: Mapping[str, Any], messages: list[dict[str, Any]], index: int) -> None:
        if not (self._template or self._tokenizer.chat_template):  # TRL refuses it
            return
        reason = _empty_message(messages)
        if all(message.get(MASKED) is False for message in messages):
            reason = "there is nothing to learn, each message of this chat is marked as not to be learned"
        if reason is None and self._only_answers and set(row) & {"messages", "completion"}:
            reason = no_answer(messages, NO_ANSWERS)
        if reason:
            raise DataError(f"{self.place(index)}: {reason}.")
        kind = (*map(_kind, messages), bool(row.get("tools")))
        if kind in self._seen:
            return
        self._seen.add(kind)
        try:
            problem = self._rendered(row, messages)
        except LimitExceeded as error:
            raise ConfigError(
                f"{self.place(index)}: the chat template does not come to an end: rendering the row {error}. Set "
                "chat_template_path to another template."
            ) from None
        except DataError as error:
            problem = str(error)
        if problem:
            raise DataError(f"{self.place(index)}: {problem}")

    def _rendered(self, row: Mapping[str, Any], messages: list[dict[str, Any]]) -> str | None:
        """Return why a row cannot be rendered, or not all of it; None where it can."""
        rendered = _renderer(row, self._tokenizer, self._template)
        if any(message.get("tool_calls") for message in messages):
            self._wanted = self._wanted or [arguments_wanted(_renderer({}, self._tokenizer, self._template))]
            messages = with_arguments(messages, self._wanted[0]) if self._wanted[0] else messages
        return _problem(messages, rendered) or _unwritten(
            row, messages, rendered, self._tokenizer, self._template, self._known
        )


def check_as_read(stream: Any, check: ChatCheck, text_field: str) -> Any:
    """Return a stream that raises DataError at a row that cannot be learned, such as one with null for its text."""

    def passes(row: Any, index: int) -> bool:
        where = check.place(index)
        if "input_ids" in row:
            _check_tokens_of(row, where)
            return True
        messages = _chat(row, where)
        if isinstance(messages, list):
            check(row, messages, index)
            return True
        if "prompt" not in row and "messages" in row and text_field != "messages":
            raise _unreadable(where, "messages", "messages", messages)
        texts = [name for name in ("prompt", "completion") if name in row] if "prompt" in row else [text_field]
        for name in texts:
            if not isinstance(row.get(name), str):
                raise _unreadable(where, name, "text", row.get(name))
        return True

    return stream.filter(passes, with_indices=True)  # a map would lose what is known of the columns


def _check_tokens_of(row: Mapping[str, Any], place: str) -> None:
    """Raise DataError where a tokenized row holds no list of ids, or another number of labels than of ids."""
    lengths = []
    for name in (name for name in ("input_ids", "labels") if name in row):
        ids = np.array(row[name], dtype=object) if hasattr(row[name], "__len__") else None
        if ids is None or ids.ndim != 1 or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
            raise _unreadable(place, name, "a list of token ids", row[name])
        lengths.append(len(ids))
    if len({*lengths}) > 1:
        raise uneven_labels(place, *lengths)


def _unreadable(place: str, column: str, expected: str, value: Any) -> DataError:
    got = "null" if value is None else repr(value)
    return DataError(f"{place}: column {column!r}: expected {expected}, got {got:.80}.")


def uneven_labels(place: str, tokens: int, labels: int) -> DataError:
    """Return the error of a tokenized row, of a table or of a stream, whose labels are not as many as its ids."""
    return DataError(f"{place}: expected as many labels as input_ids, got {labels} labels of {tokens} tokens.")


def _chat(row: Mapping[str, Any], place: str) -> Any:
    """Return the messages of a row, of prompt and completion where it has them, as TRL does.

    Raises:
        DataError: one of these columns is an empty list.
    """
    read = ("prompt", "completion") if "prompt" in row else ("messages",)
    empty = next((name for name in read if row.get(name) == []), None)
    if empty is not None:
        raise DataError(f"{place}: column {empty!r}: expected messages, got an empty list.")
    first = row.get(read[0])
    if "completion" in row and len({isinstance(row[name], list) for name in read if name in row}) > 1:
        raise DataError(f"{place}: columns 'prompt' and 'completion': {ALIKE}.")
    return [*first, *(row.get("completion") or [])] if isinstance(first, list) and read[0] == "prompt" else first


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
    columns = set(column_names(dataset))
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

    def fitted(call: Any) -> dict[str, Any]:
        if not isinstance(call, dict):
            raise DataError(f"expected tool_calls as a list of mappings, got one of {call!r:.80}")
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


def fitting(messages: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return messages with the arguments of tool calls as the tokenizer's own chat template writes them."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    wanted = arguments_wanted(_renderer({}, tokenizer, None))
    return with_arguments(messages, wanted) if wanted else messages


def _renderer(row: Any, tokenizer: Any, template: str | None) -> Render:
    """Return what renders messages with the tools and options of a row."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options = row.get("chat_template_kwargs") or {}

    def rendered(messages: list[dict[str, Any]]) -> str:
        with limited(RENDER_SECONDS, RENDER_MIB):
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **options
            )

    return rendered


def _problem(messages: list[dict[str, Any]], rendered: Render) -> str | None:
    """Return why the template cannot render a row, or None."""
    roles = [role for role in dict.fromkeys(message["role"] for message in messages) if role not in BASIC_ROLES]
    unknown = next((role for role in roles if not _knows(role, messages, rendered)), None)
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
    row: Any, messages: list[dict[str, Any]], rendered: Render, tokenizer: Any, template: str | None, known: set[str]
) -> str | None:
    """Return which field of a row the template leaves out, or None; add those that it writes to `known`."""
    fields = [field for field in _WRITTEN if field not in known]
    for field in fields:
        if field == "tools":
            untooled = _renderer(_without(row, field), tokenizer, template)
            text = _text(rendered, messages) if row.get("tools") else None
            lacks = text is not None and text == _text(untooled, messages)
        else:
            having = [i for i, message in enumerate(messages) if message.get(field)]
            if not having:
                continue
            some = messages[: having[-1] + 1]  # thoughts of earlier answers may be left out when others follow
            text = _text(rendered, some)
            lacks = text is not None and text == _text(rendered, [_without(message, field) for message in some])
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


def _text(rendered: Render, messages: list[dict[str, Any]]) -> str | None:
    """Return the text of messages; None where the template refuses them, in whatever way it fails."""
    try:
        return rendered(messages)
    except LimitExceeded:
        raise
    except Exception:
        return None


def _knows(role: str, messages: list[dict[str, Any]], rendered: Render) -> bool:
    """Return whether a template does something else with a role than with a name that it cannot know."""
    renamed = [{**message, "role": NO_ROLE} if message["role"] == role else message for message in messages]
    text, without = _text(rendered, messages), _text(rendered, renamed)
    if text is None or without is None:  # the row is refused, as will be said; or only a name that it cannot know
        return True
    # Templates may write a role in capitals.
    return without.casefold().replace(NO_ROLE, role.casefold()) != text.casefold()


# TRL learns what a template writes between `{% generation %}` and `{% endgeneration %}`. The template made here writes
# what the first one writes. It asks that one for the text up to a message and for the text with it, and puts the
# difference between these marks. It serves to prepare rows; the tokenizer keeps its own.


ANSWERS = ("assistant", "model")  # roles
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

# The words in capitals are replaced; comments stay in the template, and write nothing.
_TEMPLATE = """\
{#- What the first template writes for these messages. -#}
{%- macro liger_chat(messages, add_generation_prompt) +%}THEIRS{%+ endmacro -%}

{#- The text up to the content of `message`, with the messages before it. For an answer that is the text that asks for
    one, if the template writes that before the answer, too. Else another content shows where the own one begins. -#}
{%- macro liger_header(before, message) -%}
    {%- set asked = liger_chat(before, true) if before and message.role in ANSWERS else '' -%}
    {%- if asked and asked != liger_chat(before, false) and liger_chat(before + [message], false).startswith(asked) -%}
        {{- asked -}}
    {%- else -%}
        {%- set name = 'liger-trainer-stand-in' -%}
        {%- set content = name if message.content is string else [{'type': 'text', 'text': name}] -%}
        {%- set text = liger_chat(before + [dict(message, content=content)], false) -%}
        {%- if name not in text -%}
            {{- raise_exception("it does not write the content of message " ~ (before|length + 1) ~ " (" ~
                message.role ~ ") where the message stands; take `supervised_part: content` out, or join the message "
                "to the next") -}}
        {%- endif -%}
        {{- text.split(name)[0] -}}
    {%- endif -%}
{%- endmacro -%}

{#- The text up to the end of these messages, the first ones of a chat whose text is `whole`. Some templates end a chat,
    not each message, with the end-of-text token; where `whole` has none at that place, it is taken off. -#}
{%- macro liger_until(whole, messages) -%}
    {%- set text = liger_chat(messages, false) if messages else '' -%}
    {%- set closed = eos_token and text.endswith(eos_token) and not whole.startswith(text) -%}
    {{- text[:-(eos_token|length)] if closed else text -}}
{%- endmacro -%}

{#- The whole chat's text is written piece by piece, up to `liger.written`, and each learned part between marks. -#}
{%- set liger_whole = liger_chat(messages, add_generation_prompt) -%}
{%- set liger = namespace(written=0) -%}
{%- for message in messages -%}
    {%- if CHOSEN -%}
        {%- set start = START -%}
        {%- set end = liger_until(liger_whole, messages[:loop.index]) -%}
        {%- if not (liger_whole.startswith(end) and end.startswith(start)) -%}
            {{- raise_exception("it renders message " ~ loop.index ~ " (" ~ message.role ~ ") otherwise where other "
                "messages follow, so its part cannot be told; take supervised_part out, or set chat_template_path to a "
                "template that renders it alike") -}}
        {%- endif -%}
        OTHERS{{- liger_whole[liger.written:start|length] -}}END
        PART{{- end[start|length:] -}}END
        {%- set liger.written = end|length -%}
    {%- endif -%}
{%- endfor -%}
OTHERS{{- liger_whole[liger.written:] -}}END
"""

# Of a template with its own marks. It writes what it marks between two characters that no text has; which message
# a mark belongs to shows in how many there are up to it.
_WITH_OWN_MARKS = """\
{%- macro liger_chat(messages, add_generation_prompt) +%}THEIRS{%+ endmacro -%}
{%- macro liger_count(messages) -%}
    {{- liger_chat(messages, false).split('\ue0f0')|length - 1 if messages else 0 -}}
{%- endmacro -%}
{%- set liger = namespace(masked=[]) -%}
{%- for message in messages -%}
    {%- if message.train is false -%}
        {%- set first = liger_count(messages[:loop.index0])|int -%}
        {%- set liger.masked = liger.masked + range(first, liger_count(messages[:loop.index])|int)|list -%}
    {%- endif -%}
{%- endfor -%}
{%- for piece in liger_chat(messages, add_generation_prompt).split('\ue0f0') -%}
    {%- set parts = piece.split('\ue0f1') -%}
    {%- if loop.first or loop.index0 - 1 in liger.masked -%}
        {{- parts|join -}}
    {%- else -%}
        {%- generation -%}{{- parts[0] -}}{%- endgeneration -%}
        {{- parts[1:]|join -}}
    {%- endif -%}
{%- endfor -%}
"""


def marked_template(template: str, part: str | None, answers_only: bool) -> str:
    """Return a template that writes what `template` writes, with marks around what is learned.

    Nothing is marked of messages whose `train` is false.

    Args:
        part: "message", all of a message with its header, or "content", from the content to the end of the turn. None:
            every token, or, of answers, what `template` marks itself.
        answers_only: mark only the model's messages.
    """
    template = template.removesuffix("\n")
    if part is None and answers_only:
        return _WITH_OWN_MARKS.replace("THEIRS", _MARK.sub(_with_characters, template))
    theirs = _MARK.sub(r"{%\1 \2with \3%}", template)  # a scope, as theirs is
    whole = "liger_until(liger_whole, messages[:loop.index0])"
    start = "liger_header(messages[:loop.index0], message)" if part == "content" else whole
    learned = f"message.role in {ANSWERS}" if answers_only else "true"
    chosen = "message.train is false" if part is None else f"{learned} and message.train is not false"
    marks = ("{%- generation -%}", "{%- endgeneration -%}")
    part_marks, other_marks = (("", ""), marks) if part is None else (marks, ("", ""))
    marked = _TEMPLATE.replace("CHOSEN", chosen).replace("START", start).replace("ANSWERS", str(ANSWERS))
    for name, (begin, end) in (("OTHERS", other_marks), ("PART", part_marks)):
        marked = re.sub(rf"{name}(.*)END", lambda found, b=begin, e=end: f"{b}{found[1]}{e}", marked)
    return marked.replace("THEIRS", theirs)


def _with_characters(mark: re.Match) -> str:
    """Return a scope in place of a template's mark, with a character at its border."""
    before, is_end, after = mark.groups()
    if is_end:
        return f"{{%{before} if true %}}{{{{ '\ue0f1' }}}}{{% endif %}}{{% endwith {after}%}}"
    return f"{{%{before} with %}}{{{{ '\ue0f0' }}}}{{% if true {after}%}}{{% endif %}}"


def has_masked_messages(dataset: Any) -> bool:
    """Return whether a message of some row is marked as not to be learned; of a stream, whether one may be."""
    columns = [name for name in ("messages", "prompt", "completion") if name in column_names(dataset)]
    if is_plain(dataset.features) or not columns or not is_conversational(next(iter(dataset))):
        return False
    if not isinstance(dataset, Dataset):
        return True
    rows: Any = dataset.select_columns(columns)
    return any(message.get(MASKED) is False for row in rows for name in columns for message in row[name])


def template_for_training(tokenizer: Any) -> str:
    """Return TRL's training template, which renders messages alike whatever follows, or the tokenizer's own."""
    try:
        known = get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none; it needs marks, and we do not
        known = None
    own = tokenizer.chat_template
    return known or (own["default"] if isinstance(own, dict) else own)
