"""Second derivatives of what runs in kernels: refused by every op, never silently wrong."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import PATHS, TRITON_DEVICE, random_inputs, set_path

from liger_trainer.kernels._low_rank import Adapter
from liger_trainer.kernels.gated_linear import gated_linear
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.lora_linear import lora_linear

KERNELS = Path(__file__).parents[2] / "kernels"


def test_every_backward_refuses_them():
    """Tests see the refusal of each op; this one, that no autograd function was forgotten."""
    functions = {
        f"{path.name}: {node.name}": [ast.unparse(x) for part in node.body for x in getattr(part, "decorator_list", ())]
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases)
    }
    assert len(functions) > 10
    assert not [name for name, decorators in functions.items() if "first_order" not in decorators]


@pytest.mark.skipif("triton" not in PATHS, reason="autograd's own formulas without Triton")
@pytest.mark.parametrize("op", ["lora_linear", "gated_linear"])
def test_backward_under_autocast(op, monkeypatch):
    """A loss whose backward is called within autocast has the gradients of one that is not."""
    set_path(monkeypatch, "triton")
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(TRITON_DEVICE).requires_grad_()

    x, weight, a, b = leaf(5, 8), leaf(6, 8), leaf(2, 8), leaf(6, 2)
    leaves = (x, a, b) if op == "lora_linear" else (x, weight)

    def loss() -> torch.Tensor:
        if op == "lora_linear":
            return lora_linear(x, weight.detach(), None, [Adapter(a, b, 2.0)]).square().sum()
        return gated_linear(x, None, weight[:, :4], activation="silu").square().sum()

    expected = torch.autograd.grad(loss(), leaves)
    again = loss()
    with torch.autocast(TRITON_DEVICE, torch.bfloat16):
        got = torch.autograd.grad(again, leaves)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_traced_losses_refuse_them():
    """Even where torch.compile leaves the opaque op to autograd, whose gradients hold constants."""
    tensors: dict[str, Any] = {**random_inputs(9, 6, 21)}
    hidden = tensors.pop("hidden").requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    loss = compiled(hidden, **tensors).loss
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)
