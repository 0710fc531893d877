"""What only a GPU shows of kl_div, jsd and tvd: bf16, real sizes, offsets beyond 2^31, a host that never waits."""

import pytest
import torch
from given_checks import FORMS, check_form, in_backward, sides, some_labels

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=FORMS.values(), ids=list(FORMS))
def form(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2048, 4096), (333, 50001), (3, 128256)], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_real_sizes(form, shape, dtype, reduction):
    if form is FORMS["tvd-logits"] and dtype == torch.float32:
        pytest.skip("among millions of softmaxes some cross within rounding, and the sign there is chance")
    tensors = sides(form, *shape, dtype=dtype, device="cuda")
    tensors["labels"] = some_labels(shape[0], device="cuda")
    check_form(form, tensors, reduction=reduction)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_repeats_to_the_bit(form, late, monkeypatch):
    in_backward(monkeypatch, late)
    tensors = sides(form, 500, 32003, dtype=torch.bfloat16, device="cuda")
    first, second = (check_form(form, tensors) for _ in range(2))
    assert all(first[k].equal(second[k]) for k in first)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_host_never_waits(form, late, upstream, monkeypatch):
    in_backward(monkeypatch, late)
    tensors = sides(form, 64, 5001, dtype=torch.bfloat16, device="cuda")
    labels, factor = some_labels(64, device="cuda"), torch.tensor(upstream, device="cuda")
    for attempt in ("compile", "run"):
        leaves = {k: x.detach().requires_grad_() for k, x in tensors.items()}
        torch.cuda.set_sync_debug_mode("error" if attempt == "run" else "default")
        try:
            (form.op(**leaves, labels=labels, **form.options) * factor).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_offsets_beyond_32_bits(name):
    """The last rows of 17000 x 131072 must give what they give alone."""
    form, n, vocab = FORMS[name], 17000, 131072
    assert n * vocab > 2**31
    tail = sides(form, 8, vocab, dtype=torch.bfloat16, device="cuda")
    whole = {k: torch.zeros(n, vocab, dtype=torch.bfloat16, device="cuda") for k in tail}
    for k, x in tail.items():
        whole[k][-8:] = x
    grads = []
    for tensors in (whole, tail):
        x = tensors["input"].requires_grad_()
        out = form.op(**tensors, **form.options, reduction="sum")
        grads.append(torch.autograd.grad(out, x)[0][-8:])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
