"""Attention within documents: what no form of tests/support/op_table.py says."""

import pytest
import torch
from kernel_checks import check
from op_table import CASES
from torch import Tensor

from liger_trainer.kernels import _tuning
from liger_trainer.kernels import document_attention as source
from liger_trainer.kernels.document_attention import (
    document_attention,
    document_bounds,
    document_bounds_reference,
)


def attention(place) -> dict[str, Tensor]:
    return CASES["document_attention"].inputs(place)


@pytest.mark.parametrize("ends, window", [((0, 1), None), ((0, 1, 30, 30, 61, 70), 1)])
def test_a_document_or_window_of_one_token(fp32, ends, window):
    """Its weight is 1 whatever its score, whose gradient is what rounding leaves of 0."""
    tensors = {k: x[: ends[-1]] for k, x in CASES["document_attention"].inputs(fp32, heads=4, keys=4).items()}
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    out = document_attention(q, k, v, torch.tensor(ends, dtype=torch.int32, device=fp32.device), window=window)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    torch.testing.assert_close((out.detach(), dv), (v.detach(), upstream), rtol=1e-5, atol=1e-6)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


def test_documents_do_not_see_one_another(fp32):
    tensors = attention(fp32)
    before = document_attention(**tensors)
    for name in ("k", "v"):
        tensors[name] = tensors[name].clone()
        tensors[name][1:30] += 1
    same = (before == document_attention(**tensors)).flatten(1).all(1)
    assert same[:1].all() and same[30:].all() and not same[1:30].any()


def test_each_token_knows_its_document(fp32):
    for ends in ([0, 5], [0, 0, 5, 5, 300, 300], list(range(301)), [0, *range(10, 300, 17), 300]):
        bounds = torch.tensor(ends, dtype=torch.int32, device=fp32.device)
        got = document_bounds(bounds, ends[-1])
        assert torch.equal(got, document_bounds_reference(bounds, ends[-1])) and got.dtype == torch.int32
    tensors = attention(fp32)
    bounds = document_bounds(tensors["ends"], 70)
    assert torch.equal(document_attention(**tensors, bounds=bounds), document_attention(**tensors))


def test_rows_of_one_length_are_documents_of_that_length(fp32):
    """To the bit: only where a token's document begins is found in another way."""
    tensors = attention(fp32)
    ends = torch.arange(0, 71, 14, dtype=torch.int32, device=fp32.device)
    how = {"window": 9, "softcap": 2.0, "sinks": torch.linspace(-2, 2, 2, device=fp32.device)}
    results = []
    for each in (14, ends):
        leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
        out = document_attention(*leaves, each, **how)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_sinks_that_weigh_nothing_change_nothing(fp32):
    tensors = attention(fp32)
    sinks = torch.full((2,), -torch.inf, device=fp32.device)
    torch.testing.assert_close(document_attention(**tensors, sinks=sinks), document_attention(**tensors))
    # and one that weighs all leaves nothing
    assert document_attention(**tensors, sinks=-sinks.clamp(min=-200)).abs().max() < 1e-30


@pytest.mark.parametrize("frozen", [True, False])
def test_sinks_by_themselves(fp32, frozen):
    """Trained alone, and frozen beside trained queries."""
    case = CASES["document_attention, sinks"]
    tensors = case.inputs(fp32)
    check(case.function, case.reference, tensors, None, leaves=["q"] if frozen else ["sinks"])


def test_what_does_not_fit_is_refused(fp32):
    tensors = attention(fp32)
    with pytest.raises(ValueError, match=r"sinks must be \(2,\)"):
        document_attention(**tensors, sinks=torch.zeros(3, device=fp32.device))
    with pytest.raises(ValueError, match="softcap must be positive"):
        document_attention(**tensors, softcap=0.0)
    with pytest.raises(ValueError, match="Documents of 30 tokens do not make up 70"):
        document_attention(**tensors | {"ends": 30})
    wide = torch.zeros(1, 1, 513, device=fp32.device)
    with pytest.raises(ValueError, match="D be at most 512"):
        document_attention(wide, wide, wide, 1)


# a part of the kernels' source, what a mistake makes of it, and a form whose bound sees it
def test_narrow_windows_have_tiles_of_their_own():
    """As shipped: of dk and dv together, where most blocks are masked ones."""
    for table in (_tuning.HOPPER, _tuning.AMPERE, _tuning.ADA):
        narrow, wide = (source.tiles_of("dkdv", 64, False, table, window) for window in (128, 512))
        assert narrow != wide == source.tiles_of("dkdv", 64, False, table)
        assert source.tiles_of("dkdv", 128, False, table, 128) == source.tiles_of("dkdv", 128, False, table)
        assert source.tiles_of("dkdv", 64, True, table, 128) == source.tiles_of("dkdv", 64, True, table)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_documents_and_sinks_on_gpu():
    """And equals what is launched, to the bit."""
    T, heads = 512, (8, 2)
    q, k, v = (torch.randn(T, n, 64, device="cuda", dtype=torch.bfloat16) for n in (heads[0], heads[1], heads[1]))
    sinks, ends = (
        torch.zeros(heads[0], device="cuda"),
        torch.tensor([0, 100, T, T, T], dtype=torch.int32, device="cuda"),
    )
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]

    def step() -> list[Tensor]:
        out = document_attention(*leaves[:3], ends, sinks=leaves[3], window=70, softcap=20.0)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for each, sink in (([0, 3, 3, 300, T], 1.0), ([0, T, T, T, T], -3.0), ([0, 1, 2, 3, T], 0.5)):
            with torch.no_grad():
                ends.copy_(torch.tensor(each, dtype=torch.int32))
                sinks.fill_(sink)
            graph.replay()
            torch.testing.assert_close(captured, step(), rtol=0, atol=0)
