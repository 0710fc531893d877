"""What every recipe does around the trainer that is its own: check, load, measure, train, save, measure again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from peft import PeftModel
from rich.console import Console
from trl import get_peft_config

from ..common.files import writing_to
from ..trainers.sft_trainer import LigerTrainer
from .data.datasets import RunData, load_run_datasets
from .ending import print_ending
from .metric_rows import MetricRow, shown_rows
from .models import ModelFiles, load_student, open_model, with_processor
from .output_dir import again, check_output_dir, finish, save_student
from .results import RunResults, patch_facts, print_before, print_results, print_rows, run_console
from .samples import Measurement, ModelFacts, Prompt, compare, measure, model_facts
from .train_loop import Clock, check_checkpoint, train

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

TrainerT = TypeVar("TrainerT", bound=LigerTrainer)


@dataclass(frozen=True)
class Preparation:
    """Everything that a run opens before it loads weights."""

    config: "RunConfig"
    console: Console
    clock: Clock
    output_dir: Path
    data: RunData
    student: ModelFiles


def prepare(config: "RunConfig") -> Preparation:
    """Check the output directory, load the rows and open the student's files.

    Raises:
        ConfigError: the output directory is taken or in use, or there is no such model, dataset or checkpoint.
        DataError: the dataset is wrong.
    """
    clock = Clock()
    output_dir = check_output_dir(config)
    check_checkpoint(config)
    student = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, student.vocab_size)
    return Preparation(config, run_console(), clock, output_dir, data, with_processor(config, student, data))


def load_trainer(run: Preparation, trainer_class: type[TrainerT], args: Any, **teacher: Any) -> TrainerT:
    """Load the weights and tokenize the rows.

    Args:
        args: `config.training_args()`, called before: it sets up the devices that weights are loaded onto.
        teacher: keywords of a trainer that distils.
    """
    config = run.config
    loading = run.console.status("Loading weights, tokenizing rows")
    with run.clock("load"), loading, config.refusals(trainer_class.__name__):
        student = load_student(config, run.student)
        trainer = trainer_class(
            student,
            args=args,
            train_dataset=run.data.train,
            eval_dataset=run.data.test,
            processing_class=run.student.processing,
            peft_config=None if isinstance(student, PeftModel) else get_peft_config(config.model_args()),
            **teacher,
        )
    if trainer.row_facts:  # rows with images are prepared batch by batch
        print_rows(run.console, trainer.row_facts)
    return trainer


def train_and_save(
    run: Preparation,
    trainer: LigerTrainer,
    prompts: list[Prompt],
    rows: tuple[MetricRow, ...],
    teacher_texts: list[str] | None = None,
    teacher: Callable[[], ModelFacts] | None = None,
) -> Path:
    """Measure, train, save, measure again, and write the results; return the output directory.

    Meanwhile no other process may train in it.

    Args:
        rows: the metrics to print.
        teacher_texts: the teacher's completions of the prompts.
        teacher: measures the facts about the teacher, if it is one model and not the student's own base; right after
            the trained student's, so that their speeds compare.

    Raises:
        Interrupted: training was stopped, and a checkpoint saved.
        ConfigError: another process trains in the output directory.
        StorageError: the disk is full, read-only or over its quota.
    """
    with trainer.folder_locked():
        measure_now = partial(measure, trainer, prompts, run.config["max_new_tokens"])
        return _train_and_save(run, trainer, measure_now, prompts, rows, teacher_texts, teacher)


def _train_and_save(
    run: Preparation,
    trainer: LigerTrainer,
    measure_now: Callable[[], Measurement],
    prompts: list[Prompt],
    rows: tuple[MetricRow, ...],
    teacher_texts: list[str] | None,
    teacher: Callable[[], ModelFacts] | None,
) -> Path:
    config, clock = run.config, run.clock
    with writing_to(run.output_dir, again(run.output_dir)):
        before, training = train(trainer, config, measure_now, clock, partial(_show_before, run.console, rows))
        with clock("save"):
            save_student(trainer, config, run.output_dir)
    with clock("measure_after"):
        after = measure_now()
        beside = teacher() if teacher else None
    results = RunResults(
        recipe=config.recipe,
        config=config.source,
        before=before.metrics,
        after=after.metrics,
        completions=compare(prompts, before, after, teacher_texts),
        data=run.data.facts,
        rows=trainer.row_facts,
        patched=patch_facts(
            trainer.graph_reports, student=trainer.patched, teacher=getattr(trainer, "teacher_patched", None)
        ),
        training=training,
        seconds=clock.seconds,
        log_history=trainer.state.log_history,
        models={
            "student": model_facts(trainer.accelerator.unwrap_model(trainer.model), after.tokens_per_second),
            **({"teacher": beside} if beside else {}),
        },
    )
    with writing_to(run.output_dir, again(run.output_dir)):
        finish(trainer, config, run.output_dir, results)
    print_results(run.console, results, shown_rows(rows, [results.before]), run.output_dir)
    print_ending(run.console, config, results, run.output_dir)
    return run.output_dir


def _show_before(console: Console, rows: tuple[MetricRow, ...], before: dict[str, float]) -> None:
    print_before(console, shown_rows(rows, [before]), before)
