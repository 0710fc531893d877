"""Read rows from a demo, a local file, a directory, the hub or a TRL mixture. Every error names its file and line."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from ... import plugins
from ...common.files import EXPECTED, LINES, SUFFIXES, hint_of_folder, kind_of_file
from ...errors import ConfigError, DataError
from ...plugins import DEMO, TASK
from .row_checks import BadRows, form_of, learned_answers, row_problem
from .text_files import as_written, numbered_lines, place_in, read_json, read_table

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from ...config.run_config import RunConfig

# Columns of a CSV file that are text whatever their cells look like: "42", "NA" and "null" are answers too.
_TEXTS = ("prompt", "completion", "instruction", "input", "output", "system")
_SPLITS = {
    split: re.compile(rf"(?<![a-z])({words})(s|ing|(data|file|row|set)s?|split|val)?(?![a-z])", re.IGNORECASE)
    for split, words in {
        "test": "test|eval|evaluation|held_?out|holdout", "validation": "val|valid|validation|dev", "train": "train",
    }.items()
}  # fmt: skip
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")  # as the hub's libraries name files
# Of a file or a folder: hidden, of a model or a run, about a dataset, or what datasets keeps next to its own files
_NO_ROWS = re.compile(
    r"\..*|__.*|(.*config|.*\.index|.*_results|dataset_(infos?|dict)|state|trainer_state|tokenizer|added_tokens|vocab|"
    r"special_tokens_map)\.json|(merges|vocab|requirements.*|licen[cs]e.*|readme.*)\.txt|cache-.*\.arrow",
    re.IGNORECASE,
)
_UNREAD = (".xls", ".xlsx", ".ods", ".h5", ".hdf5", ".db", ".sqlite", ".orc", ".avro", ".tar", ".tgz", ".7z", ".lz4")
_POINTER = b"version https://git-lfs"
_FILE_OF_ARROW = b"ARROW1"  # how an IPC file (Feather) begins; `save_to_disk` writes IPC streams


# A file or split, with braces for a number, and the number of row i of a split in it.
Place = Callable[[str, int], tuple[str, int]]


@dataclass(frozen=True)
class LoadedDataset:
    """The splits of a dataset as they were read; `place` says where row i of a split comes from."""

    splits: dict[str, "Dataset"]
    place: Place
    licence: str | None = None
    held_out: str | None = None
    blank_lines: int = 0


def load_source(config: "RunConfig", bad: BadRows) -> LoadedDataset:
    """Load the dataset that `dataset_name` or `datasets` names.

    Args:
        bad: takes the rows that cannot be read; they are left out.

    Raises:
        ConfigError: there is no such dataset.
        DataError: a file of it cannot be read.
    """
    name = config["dataset_name"]
    if config["datasets"]:
        return _load_mixture(config)
    path = Path(name).expanduser()
    if config["task_config"] is not None and not name.startswith(TASK):
        raise config.error("task_config", f"belongs to a task, {TASK}...; leave it out for {name} (~task_config).")
    if config["dataset_config"] is not None and (name.startswith((DEMO, TASK)) or path.exists()):
        raise config.error("dataset_config", f"has no effect: {name} is not a dataset of the hub.")
    if name.startswith(DEMO):
        return _load_demo(config)
    if name.startswith(TASK):
        if config["exact_match"]:
            raise config.error("exact_match", "has no effect: a task's own checker always counts; leave it out.")
        rows = plugins.load(TASK).load_task(config)
        return LoadedDataset({"train": rows.train, "test": rows.test}, _row_of, rows.licence, rows.held_out)
    if path.is_file():
        return _load_files(config, bad, {"train": [path]})
    if path.is_dir():
        return _load_directory(config, bad, path)
    if found := sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file()):
        folders = {file.parent for file in found}
        return _load_named(config, bad, Path(os.path.commonpath(folders)), found)
    if path.is_absolute() or name.startswith((".", "~")) or "://" in name or kind_of_file(path) in SUFFIXES:
        raise config.error("dataset_name", f"no such file or directory: {name}{hint_of_folder(config.source, name)}")
    return _load_hub(config)


def _by_name(splits: "DatasetDict") -> dict[str, "Dataset"]:
    return {str(name): rows for name, rows in splits.items()}


def _row_of(split: str, index: int) -> tuple[str, int]:
    return f"row {{}} of the {split} rows", index


def _load_demo(config: "RunConfig") -> LoadedDataset:
    try:
        demo = plugins.load(DEMO).demo_dataset(config["dataset_name"].removeprefix(DEMO))
    except ConfigError as error:
        raise config.error("dataset_name", str(error)) from None
    held_out = f"{len(demo.held_out_modules)} whole modules: {', '.join(demo.held_out_modules)}"
    return LoadedDataset({"train": demo.train, "test": demo.test}, _row_of, demo.licence, held_out)


def _load_hub(config: "RunConfig") -> LoadedDataset:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    name = config["dataset_name"]
    try:
        loaded = datasets.load_dataset(name, name=config["dataset_config"])
    except DatasetNotFoundError as error:
        reason = f"neither a file or directory here nor a dataset of the hub that can be read: {error}"
        raise config.error("dataset_name", reason) from None
    except (ConnectionError, OSError) as error:  # offline mode is a ConnectionError
        reason = f"there is no file or directory {name}, and the hub could not be asked: {error}"
        raise config.error("dataset_name", reason) from None
    except ValueError as error:  # an unknown configuration, among others
        raise config.error("dataset_config", str(error)) from None
    assert isinstance(loaded, datasets.DatasetDict)
    licences = {split.info.license for split in loaded.values() if split.info.license}
    return LoadedDataset(_by_name(loaded), _row_of, ", ".join(sorted(licences)) or None)


def _load_mixture(config: "RunConfig") -> LoadedDataset:
    from datasets.exceptions import DatasetsError
    from trl import get_dataset

    for path in (entry["path"] for entry in config["datasets"]):
        if Path(path).is_file():
            advice = f"name its kind as path (json, csv, parquet or text), and the file: data_files: {path}"
            raise config.error("datasets", f"{path} is a file; {advice}.")
    try:
        loaded = get_dataset(config.mixture_args())
    except (ConnectionError, OSError, ValueError, KeyError, DatasetsError) as error:
        raise config.error("datasets", f"the mixture could not be loaded: {error}") from None
    share = config["test_split_size"]
    return LoadedDataset(
        _by_name(loaded), _row_of, held_out=f"{share:.0%} of the rows, drawn by TRL" if share else None
    )


def _load_directory(config: "RunConfig", bad: BadRows, path: Path) -> LoadedDataset:
    import datasets

    try:
        if (path / "dataset_dict.json").is_file():
            return LoadedDataset(_by_name(datasets.DatasetDict.load_from_disk(str(path))), _row_of)
        if (path / "state.json").is_file():
            return LoadedDataset({"train": datasets.Dataset.load_from_disk(str(path))}, _row_of)
    except Exception as error:  # json, pyarrow and datasets each have their own
        raise DataError(f"{path}: cannot be read as the output of save_to_disk: {error}") from None
    return _load_named(config, bad, path, _rows_in(path))


def _rows_in(path: Path) -> list[Path]:
    """Return the files of rows in a folder, and those below it: of the same kinds, where it has some itself.

    Hidden files are none, nor what lies next to a model, nor the samples that `generate` keeps below its rows.
    """
    below = (file for file in sorted(path.rglob("*")) if kind_of_file(file) in SUFFIXES)
    below = (file for file in below if file.parent == path or not (file.parent / "index.json").is_file())
    found = [file for file in below if not any(map(_NO_ROWS.fullmatch, file.relative_to(path).parts))]
    kinds = {kind_of_file(file) for file in found if file.parent == path}
    return [file for file in found if not kinds or kind_of_file(file) in kinds]


def _load_named(config: "RunConfig", bad: BadRows, path: Path, found: list[Path]) -> LoadedDataset:
    """Read files that lie in `path`, each into the split that its name says, or else one of its folders' names."""
    name, train = config["dataset_name"], config["dataset_train_split"]
    if not found:
        raise config.error("dataset_name", f"{name} holds no dataset; expected {EXPECTED}, or what save_to_disk wrote.")
    named = {train, config["dataset_test_split"]}
    files: dict[str, list[Path]] = {}
    for file in found:
        files.setdefault(_split_of(file.relative_to(path), named), []).append(file)
    if unnamed := files.pop("", []):
        if files:
            others = ", ".join(str(file.relative_to(path)) for file in unnamed)
            hint = "name every file after its split, as in train.jsonl and test.jsonl, or none, or take one file"
            raise config.error("dataset_name", f"{name} holds files of no split ({others}) next to others; {hint}.")
        files = {train: unnamed}
    if not Path(name).expanduser().is_dir():  # a pattern names the files
        return _load_files(config, bad, files)
    for split, paths in files.items():
        folders = sorted({str(file.parent) for file in paths})
        if len(folders) > 1 and split in named:
            rows = f"{name} holds rows of the split {split!r} in several folders"
            raise config.error("dataset_name", f"{rows}; name one of them: {', '.join(folders)}.")
    others = (other for folder in {file.parent for file in found} for other in folder.iterdir())
    if unread := sorted(str(other) for other in others if other.suffix.lower() in _UNREAD):
        raise config.error("dataset_name", f"{unread[0]} would not be read with the others; expected {EXPECTED}.")
    return _load_files(config, bad, files)


def _split_of(file: Path, named: set[str]) -> str:
    """Return the split of a file: `train` for train.jsonl, for train/1.jsonl and for my-train-00000-of-00002.parquet.

    Words for held-out rows come before those for training. Nothing is returned where no name says it.
    """
    for part in (file.name.partition(".")[0], *reversed(file.parent.parts)):
        shard = _SHARD.fullmatch(part)
        name = shard[1] if shard else part
        words = next((split for split, words in _SPLITS.items() if words.search(_CAPITAL.sub("-", part))), None)
        if name in named or words is not None:
            return name if name in named or words is None or (shard and file.parent.name == "data") else words
    return ""


def _load_files(config: "RunConfig", bad: BadRows, files: dict[str, list[Path]]) -> LoadedDataset:
    """Read each split from its files, and remember the line of each row."""
    splits, places, blank = {}, {}, 0
    for split, paths in files.items():
        parts, where = [], []
        for path in paths:
            part, lines, skipped = _read_file(config, bad, path)
            if path.name.startswith("metadata.") and "file_name" in part.column_names:  # of datasets' imagefolder
                folder = path.parent.absolute()
                named = [str(folder / name) for name in part["file_name"]]
                part = part.remove_columns("file_name").add_column("image", named)
            parts.append(part)
            where.append((len(part), path, lines))
            blank += skipped
        splits[split] = parts[0] if len(parts) == 1 else _joined(parts, split)
        places[split] = where

    def place(split: str, index: int) -> tuple[str, int]:
        for length, path, lines in places[split]:
            if index < length:
                return place_in(path, lines, index)
            index -= length
        raise AssertionError(f"row {index} of {split} is in no file")

    return LoadedDataset(splits, place, blank_lines=blank)


def _joined(parts: list["Dataset"], split: str) -> "Dataset":
    """Return the rows of several files, such as CSV and JSON, whose columns may have other types in each."""
    import datasets

    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        try:
            names = dict.fromkeys(name for part in parts for name in part.column_names)
            return as_written({name: [dict(row).get(name) for part in parts for row in part] for name in names})
        except (TypeError, ValueError):  # images, among others
            raise DataError(f"the files of split {split!r} do not fit together: {error}") from None


def _read_file(config: "RunConfig", bad: BadRows, path: Path) -> tuple["Dataset", list[int] | None, int]:
    """Return the rows of a file, their lines if rows are lines, and the number of blank lines left out."""
    import datasets

    try:
        with path.open("rb") as file:
            first = file.read(len(_POINTER))
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}.") from None
    if not first:
        raise DataError(f"{path}: the file is empty.")
    if first == _POINTER:
        raise DataError(f"{path}: is a pointer of Git LFS, without the rows. Get them by: git lfs pull.")
    kind = ".parquet" if first.startswith(b"PAR1") else kind_of_file(path)
    if kind in (".json", *LINES):
        return read_json(path, bad, partial(_problem_in, config, bad))
    if kind == ".txt":
        numbered = list(numbered_lines(path))
        kept = [(n, line) for n, line in numbered if line.strip()]
        rows = datasets.Dataset.from_dict({config["dataset_text_field"]: [line for _, line in kept]})
        return rows, [n for n, _ in kept], len(numbered) - len(kept)
    table = partial(read_table, texts=(*_TEXTS, config["dataset_text_field"]))
    readers = {
        ".csv": partial(table, separators=",;\t|"), ".tsv": partial(table, separators="\t"),
        ".parquet": _read_parquet, ".arrow": _read_arrow, ".feather": _read_arrow,
    }  # fmt: skip
    read = readers.get(kind)
    if read is None:
        raise config.error("dataset_name", f"{path.name}: expected {EXPECTED}.")
    try:
        loaded = read(str(path))
    except DataError:
        raise
    except Exception as error:  # pyarrow, pandas and datasets each have their own
        cause = error.__cause__ or error
        advice = ". Save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else ""
        raise DataError(f"{path}: cannot be read as {kind[1:]}: {cause}{advice}") from None
    assert isinstance(loaded, datasets.Dataset)
    return loaded, None, 0


def _read_parquet(path: str) -> "Dataset":
    """Read a Parquet file, one without rows too, which datasets refuses; some writers leave such ones among others."""
    import datasets
    import pyarrow.parquet
    from datasets.table import InMemoryTable

    if pyarrow.parquet.read_metadata(path).num_rows:
        return datasets.Dataset.from_parquet(path)
    return datasets.Dataset(InMemoryTable(pyarrow.parquet.read_table(path)))


def _read_arrow(path: str) -> "Dataset":
    """Read an IPC stream, as `save_to_disk` writes it, or an IPC file, which is Feather."""
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable

    with Path(path).open("rb") as file:
        is_stream = file.read(len(_FILE_OF_ARROW)) != _FILE_OF_ARROW
    if is_stream:
        return datasets.Dataset.from_file(path)
    with pyarrow.memory_map(path) as source:
        return datasets.Dataset(InMemoryTable(pyarrow.ipc.open_file(source).read_all()))


def _problem_in(config: "RunConfig", bad: BadRows, columns: Sequence[str]) -> Callable[[dict], str | None] | None:
    """Return the check of rows with these columns, as they are in the file; None where they have no form."""
    text = config["dataset_text_field"]
    read = form_of(columns, text, config.given("dataset_text_field"), config.recipe != "sft")
    if read is None or not bad.to_train:
        return None
    return partial(row_problem, form=read[0], text=text, vocabulary=bad.vocabulary, learned=learned_answers(config))
