from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("kernel_checks")

from kernel_checks import PATHS, TRITON_DEVICE, Place, set_path  # noqa: E402 (found through the path above)

from liger_trainer.kernels import _gated, _linear_head, _linear_loss, _low_rank  # noqa: E402

HERE = Path(__file__).parent
TABLES = ("norm", "activation", "divergence", "loss")  # parameters that hold the op that a case is of


def _path(item: pytest.Item) -> tuple[str, torch.dtype | None]:
    parameters = item.callspec.params
    return parameters.get("place") or parameters.get("fp32") or ("", None)


def _pairs(item: pytest.Item) -> set[tuple]:
    """What a case tries: each two of the op that it is of, its path, and the value of each parameter; and the dtype."""
    parameters = {name: id(value) for name, value in item.callspec.params.items() if name not in ("place", "fp32")}
    op = next((parameters.pop(name) for name in TABLES if name in parameters), None)
    path, dtype = _path(item)
    values = [("path", path), ("op", op)]
    pairs = {(first, each) for each in parameters.items() for first in values}
    return pairs | {tuple(values), ("dtype", path, dtype)}


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a product of parameters, the default suite runs as many cases as try each value with each op, each value on
    each path and each op on each path, the kernels' where one must do for both.

    The rest of the product is slow. Cases of a single parameter are all run, with each path.
    """
    functions: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == HERE and hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            functions.setdefault((item.path, item.originalname), []).append(item)
    for cases in functions.values():
        left = {item: _pairs(item) for item in cases}
        tried: set[tuple] = set()
        while left:
            # The first of those that try most.
            best = max(left, key=lambda item: (len(left[item] - tried), _path(item)[0] == "triton"))
            if left[best] <= tried:
                break
            tried |= left.pop(best)
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


@pytest.fixture(scope="module", autouse=True)
def chunked_torch() -> None:
    """Not here: `place` and `fp32` say which path."""


@pytest.fixture
def tiled(monkeypatch) -> Callable[[str], None]:
    """Chunks and tiles so small that few rows and a small vocabulary take several, each of several blocks."""

    def of_path(path: str) -> None:
        set_path(monkeypatch, path, block=4)
        monkeypatch.setattr(_linear_loss, "TILE_ROWS", 4)
        monkeypatch.setattr(_linear_loss, "CHUNK_ROWS", (2, 4))

    return of_path


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what the fused losses' products are added to, in order: gradients, and logits with adapters."""
    shapes, addmm_into = [], _linear_head.addmm_into

    def spy(out, a, b, **factors):
        shapes.append(tuple(out.shape))
        addmm_into(out, a, b, **factors)

    monkeypatch.setattr(_linear_head, "addmm_into", spy)
    return shapes


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

    monkeypatch.setattr(_low_rank, "_has_wide_results", lambda x: True)
    if TRITON_DEVICE == "cpu":
        monkeypatch.setattr(_low_rank, "_wide_product", lambda m, n: m.float() @ n.float())
        monkeypatch.setattr(_low_rank, "split", split_plainly)


@pytest.fixture(autouse=True)
def nan_in_uninitialized_memory() -> Iterator[None]:
    """torch.empty and its kin return NaN (the largest integer), so what a kernel forgets to write shows.

    PyTorch fills only while deterministic algorithms are on; warn_only, since some CUDA operations have none.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Several processes share the GPU. Tests of the group "large" run one at a time, but beside those of the others."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def short_blocks(request, monkeypatch) -> None:
    """Several blocks a row of the gated activations, but for a GPU, where blocks are as shipped."""
    for name in ("FORWARD", "BACKWARD"):
        if not request.node.get_closest_marker("gpu"):
            monkeypatch.setattr(_gated, name, (16, 1))
