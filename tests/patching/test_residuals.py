"""residuals: which sums a layer's norm takes along, with the losses, gradients and tensors of the layer itself."""

import copy

import pytest
import torch
from families import build_class
from peft import LoraConfig, get_peft_model
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_trainer.patching import residuals
from liger_trainer.patching.norms import prove_norm
from liger_trainer.patching.patcher import patch
from liger_trainer.patching.residual_products import Product
from liger_trainer.patching.residuals import Branch, NormedSum, ResidualSum, added_outputs, normed_sums

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mixtral")  # a sum and a norm in front of a branch in each layer
# class: such sums of a layer
OTHERS = {
    "Olmo2ForCausalLM": 0, "Glm4ForCausalLM": 1, "ApertusForCausalLM": 1, "Phi3ForCausalLM": 0, "GraniteForCausalLM": 0,
    "JambaForCausalLM": 1, "Qwen3MoeForCausalLM": 1, "DeepseekV3ForCausalLM": 1,
}  # fmt: skip


class Usual(nn.Module):
    def forward(self, hidden, mask=None):
        residual = hidden
        hidden = self.before(hidden)
        hidden, _ = self.attention(hidden, mask=mask)
        hidden = residual + hidden
        residual = hidden
        hidden = self.behind(hidden)
        return residual + self.mlp(hidden)


class Turned(nn.Module):
    def forward(self, x):
        y = self.branch(x)
        total = y + x
        z = self.norm(total)
        return total + z


class Scaled(nn.Module):
    def forward(self, hidden):
        residual = hidden
        hidden = self.before(hidden)
        hidden = self.attention(hidden)
        hidden = residual + hidden * self.scale
        hidden = self.behind(hidden)
        return hidden


class Apart(nn.Module):
    """Nothing, a norm of something else, a sum of two others, and one that may not run."""

    def forward(self, hidden, other, flag):
        hidden = self.attention(hidden)
        hidden = hidden + hidden
        hidden = self.one(hidden)
        hidden = self.attention(hidden)
        total = hidden + other
        hidden = self.two(other)
        hidden = self.attention(hidden)
        total = other + total
        hidden = self.three(total)
        if flag:
            hidden = self.attention(hidden)
            total = hidden + other
            hidden = self.four(total)
        hidden = self.attention(hidden)
        total = hidden + other
        return self.five(total, flag)


def test_what_the_source_says():
    assert normed_sums(Usual) == (NormedSum("attention", "behind", "before"),)
    assert normed_sums(Turned) == (NormedSum("branch", "norm", None),)
    assert normed_sums(Scaled) == normed_sums(Apart) == normed_sums(nn.Linear) == ()


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op, as (whether it adds, whether gradients are recorded)."""
    made, op = [], residuals.add_rms_norm

    def call(x, residual, *args, **options):
        made.append((residual is not None, torch.is_grad_enabled()))
        return op(x, residual, *args, **options)

    monkeypatch.setattr(residuals, "add_rms_norm", call)
    return made


def patch_layers(model):
    return patch(model, fused_linear_cross_entropy=False)


def outputs(model, batch=None):
    result = model(**(batch or masked_batch()))
    return result.logits, named_gradients(model, result.loss)


def assert_same(model, plain, batch=None):
    got, want = outputs(model, batch), outputs(plain, batch)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(got[1], want[1], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family, calls):
    # transformers' hooks for the router's logits would watch attention too
    model = tiny_model(family, **({"output_router_logits": False} if family == "mixtral" else {}))
    plain = copy.deepcopy(model)
    patched = patch_layers(model)
    assert patched.report.swapped[residuals.KIND] == 2
    assert_same(model, plain)
    assert sorted(calls) == [(False, True)] * 2 + [(True, True)] * 2
    patched.undo()
    assert not any("forward" in vars(m) or residuals.STREAM in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name, calls):
    model = build_class(name)
    plain = copy.deepcopy(model)
    patched = patch_layers(model)
    ids = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    assert_same(model, plain, {"input_ids": ids, "labels": ids})
    assert patched.report.swapped[residuals.KIND] == len(calls) // 2 == 2 * OTHERS[name]


def test_without_gradients_the_sum_alone(calls):
    model = tiny_model("qwen3")
    plain = copy.deepcopy(model)
    patch_layers(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**masked_batch()).loss, plain(**masked_batch()).loss)
    assert calls == [(True, False)] * 2


def test_frozen_embeddings(calls):
    """The stream that enters the first layer has no gradient."""
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(False)
    plain = copy.deepcopy(model)
    patch_layers(model)
    assert_same(model, plain)
    assert calls == [(True, True), (False, True), (True, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, calls):
    """In autocast the stream stays as wide as it is, and branches are narrow."""
    model = tiny_model("llama", dtype=dtype)
    plain = copy.deepcopy(model)
    patch_layers(model)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(**masked_batch()), plain(**masked_batch())
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-2, atol=0)
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["self_attn", "post_attention_layernorm", "input_layernorm"])
def test_hooks_see_tensors(name, calls):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    patch_layers(model)
    seen = []

    def hook(module, args, kwargs, output):
        output = output[0] if isinstance(output, tuple) else output
        seen.append([type(value) for value in (*args, *kwargs.values(), output) if hasattr(value, "dim")])

    model.model.layers[0].get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    assert_same(model, plain)
    assert seen and all(kind is torch.Tensor for kinds in seen for kind in kinds)
    assert len(calls) == 3


def test_checkpointing(calls):
    model = tiny_model("qwen3").train()
    plain = copy.deepcopy(model)
    patch_layers(model)
    for each in (model, plain):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each.config.use_cache = False
    assert_same(model, plain)
    assert len(calls) == 8


def test_a_deep_copy_has_streams_of_its_own(calls):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    patch_layers(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.zero_()
    assert_same(twin, plain)
    layer, other = twin.model.layers[0], model.model.layers[0]
    assert vars(layer.self_attn)[residuals.STREAM].norm is layer.post_attention_layernorm
    assert vars(layer.self_attn)[residuals.STREAM] is not vars(other.self_attn)[residuals.STREAM]


def test_nothing_is_held_behind_a_layer():
    model = tiny_model("llama")
    patch_layers(model)
    model(**masked_batch())
    assert all(vars(m)[residuals.STREAM].leave() is None for m in model.modules() if residuals.STREAM in vars(m))


def test_strides_are_those_of_the_stream():
    """As of a branch that ends in a convolution, behind which a mixture of experts views the norm's output."""
    layer = tiny_model("llama").model.layers[0]
    rule = prove_norm(layer.post_attention_layernorm)
    stream, branch = torch.randn(2, 3, 32), torch.randn(2, 32, 3).mT
    assert (stream + Branch(branch, None)).normed(layer.post_attention_layernorm, rule).is_contiguous()


def test_norms_are_called_by_keyword_too(calls):
    layer = tiny_model("llama").model.layers[0]
    x = torch.randn(2, 3, 32, requires_grad=True)
    want = layer.post_attention_layernorm(x), layer.input_layernorm(x)
    model = tiny_model("llama")
    patch(model)
    layer = model.model.layers[0]
    got = layer.post_attention_layernorm(hidden_states=x), layer.input_layernorm(hidden_states=x)
    torch.testing.assert_close(got, want)
    assert calls == []


class Chain(nn.Module):
    """The norm of the first sum stands in front of the second branch."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.before, self.between, self.behind = (LlamaRMSNorm(16) for _ in range(3))

    def forward(self, x):
        r = x
        h = self.before(x)
        h = self.one(h)
        h = r + h
        r = h
        h = self.between(h)
        h = self.two(h)
        h = r + h
        h = self.behind(h)
        return h


def test_a_norm_between_two_branches(calls):
    torch.manual_seed(0)
    model, x = nn.Sequential(Chain()), torch.randn(3, 16, requires_grad=True)
    plain = copy.deepcopy(model)
    assert patch(model).report.swapped[residuals.KIND] == 2
    weights = torch.randn(3, 16)
    got, want = ((each(x) * weights).sum() for each in (model, plain))
    assert_same_gradients(named_gradients(model, got), named_gradients(plain, want))
    assert [adds for adds, _ in calls] == [False, True, True]


def test_an_option_leaves_it_out():
    assert residuals.KIND not in patch(tiny_model("llama"), rms_norm=False).report.swapped


def test_a_branch_that_is_used_otherwise():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    branch = Branch(y, None)
    for got, want in (
        (x * branch, x * y), (branch - x, y - x), (torch.add(x, branch, alpha=2), x + 2 * y), (branch.sum(), y.sum()),
        (torch.cat([branch, x]), torch.cat([y, x])), (branch + 1, y + 1), (1 + branch, y + 1), (branch[0], y[0]),
    ):  # fmt: skip
        assert type(got) is torch.Tensor and torch.equal(got, want)
    for total in (x + branch, branch + x, torch.add(x, branch)):
        assert type(total) is ResidualSum and torch.equal(total + x, x + y + x) and torch.equal(total.mT, (x + y).mT)
        assert torch.equal(x + total, x + y + x) and torch.equal(torch.stack([total, x]), torch.stack([x + y, x]))


def test_a_sum_that_is_first_needed_without_gradients():
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    total = x + Branch(y, None)
    with torch.no_grad():
        assert not (total * 1).requires_grad
    (total * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


def test_a_stream_that_is_another_tensor():
    """What the norm in front has handed on counts for its own input alone."""
    x, handed_on, other = torch.randn(3), torch.randn(3), torch.randn(3)
    branch = Branch(torch.zeros(3), (x, handed_on))
    assert torch.equal((x + branch).compute(), handed_on) and torch.equal((other + branch).compute(), other)


# without gradients: the last product of an MLP is added by itself


@pytest.fixture
def products(monkeypatch):
    """Whether each product of an MLP was added to the residual stream in place."""
    made, add_to = [], Product.add_to

    def spy(self, stream):
        made.append(add_to(self, stream))
        return made[-1]

    monkeypatch.setattr(Product, "add_to", spy)
    return made


def logits_of(model, **how):
    with torch.no_grad():
        return model(**{k: x for k, x in masked_batch().items() if k != "labels"}, **how).logits


ADDED = {"llama": 2, "qwen3": 2, "gemma2": 0, "gemma3": 0, "mixtral": 0, "granite": 0, "phi": 0, "gpt2": 0}


@pytest.mark.parametrize("family", ADDED)
def test_without_gradients(family, products):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    patched = patch_layers(model)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-5, atol=1e-5)
    assert products == [True] * ADDED[family]
    got, want = (logits_of(each, output_hidden_states=True) for each in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    added = len(products)
    outputs(model)
    assert len(products) == added  # none with gradients
    patched.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_the_source_adds():
    assert added_outputs(Usual) == ("attention",) and added_outputs(Scaled) == added_outputs(nn.Linear) == ()
    assert added_outputs(type(tiny_model("llama").model.layers[0])) == ("self_attn", "mlp")


def test_one_rounding_in_bf16():
    torch.manual_seed(0)
    stream, h, down = (
        x.bfloat16() for x in (64 * torch.randn(50, 16), torch.randn(50, 8), nn.Linear(8, 16, bias=False))
    )
    with torch.no_grad():
        truth = stream.double() + h.double() @ down.weight.double().t()
        twice, once = stream + down(h), stream.clone()
        assert Product(h, down).add_to(once)
    assert torch.equal(once, truth.bfloat16()) and not torch.equal(twice, once)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_twice_is_the_same(products, reentrant):
    """Its first forward has no gradients."""
    steps = []
    for checkpoints in (False, True):
        model = tiny_model("llama", dtype=torch.bfloat16).train()
        patch(model)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = model(**masked_batch()).loss
        steps.append((loss.item(), named_gradients(model, loss)))
    assert steps[0][0] == steps[1][0] and not products
    assert all(torch.equal(gradient, steps[1][1][name]) for name, gradient in steps[0][1].items())


def biased(model):
    return tiny_model("llama", mlp_bias=True)


def hooked(model):
    def hook(module, args, output):
        assert type(output) is torch.Tensor
        return output * 1

    model.model.layers[0].mlp.register_forward_hook(hook)
    return model


def with_adapters(model):
    """On the last product alone."""
    config = LoraConfig(target_modules=["down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config).eval()


def norm_hooked(model):
    model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    return model


def in_autocast(model):
    forward = model.forward

    def within(**batch):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(**batch)

    model.forward = within
    return model


@pytest.mark.parametrize(
    "change, added", [(biased, 0), (hooked, 1), (with_adapters, 0), (norm_hooked, 1), (in_autocast, 0)]
)
def test_products_that_are_not_added_in_place(products, change, added):
    model = change(tiny_model("llama"))
    plain = copy.deepcopy(model)
    if change is in_autocast:
        plain = in_autocast(tiny_model("llama"))
    patch_layers(model)
    tolerance = 5e-2 if change is in_autocast else 1e-5
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=tolerance, atol=tolerance)
    assert products.count(True) == added


def test_what_a_product_is_not_added_to_in_place():
    h, down, stream = torch.randn(3, 8), nn.Linear(8, 16, bias=False), torch.randn(3, 16)
    others = (stream.double(), stream[:1], torch.randn(16, 3).t(), torch.randn(2, 3, 16))
    with torch.no_grad():
        for other in others:
            before = other.clone()
            assert not Product(h, down).add_to(other) and torch.equal(other, before)
        with torch.autocast("cpu", torch.bfloat16):
            assert not Product(h, down).add_to(stream)
        assert Product(h, down).add_to(stream)


def test_a_product_in_a_sum_with_gradients():
    norm, down, h = LlamaRMSNorm(16), nn.Linear(8, 16, bias=False), torch.randn(3, 8)
    x, y = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    total = x + Branch(y, None)
    total.normed(norm, prove_norm(norm))
    with torch.no_grad():
        assert not (total + Product(h, down)).requires_grad
        assert torch.equal(total.compute(), x + y)
        frozen = x.detach() + Branch(y, None)
        frozen.normed(norm, prove_norm(norm))
    assert (frozen + Product(h, down)).requires_grad  # of the weight


def test_a_sum_that_is_needed_after_a_product_was_added():
    norm = LlamaRMSNorm(16)
    x, y, h, down = torch.randn(3, 16), torch.randn(3, 16), torch.randn(3, 8), nn.Linear(8, 16, bias=False)
    with torch.no_grad():
        total = x + Branch(y, None)
        total.normed(norm, prove_norm(norm))
        before = total._value
        torch.testing.assert_close(total + Product(h, down), x + y + down(h))
        assert before is not None and not torch.equal(before, x + y)  # it was written over
        torch.testing.assert_close(total.compute(), x + y)
        kept = total.compute()
        torch.testing.assert_close(total + Product(h, down), x + y + down(h))
        assert torch.equal(kept, x + y)
        for got in (x + Product(h, down), Product(h, down) + x, Product(h, down) + total - y):
            torch.testing.assert_close(got, x + down(h))
