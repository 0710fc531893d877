"""`teacher_prompt`: a teacher that reads instructions or context which its student does not see.

The teacher's rows are the student's with more in front: a system message where rows are chats, else the text itself.
Its answer at a token is moved to that token's place in the student's row. So the student learns to do without being
instructed (context distillation: Askell et al. 2021, arXiv:2112.00861; Snell et al. 2022, arXiv:2209.15189).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from heapq import nsmallest
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from jinja2 import TemplateError
from torch import Tensor
from trl import is_conversational
from trl.data_utils import is_conversational_from_value

from ..errors import ConfigError, DataError
from ..patching.patcher import base_of
from ..teachers.base import Cut, DistillHost, Teacher, without_labels
from ..teachers.config import TeacherConfig
from ..teachers.fingerprints import data_fingerprint
from ..teachers.row_keys import row_key, rows_with

IDS, SIZES, REPLACES = "teacher_prompt_ids", "teacher_prompt_sizes", "teacher_prompt_replaces"


class Front(NamedTuple):
    """What the teacher reads in place of the first tokens of a row.

    Attributes:
        ids: the tokens of the prompt, with those that begin every row.
        head: the tokens that begin every row of the student, which `ids` replace.
        opening: how a row with its own system message begins; empty where that cannot be seen.
    """

    ids: list[int]
    head: list[int]
    opening: list[int]


def front_of(prompt: str, tokenizer: Any, chat: bool) -> Front:
    """Return what the teacher reads before a row.

    Args:
        prompt: the text of a system message, or, without chat, text that goes before the row's.

    Raises:
        ConfigError: the chat template knows no system message.
    """
    words = ((number, word) for word, number in tokenizer.get_vocab().items() if word.isascii() and word.isalnum())
    # Two words of one token each, as in any vocabulary: what differs between their rows is the question, all else is
    # what the tokenizer or template adds.
    probes = [word for _, word in nsmallest(2, words)]
    if not chat:
        bare, whole = (tokenizer(probes[0], add_special_tokens=special)["input_ids"] for special in (False, True))
        # what special tokens stand before a text
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return Front(whole[:start] + tokenizer(prompt, add_special_tokens=False)["input_ids"], whole[:start], [])
    fronts = [_front_of_chat(prompt, tokenizer, probe, probes) for probe in probes]
    # a template that looks at the question would give each row another beginning
    if fronts[0] != fronts[1]:
        raise ConfigError("teacher_prompt: the chat template writes a system message in another way for each question.")
    return fronts[0]


def _front_of_chat(prompt: str, tokenizer: Any, probe: str, probes: list[str]) -> Front:
    user = {"role": "user", "content": probe}

    def rendered(*system: str) -> list[int]:
        messages = [*({"role": "system", "content": text} for text in system), user]
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]

    try:
        # with the prompt, without one, and with two others
        long, short, *others = rendered(prompt), rendered(), *map(rendered, probes)
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"teacher_prompt is a system message, which the chat template refuses: {error}") from None
    if others[0] == others[1]:
        raise ConfigError("teacher_prompt: the chat template leaves system messages out.")
    # from the end: the question and what follows it, which both rows share
    same = _alike(long[::-1], short[::-1])
    opening = others[0][: _alike(*others)]
    shows = opening != short[: len(opening)]  # else a row without one begins like this too
    return Front(long[: len(long) - same], short[: len(short) - same], opening if shows else [])


def _alike(one: list[int], other: list[int]) -> int:
    """Return how many of the first tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class PrivilegedTeacher(Teacher):
    """A teacher in this process, around which rows get `teacher_prompt`, or each its `teacher_prompt_column`.

    Args:
        inner: the model, or the student without its adapters.

    Raises:
        ConfigError: packed rows, losses that do not compare logits; later, tokenized or streamed rows.
        DataError: a row that does not begin as rows of its kind do, such as a chat with its own system message, or
            whose first tokens are learned; with a column, a row without text.
    """

    def __init__(self, args: TeacherConfig, inner: Teacher):
        self._args, self._inner = args, inner
        if args.packing or args.padding_free or args.eval_packing:
            raise ConfigError(
                "teacher_prompt goes before each row: set packing, eval_packing and padding_free to false."
            )
        plan = args.loss_plan()
        if plan.of("hidden") or plan.other_tokens:
            raise ConfigError(
                "teacher_prompt goes with losses on logits of the same tokens: leave hidden_*, uld and alm out."
            )
        self._prompt, self._column = args.teacher_prompt, args.teacher_prompt_column
        self._tokenizer: Any = None
        self._longest = 0
        self._chat: dict[str, bool] = {}
        self._fronts: dict[tuple[str, bool], Front] = {}
        self._of_rows: dict[bytes, Front] = {}

    @property
    def model(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.model

    @property
    def patched(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.patched

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        first = next(iter(dataset))
        # in a tokenized row nobody knows where a system message would stand
        if not isinstance(dataset, Dataset) or "input_ids" in first:
            raise ConfigError(
                f"teacher_prompt needs rows of text or messages that can be read beforehand; the {name} dataset is "
                "streamed or tokenized already."
            )
        if self._column is not None and ("prompt" in first and "completion" not in first):
            raise ConfigError(
                f"teacher_prompt_column: rows that are only prompts, as in the {name} dataset, keep no columns."
            )
        # such rows become chats when they are prepared
        alpaca = "instruction" in first and "output" in first and self._args.alpaca_prompt != "stanford_text"
        is_chat = is_conversational_from_value(first) or is_conversational(first) or "conversations" in first or alpaca
        self._tokenizer, self._chat[name] = tokenizer, bool(is_chat)
        self._inner.see(dataset, tokenizer, name)

    def read_rows(self, dataset: Dataset, name: str, cut: Cut) -> None:
        """Remember the prompt of every row, by its key after truncation."""
        if self._column is None:
            return
        for value, document in rows_with(self._column, dataset, "teacher_prompt_column", name):
            if not isinstance(value, str):
                raise DataError(
                    f"Row {document.row} of the {name} dataset has {value!r} in the column {self._column!r}; expected "
                    "text."
                )
            front = self._front(value, self._chat[name])
            # rows come back as tokens, cut, shuffled and packed: the key is all that names them
            key = row_key(cut(document.input_ids), cut(document.labels))
            if self._of_rows.setdefault(key, front) != front:
                raise DataError(
                    f"Row {document.row} of the {name} dataset stands in the data twice, with different texts in "
                    f"{self._column!r}. Equal rows need one prompt."
                )

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        if name not in self._chat:
            raise ConfigError("teacher_prompt needs rows that the trainer prepares: leave skip_prepare_dataset out.")
        self._inner.check(dataset, name, tokenizer)
        for row in dataset.select_columns(["input_ids", "labels"]):
            front = self.front(row)
            self._longest = max(self._longest, len(row["input_ids"]) - len(front.head) + len(front.ids))

    def collator(self, collator: Any) -> "PromptCollator":
        return PromptCollator(self._inner.collator(collator), self.front)

    def fingerprints(self) -> dict[str, Any]:
        # another prompt is another teacher: a resumed run would notice
        prompts = self._of_rows or {b"": self._front(self._prompt or "", all(self._chat.values()))}
        texts = (key + repr(front.ids).encode() for key, front in prompts.items())
        return {**self._inner.fingerprints(), "prompt": data_fingerprint(texts)}

    def prepare(self, trainer: DistillHost) -> int:
        size = self._inner.prepare(trainer)
        model: Any = base_of(trainer.student if self.model is None else trainer.accelerator.unwrap_model(self.model))
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self._longest > limit:
            raise ConfigError(
                f"teacher_prompt makes the teacher's longest row {self._longest:,} tokens, and it reads {limit:,} at "
                "most (max_position_embeddings). Shorten the prompt, or set a smaller max_length."
            )
        self.reads, self.unshared = self._inner.reads, self._inner.unshared
        return size

    def longest_row(self, tokens: int) -> int:
        return tokens + max((len(front.ids) - len(front.head) for front in self._fronts.values()), default=0)

    def settle(self) -> None:
        self._inner.settle()

    def front(self, row: Mapping[str, Any]) -> Front:
        """Return what the teacher reads before a prepared row.

        Raises:
            DataError: the row does not begin as it should, or its beginning is learned; its prompt is not known.
        """
        ids, labels = list(row["input_ids"]), list(row["labels"])
        shown = f"A row of {len(ids)} tokens, beginning with {ids[:8]},"
        if self._column is not None:
            front = self._of_rows.get(row_key(ids, labels))
            if front is None:
                raise DataError(f"{shown} is of no dataset that the trainer prepared, so its prompt is not known.")
        else:
            # train and held-out rows may differ in whether they are chats
            fronts = [self._front(self._prompt or "", chat) for chat in dict.fromkeys(self._chat.values())]
            front = next((front for front in fronts if ids[: len(front.head)] == front.head), fronts[0])
        size = len(front.head)
        opening = front.opening
        if ids[:size] != front.head or (opening and ids[: len(opening)] == opening):
            raise DataError(
                f"{shown} does not begin as rows without a system message do, so teacher_prompt has no place in it. "
                "Take the system message out of the row, or put it into teacher_prompt_column."
            )
        if any(label != -100 for label in labels[1:size]):
            raise DataError(
                f"{shown} has labels on tokens that teacher_prompt replaces: learn only answers, as with prompt and "
                "completion, or assistant_only_loss: true."
            )
        return front

    def _front(self, prompt: str, chat: bool) -> Front:
        if (prompt, chat) not in self._fronts:
            self._fronts[prompt, chat] = front_of(prompt, self._tokenizer, chat)
        return self._fronts[prompt, chat]

    def answer(self, inputs: dict[str, Any]) -> Any:
        """Return the teacher's logits at the student's positions; those before the end of the prompt mean nothing."""
        ids, sizes, replaces = (inputs.pop(name) for name in (IDS, SIZES, REPLACES))
        if "position_ids" in inputs:
            raise ConfigError("teacher_prompt: rows are moved in the teacher's, so they cannot have position_ids.")
        longer = prompted(inputs["input_ids"], inputs.get("attention_mask"), ids, sizes, replaces)
        rest = {key: value for key, value in without_labels(inputs).items() if key not in longer}
        logits: Any = self._inner.answer({**rest, **longer})
        length = inputs["input_ids"].shape[1]
        # the student's position p is the teacher's p plus what the prompt is longer than what it replaces
        places = (torch.arange(length, device=sizes.device) + (sizes - replaces)[:, None]).clamp(min=0)
        return logits[torch.arange(len(places), device=sizes.device)[:, None], places]

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        with self._inner.live() as models:
            yield models


def prompted(ids: Tensor, mask: Tensor | None, prompts: Tensor, sizes: Tensor, replaces: Tensor) -> dict[str, Tensor]:
    """Return input_ids and attention_mask of rows with a prompt in place of their first tokens.

    Args:
        ids, mask: (batch, length), padded on the right.
        prompts: (batch, longest), padded on the right.
        sizes: (batch,), tokens of each prompt.
        replaces: (batch,), how many tokens of each row it replaces.

    Returns:
        Both (batch, length + longest) int64, padded on the right; nothing waits for the device.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    length, longest = ids.shape[1], prompts.shape[1]
    places = torch.arange(length + longest, device=ids.device)[None]
    in_prompt = places < sizes[:, None]
    # for each place of the longer row, the place in the student's
    in_row = places - (sizes - replaces)[:, None]
    inside = in_row.clamp(0, length - 1)
    of_prompt = places.clamp(max=longest - 1).expand(len(ids), -1)
    return {
        "input_ids": torch.where(in_prompt, prompts.gather(1, of_prompt), ids.gather(1, inside)),
        "attention_mask": torch.where(in_prompt, 1, mask.gather(1, inside) * (in_row < length)),
    }


class PromptCollator:
    """Add `teacher_prompt_ids` (batch, longest), `teacher_prompt_sizes` and `teacher_prompt_replaces` (batch,)."""

    def __init__(self, collator: Any, front: Callable[[Mapping[str, Any]], Front]):
        self.collator, self._front = collator, front

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        fronts = [self._front(example) for example in examples]
        batch = self.collator(examples)
        # at least one column: an empty prompt has nothing to gather from
        ids = torch.zeros(len(fronts), max(1, *(len(front.ids) for front in fronts), 1), dtype=torch.int64)
        for row, front in zip(ids, fronts, strict=True):
            row[: len(front.ids)] = torch.tensor(front.ids, dtype=torch.int64)
        sizes = torch.tensor([len(front.ids) for front in fronts])
        return {**batch, IDS: ids, SIZES: sizes, REPLACES: torch.tensor([len(front.head) for front in fronts])}
