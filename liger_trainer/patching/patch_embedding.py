"""Patches of images, embedded by a product of matrices.

A tower cuts an image into patches by a convolution whose steps are as long as its kernel. That is a linear layer of
each patch; cuDNN has no fast convolution for such kernels in 16 bits. What the convolution returns has its channels
before the patches, and the module transposes it, so that every sum with the residual stream is transposed in memory,
and each norm copies its input first. The product writes contiguous rows.
"""

import inspect
import itertools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..common.replacements import Replacements
from . import structure
from .options import PatchOptions, PatchReport

KIND = "patch embedding"
_TRANSPOSES = frozenset(("transpose", "permute", "mT"))


def patch_patch_embedding(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have convolutions over patches, whose output is transposed, computed as products."""
    for module in model.modules() if options.towers else ():
        for conv in _convolutions(module):
            # its hooks go on running, such as the one by which checkpointing has embeddings require gradients
            if conv not in replacements and "forward" not in vars(conv) and structure.obstacle(conv) is None:
                replacements.forward(conv, embed_patches)
                report.swap(KIND)


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Return a module's convolutions over patches, if it transposes their output and reads no layout by `view`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or _TRANSPOSES.isdisjoint(code.co_names) or "view" in code.co_names:
        return []
    return [child for child in module.children() if _cuts_patches(child)]


def _cuts_patches(conv: Any) -> bool:
    if type(conv) not in (nn.Conv2d, nn.Conv3d) or conv.kernel_size != conv.stride or conv.groups != 1:
        return False
    return (conv.padding == "valid" or not any(conv.padding)) and set(conv.dilation) == {1}


def embed_patches(conv: Any, x: Tensor) -> Tensor:
    """Return conv(x), (images, channels, patches of each side), with the channels last in memory.

    Args:
        conv: its steps are as long as its kernel.
        x: (images, colours, pixels of each side). Sides that no number of patches fills go to the convolution.
    """
    sizes, kernel = x.shape[2:], conv.kernel_size
    if x.dim() != 2 + len(kernel) or any(n % k for n, k in zip(sizes, kernel, strict=True)):
        return type(conv).forward(conv, x)
    count = [n // k for n, k in zip(sizes, kernel, strict=True)]
    split = x.reshape(*x.shape[:2], *itertools.chain(*zip(count, kernel, strict=True)))
    sides = range(2, split.dim(), 2)
    patches = split.permute(0, *sides, 1, *(i + 1 for i in sides)).flatten(1 + len(count))
    return F.linear(patches, conv.weight.flatten(1), conv.bias).movedim(-1, 1)
