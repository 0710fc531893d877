"""What a record holds of a token: numbers within their bounds, ids without loss, one distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.losses.sparse_answer import TokenTargets
from liger_trainer.teachers.cache.records import COARSE, FINE, Draws, RecordFormat


def log_probs_of(n: int, v: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, v, generator=generator, dtype=torch.float64) * spread).log_softmax(-1)


@pytest.mark.parametrize("code", [COARSE, FINE], ids=["8 bits", "16 bits"])
def test_nats_are_within_their_bound(code):
    x = torch.cat([torch.linspace(0, code.limit, 40001), torch.logspace(-6, math.log10(code.limit), 40001)])
    error = (code.decode(code.encode(x)) - x).abs()
    assert (error <= code.bound(x) + 1e-6 * x + 1e-7).all()
    assert (error > 0.8 * code.bound(x)).any()  # and the bound says no more than what is so
    assert code.encode(x).max() <= code.levels and (code.encode(x).diff()[:40000] >= 0).all()
    beyond = torch.tensor([code.limit * 1.5, torch.inf])
    assert torch.allclose(code.decode(code.encode(beyond)), torch.tensor(code.limit), rtol=1e-4)


def test_the_documented_bounds():
    x = torch.linspace(0, 30, 1001, dtype=torch.float64)
    assert (COARSE.bound(x) < (x + 0.25) / 104).all() and (FINE.bound(x) < (x + 0.25) / 21000).all()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("spread, k", [(0.5, 8), (3.0, 20), (8.0, 64)])
def test_topk_is_within_its_bound(bits, spread, k):
    """Each log-probability by its own bound, those of the entries on average, and what the tail's rounding does."""
    log_p = log_probs_of(200, 1000, spread)
    values, ids = log_p.topk(k, -1)
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1)
    label, entropy = log_p[:, 7], torch.special.entr(log_p.exp()).sum(-1)
    form = RecordFormat("topk", k, bits, 1000)
    records = form.encode_topk(ids, values, rest, label, entropy)
    assert records.shape == (200, form.bytes) and records.dtype == torch.uint8
    got = form.decode(records)
    assert torch.equal(got.ids, ids.int()) and torch.equal(got.top_ids, ids[:, 0].int())
    for name, truth in (("label_log_prob", label), ("entropy", entropy)):
        assert ((getattr(got, name) - truth).abs() <= FINE.bound(truth.abs()) + 1e-5).all(), name

    each = form.code.bound(values[:, :1] - values)
    share = values.softmax(-1)
    average = (share * each.exp()).sum(-1, keepdim=True).log()
    tail = rest - FINE.bound(-rest), rest + FINE.bound(-rest)
    named = torch.stack([torch.log1p(-t.exp().clamp(max=1 - 1e-12)) for t in tail])
    moved = (named - torch.log1p(-rest.exp())).abs().amax(0)[:, None]
    error = (got.log_probs - values).abs()
    assert (error <= each + average + moved + 1e-5).all()
    assert (error[:, 1:] > each[:, 1:] / 2).any()
    mass = got.log_probs.double().exp().sum(-1) + (-FINE.decode(FINE.encode(-rest))).double().exp()
    assert torch.allclose(mass, torch.ones_like(mass), atol=1e-6)  # one distribution, the tail with it


@settings(deadline=None, max_examples=100)
@given(vocab=st.integers(2, 2**25), entries=st.integers(1, 40), bits=st.sampled_from([8, 16]), data=st.data())
def test_ids_of_every_width(vocab, entries, bits, data):
    entries = min(entries, vocab)
    ids = torch.tensor([data.draw(st.lists(st.integers(0, vocab - 1), min_size=entries, max_size=entries))])
    form = RecordFormat("topk", entries, bits, vocab)
    assert form.id_bits == max(1, math.ceil(math.log2(vocab)))
    values, one = torch.linspace(-1, -3, entries)[None], torch.full((1,), -1.0)
    assert torch.equal(form.decode(form.encode_topk(ids, values, one, one, -one)).ids, ids.int())


def test_bytes_a_token():
    assert RecordFormat("topk", 64, 8, 49152).bytes == 6 + 63 + 128
    assert RecordFormat("topk", 64, 16, 49152).bytes == 6 + 126 + 128 <= 300
    assert RecordFormat("topk", 64, 16, 262144).bytes <= 300  # the largest vocabularies there are
    assert RecordFormat("topk", 64, 8, 49152, tail_draws=32).bytes == 8 + 63 + 192 <= 300
    assert RecordFormat("topk", 64, 8, 262144, tail_draws=32).bytes <= 300
    assert RecordFormat("sampled", 12, 8, 49152).bytes == 6 + 26 <= 80
    assert RecordFormat("sampled", 12, 8, 262144).bytes <= 80


@pytest.mark.parametrize(
    "options, expected",
    [
        (("topk", None, None, 49152), (64, 32)),
        (("topk", None, 0, 49152), (64, 0)),
        (("topk", 1000, None, 49152), (1000, 24)),
        (("topk", None, None, 64), (64, 0)),
        (("topk", 60, None, 64), (60, 4)),
        (("sampled", None, None, 49152), (12, 0)),
    ],
)
def test_how_many_where_it_is_not_said(options, expected):
    kind, entries, draws, vocabulary = options
    form = RecordFormat.of(kind, entries, draws, 8, vocabulary)
    assert (form.entries, form.tail_draws) == expected


def entries_of(targets: TokenTargets) -> list[dict[int, float]]:
    return [
        {int(i): round(float(p.exp()), 5) for i, p in zip(ids, logs, strict=True) if i >= 0 and p > -torch.inf}
        for ids, logs in zip(targets.ids, targets.log_probs, strict=True)
    ]


def test_draws_become_ids_with_counts():
    form = RecordFormat("sampled", 4, 8, 100)
    draws = torch.tensor([[7, 3, 7, 7], [5, 5, 5, 5], [9, 8, 2, 1]])
    log_p = torch.tensor([[-1.0, -2, -1, -1], [-0.1] * 4, [-3.0, -2, -1, -4]])
    top = torch.tensor([7, 5, 42])
    got = form.decode(form.encode_draws(top, Draws(draws, log_p), torch.tensor([-1.0] * 3), torch.tensor([2.0] * 3)))
    assert entries_of(got) == [{3: 0.25, 7: 0.75}, {5: 1.0}, {1: 0.25, 2: 0.25, 8: 0.25, 9: 0.25}]
    assert torch.equal(got.top_ids, top.int())
    surprise = torch.tensor([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 0.0, math.log(4)])
    assert torch.allclose(got.unnamed, surprise + log_p.mean(-1), atol=1e-3)


def test_draws_from_the_tail_share_its_mass():
    """The second token's tail is beyond what is written, the third has none: nothing was drawn there."""
    form = RecordFormat("topk", 2, 16, 100, tail_draws=4)
    ids, values = torch.tensor([[7, 3]] * 3), torch.tensor([0.6, 0.2]).log().expand(3, 2)
    rest = torch.tensor([math.log(0.2), -200.0, -math.inf])
    draws = Draws(
        torch.tensor([[9, 4, 9, 9], [7, 7, 7, 7], [0, 99, 99, 99]]), torch.tensor([-3.0, -4, -3, -3]).repeat(3, 1)
    )
    got = form.decode(form.encode_topk(ids, values, rest, -torch.ones(3), torch.ones(3), draws))
    assert entries_of(got)[0] == pytest.approx({7: 0.6, 3: 0.2, 4: 0.05, 9: 0.15}, abs=1e-4)
    assert [row.keys() for row in entries_of(got)[1:]] == [{7, 3}] * 2
    assert got.top_ids.tolist() == [7] * 3 and form.tail == "none"
    # what the tail adds to the KL, sum p log p, is 0.2 * -3.25; the entries' is taken away
    assert got.unnamed[0].item() == pytest.approx(0.2 * -3.25 - 0.05 * math.log(0.05) - 0.15 * math.log(0.15), abs=1e-3)
    assert (got.unnamed[1:].abs() < 1e-6).all()
