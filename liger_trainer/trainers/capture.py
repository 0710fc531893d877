"""Capture a teacher cache: the teacher reads the rows that training will see, and its records of each token are saved.

Rows are taken in the order of their keys and cut into shards of about one size. A shard depends only on its rows, so
a capture that was killed goes on with the first shard that is not in the index, and ends with the same files. What it
has read of a shard is written down each minute and when the capture is interrupted, and is not read again.

Several processes, each with the whole teacher, read batches of one shard at a time, and the first one writes. A batch
has the same rows whoever reads it, so any number of processes writes the same files.
"""

import copy
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel

from ..common.console import announce, on_first_rank
from ..common.files import sha256, write_atomically, writing_to
from ..errors import ConfigError
from ..losses.model_parts import embedding_rows, head_rows, output_module
from ..patching.options import PatchOptions
from ..patching.packing.packed_rows import PackedRows
from ..patching.patcher import patched_record
from ..teachers.base import patch_layers
from ..teachers.cache.reader import HiddenReader, Reader, TeacherReader
from ..teachers.cache.records import HEAD, RecordFormat
from ..teachers.cache.store import (
    INDEX,
    VERSION,
    CacheIndex,
    CacheSettings,
    Fingerprints,
    HeadFile,
    HiddenSettings,
    Shard,
    TeacherName,
    check_shards,
    pack_shard,
    read_index,
    unpack_shard,
    write_index,
)
from ..teachers.fingerprints import data_fingerprint, teacher_fingerprint, template_fingerprint, tokenizer_fingerprint
from ..teachers.model import keeps_device, load_teacher, stream_weights
from ..teachers.row_keys import documents
from ..teachers.vocabulary import tokenizer_size
from .config import LigerDistillConfig
from .options import AUTO
from .row_preparation import PreparedRows, prepare_rows
from .rows import check_ids, check_positions
from .student import pop_liger_options

# The teacher: a model, patched as a live one is, and what makes records of it.


class RowReader(Protocol):
    """Makes the records (supervised tokens, bytes) of each of several rows, by their keys, token ids and labels."""

    def read(self, keys: Sequence[bytes], rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]: ...


@dataclass(frozen=True)
class CaptureSource:
    """What says what a teacher predicts, and what the cache's index says about it."""

    reader: RowReader
    settings: CacheSettings | HiddenSettings
    teacher: TeacherName
    fingerprint: str
    comes_from: Literal["files", "memory", "vllm", "distillkit"]


def model_source(
    teacher: PreTrainedModel | str, args: LigerDistillConfig, rows: PreparedRows, undoing: ExitStack
) -> CaptureSource:
    """Load a teacher and patch it, until `undoing` is left.

    Raises:
        ConfigError: it lacks tokens of the vocabulary, or cannot be recorded as `cache_kind` says.
        DataError: rows have ids that it does not have.
    """
    vocabulary, kind, form = tokenizer_size(rows.tokenizer), cast(Any, args.cache_kind), None
    if kind != "hidden":
        form = RecordFormat.of(kind, args.cache_entries, args.cache_tail_draws, args.cache_bits, vocabulary)
    model = load_teacher(teacher, args)
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if args.teacher_offload:
        stream_weights(model, args.device)
    elif not spread and not keeps_device(args) and getattr(model, "hf_quantizer", None) is None:
        model.to(args.device)  # pyright: ignore[reportArgumentType]
    model.requires_grad_(False).eval()
    # Before anything is read: logits differ in their last bits between patched layers and others.
    undoing.callback(_patched_as_live(model, args))
    size = 0 if output_module(model) is None else head_rows(model)
    if size < vocabulary:
        raise ConfigError(
            f"The teacher knows {size} tokens, but the student's tokenizer has {vocabulary}: they do not share a "
            "vocabulary. Use a teacher with the same tokenizer."
        )
    check_ids(rows.largest_ids, "tokens", embedding_rows(model), "the teacher has")
    check_ids(rows.largest_ids, "labels", vocabulary, "the tokenizer has")
    check_positions(rows.datasets, args, model, "the teacher")
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    reader: Reader
    settings: CacheSettings | HiddenSettings
    if form is None:
        reader = HiddenReader(model, vocabulary, autocast)
        head, layout = reader.head, reader.head.format
        settings = HiddenSettings(
            kind="hidden", width=layout.width, dtype=layout.dtype, scale=head.scale, softcap=head.softcap,
            vocab_size=vocabulary, max_length=args.max_length, shard_mb=args.cache_shard_mb,
        )  # fmt: skip
    else:
        settings = token_settings(form, args)
        reader = TeacherReader(model, form, settings.temperature, settings.seed or 0, autocast)
    path_or_id = teacher if isinstance(teacher, str) else None
    name = TeacherName(
        name=path_or_id or type(model).__name__,
        revision=args.teacher_model_revision if path_or_id else None,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    fingerprint = teacher_fingerprint(teacher, args)
    return CaptureSource(reader, settings, name, fingerprint, "files" if path_or_id else "memory")


def token_settings(form: RecordFormat, args: LigerDistillConfig, unknown: tuple[str, ...] = ()) -> CacheSettings:
    """Return the settings of a cache of tokens. `unknown`: what its records leave open."""
    return CacheSettings.model_validate(
        {
            **dataclasses.asdict(form),
            "temperature": float(args.loss_temperature),
            "seed": args.seed if form.draws else None,
            "max_length": args.max_length,
            "shard_mb": args.cache_shard_mb,
            "unknown": unknown,
        }
    )


def _patched_as_live(teacher: PreTrainedModel, args: LigerDistillConfig) -> Callable[[], None]:
    """Patch a teacher as `LigerDistillTrainer` patches a live one for padded rows, so that it rounds as that does.

    Returns:
        What gives the model back as it was.
    """
    if args.teacher_offload:
        announce("teacher: its layers are not patched, since their weights are streamed.")
        return lambda: None
    earlier = patched_record(teacher)
    was_packed = earlier is not None and earlier.packs_attention
    options = pop_liger_options(copy.copy(args)) or PatchOptions()
    rows = PackedRows(certain=False) if args.attention == AUTO and not args.torch_compile else None
    record = patch_layers(teacher, options, "teacher", rows)
    if record is None or was_packed:
        return lambda: None
    return record.undo if earlier is None else record.unpack_attention


LOCK, MIB = ".lock", 2**20
SECONDS_OF_A_PART = 60.0
"""What a killed capture has to read again, at most."""
Progress = Callable[[int, int], None]
"""Called with the number of tokens read so far and the number of all."""


class Place(NamedTuple):
    """Where a document stands: tokens `start` to `end` of a row of a dataset."""

    dataset: str
    row: int
    start: int
    end: int


@dataclass(frozen=True)
class CapturePlan:
    """The rows to capture, each once, in the order of their keys."""

    rows: PreparedRows
    keys: list[bytes]
    places: list["Place"]
    tokens: np.ndarray  # supervised, of each row
    shard: np.ndarray  # of each row, ascending without gaps

    @classmethod
    def of(cls, rows: PreparedRows, tokens_of_shard: int) -> "CapturePlan":
        entries: dict[bytes, tuple[Place, int]] = {}
        for name, dataset in rows.datasets.items():
            for document in documents(dataset):
                if document.tokens:
                    end = document.start + len(document.input_ids)
                    place = Place(name, document.row, document.start, end)
                    entries.setdefault(document.key, (place, document.tokens))
        # In the order of keys, which is random and the same whatever order the datasets have.
        keys = sorted(entries)
        tokens = np.array([entries[key][1] for key in keys], dtype=np.int64)
        before = np.cumsum(tokens) - tokens
        shard = np.unique(before // tokens_of_shard, return_inverse=True)[1]
        return cls(rows, keys, [entries[key][0] for key in keys], tokens, shard)

    @property
    def shards(self) -> int:
        return int(self.shard[-1]) + 1 if len(self.keys) else 0

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the token ids and labels of a row."""
        name, row, start, end = self.places[index]
        content = self.rows.datasets[name][row]
        return torch.tensor(content["input_ids"][start:end]), torch.tensor(content["labels"][start:end])

    def batches(self, shard: int, size: int) -> list[np.ndarray]:
        """Return the rows of a shard in batches, rows of similar length together."""
        rows = np.flatnonzero(self.shard == shard)
        # stable, so that a batch has the same rows in each process and after an interruption
        lengths = [self.places[row].end - self.places[row].start for row in rows]
        rows = rows[np.argsort(lengths, kind="stable")]
        return [rows[at : at + size] for at in range(0, len(rows), size)]


def capture(
    teacher: PreTrainedModel | str, args: LigerDistillConfig, tokenizer: Any, train: Dataset,
    test: Dataset | dict[str, Dataset] | None = None, progress: Progress | None = None,
) -> CacheIndex:  # fmt: skip
    """Write the teacher cache `args.teacher_cache_dir`, or go on with one that was interrupted.

    Args:
        teacher: a causal LM, or its directory or hub id.
        args: as for training from the cache: `teacher_cache_dir`, the `cache_` fields, `temperature`, and all that
            decides how rows are prepared. `per_device_eval_batch_size` rows are read at a time.
        tokenizer, train, test: as the trainer will get them.

    Returns:
        The index of the finished cache.

    Raises:
        ConfigError: the directory cannot be written to, holds a finished cache, one with other settings, another
            capture at work, or other files; DeepSpeed; the teacher lacks tokens of the vocabulary.
        CorruptError: what an earlier capture left is damaged.
        StorageError: the disk is full, read-only or over its quota; the shards before are kept.
    """
    if args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ConfigError(
            "Each process that captures a cache holds the whole teacher, which DeepSpeed may partition. Leave "
            "deepspeed out, and launch the processes without it; training from the cache may then use it."
        )
    return write_cache(partial(model_source, teacher, args), args, tokenizer, train, test, progress)


def write_cache(
    source: Callable[[PreparedRows, ExitStack], CaptureSource], args: LigerDistillConfig, tokenizer: Any,
    train: Dataset, test: Dataset | dict[str, Dataset] | None, progress: Progress | None,
) -> CacheIndex:  # fmt: skip
    """Write what a source says about the rows into a cache, as `capture` does.

    Args:
        source: makes it of the prepared rows; what it changes is undone by the stack.
    """
    if args.teacher_cache_dir is None:
        raise ConfigError("teacher_cache_dir says where the cache is written; it is not set.")
    path = Path(args.teacher_cache_dir).expanduser()
    first = args.process_index == 0
    with ExitStack() as stack:

        def begin() -> CacheIndex | None:
            # A folder that holds something, but no cache, keeps_device as it is: a lock in it would be one file more.
            if path.is_dir() and not (path / INDEX).is_file():
                others = sorted(file.name for file in path.iterdir() if file.name != LOCK and not file.match(".*.tmp"))
                if others:
                    raise ConfigError(
                        f"{path} holds other files ({', '.join(others[:3])}): choose an empty teacher_cache_dir."
                    )
            stack.callback(_locked(path).release)
            return _earlier(path)

        before = on_first_rank(first, begin)
        rows = prepare_rows(args, tokenizer, train, test)
        at_work = _Capture.of(path, source(rows, stack), args, rows, before)
        with writing_to(path, "The same command goes on with the capture."):
            index = at_work.run(progress if progress and first else lambda *_: None)
        return on_first_rank(first, lambda: index)


def _locked(path: Path) -> FileLock:
    """Make the directory and return its lock, taken."""
    lock = FileLock(path / LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"Another capture is writing {path}. Wait for it, or choose another directory.") from None
    except OSError as error:
        raise ConfigError(f"teacher_cache_dir: {path} cannot be written to: {error.strerror}") from None
    return lock


def _earlier(path: Path) -> CacheIndex | None:
    """Return the index that an interrupted capture left, or None. Check its shards and remove unfinished files."""
    for leftover in path.glob(".*.tmp"):
        leftover.unlink()
    if not (path / INDEX).is_file():
        return None
    index = read_index(path)
    if index.finished:
        raise ConfigError(
            f"{path} holds a finished teacher cache. Training uses it with `teacher: cache`; to capture again, remove "
            "it or choose another teacher_cache_dir."
        )
    for _ in check_shards(path, index, contents=True):
        pass
    _remove_parts(path, index)
    return index


def _remove_parts(path: Path, index: CacheIndex) -> None:
    """Remove the parts of shards that are whole."""
    needed = {part.name for part in index.parts}
    for file in path.glob("shard-*-part-*.safetensors"):
        if file.name not in needed:
            file.unlink()


@dataclass
class _Capture:
    """A capture while it runs."""

    path: Path
    plan: CapturePlan
    reader: RowReader
    index: CacheIndex
    batch_size: int
    rank: int
    ranks: int

    @classmethod
    def of(
        cls, path: Path, source: CaptureSource, args: LigerDistillConfig, rows: PreparedRows, before: CacheIndex | None
    ) -> "_Capture":
        plan = CapturePlan.of(rows, max(1, args.cache_shard_mb * MIB // source.settings.format.bytes))
        index = CacheIndex(
            version=VERSION,
            finished=False,
            teacher=source.teacher,
            settings=source.settings,
            fingerprints=Fingerprints(
                teacher=source.fingerprint,
                teacher_from=source.comes_from,
                tokenizer=tokenizer_fingerprint(rows.tokenizer),
                chat_template=template_fingerprint(rows.tokenizer),
                data=data_fingerprint(plan.keys),
            ),
            rows=len(plan.keys),
            tokens=int(plan.tokens.sum()),
            shards=(),
        )
        if before is not None:
            different = before.differences(index)
            if different:
                raise ConfigError(
                    f"{path} holds a capture with other settings, which cannot be continued: "
                    f"{'; '.join(different)}. Restore them, remove it, or choose another teacher_cache_dir."
                )
            index = before
        return cls(
            path, plan, source.reader, index, args.per_device_eval_batch_size, args.process_index, args.world_size
        )

    def run(self, progress: Progress) -> CacheIndex:
        if self.rank:  # reads its batches of each shard, and hands them to the first process
            for number in range(len(self.index.shards), self.plan.shards):
                for batches in self._batches_left(number, {}):
                    gather_object([self._read(batches)])
            return self.index
        if not (self.path / INDEX).is_file():
            write_index(self.path, self.index)
        each, left = self.index.settings.format.bytes, self.index.tokens - self.index.tokens_read
        announce(
            f"teacher cache: {left:,} tokens of {each:,} bytes are to be written, {left * each / MIB:,.0f} MiB; "
            f"{shutil.disk_usage(self.path).free / MIB:,.0f} MiB are free in {self.path}"
        )
        if isinstance(self.reader, HiddenReader) and self.index.head is None:
            content = self.reader.head.pack()
            write_atomically(self.path / HEAD, content)
            self._update(head=HeadFile(name=HEAD, bytes=len(content), sha256=sha256(content)))
        for number in range(len(self.index.shards), self.plan.shards):
            rows = self._read_shard(number, progress)
            shard = self._write(f"shard-{number:05}.safetensors", rows)
            self._update(shards=(*self.index.shards, shard), parts=())
            _remove_parts(self.path, self.index)
        self._update(finished=True)
        return self.index

    def _batches_left(self, number: int, rows: dict[bytes, Tensor]) -> list[list[np.ndarray]]:
        """Return the batches of a shard that are not in `rows` of the first process, those that are read at once
        together: one a process."""

        def missing() -> list[int]:
            return [i for i, batch in enumerate(batches) if any(self.plan.keys[row] not in rows for row in batch)]

        batches = self.plan.batches(number, self.batch_size)
        left = on_first_rank(self.rank == 0, missing)
        return [[batches[i] for i in left[at : at + self.ranks]] for at in range(0, len(left), self.ranks)]

    def _read(self, batches: list[np.ndarray]) -> dict[bytes, Tensor]:
        """Return the records of this process's batch by their keys; nothing where there are too few batches."""
        records: dict[bytes, Tensor] = {}
        for batch in batches[self.rank : self.rank + 1]:
            keys = [self.plan.keys[i] for i in batch]
            records.update(zip(keys, self.reader.read(keys, [self.plan.row(i) for i in batch]), strict=True))
        return records

    def _read_shard(self, number: int, progress: Progress) -> dict[bytes, Tensor]:
        """Return the records of a shard's rows by their keys. What parts of it hold is not read again."""
        rows: dict[bytes, Tensor] = {}
        for part in self.index.parts:
            rows.update(unpack_shard(self.path / part.name))
        done, fresh, written = self.index.tokens_read, dict[bytes, Tensor](), time.monotonic()
        try:
            progress(done, self.index.tokens)
            for batches in self._batches_left(number, rows):
                read = {key: row for each in gather_object([self._read(batches)]) for key, row in each.items()}
                fresh.update(read)
                done += sum(len(records) for key, records in read.items() if key not in rows)
                progress(done, self.index.tokens)
                if time.monotonic() - written >= SECONDS_OF_A_PART:
                    rows |= self._keep(number, fresh)
                    fresh, written = {}, time.monotonic()
        except BaseException as error:  # Ctrl-C too
            if not isinstance(error, OSError):  # the disk may be full
                self._keep(number, fresh)
            raise
        return rows | fresh

    def _keep(self, number: int, rows: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        """Write rows of a shard down before it is whole, and return them."""
        if rows:
            part = self._write(f"shard-{number:05}-part-{len(self.index.parts):05}.safetensors", rows)
            self._update(parts=(*self.index.parts, part))
        return rows

    def _write(self, name: str, rows: dict[bytes, Tensor]) -> Shard:
        """Write rows to a file, in the order of their keys."""
        keys = sorted(rows)
        content = pack_shard(keys, [rows[key] for key in keys])
        write_atomically(self.path / name, content)
        tokens = sum(map(len, rows.values()))
        return Shard(name=name, rows=len(rows), tokens=tokens, bytes=len(content), sha256=sha256(content))

    def _update(self, **changes: Any) -> None:
        self.index = self.index.model_copy(update=changes)
        write_index(self.path, self.index)
