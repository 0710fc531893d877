import functools

import pytest
import torch
from elementwise_checks import check_op
from rotary_checks import angles, cast, projected

from liger_trainer.kernels import rope as module
from liger_trainer.kernels.rope import rope, rope_reference

check = functools.partial(check_op, rope, rope_reference, leaves=("q", "k"))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a few tokens take several programs."""
    monkeypatch.setattr(module, "TILE", 128)


def tensors(place, shape=(2, 5, 4, 2, 16), *, rotary=None, cos_batch=None, axes=0, **layout):
    """q (B, Hq, S, D) and k (B, Hk, S, D), views of (B, S, H, D), for shape (B, S, Hq, Hk, D)."""
    B, S, hq, hk, D = shape
    cos, sin = angles(B if cos_batch is None else cos_batch, S, rotary or D, axes=axes, **layout)
    q, k = projected(B, S, hq, D, 1).transpose(1, 2), projected(B, S, hk, D, 2).transpose(1, 2)
    return cast({"q": q, "k": k, "cos": cos, "sin": sin}, place.dtype, place.device)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 5, 4, 2, 16),  # several of everything
        (1, 1, 1, 1, 2),  # one pair of columns
        (3, 7, 3, 1, 10),  # no power of two
        (1, 9, 14, 2, 40),  # more heads than a tile, and no power of two
        (0, 5, 4, 2, 16),  # empty batch
        (2, 0, 4, 2, 16),  # no token
    ],
    ids=str,
)
def test_llama(place, shape):
    check(tensors(place, shape))


def test_tile_larger_than_everything(fp32, monkeypatch):
    monkeypatch.setattr(module, "TILE", 4096)
    check(tensors(fp32, (2, 5, 6, 2, 16)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cos_batch", [1, 2], ids=["shared", "per_row"])
@pytest.mark.parametrize("rotary", [16, 8, 6, 2], ids="R{}".format)
@pytest.mark.parametrize("half_width", [False, True], ids=["", "half_width"])
def test_layouts_of_angles(fp32, interleaved, cos_batch, rotary, half_width):
    given = tensors(fp32, rotary=rotary, cos_batch=cos_batch, interleaved=interleaved, half_width=half_width)
    got = check(given, interleaved=interleaved, half_width=half_width)
    assert torch.equal(got["out0"][..., rotary:], given["q"][..., rotary:])
    assert torch.equal(got["out1"][..., rotary:], given["k"][..., rotary:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_widths_in_every_dtype(place, interleaved):
    """80 columns of which 24 turn, as in Phi: no power of two, and two kinds of pairs."""
    check(tensors(place, (2, 3, 3, 1, 80), rotary=24, interleaved=interleaved), interleaved=interleaved)


@pytest.mark.parametrize("sections", [(3, 2, 3), (8, 0, 0), (0, 8, 0), (0, 0, 8), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("cos_batch", [1, 2], ids=["shared", "per_row"])
def test_mrope(fp32, sections, cos_batch):
    check(tensors(fp32, axes=3, cos_batch=cos_batch), mrope_section=sections)


def test_mrope_of_other_layouts(fp32):
    check(tensors(fp32, axes=3, interleaved=True), mrope_section=(3, 2, 3), interleaved=True)
    check(tensors(fp32, axes=3, half_width=True, rotary=8), mrope_section=[2, 1, 1], half_width=True)


def test_half_width_equals_full_width(fp32):
    given = tensors(fp32)
    half = given | {name: given[name][..., :8] for name in ("cos", "sin")}
    for got, expected in zip(rope(**half, half_width=True), rope(**given), strict=True):
        assert torch.equal(got, expected)


def strided(x, how):
    """x with the same values and another layout in memory."""
    if how == "packed":  # a slice of one projection of q, k and v
        B, H, S, D = x.shape
        return torch.cat([x.new_full((B, S, 3, D), 7.0), x.transpose(1, 2)], 2)[:, :, 3:].transpose(1, 2)
    if how == "expanded":
        return x[:, :1].expand(x.shape)
    if how == "columns apart":
        return torch.stack((x, x), -1)[..., 0]
    return x.contiguous()


@pytest.mark.parametrize("how", ["packed", "expanded", "columns apart", "contiguous"])
def test_strides(fp32, how):
    given = tensors(fp32)
    check({name: x if name in ("cos", "sin") else strided(x, how) for name, x in given.items()})


def test_strides_of_angles(fp32):
    """Columns apart, a batch expanded, positions apart; and sines laid out unlike cosines."""
    given = tensors(fp32, cos_batch=1)
    expected = rope(**given)
    apart = {name: torch.stack((given[name], given[name]), -1)[..., 0] for name in ("cos", "sin")}
    wide = {name: given[name].expand(2, 5, 16) for name in ("cos", "sin")}
    transposed = {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("cos", "sin")}
    for angles_given in (apart, wide, transposed, {"sin": apart["sin"]}, {"cos": transposed["cos"]}):
        for x, y in zip(rope(**given | angles_given), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("upstream", ["expanded", "transposed", "contiguous"])
@pytest.mark.parametrize("how", ["projected", "contiguous", "packed"])
def test_memory_layout_is_kept(fp32, upstream, how):
    if fp32.path == "torch":
        pytest.skip("what plain torch gives is its own choice")
    given = tensors(fp32)
    q, k = ((given[n] if how == "projected" else strided(given[n], how)).requires_grad_() for n in "qk")
    result = rope(q, k, given["cos"], given["sin"])
    ones = [torch.ones_like(x, memory_format=torch.contiguous_format) for x in result]
    if upstream == "expanded":
        ones = [x.new_ones(()).expand(x.shape) for x in ones]
    if upstream == "transposed":
        ones = [torch.ones_like(x.transpose(2, 3)).transpose(2, 3) for x in ones]
    for x, out, grad in zip((q, k), result, torch.autograd.grad(result, (q, k), ones), strict=True):
        dense = x.detach().transpose(1, 2).contiguous().transpose(1, 2) if how != "contiguous" else x
        assert out.stride() == grad.stride() == dense.stride()


@pytest.mark.parametrize("leaves", [("q",), ("k",)], ids="only_{0[0]}".format)
def test_frozen(fp32, leaves):
    check_op(rope, rope_reference, tensors(fp32), leaves)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_alone(fp32, interleaved):
    given = tensors(fp32, rotary=8, interleaved=interleaved)
    given["k"] = given["k"][:, :0]
    got = check_op(rope, rope_reference, given, ["q"], interleaved=interleaved)
    assert got["out0"].shape == given["q"].shape


def test_one_output_used(fp32):
    given = tensors(fp32)
    q, k = given["q"].requires_grad_(), given["k"].requires_grad_()
    grad_q, grad_k = torch.autograd.grad(rope(**given)[1].sum(), (q, k), allow_unused=True)
    expected = torch.autograd.grad(rope_reference(**given)[1].sum(), (k,))[0]
    assert grad_q is None or not grad_q.any()
    torch.testing.assert_close(grad_k, expected)


def test_no_gradient_wanted(fp32):
    assert not any(x.requires_grad for x in rope(**tensors(fp32)))


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_mixed_dtypes(fp32, dtypes):
    given = {n: x.to(dtypes[n in ("cos", "sin")]) for n, x in tensors(fp32).items()}
    got = check(given)
    assert got["out0"].dtype == dtypes[0]


def test_queries_and_keys_of_two_dtypes(fp32):
    given = tensors(fp32)
    check(given | {"q": given["q"].half()})


def test_angles_are_constants(fp32):
    given = tensors(fp32)
    for x in given.values():
        x.requires_grad_()
    grads = torch.autograd.grad(rope(**given)[0].sum(), list(given.values()), allow_unused=True)
    assert grads[0] is not None and grads[2] is None and grads[3] is None


def test_programs_for_one_side_alone():
    """A gradient that is not needed costs no programs, whose results would be the other's once more."""
    turning = module.Angles(32, 1, (32, 32), False)
    one, both = (
        module._launch(torch.Size((2, 4, 64, 64)), 4, sides, (1,) * 16, turning, 1.0, 4096, 4).grid[0]
        for sides in (1, 2)
    )
    assert both == 2 * one


def test_turning_back_is_the_inverse(fp32):
    given = tensors(fp32, rotary=8)
    there = rope(**given)
    back = rope(*there, given["cos"], -given["sin"])
    for x, expected in zip(back, (given["q"], given["k"]), strict=True):
        torch.testing.assert_close(x, expected)


def test_compiled(fp32):
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    check_op(compiled, rope_reference, tensors(fp32, rotary=8, interleaved=True), ("q", "k"), interleaved=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (2, 4, 5)}, "must share B, S and D"),
        ({"k": (2, 2, 6, 16)}, "must share B, S and D"),
        ({"k": (2, 2, 5, 8)}, "must share B, S and D"),
        ({"cos": (3, 5, 16), "sin": (3, 5, 16)}, r"must be \(1 or 2, 5, R\)"),
        ({"cos": (1, 4, 16), "sin": (1, 4, 16)}, r"must be \(1 or 2, 5, R\)"),
        ({"sin": (1, 5, 8)}, r"sin is \(1, 5, 8\)"),
        ({"cos": (5, 16), "sin": (5, 16)}, r"cos must be \(B or 1, S, R\)"),
        ({"cos": (3, 1, 5, 16), "sin": (3, 1, 5, 16)}, "with mrope_section"),
        ({"cos": (1, 5, 18), "sin": (1, 5, 18)}, "at most the 16"),
        ({"cos": (1, 5, 7), "sin": (1, 5, 7)}, "R must be even"),
    ],
    ids=str,
)
def test_errors(change, message):
    shapes = {"q": (2, 4, 5, 16), "k": (2, 2, 5, 16), "cos": (1, 5, 16), "sin": (1, 5, 16)} | change
    with pytest.raises(ValueError, match=message):
        rope(**{name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("sections", [(4, 4), (4, 4, 4), (-1, 5, 4)], ids=str)
def test_errors_of_sections(sections):
    q, cos = torch.zeros(2, 4, 5, 16), torch.zeros(3, 1, 5, 16)
    with pytest.raises(ValueError, match="3 numbers that sum to 8"):
        rope(q, q, cos, cos, mrope_section=sections)


class TestTransformers:
    """Equal to what the models themselves compute, in fp32."""

    def compare(self, expected, given, **options):
        for x, y in zip(rope(**given, **options), expected, strict=True):
            torch.testing.assert_close(x, y)

    @pytest.mark.parametrize(
        "family, options",
        [("llama", {}), ("cohere", {"interleaved": True}), ("gpt_oss", {"half_width": True})],
        ids=str,
    )
    def test_family(self, fp32, family, options):
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        given = tensors(fp32, **options)
        self.compare(modeling.apply_rotary_pos_emb(**given), given, **options)

    def test_glm(self, fp32):
        modeling = pytest.importorskip("transformers.models.glm.modeling_glm")
        given = tensors(fp32, rotary=8)
        expected = modeling.apply_rotary_pos_emb(**given)
        half = given | {name: given[name][..., :4] for name in ("cos", "sin")}
        self.compare(expected, half, interleaved=True, half_width=True)

    def test_llama4(self, fp32):
        modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
        given = tensors(fp32, half_width=True)
        frequencies = torch.complex(given["cos"], given["sin"])
        q, k = given["q"], given["k"]
        expected = modeling.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), frequencies)
        given |= {"cos": frequencies.real, "sin": frequencies.imag}
        self.compare([x.transpose(1, 2) for x in expected], given, interleaved=True, half_width=True)

    def test_qwen2_vl(self, fp32):
        """The sections of a position in time, height and width, as the model chooses them."""
        modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

        parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 2, 3]}
        config = Qwen2VLTextConfig(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=parameters
        )
        given = tensors(fp32)
        positions = torch.randint(0, 50, (3, 2, 5), generator=torch.Generator().manual_seed(0))
        chosen = modeling.Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
        expected = modeling.apply_rotary_pos_emb(given["q"].cpu(), given["k"].cpu(), *chosen)
        t = positions[..., None].float() * 100.0 ** -(torch.arange(0, 16, 2) / 16)
        given |= {"cos": torch.cat((t, t), -1).cos(), "sin": torch.cat((t, t), -1).sin()}
        given = cast(given, fp32.dtype, fp32.device)
        self.compare([x.to(fp32.device) for x in expected], given, mrope_section=(3, 2, 3))
