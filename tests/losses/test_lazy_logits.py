"""LazyLogits: described without being computed, and real for whatever else is done to them."""

import copy
import pickle

import pytest
import torch
from accelerate.utils.operations import convert_to_fp32, pad_across_processes
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor

from liger_trainer.losses.deferred_logits import DeferredLogits, DeferredPass
from liger_trainer.losses.deferring_head import LazyLogits
from liger_trainer.losses.model_parts import Head

SHAPE = (2, 3, 16)


@pytest.fixture
def computed(monkeypatch):
    """How often logits are computed."""
    compute, times = DeferredLogits.compute, []

    def watched(deferred, why=None):
        times.append(why)
        return compute(deferred, why)

    monkeypatch.setattr(DeferredLogits, "compute", watched)
    return times


@pytest.fixture
def logits(computed):
    """(lazy, real)"""
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, SHAPE[-1]), torch.randn(*SHAPE[:-1], 8)
    with torch.no_grad():
        deferred = DeferredLogits.of(hidden, Head(head.weight, head.bias), head.forward, DeferredPass("model", False))
        return LazyLogits.of(deferred * 2.0), head(hidden) * 2.0


def test_a_description_computes_nothing(logits, computed):
    lazy, real = logits
    assert isinstance(lazy, torch.Tensor) and torch.is_tensor(lazy)
    for describe in (
        lambda x: x.shape, lambda x: x.dtype, lambda x: x.device, lambda x: x.ndim, lambda x: x.requires_grad, len,
        lambda x: x.size(-1), lambda x: x.dim(), lambda x: x.numel(), lambda x: x.is_floating_point(),
        lambda x: x.is_cuda, lambda x: x.layout, torch.is_floating_point, torch.is_complex, torch.numel,
    ):  # fmt: skip
        assert describe(lazy) == describe(real)
    assert computed == []


def test_a_cast_computes_nothing(logits, computed):
    """As accelerate casts what a model returns, and FSDP2 with an output_dtype."""
    lazy, real = logits
    half = lazy.to(torch.bfloat16)
    assert isinstance(half, LazyLogits) and half.dtype == torch.bfloat16
    by_fsdp = _cast_fp_tensor(torch.float32, half)
    for cast in (lazy.float(), half.float(), convert_to_fp32({"logits": half})["logits"], by_fsdp):
        assert isinstance(cast, LazyLogits) and cast.dtype == torch.float32
    assert computed == []
    torch.testing.assert_close(half.detach(), real.bfloat16())
    torch.testing.assert_close(half.float().detach(), real.bfloat16().float())


OPERATIONS = {
    "detach": torch.Tensor.detach, "cpu": torch.Tensor.cpu, "clone": torch.Tensor.clone, "data": lambda x: x.data,
    "transpose": lambda x: x.mT, "to": lambda x: x.to("cpu", torch.float64), "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1), "index": lambda x: x[0, 1:], "sum": lambda x: x + 1,
    "reflected": lambda x: 1 - x, "compare": lambda x: x > 0, "cat": lambda x: torch.cat([x[:1], x[1:]]),
    "numpy": lambda x: torch.from_numpy(x.numpy()), "array": lambda x: torch.from_numpy(x.__array__()),
    "list": lambda x: torch.tensor(x.tolist()), "iterate": lambda x: torch.stack(list(x)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.deepcopy, "item": lambda x: x.sum().item(),
    "repr": repr, "gather": lambda x: pad_across_processes(x, dim=1, pad_index=-100),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_anything_else_is_done_to_the_real_logits(name, logits, computed):
    lazy, real = logits
    got, want = OPERATIONS[name](lazy), OPERATIONS[name](real)
    if name == "gather" and isinstance(got, LazyLogits):  # nothing to pad
        got = got.detach()
    assert computed
    if not isinstance(want, torch.Tensor):
        assert got == want
        return
    assert not isinstance(got, LazyLogits) and not got.requires_grad
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_autocast_of_their_forward_holds():
    head, hidden = nn.Linear(8, 16), torch.randn(2, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        deferred = DeferredLogits.of(hidden, Head(head.weight, head.bias), head.forward, DeferredPass("model", False))
        lazy, want = LazyLogits.of(deferred), head(hidden)
    assert lazy.dtype == want.dtype == torch.bfloat16
    assert torch.equal(lazy.detach(), want) and torch.equal(lazy.float().detach(), want.float())


def _set_data(x):
    x.data = x.detach() + 1


def _view_first(x):
    view = x.view(-1, SHAPE[-1])
    x.mul_(2.0)
    view[0] = 5.0


WRITES = {
    "a scale": lambda x: x.div_(0.01), "some tokens": lambda x: x.__setitem__((..., slice(4, None)), -1e4),
    "a view": lambda x: x[:, :-1].zero_(), "data": lambda x: x.data.mul_(2.0), "set data": _set_data,
    "a function": lambda x: torch.nn.functional.relu(x, inplace=True), "out": lambda x: torch.exp(x, out=x),
    "numpy": lambda x: x.numpy().fill(3.0), "a view before": _view_first, "unsqueeze_": lambda x: x.unsqueeze_(0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_them_stays(name, logits):
    lazy, real = logits
    WRITES[name](lazy)
    WRITES[name](real)
    assert lazy.shape == real.shape
    torch.testing.assert_close(lazy.clone(), real, rtol=0, atol=0)


def test_they_can_be_a_leaf(logits):
    lazy, real = logits
    for x in (lazy, real):
        x.requires_grad = True
        (x * x).sum().backward()
    assert lazy.requires_grad
    torch.testing.assert_close(lazy.grad, real.grad)
