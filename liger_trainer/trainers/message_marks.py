"""A chat template that marks parts of messages as learned, made from any template that renders messages one by one.

TRL learns what a template writes between `{% generation %}` and `{% endgeneration %}`. The template made here writes
what the first one writes. It asks that one for the text up to a message and for the text with it, and puts the
difference between these marks. It serves to prepare rows; the tokenizer keeps its own.
"""

import re
from typing import Any

from datasets import Dataset
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import get_dataset_column_names, is_conversational

from .messages import MASKED, is_plain

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
    columns = [name for name in ("messages", "prompt", "completion") if name in get_dataset_column_names(dataset)]
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
