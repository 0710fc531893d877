import functools

import pytest
import torch
from kernel_checks import LEAVES, check, evaluate, random_inputs, set_path
from quick_cases import slow_but

from liger_trainer.kernels import _sparse_rows
from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_sparse_divergence import (
    linear_sparse_divergence,
    linear_sparse_divergence_reference,
    sparse_divergence_reference,
)

TINY = 1e-6  # MiB: a chunk for every row
ALL = {"temperature": 1.5, "softcap": 7.0, "scale": 0.8, "ce_weight": 0.4, "num_items": 7}
OPTIONS = {
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 5.0},
    "T 2": {"temperature": 2.0},
    "T 0.5": {"temperature": 0.5},
    "T 4 unscaled": {"temperature": 4.0, "scale_by_temperature_squared": False},
    "ce": {"ce_weight": 0.5},
    "T 2 with ce": {"temperature": 2.0, "ce_weight": 0.5},
    "num_items": {"num_items": 7},
    "all": ALL,
}
TAILS = ("bucket", "none")
check_sparse = functools.partial(check, linear_sparse_divergence, linear_sparse_divergence_reference)


@pytest.fixture(autouse=True)
def short_blocks(request, monkeypatch):
    """But for a GPU, where blocks are as shipped."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(_sparse_rows, "BLOCK", 16)


def teacher_log_probs(n: int, v: int, seed: int = 1, spread: float = 2.0) -> torch.Tensor:
    """(n, v) fp64"""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, v, generator=generator, dtype=torch.float64) * spread).log_softmax(-1)


def likeliest(log_p: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """A cache of the likeliest k."""
    log_probs, ids = log_p.topk(k, -1)
    return {"ids": ids, "log_probs": log_probs.float()}


def drawn(log_p: torch.Tensor, draws: int, seed: int = 2) -> dict[str, torch.Tensor]:
    """A cache of ids drawn from the teacher, repeated ones counted, the rest of a row padded."""
    sample = torch.multinomial(log_p.exp(), draws, True, generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros_like(log_p).scatter_add_(1, sample, torch.ones_like(sample, dtype=log_p.dtype))
    count, ids = counts.topk(min(draws, log_p.shape[1]), -1)
    return {"ids": ids.where(count > 0, -1), "log_probs": (count / draws).log().float()}


def on(device, cache):
    return {k: x.to(device) for k, x in cache.items()}


def random_sparse(n, h, v, k, *, cache=likeliest, dtype=torch.float32, device="cpu", labels=True, **given) -> dict:
    tensors = random_inputs(n, h, v, dtype=dtype, device=device, **given)
    tensors |= on(device, cache(teacher_log_probs(n, v), k))
    if not labels:
        del tensors["labels"]
    return tensors


def double(tensors):
    return {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (5, 3, 24, 4), (7, 24, 101, 13), (2, 7, 33, 32)], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_odd_sizes(place, shape, tail):
    check_sparse(random_sparse(*shape, dtype=place.dtype, device=place.device), tail=tail)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_options(place, options, tail):
    cache = likeliest if tail == "bucket" else drawn
    tensors = random_sparse(5, 12, 37, 6, cache=cache, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_sparse(tensors, tail=tail, **options)


@pytest.mark.parametrize("tail", TAILS)
def test_without_labels_every_row_takes_part(fp32, tail):
    got = check_sparse(random_sparse(5, 12, 37, 6, device=fp32.device, labels=False), tail=tail)
    assert not got["log_prob"].any() and not got["is_top1"].any()
    assert got["divergence"].all() and got["teacher_mass"].all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5, "temperature": 2.0}], ids=["plain", "options"])
def test_agreement_with_the_teachers_likeliest(place, dtype, options):
    """Whether the student's likeliest token is that of top_ids, which need not be among ids."""
    tensors = random_sparse(16, 12, 37, 4, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    assert not evaluate(linear_sparse_divergence, tensors)["agrees"].any()
    logits = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    top, keep = logits.argmax(-1), tensors["labels"] != -100
    tensors["top_ids"] = torch.where(torch.arange(16, device=top.device) % 2 == 0, top, (top + 1) % 37).to(dtype)
    agrees = check_sparse(tensors, workspace_mb=TINY, **options)["agrees"]
    assert torch.equal(agrees, keep & (torch.arange(16, device=top.device) % 2 == 0)) and 0 < agrees.sum() < keep.sum()


@pytest.mark.parametrize("tail", TAILS)
def test_padding_is_ignored(fp32, tail):
    """Wherever it stands, and whatever else the entry holds: the other half may be an id in use, or a probability."""
    tensors = random_sparse(6, 6, 37, 5, device=fp32.device, bias=True)
    expected = evaluate(linear_sparse_divergence, tensors, tail=tail, **ALL)
    ids, log_probs = tensors["ids"], tensors["log_probs"]
    negative, minus_inf = torch.full_like(ids[:, :1], -3), torch.full_like(log_probs[:, :1], -torch.inf)
    padded = tensors | {
        "ids": torch.cat([negative, ids[:, :2], ids[:, :1], ids[:, 2:], negative], 1),
        "log_probs": torch.cat([log_probs[:, :3], minus_inf, log_probs[:, 2:], minus_inf], 1),
    }
    padded["log_probs"][:, 1:3] = log_probs[:, :2]
    for name, x in evaluate(linear_sparse_divergence, padded, tail=tail, **ALL).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    check_sparse(padded, tail=tail, **ALL)


@pytest.mark.parametrize("tail", TAILS)
def test_rows_without_entries_teach_nothing(place, tail):
    tensors = random_sparse(4, 6, 37, 3, dtype=place.dtype, device=place.device)
    tensors["ids"][1], tensors["log_probs"][2] = -1, -torch.inf
    got = check_sparse(tensors, tail=tail)
    for name in ("divergence", "teacher_mass", "d_hidden"):
        largest = got[name].reshape(4, -1).abs().amax(1)
        assert (largest > 1e-3).tolist() == [True, False, False, True], name
        assert (largest[1:3] < 1e-6).all(), name


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("order", ["sorted", "vocabulary"])
def test_whole_vocabulary_gives_the_forward_kl(place, temperature, order):
    """K = V: what linear_divergence gives for the same teacher, whatever rounding left of P."""
    n, v = 5, 37
    student = random_inputs(n, 12, v, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    teacher = random_inputs(n, 9, v, dtype=place.dtype, device=place.device, seed=1)
    options = {"temperature": temperature, "ce_weight": 0.3, "softcap": 9.0}
    full = student | {f"teacher_{k}": teacher[k] for k in ("hidden", "weight")}
    expected = evaluate(linear_divergence, full, **options)
    logits = teacher["hidden"] @ teacher["weight"].t()
    cache = likeliest((logits.double() / temperature).log_softmax(-1), v)
    if order == "vocabulary":
        place_of = cache["ids"].argsort(-1)
        cache = {k: x.gather(1, place_of) for k, x in cache.items()}
    got = check_sparse(student | cache, **options)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(place.dtype, 2e-2)  # float64: the cache is in fp32
    for name, x in got.items():
        if name != "teacher_mass":
            torch.testing.assert_close(x, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def test_largest_k(fp32):
    check_sparse(random_sparse(2, 4, 1100, 1024, device=fp32.device), ce_weight=0.5)
    check_sparse(random_sparse(2, 4, 1024, 1024, device=fp32.device), temperature=2.0)


@pytest.mark.parametrize(
    "cache_dtype, tail", [(torch.bfloat16, "bucket"), (torch.bfloat16, "none"), (torch.float16, "bucket")]
)
def test_rounded_cache(fp32, cache_dtype, tail):
    """8 bits of a log-probability bring the sum to either side of 1."""
    tensors = random_sparse(8, 6, 17, 16, device=fp32.device)
    tensors["log_probs"] = tensors["log_probs"].to(cache_dtype)
    if cache_dtype == torch.bfloat16:
        assert 0 < (tensors["log_probs"].float().exp().sum(-1) > 1).sum() < 8
    plain = tensors | {"log_probs": tensors["log_probs"].float()}
    got = evaluate(linear_sparse_divergence, tensors, tail=tail)
    for name, x in check_sparse(plain, tail=tail).items():
        assert torch.equal(got[name], x), f"{name}: the cache is read as it is"


def test_sure_student(fp32):
    """1 - Q is 1e-13 to 1e-110, far below fp32's rounding of 1; the teacher leaves a tenth to the rest."""
    hidden = torch.tensor([[1.0], [2.0], [8.0]], device=fp32.device)
    weight = torch.zeros(20, 1, device=fp32.device)
    weight[3], weight[17], weight[4] = 33.0, 32.5, 0.7
    ids = torch.tensor([[17, 3]] * 3, device=fp32.device)
    tensors = {"hidden": hidden, "weight": weight, "ids": ids, "log_probs": torch.tensor([[0.3, 0.6]] * 3).log()}
    tensors["log_probs"] = tensors["log_probs"].to(fp32.device)
    got = evaluate(linear_sparse_divergence, tensors)
    truth = evaluate(linear_sparse_divergence_reference, double(tensors))
    assert truth["divergence"][0] > 2
    for name in truth:
        torch.testing.assert_close(got[name].double(), truth[name].double(), rtol=1e-5, atol=5e-5, msg=name)


@pytest.mark.parametrize("size", [1e4, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("tail", TAILS)
def test_extreme_logits(place, size, temperature, tail):
    """The student sure of what the teacher names, and of what it does not."""
    hidden = torch.tensor([[1.0], [-1.0], [0.5]], dtype=place.dtype, device=place.device)
    weight = torch.tensor([[1.0], [-1.0], [0.0], [0.5], [0.25]], dtype=place.dtype, device=place.device) * size
    ids = torch.tensor([[0, 3]] * 3, device=place.device)
    tensors = {"hidden": hidden, "weight": weight, "ids": ids}
    for p in (0.2, 1e-20):
        tensors["log_probs"] = torch.tensor([[p, 1 - p]] * 3, device=place.device).log()
        options = {"temperature": temperature, "tail": tail}
        got = evaluate(linear_sparse_divergence, tensors, **options)
        truth = evaluate(linear_sparse_divergence_reference, double(tensors), **options)
        for name, x in truth.items():
            wrong = (got[name].double() - x.double()).abs().max()
            rounding = 4 * torch.finfo(got[name].dtype).eps if x.is_floating_point() else 0.0
            bound = (rounding + 1e-6 * size) * max(size if name == "d_hidden" else 1.0, x.double().abs().max().item())
            assert wrong.item() <= bound, f"{name}: error {wrong:.2e}, bound {bound:.2e}"  # NaN fails too


@pytest.mark.parametrize("kind", [{"jsd": 1.0, "skew_kl": 0.5, "forward_kl": 0.0}, "tvd"], ids=str)
def test_other_divergences_of_the_same_id_twice_and_of_one_too_large_are_nan(fp32, kind):
    """Minima and maxima drop NaN; values and gradients do not."""
    tensors = random_sparse(4, 6, 24, 5, device=fp32.device)
    expected = linear_sparse_divergence(**tensors, kind=kind)
    for wrong in (int(tensors["ids"][2, 0]), 24):
        if wrong == 24 and fp32.path == "torch":
            continue  # which is an error there
        changed = tensors | {"ids": tensors["ids"].clone()}
        changed["ids"][2, 4] = wrong
        got = evaluate(linear_sparse_divergence, changed, kind=kind)
        assert got["loss"].isnan() and got["d_hidden"][2].isnan().all()
        for name, x in linear_sparse_divergence(**changed, kind=kind).terms.items():
            assert x.isnan().tolist() == [False, False, True, False], name
            assert torch.equal(x[[0, 1, 3]], expected.terms[name][[0, 1, 3]])


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("options", [{}, ALL], ids=["", "all"])
def test_twice_the_same_id_gives_nan(fp32, tail, options):
    tensors = random_sparse(4, 6, 20, 5, device=fp32.device)
    tensors["ids"][2, 4] = tensors["ids"][2, 0]
    got = linear_sparse_divergence(**tensors, tail=tail, **options)
    assert got.loss.isnan() and got.divergence.isnan().tolist() == [False, False, True, False]
    assert got.log_prob.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("what", ["ids", "labels"])
@pytest.mark.parametrize("value", [24, 25, 2**40])
def test_ids_and_labels_outside_the_vocabulary(fp32, what, value):
    """V is a multiple of 8, so that a row's end is where the next begins in the workspace."""
    tensors = random_sparse(4, 6, 24, 5, device=fp32.device)
    expected = linear_sparse_divergence(**tensors, ce_weight=0.1)
    tensors[what][2] = value
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_sparse_divergence(**tensors)
        return
    got = linear_sparse_divergence(**tensors, ce_weight=0.1)
    assert got.loss.isnan()
    for name in ["log_prob"] + ["divergence"] * (what == "ids"):
        x, others = getattr(got, name), [0, 1, 3]
        assert x[2].isnan() and torch.equal(x[others], getattr(expected, name)[others]), name


@pytest.mark.parametrize("k", [3, 12])
def test_draws_give_the_gradient_of_the_full_kl(k):
    """tail="none": its mean over 20,000 caches of k draws each is the full gradient, within 5 standard errors.

    The likeliest k have a gradient that stays away from it, with either tail.
    """
    repeats, v = 20_000, 9
    log_p = teacher_log_probs(1, v, spread=1.0)
    logits = teacher_log_probs(1, v, seed=5, spread=1.0)

    def gradients(cache, tail):
        x = logits.expand(len(cache["ids"]), v).contiguous().requires_grad_()
        one = torch.eye(v, dtype=torch.float64)
        linear_sparse_divergence(x, one, **cache, tail=tail, num_items=1).loss.backward()
        return x.grad

    full = (logits.softmax(-1) - log_p.exp())[0]
    each = gradients(drawn(log_p.expand(repeats, v), k), "none")
    standard_error = each.std(0) / repeats**0.5
    assert ((each.mean(0) - full).abs() < 5 * standard_error).all()
    if k == 3:
        for tail in TAILS:
            biased = gradients(likeliest(log_p, k), tail)[0]
            assert ((biased - full).abs() > 20 * standard_error).any(), tail


def test_many_draws_approach_the_full_kl(fp32):
    """The gradient of one cache comes closer, as 1 / sqrt(draws)."""
    n, v = 6, 20
    tensors = random_inputs(n, 8, v, device=fp32.device, bias=True, spread=1.0)
    log_p = teacher_log_probs(n, v, spread=1.0)
    full = evaluate(linear_sparse_divergence, tensors | on(fp32.device, likeliest(log_p, v)))
    errors = []
    for draws in (100, 10_000, 1_000_000):
        got = evaluate(linear_sparse_divergence, tensors | on(fp32.device, drawn(log_p, draws)), tail="none")
        errors.append({k: ((got[k] - full[k]).norm() / full[k].norm()).item() for k in got if k[:2] == "d_"})
    for name in errors[0]:
        for before, after in zip(errors, errors[1:], strict=False):
            assert 4 < before[name] / after[name] < 25, f"{name}: {errors}"


def test_bucket_is_a_lower_bound_of_the_full_kl(fp32):
    """It grows with every id added, up to the full KL; for a student equal to its teacher it is 0 at any K."""
    n, h, v = 4, 40, 33
    tensors = random_inputs(n, h, v, device=fp32.device)
    student = (tensors["hidden"] @ tensors["weight"].t()).double().log_softmax(-1).cpu()
    log_p = teacher_log_probs(n, v)
    full = (log_p.exp() * (log_p - student)).sum(-1)
    last = torch.zeros(n)
    for k in (1, 2, 4, 8, 16, 32, 33):
        got = linear_sparse_divergence(**tensors, **on(fp32.device, likeliest(log_p, k))).divergence.cpu()
        assert (got >= last - 1e-5).all() and (got <= full + 1e-5).all(), k
        assert k > 16 or (got < full - 1e-3).all(), f"K = {k} leaves something out"
        last = got
        same = evaluate(linear_sparse_divergence, tensors | on(fp32.device, likeliest(student, k)))
        assert all(same[name].abs().max() < 2e-6 for name in ("loss", "divergence", "d_hidden", "d_weight")), k
    torch.testing.assert_close(last.double(), full, rtol=1e-5, atol=1e-5)


def test_none_on_the_likeliest_is_biased():
    """What the docstring warns of: a student equal to its teacher is pushed to be surer."""
    log_p = teacher_log_probs(4, 33)
    x = log_p.clone().requires_grad_()
    cache = likeliest(log_p, 4)
    linear_sparse_divergence(x, torch.eye(33, dtype=torch.float64), **cache, tail="none").loss.backward()
    assert (x.grad.gather(1, cache["ids"]) < 0).all()  # descent raises the K
    assert (x.grad.scatter(1, cache["ids"], 1.0) > 0).all()  # and lowers all others


OTHERS = [kind for kind in KINDS if kind != "forward_kl"]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("options", [{}, ALL | {"beta": 0.3, "alpha": 0.2}], ids=["", "all"])
def test_other_divergences_of_the_entries_and_the_rest(place, kind, options):
    tensors = random_sparse(5, 12, 37, 6, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    tensors["ids"][1, 2] = -1
    got = check_sparse(tensors, kind=kind, **options)
    assert got["divergence"].abs().max() > 1e-3


def test_a_mix_of_divergences_and_one_that_is_measured(place):
    tensors = random_sparse(5, 12, 37, 6, dtype=place.dtype, device=place.device, ignored=0.3)
    mix = {"forward_kl": 0.5, "reverse_kl": 0.7, "tvd": -0.2, "symmetric_kl": 0.4, "jsd": 0.0}
    check_sparse(tensors, kind=mix, beta=0.3, ce_weight=0.2)
    terms = linear_sparse_divergence(**tensors, kind=mix, beta=0.3).terms
    assert set(terms) == set(mix)
    for kind in mix:
        alone = linear_sparse_divergence(**tensors, kind=kind, beta=0.3)
        torch.testing.assert_close(terms[kind], alone.divergence, rtol=1e-5, atol=1e-5)
        assert torch.equal(alone.terms[kind], alone.divergence)


@pytest.mark.parametrize("kind", slow_but(OTHERS, "reverse_kl", "skew_kl"))
def test_other_divergences_of_the_whole_vocabulary(fp32, kind):
    """K = V: no rest, and what linear_divergence gives."""
    n, v = 5, 37
    student = random_inputs(n, 12, v, device=fp32.device, bias=True, ignored=0.2)
    teacher = random_inputs(n, 9, v, device=fp32.device, seed=1)
    options = {"kind": kind, "temperature": 2.0, "ce_weight": 0.3, "beta": 0.3, "alpha": 0.2}
    full = student | {f"teacher_{k}": teacher[k] for k in ("hidden", "weight")}
    expected = evaluate(linear_divergence, full, **options)
    logits = teacher["hidden"] @ teacher["weight"].t()
    cache = likeliest((logits.double() / 2.0).log_softmax(-1), v)
    got = evaluate(linear_sparse_divergence, student | cache, **options)
    for name in ("loss", "divergence", "d_hidden", "d_weight", "d_bias", "log_prob", "entropy"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", slow_but(OTHERS, "reverse_kl", "jsd", "tvd"))
def test_other_divergences_are_lower_bounds(fp32, kind):
    """By data processing; 0, with gradient 0, for a student equal to its teacher."""
    tensors = random_inputs(4, 40, 33, device=fp32.device)
    student = (tensors["hidden"] @ tensors["weight"].t()).double().log_softmax(-1).cpu()
    log_p, last = teacher_log_probs(4, 33), torch.zeros(4)
    for k in (1, 4, 16, 33):
        got = linear_sparse_divergence(**tensors, **on(fp32.device, likeliest(log_p, k)), kind=kind).divergence.cpu()
        assert (got >= last - 1e-5).all(), k
        last = got
        same = evaluate(linear_sparse_divergence, tensors | on(fp32.device, likeliest(student, k)), kind=kind)
        gradients = () if kind == "tvd" else ("d_hidden", "d_weight")  # the sign of what rounding left
        assert all(same[name].abs().max() < 2e-6 for name in ("loss", "divergence", *gradients)), k


@pytest.mark.parametrize("kind", OTHERS)
def test_a_teacher_whose_rest_rounds_to_nothing(fp32, kind):
    """The listed tokens add up to 1 in fp32, or more: values and gradients stay numbers, the reverse KL's too."""
    tensors = random_sparse(4, 6, 20, 5, device=fp32.device)
    tensors["log_probs"] = torch.tensor([[-1e-8, -19.0, -20.0, -21.0, -22.0]] * 4, device=fp32.device)
    got = evaluate(linear_sparse_divergence, tensors, kind=kind)
    for name in ("loss", "divergence", "d_hidden", "d_weight"):
        assert got[name].isfinite().all() and got[name].abs().max() < 100, name


def test_int32_ids(fp32):
    tensors = random_sparse(6, 12, 37, 5, device=fp32.device)
    expected = evaluate(linear_sparse_divergence, tensors)
    got = evaluate(linear_sparse_divergence, tensors | {"ids": tensors["ids"].int()})
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_cross_entropy_is_that_of_the_other_op(fp32):
    """At temperature 1, whatever that of the divergence: the mixture less the divergence alone."""
    tensors = random_sparse(6, 6, 20, 4, device=fp32.device, bias=True, ignored=0.3)
    student = {k: tensors[k] for k in (*LEAVES, "labels")}
    ce = evaluate(linear_cross_entropy, student, softcap=5.0, scale=1.2)
    for temperature in (1.0, 3.0):
        options = {"softcap": 5.0, "scale": 1.2, "temperature": temperature}
        mixed = evaluate(linear_sparse_divergence, tensors, ce_weight=0.5, **options)
        alone = evaluate(linear_sparse_divergence, tensors, **options)
        for name in ("loss", "d_hidden", "d_weight", "d_bias"):
            torch.testing.assert_close(mixed[name], alone[name] + 0.5 * ce[name])
        for name in ("log_prob", "entropy", "is_top1"):
            torch.testing.assert_close(mixed[name], ce[name])


def test_temperature_squared(fp32):
    """It multiplies the divergence, value and gradient, and not the cross-entropy."""
    tensors = random_sparse(4, 6, 20, 4, device=fp32.device)
    scaled, plain, mixed = (
        evaluate(linear_sparse_divergence, tensors, temperature=3.0, scale_by_temperature_squared=s, ce_weight=w)
        for s, w in ((True, 0.0), (False, 0.0), (True, 0.5))
    )
    for name in ("loss", "divergence", "d_hidden", "d_weight"):
        torch.testing.assert_close(scaled[name], 9 * plain[name])
    torch.testing.assert_close(mixed["loss"], scaled["loss"] - 0.5 * scaled["log_prob"].mean())


def test_vocabulary_padding_takes_no_part(fp32):
    """Padding rows with huge logits change nothing and get no gradient."""
    tensors = random_sparse(5, 6, 20, 4, device=fp32.device, bias=True, ignored=0.2)
    expected = evaluate(linear_sparse_divergence, tensors, **ALL)
    padded = dict(tensors)
    padded["weight"] = torch.cat([tensors["weight"], 1e4 * tensors["weight"][:3]])
    padded["bias"] = torch.cat([tensors["bias"], torch.full_like(tensors["bias"][:3], 1e4)])
    got = evaluate(linear_sparse_divergence, padded, vocab_size=20, **ALL)
    for name in ("d_weight", "d_bias"):
        assert not got[name][20:].any(), f"{name} of the padding must be 0"
        got[name] = got[name][:20]
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6, msg=name)
    check_sparse(padded, vocab_size=20, **ALL)
    beyond = linear_sparse_divergence(**tensors, vocab_size=32, **ALL)
    assert torch.equal(beyond.loss, expected["loss"])


@pytest.mark.parametrize(
    "case, options",
    [("likeliest", x) for x in ({}, *OPTIONS.values())] + [(x, ALL) for x in ("drawn", "over 1", "whole")],
    ids=str,
)
@pytest.mark.parametrize("tail", TAILS)
def test_gradcheck(case, options, tail, monkeypatch):
    """Value and gradient belong together, also where the entries sum to more than 1."""
    set_path(monkeypatch, "torch")
    tensors = random_sparse(3, 3, 7, 7 if case == "whole" else 4, cache=drawn if case == "drawn" else likeliest,
                            dtype=torch.float64, bias=True)  # fmt: skip
    if case == "over 1":
        tensors["log_probs"] = tensors["log_probs"] + 0.5
        assert (tensors["log_probs"].exp().sum(-1) > 1).any()
    leaves = {k: tensors.pop(k).requires_grad_() for k in LEAVES}

    def loss(*values):
        return linear_sparse_divergence(**tensors, **dict(zip(leaves, values, strict=True)), tail=tail, **options).loss

    assert torch.autograd.gradcheck(loss, list(leaves.values()))


def test_reference_against_its_definition():
    """The reference itself, by loops over plain Python numbers."""
    student, log_p = teacher_log_probs(3, 9, seed=7), teacher_log_probs(3, 9)
    cache = likeliest(log_p, 4)
    for tail in TAILS:
        got = sparse_divergence_reference(student, **cache, tail=tail)
        for row in range(3):
            q, ids = student[row].exp(), cache["ids"][row].tolist()
            p = dict(zip(ids, cache["log_probs"][row].double().exp(), strict=True))
            expected = sum(p[i] * (p[i].log() - q[i].log()) for i in ids)
            if tail == "bucket":
                rest = 1 - sum(p.values())
                expected += rest * (rest.log() - sum(q[i] for i in range(9) if i not in ids).log())
            torch.testing.assert_close(got[row], expected)


@pytest.mark.parametrize("labels, frozen", [(True, ()), (False, ("weight", "bias"))])
def test_compiles_as_one_graph(labels, frozen):
    tensors = random_sparse(7, 6, 20, 4, bias=True, ignored=0.3, labels=labels)
    options = ALL | {"num_items": torch.tensor(7.0), "tail": "none"} if labels else {}
    torch.compiler.reset()
    compiled = torch.compile(linear_sparse_divergence, fullgraph=True, backend="aot_eager")
    got, expected = (evaluate(op, tensors, 2.0, frozen, **options) for op in (compiled, linear_sparse_divergence))
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, msg=name)
    with pytest.raises(Exception, match="rows has no place under torch.compile"):
        compiled(**tensors, rows=RowSelection(torch.zeros(7)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(4, 5)}, r"^hidden \(N, H\) and weight .* hidden is \(4, 5\), weight is \(20, 6\)"),
        ({"weight": torch.zeros(20)}, r"weight is \(20,\)"),
        ({"ids": torch.zeros(4, 2, dtype=torch.int64)}, r"^ids and log_probs .* ids is \(4, 2\), log_probs \(4, 3\)"),
        ({"hidden": torch.zeros(5, 6)}, r"ids is \(4, 3\), log_probs \(4, 3\), hidden \(5, 6\)"),
        ({"ids": torch.zeros(4, 3)}, "ids is torch.float32, log_probs torch.float32"),
        ({"log_probs": torch.zeros(4, 3, dtype=torch.int64)}, "log_probs torch.int64"),
        ({"ids": torch.zeros(4, 0, dtype=torch.int64), "log_probs": torch.zeros(4, 0)}, "K must lie in 1 to 1024.* 0"),
        ({"ids": torch.zeros(4, 1025).long(), "log_probs": torch.zeros(4, 1025)}, "have K = 1025"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
        ({"bias": torch.zeros(19)}, r"^bias must be one per row of weight: bias is \(19,\), weight \(20, 6\)"),
        ({"token_weight": torch.zeros(3)}, r"token_weight is \(3,\), hidden \(4, 6\)"),
        ({"labels": None, "ce_weight": 0.5}, "ce_weight is 0.5, but cross-entropy needs labels"),
        ({"reduction": "none"}, "needs recompute=True"),
        ({"recompute": True, "reduction": "sum"}, 'reduction must be "mean" or "none"'),
        ({"tail": "renormalize"}, "tail must be one of bucket, none, got 'renormalize'"),
        ({"top_ids": torch.zeros(3)}, "top_ids must be int64 or int32, one per row"),
        ({"kind": "reverse_kl", "tail": "none"}, "tail none determines the forward KL alone, got kind reverse_kl"),
        ({"kind": "hellinger"}, "kind must be one of forward_kl, reverse_kl"),
        ({"kind": "jsd", "beta": 1.5}, "beta must lie in .0, 1."),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
        ({"accumulate_dtype": torch.float64}, "accumulate_dtype must be None or torch.float32"),
        ({"num_items": 4, "rows": RowSelection(torch.zeros(4, dtype=torch.int64))}, "num_items was given twice"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        linear_sparse_divergence(**{**random_sparse(4, 6, 20, 3), **change})


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU_ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "ce_weight": 0.4}
check_sparse_on_gpu = functools.partial(check, linear_sparse_divergence, linear_sparse_divergence_reference)


def random_sparse_on_gpu(n, h, v, k, **given):
    """A teacher of k tokens a row, the label among them, 7919 apart and so distinct."""
    tensors = random_inputs(n, h, v, device="cuda", **given)
    assert v % 7919 and k < v
    first = tensors["labels"].clamp(min=0)[:, None]
    log_probs = torch.randn(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).log_softmax(-1)
    ids = (first + 7919 * torch.arange(k, device="cuda")) % v
    return tensors | {"ids": ids, "log_probs": log_probs - 0.1}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64, 32003, 1), (333, 96, 5001, 64), (257, 64, 10000, 1000), (2048, 576, 49152, 50)]
)
@pytest.mark.parametrize("options", [{}, {"tail": "none"}, GPU_ALL], ids=["bucket", "none", "all"])
def test_sparse_divergence_on_gpu(shape, dtype, options):
    tensors = random_sparse_on_gpu(*shape, dtype=dtype, bias="scale" in options, ignored=0.3)
    check_sparse_on_gpu(tensors, workspace_mb=64, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 20, 1024])
def test_gradients_are_the_same_every_time_on_gpu(k):
    """The K entries are read, taken out, and filled in by other threads than those that pass over the row."""
    tensors = random_sparse_on_gpu(512, 64, 20000, k, dtype=torch.bfloat16)
    first = evaluate(linear_sparse_divergence, tensors, **GPU_ALL)
    for _ in range(10):
        again = evaluate(linear_sparse_divergence, tensors, **GPU_ALL)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.gpu
def test_host_never_waits_on_gpu():
    tensors = random_sparse_on_gpu(512, 96, 5001, 16, dtype=torch.bfloat16, ignored=0.3)
    for mode in ("default", "error"):  # compiled in the first round
        num_items = torch.tensor(300, device="cuda")
        for name in ("hidden", "weight"):
            tensors[name] = tensors[name].detach().requires_grad_()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rows = RowSelection(tensors["labels"], num_items)
            (linear_sparse_divergence(**tensors, rows=rows, **GPU_ALL).loss * 1.0).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_offsets_beyond_32_bits_on_gpu():
    """17000 x 131072 logits in one workspace; the last rows alone must give what they give among the others."""
    n, vocab = 17000, 131072
    assert n * vocab > 2**31
    tensors = random_sparse_on_gpu(n, 64, vocab, 8, dtype=torch.bfloat16)
    got = evaluate(linear_sparse_divergence, tensors, workspace_mb=2**14, num_items=n)
    tail = {k: x[-40:] if k != "weight" else x for k, x in tensors.items()}
    expected = evaluate(linear_sparse_divergence, tail, num_items=n)
    for name in ("divergence", "log_prob", "entropy", "d_hidden"):
        torch.testing.assert_close(got[name][-40:], expected[name], rtol=1e-2, atol=1e-3 if name[:2] != "d_" else 1e-7)
    assert got["loss"].isfinite() and got["d_weight"].isfinite().all()
