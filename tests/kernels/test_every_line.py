"""Small calls of the losses that together reach every line of their kernels and twins, against fp64.

They were chosen with errors planted one at a time: each assigned, added, returned, stored or launched value of the row
kernels, the fused losses and the head times 1.01, each flag negated, each index shifted. Every such error fails a call
here, so the bounds are far below 1 %. Whoever adds a line adds a call that fails when the line is off by that much.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import LEAVES, PATHS, double, evaluate, random_inputs, random_pair, set_path
from small_blocks import home

from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import linear_divergence, linear_divergence_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from liger_trainer.kernels.types import Lora

OPS = {
    "cross_entropy": (cross_entropy, cross_entropy_reference),
    "linear": (linear_cross_entropy, linear_cross_entropy_reference),
    "divergence": (linear_divergence, linear_divergence_reference),
    "sparse": (linear_sparse_divergence, linear_sparse_divergence_reference),
}
ADAPTERS, TEACHER_ADAPTER = ("a0", "b0", "a1", "b1"), ("teacher_a", "teacher_b")
EACH_KIND = {kind: 0.3 + 0.1 * i for i, kind in enumerate(KINDS)}
EACH = torch.tensor([0.5, 2.0, -1.5])  # an upstream gradient for each token


def with_adapters(op: Callable) -> Callable:
    """The op, with the adapters of its head as separate arguments."""

    def run(**values):
        tensors = {name: values.pop(name) for name in (*ADAPTERS, *TEACHER_ADAPTER) if name in values}
        if "a0" in tensors:
            values["lora"] = [Lora(tensors["a0"], tensors["b0"], 0.5), Lora(tensors["a1"], tensors["b1"], 1.3)]
        if "teacher_a" in tensors:
            values["teacher_lora"] = Lora(tensors["teacher_a"], tensors["teacher_b"], 0.7)
        return op(**values)

    return run


def over_columns(op: Callable) -> Callable:
    """In place over a part of wider rows that depend on the leaf."""
    return lambda logits, **values: op(torch.cat([logits, logits], -1)[:, : logits.shape[1]], **values)


def calls(path: str) -> list[tuple[str, dict, dict, Any, dict]]:
    """(op, tensors, options that only ours takes, upstream gradient, options)."""
    found = []

    def call(op: str, tensors: dict, ours: dict | None = None, upstream: Any = 1.0, **options: Any) -> None:
        found.append((op, tensors, ours or {}, upstream, options))

    dtype = torch.float32 if path == "triton" else torch.float64
    one_row = {"workspace_mb": 1e-6}
    tiles = {"recompute": True, "workspace_mb": (4 * 2 * 3 + 4 * 2 * dtype.itemsize) / 2**20}  # of 2 x 4 logits
    single = functools.partial(random_inputs, 3, 3, 9, dtype=dtype, spread=1.5)
    pair = functools.partial(random_pair, 3, 3, 2, 9, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    given = {"logits": torch.randn(3, 9, dtype=dtype, generator=generator), "labels": torch.tensor([3, -100, 8])}
    given_weight = given | {"weight": torch.rand(9, generator=generator) + 0.5}
    token_weight = {"token_weight": torch.tensor([0.5, 2.0, 1.5])}
    mix = {"forward_kl": 0.5, "reverse_kl": 0.4, "jsd": 0.6}
    only_ce, smooth = {"ce_weight": 0.7}, {"label_smoothing": 0.3}
    ce = {"z_loss": 0.05, **only_ce}
    caps = {"softcap": 4.0, "teacher_softcap": 5.0, "scale": 1.3, "teacher_scale": 0.8}
    every = {"softcap": 4.0, "scale": 1.3, "temperature": 1.7, "z_loss": 0.1, **smooth}
    half, half_single = pair(dtype=torch.float16), single(dtype=torch.float16)
    negative = pair() | {
        "teacher_bias": torch.full((9,), -9.0, dtype=dtype),  # its largest logit, times 1.01, is smaller
        "bias": torch.full((9,), 3.0, dtype=dtype),  # a mean logit that smoothing sees
    }
    shapes = ((2, 3), (9, 2), (1, 3), (9, 1), (2, 2), (9, 2))
    adapters = {
        name: torch.randn(shape, dtype=dtype, generator=generator)
        for name, shape in zip((*ADAPTERS, *TEACHER_ADAPTER), shapes, strict=True)
    }
    of_student = {name: adapters[name] for name in ADAPTERS}
    cache = {"ids": torch.tensor([[1, 4], [0, 8], [3, 2]]), "log_probs": torch.log(torch.full((3, 2), 0.4))}
    call("cross_entropy", given_weight, upstream=3.0, **every)
    call("linear", single(bias=True, ignored=0.3), one_row, **every)
    call("linear", single(bias=True, ignored=0.3), tiles, EACH, reduction="none", **every)
    call(
        "divergence", random_pair(1, 3, 2, 9, dtype=dtype, bias=True), kind=EACH_KIND,
        beta=0.3, alpha=0.2, temperature=0.5, teacher_share=0.7, **caps, **ce, **smooth,
    )  # fmt: skip
    call(
        "divergence", pair(bias=True, ignored=0.3) | token_weight, one_row, 3.0, kind=mix, beta=0.3, temperature=2.0,
        **caps, **ce, **smooth,
    )  # fmt: skip
    call("divergence", pair(), kind={"skew_kl": 0.3, "symmetric_kl": 0.2}, alpha=0.0)
    call("linear", single() | token_weight, upstream=3.0, dft=True)
    call("cross_entropy", given, {"inplace": True}, 3.0)
    call("divergence", pair(labels=False), kind={"jsd": 1.0}, beta=0.3)
    call(
        "divergence", negative, kind={"forward_kl": 0.5, "reverse_kl": 0.4}, temperature=1.5,
        scale_by_temperature_squared=False, **ce, **smooth,
    )  # fmt: skip
    call("divergence", pair(), kind="forward_kl", **ce)
    call("divergence", pair(), kind="reverse_kl")
    call("divergence", pair(), kind={"jsd": 0.7, "reverse_kl": 0.2}, beta=0.0)
    call("divergence", half, {"logits_dtype": torch.float32}, kind=mix)
    call("linear", single() | {"weight": single()["weight"].half()}, one_row)
    call("linear", single() | token_weight, {"recompute": True}, 3.0, dft=True)
    call("linear", half_single, tiles, EACH, reduction="none")
    call("divergence", half | token_weight, {"recompute": True}, 3.0)
    call("divergence", pair(ignored=0.3), {"recompute": True}, EACH, reduction="none")
    call("cross_entropy", given, upstream=EACH, reduction="none", z_loss=0.1)
    call("cross_entropy", given_weight, {"inplace": True}, num_items=torch.tensor(7.0), **smooth)
    call("cross_entropy", given, num_items=7.0)
    call("cross_entropy", given, reduction="sum")
    if path == "triton":  # the products are the same to the row kernels of either path
        return found
    call("linear", single(bias=True, ignored=0.3) | of_student, one_row, 3.0)
    call("linear", single(ignored=0.3) | of_student, tiles, EACH, reduction="none")
    call("divergence", pair(bias=True, labels=False) | adapters, one_row, kind=mix, vocab_size=7)
    call("divergence", pair(ignored=0.3) | adapters, {"recompute": True}, 3.0)
    call("sparse", single(ignored=0.3) | cache, {"recompute": True}, 3.0)
    call(
        "sparse", single() | cache | token_weight | of_student, {"recompute": True}, EACH, reduction="none",
        top_ids=torch.tensor([0, 4, 8]), **only_ce,
    )  # fmt: skip
    return found


def wrong(path: str, number: int, monkeypatch) -> list[str]:
    """The outputs and gradients of a call that are off."""
    device = set_path(monkeypatch, path, block=8)
    for name, value in {"LANES": 2, "TILE_ROWS": 4, "CHUNK_ROWS": (2,), "RESCALED": 4096}.items():
        module = {"LANES": "_divergence_kernels", "RESCALED": "_autograd"}.get(name, "_linear_loss")
        monkeypatch.setattr(home(module, name), name, value)
    op, tensors, ours, upstream, options = calls(path)[number]
    leaves = ("logits",) if op == "cross_entropy" else (*LEAVES, *ADAPTERS)
    truth = evaluate(with_adapters(OPS[op][1]), double(tensors), upstream, leaves=leaves, **options)
    tensors = {name: x.to(device) for name, x in tensors.items()}
    run = over_columns(OPS[op][0]) if ours.get("inplace") else OPS[op][0]
    got = evaluate(with_adapters(run), tensors, upstream, leaves=leaves, **options, **ours)
    rounded = torch.float16 in [x.dtype for x in tensors.values()] and "logits_dtype" not in ours
    failed = []
    for name, x in truth.items():
        bound = (
            4e-3 if rounded or got[name].dtype == torch.float16 else 1e-9 if got[name].dtype == torch.float64 else 2e-5
        )
        difference = (got[name].double().cpu() - x.double()).abs().max()
        if not difference <= bound * max(x.double().abs().max(), 1e-2):
            failed.append(f"{name} is off by {difference:.1e}")
    return failed


CALLS = [(path, number) for path in PATHS for number in range(len(calls(path)))]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_small_calls(call, monkeypatch):
    assert not wrong(*call, monkeypatch)
