"""What libraries find out again for each trainer, found out once in a process, with the same results."""

import functools
import importlib.metadata
import inspect
import sys
from types import CodeType
from typing import Any

import torch
from dill import detect


def install() -> None:
    """accelerate and TRL read packages' metadata whenever they ask what is installed, and dill, with which datasets
    hashes the functions that it maps, disassembles each. A seed for devices that are not there is kept with a stack of
    calls, in case that one comes."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)
    nested_globals = detect.nestedglobals
    of_code = functools.cache(lambda code: nested_globals(code))

    def quick(func, recurse=True):
        return of_code(func) if recurse and isinstance(func, CodeType) else nested_globals(func, recurse)

    detect.nestedglobals = quick
    devices: list[Any] = [torch.cuda, torch.xpu, torch.mtia]
    for device in devices:
        if not device.is_available():
            device.manual_seed = device.manual_seed_all = lambda seed: None


def install_in_imported() -> None:
    """In what the tests have imported; no test pays for libraries that it does not use."""
    for name, quicken in _QUICKENED.items():
        if name in sys.modules:
            quicken(sys.modules[name])


def _quicken_datasets(datasets: Any) -> None:
    """A transform's function is pickled, with all that it refers to, for a fingerprint: the name of a file with the
    result, if an earlier process has made one. None has in a test. Each copy of a dataset copies its columns' types,
    which nothing changes."""
    fingerprint: Any = sys.modules["datasets.fingerprint"]
    dataset: Any = sys.modules["datasets.arrow_dataset"]
    for module in (fingerprint, dataset):
        module.update_fingerprint = lambda *_: fingerprint.generate_random_fingerprint()
    dataset.generate_fingerprint = lambda _: fingerprint.generate_random_fingerprint()
    datasets.Value.__deepcopy__ = lambda self, memo: self
    datasets.Features.__deepcopy__ = _copy_of_columns
    for transform in vars(datasets.Dataset).values():
        while inspect.isfunction(transform):
            transform.__signature__ = inspect.signature(transform)
            transform = getattr(transform, "__wrapped__", None)


def _copy_of_columns(features: Any, memo: dict) -> Any:
    copied = type(features).__new__(type(features))
    dict.update(copied, features)
    vars(copied).update({name: dict(value) for name, value in vars(features).items()})
    return copied


def _quicken_imports(imports: Any) -> None:
    imports._is_package_available = functools.cache(imports._is_package_available)


def _quicken_transport(transport: Any) -> None:
    """Each client reads all certificates of this machine."""
    transport.create_ssl_context = functools.cache(transport.create_ssl_context)


def _quicken_templates(environment: Any) -> None:
    """Each trainer compiles the template of its model card."""
    environment.Environment.compile = functools.lru_cache(maxsize=100)(environment.Environment.compile)


def _quicken_commands(typer: Any) -> None:
    """Each call of the command line builds the parsers of all commands."""
    typer.get_command = functools.cache(typer.get_command)


_QUICKENED = {
    "datasets": _quicken_datasets, "accelerate.utils.imports": _quicken_imports,
    "jinja2.environment": _quicken_templates, "httpx._transports.default": _quicken_transport,
    "typer.main": _quicken_commands,
}  # fmt: skip
