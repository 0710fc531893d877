"""Which class teaches: the one place that knows every kind of teacher. Only the one that is made is imported."""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..plugins import load
from .adapters_off import SelfTeacher
from .base import Teacher
from .config import TeacherConfig
from .model import ModelTeacher

RowsForReading = Callable[[Any, Dataset, Any, Any], Dataset]
"""(args, dataset, tokenizer, formatting_func): the rows as a model with that tokenizer reads them."""
GivenTeacher = PreTrainedModel | str | Mapping[str, PreTrainedModel | str] | None


def make_teacher(args: TeacherConfig, teacher_model: GivenTeacher, rows_for_reading: RowsForReading) -> Teacher:
    """Make the teacher that `args.teacher` names.

    Args:
        args: a `LigerDistillConfig`.
        teacher_model: what the trainer was given as its teacher.
        rows_for_reading: prepares rows for a teacher with another tokenizer.

    Raises:
        ConfigError: no teacher was given, or its cache belongs to other settings.
    """
    if args.teacher_cache_dir is not None and args.teacher != "cache":
        raise ConfigError(
            f"teacher_cache_dir has no effect with teacher={args.teacher!r}: set teacher='cache' to learn from the "
            "cache, or leave it out."
        )
    if args.teachers is not None or isinstance(teacher_model, Mapping):
        return load("teachers").EnsembleTeacher(args, teacher_model)
    if args.teacher_column is not None:
        raise ConfigError("teacher_column chooses among several teachers: name them in teachers, or leave it out.")
    if args.teacher == "cache":
        from .cached import CachedTeacher

        return CachedTeacher(args, teacher_model)
    if args.teacher != "model" and teacher_model is not None:
        raise ConfigError(f"teacher={args.teacher!r} takes no model: leave teacher_model and its name in args out.")
    # Around another teacher, which reads the row with the prompt before it.
    if args.teacher_prompt or args.teacher_prompt_column:
        if args.teacher == "server":
            raise ConfigError("teacher_prompt: the teacher must be in this process, not on a server.")
        return load("teacher_prompt").PrivilegedTeacher(args, _plain(args, teacher_model, rows_for_reading))
    return _plain(args, teacher_model, rows_for_reading)


def _plain(args: TeacherConfig, teacher_model: GivenTeacher, rows_for_reading: RowsForReading) -> Teacher:
    if args.teacher == "self":
        return SelfTeacher()
    if args.teacher == "server":
        return load("server").ServerTeacher(args)
    if teacher_model is None:
        raise ConfigError("No teacher was given: pass teacher_model, or set teacher_model_name_or_path in args.")
    assert not isinstance(teacher_model, Mapping)  # which are several
    plan = args.loss_plan()
    if plan.other_tokens:
        if plan.of("alm"):
            return load("alm").SpanTeacher(args, teacher_model, rows_for_reading)
        return load("uld").CrossTokenizerTeacher(args, teacher_model, rows_for_reading)
    return ModelTeacher(args, teacher_model)
