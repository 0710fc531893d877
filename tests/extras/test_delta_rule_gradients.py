"""A step of the gated delta rule's backward, against derivatives of its formulas in fp64."""

import math

import pytest
import torch
from torch import Tensor

from liger_trainer.extras.delta_rule_gradients import chunk_gradients
from liger_trainer.patching.packing import token_mixers

CHUNK, SCALE = 64, 0.3
NAMES = ("q", "k", "v", "do", "h", "dh", "w", "g", "dv")


def inputs(lengths, heads=(2, 4), widths=(16, 24), rows=1, decay=0.03, dtype=torch.float64, device="cpu"):
    """Random tensors for documents of these lengths, or of rows of one length, and states for one chunk too many."""
    (H, HV), (K, V), T = heads, widths, sum(lengths)
    chunks = sum(-(-length // CHUNK) for length in lengths) + (rows == 1)
    draw = torch.Generator(device).manual_seed(sum(lengths))

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64, device=device).to(dtype)

    h, dh = normal(rows, chunks, HV, K, V), normal(rows, chunks, HV, K, V)
    if rows == 1:
        h[:, -1] = dh[:, -1] = torch.nan  # of the chunk that is left over nothing may come
    of_value = (rows, T, HV)
    g = torch.cat([-decay * normal(rows, n, HV).abs().cumsum(1) for n in pieces(lengths)], 1)
    g = g if dtype == torch.float64 else g.float()
    values = normal(*of_value, V), normal(*of_value, V)
    return dict(zip(NAMES, (normal(rows, T, H, K), normal(rows, T, H, K), *values, h, dh, normal(*of_value, K), g,
                            normal(*of_value, V)), strict=True))  # fmt: skip


def pieces(lengths):
    return [min(CHUNK, length - at) for length in lengths for at in range(0, length, CHUNK)]


def truth(x, lengths):
    """dq, dk, dw and dg, by autograd through one chunk after the other."""
    x = {name: t.double() for name, t in x.items()}
    wanted = {name: x[name].requires_grad_() for name in ("q", "k", "w", "g")}
    total = torch.zeros((), dtype=torch.float64, device=x["q"].device)
    groups = x["v"].shape[2] // x["q"].shape[2]
    for row in range(x["q"].shape[0]):
        begin = 0
        for chunk, length in enumerate(pieces(lengths)):
            span = slice(begin, begin + length)
            q, k = (x[name][row, span].repeat_interleave(groups, 1) for name in ("q", "k"))
            v, do, w, g, dv = (x[name][row, span] for name in ("v", "do", "w", "g", "dv"))
            S, dS = x["h"][row, chunk], x["dh"][row, chunk]
            begin += length
            apart = (g[:, None] - g[None]).permute(2, 0, 1).tril()
            pairs = torch.einsum("ihk,jhk->hij", q, k) * apart.exp2().tril() * SCALE
            o = torch.einsum("hij,jhv->ihv", pairs, v)
            o = o + SCALE * g.exp2()[..., None] * torch.einsum("ihk,hkv->ihv", q, S)
            state = g[-1].exp2()[:, None, None] * S
            state = state + torch.einsum("jh,jhk,jhv->hkv", (g[-1] - g).exp2(), k, v)
            made = -torch.einsum("ihk,hkv->ihv", w, S)
            total = total + (o * do).sum() + (state * dS).sum() + (made * dv).sum()
    dq, dk, dw, dg = torch.autograd.grad(total, list(wanted.values()))
    return dq, dk, dw, dg / math.log(2)  # of the natural logarithm


def chunks_of(lengths, device="cpu"):
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    chunks = [(d, n) for d, length in enumerate(lengths) for n in range(-(-length // CHUNK))]
    return torch.cat([ends, ends[-1:]]).int(), torch.tensor([*chunks, (len(lengths), 0)], device=device).int()


CASES = {
    "documents": {"lengths": (3, 70, 64, 1, 130)},
    "forgetful": {"lengths": (3, 70), "decay": 30.0},
    "one head for each": {"lengths": (65,), "heads": (3, 3)},
    "rows": {"lengths": (100,), "rows": 2},
    "a row of one chunk": {"lengths": (7,), "rows": 2, "heads": (1, 2)},
}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_formulas(case, v_first):
    assert_close(run(case, v_first, torch.float64), 1e-12)


def run(case, v_first=False, dtype=torch.float64, device="cpu"):
    options = CASES[case]
    x = inputs(**options, dtype=dtype, device=device)
    want = truth(x, options["lengths"])
    ends, chunks = (None, None) if options.get("rows") else chunks_of(options["lengths"], device)
    if v_first:
        x |= {name: x[name].mT.contiguous() for name in ("h", "dh")}
    with torch.no_grad():
        got = chunk_gradients(**x, scale=SCALE, state_v_first=v_first, cu_seqlens=ends, chunk_indices=chunks)
    assert [t.dtype for t in got[:3]] == [dtype] * 3
    return got, want


def assert_close(pairs, error):
    got, want = pairs
    for one, other, name in zip(got, want, ("dq", "dk", "dw", "dg"), strict=True):
        assert one.shape == other.shape and (one - other).norm() <= error * other.norm(), name


def test_an_error_of_one_percent_is_noticed(monkeypatch):
    from liger_trainer.extras import delta_rule_gradients

    product = delta_rule_gradients.product
    monkeypatch.setattr(delta_rule_gradients, "product", lambda a, b: product(a, b) * 1.01)
    with pytest.raises(AssertionError):
        assert_close(run("documents"), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_within_their_rounding(dtype):
    assert_close(run("documents", dtype=dtype), 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    assert_close(run(case, dtype=torch.bfloat16, device="cuda"), 1e-2)


def whole_rule(rule, tensors, upstream, **how):
    tensors = [t.detach().requires_grad_() for t in tensors]
    y = rule(*tensors, use_qk_l2norm_in_kernel=True, **how)[0]
    return [y, *torch.autograd.grad(y, tensors, upstream.to(y.dtype))]


@pytest.fixture
def untuned(monkeypatch):
    """Autotuned kernels run their first configuration: fla-core's would compile and time about 120 of them."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner

    def first_of_all(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    monkeypatch.setattr(autotuner, "run", first_of_all)


@pytest.mark.gpu
def test_the_whole_rule_of_fla_is_that_of_torch(untuned):
    """fla-core's kernels, on a Hopper GPU with this step in place of the one that it refuses; in a CUDA graph too."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as plain

    assert token_mixers.refused() is None
    plain = getattr(plain, "__wrapped__", plain)
    draw = torch.Generator("cuda").manual_seed(0)
    lengths, heads, width = (70, 3, 300, 64), 4, 64

    def normal(*shape):
        return torch.randn(shape, generator=draw, device="cuda")

    T = sum(lengths)
    q, k, v, upstream = (normal(1, T, heads, width) for _ in range(4))
    tensors: list[Tensor] = [q, k, v, -normal(1, T, heads).abs() / 10, normal(1, T, heads).sigmoid()]
    ends, chunks = chunks_of(lengths, "cuda")
    parts = zip(*(t.split(lengths, 1) for t in (*tensors, upstream)), strict=True)
    want = [torch.cat(each, 1) for each in zip(*(whole_rule(plain, p[:5], p[5]) for p in parts), strict=True)]
    half = [*(t.bfloat16() for t in tensors[:3]), tensors[3], tensors[4].bfloat16()]
    parts = zip(*(t.split(lengths, 1) for t in (*half, upstream)), strict=True)
    rounded = [torch.cat(each, 1) for each in zip(*(whole_rule(plain, p[:5], p[5]) for p in parts), strict=True)]
    got = whole_rule(fla, half, upstream, cu_seqlens=ends, chunk_indices=chunks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = whole_rule(fla, half, upstream, cu_seqlens=ends.clone(), chunk_indices=chunks.clone())
    graph.replay()
    for one, other, plainly, replayed in zip(got, want, rounded, again, strict=True):
        error = (one - other).norm() / other.norm()
        assert error <= 2 * (plainly - other).norm() / other.norm() + 4e-3, error
        assert torch.equal(one, replayed)
