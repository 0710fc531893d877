"""rope and qk_norm_rope where only a GPU shows it: bf16, real sizes, offsets beyond 2^31, no wait of the host."""

import pytest
import torch
from elementwise_checks import check_op
from rotary_checks import angles, cast, projected

from liger_trainer.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_trainer.kernels.rope import rope, rope_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NORMS = ("q", "k", "q_weight", "k_weight")


def heads(shape, dtype, **layout):
    """q (B, S, Hq, D) and k (B, S, Hk, D) for shape (B, S, Hq, Hk, D), and the angles."""
    B, S, hq, hk, D = shape
    cos, sin = angles(B, S, layout.pop("rotary", D), **layout)
    q, k = projected(B, S, hq, D, 1), projected(B, S, hk, D, 2)
    return cast({"q": q, "k": k, "cos": cos, "sin": sin}, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((2, 1024, 32, 8, 128), {}),  # Llama
        ((2, 333, 14, 2, 64), {}),  # Qwen2-0.5B
        ((1, 500, 32, 2, 128), {"rotary": 64, "interleaved": True}),  # GLM, its angles in pairs
        ((1, 500, 32, 8, 96), {"rotary": 48}),
        ((2, 256, 12, 2, 128), {"axes": 3}),
    ],
    ids=str,
)
def test_rope(shape, layout, dtype):
    given = heads(shape, dtype, **layout)
    given |= {name: given[name].transpose(1, 2) for name in ("q", "k")}
    options = {"mrope_section": (16, 24, 24)} if "axes" in layout else {"interleaved": "interleaved" in layout}
    check_op(rope, rope_reference, given, ("q", "k"), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 1024, 16, 8, 128), {"cast_before_weight": True}),  # Qwen3-0.6B
        ((2, 1024, 4, 1, 256), {"offset": 1.0}),  # Gemma-3-1B
        ((1, 999, 40, 8, 128), {"norm_over_heads": True}),  # OLMo-2-32B
        ((1, 1, 16, 8, 128), {"interleaved": True}),
    ],
    ids=str,
)
def test_qk_norm_rope(shape, options, dtype):
    given = heads(shape, dtype, interleaved=options.get("interleaved", False))
    for name in ("q", "k"):
        width = given[name].shape[2:].numel() if options.get("norm_over_heads") else shape[-1]
        given[f"{name}_weight"] = torch.randn(width, device="cuda").to(dtype)
    check_op(qk_norm_rope, qk_norm_rope_reference, given, NORMS, **options)


def test_wide_weights():
    given = heads((2, 300, 16, 8, 128), torch.bfloat16)
    given |= {name: torch.randn(128, device="cuda") for name in ("q_weight", "k_weight")}
    got = check_op(qk_norm_rope, qk_norm_rope_reference, given, NORMS, cast_before_weight=True)
    assert got["out0"].dtype == torch.float32


def test_host_never_waits():
    given = heads((2, 64, 16, 8, 128), torch.bfloat16)
    given |= {name: torch.randn(128, device="cuda") for name in ("q_weight", "k_weight")}
    leaves = [given[name].requires_grad_() for name in NORMS]
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            turned = rope(leaves[0].transpose(1, 2), leaves[1].transpose(1, 2), given["cos"], given["sin"])
            torch.autograd.grad(turned, leaves[:2], [x.detach() for x in turned])
            normed = qk_norm_rope(**given)
            torch.autograd.grad(normed, leaves, [x.detach() for x in normed])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("heads_first", [False, True])
def test_offsets_beyond_32_bits(heads_first):
    """The last token of a batch of more than 2^31 elements gets what it gets alone."""
    B, S, hq, D = 2, 8200, 1024, 128
    assert B * S * hq * D > 2**31
    q = torch.empty((B, hq, S, D) if heads_first else (B, S, hq, D), dtype=torch.bfloat16, device="cuda")
    q = q.normal_().transpose(1, 2) if heads_first else q.normal_()
    k = torch.randn(B, S, 1, D, device="cuda").to(q)
    cos, sin = (x.to(q) for x in angles(B, S, D))
    weight = torch.ones(D, device="cuda").to(q)

    def both(q, k, cos, sin):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        normed = qk_norm_rope(q, k, weight, weight, cos, sin)
        results = [x[:, :, -3:].detach().clone() for x in (*turned, *normed)]
        for outputs in (turned, normed):
            grads = torch.autograd.grad(outputs, (q, k), [x.detach() for x in outputs])
            results += [x[:, -3:].clone() for x in grads]
            del outputs, grads
        return results

    expected = both(q[:, -3:], k[:, -3:], cos[:, -3:], sin[:, -3:])
    for x, y in zip(both(q, k, cos, sin), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
