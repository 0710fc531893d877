"""What a capture writes down of a teacher: a model, patched as a live teacher is, and what makes records of it."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.console import announce
from ..errors import ConfigError
from ..losses.model_parts import embedding_rows, head_rows, output_module
from ..patching.options import PatchOptions
from ..patching.packing.packed_rows import PackedRows
from ..patching.patcher import patched_record
from ..teachers.base import patch_layers
from ..teachers.cache.reader import HiddenReader, Reader, TeacherReader
from ..teachers.cache.records import RecordFormat
from ..teachers.cache.store import CacheSettings, HiddenSettings, TeacherName
from ..teachers.fingerprints import teacher_fingerprint
from ..teachers.placement import load_teacher, stays, stream_weights
from .config import LigerDistillConfig
from .options import AUTO
from .row_preparation import PreparedRows
from .rows import check_positions
from .student import pop_liger_options
from .token_ids import check_ids


class RowReader(Protocol):
    """Makes the records (supervised tokens, bytes) of each of several rows, by their keys, token ids and labels."""

    def read(self, keys: Sequence[bytes], rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Source:
    """What says what a teacher predicts, and what the cache's index says about it."""

    reader: RowReader
    settings: CacheSettings | HiddenSettings
    teacher: TeacherName
    fingerprint: str
    comes_from: Literal["files", "memory", "vllm", "distillkit"]


def model_source(
    teacher: PreTrainedModel | str, args: LigerDistillConfig, rows: PreparedRows, undoing: ExitStack
) -> Source:
    """Load a teacher and patch it, until `undoing` is left.

    Raises:
        ConfigError: it lacks tokens of the vocabulary, or cannot be recorded as `cache_kind` says.
        DataError: rows have ids that it does not have.
    """
    vocabulary = max(rows.tokenizer.get_vocab().values()) + 1
    form = None if args.cache_kind == "hidden" else _token_format(args, vocabulary)
    model = _ready(load_teacher(teacher, args), args)
    undoing.callback(_patched_as_live(model, args))
    _check_vocabulary(model, vocabulary)
    check_ids(rows.largest_ids, "tokens", embedding_rows(model), "the teacher has")
    check_ids(rows.largest_ids, "labels", vocabulary, "the tokenizer has")
    check_positions(rows.datasets, args, model, "the teacher")
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    reader, settings = (
        _hidden(model, args, vocabulary, autocast) if form is None else _tokens(model, args, form, autocast)
    )
    path_or_id = teacher if isinstance(teacher, str) else None
    name = TeacherName(
        name=path_or_id or type(model).__name__,
        revision=args.teacher_model_revision if path_or_id else None,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    fingerprint = teacher_fingerprint(teacher, args)
    return Source(reader, settings, name, fingerprint, "files" if path_or_id else "memory")


def _token_format(args: LigerDistillConfig, vocab_size: int) -> RecordFormat:
    kind: Any = args.cache_kind
    return RecordFormat.of(kind, args.cache_entries, args.cache_tail_draws, args.cache_bits, vocab_size)


def _tokens(
    model: PreTrainedModel, args: LigerDistillConfig, form: RecordFormat, autocast: torch.dtype | None
) -> tuple[Reader, CacheSettings]:
    settings = token_settings(form, args)
    return TeacherReader(model, form, settings.temperature, settings.seed or 0, autocast), settings


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


def _hidden(
    model: PreTrainedModel, args: LigerDistillConfig, vocab_size: int, autocast: torch.dtype | None
) -> tuple[Reader, HiddenSettings]:
    reader = HiddenReader(model, vocab_size, autocast)
    head, form = reader.head, reader.head.format
    return reader, HiddenSettings(
        kind="hidden", width=form.width, dtype=form.dtype, scale=head.scale, softcap=head.softcap,
        vocab_size=vocab_size, max_length=args.max_length, shard_mb=args.cache_shard_mb,
    )  # fmt: skip


def _ready(teacher: PreTrainedModel, args: LigerDistillConfig) -> PreTrainedModel:
    """Freeze the teacher and move it to the run's device. A quantized or spread model stays where it is."""
    spread = len(set((getattr(teacher, "hf_device_map", None) or {}).values())) > 1
    if args.teacher_offload:
        stream_weights(teacher, args.device)
    elif not spread and not stays(args) and getattr(teacher, "hf_quantizer", None) is None:
        teacher.to(args.device)  # pyright: ignore[reportArgumentType]
    return teacher.requires_grad_(False).eval()


def _patched_as_live(teacher: PreTrainedModel, args: LigerDistillConfig) -> Callable[[], None]:
    """Patch a teacher as `LigerDistillTrainer` patches a live one for padded rows, so that it rounds as that does.

    Returns:
        What gives the model back as it was.
    """
    if args.teacher_offload:
        announce("teacher: its layers are not patched: their weights are streamed.")
        return lambda: None
    earlier = patched_record(teacher)
    was_packed = earlier is not None and earlier.packs_attention
    options = pop_liger_options(copy.copy(args)) or PatchOptions()
    rows = PackedRows(certain=False) if args.attention == AUTO and not args.torch_compile else None
    record = patch_layers(teacher, options, "teacher", rows)
    if record is None or was_packed:
        return lambda: None
    return record.undo if earlier is None else record.unpack_attention


def _check_vocabulary(teacher: PreTrainedModel, real: int) -> None:
    size = 0 if output_module(teacher) is None else head_rows(teacher)
    if size < real:
        raise ConfigError(
            f"The teacher knows {size} tokens, but the student's tokenizer has {real}: they do not share a vocabulary. "
            "Use a teacher with the same tokenizer."
        )
