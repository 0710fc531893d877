"""Launches that are kept, on a GPU: later ones equal the first, whatever the addresses, the stream and the device."""

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels import _gated, _triton
from liger_trainer.kernels.cross_entropy import cross_entropy
from liger_trainer.kernels.kl_div import kl_div
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu

pytestmark = pytest.mark.gpu
NAMES = (
    "swiglu", "rms_norm", "layer_norm", "rope", "qk_norm_rope", "kl_div", "cross_entropy", "linear_cross_entropy",
    "linear_divergence", "linear_sparse_divergence",
)  # fmt: skip


def random(*shape: int, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def gradients(op, *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = op(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])]


def cases(device: str = "cuda") -> dict:
    """Ops, each with its tensors: one way through every file that keeps launches."""
    heads, weight = random(2, 64, 4, 64, device=device), random(64, device=device)
    angles = random(1, 64, 64, device=device).cos(), random(1, 64, 64, device=device).sin()
    rows, width = random(512, 1024, device=device), random(1024, device=device)
    labels = torch.arange(512, device=device)
    some = labels.where(labels % 3 > 0, -100)  # so that the labelled rows are selected
    words = random(600, 1024, device=device)
    ids, log_probs = labels[:, None] + labels[:4], rows[:, :4].float().log_softmax(-1)
    return {
        "swiglu": (swiglu, rows, rows + 1),
        "rms_norm": (rms_norm, rows, width),
        "layer_norm": (layer_norm, random(5000, 1024, device=device), width, width),
        "rope": (lambda q, k: rope(q, k, *angles), heads.transpose(1, 2), heads.transpose(1, 2)),
        "qk_norm_rope": (lambda q, k, w: qk_norm_rope(q, k, w, w, *angles), heads, heads, weight),
        "kl_div": (lambda x: kl_div(x, rows, from_logits=True), rows * 2),
        "cross_entropy": (lambda x: cross_entropy(x, labels).loss, rows),
        "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w, some, num_items=1).loss, rows / 32, words),
        "linear_divergence": (
            lambda x, w: linear_divergence(x, w, rows / 32, words, labels=some, num_items=1).loss, rows / 16, words,
        ),
        "linear_sparse_divergence": (
            lambda x, w: linear_sparse_divergence(x, w, ids, log_probs, labels=some, num_items=1).loss,
            rows / 32, words,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_second_launch_equals_the_first(name):
    op, *tensors = cases()[name]
    first = gradients(op, *tensors)
    held = [x.clone() for x in first]
    for _ in range(3):
        torch.testing.assert_close(gradients(op, *tensors), held, rtol=0, atol=0)


def test_straight_to_the_kernel():
    gate, up = random(512, 1024), random(512, 1024)
    swiglu(gate, up)
    launch = _gated._flat_launch(_gated._forward_flat_kernel, gate.numel(), "silu", _gated.FORWARD)
    assert _triton._stream_of() is not None and len(launch._compiled) == 1


def test_addresses_that_16_does_not_divide():
    rows = random(513, 1024).flatten()
    for first in (0, 1, 8, 3):
        gate, up = rows[first : first + 2**19].view(512, 1024), rows[: 2**19].view(512, 1024)
        torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=2e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_that_is_not_current(name):
    op, *tensors = cases("cuda:0")[name]
    expected = gradients(op, *tensors)
    op, *tensors = cases("cuda:1")[name]
    for _ in range(2):
        got = gradients(op, *tensors)
        assert {x.device.index for x in got} == {1} and torch.cuda.current_device() == 0
        torch.testing.assert_close([x.cpu() for x in got], [x.cpu() for x in expected], rtol=1e-2, atol=1e-2)


def test_on_another_stream():
    op, *tensors = cases()["rms_norm"]
    expected = gradients(op, *tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = gradients(op, *tensors)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
