"""`teacher: cache`: records that a capture wrote, in the place of a teacher.

A document's key says where its records are, and the collator lays them out as the batch is; no column of the rows is
needed.
"""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ..common.files import sha256
from ..errors import ConfigError, CorruptError
from ..losses.answers import RecordedAnswer
from ..losses.sparse_answer import SparseAnswer
from ..losses.spec import TeacherAnswer
from .base import DistillHost, Teacher
from .cache.records import HiddenFormat, TeacherHead
from .cache.store import CacheIndex, CacheSettings, TeacherCache, check_shards
from .config import TeacherConfig
from .fingerprints import teacher_fingerprint
from .row_keys import DocumentCollator
from .vocabulary import check_student_vocabulary


class BackgroundCheck:
    """Compares the shards of a cache with their checksums while a training already reads them.

    A thread reads them, which waits for nobody and holds nobody up: hashing runs outside of Python.
    """

    def __init__(self, path: Path, index: CacheIndex):
        self._damage: CorruptError | None = None
        self._thread = threading.Thread(target=self._read, args=(path, index), name="teacher cache check", daemon=True)
        self._thread.start()

    def _read(self, path: Path, index: CacheIndex) -> None:
        try:
            for _ in check_shards(path, index, contents=True):
                pass
        except (CorruptError, OSError) as error:
            self._damage = CorruptError(
                f"{error} Training stopped before a checkpoint was saved with what it read there. Restore the file, or "
                "capture the cache again, then start the same run again."
            )

    def raise_if_damaged(self) -> None:
        """Raise CorruptError if damage has been found so far."""
        if self._damage is not None:
            raise self._damage

    def wait(self) -> None:
        """Return when every shard is compared. Raise CorruptError if one is damaged."""
        self._thread.join()
        self.raise_if_damaged()


RECORDS = "teacher_records"
# Assignment by a mask copies element by element, so records are laid out four times as fast in words as in bytes.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CachedTeacher(Teacher):
    """A teacher cache in the place of a teacher.

    Args:
        args: `teacher_cache_dir`, `verify_teacher_cache`, `cache_kind`, the loss's temperature, `max_length`.
        teacher: the model or name that the cache must come from; None to take the cache as it is.

    Raises:
        ConfigError: no such cache, or one of another kind, teacher, max_length or temperature.
        CorruptError: it is damaged.
    """

    knows_new_tokens = False

    def __init__(self, args: TeacherConfig, teacher: Any = None):
        assert args.teacher_cache_dir is not None
        self.cache = TeacherCache(args.teacher_cache_dir, verify=args.verify_teacher_cache)
        self.cache.check_settings(args.cache_kind, max_length=args.max_length, temperature=args.loss_temperature)
        others = sorted(term.type for term in args.loss_plan().of("divergence") if term.type != "forward_kl")
        if others and not isinstance(self.cache.format, HiddenFormat) and self.cache.format.tail == "none":
            raise ConfigError(
                f"losses: the teacher cache {self.cache.path} holds draws, which determine only the forward KL; the "
                f"loss asks for {', '.join(others)}. Capture one with cache_tail_draws: 0 or cache_kind: hidden."
            )
        self._head: TeacherHead | None = None  # of hidden states, after `prepare`
        if teacher is not None:
            self._check_teacher(teacher, args)
        verified = args.verify_teacher_cache
        # Hashing a large cache takes minutes, and a training may begin meanwhile: nothing is saved before it is done.
        self._check = None if verified else BackgroundCheck(self.cache.path, self.cache.index)

    def fingerprints(self) -> dict[str, Any]:
        index = self.cache.index
        # The path is for people. What the shards hold is told by their checksums, which the index has.
        parts = index.model_dump(mode="json", include={"settings", "fingerprints"})
        if index.head is not None:
            parts["head"] = index.head.sha256
        return {"name": str(self.cache.path), **parts, "shards": sha256(repr(index.shards).encode())}

    def prepare(self, trainer: DistillHost) -> int:
        vocab_size = check_student_vocabulary(trainer.student, self.cache.index.settings.vocab_size)
        if isinstance(self.cache.format, HiddenFormat):
            self._head = self.cache.head().to(trainer.accelerator.device)
        return vocab_size

    def _check_teacher(self, teacher: Any, args: TeacherConfig) -> None:
        there = self.cache.index.fingerprints.teacher_from
        if self.cache.index.fingerprints.imported:
            raise ConfigError(
                f"The teacher cache {self.cache.path} was imported from records of {there}, which cannot be compared "
                "with a teacher. Leave the teacher out to train from the cache as it is."
            )
        # A fingerprint of files hashes what is on disk, one of memory what was loaded, perhaps in another dtype.
        here = "files" if isinstance(teacher, str) else "memory"
        if there != here:
            raise ConfigError(
                f"The teacher cache {self.cache.path} was captured from a model in {there}, which cannot be compared "
                f"with one in {here}. Leave the teacher out to train from the cache as it is."
            )
        name = teacher if isinstance(teacher, str) else type(teacher).__name__
        self.cache.check_teacher(name, teacher_fingerprint(teacher, args))

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        """Raise where the cache lacks a row of a prepared dataset, made with this tokenizer. No GPU is needed.

        Raises:
            ConfigError: the capture had another tokenizer or chat template, or other data.
        """
        self.cache.check_tokenizer(tokenizer)
        if isinstance(dataset, Dataset):
            self.cache.check_rows(dataset, name)

    def collator(self, collator: Any) -> "CacheCollator":
        return CacheCollator(collator, self.cache)

    def settle(self) -> None:
        """Wait until every shard is compared with its checksum, and look whether one has changed since.

        Raises:
            CorruptError: one is damaged, or has changed.
        """
        if self._check is not None:
            self._check.wait()
        self.cache.check_unchanged()

    def answer(self, inputs: dict[str, Any]) -> TeacherAnswer:
        """Decode the records of a batch, which are taken out of `inputs`, on their device."""
        if self._check is not None:  # stop at the first step after damage was found, not at the next checkpoint
            self._check.raise_if_damaged()
        form = self.cache.format
        if isinstance(form, HiddenFormat):
            assert self._head is not None
            return RecordedAnswer(self._head.logits(form.decode(inputs.pop(RECORDS))))
        targets, settings = form.decode(inputs.pop(RECORDS)), self.cache.index.settings
        assert isinstance(settings, CacheSettings)
        unknown: Any = dict.fromkeys(settings.unknown)  # None in place of the zeros that stand for what is not known
        return SparseAnswer(replace(targets, **unknown), form.tail, form.vocab_size)


class CacheCollator(DocumentCollator):
    """Add `teacher_records` (batch, length, bytes), the record of each position that predicts a token."""

    def __init__(self, collator: Any, cache: TeacherCache):
        super().__init__(collator, f"is not in the teacher cache {cache.path}: it was captured from other data.")
        self.cache = cache

    def look_up(self, key: bytes, tokens: int) -> Tensor | None:
        return self.cache.records(key)

    def columns(self, answers: list[Tensor], predicts: Tensor) -> dict[str, Any]:
        size = self.cache.format.bytes
        word = next(word for word in _WORDS if size % word.itemsize == 0)
        records = torch.zeros(*predicts.shape, size // word.itemsize, dtype=word)
        if answers:
            records[predicts] = torch.cat(answers).view(word)
        return {RECORDS: records.view(torch.uint8)}
