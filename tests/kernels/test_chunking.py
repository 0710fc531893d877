"""How much of a batch is in memory at a time, and which of its rows take part in a loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_checks import PATHS, TRITON_DEVICE

from liger_trainer.kernels import _linear_head
from liger_trainer.kernels._autograd import NeededGradients
from liger_trainer.kernels._linear_head import HostCopy, RowSelection, gather_rows, scatter_rows
from liger_trainer.kernels._linear_loss import (
    LAST_TILE,
    ROUNDINGS,
    TILE_ROWS,
    Execution,
    row_plan,
    tile_plan,
    tiles_in_gradient,
    workspace,
)
from liger_trainer.kernels._triton import use_triton

PLANS = [  # rows, vocabulary, bytes of a logit: rows of a chunk
    # 512 MiB, and up to 1 GiB for as many rows of a large vocabulary
    *((8192, vocab, width, Execution(), rows) for vocab, width, rows in (
        (16000, 2, 8192), (32000, 2, 4096), (128256, 2, 2048), (151936, 2, 2048), (262144, 2, 2048), (262144, 4, 1024),
        (524288, 2, 1024))),
    # half as many of a frozen weight, whose gradient is not read and written for each of them
    *((8192, vocab, width, Execution(frozen=True), rows) for vocab, width, rows in (
        (32000, 2, 4096), (128256, 2, 1024), (128256, 4, 1024), (524288, 2, 1024))),
    # a small batch is cut in two where its logits take more than half of the workspace
    *((count, 128256, 2, Execution(), rows) for count, rows in ((1000, 1024), (1100, 768), (2048, 1024))),
    # a workspace that is given is filled
    (8192, 128256, 2, Execution(workspace_mb=512, frozen=True), 2048),
    (2048, 128256, 2, Execution(workspace_mb=512), 2048),
]  # fmt: skip


@pytest.mark.parametrize("count, vocab, bytes_per_logit, how, rows", PLANS, ids=str)
def test_rows_of_a_chunk(count, vocab, bytes_per_logit, how, rows):
    assert row_plan(count, vocab, bytes_per_logit, how).rows == rows


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 1000, 4096, 5000])
@pytest.mark.parametrize("limit", [0.5, 1, 3, 100, 128, 200, 300, 1024, 10**6])
def test_chunks_cover_every_row_once_within_the_workspace(count, limit):
    vocab, bytes_per_logit = 250, 4
    how = Execution(workspace_mb=limit * vocab * bytes_per_logit / 2**20)
    chunks = list(row_plan(count, vocab, bytes_per_logit, how).chunks(count))
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == list(range(count))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert all(0 < size <= max(1, limit) for size in sizes)
    assert all(size % TILE_ROWS == 0 for size in sizes[:-1] if size > TILE_ROWS), "whole tiles of the matrix products"
    if limit >= count:
        assert len(chunks) == (count > 0)


@pytest.mark.parametrize("workspace_mb", [None, 0.1, 3, 40, 512])
@pytest.mark.parametrize("count, vocab, hidden_size", [(0, 1, 1), (100, 11, 8), (2048, 49152, 576), (30000, 250, 64)])
@pytest.mark.parametrize(
    "needs",
    [NeededGradients(True, True, False), NeededGradients(True, False, False), NeededGradients(False, False, False)],
)
def test_tiles_cover_the_logits_once_within_the_workspace(count, vocab, hidden_size, needs, workspace_mb):
    plan = tile_plan(count, vocab, hidden_size, 2, needs, Execution(workspace_mb))
    tiles = list(plan.tiles(vocab))
    assert [i for tile in tiles for i in range(tile.start, tile.stop)] == list(range(vocab))
    assert [i for chunk in plan.chunks(count) for i in range(chunk.start, chunk.stop)] == list(range(count))
    assert all((tile.stop - tile.start) % TILE_ROWS == 0 for tile in tiles[:-1])
    taken = plan.rows * (2 * plan.columns + 4 * hidden_size * needs.hidden)  # logits, and the sum of d hidden
    limit = max(16 * 2**20, 2 * count * hidden_size) if workspace_mb is None else workspace_mb * 2**20
    assert taken <= limit or plan.rows == TILE_ROWS >= plan.columns, "no smaller tile than TILE_ROWS squared"


@pytest.mark.parametrize(
    "count, vocab, row_bytes", [(1, 1, 2), (100, 5000, 128), (8192, 151936, 4096), (65536, 32000, 4096)]
)
def test_tiles_in_the_gradient_fit_behind_them_or_are_small(count, vocab, row_bytes):
    tiles = list(tiles_in_gradient(count, vocab, 2, row_bytes))
    covered: dict[int, int] = {}
    words = 0
    for rows, columns in tiles:
        assert rows.start == covered.get(columns.start, 0) and columns.stop <= vocab
        covered[columns.start] = rows.stop
        height, width = rows.stop - rows.start, columns.stop - columns.start
        assert 2 * height * width <= (vocab - columns.stop) * row_bytes or width <= LAST_TILE
        assert height >= count / ROUNDINGS - TILE_ROWS
        words += width if not rows.start else 0
    assert set(covered.values()) == {count} and words == vocab
    if (count, row_bytes) == (8192, 4096):
        assert len(tiles) < 40


def test_a_larger_workspace_moves_less_memory():
    """Fewer chunks read the weight, or fewer tiles the sum of d hidden; without d hidden, rows are all that counts."""
    every, weight_alone = NeededGradients(True, True, False), NeededGradients(False, True, False)

    def plan(needs, workspace_mb):
        return tile_plan(8192, 128256, 2048, 2, needs, Execution(workspace_mb))

    small, large = plan(every, 16), plan(every, 256)
    assert small.rows <= large.rows and small.columns <= large.columns and small != large
    assert plan(weight_alone, 64).rows > plan(every, 64).rows
    nothing = NeededGradients(False, False, False)
    spared, most = (tile_plan(8192, 128256, 2048, 2, nothing, Execution(), mb * 2**20) for mb in (256, 10**6))
    assert 32 * 2**20 < 2 * spared.rows * spared.columns <= 256 * 2**20 < 2 * most.rows * most.columns <= 2**30


@pytest.mark.parametrize("vocab", [1, 8, 11, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_workspace_rows_are_aligned(vocab, dtype):
    ws = workspace(5, vocab, dtype, torch.device("cpu"))
    assert ws.shape == (5, vocab) and ws.stride(1) == 1
    assert ws.stride(0) * dtype.itemsize % 16 == 0
    assert workspace(0, vocab, dtype, torch.device("cpu")).shape == (0, vocab)


@pytest.fixture(params=PATHS)
def selecting(request, monkeypatch):
    """Triton's way and torch's, the former in blocks so short that a small batch takes several."""
    monkeypatch.setattr(_linear_head, "use_triton", lambda x: request.param == "triton")
    monkeypatch.setattr(_linear_head, "BLOCK", 2)
    _linear_head._launch.cache_clear()
    yield TRITON_DEVICE if request.param == "triton" else "cpu"
    _linear_head._launch.cache_clear()


@pytest.mark.parametrize("labels", [[5, -100, 2, -100, -100, 0], [-100] * 3, [1, 2], [-100, 7], [3, -100], []], ids=str)
def test_row_selection(labels, selecting):
    labels = torch.tensor(labels, dtype=torch.int64, device=selecting)
    expected = (labels != -100).nonzero().squeeze(1)
    rows = RowSelection(labels).wait()
    assert rows.count == len(expected)
    assert rows.num_items == max(1, len(expected))
    if rows.count == len(labels):
        assert rows.index is None
    else:
        assert torch.equal(rows.index, expected)
    x = torch.arange(2.0 * len(labels), device=selecting).reshape(-1, 2)
    assert torch.equal(gather_rows(x, rows), x[expected])
    assert torch.equal(scatter_rows(gather_rows(x, rows), rows, len(labels)), x * (labels != -100)[:, None])


def test_row_selection_of_a_batch_of_sequences(selecting):
    labels = torch.tensor([[1, 2, -100], [-100, 4, -100]], device=selecting)
    assert RowSelection(labels).wait().index.tolist() == [0, 1, 4]
    assert RowSelection(labels.t(), ignore_index=4).wait().index.tolist() == [0, 1, 2, 4, 5]


def test_a_copy_is_waited_for_on_its_own_device(monkeypatch):
    """Not on the device that happens to be current, whose queue says nothing about the copy."""
    recorded = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: None))
    value: Any = SimpleNamespace(is_cuda=True, device="cuda:1", shape=(2,), dtype=torch.float64)
    value.detach = lambda: value
    HostCopy(value)
    assert recorded == ["stream of cuda:1"]


def test_path_of_a_tensor():
    """On CPU tensors: Triton only under the interpreter, and not for what numpy lacks or the kernels would narrow."""
    interpreted = use_triton(torch.zeros(1))
    for dtype in (torch.float16, torch.float32):
        assert use_triton(torch.zeros(1, dtype=dtype)) == interpreted
    for dtype in (torch.bfloat16, torch.float64):
        assert not use_triton(torch.zeros(1, dtype=dtype))
