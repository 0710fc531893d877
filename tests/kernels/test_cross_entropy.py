"""What is of cross_entropy of given logits: torch's loss, counts, extremes, and how writing over them meets autograd.

Its forms against fp64 are in tests/support/op_table.py.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import check, evaluate, set_path
from torch import Tensor

from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference

REDUCTIONS = ("mean", "sum", "none")


def random_logits(
    n: int, v: int, *, dtype=torch.float32, device="cpu", weighted=False, ignored=0.3, seed=0
) -> dict[str, Tensor]:
    """Inputs of `cross_entropy`; about half of the labels in use have the likeliest token."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(n, v, generator=generator)).to(dtype)
    labels = torch.randint(v, (n,), generator=generator)
    labels[::2] = logits.float().argmax(-1)[::2]
    labels[torch.randperm(n, generator=generator)[: round(n * ignored)]] = -100
    tensors = {"logits": logits, "labels": labels}
    if weighted:
        tensors["weight"] = torch.rand(v, generator=generator) + 0.1
    return {k: x.to(device) for k, x in tensors.items()}


def over_a_copy(logits: Tensor, labels: Tensor, **options):
    """The op over the logits' memory, which a leaf does not give away."""
    return cross_entropy(logits.clone(), labels, inplace=True, **options)


def each(n: int) -> Tensor:
    """An upstream gradient for every token, none of them 1."""
    return torch.linspace(-1.5, 3.0, n)


given = functools.partial(evaluate, leaves=("logits",))
check_op = functools.partial(check, cross_entropy, cross_entropy_reference, leaves=("logits",))
check_inplace = functools.partial(check, over_a_copy, cross_entropy_reference, leaves=("logits",))
EITHER = pytest.mark.parametrize("check_either", [check_op, check_inplace], ids=["", "inplace"])


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_torch(fp32, reduction, smoothing, weighted):
    tensors = random_logits(9, 20, device=fp32.device, weighted=weighted, ignored=0.0)
    weight = tensors.get("weight")
    tensors["labels"][[1, 4]] = 7
    for ignore_index, inplace in itertools.product((-100, 7), (False, True)):
        options = {"label_smoothing": smoothing, "reduction": reduction, "ignore_index": ignore_index}
        got = given(over_a_copy if inplace else cross_entropy, tensors, each(9)[-1], **options)
        leaf = tensors["logits"].clone().requires_grad_()
        expected = F.cross_entropy(leaf, tensors["labels"], weight, **options)
        torch.testing.assert_close(got["loss"], expected)
        (grad,) = torch.autograd.grad(expected, leaf, torch.full_like(expected, 3.0))
        torch.testing.assert_close(got["d_logits"], grad)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_z_loss_is_a_mean_over_tokens_under_class_weights(fp32, smoothing, inplace):
    """As in Liger-Kernel 0.8.5, whose kernel gives 6.1452 with smoothing."""
    torch.manual_seed(0)
    logits, labels, weight = torch.randn(12, 37), torch.randint(0, 37, (12,)), torch.rand(37) * 3 + 0.1
    labels[[3, 7]] = -100
    tensors = {"logits": logits, "labels": labels, "weight": weight}
    tensors = {name: x.to(fp32.device) for name, x in tensors.items()}
    got = given(over_a_copy if inplace else cross_entropy, tensors, z_loss=0.1, label_smoothing=smoothing)
    leaf, labels = logits.double().requires_grad_(), tensors["labels"].cpu()
    expected = F.cross_entropy(leaf, labels, weight.double(), label_smoothing=smoothing)
    expected = expected + 0.1 * leaf.logsumexp(-1).square()[labels != -100].mean()
    torch.testing.assert_close(got["loss"].cpu().double(), expected.detach(), rtol=1e-6, atol=0)
    assert smoothing == 0 or got["loss"].item() == pytest.approx(6.1452, abs=5e-5)
    (grad,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(got["d_logits"].cpu().double(), grad, rtol=1e-5, atol=1e-7)


def test_per_token_values(fp32):
    """log_prob and entropy are those of torch's distribution, whatever smoothing, class weights and z-loss do."""
    tensors = random_logits(6, 20, device=fp32.device, weighted=True, ignored=0.0)
    got = cross_entropy(**tensors, softcap=5.0, label_smoothing=0.1, z_loss=0.1, reduction="sum")
    distribution = torch.distributions.Categorical(logits=5.0 * torch.tanh(tensors["logits"] / 5.0))
    torch.testing.assert_close(got.log_prob, distribution.log_prob(tensors["labels"]))
    torch.testing.assert_close(got.entropy, distribution.entropy())
    assert got.is_top1.tolist() == (tensors["logits"].argmax(-1) == tensors["labels"]).tolist()
    assert not (got.log_prob.requires_grad or got.entropy.requires_grad)


@EITHER
@pytest.mark.parametrize("as_tensor", [None, torch.float32, torch.float64, torch.int64], ids=str)
def test_num_items(fp32, as_tensor, check_either):
    """The loss stays fp32 whatever the dtype of the count."""
    tensors = random_logits(5, 20, device=fp32.device, weighted=True)
    num_items = 5 if as_tensor == torch.int64 else 2.5
    if as_tensor:
        num_items = torch.tensor([num_items], dtype=as_tensor, device=fp32.device)
    got = check_either(tensors, num_items=num_items)
    total = cross_entropy(**tensors, reduction="sum").loss
    torch.testing.assert_close(got["loss"], total / float(num_items))


@EITHER
@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)], ids=["", "0", "tensor 0"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_all_ignored_gives_zero(fp32, num_items, weighted, check_either):
    """torch's mean of nothing is NaN; a rank whose share of the batch holds no label must add nothing."""
    tensors = random_logits(4, 20, device=fp32.device, weighted=weighted, ignored=1.0)
    op = over_a_copy if check_either is check_inplace else cross_entropy
    got = given(op, tensors, num_items=num_items, label_smoothing=0.1, z_loss=0.1)
    assert all(not x.any() for x in got.values())


@EITHER
@pytest.mark.parametrize("num_items", [0, 0.0, torch.tensor(0)], ids=["0", "0.0", "tensor 0"])
def test_labelled_tokens_that_nothing_counts_have_an_infinite_mean(fp32, num_items, check_either):
    """As in transformers. Only the device knows whether there is a label, and the host does not wait for it."""
    from transformers.loss.loss_utils import fixed_cross_entropy

    tensors = random_logits(4, 20, device=fp32.device)
    op = over_a_copy if check_either is check_inplace else cross_entropy
    theirs = fixed_cross_entropy(tensors["logits"], tensors["labels"], torch.tensor(0))
    assert theirs == op(tensors["logits"].requires_grad_(), tensors["labels"], num_items=num_items).loss == torch.inf


def test_frozen_logits(fp32):
    """No gradient wanted: only values, and with inplace the logits as they were."""
    tensors = random_logits(4, 20, device=fp32.device)
    before = tensors["logits"].clone()
    expected = cross_entropy_reference(**tensors)
    with_grad = {**tensors, "logits": tensors["logits"].clone().requires_grad_()}
    with torch.no_grad():
        results = [cross_entropy(**with_grad, inplace=True), cross_entropy(**tensors, inplace=True)]
    results.append(cross_entropy(before, tensors["labels"], inplace=True))
    for got in results:
        assert not got.loss.requires_grad
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y)
    assert torch.equal(before, tensors["logits"]) and torch.equal(before, with_grad["logits"])


def test_extreme_logits(place):
    """Logits of +-1e4: no overflow, and the exact limits, loss 0 or the gap."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=place.dtype, device=place.device)
    for labels, expected in ([0, 1], 0.0), ([1, 0], 2e4):
        tensors = {"logits": logits, "labels": torch.tensor(labels, device=place.device)}
        got = check_op(tensors)
        assert got["loss"].item() == pytest.approx(expected, rel=1e-2)


def test_small_gradients_wait_for_the_scaler(monkeypatch):
    """A mean over 2^20 tokens lies below fp16's smallest number; a loss scale of 2^16 lifts it, in place too."""
    for path in ("torch", "triton"):
        with monkeypatch.context() as patch:
            device = set_path(patch, path)
            tensors = random_logits(4, 37, dtype=torch.float16, device=device)
            for check_either in (check_op, check_inplace):
                got = check_either(tensors, 2.0**16, num_items=2**20)
                assert (got["d_logits"][tensors["labels"] != -100] != 0).float().mean() > 0.8


def strided(logits: Tensor) -> dict[str, Tensor]:
    """The same values in other strides."""
    n, v = logits.shape
    rows, columns = logits.new_full((2 * n, v), 7.0), logits.new_full((n, v + 3), 7.0)
    rows[::2], columns[:, :v] = logits, logits
    return {"rows": rows[::2], "columns": columns[:, :v], "transposed": logits.t().contiguous().t()}


@pytest.mark.parametrize("layout", ["rows", "columns", "transposed"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_over_non_contiguous_logits(place, layout, reduction):
    tensors = random_logits(5, 37, dtype=place.dtype, device=place.device)
    tensors["labels"] = tensors["labels"].repeat_interleave(2)[::2]
    upstream = each(5) if reduction == "none" else 3.0

    def over_strided(logits, labels, **options):
        return cross_entropy(strided(logits)[layout], labels, inplace=True, **options)

    check(over_strided, cross_entropy_reference, tensors, upstream, leaves=("logits",), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_leaves_the_padding_as_it_is(fp32, reduction):
    """Logits of a padded head, cut to the vocabulary: what lies between the rows is not theirs."""
    padded = torch.full((4, 40), 7.0, device=fp32.device, requires_grad=True) * 1
    logits = padded[:, :37]
    loss = cross_entropy(logits, torch.tensor([3, 36, 0, -100], device=fp32.device), inplace=True, reduction=reduction)
    (3 * loss.loss.sum()).backward()
    assert (padded[:, 37:] == 7).all() and not (padded[:, :37] == 7).any()


def test_rows_that_share_memory_are_not_written_over(fp32):
    row = random_logits(1, 37, device=fp32.device)["logits"]
    labels = torch.tensor([3, 36, 0], device=fp32.device)

    def of_row(op, **options):
        leaf = row.clone().requires_grad_()
        return torch.autograd.grad(op((leaf * 1).expand(3, 37), labels, **options).loss, leaf)[0]

    torch.testing.assert_close(of_row(cross_entropy, inplace=True), of_row(cross_entropy_reference))


def hooked(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(leaf, logits that depend on it, the gradients that arrive at these)."""
    leaf = tensors["logits"].detach().requires_grad_()
    logits, seen = leaf * 1, []
    logits.register_hook(seen.append)
    return leaf, logits, seen


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [True, False])
def test_inplace_reuses_the_logits_memory(place, reduction, inplace):
    tensors = random_logits(4, 37, dtype=place.dtype, device=place.device)
    _, logits, seen = hooked(tensors)
    memory, before = logits.data_ptr(), logits.detach().clone()
    loss = cross_entropy(logits, tensors["labels"], inplace=inplace, reduction=reduction).loss
    loss.sum().backward()
    assert (seen[0].data_ptr() == memory) == inplace
    assert torch.equal(logits, before) != inplace


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [True, False])
def test_second_backward(fp32, reduction, inplace):
    tensors = random_logits(4, 37, device=fp32.device)
    truth = given(cross_entropy_reference, tensors, reduction=reduction)["d_logits"]
    leaf, logits, _ = hooked(tensors)
    loss = cross_entropy(logits, tensors["labels"], inplace=inplace, reduction=reduction).loss.sum()
    factors = (1.0, 3.0, 0.0, 1.0, 2.0)
    grads = [torch.autograd.grad(loss * f, leaf, retain_graph=i < 4)[0] for i, f in enumerate(factors)]
    for factor, grad in zip(factors, grads, strict=True):  # the earlier results must not have changed either
        torch.testing.assert_close(grad, factor * truth)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_users_of_overwritten_logits_are_told(fp32, dtype, reduction):
    tensors = random_logits(4, 37, dtype=dtype, device=fp32.device)
    _, logits, _ = hooked(tensors)
    other = logits.square().sum()  # saves the logits
    loss = cross_entropy(logits, tensors["labels"], inplace=True, reduction=reduction).loss.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_inplace_refuses_a_leaf(fp32):
    tensors = random_logits(4, 37, device=fp32.device)
    with pytest.raises(RuntimeError, match="inplace=True would overwrite logits that are a leaf"):
        cross_entropy(tensors["logits"].requires_grad_(), tensors["labels"], inplace=True)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("label", [20, -1, 2**40])
def test_label_outside_the_vocabulary_gives_nan_under_triton(fp32, label, weighted):
    tensors = random_logits(5, 20, device=fp32.device, weighted=weighted, ignored=0.0)
    tensors["labels"][2] = label
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            cross_entropy(**tensors)
        return
    got = cross_entropy(**tensors, reduction="none")
    assert got.loss.isnan().tolist() == got.log_prob.isnan().tolist() == [False, False, True, False, False]
    assert cross_entropy(**tensors).loss.isnan()


@pytest.mark.parametrize("change, message", [
    ({"logits": torch.zeros(2, 2, 20)}, r"needs logits \(N, V\) and labels \(N,\): logits is \(2, 2, 20\)"),
    ({"labels": torch.zeros(3, dtype=torch.int64)}, r"logits is \(4, 20\), labels is \(3,\)"),
    ({"weight": torch.zeros(19)}, r"one entry per class: weight is \(19,\), logits \(4, 20\)"),
    ({"reduction": "batchmean"}, "reduction must be one of mean, sum, none, got 'batchmean'"),
    ({"num_items": 4, "reduction": "sum"}, 'num_items is what reduction="mean" divides by; with reduction="sum"'),
    ({"num_items": 4, "reduction": "none"}, 'with reduction="none" it has no use'),
    ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
    ({"softcap": -1.0}, "softcap must be positive or None, got -1.0"),
    ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels must be int64, got int32"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{**random_logits(4, 20), **change})


GPU_ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}


def on_gpu(n: int, v: int, dtype=torch.bfloat16) -> dict[str, Tensor]:
    return random_logits(n, v, dtype=dtype, device="cuda", weighted=True, ignored=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction, num_items", [("mean", None), ("mean", 300), ("mean", torch.tensor(300)),
                                                  ("sum", None), ("none", None)])  # fmt: skip
def test_host_never_waits_on_gpu(reduction, inplace, num_items):
    num_items = num_items.cuda() if isinstance(num_items, Tensor) else num_items
    tensors, factor = on_gpu(64, 5001), torch.tensor(3.0, device="cuda")
    how = {"num_items": num_items, "reduction": reduction, "inplace": inplace, **GPU_ALL}
    for mode in ("default", "error"):  # the first launches compile
        leaf = tensors["logits"].clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss = cross_entropy(leaf * 1, tensors["labels"], weight=tensors["weight"], **how).loss
            (loss * factor).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
