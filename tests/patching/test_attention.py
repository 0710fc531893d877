"""Rotary functions and the norms of queries and keys: what is swapped computes what the model computed."""

import copy
import functools
import inspect
import sys
import types

import accelerate
import pytest
import torch
import transformers
from families import build
from tiny import (
    SIZES,
    assert_same_gradients,
    gradients,
    masked_batch,
    named_gradients,
    spread_weights,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from liger_trainer.patching.layers import attention, deferred_norm, rotary
from liger_trainer.patching.layers.deferred_norm import DeferredNorm
from liger_trainer.patching.layers.norms import prove_norm
from liger_trainer.patching.patcher import patch
from liger_trainer.patching.rebind_globals import always_reads_after, globals_read, rebound

ROPE, FUSED = "rope", "QK norm + rope"
ALONE = dict.fromkeys(
    ("rms_norm", "layer_norm", "swiglu", "geglu", "relu2", "gelu", "linear", "lora", "fused_linear_cross_entropy"),
    False,
)
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
# name: (configuration class, its options beside SIZES, what each attention should report)
CASES = {
    "llama": ("LlamaConfig", {}, ROPE),
    "mistral": ("MistralConfig", {"sliding_window": 4}, ROPE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, ROPE),
    "qwen2": ("Qwen2Config", {}, ROPE),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, FUSED),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4}, ROPE),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4}, FUSED),  # norms after the transposition
    "olmo": ("OlmoConfig", {}, ROPE),  # casts back
    "olmo2": ("Olmo2Config", {}, FUSED),  # over all heads
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}, ROPE),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}, ROPE),
    "glm4": ("Glm4Config", {"head_dim": 8}, ROPE),  # interleaved, partial, reads half of the cosines
    "cohere": ("CohereConfig", {}, ROPE),  # interleaved
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, ROPE),  # half width
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}, ROPE),
    "exaone4": ("Exaone4Config", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, ROPE),
    "deepseek_v3": ("DeepseekV3Config", LATENT, ROPE),  # comes interleaved, leaves as halves
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "num_local_experts": 4}, ROPE),  # complex frequencies
    "qwen3_next": (
        "Qwen3NextConfig",
        {"head_dim": 8, "layer_types": ["full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2},
        FUSED,
    ),
}


def model_of(name, **overrides):
    config, options, _ = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**{**SIZES, **options, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager", attn_implementation="eager"
    )
    return spread_weights(model).eval()


def patch_rope(model):
    return patch(model, **ALONE)


def outputs(model, batch=None):
    result = model(**(batch or masked_batch()))
    return result.logits, named_gradients(model, result.loss)


def assert_same(model, plain, rtol=1e-5):
    got, want = outputs(model), outputs(plain)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(got[1], want[1], rtol)


@pytest.fixture
def calls(monkeypatch):
    """How often each op runs."""
    counts = dict.fromkeys((ROPE, FUSED), 0)

    def counted(kind, op):
        def call(*args, **options):
            counts[kind] += 1
            return op(*args, **options)

        return call

    monkeypatch.setattr(rotary, "rope", counted(ROPE, rotary.rope))
    monkeypatch.setattr(deferred_norm, "qk_norm_rope", counted(FUSED, deferred_norm.qk_norm_rope))
    return counts


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name, calls):
    model = model_of(name)
    plain, kind = copy.deepcopy(model), CASES[name][2]
    patched = patch_rope(model)
    assert patched.report.swapped == {kind: 2}
    assert not [name for name in patched.report.left_alone if "Attention" in name]
    assert_same(model, plain)
    assert calls[kind] == (1 if name in ("smollm3", "exaone4") else 2)  # layers without positions among them
    assert sum(calls.values()) == calls[kind]


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "glm4"])
def test_kernels(name, kernels):
    model = model_of(name, num_hidden_layers=1)
    plain = copy.deepcopy(model)
    patch_rope(model)
    assert_same(model, plain)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "exaone4"])
def test_generation_with_a_cache(name, calls):
    model = model_of(name)
    prompt = {"input_ids": masked_batch()["input_ids"][:, :5], "max_new_tokens": 6, "do_sample": False}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    want = model.generate(**prompt, return_dict_in_generate=True, output_logits=True)
    patch_rope(model)
    got = model.generate(**prompt, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-5, atol=1e-5)
    assert sum(calls.values()) >= 6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("olmo2", torch.float32), ("olmo", torch.bfloat16)],
)
def test_autocast(name, dtype):
    model = model_of(name).to(dtype)
    plain = copy.deepcopy(model)
    patch_rope(model)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = outputs(model), outputs(plain)
    assert got[0].dtype == want[0].dtype
    torch.testing.assert_close(got[0], want[0], rtol=5e-2, atol=5e-2 * want[0].abs().max().item())
    assert_same_gradients(got[1], want[1], 8e-2)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_training_with_checkpointing_and_dropout(name):
    model = model_of(name, attention_dropout=0.2).train()
    plain = copy.deepcopy(model)
    patch_rope(model)
    results = []
    for each in (model, plain):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        results.append(outputs(each))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(results[0][1], results[1][1])


def test_no_name_of_the_models_module_changes():
    namespace, forward = dict(vars(modeling_qwen3)), modeling_qwen3.Qwen3Attention.forward
    patch_rope(model_of("qwen3"))
    assert modeling_qwen3.Qwen3Attention.forward is forward
    assert all(vars(modeling_qwen3)[name] is value for name, value in namespace.items())
    assert all(name.startswith("_liger_trainer_") for name in vars(modeling_qwen3).keys() - namespace.keys())


def test_layers_and_models_share_one_function():
    model, other = model_of("llama"), model_of("llama")
    patch_rope(model), patch_rope(other)
    forwards = {layer.self_attn.forward.__func__ for x in (model, other) for layer in x.model.layers}
    assert len(forwards) == 1
    assert len([name for name in vars(modeling_llama) if name.startswith("_liger_trainer_")]) == 1


def test_meta_device():
    with torch.device("meta"):
        model = model_of("qwen3")
    assert patch_rope(model).report.swapped == {FUSED: 2}


def test_weights_that_come_and_go(calls):
    """As `device_map` offloads them: a norm's weight is there while its forward runs, and no longer."""
    model = model_of("qwen3").requires_grad_(False)
    plain = copy.deepcopy(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    patched = patch_rope(model)
    batch = masked_batch()
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    assert calls == {ROPE: 2, FUSED: 0}
    patched.undo()
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_compiled_without_graph_breaks():
    """As a whole model, of qwen3, in test_compile.py."""
    model = model_of("llama", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    patch_rope(model)
    counts = []
    for each in (model, plain):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        for layer in each.model.layers:
            layer.self_attn.compile(backend=counter, fullgraph=True)
        each(**masked_batch())
        counts.append(counter.frame_count)
    assert_same(model, plain)
    assert counts == [1, 1]


def test_compiled_with_graph_breaks():
    model = model_of("qwen3", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    patch_rope(model)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(torch.compiler.disable(lambda module, args, output: None))
        layer.self_attn.compile(backend="eager")
    assert_same(model, plain)


def test_what_is_put_into_the_module_later_is_seen(monkeypatch):
    model = model_of("llama")
    patch_rope(model)
    seen = []

    def attention(module, query, *args, **kwargs):
        seen.append(module)
        return original(module, query, *args, **kwargs)

    original = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
    outputs(model)
    assert len(seen) == 2


def test_hooks_on_a_norm_see_a_tensor(calls):
    model = model_of("qwen3")
    plain = copy.deepcopy(model)
    patch_rope(model)
    seen = []
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    assert_same(model, plain)
    assert isinstance(seen[0], torch.Tensor)
    assert calls == {ROPE: 1, FUSED: 1}


@pytest.mark.parametrize(
    ("name", "head_dim", "path"),
    [("qwen3", 1, "torch"), ("qwen3", 2, "triton"), ("gemma3", 1, "triton"), ("gemma3", 4, "torch")],
)
def test_heads_of_few_columns(request, name, head_dim, path):
    """Of one column the mean of squares is the square: a proof that divides by a deviation is NaN."""
    model = model_of(name, head_dim=head_dim)
    plain = copy.deepcopy(model)
    report = patch(model, fused_linear_cross_entropy=False).report
    assert not report.left_alone
    assert report.swapped[FUSED] == 2 and report.swapped["RMSNorm"] == (9 if name == "gemma3" else 5)
    if path == "triton":
        request.getfixturevalue("kernels")
    assert_same(model, plain, 5e-5)


@pytest.mark.parametrize(
    ("norm", "kind"),
    [("q_norm", "forward_hook"), ("k_norm", "forward_pre_hook"), ("q_norm", "full_backward_hook"),
     ("k_norm", "full_backward_pre_hook")],
)  # fmt: skip
def test_hooks_on_one_of_the_norms_count(norm, kind):
    """Each doubles what it is given; the other norm waits all the same."""
    model = model_of("qwen3")
    plain = copy.deepcopy(model)
    patch_rope(model)
    seen = []

    def double(module, *given):
        seen.append(module)
        last = given[0] if kind in ("full_backward_hook", "forward_pre_hook") else given[-1]
        return tuple(x * 2 for x in last) if isinstance(last, tuple) else last * 2

    for each in (model, plain):
        getattr(each.model.layers[0].self_attn.get_submodule(norm), f"register_{kind}")(double)
    assert_same(model, plain)
    assert len(seen) == 2


def test_norms_that_are_changed_in_place():
    """OLMoE clips its queries between norm and rotation."""
    model = build("olmoe", "OlmoeForCausalLM")
    model.config.clip_qkv = 0.5
    plain = copy.deepcopy(model)
    assert patch_rope(model).report.swapped == {FUSED: 2}
    with torch.no_grad():  # in place on a norm's output, which its backward needs
        torch.testing.assert_close(model(**masked_batch()).logits, plain(**masked_batch()).logits)


def test_norm_after_the_rotation_stays():
    model = build("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")
    plain = copy.deepcopy(model)
    assert patch_rope(model).report.swapped == {ROPE: 2}
    assert_same(model, plain)


@pytest.mark.parametrize("case", ["no rotation", "other arguments"])
def test_what_is_left_alone(case, monkeypatch):
    def of_more(q, k, cos, sin, factor):
        return TURN(q, k, cos, sin)

    function = function_with(halves, scale=1.01) if case == "no rotation" else of_more
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    monkeypatch.setattr(attention, "_methods_with_rotary_calls", attention._methods_with_rotary_calls.__wrapped__)
    patched = patch(model_of("llama"), **{**ALONE, "rms_norm": True})
    assert ROPE not in patched.report.swapped
    (reason,) = patched.report.left_alone.values()
    assert reason.startswith("it is no rotation" if case == "no rotation" else "it takes (q, k, cos, sin, factor)")


def test_a_replaced_forward_is_left_alone():
    model = model_of("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = functools.partial(attention.forward)
    report = patch_rope(model).report
    assert report.swapped == {ROPE: 1}
    assert report.left_alone == {"LlamaAttention": "its forward has been replaced"}


# The proof


def halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def function_with(rotate_half, scale=1.0, cast=False):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = [x * cos + scale * rotate_half(x) * sin for x in (q, k)]
        return tuple(y.to(x.dtype) if cast else y for x, y in zip((q, k), turned, strict=True))

    return apply_rotary_pos_emb


TURN = function_with(halves)


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (function_with(lambda x: -halves(x)), "pairs"),
        (function_with(lambda x: halves(x).flip(-1)), "halves"),
        (function_with(halves, scale=1.01), "halves"),
        (function_with(halves), "pairs"),
        (function_with(pairs), "halves"),
        (lambda q, k, cos, sin, unsqueeze_dim=1: (q, k), "halves"),
        (lambda q, k, cos, sin, unsqueeze_dim=1: TURN(q, k, sin, cos, unsqueeze_dim), "halves"),
        (
            lambda q, k, cos, sin, unsqueeze_dim=1: function_with(halves)(q.detach(), k, cos, sin, unsqueeze_dim),
            "halves",
        ),
        (lambda q, k, cos, sin, unsqueeze_dim=1: TURN(q, k, cos, sin), "halves"),  # always 1
    ],
)
def test_proof_refuses(function, layout):
    rule = rotary.prove_rotary(function, frozenset({layout}))
    assert isinstance(rule, str)


def test_proof_accepts():
    assert rotary.prove_rotary(function_with(halves), frozenset({"halves"})) == rotary.RotaryRule(promotes=True)
    backwards = rotary.RotaryRule(reverse=True, promotes=True)
    assert rotary.prove_rotary(function_with(lambda x: -halves(x)), frozenset({"halves"})) == backwards
    cast = rotary.RotaryRule(interleaved=True)
    assert rotary.prove_rotary(function_with(pairs, cast=True), frozenset({"pairs"})) == cast
    assert rotary.prove_rotary(function_with(pairs, cast=True), frozenset()) == cast
    assert isinstance(rotary.prove_rotary(function_with(halves), frozenset({"halves", "pairs"})), str)


@pytest.mark.parametrize("cast", [True, False])
def test_dtypes(cast):
    function = function_with(halves, cast=cast)
    ours = rotary.replacement(function, rotary.prove_rotary(function, frozenset({"halves"})))
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.bfloat16) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    for a, b in zip(function(q, k, cos, sin), ours(q, k, cos, sin), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):  # the products that follow would narrow it again
        assert ours(q, k, cos, sin)[0].dtype == torch.bfloat16


def test_other_calls_go_to_the_models_function():
    function = function_with(halves)
    ours = rotary.replacement(function, rotary.prove_rotary(function, frozenset({"halves"})))
    q, k, cos, sin = torch.randn(4, 5, 8), torch.randn(2, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
    for a, b in zip(function(q, k, cos, sin, 0), ours(q, k, cos, sin, 0), strict=True):
        assert torch.equal(a, b)
    q, k, cos = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 8, requires_grad=True)
    (ours(q, k, cos, cos)[0].sum()).backward()
    assert cos.grad is not None  # angles that train


def test_layouts_of_models():
    assert rotary.layouts_of(model_of("llama")) == {"halves"}
    assert rotary.layouts_of(model_of("cohere")) == {"pairs"}
    assert rotary.layouts_of(model_of("gpt_oss")) == {"once"}


# Code of attention


class Func(nn.Module):
    """A rotary function as it is with Hugging Face's `kernels` installed."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return function_with(halves)(q, k, cos, sin, unsqueeze_dim)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


SOURCE = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(8), Norm(8)

    @decorated
    def forward(self, x, cos, sin, *, scale=1.0, use_rope=True):
        return scale * sum(y.sum() for y in self.turn(x, cos, sin, use_rope))

    def turn(self, x, cos, sin, use_rope):
        q, k = self.q_norm(x), self.k_norm(x)
        {call}
        return q, k
"""


def attention_of(call, rotary_function=None, monkeypatch=None):
    module = types.ModuleType("planted")
    module.__dict__.update(
        nn=nn, decorated=decorated, torch=torch, apply_rotary_pos_emb=rotary_function or function_with(halves),
        Norm=modeling_llama.LlamaRMSNorm,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "planted", module)
    exec(SOURCE.format(call=call), module.__dict__)
    attention = module.Attention()
    spread_weights(attention)
    return attention


class Wrapped(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, **inputs):
        return self.attention(**inputs)


ALWAYS = "q, k = apply_rotary_pos_emb(q, k, cos, sin)"
HALF = "cos, sin = cos[..., :2].repeat(1, 1, 2), sin[..., :2].repeat(1, 1, 2)"


@pytest.mark.parametrize(
    ("call", "function", "kind", "called"),
    [
        (ALWAYS, None, FUSED, FUSED),
        (ALWAYS, Func(), FUSED, FUSED),
        (f"if use_rope:\n            {ALWAYS}", None, ROPE, ROPE),
        (f"k = k + 1\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = torch.tanh(k)\n        {ALWAYS}", None, FUSED, ROPE),
        (f"q[..., 0] = 3\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = q\n        {ALWAYS}", None, FUSED, FUSED),
        (f"k = torch.cat([q, k], 1)\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = k.transpose(1, 3).transpose(1, 3)\n        {ALWAYS}", None, FUSED, FUSED),
        (f"q, k = q.transpose(1, 3), k.transpose(1, 3)\n        {HALF}\n        {ALWAYS}", None, FUSED, ROPE),
        (f"if q.shape != k.shape:\n            raise ValueError\n        {ALWAYS}", None, FUSED, FUSED),
    ],
)
def test_code_around_the_rotation(call, function, kind, called, calls, monkeypatch):
    model = Wrapped(attention_of(call, function, monkeypatch))
    plain = copy.deepcopy(model)
    assert patch_rope(model).report.swapped == {kind: 1}
    x, (cos, sin) = torch.randn(2, 4, 5, 8), (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    results = []
    for each in (model, plain):
        leaf = x.clone().requires_grad_()
        loss = each(x=leaf, cos=cos, sin=sin, scale=2.0)
        each.zero_grad()
        (loss.square() / 10).backward()
        results.append((loss, {**gradients(each), "x": leaf.grad}))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert_same_gradients(results[0][1], results[1][1])
    assert calls[called] == 1


def test_gradients_are_not_lost_in_someone_elses_function(monkeypatch):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * 2

    attention = attention_of(f"q = double(q)\n        {ALWAYS}", None, monkeypatch)
    sys.modules["planted"].double = Double.apply
    patch_rope(Wrapped(attention))
    cos = torch.randn(1, 5, 8)
    with pytest.raises(RuntimeError, match="deferred LlamaRMSNorm of queries or keys"):
        attention(torch.randn(2, 4, 5, 8), cos, cos)


def test_copies_of_functions():
    forward = modeling_llama.LlamaAttention.forward
    name = "apply_rotary_pos_emb"
    assert globals_read(forward, rotary.is_rotary) == {name: modeling_llama.apply_rotary_pos_emb}
    ours = rebound(forward, name, modeling_llama.apply_rotary_pos_emb, print)
    assert ours is rebound(forward, name, modeling_llama.apply_rotary_pos_emb, print)
    assert ours.__globals__ is forward.__globals__
    assert (ours.__qualname__, ours.__defaults__) == (forward.__qualname__, forward.__defaults__)
    assert globals_read(ours, lambda value: value is print)
    with pytest.raises(ValueError, match="does not read rope"):
        rebound(forward, "rope", print, print)


def test_which_code_always_turns():
    def reads(module, names=("apply_rotary_pos_emb",)):
        return always_reads_after(inspect.unwrap(module.forward), "q_norm", names)

    models = transformers.models
    assert reads(models.qwen3.modeling_qwen3.Qwen3Attention)
    assert reads(models.glm4_moe.modeling_glm4_moe.Glm4MoeAttention)  # the norm is conditional, the rotation is not
    assert not reads(models.exaone4.modeling_exaone4.Exaone4Attention)
    assert not reads(models.llama.modeling_llama.LlamaAttention)


# A norm that waits


def deferred(shape, width, dtype=torch.float32):
    module = spread_weights(modeling_llama.LlamaRMSNorm(width))
    norm = prove_norm(module)
    assert not isinstance(norm, str)
    x = torch.randn(shape).to(dtype)
    return DeferredNorm.of(x, module, norm), module(x)


def test_views_are_noted():
    waits, real = deferred((2, 5, 32), 32)
    viewed = waits.view(2, 5, 4, 8).transpose(1, 2)
    assert isinstance(viewed, DeferredNorm)
    assert (viewed.shape, viewed.over, viewed.ndim) == ((2, 4, 5, 8), (1, 3), 4)
    torch.testing.assert_close(viewed.compute(), real.view(2, 5, 4, 8).transpose(1, 2))
    split = deferred((2, 5, 4, 8), 8)[0].transpose(1, -2)
    assert (split.shape, split.over) == ((2, 4, 5, 8), (3,))
    assert isinstance(waits.view(2, 160), torch.Tensor)  # heads mixed with positions


def test_everything_else_computes():
    waits, real = deferred((2, 5, 32), 32)
    torch.testing.assert_close(waits[:, 1:] * 2, real[:, 1:] * 2)
    torch.testing.assert_close(torch.stack([waits, real]), torch.stack([real, real]))
    torch.testing.assert_close(1 - waits.float(), 1 - real)
    view = waits.view(2, 5, 4, 8)
    waits.clamp_(max=0.0)
    torch.testing.assert_close(view.compute(), real.clamp(max=0.0).view(2, 5, 4, 8))  # views share what is in place


def test_narrow_queries_and_wide_weights():
    """The normed values are rounded before they meet the weights, and not after: what leaves is fp32."""
    (q, real_q), (k, real_k) = (deferred((2, 5, heads, 8), 8, torch.bfloat16) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    q, k, real_q, real_k = (x.transpose(1, 2) for x in (q, k, real_q, real_k))
    assert isinstance(q, DeferredNorm) and isinstance(k, DeferredNorm)
    ours = deferred_norm.norm_and_rotate(q, k, cos, sin, 1, True, {})
    assert ours is not None
    for a, b in zip(ours, TURN(real_q, real_k, cos, sin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
