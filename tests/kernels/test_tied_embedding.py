"""The gradient of a weight that embeds tokens and is the output head, against fp64 and torch's two gradients."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import assert_within_plain_error

from liger_trainer.kernels import tied_embedding
from liger_trainer.kernels.tied_embedding import TiedWeight, add_rows_, add_rows_reference

V, H = 11, 37
IDS = {
    "mixed": torch.randint(V, (4, 17), generator=torch.Generator().manual_seed(0)),
    "one token": torch.full((70,), 3),
    "three long runs": torch.tensor([0] * 41 + [7] * 30 + [V - 1] * 9).flip(0),
    "each once": torch.randperm(V, generator=torch.Generator().manual_seed(1)),
    "a run that ends with a span": torch.tensor([2] * 16 + [5] * 16 + [6] * 3),
    "int32": torch.tensor([[1, 1, 4]], dtype=torch.int32),
    "one": torch.tensor([[V - 1]]),
    "none": torch.zeros(0, 5, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def short_blocks(request, monkeypatch):
    """Runs in several spans, and rows in several blocks; but for a GPU, where they are as shipped."""
    if not request.node.get_closest_marker("gpu"):
        for name, value in {"SPAN": 8, "ROWS": 2, "BLOCK": 16}.items():
            monkeypatch.setattr(tied_embedding, name, value)
        tied_embedding._launches.cache_clear()
        yield
        tied_embedding._launches.cache_clear()
    else:
        yield


def normal(*shape: int, seed: int, place) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(place.device, place.dtype)


def gradient(form: str, weight, ids, hidden, upstream, padding=None, uses: int = 1) -> torch.Tensor:
    """d weight of a loss that reads embedded tokens and logits."""
    weight = weight.detach().requires_grad_()
    tied = TiedWeight(weight) if form == "tied" else None
    head = weight if tied is None else tied.head
    loss = ((hidden @ head.t()) ** 2).sum()
    for use in range(uses):
        rows = F.embedding(ids, weight, padding) if tied is None else tied.embed(ids, padding)
        loss = loss + (rows * upstream * (1 + use)).sum()
    (dweight,) = torch.autograd.grad(loss, weight)
    return dweight


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("padding", [None, 3])
def test_against_fp64_and_torch(place, ids, padding):
    ids = ids.to(place.device)
    weight, hidden = normal(V, H, seed=2, place=place), normal(5, H, seed=3, place=place)
    upstream = normal(*ids.shape, H, seed=4, place=place)
    got = gradient("tied", weight, ids, hidden, upstream, padding)
    plain = gradient("plain", weight, ids, hidden, upstream, padding)
    truth = gradient("plain", weight.double(), ids, hidden.double(), upstream.double(), padding)
    assert got.dtype == place.dtype and got.is_contiguous()
    assert_within_plain_error("d_weight", got, plain, truth, place.dtype)
    assert torch.equal(got, gradient("tied", weight, ids, hidden, upstream, padding))


@pytest.mark.parametrize("planted", ["a row left out", "a row twice", "1 %"])
def test_planted_errors_are_seen(fp32, planted):
    ids = IDS["three long runs"].to(fp32.device)
    rows, dweight = normal(len(ids), H, seed=5, place=fp32), normal(V, H, seed=6, place=fp32)
    plain, truth, got = dweight.clone(), dweight.double(), dweight.clone()
    add_rows_reference(plain, ids, rows)
    add_rows_reference(truth, ids, rows.double())
    wrong = rows.clone()
    wrong[20] *= {"a row left out": 0, "a row twice": 2, "1 %": 1.01}[planted]
    add_rows_(got, ids, rows)
    assert_within_plain_error("d_weight", got, plain, truth, fp32.dtype)
    got = dweight.clone()
    add_rows_(got, ids, wrong)
    with pytest.raises(AssertionError):
        assert_within_plain_error("d_weight", got, plain, truth, fp32.dtype)


def test_uses_that_are_absent_or_repeated(fp32):
    ids, weight = IDS["mixed"].to(fp32.device), normal(V, H, seed=2, place=fp32)
    hidden, upstream = normal(5, H, seed=3, place=fp32), normal(*ids.shape, H, seed=4, place=fp32)
    for uses in (0, 2):
        got, want = (gradient(form, weight, ids, hidden, upstream, uses=uses) for form in ("tied", "plain"))
        torch.testing.assert_close(got, want)
    weight.requires_grad_()
    (alone,) = torch.autograd.grad((TiedWeight(weight).embed(ids) * upstream).sum(), weight)
    torch.testing.assert_close(alone, torch.autograd.grad((F.embedding(ids, weight) * upstream).sum(), weight)[0])
    tied = TiedWeight(weight)
    rows = tied.embed(ids)
    (dhead,) = torch.autograd.grad((hidden @ tied.head.t()).sum(), weight)  # not through the rows
    torch.testing.assert_close(dhead, hidden.sum(0).expand(V, H))
    assert torch.equal(rows, F.embedding(ids, weight))


def test_gradients_of_any_order_in_memory(fp32):
    ids, weight = IDS["mixed"].to(fp32.device), normal(V, H, seed=2, place=fp32).requires_grad_()
    upstream = normal(H, *ids.shape, seed=4, place=fp32).permute(1, 2, 0)
    for head_gradient in (normal(H, V, seed=7, place=fp32).t(), weight.new_ones(1, 1).expand(V, H)):
        tied = TiedWeight(weight)
        before = head_gradient.clone()
        (got,) = torch.autograd.grad((tied.embed(ids), tied.head), weight, (upstream, head_gradient))
        (want,) = torch.autograd.grad((F.embedding(ids, weight), weight * 1), weight, (upstream, head_gradient))
        torch.testing.assert_close(got, want)
        assert torch.equal(head_gradient, before)


def test_a_second_backward_and_second_derivatives(fp32):
    ids, weight = IDS["mixed"].to(fp32.device), normal(V, H, seed=2, place=fp32).requires_grad_()
    tied = TiedWeight(weight)
    loss = (tied.embed(ids) ** 2).sum() + (tied.head**2).sum()
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_hooks_of_the_weight_get_the_whole_gradient(fp32):
    """As those of DistributedDataParallel, which average it."""
    ids, weight = IDS["mixed"].to(fp32.device), normal(V, H, seed=2, place=fp32).requires_grad_()
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(2):
        tied = TiedWeight(weight)
        ((tied.embed(ids) ** 2).sum() + (tied.head**2).sum()).backward()
    (want,) = torch.autograd.grad((F.embedding(ids, weight) ** 2).sum() + (weight**2).sum(), weight)
    for gradient in seen[:2]:
        torch.testing.assert_close(gradient, want)
    torch.testing.assert_close(weight.grad, 2 * want)


@pytest.mark.gpu
def test_more_than_2_31_numbers():
    n, width = 2**20 + 3, 2056
    dweight = torch.zeros(n, width, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([n - 1, 5, n - 1, n - 2] + [n - 1] * 600, device="cuda")
    rows = torch.ones(len(ids), width, dtype=torch.bfloat16, device="cuda")
    add_rows_(dweight, ids, rows)
    assert dweight[[5, n - 2]].eq(1).all() and dweight[n - 1].sub(602).abs().max() <= 4
    assert dweight.count_nonzero() == 3 * width


@pytest.mark.gpu
@pytest.mark.parametrize("width", [576, 1024, 2048, 2560])
def test_real_sizes_on_a_gpu(width):
    """Zipf's frequencies, and a third of the tokens padding that nobody declared."""
    torch.manual_seed(0)
    ids = (torch.rand(8192, device="cuda") ** -1).long().clamp(max=151_935)
    ids[::3] = 151_643
    rows = torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(151_936, width, device="cuda", dtype=torch.bfloat16)
    got, plain, truth = start.clone(), start.clone(), start.double()
    add_rows_(got, ids, rows)
    add_rows_reference(plain, ids, rows)
    add_rows_reference(truth, ids, rows.double())
    used = ids.unique()
    assert_within_plain_error("d_weight", got[used], plain[used], truth[used], torch.bfloat16)
    got[used] = start[used]
    assert torch.equal(got, start)
