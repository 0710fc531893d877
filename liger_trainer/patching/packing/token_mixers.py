"""Layers that mix tokens otherwise than by attention: causal convolutions, the gated delta rule (Yang et al. 2024,
arXiv:2412.06464) and Mamba-2's scan (Dao & Gu 2024, arXiv:2405.21060), found by the functions that their modules call.

transformers' file of a model has `causal_conv1d_fn`, `torch_chunk_gated_delta_rule` and `mamba2_chunk_scan`, which run
kernels of the packages causal_conv1d, fla-core and mamba_ssm where these are installed. The instance gets a copy of its
forward that calls ours (`rebound` of compat/code_objects.py):

causal convolution    our op, which the function below transformers' decorator is proved to be
gated delta rule      fla-core's function, where it is installed, with chunks that are laid out on the device
Mamba-2's scan        products of torch (extras/mamba_scan.py), which that function is proved to be, where mamba_ssm is
                      absent

All read the documents of packed rows by their lengths, as attention does (packed_attention.py).
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.code_objects import closed_over, globals_read, rebound
from ...compat.modules import replaced_forward
from ...compat.recognitions import has_kernel, is_guarded_kernel
from ...kernels.runtime import is_interpreted
from ...plugins import load
from .. import structure
from ..options import PatchOptions, PatchReport
from .document_mask import Documents
from .packed_attention import documents_of

# The first parameters of the functions for many tokens, and of those for a token after what a cache holds.
_CONV = ["hidden_states", "weight", "bias", "activation"]
_RULE = ["query", "key", "value", "g", "beta", "chunk_size"]
_SCAN = ["hidden_states", "dt", "A", "B", "C", "chunk_size"]
_OF_ONE_TOKEN = (
    ["hidden_states", "conv_state"], ["query", "key", "value", "g", "beta", "initial_state"],
    ["state", "hidden_states", "dt", "A", "B", "C"],
)  # fmt: skip
_WHOLE = ["zxbcdt", "conv1d_weight"]  # a whole layer by mamba_ssm; without it, it returns None, or refuses packed rows
DELTA_RULE, MAMBA_SCAN = "delta rule", "Mamba-2 scan"
_ACTIVATIONS = (None, "silu", "swish")
CHUNK = 64  # tokens that fla-core computes at once
NO_FLA = "fla-core is not installed, so it runs in plain torch, which is much slower: `pip install fla-core einops`"


def patch_hybrids(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the causal convolutions, delta rules and scans in `model`, if `options.hybrids`."""
    if not options.hybrids:
        return
    for module in model.modules():
        kind = type(module)
        forward = before = kind.forward
        for name, function in _mixers_of(kind).items():
            what, why, ours = _in_its_place(function)
            if structure.is_replaced(module):
                why, ours = "its forward has been replaced", None
            if why is None:
                report.swap(what)
            else:
                report.leave(what if what == DELTA_RULE else f"{name} of {kind.__name__}", why)
            if ours is not None:
                forward = rebound(forward, name, function, ours)
            if what == MAMBA_SCAN and ours is not None:
                for whole, absent in globals_read(kind.forward, _is_absent_whole).items():
                    forward = rebound(forward, whole, absent, inspect.unwrap(absent))
        if forward is not before:
            replacements.forward(module, forward)


def _in_its_place(function: Callable) -> tuple[str, str | None, Callable | None]:
    """Return what a function is, why our own way is not taken if so, and what is called in its place, if anything."""
    if _begins(function, _CONV):
        why = why_no_conv(function)
        return "causal conv", why, None if why else convolution(function)
    if _begins(function, _SCAN):
        why = why_no_scan(function)
        return MAMBA_SCAN, why, None if why else scan(function)
    why = why_no_rule(function)
    return DELTA_RULE, why, delta_rule(function, by_fla=why is None) if why in (None, refused()) else None


def missing_for(model: nn.Module, function: Any, by_lengths: bool) -> str | None:
    """Say what a function of a modelling file lacks to keep documents apart in `model`, None where it does.

    Args:
        by_lengths: the model is patched, and its batches bring lengths, which our functions read.
    """
    known = any(_begins(function, names) for names in (_CONV, _RULE, _SCAN, _WHOLE, *_OF_ONE_TOKEN))
    if known and by_lengths and not _calls_others(model):
        return None
    if not has_kernel(function):
        return function.__name__
    return f"{function.__name__}: {why_no_rule(function)}" if _begins(function, _RULE) and refused() else None


def _calls_others(model: nn.Module) -> bool:
    """Whether a module of a model mixes many tokens by a function that is not ours, or none by one that is."""
    mixing = [module for module in model.modules() if _mixers_of(type(module))]
    forwards = [getattr(replaced_forward(module), "__func__", type(module).forward) for module in mixing]
    rules = [f for module in mixing for f in _mixers_of(type(module)).values() if _begins(f, _RULE)]
    by_torch = any(why_no_rule(rule) is not None for rule in rules)
    return not mixing or by_torch or any(globals_read(forward, _mixes_tokens) for forward in forwards)


def _mixes_tokens(function: Any) -> bool:
    return is_guarded_kernel(function) and not any(_begins(function, names) for names in _OF_ONE_TOKEN)


def _is_absent_whole(function: Any) -> bool:
    return is_guarded_kernel(function) and _begins(function, _WHOLE) and not has_kernel(function)


@functools.cache
def _mixers_of(kind: type) -> dict[str, Any]:
    """Return what the forward of a class calls that mixes tokens in a way we know, by the global names."""
    return globals_read(
        kind.forward,  # pyright: ignore[reportAttributeAccessIssue]
        lambda function: is_guarded_kernel(function) and any(_begins(function, k) for k in (_CONV, _RULE, _SCAN)),
    )


def _begins(function: Any, names: list[str]) -> bool:
    """Whether a function has these first parameters; a delta rule's for many tokens also its name, as others, with a
    decay for each column (Kimi), are called alike."""
    if names is _RULE and "gated_delta_rule" not in getattr(function, "__name__", ""):
        return False
    return list(inspect.signature(function).parameters)[: len(names)] == names


@functools.cache
def why_no_conv(function: Callable) -> str | None:
    """Say why a function is not our op, None where it is: values and gradients, with and without bias and SiLU."""
    from ...kernels.causal_conv import causal_conv_reference  # which other models need not wait for

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
            if not _agree(theirs, ours, inputs):
                return "it is no causal convolution that our op knows"
    return None


def _agree(theirs: Tensor, ours: Tensor, inputs: list[Tensor]) -> bool:
    """Whether two results and their gradients to the inputs are one, but for rounding."""
    if theirs.shape != ours.shape:
        return False
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(y, inputs, upstream) for y in (theirs, ours)]
    pairs = [(theirs, ours), *zip(*gradients, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


@functools.cache  # one function for all layers, so that torch.compile sees one
def convolution(function: Callable) -> Callable:
    """Return a function that is called like `function` and computed by our op."""
    from ...kernels.causal_conv import WIDEST, causal_conv

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


@functools.cache
def why_no_scan(function: Callable) -> str | None:
    """Say why Mamba-2's scan is left to a function, None where ours is the same: values and gradients."""
    if has_kernel(function):
        return "mamba_ssm computes it"
    with structure.on_miniatures():
        draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
        sizes = ((2, 9, 4, 3), (2, 9, 4), (4,), (2, 9, 2, 5), (2, 9, 2, 5), (4,), (4,))
        x, dt, A, B, C, D, bias = inputs = [draw(size).requires_grad_() for size in sizes]
        how = {"dt_softplus": True, "dt_limit": (0.1, 1.0)}
        try:
            theirs = inspect.unwrap(function)(x, dt, A, B, C, chunk_size=4, D=D, dt_bias=bias, z=None, **how)
        except (RuntimeError, TypeError, ValueError):
            return "it takes other tensors than ours"
        if not _agree(theirs, load("mamba_scan").mamba_scan(x, dt, A, B, C, D, bias, chunk=4, **how), inputs):
            return "it is no scan of Mamba-2 as we know it"
    return None


@functools.cache  # one function for all layers, so that torch.compile sees one
def scan(function: Callable) -> Callable:
    """Return a function that is called like transformers' and computed by `mamba_scan`, where it keeps no state."""
    mamba_scan = load("mamba_scan").mamba_scan

    def compute(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        **how: Any,
    ) -> Any:  # fmt: skip
        """Return (rows, length, heads, P), fp32. `how` may have the documents: `cu_seq_lens_q`."""
        ends = how.get("cu_seq_lens_q")
        kept = {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
        with_state = how.get("initial_states") is not None or how.get("return_final_states")
        if with_state or how.get("z") is not None or (ends is None and how.get("seq_idx") is not None):
            return function(hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, **kept, **how)
        if ends is None:
            return mamba_scan(hidden_states, dt, A, B, C, D, dt_bias, **kept)
        rows, length = dt.shape[:2]
        document = documents_of(ends, how).bounds(rows * length, dt.device)[:1]  # by its beginning
        x, dt, B, C = (tensor.flatten(0, 1)[None] for tensor in (hidden_states, dt, B, C))
        return mamba_scan(x, dt, A, B, C, D, dt_bias, document, **kept).view(rows, length, *x.shape[2:])

    return compute


def why_no_rule(function: Any) -> str | None:
    """Say why transformers' function of the delta rule does not run on fla-core, None where it does."""
    if not has_kernel(function):
        return NO_FLA
    if not (getattr(closed_over(function).get("implementation"), "__module__", None) or "").startswith("fla."):
        return "it runs a kernel of another package than fla-core"
    return refused()


@functools.cache
def refused() -> str | None:
    """Say why fla-core refuses the backward of the delta rule on this GPU, None where it does not.

    One of its kernels (`chunk_bwd_dqkwg`) has wrong results on Hopper with Triton 3.4.0 to 3.7.0, and raises there
    (its issue 640). From its release 0.6 on it takes a function of ours for that step (extras/delta_rule_gradients.py).
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or is_interpreted():
        return None
    import triton

    version = tuple(int(part) for part in triton.__version__.partition("+")[0].split(".")[:3])
    if not (3, 4, 0) <= version < (3, 7, 1) or importlib.util.find_spec("tilelang") is not None:
        return None
    if load("delta_rule").register_gradients():
        return None
    return (
        f"fla-core refuses its backward with Triton {triton.__version__} on Hopper GPUs, where its gradients would be "
        "wrong (fla issue 640), so it runs in plain torch, which is much slower: `pip install 'fla-core>=0.6'`"
    )


@functools.cache  # one function for all layers, so that torch.compile sees one
def delta_rule(function: Any, by_fla: bool) -> Callable:
    """Return a function that is called like transformers' and computed by fla-core's, which transformers has found.

    Args:
        by_fla: else, and on a CPU, by the function in plain torch, one document after the other.
    """
    plain, fla = inspect.unwrap(function), closed_over(function)["implementation"]

    def compute(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **how: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return (rows, length, heads, width), and with `output_final_state` the state behind it.

        Args:
            query, key: (rows, length, heads, width); values may have more heads, of another width.
            g, beta: (rows, length, heads of values).
            cu_seqlens: (documents + 1), where documents begin and end in the rows laid end to end.
        """
        rows, length = query.shape[:2]
        inputs: tuple[Tensor, ...] = (query, key, value, g, beta)
        runs_fla = by_fla and (not query.is_cpu or is_interpreted())
        normed: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            normed |= {"initial_state": initial_state, "output_final_state": output_final_state}
            return (fla if runs_fla else plain)(*inputs, **normed)
        documents = documents_of(cu_seqlens, how)
        inputs = tuple(x.flatten(0, 1)[None] for x in inputs)
        if runs_fla:
            ends, chunks = chunks_of(documents, rows * length, query.device)
            y = fla(*inputs, **normed, cu_seqlens=ends, chunk_indices=chunks)[0]
        else:
            lengths = [count for count in documents.lengths if count]
            parts = zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)
            y = torch.cat([plain(*part, **normed)[0] for part in parts], dim=1)
        return y.view(rows, length, *y.shape[2:]), None

    return compute


def chunks_of(documents: Documents, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ends of documents, an empty one behind them, and the document and the number in it of each chunk.

    There are as many chunks as so many documents can have, so that nothing depends on a number on the device. Those
    that are left over are of the empty document, in which fla-core's kernels read and write nothing. Both tensors are
    new for each batch and in each CUDA graph, since fla-core remembers by object what it makes of them.

    Returns:
        (documents + 2,) and (tokens // 64 + documents, 2), int32.
    """
    return documents.once("chunks", device, lambda ends: _chunks(ends.int(), tokens))


def _chunks(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    count = ends.shape[0] - 1
    ends = torch.cat([ends, ends[-1:]])
    chunks = (ends.diff() + (CHUNK - 1)) // CHUNK  # of each document
    last = chunks.cumsum(0)
    at = torch.arange(tokens // CHUNK + count, device=ends.device)
    document = torch.searchsorted(last, at, right=True).clamp(max=count)
    number = (at - (last - chunks)[document]).where(at < last[-1], 0)
    return ends, torch.stack([document, number], 1).int()
