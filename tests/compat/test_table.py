"""The private names of other libraries that we rely on: there as they were, all of them listed, each in one package."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import platform
import re
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.version import Version
from private_names import NAMES

ROOT = Path(__file__).parents[2]
LINKS = ("liger_trainer/kernels", "liger_trainer/recipes", "liger_trainer/configs")
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("liger_trainer", "kernels", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(LINKS)
}
COMPAT = "liger_trainer/compat/"
# Overriding methods stand where super() finds them, and kernels import nothing of the package.
EXEMPT = {
    "kernels/_triton.py", "kernels/_autograd.py", "liger_trainer/trainers/sft_trainer.py",
    "liger_trainer/trainers/distill_trainer.py",
}  # fmt: skip
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit"}  # of named tuples, and os._exit
LISTED = {part for entry in NAMES for part in f"{entry.module}.{entry.name}".split(".")}
OF_CODE = (
    r"\b(__code__|co_\w+|f_locals|f_code|__closure__|cell_contents|getclosurevars|getsource|__globals__|_getframe"
    r"|get_instructions|__qualname__(?! =)|__wrapped__)\b"
)

source_of = functools.cache(inspect.getsource)


@functools.cache
def names_of(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the private names that a file defines, and those that it uses."""
    defined, used = set(), set()
    for node in ast.walk(ast.parse(FILES[file])):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                used.update(module.split("."), (alias.name for alias in names))
            case ast.Constant(value=str(text)) if text in LISTED:  # handed to getattr, vars and the like
                used.add(text)
    private = re.compile(r"_[A-Za-z]\w*").fullmatch
    return frozenset(filter(private, defined)), frozenset(filter(private, used))


def foreign_names(file: str) -> set[str]:
    """Return the private names of others that a file uses or overrides: listed ones, and such as we define nowhere."""
    defined, used = names_of(file)
    return (used - DOCUMENTED - our_names()) | ((used - defined) & LISTED)


@functools.cache
def our_names() -> frozenset[str]:
    return frozenset().union(*(names_of(file)[0] for file in FILES))


def holder_of(module: str):
    """Import a module, or get what is no module, as `torch.ops.aten`, from its parent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        parent, _, name = module.rpartition(".")
        return getattr(holder_of(parent), name)


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: f"{entry.module.partition('.')[0]} {entry.name}")
def test_a_name_is_there_as_we_need_it(entry):
    library = entry.module.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    version = platform.python_version() if library == "sys" else importlib.metadata.version(library)
    if Version(version) < Version(entry.since):
        pytest.skip(f"{library} {version} has it not yet")
    sentence = f"{library} {version}: {entry.module} {entry.name} has changed; {entry.why}"
    holder = holder_of(entry.module)
    *classes, attribute = entry.name.split(".")
    for name in classes:
        holder = getattr(holder, name)
    found = getattr(holder, attribute, None)
    if found is None:
        sources = [cls for cls in holder.__mro__ if cls is not object] if inspect.isclass(holder) else [holder]
        assert any(re.search(rf"\b{attribute}\b", source_of(each)) for each in sources), sentence
    if entry.parameters is not None:
        parameters = tuple(name for name in inspect.signature(found).parameters if name != "self")
        assert parameters == entry.parameters, sentence


def test_every_private_name_of_other_libraries_is_listed():
    found = {file: foreign_names(file) - LISTED for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}, "add them to tests/support/private_names.py"


def test_no_name_is_listed_that_nobody_uses():
    words = {word for text in FILES.values() for word in re.findall(r"\w+", text)}
    assert {entry.name.rpartition(".")[2] for entry in NAMES} - words == set()


def test_private_names_of_other_libraries_are_in_one_package():
    found = {file: foreign_names(file) for file in FILES if not file.startswith(COMPAT) and file not in EXEMPT}
    assert {file: names for file, names in found.items() if names} == {}, "go through a function of compat/"


def test_code_of_other_libraries_is_read_in_one_package():
    found = defaultdict(list)
    for file, text in FILES.items():
        if not file.startswith(COMPAT) and file not in EXEMPT:
            for number, line in enumerate(text.splitlines(), 1):
                if re.search(OF_CODE, line.partition("#")[0]):
                    found[file].append(number)
    assert found == {}, "go through a function of compat/code_objects.py"
