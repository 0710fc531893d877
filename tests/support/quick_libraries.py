"""What libraries find out again for each trainer, found out once in a process, with the same results."""

import functools
import importlib.metadata
import sys
from typing import Any


def install() -> None:
    """accelerate and TRL read packages' metadata whenever they ask what is installed."""
    for name in ("metadata", "version", "packages_distributions"):
        setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))


def install_in_imported() -> None:
    """In what the tests have imported; no test pays for libraries that it does not use."""
    found = {name: sys.modules.get(name) for name in ("datasets", "accelerate.utils.imports", "typer.main")}
    datasets, imports, typer = found.values()
    if datasets is not None:
        _quicken_datasets()
    if imports is not None:
        imports._is_package_available = functools.cache(imports._is_package_available)
    if typer is not None:  # each call of the command line builds the parsers of all commands
        typer.get_command = functools.cache(typer.get_command)


def _quicken_datasets() -> None:
    """A transform's function is pickled, with all that it refers to, for a fingerprint: the name of a file with the
    result, if an earlier process has made one. None has in a test."""
    fingerprint: Any = sys.modules["datasets.fingerprint"]
    dataset: Any = sys.modules["datasets.arrow_dataset"]
    for module in (fingerprint, dataset):
        module.update_fingerprint = lambda *_: fingerprint.generate_random_fingerprint()
    dataset.generate_fingerprint = lambda _: fingerprint.generate_random_fingerprint()
