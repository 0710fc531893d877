"""MLPs whose adapters' terms are in the activation's kernels: ranks, sizes, and when they are not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import CUDA, Place, check, evaluate
from op_table import CASES, packed, ranks

from liger_trainer.kernels import lora_mlp

MLP = CASES["lora_mlp"]


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the fused passes that run."""
    calls: list[str] = []
    for name in ("forward_with_terms", "backward_with_terms"):
        function = getattr(lora_mlp, name)
        monkeypatch.setattr(lora_mlp, name, lambda *args, n=name, f=function: (calls.append(n), f(*args))[1])
    return calls


def half(like: Place) -> Place:
    return like._replace(dtype=torch.float16)


def inputs(like: Place, each: tuple[int, int, int], *, is_packed: bool = False, **sizes: int) -> dict[str, Any]:
    """A gated MLP with one adapter of each of these ranks on gate, up and down; packed gate and up have the first's."""
    gate, up, down = ((rank,) for rank in each)
    change = ranks(gate=gate, up=up, down=down)
    if is_packed:
        join = packed("gate_weight", "up_weight")
        change = lambda tensors, draw: ranks(gate=gate, down=down)(join(tensors, draw), draw)  # noqa: E731
    return replace(MLP, change=change).inputs(like, **sizes)


@pytest.mark.parametrize("each", [(1, 1, 1), (3, 17, 5), (16, 16, 16), (64, 8, 33)], ids=str)
@pytest.mark.parametrize("rows, inner", [(1, 16), (45, 21), (64, 32), (0, 21)], ids=str)
@pytest.mark.parametrize("is_packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * CUDA, ids=str)
def test_ranks_and_sizes(triton_fp32, launched, monkeypatch, each, rows, inner, is_packed, dtype):
    """Output and all gradients against fp64."""
    monkeypatch.setattr(lora_mlp, "MOST_RANK", 64)
    tensors = inputs(triton_fp32._replace(dtype=dtype), each, is_packed=is_packed, rows=rows, inner=inner)
    check(MLP.function, MLP.reference, tensors, None, leaves=MLP.leaves_of(tensors))
    assert launched == ["forward_with_terms", "backward_with_terms"]


@pytest.mark.parametrize("frozen", ["x", "gate_a0 up_b0", "down_a0", "gate_b0 up_b0 down_b0"])
def test_frozen_parts(triton_fp32, frozen):
    tensors = inputs(half(triton_fp32), (4, 3, 2), rows=45, inner=29)
    check(MLP.function, MLP.reference, tensors, None, frozen.split(), MLP.leaves_of(tensors))


def test_a_second_backward_and_gate_and_up_made_again_give_the_same_bits(triton_fp32, launched):
    tensors = inputs(half(triton_fp32), (4, 3, 2), rows=45, inner=29)
    leaves = MLP.leaves_of(tensors)
    y = MLP.function(**{k: x.requires_grad_(k in leaves) for k, x in tensors.items()})
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, [tensors[k] for k in leaves], dy, retain_graph=True)
    second = torch.autograd.grad(y, [tensors[k] for k in leaves], dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    kept, again = (evaluate(MLP.function, tensors, None, leaves=leaves, remake=remake) for remake in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert len(launched) == 3 + 2 + 2


@pytest.mark.parametrize("why", ["rank", "none on up", "two on down", "wider", "fp32"])
def test_others_have_products_of_their_own(triton_fp32, launched, why):
    each = {"rank": (65, 4, 4)}.get(why, (4, 4, 4))
    tensors = inputs(triton_fp32 if why in ("wider", "fp32") else half(triton_fp32), each, rows=45, inner=29)
    if why == "none on up":
        del tensors["up_a0"], tensors["up_b0"]
    elif why == "two on down":
        tensors |= {"down_a1": tensors["down_a0"].clone(), "down_b1": tensors["down_b0"].clone()}
    elif why == "wider":
        tensors = {k: x if k.endswith(("a0", "b0")) else x.half() for k, x in tensors.items()}
    check(MLP.function, MLP.reference, tensors, None, leaves=MLP.leaves_of(tensors))
    assert not launched
