"""Every Triton kernel compiles for an H100, in each dtype, with what the ops launch it with; no GPU is needed.

How far the default suite follows them is in compile_kernels.py; with `-m slow` all the way, to the machine's code.
Triton's interpreter, which runs the other tests, accepts what its compiler refuses: a pointer that an `if` defines
again with another shape, a string as the default of an argument that is no constexpr, a Python helper in a kernel.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if "nvidia" not in triton.backends.backends:
    pytest.skip("this Triton has no NVIDIA backend", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
KERNELS = Path(__file__).parents[2] / "kernels"
# Whose tensors have dtypes of their own, whatever the op's.
OF_ONE_DTYPE = {
    ("_linear_head", "_find_kernel"),
    ("_low_rank", "_split_kernel"),
    ("_triton", "_probe_kernel"),
    ("document_attention", "_bounds_kernel"),
    ("draw_tokens", "_best_kernel"),
    ("draw_tokens", "_note_kernel"),
}
IN_TRITON = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


@pytest.fixture(scope="module", params=["--short", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request) -> list[dict]:
    """The script's lines. In a process without TRITON_INTERPRET, which triton.jit obeys once and for all."""
    environment = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, SCRIPT, request.param], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def launched_kernels() -> set[tuple[str, str]]:
    """(file, name) of each function under @triton.jit that no other such function calls."""
    functions = {
        (path.stem, node.name): node
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list)
    }
    calls = (x.func for node in functions.values() for x in ast.walk(node) if isinstance(x, ast.Call))
    called = {x.id for x in calls if isinstance(x, ast.Name)}
    return {(file, name) for file, name in functions if name not in called}


def dtypes_of(line: dict) -> set[str]:
    """Those of pointers: arguments, or made by the kernel from a table's addresses, with a constant for their dtype."""
    types = [x for each in line["types"].values() for x in (each if isinstance(each, list) else [each])]  # of tuples
    return {*types, *(f"*{constant}" for constant in line["constants"].values())}


def test_every_launch_compiles(compiled):
    failed = {(x["file"], x["kernel"]): x for x in reversed(compiled) if "error" in x}  # once, the first of each
    messages = [
        f"{file}.py: {name} in {x['dtype']} with {x['constants']}\n{x['error']}" for (file, name), x in failed.items()
    ]
    assert not messages, "\n\n".join(messages)


def test_every_kernel_is_compiled(compiled):
    """A kernel is launched by the script at least once with a tensor of each dtype."""
    known, dtypes = launched_kernels(), {x["dtype"] for x in compiled}
    assert ("rms_norm", "_backward_kernel") in known and ("_logits", "transformed") not in known
    assert {(x["file"], x["kernel"]) for x in compiled} >= OF_ONE_DTYPE
    assert dtypes >= {"bfloat16", "float32"}
    for dtype in dtypes:
        lines = [x for x in compiled if x["dtype"] == dtype and ("error" in x or IN_TRITON[dtype] in dtypes_of(x))]
        missing = known - OF_ONE_DTYPE - {(x["file"], x["kernel"]) for x in lines}
        assert not missing, (
            f"Never compiled in {dtype}: {', '.join(f'{name} of kernels/{file}.py' for file, name in missing)}. "
            f"Call the op that launches it in tests/support/{SCRIPT.name}, in each dtype and with the options that "
            f"change the kernel's constants; if nothing launches it, delete it."
        )


def test_no_launch_exceeds_shared_memory(compiled):
    """227 KB a block, on an H100; a launch with more fails there."""
    assert max(x.get("shared", 0) for x in compiled) <= 227 * 1024
