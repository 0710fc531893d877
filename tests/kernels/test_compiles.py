"""Every Triton kernel compiles in each dtype, as the ops launch it, for each architecture; no GPU is needed.

How far the default suite follows them is in compile_kernels.py: all kernels for an H100, those that need much shared
memory for the others too. With `-m slow` all of them for all architectures, to the machine's code.
Triton's interpreter, which runs the other tests, accepts what its compiler refuses: a pointer that an `if` defines
again with another shape, a string as the default of an argument that is no constexpr, a Python helper in a kernel.
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from liger_trainer.kernels import _tuning

triton = pytest.importorskip("triton", reason="Triton is not installed")
if "nvidia" not in triton.backends.backends:
    pytest.skip("this Triton has no NVIDIA backend", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
KERNELS = Path(__file__).parents[2] / "kernels"
# Whose tensors have dtypes of their own, whatever the op's.
OF_ONE_DTYPE = {
    ("_linear_head", "_find_kernel"),
    ("_lora_gated", "_backward_kernel"),  # products of 16-bit numbers
    ("_lora_gated", "_forward_kernel"),
    ("_low_rank", "_split_kernel"),
    ("_triton", "_probe_kernel"),
    ("document_attention", "_bounds_kernel"),
    ("draw_tokens", "_best_kernel"),
    ("draw_tokens", "_note_kernel"),
}
IN_TRITON = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
# KiB of shared memory a block: the CUDA programming guide, technical specifications per compute capability
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def launches_of(sm: int) -> dict:
    return dataclasses.asdict(_tuning.ARCHITECTURES[divmod(sm, 10)]) | {"name": ""}


# Ada and GB20x launch what GA10x does, and Triton lays out the same bytes: only slowly tried, as long as that is so.
LAUNCH_THE_SAME = [sm for sm in (89, 120) if launches_of(sm) == launches_of(86)]


def lines_of(words: str) -> list[dict]:
    """The script's lines. In a process without TRITON_INTERPRET, which triton.jit obeys once and for all."""
    environment = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, SCRIPT, *words.split()], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled_for() -> Callable[[str, int], list[dict]]:
    """The lines of an architecture: one process compiles for all that are tried by default."""
    found: dict[tuple[str, int], list[dict]] = {}

    def lines(how: str, sm: int) -> list[dict]:
        if (how, sm) not in found:
            at_once = [sm] if sm in LAUNCH_THE_SAME else [each for each in LIMITS if each not in LAUNCH_THE_SAME]
            found.update({(how, each): [] for each in at_once})
            for line in lines_of(f"{how} --sm={','.join(map(str, at_once))}"):
                found[how, line["sm"]].append(line)
        return found[how, sm]

    return lines


@pytest.fixture(
    scope="module",
    params=["--short --sm=90", *(pytest.param(f"--all --sm={sm}", marks=pytest.mark.slow) for sm in LIMITS)],
)
def compiled(request) -> list[dict]:
    return lines_of(request.param)


def too_large(lines: list[dict], sm: int) -> list[str]:
    return [
        f"{x['file']}.py: {x['kernel']} in {x['dtype']} takes {x['shared']} bytes with {x['constants']}"
        for x in lines
        if x.get("shared", 0) > LIMITS[sm] * 1024
    ]


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


def test_no_launch_exceeds_shared_memory(compiled, request):
    """A launch with more fails there."""
    sm = int(request.node.callspec.params["compiled"].rpartition("=")[2])
    assert max(x.get("shared", 0) for x in compiled) > 64 * 1024  # attention's are seen
    assert not too_large(compiled, sm), "\n".join(too_large(compiled, sm))


# One parameter: of a product the default suite would leave some architectures out (conftest.py).
@pytest.mark.parametrize(
    "words",
    [
        *(f"--shared --sm={sm}" for sm in LIMITS if sm not in LAUNCH_THE_SAME),
        *(pytest.param(f"--shared --sm={sm}", marks=pytest.mark.slow) for sm in LAUNCH_THE_SAME),
        *(pytest.param(f"--all --shared --sm={sm}", marks=pytest.mark.slow) for sm in LIMITS),
    ],
)
def test_what_takes_most_shared_memory_fits_each_architecture(compiled_for, words):
    how, _, number = words.rpartition(" --sm=")
    sm = int(number)
    lines = compiled_for(how, sm)
    hungry = {"rms_norm", "layer_norm", "document_attention", "decode_attention", "thin_linear", "_dropout"}
    assert {x["file"] for x in lines} >= hungry
    assert {x["constants"].get("D") for x in lines if "attention" in x["file"]} >= {128, 256, 512}
    assert not [x for x in lines if "error" in x]
    assert not too_large(lines, sm), "\n".join(too_large(lines, sm))


@pytest.mark.parametrize(
    ("capability", "kib", "name"),
    [((9, 0), 227, "Hopper"), ((8, 0), 163, "Ampere"), ((8, 9), 99, "Ada"), ((12, 0), 99, "Blackwell (GB20x)"),
     ((10, 0), 227, "Blackwell"),
     ((11, 0), 227, "Hopper"), ((13, 5), 170, "Ampere"), ((7, 0), 96, "Ampere (GA10x)"),  # not listed
     ((9, 0), 100, "Ampere (GA10x)")],  # listed, but this one gives less
)  # fmt: skip
def test_a_device_takes_the_table_that_fits_its_memory(capability, kib, name):
    assert _tuning.table_for(capability, kib * 1024).name == name


def test_tables_hold_no_more_than_their_architectures_have():
    for (major, minor), table in _tuning.ARCHITECTURES.items():
        if major * 10 + minor in LIMITS:
            assert table.shared == LIMITS[major * 10 + minor] * 1024
