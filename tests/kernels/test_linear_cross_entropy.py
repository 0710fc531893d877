import pytest
import torch
import torch.nn.functional as F
from kernel_checks import LEAVES, check_cross_entropy, evaluate, random_inputs, set_path

from liger_trainer.kernels import _cross_entropy_rows, _head
from liger_trainer.kernels import linear_cross_entropy as module
from liger_trainer.kernels._labelled_rows import RowSelection
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

TINY = 1e-6  # MiB: a chunk for every row

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 4.0},
    "temperature": {"temperature": 2.0},
    "sharp": {"temperature": 0.5},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.03},
    "dft": {"dft": True},
    "all": {
        "scale": 1.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True,
        "num_items": 7,
    },
}  # fmt: skip


@pytest.fixture
def written(monkeypatch) -> list[bool]:
    """Whether each launch of the row kernel wrote a gradient."""
    flags, real = [], module.whole_rows

    def spy(logits, bias, targets, out, grad, options):
        flags.append(grad is not None)
        real(logits, bias, targets, out, grad, options)

    monkeypatch.setattr(module, "whole_rows", spy)
    return flags


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 16), (37, 24, 101), (3, 65, 33)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_odd_sizes(place, shape, bias):
    check_cross_entropy(random_inputs(*shape, dtype=place.dtype, device=place.device, bias=bias))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(place, options):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_cross_entropy(tensors, **options)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("workspace_mb", [TINY, 0.001, 512])
def test_ignored_rows_and_chunks(place, ignored, workspace_mb):
    tensors = random_inputs(11, 6, 37, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    got = check_cross_entropy(tensors, workspace_mb=workspace_mb, label_smoothing=0.1)
    skipped = tensors["labels"] == -100
    for name in ("log_prob", "entropy", "is_top1", "d_hidden"):
        assert not got[name][skipped].any(), f"{name} of ignored rows must be 0"


def test_other_ignore_index(fp32):
    tensors = random_inputs(9, 6, 20, device=fp32.device)
    tensors["labels"][2:5] = 7
    check_cross_entropy(tensors, ignore_index=7)


def test_empty_batch(place):
    got = check_cross_entropy(random_inputs(0, 6, 20, dtype=place.dtype, device=place.device, bias=True))
    assert got["loss"] == 0 and not got["d_weight"].any() and not got["d_bias"].any()


def test_all_ignored_gives_zero(place):
    tensors = random_inputs(4, 6, 20, dtype=place.dtype, device=place.device, bias=True)
    tensors["labels"].fill_(-100)
    got = evaluate(linear_cross_entropy, tensors)
    assert all(not x.any() for x in got.values())


def test_extreme_logits(place):
    """Logits of +-1e4: no overflow, and the exact limits, loss 0 or the gap."""
    hidden = torch.tensor([[1.0], [-1.0]], dtype=place.dtype, device=place.device)
    weight = torch.tensor([[1e4], [-1e4], [0.0], [5e3], [1.0]], dtype=place.dtype, device=place.device)
    for labels, expected in ([0, 1], 0.0), ([1, 0], 2e4):
        tensors = {"hidden": hidden, "weight": weight, "labels": torch.tensor(labels, device=place.device)}
        got = check_cross_entropy(tensors)
        assert got["loss"].item() == pytest.approx(expected, rel=1e-2)
    check_cross_entropy({**tensors, "hidden": hidden / 8}, temperature=0.5, label_smoothing=0.1, z_loss=1e-4)


def test_large_vocabulary_with_the_block_in_use(fp32, monkeypatch):
    monkeypatch.setattr(_cross_entropy_rows, "BLOCK", 4096)
    check_cross_entropy(random_inputs(2, 3, 9001, device=fp32.device, bias=True), label_smoothing=0.1, softcap=5.0)


@pytest.mark.parametrize("what", ["hidden", "weight", "labels"])
def test_non_contiguous(place, what):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, ignored=0.3)
    x = tensors[what]
    tensors[what] = x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x], -1)[:, 0]
    assert not tensors[what].is_contiguous()
    check_cross_entropy(tensors)
    wide = torch.cat([x, x], -1) if x.dim() == 2 else x.repeat(2)
    check_cross_entropy({**tensors, what: wide[..., : x.shape[-1]]})


@pytest.mark.parametrize("num_items", [5, 2.5, "tensor", "fractional tensor", 1000])
@pytest.mark.parametrize("through_rows", [False, True], ids=["argument", "rows"])
def test_num_items(fp32, num_items, through_rows):
    tensors = random_inputs(9, 6, 20, device=fp32.device, bias=True, ignored=0.3)
    plain = {"tensor": 5, "fractional tensor": 2.5}.get(num_items, num_items)
    if isinstance(num_items, str):
        num_items = torch.tensor(plain, device=fp32.device)
    truth = evaluate(linear_cross_entropy_reference, tensors, num_items=plain)
    given = {"rows": RowSelection(tensors["labels"], num_items)} if through_rows else {"num_items": num_items}
    for name, x in evaluate(linear_cross_entropy, tensors, **given).items():
        torch.testing.assert_close(x, truth[name], msg=lambda m, name=name: f"{name}: {m}")


def test_num_items_zero_gives_zero(fp32):
    """A rank whose share of the global batch holds no label at all."""
    tensors = random_inputs(4, 6, 20, device=fp32.device)
    tensors["labels"].fill_(-100)
    got = evaluate(linear_cross_entropy, tensors, num_items=torch.tensor(0, device=fp32.device))
    assert all(not x.any() for x in got.values())


def test_rows_selected_earlier(fp32):
    tensors = random_inputs(9, 6, 20, device=fp32.device, bias=True)
    tensors["labels"][[1, 4, 8]] = 3
    rows = RowSelection(tensors["labels"], num_items=4, ignore_index=3)
    got = evaluate(linear_cross_entropy, tensors, rows=rows)
    expected = evaluate(linear_cross_entropy, tensors, num_items=4, ignore_index=3)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "weight")])
def test_frozen_inputs_skip_their_products(fp32, products, written, frozen):
    tensors = random_inputs(5, 6, 20, device=fp32.device, bias=True)
    check_cross_entropy(tensors, frozen=frozen, workspace_mb=2 * 20 * 4 / 2**20)  # chunks of 2, 2 and 1 rows
    expected = []
    for rows in (2, 2, 1):
        expected += [(20, 6)] * ("weight" not in frozen) + [(rows, 6)] * ("hidden" not in frozen)
    assert products == expected
    assert written == [True, True, True]


@pytest.mark.parametrize("why", ["frozen", "no_grad"])
def test_without_gradients_only_the_forward_runs(fp32, products, written, why):
    tensors = random_inputs(5, 6, 20, device=fp32.device, bias=True)
    truth = linear_cross_entropy_reference(**tensors)
    with torch.set_grad_enabled(why == "frozen"):
        got = linear_cross_entropy(
            **{k: x.requires_grad_(why == "no_grad" and k in LEAVES) for k, x in tensors.items()}
        )
    assert products == [] and written == [False]
    assert not any(x.requires_grad for x in got)
    for name, x in got._asdict().items():
        torch.testing.assert_close(x, getattr(truth, name), msg=lambda m, name=name: f"{name}: {m}")


def test_ignored_rows_take_no_part_in_the_products(fp32, products):
    tensors = random_inputs(9, 6, 20, device=fp32.device)
    tensors["labels"][:6] = -100
    evaluate(linear_cross_entropy, tensors)
    assert products == [(20, 6), (3, 6)]


@pytest.mark.parametrize("upstream", [1.0, 3.0, 0.5, 0.0])
def test_upstream_gradient(place, upstream):
    tensors = random_inputs(5, 6, 20, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    check_cross_entropy(tensors, upstream=upstream)


def leaves_of(tensors):
    return [tensors[k].requires_grad_() for k in LEAVES]


def test_second_backward(fp32):
    tensors = random_inputs(5, 6, 20, device=fp32.device, bias=True)
    leaves = leaves_of(tensors)
    truth = torch.autograd.grad(linear_cross_entropy_reference(**tensors).loss, leaves)
    loss = linear_cross_entropy(**tensors).loss
    results = [
        torch.autograd.grad(loss, leaves, torch.full_like(loss, f), retain_graph=True) for f in (1, 3, 0, 0.5, 1)
    ]
    for factor, grads in zip(
        (1, 3, 0, 0.5, 1), results, strict=True
    ):  # the earlier results must not have changed either
        for leaf, grad, true in zip(LEAVES, grads, truth, strict=True):
            torch.testing.assert_close(grad, factor * true, msg=lambda m, leaf=leaf: f"d_{leaf}: {m}")


def test_second_backward_into_grad(fp32):
    tensors = random_inputs(5, 6, 20, device=fp32.device, bias=True)
    leaves = leaves_of(tensors)
    truth = torch.autograd.grad(linear_cross_entropy_reference(**tensors).loss, leaves)
    loss = linear_cross_entropy(**tensors).loss
    loss.backward(retain_graph=True)
    for leaf in leaves:
        leaf.grad.mul_(10)  # what gradient clipping does
    (2 * loss).backward()
    for leaf, true in zip(leaves, truth, strict=True):
        torch.testing.assert_close(leaf.grad, 12 * true)


def test_gradients_of_gradients_are_refused(fp32):
    tensors = random_inputs(5, 6, 20, device=fp32.device)
    hidden = tensors["hidden"].requires_grad_()
    loss = linear_cross_entropy(**tensors).loss + hidden.square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_sum_to_the_batch(fp32, dtype):
    """Into existing .grad, with the batch's token count: as in gradient accumulation."""
    if fp32.path == "triton" and dtype == torch.float64:
        pytest.skip("the kernels compute in fp32")
    tensors = random_inputs(12, 6, 20, dtype=dtype, device=fp32.device, bias=True, ignored=0.3)
    options = {"num_items": int((tensors["labels"] != -100).sum()), "z_loss": 0.01, "label_smoothing": 0.1}
    whole = evaluate(linear_cross_entropy, tensors, **options)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for splits in (2, 4, 12):
        leaves = {k: tensors[k].clone().requires_grad_() for k in LEAVES}
        total = 0.0
        for part in torch.arange(12).chunk(splits):
            loss = linear_cross_entropy(leaves["hidden"][part], leaves["weight"], tensors["labels"][part],
                                        bias=leaves["bias"], **options).loss  # fmt: skip
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(total, whole["loss"], rtol=tolerance, atol=tolerance)
        for k, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, whole[f"d_{k}"], rtol=tolerance, atol=tolerance)


def test_results_do_not_depend_on_the_workspace(fp32):
    tensors = random_inputs(9, 6, 37, device=fp32.device, bias=True, ignored=0.2)
    expected = evaluate(linear_cross_entropy, tensors)
    for workspace_mb in (TINY, 0.0005, 1, 4096):
        for name, x in evaluate(linear_cross_entropy, tensors, workspace_mb=workspace_mb).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("options", [v for k, v in OPTIONS.items() if k not in ("dft", "all")], ids=str)
def test_gradcheck(options, monkeypatch):
    """dft aside, whose weight is held constant and so has no finite difference."""
    set_path(monkeypatch, "torch")
    tensors = random_inputs(4, 3, 7, dtype=torch.float64, bias=True, ignored=0.3)
    labels = tensors.pop("labels")

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, labels, bias=bias, **options).loss

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in tensors.values()])


def test_equals_torch(fp32):
    tensors = random_inputs(9, 6, 20, dtype=torch.float32, device=fp32.device, ignored=0.2)
    logits = tensors["hidden"] @ tensors["weight"].t()
    expected = F.cross_entropy(logits / 1.5, tensors["labels"], label_smoothing=0.1)
    torch.testing.assert_close(linear_cross_entropy(**tensors, temperature=1.5, label_smoothing=0.1).loss, expected)
    distribution = torch.distributions.Categorical(logits=logits)
    keep = tensors["labels"] != -100
    torch.testing.assert_close(linear_cross_entropy(**tensors).entropy, distribution.entropy() * keep)


def test_dft_reference_is_the_published_loss():
    """Wu et al. 2025: -sg(p) log p."""
    tensors = random_inputs(6, 5, 9, dtype=torch.float64)
    log_prob = F.linear(tensors["hidden"], tensors["weight"]).log_softmax(-1)
    log_prob = log_prob.gather(1, tensors["labels"][:, None]).squeeze(1)
    expected = -(log_prob.exp() * log_prob).mean()
    torch.testing.assert_close(linear_cross_entropy_reference(**tensors, dft=True).loss, expected)


def test_ties_count_as_top1(fp32):
    hidden = torch.ones(3, 1, device=fp32.device)
    weight = torch.tensor([[1.0], [2.0], [0.5], [2.0]], device=fp32.device)
    labels = torch.tensor([1, 3, 0], device=fp32.device)
    assert linear_cross_entropy(hidden, weight, labels).is_top1.tolist() == [True, True, False]


@pytest.mark.parametrize("label", [20, -1, 2**40])
def test_label_outside_the_vocabulary_gives_nan_under_triton(fp32, label):
    tensors = random_inputs(5, 6, 20, device=fp32.device, bias=True)
    tensors["labels"][2] = label
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(**tensors)
        return
    got = linear_cross_entropy(**tensors)
    assert got.loss.isnan() and got.log_prob.isnan().tolist() == [False, False, True, False, False]


def test_autocast_computes_in_its_dtype(monkeypatch):
    dtypes, project = [], _head.project

    def spy(x, w, out):
        dtypes.append((x.dtype, w.dtype, out.dtype))
        return project(x, w, out)

    monkeypatch.setattr(_head, "project", spy)
    tensors = random_inputs(33, 16, 50, bias=True, ignored=0.2)
    with torch.autocast("cpu", torch.bfloat16):
        got = evaluate(linear_cross_entropy, tensors, workspace_mb=0.001)
        plain = evaluate(linear_cross_entropy_reference, tensors)
    assert set(dtypes) == {(torch.bfloat16,) * 3}
    truth = evaluate(linear_cross_entropy_reference, {k: x.double() if k in LEAVES else x for k, x in tensors.items()})
    for name in truth:
        assert got[name].dtype == (torch.bool if name == "is_top1" else torch.float32), name
        if name != "is_top1":
            wrong, allowed = ((x[name].double() - truth[name]).norm() for x in (got, plain))
            assert 0 < wrong <= 2 * allowed + 1e-3, (
                f"{name}: error {wrong:.2e}, plain torch under autocast {allowed:.2e}"
            )


@pytest.mark.parametrize("hidden, weight", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_mixed_dtypes(hidden, weight, monkeypatch):
    """Products in what both promote to; each gradient in its own input's dtype."""
    set_path(monkeypatch, "torch")
    tensors = random_inputs(7, 6, 20)
    tensors["hidden"], tensors["weight"] = (
        tensors["hidden"].to(getattr(torch, hidden)),
        tensors["weight"].to(getattr(torch, weight)),
    )
    got = evaluate(linear_cross_entropy, tensors, workspace_mb=0.0005)
    truth = evaluate(linear_cross_entropy_reference, {k: x.float() if k in LEAVES else x for k, x in tensors.items()})
    for name in ("d_hidden", "d_weight"):
        assert got[name].dtype == tensors[name[2:]].dtype
        torch.testing.assert_close(got[name].float(), truth[name], rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(got["loss"], truth["loss"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(4, 5)}, r"share H: hidden is \(4, 5\), weight is \(20, 6\)"),
        ({"hidden": torch.zeros(2, 2, 6)}, r"hidden is \(2, 2, 6\)"),
        ({"weight": torch.zeros(20)}, r"weight is \(20,\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
        ({"bias": torch.zeros(19)}, r"one per row of weight: bias is \(19,\), weight \(20, 6\)"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"num_items": 4, "rows": RowSelection(torch.zeros(4, dtype=torch.int64))}, "num_items was given twice"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**random_inputs(4, 6, 20), **change})


def test_logits_far_from_zero(fp32):
    """What log-sum-exp is rounded by is common to a row, and must not add up in the gradient of hidden."""
    tensors = random_inputs(64, 16, 300, device=fp32.device, spread=1.0)
    tensors["bias"] = torch.full((300,), 300.0, device=fp32.device)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    truth = evaluate(linear_cross_entropy_reference, double)["d_hidden"]
    errors = [
        (evaluate(op, tensors)["d_hidden"].double() - truth).norm()
        for op in (linear_cross_entropy, linear_cross_entropy_reference)
    ]
    assert errors[0] < 2 * errors[1]
