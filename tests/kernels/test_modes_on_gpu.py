"""What only a GPU shows of recomputed logits and of cross_entropy: bf16 in Triton, odd sizes, and no waiting host."""

import functools

import pytest
import torch
from kernel_checks import check, check_cross_entropy, check_divergence, random_inputs, random_pair

from liger_trainer.kernels._chunking import RowSelection
from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}


def over_a_copy(logits, labels, **options):
    return cross_entropy(logits.clone(), labels, inplace=True, **options)


def random_logits(n: int, v: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    labels = torch.randint(v, (n,), generator=generator, device=DEVICE)
    labels[::5] = -100
    logits = 3 * torch.randn(n, v, generator=generator, device=DEVICE)
    return {"logits": logits.to(dtype), "labels": labels, "weight": torch.rand(v, generator=generator, device=DEVICE)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32003), (333, 5001), (64, 128256)], ids=str)
@pytest.mark.parametrize("op", [cross_entropy, over_a_copy])
def test_cross_entropy(shape, dtype, op):
    tensors = random_logits(*shape, dtype=dtype)
    plain = {k: x for k, x in tensors.items() if k != "weight"}
    upstream = torch.linspace(-1.5, 3.0, shape[0], device=DEVICE)
    check_op = functools.partial(check, op, cross_entropy_reference, leaves=("logits",))
    check_op(plain, 3.0)
    check_op(tensors, 3.0, **ALL)
    check_op(tensors, upstream, reduction="none", **ALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)], ids=str)
@pytest.mark.parametrize("workspace_mb", [None, 4])
def test_recomputed_cross_entropy(shape, dtype, workspace_mb):
    tensors = random_inputs(*shape, dtype=dtype, device=DEVICE, bias=True, ignored=0.3)
    tensors["token_weight"] = torch.rand(shape[0], device=DEVICE)
    how = {"recompute": True, "workspace_mb": workspace_mb}
    check_cross_entropy(tensors, 3.0, **how)
    upstream = torch.linspace(-1.5, 3.0, shape[0], device=DEVICE)
    check_cross_entropy(tensors, upstream, reduction="none", **ALL, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_divergence(dtype):
    tensors = random_pair(333, 96, 128, 5001, dtype=dtype, device=DEVICE, bias=True, ignored=0.3)
    upstream = torch.linspace(-1.5, 3.0, 333, device=DEVICE)
    check_divergence(tensors, upstream, recompute=True, reduction="none", kind="jsd", ce_weight=0.4, workspace_mb=4)


@pytest.mark.parametrize("how", [{"accumulate_dtype": torch.float32}, {"overwrite_hidden": True}], ids=str)
def test_modes(how):
    tensors = random_inputs(2048, 576, 49152, dtype=torch.bfloat16, device=DEVICE, ignored=0.3)

    def op(hidden, *args, **values):
        return linear_cross_entropy(hidden.clone(), *args, **values)

    reference = check_cross_entropy.args[1]
    check(op, reference, tensors, 3.0, workspace_mb=16, **how)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("num_items", [None, 300, "tensor"])
def test_host_never_waits_for_cross_entropy(reduction, inplace, num_items):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_host_never_waits_for_recomputed_logits(reduction, dtype):
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
