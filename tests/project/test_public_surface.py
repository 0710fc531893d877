"""What a user can import, write into a file or type, as public_surface.yaml has it.

A difference is a change that users notice. Names and signatures that are Liger-Kernel's too are those of its 0.8.5.
Where a change is meant, give it a line in CHANGELOG.md and write the file again:

    python tests/project/test_public_surface.py
"""

import dataclasses
import enum
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, get_args, get_type_hints

import pytest
import typer
import yaml

import liger_trainer
from liger_trainer import errors
from liger_trainer.cli import app as command_line
from liger_trainer.config.schema import shipped_schema

FILE = Path(__file__).with_name("public_surface.yaml")
PROMISED = {"liger_trainer.config.run_config": ["check_text"], "liger_trainer.teachers.base": ["Teacher"]}  # in docs/


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "liger_trainer"


def signature(thing: Any) -> str:
    """Without annotations, which releases write differently; of a configuration, without the fields of TRL's class."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return "an exception"
    found, own = inspect.signature(thing), None
    if any(dataclasses.is_dataclass(base) and not is_ours(base) for base in getattr(thing, "__mro__", ())):
        own = {name for base in thing.__mro__ if is_ours(base) for name in inspect.get_annotations(base)}
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if own is None or p.name in own]
    return re.sub(r" at 0x\w+", "", str(inspect.Signature(plain)))


def members(cls: type) -> dict[str, str]:
    """`forward`, what the docstring lists as attributes, and the methods of a class without bases of other libraries.
    The other methods of our trainers and configurations are hooks between them and TRL's."""
    listed = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    names = [] if dataclasses.is_dataclass(cls) else re.findall(r"^ {8}(\w+): ", listed, re.M)
    found = dict.fromkeys(names, "attribute")
    no_base = cls.__mro__[-2].__module__ in ("abc", cls.__module__)
    for name in sorted({name for base in cls.__mro__ if is_ours(base) for name in vars(base)}):
        method = inspect.getattr_static(cls, name)
        if name == "forward" or no_base and name[0] != "_" and isinstance(method, (FunctionType, classmethod)):
            found[name] = signature(getattr(method, "__func__", method))
    return {f"{cls.__name__}.{name}": call for name, call in found.items()}


def described(place: str, names: list[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        thing = getattr(import_module(place), name)
        found[name] = signature(thing) if callable(thing) else type(thing).__name__
        if inspect.isclass(thing) and ".kernels." not in place:  # whose results and arguments are their fields
            found |= members(thing)
    return found


def names_of_op(place: str) -> list[str]:
    """Those in `__all__`; else the op, which has the file's name, its reference, and Liger-Kernel's names."""
    module, stem = import_module(place), place.rpartition(".")[2]
    ops = re.compile(rf"{stem}_?|{stem}_reference|liger_\w+")
    listed = getattr(module, "__all__", None) or filter(ops.fullmatch, vars(module))
    helpers = stem in ("types", "runtime")  # of the ops; their classes are arguments of ops
    return [name for name in listed if not helpers or inspect.isclass(getattr(module, name))]


def public_names() -> dict[str, dict[str, str]]:
    ops = [f"liger_trainer.kernels.{path.stem}" for path in sorted(Path(__file__).parents[2].glob("kernels/[!_]*.py"))]
    names = {"liger_trainer": liger_trainer.__all__, **PROMISED}
    names |= {place: names_of_op(place) for place in [*ops, "liger_trainer.modules.functional"]}
    return {place: described(place, kept) for place, kept in names.items() if kept}


def keys() -> dict[str, str]:
    """Of the shipped schema, so that no other release of TRL changes them."""
    return {n: f"{k.section} {json.dumps(k.rule)} = {json.dumps(k.default)}" for n, k in shipped_schema().keys.items()}


def commands(command: Any, path: str = "liger-trainer") -> dict[str, str]:
    """Each command, whether it takes settings, and its arguments and options with their types and defaults."""
    types = get_type_hints(command.callback) if command.callback else {}
    found = {path: "takes settings" if command.context_settings.get("allow_extra_args") else ""}
    for option in (option for option in command.params if option.name in types):  # not those of typer itself
        kind = types[option.name]
        choices = [[str(c) for c in t] for t in (kind, *get_args(kind)) if isinstance(t, enum.EnumType)]
        names = [*option.opts, *option.secondary_opts] if option.opts[0][0] == "-" else [option.metavar]
        default = "required" if option.required else f"= {option.default}"
        found[" ".join([path, *names])] = f"{choices or inspect.formatannotation(kind)} {default}"
    for name, below in sorted(getattr(command, "commands", {}).items()):
        found |= commands(below, f"{path} {name}")
    return found


PARTS = {
    "names": public_names,
    "keys": keys,
    "commands": lambda: commands(typer.main.get_command(command_line.app)),
    "exit codes": lambda: {n: error.exit_code for n, error in vars(errors).items() if hasattr(error, "exit_code")},
}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_users_see_changes_unnoticed(part):
    assert PARTS[part]() == yaml.safe_load(FILE.read_text(encoding="utf-8"))[part]


if __name__ == "__main__":
    FILE.write_text(yaml.safe_dump({part: read() for part, read in PARTS.items()}, sort_keys=False, width=10**6))
