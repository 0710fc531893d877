"""The layers of single families, tiles and experts beside plain torch in fp64, and Hugging Face's where there are."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_layer_true, assert_true
from torch import nn
from transformers import Llama4TextConfig, MixtralConfig
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.llama4 import modeling_llama4
from transformers.models.mixtral import modeling_mixtral

from liger_trainer import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerFalconH1MLP,
    LigerFalconH1SwiGLUMLP,
    LigerMLP,
    LigerModulatedRMSNorm,
    LigerQwen3MoeSwiGLUMLP,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerSwiGLUMLPForMuseGlimmer,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)


def config(**options) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 24, "intermediate_size": 40, "hidden_act": "silu"} | options)


def gated(act):
    return lambda x, gate, up, down: F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)


MLPS = {
    "qwen3-moe": lambda: LigerQwen3MoeSwiGLUMLP(config()),
    "qwen3-moe, its width": lambda: LigerQwen3MoeSwiGLUMLP(config(intermediate_size=8), intermediate_size=16),
    "plain": lambda: LigerMLP(config()),
    "muse-glimmer": lambda: LigerSwiGLUMLPForMuseGlimmer(config(hidden_act=None, hidden_activation="silu")),
    "tiled": lambda: LigerTiledSwiGLUMLP(config()),
    "one tile": lambda: LigerTiledSwiGLUMLP(config(), num_shards=1),
    "tiles of unequal size": lambda: LigerTiledSwiGLUMLP(config(), num_shards=3),
}


@pytest.mark.parametrize("name", MLPS)
def test_swiglu_mlps(name):
    assert_layer_true(MLPS[name](), gated(F.silu), torch.randn(2, 31, 24))


@pytest.mark.parametrize("act, form", [("gelu_pytorch_tanh", "tanh"), ("gelu", "none")])
def test_tiled_geglu_mlp(act, form):
    mlp = LigerTiledGEGLUMLP(config(hidden_act=act), num_shards=4)
    assert_layer_true(mlp, gated(lambda x: F.gelu(x, approximate=form)), torch.randn(31, 24))


def test_experts_of_mixtrals_first_releases():
    mlp = LigerBlockSparseTop2MLP(config())
    assert [name for name, _ in mlp.named_parameters()] == ["w1.weight", "w2.weight", "w3.weight"]
    truth = gated(F.silu)
    assert_layer_true(mlp, lambda x, w1, w2, w3: truth(x, w1, w3, w2), torch.randn(2, 7, 24))


@pytest.mark.parametrize("module", [LigerFalconH1SwiGLUMLP, LigerFalconH1MLP])
@pytest.mark.parametrize("bias", [False, True])
def test_falcon_h1_mlp_is_hugging_faces(module, bias):
    how = config(mlp_bias=bias, mlp_multipliers=(0.7, 1.3))
    theirs = modeling_falcon_h1.FalconH1MLP(how).double()
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in module(how).named_parameters()]

    def truth(x, *parameters):
        return torch.func.functional_call(theirs, dict(zip(names, parameters, strict=True)), (x,))

    assert_layer_true(module(how), truth, torch.randn(2, 7, 24))


@pytest.mark.parametrize("shards, tiles", [(None, 4), (5, 5), (1, 1)])
def test_tiles_store_their_input_alone(shards, tiles):
    """Default: positions / hidden_size, rounded up. Gate and up of one tile at a time, never those of all."""
    mlp, x, rows, kept = LigerTiledSwiGLUMLP(config(), num_shards=shards), torch.randn(1, 80, 24), [], []
    mlp.gate_proj.register_forward_hook(lambda _, args, output: rows.append(args[0].shape[-2]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = mlp(x.requires_grad_())
    assert len(rows) == tiles and sum(rows) == 80
    assert not any(shape[-1] == 40 for shape in kept)
    y.sum().backward()
    assert len(rows) == 2 * tiles


# Experts


def experts_truth(index):
    def truth(x, weights, gate_up, down):
        out = torch.zeros_like(x)
        for token, k in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
            e = index[token, k]
            gate, up = F.linear(x[token], gate_up[e]).chunk(2)
            out = out.index_add(
                0, torch.tensor([token]), weights[token, k] * F.linear(F.silu(gate) * up, down[e])[None]
            )
        return out

    return truth


@pytest.mark.parametrize("names", [("num_experts", "moe_intermediate_size"), ("num_local_experts", "intermediate_size"),
                                   ("n_routed_experts", "moe_intermediate_size")])  # fmt: skip
def test_experts(names):
    experts = LigerExperts(config(**dict(zip(names, (5, 12), strict=True))))
    index = torch.stack([torch.randperm(4)[:2] for _ in range(9)])  # the fifth expert has no token

    def call(x, weights, gate_up, down):
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, parameters, (x, index, weights))

    assert_true(call, experts_truth(index), torch.randn(9, 24), torch.rand(9, 2), *experts.parameters())


def mixtral():
    how = MixtralConfig(hidden_size=24, intermediate_size=16, num_local_experts=4, experts_implementation="eager")
    theirs = modeling_mixtral.MixtralExperts(how)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = LigerExperts(how)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def test_experts_are_hugging_faces():
    """State dicts fit; a batch of sequences; int32 indices."""
    ours, theirs = mixtral()
    x, index, weights = torch.randn(2, 7, 24), torch.randint(4, (2, 7, 2)), torch.rand(2, 7, 2)
    got, wanted = ours(x, index.int(), weights), theirs(x.view(-1, 24), index.view(-1, 2), weights.view(-1, 2))
    torch.testing.assert_close(got, wanted.view_as(x), rtol=0, atol=1e-5)


def test_experts_in_bf16_are_grouped_products():
    """Values and gradients beside fp64; an expert without tokens has gradient 0."""
    experts = mixtral()[0].bfloat16()
    x, weights = torch.randn(40, 24).bfloat16().requires_grad_(), torch.rand(40, 2).requires_grad_()
    index = torch.stack([torch.randperm(3)[:2] for _ in range(40)])
    assert experts._grouped(x) and not experts._grouped(x.float()) and not experts._grouped(x[:0])
    leaves = [x, weights, *experts.parameters()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y, truth = experts(x, index, weights), experts_truth(index)(*exact)
    upstream = torch.randn(40, 24)
    got = [y, *torch.autograd.grad(y, leaves, upstream.bfloat16())]
    wanted = [truth, *torch.autograd.grad(truth, exact, upstream.double())]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()
    assert y.dtype == torch.bfloat16 and not got[3][3].any() and not got[4][3].any()


def test_experts_of_odd_sizes_and_without_tokens():
    experts = LigerExperts(config(num_experts=3, intermediate_size=6)).bfloat16()
    x, index = torch.randn(4, 24).bfloat16(), torch.randint(3, (4, 1))
    assert not experts._grouped(x)
    y, z = experts(x, index, torch.ones(4, 1)), experts.float()(x.float(), index, torch.ones(4, 1))
    torch.testing.assert_close(y.float(), z, rtol=0.02, atol=0.02)
    none = experts(torch.randn(0, 24), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert none.shape == (0, 24)


# Norms


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_norms_of_muse_glimmer():
    x = torch.randn(2, 7, 24)
    assert_layer_true(LigerRMSNormForMuseGlimmer(24), lambda x, w: rms(x) * w, x)
    assert_layer_true(LigerRMSNormForMuseGlimmer(with_scale=False), rms, x)
    assert_layer_true(LigerRMSNormForMuseGlimmerTextCentered(24), lambda x, w: rms(x) * (1 + w), x)
    y = x.bfloat16()
    for norm in (LigerRMSNormForMuseGlimmer(24), LigerRMSNormForMuseGlimmerTextCentered(24)):
        assert torch.equal(norm(y), rms(y.float()).bfloat16())  # initially the weight is 1, or 0 of offset 1


SHAPES = {"all": (24,), "one row": (1, 24), "a sequence": (2, 24), "a token": (14, 24), "like x": (2, 7, 24)}


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_modulated_rms_norm(name, shifted):
    shape = SHAPES[name]
    wide = {"a sequence": (2, 1, 24), "a token": (2, 7, 24)}.get(name, shape)
    modulation = [torch.randn(shape) for _ in range(1 + shifted)]

    def truth(x, scale, *rest):
        y = (1 + scale.view(wide)) * rms(x) * (0.5 + rest[-1])
        return y + rest[0].view(wide) if shifted else y

    assert_layer_true(LigerModulatedRMSNorm(24, offset=0.5), truth, torch.randn(2, 7, 24), *modulation)
    if not shifted:
        plain = LigerModulatedRMSNorm(24, elementwise_affine=False)
        assert_layer_true(plain, lambda x, s: (1 + s.view(wide)) * rms(x), torch.randn(2, 7, 24), *modulation)


def test_on_the_kernels(kernels):
    """Strided views of Triton's kernels' inputs: complex frequencies' parts, packed gates, rows of an expert."""
    test_llama4_text_rotation(2)
    test_swiglu_mlps("tiles of unequal size")
    test_experts(("num_experts", "moe_intermediate_size"))
    test_modulated_rms_norm("a sequence", True)


# Llama 4's rotation


def turned(x, turns):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(3)


@pytest.mark.parametrize("batch", [1, 2])
def test_llama4_text_rotation(batch):
    q, k = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16)
    turns = 1.1 * torch.polar(torch.ones(batch, 7, 8), 6 * torch.rand(batch, 7, 8))
    exact = turns.to(torch.complex128)[:, :, None]
    assert_true(
        lambda q, k: liger_llama4_text_rotary_pos_emb(q, k, turns),
        lambda q, k: (turned(q, exact), turned(k, exact)), q, k,
    )  # fmt: skip


def test_llama4_text_rotation_is_hugging_faces():
    how = Llama4TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    turns = modeling_llama4.Llama4TextRotaryEmbedding(how)(torch.randn(2, 7, 64), torch.arange(7)[None])
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.randn(2, 7, 4, 16).to(dtype), torch.randn(2, 7, 2, 16).to(dtype)
        for ours, theirs in zip(liger_llama4_text_rotary_pos_emb(q, k, turns),
                                modeling_llama4.apply_rotary_emb(q, k, turns), strict=True):  # fmt: skip
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(7, 8), (7, 1, 8), (1, 7, 1, 8)])
def test_llama4_vision_rotation_is_hugging_faces(shape):
    q, k = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 4, 16)
    turns = torch.polar(torch.ones(shape), 6 * torch.rand(shape))
    exact = turns.to(torch.complex128).view(1, 7, 1, 8)
    assert_true(
        lambda q, k: liger_llama4_vision_rotary_pos_emb(q, k, turns),
        lambda q, k: (turned(q, exact), turned(k, exact)), q, k,
    )  # fmt: skip
    for ours, theirs in zip(liger_llama4_vision_rotary_pos_emb(q, k, turns),
                            modeling_llama4.vision_apply_rotary_emb(q, k, turns), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def test_layers_compile_whole():
    torch._dynamo.reset()
    experts = LigerExperts(config(num_experts=4)).bfloat16()
    index, weights, turns = torch.randint(4, (31, 2)), torch.rand(31, 2), torch.polar(torch.ones(1, 31, 6), angles)
    tiled, falcon = LigerTiledSwiGLUMLP(config()), LigerFalconH1MLP(config(mlp_multipliers=(0.7, 1.3)))
    norm, scale = LigerModulatedRMSNorm(24), torch.randn(24)

    def block(x):
        x = norm(falcon(tiled(x)), scale)
        q, k = liger_llama4_text_rotary_pos_emb(x.view(1, 31, 2, 12), x.view(1, 31, 2, 12), turns)
        return (q + k).flatten(2)[0] + experts(x.bfloat16(), index, weights).float()

    x = torch.randn(31, 24)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, block(x), rtol=1e-5, atol=1e-5)


angles = torch.rand(1, 31, 6)

# What is refused

x7, angle = torch.randn(2, 7, 4, 16), torch.polar(torch.ones(7, 8), torch.rand(7, 8))
REFUSED = [
    (lambda: LigerBlockSparseTop2MLP(config(hidden_act="gelu")), "LigerBlockSparseTop2MLP.*'gelu'"),
    (lambda: LigerExperts(config(hidden_act="gelu", num_experts=2)), "LigerExperts.*'gelu'"),
    (lambda: LigerExperts(config()), "num_local_experts"),
    (lambda: LigerTiledSwiGLUMLP(config(), num_shards=0), "num_shards must be"),
    (lambda: LigerTiledGEGLUMLP(config(hidden_act="gelu"), -1), "num_shards must be"),
    (lambda: LigerTiledGEGLUMLP(config()), "LigerTiledGEGLUMLP.*'silu'"),
    (lambda: LigerRMSNormForMuseGlimmer(), "dim must be"),
    (lambda: LigerModulatedRMSNorm(24)(torch.randn(2, 7, 24), torch.randn(3, 24)), "scale must have"),
    (lambda: LigerModulatedRMSNorm(24)(torch.randn(2, 7, 24), torch.randn(2, 1)), "scale must have"),
    (lambda: LigerModulatedRMSNorm(24)(torch.randn(2, 24), torch.randn(24), torch.randn(2, 24)), "shift must have"),
    (lambda: liger_llama4_text_rotary_pos_emb(x7, x7, angle.real[None]), "freqs_cis must be complex"),
    (lambda: liger_llama4_vision_rotary_pos_emb(x7, x7, angle.real), "freqs_ci must be complex"),
    (lambda: liger_llama4_vision_rotary_pos_emb(x7, x7, angle[:6]), "freqs_ci must hold"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
