"""Triton where it is installed; else a stand-in under which the op files still import (CPU builds of torch)."""

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # what @triton.jit compiles is not Python to a type checker
    INSTALLED: bool
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = SimpleNamespace(jit=lambda function: function)
        tl = SimpleNamespace(constexpr=None)
        INSTALLED = False
    else:
        INSTALLED = True

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: Tensor) -> bool:
    """Whether ops on x launch Triton kernels: on any accelerator, and on CPU tensors under the interpreter.

    The interpreter computes in numpy, which has no bf16; those tensors take the torch path.
    """
    if x.device.type != "cpu":
        return INSTALLED
    return INSTALLED and INTERPRETED and x.element_size() in (2, 4) and str(x.dtype) != "torch.bfloat16"


__all__ = ["INSTALLED", "INTERPRETED", "tl", "triton", "use_triton"]
