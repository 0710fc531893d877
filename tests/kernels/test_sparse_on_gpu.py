"""What only a GPU shows of linear_sparse_divergence: bf16, threads that share a row, and that the host never waits."""

import functools

import pytest
import torch
from kernel_checks import check, evaluate, random_inputs

from liger_trainer.kernels._chunking import RowSelection
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "ce_weight": 0.4}
check_sparse = functools.partial(check, linear_sparse_divergence, linear_sparse_divergence_reference)


def random_sparse(n, h, v, k, **given):
    """A teacher of k tokens a row, the label among them, 7919 apart and so distinct."""
    tensors = random_inputs(n, h, v, device="cuda", **given)
    assert v % 7919 and k < v
    first = tensors["labels"].clamp(min=0)[:, None]
    log_probs = torch.randn(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).log_softmax(-1)
    ids = (first + 7919 * torch.arange(k, device="cuda")) % v
    return tensors | {"ids": ids, "log_probs": log_probs - 0.1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64, 32003, 1), (333, 96, 5001, 64), (257, 64, 10000, 1000), (2048, 576, 49152, 50)]
)
@pytest.mark.parametrize("options", [{}, {"tail": "none"}, ALL], ids=["bucket", "none", "all"])
def test_sparse_divergence(shape, dtype, options):
    tensors = random_sparse(*shape, dtype=dtype, bias="scale" in options, ignored=0.3)
    check_sparse(tensors, workspace_mb=64, **options)


@pytest.mark.parametrize("k", [1, 20, 1024])
def test_gradients_are_the_same_every_time(k):
    """The K entries are read, taken out, and filled in by other threads than those that pass over the row."""
    tensors = random_sparse(512, 64, 20000, k, dtype=torch.bfloat16)
    first = evaluate(linear_sparse_divergence, tensors, **ALL)
    for _ in range(10):
        again = evaluate(linear_sparse_divergence, tensors, **ALL)
        assert all(torch.equal(again[name], x) for name, x in first.items())


def test_host_never_waits():
    tensors = random_sparse(512, 96, 5001, 16, dtype=torch.bfloat16, ignored=0.3)
    for mode in ("default", "error"):  # compiled in the first round
        num_items = torch.tensor(300, device="cuda")
        for name in ("hidden", "weight"):
            tensors[name] = tensors[name].detach().requires_grad_()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rows = RowSelection(tensors["labels"], num_items)
            (linear_sparse_divergence(**tensors, rows=rows, **ALL).loss * 1.0).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.xdist_group("large")
def test_offsets_beyond_32_bits():
    """17000 x 131072 logits in one workspace; the last rows alone must give what they give among the others."""
    n, vocab = 17000, 131072
    assert n * vocab > 2**31
    tensors = random_sparse(n, 64, vocab, 8, dtype=torch.bfloat16)
    got = evaluate(linear_sparse_divergence, tensors, workspace_mb=2**14, num_items=n)
    tail = {k: x[-40:] if k != "weight" else x for k, x in tensors.items()}
    expected = evaluate(linear_sparse_divergence, tail, num_items=n)
    for name in ("divergence", "log_prob", "entropy", "d_hidden"):
        torch.testing.assert_close(got[name][-40:], expected[name], rtol=1e-2, atol=1e-3 if name[:2] != "d_" else 1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()
