"""Errors planted in the kernels, one at a time: a copy of kernels/ with one value off by 1 % fails the checks below.

Planted are, in every function of FUNCTIONS, each assigned, added, returned, stored or launched value (times 1.01), each
flag (negated) and each index (shifted by one, or the first row in place of the row). Left alone are conditions of `if`
and the places that values are stored to: uninitialized memory reads as NaN here, so what is stored elsewhere shows.
All are slow: minutes on one core for each file.
"""

import ast
import functools
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from kernel_checks import LEAVES, PATHS, evaluate, random_inputs, random_pair

from liger_trainer.kernels import divergence_kinds
from liger_trainer.kernels._linear_head import Lora
from liger_trainer.kernels._triton import INTERPRETED
from liger_trainer.kernels.cross_entropy import cross_entropy_reference
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence_reference

KERNELS = Path(divergence_kinds.__file__).resolve().parent
REFERENCES = {
    "cross_entropy": cross_entropy_reference,
    "linear_cross_entropy": linear_cross_entropy_reference,
    "linear_divergence": linear_divergence_reference,
    "linear_sparse_divergence": linear_sparse_divergence_reference,
}
FUNCTIONS = {
    "triton": {
        "_autograd": ["_rescale_kernel"],
        "_logits": ["transformed", "load_logits", "load_label_logit"],
        "_cross_entropy_rows": [
            "_rounded", "_statistics", "_write_gradient", "_label_weights", "_whole_rows_kernel", "_write_zeros",
            "_tile_statistics_kernel", "_tile_gradient_kernel", "_scalars", "whole_rows", "tile_statistics",
            "tile_gradient",
        ],
        "_divergence_kernels": [
            "load", "load_labels", "load_sides", "load_compared", "lanes_of", "fold", "entropy", "probabilities",
            "log_ratios", "_mixture", "skew", "skew_reverse", "sign", "sums_of", "value_of", "gradient_of",
            "gradient_weight", "gradient_weights", "divergence_kernel", "first_pass", "write_metrics",
            "at_temperature", "second_pass", "write_gradient", "divergence_rows",
        ],
        "_divergence_torch": ["DivergenceOptions", "form_of"],
    },
    "torch": {
        "_autograd": ["rescale", "multiply_"],
        "_linear_head": [
            "Rows", "token_count", "scatter_rows", "gather_rows", "labelled_weight", "low_rank", "_low", "LinearHead",
            "Operands", "TermGradients", "HeadGradients", "addmm_into", "project",
        ],
        "_linear_loss": ["LinearLoss", "GradientsInForward", "Recomputed", "upstream_rows"],
        "_logits": ["transform"],
        "_cross_entropy_rows": [
            "weight_of_labels", "new_carry", "finish", "_weighted", "_of_label", "_gatherable", "_whole_rows_torch",
            "_tile_statistics_torch",
            "_tile_gradient_torch", "gradient_factor",
        ],
        "_divergence_torch": [
            "DivergenceOptions", "kl", "log_ratios", "pieces_of", "sums_of", "value_of", "gradient_of",
            "divergence_rows_torch", "write_metrics", "at_temperature", "_divergences", "add_gradient",
            "_cross_entropy",
        ],
        "_divergence_reference": ["named_terms"],
        "divergence_kinds": ["parts", "divergence_weights"],
        "linear_cross_entropy": ["LinearCrossEntropy"],
        "linear_divergence": ["LinearPair", "_loss"],
        "linear_sparse_divergence": ["LinearSparse", "_loss"],
        "cross_entropy": ["CrossEntropyFunction"],
    },
}  # fmt: skip
ADAPTERS, TEACHER_ADAPTER = ("a0", "b0", "a1", "b1"), ("teacher_a", "teacher_b")
RUN = [path for path in PATHS if path == "torch" or INTERPRETED]
FLAGS = {"agrees", "is_top1", "higher", "inside", "ends"}
INDICES = {"cols", "lanes", "offsets", "label"}
FIRST = {"row", "logits_ptr", "student_ptr", "teacher_ptr", "grad_ptr", "carry_ptr", "labels", "place"}
# Names of no number, or of one that sizes memory or tells the drivers what to do.
NO_VALUE = {
    "_", "dtype", "teacher_dtype", "wide", "device", "n", "o", "how", "options", "needs", "inputs", "plan", "bounds",
    "limit", "grid", "whole", "over", "make", "shape", "strides", "rows", "targets", "each_row", "label_rows", "vocab",
    "tile", "carry", "largest", "size", "columns", "terms", "part", "operands", "*larger", "*tensors", "smallest",
    "common", "low", "dlogits", "adapters", "row_function", "of_chunk", "loss", "ctx.loss", "head", "of_teacher", "ws",
    "grad_ws", "out", "into", "student", "teacher", "logits", "given", "weights", "bias", "hidden", "gradients",
    "result", "self", "self.x", "self.w", "self._x_sum", "self._bias", "self._terms", "self._factor", "self._overwrite",
    "ctx", "ctx.targets", "ctx.options", "ctx.dtype", "ctx.per_token_loss", "ctx.reduction", "ctx.inplace", "ctx.ready",
    "sides", "of_logits", "ends", "values", "wanted", "chunk_state", "chunk", "weight", "ctx.needs", "label_logits",
    "(ws, chunk_state)", "flags", "graded", "kinds", "measured", "written",
}  # fmt: skip
SIZING = (
    "__post_init__",
    "tensors",
    "logits_dtype",
    "bytes_per_logit",
    "plan",
    "memory",
    "new_values",
    "chunk_state",
    "_tiles",
)
# of DivergenceOptions, for kernels alone: torch reads the options themselves
FOR_KERNELS = ("measured", "graded", "numbers", "of_logits", "of_kinds", "flags")
TOP = "where maxima start: any number below the logits does"
BEFORE = "what a lane holds before its first logit is multiplied by exp(-1e30)"
BEYOND = "columns beyond the vocabulary are read, and weigh nothing"
ON_GPU = "runs on a GPU alone"
PARTIAL_SUMS = "{0}_total, {0}_moment, {0}_ratio, {0}_total_T, {0}_ratio_T = (zero, zero, zero, zero, zero) [{1}]"
STORAGE = "where the gradient lies and not what it is: tests of what inplace reuses"
LABELS = "labels pass through it too, whose plants are not numbers: planted where it is called"
# What no check can notice, and why.
EQUIVALENT = {
    "_statistics: total = tl.zeros((BLOCK,), tl.float32)": BEFORE,
    "_statistics: weighted = tl.zeros((BLOCK,), tl.float32)": BEFORE,
    **{f"first_pass: {PARTIAL_SUMS.format(side, i)}": BEFORE for side in "st" for i in range(5)},
    "_statistics: top = tl.full((BLOCK,), -1e+30, tl.float32)": TOP,
    "new_carry: carry[0].fill_(-1e+30)": TOP,
    "new_carry: carry[4].fill_(float('nan'))": "1.01 NaN; it stays where no tile holds the label: tests of such labels",
    "first_pass: s_top = zero - 1e+30": TOP,
    "first_pass: t_top = zero - 1e+30": TOP,
    "first_pass: t_at_s_top = zero - 1e+30": TOP,
    "divergence_rows: padded = -(-vocab // 16) * 16": BEYOND,
    "divergence_kernel: means = (0.0, reverse_T) [0]": "the forward KL's gradient subtracts no mean",
    "write_metrics: return (s_max, t_max, s_lse, t_lse, forward, reverse) [0]": "what a sum is scaled by, and back",
    "divergence_rows: argument ALIASED": "a barrier, which the interpreter does not need",
    "first_pass: u_top = zero - 1e+30": TOP,
    "gather_rows: return x if rows.index is None else x.index_select(0, rows.index)": LABELS,
    "_gatherable: return labels if targets.ignore_index is None else labels.where(labels != targets.ignore_index, 0)": (
        LABELS
    ),
    "tile_statistics: class_weight = None if targets.class_weight is None else targets.class_weight[tile.columns]": (
        "rows with class weights come whole on this path"
    ),
    "backward: grad = raw if over else torch.empty_like(raw)": STORAGE,
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
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return is_flag(node.left) and is_flag(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "any"):
        return is_flag(node.func.value, name)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "any":
        return True
    return (
        isinstance(node, ast.Compare | ast.BoolOp) or name in FLAGS or (isinstance(node, ast.Name) and node.id in FLAGS)
    )


def wrong(node: ast.expr, name: str = "") -> ast.expr:
    """The value, wrong."""
    if isinstance(node, ast.IfExp):
        branches = (
            x if isinstance(x, ast.Constant) and x.value is None else wrong(x, name) for x in (node.body, node.orelse)
        )
        return ast.IfExp(node.test, *branches)
    if isinstance(node, ast.GeneratorExp):
        return ast.GeneratorExp(wrong(node.elt, name), node.generators)
    if isinstance(node, ast.DictComp):
        return ast.DictComp(node.key, wrong(node.value, name), node.generators)
    if name == "mask":
        return value_of(node, "{} & (cols < V - 1)")
    if name in FIRST:
        return value_of(node, "{} * 0")
    if name == "used":
        return value_of(node, "tl.maximum({} - 1, 0)")
    if name in INDICES:
        return value_of(node, "{} + 1")
    if ast.unparse(node).endswith(", 1.0, 0.0)"):
        return value_of(node, "1.0 - {}")
    if is_flag(node, name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.func.value = value_of(node.func.value, "({} == 0)")
            return node
        return value_of(node, "({} == 0)")
    zero = ast.unparse(node) in ("0", "0.0", "zero") or ast.unparse(node).startswith(
        ("tl.zeros", "like.new_zeros", "torch.zeros_like")
    )
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
    if names and set(names) <= NO_VALUE:
        return
    if isinstance(node, ast.Tuple):
        for i, element in enumerate(node.elts):
            name = names[i] if len(names) == len(node.elts) else ""
            text = ast.unparse(element)
            nothing = isinstance(element, ast.Starred) or text.endswith(("None", ".shape[0]")) or text in NO_VALUE
            if name not in NO_VALUE and not nothing:
                yield f" [{i}]", replace(node, "elts", i, name)
    elif isinstance(node, ast.Dict):
        for i, key in enumerate(node.keys):
            yield f" [{ast.unparse(key) if key else i}]", replace(node, "values", i)
    elif ast.unparse(node) not in NO_VALUE and not (
        isinstance(node, ast.Constant) and node.value in (None, True, False)
    ):
        yield "", replace(owner, field, None, names[0] if names else "")


def results_of_call(body: list[ast.stmt], at: ast.Assign, names: list[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """a, b = f(...): either is made wrong in a statement of its own after the call."""
    for name in names:
        if name not in NO_VALUE:
            error = ast.Assign([ast.Name(name, ast.Store())], wrong(ast.Name(name, ast.Load()), name), lineno=at.lineno)
            yield f" [{name}]", lambda error=error: body.insert(body.index(at) + 1, error)


def of_call(call: ast.Call) -> Iterator[tuple[str, Callable[[], None]]]:
    """A store, a launch, or a torch function that writes to its first argument or to out."""
    call = call.func if isinstance(call.func, ast.Call) else call  # kept_launch(numbers and constants)(tensors)
    keywords = {k.arg: k for k in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "":  # a launch, or addmm_into
        for i, x in enumerate(call.args):
            if isinstance(x, ast.BinOp) or (isinstance(x, ast.Call) and ast.unparse(x.func) == "float"):
                yield f" argument {ast.unparse(x)}", replace(call, "args", i)
        for k in call.keywords:
            if isinstance(k.value, ast.Compare | ast.BoolOp) or k.arg == "alpha":
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


def returns_value(call: ast.Call) -> bool:
    """Not what writes to out, nor an object that is made of values."""
    name = ast.unparse(call.func)
    nothing = name in ("torch.mm", "addmm_into", "gradients.finish", "cls", "replace") or name[0].isupper()
    return not (nothing or name.endswith("_torch"))


def plants_of(body: list[ast.stmt]) -> Iterator[Plant]:
    for s in list(body):
        found: Iterator = iter(())
        value = s.value if isinstance(s, ast.Assign | ast.Expr) else None
        launch = isinstance(value, ast.Call) and isinstance(value.func, ast.Call)
        if launch:
            found = of_call(value)
        elif isinstance(s, ast.Assign):
            targets = s.targets[0].elts if isinstance(s.targets[0], ast.Tuple) else s.targets[:1]
            names = [ast.unparse(t) for t in targets]
            many = len(names) > 1 and isinstance(s.value, ast.Call | ast.Attribute)
            found = results_of_call(body, s, names) if many else parts(s, "value", names)
        elif isinstance(s, ast.AugAssign):
            found = parts(s, "value", [ast.unparse(s.target)])
        elif isinstance(s, ast.Return) and isinstance(s.value, ast.Call) and not returns_value(s.value):
            found = of_call(s.value)
        elif isinstance(s, ast.Return):
            found = parts(s, "value", [])
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            found = of_call(s.value)
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.IfExp):
            found = of_call(s.value.body)
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
                left_out = SIZING if path == "triton" else SIZING + FOR_KERNELS
                if isinstance(node, ast.FunctionDef) and node.name not in left_out:
                    found += [p._replace(what=f"{node.name}: {p.what}") for p in plants_of(node.body)]
    return tree, sorted(found, key=lambda p: p.line)


def load(name: str, file: str, planted: ast.Module | None, folder: Path, path: str) -> dict[str, Callable]:
    """The ops of a copy of kernels/ under another name, with short blocks, tiles and chunks."""
    shutil.copytree(KERNELS, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if planted is not None:
        (folder / name / f"{file}.py").write_text(ast.unparse(ast.fix_missing_locations(planted)))
    with mock.patch("torch.library.custom_op", mock.Mock()):  # a copy's opaque op must not take the place of ours
        ops = {op: getattr(importlib.import_module(f"{name}.{op}"), op) for op in REFERENCES}
    for module in [m for key, m in sys.modules.items() if key.startswith(f"{name}.")]:
        if hasattr(module, "use_triton"):
            module.use_triton = lambda x: path == "triton"
    rows, divergence_rows, chunks, autograd = (
        sys.modules[f"{name}.{m}"] for m in ("_cross_entropy_rows", "_divergence_kernels", "_linear_loss", "_autograd")
    )
    rows.BLOCK, divergence_rows.LANES, chunks.TILE_ROWS, chunks.CHUNK_ROWS, autograd.RESCALED = 8, 2, 4, (2,), 4096
    return ops


class Check(NamedTuple):
    op: str
    tensors: dict[str, torch.Tensor]
    options: dict
    upstream: float | torch.Tensor
    truth: dict[str, torch.Tensor]
    rounded: bool  # to fp16 on the way to each output


def check(
    op: str, tensors, ours: Mapping = MappingProxyType({}), upstream: float | torch.Tensor = 1.0, **options
) -> Check:
    """ours: options that the reference does not take."""
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    truth = evaluate(with_adapters(REFERENCES[op], Lora), double, upstream, leaves=leaves_of(op), **options)
    half = torch.float16 in [x.dtype for x in tensors.values()] and "logits_dtype" not in ours
    return Check(op, tensors, options | dict(ours), upstream, truth, half)


def leaves_of(op: str) -> tuple[str, ...]:
    return ("logits",) if op == "cross_entropy" else (*LEAVES, *ADAPTERS)


def with_adapters(op: Callable, lora: type[Lora]) -> Callable:
    """The op, with the adapters of its head as arguments of their own."""

    def run(**values):
        tensors = {name: values.pop(name) for name in (*ADAPTERS, *TEACHER_ADAPTER) if name in values}
        if "a0" in tensors:
            values["lora"] = [lora(tensors["a0"], tensors["b0"], 0.5), lora(tensors["a1"], tensors["b1"], 1.3)]
        if "teacher_a" in tensors:
            values["teacher_lora"] = lora(tensors["teacher_a"], tensors["teacher_b"], 0.7)
        return op(**values)

    return run


def run(ops: Mapping[str, Callable], c: Check) -> dict[str, torch.Tensor]:
    op = with_adapters(ops[c.op], sys.modules[ops["linear_cross_entropy"].__module__].Lora)
    if c.options.get("inplace"):  # over a part of wider rows that depend on the leaf

        def over_columns(logits, **values):
            return ops[c.op](torch.cat([logits, logits], -1)[:, : logits.shape[1]], **values)

        op = over_columns
    return evaluate(op, c.tensors, c.upstream, leaves=leaves_of(c.op), **c.options)


@functools.cache
def checks(path: str) -> list[Check]:
    """Small calls that reach every line together, those that notice most first."""
    dtype = torch.float32 if path == "triton" else torch.float64
    one_row = {"workspace_mb": 1e-6}
    tiles = {"recompute": True, "workspace_mb": (4 * 2 * 3 + 4 * 2 * dtype.itemsize) / 2**20}  # of 2 x 4 logits
    single = functools.partial(random_inputs, 3, 3, 9, dtype=dtype, spread=1.5)
    pair = functools.partial(random_pair, 3, 3, 2, 9, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    given = {"logits": torch.randn(3, 9, dtype=dtype, generator=generator), "labels": torch.tensor([3, -100, 8])}
    given_weight = given | {"weight": torch.rand(9, generator=generator) + 0.5}
    token_weight = {"token_weight": torch.tensor([0.5, 2.0, 1.5])}
    each = torch.tensor([0.5, 2.0, -1.5])
    each_kind = {name: 0.3 + 0.1 * i for i, name in enumerate(KINDS)}
    mix = {"forward_kl": 0.5, "reverse_kl": 0.4, "jsd": 0.6}
    ce_alone = {"ce_weight": 0.7}
    ce = {"z_loss": 0.05, **ce_alone}
    caps = {"softcap": 4.0, "teacher_softcap": 5.0, "scale": 1.3, "teacher_scale": 0.8}
    smooth = {"label_smoothing": 0.3}
    every = {"softcap": 4.0, "scale": 1.3, "temperature": 1.7, "z_loss": 0.1, **smooth}
    half, half_single = pair(dtype=torch.float16), single(dtype=torch.float16)
    negative = pair() | {
        "teacher_bias": torch.full((9,), -9.0, dtype=dtype),  # its largest logit, times 1.01, is smaller
        "bias": torch.full((9,), 3.0, dtype=dtype),  # a mean logit that smoothing sees
    }
    shapes = ((2, 3), (9, 2), (1, 3), (9, 1), (2, 2), (9, 2))
    adapters = {
        name: torch.randn(shape, dtype=dtype, generator=generator)
        for name, shape in zip((*ADAPTERS, *TEACHER_ADAPTER), shapes, strict=True)
    }
    of_student = {name: adapters[name] for name in ADAPTERS}
    sparse_teacher = {"ids": torch.tensor([[1, 4], [0, 8], [3, 2]]), "log_probs": torch.log(torch.full((3, 2), 0.4))}
    linear, divergence, plain = "linear_cross_entropy", "linear_divergence", "cross_entropy"
    of_products = [  # which are the same to the row kernels of either path
        check(linear, single(bias=True, ignored=0.3) | of_student, one_row, upstream=3.0),
        check(linear, single(ignored=0.3) | of_student, tiles, upstream=each, reduction="none"),
        check(divergence, pair(bias=True, labels=False) | adapters, one_row, kind=mix, vocab_size=7),
        check(divergence, pair(ignored=0.3) | adapters, {"recompute": True}, upstream=3.0),
        check("linear_sparse_divergence", single(ignored=0.3) | sparse_teacher, {"recompute": True}, upstream=3.0),
        check(
            "linear_sparse_divergence", single() | sparse_teacher | token_weight | of_student, {"recompute": True},
            top_ids=torch.tensor([0, 4, 8]), upstream=each, reduction="none", **ce_alone,
        ),
    ]  # fmt: skip
    return [
        check(plain, given_weight, upstream=3.0, **every),
        check(linear, single(bias=True, ignored=0.3), one_row, **every),
        check(linear, single(bias=True, ignored=0.3), tiles, upstream=each, reduction="none", **every),
        check(
            divergence, random_pair(1, 3, 2, 9, dtype=dtype, bias=True), kind=each_kind, beta=0.3, alpha=0.2,
            temperature=0.5, teacher_share=0.7, **caps, **ce, **smooth,  # one token has more than half of the mass
        ),
        check(
            divergence, pair(bias=True, ignored=0.3) | token_weight, one_row,
            upstream=3.0, kind=mix, beta=0.3, temperature=2.0, **caps, **ce, **smooth,
        ),
        check(divergence, pair(), kind={"skew_kl": 0.3, "symmetric_kl": 0.2, "tvd": 0.0}, alpha=0.0),
        check(linear, single() | token_weight, upstream=3.0, dft=True),
        check(plain, given, {"inplace": True}, upstream=3.0),
        check(divergence, pair(labels=False), kind={"jsd": 1.0}, beta=0.3),
        check(
            divergence, negative, kind={"forward_kl": 0.5, "reverse_kl": 0.4}, temperature=1.5,
            scale_by_temperature_squared=False, **ce, **smooth,
        ),
        check(divergence, pair(), kind="forward_kl", **ce),
        check(divergence, pair(), kind="reverse_kl"),
        check(divergence, pair(), kind={"jsd": 0.7, "reverse_kl": 0.2}, beta=0.0),
        check(divergence, half, {"logits_dtype": torch.float32}, kind=mix),
        check(linear, single() | {"weight": single()["weight"].half()}, one_row),
        check(linear, single() | token_weight, {"recompute": True}, upstream=3.0, dft=True),
        check(linear, half_single, tiles, upstream=each, reduction="none"),
        check(divergence, half | token_weight, {"recompute": True}, upstream=3.0),
        check(divergence, pair(ignored=0.3), {"recompute": True}, upstream=each, reduction="none"),
        check(plain, given, upstream=each, reduction="none", z_loss=0.1),
        check(plain, given_weight, {"inplace": True}, num_items=torch.tensor(7.0), **smooth),
        check(plain, given, num_items=7.0),
        check(plain, given, reduction="sum"),
        *(of_products if path == "torch" else ()),
    ]  # fmt: skip


def failing(ops: Mapping[str, Callable], path: str, of_divergence: bool = False) -> str | None:
    """The first output that a check finds wrong, those first whose op is at stake."""
    of_op = [(c.op == "linear_divergence") == of_divergence for c in checks(path)]
    for number, c in sorted(enumerate(checks(path)), key=lambda x: not of_op[x[0]]):
        got = run(ops, c)
        for name, truth in c.truth.items():
            bound = 1e-9 if got[name].dtype == torch.float64 else 2e-5
            if c.rounded or got[name].dtype == torch.float16:
                bound = 4e-3
            difference = (got[name].double() - truth.double()).abs().max()
            if not difference <= bound * max(truth.double().abs().max(), 1e-2):
                return f"check {number}, {name}: off by {difference:.1e}"
    return None


def cases() -> list:
    found = []
    for path, files in FUNCTIONS.items():
        skip = pytest.mark.skipif(path not in RUN, reason="under the interpreter: a GPU would compile each")
        marks = [pytest.mark.slow, skip]
        for file in files:
            for index, plant in enumerate(plants(file, path)[1]):
                if plant.what not in EQUIVALENT:
                    what = plant.what if len(plant.what) < 150 else f"{plant.what[:80]} ... {plant.what[-40:]}"
                    name = f"{path}-{file}.py:{plant.line} {what}"
                    found.append(pytest.param(path, file, index, id=name, marks=marks))
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
        noticed = failing(ops, path, "divergence" in file or "fold" in found[index].what)
    except (
        Exception
    ) as error:  # a kernel that uses what it has not defined, or an index beyond the end; all else is ours
        if type(error).__name__ != "InterpreterError" and "out of bounds" not in str(error):
            raise
        noticed = repr(error)
    assert noticed, f"kernels/{file}.py:{found[index].line}: no check notices an error in {found[index].what}"


def test_equivalent_plants_exist():
    every = {p.what for path, files in FUNCTIONS.items() for file in files for p in plants(file, path)[1]}
    assert EQUIVALENT.keys() <= every, "a line named in EQUIVALENT is gone"


@pytest.mark.parametrize("path, file", [(path, file) for path, files in FUNCTIONS.items() for file in files])
def test_planted_functions_exist(path, file):
    defined = {getattr(node, "name", None) for node in ast.parse((KERNELS / f"{file}.py").read_text()).body}
    assert defined.issuperset(FUNCTIONS[path][file]), "a function named in FUNCTIONS is elsewhere"
