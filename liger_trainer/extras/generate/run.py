"""`liger-trainer generate`: sample data from a teacher, drop what is of no use, and write the rest as a dataset.

The samples are a function of options, teacher and seed: each batch has its own seed, and which samples are kept follows
from the samples before. So a run that was killed goes on after its last whole batch and ends with the same rows.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from ...common.files import write_atomically, writing_to
from ...common.weights import adapter_at
from ...errors import ConfigError, DataError
from ...plugins import DEMO
from ...secrets import redact
from ...teachers.fingerprints import template_fingerprint, tokenizer_fingerprint
from ...teachers.vocabulary import tokenizer_of
from ..demo import DEMO_MODELS, resolve_model
from ..report.model_card import public
from .options import DRAWN_ROWS, GenerateOptions
from .prompts import PromptSource, held_out_grams, prompt_source
from .sieve import FILTERS, Sample, Sieve
from .store import FOLDER, LOCK, SampleStore
from .teachers import LocalTeacher, ServedTeacher, Tokens

ROWS, CARD = "train.jsonl", "README.md"
MOST_SAMPLES_PER_ROW = 20
"""Drawn prompts have no end: sampling stops with so many samples for each row that was asked for."""
Progress = Callable[[int, int | None], None]
"""Called with the rows kept so far and those asked for, if that is known."""


@dataclass(frozen=True)
class Generated:
    """What came of it.

    Attributes:
        rows: kept and written.
        asked: rows that were asked for; None for as many as come of the prompts.
        samples: judged, kept or not.
        tokens: sampled, those of dropped samples too.
        dropped: samples by the filter that dropped them, with the first of each in `examples`.
    """

    rows: int
    asked: int | None
    samples: int
    tokens: int
    dropped: dict[str, int]
    examples: dict[str, str]


def generate(
    teacher: str,
    output_dir: str | Path,
    options: GenerateOptions | None = None,
    progress: Progress = lambda rows, asked: None,
) -> Generated:
    """Write `train.jsonl` and its card to a directory, or go on with samples that an earlier process left there.

    Args:
        teacher: directory, hub id or demo: name of a causal LM; with a server, of its tokenizer.
        output_dir: a new or empty directory, or one that this function wrote with the same options.
        options: None: all defaults, with prompts that the teacher draws.
        progress: called after each batch with the rows kept so far and those asked for, None where that is not known.

    Raises:
        ConfigError: the teacher, the prompts or the held-out rows cannot be loaded; the directory holds other files or
            data that was sampled otherwise; another process writes there.
        CorruptError: samples of an earlier process are damaged.
        DataError: no row is left, or a row has no prompt.
        StorageError: the disk is full, read-only or over its quota.
        TeacherServerError: the server cannot be reached.
    """
    path = Path(output_dir).expanduser()
    with _alone(path), writing_to(path, "The same command goes on."):
        return _Generation.of(teacher, path, options or GenerateOptions()).run(progress)


@contextlib.contextmanager
def _alone(output_dir: Path) -> Iterator[None]:
    lock = FileLock(output_dir / FOLDER / LOCK)
    try:
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        # two processes in one folder would write over each other's batches
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"Another process is writing {output_dir}. Wait for it, or choose another folder.") from None
    except OSError as error:
        raise ConfigError(f"{output_dir} cannot be written to: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Generation:
    """A generation while it runs."""

    teacher: str
    output_dir: Path
    options: GenerateOptions
    model: LocalTeacher | ServedTeacher
    prompts: PromptSource
    sieve: Sieve
    store: SampleStore

    @classmethod
    def of(cls, teacher: str, output_dir: Path, options: GenerateOptions) -> "_Generation":
        path = os.path.expanduser(resolve_model(teacher))
        tokenizer = _tokenizer(teacher, path, options)
        prompts = prompt_source(options, tokenizer)
        grams, held_out = held_out_grams(options)
        served = options.teacher_server_base_url is not None
        model = ServedTeacher(teacher, options) if served else LocalTeacher(path, tokenizer, options)
        # what decides the samples: with anything else the same folder would hold two kinds of rows
        identity = {
            "teacher": public(teacher), **options.deciding(), **_named(options), "sampled by a server": served,
            "the teacher's weights": model.fingerprint, "its tokenizer": tokenizer_fingerprint(tokenizer),
            "its chat template": template_fingerprint(tokenizer), "the prompts": prompts.fingerprint,
            "the held-out rows": held_out,
        }  # fmt: skip
        store = SampleStore.open(output_dir, identity)
        return cls(teacher, output_dir, options, model, prompts, Sieve(options, grams), store)

    @property
    def asked(self) -> int | None:
        return self.options.num_rows or (DRAWN_ROWS if self.prompts.batches is None else None)

    def run(self, progress: Progress) -> Generated:
        # finished before: the same command then only says so
        if self.store.summary and all((self.output_dir / name).is_file() for name in (ROWS, CARD)):
            return Generated(**self.store.summary)
        # What an earlier process sampled is judged again, in order: the sieve's state is not stored.
        self._judge(self.store.samples(), progress)
        while not self._is_enough():
            batch = self._sample(self.store.batches)
            self.store.add(batch)
            self._judge(iter(batch), progress)
        return self._finish()

    def _judge(self, samples: Iterator[Sample], progress: Progress) -> None:
        for sample in samples:
            if self.sieve.rows != self.asked:
                self.sieve.judge(sample)
        progress(self.sieve.rows, self.asked)

    def _is_enough(self) -> bool:
        done, limit = self.store.batches, self.prompts.batches
        if limit is None:
            # drawn prompts have no end of their own
            limit = -(-MOST_SAMPLES_PER_ROW * (self.asked or 0) // self.options.batch_size)
        return self.sieve.rows == self.asked or done >= limit

    def _sample(self, batch: int) -> list[Sample]:
        prompts = self.prompts.samples(batch, self.model.ask, self._seed(batch, "prompts"))
        # those that were dropped with their prompt are not completed
        open_ = [(number, ids) for number, (sample, ids) in enumerate(prompts) if sample.dropped is None]
        samples = [sample for sample, _ in prompts]
        if open_:
            ids: list[Tokens] = [ids for _, ids in open_]
            answers = self.model.ask(ids, self._seed(batch, "completions"), self.options.max_new_tokens, ())
            for (number, _), answer in zip(open_, answers, strict=True):
                sample = samples[number]
                chat = not isinstance(sample.prompt, str)
                # a text without chat goes on where the prompt ends, white space too
                text = answer.text.strip() if chat else answer.text
                samples[number] = dataclasses.replace(
                    sample, completion=text, tokens=sample.tokens + answer.tokens, finished=answer.finished
                )
        return samples

    def _seed(self, batch: int, purpose: str) -> int:
        # A seed for each batch and purpose, so that a run that goes on draws what it would have drawn.
        digest = hashlib.sha256(f"{self.options.seed} {batch} {purpose}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    def _finish(self) -> Generated:
        sieve = self.sieve
        generated = Generated(
            sieve.rows, self.asked, len(sieve.kept), sieve.tokens, dict(sieve.dropped), dict(sieve.examples)
        )
        if not generated.rows:
            reasons = ", ".join(f"{name}: {count}" for name, count in generated.dropped.items())
            raise DataError(f"{self.output_dir}: of {generated.samples} samples none is left ({reasons}).")
        # written in full before it takes the name that users read
        staged = self.output_dir / f".{ROWS}.tmp"
        try:
            staged.unlink(missing_ok=True)
            with staged.open("x", encoding="utf-8") as file:
                # the store may hold more samples than were judged: a batch ends after the last row that was asked for
                for kept, sample in zip(sieve.kept, self.store.samples(), strict=False):
                    if kept:
                        file.write(json.dumps(_row(sample), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self.output_dir / ROWS)
        finally:
            staged.unlink(missing_ok=True)
        summary = dataclasses.asdict(generated)
        write_atomically(self.output_dir / CARD, card(self.teacher, self.options, summary))
        self.store.finish(summary)
        return generated


def _named(options: GenerateOptions) -> dict[str, Any]:
    """Return what names files, without the folders of this machine: samples may be published with their data."""
    return {"prompts": public(options.prompts), "held_out": public(options.held_out)}


def _row(sample: Sample) -> dict[str, Any]:
    if isinstance(sample.prompt, str):
        return {"prompt": sample.prompt, "completion": sample.completion}
    return {"prompt": sample.prompt, "completion": [{"role": "assistant", "content": sample.completion}]}


def _tokenizer(teacher: str, path: str, options: GenerateOptions) -> Any:
    try:
        adapter = adapter_at(path, options.revision)
        # an adapter's own, if it was saved with one
        tokenizer = None if adapter is None else tokenizer_of(path, options.revision)
        return tokenizer or AutoTokenizer.from_pretrained(
            path, revision=options.revision or "main", trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"TEACHER: {teacher} has no tokenizer that can be read: {error}") from None


# The card of generated data: README.md with the YAML header that the hub reads.


_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_SAMPLING = (
    "seed", "temperature", "top_p", "top_k", "max_new_tokens", "max_prompt_tokens", "batch_size",
    "completions_per_prompt", "system_prompt", "dtype", "revision", "teacher_server_model",
)  # fmt: skip
_FILTERS = (
    "keep_unfinished",
    "min_completion_words",
    "max_repetition",
    "near_duplicates",
    "held_out",
    "held_out_ngram",
)


def card(teacher: str, options: GenerateOptions, summary: dict[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        summary: the fields of `Generated`.
    """
    rows, name, source = summary["rows"], public(teacher), public(options.prompts)
    header = {
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "distillation", "liger-trainer"],
        # the hub's own classes
        "size_categories": [next((name for limit, name in _SIZES if rows < limit), "n>1M")],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "train.jsonl"}]}],
    }
    origin = f"rows of {source} ({options.prompts_split})" if options.prompts else (
        "drawn by the teacher from its chat template's empty user turn (Magpie, arXiv:2406.08464)"
    )  # fmt: skip
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# Completions of {name}\n",
        f"{rows:,} rows that a language model wrote. Nobody has read them: they may be wrong, unfair or offensive.\n",
        _table(("", ""), [("teacher", name), ("prompts", origin), *_set(options, _SAMPLING)]),
        "## Licence\n",
        _licence(teacher, options),
        "## Filters\n",
        f"Of {summary['samples']:,} samples with {summary['tokens']:,} tokens, {rows:,} were kept. "
        "Each was dropped by the first filter that it failed.\n",
        _table(
            ("dropped", "samples", "why", "the first"),
            [
                (reason, f"{summary['dropped'][reason]:,}", why, summary["examples"][reason])
                for reason, why in FILTERS.items()
                if reason in summary["dropped"]
            ],
        ),
        _table(("filter", "value"), _set(options, _FILTERS)),
        "## Use\n",
        "```yaml\ndataset_name: path/to/this/folder\n```\n",
        "Written by `liger-trainer generate`. `samples/` has every sample, those that were dropped too.",
    ]
    return redact("\n".join(part for part in parts if part) + "\n")


def _licence(teacher: str, options: GenerateOptions) -> str:
    demo = DEMO_MODELS.get(teacher.removeprefix(DEMO)) if teacher.startswith(DEMO) else None
    of_teacher = f"{teacher} is under {demo.licence}" if demo else f"See the licence of {public(teacher)}"
    of_prompts = f", and the licence of the prompts from {public(options.prompts)}" if options.prompts else ""
    return (
        f"{of_teacher}{of_prompts}: some licences say what may be trained on a model's output, or how such a model "
        "must be called. This card names no licence for the rows; add one before you publish them.\n"
    )


def _set(options: GenerateOptions, names: tuple[str, ...]) -> list[tuple[str, str]]:
    values = (
        (name, public(getattr(options, name)) if name == "held_out" else getattr(options, name)) for name in names
    )
    return [(name, str(value)) for name, value in values if value is not None]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Return a text for a table's cell: what a model wrote must not end the cell or become HTML."""
    text = " ".join(text.split())
    return "".join("&lt;" if sign == "<" else f"\\{sign}" if sign in "\\|`[*_$!" else sign for sign in text)


def print_generated(path: Path, generated: Generated) -> None:
    """Print what was dropped and why, how many rows were written, and the setting that trains on them."""
    console = Console(highlight=False)
    if generated.dropped:
        table = Table("dropped", "samples", "why", "the first of them")
        for name, why in FILTERS.items():
            if name in generated.dropped:
                example = Text(generated.examples[name])  # no markup: a model wrote it
                table.add_row(name, f"{generated.dropped[name]:,}", why, example)
        console.print(table)
    rows = f"{generated.rows:,} rows of {generated.samples:,} samples ({generated.tokens:,} tokens)"
    console.print(f"{rows}: {path / 'train.jsonl'}", soft_wrap=True)
    if generated.asked is not None and generated.rows < generated.asked:
        console.print(f"{generated.asked:,} rows were asked for; sampling ended before there were so many.")
    console.print(f"Train on them: dataset_name: {path}", soft_wrap=True)
