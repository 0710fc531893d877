"""Second derivatives of what runs in kernels: refused by every op, never silently wrong."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import random_inputs

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy

KERNELS = Path(__file__).parents[2] / "kernels"


def test_every_backward_refuses_them():
    """Each test of an op sees the refusal; this one, that no autograd function was forgotten."""
    functions = {
        f"{path.name}: {node.name}": [ast.unparse(x) for part in node.body for x in getattr(part, "decorator_list", ())]
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases)
    }
    assert len(functions) > 10
    assert not [name for name, decorators in functions.items() if "first_order" not in decorators]


def test_traced_losses_refuse_them():
    """Even where torch.compile leaves the opaque op to autograd, whose gradients hold constants."""
    tensors: dict[str, Any] = {**random_inputs(9, 6, 21)}
    hidden = tensors.pop("hidden").requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    loss = compiled(hidden, **tensors).loss
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)
