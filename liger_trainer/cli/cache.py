"""`cache`: write down a teacher's predictions for the rows once, or import them; look at what was written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..common.console import is_main_process
from ..errors import ConfigError
from ._shared import OVERRIDES, AsJson, Config, Overrides, checked, out_of_memory

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..teachers.cache.store import CacheIndex, CacheSettings, HiddenSettings


class RecordsOf(StrEnum):
    """The tools whose records `import` reads."""

    vllm = "vllm"
    distillkit = "distillkit"


TAKES_LESS = (
    "What takes less: a smaller per_device_eval_batch_size, a smaller max_length, teacher_dtype=bfloat16, "
    "teacher_load_in_4bit=true."
)


class _CaptureByDefault(TyperGroup):
    """Read `cache CONFIG` as `cache capture CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Most people want this; `import`, `info` and `verify` are rare.
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["capture", *args]
        if ctx.obj and args and args[0] != "capture":
            raise ConfigError(f"cache {args[0]} starts no processes: it takes no arguments after --; got {ctx.obj}.")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_CaptureByDefault,
    no_args_is_help=True,
    help="Write down what a teacher says to the rows of CONFIG; look at what was written.",
)
CacheDir = Annotated[Path, typer.Argument(metavar="DIR", help="A teacher_cache_dir.", show_default=False)]


@app.command(context_settings=OVERRIDES)
def capture(context: typer.Context, config: Config, overrides: Overrides = None) -> None:
    """Capture the teacher of CONFIG into teacher_cache_dir, or continue a capture that was interrupted.

    Arguments after -- go to accelerate launch: its processes share the rows out.
    """
    from ..run.launch import as_rank, launch

    # a recipe without a teacher would else be told of `teacher`, which nobody has set
    settings = checked(config, overrides, "recipe=distill", "teacher=cache").on_this_machine()
    if settings.recipe != "distill" or not settings["teacher_model_name_or_path"]:
        raise settings.error("teacher_model_name_or_path", "missing; a capture needs the teacher itself.")
    if context.obj:
        # Does not return: it exits with the exit code of the processes.
        launch(context.obj, ["cache", config, *(overrides or [])], settings["use_cpu"])
    try:
        with as_rank(), out_of_memory(TAKES_LESS):
            index = _capture(settings)
    except KeyboardInterrupt:
        typer.echo("liger-trainer: interrupted. What was captured is kept; the same command continues.", err=True)
        raise typer.Exit(130) from None
    if is_main_process():
        _print(Path(settings["teacher_cache_dir"]).expanduser(), index)


@app.command("import", context_settings=OVERRIDES)
def import_(
    config: Config,
    records: Annotated[
        Path, typer.Option("--records", metavar="PATH", help="A file of them, or a folder.", show_default=False)
    ],
    tool: Annotated[RecordsOf, typer.Option("--from", help="The tool that wrote them.", show_default=False)],
    compression: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="DistillKit's YAML with the compression, if it is not next to the records."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write what another tool has recorded of a teacher into teacher_cache_dir, for the rows of CONFIG.

    vllm: prompt_logprobs, in JSON lines or Parquet. distillkit: what its sample_logits_vllm writes.
    """
    settings = checked(config, overrides, "teacher=cache").on_this_machine()
    if settings.recipe != "distill":
        raise settings.error("recipe", "a teacher cache is for recipe: distill.")
    _print(Path(settings["teacher_cache_dir"]).expanduser(), _import(settings, records, tool, compression))


@app.command()
def info(directory: CacheDir, as_json: AsJson = False) -> None:
    """Print what a cache holds, what it belongs to, and how many bytes a token takes."""
    from ..teachers.cache.store import read_index

    index = read_index(directory.expanduser())
    if as_json:
        typer.echo(index.model_dump_json(indent=1))
    else:
        _print(directory.expanduser(), index)


@app.command()
def verify(directory: CacheDir) -> None:
    """Read every shard and compare its checksum. Exit code 6 if a bit has changed."""
    from ..teachers.cache.store import TeacherCache

    cache = TeacherCache(directory, verify=True)
    typer.echo(f"{directory}: {len(cache.index.shards)} shards, {cache.index.tokens:,} tokens, nothing is damaged.")


def _import(config: "RunConfig", records: Path, tool: RecordsOf, compression: Path | None) -> "CacheIndex":
    from ..extras.foreign_caches.import_cache import import_cache
    from ..run.data.datasets import load_run_datasets
    from ..run.models import check_student, open_model

    files = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, files.vocab_size)
    check_student(config, files, data)
    args: Any = config.training_args()
    with _progress(show=not args.disable_tqdm) as progress, config.refusals("the import"):
        return import_cache(
            records, tool.value, args, files.tokenizer, data.train, data.test, progress, compression=compression
        )


def _capture(config: "RunConfig") -> "CacheIndex":
    from ..run.data.datasets import load_run_datasets
    from ..run.models import check_same_tokenizer, check_student, open_model
    from ..trainers.capture import capture

    files = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, files.vocab_size)
    teacher = open_model(config, "teacher_model_name_or_path")
    check_student(config, files, data)
    shared = check_same_tokenizer(config, files, teacher)
    assert shared is not None  # uld is refused with a cache
    # Its records would have no probability for these tokens, which is not the same as a small one.
    if shared.student_only:
        raise config.error(
            "teacher_model_name_or_path",
            f"the student's tokenizer has tokens that the teacher's lacks ({shared.named_student_only}), and a cache "
            "covers all of the student's. Remove them from the student's tokenizer, or train with teacher: model, "
            "which leaves them out of the loss.",
        )
    args: Any = config.training_args()
    # TRL's own switch for bars counts for this one too.
    with _progress(show=not args.disable_tqdm) as progress, config.refusals("the capture"):
        return capture(teacher.path, args, files.tokenizer, data.train, data.test, progress)


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with tokens, tokens per second and the remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task("tokens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(path: Path, index: "CacheIndex") -> None:
    from rich.console import Console
    from rich.table import Table

    settings, prints = index.settings, index.fingerprints
    # Of a capture that was interrupted, parts are not merged into shards yet.
    done, size = index.tokens_read, sum(s.bytes for s in (*index.shards, *index.parts))
    head = f", and {index.head.bytes / 2**20:,.1f} MiB of the head" if index.head else ""
    ids = "" if settings.kind == "hidden" else f", {settings.format.id_bits} bits each"
    teacher = f"{index.teacher.name}{f' at {index.teacher.revision}' if index.teacher.revision else ''}"
    from_where = f"{index.teacher.dtype}; weights in {prints.teacher_from}"
    if prints.imported:
        from_where = f"from records of {prints.teacher_from}"
    rows = {
        "state": "finished" if index.finished else f"not finished: {done:,} of {index.tokens:,} tokens",
        "holds": _contents(settings),
        "rows": f"{index.rows:,} with {index.tokens:,} supervised tokens",
        "bytes per token": f"{settings.format.bytes} in a record, {size / max(1, done):.1f} on disk",
        "size": f"{size / 2**20:,.1f} MiB in {len(index.shards)} shards{head}",
        "teacher": f"{teacher}, {from_where}: {prints.teacher[:16]}",
        "tokenizer": f"{settings.vocab_size:,} tokens{ids}: {prints.tokenizer[:16]}",
        "chat template": prints.chat_template[:16] if prints.chat_template else "none",
        "data": prints.data[:16],
        "max_length": str(settings.max_length),
    }
    table = Table(title=str(path), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _contents(settings: "CacheSettings | HiddenSettings") -> str:
    """Say in words what a record holds."""
    if settings.kind == "hidden":
        cap = "" if settings.softcap is None else f" and softcap {settings.softcap:g}"
        return (
            f"hidden states of {settings.width:,} values in {settings.dtype}, and the head with scale "
            f"{settings.scale:g}{cap}; for any temperature"
        )
    # A cache without draws of the tail knows only how much mass the rest has.
    rest = f", {settings.tail_draws} draws from it, seed {settings.seed}" if settings.tail_draws else ""
    kinds = {
        "topk": f"the likeliest {settings.entries} tokens with the mass of the rest{rest}, {settings.bits} bits",
        "sampled": f"{settings.entries} draws from the teacher, seed {settings.seed}",
    }
    names = {"label_log_prob": "the labels' log-probabilities", "entropy": "the entropies"}
    unknown = f", without {' and '.join(names[name] for name in settings.unknown)}" if settings.unknown else ""
    return f"{kinds[settings.kind]}, at temperature {settings.temperature:g}{unknown}"
