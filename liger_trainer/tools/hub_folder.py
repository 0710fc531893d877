"""Our kernels as a folder in the layout of Hugging Face's kernel hub, which its `kernels` package loads from disk.

    FOLDER/build/torch-<backend>/metadata.json   name, version, license, backend
                                 __init__.py     the ops by name, and `layers`
                                 rms_norm.py, ...

The files are those of kernels/, which import torch and Triton alone. Only the namespace of their ops under
torch.compile is another, so that the folder and the installed package work side by side.
"""

import ast
import json
from pathlib import Path

from .. import __version__
from ..common.files import sha256
from ..kernels import runtime

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
NAME, NAMESPACE, LICENSE = "liger-trainer", "liger_trainer::", "Apache-2.0"
LAYOUT_VERSION = 1  # counted up when a layer or an op changes its arguments


def write_hub_folder(folder: Path) -> list[str]:
    """Write the kernels into an empty folder and return the names of the variants, such as `torch-cuda`."""
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in sorted(Path(runtime.__file__).parent.glob("*.py"))
    }
    sources["__init__.py"] = _package(sources)
    digest = sha256("".join(sources.values()).encode())[:12]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True)
        identity = f"_liger_trainer_{backend}_{digest}"
        for name, text in sources.items():
            (variant / name).write_text(text.replace(NAMESPACE, f"{identity}::"), encoding="utf-8")
        metadata = {
            "id": identity, "name": NAME, "version": LAYOUT_VERSION, "license": LICENSE, "python-depends": [],
            "backend": {"type": backend},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return [f"torch-{backend}" for backend in BACKENDS]


def _package(sources: dict[str, str]) -> str:
    """Return the text of an `__init__.py` with every public op, each of which has its file's name."""
    ops = [Path(name).stem for name, text in sources.items() if Path(name).stem in _functions(text)]
    imports = "".join(f"from .{op} import {op}\n" for op in ops)
    exported = "".join(f'    "{name}",\n' for name in sorted([*ops, "layers"]))
    title = f'"""Triton kernels for training language models: those of liger-trainer {__version__}."""'
    return f"{title}\n\nfrom . import layers\n{imports}\n__all__ = [\n{exported}]\n"


def _functions(text: str) -> set[str]:
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
