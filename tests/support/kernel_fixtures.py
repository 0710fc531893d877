"""Fixtures of tests/kernels and tests/extras/kernels, and which cases of a product the default suite runs."""

import contextlib
import fcntl
import heapq
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.register_assert_rewrite("kernel_checks")

from kernel_checks import PATHS, TRITON_DEVICE, Place, set_path  # noqa: E402 (found through the path above)
from small_blocks import home  # noqa: E402

LOCKS = tempfile.gettempdir()  # of all processes, before each has its own
TABLES = ("divergence", "loss", "name")  # parameters that hold or name the op that a case is of, as `case` does


def _path(item: pytest.Item) -> tuple[str, torch.dtype | None]:
    """The path of a case, and its dtype where the same parameter says it."""
    for value in item.callspec.params.values():
        path, dtype = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if isinstance(path, str) and path in PATHS and (dtype is None or isinstance(dtype, torch.dtype)):
            return path, dtype
    return "", None


def _pairs(item: pytest.Item) -> set[tuple]:
    """What a case tries: each two of the op that it is of, its path, and the value of each parameter; and the dtype.

    In 16 bits only the dtype.
    """
    parameters = {name: id(value) for name, value in item.callspec.params.items()}
    op = next((parameters.pop(name) for name in TABLES if name in parameters), None)
    op = getattr(item.callspec.params.get("case"), "op", op)
    path, dtype = _path(item)
    tried = {("dtype", path, dtype, op)}
    if dtype is not None and dtype.itemsize == 2:  # whose roundings hide an error of 1 %
        return tried
    values = [("path", path), ("op", op)]
    return tried | {(first, each) for each in parameters.items() for first in values} | {tuple(values)}


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a product of parameters, the default suite runs as many cases as try each value with each op, each value on
    each path and each op on each path, the kernels' where one must do for both; none of these only in 16 bits.

    The rest of the product is slow. Cases of a single parameter are all run, with each path.
    """
    functions: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "kernels" and hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            functions.setdefault((item.path, item.originalname), []).append(item)
    for cases in functions.values():
        left = {item: _pairs(item) for item in cases}
        tried: set[tuple] = set()
        # The first of those that try most, by what each would have added when it was last looked at: it is never more.
        queue = [(-len(pairs), _path(item)[0] != "triton", at) for at, (item, pairs) in enumerate(left.items())]
        heapq.heapify(queue)
        while queue:
            *_, at = heapq.heappop(queue)
            added = left[cases[at]] - tried
            key = (-len(added), _path(cases[at])[0] != "triton", at)
            if queue and key > queue[0]:
                heapq.heappush(queue, key)
            elif added:
                tried |= left.pop(cases[at])
        for item in left:
            item.add_marker(pytest.mark.slow)


def _place(request, monkeypatch) -> Place:
    path, dtype = request.param
    return Place(path, set_path(monkeypatch, path), dtype)


def _name(param) -> str:
    return f"{param[0]}-{str(param[1]).removeprefix('torch.')}"


@pytest.fixture(params=[(path, dtype) for path in PATHS for dtype in PATHS[path]], ids=_name)
def place(request, monkeypatch) -> Place:
    return _place(request, monkeypatch)


@pytest.fixture(params=[(path, torch.float32) for path in PATHS], ids=_name)
def fp32(request, monkeypatch) -> Place:
    """Both paths, where a property of the op is at stake and not its rounding."""
    return _place(request, monkeypatch)


@pytest.fixture
def triton_fp32(monkeypatch) -> Place:
    """Only the kernels' path, where plain torch does as it likes."""
    if "triton" not in PATHS:
        pytest.skip("Triton is not here, or cannot run on a CPU")
    return Place("triton", set_path(monkeypatch, "triton"), torch.float32)


@pytest.fixture(scope="module", autouse=True)
def chunked_torch() -> None:
    """Not here: `place` and `fp32` say which path."""


@pytest.fixture
def tiled(monkeypatch) -> Callable[[str], None]:
    """Chunks and tiles so small that few rows and a small vocabulary take several, each of several blocks."""

    def of_path(path: str) -> None:
        set_path(monkeypatch, path, block=4)
        monkeypatch.setattr(home("_linear_loss", "TILE_ROWS"), "TILE_ROWS", 4)
        monkeypatch.setattr(home("_linear_loss", "CHUNK_ROWS"), "CHUNK_ROWS", (2, 4))

    return of_path


class Products(list):
    """What the fused losses' products write to, in order: ("logits", rows, columns), and ("gradient", rows, columns).

    Gradients are added to; so are adapters' parts of logits, and what a head gives back for its adapters. Of the
    logits' products: the weights, and all dtypes of what they read and write.
    """

    def __init__(self):
        super().__init__()
        self.weights, self.dtypes = [], set()

    def of(self, kind: str) -> list[tuple[int, ...]]:
        return [tuple(shape) for name, *shape in self if name == kind]


@pytest.fixture
def products(monkeypatch) -> Products:
    made, module = Products(), home("_linear_head", "addmm_into")
    project, addmm_into = module.project, module.addmm_into

    def spy_on_logits(x, w, out):
        made.append(("logits", *out.shape))
        made.weights.append(w)
        made.dtypes.update((x.dtype, w.dtype, out.dtype))
        return project(x, w, out)

    def spy_on_gradients(out, a, b, **factors):
        made.append(("gradient", *out.shape))
        addmm_into(out, a, b, **factors)

    monkeypatch.setattr(module, "project", spy_on_logits)
    monkeypatch.setattr(module, "addmm_into", spy_on_gradients)
    return made


@pytest.fixture
def wide_results(monkeypatch):
    """bf16 products with fp32 results, and their splitting, where neither a GPU nor the interpreter can do it."""

    def split_plainly(parts, form, out, scale=1.0):
        value, pieces = parts.sum(1) * scale, {}
        for name in "hml":
            pieces[name] = value.to(out.dtype)
            value = value - pieces[name].float()
        for slot, name in enumerate(form):
            out[:, slot] = pieces[name]
        return out

    module = home("_low_rank", "_has_wide_results")
    monkeypatch.setattr(module, "_has_wide_results", lambda x: True)
    if TRITON_DEVICE == "cpu":
        monkeypatch.setattr(module, "_wide_product", lambda m, n: m.float() @ n.float())
        monkeypatch.setattr(module, "split", split_plainly)


@pytest.fixture(autouse=True)
def nan_in_uninitialized_memory() -> Iterator[None]:
    """torch.empty and its kin return NaN (the largest integer), so what a kernel forgets to write shows.

    PyTorch fills only while deterministic algorithms are on; warn_only, since some CUDA operations have none.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def memory_for_others(request) -> Iterator[None]:
    """Several processes share the GPU. Tests of the group "large" run one at a time, next to those of the others.

    xdist keeps groups together only with --dist loadgroup, and pytest's default here is loadfile: hence the lock.
    """
    group = request.node.get_closest_marker("xdist_group")
    with contextlib.ExitStack() as held:
        if group is not None and torch.cuda.is_available():
            name = f"liger-trainer-tests-{os.getuid()}-{group.args[0]}"
            fcntl.flock(held.enter_context(open(os.path.join(LOCKS, name), "w")), fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
            torch.cuda.empty_cache()
