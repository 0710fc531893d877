"""Which tokens two models share: their tokenizers compared id by id, as strings, and the rows of their heads.

Heads are often padded beyond the tokenizer (Qwen2.5 has 151,665 tokens in 151,936 or 152,064 rows), and one of two
tokenizers may have tokens added at its end. Both are cut off. Where an id means different tokens, nothing is shared.
"""

import json
from dataclasses import dataclass, replace
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer

from ..common.console import announce
from ..common.weights import adapter_at
from ..errors import ConfigError, DataError
from ..losses.model_parts import head_rows

SHOWN = 3  # tokens that a message names
COMPARED, SHOWN_TEXT = 8, 40  # chats whose templates are compared, and characters of each that are shown


@dataclass(frozen=True)
class Vocabulary:
    """The shared ids, 0 to `size` - 1, and what either side has besides them.

    Attributes:
        size: the number of shared ids.
        compared: whether the tokenizers were compared; if not, `size` is the student's.
        student_only, teacher_only: {id: token} that only one tokenizer has, beyond `size` or in a gap of the other.
        student_rows, teacher_rows: rows of the heads, once the models are loaded.
    """

    size: int
    compared: bool
    student_only: dict[int, str]
    teacher_only: dict[int, str]
    student_rows: int | None = None
    teacher_rows: int | None = None

    def __str__(self) -> str:
        how = (
            "the same in both tokenizers" if self.compared else "in the student's tokenizer (the teacher's is unknown)"
        )
        cut = [
            *self._cut("student", self.student_only, self.student_rows),
            *self._cut("teacher", self.teacher_only, self.teacher_rows),
        ]
        return f"{self.size:,} tokens, {how}" + (f"; left out of the loss: {', '.join(cut)}" if cut else "")

    def _cut(self, side: str, unshared: dict[int, str], rows: int | None) -> list[str]:
        end = max([self.size, *(i + 1 for i in unshared)])
        parts = []
        if unshared:
            parts.append(f"{_count(unshared, 'token')} that only the {side} has ({_named(unshared)})")
        if rows is not None and rows > end:
            parts.append(f"{_count(range(end, rows), 'row')} of padding in the {side}'s head ({_ids(end, rows)})")
        return parts

    @property
    def named_student_only(self) -> str:
        return _named(self.student_only)

    @property
    def unshared(self) -> frozenset[int]:
        """The ids that only one tokenizer has."""
        return frozenset({*self.student_only, *self.teacher_only})

    def check_rows(self, dataset: Any, name: str) -> None:
        """Raise DataError for a prepared dataset with tokens that the teacher's tokenizer does not have."""
        if not self.student_only:
            return
        if not hasattr(dataset, "with_format") or not hasattr(dataset, "num_rows"):
            raise ConfigError(
                f"The student's tokenizer has tokens that the teacher's has not ({self.named_student_only}), and "
                f"whether the {name} dataset uses them cannot be known, because its rows come on the way. Load it "
                "whole, and tokenized where skip_prepare_dataset is set."
            )
        unknown, found = np.array(sorted(self.student_only)), np.zeros(len(self.student_only), dtype=np.int64)
        # In Arrow, since Python lists of all rows would take far longer.
        for table in dataset.with_format("arrow").iter(1000):
            ids = table["input_ids"].combine_chunks().values.to_numpy(zero_copy_only=False)
            found += np.bincount(np.searchsorted(unknown, ids[np.isin(ids, unknown)]), minlength=len(unknown))
        used = {int(i): self.student_only[int(i)] for i in unknown[found > 0]}
        if used:
            raise DataError(
                f"The {name} dataset uses {_count(used, 'token')} that the teacher's tokenizer does not have, "
                f"{found.sum():,} times: {_named(used)}. Leave them out of the rows and the chat template, use a "
                "teacher that knows them, or distil across tokenizers with an `alm` or `uld` loss."
            )


def compare_tokenizers(student: Any, teacher: Any | None) -> Vocabulary:
    """Return what two tokenizers share; all of the student's tokens where the teacher's tokenizer is unknown.

    Tokens are compared as the vocabularies spell them, not how either tokenizer splits text.

    Raises:
        ConfigError: an id means different tokens, or they have no id in common.
    """
    ours = _by_id(student)
    if teacher is None:  # no tokenizer is next to it: `with_heads` compares at least the sizes
        return Vocabulary(max(ours) + 1, False, {}, {})
    theirs = _by_id(teacher)
    # Only ids that both have can contradict. Others are tokens that one of them was given later.
    both = ours.keys() & theirs.keys()
    different = sorted(i for i in both if ours[i] != theirs[i])
    if different or not both:
        examples = (
            f"id {i} is {ours[i]!r} for the student and {theirs[i]!r} for the teacher" for i in different[:SHOWN]
        )
        shown = "; ".join(examples)
        # How many tokens are the same under other ids tells whether text could be aligned.
        students_tokens = set(ours.values())
        same = sum(token in students_tokens for token in theirs.values())
        raise ConfigError(
            f"student and teacher have different tokenizers: {len(different):,} of {len(both):,} shared ids differ; "
            f"{shown}{'; ...' if len(different) > SHOWN else ''}. The student knows {same:,} of the teacher's "
            f"{len(theirs):,} tokens under any id. Distil across them with "
            "`losses: [{type: alm}]` or `[{type: uld}]`, choose a teacher of the same model family, or distil from "
            "text that the teacher has written, with recipe: sft."
        )
    size = min(max(ours), max(theirs)) + 1
    return Vocabulary(
        size,
        True,
        {i: ours[i] for i in sorted(ours.keys() - theirs.keys())},
        {i: theirs[i] for i in sorted(theirs.keys() - ours.keys())},
    )


def with_heads(vocabulary: Vocabulary, student: Any, teacher: Any) -> Vocabulary:
    """Return the vocabulary with the rows of both heads, once the models are loaded.

    Raises:
        ConfigError: a head lacks tokens of the shared vocabulary.
    """
    rows = [head_rows(model) for model in (student, teacher)]
    check_student_vocabulary(student, vocabulary.size)
    if rows[1] < vocabulary.size:
        whose = "both tokenizers have" if vocabulary.compared else "the student's tokenizer has"
        raise ConfigError(
            f"The teacher knows {rows[1]} tokens, but {whose} {vocabulary.size}: they do not share a vocabulary. Use a "
            "teacher with the same tokenizer, or distil across tokenizers with an `alm` or `uld` loss."
        )
    return replace(vocabulary, student_rows=rows[0], teacher_rows=rows[1])


def check_student_vocabulary(student: Any, real: int) -> int:
    """Return `real`, the number of tokens, if the student has them all; else raise ConfigError."""
    size = head_rows(student)
    if size < real:
        raise ConfigError(
            f"The student knows {size} tokens, but the tokenizer has {real}: resize its embeddings, or pass "
            "the tokenizer that belongs to it."
        )
    return real


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return what ends a completion: the tokenizer's end of sequence, and what the model declares, as end of turn."""
    declared: Any = model.generation_config.eos_token_id if model.generation_config else None
    # Chat models declare their end of turn, which is another token than the tokenizer's end of sequence.
    ends: list[Any] = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return sorted({token for token in ends if token is not None})


def tokenizer_of(model: Any, revision: str | None = None, **options: Any) -> Any | None:
    """Return the tokenizer next to a model (a directory, a hub id, or a model loaded from either); None without one.

    For adapters that were saved without a tokenizer it is their base's.

    Args:
        revision: of a hub id.
        **options: for `AutoTokenizer.from_pretrained`, such as trust_remote_code.
    """
    # Where nothing is said, transformers would ask at a prompt, on every rank.
    options.setdefault("trust_remote_code", False)
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    if not name:
        return None
    if not isinstance(model, str) and not Path(name).is_dir():
        options["local_files_only"] = True  # a model in memory must not cause a download
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **options)
    except (OSError, ValueError, KeyError, ImportError):
        adapter = adapter_at(name, revision) if isinstance(model, str) else None
        return None if adapter is None else tokenizer_of(adapter.base, adapter.revision, **options)
    # Without files, transformers makes some classes with nothing but special tokens.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def teacher_tokenizer(teacher: Any, named: str | None = None, **options: Any) -> Any | None:
    """Return the tokenizer of a teacher, a model or its name.

    Args:
        named: `teacher_tokenizer_name_or_path`, which replaces the one next to the teacher.
        **options: as for `tokenizer_of`.

    Raises:
        ConfigError: `named` has none.
    """
    if named is None:
        return tokenizer_of(teacher, **options)
    tokenizer = tokenizer_of(named, trust_remote_code=options.get("trust_remote_code", False))
    if tokenizer is None:
        raise ConfigError(f"teacher_tokenizer_name_or_path: {named} has no tokenizer that transformers can read.")
    return tokenizer


def announce_other_template(rows: Any, student: Any, teacher: Any, name: str) -> None:
    """Say where a teacher's own chat template writes one of the first chats otherwise than the student's, in which the
    teacher reads them.

    Args:
        rows: not tokenized yet; plain text passes.
        student, teacher: tokenizers.
        name: the teacher's.
    """
    own = getattr(teacher, "chat_template", None)
    if not own or own == student.chat_template:
        return
    # Templates that differ only where these chats do not go are not told apart, and make no difference in these rows.
    for row in islice(rows, COMPARED):
        messages = row.get("messages") or row.get("prompt")
        if not isinstance(messages, list):
            return
        ours, theirs = (_rendered(tokenizer, row, messages) for tokenizer in (student, teacher))
        if ours != theirs:
            same = len(commonprefix([ours, theirs]))
            announce(
                f"{name}: reads chats in the student's chat template, and its own writes them otherwise: "
                f"{ours[same : same + SHOWN_TEXT]!r} and {theirs[same : same + SHOWN_TEXT]!r} behind {same:,} equal "
                "characters. Set chat_template_path to the template that the teacher knows, if that is meant."
            )
            return


def _rendered(tokenizer: Any, row: Any, messages: Any) -> str:
    """Return a chat up to where an answer is asked for; what the template says where it refuses the chat."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        return str(error)


def options_of_teacher(teacher: Any, args: Any) -> dict[str, Any]:
    """Return what a configuration says about the files of a teacher, as keywords of `teacher_tokenizer`."""
    options = {"named": args.teacher_tokenizer_name_or_path, "trust_remote_code": args.trust_remote_code}
    if isinstance(teacher, str):
        options["revision"] = args.teacher_model_revision
        gguf_file = (args.teacher_model_init_kwargs or {}).get("gguf_file")
        options |= {} if gguf_file is None else {"gguf_file": gguf_file}
    return options


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _count(of: Any, what: str) -> str:
    return f"{len(of):,} {what}{'' if len(of) == 1 else 's'}"


def _ids(start: int, end: int) -> str:
    return f"id {start:,}" if end == start + 1 else f"ids {start:,} to {end - 1:,}"


def _named(tokens: dict[int, str]) -> str:
    named = ", ".join(f"{index} {token!r}" for index, token in list(tokens.items())[:SHOWN])
    return named + (", ..." if len(tokens) > SHOWN else "")
