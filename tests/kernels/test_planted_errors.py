"""Errors planted in the kernels, one at a time: a copy of kernels/ with one value off by 1 % fails the checks below.

Planted are, in every function of FUNCTIONS, each assigned, added, returned, stored or launched value (times 1.01), each
flag (negated) and each index (shifted by one, or the first row in place of the row). Left alone are conditions of `if`
and the places that values are stored to: uninitialized memory reads as NaN here, so what is stored elsewhere shows.
"""

import ast
import functools
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from kernel_checks import PATHS, evaluate, random_inputs, random_pair

from liger_trainer.kernels import _chunks
from liger_trainer.kernels._triton import INTERPRETED
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence_reference

KERNELS = Path(_chunks.__file__).resolve().parent
FUNCTIONS = {
    "triton": {
        "_chunks": ["_rescale_kernel"],
        "_rows": ["load_logits", "load_label_logit", "fold"],
        "_cross_entropy_rows": [
            "_statistics", "_write_gradient", "_label_weights", "_whole_rows_kernel", "_tile_statistics_kernel",
            "_tile_gradient_kernel", "_flags", "_scalars", "whole_rows", "tile_statistics", "tile_gradient",
        ],
        "_divergence_rows": ["_log_ratios", "_divergence_kernel", "_rows_triton", "DivergenceOptions"],
    },
    "torch": {
        "_chunks": ["put", "take", "HeadGradients", "addmm_into", "project", "rescale", "multiply_", "upstream_rows"],
        "_rows": ["transform"],
        "_cross_entropy_rows": [
            "finish", "_weighted", "_of_label", "_tile_statistics_torch", "_tile_gradient_torch", "gradient_factor",
        ],
        "linear_cross_entropy": ["_with_gradients", "_statistics", "_recomputed_gradients"],
        "_divergence_rows": ["_log_ratios_torch", "_rows_torch", "_cross_entropy_torch", "DivergenceOptions"],
        "linear_divergence": ["_walk", "Pair", "LinearHead", "divergence_weights"],
    },
}  # fmt: skip
RUN = [path for path in PATHS if path == "torch" or INTERPRETED]
FLAGS = {"agrees", "is_top1", "higher", "inside"}
INDICES = {"cols", "lanes", "offsets", "label"}
FIRST_ROW = {"row", "logits_ptr", "student_ptr", "teacher_ptr", "grad_ptr"}
# Names of no number, or of one that sizes memory or tells the drivers what to do.
NO_VALUE = {
    "_", "dtype", "teacher_dtype", "logits_dtype", "teacher_logits_dtype", "device", "gradients", "bounds", "n", "o",
    "how", "grid", "whole", "ws", "teacher_ws", "grad_ws", "logits_ws", "out", "each_row", "label_rows", "chunk_labels",
    "student", "teacher", "logits", "given", "limit", "weights", "bias", "hidden",
    "self._first", "self.hidden", "self.weight", "self.bias",
}  # fmt: skip
TOP = "where maxima start: any number below the logits does"
BEFORE = "what a lane holds before its first logit is multiplied by exp(-1e30)"
ON_GPU = "runs on a GPU alone"
PARTIAL_SUMS = "{0}_total, {0}_entropy, {0}_ratio, {0}_total_T, {0}_ratio_T = (zero, zero, zero, zero, zero) [{1}]"
# What no check can notice, and why.
EQUIVALENT = {
    "_cross_entropy_kernel: total = tl.zeros((BLOCK,), tl.float32)": BEFORE,
    "_cross_entropy_kernel: weighted = tl.zeros((BLOCK,), tl.float32)": BEFORE,
    **{f"_divergence_kernel: {PARTIAL_SUMS.format(side, i)}": BEFORE for side in "st" for i in range(5)},
    "_cross_entropy_kernel: top = tl.full((BLOCK,), -1e+30, tl.float32)": TOP,
    "_divergence_kernel: s_top = zero - 1e+30": TOP,
    "_divergence_kernel: t_top = zero - 1e+30": TOP,
    "_divergence_kernel: t_at_s_top = zero - 1e+30": TOP,
    "rows_triton: argument ALIASED": "a barrier, which the interpreter does not need",
    "addmm_into: torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)": ON_GPU,
    "project: return torch.mm(x, w.t(), out_dtype=out.dtype, out=out)": ON_GPU,
}


class Plant(NamedTuple):
    line: int
    what: str
    apply: Callable[[], None]


def value_of(node: ast.expr, form: str) -> ast.expr:
    return ast.parse(form.format(f"({ast.unparse(node)})"), mode="eval").body


def is_flag(node: ast.expr, name: str = "") -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "any"):
        return is_flag(node.func.value, name)
    return isinstance(node, ast.Compare) or name in FLAGS or (isinstance(node, ast.Name) and node.id in FLAGS)


def wrong(node: ast.expr, name: str = "") -> ast.expr:
    """The value, wrong."""
    if isinstance(node, ast.IfExp):
        branches = (
            x if isinstance(x, ast.Constant) and x.value is None else wrong(x, name) for x in (node.body, node.orelse)
        )
        return ast.IfExp(node.test, *branches)
    if isinstance(node, ast.GeneratorExp):
        return ast.GeneratorExp(wrong(node.elt, name), node.generators)
    if name == "mask":
        return value_of(node, "{} & (cols < V - 1)")
    if name in FIRST_ROW:
        return value_of(node, "{} * 0")
    if name in INDICES:
        return value_of(node, "{} + 1")
    if is_flag(node, name):
        if isinstance(node, ast.Call) and node.func.attr == "to":
            node.func.value = value_of(node.func.value, "({} == 0)")
            return node
        return value_of(node, "({} == 0)")
    zero = ast.unparse(node) in ("0", "0.0", "zero") or ast.unparse(node).startswith(("tl.zeros", "tl.full((), 0"))
    return value_of(node, "{} + 0.01" if zero else "{} * 1.01")


def replace(owner, field: str, index: int | None, name: str = "") -> Callable[[], None]:
    def apply():
        if index is None:
            setattr(owner, field, wrong(getattr(owner, field), name))
        else:
            getattr(owner, field)[index] = wrong(getattr(owner, field)[index], name)

    return apply


def parts(owner, field: str, names: list[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """One plant, or one for each entry of a tuple."""
    node = getattr(owner, field)
    if isinstance(node, ast.Tuple):
        for i, element in enumerate(node.elts):
            name = names[i] if len(names) == len(node.elts) else ""
            nothing = isinstance(element, ast.Starred) or ast.unparse(element).endswith(("None", ".shape[0]"))
            if name not in NO_VALUE and not nothing:
                yield f" [{i}]", replace(node, "elts", i, name)
    elif not set(names) <= NO_VALUE and not (isinstance(node, ast.Constant) and node.value in (None, True, False)):
        yield "", replace(owner, field, None, names[0] if names else "")


def results_of_call(body: list[ast.stmt], at: ast.Assign, names: list[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """a, b = f(...): either is made wrong in a statement of its own after the call."""
    for name in names:
        if name not in NO_VALUE:
            error = ast.Assign([ast.Name(name, ast.Store())], wrong(ast.Name(name, ast.Load()), name), lineno=at.lineno)
            yield f" [{name}]", lambda error=error: body.insert(body.index(at) + 1, error)


def of_call(call: ast.Call) -> Iterator[tuple[str, Callable[[], None]]]:
    """A store, a launch, or a torch function that writes to its first argument or to out."""
    keywords = {k.arg: k for k in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if isinstance(call.func, ast.Subscript) or name == "":  # a launch, or addmm_into
        for i, x in enumerate(call.args):
            if isinstance(x, ast.BinOp) or (isinstance(x, ast.Call) and ast.unparse(x.func) == "float"):
                yield f" argument {ast.unparse(x)}", replace(call, "args", i)
        for k in call.keywords:
            if isinstance(k.value, ast.Compare) or k.arg == "alpha":
                yield f" argument {k.arg}", replace(k, "value", None)
    elif "alpha" in keywords:
        yield "", replace(keywords["alpha"], "value", None)
    elif name == "store":
        yield "", replace(call, "args", 1)
    elif name == "stack":
        for i in range(len(call.args[0].elts)):
            yield f" [{i}]", replace(call.args[0], "elts", i)
    elif name == "mm":
        yield "", replace(call, "args", 0)
    elif call.args and ast.unparse(call.func.value) not in NO_VALUE:
        yield "", replace(call, "args", len(call.args) - 1)


def plants_of(body: list[ast.stmt]) -> Iterator[Plant]:
    for s in list(body):
        found: Iterator = iter(())
        if isinstance(s, ast.Assign):
            targets = s.targets[0].elts if isinstance(s.targets[0], ast.Tuple) else s.targets[:1]
            names = [ast.unparse(t) for t in targets]
            many = len(names) > 1 and isinstance(s.value, ast.Call)
            found = results_of_call(body, s, names) if many else parts(s, "value", names)
        elif isinstance(s, ast.AugAssign):
            found = parts(s, "value", [ast.unparse(s.target)])
        elif isinstance(s, ast.Return) and isinstance(s.value, ast.Call) and ast.unparse(s.value.func) == "torch.mm":
            found = of_call(s.value)
        elif isinstance(s, ast.Return):
            found = parts(s, "value", [])
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            found = of_call(s.value)
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.IfExp):
            found = of_call(s.value.body)
        launch = isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Subscript)
        for what, apply in found:
            yield Plant(s.lineno, what.strip() if launch else ast.unparse(s).splitlines()[0] + what, apply)
        for field in ("body", "orelse"):
            if not isinstance(s, ast.Expr) and isinstance(getattr(s, field, None), list):
                yield from plants_of(getattr(s, field))


def plants(file: str, path: str) -> tuple[ast.Module, list[Plant]]:
    tree = ast.parse((KERNELS / f"{file}.py").read_text())
    found = []
    for owner in tree.body:
        if getattr(owner, "name", None) in FUNCTIONS[path][file]:
            for node in [owner] if isinstance(owner, ast.FunctionDef) else owner.body:
                if isinstance(node, ast.FunctionDef) and node.name != "__post_init__":
                    found += [p._replace(what=f"{node.name}: {p.what}") for p in plants_of(node.body)]
    return tree, sorted(found, key=lambda p: p.line)


def load(name: str, file: str, planted: ast.Module | None, folder: Path, path: str):
    """The two ops of a copy of kernels/ under another name, with a short block."""
    shutil.copytree(KERNELS, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if planted is not None:
        (folder / name / f"{file}.py").write_text(ast.unparse(ast.fix_missing_locations(planted)))
    modules = {m: importlib.import_module(f"{name}.{m}") for m in FUNCTIONS["torch"]}
    for m in ("_chunks", "linear_cross_entropy", "linear_divergence"):
        modules[m].use_triton = lambda x: path == "triton"
    for m in ("linear_cross_entropy", "_divergence_rows"):
        modules[m].BLOCK = 4
    return modules["linear_cross_entropy"].linear_cross_entropy, modules["linear_divergence"].linear_divergence


class Check(NamedTuple):
    divergence: bool
    tensors: dict[str, torch.Tensor]
    options: dict
    upstream: float
    truth: dict[str, torch.Tensor]


def check(tensors, upstream=1.0, workspace_mb=512, logits_dtype=None, **options) -> Check:
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    divergence = "teacher_hidden" in tensors
    reference = linear_divergence_reference if divergence else linear_cross_entropy_reference
    truth = evaluate(reference, double, upstream, **options)
    options |= {"workspace_mb": workspace_mb} | ({"logits_dtype": logits_dtype} if logits_dtype else {})
    return Check(divergence, tensors, options, upstream, truth)


@functools.cache
def checks(path: str) -> list[Check]:
    """Small calls that reach every line together, those that notice most first."""
    dtype = torch.float32 if path == "triton" else torch.float64
    two_rows = 2 * 16 * dtype.itemsize / 2**20
    single = functools.partial(random_inputs, 4, 3, 11, dtype=dtype, spread=1.5)
    pair = functools.partial(random_pair, 4, 3, 2, 11, dtype=dtype)
    mix = {"forward_kl": 0.5, "reverse_kl": 0.4, "jsd": 0.6}
    ce = {"ce_weight": 0.7, "z_loss": 0.05}
    caps = {"softcap": 4.0, "teacher_softcap": 5.0, "scale": 1.3, "teacher_scale": 0.8}
    smooth = {"label_smoothing": 0.3}
    half = pair(dtype=torch.float16)
    negative = pair() | {
        "teacher_bias": torch.full((11,), -9.0, dtype=dtype)
    }  # its largest logit, times 1.01, is smaller
    return [
        check(
            single(bias=True, ignored=0.3), softcap=4.0, scale=1.3, temperature=1.7, z_loss=0.1, workspace_mb=two_rows,
            **smooth,
        ),
        check(
            pair(bias=True, ignored=0.3), 3.0, kind=mix, beta=0.3, temperature=2.0, workspace_mb=2 * two_rows,
            **caps, **ce, **smooth,
        ),
        check(single(), 3.0, dft=True),
        check(pair(labels=False), kind={"jsd": 1.0}, beta=0.3),
        check(
            negative, kind={"forward_kl": 0.5, "reverse_kl": 0.4}, temperature=1.5, scale_by_temperature_squared=False,
            **ce,
        ),
        check(pair(), kind="forward_kl", **ce),
        check(pair(), kind="reverse_kl"),
        check(pair(), kind={"jsd": 0.7, "reverse_kl": 0.2}, beta=0.0),
        check(half, kind=mix, logits_dtype=torch.float32),
        check(single() | {"weight": single()["weight"].half()}, workspace_mb=1e-6),
    ]  # fmt: skip


def failing(ops, path: str) -> str | None:
    """The first output that a check finds wrong."""
    for number, c in enumerate(checks(path)):
        got = evaluate(ops[c.divergence], c.tensors, c.upstream, **c.options)
        for name, truth in c.truth.items():
            bound = (2e-5 if path == "triton" else 1e-9) if got[name].dtype != torch.float16 else 4e-3
            if torch.float16 in (c.tensors["hidden"].dtype, c.tensors["weight"].dtype):
                bound = max(bound, 2e-5)
            difference = (got[name].double() - truth.double()).abs().max()
            if not difference <= bound * max(truth.double().abs().max(), 1e-2):
                return f"check {number}, {name}: off by {difference:.1e}"
    return None


def cases() -> list:
    found = []
    for path, files in FUNCTIONS.items():
        marks = [pytest.mark.skipif(path not in RUN, reason="under the interpreter: a GPU would compile each")]
        for file in files:
            for index, plant in enumerate(plants(file, path)[1]):
                if plant.what not in EQUIVALENT:
                    found.append(
                        pytest.param(path, file, index, id=f"{path}-{file}.py:{plant.line} {plant.what}", marks=marks)
                    )
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [m for m in sys.modules if m.startswith("planted_kernels")]:
        del sys.modules[name]


@pytest.mark.parametrize("path", RUN)
def test_nothing_planted_passes(path, folder):
    assert failing(load("planted_kernels", "", None, folder, path), path) is None


@pytest.mark.parametrize("path, file, index", cases())
def test_planted_error_is_noticed(path, file, index, folder):
    tree, found = plants(file, path)
    found[index].apply()
    ops = load("planted_kernels", file, tree, folder, path)
    try:
        noticed = failing(ops, path)
    except Exception as error:
        if type(error).__name__ != "InterpreterError":  # a kernel that uses what it has not defined; all else is ours
            raise
        noticed = repr(error)
    assert noticed, f"kernels/{file}.py:{found[index].line}: no check notices an error in {found[index].what}"


def test_equivalent_plants_exist():
    every = {p.what for path, files in FUNCTIONS.items() for file in files for p in plants(file, path)[1]}
    assert EQUIVALENT.keys() <= every, "a line named in EQUIVALENT is gone"
