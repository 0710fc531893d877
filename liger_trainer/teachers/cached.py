"""`teacher: cache`: a trainer's teacher out of a cache. Rows carry their own key, so no column has to come along.

TRL's packing and its collator keep token ids, labels and the lengths of what was packed, and nothing else. That is
all it takes: each document's content says where its records are, and the collator lays them out as the batch is.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from ..common.files import sha256
from ..errors import ConfigError, DataError
from ..losses.sparse import SparseAnswer
from .base import DistillHost, Teacher
from .cache.store import TeacherCache
from .config import TeacherConfig
from .fingerprints import teacher_fingerprint
from .row_keys import row_key, spans, supervised_tokens
from .vocabulary import check_student_vocabulary

RECORDS = "teacher_records"


class CachedTeacher(Teacher):
    """A teacher cache in the place of a teacher.

    Args:
        args: `teacher_cache_dir`, `verify_teacher_cache`, the loss's temperature, `max_length`.
        teacher: the model or the name that the cache must have been captured from; None to take it as it is.

    Raises:
        ConfigError: no such cache, or one of another teacher, max_length or temperature.
        CorruptError: it is damaged.
    """

    knows_new_tokens = False

    def __init__(self, args: TeacherConfig, teacher: Any = None):
        assert args.teacher_cache_dir is not None
        self.cache = TeacherCache(args.teacher_cache_dir, verify=args.verify_teacher_cache)
        self.cache.check_settings(args.max_length, args.loss_temperature)
        if teacher is not None:
            self._check_teacher(teacher, args)

    def fingerprints(self) -> dict[str, Any]:
        index = self.cache.index
        parts = index.model_dump(mode="json", include={"settings", "fingerprints"})
        return {"name": str(self.cache.path), **parts, "shards": sha256(repr(index.shards).encode())}

    def prepare(self, trainer: DistillHost) -> int:
        return check_student_vocabulary(trainer.student, self.cache.index.settings.vocab_size)

    def _check_teacher(self, teacher: Any, args: TeacherConfig) -> None:
        there = self.cache.index.fingerprints.teacher_from
        here = "files" if isinstance(teacher, str) else "memory"
        if there != here:
            raise ConfigError(
                f"The teacher cache {self.cache.path} was captured from a model in {there}, which cannot be compared "
                f"with one in {here}. Leave the teacher out to train from the cache as it is."
            )
        name = teacher if isinstance(teacher, str) else type(teacher).__name__
        self.cache.check_teacher(name, teacher_fingerprint(teacher, args))

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        """Whether the cache has every row of a prepared dataset, made with this tokenizer. No GPU is needed.

        Raises:
            ConfigError: it was captured with another tokenizer or chat template, or from other data.
        """
        self.cache.check_tokenizer(tokenizer)
        if isinstance(dataset, Dataset):
            self.cache.check_rows(dataset, name)

    def collator(self, collator: Any) -> "CacheCollator":
        return CacheCollator(collator, self.cache)

    def answer(self, inputs: dict[str, Any]) -> SparseAnswer:
        """The teacher at the positions of a batch, whose records are taken out of `inputs`. On their device."""
        form = self.cache.format
        return SparseAnswer(form.decode(inputs.pop(RECORDS)), form.tail, form.vocab_size)


class CacheCollator:
    """TRL's collator, and `teacher_records` (batch, length, bytes): of each position that predicts a token.

    Raises, when called:
        DataError: a row that the cache does not have.
    """

    def __init__(self, collator: Any, cache: TeacherCache):
        self.collator, self.cache = collator, cache

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        records = [record for example in examples for record in self._of(example)]
        predicts = pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
        found, expected = sum(map(len, records)), int(predicts.sum())
        if found != expected:
            raise DataError(
                f"A batch has {expected} supervised tokens, and the cache {found} for its rows. Labels must be as the "
                "rows have them: with eval_packing, use packing too, so that the collator keeps documents apart."
            )
        laid_out = torch.zeros(*predicts.shape, self.cache.format.bytes, dtype=torch.uint8)
        if records:
            laid_out[predicts] = torch.cat(records)
        batch[RECORDS] = laid_out
        return batch

    def _of(self, example: dict[str, Any]) -> list[Tensor]:
        """The records of an example's documents, in their order."""
        ids, labels = example["input_ids"], example.get("labels", example["input_ids"])
        found = []
        for start, end in spans(len(ids), example.get("seq_lengths")):
            if supervised_tokens(labels[start:end]) == 0:
                continue
            records = self.cache.records(row_key(ids[start:end], labels[start:end]))
            if records is None:
                raise DataError(
                    f"A row of {end - start} tokens, beginning with {list(ids[start : start + 8])}, is not in the "
                    f"teacher cache {self.cache.path}: it was captured from other data."
                )
            found.append(records)
        return found
