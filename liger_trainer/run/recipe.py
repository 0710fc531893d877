"""What every recipe does around its trainer: check, load, measure, train, save, measure again, and end."""

import json
import math
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import PeftModel
from rich.console import Console
from transformers import Trainer
from trl import get_peft_config

from .. import plugins
from ..common.files import METRICS, REPORT, write_atomically, writing_to
from ..common.weights import merged
from ..compat.trainers import model_card_tags
from ..config.conflicts import NO_FP16
from ..config.yaml_reader import setting
from ..errors import LigerTrainerError, NonFiniteError, StorageError
from ..secrets import redact, redacted
from ..trainers.sft_trainer import LigerTrainer
from .data.datasets import RunData, load_run_datasets
from .launch import device_facts, versions
from .metric_rows import MetricRow, verdict
from .models import ModelFiles, load_student, open_model, with_processor
from .results import (
    RunResults,
    check_output_dir,
    patch_facts,
    print_before,
    print_results,
    print_rows,
    resume_hint,
    run_console,
)
from .samples import ModelFacts, Prompt, compare, measure, model_facts
from .train_loop import Clock, check_checkpoint, train

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

TrainerT = TypeVar("TrainerT", bound=LigerTrainer)


@dataclass(frozen=True)
class OpenedRun:
    """Everything that a run opens before it loads weights."""

    config: "RunConfig"
    console: Console
    clock: Clock
    output_dir: Path
    data: RunData
    student: ModelFiles


def prepare(config: "RunConfig") -> OpenedRun:
    """Check the output directory, load the rows and open the student's files.

    Raises:
        ConfigError: the output directory is taken or in use, or there is no such model, dataset or checkpoint.
        DataError: the dataset is wrong.
    """
    clock = Clock()
    # What costs nothing is checked first. The rows come after the model, since their token ids are checked against it.
    output_dir = check_output_dir(config)
    check_checkpoint(config)
    on_cpu = config["use_cpu"] or not torch.accelerator.is_available()
    if config["fp16"] and on_cpu:
        raise config.error("fp16", NO_FP16)
    if config["attn_implementation"] == "flex_attention" and on_cpu:
        advice = "leave attn_implementation out, or set it to sdpa or eager"
        raise config.error("attn_implementation", f"torch's flex_attention does not train on a CPU; {advice}.")
    student = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, student.vocab_size)
    return OpenedRun(config, run_console(), clock, output_dir, data, with_processor(config, student, data))


def _check_batches(config: "RunConfig", trainer: Any) -> None:
    """Raise ConfigError where `dataloader_drop_last` would leave no batch. Packing has made the rows fewer by now."""
    for kind, rows in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        size = getattr(trainer.args, f"{kind}_batch_size") * trainer.args.world_size
        if len(rows) < size:
            reason = f"leaves no batch of the {kind} rows: there are {len(rows)}, and a batch of all devices has {size}"
            raise config.error(
                "dataloader_drop_last", f"{reason}. Leave it out, or lower per_device_{kind}_batch_size."
            )


def load_trainer(run: OpenedRun, trainer_class: type[TrainerT], args: Any, **teacher: Any) -> TrainerT:
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
            peft_config=get_peft_config(config.model_args()),
            **teacher,
        )
    if args.dataloader_drop_last:
        _check_batches(config, trainer)
    _name_base_for_good(trainer.model)
    plugins.measure_task(trainer, config, run.data)
    if trainer.row_facts:  # rows with images are prepared batch by batch
        print_rows(run.console, trainer.row_facts)
    return trainer


def _name_base_for_good(model: Any) -> None:
    """Have adapters name a base in a folder by its whole path: a relative one leads elsewhere from another folder."""
    for adapter in model.peft_config.values() if isinstance(model, PeftModel) else ():
        base = adapter.base_model_name_or_path
        if base and Path(base).is_dir():
            adapter.base_model_name_or_path = str(Path(base).absolute())


def train_and_save(
    run: OpenedRun,
    trainer: LigerTrainer,
    prompts: list[Prompt],
    rows: tuple[MetricRow, ...],
    teacher_texts: list[str] | None = None,
    teacher: ModelFacts | None = None,
) -> Path:
    """Measure, train, save, measure again, and write the results; return the output directory.

    Meanwhile no other process may train in it.

    Args:
        rows: the metrics to print.
        teacher_texts: the teacher's completions of the prompts.
        teacher: the facts about the teacher, if it is one model and not the student's own base.

    Raises:
        Interrupted: training was stopped, and a checkpoint saved.
        ConfigError: another process trains in the output directory.
        StorageError: the disk is full, read-only or over its quota.
    """
    # Until metrics.json is there: a run that begins in between would remove what this one has saved.
    with trainer.checkpoint_guard.folder_locked():
        measure_now = partial(measure, trainer, prompts, run.config["max_new_tokens"])
        config, clock = run.config, run.clock
        with writing_to(run.output_dir, resume_hint(run.output_dir)):
            show = partial(print_before, run.console, rows)
            before, training = train(trainer, config, measure_now, clock, show)
            with clock("save"):
                # Before the last evaluation, so that nothing that fails from here on costs the weights.
                save_student(trainer, config, run.output_dir)
        with clock("measure_after"):
            after = measure_now()
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
                "student": model_facts(trainer.accelerator.unwrap_model(trainer.model)),
                **({"teacher": teacher} if teacher else {}),
            },
        )
        with writing_to(run.output_dir, resume_hint(run.output_dir)):
            finish(trainer, config, run.output_dir, results)
        print_results(run.console, results, rows, run.output_dir)
        print_ending(run.console, config, results, run.output_dir)
        return run.output_dir


# What is written, and in which order: the trained weights before the last evaluation, and metrics.json last of all. Its
# presence means that the run is finished, and nothing that follows training can lose the model.


def save_student(trainer: Trainer, config: "RunConfig", output_dir: Path) -> None:
    """Save the trained weights and the tokenizer, so that transformers by itself can load them.

    A LoRA adapter is saved as an adapter, unless its base model was made by dropping layers: that base is nowhere on
    disk, so the adapter is merged into it first, and the merged model is what is evaluated from then on.

    Raises:
        ConfigError: the merged model's logits are not those with the adapter.
    """
    # The base without the dropped layers is nowhere on disk, so an adapter of it could not be loaded.
    if isinstance(trainer.model, PeftModel) and config.drops_layers():
        trainer.model = merged(trainer.model)
    model: Any = trainer.model
    model.config.use_cache = True  # off in training; whoever loads the model wants to generate
    trainer.save_model(str(output_dir), _internal_call=True)  # pushed once, with its card, at the end


def finish(trainer: Trainer, config: "RunConfig", output_dir: Path, results: "RunResults") -> None:
    """Write what follows the last evaluation: the model card, the push to the hub, metrics.json, report.html.

    Raises:
        NonFiniteError: a metric of the trained model is NaN; metrics.json says which.
        LigerTrainerError: the hub refused the model, or could not be reached; all files are written by then.
    """
    _write_card(trainer, config, output_dir, results)
    refused = _push(trainer, config) if config["push_to_hub"] else None
    if trainer.is_world_process_zero():
        content = redacted(_for_json({**asdict(results), **_circumstances(config)}))
        write_atomically(output_dir / METRICS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        _report(output_dir)
    # Errors are raised only after this: processes that still wait for one another would hang.
    trainer.accelerator.end_training()  # ends the process group too
    nans = [name for name, value in results.after.items() if math.isnan(value)]
    if nans:
        raise NonFiniteError(f"the trained model's {', '.join(nans)} is NaN: the model in {output_dir} cannot be used.")
    if refused is not None:
        upload = shlex.join(["hf", "upload", trainer.hub_model_id or output_dir.name, str(output_dir), "."])
        raise LigerTrainerError(
            f"{output_dir} is complete, but was not pushed to the hub: {refused} To push it again: {upload}"
        )


def _push(trainer: Trainer, config: "RunConfig") -> Exception | None:
    """Push the model and return the error, if any: it must not cost the results, which are not written yet."""
    try:
        trainer.push_to_hub(dataset_name=config["dataset_name"])
    # Training took hours, and the token may have expired: the results are written first.
    except Exception as error:  # errors of huggingface_hub and of its HTTP client
        return error
    return None


def _write_card(trainer: Trainer, config: "RunConfig", output_dir: Path, results: "RunResults") -> None:
    """Write the card of this run in place of the one that TRL and PEFT write; `push_to_hub` writes it once more."""
    card = plugins.load("model_card")
    model = card.Published(
        adapter=isinstance(trainer.model, PeftModel),
        chat=bool(getattr(trainer.processing_class, "chat_template", None)),
        tags=model_card_tags(trainer),
        hub_model_id=trainer.hub_model_id if config["push_to_hub"] else None,
    )

    def write(*_: Any, **__: Any) -> None:
        if trainer.is_world_process_zero():
            write_atomically(output_dir / card.NAME, redact(str(card.model_card(config, results, model))))

    # TRL and PEFT write a card of their own on each save and push, which would replace this one.
    trainer.create_model_card = write
    write()


def _circumstances(config: "RunConfig") -> dict[str, Any]:
    """Return what a run came from, and where it ran."""
    return {
        "settings": {key: {"value": value, "set_by": where} for key, (value, where) in config.changes().items()},
        "versions": versions(),
        "environment": {"platform": platform.platform(), **device_facts()},
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _report(output_dir: Path) -> None:
    """Write report.html. An error in it is printed: the run is done, and everything else is saved.

    Raises:
        StorageError: the disk is full, read-only or over its quota.
    """
    advice = f"to write it again: liger-trainer report {shlex.quote(str(output_dir))}"
    try:
        with writing_to(output_dir / REPORT, f"Everything else of the run is saved; {advice}"):
            plugins.load("report").report_run(output_dir)
    except StorageError:
        raise
    except Exception as error:
        print(f"liger-trainer: no report was written: {type(error).__name__}: {error}; {advice}", file=sys.stderr)


def _for_json(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {str(k): _for_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(v) for v in value]
    # json.dumps would write NaN, which strict readers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# The last lines of a run: the verdict, and three commands that go on from here.
STYLES = {"good": "green", "bad": "red", "": "yellow"}


def print_ending(console: Console, config: "RunConfig", results: RunResults, output_dir: Path) -> None:
    """Print the verdict of a run and what can be done next."""
    models = {name: asdict(facts) for name, facts in results.models.items()}
    judged = verdict(results.recipe, results.before, results.after, models, results.data.test_rows)
    if judged is not None:
        console.print(judged.text, style=STYLES[judged.tone], highlight=False, soft_wrap=True)
    commands = next_commands(output_dir, adapter=(output_dir / "adapter_config.json").is_file())
    width = max(map(len, commands))
    console.print("Next:", highlight=False)
    for command, what in commands.items():
        console.print(f"  {command:<{width}}  # {what}", highlight=False, markup=False, soft_wrap=True)


def next_commands(output_dir: Path, adapter: bool) -> dict[str, str]:
    """Return three commands, each with what it does."""

    def line(*words: str) -> str:
        return shlex.join(["liger-trainer", *words])

    run, name = str(output_dir), output_dir.resolve().name
    # `.` and `..` have no name to put a suffix on.
    above = output_dir / ".." if output_dir.name in ("", "..") else output_dir.parent
    if adapter:
        last = line("merge", run, str(above / f"{name}-merged")), "adapter and base as one model"
    else:
        other = setting("output_dir", above / f"{name}-2")
        last = line("run", str(output_dir / "config.yaml"), other, "learning_rate=1e-4"), "again, with a change"
    return {
        line("chat", run): "talk to it",
        line("eval", run): "more metrics on the held-out rows, with calibration",
        last[0]: last[1],
    }
