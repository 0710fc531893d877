"""The results of a run, what it prints of its data and of them, and whether its output directory may be written to."""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers import Trainer

from ..common.checkpoints import checkpoints_in
from ..common.console import is_main_process
from ..common.files import CONFIG, DEFAULTS, METRICS, REPORT, refuse_if_held, write_atomically
from ..patching.patcher import Patched
from ..trainers.rows import RowFacts
from .data.datasets import PLAIN, USERS_TOO, DataFacts
from .metric_rows import MetricRow, shown_rows
from .samples import Completion, ModelFacts, comparison_table, print_completions

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


@dataclass(frozen=True)
class TrainingFacts:
    """What the training took. `peak_memory_mib` is the GPU memory allocated in training, or, on a CPU, the resident
    memory of the process up to its end."""

    steps: int
    epochs: float
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_mib: float
    peak_memory_of: str
    device: str
    processes: int
    trainable_parameters: int
    parameters: int
    # the step that a run was resumed at; seconds and tokens_per_second count from there, tokens from the start
    resumed_at: int = 0
    skipped_steps: int = 0  # steps that were left out for numbers that were not finite (`on_non_finite: skip_step`)


@dataclass(frozen=True)
class RunResults:
    """What metrics.json holds, besides the versions. KLs, losses and entropies are in nats per token."""

    recipe: str
    config: str
    before: dict[str, float]
    after: dict[str, float]
    completions: list[Completion]
    data: DataFacts
    rows: dict[str, RowFacts]  # of each split, as the trainer prepared it
    patched: dict[str, Any]  # `patch_facts`
    training: TrainingFacts
    seconds: dict[str, float]  # of each part of the run
    log_history: list[dict[str, Any]]
    # the student and, where one other model teaches, the teacher
    models: dict[str, ModelFacts] = field(default_factory=dict)


def patch_facts(graphs: Mapping[str, str], **models: Patched | None) -> dict[str, Any]:
    """Return, for each model that is not None, what was swapped, what was not, and why.

    Args:
        graphs: by model, what was done about CUDA graphs.
    """
    reports = {name: patched.report for name, patched in models.items() if patched is not None}
    return {
        name: {
            "model": report.model, "swapped": dict(report.swapped), "left_alone": report.left_alone,
            "cuda_graphs": graphs.get(name),
        }
        for name, report in reports.items()
    }  # fmt: skip


def run_console() -> Console:
    """Return the console of a run, which is silent in all processes but the first."""
    return Console(quiet=not is_main_process())


def print_plan(console: Console, config: "RunConfig", facts: DataFacts, vocabulary: str | None = None) -> None:
    """Print the settings that were given or differ from the defaults, with their places, and facts about the data."""
    settings = Table(title=f"{config.recipe}: {config.source}", title_justify="left")
    for column in ("setting", "value", "set by"):
        settings.add_column(column, overflow="fold")
    for key, (value, where) in config.changes().items():
        settings.add_row(key, str(value), where)
    console.print(settings)
    print_data(console, facts, vocabulary)


def print_data(console: Console, facts: DataFacts, vocabulary: str | None = None) -> None:
    """Print the facts about the data; repeated rows in yellow. Point out what is easily missed."""
    data = Table(title="data", title_justify="left", show_header=False)
    data.add_column()
    data.add_column(overflow="fold")
    for name, value in asdict(facts).items():
        # Nothing was skipped, there are no images, a file has no licence: the row would say nothing.
        if value in ({}, None):
            continue
        if isinstance(value, dict):
            value = tuple(f"{why}: {rows}"[:200] for why, rows in value.items())
        shown = ", ".join(value) if isinstance(value, tuple) else str(value)
        repeated = name in ("test_rows_seen_in_training", "train_rows_repeated", "test_rows_repeated") and value
        data.add_row(name.replace("_", " "), shown, style="yellow" if repeated else None)
    if vocabulary:
        data.add_row("vocabulary", vocabulary)
    console.print(data)
    unread = {"system" if name == "system_prompt" else name for name in facts.columns} - {*facts.columns_used}
    missed = {
        "What the user says is learned too. To learn only the answers: assistant_only_loss=true; where the chat "
        "template does not mark them, with supervised_part=content.": facts.learned.startswith(USERS_TOO),
        "Prompts and completions are joined as they stand, without the chat template. For a model that chats, name the "
        "columns instruction and output, or write messages.": facts.learned == PLAIN,
        "Answers that say nothing teach the model to say nothing: look at them.": facts.empty_answers is not None,
        "The column system is not read: these rows are no chats, whose first message it would be.": "system" in unread,
        "The column weight is not read: weight_column=weight multiplies the loss of rows by it.": "weight" in unread,
    }
    for told in (text for text, applies in missed.items() if applies):
        console.print(told, style="yellow", highlight=False)


def print_before(console: Console, rows: tuple[MetricRow, ...], before: Mapping[str, float]) -> None:
    """Print the held-out metrics of the student before training, on one line."""
    values = (f"{row.title} {before[row.metric]:.{row.digits}f}" for row in shown_rows(rows, [before]))
    console.print(f"Before training, held-out rows: {', '.join(values)}", highlight=False, soft_wrap=True)


def print_results(console: Console, results: RunResults, rows: tuple[MetricRow, ...], output_dir: Path) -> None:
    """Print completions, the table of metrics, speed, memory, and where the files are."""
    print_completions(console, results.completions)
    console.print(comparison_table(shown_rows(rows, [results.before]), results.before, results.after))
    training = results.training
    console.print(
        f"{training.steps - training.resumed_at} steps in {training.seconds:.0f} s ({training.tokens_per_second:,.0f} "
        f"tokens/s), {training.tokens:,} tokens in all; peak memory {training.peak_memory_mib:,.0f} MiB "
        f"({training.peak_memory_of}); {training.device}",
        highlight=False,
    )
    files = "Model, tokenizer, config.yaml, metrics.json and report.html are in"
    console.print(f"{files} {output_dir}", highlight=False, soft_wrap=True)


def print_rows(console: Console, rows: dict[str, RowFacts]) -> None:
    """Print what the trainer made of the rows of each split; losses in yellow."""
    table = Table(title="rows, tokenized", title_justify="left")
    table.add_column()
    for split in rows:
        table.add_column(split, justify="right")
    for name in (column.name for column in fields(RowFacts)):
        counts = [getattr(facts, name) for facts in rows.values()]
        lost = name in ("rows_dropped", "rows_truncated", "supervised_tokens_lost") and any(counts)
        table.add_row(name.replace("_", " "), *(f"{count:,}" for count in counts), style="yellow" if lost else None)
    console.print(table)


# The output directory at the start of a run.
WRITTEN = (  # names that a run writes, and others do, too
    CONFIG, REPORT, "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "training_args.bin",
)  # fmt: skip


def check_output_dir(config: "RunConfig") -> Path:
    """Return the output directory. It is not made yet: most mistakes show later, and should leave nothing behind.

    Raises:
        ConfigError: it holds a finished run, checkpoints that this run does not go on from, or files of no run that it
            would replace, and `overwrite_output_dir` is not set; another process trains in it; it is the directory of
            an input model; or it cannot be written.
    """
    # A shell expands ~ only at the start of a word, so output_dir=~/x comes as it is.
    output_dir = Path(config["output_dir"]).expanduser()
    if (output_dir / METRICS).is_file() and not config["overwrite_output_dir"]:
        advice = "choose another output_dir or set overwrite_output_dir=true"
        raise config.error("output_dir", f"{output_dir} holds a finished run ({METRICS}); {advice}.")
    earlier = _earlier_checkpoints(config, output_dir)
    if earlier and not config["overwrite_output_dir"]:
        advice = "set resume_from_checkpoint=true to continue it, or overwrite_output_dir=true to remove it"
        raise config.error("output_dir", f"{output_dir} holds {earlier[-1].name} of an earlier run; {advice}.")
    for key in ("model_name_or_path", "teacher_model_name_or_path"):
        name = config.values.get(key)
        taken = [
            path for path in (output_dir, *earlier) if name and path.resolve() == Path(name).expanduser().resolve()
        ]
        if taken:
            raise config.error("output_dir", f"{taken[0]} is also {key}, which would be overwritten.")
    written = output_dir / CONFIG
    ours = written.is_file() and DEFAULTS in written.read_text(errors="replace")  # a run has begun there
    foreign = [name for name in WRITTEN if (output_dir / name).is_file()]
    if foreign and not (ours or config["resume_from_checkpoint"] or config["overwrite_output_dir"]):
        advice = "choose another output_dir, or set overwrite_output_dir=true to replace them"
        raise config.error("output_dir", f"{output_dir} holds {', '.join(foreign)}, which no run wrote; {advice}.")
    # Ranks of one run would find the lock of their first process, and refuse.
    if is_main_process():  # which takes the lock for all
        refuse_if_held(output_dir)
    check_writable(config, "output_dir", output_dir)
    return output_dir


def check_writable(config: "RunConfig", key: str, path: Path) -> None:
    """Check that a folder can be written to, by making something there.

    The access rights of a network folder do not say what its server will refuse.

    Raises:
        ConfigError: the folder, or the nearest one above it that exists, cannot be written to.
    """
    # The folder itself is made when training begins, so that a mistake before leaves nothing behind.
    nearest = next(above for above in (path, *path.absolute().parents) if above.exists())
    try:
        with TemporaryDirectory(dir=nearest, prefix=".liger-trainer-"):
            pass
    except OSError as error:
        why = f" ({error.strerror})" if nearest.is_dir() else ""
        raise config.error(key, f"{nearest} is not a directory that can be written to{why}.") from None


def _earlier_checkpoints(config: "RunConfig", output_dir: Path) -> list[Path]:
    """Return checkpoints that this run does not resume from.

    They must not be mixed with its own: resuming and `save_total_limit` go by the number of the step.
    """
    return [] if config["resume_from_checkpoint"] else checkpoints_in(output_dir)


def resume_hint(output_dir: Path) -> str:
    """Say how a run is gone on with, for an error that ends it."""
    return f"To continue from the newest checkpoint: {shlex.join(['liger-trainer', 'resume', str(output_dir)])}"


def start_output(trainer: Trainer, config: "RunConfig") -> None:
    """At the start of training, write config.yaml, which `liger-trainer resume` reads, and remove the run that this one
    overwrites."""
    if trainer.is_world_process_zero():
        output_dir = Path(str(trainer.args.output_dir))
        _clear(output_dir, config)
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(output_dir / CONFIG, config.to_yaml())


def _clear(output_dir: Path, config: "RunConfig") -> None:
    for name in (METRICS, REPORT):
        (output_dir / name).unlink(missing_ok=True)
    for checkpoint in _earlier_checkpoints(config, output_dir):
        checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint)
