"""`ls`, `cat`, `cp` and `new`: the built-in configurations, and how to write another."""

import csv
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.options import did_you_mean
from ..config.schema import Hardware, built_in_configs, find_config, needs_of
from ..errors import ConfigError
from ._shared import AsJson, Config, Force, write_new

UNWRAPPED = 400  # columns, if the output goes into a file or a pipe
_NAMED = re.compile(r"^model_name_or_path: *(\S+)", re.M)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([bm])(?![a-z])", re.I)


class Order(StrEnum):
    """What `ls` sorts by, before the rest."""

    model = "model"
    memory = "memory"
    purpose = "purpose"


def billions(model: str) -> float:
    """Return the parameters that a model's name tells, in billions; 0 where it tells none."""
    # "Qwen3-0.6B" says it, and a name with several numbers says it first.
    size = _SIZE.search(model.rpartition("/")[2])
    return 0.0 if size is None else float(size[1]) / (1000 if size[2].lower() == "m" else 1)


def ls(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE | FAMILY",
            help="Only those of a recipe (sft, distill) or of a family (llama3, qwen3, ...).",
            show_default=False,
        ),
    ] = None,
    fits: Annotated[
        float | None,
        typer.Option("--fits", metavar="GB", min=0, help="Only those that need so much memory a GPU, or less."),
    ] = None,
    sort: Annotated[Order, typer.Option(help="What comes first in the order.")] = Order.model,
    as_json: AsJson = False,
) -> None:
    """List the built-in configurations, by model, memory and purpose: what each does and what it needs."""
    entries = [_entry(name, resource.read_text(encoding="utf-8")) for name, resource in built_in_configs().items()]
    if group is not None:
        groups = sorted({entry[kind] for entry in entries for kind in ("recipe", "family")})
        if group not in groups:
            hint = did_you_mean(group, groups)
            raise ConfigError(f"ls: expected one of {', '.join(groups)}, got {group!r}.{hint}")
        entries = [entry for entry in entries if group in (entry["recipe"], entry["family"])]
    entries = sorted(entries, key=_ORDERS[sort])
    if fits is not None:
        entries = [entry for entry in entries if entry["memory_gb"] <= fits]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    elif not entries:
        typer.echo(f"None needs {fits:g} GB or less.")
    else:
        _print(entries, gaps=sort is Order.model)


def _by_model(entry: dict[str, Any]) -> tuple:
    return entry["family"], billions(entry["model"]), entry["gpus"], entry["memory_gb"], entry["recipe"]


_ORDERS: dict[Order, Callable[[dict[str, Any]], tuple]] = {
    Order.model: _by_model,
    Order.memory: lambda entry: (entry["gpus"], entry["memory_gb"], *_by_model(entry)),
    Order.purpose: lambda entry: (entry["recipe"] == "distill", entry["kind"], *_by_model(entry)),
}


def _entry(name: str, text: str) -> dict[str, Any]:
    """Read an entry from the name, configs/<family>/<recipe>_<variant>.yaml, and the configuration's first lines."""
    family, _, variant = name.partition("/")
    first, second = (line.removeprefix("#").strip() for line in text.splitlines()[:2])
    model, needs = _NAMED.search(text), needs_of(text) or Hardware(0, 0)
    # The first word after the recipe, such as lora; on_policy and two_stage are one word to a reader.
    kind = re.match(r"[a-z]+_(on_policy|two_stage|[a-z]+)", variant)
    return {
        "name": name,
        "recipe": variant.partition("_")[0],
        "family": family,
        "kind": kind[1] if kind else "",
        "model": model[1] if model else "",
        "gpus": needs.gpus,
        "memory_gb": needs.memory_gb,
        "description": first,
        "needs": second.removeprefix("Needs "),
    }


def _print(entries: list[dict[str, Any]], gaps: bool) -> None:
    """Print one line per entry, with gaps between families. On a terminal, wrap lines within their columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("configuration", no_wrap=True)
    table.add_column("what it does")
    table.add_column("needs")
    # A table in a file is read by programs: no gaps, and a row a line.
    terminal, family = sys.stdout.isatty(), None
    for entry in entries:
        if gaps and terminal and family not in (None, entry["family"]):
            table.add_row()
        family = entry["family"]
        table.add_row(entry["name"], entry["description"], entry["needs"])
    Console(width=None if terminal else UNWRAPPED, highlight=False, markup=False).print(table)


def cat(config: Config) -> None:
    """Print a configuration."""
    typer.echo(find_config(config)[0], nl=False)


def cp(
    config: Config,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A file, or a folder that exists.", show_default=False)],
    force: Force = False,
) -> None:
    """Copy a configuration, to change it."""
    text, label = find_config(config)
    path = dest.expanduser()
    # As cp does.
    path = path / Path(label).name if path.is_dir() else path
    write_new(path, text, force)
    typer.echo(f"Copied to {path}; start it with: liger-trainer run {shlex.quote(str(path))}")


# `new`: ask four questions and write a configuration. What flags answer is not asked.


class Purpose(StrEnum):
    sft = "sft"
    distill = "distill"


class Method(StrEnum):
    full = "full"
    lora = "lora"
    qlora = "qlora"


METHODS = {Method.full: "all weights", Method.lora: "LoRA", Method.qlora: "LoRA on 4-bit weights"}
LARGE_FULL, LARGE_LORA = 2.0, 7.0  # billions of parameters from which on the learning rate is half of that below


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration to write.")] = Path("my.yaml"),
    purpose: Annotated[Purpose | None, typer.Option(help="Fine-tune, or learn from a teacher.")] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model to train: hub id or folder.")] = None,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL", help="Who teaches it, to distil.")] = None,
    method: Annotated[Method | None, typer.Option(help="What is trained. To distil: all weights by default.")] = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="A file, a folder or a dataset of the hub.")] = None,
    force: Force = False,
) -> None:
    """Write a configuration: asks for purpose, model, data, and teacher or method, unless flags say it."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name or add --force.")
    purpose = Purpose(
        _ask("purpose", purpose, "Fine-tune (sft) or learn from a teacher (distill)?", Purpose.sft, Purpose)
    )
    model = _ask("model", model, "Which model is trained? A hub id or a folder", "Qwen/Qwen3-0.6B")
    if purpose is Purpose.distill:
        teacher = _ask("teacher", teacher, "Which model teaches it? One of the same tokenizer", "Qwen/Qwen3-4B")
        method = method or Method.full
    elif teacher is not None:
        raise ConfigError("--teacher: only --purpose distill has a teacher.")
    else:
        method = Method(
            _ask("method", method, "Train all weights (full), LoRA (lora) or 4-bit LoRA (qlora)?", Method.lora, Method)
        )
    data = _ask("data", data, "Which rows? A .jsonl, .csv, .parquet file, a folder, a hub id", "trl-lib/Capybara")
    text = configuration(file, purpose, model, teacher, method, data)
    from ..config.run_config import check_text

    try:  # answers may be wrong, such as a teacher that is no text or a file that is not there
        check_text(text, str(file), paths=True)
    except ConfigError as error:
        raise ConfigError(f"Nothing was written: the configuration of these answers is wrong. {error}") from None
    write_new(file, text, force)
    typer.echo(f"Wrote {file}. Next:")
    typed = shlex.quote(str(file))
    for command, what in (
        (f"liger-trainer preview {typed}", "rows as the model will see them"),
        (f"liger-trainer estimate {typed} --gpu 24GB", "does it fit"),
        (f"liger-trainer run {typed}", "train"),
    ):
        typer.echo(f"  {command:<{len(typed) + 35}}  # {what}")


def _ask(flag: str, answer: str | None, question: str, default: str, choices: type[StrEnum] | None = None) -> str:
    """Return the answer of a flag, or ask on a terminal.

    Raises:
        ConfigError: the flag is missing, and nobody is there to be asked.
    """
    if answer is not None:
        return answer
    # A script would wait for ever.
    if not sys.stdin.isatty():
        which = f" Choose from: {', '.join(choices)}." if choices else ""
        raise ConfigError(f"--{flag} is missing, and there is no terminal to ask on.{which}")
    while True:
        given = str(typer.prompt(question, default=str(default))).strip()
        if choices is None:
            wrong = _not_there(flag, given)
        else:
            wrong = None if given in list(choices) else f"Expected one of {', '.join(choices)}."
        if wrong is None:
            return given
        typer.echo(wrong)


def _not_there(flag: str, answer: str) -> str | None:
    """Return what is wrong with the name of a model or of rows, so that only this is asked again."""
    from ..config.check import missing_paths
    from ..config.yaml_reader import COMMAND_LINE, Setting

    key = {"model": "model_name_or_path", "teacher": "teacher_model_name_or_path", "data": "dataset_name"}[flag]
    return next((finding.message for finding in missing_paths({key: Setting(answer, COMMAND_LINE)})), None)


def configuration(file: Path, purpose: Purpose, model: str, teacher: str | None, method: Method, data: str) -> str:
    """Return the configuration as YAML, in the values of the built-in ones."""
    from ..config.yaml_reader import inline

    distils, adapters = purpose is Purpose.distill, method is not Method.full
    what = f"Distil {teacher} into {model}" if distils else f"Fine-tune {model} on {data}"
    large = billions(model) >= (LARGE_LORA if adapters else LARGE_FULL)
    # As in the built-in configurations of models of that size.
    rate = ("1e-4" if large else "2e-4") if adapters else ("1e-5" if large else "2e-5")
    halved = distils and model == teacher  # else there would be nothing to learn
    if halved:
        what, rate = f"Distil {model} into half of its layers", "5e-4" if adapters else "1e-4"
    max_length = positions_of(model, 2048 if distils else 4096)
    pace = pace_of(data, max_length)
    # By hand, since a YAML writer drops comments.
    lines = [
        f"# {what}: {METHODS[method]}",
        f"# How much memory it needs: liger-trainer estimate {shlex.quote(str(file))} --gpu NAME",
        f"# liger-trainer run {shlex.quote(str(file))}",
        f"recipe: {purpose}",
        "",
        f"model_name_or_path: {inline(model)}",
        *([f"teacher_model_name_or_path: {inline(teacher or '')}"] if distils else []),
        *(["keep_every_nth_layer: 2   # the student; whole, it would be its teacher already"] if halved else []),
        *(_ADAPTERS if adapters else ()),
        *(["load_in_4bit: true   # takes bitsandbytes"] if method is Method.qlora else []),
        "",
        f"dataset_name: {inline(data)}",
        "# assistant_only_loss: true   # learn only the answers of chats, not what the user says",
        "# supervised_part: content    # needed for that where the chat template does not mark answers, as most do not",
        f"max_length: {max_length}",
        f"packing: {_PACKED if pace.packing else _NOT_PACKED}",
        *([f"holdout_fraction: {pace.held_out}   # fewer rows would judge little"] if pace.held_out else []),
        "max_eval_rows: 100",
        "",
        *(
            ["beta: 0.0   # forward KL; 1.0 is the reverse KL, in between lies the generalised JSD", ""]
            if distils
            else []
        ),
        f"num_train_epochs: {pace.epochs}   # or max_steps{pace.told}",
        f"per_device_train_batch_size: {ROWS}",
        f"gradient_accumulation_steps: {pace.accumulation}",
        f"learning_rate: {rate}",
        "lr_scheduler_type: cosine",
        "warmup_steps: 0.03   # of all steps",
        "gradient_checkpointing: true",
        "logging_steps: 5",
        "save_steps: 200",
        "save_total_limit: 2",
    ]
    return "\n".join(lines) + "\n"


def positions_of(model: str, most: int) -> int:
    """Return how many tokens a row may have in a model that lies in a folder, if that is known, and at most `most`."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        return min(most, int((config.get("text_config") or config)["max_position_embeddings"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return most


_PACKED = "true   # rows are filled up to max_length, and documents do not see one another"
_NOT_PACKED = "false   # true fills rows up to max_length, which leaves too few of these for an epoch"


# How long to train on few rows. An epoch of one step teaches nothing, and in it the warmup's rate is still 0.
ROWS, ACCUMULATION, EPOCHS = 2, 8, 3  # rows of a micro-batch; the most of the others
ENOUGH, IN_ALL = 50, 100  # steps of an epoch, and of a run, that are aimed at
SHARE, HELD_OUT, MOST = 0.05, 20, 0.2  # holdout_fraction by default; rows that can judge a run; most of few rows
BYTES_A_TOKEN = 4  # of JSON, English and code, roughly
TOO_LARGE = 200_000_000  # bytes of data that are surely enough


@dataclass(frozen=True)
class Pace:
    """What of a configuration follows from how many rows there are; `told` says what it comes to."""

    packing: bool = True
    accumulation: int = ACCUMULATION
    epochs: int = 1
    held_out: float | None = None  # the share, where the default would be too few
    told: str = ""


def pace_of(data: str, max_length: int) -> Pace:
    """Return the pace for the rows in a local file or folder; the usual one where they are not counted.

    Raises:
        ConfigError: there are none.
    """
    counted = _count(Path(data).expanduser())
    if counted is None:
        return Pace()
    rows, tokens = counted
    if not rows:
        raise ConfigError(f"--data: {data} has no rows.")
    held_out = None
    if Path(data).expanduser().is_file() and rows * SHARE < HELD_OUT:  # a folder may have a split of its own
        held_out = min(math.ceil(100 * HELD_OUT / rows) / 100, MOST)
        rows, tokens = (round(count * (1 - held_out)) for count in counted)
    packed = tokens // max_length
    packing = packed >= ROWS * ENOUGH
    sequences = packed if packing else rows
    accumulation = min(max(sequences // (ROWS * ENOUGH), 1), ACCUMULATION)
    steps = math.ceil(sequences / (ROWS * accumulation))
    epochs = min(max(math.ceil(IN_ALL / max(steps, 1)), 1), EPOCHS)
    told = f"; {counted[0]:,} rows make about {steps * epochs:,} steps on one GPU"
    return Pace(packing, accumulation, epochs, held_out, told)


def _count(path: Path) -> tuple[int, int] | None:
    """Return the rows and about the tokens of local data; None where it is large, or of a kind that is not counted."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    if sum(file.stat().st_size for file in files) > TOO_LARGE:
        return None
    counts = [_COUNTS[file.suffix](file) for file in files if file.suffix in _COUNTS]
    if not counts:
        return None
    return sum(rows for rows, _ in counts), sum(size for _, size in counts) // BYTES_A_TOKEN


def _count_lines(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return sum(bool(line.strip()) for line in content.split(b"\n")), len(content)


def _count_json(path: Path) -> tuple[int, int]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError:  # JSON lines by another name
        return _count_lines(path)
    return (len(rows) if isinstance(rows, list) else 1), path.stat().st_size


def _count_csv(path: Path) -> tuple[int, int]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return max(sum(1 for _ in csv.reader(file)) - 1, 0), path.stat().st_size
    except csv.Error:  # such as a field that is very long; a run says what is wrong
        return _count_lines(path)


def _count_parquet(path: Path) -> tuple[int, int]:
    from pyarrow import parquet

    facts = parquet.read_metadata(path)
    # Before compression, as text would be.
    return facts.num_rows, sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))


_COUNTS = {
    ".jsonl": _count_lines, ".ndjson": _count_lines, ".json": _count_json, ".csv": _count_csv, ".tsv": _count_csv,
    ".parquet": _count_parquet,
}  # fmt: skip


_ADAPTERS = (
    "dtype: bfloat16   # of the frozen weights; the adapters' are fp32",
    "use_peft: true",
    "lora_r: 16",
    "lora_alpha: 32",
    "lora_dropout: 0.0",
    "lora_target_modules: all-linear   # but the head",
)
