"""Second derivatives of what runs in kernels: refused by every op, never silently wrong."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import PATHS, TRITON_DEVICE, random_inputs, set_path

from liger_trainer.kernels._low_rank import Adapter
from liger_trainer.kernels.clamped_swiglu import clamped_swiglu
from liger_trainer.kernels.gated_linear import gated_linear
from liger_trainer.kernels.gated_mlp import gated_mlp
from liger_trainer.kernels.gated_rms_norm import gated_rms_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linears import linears
from liger_trainer.kernels.lora_experts import StackedProjection, lora_experts
from liger_trainer.kernels.lora_linear import lora_linear
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.relu2 import relu2
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu

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


def leaf_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(TRITON_DEVICE).requires_grad_()


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    return leaf_of(1, 5, 8).detach().cos(), leaf_of(1, 5, 8).detach().sin()


def adapter() -> list[Adapter]:
    return [Adapter(leaf_of(2, 8), leaf_of(6, 2), 1.0)]


def ids() -> torch.Tensor:
    return torch.arange(10, device=TRITON_DEVICE).view(5, 2) % 3


def experts(rows: int, columns: int) -> StackedProjection:
    return StackedProjection(leaf_of(3, rows, columns).detach())


OPS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "swiglu": (swiglu, (5, 8)),
    "relu2": (relu2, (5, 8)),
    "gated_linear": (lambda x: gated_linear(x, None, leaf_of(6, 4)), (5, 8)),
    "gated_mlp": (lambda x: gated_mlp(x, [leaf_of(8, 8), leaf_of(6, 4)]), (5, 8)),
    "linears": (lambda x: linears(x, [leaf_of(6, 8), leaf_of(4, 8)])[1], (5, 8)),
    "lora_linear": (lambda x: lora_linear(x, leaf_of(6, 8).detach(), None, adapter()), (5, 8)),
    "gated_rms_norm": (lambda x: gated_rms_norm(x, leaf_of(5, 8), leaf_of(8)), (5, 8)),
    "clamped_swiglu": (lambda x: clamped_swiglu(x, limit=1.0), (5, 8)),
    "lora_experts": (lambda x: lora_experts(x, ids(), leaf_of(5, 2), experts(8, 8), experts(8, 4)), (5, 8)),
    "rope": (lambda q: rope(q, q, *angles())[0], (1, 2, 5, 8)),
    "qk_norm_rope": (lambda q: qk_norm_rope(q, q, leaf_of(8), leaf_of(8), *angles())[0], (1, 5, 2, 8)),
}


@pytest.mark.skipif("triton" not in PATHS, reason="plain torch differentiates twice")
@pytest.mark.parametrize("op", OPS)
def test_kernels_refuse_them(op, monkeypatch):
    set_path(monkeypatch, "triton")
    function, shape = OPS[op]
    x = leaf_of(*shape)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(function(x).sum(), x, create_graph=True)


def test_traced_losses_refuse_them():
    """Even where torch.compile leaves the opaque op to autograd, whose gradients hold constants."""
    tensors: dict[str, Any] = {**random_inputs(9, 6, 21)}
    hidden = tensors.pop("hidden").requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    loss = compiled(hidden, **tensors).loss
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)
