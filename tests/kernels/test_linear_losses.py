"""What every fused linear loss computes: each form of it against fp64, extremes, padding, temperatures, refusals.

How they compute it is in test_linear_modes.py, and what is of one loss in its own file.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_losses import CE, DISTINCT, EACH, EVERY, MIX, Loss, sparse_on_gpu
from kernel_checks import LEAVES, Place, assert_same, check, double, evaluate
from small_blocks import home
from torch import Tensor

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.types import RowSelection

every_loss = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY)
with_divergence = pytest.mark.parametrize("name", ["divergence", "sparse", "uld", "alm"])
FORMS = {f"{name}, {form}": (loss, options) for name, loss in EVERY.items() for form, options in loss.forms.items()}


def check_loss(loss: Loss, tensors: dict[str, Tensor], frozen: tuple[str, ...] = (), **options: Any) -> dict:
    upstream = loss.upstream(len(tensors["hidden"]))
    return check(loss.op, loss.reference, tensors, upstream, frozen, **options)


@pytest.mark.parametrize("loss", DISTINCT.values(), ids=DISTINCT)
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 16), (13, 24, 101), (3, 65, 33)], ids=str)
@pytest.mark.parametrize("at_once", [False, True], ids=["", "all"])
def test_odd_sizes(place, loss, shape, at_once):
    tensors = loss.inputs(*shape, dtype=place.dtype, device=place.device, bias=at_once)
    check_loss(loss, tensors, **loss.options if at_once else {})


@pytest.mark.parametrize("loss, options", FORMS.values(), ids=FORMS)
def test_options(place, loss, options):
    tensors = loss.inputs(5, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    if "ids" in tensors:
        tensors["ids"][1, 2] = -1  # an entry of padding
    check_loss(loss, tensors, **options)


@every_loss
@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias"), ("hidden",)], ids="-".join)
@pytest.mark.parametrize("at_once", [False, True], ids=["", "all"])
def test_frozen_parts(fp32, loss, frozen, at_once):
    tensors = loss.inputs(9, 12, 37, device=fp32.device, bias=True, ignored=0.3)
    check_loss(loss, tensors, frozen, **loss.options if at_once else {})


def extremes(name: str, place: Place, size: float) -> Iterator[dict[str, Tensor]]:
    """Logits of up to +-size, of which a teacher says the same, the opposite, or nothing."""
    hidden = torch.tensor([[1.0], [-1.0], [0.5]], dtype=place.dtype, device=place.device)
    weight = torch.tensor([[1.0], [-1.0], [0.0], [0.5], [0.25]], dtype=place.dtype, device=place.device) * size
    tensors = {"hidden": hidden, "weight": weight}
    if name == "divergence":
        for teacher_hidden in (-hidden, torch.zeros_like(hidden)):
            yield tensors | {"teacher_hidden": teacher_hidden, "teacher_weight": weight}
    elif name == "sparse":
        ids = torch.tensor([[0, 3]] * 3, device=place.device)
        for p in (0.2, 1e-20):
            yield tensors | {"ids": ids, "log_probs": torch.tensor([[p, 1 - p]] * 3, device=place.device).log()}
    else:
        for labels in ([0, 1, 0], [1, 0, 2]):
            yield tensors | {"labels": torch.tensor(labels, device=place.device)}


EXTREME = {
    "cross_entropy": [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}], "entropy": [{}],
    "divergence": [{}, *({"kind": k} for k in EACH if k not in ("forward_kl", "symmetric_kl")), {"kind": MIX},
                   *({"kind": k, "teacher_share": 0.3} for k in ("skew_kl", "skew_reverse_kl", "tvd"))],
    "sparse": [{}, {"tail": "none"}],
}  # fmt: skip


@pytest.mark.parametrize("size", [1e4, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name, options", [(name, x) for name, each in EXTREME.items() for x in each], ids=str)
def test_extreme_logits(place, name, options, size, temperature):
    """No overflow: sides that are sure of different tokens have a probability of 0 under each other."""
    loss, options = EVERY[name], {"temperature": temperature, **options}
    for tensors in extremes(name, place, size):
        upstream = loss.upstream(3)
        got = evaluate(loss.op, tensors, upstream, **options)
        for of, x in evaluate(loss.reference, double(tensors), upstream, **options).items():
            wrong = (got[of].double() - x.double()).abs().max()
            rounding = 4 * torch.finfo(got[of].dtype).eps if x.is_floating_point() else 0.0
            bound = (rounding + 1e-6 * size) * max(size if of == "d_hidden" else 1.0, x.double().abs().max().item())
            assert wrong.item() <= bound, f"{of}: error {wrong:.2e}, bound {bound:.2e}"  # NaN fails too
        if options.get("kind") == "jsd":
            assert (got["divergence"] / temperature**2 <= 0.69315).all(), "a JSD is at most ln 2"


@pytest.mark.parametrize("name", ["divergence", "sparse", "uld"])
@pytest.mark.parametrize("at_once", [False, True], ids=["", "all"])
def test_without_labels_every_row_takes_part(fp32, name, at_once):
    loss = EVERY[name]
    options = {k: x for k, x in loss.options.items() if k not in CE} if at_once else {}
    tensors = loss.inputs(5, 12, 37, device=fp32.device, labels=False)
    got = check_loss(loss, tensors, **options)
    assert got["entropy"].all() and not any(got[x].any() for x in got if x in ("log_prob", "is_top1"))
    assert "teacher_log_prob" not in got or not got["teacher_log_prob"].any()
    check_loss(loss, tensors, num_items=torch.tensor(2.5, device=fp32.device), **options)
    check_loss(loss, {k: x if "weight" in k else x[:0] for k, x in tensors.items()}, **options)


PADDED = [
    *((name, ("",), {"vocab_size": 20}) for name in EVERY if name != "cross_entropy"),
    ("divergence", ("", "teacher_"), {"vocab_size": 20}), ("divergence", ("teacher_",), {"vocab_size": 20}),
    ("divergence", ("",), {}), ("divergence", ("teacher_",), {}),  # cut by the other head, which is shorter
    ("uld", ("teacher_",), {"teacher_vocab_size": 25}),
    ("uld", ("", "teacher_"), {"vocab_size": 20, "teacher_vocab_size": 25}),
]  # fmt: skip


@pytest.mark.parametrize("name, sides, sizes", PADDED, ids=str)
def test_padding_takes_no_part(fp32, name, sides, sizes):
    """Padding rows with huge logits change nothing and get no gradient. Sizes beyond both heads change nothing."""
    loss = EVERY[name]
    tensors = loss.inputs(5, 6, 20, device=fp32.device, bias=True, ignored=0.2)
    options = loss.options | ({"kind": EACH, "teacher_share": 0.6} if name == "divergence" else {})
    expected = evaluate(loss.op, tensors, loss.upstream(5), **options)
    padded = dict(tensors)
    for side in sides:
        w, b = padded[f"{side}weight"], padded[f"{side}bias"]
        padded[f"{side}weight"] = torch.cat([w, 1e4 * w[:3]])
        padded[f"{side}bias"] = torch.cat([b, torch.full_like(b[:3], 1e4)])
    got = evaluate(loss.op, padded, loss.upstream(5), **options, **sizes)
    for of in ("d_weight", "d_bias"):
        assert not got[of][20:].any(), f"{of} of the padding must be 0"
        got[of] = got[of][:20]
    assert_same(got, expected, rtol=0, atol=1e-6)
    check_loss(loss, padded, ("weight", "bias"), **options, **sizes)
    beyond = dict.fromkeys(sizes, 32)
    assert torch.equal(loss.op(**tensors, **beyond, **options).loss, loss.op(**tensors, **options).loss)


@with_divergence
def test_cross_entropy_is_that_of_the_other_op(fp32, name):
    """At temperature 1, whatever the divergence's: the mixture less the divergence by itself."""
    loss, common = EVERY[name], {"softcap": 5.0, "scale": 1.2}
    common |= {k: x for k, x in {"label_smoothing": 0.1, "z_loss": 0.02}.items() if loss.takes(k)}
    tensors = loss.inputs(6, 6, 20, device=fp32.device, bias=True, ignored=0.3)
    ce = evaluate(linear_cross_entropy, {k: tensors[k] for k in (*LEAVES, "labels")}, **common)
    for heat in ({}, {"temperature": 3.0}) if loss.takes("temperature") else ({},):
        mixed, plain = (evaluate(loss.op, tensors, ce_weight=w, **common, **heat) for w in (0.5, 0.0))
        sums = {x: plain[x] + 0.5 * ce[x] for x in ("loss", "d_hidden", "d_weight", "d_bias")}
        assert_same(mixed, sums | {x: ce[x] for x in ("log_prob", "entropy", "is_top1")}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, options", [("divergence", {"kind": EACH}), ("sparse", {}), ("sparse", {"kind": EACH}), ("uld", {})], ids=str
)
def test_temperature_squared_multiplies_the_divergence(fp32, name, options):
    """Value and gradient; what is measured at temperature 1 stays."""
    loss = EVERY[name]
    tensors = loss.inputs(4, 6, 20, device=fp32.device)
    scaled, plain = (
        evaluate(loss.op, tensors, temperature=3.0, scale_by_temperature_squared=s, **options) for s in (True, False)
    )
    for of, x in plain.items():
        if of in ("loss", "divergence", "uld") or of.startswith(("of ", "d_")):
            torch.testing.assert_close(scaled[of], 9 * x, rtol=2e-5, atol=1e-5, msg=of)
        else:
            assert torch.equal(scaled[of], x), f"{of} is of temperature 1"


@every_loss
def test_ties_count_as_top1(fp32, loss):
    tensors = loss.inputs(3, 1, 4, device=fp32.device)
    tensors["hidden"], tensors["labels"] = torch.ones_like(tensors["hidden"]), tensors["labels"].new_tensor([1, 3, 0])
    tensors["weight"] = tensors["weight"].new_tensor([[1.0], [2.0], [0.5], [2.0]])
    assert loss.op(**tensors).is_top1.tolist() == [True, True, False]


@pytest.mark.parametrize("name", ["cross_entropy", "divergence", "sparse", "log_probs"])
@pytest.mark.parametrize("label", [24, -1, 2**40])
def test_a_label_outside_the_vocabulary_gives_nan_under_triton(fp32, name, label):
    """In its row. (V is a multiple of 8, so that a row's end is where the next begins in the workspace.)"""
    loss = EVERY[name]
    tensors, options = loss.inputs(4, 6, 24, device=fp32.device), {"ce_weight": 0.1} if loss.takes("ce_weight") else {}
    expected = loss.op(**tensors, **options)
    tensors["labels"][2] = label
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            loss.op(**tensors, **options)
        return
    got = loss.op(**tensors, **options)
    assert got.loss.isnan().any() and got.log_prob.isnan().tolist() == [False, False, True, False]
    assert torch.equal(got.log_prob[[0, 1, 3]], expected.log_prob[[0, 1, 3]])


def test_large_vocabulary_with_the_block_in_use(fp32, monkeypatch):
    monkeypatch.setattr(home("_cross_entropy_rows", "BLOCK"), "BLOCK", 4096)
    loss = EVERY["cross_entropy"]
    check_loss(loss, loss.inputs(2, 3, 9001, device=fp32.device, bias=True), **loss.options)


ROWS = RowSelection(torch.zeros(4, dtype=torch.int64))
REFUSED = [
    ({"hidden": torch.zeros(4, 5)}, r"^hidden \(N, H\) and weight .* share H: hidden is \(4, 5\), weight is \(20, 6\)"),
    ({"hidden": torch.zeros(2, 2, 6)}, r"hidden is \(2, 2, 6\)"), ({"weight": torch.zeros(20)}, r"weight is \(20,\)"),
    ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
    ({"labels": torch.zeros(4)}, "labels must be int64"),
    ({"bias": torch.zeros(19)}, r"^bias must be one per row of weight: bias is \(19,\), weight \(20, 6\)"),
    ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ({"temperature": float("nan")}, "temperature must be positive, got nan"),
    ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
    ({"label_smoothing": -0.1}, "label_smoothing"), ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
    ({"teacher_softcap": -1.0}, "softcap must be positive or None, got -1.0"),
    ({"vocab_size": 0}, "^vocab_size must be at least 1 or None, got 0"),
    ({"teacher_vocab_size": 0}, "^teacher_vocab_size must be at least 1 or None, got 0"),
    ({"labels": None, "ce_weight": 0.5}, "ce_weight is 0.5, but cross-entropy needs labels"),
    ({"num_items": 4, "rows": ROWS}, "num_items was given twice"),
    ({"teacher_hidden": torch.zeros(4, 9)}, r"^teacher_hidden .* must share H: teacher_hidden is \(4, 9\)"),
    ({"teacher_bias": torch.zeros(18)}, r"teacher_bias must .* teacher_bias is \(18,\), teacher_weight"),
    ({"beta": 1.5}, r"beta must lie in \[0, 1\]"), ({"beta": -0.1}, "beta must lie"),
    ({"alpha": 1.0}, r"alpha .*in \[0, 1\), got"), ({"alpha": -0.1}, "alpha "), ({"alpha": float("nan")}, "alpha "),
    ({"kind": "kl"}, "kind must be one of forward_kl, .*, tvd, or a mapping of these to weights; got 'kl'"),
    ({"kind": {}}, "kind must be one of"), ({"kind": {"forward_kl": 1.0, "ce": 1.0}}, "kind must be one of"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, message", [
    (name, *each) for each in REFUSED for name, loss in EVERY.items()
    if loss.takes(*each[0]) and not (name == "alm" and len(each[0]) > 1)
], ids=lambda each: ",".join(each) if isinstance(each, dict) else each)  # fmt: skip
def test_refusals(name, change, message):
    loss = EVERY[name]
    with pytest.raises(ValueError, match=message):
        loss.op(**{**loss.inputs(4, 6, 20), **change})


# On a GPU

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU_CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.001}
CAPPED = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3}
SMOOTH = {kind: weight for kind, weight in EACH.items() if kind != "tvd"}  # whose sign turns on a rounding error
ROW, ROWS_333, BATCH = (1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)
LARGE = pytest.mark.xdist_group("large")
ON_GPU = [
    *(("cross_entropy", shape, options) for shape in (ROW, ROWS_333, BATCH)
      for options in ({}, CAPPED | {"label_smoothing": 0.1, "z_loss": 1e-3})),
    *(("divergence", shape, options) for shape in (ROW, ROWS_333, BATCH)
      for options in ({}, {"kind": MIX, "temperature": 2.0, "softcap": 15.0, "teacher_softcap": 20.0, **GPU_CE})),
    *(("divergence", shape, {"kind": SMOOTH, **options}) for shape in (ROW, ROWS_333)
      for options in ({}, {"temperature": 1.5, "teacher_share": 0.6, "alpha": 0.2, "beta": 0.3, **GPU_CE})),
    *(("sparse", (*shape, k), options) for shape, k in ((ROW, 1), (ROWS_333, 64), ((257, 64, 10000), 1000), (BATCH, 50))
      for options in ({}, {"tail": "none"}, CAPPED | {"ce_weight": 0.4})),
    *((name, shape, {"temperature": 1.3, "mean_logits": True}) for name in ("log_probs", "entropy")
      for shape in ((515, 129, 32003), (2100, 64, 1000))),
    ("alm", (200, 64, 1001), {"ce_weight": 0.3}),
]  # fmt: skip


def on_gpu(name: str, shape: tuple[int, ...], **how: Any) -> dict[str, Tensor]:
    if name == "sparse":
        *shape, k = shape
        return sparse_on_gpu(*shape, k, **how)
    return EVERY[name].inputs(*shape, device="cuda", **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, shape, options", [
    pytest.param(*case, marks=LARGE if case[:2] == ("divergence", BATCH) else ()) for case in ON_GPU
], ids=str)  # fmt: skip
def test_values_and_gradients_on_gpu(name, shape, options, dtype):
    tensors = on_gpu(name, shape, dtype=dtype, bias=bool(options), ignored=0.3)
    for frozen in ((), ("weight", "bias")) if name in ("log_probs", "entropy") else ((),):
        workspace_mb = 4 if options.get("kind") is SMOOTH else 16 if name in ("log_probs", "entropy") else 128
        check_loss(EVERY[name], tensors, frozen, workspace_mb=workspace_mb, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"recompute": True, "reduction": "none"}], ids=str)
@pytest.mark.parametrize("name, options", [
    ("cross_entropy", {}), ("divergence", {"kind": EACH, "temperature": 2.0, **GPU_CE}),
    ("sparse", CAPPED | {"ce_weight": 0.4}), ("log_probs", {"mean_logits": True}), ("entropy", {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
def test_the_host_never_waits_on_gpu(name, options, how, frozen, dtype):
    """With the rows' selection started before, or without one, forward and backward only queue work."""
    loss = EVERY[name]
    if not loss.takes(*how):
        pytest.skip("its logits are always recomputed, for each token")
    shape, of_tokens = (512, 96, 5001, 16) if name == "sparse" else (512, 96, 5001), loss.values > 0
    tensors = on_gpu(name, shape, dtype=dtype, ignored=0.0 if of_tokens else 0.3)
    if loss.takes("token_weight"):
        tensors["token_weight"] = torch.rand(512, device="cuda")
    factor, of_host = torch.tensor(3.0, device="cuda"), torch.tensor(300)  # a number that the host has is not sent
    num_items = of_host.cuda() if loss.takes("num_items") and "reduction" not in how else None
    for mode in ("default", "error"):  # the first launches compile
        leaves = {k: tensors[k].detach().requires_grad_(k == "hidden" or not frozen) for k in ("hidden", "weight")}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            RowSelection(tensors["labels"], of_host)
            rows = {"ignore_index": None} if of_tokens else {"rows": RowSelection(tensors["labels"], num_items)}
            (loss.op(**tensors | leaves, **rows, workspace_mb=4, **options, **how).loss * factor).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@LARGE
@pytest.mark.parametrize("name, workspace, options, fields", [
    ("cross_entropy", 2**14, {}, ("log_prob", "entropy", "is_top1")),
    ("divergence", 2**15, {"kind": "jsd"}, ("divergence", "forward_kl", "reverse_kl", "agrees")),
    ("sparse", 2**14, {}, ("divergence", "log_prob", "entropy")),
])  # fmt: skip
def test_offsets_beyond_32_bits_on_gpu(name, workspace, options, fields):
    """17000 x 131072 logits in one workspace; the last rows get what they get without the others."""
    n, vocab, loss = 17000, 131072, EVERY[name]
    assert n * vocab > 2**31
    tensors = on_gpu(name, (n, 64, vocab, 8) if name == "sparse" else (n, 64, vocab), dtype=torch.bfloat16)
    got = evaluate(loss.op, tensors, workspace_mb=workspace, num_items=n, **options)
    tail = {k: x[-40:] if not k.endswith("weight") else x for k, x in tensors.items()}
    expected = evaluate(loss.op, tail, num_items=n, **options)
    rtol, atol = (2e-2, 2e-2) if name == "divergence" else (1e-2, 1e-3)
    assert_same({k: x[-40:] for k, x in got.items() if x.dim()}, {k: expected[k] for k in fields}, rtol=rtol, atol=atol)
    torch.testing.assert_close(got["d_hidden"][-40:], expected["d_hidden"], rtol=rtol, atol=1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()
