"""Which trainings of a run in stages are left, and what can be checked of one before it is its turn."""

from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.checkpoints import checkpoints_in
from ..common.files import METRICS
from .data.datasets import load_run_datasets
from .models import check_same_tokenizer, check_student, open_model, open_teachers
from .output_dir import check_output_dir

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


def stages_to_run(config: "RunConfig") -> list["RunConfig"]:
    """Return the stages that are not finished, each with the checkpoint that it goes on from.

    Without `resume_from_checkpoint` these are all. With it, those that are finished are left out, and one that has no
    checkpoint yet starts from what the ones before it have saved.
    """
    wanted = config["resume_from_checkpoint"]
    if not wanted:
        return list(config.stages)
    *early, last = config.stages
    present, *later = [*dropwhile(_is_finished, early), last]
    if wanted is True and present.stage > 0 and not checkpoints_in(Path(present["output_dir"]).expanduser()):
        wanted = None
    return [_resumed(present, wanted), *(_resumed(stage, None) for stage in later)]


def _is_finished(stage: "RunConfig") -> bool:
    return Path(stage["output_dir"], METRICS).expanduser().is_file()


def _resumed(stage: "RunConfig", checkpoint: str | bool | None) -> "RunConfig":
    return replace(stage, values={**stage.values, "resume_from_checkpoint": checkpoint})


def check_stage(config: "RunConfig") -> None:
    """Check what can be checked of a later stage before the one ahead of it has trained.

    Raises:
        ConfigError: its output directory is taken, or there is no such teacher or dataset, or they do not fit together.
        DataError: its dataset is wrong.
    """
    check_output_dir(config)
    student = open_model(config, "model_name_or_path")
    check_student(config, student, load_run_datasets(config, student.vocab_size))
    if config.recipe == "sft":
        return
    for entry, teacher in open_teachers(config).values():
        check_same_tokenizer(entry, student, teacher)
