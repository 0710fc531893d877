"""What only a GPU shows: bf16 in Triton, large and odd shapes, offsets beyond 2^31, and that the host never waits."""

import functools

import pytest
import torch
from kernel_checks import check_cross_entropy, check_divergence, evaluate, random_inputs, random_pair

from liger_trainer.kernels import _cross_entropy_rows, _divergence_rows
from liger_trainer.kernels._chunking import RowSelection
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence, linear_divergence_reference

pytestmark = pytest.mark.gpu

LARGE = pytest.mark.xdist_group("large")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MIX = {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}
EACH = {kind: 0.2 + 0.1 * i for i, kind in enumerate(KINDS)}
JUMPING = ("tvd", "adaptive_kl")  # where a sign or the head's edge turns on a rounding error
CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.001}
inputs = functools.partial(random_inputs, device="cuda")
pair = functools.partial(random_pair, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}]
)
def test_cross_entropy(shape, dtype, options):
    tensors = inputs(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    check_cross_entropy(tensors, workspace_mb=64, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64, 48, 32003), (333, 96, 128, 5001), pytest.param((2048, 576, 576, 49152), marks=LARGE)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"kind": MIX, "temperature": 2.0, "softcap": 15.0, "teacher_softcap": 20.0, **CE}]
)
def test_divergence(shape, dtype, options):
    tensors = pair(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    check_divergence(tensors, workspace_mb=128, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 48, 32003), (333, 96, 128, 5001)], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "teacher_share": 0.6, "alpha": 0.2, "beta": 0.3, **CE}])
def test_each_kind_of_divergence(shape, dtype, options):
    tensors = pair(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    kind = {name: weight for name, weight in EACH.items() if name not in JUMPING}
    check_divergence(tensors, workspace_mb=4, kind=kind, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", JUMPING)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "teacher_share": 0.5, "softcap": 15.0}], ids=["", "mixed"]
)
def test_divergences_that_jump(kind, dtype, options):
    tensors = pair(333, 96, 128, 20003, dtype=dtype, ignored=0.3)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    got = evaluate(linear_divergence, tensors, kind=kind, workspace_mb=16, **options)
    plain = evaluate(linear_divergence_reference, tensors, kind=kind, **options)
    truth = evaluate(linear_divergence_reference, double, kind=kind, **options)
    for name in ("loss", "divergence", f"of {kind}", "d_hidden", "d_weight"):
        wrong, allowed = ((x[name].double() - truth[name]).norm() / truth[name].norm() for x in (got, plain))
        assert wrong <= 2 * allowed + 1e-3, f"{name}: relative error {wrong:.2e}, of plain torch {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5001, 20000])
def test_wider_logits(dtype, vocab):
    """The gradient overwrites the front of logits that other threads of the program still read."""
    tensors = pair(512, 96, 128, vocab, dtype=dtype, ignored=0.1)
    check_divergence(tensors, logits_dtype=torch.float32, workspace_mb=32, kind=MIX, **CE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("teacher_share", [1.0, 0.7])
@pytest.mark.parametrize("kind", [MIX, EACH], ids=["mix", "each"])
def test_student_equal_to_teacher_gives_exactly_zero(dtype, teacher_share, kind):
    tensors = inputs(300, 128, 5001, dtype=dtype)
    tensors |= {f"teacher_{k}": tensors[k] for k in ("hidden", "weight")}
    got = evaluate(linear_divergence, tensors, kind=kind, temperature=2.0, teacher_share=teacher_share)
    assert all(not got[k].any() for k in ("loss", "divergence", "forward_kl", "reverse_kl", "d_hidden", "d_weight"))
    assert not any(x.any() for name, x in got.items() if name.startswith("of "))


@pytest.mark.parametrize("upstream", [1.0, 3.0, 0.0])
def test_host_never_waits(upstream):
    """With the rows' selection started before, forward and backward queue work and nothing else."""
    tensors = pair(512, 96, 64, 5001, dtype=torch.bfloat16, ignored=0.3)
    student = {k: x for k, x in tensors.items() if not k.startswith("teacher")}
    factor = torch.tensor(upstream, device="cuda")
    for attempt in ("compile", "run"):
        num_items = torch.tensor(300, device="cuda")
        for values in (student, tensors):
            for k in ("hidden", "weight"):
                values[k] = values[k].detach().requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if attempt == "run" else "default")
        try:
            rows = RowSelection(tensors["labels"], num_items)
            RowSelection(tensors["labels"], torch.tensor(300))  # a number that the host has is not sent around
            loss = linear_cross_entropy(**student, rows=rows).loss * factor
            (loss + linear_divergence(**tensors, kind=EACH, temperature=2.0, rows=rows, **CE).loss * factor).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@LARGE
def test_offsets_beyond_32_bits():
    """17000 x 131072 logits in one workspace; the last rows alone must give what they give among the others."""
    n, vocab = 17000, 131072
    assert n * vocab > 2**31
    tensors = inputs(n, 64, vocab, dtype=torch.bfloat16)
    got = evaluate(linear_cross_entropy, tensors, workspace_mb=2**14, num_items=n)
    tail = {k: x[-40:] if k != "weight" else x for k, x in tensors.items()}
    expected = evaluate(linear_cross_entropy, tail, num_items=n)
    for name in ("log_prob", "entropy", "is_top1", "d_hidden"):
        torch.testing.assert_close(got[name][-40:], expected[name], rtol=1e-2, atol=1e-3 if name[:2] != "d_" else 1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()


@LARGE
def test_divergence_offsets_beyond_32_bits():
    n, vocab = 17000, 131072
    tensors = pair(n, 64, 32, vocab, dtype=torch.bfloat16)
    got = evaluate(linear_divergence, tensors, kind="jsd", workspace_mb=2**15, num_items=n)
    tail = {k: x[-40:] if k[-6:] != "weight" else x for k, x in tensors.items()}
    expected = evaluate(linear_divergence, tail, kind="jsd", num_items=n)
    for name in ("divergence", "forward_kl", "reverse_kl", "agrees", "d_hidden"):
        torch.testing.assert_close(got[name][-40:], expected[name], rtol=2e-2, atol=2e-2 if name[:2] != "d_" else 1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()


def test_gpu_runs_triton():
    x = torch.zeros(1, device="cuda")
    assert _cross_entropy_rows.use_triton(x) and _divergence_rows.use_triton(x)
