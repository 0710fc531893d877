"""The demo dataset: the documentation of Python's standard library (PSF-2.0) as question and answer.

`demo:python_docstrings` is made from the running interpreter, without a download.
"""

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.files import sha256
from ...errors import LigerTrainerError
from .demo_model import PREFIX, demo_key

if TYPE_CHECKING:
    from datasets import Dataset

MIN_CHARS, MAX_CHARS = 30, 1000  # of an answer
HELD_OUT = (0.06, 0.075)  # least and largest share of the rows
QUESTIONS = {
    "module": (
        "What is Python's `{}` module for?",
        "Describe the `{}` module of the Python standard library.",
        "What does the Python module `{}` offer?",
    ),
    "class": (
        "What is the class `{}` in Python?",
        "What is Python's `{}` for?",
        "Describe `{}` from the Python standard library.",
    ),
    "function": (
        "What does `{}` do in Python?",
        "Explain the Python function `{}`.",
        "How does `{}` from the Python standard library work?",
    ),
    "method": (
        "What does `{}` do in Python?",
        "Explain the Python method `{}`.",
        "What happens when I call `{}` in Python?",
    ),
    "property": (
        "What does the attribute `{}` hold in Python?",
        "Explain the Python attribute `{}`.",
    ),
}


@dataclass(frozen=True)
class DemoDataset:
    """Chat rows in TRL's conversational prompt/completion form, held out by module."""

    name: str
    licence: str
    train: "Dataset"
    test: "Dataset"
    sha256: str  # of the rows as JSON lines, train before test
    held_out_modules: tuple[str, ...]  # top-level modules whose rows are all in `test`

    @property
    def rows(self) -> int:
        """Rows of both splits together."""
        return len(self.train) + len(self.test)


def demo_dataset(name: str = "python_docstrings") -> DemoDataset:
    """Build a demo dataset from the running interpreter: the same rows for one Python build.

    Rows are `{"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}`. Their order is that of a
    hash, so that the first n rows of a split are a fair sample of it.

    Args:
        name: a key of `DEMO_DATASETS`, without the prefix.

    Raises:
        ConfigError: unknown name.
        LigerTrainerError: the interpreter could not list its documentation.
    """
    demo_key(PREFIX + name, DEMO_DATASETS)
    return DEMO_DATASETS[name]()


def _python_docstrings() -> DemoDataset:
    """Ask about every public module, class, function, method and property that has a docstring."""
    from datasets import Dataset

    answers: dict[str, tuple[str, str, str]] = {}  # the first object that has an answer keeps it
    for kind, module, name, docstring in _read_docstrings():
        answer = shorten(docstring, MAX_CHARS)
        if len(answer) >= MIN_CHARS:
            answers.setdefault(answer, (kind, module, name))
    by_module: dict[str, list[tuple[str, dict]]] = defaultdict(list)
    for answer, (kind, module, name) in answers.items():
        by_module[module.partition(".")[0]].append((name, _row(kind, name, answer)))
    held_out = _hold_out({module: len(rows) for module, rows in by_module.items()})
    test = _in_hash_order(by_module, held_out)
    train = _in_hash_order(by_module, by_module.keys() - held_out)
    digest = hashlib.sha256()
    for row in train + test:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return DemoDataset(
        name="python_docstrings",
        licence="PSF-2.0",
        train=Dataset.from_list(train),
        test=Dataset.from_list(test),
        sha256=digest.hexdigest(),
        held_out_modules=tuple(held_out),
    )


DEMO_DATASETS: dict[str, Callable[[], DemoDataset]] = {"python_docstrings": _python_docstrings}


def _read_docstrings() -> list[tuple[str, str, str, str]]:
    """Return (kind, module, name, docstring) of everything public, from an isolated interpreter."""
    script = Path(__file__).with_name("_docstrings.py")
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise LigerTrainerError(
            f"{sys.executable} could not list the documentation of its standard library:\n"
            f"{result.stderr.strip()}\n"
            "Run the demo with an ordinary Python installation, or name another dataset."
        )
    return json.loads(result.stdout)


def shorten(text: str, limit: int) -> str:
    """Cut `text` after a paragraph, sentence or word, if it is longer than `limit` characters."""
    text = text.strip()
    if len(text) <= limit:
        return text
    for end, extra in (("\n\n", 0), (".\n", 1), (". ", 1), ("\n", 0), (" ", 0)):
        cut = text.rfind(end, limit // 2, limit)
        if cut >= 0:
            return text[: cut + extra].rstrip()
    return text[:limit]


def _row(kind: str, name: str, answer: str) -> dict:
    templates = QUESTIONS[kind]
    question = templates[int(_hash(name), 16) % len(templates)].format(name)
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def _hold_out(sizes: dict[str, int]) -> list[str]:
    """Choose modules in hash order, skipping those that are too large, until they hold enough rows."""
    total, held, chosen = sum(sizes.values()), 0, []
    for module in sorted(sizes, key=_hash):
        if held >= HELD_OUT[0] * total:
            break
        if held + sizes[module] <= HELD_OUT[1] * total:
            chosen.append(module)
            held += sizes[module]
    return sorted(chosen)


def _in_hash_order(by_module: Mapping[str, list[tuple[str, dict]]], modules: Iterable[str]) -> list[dict]:
    named = [pair for module in modules for pair in by_module[module]]
    return [row for _, row in sorted(named, key=lambda pair: _hash(pair[0]))]


def _hash(text: str) -> str:
    return sha256(text.encode())
