"""kl_div, jsd and tvd: every form against its definition; what they share; what is of one of them alone."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from given_checks import (
    BOTH,
    FORMS,
    REDUCTIONS,
    check_definition,
    check_form,
    in_backward,
    short_blocks,
    sides,
    some_labels,
)

from liger_trainer.kernels import _unfused_divergence
from liger_trainer.kernels.jsd import jsd
from liger_trainer.kernels.kl_div import kl_div
from liger_trainer.kernels.linear_divergence import divergence_reference
from liger_trainer.kernels.tvd import tvd

INF = float("inf")

LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "shifted": lambda x: x[:, :-1],  # as labels shift: rows with two strides
    "columns of a wider tensor": lambda x: torch.cat([x, x.flip(-1)], -1)[..., : x.shape[-1]],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one row for all": lambda x: x[:1, :1].expand_as(x),
    "four dimensions": lambda x: x[:, None].expand(-1, 2, -1, -1)[:, :, 1:],
}


# One form whose entries stand alone and one that walks along rows; what the kinds compute is for their own tests.
TWO = {k: FORMS[k] for k in ("jsd", "jsd-logits")}


@pytest.fixture(autouse=True)
def blocks(request, monkeypatch):
    """Several blocks a row, but for a GPU, where blocks are as shipped."""
    if not request.node.get_closest_marker("gpu"):
        short_blocks(monkeypatch)


@pytest.fixture(params=TWO.values(), ids=list(TWO))
def form(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["early", "late"])
def late(request, monkeypatch):
    in_backward(monkeypatch, request.param)


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


# Of each op's forms: the table that the ops are checked by.
every_form = pytest.mark.parametrize("divergence", FORMS.values(), ids=FORMS)
NAN = float("nan")


@every_form
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_definition(place, divergence, reduction):
    check_definition(divergence, place, reduction)


@every_form
def test_definition_with_gradients_in_the_backward(fp32, divergence, monkeypatch):
    in_backward(monkeypatch, True)
    check_definition(divergence, fp32, "mean")


@every_form
def test_nan_shows(fp32, divergence):
    """In the rows of either side's NaN, and in no other."""
    for wrong in BOTH:
        tensors = sides(divergence, 3, 37, **like(fp32))
        tensors[wrong][1, 20] = NAN
        out = divergence.op(**tensors, **divergence.options, reduction="none")
        assert out.reshape(3, -1).isnan().any(1).tolist() == [False, True, False]


@every_form
def test_equal_sides_give_exactly_zero(fp32, divergence):
    if divergence.input is not divergence.target:
        pytest.skip("kl_div's sides are of two forms")
    x = sides(divergence, 3, 37, spread=8.0, **like(fp32))["input"]
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    loss = divergence.op(*leaves, **divergence.options)
    assert loss == 0
    if divergence.op is kl_div and "from_logits" not in divergence.options:
        return  # a gradient with respect to log-probabilities that need not sum to 1
    if divergence.options.get("beta") in (0.0, 1.0) and "from_logits" not in divergence.options:
        return  # the KLs that it tends to
    grads = torch.autograd.grad(loss, leaves)
    assert all(g.abs().max() < 1e-7 for g in grads)
    assert fp32.path == "torch" or not any(g.any() for g in grads)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 17), (37,), (2, 3, 33), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_shapes(fp32, form, shape, reduction):
    got = check_form(form, sides(form, *shape, **like(fp32)), reduction=reduction)
    entries = () if reduction == "batchmean" else shape[:-1] if form.options.get("from_logits") else shape
    assert got["out0"].shape == entries and got["d_input"].is_contiguous()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)], ids=str)
def test_empty_batch(fp32, form, shape, reduction):
    got = check_form(form, sides(form, *shape, **like(fp32)), reduction=reduction)
    assert reduction == "none" or got["out0"] == 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels(fp32, form, reduction):
    tensors = sides(form, 2, 3, 37, **like(fp32)) | {"labels": some_labels(2, 3, device=fp32.device)}
    ignored = tensors["labels"] == -100
    for name in BOTH:  # what is ignored is not read
        tensors[name][ignored] = float("nan")
    got = check_form(form, tensors, reduction=reduction)
    assert not any(got[f"d_{name}"][ignored].any() for name in BOTH)
    if reduction != "none":
        kept = {name: tensors[name][~ignored] for name in BOTH}
        expected = form.op(**kept, reduction=reduction, **form.options)
        torch.testing.assert_close(got["out0"], expected, rtol=1e-6, atol=1e-7)


def test_labels_of_any_layout_and_index(fp32, form):
    labels = some_labels(4, 6, ignore_index=1, device=fp32.device)[:, ::2]
    check_form(form, sides(form, 3, 4, 20, **like(fp32)) | {"labels": labels.t()}, ignore_index=1)
    check_form(form, sides(form, 4, 20, **like(fp32)) | {"labels": labels[:, 1]}, ignore_index=1)


@pytest.mark.filterwarnings("ignore:divide by zero encountered")  # numpy's: a mean over no rows, which no row takes
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_rows_ignored(fp32, form, reduction):
    tensors = sides(form, 3, 20, **like(fp32)) | {"labels": some_labels(3, ignored=1.0, device=fp32.device)}
    got = check_form(form, tensors, reduction=reduction)
    assert not any(x.any() for x in got.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_layouts(fp32, form, layout, reduction):
    tensors = sides(form, 2, 3, 37, **like(fp32))
    for first, second in (BOTH, BOTH[::-1]):  # each side alone, so that one's strides cannot serve the other
        sides_ = {first: LAYOUTS[layout](tensors[first])}
        shape = sides_[first].shape
        sides_[second] = sides(form, *shape, **like(fp32), seed=1)[second]
        check_form(form, sides_, reduction=reduction)


@pytest.mark.parametrize("leaf", BOTH)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_one_side_frozen(fp32, form, leaf, reduction):
    check_form(form, sides(form, 3, 37, **like(fp32)), [leaf], reduction=reduction)


def test_without_gradients_the_value_is_the_same(fp32, form):
    tensors = sides(form, 3, 37, **like(fp32))
    expected = check_form(form, tensors)["out0"]
    assert form.op(**tensors, **form.options) == expected
    with torch.no_grad():
        leaves = {k: x.detach().requires_grad_() for k, x in tensors.items()}
        got = form.op(**leaves, **form.options)
    assert got == expected and not got.requires_grad


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_mixed_dtypes(fp32, form, dtypes, reduction):
    tensors = {k: x.to(d) for (k, x), d in zip(sides(form, 3, 37, **like(fp32)).items(), dtypes, strict=True)}
    got = check_form(form, tensors, reduction=reduction)
    assert got["out0"].dtype == torch.float32
    assert (got["d_input"].dtype, got["d_target"].dtype) == dtypes


def test_upstream_of_one_moves_nothing_and_others_scale(fp32, form, late):
    tensors = {k: x.requires_grad_() for k, x in sides(form, 3, 37, **like(fp32)).items()}
    loss = form.op(**tensors, **form.options)
    plain = torch.autograd.grad(form.reference(**tensors, **form.options), list(tensors.values()))
    for factor in (1.0, -3.0, 0.0, 1.0):
        got = torch.autograd.grad(loss * factor, list(tensors.values()), retain_graph=True)
        for g, p in zip(got, plain, strict=True):
            torch.testing.assert_close(g, p * factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("view", ["expanded", "transposed"])
def test_layouts_of_the_gradient_of_single_values(fp32, form, view):
    tensors = {k: x.requires_grad_() for k, x in sides(form, 4, 3, 37, **like(fp32)).items()}
    results = []
    for op in (form.op, form.reference):
        out = op(**tensors, **form.options, reduction="none")
        upstream = torch.full_like(out[:1, :1], 1.5).expand_as(out)
        if view == "transposed":
            upstream = torch.linspace(1, 2, out.numel()).to(out).view(out.mT.shape).mT
        results.append(torch.autograd.grad(out, list(tensors.values()), upstream))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_small_fp16_gradients_survive_until_they_are_scaled(fp32, form):
    """As under a gradient scaler. Unscaled, many are 0 in fp16."""
    tensors = {k: x.half().requires_grad_() for k, x in sides(form, 6, 37, spread=5.0, device=fp32.device).items()}
    grads = [
        torch.autograd.grad(op(**tensors, **form.options) * 2.0**16, list(tensors.values()))
        for op in (form.op, form.reference)
    ]
    torch.testing.assert_close(*grads, rtol=4e-3, atol=1e-6)


def test_second_derivatives_are_refused(fp32, form):
    if fp32.path == "torch":
        pytest.skip("plain torch has them")
    for reduction in ("none", "sum"):
        tensors = {k: x.requires_grad_() for k, x in sides(form, 3, 20, **like(fp32)).items()}
        out = form.op(**tensors, **form.options, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(out, tensors["input"], create_graph=True)


def test_launch_configurations_as_shipped(fp32, form, monkeypatch):
    monkeypatch.undo()
    if fp32.path == "triton":
        monkeypatch.setattr(_unfused_divergence, "use_triton", lambda x: True)
    for shape in [(2, 700), (1, 5), (2, 5000)]:
        check_form(form, sides(form, *shape, **like(fp32)))


def test_gradients_are_written_in_the_forward_where_that_is_cheaper():
    def early(vocab, dtype=torch.float32, **options):
        x = torch.empty(2, vocab, dtype=dtype)
        return _unfused_divergence._early(x, x, _unfused_divergence.Call("jsd", **options))

    entries: dict[str, Any] = {"from_logits": False}
    logits: dict[str, Any] = {"from_logits": True}
    assert early(262144, reduction="sum", **entries) and early(8192, reduction="mean", **logits)
    assert not early(8192, reduction="none", **entries) and not early(262144, reduction="mean", **logits)
    assert not early(8192, reduction="mean", dtype=torch.float16, **entries)


@pytest.mark.parametrize("form", [FORMS[k] for k in ("kl_div", "jsd-logits", "tvd")], ids=["kl_div", "jsd", "tvd"])
def test_compiled(fp32, form):
    tensors = {k: x.requires_grad_() for k, x in sides(form, 4, 37, **like(fp32)).items()}
    labels = some_labels(4, device=fp32.device)
    compiled = torch.compile(form.op, fullgraph=True, backend="aot_eager")
    results = []
    for op in (form.op, compiled):
        loss = op(**tensors, labels=labels, **form.options)
        results.append((loss.detach(), *torch.autograd.grad(loss, list(tensors.values()))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_errors(form):
    tensors = sides(form, 4, 7)
    name = form.op.__name__
    wrong = {k: x[:3] if k == "target" else x for k, x in tensors.items()}
    with pytest.raises(ValueError, match=rf"{name} needs .* input is \(4, 7\), target is \(3, 7\)"):
        form.op(**wrong, **form.options)
    with pytest.raises(ValueError, match=r"target is \(\)"):
        form.op(tensors["input"].sum(), tensors["target"].sum(), **form.options)
    with pytest.raises(ValueError, match=r"labels is \(7,\), input \(4, 7\)"):
        form.op(**tensors, labels=some_labels(7), **form.options)
    with pytest.raises(ValueError, match="one of none, mean, sum, batchmean; got 'average'"):
        form.op(**tensors, reduction="average", **form.options)
    with pytest.raises(ValueError, match="positive, got 0"):
        form.op(**tensors, **{**form.options, "temperature": 0})
    if "from_logits" not in form.options:
        with pytest.raises(ValueError, match=r"temperature is 2.0, .* from_logits=True"):
            form.op(**tensors, temperature=2.0, **form.options)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("shape", [(37,), (3, 37), (2, 3, 37)], ids=str)
def test_kl_div_equals_torch(fp32, reduction, log_target, shape):
    form = FORMS["kl_div-log_target" if log_target else "kl_div"]
    tensors = sides(form, *shape, device=fp32.device)
    results = []
    for op in (kl_div, F.kl_div):
        leaves = {k: x.clone().requires_grad_() for k, x in tensors.items()}
        out = op(**leaves, reduction=reduction, log_target=log_target)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_default_of_kl_div_is_batchmean(fp32):
    tensors = sides(FORMS["kl_div"], 3, 37, device=fp32.device)
    torch.testing.assert_close(kl_div(**tensors), F.kl_div(**tensors, reduction="batchmean"))


@pytest.mark.parametrize("squared", [True, False])
def test_kl_div_of_logits_at_a_temperature(fp32, squared):
    form = FORMS["kl_div-logits"]
    tensors = sides(form, 3, 37, device=fp32.device)
    options = {"reduction": "none", "scale_by_temperature_squared": squared}
    got = check_form(form, tensors, **options)
    expected = divergence_reference(tensors["input"], tensors["target"], temperature=1.7) * (1.7**2 if squared else 1)
    torch.testing.assert_close(got["out0"], expected, rtol=1e-5, atol=1e-6)


def test_kl_div_of_far_apart_logits(fp32):
    """One side's maximum is the other's minimum, at the row's ends, and rows are offset by hundreds."""
    offset = torch.tensor([[0.0], [300.0], [-300.0]], device=fp32.device)
    x = torch.linspace(-40, 40, 37, device=fp32.device) + offset
    check_form(FORMS["kl_div-logits"], {"input": x, "target": x.flip(-1)})


def rows(*values, device, log=False):
    x = torch.tensor(values, device=device)
    return (x.log() if log else x).requires_grad_()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of what a where then drops
@pytest.mark.parametrize("log_target", [False, True])
def test_zero_probability_in_the_target_has_no_part(fp32, log_target):
    x = rows([0.5, 0.5, 0.0], [0.2, 0.3, 0.5], device=fp32.device, log=True)
    p = rows([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], device=fp32.device, log=log_target)
    out = kl_div(x, p, reduction="none", log_target=log_target)
    expected = torch.zeros(2, 3, device=fp32.device)
    expected[1, 1] = 0.5 * math.log(5 / 3)
    torch.testing.assert_close(out, expected)
    d_x, d_p = torch.autograd.grad(out.sum(), (x, p))
    torch.testing.assert_close(d_x, -(p.exp() if log_target else p).detach())
    slope = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1 + math.log(5 / 3), 1.0]], device=fp32.device)
    torch.testing.assert_close(d_p, slope * p.exp().detach() if log_target else slope)


@pytest.mark.parametrize("log_target", [False, True])
def test_mass_where_the_input_has_none_is_infinite(fp32, log_target):
    x = rows([1.0, 0.0], device=fp32.device, log=True)
    p = rows([0.5, 0.5], device=fp32.device, log=log_target)
    out = kl_div(x, p, reduction="none", log_target=log_target)
    assert out[0, 1] == INF and torch.isfinite(out[0, 0])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, -0.5))


def test_kl_div_of_masked_logits(fp32):
    """-inf on both sides: as if the column were not there. On the input's alone: infinite. NaN shows."""
    tensors = sides(FORMS["kl_div-logits"], 4, 37, device=fp32.device)
    masked = {k: x.clone() for k, x in tensors.items()}
    for name in BOTH:
        masked[name][:, 5:22] = -INF  # the second block has no other
    got = check_form(FORMS["kl_div-logits"], masked, reduction="none")
    left = {k: torch.cat([x[:, :5], x[:, 22:]], 1) for k, x in tensors.items()}
    expected = check_form(FORMS["kl_div-logits"], left, reduction="none")
    torch.testing.assert_close(got["out0"], expected["out0"], rtol=1e-5, atol=1e-6)
    assert not got["d_input"][:, 5:22].any() and not got["d_target"][:, 5:22].any()
    tensors["input"][0, 3], tensors["target"][1, 3], tensors["input"][2, 20] = -INF, -INF, float("nan")
    out = kl_div(**tensors, from_logits=True, reduction="none")
    assert out[0] == INF and out[1].isfinite() and out[2].isnan() and out[3].isfinite()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd_of_logits_is_that_of_linear_divergence(fp32, beta):
    x, t = sides(FORMS["jsd-logits"], 4, 37, device=fp32.device).values()
    got = jsd(x, t, beta=beta, from_logits=True, temperature=2.0, reduction="none", scale_by_temperature_squared=False)
    expected = divergence_reference(x, t, kind="jsd", beta=beta, temperature=2.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    given = jsd((x / 2).log_softmax(-1), (t / 2).log_softmax(-1), beta=beta, reduction="none").sum(-1)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_has_the_convention_of_liger_kernel(fp32, beta):
    """Summed over entries and divided by the rows that are not ignored; log-probabilities of student, then teacher."""
    log_q, log_p = sides(FORMS["jsd"], 6, 37, device=fp32.device).values()
    labels = torch.tensor([3, 7, -100, 2, -100, 1], device=fp32.device)
    keep, m = labels != -100, (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    forward, reverse = (F.kl_div(m[keep], x[keep], log_target=True, reduction="sum") for x in (log_p, log_q))
    if beta in (0.0, 1.0):  # the limits after division by beta, by 1 - beta
        forward, reverse = (forward + reverse, 0) if beta == 0 else (0, forward + reverse)
        pair = (log_q, log_p) if beta == 0 else (log_p, log_q)
        expected = F.kl_div(*(x[keep] for x in pair), log_target=True, reduction="sum") / 4
    else:
        expected = (beta * forward + (1 - beta) * reverse) / 4
    torch.testing.assert_close(jsd(log_q, log_p, beta=beta, labels=labels), expected, rtol=1e-5, atol=1e-6)


def test_batchmean_of_jsd_is_over_the_rows_of_all_leading_dimensions(fp32):
    tensors = sides(FORMS["jsd"], 2, 3, 37, device=fp32.device)
    flat = {k: x.flatten(0, 1) for k, x in tensors.items()}
    torch.testing.assert_close(jsd(**tensors), jsd(**flat))


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_jsd_of_vanishing_probabilities(fp32, name):
    """-inf on either side or on both, and logarithms whose exponential is 0: all finite."""
    tensors = sides(FORMS[name], 3, 37, device=fp32.device)
    for x, columns in zip(tensors.values(), ([3, 20, 21], [4, 20, 22]), strict=True):
        x[:, columns] = -INF
        x[1, :30] -= 200.0
    got = check_form(FORMS[name], tensors, reduction="sum")
    assert not got["d_input"][:, [3, 20, 21]].any() and not got["d_target"][:, [4, 20, 22]].any()


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_jsd_far_apart(fp32, name):
    """No overlap: the divergence tends to beta log 1/beta + (1 - beta) log 1/(1 - beta)."""
    x = torch.linspace(-300, 300, 37, device=fp32.device)
    pair = [x[None], x.flip(-1)[None]]
    if name == "jsd":
        pair = [y.log_softmax(-1) for y in pair]
    got = jsd(*pair, beta=0.3, from_logits=name == "jsd-logits")
    torch.testing.assert_close(got.item(), 0.6108643, rtol=1e-5, atol=0)


def test_jsd_of_almost_equal_sides(fp32):
    """Of second order in their difference, which differences of logarithms of m would lose."""
    x = sides(FORMS["jsd"], 4, 37, device=fp32.device)["input"].double()
    t = (x + 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)).log_softmax(-1)
    tensors = {"input": x.float(), "target": t.float()}
    truth = jsd(*(y.double() for y in tensors.values()))
    torch.testing.assert_close(jsd(**tensors).double(), truth, rtol=1e-2, atol=0)


def test_options_that_do_not_go_together():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        jsd(x, x, beta=1.5)
    with pytest.raises(ValueError, match="log_target says"):
        kl_div(x, x, log_target=True, from_logits=True)


def test_tvd_softmaxes_logits(fp32):
    x, t = sides(FORMS["tvd-logits"], 4, 37, device=fp32.device).values()
    expected = ((x / 2).softmax(-1) - (t / 2).softmax(-1)).abs().sum(-1) / 2
    options = {"temperature": 2.0, "from_logits": True, "reduction": "none"}
    torch.testing.assert_close(tvd(x, t, **options), expected * 4)
    torch.testing.assert_close(tvd(x, t, **options, scale_by_temperature_squared=False), expected)


def test_tvd_without_overlap_is_one(fp32):
    x = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")], [50.0, 0.0, 0.0, 0.0]], device=fp32.device)
    t = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0], [0.0, 0.0, 50.0, 0.0]], device=fp32.device)
    torch.testing.assert_close(tvd(x, t, from_logits=True, reduction="none"), torch.ones(2, device=fp32.device))


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2048, 4096), (333, 50001), (3, 128256)], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_real_sizes_on_gpu(divergence, shape, dtype, reduction):
    if divergence is FORMS["tvd-logits"] and dtype == torch.float32:
        pytest.skip("among millions of softmaxes some cross within rounding, and the sign there is chance")
    tensors = sides(divergence, *shape, dtype=dtype, device="cuda")
    tensors["labels"] = some_labels(shape[0], device="cuda")
    check_form(divergence, tensors, reduction=reduction)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_repeats_to_the_bit_on_gpu(divergence, late, monkeypatch):
    in_backward(monkeypatch, late)
    tensors = sides(divergence, 500, 32003, dtype=torch.bfloat16, device="cuda")
    first, second = (check_form(divergence, tensors) for _ in range(2))
    assert all(first[k].equal(second[k]) for k in first)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_host_never_waits_on_gpu(divergence, late, upstream, monkeypatch):
    in_backward(monkeypatch, late)
    tensors = sides(divergence, 64, 5001, dtype=torch.bfloat16, device="cuda")
    labels, factor = some_labels(64, device="cuda"), torch.tensor(upstream, device="cuda")
    for attempt in ("compile", "run"):
        leaves = {k: x.detach().requires_grad_() for k, x in tensors.items()}
        torch.cuda.set_sync_debug_mode("error" if attempt == "run" else "default")
        try:
            (divergence.op(**leaves, labels=labels, **divergence.options) * factor).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_offsets_beyond_32_bits_on_gpu(name):
    """The last rows of 17000 x 131072 must give what they give alone."""
    divergence, n, vocab = FORMS[name], 17000, 131072
    assert n * vocab > 2**31
    tail = sides(divergence, 8, vocab, dtype=torch.bfloat16, device="cuda")
    whole = {k: torch.zeros(n, vocab, dtype=torch.bfloat16, device="cuda") for k in tail}
    for k, x in tail.items():
        whole[k][-8:] = x
    grads = []
    for tensors in (whole, tail):
        x = tensors["input"].requires_grad_()
        out = divergence.op(**tensors, **divergence.options, reduction="sum")
        grads.append(torch.autograd.grad(out, x)[0][-8:])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
