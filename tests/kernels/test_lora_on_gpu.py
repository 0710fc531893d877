"""What only a GPU shows of adapters on the head: bf16, fp32 logits under bf16 products, ranks that no tile divides."""

import pytest
import torch
from kernel_checks import LEAVES, check, random_inputs, random_pair

from liger_trainer.kernels._chunking import RowSelection
from liger_trainer.kernels._head import Lora
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence, linear_divergence_reference

pytestmark = pytest.mark.gpu
N, H, V = 1000, 576, 32003


def adapted(tensors: dict, rank: int) -> dict:
    generator = torch.Generator().manual_seed(3)
    like = tensors["weight"]
    a, b = torch.randn(rank, H, generator=generator) / rank**0.5, torch.randn(V, rank, generator=generator) / 2
    return tensors | {"a": a.to(like), "b": b.to(like)}


def with_adapter(op):
    return lambda a, b, **tensors: op(**tensors, lora=Lora(a, b, 0.7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank, recompute", [(16, False), (16, True), (3, False), (3, True)])
def test_cross_entropy(dtype, rank, recompute):
    tensors = adapted(random_inputs(N, H, V, dtype=dtype, device="cuda", ignored=0.3), rank)
    ops = with_adapter(linear_cross_entropy), with_adapter(linear_cross_entropy_reference)
    leaves = (*LEAVES, "a", "b")
    check(*ops, tensors, 3.0, frozen=("weight",), leaves=leaves, recompute=recompute, workspace_mb=16)


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_divergence(logits_dtype):
    tensors = adapted(random_pair(N, H, 96, V, dtype=torch.bfloat16, device="cuda", ignored=0.3), 16)
    ops = with_adapter(linear_divergence), with_adapter(linear_divergence_reference)
    check(*ops, tensors, leaves=(*LEAVES, "a", "b"), logits_dtype=logits_dtype, workspace_mb=32)


def test_host_never_waits():
    tensors = adapted(random_inputs(N, H, V, dtype=torch.bfloat16, device="cuda", ignored=0.3), 16)
    for name in ("a", "b"):  # as PEFT keeps them
        tensors[name] = tensors[name].float().requires_grad_()
    tensors["hidden"].requires_grad_()
    for mode in ("default", "error"):  # compiled in the first round
        num_items = torch.tensor(300, device="cuda")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rows = RowSelection(tensors["labels"], num_items)
            with_adapter(linear_cross_entropy)(**tensors, rows=rows).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert tensors["a"].grad.dtype == tensors["b"].grad.dtype == torch.float32
