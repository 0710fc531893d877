"""Samples on the disk: a part for each batch, gathered into shards, and an index with what they were sampled by.

A part is written as a whole before the index names it, so whenever a process is killed, all batches but the one at hand
are there. What stands in the samples, and not the moment of an interruption, decides what comes next.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.files import sha256, write_atomically
from ...errors import ConfigError, CorruptError
from ...teachers.fingerprints import shortened
from .sieve import Sample

FOLDER, INDEX, LOCK, VERSION = "samples", "index.json", ".lock", 1
PARTS_OF_A_SHARD = 64


@dataclass
class SampleStore:
    """The samples of one output directory.

    Attributes:
        identity: what decides the samples and which of them are kept: options, teacher, prompts.
        shards, parts: files in order, each with name, batches and SHA-256.
        summary: of finished data.
    """

    path: Path
    identity: dict[str, Any]
    shards: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    @classmethod
    def open(cls, output_dir: Path, identity: dict[str, Any]) -> "SampleStore":
        """Return the store of a directory, new or with the samples of an earlier process.

        Raises:
            ConfigError: it holds other files, or samples that were made otherwise.
            CorruptError: the index cannot be read.
        """
        # as it will come back from the file: tuples are lists there
        path, identity = output_dir / FOLDER, json.loads(json.dumps(identity))
        if not (path / INDEX).is_file():
            # nothing of the user's is ever written over
            others = sorted(p.name for p in output_dir.iterdir() if p.name != FOLDER)
            if others:
                raise ConfigError(f"{output_dir} holds other files ({', '.join(others[:3])}): choose an empty folder.")
            return cls(path, identity)
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            store = cls(path, index["identity"], index["shards"], index["parts"], index["summary"])
            version = index["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{path / INDEX} cannot be read: {type(error).__name__}: {error}") from None
        different = list(_differences(store.identity, identity))
        if version != VERSION:
            different = [f"written by another version ({version})"]
        if different:
            raise ConfigError(
                f"{output_dir} holds data that was sampled otherwise and cannot be continued: {'; '.join(different)}. "
                "Restore these, or choose another folder."
            )
        return store

    @property
    def batches(self) -> int:
        return sum(file["batches"] for file in (*self.shards, *self.parts))

    def samples(self) -> Iterator[Sample]:
        """Yield all samples in order.

        Raises:
            CorruptError: a file is missing or not what was written.
        """
        for file in (*self.shards, *self.parts):
            for line in self._content(file).decode().splitlines():
                yield Sample(**json.loads(line))

    def add(self, samples: list[Sample]) -> None:
        """Write a batch down."""
        lines = [json.dumps(dataclasses.asdict(sample)) + "\n" for sample in samples]
        # by the number of the batch: a part that a killed process left is written over
        self.parts.append(self._write(f"part-{self.batches:06}.jsonl", "".join(lines).encode(), 1))
        self._write_index()
        # Shards keep the number of files small; the index names a shard before its parts go.
        if len(self.parts) == PARTS_OF_A_SHARD:
            # read back and compared with their hashes while they are gathered
            gathered = self.parts
            content = b"".join(self._content(part) for part in gathered)
            self.shards.append(self._write(f"shard-{len(self.shards):05}.jsonl", content, len(gathered)))
            self.parts = []
            self._write_index()
        self._remove_leftovers()

    def finish(self, summary: dict[str, Any]) -> None:
        self.summary = summary
        self._write_index()

    def _content(self, file: dict[str, Any]) -> bytes:
        try:
            content = (self.path / file["name"]).read_bytes()
        except OSError as error:
            raise CorruptError(f"{self.path / file['name']} cannot be read: {error.strerror}.") from None
        if sha256(content) != file["sha256"]:
            raise CorruptError(f"{self.path / file['name']} is not what was written: its SHA-256 differs.")
        return content

    def _write(self, name: str, content: bytes, batches: int) -> dict[str, Any]:
        write_atomically(self.path / name, content)
        return {"name": name, "batches": batches, "sha256": sha256(content)}

    def _write_index(self) -> None:
        content = {name: getattr(self, name) for name in ("identity", "shards", "parts", "summary")}
        write_atomically(self.path / INDEX, json.dumps({"version": VERSION, **content}, indent=1))

    def _remove_leftovers(self) -> None:
        """Remove parts that a shard holds, or that a process was killed over."""
        # while there are parts, the index still needs them
        if not self.parts:
            for file in self.path.glob("part-*.jsonl"):
                file.unlink()


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            yield f"{key} was {shortened(before.get(key))} and is {shortened(now.get(key))}"
