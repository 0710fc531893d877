"""What kl_div, jsd and tvd share: shapes, layouts, reductions, ignored rows, and when gradients are computed."""

from typing import Any

import pytest
import torch
from given_checks import BOTH, FORMS, REDUCTIONS, check_form, in_backward, short_blocks, sides, some_labels

from liger_trainer.kernels import _unfused_divergence, _unfused_divergence_kernels

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
def blocks(monkeypatch):
    short_blocks(monkeypatch)


@pytest.fixture(params=TWO.values(), ids=list(TWO))
def form(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["early", "late"])
def late(request, monkeypatch):
    in_backward(monkeypatch, request.param)


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


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
        given = {first: LAYOUTS[layout](tensors[first])}
        shape = given[first].shape
        given[second] = sides(form, *shape, **like(fp32), seed=1)[second]
        check_form(form, given, reduction=reduction)


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


def test_launch_configurations_as_shipped(place, form, monkeypatch):
    monkeypatch.undo()
    if place.path == "triton":
        monkeypatch.setattr(_unfused_divergence, "use_triton", lambda x: True)
    for shape in [(2, 700), (1, 5), (2, 5000)]:
        check_form(form, sides(form, *shape, **like(place)))


def test_gradients_are_written_in_the_forward_where_that_is_cheaper():
    def early(vocab, dtype=torch.float32, **options):
        x = torch.empty(2, vocab, dtype=dtype)
        return _unfused_divergence._early(x, x, _unfused_divergence_kernels.Call("jsd", **options))

    given: dict[str, Any] = {"from_logits": False}
    logits: dict[str, Any] = {"from_logits": True}
    assert early(262144, reduction="sum", **given) and early(8192, reduction="mean", **logits)
    assert not early(8192, reduction="none", **given) and not early(262144, reduction="mean", **logits)
    assert not early(8192, reduction="mean", dtype=torch.float16, **given)


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
def test_errors(fp32, form):
    tensors = sides(form, 4, 7, **like(fp32))
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
