"""`init-student`: make a student from its teacher, measure it against the teacher, and save it.

Importance and metrics are measured on the held-out rows of the run, prepared as the trainer prepares them. No weight is
learned from them, but they decide which layers stay.
"""

import copy
import json
import math
import os
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from ...common.console import announce
from ...common.files import staged_folder, writing_to
from ...config.conflicts import STUDENT_KEYS, init_student_conflicts, is_sharded
from ...config.schema import find_config
from ...config.yaml_reader import read_settings, setting
from ...errors import ConfigError, NonFiniteError
from ...run.data.datasets import RunData, load_run_datasets
from ...run.launch import versions
from ...run.metric_rows import DISTILL_ROWS
from ...run.models import ModelFiles, check_student, load_original, open_model, with_processor
from ...run.results import check_writable
from ...trainers.distill_trainer import LigerDistillTrainer
from ...trainers.row_preparation import Preparation
from .drop_layers import drop_layers, kept_indices
from .importance import Importance, LeftOut, eliminate_layers, measure_importance
from .narrowing import layer_mlps, narrow_mlps

if TYPE_CHECKING:
    from ...config.run_config import RunConfig

STUDENT = "student.json"
CHOICE = "student_layer_choice"


@dataclass(frozen=True)
class StudentRecord:
    """What student.json holds, besides the versions and the facts about the data. KLs are in nats per token."""

    teacher: str
    """the model that the student is made from, as the configuration names it"""
    teacher_revision: str | None
    chosen_by: dict[str, Any]
    """the keys of the configuration that say what is kept"""
    layers_kept: list[int]
    """indices in the teacher, in order"""
    layer_importance: list[float]
    """block influence of each of the teacher's layers (arXiv:2403.03853)"""
    importance_tokens: int
    layers_left_out: list[LeftOut] | None
    """in their order, where `student_layer_choice` is greedy_kl"""
    intermediate_size: dict[str, int] | None
    """of teacher and student, if it was narrowed"""
    activation_kept: list[float] | None
    """for each kept layer, the share of its units' mean absolute activation that the kept units have"""
    parameters: dict[str, int]
    dtype: str
    metrics: dict[str, float]
    """of the saved student against the teacher, on the held-out rows"""


def make_student(config: "RunConfig") -> tuple[Path, StudentRecord, PreTrainedModel]:
    """Make, measure and save the student that `config` describes; return its directory, record and model.

    Raises:
        ConfigError: no setting says what to keep, a model or choice does not fit, the output directory is not empty,
            or settings are for several processes.
        DataError: the dataset is wrong.
        NonFiniteError: a metric of the student is NaN or infinite; nothing is left behind.
    """
    _check_settings(config)
    # before any model is loaded
    output_dir = check_student_dir(config)
    files = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, files.vocab_size)
    # rows with images need the model's processor, which only they tell
    files = with_processor(config, files, data)
    check_student(config, files, data)
    _check_sizes(config, files)
    with writing_to(output_dir), staged_folder(output_dir) as staged:
        args = _arguments(config, staged)
        with config.refusals("init-student"):
            original = load_original(config, files)
            parameters = original.num_parameters()
            importance, left_out = _measure(config, original, files, data, args)
        student, kept, shares = build_student(config, original, importance, left_out)
        # training configurations set it to False; a saved student is read to generate, too
        student.config.use_cache = True
        student.save_pretrained(staged)
        files.processing.save_pretrained(staged)
        sizes = [_width(model) for model in (original, student)]
        record = StudentRecord(
            teacher=config["model_name_or_path"],
            teacher_revision=files.revision,
            chosen_by={key: config[key] for key in STUDENT_KEYS if config[key] is not None} | _choice(config),
            layers_kept=kept,
            layer_importance=importance.layers,
            importance_tokens=importance.tokens,
            layers_left_out=left_out,
            intermediate_size={"teacher": sizes[0], "student": sizes[1]} if shares else None,
            activation_kept=shares,
            parameters={"teacher": parameters, "student": student.num_parameters()},
            dtype=str(student.dtype).removeprefix("torch."),
            metrics=_compare(config, student, original, files, data, args),
        )
        content = {**asdict(record), "data": asdict(data.facts), "versions": versions()}
        (staged / STUDENT).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return output_dir, record, student


def _choice(config: "RunConfig") -> dict[str, str]:
    return {} if config["student_num_layers"] is None else {CHOICE: config[CHOICE]}


def _check_settings(config: "RunConfig") -> None:
    for key, message in init_student_conflicts(config.values):
        raise config.error(key, message)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("init-student runs in one process: start it without a launcher.")
    if is_sharded(config.values):
        raise ConfigError("init-student runs in one process: unset ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED.")


def check_student_dir(config: "RunConfig") -> Path:
    """Return the directory of the student. It is not made yet.

    Raises:
        ConfigError: it is not empty, or cannot be written.
    """
    key = "student_output_dir"
    chosen = config[key] or f"{str(config['output_dir']).rstrip('/')}-student"
    path = Path(chosen).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise config.error(key, f"{path} is there already and is not empty; choose another {key}.")
    check_writable(config, key, path)
    return path


def _check_sizes(config: "RunConfig", files: ModelFiles) -> None:
    """Check that the student is smaller than its teacher; other keys are checked as for a run."""
    text = files.config.get_text_config(decoder=True)
    sizes = {"student_num_layers": "num_hidden_layers", "student_intermediate_size": "intermediate_size"}
    for key, attribute in sizes.items():
        size = getattr(text, attribute, None)
        if config[key] is not None and isinstance(size, int) and config[key] >= size:
            raise config.error(key, f"expected less than {size}, which {files.path} has, got {config[key]}.")


def _arguments(config: "RunConfig", staged: Path) -> Any:
    """Return the run's arguments for a distillation from a model, which only measures."""
    args: Any = replace(config, recipe="distill").training_args()
    args.output_dir, args.report_to, args.push_to_hub = str(staged), [], False
    args.teacher, args.teachers, args.teacher_column, args.teacher_cache_dir = "model", None, None, None
    # nothing is trained, so there is nothing to save memory for
    args.gradient_checkpointing = False
    return args


def _measure(
    config: "RunConfig", original: PreTrainedModel, files: ModelFiles, data: RunData, args: Any
) -> tuple[Importance, list[LeftOut] | None]:
    """Measure the importance of layers and units, and in which order layers are left out, where they are chosen so."""
    rows: Any = Preparation(
        copy.copy(args),
        train_dataset=data.test,
        eval_dataset=data.test,
        processing_class=copy.deepcopy(files.processing),
    )
    rows.row_preparation.check_ids(original)
    # the trainer that only prepares rows has not moved the model
    original.to(args.device)
    narrows = config["student_intermediate_size"] is not None
    downs = [mlp.down for mlp in layer_mlps(original)] if narrows else []
    importance = measure_importance(original, rows.get_eval_dataloader(), downs)
    if config["student_num_layers"] is None or config[CHOICE] != "greedy_kl":
        return importance, None
    # eliminate_layers is told how many go, not how many stay
    surplus = len(importance.layers) - config["student_num_layers"]
    return importance, eliminate_layers(original, rows.get_eval_dataloader(), surplus, _say)


def _say(left_out: LeftOut) -> None:
    announce(f"left out layer {left_out.layer}: {left_out.forward_kl:.4f} nats a token away from the whole model")


def build_student(
    config: "RunConfig", original: PreTrainedModel, importance: Importance, left_out: list[LeftOut] | None = None
) -> tuple[PreTrainedModel, list[int], list[float] | None]:
    """Return the student, its kept layers, and the share of activation that each narrowed MLP keeps."""
    every_nth, kept = config["keep_every_nth_layer"], config["keep_layers"]
    if left_out is not None:
        # what was not left out, in the teacher's order
        kept = sorted(set(range(len(importance.layers))).difference(one.layer for one in left_out))
    elif config["student_num_layers"] is not None:
        kept = importance.most_important(config["student_num_layers"])
    elif every_nth is not None:
        kept = kept_indices(len(importance.layers), every_nth, None)
    elif kept is None:
        kept = list(range(len(importance.layers)))
    student = drop_layers(original, keep=kept)
    if config["student_intermediate_size"] is None:
        return student, kept, None
    # of the layers that stay, by their index in the teacher
    active = [importance.units[index] for index in kept]
    # ascending, so that the kept units stand in their old order
    units = [layer.topk(config["student_intermediate_size"]).indices.sort().values for layer in active]
    shares = [(layer[best].sum() / layer.sum()).item() for layer, best in zip(active, units, strict=True)]
    return narrow_mlps(student, units), kept, shares


def _width(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "intermediate_size", 0)


def _compare(
    config: "RunConfig",
    student: PreTrainedModel,
    original: PreTrainedModel,
    files: ModelFiles,
    data: RunData,
    args: Any,
) -> dict[str, float]:
    """Measure the student against the model that it was made from."""
    with config.refusals("LigerDistillTrainer"):
        trainer = LigerDistillTrainer(
            student,
            teacher_model=original,
            args=args,
            train_dataset=data.test,
            eval_dataset=data.test,
            processing_class=copy.deepcopy(files.processing),
        )
    measured = trainer.evaluate()
    # the same rows as the report of a distillation
    metrics = {row.metric: measured[f"eval_{row.metric}"] for row in DISTILL_ROWS}
    wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(f"the student's {', '.join(wrong)} is not finite: {metrics}. It is not saved.")
    return metrics


def print_student(config: "RunConfig", path: Path, record: StudentRecord, student: PreTrainedModel) -> None:
    """Print each layer with its importance, the metrics, what was narrowed, and the command that trains the student."""
    console = Console()
    # By their number in the original, since that is what importances are of.
    new = {old: index for index, old in enumerate(record.layers_kept)}
    kinds = getattr(student.config.get_text_config(decoder=True), "layer_types", None)
    layers = Table(title=f"Layers of {record.teacher}", title_justify="left")
    for column in ("layer", "importance", "in the student"):
        layers.add_column(column, justify="right" if column != "in the student" else "left")
    for index, importance in enumerate(record.layer_importance):
        kind = f", {kinds[new[index]]}" if kinds and index in new and len(set(kinds)) > 1 else ""
        state = f"kept as {new[index]}{kind}" if index in new else "dropped"
        layers.add_row(str(index), f"{importance:.4f}", state, style=None if index in new else "dim")
    console.print(layers)

    metrics = Table(title="Held-out rows, against the original", title_justify="left")
    metrics.add_column("metric")
    metrics.add_column("student", justify="right")
    for row in DISTILL_ROWS:
        metrics.add_row(row.title, f"{record.metrics[row.metric]:.{row.digits}f}")
    console.print(metrics)

    if record.intermediate_size and record.activation_kept:
        sizes, shares = record.intermediate_size, record.activation_kept
        console.print(
            f"MLPs narrowed from {sizes['teacher']} to {sizes['student']} units, which have "
            f"{min(shares):.1%} to {max(shares):.1%} of a layer's activation.",
            highlight=False,
        )
    before, after = record.parameters["teacher"], record.parameters["student"]
    console.print(f"{before:,} parameters became {after:,} ({after / before:.0%}): {path}", highlight=False)
    console.print(f"Train it: {_next_command(config, path)}", highlight=False, soft_wrap=True)


def _next_command(config: "RunConfig", path: Path) -> str:
    """Return the `run` command that trains the student, with the keys that made it removed."""
    # On the command line they need not be repeated; in the file they would drop layers of the student too.
    in_file = [key for key in read_settings(*find_config(config.source)).values if key in (*STUDENT_KEYS, CHOICE)]
    return shlex.join(
        ["liger-trainer", "run", config.source, setting("model_name_or_path", path), *(f"~{key}" for key in in_file)]
    )
