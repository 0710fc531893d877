"""Weights in 4 bits: each number as the formats define it, and a weight that torch's operations unpack."""

import copy
import math
from typing import Any

import pytest
import torch
from kernel_checks import PATHS, normal, set_path
from torch import nn

from liger_trainer.compat.four_bit_tensor import FourBitTensor
from liger_trainer.kernels import four_bits
from liger_trainer.kernels.four_bits import (
    MXFP4_VALUES,
    NF4_VALUES,
    NestedScales,
    nf4_codes,
    unpack,
    unpack_nf4_,
)

# a block's part, blocks and a part, one program and another, as many as one takes, none
SIZES = (10, 3 * 64 + 22, 128 + 2, 128, 0)


@pytest.fixture(params=PATHS)
def device(request, monkeypatch) -> str:
    monkeypatch.setattr(four_bits, "NUMBERS", 128)
    return set_path(monkeypatch, request.param)


def packed(n: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw codes and scales of n numbers."""
    generator = torch.Generator().manual_seed(n)
    block = 64 if kind == "nf4" else 32
    blocks = -(-n // block)
    codes = torch.randint(0, 256, (blocks * block // 2,), generator=generator).to(torch.uint8)
    if kind == "nf4":
        return codes, torch.rand(blocks, generator=generator)
    return codes, torch.randint(117, 137, (blocks,), generator=generator).to(torch.uint8)


def truth(codes: torch.Tensor, scales: torch.Tensor, n: int) -> torch.Tensor:
    """Number by number, in Python's floats."""
    is_nf4 = scales.dtype != torch.uint8
    values, block = (NF4_VALUES, 64) if is_nf4 else (MXFP4_VALUES, 32)
    numbers = [code for byte in codes.tolist() for code in (byte % 16, byte // 16)][:n]
    each = [s if is_nf4 else 2.0 ** (s - 127) for s in scales.tolist()]
    return torch.tensor([values[c] * each[i // block] for i, c in enumerate(numbers)], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["nf4", "mxfp4"])
@pytest.mark.parametrize("n", SIZES)
def test_each_number_is_its_value_times_the_scale_of_its_block(n, kind, device):
    codes, scales = packed(n, kind)
    want = truth(codes, scales, n)
    for dtype in (torch.float32, torch.float16):
        got = unpack(codes.to(device), scales.to(device), n, dtype)
        assert got.shape == (n,) and torch.equal(got.cpu(), want.float().to(dtype))


def test_every_scale_of_mxfp4(device):
    """From 2^-127, below the normal numbers, to 2^127."""
    scales = torch.arange(255, dtype=torch.uint8)
    codes = torch.full((255 * 16,), 0x21, dtype=torch.uint8)  # 0.5 and 1
    got = unpack(codes.to(device), scales.to(device), 255 * 32, torch.float32).cpu()
    want = truth(codes, scales, 255 * 32).float()
    atol = 2**-126 if device == "cuda" else 0  # a GPU may take 2^-127 for 0
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_mxfp4_is_exact_in_bf16_and_what_transformers_unpacks():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    codes, scales = packed(3 * 8 * 64, "mxfp4")
    blocks, scales = codes.view(3, 8, 2, 16), scales.view(3, 8, 2)
    ours = FourBitTensor.mxfp4(blocks, scales, torch.bfloat16).unpacked()
    assert torch.equal(ours, mxfp4.convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(ours.double().transpose(1, 2).flatten(), truth(codes, scales.flatten(), 3 * 8 * 64))


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 7, 64), (130,), (5, 2), (2, 0, 64)], ids=str)
def test_nf4_rounds_to_the_nearest_value(shape):
    """Entries of whole blocks, and such as share one with the next."""
    weight = normal(*shape) if 0 not in shape else torch.empty(shape)
    if weight.numel():
        weight.view(-1)[:64] = 0  # a block of zeros, or the first entry
    quantised = FourBitTensor.nf4(weight)
    got = quantised.unpacked()
    assert got.shape == weight.shape and quantised.codes.nbytes == math.ceil(weight.numel() / 64) * 32
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64).double()
    choices = blocks.abs().amax(1)[:, None] * torch.tensor(NF4_VALUES).double()
    nearest = (blocks[:, :, None] - choices[:, None]).abs().amin(2)
    found = (blocks - nn.functional.pad(got.flatten(), (0, -weight.numel() % 64)).view(-1, 64)).abs()
    torch.testing.assert_close(found, nearest, rtol=1e-6, atol=1e-7)


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(4, 8, 64)
    theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4", blocksize=64))
    torch.testing.assert_close(FourBitTensor.nf4(weight).unpacked(), theirs, rtol=1e-6, atol=1e-7)


# scales whose product and sum, fused, would be rounded otherwise; more blocks than have one outer scale
BLOCKS = 256 + 3


def nested_scales() -> NestedScales:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (BLOCKS,), generator=generator).to(torch.uint8)
    return NestedScales(codes, torch.linspace(-1, 1, 256), torch.tensor([0.37, 1.9]), torch.tensor(0.11))


@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "plain"])
def test_nf4_of_bitsandbytes_bit_for_bit(is_nested, stored, device):
    """High bits first; a scale that is packed is a product, rounded, and a sum."""
    nested, codes = nested_scales(), packed(BLOCKS * 64, "nf4")[0]
    inner = torch.tensor([nested.map[code] for code in nested.codes.tolist()])
    scales = inner * nested.largest.repeat_interleave(256)[:BLOCKS] + nested.offset
    table = torch.tensor(NF4_VALUES)
    numbers = torch.stack((codes >> 4, codes & 15), 1).flatten().long()
    want = table[numbers] * scales.repeat_interleave(64)
    given = NestedScales(*(x.to(device) for x in nested)) if is_nested else scales.to(device)
    for dtype in (torch.float32, torch.float16):
        out = torch.empty(BLOCKS, 64, dtype=dtype, device=device)
        unpack_nf4_(out, codes.view(stored).unsqueeze(1).to(device), given)
        assert torch.equal(out.cpu().flatten(), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "plain"])
def test_nf4_is_what_bitsandbytes_unpacks(is_nested, dtype, triton_fp32):
    functional = pytest.importorskip("bitsandbytes.functional")
    if dtype == torch.bfloat16 and triton_fp32.device == "cpu":
        pytest.skip("Triton's interpreter has no bf16")
    weight = normal(3 * 96, 128).to(dtype).to(triton_fp32.device)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=is_nested)
    scales = state.absmax
    if is_nested:
        scales = NestedScales(scales, state.state2.code, state.state2.absmax, state.offset)
    unpack_nf4_(out := torch.empty_like(weight), codes, scales)
    assert torch.equal(out, functional.dequantize_4bit(codes, state))


def test_no_number_stays_no_number():
    weight = torch.ones(2, 64)
    weight[0, 3] = math.nan
    got = FourBitTensor.nf4(weight).unpacked()
    assert got[0].isnan().all() and torch.equal(got[1], weight[1])


def test_codes_are_two_a_byte():
    codes, scales = nf4_codes(torch.tensor([-2.0, 2.0] * 32))
    assert codes.tolist() == [0xF0] * 32 and scales.tolist() == [2.0]


@pytest.fixture(params=["nf4", "mxfp4"])
def weight(request) -> FourBitTensor:
    if request.param == "nf4":
        return FourBitTensor.nf4(normal(3, 4, 64))
    codes, scales = packed(3 * 4 * 64, "mxfp4")
    return FourBitTensor.mxfp4(codes.view(3, 4, 2, 16), scales.view(3, 4, 2), torch.float32)


def test_torch_unpacks_it(weight):
    parameter, dense = nn.Parameter(weight, requires_grad=False), weight.unpacked().contiguous()
    assert isinstance(parameter, FourBitTensor) and parameter.shape == dense.shape
    x = normal(5, dense.shape[2]).requires_grad_()
    results = []
    for each in (parameter, dense):
        y = x @ each[1].t() + each.sum()
        results += [y, *torch.autograd.grad(y.square().sum(), x)]
    torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)


def test_copies_and_casts_stay_packed(weight):
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    made: Any
    for made in (copy.deepcopy(layer), copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).to("meta")):
        assert isinstance(made.weight, FourBitTensor) and made.weight.codes is not layer.weight.codes
    assert copy.deepcopy(layer).to(torch.bfloat16).weight.unpacked().dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(layer).weight.unpacked(), weight.unpacked())
    other = weight.clone()
    other.codes.zero_()
    other.copy_(weight)
    assert torch.equal(other.unpacked(), weight.unpacked())


def test_it_is_not_changed(weight):
    with pytest.raises(RuntimeError, match="would change a weight in 4 bits.*liger-trainer merge"):
        weight.add_(1)


def test_experts_of_other_shapes_are_refused():
    blocks, scales = torch.zeros(2, 3, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, 5, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 16\) and \(2, 3, 5\)"):
        FourBitTensor.mxfp4(blocks, scales, torch.float32)
