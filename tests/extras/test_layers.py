"""The layers of modules/ against Hugging Face's and torch's, or formulas in fp64: values, gradients, state dicts."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_same, check, random, randomized, results
from torch import Tensor, nn
from transformers import Llama4TextConfig, MixtralConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4 import modeling_llama4
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from liger_trainer import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerFalconH1MLP,
    LigerFalconH1SwiGLUMLP,
    LigerFusedAddRMSNorm,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerMLP,
    LigerModulatedRMSNorm,
    LigerPhi3SwiGLUMLP,
    LigerQKNormRope,
    LigerQwen3MoeSwiGLUMLP,
    LigerReLUSquared,
    LigerRMSNorm,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRope,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
)

GEMMA = dict(offset=1.0, casting_mode="gemma", init_fn="zeros")
BF16 = torch.bfloat16


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


# Norms

NORMS = {
    "llama": (LigerRMSNorm(24), LlamaRMSNorm(24)),
    "eps": (LigerRMSNorm(24, 1e-2), LlamaRMSNorm(24, eps=1e-2)),
    "gemma": (LigerRMSNorm(24, **GEMMA), GemmaRMSNorm(24)),
    **{
        f"no weight, {mode}": (LigerRMSNorm(24, casting_mode=mode, elementwise_affine=False), rms)
        for mode in ("llama", "gemma", "none")
    },
    "layer norm": (LigerLayerNorm(24), nn.LayerNorm(24, eps=1e-6, bias=False)),
    "layer norm, bias": (LigerLayerNorm(24, 1e-2, True), nn.LayerNorm(24, eps=1e-2)),
    "Muse Glimmer": (LigerRMSNormForMuseGlimmer(24), lambda x, w: rms(x) * w),
    "Muse Glimmer, no weight": (LigerRMSNormForMuseGlimmer(with_scale=False), rms),
    "Muse Glimmer, centred": (LigerRMSNormForMuseGlimmerTextCentered(24), lambda x, w: rms(x) * (1 + w)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    check(*NORMS[name], random(2, 7, 24))


@pytest.mark.parametrize("weights", [torch.float32, BF16])
@pytest.mark.parametrize("name", ["llama", "eps", "gemma"])
def test_rms_norms_of_bf16(name, weights):
    check(*NORMS[name], random(2, 7, 24, dtype=BF16), dtype=weights)


def test_rms_norm_casts_before_or_after_the_weight():
    """In bf16 the modes differ, each from the other's reference by a rounding."""
    x, weight = random(50, 64, dtype=BF16), 1 + 0.3 * random(64, seed=1)
    normed = F.rms_norm(x.float(), (64,), eps=1e-6)
    for mode, wanted in (("llama", normed.bfloat16() * weight), ("gemma", (normed * weight).bfloat16())):
        norm = LigerRMSNorm(64, casting_mode=mode)
        norm.weight.data.copy_(weight)
        y = norm(x)
        assert y.dtype == wanted.dtype and torch.equal(y, wanted)
    y = x[:, :24]
    for norm in (LigerRMSNormForMuseGlimmer(24), LigerRMSNormForMuseGlimmerTextCentered(24)):
        assert torch.equal(norm(y), rms(y.float()).bfloat16())  # initially the weight is 1, or 0 of offset 1


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
    ours, norm = randomized(LigerFusedAddRMSNorm(24, **options)), randomized(LigerRMSNorm(24, **options))

    def apart(x, residual):
        return norm(x + residual), x + residual

    for dtype in (torch.float32, BF16):
        ours.to(dtype), norm.to(dtype)
        inputs = [random(2, 7, 24, dtype=dtype), random(2, 7, 24, dtype=dtype, seed=1)]
        assert_same(results(ours, inputs, list(ours.parameters())), results(apart, inputs, list(norm.parameters())))


def test_initial_weights():
    for module in (LigerRMSNorm, LigerFusedAddRMSNorm, LigerLayerNorm):
        assert torch.equal(module(3).weight, torch.ones(3))
        assert torch.equal(module(3, init_fn="zeros").weight, torch.zeros(3))
    assert torch.equal(LigerLayerNorm(3, bias=True).bias, torch.zeros(3))
    assert not list(NORMS["no weight, llama"][0].parameters()) and not NORMS["no weight, llama"][0].state_dict()


SHAPES = {"all": (24,), "one row": (1, 24), "a sequence": (2, 24), "a token": (14, 24), "like x": (2, 7, 24)}


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_modulated_rms_norm(name, shifted):
    shape = SHAPES[name]
    wide = {"a sequence": (2, 1, 24), "a token": (2, 7, 24)}.get(name, shape)
    modulation = [random(*shape, seed=i + 1) for i in range(1 + shifted)]

    def truth(x, scale, *rest):
        y = (1 + scale.view(wide)) * rms(x) * (0.5 + rest[-1])
        return y + rest[0].view(wide) if shifted else y

    check(LigerModulatedRMSNorm(24, offset=0.5), truth, random(2, 7, 24), *modulation)
    if not shifted:
        plain = LigerModulatedRMSNorm(24, elementwise_affine=False)
        check(plain, lambda x, s: (1 + s.view(wide)) * rms(x), random(2, 7, 24), *modulation)


# MLPs


def config(**options) -> SimpleNamespace:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "hidden_act": "silu", "mlp_bias": False}
    return SimpleNamespace(**{**sizes, **options})


def gated(act):
    return lambda x, gate, up, down: F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)


def gelu(form):
    return lambda x: F.gelu(x, approximate=form)


def of_hugging_face(ours, theirs, **options):
    torch.manual_seed(0)
    return ours(config(**options)), theirs(config(**options))


SILU = gated(F.silu)
FALCON = {"mlp_multipliers": (0.7, 1.3)}
MLPS = {
    "llama": of_hugging_face(LigerSwiGLUMLP, LlamaMLP),
    "llama-bias": of_hugging_face(LigerSwiGLUMLP, LlamaMLP, mlp_bias=True),
    "swish": of_hugging_face(LigerSwiGLUMLP, LlamaMLP, hidden_act="swish"),
    "gemma": of_hugging_face(LigerGEGLUMLP, GemmaMLP, hidden_act="gelu_pytorch_tanh"),
    "gelu-new": of_hugging_face(LigerGEGLUMLP, GemmaMLP, hidden_act="gelu_new"),
    "gelu-fast": of_hugging_face(LigerGEGLUMLP, GemmaMLP, hidden_act="gelu_fast"),
    "gelu-exact": of_hugging_face(LigerGEGLUMLP, GemmaMLP, hidden_act="gelu"),
    "gemma3": of_hugging_face(LigerGEGLUMLP, Gemma3MLP, hidden_activation="gelu_pytorch_tanh", hidden_act=None),
    "phi3": of_hugging_face(LigerPhi3SwiGLUMLP, Phi3MLP),
    **{
        f"{ours.__name__}{', bias' * bias}": of_hugging_face(ours, FalconH1MLP, mlp_bias=bias, **FALCON)
        for ours in (LigerFalconH1SwiGLUMLP, LigerFalconH1MLP)
        for bias in (False, True)
    },
    "Mixtral's first": (LigerBlockSparseTop2MLP(config()), lambda x, w1, w2, w3: SILU(x, w1, w3, w2)),
    "Qwen3 MoE": (LigerQwen3MoeSwiGLUMLP(config()), SILU),
    "Qwen3 MoE, its width": (LigerQwen3MoeSwiGLUMLP(config(intermediate_size=8), intermediate_size=16), SILU),
    "plain": (LigerMLP(config()), SILU),
    "Muse Glimmer": (LigerSwiGLUMLPForMuseGlimmer(config(hidden_act=None, hidden_activation="silu")), SILU),
    "tiled": (LigerTiledSwiGLUMLP(config()), SILU),
    "one tile": (LigerTiledSwiGLUMLP(config(), num_shards=1), SILU),
    "unequal tiles": (LigerTiledSwiGLUMLP(config(), num_shards=3), SILU),
    "tiled gelu": (LigerTiledGEGLUMLP(config(hidden_act="gelu"), num_shards=4), gated(gelu("none"))),
    "tiled tanh": (LigerTiledGEGLUMLP(config(hidden_act="gelu_pytorch_tanh"), 4), gated(gelu("tanh"))),
    "another width": (LigerSwiGLUMLP(config(), intermediate_size=16), SILU),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps(name):
    ours, theirs = MLPS[name]
    x = 3 * random(2, 31, 24)
    check(ours, theirs, x)
    if isinstance(theirs, nn.Module):
        check(ours, theirs, x.bfloat16(), dtype=BF16)


def test_names_of_weights():
    """Which checkpoints have; those of Hugging Face's fit both ways above."""
    names = [name for name, _ in MLPS["Mixtral's first"][0].named_parameters()]
    assert names == ["w1.weight", "w2.weight", "w3.weight"]
    assert MLPS["another width"][0].intermediate_size == 16


@pytest.mark.parametrize("name", ["llama-bias", "gemma", "gelu-exact", "phi3"])
def test_a_down_proj_that_does_more_is_called(name):
    """An adapter, a hook, a replaced forward: whatever is done to down_proj takes part."""
    mlp, x = randomized(MLPS[name][0]), random(3, 24)
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
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault((t.data_ptr(), t.shape), t), lambda t: t):
        MLPS[name][0](random(3, 24))
    assert sum(t.numel() for t in kept.values() if t.shape[0] == 3 and t.shape[1] >= 40) == 2 * 3 * 40


@pytest.mark.parametrize("name", ["llama-bias", "gemma"])
def test_mlp_under_autocast(name):
    ours, theirs = map(randomized, MLPS[name])
    ours.load_state_dict(theirs.state_dict())
    with torch.autocast("cpu", BF16):
        got, wanted = (results(each, [random(5, 24)], list(each.parameters())) for each in (ours, theirs))
    assert_same(got, wanted, tolerance=2e-2)


@pytest.mark.parametrize("shards, tiles", [(None, 4), (5, 5), (1, 1)])
def test_tiles_store_their_input_alone(shards, tiles):
    """Default: positions / hidden_size, rounded up. Gate and up of one tile at a time, never those of all."""
    mlp, x, rows, kept = LigerTiledSwiGLUMLP(config(), num_shards=shards), random(1, 80, 24), [], []
    mlp.gate_proj.register_forward_hook(lambda _, args, output: rows.append(args[0].shape[-2]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = mlp(x.requires_grad_())
    assert len(rows) == tiles and sum(rows) == 80
    assert not any(shape[-1] == 40 for shape in kept)
    y.sum().backward()
    assert len(rows) == 2 * tiles


def test_relu_squared():
    check(LigerReLUSquared(), lambda x: F.relu(x).square(), random(5, 24))


# Experts


def experts_truth(index):
    def truth(x, weights, gate_up, down):
        out = torch.zeros_like(x)
        for token, k in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
            e = index[token, k]
            gate, up = F.linear(x[token], gate_up[e]).chunk(2)
            product = weights[token, k] * F.linear(F.silu(gate) * up, down[e])
            out = out.index_add(0, torch.tensor([token]), product[None])
        return out

    return truth


class Routed(nn.Module):
    """Experts whose index is given."""

    def __init__(self, experts, index):
        super().__init__()
        self.experts, self.index = experts, index

    def forward(self, x, weights):
        return self.experts(x, self.index, weights)


@pytest.mark.parametrize("names", [("num_experts", "moe_intermediate_size"), ("num_local_experts", "intermediate_size"),
                                   ("n_routed_experts", "moe_intermediate_size")])  # fmt: skip
def test_experts(names):
    index = torch.stack([torch.randperm(4)[:2] for _ in range(9)])  # the fifth expert has no token
    experts = Routed(LigerExperts(config(**dict(zip(names, (5, 12), strict=True)))), index)
    check(experts, experts_truth(index), random(9, 24), torch.rand(9, 2))


def mixtral():
    how = MixtralConfig(hidden_size=24, intermediate_size=16, num_local_experts=4, experts_implementation="eager")
    theirs = MixtralExperts(how)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = LigerExperts(how)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def test_experts_are_hugging_faces():
    """State dicts fit; a batch of sequences; int32 indices."""
    ours, theirs = mixtral()
    x, index, weights = random(2, 7, 24), torch.randint(4, (2, 7, 2)), torch.rand(2, 7, 2)
    got, wanted = ours(x, index.int(), weights), theirs(x.view(-1, 24), index.view(-1, 2), weights.view(-1, 2))
    torch.testing.assert_close(got, wanted.view_as(x), rtol=0, atol=1e-5)


def test_experts_in_bf16_are_grouped_products():
    """Values and gradients against fp64; an expert without tokens has gradient 0."""
    experts = mixtral()[0].bfloat16()
    x, weights = random(40, 24, dtype=BF16), torch.rand(40, 2)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(40)])
    assert experts._grouped(x) and not experts._grouped(x.float()) and not experts._grouped(x[:0])
    parameters = list(experts.parameters())
    got = results(lambda x, weights: experts(x, index, weights), [x, weights], parameters)
    exact = [t.detach().double() for t in (x, weights, *parameters)]
    for ours, theirs in zip(got, results(experts_truth(index), exact), strict=True):
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()
    assert got[0].dtype == BF16 and not got[3][3].any() and not got[4][3].any()


def test_experts_of_odd_sizes_and_without_tokens():
    experts = LigerExperts(config(num_experts=3, intermediate_size=6)).bfloat16()
    x, index = random(4, 24, dtype=BF16), torch.randint(3, (4, 1))
    assert not experts._grouped(x)
    y, z = experts(x, index, torch.ones(4, 1)), experts.float()(x.float(), index, torch.ones(4, 1))
    torch.testing.assert_close(y.float(), z, rtol=0.02, atol=0.02)
    none = experts(torch.randn(0, 24), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert none.shape == (0, 24)


# Rotations


def angles(batch: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin (batch, length, width), as transformers' rotary embeddings make them: each half the same."""
    positions = torch.arange(length)[None] + 3 * torch.arange(batch)[:, None]
    frequencies = 10.0 ** -torch.linspace(0, 2, width // 2)
    angle = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


Q, K = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1)
COS, SIN = angles(2, 7, 16)
THREE = [torch.stack([x, x.roll(1, 1), x.roll(2, 1)]) for x in (COS, SIN)]  # positions of time, height, width
SECTION = [2, 3, 3]


def by_llama(cos, sin, **how):
    return lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, **how)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_pos_emb_is_hugging_faces(batch, unsqueeze_dim):
    q, k, (cos, sin) = Q, K, angles(batch, 7, 16)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    calls = [
        ((cos, sin), {"unsqueeze_dim": unsqueeze_dim}), ((cos, sin, None, unsqueeze_dim), {}),
        ((cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), None, unsqueeze_dim), {}),
        ((cos[..., :8], sin[..., :8]), {"unsqueeze_dim": unsqueeze_dim, "rotary_dim": 16}),
        *([((cos[0], sin[0]), {"unsqueeze_dim": unsqueeze_dim})] if batch == 1 else []),
    ]  # fmt: skip
    for args, options in calls:
        ours = lambda q, k, args=args, options=options: liger_rotary_pos_emb(q, k, *args, **options)  # noqa: E731
        check(ours, by_llama(cos, sin, unsqueeze_dim=unsqueeze_dim), q, k)


def first_columns(q, k):
    """The first 8 columns turn and the others pass through."""
    turned = apply_rotary_pos_emb(q[..., :8], k[..., :8], *angles(2, 7, 8))
    return [torch.cat([x, y[..., 8:]], -1) for x, y in zip(turned, (q, k), strict=True)]


def by_gpt_oss(q, k):
    return modeling_gpt_oss.apply_rotary_pos_emb(q, k, COS[..., :8], SIN[..., :8])


def by_axes(q, k):
    """Each pair from its position."""
    parts = [[part[i % 3] for i, part in enumerate(x.split(2 * SECTION, -1))] for x in THREE]
    return apply_rotary_pos_emb(q, k, *(torch.cat(x, -1) for x in parts))


def interleaved(q, k):
    turns = torch.complex(COS[..., :8].double(), SIN[..., :8].double())[:, None]
    return [turned(x, turns) for x in (q, k)]


def turned(x, turns):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def swapped(q, k):
    """Heads behind positions."""
    turned = liger_multimodal_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *THREE, SECTION, 2)
    return [x.transpose(1, 2) for x in turned]


MORE = [torch.cat([x[..., :4], random(2, 7, 4, seed=5)], -1) for x in angles(2, 7, 8)]
HALVES = COS[..., :8], SIN[..., :8]
ROTATIONS = {
    "a part": (lambda q, k: liger_rotary_pos_emb(q, k, *angles(2, 7, 8)), first_columns),
    "the first angles of more": (lambda q, k: liger_rotary_pos_emb(q, k, *MORE, rotary_dim=8), first_columns),
    "gpt-oss": (lambda q, k: liger_rotary_pos_emb(q, k, *HALVES, rotary_dim=16), by_gpt_oss),
    "gpt-oss, layer": (lambda q, k: LigerRope(half_width=True)(q, k, *HALVES), by_gpt_oss),
    "axes": (lambda q, k: liger_multimodal_rotary_pos_emb(q, k, *THREE, SECTION), by_axes),
    "axes, layer": (lambda q, k: LigerRope(mrope_section=SECTION)(q, k, *THREE), by_axes),
    "axes, heads behind": (swapped, by_axes),
    "interleaved": (
        lambda q, k: LigerRope(interleaved=True)(q, k, *(x[..., :8].repeat_interleave(2, -1) for x in (COS, SIN))),
        interleaved,
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name):
    check(*ROTATIONS[name], Q, K)


def norm_then_rope(q_norm: nn.Module, k_norm: nn.Module, over_heads: bool):
    """What the attention of these models does to the outputs of q_proj and k_proj, (B, S, heads, D)."""

    def run(q, k):
        if over_heads:
            q, k = q_norm(q.flatten(2)).view_as(q), k_norm(k.flatten(2)).view_as(k)
        else:
            q, k = q_norm(q), k_norm(k)
        return apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), COS, SIN)

    return run


HEADS = [random(2, 7, 4, 16), random(2, 7, 2, 16, seed=1)]
OLMO = dict(casting_mode="gemma", norm_over_heads=True, num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    "norm, options", [(Qwen3RMSNorm, {}), (Gemma3RMSNorm, GEMMA), (Olmo2RMSNorm, OLMO)], ids=["qwen", "gemma", "olmo"]
)
def test_qk_norm_rope_is_norm_then_rope(norm, options):
    over_heads = "num_heads" in options
    ours = LigerQKNormRope(16, **options)
    q_norm, k_norm = (randomized(norm(16 * (heads if over_heads else 1), 1e-6)) for heads in (4, 2))
    ours.q_norm.load_state_dict(q_norm.state_dict())
    ours.k_norm.load_state_dict(k_norm.state_dict())
    parameters = [*q_norm.parameters(), *k_norm.parameters()]
    wanted = results(norm_then_rope(q_norm, k_norm, over_heads), HEADS, parameters)
    assert_same(results(lambda q, k: ours(q, k, COS, SIN), HEADS, list(ours.parameters())), wanted)


@pytest.mark.parametrize(
    "options, table",
    [({"interleaved": True}, (COS, SIN)), ({"half_width": True}, HALVES), ({"mrope_section": SECTION}, THREE)],
    ids=str,
)
def test_qk_norm_rope_turns_as_rope_does(options, table):
    ours, turn = randomized(LigerQKNormRope(16, **options)), LigerRope(**options)

    def apart(q, k):
        return turn(ours.q_norm(q).transpose(1, 2), ours.k_norm(k).transpose(1, 2), *table)

    parameters = list(ours.parameters())
    assert_same(results(lambda q, k: ours(q, k, *table), HEADS, parameters), results(apart, HEADS, parameters))


# Llama 4's: by complex numbers, of q and k as (B, S, heads, D)


@pytest.mark.parametrize("batch", [1, 2])
def test_llama4_text_rotation(batch):
    turns = 1.1 * torch.polar(torch.ones(batch, 7, 8), 6 * torch.rand(batch, 7, 8))
    exact = turns.to(torch.complex128)[:, :, None]
    ours = lambda q, k: liger_llama4_text_rotary_pos_emb(q, k, turns)  # noqa: E731
    check(ours, lambda q, k: (turned(q, exact), turned(k, exact)), *HEADS)


@pytest.mark.parametrize("shape", [(7, 8), (7, 1, 8), (1, 7, 1, 8)])
def test_llama4_vision_rotation(shape):
    turns = torch.polar(torch.ones(shape), 6 * torch.rand(shape))
    exact = turns.to(torch.complex128).view(1, 7, 1, 8)
    ours = lambda q, k: liger_llama4_vision_rotary_pos_emb(q, k, turns)  # noqa: E731
    check(ours, lambda q, k: (turned(q, exact), turned(k, exact)), HEADS[0], HEADS[0].flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_llama4_rotations_are_hugging_faces(dtype):
    how = Llama4TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    turns = modeling_llama4.Llama4TextRotaryEmbedding(how)(random(2, 7, 64), torch.arange(7)[None])
    q, k = (x.to(dtype) for x in HEADS)
    ours, theirs = liger_llama4_text_rotary_pos_emb(q, k, turns), modeling_llama4.apply_rotary_emb(q, k, turns)
    torch.testing.assert_close(tuple(ours), tuple(theirs))
    ours = liger_llama4_vision_rotary_pos_emb(q, q, turns[0])
    torch.testing.assert_close(tuple(ours), tuple(modeling_llama4.vision_apply_rotary_emb(q, q, turns[0])))


# All of them


def test_on_the_kernels(kernels):
    """Strided views of Triton's kernels' inputs: complex frequencies' parts, packed gates, rows of an expert."""
    test_llama4_text_rotation(2)
    test_mlps("unequal tiles")
    test_experts(("num_experts", "moe_intermediate_size"))
    test_modulated_rms_norm("a sequence", True)


def test_layers_compile_whole():
    torch._dynamo.reset()
    torch.manual_seed(0)
    cos, sin = angles(1, 14, 12)
    turns = torch.polar(torch.ones(1, 14, 6), torch.rand(1, 14, 6))
    index, weights, scale = torch.randint(4, (14, 2)), torch.rand(14, 2), torch.randn(24)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([LigerRMSNorm(24), LigerLayerNorm(24, bias=True)])
            self.add, self.modulated = LigerFusedAddRMSNorm(24), LigerModulatedRMSNorm(24)
            self.mlp, self.geglu = LigerSwiGLUMLP(config()), LigerGEGLUMLP(config(hidden_act="gelu"))
            self.tiled, self.falcon = LigerTiledSwiGLUMLP(config()), LigerFalconH1MLP(config(**FALCON))
            self.qk, self.relu2 = LigerQKNormRope(12), LigerReLUSquared()
            self.experts = LigerExperts(config(num_experts=4)).bfloat16()

        def forward(self, x):
            y, x = self.add(self.mlp(self.norms[0](x)), x)
            x = x + self.geglu(self.norms[1](y)) + self.modulated(self.falcon(self.tiled(x)), scale)
            q, k = self.qk(x.view(1, 14, 2, 12), y.view(1, 14, 2, 12), cos, sin)
            q, k = liger_rotary_pos_emb(q, k, cos, sin)
            q, k = liger_llama4_text_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), turns)
            routed = self.experts(x.bfloat16(), index, weights).float()
            return self.relu2((q + k).flatten(2)[0]) + routed

    block, x = Block(), random(14, 24)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    parameters = list(block.parameters())
    got, wanted = (results(each, [x], parameters) for each in (compiled, block))
    assert_same(got, wanted, tolerance=2e-2)  # the experts' bf16
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)


def rotate(**options):
    return liger_rotary_pos_emb(Q, K, *angles(2, 7, 16), **options)


TURNS = torch.polar(torch.ones(7, 8), torch.rand(7, 8))
REFUSED = [
    (lambda: LigerRMSNorm(4, casting_mode="bf16"), "casting_mode must be"),
    (lambda: LigerRMSNorm(4, init_fn="normal"), "init_fn must be"),
    (lambda: LigerRMSNorm(4, offset=1.0, elementwise_affine=False), "offset 1.0 is added"),
    (lambda: LigerRMSNorm(4, casting_mode="none")(random(2, 4).half()), "casting_mode='none'"),
    (lambda: LigerFusedAddRMSNorm(4, casting_mode="?"), "casting_mode must be"),
    (lambda: LigerRMSNormForMuseGlimmer(), "dim must be"),
    (lambda: LigerModulatedRMSNorm(24)(random(2, 7, 24), random(3, 24)), "scale must have"),
    (lambda: LigerModulatedRMSNorm(24)(random(2, 7, 24), random(2, 1)), "scale must have"),
    (lambda: LigerModulatedRMSNorm(24)(random(2, 24), random(24), random(2, 24)), "shift must have"),
    (lambda: LigerLayerNorm(4, init_fn="normal"), "init_fn must be"),
    (lambda: LigerLayerNorm(4, impl="triton"), "impl"),
    (lambda: LigerLayerNorm(4, mode="fast"), "mode"),
    (lambda: LigerLayerNorm(4, backend="cutile"), "backend"),
    (lambda: LigerSwiGLUMLP(config(hidden_act="gelu")), "LigerSwiGLUMLP.*'gelu'"),
    (lambda: LigerPhi3SwiGLUMLP(config(hidden_act="gelu")), "LigerPhi3SwiGLUMLP.*'gelu'"),
    (lambda: LigerGEGLUMLP(config()), "LigerGEGLUMLP.*'silu'"),
    (lambda: LigerGEGLUMLP(config(hidden_act=None)), "None"),
    (lambda: LigerBlockSparseTop2MLP(config(hidden_act="gelu")), "LigerBlockSparseTop2MLP.*'gelu'"),
    (lambda: LigerTiledSwiGLUMLP(config(), num_shards=0), "num_shards must be"),
    (lambda: LigerTiledGEGLUMLP(config(hidden_act="gelu"), -1), "num_shards must be"),
    (lambda: LigerTiledGEGLUMLP(config()), "LigerTiledGEGLUMLP.*'silu'"),
    (lambda: LigerExperts(config(hidden_act="gelu", num_experts=2)), "LigerExperts.*'gelu'"),
    (lambda: LigerExperts(config()), "num_local_experts"),
    (lambda: LigerQKNormRope(4, norm_over_heads=True), "num_heads"),
    (lambda: LigerQKNormRope(4, norm_over_heads=True, num_heads=2), "num_heads"),
    (lambda: LigerQKNormRope(4, num_heads=2, num_kv_heads=2), "num_heads"),
    (lambda: rotate(position_ids=torch.arange(7)), "position_ids"),
    (lambda: rotate(unsqueeze_dim=0), "unsqueeze_dim"),
    (lambda: rotate(rotary_dim=5), "rotary_dim"),
    (lambda: rotate(rotary_dim=18), "rotary_dim"),
    (lambda: liger_llama4_text_rotary_pos_emb(*HEADS, TURNS.real[None]), "freqs_cis must be complex"),
    (lambda: liger_llama4_vision_rotary_pos_emb(*HEADS, TURNS.real), "freqs_ci must be complex"),
    (lambda: liger_llama4_vision_rotary_pos_emb(*HEADS, TURNS[:6]), "freqs_ci must hold"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
