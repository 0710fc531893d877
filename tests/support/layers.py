"""Single layers, patched by one part and run next to their own forward."""

import copy

import torch
from torch import nn

from liger_trainer.common.replacements import Replacements
from liger_trainer.patching.options import PatchOptions, PatchReport


def layer(make, dtype=torch.float32) -> nn.Module:
    """Make a layer with weights that no initialisation gives."""
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return module.to(dtype)


def swapped(part, module, **options):
    """Return a copy of the module that a part has patched, and the report."""
    model, report = nn.Sequential(copy.deepcopy(module)), PatchReport("test")
    part(model, PatchOptions(**options), Replacements(), report)
    return model[0], report


def run(module, *inputs, autocast=False):
    """Return the output, and the gradients of the inputs and the parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(*inputs)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), *(x.grad for x in inputs), *(p.grad for p in module.parameters())


def assert_same(got, want, bound=2e-6):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - theirs).double().norm() <= bound * theirs.double().norm()


def changed(base, **methods):
    """Return a subclass in which some methods are others."""
    return type("Changed", (base,), methods)
