import functools
import itertools

import pytest
import torch
from kernel_checks import (
    LEAVES,
    check_cross_entropy,
    check_divergence,
    evaluate,
    random_inputs,
    random_pair,
    set_path,
)

from liger_trainer.kernels import _cross_entropy_rows, _divergence_kernels, _linear_head
from liger_trainer.kernels import linear_divergence as module
from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import (
    divergence_reference,
    divergence_weights,
    linear_divergence,
    linear_divergence_reference,
)

TINY = 1e-6  # MiB: a chunk for every row
MIX = {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}
EACH = {kind: 0.2 + 0.1 * i for i, kind in enumerate(module.KINDS)}
CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.02}
KINDS = {
    "forward_kl": {},
    "reverse_kl": {"kind": "reverse_kl"},
    "jsd": {"kind": "jsd"},
    "jsd 0.1": {"kind": "jsd", "beta": 0.1},
    "jsd 0.9": {"kind": "jsd", "beta": 0.9},
    "mix": {"kind": MIX, "beta": 0.3},
    "only ce": {"kind": {"forward_kl": 0.0}, "ce_weight": 1.0},
    "with ce": {"kind": "jsd", **CE},
}
OPTIONS = {
    "scale": {"scale": 0.5, "teacher_scale": 1.5},
    "softcap": {"softcap": 5.0},
    "teacher_softcap": {"teacher_softcap": 4.0},
    "T 2": {"temperature": 2.0},
    "T 0.5": {"temperature": 0.5},
    "T 4 unscaled": {"temperature": 4.0, "scale_by_temperature_squared": False},
    "T 2 with ce": {"temperature": 2.0, "ce_weight": 0.5},
    "smoothing": {"ce_weight": 0.5, "label_smoothing": 0.2},
    "z_loss": {"ce_weight": 0.5, "z_loss": 0.05},
    "all": {
        "kind": MIX, "beta": 0.2, "scale": 0.8, "teacher_scale": 1.2, "softcap": 7.0, "teacher_softcap": 9.0,
        "temperature": 1.5, "num_items": 7, **CE,
    },
}  # fmt: skip


def identical_pair(n, h, v, place, bias=True):
    student = random_inputs(n, h, v, dtype=place.dtype, device=place.device, bias=bias)
    return student | {f"teacher_{k}": x.clone() for k, x in student.items() if k != "labels"}


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (5, 3, 8, 16), (13, 24, 7, 101), (2, 7, 65, 33)], ids=str)
@pytest.mark.parametrize("options", [{}, {"kind": EACH, **CE}], ids=["", "each"])
def test_odd_sizes(place, shape, options):
    check_divergence(random_pair(*shape, dtype=place.dtype, device=place.device), **options)


@pytest.mark.parametrize("options", [*KINDS.values(), *OPTIONS.values()], ids=[*KINDS, *OPTIONS])
def test_options(place, options):
    tensors = random_pair(5, 12, 9, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_divergence(tensors, **options)


@pytest.mark.parametrize("options", [v for v in KINDS.values() if "ce_weight" not in v], ids=str)
def test_without_labels_every_row_takes_part(fp32, options):
    tensors = random_pair(5, 12, 9, 37, device=fp32.device, labels=False)
    got = check_divergence(tensors, **options)
    for name in ("log_prob", "is_top1", "teacher_log_prob"):
        assert not got[name].any(), f"{name} needs labels"
    check_divergence(tensors, num_items=torch.tensor(2.5, device=fp32.device), **options)
    check_divergence({k: x if "weight" in k else x[:0] for k, x in tensors.items()}, **options)


@pytest.mark.parametrize("kind", [*module.KINDS, EACH], ids=str)
@pytest.mark.parametrize("temperature, teacher_share", [(2.0, 0.7), pytest.param(1.0, 1.0, marks=pytest.mark.slow)])
def test_student_equal_to_teacher_gives_exactly_zero(place, kind, temperature, teacher_share):
    options = {"kind": kind, "temperature": temperature, "teacher_share": teacher_share, "softcap": 6.0,
               "teacher_softcap": 6.0, "workspace_mb": 0.002}  # fmt: skip
    got = evaluate(linear_divergence, identical_pair(5, 6, 37, place), **options)
    of_kinds = [name for name in got if name.startswith("of ")]
    for name in ("loss", "divergence", "forward_kl", "reverse_kl", "d_hidden", "d_weight", "d_bias", *of_kinds):
        assert not got[name].any(), f"{name} is up to {got[name].abs().max()}"
    assert got["agrees"].all()
    for name in ("log_prob", "entropy"):  # whose last operations a compiler may fuse on one side alone
        torch.testing.assert_close(got[name], got[f"teacher_{name}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta, limit", [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_jsd_at_its_ends_is_a_kl(fp32, beta, limit):
    tensors = random_pair(5, 6, 5, 20, device=fp32.device)
    got = evaluate(linear_divergence, tensors, kind="jsd", beta=beta, temperature=2.0)
    expected = evaluate(linear_divergence, tensors, kind=limit, temperature=2.0)
    assert torch.equal(got["of jsd"], expected.pop(f"of {limit}"))
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_jsd_tends_to_the_kls():
    """After division by beta or 1 - beta: the limits that beta 0 and 1 stand for."""
    student, teacher = torch.randn(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for beta, share, limit in ((1e-6, 1e-6, "forward_kl"), (1 - 1e-6, 1e-6, "reverse_kl")):
        near = divergence_reference(student, teacher, kind="jsd", beta=beta) / share
        torch.testing.assert_close(near, divergence_reference(student, teacher, kind=limit), rtol=1e-4, atol=1e-4)


def test_agrees_with_torch(fp32):
    tensors = random_pair(6, 6, 5, 20, device=fp32.device, labels=False)
    log_q = (tensors["hidden"] @ tensors["weight"].t()).log_softmax(-1)
    log_p = (tensors["teacher_hidden"] @ tensors["teacher_weight"].t()).log_softmax(-1)
    got = linear_divergence(**tensors)
    torch.testing.assert_close(
        got.loss, torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    )
    torch.testing.assert_close(
        got.reverse_kl, torch.nn.functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    )
    torch.testing.assert_close(got.teacher_entropy, torch.distributions.Categorical(logits=log_p).entropy())


def test_cross_entropy_is_that_of_the_other_op(fp32):
    tensors = random_pair(6, 6, 5, 20, device=fp32.device, bias=True, ignored=0.3)
    options = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "scale": 1.2}
    got = evaluate(linear_divergence, tensors, kind={"jsd": 0.0}, ce_weight=1.0, temperature=3.0, **options)
    student = {k: x for k, x in tensors.items() if not k.startswith("teacher")}
    for name, x in evaluate(linear_cross_entropy, student, **options).items():
        torch.testing.assert_close(got[name], x, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("rows_of", ["both", "student", "teacher"])
@pytest.mark.parametrize("named", [True, False], ids=["vocab_size", "shorter head"])
def test_padding_takes_no_part(fp32, rows_of, named):
    """Padding rows with huge logits change nothing and get no gradient, cut by vocab_size or by the other head."""
    if rows_of == "both" and not named:
        pytest.skip("equal heads need vocab_size")
    tensors = random_pair(5, 6, 9, 20, device=fp32.device, bias=True, ignored=0.2)
    options = {"kind": EACH, "temperature": 2.0, "teacher_share": 0.6, **CE}
    expected = evaluate(linear_divergence, tensors, **options)
    padded = dict(tensors)
    for side, prefix in (("student", ""), ("teacher", "teacher_")):
        if rows_of in ("both", side):
            w, b = padded[f"{prefix}weight"], padded[f"{prefix}bias"]
            padded[f"{prefix}weight"] = torch.cat([w, 1e4 * w[:3]])
            padded[f"{prefix}bias"] = torch.cat([b, torch.full_like(b[:3], 1e4)])
    got = evaluate(linear_divergence, padded, vocab_size=20 if named else None, **options)
    for name in ("d_weight", "d_bias"):
        assert not got[name][20:].any(), f"{name} of the padding must be 0"
        got[name] = got[name][:20]
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    check_divergence(padded, vocab_size=20 if named else None, **options)


def test_vocab_size_beyond_both_heads_changes_nothing(fp32):
    tensors = random_pair(3, 6, 5, 20, device=fp32.device)
    assert torch.equal(linear_divergence(**tensors, vocab_size=32).loss, linear_divergence(**tensors).loss)


@pytest.mark.parametrize("size", [1e4, 30.0])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", MIX], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_extreme_logits(place, size, kind, temperature):
    """Student and teacher sure of different tokens: either's probability underflows to 0 under the other."""
    hidden = torch.tensor([[1.0], [-1.0], [0.5]], dtype=place.dtype, device=place.device)
    weight = torch.tensor([[1.0], [-1.0], [0.0], [0.5], [0.25]], dtype=place.dtype, device=place.device) * size
    tensors = {"hidden": hidden, "weight": weight, "teacher_weight": weight}
    for teacher_hidden in (-hidden, torch.zeros_like(hidden)):
        tensors["teacher_hidden"] = teacher_hidden
        got = evaluate(linear_divergence, tensors, kind=kind, temperature=temperature)
        double = {k: x.double() for k, x in tensors.items()}
        truth = evaluate(linear_divergence_reference, double, kind=kind, temperature=temperature)
        for name, x in truth.items():
            wrong = (got[name].double() - x.double()).abs().max()
            rounding = 4 * torch.finfo(got[name].dtype).eps if x.is_floating_point() else 0.0
            bound = (rounding + 1e-6 * size) * max(size if name == "d_hidden" else 1.0, x.double().abs().max().item())
            assert wrong.item() <= bound, f"{name}: error {wrong:.2e}, bound {bound:.2e}"  # NaN fails too
        if kind == "jsd":
            assert (got["divergence"] / temperature**2 <= 0.69315).all(), "a JSD is at most ln 2"


@pytest.mark.parametrize("options", [{}, {"kind": MIX, "temperature": 2.0, "softcap": 6.0, **CE}], ids=["", "all"])
@pytest.mark.parametrize("workspace_mb", [TINY, 0.001, 512])
def test_wider_logits(place, options, workspace_mb):
    """fp32 logits under narrower products; the gradient lies in the front half of its row of logits."""
    tensors = random_pair(7, 12, 9, 77, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    got = check_divergence(tensors, logits_dtype=torch.float32, workspace_mb=workspace_mb, **options)
    if place.dtype.itemsize > 2:
        return
    wide = {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()}
    unrounded = evaluate(linear_divergence_reference, wide, **options)
    for name, x in unrounded.items():
        if name[:2] != "d_" and x.is_floating_point():  # no narrow number lies on the way to these
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("options", [*KINDS.values(), OPTIONS["softcap"], OPTIONS["all"]], ids=str)
def test_gradcheck(options, temperature, monkeypatch):
    """Value and gradient belong together, T^2 included."""
    set_path(monkeypatch, "torch")
    tensors = random_pair(3, 3, 2, 5, dtype=torch.float64, bias=True)
    leaves = {k: tensors.pop(k).requires_grad_() for k in LEAVES}
    options = {**options, "temperature": temperature}

    def loss(*values):
        return linear_divergence(**tensors, **dict(zip(leaves, values, strict=True)), **options).loss

    assert torch.autograd.gradcheck(loss, list(leaves.values()))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_temperature_squared(fp32, kind):
    """It multiplies the divergence, value and gradient, and not the cross-entropy."""
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    scaled, plain = (
        evaluate(linear_divergence, tensors, kind=kind, temperature=3.0, scale_by_temperature_squared=s)
        for s in (True, False)
    )
    for name in ("loss", "divergence", "d_hidden", "d_weight"):
        torch.testing.assert_close(scaled[name], 9 * plain[name])
    for name in ("forward_kl", "reverse_kl", "entropy"):
        assert torch.equal(scaled[name], plain[name]), f"{name} is of temperature 1"
    mixed = linear_divergence(**tensors, kind=kind, temperature=3.0, ce_weight=0.5).loss
    ce = linear_cross_entropy(tensors["hidden"], tensors["weight"], tensors["labels"]).loss
    torch.testing.assert_close(mixed, scaled["loss"] + 0.5 * ce)


def test_ties(fp32):
    """agrees: some likeliest token is common to both. is_top1: none is likelier than the label."""
    one = torch.ones(1, 1, device=fp32.device)
    cases = [
        ([1, 3, 2, 3], [0, 3, 0, 2], True),  # the teacher's choice is the student's first of two
        ([1, 3, 2, 3], [0, 2, 0, 3], True),
        ([3, 1, 2, 0], [0, 3, 0, 3], False),
        ([3, 1, 2, 3], [3, 3, 3, 0], True),
        ([2, 2, 2, 2], [0, 0, 1, 0], True),
        ([0, 0, 1, 0], [1, 1, 0, 1], False),
    ]
    for vector_bytes, (student, teacher, agree) in itertools.product((4, 16), cases):
        _divergence_kernels.VECTOR_BYTES = vector_bytes  # ties across lanes and within one; the fixture restores it
        s, t = (torch.tensor(x, dtype=torch.float32, device=fp32.device)[:, None] for x in (student, teacher))
        for label in range(4):
            got = linear_divergence(one, s, one, t, labels=torch.tensor([label], device=fp32.device))
            assert got.agrees.item() == agree, (student, teacher, vector_bytes)
            assert got.is_top1.item() == (student[label] == max(student)), (student, label, vector_bytes)


@pytest.mark.parametrize("label", [20, -1])
def test_label_outside_the_vocabulary_gives_nan_under_triton(fp32, label):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    tensors["labels"][2] = label
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_divergence(**tensors)
        return
    got = linear_divergence(**tensors, ce_weight=0.1)
    assert got.loss.isnan()
    for x in (got.log_prob, got.teacher_log_prob):
        assert x.isnan().tolist() == [False, False, True, False]


def test_a_head_of_both_sides_whose_products_differ_in_dtype(fp32):
    """Each side in its own: fp16 hidden states beside the teacher's fp32."""
    x, y, weight = (torch.randn(*shape, device=fp32.device) for shape in ((33, 16), (33, 16), (50, 16)))
    x, weight = x.half().requires_grad_(), weight.half()
    losses = [linear_divergence(x, weight, y, of_teacher).loss for of_teacher in (weight, weight.clone())]
    assert losses[0].item() == losses[1].item() > 0


@pytest.mark.parametrize("frozen, casts", [(True, 1), (False, 2)])
def test_a_frozen_head_that_is_its_own_teacher_is_cast_once(fp32, monkeypatch, frozen, casts):
    seen, project = [], _linear_head.project

    def spy(x, w, out):
        seen.append(w)  # kept, so that no other takes its place
        return project(x, w, out)

    monkeypatch.setattr(_linear_head, "project", spy)
    x, y, weight = (torch.randn(*shape, device=fp32.device) for shape in ((33, 16), (33, 16), (50, 16)))
    x.requires_grad_(), weight.requires_grad_(not frozen)
    with torch.autocast(fp32.device, torch.bfloat16):
        losses = [linear_divergence(x, weight, y, of_teacher).loss for of_teacher in (weight, weight.detach().clone())]
    assert len({w.data_ptr() for w in seen[:2]}) == casts and all(w.dtype == torch.bfloat16 for w in seen)
    assert losses[0].item() == losses[1].item() > 0
    one, two = (torch.autograd.grad(loss, x)[0] for loss in losses)
    assert torch.equal(one, two)


@pytest.mark.parametrize("teacher", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("student", ["float64", "float32", "bfloat16", "float16"])
def test_teacher_of_another_dtype(student, teacher, monkeypatch):
    set_path(monkeypatch, "torch")
    student, teacher = getattr(torch, student), getattr(torch, teacher)
    tensors = random_pair(7, 6, 5, 20, bias=True)
    tensors = {
        k: x.to(teacher if k.startswith("teacher") else student) if k != "labels" else x for k, x in tensors.items()
    }
    options = {"kind": MIX, "temperature": 2.0, **CE}
    got = evaluate(linear_divergence, tensors, **options)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    truth = evaluate(linear_divergence_reference, double, **options)
    tolerance = 10 * max(torch.finfo(student).eps, torch.finfo(teacher).eps, 1e-7)
    for name in ("loss", "divergence", "d_hidden", "d_weight", "d_bias"):
        assert got[name].dtype == (student if name[:2] == "d_" else torch.promote_types(student, torch.float32))
        wrong = (got[name].double() - truth[name]).norm() / truth[name].norm()
        assert wrong < tolerance, f"{name}: relative error {wrong:.2e}"


@pytest.mark.parametrize("teacher", ["float64", "float16"])
def test_teacher_of_another_dtype_under_triton(fp32, teacher):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    teacher = getattr(torch, teacher)
    tensors = {k: x.to(teacher) if k.startswith("teacher") else x for k, x in tensors.items()}
    got = evaluate(linear_divergence, tensors, kind=MIX)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    truth = evaluate(linear_divergence_reference, double, kind=MIX)
    for name in ("loss", "d_hidden", "d_weight"):
        torch.testing.assert_close(got[name].double(), truth[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "kind, beta, expected",
    [
        ("forward_kl", 0.5, {"forward_kl": 1}),
        ("reverse_kl", 0.5, {"reverse_kl": 1}),
        ("jsd", 0.5, {"jsd": 1}),
        ("jsd", 0, {"forward_kl": 1}),
        ("jsd", 1, {"reverse_kl": 1}),
        (MIX, 0.3, MIX),
        (MIX, 0.0, {"forward_kl": 1.0, "reverse_kl": 0.5}),
        (MIX, 1.0, {"forward_kl": 0.3, "reverse_kl": 1.2}),
        ({"reverse_kl": 2}, 0.5, {"reverse_kl": 2}),
        ({"jsd": 0}, 0.0, {"forward_kl": 0}),
        ("symmetric_kl", 0.5, {"forward_kl": 0.5, "reverse_kl": 0.5}),
        ({"symmetric_kl": 0.4, "forward_kl": 0.1, "tvd": 0}, 0.5, {"forward_kl": 0.3, "reverse_kl": 0.2, "tvd": 0}),
        ({"skew_kl": 2, "skew_reverse_kl": 3}, 0.5, {"skew_kl": 2, "skew_reverse_kl": 3}),
    ],
)
def test_kinds(kind, beta, expected):
    got = divergence_weights(kind, beta)
    assert got == pytest.approx(expected)
    assert divergence_weights(got, beta) == got


def test_skewed_kls_without_skew_are_kls():
    kind = {"skew_kl": 2, "skew_reverse_kl": 3, "tvd": 1}
    assert divergence_weights(kind, 0.5, 0.0) == {"forward_kl": 2, "reverse_kl": 3, "tvd": 1}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(4, 5)}, r"^hidden \(N, H\) and weight .* hidden is \(4, 5\), weight is \(20, 6\)"),
        ({"weight": torch.zeros(20)}, r"weight is \(20,\)"),
        (
            {"teacher_hidden": torch.zeros(4, 6)},
            r"^teacher_hidden .* teacher_hidden is \(4, 6\), teacher_weight is \(20, 5\)",
        ),
        ({"teacher_hidden": torch.zeros(3, 5)}, "same tokens: hidden has 4 rows, teacher_hidden 3"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
        ({"bias": torch.zeros(19)}, r"^bias must be one per row of weight: bias is \(19,\), weight \(20, 6\)"),
        (
            {"teacher_bias": torch.zeros(21)},
            r"teacher_bias must .* teacher_bias is \(21,\), teacher_weight \(20, 5\)",
        ),
        ({"labels": None, "ce_weight": 0.5}, "ce_weight is 0.5, but cross-entropy needs labels"),
        ({"logits_dtype": torch.float64}, "logits_dtype must be None or torch.float32, got torch.float64"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"beta": 1.5}, r"beta must lie in \[0, 1\], got 1.5"),
        ({"beta": -0.1}, "beta must lie"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"teacher_softcap": -1.0}, "softcap must be positive or None, got -1.0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
        ({"kind": "kl"}, "kind must be one of forward_kl, .*, tvd, or a mapping of these to weights; got 'kl'"),
        ({"kind": {}}, "kind must be one of"),
        ({"kind": {"forward_kl": 1.0, "ce": 1.0}}, "kind must be one of"),
        ({"num_items": 4, "rows": RowSelection(torch.zeros(4, dtype=torch.int64))}, "num_items was given twice"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        linear_divergence(**{**random_pair(4, 6, 5, 20), **change})


LARGE = pytest.mark.xdist_group("large")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU_MIX = {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.7}
JUMPING = ("tvd",)  # where a sign turns on a rounding error
GPU_CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.001}
inputs = functools.partial(random_inputs, device="cuda")
pair = functools.partial(random_pair, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}]
)
def test_cross_entropy_on_gpu(shape, dtype, options):
    tensors = inputs(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    check_cross_entropy(tensors, workspace_mb=64, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64, 48, 32003), (333, 96, 128, 5001), pytest.param((2048, 576, 576, 49152), marks=LARGE)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"kind": GPU_MIX, "temperature": 2.0, "softcap": 15.0, "teacher_softcap": 20.0, **GPU_CE}]
)
def test_divergence_on_gpu(shape, dtype, options):
    tensors = pair(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    check_divergence(tensors, workspace_mb=128, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 48, 32003), (333, 96, 128, 5001)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "teacher_share": 0.6, "alpha": 0.2, "beta": 0.3, **GPU_CE}]
)
def test_each_kind_of_divergence_on_gpu(shape, dtype, options):
    tensors = pair(*shape, dtype=dtype, bias=bool(options), ignored=0.3)
    kind = {name: weight for name, weight in EACH.items() if name not in JUMPING}
    check_divergence(tensors, workspace_mb=4, kind=kind, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", JUMPING)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "teacher_share": 0.5, "softcap": 15.0}], ids=["", "mixed"]
)
def test_divergences_that_jump_on_gpu(kind, dtype, options):
    tensors = pair(333, 96, 128, 20003, dtype=dtype, ignored=0.3)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    got = evaluate(linear_divergence, tensors, kind=kind, workspace_mb=16, **options)
    plain = evaluate(linear_divergence_reference, tensors, kind=kind, **options)
    truth = evaluate(linear_divergence_reference, double, kind=kind, **options)
    for name in ("loss", "divergence", f"of {kind}", "d_hidden", "d_weight"):
        wrong, allowed = ((x[name].double() - truth[name]).norm() / truth[name].norm() for x in (got, plain))
        assert wrong <= 2 * allowed + 1e-3, f"{name}: relative error {wrong:.2e}, of plain torch {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5001, 20000])
def test_wider_logits_on_gpu(dtype, vocab):
    """The gradient overwrites the front of logits that other threads of the program still read."""
    tensors = pair(512, 96, 128, vocab, dtype=dtype, ignored=0.1)
    check_divergence(tensors, logits_dtype=torch.float32, workspace_mb=32, kind=GPU_MIX, **GPU_CE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("teacher_share", [1.0, 0.7])
@pytest.mark.parametrize("kind", [GPU_MIX, EACH], ids=["mix", "each"])
def test_student_equal_to_teacher_gives_exactly_zero_on_gpu(dtype, teacher_share, kind):
    tensors = inputs(300, 128, 5001, dtype=dtype)
    tensors |= {f"teacher_{k}": tensors[k] for k in ("hidden", "weight")}
    got = evaluate(linear_divergence, tensors, kind=kind, temperature=2.0, teacher_share=teacher_share)
    assert all(not got[k].any() for k in ("loss", "divergence", "forward_kl", "reverse_kl", "d_hidden", "d_weight"))
    assert not any(x.any() for name, x in got.items() if name.startswith("of "))


@pytest.mark.gpu
@pytest.mark.parametrize("upstream", [1.0, 3.0, 0.0])
def test_host_never_waits_on_gpu(upstream):
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
            (
                loss + linear_divergence(**tensors, kind=EACH, temperature=2.0, rows=rows, **GPU_CE).loss * factor
            ).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@LARGE
def test_offsets_beyond_32_bits_on_gpu():
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


@pytest.mark.gpu
@LARGE
def test_divergence_offsets_beyond_32_bits_on_gpu():
    n, vocab = 17000, 131072
    tensors = pair(n, 64, 32, vocab, dtype=torch.bfloat16)
    got = evaluate(linear_divergence, tensors, kind="jsd", workspace_mb=2**15, num_items=n)
    tail = {k: x[-40:] if k[-6:] != "weight" else x for k, x in tensors.items()}
    expected = evaluate(linear_divergence, tail, kind="jsd", num_items=n)
    for name in ("divergence", "forward_kl", "reverse_kl", "agrees", "d_hidden"):
        torch.testing.assert_close(got[name][-40:], expected[name], rtol=2e-2, atol=2e-2 if name[:2] != "d_" else 1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()


@pytest.mark.gpu
def test_gpu_runs_triton_on_gpu():
    x = torch.zeros(1, device="cuda")
    assert _cross_entropy_rows.use_triton(x) and _divergence_kernels.use_triton(x)
