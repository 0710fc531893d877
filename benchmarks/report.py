"""What every benchmark reads and writes: names on a command line; where it ran, Markdown tables, a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .measure import Roofline, Spread

PACKAGES = ("torch", "triton", "liger-kernel", "trl", "cut-cross-entropy", "quack-kernels", "transformers")


def describe(device: torch.device, roofline: Roofline, arguments: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return where and how a run of `benchmarks.run` was made."""
    where = provenance(PACKAGES, device.type == "cuda")
    command = shlex.join(["python", "-m", "benchmarks.run", *without_output(arguments)])
    python = platform.python_version()
    return {**where, "command": command, "python": python, "rounds": rounds, "roofline": asdict(roofline)}


def head(header: dict[str, Any]) -> str:
    """Return the list at the top of a page, of what `describe` returns."""
    limits = Roofline(**header["roofline"])
    return "\n".join([
        f"- {header['device']}, {header['date']}, commit {header['commit']}",
        f"- `{header['command']}`: {header['rounds']} rounds",
        f"- Python {header['python']}, {join_versions(header['packages'])}",
        f"- Measured limits: matrix product {limits.gemm_tflops:.3g} TFLOP/s ({limits.gemm_shape}), copy "
        f"{limits.copy_gbs:.0f} GB/s",
    ])  # fmt: skip


def provenance(packages: Sequence[str], cuda: bool | None = None) -> dict[str, Any]:
    """Return the device, the date, the commit and the versions of packages."""
    cuda = torch.cuda.is_available() if cuda is None else cuda
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git_commit(),
        "packages": {name: _version(name) for name in packages},
    }


def where(header: dict[str, Any]) -> str:
    """Return the sentence at the top of a page, of `provenance` and the command."""
    versions = join_versions(header["packages"])
    return f"{header['device']}, {header['date']}, commit {header['commit']}, {versions}. `{header['command']}`."


def join_versions(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in packages.items())


def without_output(arguments: Sequence[str]) -> list[str]:
    """Drop the folders of results and logs: a path on this machine says nothing about them."""
    folders = ("--output", "--logs")
    return [
        argument
        for before, argument in zip([None, *arguments], arguments, strict=False)
        if argument.split("=")[0] not in folders and before not in folders
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """Return the variable BENCH_COMMIT, for a copy without its history, or what git says."""
    if commit := os.environ.get("BENCH_COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(path: Path, data: Any, text: str) -> None:
    """Write <path>.json and <path>.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    path.with_name(f"{path.name}.md").write_text(text)


def spread(values: Spread, digits: str) -> str:
    return f"{values.median:{digits}} ({values.p25:{digits}} to {values.p75:{digits}})"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [row(titles), row(["---"] * len(titles)), *map(row, rows)]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def listing(cases: Sequence[Any], providers: Sequence[Any]) -> str:
    lines = [case.name + ("" if case.default else " (only by name)") for case in cases]
    lines += [f"{provider.name}: {provider.title} ({', '.join(provider.kinds)})" for provider in providers]
    return "\n".join(lines)


def matching(patterns: str, names: Sequence[str], what: str, parser: argparse.ArgumentParser) -> set[str]:
    """Names that match any of the comma-separated globs; a glob that matches none is an error."""
    chosen: set[str] = set()
    for pattern in patterns.split(","):
        matches = {name for name in names if fnmatchcase(name, pattern.strip())}
        if not matches:
            choices = ", ".join(dict.fromkeys(names))
            parser.error(f"no {what} is called {pattern.strip()!r}; there are: {choices}")
        chosen |= matches
    return chosen
