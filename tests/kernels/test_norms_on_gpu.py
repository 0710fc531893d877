"""What only a GPU shows of the normalizations: bf16, the launch configuration of each size, offsets beyond 2^31."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elementwise_checks import check_op
from norm_checks import random_tensors

from liger_trainer.kernels import layer_norm as layer_norm_module
from liger_trainer.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from liger_trainer.kernels.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.rms_norm import rms_norm, rms_norm_reference

pytestmark = pytest.mark.gpu

NAMES = {
    rms_norm: (rms_norm_reference, ("x", "weight")),
    add_rms_norm: (add_rms_norm_reference, ("x", "residual", "weight")),
    layer_norm: (layer_norm_reference, ("x", "weight", "bias")),
}
# Each size of tile, exact and not; H 16384 and above prefetches nothing.
SHAPES = [(2048, 4096), (2047, 1024), (333, 2560), (4099, 128), (77, 576), (512, 8192), (130, 20000), (3, 65536)]


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Also where torch's layer_norm would stand for ours."""
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", -1)


def inputs(op, shape, dtype, weight_dtype=None):
    return random_tensors(shape, SimpleNamespace(device="cuda", dtype=dtype), NAMES[op][1], weight_dtype)


@pytest.mark.parametrize("op", NAMES, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_sizes(op, shape, dtype, frozen):
    reference, names = NAMES[op]
    tensors = inputs(op, shape, dtype)
    check_op(op, reference, tensors, [k for k in names if k not in ("weight", "bias")] if frozen else names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stands_for_small_layer_norms_is_within_the_bound(dtype, monkeypatch):
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", 2**22)
    tensors = inputs(layer_norm, (512, 4096), dtype)
    y: Any = layer_norm(**{k: x.detach().requires_grad_() for k, x in tensors.items()})
    assert y.grad_fn.name() == "NativeLayerNormBackward0"
    check_op(layer_norm, layer_norm_reference, tensors, NAMES[layer_norm][1])


@pytest.mark.parametrize("op", [rms_norm, add_rms_norm], ids=lambda op: op.__name__)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cast_before_weight(op, weight_dtype):
    reference, names = NAMES[op]
    tensors = inputs(op, (1024, 2048), torch.bfloat16, weight_dtype)
    check_op(op, reference, tensors, names, cast_before_weight=True, offset=0.5)


def test_bf16_is_rounded_where_the_models_round_it():
    """All but the entries at which rstd's last bit decides."""
    x, weight = inputs(rms_norm, (2048, 4096), torch.bfloat16).values()
    for cast in (False, True):
        expected = rms_norm_reference(x, weight, cast_before_weight=cast)
        assert (rms_norm(x, weight, cast_before_weight=cast) == expected).float().mean() > 0.999


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("op", NAMES, ids=lambda op: op.__name__)
def test_offsets_beyond_32_bits(op):
    """The last rows alone must give what they give among the others."""
    _, names = NAMES[op]
    H, N = 8192, 2**18 + 3
    tensors = {k: torch.rand(H, device="cuda", dtype=torch.bfloat16) for k in names if k in ("weight", "bias")}
    tail = {k: torch.randn(5, H, device="cuda", dtype=torch.bfloat16) for k in names if k not in tensors}
    whole = {k: torch.zeros(N, H, device="cuda", dtype=torch.bfloat16) for k in tail}
    assert whole["x"].numel() > 2**31
    for k, x in whole.items():
        x[-5:] = tail[k]

    def run(rows):
        leaves = {k: (rows | tensors)[k].requires_grad_() for k in names}
        outputs = op(**leaves)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        grads = torch.autograd.grad([y[-5:].float().square().sum() for y in outputs], list(leaves.values()))
        return [t[-5:] if t.dim() == 2 else t for t in (*outputs, *grads)]

    torch.testing.assert_close(run(whole), run(tail))


@pytest.mark.parametrize("op", NAMES, ids=lambda op: op.__name__)
def test_host_never_waits(op):
    tensors = {k: x.requires_grad_() for k, x in inputs(op, (512, 1024), torch.bfloat16).items()}
    for mode in ("default", "error"):  # the first run compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outputs = op(**tensors)
            outputs = outputs if isinstance(outputs, torch.Tensor) else sum(outputs)
            outputs.backward(torch.ones_like(outputs))
        finally:
            torch.cuda.set_sync_debug_mode("default")
