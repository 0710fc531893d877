"""What is of linear_sparse_divergence: what a cache may hold, how far it determines a divergence, and draws."""

import functools

import pytest
import torch
from fused_losses import LOSSES, drawn, likeliest, random_sparse, sparse_on_gpu, teacher_log_probs
from kernel_checks import assert_same, check, double, evaluate, random_inputs
from quick_cases import quick_but

from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_sparse_divergence import (
    linear_sparse_divergence,
    linear_sparse_divergence_reference,
    sparse_divergence_reference,
)

ALL = LOSSES["sparse"].options | {"num_items": 7}
OTHERS = [kind for kind in KINDS if kind != "forward_kl"]
TAILS = ("bucket", "none")
check_sparse = functools.partial(check, linear_sparse_divergence, linear_sparse_divergence_reference)


@pytest.mark.parametrize(
    "shape, k", [((1, 1, 2), 1), ((5, 3, 24), 4), ((7, 24, 101), 13), ((2, 7, 33), 32), ((3, 5, 21), 21)], ids=str
)
@pytest.mark.parametrize("tail, cache", [("bucket", likeliest), ("none", drawn)])
def test_any_number_of_entries(place, shape, k, tail, cache):
    tensors = random_sparse(*shape, k=k, cache=cache, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_sparse(tensors, tail=tail)
    check_sparse(tensors, tail=tail, **ALL)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5, "temperature": 2.0}], ids=["plain", "options"])
def test_agreement_with_the_teachers_likeliest(place, dtype, options):
    """Whether the student's likeliest token is the one in top_ids, which need not be among ids."""
    tensors = random_sparse(16, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    assert not evaluate(linear_sparse_divergence, tensors)["agrees"].any()
    logits = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    top, keep = logits.argmax(-1), tensors["labels"] != -100
    tensors["top_ids"] = torch.where(torch.arange(16, device=top.device) % 2 == 0, top, (top + 1) % 37).to(dtype)
    agrees = check_sparse(tensors, workspace_mb=1e-6, **options)["agrees"]
    assert torch.equal(agrees, keep & (torch.arange(16, device=top.device) % 2 == 0)) and 0 < agrees.sum() < keep.sum()


@pytest.mark.parametrize("tail", TAILS)
def test_padding_is_ignored(fp32, tail):
    """Wherever it stands, and whatever else the entry holds: the other half may be an id in use, or a probability."""
    tensors = random_sparse(6, 6, 37, k=5, device=fp32.device, bias=True)
    expected = evaluate(linear_sparse_divergence, tensors, tail=tail, **ALL)
    ids, log_probs = tensors["ids"], tensors["log_probs"]
    negative, minus_inf = torch.full_like(ids[:, :1], -3), torch.full_like(log_probs[:, :1], -torch.inf)
    padded = tensors | {
        "ids": torch.cat([negative, ids[:, :2], ids[:, :1], ids[:, 2:], negative], 1),
        "log_probs": torch.cat([log_probs[:, :3], minus_inf, log_probs[:, 2:], minus_inf], 1),
    }
    padded["log_probs"][:, 1:3] = log_probs[:, :2]
    assert_same(evaluate(linear_sparse_divergence, padded, tail=tail, **ALL), expected, rtol=1e-6, atol=1e-6)
    check_sparse(padded, tail=tail, **ALL)


@pytest.mark.parametrize("tail", TAILS)
def test_rows_without_entries_teach_nothing(place, tail):
    tensors = random_sparse(4, 6, 37, k=3, dtype=place.dtype, device=place.device)
    tensors["ids"][1], tensors["log_probs"][2] = -1, -torch.inf
    got = check_sparse(tensors, tail=tail)
    for name in ("divergence", "teacher_mass", "d_hidden"):
        largest = got[name].reshape(4, -1).abs().amax(1)
        assert (largest > 1e-3).tolist() == [True, False, False, True], name
        assert (largest[1:3] < 1e-6).all(), name


def whole_vocabulary(place, temperature):
    """Return a student, the same with its teacher for linear_divergence, and that teacher's cache with K = V."""
    n, v = 5, 37
    student = random_inputs(n, 12, v, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    teacher = random_inputs(n, 9, v, dtype=place.dtype, device=place.device, seed=1)
    logits = teacher["hidden"] @ teacher["weight"].t()
    cache = likeliest((logits.double() / temperature).log_softmax(-1), v)
    return student, student | {f"teacher_{k}": teacher[k] for k in ("hidden", "weight")}, cache


@pytest.mark.parametrize("kind", ["forward_kl", *quick_but(OTHERS, "jsd", "skew_reverse_kl", "symmetric_kl", "tvd")])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("order", ["sorted", "vocabulary"])
def test_whole_vocabulary_gives_the_divergence(place, kind, temperature, order):
    """K = V: no rest, and what linear_divergence gives for the same teacher, whatever rounding left of P."""
    student, full, cache = whole_vocabulary(place, temperature)
    options = {"kind": kind, "temperature": temperature, "ce_weight": 0.3, "softcap": 9.0, "beta": 0.3, "alpha": 0.2}
    expected = evaluate(linear_divergence, full, **options)
    if order == "vocabulary":
        place_of = cache["ids"].argsort(-1)
        cache = {k: x.gather(1, place_of) for k, x in cache.items()}
    got = (
        check_sparse(student | cache, **options)
        if kind != "tvd"
        else evaluate(linear_sparse_divergence, student | cache, **options)
    )
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(place.dtype, 2e-2)  # float64: the cache is in fp32
    tolerance *= 1 if kind == "forward_kl" else 10
    same = got.keys() & expected.keys() - {"agrees"}
    if kind == "tvd" and place.dtype.itemsize == 2:  # where rounding turns a sign
        same -= {"d_hidden", "d_weight", "d_bias"}
    assert same >= {"loss", "divergence", "log_prob", "entropy"}
    assert_same(got, {name: expected[name] for name in same}, rtol=tolerance, atol=tolerance)


def test_whole_vocabulary_gives_each_term_of_a_mix(fp32):
    """Of all kinds in one call, and the gradient of their sum."""
    student, full, cache = whole_vocabulary(fp32, 2.0)
    weights = {kind: 0.5 + 0.1 * i for i, kind in enumerate(KINDS)}
    options = {"kind": weights, "temperature": 2.0, "beta": 0.3, "alpha": 0.2}
    got = evaluate(linear_sparse_divergence, student | cache, **options)
    expected = evaluate(linear_divergence, full, **options)
    same = {f"of {kind}" for kind in KINDS} | {"loss", "d_hidden", "d_weight", "d_bias"}
    assert_same({name: got[name] for name in same}, {name: expected[name] for name in same}, rtol=1e-4, atol=1e-5)


def test_largest_k(fp32):
    check_sparse(random_sparse(2, 4, 1100, k=1024, device=fp32.device), ce_weight=0.5)
    check_sparse(random_sparse(2, 4, 1024, k=1024, device=fp32.device), temperature=2.0)


@pytest.mark.parametrize(
    "cache_dtype, tail", [(torch.bfloat16, "bucket"), (torch.bfloat16, "none"), (torch.float16, "bucket")]
)
def test_rounded_cache(fp32, cache_dtype, tail):
    """8 bits of a log-probability bring the sum to either side of 1."""
    tensors = random_sparse(8, 6, 17, k=16, device=fp32.device)
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


@pytest.mark.parametrize("kind", ["forward_kl", {"jsd": 1.0, "skew_kl": 0.5, "forward_kl": 0.0}, "tvd"], ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("wrong", ["twice", 24, 25, 2**40])
def test_an_id_twice_or_beyond_the_vocabulary_gives_nan(fp32, kind, tail, wrong):
    """In its row; minima and maxima drop NaN, values and gradients do not. (V is a multiple of 8: see the label's.)"""
    if tail == "none" and kind != "forward_kl":
        pytest.skip("of which it determines none")
    tensors = random_sparse(4, 6, 24, k=5, device=fp32.device)
    options = {"kind": kind, "tail": tail, "ce_weight": 0.1}
    expected = linear_sparse_divergence(**tensors, **options)
    tensors["ids"][2, 4] = tensors["ids"][2, 0] if wrong == "twice" else wrong
    if wrong != "twice" and fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_sparse_divergence(**tensors, **options)
        return
    got = evaluate(linear_sparse_divergence, tensors, **options)
    assert got["loss"].isnan() and got["d_hidden"][2].isnan().all()
    terms = {f"of {name}": x for name, x in expected.terms.items()}
    for name, x in {"divergence": expected.divergence, "log_prob": expected.log_prob, **terms}.items():
        assert got[name].isnan().tolist() == [False, False, True, False], name
        assert torch.equal(got[name][[0, 1, 3]], x[[0, 1, 3]]), name


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


@pytest.mark.parametrize("kind", ["forward_kl", *quick_but(OTHERS, "skew_kl", "skew_reverse_kl", "symmetric_kl")])
def test_the_bucket_gives_a_lower_bound(fp32, kind):
    """It grows with every id added (data processing), up to the divergence; for equal sides it is 0 at any K."""
    tensors = random_inputs(4, 40, 33, device=fp32.device)
    student = (tensors["hidden"] @ tensors["weight"].t()).double().log_softmax(-1).cpu()
    log_p, last = teacher_log_probs(4, 33), torch.zeros(4)
    full = (log_p.exp() * (log_p - student)).sum(-1)
    for k in (1, 2, 4, 8, 16, 32, 33) if kind == "forward_kl" else (1, 4, 16, 33):
        cache = likeliest(log_p, k, fp32.device)
        got = linear_sparse_divergence(**tensors, **cache, kind=kind).divergence.cpu()
        assert (got >= last - 1e-5).all(), k
        assert kind != "forward_kl" or k > 16 or (got < full - 1e-3).all(), f"K = {k} leaves something out"
        last = got
        same = evaluate(linear_sparse_divergence, tensors | likeliest(student, k, fp32.device), kind=kind)
        gradients = () if kind == "tvd" else ("d_hidden", "d_weight")  # the sign of what rounding left
        assert all(same[name].abs().max() < 2e-6 for name in ("loss", "divergence", *gradients)), k
    if kind == "forward_kl":
        torch.testing.assert_close(last.double(), full, rtol=1e-5, atol=1e-5)


def test_terms_of_a_mix_are_those_of_each_kind(place):
    tensors = random_sparse(5, 12, 37, k=6, dtype=place.dtype, device=place.device, ignored=0.3)
    mix = {"forward_kl": 0.5, "reverse_kl": 0.7, "tvd": -0.2, "symmetric_kl": 0.4, "jsd": 0.0}
    terms = linear_sparse_divergence(**tensors, kind=mix, beta=0.3).terms
    assert set(terms) == set(mix)
    for kind in mix:
        single = linear_sparse_divergence(**tensors, kind=kind, beta=0.3)
        torch.testing.assert_close(terms[kind], single.divergence, rtol=1e-5, atol=1e-5)
        assert torch.equal(single.terms[kind], single.divergence)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_teacher_whose_rest_rounds_to_nothing(fp32, kind):
    """The listed tokens add up to 1 in fp32, or more: the rest counts as 2^-24, so the reverse KL is finite too."""
    tensors = random_sparse(4, 6, 20, k=5, device=fp32.device)
    tensors["log_probs"] = torch.tensor([[-1e-8, -19.0, -20.0, -21.0, -22.0]] * 4, device=fp32.device)
    got = evaluate(linear_sparse_divergence, tensors, kind=kind)
    if kind == "reverse_kl":
        all_q = (tensors["hidden"] @ tensors["weight"].t()).double().softmax(-1)
        q, p = all_q.gather(1, tensors["ids"]), tensors["log_probs"].double().exp()
        rest = 1 - q.sum(1)
        want = (q * (q / p).log()).sum(1) + rest * (rest / 2.0**-24).log()
        torch.testing.assert_close(got["divergence"].double(), want, rtol=1e-4, atol=1e-4)
    for name in ("loss", "divergence", "d_hidden", "d_weight"):
        assert got[name].isfinite().all() and got[name].abs().max() < 100, name


def test_int32_ids(fp32):
    tensors = random_sparse(6, 12, 37, k=5, device=fp32.device)
    expected = evaluate(linear_sparse_divergence, tensors)
    got = evaluate(linear_sparse_divergence, tensors | {"ids": tensors["ids"].int()})
    assert all(torch.equal(got[name], expected[name]) for name in expected)


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


NONE = torch.zeros(4, 0)


@pytest.mark.parametrize("change, message", [
    ({"ids": torch.zeros(4, 2, dtype=torch.int64)}, r"^ids and log_probs .* ids is \(4, 2\), log_probs \(4, 3\)"),
    ({"hidden": torch.zeros(5, 6)}, r"ids is \(4, 3\), log_probs \(4, 3\), hidden \(5, 6\)"),
    ({"ids": torch.zeros(4, 3)}, "ids is torch.float32, log_probs torch.float32"),
    ({"log_probs": torch.zeros(4, 3, dtype=torch.int64)}, "log_probs torch.int64"),
    ({"ids": NONE.long(), "log_probs": NONE}, "K must lie in 1 to 1024.* 0"),
    ({"ids": torch.zeros(4, 1025).long(), "log_probs": torch.zeros(4, 1025)}, "have K = 1025"),
    ({"tail": "renormalize"}, "tail must be one of bucket, none, got 'renormalize'"),
    ({"top_ids": torch.zeros(3)}, "top_ids must be int64 or int32, one per row"),
    ({"kind": "reverse_kl", "tail": "none"}, "tail none determines only the forward KL, got kind reverse_kl"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linear_sparse_divergence(**{**random_sparse(4, 6, 20, k=3), **change})


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 20, 1024])
def test_gradients_are_the_same_every_time_on_gpu(k):
    """The K entries are read, taken out, and filled in by other threads than those that pass over the row."""
    tensors = sparse_on_gpu(512, 64, 20000, k, dtype=torch.bfloat16)
    options = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "ce_weight": 0.4}
    first = evaluate(linear_sparse_divergence, tensors, **options)
    for _ in range(10):
        assert_same(evaluate(linear_sparse_divergence, tensors, **options), first)
