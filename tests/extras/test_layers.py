"""The layers of modules/ beside Hugging Face's and torch's: values, gradients, state dicts."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

import liger_trainer
from liger_trainer import (
    LigerFusedAddRMSNorm,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerPhi3SwiGLUMLP,
    LigerQKNormRope,
    LigerReLUSquared,
    LigerRMSNorm,
    LigerRope,
    LigerSwiGLUMLP,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GEMMA = dict(offset=1.0, casting_mode="gemma", init_fn="zeros")


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(op, inputs: list[Tensor], parameters=()) -> list[Tensor]:
    """Outputs of op, and the gradients of inputs and parameters under a random upstream gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    upstream = [random(*y.shape, dtype=y.dtype, seed=9) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*inputs, *parameters], upstream)]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = TOLERANCE[theirs.dtype] * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def randomize(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * random(*parameter.shape, seed=i + 1))
    return module


def check_layer(ours: nn.Module, theirs: nn.Module, *inputs: Tensor, dtype=None) -> None:
    """State dicts fit both ways, and outputs and all gradients agree. dtype: of the parameters."""
    randomize(theirs).to(dtype)
    ours.to(dtype).load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert_same(
        results(ours, list(inputs), list(ours.parameters())), results(theirs, list(inputs), list(theirs.parameters()))
    )


@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (LigerRMSNorm(24), modeling_llama.LlamaRMSNorm(24)),
        (LigerRMSNorm(24, 1e-2), modeling_llama.LlamaRMSNorm(24, eps=1e-2)),
        (LigerRMSNorm(24, **GEMMA), modeling_gemma.GemmaRMSNorm(24)),
    ],
    ids=["llama", "eps", "gemma"],
)
def test_rms_norm_is_hugging_faces(ours, theirs, dtype, weight_dtype):
    check_layer(copy.deepcopy(ours), copy.deepcopy(theirs), random(2, 7, 24, dtype=dtype), dtype=weight_dtype)


def test_rms_norm_casts_before_or_after_the_weight():
    """In bf16 the modes differ, each from the other's reference by a rounding."""
    x, weight = random(50, 64, dtype=torch.bfloat16), 1 + 0.3 * random(64, seed=1)
    normed = F.rms_norm(x.float(), (64,), eps=1e-6)
    for mode, wanted in (("llama", normed.bfloat16() * weight), ("gemma", (normed * weight).bfloat16())):
        norm = LigerRMSNorm(64, casting_mode=mode)
        norm.weight.data.copy_(weight)
        y = norm(x)
        assert y.dtype == wanted.dtype
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_rms_norm_without_weight(mode):
    norm = LigerRMSNorm(24, casting_mode=mode, elementwise_affine=False)
    assert not list(norm.parameters()) and not norm.state_dict()
    assert_same(results(norm, [random(5, 24)]), results(lambda x: F.rms_norm(x, (24,), eps=1e-6), [random(5, 24)]))


def test_rms_norm_options_of_ligers_kernels_change_nothing():
    x, upstream = random(5, 24).requires_grad_(), random(5, 24, seed=1)
    before = upstream.clone()
    grads = [
        torch.autograd.grad(LigerRMSNorm(24, in_place=in_place, row_mode=row_mode)(x), x, upstream)[0]
        for in_place in (True, False)
        for row_mode in (None, True, False)
    ]
    assert torch.equal(upstream, before)
    assert all(torch.equal(g, grads[0]) for g in grads)


@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
def test_add_rms_norm_is_sum_and_norm(options):
    ours, norm = randomize(LigerFusedAddRMSNorm(24, **options)), randomize(LigerRMSNorm(24, **options))

    def apart(x, residual):
        return norm(x + residual), x + residual

    for dtype in TOLERANCE:
        ours.to(dtype), norm.to(dtype)
        inputs = [random(2, 7, 24, dtype=dtype), random(2, 7, 24, dtype=dtype, seed=1)]
        assert_same(results(ours, inputs, ours.parameters()), results(apart, inputs, norm.parameters()))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias):
    check_layer(LigerLayerNorm(24, bias=bias), nn.LayerNorm(24, eps=1e-6, bias=bias), random(2, 7, 24))
    check_layer(LigerLayerNorm(24, 1e-2, bias), nn.LayerNorm(24, eps=1e-2, bias=bias), random(2, 7, 24))


def test_initial_weights():
    for module in (LigerRMSNorm, LigerFusedAddRMSNorm, LigerLayerNorm):
        assert torch.equal(module(3).weight, torch.ones(3))
        assert torch.equal(module(3, init_fn="zeros").weight, torch.zeros(3))
    assert torch.equal(LigerLayerNorm(3, bias=True).bias, torch.zeros(3))


def config(**options) -> SimpleNamespace:
    return SimpleNamespace(
        **{"hidden_size": 24, "intermediate_size": 40, "hidden_act": "silu", "mlp_bias": False} | options
    )


MLPS = {
    "llama": (LigerSwiGLUMLP, modeling_llama.LlamaMLP, config()),
    "llama-bias": (LigerSwiGLUMLP, modeling_llama.LlamaMLP, config(mlp_bias=True)),
    "swish": (LigerSwiGLUMLP, modeling_llama.LlamaMLP, config(hidden_act="swish")),
    "gemma": (LigerGEGLUMLP, modeling_gemma.GemmaMLP, config(hidden_act="gelu_pytorch_tanh")),
    "gelu-new": (LigerGEGLUMLP, modeling_gemma.GemmaMLP, config(hidden_act="gelu_new")),
    "gelu-fast": (LigerGEGLUMLP, modeling_gemma.GemmaMLP, config(hidden_act="gelu_fast")),
    "gelu-exact": (LigerGEGLUMLP, modeling_gemma.GemmaMLP, config(hidden_act="gelu")),
    "gemma3": (
        LigerGEGLUMLP,
        modeling_gemma3.Gemma3MLP,
        SimpleNamespace(hidden_size=24, intermediate_size=40, hidden_activation="gelu_pytorch_tanh"),
    ),
    "phi3": (LigerPhi3SwiGLUMLP, modeling_phi3.Phi3MLP, config()),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlp_is_hugging_faces(name):
    ours, theirs, how = MLPS[name]
    torch.manual_seed(0)
    check_layer(ours(how), theirs(how), random(2, 7, 24) * 3)
    check_layer(ours(how), theirs(how), random(2, 7, 24, dtype=torch.bfloat16) * 3, dtype=torch.bfloat16)


def test_mlp_of_another_width():
    mlp = LigerSwiGLUMLP(config(), intermediate_size=16)
    assert mlp.intermediate_size == 16 and mlp.down_proj.weight.shape == (24, 16)
    assert mlp(random(3, 24)).shape == (3, 24)


@pytest.mark.parametrize("name", ["llama-bias", "gemma", "gelu-exact", "phi3"])
def test_a_down_proj_that_does_more_is_called(name):
    """An adapter, a hook, a replaced forward: whatever is done to down_proj takes part."""
    module, _, how = MLPS[name]
    torch.manual_seed(0)
    mlp, x = module(how), random(3, 24)
    plain = results(mlp, [x])
    seen = []
    handle = mlp.down_proj.register_forward_hook(lambda _, args, output: seen.append(args[0].shape))
    assert_same(results(mlp, [x]), plain)
    assert seen == [(3, 40)]
    handle.remove()

    mlp.down_proj.forward = lambda h: 2 * F.linear(h, mlp.down_proj.weight, mlp.down_proj.bias)
    assert_same(results(mlp, [x]), [2 * y for y in plain])
    del mlp.down_proj.forward

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    mlp.down_proj.__class__ = Doubled
    assert_same(results(mlp, [x]), [2 * y for y in plain])


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3"])
def test_mlp_keeps_gate_and_up_alone(name, kernels):
    """act(gate) * up, of (tokens, intermediate_size) like them, is not saved for the backward. (Torch keeps it.)"""
    module, _, how = MLPS[name]
    mlp, x = module(how), random(3, 24)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault((t.data_ptr(), t.shape), t), lambda t: t):
        mlp(x)
    assert sum(t.numel() for t in kept.values() if t.shape[0] == 3 and t.shape[1] >= 40) == 2 * 3 * 40


@pytest.mark.parametrize("name", ["llama-bias", "gemma"])
def test_mlp_under_autocast(name):
    ours, theirs, how = MLPS[name]
    ours, theirs = ours(how), theirs(how)
    ours.load_state_dict(theirs.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        got = results(ours, [random(5, 24)], ours.parameters())
        wanted = results(theirs, [random(5, 24)], theirs.parameters())
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_relu_squared():
    x = random(5, 24)
    assert_same(results(LigerReLUSquared(), [x]), results(lambda x: F.relu(x).square(), [x]))


def angles(batch: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin (batch, length, width), as transformers' rotary embeddings make them: each half the same."""
    positions = torch.arange(length)[None] + 3 * torch.arange(batch)[:, None]
    frequencies = 10.0 ** -torch.linspace(0, 2, width // 2)
    angle = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_pos_emb_is_hugging_faces(batch, unsqueeze_dim):
    q, k = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    cos, sin = angles(batch, 7, 16)
    wanted = results(
        lambda q, k: modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim), [q, k]
    )

    def check(*args, **options):
        assert_same(results(lambda q, k: liger_rotary_pos_emb(q, k, *args, **options), [q, k]), wanted)

    check(cos, sin, unsqueeze_dim=unsqueeze_dim)
    check(cos, sin, None, unsqueeze_dim)
    check(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), None, unsqueeze_dim)
    check(cos[..., :8], sin[..., :8], unsqueeze_dim=unsqueeze_dim, rotary_dim=16)
    if batch == 1:
        check(cos[0], sin[0], unsqueeze_dim=unsqueeze_dim)


def test_rotary_pos_emb_of_a_part():
    """The first R columns turn and the others pass through; rotary_dim uses the first angles of more."""
    q, k, (cos, sin) = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1), angles(2, 7, 8)

    def wanted(q, k):
        turned = modeling_llama.apply_rotary_pos_emb(q[..., :8], k[..., :8], cos, sin)
        return [torch.cat([x, y[..., 8:]], -1) for x, y in zip(turned, (q, k), strict=True)]

    expected = results(wanted, [q, k])
    assert_same(results(lambda q, k: liger_rotary_pos_emb(q, k, cos, sin), [q, k]), expected)
    more = [torch.cat([x[..., :4], random(2, 7, 4, seed=5)], -1) for x in (cos, sin)]
    assert_same(results(lambda q, k: liger_rotary_pos_emb(q, k, *more, rotary_dim=8), [q, k]), expected)


def test_rotary_pos_emb_of_gpt_oss():
    q, k, (cos, sin) = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1), angles(2, 7, 16)
    cos, sin = cos[..., :8], sin[..., :8]
    wanted = results(lambda q, k: modeling_gpt_oss.apply_rotary_pos_emb(q, k, cos, sin), [q, k])
    assert_same(results(lambda q, k: liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=16), [q, k]), wanted)
    assert_same(results(lambda q, k: LigerRope(half_width=True)(q, k, cos, sin), [q, k]), wanted)


def test_multimodal_rotary_pos_emb_takes_each_pair_from_its_position():
    q, k, section = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1), [2, 3, 3]
    cos, sin = (torch.stack([x, x.roll(1, 1), x.roll(2, 1)]) for x in angles(2, 7, 16))  # time, height, width
    composed = [torch.cat([part[i % 3] for i, part in enumerate(x.split(2 * section, -1))], -1) for x in (cos, sin)]
    wanted = results(lambda q, k: modeling_llama.apply_rotary_pos_emb(q, k, *composed), [q, k])
    assert_same(results(lambda q, k: liger_multimodal_rotary_pos_emb(q, k, cos, sin, section), [q, k]), wanted)
    assert_same(results(lambda q, k: LigerRope(mrope_section=section)(q, k, cos, sin), [q, k]), wanted)
    swapped = results(
        lambda q, k: [
            x.transpose(1, 2)
            for x in liger_multimodal_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, section, 2)
        ],
        [q, k],
    )
    assert_same(swapped, wanted)


def test_interleaved_rope():
    q, k, (cos, sin) = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1), angles(2, 7, 16)

    def complex_product(*tensors):
        turn = torch.complex(cos[..., :8], sin[..., :8])[:, None]
        pairs = [torch.view_as_complex(x.unflatten(-1, (8, 2)).contiguous()) * turn for x in tensors]
        return [torch.view_as_real(x).flatten(-2) for x in pairs]

    doubled = [x[..., :8].repeat_interleave(2, -1) for x in (cos, sin)]
    got = results(lambda q, k: LigerRope(interleaved=True)(q, k, *doubled), [q, k])
    assert_same(got, results(complex_product, [q, k]))


def norm_then_rope(q_norm: nn.Module, k_norm: nn.Module, cos: Tensor, sin: Tensor, over_heads: bool):
    """What the attention of these models does to the outputs of q_proj and k_proj, (B, S, heads, D)."""

    def run(q, k):
        if over_heads:
            q, k = q_norm(q.flatten(2)).view_as(q), k_norm(k.flatten(2)).view_as(k)
        else:
            q, k = q_norm(q), k_norm(k)
        return modeling_llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    return run


@pytest.mark.parametrize(
    "norm, options",
    [
        (modeling_qwen3.Qwen3RMSNorm, {}),
        (modeling_gemma3.Gemma3RMSNorm, GEMMA),
        (modeling_olmo2.Olmo2RMSNorm, dict(casting_mode="gemma", norm_over_heads=True, num_heads=4, num_kv_heads=2)),
    ],
    ids=["qwen3", "gemma3", "olmo2"],
)
def test_qk_norm_rope_is_norm_then_rope(norm, options):
    over_heads = "num_heads" in options
    ours = LigerQKNormRope(16, **options)
    q_norm, k_norm = (randomize(norm(16 * (heads if over_heads else 1), 1e-6)) for heads in (4, 2))
    ours.q_norm.load_state_dict(q_norm.state_dict())
    ours.k_norm.load_state_dict(k_norm.state_dict())
    inputs, (cos, sin) = [random(2, 7, 4, 16), random(2, 7, 2, 16, seed=1)], angles(2, 7, 16)
    wanted = results(
        norm_then_rope(q_norm, k_norm, cos, sin, over_heads), inputs, [*q_norm.parameters(), *k_norm.parameters()]
    )
    assert_same(results(lambda q, k: ours(q, k, cos, sin), inputs, ours.parameters()), wanted)


def test_qk_norm_rope_turns_as_rope_does():
    """Each option of the rotation, beside LigerRope's."""
    inputs, (cos, sin) = [random(2, 7, 4, 16), random(2, 7, 2, 16, seed=1)], angles(2, 7, 16)
    three = [torch.stack([x, x.roll(1, 1), x.roll(2, 1)]) for x in (cos, sin)]
    for options, table in (
        (dict(interleaved=True), (cos, sin)),
        (dict(half_width=True), (cos[..., :8], sin[..., :8])),
        (dict(mrope_section=[2, 3, 3]), three),
    ):
        ours, turn = randomize(LigerQKNormRope(16, **options)), LigerRope(**options)

        def apart(q, k, ours=ours, turn=turn, table=table):
            return turn(ours.q_norm(q).transpose(1, 2), ours.k_norm(k).transpose(1, 2), *table)

        got = results(lambda q, k, ours=ours, table=table: ours(q, k, *table), inputs, ours.parameters())
        assert_same(got, results(apart, inputs, ours.parameters()))


def test_layers_compile_whole():
    torch._dynamo.reset()
    torch.manual_seed(0)
    cos, sin = angles(1, 7, 12)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([LigerRMSNorm(24), LigerLayerNorm(24, bias=True)])
            self.add = LigerFusedAddRMSNorm(24)
            self.mlp, self.geglu = LigerSwiGLUMLP(config()), LigerGEGLUMLP(config(hidden_act="gelu"))
            self.qk, self.relu2 = LigerQKNormRope(12), LigerReLUSquared()

        def forward(self, x):
            y, x = self.add(self.mlp(self.norms[0](x)), x)
            x = x + self.geglu(self.norms[1](y))
            q, k = self.qk(x.unflatten(-1, (2, 12)), y.unflatten(-1, (2, 12)), cos, sin)
            return self.relu2(sum(liger_rotary_pos_emb(q, k, cos, sin)))

    block, x = Block(), random(2, 7, 24)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, [x], block.parameters()), results(block, [x], block.parameters()))


REFUSED = [
    (lambda: LigerRMSNorm(4, casting_mode="bf16"), ValueError, "casting_mode must be"),
    (lambda: LigerRMSNorm(4, init_fn="normal"), ValueError, "init_fn must be"),
    (lambda: LigerRMSNorm(4, offset=1.0, elementwise_affine=False), ValueError, "offset 1.0 is added"),
    (lambda: LigerRMSNorm(4, casting_mode="none")(random(2, 4).half()), TypeError, "casting_mode='none'"),
    (lambda: LigerFusedAddRMSNorm(4, casting_mode="?"), ValueError, "casting_mode must be"),
    (lambda: LigerLayerNorm(4, init_fn="normal"), ValueError, "init_fn must be"),
    (lambda: LigerLayerNorm(4, impl="triton"), ValueError, "impl"),
    (lambda: LigerLayerNorm(4, mode="fast"), ValueError, "mode"),
    (lambda: LigerLayerNorm(4, backend="cutile"), ValueError, "backend"),
    (lambda: LigerSwiGLUMLP(config(hidden_act="gelu")), ValueError, "LigerSwiGLUMLP.*'gelu'"),
    (lambda: LigerPhi3SwiGLUMLP(config(hidden_act="gelu")), ValueError, "LigerPhi3SwiGLUMLP.*'gelu'"),
    (lambda: LigerGEGLUMLP(config()), ValueError, "LigerGEGLUMLP.*'silu'"),
    (lambda: LigerGEGLUMLP(config(hidden_act=None)), ValueError, "None"),
    (lambda: LigerQKNormRope(4, norm_over_heads=True), ValueError, "num_heads"),
    (lambda: LigerQKNormRope(4, norm_over_heads=True, num_heads=2), ValueError, "num_heads"),
    (lambda: LigerQKNormRope(4, num_heads=2, num_kv_heads=2), ValueError, "num_heads"),
    (lambda: rotate(position_ids=torch.arange(7)), ValueError, "position_ids"),
    (lambda: rotate(unsqueeze_dim=0), ValueError, "unsqueeze_dim"),
    (lambda: rotate(rotary_dim=5), ValueError, "rotary_dim"),
    (lambda: rotate(rotary_dim=18), ValueError, "rotary_dim"),
]


def rotate(**options):
    return liger_rotary_pos_emb(random(2, 4, 7, 16), random(2, 2, 7, 16), *angles(2, 7, 16), **options)


@pytest.mark.parametrize("call, error, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


SIGNATURES = {  # of Liger-Kernel 0.8.5
    "LigerRMSNorm": "hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=True row_mode=None "
    "elementwise_affine=True",
    "LigerFusedAddRMSNorm": "hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=False",
    "LigerLayerNorm": "hidden_size eps=1e-06 bias=False init_fn='ones' impl=None mode=None backend=None",
    "LigerSwiGLUMLP": "config intermediate_size=None",
    "LigerPhi3SwiGLUMLP": "config",
    "LigerGEGLUMLP": "config",
    "LigerCrossEntropyLoss": "weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' "
    "softcap=None return_z_loss=False return_token_accuracy=False return_predicted_tokens=False",
    "LigerFusedLinearCrossEntropyLoss": "ce_weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 "
    "reduction='mean' softcap=None return_z_loss=False accum_dtype=None use_token_scaling=False "
    "return_token_accuracy=False return_predicted_tokens=False",
    "LigerKLDIVLoss": "eps=1e-10 size_average=None reduce=None reduction='mean' log_target=False",
    "LigerJSD": "beta=0.5 ignore_index=-100",
    "LigerTVDLoss": "reduction='batchmean' ignore_index=-100",
    "LigerFusedLinearJSD": "jsd_beta=0.5 ignore_index=-100 temperature=1.0 accum_dtype=None",
    "liger_rotary_pos_emb": "q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None",
    "liger_multimodal_rotary_pos_emb": "q k cos sin mrope_section unsqueeze_dim=1",
    "LigerBlockSparseTop2MLP": "config",
    "LigerExperts": "config",
    "LigerExperts.forward": "self hidden_states top_k_index top_k_weights",
    "LigerFalconH1MLP": "config",
    "LigerFalconH1SwiGLUMLP": "config",
    "LigerMLP": "config",
    "LigerQwen3MoeSwiGLUMLP": "config intermediate_size=None",
    "LigerSwiGLUMLPForMuseGlimmer": "config",
    "LigerTiledGEGLUMLP": "config num_shards=None",
    "LigerTiledSwiGLUMLP": "config num_shards=None",
    "LigerModulatedRMSNorm": "hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=True "
    "elementwise_affine=True",
    "LigerModulatedRMSNorm.forward": "self hidden_states scale shift=None",
    "LigerRMSNormForMuseGlimmer": "dim=None eps=1e-06 offset=0.0 casting_mode='gemma' init_fn='ones' in_place=False "
    "with_scale=True",
    "LigerRMSNormForMuseGlimmerTextCentered": "hidden_size eps=1e-06 offset=1.0 casting_mode='gemma' init_fn='zeros' "
    "in_place=False row_mode=None",
    "LigerFusedCETVDLoss": "ignore_index=-100",
    "LigerFusedCETVDLoss.forward": "self student_logits teacher_logits target",
    "LigerFusedLinearKLDivLoss": "reduction='batchmean' ignore_index=-100 temperature=1.0 eps=1e-10 accum_dtype=None",
    "LigerFusedLinearKLDivLoss.forward": "self student_input student_weight target shift_labels=None",
    "liger_llama4_text_rotary_pos_emb": "xq xk freqs_cis",
    "liger_llama4_vision_rotary_pos_emb": "query key freqs_ci",
    "LigerCrossEntropyLoss.forward": "self _input target",
    "LigerFusedLinearCrossEntropyLoss.forward": "self lin_weight _input target bias=None",
    "LigerKLDIVLoss.forward": "self y_pred y_true",
    "LigerJSD.forward": "self log_q log_p shift_labels=None",
    "LigerTVDLoss.forward": "self p q shift_labels=None",
    "LigerFusedLinearJSD.forward": "self student_input student_weight teacher_input teacher_weight shift_labels=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_ligers(name):
    cls, _, method = name.partition(".")
    called = getattr(liger_trainer, cls)
    parameters = inspect.signature(getattr(called, method) if method else called).parameters.values()
    ours = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.kind != p.KEYWORD_ONLY
    ]
    assert ours == SIGNATURES[name].split()
