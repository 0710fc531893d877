"""lora_experts on a GPU: grouped products of bf16, without waiting, within the error of plain torch. Seconds."""

import pytest
import torch
from elementwise_checks import check_op
from expert_checks import experts, inputs, leaves_of

from liger_trainer.kernels._packed_gate import Gate
from liger_trainer.kernels.lora_experts import SILU, lora_experts, lora_experts_reference

pytestmark = pytest.mark.gpu
GATES = {
    "silu": SILU,
    "gelu": Gate("gelu_tanh", "up first"),
    "gpt-oss": Gate(layout="interleaved", limit=7.0, alpha=1.702, shift=1.0),
}
# sizes, ranks: odd ones run expert by expert; ranks that 8 does not divide are filled up
SIZES = {
    "grouped": dict(tokens=300, count=16, top=4, width=256, inner=384, ranks=(16, 16)),
    "few rows, many experts": dict(tokens=5, count=64, top=2, width=128, inner=64, ranks=(8, 8)),
    "an expert without rows": dict(tokens=70, count=6, top=2, width=128, inner=2048, ranks=(16, 16), skip=0),
    "odd ranks": dict(tokens=70, count=6, top=2, width=128, inner=64, ranks=(5, 20)),
    "odd sizes": dict(tokens=70, count=6, top=2, width=100, inner=60, ranks=(4, 4)),
}


CASES = [
    *(("silu", size, dtype) for size in SIZES for dtype in (torch.bfloat16, torch.float32)),
    *((gate, "grouped", torch.bfloat16) for gate in GATES if gate != "silu"),
]


@pytest.mark.parametrize(("gate", "size", "dtype"), CASES, ids=str)
def test_on_a_gpu(gate, size, dtype):
    options = dict(SIZES[size])
    tensors = inputs(options.pop("tokens"), {"dtype": dtype, "device": "cuda"}, bias=gate == "gpt-oss", **options)
    check_op(experts(lora_experts), experts(lora_experts_reference), tensors, leaves_of(tensors), gate=GATES[gate])


def test_fp32_adapters_over_bf16_experts_never_wait():
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    tensors = inputs(512, like, count=16, top=4, width=256, inner=128, ranks=(16, 16), wide=torch.float32)
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    for mode in ("default", "error"):  # the first compiles kernels, and asks the device what it is
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gradients = torch.autograd.grad(experts(lora_experts)(**tensors, gate=SILU).sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(g.dtype == x.dtype and g.isfinite().all() for g, x in zip(gradients, leaves, strict=True))
