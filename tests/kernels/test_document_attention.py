"""document_attention beside a masked softmax in fp64."""

import functools

import pytest
import torch
from elementwise_checks import check_op

from liger_trainer.kernels import document_attention as module
from liger_trainer.kernels.document_attention import (
    Tiles,
    document_attention,
    document_attention_reference,
    document_bounds,
    document_bounds_reference,
)

check = functools.partial(check_op, document_attention, document_attention_reference, leaves=("q", "k", "v"))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a few tokens take several blocks, some of them seen whole, and queries' blocks differ from keys'."""
    monkeypatch.setattr(
        module, "tiles_of", lambda kind, D, exact: Tiles(*((16, 32) if kind == "dkdv" else (32, 16)), 4, 2)
    )


def tensors(place, T=70, hq=4, hk=2, D=16, ends=(0, 1, 30, 30, 61, 70), seed=0):
    """q, k and v as views of one tensor, as a layer of joint projections has them."""
    joint = torch.randn(T, hq + 2 * hk, D, generator=torch.Generator().manual_seed(seed))
    q, k, v = joint.to(place.device, place.dtype).split([hq, hk, hk], 1)
    return {"q": q, "k": k, "v": v, "ends": torch.tensor(ends, dtype=torch.int32, device=place.device)}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"T": 0, "ends": (0, 0)},
        {"hq": 3, "hk": 1, "D": 24},  # no power of two
        {"hq": 2, "hk": 2, "ends": (0, 70)},  # one document, most blocks without a mask
        {"ends": (*range(0, 70, 7), 70)},  # many
        {"ends": (0, 32, 64, 70)},  # at the edges of blocks
        {"ends": (0, 70, 70, 70)},  # documents without tokens behind
    ],
    ids=str,
)
def test_documents(place, shape):
    check(tensors(place, **shape))


@pytest.mark.parametrize("window", [2, 5, 16, 33, 200])
def test_windows(fp32, window):
    check(tensors(fp32, ends=(0, 50, 70)), window=window)


@pytest.mark.parametrize("shape, window", [({"T": 1, "ends": (0, 1)}, None), ({}, 1)])
def test_a_token_alone(fp32, shape, window):
    """Its weight is 1 whatever its score, whose gradient is what rounding leaves of 0."""
    given = tensors(fp32, hk=4, **shape)
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    out = document_attention(q, k, v, given["ends"], window=window)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    torch.testing.assert_close((out.detach(), dv), (v.detach(), upstream), rtol=1e-5, atol=1e-6)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_scales(fp32, scale):
    check(tensors(fp32), scale=scale)


def test_documents_do_not_see_one_another(fp32):
    given = tensors(fp32)
    before = document_attention(**given)
    for name in ("k", "v"):
        given[name] = given[name].clone()
        given[name][1:30] += 1
    after = document_attention(**given)
    same = (before == after).flatten(1).all(1)
    assert same[:1].all() and same[30:].all() and not same[1:30].any()


def test_each_token_knows_its_document(fp32):
    for ends in ([0, 5], [0, 0, 5, 5, 300, 300], list(range(301)), [0, *range(10, 300, 17), 300]):
        bounds = torch.tensor(ends, dtype=torch.int32, device=fp32.device)
        got = document_bounds(bounds, ends[-1])
        assert torch.equal(got, document_bounds_reference(bounds, ends[-1])) and got.dtype == torch.int32


def test_bounds_may_be_given(fp32):
    given = tensors(fp32)
    bounds = document_bounds(given["ends"], 70)
    assert torch.equal(document_attention(**given, bounds=bounds), document_attention(**given))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.zeros(70, 3, 16), "v": torch.zeros(70, 3, 16)}, "Hk must divide Hq"),
        ({"k": torch.zeros(69, 2, 16)}, "must share T and D"),
        ({"v": torch.zeros(70, 2, 16, dtype=torch.float16)}, "must share their dtype"),
    ],
)
def test_what_does_not_fit_is_said(fp32, change, message):
    with pytest.raises(ValueError, match=message):
        document_attention(**{**tensors(fp32), **{k: x.to(fp32.device) for k, x in change.items()}})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D, window", [(64, None), (128, None), (128, 300), (96, 50), (256, None)])
def test_on_a_gpu(monkeypatch, dtype, D, window):
    monkeypatch.undo()
    ends = (0, 3, 3, 700, 800, 1200, 1999)
    given = tensors(type("Place", (), {"device": "cuda", "dtype": dtype}), T=1999, D=D, ends=ends)
    first, second = (check(given, window=window) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first), "no atomics"
