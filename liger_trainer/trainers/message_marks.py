"""A chat template that marks parts of messages as learned, made from any template that renders messages one by one.

TRL learns what a template writes between `{% generation %}` and `{% endgeneration %}`. The template made here writes
what the first one writes. It asks that one for the text up to a message and for the text with it, and puts the
difference between these marks. It serves to prepare rows; the tokenizer keeps its own.
"""

import re
from typing import Any

from trl.chat_template_utils import get_training_chat_template

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
    {%- if LEARNED -%}
        {%- set start = START -%}
        {%- set end = liger_until(liger_whole, messages[:loop.index]) -%}
        {%- if not (liger_whole.startswith(end) and end.startswith(start)) -%}
            {{- raise_exception("it renders message " ~ loop.index ~ " (" ~ message.role ~ ") otherwise where other "
                "messages follow, so its part cannot be told; take supervised_part out, or set chat_template_path to a "
                "template that renders it alike") -}}
        {%- endif -%}
        {{- liger_whole[liger.written:start|length] -}}
        {%- generation -%}{{- end[start|length:] -}}{%- endgeneration -%}
        {%- set liger.written = end|length -%}
    {%- endif -%}
{%- endfor -%}
{{- liger_whole[liger.written:] -}}
"""


def marked_template(template: str, part: str, answers_only: bool) -> str:
    """Return a template that writes what `template` writes, with marks around the messages that are learned.

    Args:
        part: "message", all of a message with its header, or "content", from the content to the end of the turn.
        answers_only: mark the messages of the model alone.
    """
    theirs = _MARK.sub(r"{%\1 \2with \3%}", template.removesuffix("\n"))  # a scope, as theirs is
    start = {
        "message": "liger_until(liger_whole, messages[:loop.index0])",
        "content": "liger_header(messages[:loop.index0], message)",
    }[part]
    learned = f"message.role in {ANSWERS}" if answers_only else "true"
    marked = _TEMPLATE.replace("LEARNED", learned).replace("START", start).replace("ANSWERS", str(ANSWERS))
    return marked.replace("THEIRS", theirs)


def template_for_training(tokenizer: Any) -> str:
    """Return TRL's training template, which renders messages alike whatever follows, or the tokenizer's own."""
    try:
        known = get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none; it needs marks, and we do not
        known = None
    own = tokenizer.chat_template
    return known or (own["default"] if isinstance(own, dict) else own)
