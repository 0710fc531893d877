"""Trained layers of one input: computed together where they are nothing but weights, and as before elsewhere."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from recorders import calls_of
from steps import step
from tiny import tiny_model
from torch import nn
from torch.testing import assert_close

from liger_trainer.patching.layers import linears as patching
from liger_trainer.patching.layers.linears import SharedInput, layers_of_one_input
from liger_trainer.patching.patcher import patch


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    return calls_of(monkeypatch, patching, "linears")


def sizes(calls: list[tuple]) -> list[int]:
    """How many layers each call of the op computes."""
    return [len(weights) for _, weights, _ in calls]


def plain_and_copy(family="qwen3", **options):
    plain = tiny_model(family, **options)
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize(
    ("family", "way"),
    [*((family, "plain") for family in ("llama_tied", "qwen3", "gemma2")), ("qwen3", "checkpointing"),
     ("qwen3", "without gradients")],
)  # fmt: skip
def test_loss_and_gradients_are_the_plain_models(family, way, calls):
    """Without gradients each layer is called by itself; undone, no call is ours."""
    plain, model = plain_and_copy(family)
    patched = patch(model)
    assert patched.report.swapped["shared input"] == 4
    for each in (plain, model) if way == "checkpointing" else ():
        each.train().gradient_checkpointing_enable({"use_reentrant": False})
    with torch.set_grad_enabled(way != "without gradients"):
        assert_close(step(model), step(plain), rtol=1e-4, atol=1e-6)
    assert set(sizes(calls)) == (set() if way == "without gradients" else {2, 3})
    assert len(calls) == 4 or way != "plain"
    patched.undo()
    assert not any("forward" in vars(m) for m in model.modules())
    calls.clear()
    step(model)
    assert not calls


@pytest.mark.parametrize("change", ["hook", "frozen", "replaced"])
def test_a_layer_that_becomes_more_than_its_weight(change, calls):
    """A hook and another forward are called; a weight that is frozen has no gradient."""
    plain, model = plain_and_copy(num_hidden_layers=1)
    patch(model)
    seen = []
    for each in (plain, model):
        layer = each.get_submodule("model.layers.0.self_attn.k_proj")
        if change == "hook":
            layer.register_forward_hook(lambda module, args, output: seen.append(1) or 2 * output)
        elif change == "frozen":
            layer.weight.requires_grad_(False)
        else:
            layer.forward = lambda x, weight=layer.weight: 3 * torch.nn.functional.linear(x, weight)
    assert_close(step(model), step(plain), rtol=1e-4, atol=1e-6)
    assert sizes(calls) == ([3, 2] if change == "frozen" else [2])
    assert len(seen) == (2 if change == "hook" else 0)


def test_frozen_layers_are_left_alone():
    model = tiny_model()
    model.requires_grad_(False)
    assert "shared input" not in patch(model).report.swapped


class Attention(nn.Module):
    def forward(self, hidden, mask=None):
        shape = hidden.shape
        q, k = self.q(hidden).view(shape), self.k(hidden)
        v = self.drop(self.v(hidden) + 1)
        return self.out(q + k + v, scale=2)


class Several(nn.Module):
    def forward(self, hidden, states):
        return self.q(hidden) + self.k(states) + self.v(states)


class Conditional(nn.Module):
    def forward(self, hidden, cross):
        q = self.q(hidden)
        k = self.k(hidden) if cross is None else cross
        if cross is None:
            v = self.v(hidden)
        return q + k + v + [self.w(hidden) for _ in range(2)][0] + (cross or self.u(hidden))


class Reassigned(nn.Module):
    def forward(self, hidden):
        q = self.q(hidden)
        hidden = self.norm(hidden)
        return q + self.k(hidden)


class Twice(nn.Module):
    def forward(self, hidden):
        return self.q(hidden) + self.k(hidden) + self.k(hidden) + self.v(hidden, 1) + self.w(x=hidden)


@pytest.mark.parametrize(
    ("kind", "want"),
    [(Attention, (("q", "k", "v"),)), (Several, (("k", "v"),)), (Conditional, ()), (Reassigned, ()), (Twice, ()),
     (nn.Linear, ())],
)  # fmt: skip
def test_calls_with_one_argument(kind, want):
    assert layers_of_one_input(kind) == want


def test_each_thread_has_what_waits_for_itself():
    layers = [nn.Linear(4, 3), nn.Linear(4, 3)]
    group, computed = SharedInput(layers), []

    def run(x, index):
        def compute(layers):
            computed.append(x)
            return [layer(x) for layer in layers]

        return group.output(layers[index], x, compute)

    one, other = torch.randn(2, 4), torch.randn(2, 4)
    with ThreadPoolExecutor(1) as pool:
        first = run(one, 0), pool.submit(run, other, 0).result()
        second = run(one, 1), pool.submit(run, other, 1).result()
    assert len(computed) == 2
    for layer, (mine, theirs) in zip(layers, (first, second), strict=True):
        torch.testing.assert_close((mine, theirs), (layer(one), layer(other)))
