"""Dropout of LoRA ops: the masks that they make, the numbers under these masks, and what they depend on."""

import functools
import itertools

import pytest
import torch
from kernel_checks import CUDA, TRITON_DEVICE, Place, check, evaluate, normal
from op_table import ADAPTER
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_trainer.extras.selfcheck_cases import SCALES, Draw, adapted
from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._dropout import LEVELS, add_gradients, draw_seed, kept, philox, runs_of, values_of_kept
from liger_trainer.kernels._low_rank import Numerics
from liger_trainer.kernels.gated_linear import gated_linear_reference
from liger_trainer.kernels.lora_linear import lora_linear
from liger_trainer.kernels.lora_mlp import lora_mlp
from liger_trainer.kernels.types import Adapter, Projection

SEED = 0x299F31D0A4093822


@pytest.fixture
def same_seed(monkeypatch):
    """Every op draws the same seed, so that a reference knows its masks."""
    monkeypatch.setattr(_low_rank, "draw_seed", lambda x: torch.tensor([SEED], device=x.device))


def dropped(x: Tensor, p: float, stream: int) -> Tensor:
    """dropout(x) with the mask of an adapter under `same_seed`."""
    flat = x.reshape(-1, x.shape[-1])
    threshold = round(p * LEVELS)
    mask = kept(torch.tensor([SEED], device=x.device), stream, tuple(flat.shape), threshold).view(x.shape)
    return x.where(mask, 0) / (1 - threshold / LEVELS)


def adapters_of(tensors, rates, prefix="") -> list[Adapter]:
    pairs = [(tensors[f"{prefix}a{i}"], tensors[f"{prefix}b{i}"]) for i in range(len(rates))]
    return [Adapter(a, b, scale, p) for (a, b), scale, p in zip(pairs, SCALES, rates, strict=False)]


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, adapters, stream: int = 0) -> Tensor:
    """A layer in plain torch, whose adapters see x through the masks from `stream` on."""
    y = torch.nn.functional.linear(x, weight, bias)
    for i, (a, b, scale, p) in enumerate(adapters):
        y = y + dropped(x, p, stream + i) @ a.t().to(x.dtype) @ b.t().to(x.dtype) * scale
    return y


def linear_with(rates, op=lora_linear):
    return lambda x, weight, **tensors: op(x, weight, None, adapters_of(tensors, rates))


def mlp_with(rates, op):
    def run(x, **tensors):
        names = [name for name in ("gate", "up", "down") if f"{name}_weight" in tensors]
        layers = [
            Projection(tensors[f"{n}_weight"], None, tuple(adapters_of(tensors, rates[n], f"{n}_"))) for n in names
        ]
        return op(x, layers[0], layers[1] if len(layers) == 3 else None, layers[-1])

    return run


def mlp_of_layers(x, gate, up, down):
    """The MLP in plain torch: the adapters are numbered through its layers."""
    counts = [0, *itertools.accumulate(len(p.adapters) for p in (gate, up) if p is not None)]
    hidden = [layer(x, p.weight, p.bias, p.adapters, n) for p, n in zip((gate, up), counts, strict=False) if p]
    eye = torch.eye(down.weight.shape[1], dtype=x.dtype, device=x.device)
    h = gated_linear_reference(hidden[0], hidden[1] if up is not None else None, eye)
    return layer(h, down.weight, down.bias, down.adapters, counts[-1])


def inputs(rows: int, columns: int, like: Place, ranks=(4,), adapters: torch.dtype | None = None) -> dict:
    tensors = {"x": normal(rows, columns, seed=9, spread=2.0), **adapted(Draw(), "", 11, columns, ranks)}
    narrow = {name: x.to(like.device, like.dtype) for name, x in tensors.items()}
    return narrow | {n: x.to(like.device, adapters or like.dtype) for n, x in tensors.items() if n[0] in "ab"}


def leaves_of(tensors: dict) -> list[str]:
    return ["x", *filter(ADAPTER.search, tensors)]


@pytest.mark.parametrize(
    ("seed", "counter", "want"),
    [
        (0, [0] * 4, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (-1, [0xFFFFFFFF] * 4, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (SEED, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
    ],
)
def test_philox(seed, counter, want):
    """The known answers for seven rounds that its authors publish."""
    numbers = philox(torch.tensor([seed]), [torch.tensor([c]) for c in counter])
    assert [int(x) for x in numbers] == want


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_masks_are_independent_of_each_other(p):
    """The rate, in all and in each row and column, and no correlation with neighbours, other adapters or seeds."""
    shape, threshold = (1500, 800), round(p * LEVELS)
    seeds = torch.tensor([SEED]), torch.tensor([SEED + 1]), torch.tensor([SEED + (1 << 32)])
    drops = [~kept(seed, stream, shape, threshold) for seed, stream in [*((s, 0) for s in seeds), (seeds[0], 1)]]
    spread = (p * (1 - p)) ** 0.5
    first = (drops[0].double() - p) / spread
    for each in drops:
        standard = (each.double() - p) / spread
        assert standard.mean().abs() < 4.5 / standard.numel() ** 0.5
        for dim in (0, 1):  # means of columns and rows, in units of their own spread
            means = standard.mean(dim) * shape[dim] ** 0.5
            assert means.abs().max() < 5.5 and means.std().item() == pytest.approx(1, abs=0.12)
    others = [(each.double() - p) / spread for each in drops[1:]]
    shifted = [first.roll(step, dim) for dim in (0, 1) for step in (1, 2, 4, 8)]
    for other in (*others, *shifted):
        assert (first * other).mean().abs() < 4.5 / first.numel() ** 0.5


@pytest.mark.parametrize("packing", ["one", "three", "several ranks", "several rates", "high rank", "some do not"])
def test_lora_linear(place, same_seed, packing):
    """Every output and gradient under the masks of `kept`, which plain torch makes."""
    ranks, rates = {
        "one": ((4,), (0.3,)),
        "three": ((4, 4, 4), (0.2, 0.2, 0.2)),
        "several ranks": ((2, 5, 5), (0.3, 0.3, 0.3)),
        "several rates": ((3, 3), (0.1, 0.6)),
        "high rank": ((150, 22), (0.3, 0.3)),
        "some do not": ((3, 3, 3), (0.0, 0.4, 0.0)),
    }[packing]
    tensors = inputs(45, 37, place, ranks)
    check_dropped(tensors, rates)


def check_dropped(tensors, rates=(0.3,), leaves=None) -> dict:
    ops = linear_with(rates), linear_with(rates, layer)
    return check(*ops, tensors, None, leaves=leaves_of(tensors) if leaves is None else leaves)


SHAPES = {
    "one row": lambda x: x[:1], "a vector": lambda x: x[0], "three dimensions": lambda x: x.view(5, 9, -1),
    "no rows": lambda x: x[:0], "columns of a wider tensor": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "by columns": lambda x: x.t().contiguous().t(),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_layouts(fp32, same_seed, shape):
    tensors = inputs(45, 16, fp32)
    check_dropped(tensors | {"x": SHAPES[shape](tensors["x"])})


@pytest.mark.parametrize("leaves", [["x"], ["a0"], ["b1"], ["x", "b0"], ["a0", "a1"], ["x", "a1", "b1"]], ids="-".join)
def test_frozen(fp32, same_seed, leaves):
    check_dropped(inputs(45, 37, fp32, (3, 3)), (0.3, 0.3), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adapters_wider_than_the_base(same_seed, dtype):
    got = check_dropped(inputs(45, 37, Place("", TRITON_DEVICE, dtype), (3, 4), torch.float32), (0.3, 0.1))
    assert got["d_a0"].dtype == torch.float32


@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("of_gate", [(0.3, 0.0), (0.1,), (0.0,)], ids=str)  # one: in the activation's kernels
def test_lora_mlp(triton_fp32, same_seed, packed, dtype, of_gate):
    """gate, up and down have separate masks. (In plain torch the op is three layers, whose masks are torch's.)"""
    rates = {"gate": of_gate, "up": (0.3,), "down": (0.5,)}
    shapes = {"gate": (42, 16), "down": (16, 21)} if packed else {"gate": (21, 16), "up": (21, 16), "down": (16, 21)}
    tensors = {"x": normal(45, 16, seed=9, spread=2.0)}
    for name, shape in shapes.items():
        tensors |= adapted(Draw(), name, *shape, ranks=(4, 2)[: len(rates[name])])
    tensors = {name: x.to(triton_fp32.device, dtype) for name, x in tensors.items()}
    ops = mlp_with(rates, lora_mlp), mlp_with(rates, mlp_of_layers)
    check(*ops, tensors, None, leaves=leaves_of(tensors))


@pytest.mark.parametrize("slots", [1, 4])
def test_slots(triton_fp32, slots):
    """Adapters whose matrices are sums of several, slot after slot of all of them: what split factors take."""
    rows, columns, adapters = 35, 60, ((5, 3277, 0.7), (5, 3277, 0.7), (7, 30000, 0.7), (40, 30000, 2.0))
    seed, total = draw_seed(torch.zeros(1, device=TRITON_DEVICE)), sum(rank for rank, *_ in adapters)
    draw = functools.partial(normal, spread=2.0, like=triton_fp32)
    x, dx = (draw(rows, columns, seed=i) for i in (0, 1))
    a, g = (draw(n, m) for n, m in ((slots * total, columns), (rows, slots * total)))
    values, want_dx = torch.full_like(g, torch.nan), dx.double()
    values_of_kept(x, a, seed, runs_of(adapters, 2, slots), slots, values)
    parts = add_gradients(g, a, seed, runs_of(adapters, 2, slots), slots, x, dx)
    assert parts is not None
    da, start = parts.sum(0), 0
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-4)  # of entries of about 100
    for i, (rank, threshold, factor) in enumerate(adapters):
        mask = kept(seed, 2 + i, (rows, columns), threshold)
        at = torch.cat([torch.arange(rank) + slot * total + start for slot in range(slots)]).to(x.device)
        assert_close(values[:, at].double(), factor * (x * mask).double() @ a[at].double().t())
        assert_close(da[at].double(), g[:, at].double().t() @ (x * mask).double())
        want_dx += mask * (g[:, at].double() @ a[at].double())
        start += rank
    assert_close(dx.double(), want_dx)


def test_split_factors(same_seed, wide_results):
    """fp32 adapters over bf16: the precision of fp32 in the gradients."""
    tensors = inputs(45, 37, Place("", TRITON_DEVICE, torch.bfloat16), (4, 4), torch.float32)
    assert Numerics.of(tensors["x"], adapters_of(tensors, (0.3, 0.3))).split
    check_dropped(tensors, (0.3, 0.3))


def results_of(tensors, seed: int | None = None, run=None, rates=(0.4, 0.4)) -> dict[str, Tensor]:
    if seed is not None:
        torch.manual_seed(seed)
    return evaluate(run or linear_with(rates), tensors, None, leaves=leaves_of(tensors))


def test_torch_s_seed_reproduces_the_masks(fp32):
    tensors = inputs(8, 37, fp32, (4, 4))
    first, second, other, next_one = (results_of(tensors, seed) for seed in (3, 3, 4, None))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for each in (other, next_one):
        assert all((each[name] != first[name]).any() for name in first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_makes_the_same_masks(fp32, reentrant):
    tensors, linear = inputs(8, 37, fp32, (4, 4)), linear_with((0.4, 0.4))
    leaves, gradients = [tensors[name].requires_grad_() for name in leaves_of(tensors)], []

    def run(*values):
        return linear(**dict(zip(tensors, values, strict=True)))

    for call in (run, functools.partial(checkpoint, run, use_reentrant=reentrant)):
        torch.manual_seed(3)
        call(*tensors.values()).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    torch.testing.assert_close(*gradients)


def test_a_retained_graph_has_the_same_masks(fp32):
    tensors = inputs(8, 37, fp32)
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    y = linear_with((0.4,))(**tensors)
    first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, torch.ones_like(y)), first, rtol=0, atol=0)


def test_no_mask_and_no_dropped_x_are_kept(fp32):
    tensors, saved = inputs(45, 37, fp32, (4, 2)), []
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    given = {x.data_ptr() for x in tensors.values()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        linear_with((0.3, 0.3))(**tensors)
    assert [tuple(x.shape) for x in saved if x.data_ptr() not in given] == [(45, 1, 6), (1,)]


def test_compiles_whole(fp32):
    """torch.compile draws its own masks: at a rate so low that none drops anything, the numbers are those without."""
    tensors = inputs(5, 37, fp32)
    compiled = torch.compile(linear_with((1e-9,)), fullgraph=True, backend="aot_eager")
    check(compiled, linear_with((0.0,)), tensors, None, leaves=leaves_of(tensors))
    compiled = torch.compile(linear_with((0.5,)), fullgraph=True, backend="aot_eager")
    assert (compiled(**tensors) != linear_with((0.0,))(**tensors)).all()


@pytest.mark.parametrize("p", [1.0, -0.1, 2])
def test_rates_that_are_refused(p):
    with pytest.raises(ValueError, match=rf"dropout of an adapter of weight must be from 0 to below 1, got {p}"):
        linear_with((p,))(**inputs(5, 37, Place("", "cpu", torch.float32)))


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, columns", [(2048, 1024), (1000, 3072), (77, 1000)], ids=str)
def test_sizes_on_gpu(monkeypatch, same_seed, adapters, rows, columns):
    monkeypatch.undo()
    monkeypatch.setattr(_low_rank, "draw_seed", lambda x: torch.tensor([SEED], device=x.device))
    tensors = inputs(rows, columns, Place("", "cuda", torch.bfloat16), (16, 16, 8), adapters)
    check_dropped(tensors, (0.05, 0.05, 0.05))


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_offsets_beyond_32_bits_on_gpu(monkeypatch):
    """The last rows of x, dx and values have the numbers of a call with their masks."""
    monkeypatch.undo()
    rows, columns, tail = (1 << 19) + 8, 4200, 16
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    a, g = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((16, columns), (rows, 16)))
    seed, runs = draw_seed(x), runs_of(((16, 6554, 1.0),), 0, 1)
    values, dx = g.new_empty(rows, 16), torch.zeros_like(x)
    values_of_kept(x, a, seed, runs, 1, values)
    add_gradients(g, a, seed, runs, 1, x, dx)
    at = torch.arange(rows - tail, rows, device="cuda").view(-1, 1).expand(tail, -(-columns // 8))
    counter = [at, torch.arange(at.shape[1], device="cuda").expand_as(at), torch.zeros_like(at), torch.zeros_like(at)]
    words = torch.stack(philox(seed, counter), -1)
    mask = (torch.stack((words & 0xFFFF, words >> 16), -1).view(tail, -1) >= 6554)[:, :columns]
    torch.testing.assert_close(values[-tail:].float(), (x[-tail:] * mask).float() @ a.float().t(), rtol=2e-2, atol=2)
    torch.testing.assert_close(dx[-tail:].float(), mask * (g[-tail:].float() @ a.float()), rtol=2e-2, atol=0.1)


@pytest.mark.gpu
def test_replays_of_a_graph_draw_new_masks_on_gpu(monkeypatch):
    """Forward and backward in one CUDA graph: other masks at each replay, the same in both directions."""
    monkeypatch.undo()
    torch.use_deterministic_algorithms(False)
    eye, zero = torch.eye(64, device="cuda"), torch.zeros(64, 64, device="cuda")
    x = torch.ones(256, 64, device="cuda", requires_grad=True)

    def step():
        y = lora_linear(x, zero, None, [Adapter(eye, eye, 1.0, 0.5)])
        return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(y, dx)
        seen.append(y.clone())
    assert all((one != other).any() for one, other in itertools.combinations(seen, 2))
    assert CUDA and seen[0].count_nonzero().item() == pytest.approx(x.numel() / 2, rel=0.05)
