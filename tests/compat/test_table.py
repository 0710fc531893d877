"""The private names of other libraries that the trainers rely on: there as they were, and all of them listed."""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest
from transformers import TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

import liger_trainer.trainers
from liger_trainer.compat.table import SEAMS

source_of = functools.cache(inspect.getsource)
TRAINERS = Path(liger_trainer.trainers.__file__).parent
FILES = [path for path in TRAINERS.glob("*.py")]
FILES += [TRAINERS.parent / "extras" / "qat.py", TRAINERS.parent / "extras" / "vocab_parallel" / "trainer.py"]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.module.partition('.')[0]} {seam.name}")
def test_a_seam_is_there_as_the_trainers_need_it(seam):
    library = seam.module.partition(".")[0]
    sentence = f"{library} {importlib.metadata.version(library)}: {seam.module} {seam.name} has changed; {seam.why}"
    holder = importlib.import_module(seam.module)
    *classes, attribute = seam.name.split(".")
    for name in classes:
        holder = getattr(holder, name)
    found = getattr(holder, attribute, None)
    if found is None:
        sources = [cls for cls in holder.__mro__ if cls is not object] if inspect.isclass(holder) else [holder]
        assert any(re.search(rf"\b{attribute}\b", source_of(each)) for each in sources), sentence
    if seam.parameters is not None:
        assert tuple(name for name in inspect.signature(found).parameters if name != "self") == seam.parameters, (
            sentence
        )


def test_every_private_name_of_other_libraries_is_listed():
    """Private attributes that no trainer sets or defines, and private methods that override one of the libraries."""
    ours, used, overridden = set(), set(), set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute):
                (ours if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    overridden = {name for name in ours for cls in (SFTTrainer, TrainerCallback) if hasattr(cls, name)}
    foreign = {name for name in (used - ours) | overridden if re.match("_[a-z]", name, re.IGNORECASE)}
    listed = {seam.name.rpartition(".")[2] for seam in SEAMS}
    assert foreign and foreign <= listed, f"missing in compat/table.py: {sorted(foreign - listed)}"


def test_no_seam_is_listed_that_nobody_uses():
    text = "\n".join(path.read_text() for path in FILES)
    assert [seam.name for seam in SEAMS if not re.search(rf"\b{seam.name.rpartition('.')[2]}\b", text)] == []
