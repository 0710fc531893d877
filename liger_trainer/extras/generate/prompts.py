"""Where prompts come from: rows of a dataset, or the teacher itself.

A chat model that is shown its template up to an empty user turn writes what a user might ask: Magpie's idea (Xu et al.
2024, arXiv:2406.08464).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import yaml
from datasets import Dataset

from ...config.run_config import check_text, load_run_config
from ...errors import ConfigError, DataError
from ...run.data.datasets import load_run_datasets
from ...run.data.row_checks import BadRows
from ...run.data.sources import load_source
from ...teachers.fingerprints import rows_fingerprint
from ...trainers.chat_rows import NO_ANSWERS, in_messages
from ...trainers.chat_template import fitting
from ...trainers.rows import text_prompt_ids
from .options import GenerateOptions
from .sieve import Sample, grams_of
from .teachers import Answer, Ask, Tokens

COLUMNS = ("prompt", "messages", "conversations", "instruction")
BATCHES_OF_A_WINDOW = 64  # prompts of so many batches are sorted by length before they are cut into batches
EMPTY_TURN = "liger-trainer-empty-turn"  # stands where the user's text will be


class PromptSource(Protocol):
    """Prompts in batches, each with its own seed; `batches` is None without an end.

    `samples` returns a batch's prompts, each as a sample: dropped already, or yet to be completed.
    """

    @property
    def batches(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def samples(self, batch: int, ask: Ask, seed: int) -> list[tuple[Sample, Tokens]]: ...


@dataclass(frozen=True)
class Renderer:
    """Prompts as a teacher's tokens."""

    tokenizer: Any
    options: GenerateOptions

    @property
    def chat(self) -> bool:
        return bool(self.tokenizer.chat_template) and not self.options.plain

    def prompt(self, value: Any) -> list[dict[str, Any]] | str | None:
        """Return a row's prompt as messages, or as text for a model without chat template; None if there is none.

        Answers at the end of a conversation are left out.
        """
        if isinstance(value, str):
            if not value.strip():
                return None
            if not self.chat:
                return value
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not all(isinstance(m, dict) and m.get("role") for m in value):
            return None
        asked = [i for i, message in enumerate(value) if message["role"] in NO_ANSWERS]
        if not asked or value[asked[-1]]["role"] == "system":
            return None
        messages = [{k: v for k, v in message.items() if v is not None} for message in value[: asked[-1] + 1]]
        if self.options.system_prompt is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.options.system_prompt}, *rest]
        return messages

    def tokens(self, prompt: list[dict[str, Any]] | str) -> Tokens:
        if isinstance(prompt, str):
            return text_prompt_ids(prompt, self.tokenizer)
        prompt = fitting(prompt, self.tokenizer)
        rendered = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])


class GivenPrompts:
    """The prompts of a dataset, in windows that are sorted by length, longest first.

    Raises:
        ConfigError: no such dataset, split or column; chat messages for a teacher without chat template.
        DataError: a row without a prompt.
    """

    def __init__(self, options: GenerateOptions, renderer: Renderer):
        self._options, self._renderer = options, renderer
        self._rows, self._column = _prompt_rows(options)
        if isinstance(self._rows[0][self._column], list) and not renderer.chat:
            raise ConfigError(
                f"prompts: {options.prompts} holds chat messages, and the teacher has no chat template (or `plain` is "
                "set). Choose a chat model, or a prompt_column of text."
            )
        if options.system_prompt is not None and not renderer.chat:
            raise ConfigError("system_prompt: has no effect on prompts of plain text.")
        # each prompt as often as it is to be answered, one after the other
        self._total = len(self._rows) * options.completions_per_prompt
        self.batches = -(-self._total // options.batch_size)
        self.fingerprint = rows_fingerprint(self._rows)
        self._window: tuple[int, list[tuple[Any, Tokens]]] = (-1, [])

    def samples(self, batch: int, ask: Ask, seed: int) -> list[tuple[Sample, Tokens]]:
        # windows and not the whole dataset: a prompt is rendered when its turn comes
        number, place = divmod(batch, BATCHES_OF_A_WINDOW)
        if self._window[0] != number:
            self._window = number, self._sorted(number)
        size, most = self._options.batch_size, self._options.max_prompt_tokens
        chosen = self._window[1][place * size : (place + 1) * size]
        return [(Sample(p, None, dropped="long prompt" if len(ids) > most else None), ids) for p, ids in chosen]

    def _sorted(self, window: int) -> list[tuple[Any, Tokens]]:
        size = self._options.batch_size * BATCHES_OF_A_WINDOW
        numbers = range(window * size, min((window + 1) * size, self._total))
        rendered: dict[int, tuple[Any, Tokens]] = {}
        for row in sorted({number // self._options.completions_per_prompt for number in numbers}):
            prompt = self._renderer.prompt(self._rows[row][self._column])
            if prompt is None:
                raise DataError(f"{self._options.prompts}: row {row} has no prompt in column {self._column!r}.")
            rendered[row] = prompt, self._renderer.tokens(prompt)
        entries = [rendered[number // self._options.completions_per_prompt] for number in numbers]
        # Longest first: batches have little padding, and one that does not fit into memory fails at once.
        return sorted(entries, key=lambda entry: -len(entry[1]))


def _prompt_rows(options: GenerateOptions) -> tuple[Dataset, str]:
    # the smallest configuration that loads rows as a run does
    text = yaml.safe_dump({"model_name_or_path": "none", "dataset_name": options.prompts, "recipe": "sft"})
    config = check_text(text, "prompts")
    bad = BadRows(to_train=False)
    try:
        splits = load_source(config, bad).splits
    except ConfigError as error:
        raise ConfigError(f"prompts: {str(error).partition('dataset_name: ')[2] or error}") from None
    bad.check()
    if options.prompts_split not in splits:
        raise ConfigError(f"prompts_split: no split {options.prompts_split!r}; there is {', '.join(splits)}.")
    rows = splits[options.prompts_split]
    if not len(rows):
        raise DataError(f"{options.prompts}: split {options.prompts_split!r} has no rows.")
    column = options.prompt_column
    if column is None:
        rows = in_messages(rows)
        have = rows.column_names
        column = next((c for c in (*COLUMNS, *(have if len(have) == 1 else ())) if c in have), None)
    if column is None or column not in rows.column_names:
        raise ConfigError(
            f"prompt_column: expected a column with prompts, {', '.join(COLUMNS)}; {options.prompts} has: "
            f"{', '.join(rows.column_names)}."
        )
    if "tools" in rows.column_names or "chat_template_kwargs" in rows.column_names:
        raise ConfigError("prompts: rows with the column tools or chat_template_kwargs are not supported; remove it.")
    return rows.select_columns([column]), column


class DrawnPrompts:
    """Prompts that the teacher writes into an empty user turn, without end.

    Raises:
        ConfigError: the teacher has no chat template, or its template marks the end of a user turn by no special token.
    """

    batches = None

    def __init__(self, options: GenerateOptions, renderer: Renderer):
        self._options, self._renderer = options, renderer
        if not renderer.chat:
            raise ConfigError("prompts: missing; this teacher has no chat template from which it could draw prompts.")
        tokenizer = renderer.tokenizer
        before, after = self._around(tokenizer)
        self._start: Tokens = tokenizer(before, add_special_tokens=False)["input_ids"]
        # a special token that stands behind the user's text ends what is drawn
        ends = set(tokenizer(after, add_special_tokens=False)["input_ids"]) & set(tokenizer.all_special_ids)
        if not ends:
            raise ConfigError(
                "prompts: missing; the teacher's chat template marks the end of a user turn by no special token, so "
                "prompts cannot be drawn from it."
            )
        self._ends = tuple(sorted(ends))
        self.fingerprint = "drawn"

    def _around(self, tokenizer: Any) -> tuple[str, str]:
        messages = self._renderer.prompt([{"role": "user", "content": EMPTY_TURN}])
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # a template may trim or change the text: then it is not found
        before, found, after = text.partition(EMPTY_TURN)
        if not found:
            raise ConfigError("prompts: missing; the teacher's chat template does not show the user's text as it is.")
        return before, after

    def samples(self, batch: int, ask: Ask, seed: int) -> list[tuple[Sample, Tokens]]:
        most = self._options.max_prompt_tokens
        drawn = ask([self._start] * self._options.batch_size, seed, most, self._ends)
        return [self._sample(answer) for answer in drawn]

    def _sample(self, answer: Answer) -> tuple[Sample, Tokens]:
        text = answer.text.strip()
        prompt = self._renderer.prompt(text)
        if prompt is None:
            return Sample("", None, answer.tokens, dropped="empty prompt"), []
        if not answer.finished:
            return Sample(prompt, None, answer.tokens, dropped="unfinished prompt"), []
        return Sample(prompt, None, answer.tokens), self._renderer.tokens(prompt)


def prompt_source(options: GenerateOptions, tokenizer: Any) -> PromptSource:
    """Return where the prompts come from."""
    renderer = Renderer(tokenizer, options)
    return GivenPrompts(options, renderer) if options.prompts else DrawnPrompts(options, renderer)


def held_out_grams(options: GenerateOptions) -> tuple[frozenset[int], str | None]:
    """Return the hashes of the word n-grams in the held-out rows, and the SHA-256 of that dataset; nothing without.

    Raises:
        ConfigError: the rows are token ids.
    """
    if options.held_out is None:
        return frozenset(), None
    data = load_run_datasets(load_run_config(options.held_out, exact=True))
    if data.facts.form == "input_ids":
        raise ConfigError(f"held_out: {options.held_out} has rows of token ids, with which no text can be compared.")
    return grams_of(data.test.to_list(), options.held_out_ngram), data.facts.sha256
