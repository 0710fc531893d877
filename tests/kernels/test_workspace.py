"""Memory that packed weights share: who gets it, and that the ops over it compute as over weights of their own."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import evaluate
from op_table import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_trainer.extras.selfcheck_cases import layer
from liger_trainer.kernels._triton import without_launches
from liger_trainer.kernels._workspace import SharedUnpack, Workspace
from liger_trainer.kernels.lora_linears import lora_linears
from liger_trainer.kernels.lora_mlp import lora_mlp

FP32, CPU = torch.float32, torch.device("cpu")


def test_one_at_a_time_has_the_memory():
    workspace = Workspace(12)
    with workspace.lent((3, 4), FP32, CPU) as first:
        with workspace.lent((3, 4), FP32, CPU) as second:
            assert first.data_ptr() != second.data_ptr()
        kept = first.data_ptr()
    for shape in ((12,), (2, 5)):
        with workspace.lent(shape, FP32, CPU) as again:
            assert again.data_ptr() == kept and again.shape == shape
    with workspace.lent((2, 5), torch.float64, CPU) as other, workspace.lent((13,), FP32, CPU) as larger:
        assert kept not in (other.data_ptr(), larger.data_ptr()) and larger.shape == (13,)


def test_memory_that_is_given_back_after_an_error():
    workspace = Workspace(4)
    with pytest.raises(KeyError), workspace.lent((4,), FP32, CPU) as first:
        raise KeyError
    with workspace.lent((4,), FP32, CPU) as second:
        assert second.data_ptr() == first.data_ptr()


def test_memory_that_inference_took_serves_training():
    workspace = Workspace(4)
    with torch.inference_mode(), workspace.lent((2, 2), FP32, CPU):
        pass
    x = torch.randn(3, 2, requires_grad=True)
    with workspace.lent((2, 2), FP32, CPU) as weight:
        weight.fill_(1.0)
        assert not (x @ weight).is_inference()


def test_a_copy_has_memory_of_its_own():
    workspace = Workspace(4)
    with workspace.lent((4,), FP32, CPU) as first, copy.deepcopy(workspace).lent((4,), FP32, CPU) as second:
        assert first.data_ptr() != second.data_ptr()


def test_tensors_without_data_are_kept_apart():
    workspace = Workspace(4)
    unpack = SharedUnpack(torch.clone, lambda packed, out: out.copy_(packed), (4,), FP32, workspace)
    addresses = []
    for mode in (FakeTensorMode(), None, FakeTensorMode(), None):
        weight = torch.arange(4.0) if mode is None else mode.from_tensor(torch.ones(4))
        with mode or nullcontext(), without_launches(), unpack.lent(weight) as out:
            assert (type(out) is torch.Tensor) == (mode is None)
            if mode is None:
                assert torch.equal(out, weight)
                addresses.append(out.data_ptr())
    assert len({*addresses}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_another_stream_has_memory_of_its_own():
    workspace, device = Workspace(4), torch.device("cuda", 0)
    with workspace.lent((4,), FP32, device) as first:
        pass
    with torch.cuda.stream(torch.cuda.Stream()), workspace.lent((4,), FP32, device) as second:
        assert second.data_ptr() != first.data_ptr()


def in_turns(projection: Any, workspace: Workspace, addresses: list[int]) -> Any:
    """The projection with its weight packed: transposed and doubled. What lies in the memory goes with each use."""

    def write(packed, out):
        addresses.append(out.data_ptr())
        out.copy_(packed.t() / 2)

    dense = projection.weight
    unpack = SharedUnpack(lambda packed: packed.t() / 2, write, dense.shape, dense.dtype, workspace)
    return replace(projection, weight=(dense * 2).t().contiguous(), unpack=unpack)


@pytest.mark.parametrize("op", ["lora_linears", "lora_mlp", "lora_mlp, remade"])
def test_weights_take_turns_in_forward_and_backward(op, triton_fp32):
    """The outputs and gradients are those of weights that stay, bit for bit, and no two weights lie side by side."""
    case, addresses = CASES[op], []
    tensors = case.inputs(triton_fp32)
    names = ("q", "k", "v") if op == "lora_linears" else ("gate", "up", "down")
    workspace = Workspace(max(x.numel() for name, x in tensors.items() if name.endswith("weight")))

    def run(shares: bool) -> dict[str, torch.Tensor]:
        def function(x, **given):
            projections = [layer(given, name) for name in names]
            if shares:
                projections = [in_turns(p, workspace, addresses) for p in projections]
            if op == "lora_linears":
                return lora_linears(x, projections)
            return lora_mlp(x, *projections, remake=op.endswith("remade"))

        return evaluate(function, tensors, None, leaves=case.leaves_of(tensors))

    got, want = run(True), run(False)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert len(addresses) == (8 if op.endswith("remade") else 6) and len(set(addresses)) == 1
