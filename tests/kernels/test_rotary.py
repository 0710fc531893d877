"""What is of the rotations and of attention over documents: layouts in memory, models, the inverse, documents."""

import functools
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import assert_same, check, evaluate
from op_table import CASES, OLMO, QWEN, angles
from torch import Tensor

from liger_trainer.extras.selfcheck_cases import Draw, Sizes
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.rope import rope, rope_reference

NORMED = ("q", "k", "q_weight", "k_weight")


def given(name: str, place, rotary: int = 16, **layout) -> dict[str, Tensor]:
    """An op's inputs with other angles; for rope as views of what projections give, (B, S, H, D)."""
    draw = Draw(Sizes(positions=5))
    tensors = CASES[name].inputs(place)
    if CASES[name].op == "rope":
        tensors |= {x: tensors[x].transpose(1, 2).contiguous().transpose(1, 2) for x in "qk"}
    turned = angles(rotary, rows=2, **layout)({}, draw)
    return tensors | {k: x.to(place.device, place.dtype) for k, x in turned.items()}


@pytest.mark.parametrize("form, rotary", [("a part, of each row", 8), ("interleaved", 6), ("Phi", 24)])
def test_columns_beyond_the_angles_pass_through(fp32, form, rotary):
    case = CASES[f"rope, {form}"]
    tensors = case.inputs(fp32)
    for out, x in zip(case.function(**tensors, **case.options), (tensors["q"], tensors["k"]), strict=True):
        assert torch.equal(out[..., rotary:], x[..., rotary:]) and not torch.equal(out, x)


def test_half_width_equals_full_width(fp32):
    full = given("rope", fp32)
    half = full | {name: full[name][..., :8] for name in ("cos", "sin")}
    for got, expected in zip(rope(**half, half_width=True), rope(**full), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_strides_of_angles(fp32, name):
    """Columns apart, a batch expanded, positions apart; and sines laid out unlike cosines."""
    case, tensors = CASES[name], CASES[name].inputs(fp32)
    expected = case.function(**tensors)
    apart = {k: torch.stack((tensors[k], tensors[k]), -1)[..., 0] for k in ("cos", "sin")}
    wide = {k: tensors[k].expand(2, -1, -1) for k in ("cos", "sin")}
    turned = {k: tensors[k].transpose(1, 2).contiguous().transpose(1, 2) for k in ("cos", "sin")}
    for angles_given in (apart, wide, turned, {"sin": apart["sin"]}, {"cos": turned["cos"]}):
        for x, y in zip(case.function(**tensors | angles_given), expected, strict=True):
            assert torch.equal(x, y)


def in_memory(x: Tensor, how: str) -> Tensor:
    """(B, S, H, D) with the same values and another layout."""
    if how == "packed":  # a slice of one projection of q, k and v
        return torch.cat([x.new_full((*x.shape[:2], 3, x.shape[3]), 7.0), x], 2)[:, :, 3:]
    return x.transpose(1, 2).contiguous().transpose(1, 2) if how == "heads first" else x.contiguous()


@pytest.mark.parametrize("upstream", ["expanded", "heads first", "contiguous"])
@pytest.mark.parametrize("how", ["projected", "packed", "heads first"])
@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_memory_layout_is_kept(triton_fp32, name, upstream, how):
    """So that neither the layers in front nor attention behind have to copy."""
    case, tensors = CASES[name], CASES[name].inputs(triton_fp32)
    swap = (lambda x: x.transpose(1, 2)) if name == "rope" else (lambda x: x)  # rope takes heads before positions
    for x in "qk":
        tensors[x] = swap(in_memory(swap(tensors[x]), how)).requires_grad_()
    result = case.function(**tensors)
    ups = [torch.ones(x.shape, device=x.device) for x in result]
    if upstream == "expanded":
        ups = [x.new_ones(()).expand(x.shape) for x in ups]
    if upstream == "heads first":
        ups = [in_memory(x, "heads first") for x in ups]
    leaves = tensors["q"], tensors["k"]
    for x, out, grad in zip(leaves, result, torch.autograd.grad(result, leaves, ups), strict=True):
        dense = in_memory(swap(x.detach()), how if how == "heads first" else "projected")
        assert grad.stride() == swap(dense).stride() and out.stride() == dense.transpose(1, 2).stride()


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_queries(fp32, interleaved):
    tensors = given("rope", fp32, rotary=8, interleaved=interleaved)
    tensors["k"] = tensors["k"][:, :0]
    check(rope, rope_reference, tensors, None, leaves=("q",), interleaved=interleaved)


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_angles_are_constants(fp32, name):
    tensors = {k: x.requires_grad_() for k, x in CASES[name].inputs(fp32).items()}
    outputs = CASES[name].function(**tensors)
    grads = dict(
        zip(tensors, torch.autograd.grad(outputs[0].sum(), [*tensors.values()], allow_unused=True), strict=True)
    )
    assert grads["q"] is not None and grads["cos"] is None and grads["sin"] is None
    if name == "qk_norm_rope":  # an output that is not used costs nothing
        assert grads["k"] is None and grads["k_weight"] is None


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_queries_and_keys_of_two_dtypes(fp32, name):
    case, tensors = CASES[name], CASES[name].inputs(fp32)
    narrow = {k: x.half() for k, x in tensors.items() if k.startswith("q")}
    check(case.function, case.reference, tensors | narrow, None, leaves=case.leaves)


def test_cast_before_weight_rounds_there(fp32):
    """To the last bit, without a rotation: the product of two fp16 numbers, rounded once, or of three."""
    tensors = {name: x.half() for name, x in CASES["qk_norm_rope"].inputs(fp32).items()}
    tensors |= {"cos": torch.ones_like(tensors["cos"]), "sin": torch.zeros_like(tensors["sin"])}
    tensors |= {name: torch.full((16,), 0.73).to(tensors["q"]) for name in ("q_weight", "k_weight")}
    wide = tensors["q"].float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).half() * tensors["q_weight"]
    assert torch.equal(qk_norm_rope(**tensors, **QWEN)[0], rounded.transpose(1, 2))
    assert not torch.equal(qk_norm_rope(**tensors)[0], rounded.transpose(1, 2))


def modeling_of(family: str):
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}")


FAMILIES = {"llama": {}, "cohere": {"interleaved": True}, "gpt_oss": {"half_width": True}}


class TestTransformers:
    """Equal to what the models themselves compute, in fp32."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_rotation(self, fp32, family):
        options = FAMILIES[family]
        tensors = given("rope", fp32, **options)
        expected = modeling_of(family).apply_rotary_pos_emb(**tensors)
        torch.testing.assert_close(rope(**tensors, **options), tuple(expected))

    def test_glm(self, fp32):
        tensors = given("rope", fp32, rotary=8)
        expected = modeling_of("glm").apply_rotary_pos_emb(**tensors)
        half = tensors | {name: tensors[name][..., :4] for name in ("cos", "sin")}
        torch.testing.assert_close(rope(**half, interleaved=True, half_width=True), tuple(expected))

    def test_llama4(self, fp32):
        tensors = given("rope", fp32, half_width=True)
        frequencies = torch.complex(tensors["cos"], tensors["sin"])
        q, k = (tensors[x].transpose(1, 2) for x in "qk")
        expected = tuple(x.transpose(1, 2) for x in modeling_of("llama4").apply_rotary_emb(q, k, frequencies))
        tensors |= {"cos": frequencies.real, "sin": frequencies.imag}
        torch.testing.assert_close(rope(**tensors, interleaved=True, half_width=True), expected)

    def test_qwen2_vl(self, fp32):
        """The sections of a position in time, height and width, as the model chooses them."""
        modeling = modeling_of("qwen2_vl")
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

        parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 2, 3]}
        config = Qwen2VLTextConfig(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=parameters
        )
        tensors = given("rope", fp32)
        positions = torch.randint(0, 50, (3, 2, 5), generator=torch.Generator().manual_seed(0))
        chosen = modeling.Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
        expected = modeling.apply_rotary_pos_emb(tensors["q"].cpu(), tensors["k"].cpu(), *chosen)
        t = positions[..., None].float() * 100.0 ** -(torch.arange(0, 16, 2) / 16)
        t = torch.cat((t, t), -1).to(fp32.device)
        got = rope(**tensors | {"cos": t.cos(), "sin": t.sin()}, mrope_section=(3, 2, 3))
        torch.testing.assert_close([x.cpu() for x in got], list(expected))

    @pytest.mark.parametrize("family, norm, form, options", [
        ("qwen3", "Qwen3RMSNorm", "Qwen3", QWEN), ("gemma3", "Gemma3RMSNorm", "Gemma3", {"offset": 1.0}),
        ("olmo2", "Olmo2RMSNorm", "OLMo2", OLMO),
    ])  # fmt: skip
    def test_norm_and_rotation(self, fp32, family, norm, form, options):
        """With gradients, as the attention layers compute them."""
        modeling = modeling_of(family)

        def layer(q, k, q_weight, k_weight, cos, sin):
            normed = []
            for x, w in ((q, q_weight), (k, k_weight)):
                module = getattr(modeling, norm)(w.shape[0], eps=1e-6)
                del module.weight
                module.weight = w
                normed.append(module(x.flatten(2)).view(x.shape) if options is OLMO else module(x))
            return modeling.apply_rotary_pos_emb(*(x.transpose(1, 2) for x in normed), cos, sin)

        tensors = given(f"qk_norm_rope, {form}", fp32)
        got, expected = (evaluate(op, tensors, None, leaves=NORMED)
                         for op in (functools.partial(qk_norm_rope, **options), layer))  # fmt: skip
        assert_same(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("heads_first", [False, True])
def test_offsets_beyond_32_bits_on_gpu(heads_first):
    """The last token of a batch of more than 2^31 elements gets what it gets without the others."""
    B, S, hq, D = 2, 8200, 1024, 128
    assert B * S * hq * D > 2**31
    q = torch.empty((B, hq, S, D) if heads_first else (B, S, hq, D), dtype=torch.bfloat16, device="cuda")
    q = q.normal_().transpose(1, 2) if heads_first else q.normal_()
    k = torch.randn(B, S, 1, D, device="cuda").to(q)
    turned = angles(D, rows=B)({}, SimpleNamespace(sizes=Sizes(positions=S), integers=Draw().integers))
    cos, sin = (x.to(q) for x in turned.values())
    weight = torch.ones(D, device="cuda").to(q)

    def both(q, k, cos, sin):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        normed = qk_norm_rope(q, k, weight, weight, cos, sin)
        results = [x[:, :, -3:].detach().clone() for x in (*turned, *normed)]
        for outputs in (turned, normed):
            grads = torch.autograd.grad(outputs, (q, k), [x.detach() for x in outputs])
            results += [x[:, -3:].clone() for x in grads]
            del outputs, grads
        return results

    expected = both(q[:, -3:], k[:, -3:], cos[:, -3:], sin[:, -3:])
    for x, y in zip(both(q, k, cos, sin), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
