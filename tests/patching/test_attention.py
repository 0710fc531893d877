"""Rotary functions and the norms of queries and keys: what is swapped computes what the model computed."""

import copy
import functools
import sys
import types

import accelerate
import pytest
import torch
import transformers
from families import build
from recorders import calls_of
from steps import assert_same_step, only
from tiny import SIZES, assert_same_gradients, gradients, masked_batch, spread_weights
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.codegen import modeling_codegen
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama import modeling_llama
from transformers.models.nanochat import modeling_nanochat

from liger_trainer.patching.layers import attention as patching
from liger_trainer.patching.layers import deferred_norm, rotary
from liger_trainer.patching.layers.rotary import takes_one
from liger_trainer.patching.patcher import patch

ROPE, FUSED = "rope", "QK norm + rope"
# name: (configuration class, its options beside SIZES; None: as families.py builds it), what attention should report,
# modules that are swapped, calls of the op in a forward
CASES = {
    "llama": ("LlamaConfig", {}, ROPE, 2, 2),
    "mistral": ("MistralConfig", {"sliding_window": 4}, ROPE, 2, 2),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, ROPE, 2, 2),
    "qwen2": ("Qwen2Config", {}, ROPE, 2, 2),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, FUSED, 2, 2),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4}, ROPE, 2, 2),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4}, FUSED, 2, 2),  # norms after the transposition
    "olmo": ("OlmoConfig", {}, ROPE, 2, 2),  # casts back
    "olmo2": ("Olmo2Config", {}, FUSED, 2, 2),  # over all heads
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}, ROPE, 2, 2),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}, ROPE, 2, 2),
    "glm4": ("Glm4Config", {"head_dim": 8}, ROPE, 2, 2),  # interleaved, partial, reads half of the cosines
    "glm4_moe": (None, {"use_qk_norm": True}, FUSED, 2, 2),  # the norm is conditional, the rotation is not
    "cohere": ("CohereConfig", {}, ROPE, 2, 2),  # interleaved
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, ROPE, 2, 2),  # once
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}, ROPE, 2, 1),  # a layer without positions
    "exaone4": ("Exaone4Config", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, ROPE,
                2, 1),
    "deepseek_v3": (None, {}, ROPE, 2, 2),  # comes interleaved, leaves as halves
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "num_local_experts": 4}, ROPE, 2, 2),  # complex frequencies
    "qwen3_next": ("Qwen3NextConfig", {"head_dim": 8, "layer_types": ["full_attention"] * 2, "num_experts": 4,
                                       "num_experts_per_tok": 2}, FUSED, 2, 2),
    "hunyuan_v1_dense": (None, {}, ROPE, 2, 2),  # the norm comes after the rotation
    # functions of one tensor at a time, and one that turns backwards
    "gemma4_text": (None, {}, ROPE, 2, 4),
    "gemma3n_text": (None, {}, ROPE, 2, 4),
    "codegen": (None, {}, ROPE, 2, 4),
    "gptj": (None, {}, ROPE, 2, 4),
    "nanochat": (None, {}, ROPE, 2, 2),
    "deepseek_v4": (None, {}, ROPE, 4, None),  # rotates back, too, and has compressors beside attention
}  # fmt: skip


def model_of(name, **overrides):
    config, options = CASES[name][:2] if name in CASES else (None, {})
    torch.manual_seed(0)
    if config is None:
        return build(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], **options, **overrides)
    config = getattr(transformers, config)(**{**SIZES, **options, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager", attn_implementation="eager"
    )
    return spread_weights(model).eval()


def patch_rope(model):
    return patch(model, only("rope"))


def pair(model):
    """A copy as it was, the model with our rotations, and what was swapped."""
    plain = copy.deepcopy(model)
    return plain, model, patch_rope(model).report.swapped


def assert_same(model, plain, rtol=1e-5, loss_rtol=1e-5):
    assert_same_step(model, plain, rtol=rtol, loss_rtol=loss_rtol)


@pytest.fixture
def calls(monkeypatch) -> dict[str, list]:
    """The calls of each op."""
    return {ROPE: calls_of(monkeypatch, rotary, "rope"), FUSED: calls_of(monkeypatch, deferred_norm, "qk_norm_rope")}


@pytest.mark.parametrize(
    ("name", "path"), [*((name, "torch") for name in CASES), *((n, "triton") for n in ("qwen3", "olmo2", "glm4"))]
)
def test_loss_and_gradients(request, name, path, calls):
    model = model_of(name, **({"num_hidden_layers": 1} if path == "triton" else {}))
    plain, (kind, modules, times), report = copy.deepcopy(model), CASES[name][2:], patch_rope(model).report
    if path == "triton":
        request.getfixturevalue("kernels")
        assert_same(model, plain)
        return
    assert report.swapped == {kind: modules} and not [name for name in report.left_alone if "Attention" in name]
    assert_same(model, plain)
    (other,) = calls.keys() - {kind}
    assert times in (None, len(calls[kind])) and calls[kind] and not calls[other]


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
    assert sum(map(len, calls.values())) >= 6


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_training_with_checkpointing_and_dropout(name):
    plain, model, _ = pair(model_of(name, attention_dropout=0.2))
    for each in (model, plain):
        each.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, plain)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("olmo2", torch.float32), ("olmo", torch.bfloat16),
     ("codegen", torch.bfloat16), ("gptj", torch.bfloat16)],
)  # fmt: skip
def test_autocast(name, dtype):
    plain, model, _ = pair(model_of(name).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model, plain, 8e-2, 5e-2)


def test_norms_that_are_changed_in_place():
    """OLMoE clips its queries between norm and rotation."""
    model = model_of("olmoe")
    model.config.clip_qkv = 0.5
    plain, model, swapped = pair(model)
    assert swapped == {FUSED: 2}
    with torch.no_grad():  # in place on a norm's output, which its backward needs
        torch.testing.assert_close(model(**masked_batch()).logits, plain(**masked_batch()).logits)


def test_weights_that_come_and_go(calls):
    """As `device_map` offloads them: a norm's weight is there while its forward runs, and no longer."""
    model = model_of("qwen3").requires_grad_(False)
    plain = copy.deepcopy(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    patched = patch_rope(model)
    batch = masked_batch()
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    assert len(calls[ROPE]) == 2 and not calls[FUSED]
    patched.undo()
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_compiled_with_graph_breaks():
    plain, model, _ = pair(model_of("qwen3", num_hidden_layers=1))
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(torch.compiler.disable(lambda module, args, output: None))
        layer.self_attn.compile(backend="eager")
    assert_same(model, plain)


def test_what_is_put_into_the_module_later_is_seen(monkeypatch):
    model = model_of("llama")
    patch_rope(model)
    seen = calls_of(monkeypatch, modeling_llama, "eager_attention_forward")
    model(**masked_batch())
    assert len(seen) == 2


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
def test_hooks_on_one_of_the_norms_count(norm, kind, calls):
    """Each doubles the tensor that it is given; the other norm waits all the same."""
    plain, model, _ = pair(model_of("qwen3"))
    seen = []

    def double(module, *given):
        last = given[0] if kind in ("full_backward_hook", "forward_pre_hook") else given[-1]
        seen.append(last[0] if isinstance(last, tuple) else last)
        return tuple(x * 2 for x in last) if isinstance(last, tuple) else last * 2

    for each in (model, plain):
        getattr(each.model.layers[0].self_attn.get_submodule(norm), f"register_{kind}")(double)
    assert_same(model, plain)
    assert [type(x) for x in seen] == [torch.Tensor] * 2 and [*map(len, calls.values())] == [1, 1]


def of_more(q, k, cos, sin, factor):
    return TURN(q, k, cos, sin)


@pytest.mark.parametrize("case", ["it is no rotation", "it takes (q, k, cos, sin, factor)", "its forward has been rep"])
def test_what_is_left_alone(case, monkeypatch):
    model = model_of("llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    if "forward" in case:
        attention.forward = functools.partial(attention.forward)
    else:
        function = of_more if "takes" in case else function_with(halves, scale=1.01)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
        monkeypatch.setattr(patching, "_methods_with_rotary_calls", patching._methods_with_rotary_calls.__wrapped__)
    report = patch(model, only("rope", "rms_norm")).report
    (reason,) = report.left_alone.values()
    assert ROPE not in report.swapped and reason.startswith(case)


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


def proof(function, *layouts):
    return rotary.prove_rotary(function, frozenset(layouts))


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
        (lambda q, k, cos, sin, unsqueeze_dim=1: TURN(q.detach(), k, cos, sin, unsqueeze_dim), "halves"),
        (lambda q, k, cos, sin, unsqueeze_dim=1: TURN(q, k, cos, sin), "halves"),  # always 1
    ],
)
def test_proof_refuses(function, layout):
    assert isinstance(proof(function, layout), str)


def test_proof_accepts():
    assert proof(TURN, "halves") == rotary.RotaryRule(promotes=True)
    assert proof(function_with(lambda x: -halves(x)), "halves") == rotary.RotaryRule(reverse=True, promotes=True)
    for layouts in (("pairs",), ()):
        assert proof(function_with(pairs, cast=True), *layouts) == rotary.RotaryRule(interleaved=True)
    assert isinstance(proof(TURN, "halves", "pairs"), str)
    gemma, codegen = (m.apply_rotary_pos_emb for m in (modeling_gemma4, modeling_codegen))
    assert takes_one(gemma) and takes_one(codegen) and not takes_one(modeling_nanochat.apply_rotary_pos_emb)


def test_other_calls_go_to_the_models_function():
    ours = rotary.replacement(TURN, proof(TURN, "halves"))
    q, k, cos, sin = torch.randn(4, 5, 8), torch.randn(2, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
    for a, b in zip(TURN(q, k, cos, sin, 0), ours(q, k, cos, sin, 0), strict=True):
        assert torch.equal(a, b)
    q, k, cos = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 8, requires_grad=True)
    (ours(q, k, cos, cos)[0].sum()).backward()
    assert cos.grad is not None  # angles that train


@pytest.mark.parametrize("cast", [True, False])
def test_dtypes(cast):
    function = function_with(halves, cast=cast)
    ours = rotary.replacement(function, proof(function, "halves"))
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.bfloat16) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    for a, b in zip(function(q, k, cos, sin), ours(q, k, cos, sin), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):  # the products that follow would narrow it again
        assert ours(q, k, cos, sin)[0].dtype == torch.bfloat16


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
        (f"k = 1 - k.float()\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = torch.tanh(k)\n        {ALWAYS}", None, FUSED, ROPE),
        (f"q[..., 0] = 3\n        {ALWAYS}", None, FUSED, ROPE),
        (f"view = q.view(q.shape)\n        q.clamp_(max=0.5)\n        q = view\n        {ALWAYS}", None, FUSED, ROPE),
        (f"q = q.view(2, 4, 40).view(2, 4, 5, 8)\n        {ALWAYS}", None, FUSED, ROPE),  # heads mixed with positions
        (f"k = q\n        {ALWAYS}", None, FUSED, FUSED),
        (f"k = torch.cat([q, k], 1)\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = torch.stack([q, k])[1]\n        {ALWAYS}", None, FUSED, ROPE),
        (f"k = k.transpose(1, 3).transpose(1, 3)\n        {ALWAYS}", None, FUSED, FUSED),
        (f"q, k = q.transpose(1, 3), k.transpose(1, 3)\n        {HALF}\n        {ALWAYS}", None, FUSED, ROPE),
        (f"if q.shape != k.shape:\n            raise ValueError\n        {ALWAYS}", None, FUSED, FUSED),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_code_around_the_rotation(call, function, kind, called, dtype, calls, monkeypatch):
    """Narrow queries meet wide weights after they are rounded, and not before."""
    plain, model, swapped = pair(Wrapped(attention_of(call, function, monkeypatch)))
    assert swapped == {kind: 1}
    x, (cos, sin) = torch.randn(2, 4, 5, 8), (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    results = []
    for each in (model, plain):
        leaf = x.to(dtype).requires_grad_()
        loss = each(x=leaf, cos=cos, sin=sin, scale=2.0)
        each.zero_grad()
        (loss.square() / 10).backward()
        results.append((loss, {**gradients(each), "x": leaf.grad}))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert_same_gradients(results[0][1], results[1][1], 1e-5 if dtype == torch.float32 else 1e-2)
    assert len(calls[called]) == 1


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
