"""Layers that mix tokens beside attention: causal convolutions, found by the function that their modules call.

transformers' file of a model has `causal_conv1d_fn`, which runs a kernel of the package causal_conv1d where that is
installed. The function below its decorator is proved to be our op, and the instance gets a copy of its forward that
calls ours (`rebound` of compat/code_objects.py). Ours reads the documents of packed rows by their lengths, as attention
does (packed_attention.py).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.code_objects import globals_read, rebound
from ...compat.modules import replaced_forward
from ...compat.recognitions import is_guarded_kernel
from ...kernels.causal_conv import WIDEST, causal_conv, causal_conv_reference
from .. import structure
from ..options import PatchOptions, PatchReport
from .packed_attention import documents_of

KIND = "causal conv"
# The first parameters of the function for many tokens, and of the one for a token after those that a cache holds.
_OF_TOKENS, _OF_ONE_TOKEN = ["hidden_states", "weight", "bias", "activation"], ["hidden_states", "conv_state"]
_ACTIVATIONS = (None, "silu", "swish")


def patch_convs(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the causal convolutions in `model`, if `options.hybrids`."""
    if not options.hybrids:
        return
    for module in model.modules():
        kind = type(module)
        for name, before in _convs_of(kind).items():
            why = "its forward has been replaced" if structure.is_replaced(module) else why_no_conv(before)
            if why is not None:
                report.leave(f"{name} of {kind.__name__}", why)
                continue
            replacements.forward(module, rebound(kind.forward, name, before, replacement(before)))
            report.swap(KIND)


def is_ours(function: Any, model: nn.Module) -> bool:
    """Whether a function of a modelling file is a causal convolution that no module of a patched model calls.

    The function for one token counts with the other: it is called only with a cache, which packed rows have not.
    """
    if not _begins(function, _OF_TOKENS) and not _begins(function, _OF_ONE_TOKEN):
        return False
    convs = [module for module in model.modules() if _convs_of(type(module))]
    forwards = [getattr(replaced_forward(module), "__func__", type(module).forward) for module in convs]
    return bool(convs) and not any(globals_read(forward, _of_others) for forward in forwards)


def _of_others(function: Any) -> bool:
    """Whether a function mixes many tokens, and not by our convolution."""
    return is_guarded_kernel(function) and not _begins(function, _OF_ONE_TOKEN)


@functools.cache
def _convs_of(kind: type) -> dict[str, Any]:
    """Return the causal convolutions that the forward of a class calls, by their global names."""
    return globals_read(kind.forward, _is_conv)  # pyright: ignore[reportAttributeAccessIssue]


def _is_conv(function: Any) -> bool:
    return is_guarded_kernel(function) and _begins(function, _OF_TOKENS)


def _begins(function: Any, names: list[str]) -> bool:
    return list(inspect.signature(function).parameters)[: len(names)] == names


@functools.cache
def why_no_conv(function: Callable) -> str | None:
    """Say why a function is not our op, None where it is: values and gradients, with and without bias and SiLU."""
    plain = inspect.unwrap(function)
    with structure.on_miniatures():
        draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
        for activation, bias in ((None, None), ("silu", None), ("silu", draw(6))):
            x, weight = draw(2, 9, 6).transpose(1, 2), draw(6, 4)
            inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
            try:
                theirs = plain(*inputs[:2], bias, activation=activation)
            except (RuntimeError, TypeError, ValueError):
                return "it takes other tensors than our op"
            ours = causal_conv_reference(x.transpose(1, 2), weight, bias, silu=activation == "silu").transpose(1, 2)
            upstream = draw(2, 6, 9)
            pairs = [(theirs, ours)] if theirs.shape == ours.shape else []
            if pairs:
                gradients = [torch.autograd.grad(y, inputs, upstream) for y in (theirs, ours)]
                pairs += zip(*gradients, strict=True)
            if not pairs or not all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs):
                return "it is no causal convolution that our op knows"
    return None


@functools.cache  # one function for all layers, so that torch.compile sees one
def replacement(function: Callable) -> Callable:
    """Return a function that is called like `function` and computed by our op."""

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **how: Any
    ) -> Tensor:
        """Return (rows, channels, length), as `hidden_states` is. `how` may have the documents: `cu_seq_lens_q`."""
        ends = how.get("cu_seq_lens_q")
        known = activation in _ACTIVATIONS and weight.shape[-1] <= WIDEST
        if not known or (ends is None and how.get("seq_idx") is not None):
            return function(hidden_states, weight, bias, activation=activation, **how)
        x, bounds = hidden_states.transpose(1, 2), None
        if ends is not None:
            documents = documents_of(ends, how)
            ends, bounds = documents.ends, documents.bounds(x.shape[0] * x.shape[1], x.device)
        return causal_conv(x, weight, bias, ends, silu=activation is not None, bounds=bounds).transpose(1, 2)

    return convolve
