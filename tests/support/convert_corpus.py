"""What becomes of all configurations in a folder: `python tests/support/convert_corpus.py TOOL FOLDER` prints counts.

A key that stands in a file has to be said: its path is in the output, or its value changes the output. So each key that
the output does not name is given other values, one after another, and is unsaid if none of them changes anything.
"""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from liger_trainer.config.run_config import check_text
from liger_trainer.config.yaml_reader import parse_yaml
from liger_trainer.errors import ConfigError
from liger_trainer.extras.convert import Tool, convert

OTHERS = ("another", 7, 0.25, True, False, None, ["another"])
COLUMNS = ("files", "convert and validate", "refused", "need a hand", "keys", "converted", "reported", "unsaid")


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each value that holds no further keys."""
    mappings = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if value and (isinstance(value, dict) or mappings):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path


def outcome(tree: dict, tool: Tool, path: tuple = (), value: Any = None) -> str:
    """Return the output for `tree` with another value at `path`, without the lines at which keys stand."""
    tree = deepcopy(tree)
    place: Any = tree
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    try:
        written = convert(yaml.safe_dump(tree, sort_keys=False), "theirs.yaml", tool).to_yaml()
    except ConfigError as error:
        written = str(error)
    return re.sub(r"theirs\.yaml:\d+", "", written)


def count(file: Path, tool: Tool) -> tuple[Counter, list[str]]:
    """Return the counts of one file, by COLUMNS, and its unsaid keys."""
    text, counts = file.read_text(encoding="utf-8"), Counter(files=1)
    try:
        result = convert(text, str(file), tool)
        counts["need a hand"] += 1
        check_text(result.to_yaml(), str(file))
        counts.update({"need a hand": -1, "convert and validate": 1})
    except ConfigError:
        if not counts["need a hand"]:
            return counts + Counter(refused=1), []
    tree, reported = parse_yaml(text), {finding.key for finding in (*result.lost, *result.notes, *result.unneeded)}
    before, keys = outcome(tree, tool), {".".join(map(str, path)): path for path in leaves(tree)}
    unnamed = {name: path for name, path in keys.items() if name not in reported}
    unsaid = [name for name, path in unnamed.items() if all(outcome(tree, tool, path, v) == before for v in OTHERS)]
    converted = len(unnamed) - len(unsaid)
    counts.update(keys=len(keys), converted=converted, reported=len(keys) - len(unnamed), unsaid=len(unsaid))
    return counts, unsaid


if __name__ == "__main__":
    table, total = importlib.import_module(f"liger_trainer.extras.convert.{sys.argv[1]}").TOOL, Counter()
    for path in sorted(path for path in Path(sys.argv[2]).rglob("*.y*ml")):
        counts, unsaid = count(path, table)
        total.update(counts)
        print(*(f"unsaid: {path}: {name}\n" for name in unsaid), sep="", end="", flush=True)
    print(*(f"{name}: {total[name]}" for name in COLUMNS), sep=", ")
