"""What `liger-trainer new` writes: a configuration in the values of the built-in ones, paced by the rows."""

import csv
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from ..config.yaml_reader import inline
from ..errors import ConfigError

METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "LoRA on 4-bit weights"}
LARGE_FULL, LARGE_LORA = 2.0, 7.0  # billions of parameters from which on the learning rate is half of that below


def configuration(
    file: Path, purpose: str, model: str, teacher: str | None, method: str, data: str, billions: float
) -> str:
    """Return the configuration as YAML, in the values of the built-in ones.

    Args:
        purpose, method, ...: the answers to the questions of `liger-trainer new`.
        billions: of parameters, as the model's name says.
    """
    distils, adapters = purpose == "distill", method != "full"
    what = f"Distil {teacher} into {model}" if distils else f"Fine-tune {model} on {data}"
    large = billions >= (LARGE_LORA if adapters else LARGE_FULL)
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
        *(["load_in_4bit: true   # takes bitsandbytes"] if method == "qlora" else []),
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
    if Path(data).expanduser().is_file() and rows * SHARE < HELD_OUT:  # a folder may have its own split
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
