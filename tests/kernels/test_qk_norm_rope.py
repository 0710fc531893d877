import functools

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from rotary_checks import angles, cast, projected

from liger_trainer.kernels import qk_norm_rope as module
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_trainer.kernels.rope import rope, rope_reference

LEAVES = ("q", "k", "q_weight", "k_weight")
FAMILIES = {
    "qwen3": {"cast_before_weight": True},
    "gemma3": {"offset": 1.0},
    "olmo2": {"norm_over_heads": True},
}
families = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
check = functools.partial(check_op, qk_norm_rope, qk_norm_rope_reference, leaves=LEAVES)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """So that a few tokens take several programs, and a program several tiles; on a GPU they are as shipped."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(module, "FORWARD_TILE", 256)
    monkeypatch.setattr(module, "BACKWARD_TILE", 128)
    monkeypatch.setattr(module, "PROGRAMS", 1)


def tensors(place, shape=(2, 5, 4, 2, 16), *, norm_over_heads=False, rotary=None, cos_batch=None, axes=0, **layout):
    """q (B, S, Hq, D), k (B, S, Hk, D) and the rest, for shape (B, S, Hq, Hk, D)."""
    B, S, hq, hk, D = shape
    cos, sin = angles(B if cos_batch is None else cos_batch, S, rotary or D, axes=axes, **layout)
    generator = torch.Generator().manual_seed(3)
    weights = (torch.randn(D * (h if norm_over_heads else 1), generator=generator) for h in (hq, hk))
    q, k = projected(B, S, hq, D, 1), projected(B, S, hk, D, 2) * 3
    given = dict(zip(("q", "k", "q_weight", "k_weight", "cos", "sin"), (q, k, *weights, cos, sin), strict=True))
    return cast(given, place.dtype, place.device)


def check_family(place, options, shape=(2, 5, 4, 2, 16), **kwargs):
    return check(tensors(place, shape, norm_over_heads=options.get("norm_over_heads", False), **kwargs), **options)


@families
@pytest.mark.parametrize(
    "shape",
    [
        (2, 5, 4, 2, 16),  # several of everything
        (1, 1, 1, 1, 2),  # one pair of columns
        (3, 3, 3, 1, 10),  # no power of two
        (1, 2, 6, 4, 40),  # more heads than a tile
        (0, 5, 4, 2, 16),  # empty batch
    ],
    ids=str,
)
def test_families(place, shape, options):
    check_family(place, options, shape)


@families
def test_tiles_larger_than_everything(fp32, options, monkeypatch):
    for name in ("FORWARD_TILE", "BACKWARD_TILE"):
        monkeypatch.setattr(module, name, 4096)
    check_family(fp32, options)


def test_one_tile_a_program(fp32, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 1000)
    check_family(fp32, FAMILIES["qwen3"])


def test_cast_after_offset(place):
    check(tensors(place), offset=1.0, cast_before_weight=True)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps(fp32, eps):
    given = tensors(fp32)
    check(given | {"q": given["q"] * 0.3}, eps=eps)


@families
@pytest.mark.parametrize(
    "layout",
    [
        {"rotary": 8},
        {"rotary": 6, "interleaved": True},
        {"interleaved": True, "cos_batch": 1},
        {"half_width": True, "rotary": 4},
        {"axes": 3, "mrope_section": (3, 2, 3)},
    ],
    ids=str,
)
def test_angles(fp32, options, layout):
    given = {name: x for name, x in layout.items() if name != "mrope_section"}
    passed = {name: x for name, x in layout.items() if name in ("interleaved", "half_width", "mrope_section")}
    check(tensors(fp32, norm_over_heads=options.get("norm_over_heads", False), **given), **options, **passed)


def strided(x, how):
    """x with the same values and another layout in memory."""
    if how == "packed":  # a slice of one projection of q, k and v
        return torch.cat([x.new_full((*x.shape[:2], 3, x.shape[3]), 7.0), x], 2)[:, :, 3:]
    if how == "expanded":
        return x[:1].expand(x.shape)
    if how == "columns apart":
        return torch.stack((x, x), -1)[..., 0]
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # heads first


@pytest.mark.parametrize("options", [FAMILIES["qwen3"], FAMILIES["olmo2"]], ids=["qwen3", "olmo2"])
@pytest.mark.parametrize("how", ["packed", "expanded", "columns apart", "heads first"])
def test_strides(fp32, options, how):
    given = tensors(fp32, norm_over_heads=options.get("norm_over_heads", False), cos_batch=1)
    given |= {name: strided(given[name], how) for name in ("q", "k")}
    given["sin"] = given["sin"].transpose(1, 2).contiguous().transpose(1, 2)  # unlike the cosines
    weights = {name: torch.stack((given[name], given[name]), -1)[:, 0] for name in ("q_weight", "k_weight")}
    check(given | weights, **options)


@pytest.mark.parametrize("upstream", ["expanded", "tokens first", "contiguous"])
@pytest.mark.parametrize("how", ["projected", "packed", "heads first"])
def test_memory_layout_is_kept(fp32, upstream, how):
    if fp32.path == "torch":
        pytest.skip("what plain torch gives is its own choice")
    given = tensors(fp32)
    for name in ("q", "k"):
        given[name] = (given[name] if how == "projected" else strided(given[name], how)).requires_grad_()
    result = qk_norm_rope(**given)
    ones = [torch.ones(x.shape, device=x.device) for x in result]
    if upstream == "expanded":
        ones = [x.new_ones(()).expand(x.shape) for x in ones]
    if upstream == "tokens first":
        ones = [strided(x, "heads first") for x in ones]
    q, k = given["q"], given["k"]
    for x, out, grad in zip((q, k), result, torch.autograd.grad(result, (q, k), ones), strict=True):
        dense = x.detach().contiguous() if how != "heads first" else x
        assert grad.stride() == dense.stride() and out.stride() == dense.transpose(1, 2).stride()


@pytest.mark.parametrize("options", [FAMILIES["qwen3"], FAMILIES["olmo2"]], ids=["qwen3", "olmo2"])
@pytest.mark.parametrize(
    "leaves",
    [("q", "k"), ("q_weight", "k_weight"), ("q",), ("k_weight",), ("q", "k_weight"), ("k", "k_weight")],
    ids="+".join,
)
def test_frozen(fp32, options, leaves):
    given = tensors(fp32, norm_over_heads=options.get("norm_over_heads", False))
    check_op(qk_norm_rope, qk_norm_rope_reference, given, leaves, **options)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(fp32, used):
    def op(**given):
        return qk_norm_rope(**given)[used]

    def reference(**given):
        return qk_norm_rope_reference(**given)[used]

    check_op(op, reference, tensors(fp32), ("q", "q_weight") if used == 0 else ("k", "k_weight"))


def test_unused_output_has_no_gradient(fp32):
    given = tensors(fp32)
    leaves = [given[name].requires_grad_() for name in LEAVES]
    grads = torch.autograd.grad(qk_norm_rope(**given)[0].sum(), leaves, allow_unused=True)
    assert grads[0] is not None and grads[2] is not None and grads[1] is None and grads[3] is None


@families
@pytest.mark.parametrize(
    "dtypes",
    [
        {"q_weight": torch.float32, "k_weight": torch.float32},
        {"k_weight": torch.float32},
        {"cos": torch.float32, "sin": torch.float32},
    ],
    ids=["wide weights", "one wide weight", "wide angles"],
)
def test_mixed_dtypes(fp32, options, dtypes):
    given = tensors(fp32, norm_over_heads=options.get("norm_over_heads", False))
    got = check({name: x.to(dtypes.get(name, torch.float16)) for name, x in given.items()}, **options)
    wide = options.get("cast_before_weight") and "k_weight" in dtypes
    assert got["out1"].dtype == (torch.float32 if wide else torch.float16)


def test_queries_and_keys_of_two_dtypes(fp32):
    given = tensors(fp32)
    check(given | {name: given[name].half() for name in ("q", "q_weight")})


def test_cast_before_weight_rounds_there(fp32):
    """To the last bit, without a rotation: the product of two fp16 numbers, rounded once, or of three."""
    given = {name: x.half() for name, x in tensors(fp32).items()}
    given |= {"cos": torch.ones_like(given["cos"]), "sin": torch.zeros_like(given["sin"])}
    given |= {name: torch.full((16,), 0.73).to(given["q"]) for name in ("q_weight", "k_weight")}
    wide = given["q"].float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).half() * given["q_weight"]
    assert torch.equal(qk_norm_rope(**given, cast_before_weight=True)[0], rounded.transpose(1, 2))
    assert not torch.equal(qk_norm_rope(**given)[0], rounded.transpose(1, 2))


def test_angles_are_constants(fp32):
    given = tensors(fp32)
    for x in given.values():
        x.requires_grad_()
    grads = torch.autograd.grad(qk_norm_rope(**given)[0].sum(), list(given.values()), allow_unused=True)
    assert grads[0] is not None and grads[4] is None and grads[5] is None


def test_deterministic(fp32):
    first, second = (outputs_and_grads(qk_norm_rope, tensors(fp32), LEAVES, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_compiled(fp32):
    compiled = torch.compile(qk_norm_rope, fullgraph=True, backend="aot_eager")
    check_op(compiled, qk_norm_rope_reference, tensors(fp32), LEAVES, **FAMILIES["qwen3"])


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({"q": (5, 4, 16)}, {}, "must share B, S and D"),
        ({"k": (2, 6, 2, 16)}, {}, "must share B, S and D"),
        ({"k": (2, 5, 2, 8)}, {}, "must share B, S and D"),
        ({"q_weight": (64,)}, {}, "q_weight must hold 16 numbers, one per column"),
        ({"k_weight": (2, 8)}, {}, r"k_weight must hold 16 numbers.*\(2, 8\)"),
        ({}, {"norm_over_heads": True}, "q_weight must hold 64 numbers, H"),
        ({"q_weight": (64,)}, {"norm_over_heads": True}, "k_weight must hold 32 numbers"),
        ({"cos": (1, 4, 16), "sin": (1, 4, 16)}, {}, r"must be \(1 or 2, 5, R\)"),
        ({"cos": (1, 5, 18), "sin": (1, 5, 18)}, {}, "at most the 16"),
    ],
    ids=str,
)
def test_errors(change, options, message):
    shapes = {
        "q": (2, 5, 4, 16), "k": (2, 5, 2, 16), "q_weight": (16,), "k_weight": (16,), "cos": (1, 5, 16),
        "sin": (1, 5, 16),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**{name: torch.zeros(shape) for name, shape in (shapes | change).items()}, **options)


class TestTransformers:
    """Equal to what the models' own attention layers compute, in fp32, with gradients."""

    @pytest.mark.parametrize("family, norm", [("qwen3", "Qwen3RMSNorm"), ("gemma3", "Gemma3RMSNorm")])
    def test_norm_of_each_head(self, fp32, family, norm):
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        self.compare(fp32, modeling, getattr(modeling, norm), FAMILIES[family])

    def test_norm_over_heads(self, fp32):
        modeling = pytest.importorskip("transformers.models.olmo2.modeling_olmo2")
        self.compare(fp32, modeling, modeling.Olmo2RMSNorm, FAMILIES["olmo2"])

    def compare(self, place, modeling, norm_class, options):
        over_heads = options.get("norm_over_heads", False)
        given = tensors(place, norm_over_heads=over_heads)

        def layer(q, k, q_weight, k_weight, cos, sin):
            normed = []
            for x, w in ((q, q_weight), (k, k_weight)):
                norm = norm_class(w.shape[0], eps=1e-6)
                del norm.weight
                norm.weight = w
                normed.append(norm(x.flatten(2)).view(x.shape) if over_heads else norm(x))
            return modeling.apply_rotary_pos_emb(*(x.transpose(1, 2) for x in normed), cos, sin)

        expected = outputs_and_grads(layer, given, LEAVES, torch.float32)
        got = outputs_and_grads(functools.partial(qk_norm_rope, **options), given, LEAVES, torch.float32)
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x)


def test_norm_then_rope(fp32):
    """The op is torch's own RMSNorm followed by rope."""
    given = tensors(fp32)
    normed = [
        torch.nn.functional.rms_norm(given[n], (16,), given[f"{n}_weight"], 1e-6).transpose(1, 2) for n in ("q", "k")
    ]
    for x, y in zip(qk_norm_rope(**given), rope_reference(*normed, given["cos"], given["sin"]), strict=True):
        torch.testing.assert_close(x, y)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NORMS = ("q", "k", "q_weight", "k_weight")


def heads(shape, dtype, **layout):
    """q (B, S, Hq, D) and k (B, S, Hk, D) for shape (B, S, Hq, Hk, D), and the angles."""
    B, S, hq, hk, D = shape
    cos, sin = angles(B, S, layout.pop("rotary", D), **layout)
    q, k = projected(B, S, hq, D, 1), projected(B, S, hk, D, 2)
    return cast({"q": q, "k": k, "cos": cos, "sin": sin}, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((2, 1024, 32, 8, 128), {}),  # Llama
        ((2, 333, 14, 2, 64), {}),  # Qwen2-0.5B
        ((1, 500, 32, 2, 128), {"rotary": 64, "interleaved": True}),  # GLM, its angles in pairs
        ((1, 500, 32, 8, 96), {"rotary": 48}),
        ((2, 256, 12, 2, 128), {"axes": 3}),
    ],
    ids=str,
)
def test_rope_on_gpu(shape, layout, dtype):
    given = heads(shape, dtype, **layout)
    given |= {name: given[name].transpose(1, 2) for name in ("q", "k")}
    options = {"mrope_section": (16, 24, 24)} if "axes" in layout else {"interleaved": "interleaved" in layout}
    check_op(rope, rope_reference, given, ("q", "k"), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 1024, 16, 8, 128), {"cast_before_weight": True}),  # Qwen3-0.6B
        ((2, 1024, 4, 1, 256), {"offset": 1.0}),  # Gemma-3-1B
        ((1, 999, 40, 8, 128), {"norm_over_heads": True}),  # OLMo-2-32B
        ((1, 1, 16, 8, 128), {"interleaved": True}),
    ],
    ids=str,
)
def test_qk_norm_rope_on_gpu(shape, options, dtype):
    given = heads(shape, dtype, interleaved=options.get("interleaved", False))
    for name in ("q", "k"):
        width = given[name].shape[2:].numel() if options.get("norm_over_heads") else shape[-1]
        given[f"{name}_weight"] = torch.randn(width, device="cuda").to(dtype)
    check_op(qk_norm_rope, qk_norm_rope_reference, given, NORMS, **options)


@pytest.mark.gpu
def test_wide_weights_on_gpu():
    given = heads((2, 300, 16, 8, 128), torch.bfloat16)
    given |= {name: torch.randn(128, device="cuda") for name in ("q_weight", "k_weight")}
    got = check_op(qk_norm_rope, qk_norm_rope_reference, given, NORMS, cast_before_weight=True)
    assert got["out0"].dtype == torch.float32


@pytest.mark.gpu
def test_host_never_waits_on_gpu():
    given = heads((2, 64, 16, 8, 128), torch.bfloat16)
    given |= {name: torch.randn(128, device="cuda") for name in ("q_weight", "k_weight")}
    leaves = [given[name].requires_grad_() for name in NORMS]
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            turned = rope(leaves[0].transpose(1, 2), leaves[1].transpose(1, 2), given["cos"], given["sin"])
            torch.autograd.grad(turned, leaves[:2], [x.detach() for x in turned])
            normed = qk_norm_rope(**given)
            torch.autograd.grad(normed, leaves, [x.detach() for x in normed])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("heads_first", [False, True])
def test_offsets_beyond_32_bits_on_gpu(heads_first):
    """The last token of a batch of more than 2^31 elements gets what it gets alone."""
    B, S, hq, D = 2, 8200, 1024, 128
    assert B * S * hq * D > 2**31
    q = torch.empty((B, hq, S, D) if heads_first else (B, S, hq, D), dtype=torch.bfloat16, device="cuda")
    q = q.normal_().transpose(1, 2) if heads_first else q.normal_()
    k = torch.randn(B, S, 1, D, device="cuda").to(q)
    cos, sin = (x.to(q) for x in angles(B, S, D))
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
