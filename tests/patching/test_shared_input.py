"""shared_input: which layers a module calls with one tensor, and when they are computed together."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from torch import nn

from liger_trainer.patching.layers import lora as patch_lora
from liger_trainer.patching.layers.linears import SharedInput, layers_of_one_input
from liger_trainer.patching.patcher import patch


class Layers(nn.Module):
    q: Any
    k: Any
    v: Any
    w: Any
    u: Any
    out: Any
    drop: Any
    norm: Any


class Attention(Layers):
    def forward(self, hidden, mask=None):
        shape = hidden.shape
        q, k = self.q(hidden).view(shape), self.k(hidden)
        v = self.drop(self.v(hidden) + 1)
        return self.out(q + k + v, scale=2)


class Several(Layers):
    def forward(self, hidden, states):
        return self.q(hidden) + self.k(states) + self.v(states)


class Conditional(Layers):
    def forward(self, hidden, cross):
        q = self.q(hidden)
        k = self.k(hidden) if cross is None else cross
        if cross is None:
            v = self.v(hidden)
        return q + k + v + [self.w(hidden) for _ in range(2)][0] + (cross or self.u(hidden))


class Reassigned(Layers):
    def forward(self, hidden):
        q = self.q(hidden)
        hidden = self.norm(hidden)
        return q + self.k(hidden)


class Twice(Layers):
    def forward(self, hidden):
        return self.q(hidden) + self.k(hidden) + self.k(hidden) + self.v(hidden, 1) + self.w(x=hidden)


@pytest.mark.parametrize(
    ("kind", "want"),
    [(Attention, [["q", "k", "v"]]), (Several, [["k", "v"]]), (Conditional, []), (Reassigned, []), (Twice, []),
     (nn.Linear, [])],
)  # fmt: skip
def test_calls_with_one_argument(kind, want):
    module = object.__new__(kind)
    assert layers_of_one_input(module) == want


def test_attention_of_families():
    """Read in transformers as it is installed: a change there would switch the op off without a word."""
    for name in ("llama", "qwen3", "gemma2", "phi"):
        groups = {tuple(group) for m in tiny_model(name).modules() for group in layers_of_one_input(m)}
        assert ("q_proj", "k_proj", "v_proj") in groups, name


def pair(**options):
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        config = LoraConfig(r=3, init_lora_weights=False, **{"target_modules": "all-linear", **options})
        models.append(get_peft_model(tiny_model(), config).train())
    patch(models[1], rope=False, rms_norm=False, fused_linear_cross_entropy=False)
    return models


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """How many layers each call of the op computed."""
    counts, op = [], patch_lora.lora_linears
    monkeypatch.setattr(patch_lora, "lora_linears", lambda x, ps: (counts.append(len(ps)), op(x, ps))[1])
    return counts


def attention_of(model, layer=0):
    return model.base_model.model.model.layers[layer].self_attn


def check(plain, model):
    got, want = (named_gradients(each, each(**masked_batch()).loss) for each in (model, plain))
    assert_same_gradients(got, want)


@pytest.mark.parametrize(
    ("targets", "want"), [("all-linear", [3, 3]), (["q_proj", "v_proj"], [2, 2]), (["q_proj", "o_proj"], [])], ids=str
)
def test_layers_with_adapters_are_one_op(sizes, targets, want):
    plain, model = pair(target_modules=targets)
    check(plain, model)
    assert sizes == want


def other_input(layer):
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_layer_that_gets_another_tensor(sizes, name):
    plain, model = pair()
    for each in (plain, model):
        other_input(getattr(attention_of(each), name))
    check(plain, model)
    assert sizes == [3]  # of the other layer of the model


def test_a_tensor_that_is_changed_in_between(sizes):
    _, model = pair()
    attention, x = attention_of(model), torch.randn(2, 5, 32)
    with torch.no_grad():
        attention.q_proj(x)
        x.mul_(2)
        torch.testing.assert_close(attention.k_proj(x), type(attention.k_proj).forward(attention.k_proj, x))
    assert sizes == [3]


def test_what_nobody_takes_is_dropped_in_the_next_pass(sizes):
    _, model = pair()
    attention, (x, y) = attention_of(model), torch.randn(2, 2, 5, 32)
    with torch.no_grad():
        attention.q_proj(x)
        attention.q_proj(y)
        torch.testing.assert_close(attention.v_proj(x), type(attention.v_proj).forward(attention.v_proj, x))
        torch.testing.assert_close(attention.k_proj(y), type(attention.k_proj).forward(attention.k_proj, y))
    attention(x, (torch.ones(1, 5, 8), torch.ones(1, 5, 8)), None)
    group = vars(attention.q_proj)[patch_lora.GROUP]
    assert group._x is None and not group._waiting


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


def test_a_deep_copy_has_a_group_of_its_own():
    holder = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    group = SharedInput(list(holder))
    for layer in holder:
        layer.group = group
    twin = copy.deepcopy(holder)
    assert twin[0].group is twin[1].group is not group and twin[0].group.layers == list(twin)


def test_inference_mode():
    x = torch.inference_mode()(torch.randn)(2, 4)
    layers = [nn.Linear(4, 3), nn.Linear(4, 3)]
    group = SharedInput(layers)
    with torch.inference_mode():
        outputs = [group.output(layer, x, lambda layers: [layer(x) for layer in layers]) for layer in layers]
        torch.testing.assert_close(outputs, [layer(x) for layer in layers])
