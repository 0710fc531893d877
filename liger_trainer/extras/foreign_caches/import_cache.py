"""Import a teacher cache: what another tool has written down of a teacher, as a cache of ours."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from ...common.files import sha256
from ...errors import ConfigError
from ...teachers.cache.records import RecordFormat
from ...teachers.cache.store import CacheIndex, TeacherName
from ...teachers.row_keys import documents
from ...teachers.vocabulary import compare_tokenizers, teacher_tokenizer
from ...trainers.capture import CaptureSource, Progress, token_settings, write_cache
from ...trainers.config import LigerDistillConfig
from ...trainers.row_preparation import PreparedRows
from .distillkit_records import DistillKitRecords
from .foreign import ForeignReader, ForeignRecords, MatchedRows
from .vllm_records import VLLMRecords

MOST_ENTRIES = 64  # unless cache_entries says otherwise, as in a capture


def import_cache(
    records: str | Path, tool: Literal["vllm", "distillkit"], args: LigerDistillConfig, tokenizer: Any, train: Dataset,
    test: Dataset | dict[str, Dataset] | None = None, progress: Progress | None = None,
    compression: str | Path | None = None,
) -> CacheIndex:  # fmt: skip
    """Write the teacher cache `args.teacher_cache_dir` from another tool's records, or go on with one.

    Args:
        records: its file, or a folder of its files.
        tool: "vllm", prompt log-probabilities as vLLM returns them; "distillkit", what its sample_logits_vllm writes.
        args: as for training from the cache, see `capture`. `cache_entries` defaults to as many tokens as the records
            list at every place, 64 at most.
        tokenizer, train, test: as the trainer will get them.
        compression: of DistillKit's records, the YAML file that says how they are compressed. Default:
            compression_config.yaml next to them.

    Returns:
        The index of the finished cache.

    Raises:
        ConfigError: no such records, or they list fewer tokens than `cache_entries`, other tokens than the tokenizer
            has, or not all rows; a kind of cache or a temperature that they do not give; and as `capture` does.
        DataError: a row of the records is not of the tool's form, or has no log-probabilities.
        CorruptError, StorageError: as `capture` does.
    """
    path = Path(records).expanduser()
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder.")
    _check_options(args)
    if tool == "distillkit":
        opened: ForeignRecords = DistillKitRecords(path, None if compression is None else Path(compression))
    elif compression is not None:
        raise ConfigError(f"compression: only DistillKit's records are compressed; these are of {tool}.")
    elif tool == "vllm":
        opened = VLLMRecords(path)
    else:
        raise ConfigError(f"tool: expected vllm or distillkit, got {tool!r}.")
    return write_cache(partial(_source, opened, path, args), args, tokenizer, train, test, progress)


def _check_options(args: LigerDistillConfig) -> None:
    """Raise ConfigError for a cache that no records of tokens are."""
    # hidden states and draws are not in such records
    if args.cache_kind != "topk" or args.cache_tail_draws:
        raise ConfigError(
            "Records of other tools hold the likeliest tokens and the mass of the rest: leave cache_kind at topk, and "
            f"cache_tail_draws out; got {args.cache_kind}, {args.cache_tail_draws}."
        )
    if args.loss_temperature != 1.0:
        raise ConfigError(
            f"temperature: the records are of temperature 1, the loss is of {args.loss_temperature}: what the tokens "
            "beyond their list have at another temperature cannot be known. Use temperature 1."
        )
    if args.teacher_model_name_or_path is not None:
        raise ConfigError(
            "teacher_model_name_or_path: records are imported, and no teacher is read that could be compared with "
            "them. Leave it out; teacher_tokenizer_name_or_path names the teacher's tokenizer, which is compared."
        )


def _source(
    records: ForeignRecords, path: Path, args: LigerDistillConfig, rows: PreparedRows, undoing: ExitStack
) -> CaptureSource:
    vocabulary = _vocabulary(args, rows)
    parts = {
        # rows without a supervised token need no record
        name: [(d.row, d.input_ids, d.labels) for d in documents(dataset) if d.tokens]
        for name, dataset in rows.datasets.items()
    }
    matched = MatchedRows(records, ((ids, labels) for part in parts.values() for _, ids, labels in part))
    _check_found(matched, parts, path)
    assert matched.entries is not None
    # every row of a cache has as many entries as the others
    entries = args.cache_entries or min(MOST_ENTRIES, matched.entries)
    if entries > matched.entries:
        raise ConfigError(f"cache_entries is {entries}, and {path} lists {matched.entries} tokens at some place.")
    form = RecordFormat("topk", entries, 16 if args.cache_bits == 16 else 8, vocabulary)
    # metrics that the cache cannot give: the reader leaves them out
    unknown = ("entropy",) if records.knows_labels else ("label_log_prob", "entropy")
    name = TeacherName(name=records.teacher or str(path), revision=None, dtype="not known")
    # of the files: an import that goes on must read the same ones
    fingerprint = sha256("".join(sha256(file) for file in records.files).encode())
    comes_from: Any = records.tool
    settings = token_settings(form, args, unknown)
    return CaptureSource(ForeignReader(records, matched, form), settings, name, fingerprint, comes_from)


def _vocabulary(args: LigerDistillConfig, rows: PreparedRows) -> int:
    """Return the size of the student's vocabulary, compared with the teacher's where its tokenizer is named."""
    named = args.teacher_tokenizer_name_or_path
    theirs = named and teacher_tokenizer(None, named, trust_remote_code=args.trust_remote_code)
    shared = compare_tokenizers(rows.tokenizer, theirs)
    if shared.student_only:
        raise ConfigError(
            f"The student's tokenizer has tokens that the teacher's lacks ({shared.named_student_only}), and a cache "
            "covers all of the student's. Remove them from the student's tokenizer."
        )
    return shared.size


def _check_found(matched: MatchedRows, parts: dict[str, list[tuple]], path: Path) -> None:
    """Raise ConfigError where the records lack rows, naming the first."""
    missing = [(name, *d) for name, part in parts.items() for d in part if matched.find(d[1], d[2]) is None]
    if missing:
        name, row, ids, _ = missing[0]
        raise ConfigError(
            f"{path} has no records of {len(missing):,} of {sum(map(len, parts.values())):,} rows. The first is row "
            f"{row} of the {name} dataset, with {len(ids)} tokens that begin with {ids[:8].tolist()}. Rows must be "
            "the same to the token: check dataset, chat template, special tokens and held-out rows, and have the "
            "other tool read the rows up to their last supervised token."
        )
