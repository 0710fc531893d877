"""What both fused linear losses take beyond the loss itself: token weights, recomputed logits, fp32 accumulation,
gradients over the hidden states."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_checks import (
    LEAVES,
    check,
    check_cross_entropy,
    check_divergence,
    evaluate,
    random_inputs,
    random_pair,
    set_path,
)
from torch import Tensor

from liger_trainer.kernels import _chunking, _head
from liger_trainer.kernels import linear_cross_entropy as cross_entropy_module
from liger_trainer.kernels import linear_divergence as divergence_module
from liger_trainer.kernels._labelled_rows import RowSelection
from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence

MIX = {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}
TINY = 1e-4  # MiB: tiles of 4 columns and chunks of 2 or 4 rows, see `tiled`


class Loss(NamedTuple):
    op: Callable
    reference: Callable
    inputs: Callable[..., dict[str, Tensor]]  # (n, h, v, **options)
    module: object
    options: dict


LOSSES = {
    "cross_entropy": Loss(
        cross_entropy_module.linear_cross_entropy, cross_entropy_module.linear_cross_entropy_reference, random_inputs,
        cross_entropy_module,
        {"scale": 1.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True},
    ),
    "divergence": Loss(
        divergence_module.linear_divergence, divergence_module.linear_divergence_reference,
        lambda n, h, v, **how: random_pair(n, h, h + 1, v, **how), divergence_module,
        {"kind": MIX, "beta": 0.3, "temperature": 1.5, "softcap": 7.0, "scale": 1.2, "ce_weight": 0.4, "z_loss": 0.02,
         "label_smoothing": 0.1},
    ),
}  # fmt: skip


@pytest.fixture(params=LOSSES)
def loss(request) -> Loss:
    return LOSSES[request.param]


@pytest.fixture
def products(monkeypatch, loss) -> list[tuple]:
    """The products in order: ("logits", rows, columns), and ("gradient", *shape)."""
    shapes, project, addmm_into = [], _head.project, _head.addmm_into

    def spy_on_logits(x, w, out):
        shapes.append(("logits", *out.shape))
        return project(x, w, out)

    def spy_on_gradients(out, a, b, **factors):
        shapes.append(("gradient", *out.shape))
        addmm_into(out, a, b, **factors)

    monkeypatch.setattr(_head, "project", spy_on_logits)
    monkeypatch.setattr(_head, "addmm_into", spy_on_gradients)
    return shapes


def each(n: int) -> Tensor:
    """A gradient for every token's loss, none of them 1."""
    return torch.linspace(-1.5, 3.0, n)


def weighted(loss: Loss, n: int, *shape: int, device="cpu", **how) -> dict[str, Tensor]:
    """Inputs with a weight for every token, one of them 0."""
    token_weight = torch.rand(n, generator=torch.Generator().manual_seed(3)) * 2
    token_weight[: n // 3] = 0
    return loss.inputs(n, *shape, device=device, **how) | {"token_weight": token_weight.to(device)}


def check_recomputed(loss: Loss, tensors, upstream: float | Tensor = 1.0, **options) -> dict[str, Tensor]:
    return check(loss.op, loss.reference, tensors, upstream, recompute=True, **options)


# Token weights


@pytest.mark.parametrize("options", [False, True], ids=["", "all"])
@pytest.mark.parametrize("workspace_mb", [TINY, None])
def test_token_weight(place, loss, options, workspace_mb):
    tensors = weighted(loss, 7, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check(loss.op, loss.reference, tensors, 3.0, workspace_mb=workspace_mb, **loss.options if options else {})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_token_weight_of_any_dtype_and_stride(fp32, loss, dtype, recompute):
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.2)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=fp32.device)
    expected = evaluate(loss.op, tensors | {"token_weight": mask.float()}, recompute=recompute)
    got = evaluate(loss.op, tensors | {"token_weight": mask.to(dtype)[:, None].expand(6, 3)[:, 1]}, recompute=recompute)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_gradient_goes_to_token_weight(fp32, loss, recompute):
    tensors = weighted(loss, 4, 6, 21, device=fp32.device)
    for name in (*LEAVES[:2], "token_weight"):
        tensors[name].requires_grad_()
    loss.op(**tensors, recompute=recompute).loss.backward()
    assert tensors["token_weight"].grad is None and tensors["hidden"].grad is not None


# Recomputed logits


@pytest.mark.parametrize("options", [False, True], ids=["", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_recompute(place, loss, tiled, products, options, reduction):
    """Over many chunks, and for the cross-entropy many tiles, with another gradient for each token's loss."""
    tiled(place.path)
    tensors = weighted(loss, 7, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    upstream = each(7) if reduction == "none" else 3.0
    options = loss.options if options else {}
    got = check_recomputed(loss, tensors, upstream, reduction=reduction, workspace_mb=TINY, **options)
    assert got["loss"].shape == ((7,) if reduction == "none" else ())
    tiles = [shape for kind, *shape in products if kind == "logits"]
    assert len(tiles) >= 6 and max(rows for rows, _ in tiles) <= 4
    if loss is LOSSES["cross_entropy"]:
        assert max(columns for _, columns in tiles) <= 12
    skipped = tensors["labels"] == -100
    for name in got.keys() - {"d_weight", "d_bias"}:
        if got[name].dim():
            assert not got[name][skipped].any(), f"{name} of ignored rows must be 0"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace_mb", [None, TINY])
@pytest.mark.parametrize("n, ignored", [(5, 1.0), (0, 0.0), (1, 0.0)], ids=["all ignored", "empty", "one"])
def test_recompute_of_few_rows(place, loss, tiled, n, ignored, workspace_mb, reduction):
    tiled(place.path)
    tensors = weighted(loss, n, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    got = check_recomputed(loss, tensors, 2.0, reduction=reduction, workspace_mb=workspace_mb)
    if n != 1:
        assert all(not x.any() for x in got.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_num_items(fp32, loss, recompute):
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.3)
    for num_items in (5, 2.5, torch.tensor(2.5, device=fp32.device)):
        check(loss.op, loss.reference, tensors, 3.0, recompute=recompute, num_items=num_items)
    rows = RowSelection(tensors["labels"], num_items=5)
    got = evaluate(loss.op, tensors, recompute=recompute, rows=rows)
    expected = evaluate(loss.op, tensors, recompute=recompute, num_items=5)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("through_rows", [False, True], ids=["argument", "rows"])
def test_nothing_is_divided_by_zero_items(fp32, loss, recompute, through_rows):
    """Of no row it is 0 all the same; of labelled rows the quotient would be infinite, and 0 would hide them."""
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.3)

    def run(num_items):
        given = {"rows": RowSelection(tensors["labels"], num_items)} if through_rows else {"num_items": num_items}
        return evaluate(loss.op, tensors, recompute=recompute, **given)

    labelled = int((tensors["labels"] != -100).sum())
    bad = [0, -1.0, torch.tensor(0, device=fp32.device), torch.tensor(float("nan"), device=fp32.device)]
    for num_items in bad:
        with pytest.raises(ValueError, match=rf"num_items must be positive, got \S+ for {labelled} rows"):
            run(num_items)
    tensors["labels"].fill_(-100)
    for num_items in bad[::2]:
        assert all(not x.any() for x in run(num_items).values())
        plain = evaluate(loss.reference, tensors, num_items=num_items)
        assert not plain["loss"].any() and not plain["d_hidden"].any()


def test_recompute_without_labels(fp32):
    divergence = LOSSES["divergence"]
    tensors = weighted(divergence, 4, 6, 21, device=fp32.device, labels=False)
    check_recomputed(divergence, tensors, each(4), reduction="none", kind=MIX)


def test_mean_is_the_mean_of_the_tokens_losses(fp32, loss):
    """The sum of reduction="none" over num_items, with the same gradients, in either mode."""
    tensors = weighted(loss, 6, 6, 21, device=fp32.device, bias=True, ignored=0.3)
    count = (tensors["labels"] != -100).sum()

    def mean_of_tokens(**values):
        got = loss.op(**values, recompute=True, reduction="none")
        return got._replace(loss=got.loss.sum() / count)

    results = [evaluate(op, tensors) for op in (mean_of_tokens, loss.op)]
    results.append(evaluate(loss.op, tensors, recompute=True))
    for got in results[1:]:
        for name, x in results[0].items():
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "weight")])
def test_frozen_inputs_skip_their_products(fp32, loss, products, frozen):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True)
    check_recomputed(loss, tensors, 3.0, frozen=frozen)
    forward = [("logits", 5, 21)] * (2 if loss is LOSSES["divergence"] else 1)
    gradients = [("gradient", 21, 6)] * ("weight" not in frozen) + [("gradient", 5, 6)] * ("hidden" not in frozen)
    assert products == [*forward, *forward, *gradients]


@pytest.mark.parametrize("why", ["frozen", "no_grad"])
def test_without_gradients_only_the_forward_runs(fp32, loss, products, why):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True)
    truth = loss.reference(**tensors)
    with torch.set_grad_enabled(why == "frozen"):
        leaves = {k: x.requires_grad_(why == "no_grad" and k in LEAVES) for k, x in tensors.items()}
        got = loss.op(**leaves, recompute=True)
    assert set(products) == {("logits", 5, 21)} and not got.loss.requires_grad
    for name, x in got._asdict().items():
        torch.testing.assert_close(x, getattr(truth, name), msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("what", ["hidden", "weight", "labels"])
def test_recompute_of_non_contiguous_inputs(place, loss, tiled, what):
    tiled(place.path)
    tensors = loss.inputs(5, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    x = tensors[what]
    tensors[what] = x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x], -1)[:, 0]
    assert not tensors[what].is_contiguous()
    check_recomputed(loss, tensors, 3.0, workspace_mb=TINY)


def test_recompute_holds_nothing_but_its_inputs(fp32, loss):
    tensors = weighted(loss, 6, 6, 21, device=fp32.device, bias=True, ignored=0.3)
    inputs, saved = {x.data_ptr() for x in tensors.values()}, []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    for name in LEAVES:
        tensors[name].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss.op(**tensors, recompute=True, reduction="none")
    assert saved and all(x.data_ptr() in inputs or x.numel() <= 6 * 6 for x in saved), [x.shape for x in saved]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward(fp32, loss, reduction):
    tensors = loss.inputs(4, 6, 21, device=fp32.device, bias=True, ignored=0.2)
    truth = evaluate(loss.reference, tensors, reduction=reduction)
    leaves = [tensors[k].requires_grad_() for k in LEAVES]
    value = loss.op(**tensors, recompute=True, reduction=reduction).loss
    factors = (1.0, 3.0, 0.0, 0.5)
    results = [torch.autograd.grad(value, leaves, torch.full_like(value, f), retain_graph=True) for f in factors]
    for factor, grads in zip(factors, results, strict=True):  # the earlier results must not have changed either
        for leaf, grad in zip(LEAVES, grads, strict=True):
            torch.testing.assert_close(grad, factor * truth[f"d_{leaf}"], msg=lambda m, leaf=leaf: f"d_{leaf}: {m}")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused(fp32, loss, reduction):
    tensors = loss.inputs(4, 6, 21, device=fp32.device)
    hidden = tensors["hidden"].requires_grad_()
    value = loss.op(**tensors, recompute=True, reduction=reduction).loss.sum() + hidden.square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_changed_inputs_are_noticed(fp32, loss):
    """The backward reads them again."""
    tensors = loss.inputs(4, 6, 21, device=fp32.device)
    hidden = tensors["hidden"].requires_grad_() * 1
    value = loss.op(**{**tensors, "hidden": hidden}, recompute=True).loss
    hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("label", [21, -1, 2**40])
def test_label_outside_the_vocabulary(fp32, tiled, label):
    """NaN, whichever tile it is missing from; on a CPU the one tile of a whole row is an error, as in torch."""
    tiled(fp32.path)
    cross_entropy = LOSSES["cross_entropy"]
    tensors = cross_entropy.inputs(5, 6, 21, device=fp32.device)
    tensors["labels"][2] = label
    got = cross_entropy.op(**tensors, recompute=True, reduction="none", workspace_mb=TINY)
    assert got.loss.isnan().tolist() == [False, False, True, False, False]
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            cross_entropy.op(**tensors, recompute=True)
    else:
        assert cross_entropy.op(**tensors, recompute=True).loss.isnan()


def test_recompute_under_autocast(loss, monkeypatch):
    set_path(monkeypatch, "torch")
    tensors = loss.inputs(33, 16, 50, bias=True, ignored=0.2)
    dtypes, project = set(), _head.project

    def spy(x, w, out):
        dtypes.add((x.dtype, w.dtype, out.dtype))
        return project(x, w, out)

    monkeypatch.setattr(_head, "project", spy)
    with torch.autocast("cpu", torch.bfloat16):
        got = evaluate(loss.op, tensors, recompute=True)
        plain = evaluate(loss.reference, tensors)
    assert dtypes == {(torch.bfloat16,) * 3}
    truth = evaluate(loss.reference, {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()})
    for name in ("loss", "d_hidden", "d_weight", "d_bias"):
        assert got[name].dtype == torch.float32, name
        wrong, allowed = ((x[name].double() - truth[name]).norm() for x in (got, plain))
        assert 0 < wrong <= 2 * allowed + 1e-3, f"{name}: error {wrong:.2e}, plain torch under autocast {allowed:.2e}"


@pytest.fixture(params=["torch", "triton"])
def fp16_path(request, tiled) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    tiled(request.param)
    return request.param


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("large", ["hidden", "weight"])
def test_fp16_gradients_do_not_underflow(loss, fp16_path, large, reduction):
    """Times 1e-6 the logits' gradients lie below fp16's smallest number; those of a product with 64 do not."""
    tensors = loss.inputs(5, 6, 21, bias=True)
    other = "weight" if large == "hidden" else "hidden"
    tensors[large], tensors[other] = tensors[large] * 64, tensors[other] / 64
    tensors = {k: x.half() if x.is_floating_point() else x for k, x in tensors.items()}
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    upstream = 1e-6 * (each(5) if reduction == "none" else 5.0)
    got = evaluate(loss.op, tensors, upstream, recompute=True, reduction=reduction, workspace_mb=TINY)
    truth = evaluate(loss.reference, double, upstream, reduction=reduction)
    name = f"d_{other}"
    torch.testing.assert_close(got[name].double(), truth[name], rtol=4e-3, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fp16_sums_over_tokens_do_not_overflow(loss, fp16_path, reduction):
    """The mean's gradient lies within fp16, the sum over tokens that it is a part of does not."""
    n = 9
    tensors = loss.inputs(n, 6, 21)
    tensors["hidden"], tensors["weight"] = torch.full((n, 6), 3e4), tensors["weight"] * 1e-5
    tensors["labels"].fill_(3)
    options = {"kind": {"forward_kl": 0.0}, "ce_weight": 1.0} if loss is LOSSES["divergence"] else {}
    tensors = {k: x.half() if x.is_floating_point() else x for k, x in tensors.items()}
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    upstream = 1 / n if reduction == "none" else 1.0
    got = evaluate(loss.op, tensors, upstream, recompute=True, reduction=reduction, **options)
    truth = evaluate(loss.reference, double, upstream, reduction=reduction, **options)
    assert truth["d_weight"].abs().max() * n > 65504
    torch.testing.assert_close(got["d_weight"].double(), truth["d_weight"], rtol=4e-3, atol=1.0)


# The weight's gradient summed in fp32


@pytest.mark.parametrize("recompute", [False, True])
def test_fp32_accumulation(loss, tiled, recompute, monkeypatch):
    """Rounded once and not once a chunk: less than half the error over many chunks, which are summed so by default."""
    tiled("torch")
    tensors = loss.inputs(128, 8, 40, dtype=torch.bfloat16)
    tensors["hidden"].abs_()  # sums that grow from chunk to chunk
    tensors["labels"].fill_(3)
    truth = evaluate(loss.reference, {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()})
    errors = []
    for accumulate_dtype, roundings in ((None, 10**6), (torch.float32, 10**6), (None, 16)):
        monkeypatch.setattr(_chunking, "ROUNDINGS", roundings)
        got = evaluate(loss.op, tensors, recompute=recompute, accumulate_dtype=accumulate_dtype, workspace_mb=4 * TINY)
        assert got["d_weight"].dtype == torch.bfloat16
        errors.append((got["d_weight"].double() - truth["d_weight"]).norm())
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] == errors[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_fp32_accumulation_within_the_error_bound(place, loss, recompute):
    tensors = loss.inputs(7, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    how = {"recompute": recompute, "accumulate_dtype": torch.float32, "workspace_mb": 0.0003}
    check(loss.op, loss.reference, tensors, 3.0, **how)


# The gradient of hidden over hidden


def over_a_copy(loss: Loss, layout: Callable[[Tensor], Tensor] = torch.clone, **how) -> Callable:
    """The op over a tensor that depends on hidden, which as a leaf must stay."""

    def op(hidden, *args, **values):
        return loss.op(layout(hidden), *args, overwrite_hidden=True, **how, **values)

    return op


def columns_of_wider(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[:, : x.shape[1]]


def transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t()


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("layout", [torch.clone, columns_of_wider, transposed])
def test_overwrite_hidden(place, loss, ignored, layout):
    tensors = weighted(loss, 5, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    check(over_a_copy(loss, layout), loss.reference, tensors, 3.0, workspace_mb=0.0003)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("overwrite", [True, False])
def test_overwrite_hidden_reuses_its_memory(fp32, loss, ignored, overwrite):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, ignored=ignored)
    hidden, seen = tensors["hidden"].requires_grad_() * 1, []
    hidden.register_hook(seen.append)
    memory, before = hidden.data_ptr(), hidden.detach().clone()
    loss.op(**{**tensors, "hidden": hidden}, overwrite_hidden=overwrite).loss.backward()
    assert (seen[0].data_ptr() == memory) == overwrite
    assert torch.equal(hidden, before) != overwrite


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_other_users_of_overwritten_hidden_states_are_told(fp32, loss, ignored):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, ignored=ignored)
    hidden = tensors["hidden"].requires_grad_() * 1
    other = hidden.square().sum()  # saves hidden
    value = loss.op(**{**tensors, "hidden": hidden}, overwrite_hidden=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (value + other).backward()


def test_hidden_states_without_gradient_are_not_overwritten(fp32, loss):
    tensors = loss.inputs(5, 6, 21, device=fp32.device)
    hidden, before = tensors["hidden"], tensors["hidden"].clone()
    tensors["weight"].requires_grad_()
    loss.op(**tensors, overwrite_hidden=True).loss.backward()
    with torch.no_grad():
        loss.op(**{**tensors, "hidden": hidden.clone().requires_grad_() * 1}, overwrite_hidden=True)
    assert torch.equal(hidden, before) and tensors["weight"].grad.any()


def test_second_backward_over_hidden(fp32, loss):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True, ignored=0.2)
    truth = evaluate(loss.reference, tensors)
    leaves = [tensors[k].requires_grad_() for k in LEAVES]
    value = over_a_copy(loss)(**tensors).loss
    results = [torch.autograd.grad(value, leaves, torch.full_like(value, f), retain_graph=f != 2) for f in (3, 1, 2)]
    for factor, grads in zip((3, 1, 2), results, strict=True):
        for leaf, grad in zip(LEAVES, grads, strict=True):
            torch.testing.assert_close(grad, factor * truth[f"d_{leaf}"], msg=lambda m, leaf=leaf: f"d_{leaf}: {m}")


@pytest.mark.parametrize("hidden, weight", [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("how", [{"recompute": True}, {"overwrite_hidden": True}, {"accumulate_dtype": torch.float32}])
def test_mixed_dtypes(loss, hidden, weight, how, monkeypatch):
    """Products in what both promote to; each gradient in its own input's dtype."""
    set_path(monkeypatch, "torch")
    tensors = loss.inputs(7, 6, 21)
    tensors["hidden"], tensors["weight"] = (
        tensors["hidden"].to(getattr(torch, hidden)), tensors["weight"].to(getattr(torch, weight)),
    )  # fmt: skip
    op = over_a_copy(loss) if "overwrite_hidden" in how else functools.partial(loss.op, **how)
    got = evaluate(op, tensors, workspace_mb=0.0005)
    truth = evaluate(loss.reference, {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()})
    for name in ("d_hidden", "d_weight"):
        assert got[name].dtype == tensors[name[2:]].dtype
        torch.testing.assert_close(got[name].float(), truth[name], rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(got["loss"], truth["loss"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_weight": torch.ones(3)}, r"token_weight must be one per row .* is \(3,\), hidden \(4, 6\)"),
        ({"reduction": "sum"}, 'reduction must be "mean" or "none", got \'sum\'. For a sum, give num_items=1'),
        ({"reduction": "none"}, 'reduction="none" needs recompute=True'),
        ({"reduction": "none", "recompute": True, "num_items": 4}, 'with reduction="none" it has no use'),
        ({"overwrite_hidden": True, "hidden": torch.zeros(4, 6).requires_grad_()}, "would overwrite a leaf"),
        ({"overwrite_hidden": True, "recompute": True}, "overwrite_hidden works without recompute"),
        ({"accumulate_dtype": torch.bfloat16}, "accumulate_dtype must be None or torch.float32, got torch.bfloat16"),
    ],
)
def test_bad_arguments(loss, change, message):
    with pytest.raises(ValueError, match=message):
        loss.op(**{**loss.inputs(4, 6, 21), **change})


DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}


def over_a_copy_on_gpu(logits, labels, **options):
    return cross_entropy(logits.clone(), labels, inplace=True, **options)


def random_logits(n: int, v: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    labels = torch.randint(v, (n,), generator=generator, device=DEVICE)
    labels[::5] = -100
    logits = 3 * torch.randn(n, v, generator=generator, device=DEVICE)
    return {"logits": logits.to(dtype), "labels": labels, "weight": torch.rand(v, generator=generator, device=DEVICE)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32003), (333, 5001), (64, 128256)], ids=str)
@pytest.mark.parametrize("op", [cross_entropy, over_a_copy_on_gpu])
def test_cross_entropy_on_gpu(shape, dtype, op):
    tensors = random_logits(*shape, dtype=dtype)
    plain = {k: x for k, x in tensors.items() if k != "weight"}
    upstream = torch.linspace(-1.5, 3.0, shape[0], device=DEVICE)
    check_op = functools.partial(check, op, cross_entropy_reference, leaves=("logits",))
    check_op(plain, 3.0)
    check_op(tensors, 3.0, **ALL)
    check_op(tensors, upstream, reduction="none", **ALL)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)], ids=str)
@pytest.mark.parametrize("workspace_mb", [None, 4])
def test_recomputed_cross_entropy_on_gpu(shape, dtype, workspace_mb):
    tensors = random_inputs(*shape, dtype=dtype, device=DEVICE, bias=True, ignored=0.3)
    tensors["token_weight"] = torch.rand(shape[0], device=DEVICE)
    how = {"recompute": True, "workspace_mb": workspace_mb}
    check_cross_entropy(tensors, 3.0, **how)
    upstream = torch.linspace(-1.5, 3.0, shape[0], device=DEVICE)
    check_cross_entropy(tensors, upstream, reduction="none", **ALL, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_divergence_on_gpu(dtype):
    tensors = random_pair(333, 96, 128, 5001, dtype=dtype, device=DEVICE, bias=True, ignored=0.3)
    upstream = torch.linspace(-1.5, 3.0, 333, device=DEVICE)
    check_divergence(tensors, upstream, recompute=True, reduction="none", kind="jsd", ce_weight=0.4, workspace_mb=4)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"accumulate_dtype": torch.float32}, {"overwrite_hidden": True}], ids=str)
def test_modes_on_gpu(how):
    tensors = random_inputs(2048, 576, 49152, dtype=torch.bfloat16, device=DEVICE, ignored=0.3)

    def op(hidden, *args, **values):
        return linear_cross_entropy(hidden.clone(), *args, **values)

    reference = check_cross_entropy.args[1]
    check(op, reference, tensors, 3.0, workspace_mb=16, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("num_items", [None, 300, "tensor"])
def test_host_never_waits_for_cross_entropy_on_gpu(reduction, inplace, num_items):
    if num_items and reduction != "mean":
        pytest.skip("num_items is of the mean")
    num_items = torch.tensor(300, device=DEVICE) if num_items == "tensor" else num_items
    tensors = random_logits(64, 5001)
    factor = torch.tensor(3.0, device=DEVICE)
    for attempt in ("compile", "run"):
        leaf = tensors["logits"].clone().requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if attempt == "run" else "default")
        try:
            loss = cross_entropy(
                leaf * 1, tensors["labels"], weight=tensors["weight"], num_items=num_items, reduction=reduction,
                inplace=inplace, **ALL,
            ).loss  # fmt: skip
            (loss * factor).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_host_never_waits_for_recomputed_logits_on_gpu(reduction, dtype):
    tensors = random_pair(512, 96, 64, 5001, dtype=dtype, device=DEVICE, ignored=0.3)
    student = {k: x for k, x in tensors.items() if not k.startswith("teacher")}
    token_weight, factor = torch.rand(512, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    how = {"recompute": True, "reduction": reduction, "token_weight": token_weight}
    for attempt in ("compile", "run"):
        for values in (student, tensors):
            for k in ("hidden", "weight"):
                values[k] = values[k].detach().requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if attempt == "run" else "default")
        try:
            rows = RowSelection(tensors["labels"])
            loss = linear_cross_entropy(**student, rows=rows, workspace_mb=4, **how).loss * factor
            (loss + linear_divergence(**tensors, rows=rows, **how).loss * factor).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
