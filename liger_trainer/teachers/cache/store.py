"""A teacher cache on disk: an index and shards of records, read through memory maps, looked up by row keys.

    index.json                  settings, fingerprints, and of each shard its rows, tokens, bytes and SHA-256
    shard-00000.safetensors     keys (rows, 16), offsets (rows + 1,), records (tokens, bytes of a token)
    head.safetensors            the teacher's output head, with hidden states (records.py)

Rows are sorted by key over all shards, so bisection finds a row. The index is rewritten after every shard, and its
last version says that the cache is finished. Every file is written atomically, so a killed capture leaves whole files.
While a capture works on a shard, it writes what it has of it to shard-00000-part-00000.safetensors and so on, of the
same form, which it removes when the shard is whole.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from datasets import Dataset
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ...common.files import sha256, write_atomically
from ...errors import ConfigError, CorruptError
from ..fingerprints import shortened, template_fingerprint, tokenizer_fingerprint
from ..row_keys import KEY_BYTES, documents
from .records import HEAD, Dtype, HiddenFormat, RecordFormat, TeacherHead

VERSION = 1
INDEX = "index.json"
_OPEN_SHARDS = 256  # memory maps at a time


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class CacheSettings(_Part):
    """How a cache of tokens was captured. A capture goes on only where all of these are the same."""

    kind: Literal["topk", "sampled"]
    entries: int
    tail_draws: int = 0  # older caches lack the key
    bits: Literal[8, 16]
    temperature: float
    vocab_size: int
    seed: int | None  # of the draws
    max_length: int | None
    shard_mb: int
    unknown: tuple[Literal["label_log_prob", "entropy"], ...] = ()
    """what another tool's records do not say, and ours hold zeros for"""

    @property
    def format(self) -> RecordFormat:
        return RecordFormat(self.kind, self.entries, self.bits, self.vocab_size, self.tail_draws)

    @property
    def fixed(self) -> dict[str, Any]:
        """Return what a run must have in common with the capture, by name."""
        return {"max_length": self.max_length, "temperature": self.temperature}


class HiddenSettings(_Part):
    """How a cache of hidden states was captured; scale and softcap are the head's. It is of no temperature."""

    kind: Literal["hidden"]
    width: int
    dtype: Dtype
    scale: float
    softcap: float | None
    vocab_size: int
    max_length: int | None
    shard_mb: int

    @property
    def format(self) -> HiddenFormat:
        return HiddenFormat(self.width, self.dtype)

    @property
    def fixed(self) -> dict[str, Any]:
        """Return what a run must have in common with the capture, by name."""
        return {"max_length": self.max_length}


class Fingerprints(_Part):
    """What a cache was captured from; see teachers/fingerprints.py."""

    teacher: str
    teacher_from: Literal["files", "memory", "vllm", "distillkit"]
    """where the weights were, or whose records were imported: the fingerprint is then of their files"""
    tokenizer: str
    chat_template: str | None
    data: str

    @property
    def imported(self) -> bool:
        """Whether another tool wrote the records down."""
        return self.teacher_from not in ("files", "memory")


class TeacherName(_Part):
    """The teacher's name, for people; the fingerprint decides."""

    name: str
    revision: str | None
    dtype: str


class Shard(_Part):
    name: Annotated[str, StringConstraints(pattern=r"^shard-\d{5,}(-part-\d{5,})?\.safetensors$")]
    """of a file in the cache's folder, and nowhere else"""
    rows: int
    tokens: int
    bytes: int
    sha256: str


class HeadFile(_Part):
    """The file of the teacher's head."""

    name: Literal["head.safetensors"]
    bytes: int
    sha256: str


class CacheIndex(_Part):
    """index.json, without its own checksum."""

    version: int
    finished: bool
    teacher: TeacherName
    settings: Annotated[CacheSettings | HiddenSettings, Field(discriminator="kind")]
    fingerprints: Fingerprints
    rows: int
    tokens: int
    shards: tuple[Shard, ...]
    parts: tuple[Shard, ...] = ()
    """what an unfinished capture has of the next shard"""
    head: HeadFile | None = None
    """of hidden states, once it is written"""

    @property
    def tokens_read(self) -> int:
        """Return how many tokens are written down."""
        return sum(shard.tokens for shard in (*self.shards, *self.parts))

    def differences(self, other: "CacheIndex") -> list[str]:
        """Return why `other` cannot go on where this one ended: "settings.entries: 64 there, 32 now"."""
        ours, theirs = (
            {"teacher": i.teacher, "settings": i.settings, "fingerprints": i.fingerprints} for i in (self, other)
        )
        return [
            f"{part}.{name}: {shortened(value)} there, {shortened(getattr(theirs[part], name))} now"
            for part, model in ours.items()
            for name, value in model
            if hasattr(theirs[part], name) and value != getattr(theirs[part], name)
        ]


def read_index(path: Path) -> CacheIndex:
    """Read the index of the cache in directory `path`, finished or not.

    Raises:
        ConfigError: there is no cache, or one of another version of the format.
        CorruptError: the index is damaged.
    """
    file = path / INDEX
    if not file.is_file():
        raise ConfigError(
            f"{path} holds no teacher cache: there is no {INDEX}. `liger-trainer cache CONFIG` makes one."
        )
    try:
        content = json.loads(file.read_bytes())
        checksum = content.pop("sha256")
        version = content["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{file} is damaged and cannot be read ({error}). Capture the cache again.") from None
    if checksum != _checksum(content):
        raise CorruptError(f"{file} is damaged: its content does not have the checksum that it names.")
    if version != VERSION:
        raise CorruptError(f"{file} has version {version} of the format; this liger-trainer reads version {VERSION}.")
    try:
        return CacheIndex.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise CorruptError(f"{file} is not an index of a teacher cache: {error}") from None


def write_index(path: Path, index: CacheIndex) -> None:
    # Keys that older versions did not know are left out where they say nothing, so that these read caches of today.
    absent: dict[str, Any] = {name: True for name in ("parts", "head") if not getattr(index, name)}
    if isinstance(index.settings, CacheSettings) and not index.settings.unknown:
        absent["settings"] = {"unknown"}
    content = index.model_dump(mode="json", exclude=absent)
    text = json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n"
    write_atomically(path / INDEX, text)


def _checksum(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


class TeacherCache:
    """A finished cache, for reading.

    Args:
        path: its directory.
        verify: read every shard and compare its SHA-256 first.

    A shard that changes while it is read is compared with its SHA-256 again, before more is read from it.

    Raises:
        ConfigError: there is no cache, or its capture was not finished.
        CorruptError: a shard is missing, has another length than the index says, or, if asked for, another content.
            `records` raises it too, for one that has changed.
    """

    def __init__(self, path: str | os.PathLike, verify: bool = False):
        self.path = Path(path).expanduser()
        self.index = read_index(self.path)
        if not self.index.finished:
            raise ConfigError(
                f"The capture of {self.path} is not finished: {self.index.tokens_read:,} of "
                f"{self.index.tokens:,} tokens. Run the same `liger-trainer cache` command again, and it goes on."
            )
        self.format = self.index.settings.format
        self._files = [self.path / shard.name for shard in self.index.shards]
        for _ in check_shards(self.path, self.index, contents=False):
            pass
        self._states = [_state(file) for file in self._files]  # from before contents are compared, here or in a thread
        if verify:
            for _ in check_shards(self.path, self.index, contents=True):
                pass
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._read_keys()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}  # memory maps cannot be pickled

    def __len__(self) -> int:
        return self.index.rows

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def records(self, key: bytes) -> Tensor | None:
        """Return the records (supervised tokens, bytes) uint8 of the row with this key; None without it."""
        row = self._find(key)
        if row is None:
            return None
        shard = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        start, end = self._offsets[row + shard : row + shard + 2]  # each shard has one offset more than rows
        try:
            return self._shard(shard).get_slice("records")[int(start) : int(end)]
        except SafetensorError as error:
            raise self._unreadable(shard, error) from None

    def tokens(self, key: bytes) -> int | None:
        """Return how many records the row has; None without it."""
        row = self._find(key)
        if row is None:
            return None
        row += int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return int(self._offsets[row + 1] - self._offsets[row])

    def head(self) -> TeacherHead:
        """Read the teacher's head, on the CPU, for a cache of hidden states.

        Raises:
            CorruptError: it is damaged.
        """
        settings, head = self.index.settings, self.index.head
        assert isinstance(settings, HiddenSettings) and head is not None
        _check_file(self.path, head, contents=True)
        return TeacherHead.unpack((self.path / HEAD).read_bytes(), settings.scale, settings.softcap)

    def _find(self, key: bytes) -> int | None:
        wanted = np.frombuffer(key, dtype=">u8")
        # bisect by the first half; keys with the same half stand side by side
        row = int(np.searchsorted(self._keys[:, 0], wanted[0]))
        while row < len(self._keys) and self._keys[row, 0] == wanted[0]:
            if self._keys[row, 1] == wanted[1]:
                return row
            row += 1
        return None

    def _read_keys(self) -> None:
        keys, offsets = [np.empty((0, KEY_BYTES), np.uint8)], [np.empty(0, np.int64)]
        for place in range(len(self.index.shards)):
            try:
                keys.append(self._shard(place).get_tensor("keys").numpy())
                offsets.append(self._shard(place).get_tensor("offsets").numpy())
            except SafetensorError as error:
                raise self._unreadable(place, error) from None
        # Read as big-endian, so numbers sort as bytes do; then converted, because bisection is fast on native ones.
        self._keys = np.concatenate(keys).view(">u8").astype(np.uint64)
        self._offsets = np.concatenate(offsets)
        self._first_rows = np.cumsum([0] + [shard.rows for shard in self.index.shards])[:-1]
        if len(self._keys) != self.index.rows or len(self._offsets) != self.index.rows + len(self.index.shards):
            raise CorruptError(f"The shards of {self.path} hold {len(self._keys)} rows, the index {self.index.rows}.")

    def check_unchanged(self) -> None:
        """Raise CorruptError where a shard was written to, replaced or removed, and is no longer what it was."""
        for place in range(len(self._files)):
            self._check_unchanged(place)

    def _check_unchanged(self, place: int) -> None:
        try:
            now = _state(self._files[place])
        except OSError as error:
            raise self._unreadable(place, error) from None
        if now == self._states[place]:
            return
        try:
            _check_file(self.path, self.index.shards[place], contents=True)  # a copy or new permissions do no harm
        except CorruptError as error:
            raise CorruptError(
                f"{error} It has changed since it was opened. Restore the file, or capture the cache again, then start "
                "the same run again."
            ) from None
        self._states[place] = now
        self._open.pop(place, None)

    def _shard(self, place: int) -> Any:
        self._check_unchanged(place)
        if place not in self._open:
            try:
                self._open[place] = safe_open(self._files[place], framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._unreadable(place, error) from None
            if len(self._open) > _OPEN_SHARDS:  # processes may hold so many maps and files open, not all of a cache's
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return self._open[place]

    def _unreadable(self, place: int, error: Exception) -> CorruptError:
        return CorruptError(
            f"{self._files[place]} cannot be read ({error}). `liger-trainer cache verify` says what is."
        )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ConfigError where the rows were made with another tokenizer or chat template."""
        fingerprints = self.index.fingerprints
        if tokenizer_fingerprint(tokenizer) != fingerprints.tokenizer:
            raise self._refused("with another tokenizer: its vocabulary, merges or added tokens differ")
        if template_fingerprint(tokenizer) != fingerprints.chat_template:
            raise self._refused("with another chat template")

    def check_settings(self, kind: str, **of_run: Any) -> None:
        """Raise ConfigError where a run does not fit the capture.

        Args:
            kind: the run's `cache_kind`: "hidden" or, for what is recorded of tokens, another.
            of_run: its `max_length` and `temperature`, which a cache of hidden states leaves open.
        """
        settings = self.index.settings
        if (settings.kind == "hidden") != (kind == "hidden"):
            raise ConfigError(
                f"The teacher cache {self.path} is of cache_kind: {settings.kind}, this run has cache_kind: {kind}. "
                f"They serve different losses. Set cache_kind: {settings.kind}, or name another teacher_cache_dir."
            )
        for name, there in settings.fixed.items():
            if there != of_run[name]:
                raise self._refused(f"with {name} {there}, and this run has {of_run[name]}")

    def check_teacher(self, name: str, fingerprint: str) -> None:
        """Raise ConfigError where the cache was captured from a teacher with another fingerprint."""
        teacher = self.index.teacher
        if fingerprint != self.index.fingerprints.teacher:
            raise self._refused(f"from another teacher ({teacher.name}): its weights are not those of {name}")

    def check_rows(self, dataset: Dataset, name: str) -> None:
        """Raise ConfigError where rows of a prepared dataset are not in the cache, naming the first."""
        unknown, total, first = 0, 0, None
        for document in documents(dataset):
            if document.tokens == 0:
                continue
            total += 1
            if self.tokens(document.key) != document.tokens:
                unknown += 1
                first = document if first is None else first
        if first is not None:
            raise self._refused(
                f"from other data: {unknown:,} of {total:,} rows of the {name} dataset are not in it, the first being "
                f"row {first.row} with {len(first.input_ids)} tokens, {first.tokens} of them supervised. Rows must be "
                "the same to the token, their masks too: check dataset, split, held-out rows, truncation and masks "
                "(with packing_strategy wrapped or bfd_split, packing and seed as well)"
            )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"The teacher cache {self.path} does not belong to this run: it was captured {why}. "
            "Capture it again with `liger-trainer cache CONFIG`, or restore the settings it was captured with."
        )


def check_shards(path: Path, index: CacheIndex, contents: bool) -> Iterator[Shard | HeadFile]:
    """Yield each file that the index names once it is there, has its length and, on request, its SHA-256.

    Raises:
        CorruptError: at the first one that is missing or damaged.
    """
    for file in (*(() if index.head is None else (index.head,)), *index.shards, *index.parts):
        _check_file(path, file, contents)
        yield file


def _state(file: Path) -> tuple[int, ...]:
    """Return what becomes another when a file is written to or replaced."""
    found = os.stat(file)
    # The time of the last change of the inode too: a copy tool may set the time of modification back.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_file(path: Path, expected: Shard | HeadFile, contents: bool) -> None:
    file = path / expected.name
    if not file.is_file():
        raise CorruptError(f"{file} is missing.")
    size = file.stat().st_size
    if size != expected.bytes:
        raise CorruptError(f"{file} has {size:,} bytes, and should have {expected.bytes:,}.")
    if contents and sha256(file) != expected.sha256:
        raise CorruptError(f"{file} is damaged: its content does not have the checksum of {INDEX}.")


def pack_shard(keys: list[bytes], records: list[Tensor]) -> bytes:
    """Return the content of a shard file; the rows are in the order of their keys."""
    offsets = np.cumsum([0, *(len(record) for record in records)])
    tensors = {
        "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES).copy()),
        "offsets": torch.from_numpy(offsets.astype(np.int64)),
        "records": torch.cat(records),
    }
    # One entry only: safetensors writes several in any order, and the same rows must give the same bytes.
    return save(tensors, metadata={"format": f"liger-trainer teacher cache {VERSION}"})


def unpack_shard(file: Path) -> dict[bytes, Tensor]:
    """Return the records of each row in a shard file, by the row's key."""
    tensors = load_file(file)
    ends = tensors["offsets"].tolist()
    keys = [row.tobytes() for row in tensors["keys"].numpy()]
    return {key: tensors["records"][start:end] for key, start, end in zip(keys, ends[:-1], ends[1:], strict=True)}
