"""Linear layers behind a norm: their backward makes the norm's output again instead of keeping it."""

from functools import partial

import pytest
import torch
from kernel_checks import PATHS

from liger_trainer.kernels import layer_norm as layer_norm_module
from liger_trainer.kernels import rms_norm as rms_norm_module
from liger_trainer.kernels._autograd import note_recomputable
from liger_trainer.kernels._low_rank import Adapter, Projection
from liger_trainer.kernels.gated_mlp import gated_mlp
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linears import linears
from liger_trainer.kernels.lora_linears import lora_linears
from liger_trainer.kernels.lora_mlp import lora_mlp
from liger_trainer.kernels.rms_norm import rms_norm, rms_norm_reference

pytestmark = pytest.mark.skipif("triton" not in PATHS, reason="plain torch keeps what autograd asks for")
N, H, INNER = 6, 16, 12
NORMS = {
    "rms": lambda x, w, b: rms_norm(x, w, 1e-6, cast_before_weight=True),
    "rms without weight": lambda x, w, b: rms_norm(x, None),
    "layer": layer_norm,
}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapters(rows, columns, seed):
    return (
        Adapter(seeded(3, columns, seed=seed).requires_grad_(), seeded(rows, 3, seed=seed + 1).requires_grad_(), 2.0),
    )


def projection(rows, columns, seed):
    return Projection(seeded(rows, columns, seed=seed), None, adapters(rows, columns, seed + 10))


def trained(y):
    weights = [seeded(INNER, H, seed=seed).requires_grad_() for seed in (3, 4)]
    return linears(y, weights), weights


def low_rank(y):
    parts = [projection(INNER, H, seed) for seed in (3, 4)]
    return lora_linears(y, parts), [leaf for p in parts for a in p.adapters for leaf in a[:2]]


def mlp(y):
    parts = [projection(INNER, H, 3), projection(INNER, H, 4), projection(H, INNER, 5)]
    return (lora_mlp(y, *parts),), [leaf for p in parts for a in p.adapters for leaf in a[:2]]


def remade_mlp(y):
    weights = [
        seeded(*shape, seed=seed).requires_grad_()
        for seed, shape in ((3, (INNER, H)), (4, (INNER, H)), (5, (H, INNER)))
    ]
    return (gated_mlp(y, weights),), weights


OPS = {"linears": trained, "lora_linears": low_rank, "lora_mlp": mlp, "gated_mlp": remade_mlp}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch):
    for module in (rms_norm_module, layer_norm_module):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", 0)


def step(norm, op, between=lambda y: y, autocast=None):
    """Return (outputs, gradients, shapes and addresses of what the ops behind the norm keep, its output's address)."""
    x, w, b = (t.requires_grad_() for t in (seeded(N, H), seeded(H, seed=1), seeded(H, seed=2)))
    kept = []
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = between(NORMS[norm](x, w, b))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
            outputs, leaves = OPS[op](y)
    leaves = [x, *leaves, *([] if norm == "rms without weight" else [w])]
    gradients = torch.autograd.grad(sum(o.float().square().sum() for o in outputs), leaves)
    return outputs, gradients, kept, y.data_ptr(), x.data_ptr()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_the_output_is_not_kept_and_the_gradients_are_the_same(norm, op, autocast):
    outputs, gradients, kept, y, x = step(norm, op, autocast=autocast)
    assert x in kept and y not in kept
    # a view of the output is another tensor, of which nothing is noted
    others, wanted, kept, y, x = step(norm, op, between=lambda y: y.view(N, H), autocast=autocast)
    assert x not in kept and (autocast is not None or y in kept)
    for a, b in zip([*outputs, *gradients], [*others, *wanted], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_an_output_that_was_written_into_is_kept(op):
    def doubled(y):
        with torch.no_grad():
            y.mul_(2)
        return y

    outputs, gradients, kept, y, x = step("rms", op, between=doubled)
    assert y in kept and x not in kept


def of_adapters(dtype, noted, offset=0.0, weighted=True, dropped=0.0):
    """Return (dA of each adapter, how often the norm was made again)."""
    x, w = seeded(4 * N, H, seed=6).mul(9).to(dtype).requires_grad_(), seeded(H, seed=1).to(dtype)
    y = rms_norm_reference(x, w if weighted else None, 1e-6, offset=offset, cast_before_weight=True)
    made = []
    if noted:
        rstd = x.detach().float().square().mean(-1).add(1e-6).rsqrt()
        parameters, scaled = (w if weighted else None, rstd), partial(rms_norm_module._scaled, offset)
        note_recomputable(y, lambda *_: (made.append(1), y.detach())[1], x, *parameters, scaled=scaled)
    parts = []
    for p in (projection(INNER, H, seed) for seed in (3, 4)):
        a, b = (t.detach().to(dtype) for t in p.adapters[0][:2])
        parts.append(Projection(p.weight.to(dtype), None, (Adapter(a.requires_grad_(), b, 2.0, dropped),)))
    outputs = lora_linears(y, parts)
    upstream = [seeded(*o.shape, seed=9).to(torch.bfloat16).to(dtype) for o in outputs]
    return torch.autograd.grad(outputs, [p.adapters[0].a for p in parts], upstream), len(made)


@pytest.mark.parametrize(("offset", "weighted"), [(0.0, True), (1.0, True), (0.0, False)])
def test_the_gradient_of_a_needs_no_norm_in_bf16(offset, weighted):
    """It is made from the norm's input, and is as near to the truth as from the norm itself."""
    truth, _ = of_adapters(torch.float64, False, offset, weighted)
    plain, _ = of_adapters(torch.bfloat16, False, offset, weighted)
    got, made = of_adapters(torch.bfloat16, True, offset, weighted)
    assert not made
    for a, b, c in zip(got, plain, truth, strict=True):
        error, allowed = ((each.double() - c).norm() / c.norm() for each in (a, b))
        assert error < 1.5 * allowed < 0.01


def test_where_the_norm_is_made_again_for_a():
    """With dropout, which needs its elements, in fp16, and in fp32, where it stays the same to the bit."""
    for dtype, dropped in ((torch.bfloat16, 0.3), (torch.float16, 0.0), (torch.float32, 0.0)):
        assert of_adapters(dtype, True, dropped=dropped)[1] == 1


def test_an_input_that_was_written_into():
    """The norm itself refuses its backward then, so the note must not hide it before."""
    x = seeded(N, H).requires_grad_() * 1
    y = rms_norm(x, None)
    with torch.no_grad():
        x.mul_(2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        trained(y)
    assert y.data_ptr() in kept


def test_an_input_without_contiguous_rows_is_not_kept_beside_its_copy():
    x = seeded(H, N).requires_grad_().t()
    y, kept = rms_norm(x, None), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        trained(y)
    assert y.data_ptr() in kept and x.data_ptr() not in kept


def test_nothing_is_noted_without_gradients():
    with torch.no_grad():
        assert not vars(rms_norm(seeded(N, H).requires_grad_(), None))
    assert not vars(rms_norm(seeded(N, H), None))


def test_parameters_that_an_engine_takes_away_between_the_passes(tmp_path):
    """In a group of processes the note has copies of the weight."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        w, kept = seeded(H, seed=1).requires_grad_(), []
        y = rms_norm(seeded(N, H).requires_grad_(), w)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            trained(y)
        (copy,) = [t for t in kept if t.shape == (H,)]
        assert torch.equal(copy, w) and copy.data_ptr() != w.data_ptr()
    finally:
        torch.distributed.destroy_process_group()
