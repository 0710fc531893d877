"""Mamba-2's scan by products: values and gradients are those of the recurrence, documents those of single rows."""

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from liger_trainer.extras import mamba_scan as scanning
from liger_trainer.extras.mamba_scan import mamba_scan
from liger_trainer.patching.packing import token_mixers

if not hasattr(granite, "mamba2_chunk_scan"):
    pytest.skip("this transformers has no function for the scan", allow_module_level=True)

NAMES = ("x", "dt", "A", "B", "C", "D", "bias")


def inputs(rows, length, heads=6, groups=2, width=4, states=5, dtype=torch.float64):
    sizes = [(rows, length, heads, width), (rows, length, heads), (heads,), *[(rows, length, groups, states)] * 2]
    drawn = [torch.randn(size, dtype=torch.float64) for size in (*sizes, (heads,), (heads,))]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def numbers_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def recurrence(x, dt, A, B, C, D, bias, document=None):
    """Token after token, as the definition says."""
    heads = x.shape[2]
    dt = torch.nn.functional.softplus(dt + bias)
    B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    state, ys = x.new_zeros(x.shape[0], heads, B.shape[-1], x.shape[-1]), []
    for t in range(x.shape[1]):
        if document is not None and t:
            state = state * (document[:, t] == document[:, t - 1]).to(x.dtype)[:, None, None, None]
        decay, u = torch.exp(A * dt[:, t]), dt[:, t, :, None] * x[:, t]
        state = state * decay[..., None, None] + B[:, t, :, :, None] * u[:, :, None]
        ys.append((C[:, t, :, :, None] * state).sum(2) + D[:, None] * x[:, t])
    return torch.stack(ys, 1)


def outcome(function, given, upstream, *how, **more):
    leaves = [tensor.detach().to(upstream.dtype if tensor.is_floating_point() else None) for tensor in given]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    x, dt, log_decay, *rest = leaves
    y = function(x, dt, -log_decay.exp(), *rest, *how, **more)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def distance(got, want):
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(
    "length, chunk, lengths",
    [(37, 8, None), (300, 128, None), (1, 8, None), (301, 64, (5, 1, 2, 70, 64, 3, 156)), (40, 8, (8, 8, 24))],
)
def test_values_and_gradients_are_those_of_the_recurrence(length, chunk, lengths):
    given = inputs(1 if lengths else 2, length)
    document = None if lengths is None else numbers_of(lengths)
    upstream = torch.randn_like(given[0])
    want = outcome(recurrence, given, upstream, document)
    plain = outcome(recurrence, given, upstream.float(), document)
    got = outcome(mamba_scan, given, upstream.float(), document, chunk=chunk)
    theirs = outcome(transformers_scan(chunk), given, upstream.float()) if document is None else plain
    for name, one, other, own, true in zip(("y", *NAMES), got, plain, theirs, want, strict=True):
        assert distance(one, true) <= 2 * max(distance(other, true), distance(own, true)) + 1e-6, name


def transformers_scan(chunk):
    plain = granite.mamba2_chunk_scan.__wrapped__

    def scan(x, dt, A, B, C, D, bias):
        return plain(x, dt, A, B, C, chunk_size=chunk, D=D, dt_bias=bias, dt_softplus=True)

    return scan


def test_half_precision_is_computed_in_fp32_under_autocast_too():
    given = inputs(2, 50, dtype=torch.bfloat16)
    upstream = torch.randn(2, 50, 6, 4)
    want = outcome(mamba_scan, given, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        got = mamba_scan(*[g.detach() if i != 2 else -g.detach().float().exp() for i, g in enumerate(given)])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want[0])


def test_a_layer_keeps_its_inputs_alone():
    given, kept = inputs(1, 256, dtype=torch.float32), []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mamba_scan(*given)
    assert {id(tensor) for tensor in kept} <= {id(tensor) for tensor in given}


def test_the_largest_temporary_is_of_pairs_within_chunks():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    type(self).most = max(self.most, tensor.untyped_storage().nbytes())
            return result

    given = inputs(1, 256, heads=8, groups=1, width=16, states=32, dtype=torch.float32)
    with Largest():
        mamba_scan(*given, chunk=64).sum().backward()
    assert Largest.most == 8 * 256 * 64 * 8  # differences in fp64


def test_another_scan_is_left_alone():
    plain = granite.mamba2_chunk_scan.__wrapped__
    assert token_mixers.why_no_scan(granite.mamba2_chunk_scan) is None

    def bound(implementation):
        is_new_implementation = False

        def wrapped(*args, **kwargs):
            return None if is_new_implementation else implementation(*args, **kwargs)

        wrapped.__wrapped__ = implementation
        return wrapped

    def louder(*args, **kwargs):
        return 1.01 * plain(*args, **kwargs)

    assert token_mixers.why_no_scan(bound(plain)) is None
    assert "no scan of Mamba-2" in token_mixers.why_no_scan(bound(louder))


def test_a_state_that_is_kept_is_transformers(monkeypatch):
    monkeypatch.setattr(scanning, "_scan", None)
    function = token_mixers.scan(granite.mamba2_chunk_scan)
    x, dt, A, B, C, D, bias = (tensor.detach().float() for tensor in inputs(1, 10))
    y, state = function(x, dt, -A.exp(), B, C, 4, D, bias, dt_softplus=True, return_final_states=True)
    assert y.shape == x.shape and state.shape == (1, 6, 4, 5)
