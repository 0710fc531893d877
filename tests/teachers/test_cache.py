"""The teacher cache: what is written is what the teacher said, training from it equals the teacher, nothing passes that
does not belong."""

import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from splits import capture_gradients
from tiny import (
    VOCAB,
    chats,
    completions,
    kl,
    shift_labels_of,
    texts,
    tiny_model,
    tiny_tokenizer,
    train_args,
)

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.cli import main
from liger_trainer.errors import ConfigError, CorruptError, DataError, LigerTrainerError, MaterializedLogitsWarning
from liger_trainer.losses.sparse import TokenTargets
from liger_trainer.teachers.cache import reader as teacher_reader
from liger_trainer.teachers.cache import store as teacher_cache
from liger_trainer.teachers.cache.records import COARSE, FINE, Draws, RecordFormat
from liger_trainer.teachers.cache.store import INDEX, TeacherCache, read_index
from liger_trainer.teachers.cached import RECORDS, CacheCollator
from liger_trainer.teachers.fingerprints import files_fingerprint, tokenizer_fingerprint, weights_fingerprint
from liger_trainer.teachers.row_keys import documents, row_key
from liger_trainer.trainers import capture as cache_capture
from liger_trainer.trainers.capture import capture
from liger_trainer.trainers.prepare_rows import prepare_rows

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")


def teacher_model():
    return tiny_model("gemma2", seed=5, hidden_size=48)  # with a softcap


def config(folder, **options) -> LigerDistillConfig:
    """Without draws from the rest, unless it says so."""
    cache = {"teacher": "cache", "teacher_cache_dir": folder and str(folder), "cache_tail_draws": 0}
    return train_args(LigerDistillConfig, **{**cache, **options})


def captured(folder, data=None, test=None, teacher=None, **options):
    """Capture, and the configuration that was captured with."""
    args = config(folder, **options)
    capture(teacher or teacher_model(), args, tiny_tokenizer(), data or completions(), test)
    return args


def trainer_of(args, data=None, test=None, student=None, teacher=None, tokenizer=None, **kwargs):
    return LigerDistillTrainer(
        student or tiny_model(), args=args, teacher_model=teacher, train_dataset=data or completions(),
        eval_dataset=test, processing_class=tokenizer or tiny_tokenizer(), **kwargs,
    )  # fmt: skip


# A token's record


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


@pytest.mark.parametrize("vocab", [2, 3, 64, 1000, 49152, 65537, 262145, 2**25])
def test_ids_of_every_width(vocab):
    generator = torch.Generator().manual_seed(0)
    k = min(17, vocab)
    ids = torch.stack([torch.randperm(min(vocab, 1000), generator=generator)[:k] for _ in range(50)])
    ids[:25] = vocab - 1 - ids[:25]
    form = RecordFormat("topk", k, 8, vocab)
    assert form.id_bits == max(1, math.ceil(math.log2(vocab)))
    values = torch.linspace(-1, -3, k).expand(50, -1)
    one = torch.full((50,), -1.0)
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
    "given, expected",
    [
        (("topk", None, None, 49152), (64, 32)),
        (("topk", None, 0, 49152), (64, 0)),
        (("topk", 1000, None, 49152), (1000, 24)),
        (("topk", None, None, 64), (64, 0)),
        (("topk", 60, None, 64), (60, 4)),
        (("sampled", None, None, 49152), (12, 0)),
    ],
)
def test_how_many_where_it_is_not_said(given, expected):
    kind, entries, draws, vocabulary = given
    form = RecordFormat.of(kind, entries, draws, 8, vocabulary)
    assert (form.entries, form.tail_draws) == expected


def test_a_cache_from_before_there_were_draws_from_the_rest(tmp_path):
    captured(tmp_path / "c")
    content = json.loads((tmp_path / "c" / INDEX).read_text())
    del content["sha256"], content["settings"]["tail_draws"]
    (tmp_path / "c" / INDEX).write_text(json.dumps({**content, "sha256": teacher_cache._checksum(content)}))
    assert TeacherCache(tmp_path / "c", verify=True).format.tail == "bucket"


def test_draws_become_ids_with_counts():
    form = RecordFormat("sampled", 4, 8, 100)
    draws = torch.tensor([[7, 3, 7, 7], [5, 5, 5, 5], [9, 8, 2, 1]])
    log_p = torch.tensor([[-1.0, -2, -1, -1], [-0.1] * 4, [-3.0, -2, -1, -4]])
    top = torch.tensor([7, 5, 42])
    got = form.decode(form.encode_draws(top, Draws(draws, log_p), torch.tensor([-1.0] * 3), torch.tensor([2.0] * 3)))
    assert entries_of(got) == [
        {3: 0.25, 7: 0.75}, {5: 1.0}, {1: 0.25, 2: 0.25, 8: 0.25, 9: 0.25},
    ]  # fmt: skip
    assert torch.equal(got.top_ids, top.int())
    surprise = torch.tensor([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 0.0, math.log(4)])
    assert torch.allclose(got.unnamed, surprise + log_p.mean(-1), atol=1e-3)


def entries_of(targets: TokenTargets) -> list[dict[int, float]]:
    return [
        {int(i): round(float(p.exp()), 5) for i, p in zip(ids, logs, strict=True) if i >= 0 and p > -torch.inf}
        for ids, logs in zip(targets.ids, targets.log_probs, strict=True)
    ]


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
    # what the tail adds to the KL, sum p log p, is 0.2 * -3.25; that of the entries is taken away
    assert got.unnamed[0].item() == pytest.approx(0.2 * -3.25 - 0.05 * math.log(0.05) - 0.15 * math.log(0.15), abs=1e-3)
    assert (got.unnamed[1:].abs() < 1e-6).all()


@pytest.mark.parametrize("draws", [0, 3])
def test_zeros_have_no_entries(draws):
    form = RecordFormat("topk", 5, 8, 100, draws)
    got = form.decode(torch.zeros(2, 3, form.bytes).byte())
    assert (got.log_probs[..., :5] == -torch.inf).all() and got.log_probs.shape == (2, 3, 5 + draws)
    assert got.unnamed.isfinite().all()


# What is captured


def logits_by_hand(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("family", ["gemma2", "granite", "gpt2", "llama_tied"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_topk_is_what_the_teacher_says(tmp_path, monkeypatch, family, temperature):
    """Scales, softcaps and biases of the head, chunks of logits, rows of different lengths in a batch, shards."""
    monkeypatch.setattr(teacher_reader, "_CHUNK_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(cache_capture, "MIB", 8)  # several shards
    teacher = tiny_model(family, seed=3)
    options = {"cache_entries": 9, "cache_bits": 16, "temperature": temperature, "per_device_eval_batch_size": 5}
    args = captured(tmp_path / "c", completions(13), teacher=teacher, **options)
    cache = TeacherCache(tmp_path / "c", verify=True)
    assert len(cache.index.shards) > 2
    rows = prepare_rows(args, tiny_tokenizer(), completions(13))
    seen = 0
    for document in documents(rows.datasets["train"]):
        labels = torch.from_numpy(document.labels)
        keep = shift_labels_of(labels[None])[0] != -100
        logits = logits_by_hand(teacher, document.input_ids.tolist())[keep]
        records = cache.records(document.key)
        assert records is not None
        got = cache.format.decode(records)
        values, ids = (logits / temperature).log_softmax(-1).topk(9, -1)
        assert torch.equal(got.ids.long(), ids)
        torch.testing.assert_close(got.log_probs.double(), values, rtol=1e-3, atol=1e-3)
        log_p = logits.log_softmax(-1)
        label = log_p.gather(-1, shift_labels_of(labels[None])[0][keep][:, None]).squeeze(-1)
        torch.testing.assert_close(got.label_log_prob.double(), label, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got.entropy.double(), torch.special.entr(log_p.exp()).sum(-1), rtol=1e-3, atol=1e-3)
        seen += len(records)
    assert seen == cache.index.tokens and len(cache) == cache.index.rows == 13


@pytest.mark.parametrize("likeliest", [0, 5])
def test_draws_are_unbiased(tmp_path, likeliest):
    """count / m is the teacher's probability on average over seeds, the label's and the rare ones' too; beyond the
    likeliest that are known, their mass times that."""
    teacher, data = tiny_model(seed=3), completions(1)
    shares, draws, seeds = 0, 6, 150
    rows = prepare_rows(config(tmp_path), tiny_tokenizer(), data)
    document = next(iter(documents(rows.datasets["train"])))
    row = torch.from_numpy(document.input_ids.copy()), torch.from_numpy(document.labels.copy())
    form = RecordFormat("topk", likeliest, 16, VOCAB, draws) if likeliest else RecordFormat("sampled", draws, 8, VOCAB)
    for seed in range(seeds):
        reader = teacher_reader.TeacherReader(teacher, form, temperature=2.0, seed=seed)
        got = form.decode(reader.read([document.key], [row])[0])
        p = torch.zeros(len(got.ids), VOCAB).scatter_add(1, got.ids.long().clamp(min=0), got.log_probs.exp())
        shares = shares + p / seeds
    keep = shift_labels_of(row[1][None])[0] != -100
    truth = (logits_by_hand(teacher, row[0].tolist())[keep] / 2.0).softmax(-1).float()
    spread = (truth * (1 - truth) / (draws * seeds)).sqrt()
    known = truth.topk(likeliest, -1).indices
    assert ((shares - truth).gather(-1, known).abs() < 1e-3).all()
    assert ((shares - truth).abs() < 5 * spread + 1e-4).all()
    assert torch.allclose(shares.sum(-1), torch.ones(len(shares)))


def test_what_has_no_mass_is_not_drawn():
    """At the very end of the cumulative distribution, where numbers round to its sum, lie tokens that are named."""
    reader = teacher_reader.TeacherReader(tiny_model(), RecordFormat("topk", 2, 8, VOCAB, 4))
    log_p = torch.full((1, VOCAB), -1e4)
    log_p[0, :2], log_p[0, -2:] = torch.tensor([0.75, 0.25]).log(), -torch.inf
    draws = reader._drawn(log_p, log_p.argmax(-1), torch.tensor([[0.0, 0.5, 0.8, 1.0]], dtype=torch.float64))
    assert draws.ids.tolist() == [[0, 0, 1, 0]] and draws.log_probs.isfinite().all()


def test_draws_depend_on_the_row_and_the_seed_alone(tmp_path):
    whole = captured(tmp_path / "a", cache_kind="sampled", per_device_eval_batch_size=24)
    captured(tmp_path / "b", completions().shuffle(seed=9), cache_kind="sampled", per_device_eval_batch_size=2)
    captured(tmp_path / "c", cache_kind="sampled", seed=7)
    a, b, c = (TeacherCache(tmp_path / name) for name in "abc")
    assert a.index.fingerprints == b.index.fingerprints == c.index.fingerprints
    same = [torch.equal(a.records(key), b.records(key)) for key in keys_of(whole)]  # type: ignore[arg-type]
    assert all(same) and len(same) == 24
    assert not all(torch.equal(a.records(key), c.records(key)) for key in keys_of(whole))  # type: ignore[arg-type]


def test_info_says_how_many_draws_there_are(tmp_path, capsys):
    captured(tmp_path / "c", cache_entries=8, cache_tail_draws=5, seed=7)
    said = end_of(capsys, "cache", "info", str(tmp_path / "c"))[1]
    assert "5 draws" in said, said


def keys_of(args, data=None):
    return [d.key for d in documents(prepare_rows(args, tiny_tokenizer(), data or completions()).datasets["train"])]


def test_logits_of_a_batch_are_never_stored(tmp_path, monkeypatch):
    from tiny import _VocabularyTensors

    monkeypatch.setattr(teacher_reader, "_CHUNK_LOGITS", 3 * VOCAB)
    with _VocabularyTensors() as seen:
        captured(tmp_path / "c", cache_entries=4)
    assert 0 < seen.rows <= 3


def test_a_head_that_is_no_plain_linear_layer(tmp_path):
    """Quantized heads and heads with adapters or hooks are called as they are, chunk by chunk."""

    class Scaled(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    plain, other = tiny_model(seed=3), tiny_model(seed=3)
    head = Scaled(32, VOCAB, bias=False)
    head.load_state_dict({"weight": plain.get_output_embeddings().weight / 2})
    other.set_output_embeddings(head)
    args = captured(tmp_path / "a", teacher=plain, cache_entries=8, cache_bits=16)
    captured(tmp_path / "b", teacher=other, cache_entries=8, cache_bits=16)
    a, b = TeacherCache(tmp_path / "a"), TeacherCache(tmp_path / "b")
    for key in keys_of(args):
        torch.testing.assert_close(
            a.format.decode(a.records(key)).log_probs, b.format.decode(b.records(key)).log_probs, rtol=1e-3, atol=1e-3
        )  # type: ignore[arg-type]


def test_a_teacher_of_nan_is_not_written_down(tmp_path):
    teacher = teacher_model()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[:40] = torch.nan
    with pytest.raises(LigerTrainerError, match="NaN or infinite"):
        captured(tmp_path / "c", teacher=teacher)
    assert not list((tmp_path / "c").glob("shard*"))


# Training from it


def one_step(trainer):
    gradients = capture_gradients(trainer)
    trainer.train()
    return trainer.state.log_history[0], gradients


STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.0}


@pytest.mark.parametrize("losses", [None, [{"type": "forward_kl", "weight": 0.7}, {"type": "ce", "weight": 0.4}]])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_whole_vocabulary_gives_the_live_teachers_gradient(tmp_path, losses, temperature):
    options = {"losses": losses, "temperature": temperature, **STEP}
    teacher, test = teacher_model(), completions(6, seed=4)
    args = captured(tmp_path / "c", test=test, teacher=teacher, cache_entries=VOCAB, cache_bits=16, **options)
    cached = trainer_of(args, test=test)
    live = trainer_of(config(None, **{**options, "teacher": "model"}), test=test, teacher=teacher)
    for a, b in ((cached.evaluate(), live.evaluate()),):
        for name in a.keys() - {n for n in a if "second" in n or "runtime" in n or "time" in n}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-3), name
    (logs, gradients), (truth, expected) = one_step(cached), one_step(live)
    names = {"loss", "kd_loss", "ce_loss", "agreement_at_1", "student_perplexity", "teacher_perplexity"}
    names |= {"teacher_entropy", "entropy", "mean_token_accuracy", "num_tokens"}
    assert ("forward_kl" in logs) == (temperature == 1.0)  # of another temperature the cache says nothing
    for name in names | (logs.keys() & {"forward_kl"}):
        assert logs[name] == pytest.approx(truth[name], rel=1e-3), name
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * total, name


FORMS = {
    "rows": (completions, {}),
    "packed": (completions, {"packing": True, "max_length": 48}),
    "packed, cut": (completions, {"packing": True, "max_length": 9}),
    "fragments": (texts, {"packing": True, "packing_strategy": "bfd_split", "max_length": 9}),
    "wrapped": (texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "padding-free": (completions, {"padding_free": True, "max_length": None}),
    "assistant": (chats, {"assistant_only_loss": True}),
    "assistant, packed": (chats, {"assistant_only_loss": True, "packing": True, "max_length": 64}),
    "whole rows": (completions, {"completion_only_loss": False}),
    "end": (completions, {"max_length": 7, "truncation_mode": "keep_end"}),
}


KINDS = {"topk": {"cache_kind": "topk"}, "sampled": {"cache_kind": "sampled"}, "both": {"cache_tail_draws": 4}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_packed_or_masked_give_the_loss_of_the_sparse_target_computed_live(tmp_path, form, kind):
    """By hand: each supervised position's own entries, from the teacher's forward over that document alone."""
    rows, options = FORMS[form]
    options = {**KINDS[kind], "cache_entries": 6, "cache_bits": 16, **options, **STEP}
    teacher, student, data = teacher_model(), tiny_model(), rows(10)
    args = captured(tmp_path / "c", data, teacher=teacher, per_device_train_batch_size=3, **options)
    trainer = trainer_of(args, data, student=student)
    batch = trainer.data_collator(list(trainer.train_dataset))
    got = loss_of_batch(trainer, dict(batch))

    cache, total, tokens = TeacherCache(tmp_path / "c"), 0.0, 0
    for document in documents(trainer.train_dataset):
        keep = shift_labels_of(torch.from_numpy(document.labels.copy())[None])[0] != -100
        if not keep.any():
            continue
        p, q = (logits_by_hand(m, document.input_ids.tolist())[keep].log_softmax(-1) for m in (teacher, student))
        if kind == "topk":
            values, ids = p.topk(6, -1)
            rest = [x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for x in (p, q)]
            total += kl(torch.cat([values, rest[0]], -1), torch.cat([q.gather(-1, ids), rest[1]], -1)).sum()
        else:
            targets = cache.format.decode(cache.records(document.key))  # type: ignore[arg-type]
            share = targets.log_probs.exp().double()
            chosen = q.gather(-1, targets.ids.long().clamp(min=0))
            total += (torch.special.xlogy(share, share) - share * chosen).sum()
        tokens += int(keep.sum())
    assert got.label_mask.sum() == tokens > 10
    assert got.token_loss.item() == pytest.approx(float(total) / tokens, rel=2e-3)
    assert (got.divergence[~got.label_mask] == 0).all()


def loss_of_batch(trainer, batch):
    batch.pop("max_length_q", None), batch.pop("max_length_k", None)
    with torch.no_grad():
        return trainer.model(**trainer._teacher_inputs(batch) | batch, fused_lm_head=True, use_cache=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_whose_logits_must_be_stored_has_the_same_loss(tmp_path, kind):
    args = captured(tmp_path / "c", **KINDS[kind], cache_entries=6, temperature=1.5, **STEP)
    trainer = trainer_of(args)
    batch = trainer.data_collator(list(trainer.train_dataset.select(range(7))))
    fused = loss_of_batch(trainer, dict(batch))
    trainer.model.get_output_embeddings().forward = trainer.model.get_output_embeddings().forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        plain = loss_of_batch(trainer, dict(batch))
    for name in ("loss", "log_probs", "entropy", "is_top1", "divergence", "agrees", "teacher_log_probs"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "kind", [{"cache_kind": "sampled", "cache_entries": 32}, {"cache_entries": 2, "cache_tail_draws": 30}], ids=str
)
def test_sampled_entries_estimate_the_kl_they_teach(tmp_path, kind):
    """Per token noisy, over a data set near the truth; a student equal to its teacher has a KL of about 0."""
    data, teacher = completions(40), teacher_model()
    args = captured(tmp_path / "c", data, data, teacher=teacher, **kind)
    live = trainer_of(config(None, teacher="model"), data, data, teacher=teacher)
    truth, got = live.evaluate(), trainer_of(args, data, data).evaluate()
    assert got["eval_forward_kl"] == pytest.approx(truth["eval_forward_kl"], rel=0.1)
    assert got["eval_kd_loss"] > 1.3 * truth["eval_forward_kl"]  # less the sample's own entropy, which is less
    equal = trainer_of(args, data, data, student=teacher_model()).evaluate()
    assert abs(equal["eval_forward_kl"]) < 0.02


def test_rows_in_any_order_and_batch_and_process(tmp_path):
    """Shuffled, twice, in another batch size, by workers of the data loader; a cache of more rows than are used."""
    args = captured(tmp_path / "c", completions(30), cache_entries=4, **STEP)
    some = completions(30).select([4, 9, 4, 17, 29, 2, 8])
    args = config(tmp_path / "c", dataloader_num_workers=2, per_device_train_batch_size=7, **STEP)
    one_step(trainer_of(args, some))
    again = pickle.loads(pickle.dumps(TeacherCache(tmp_path / "c")))
    key = keys_of(args, some)[0]
    assert torch.equal(again.records(key), TeacherCache(tmp_path / "c").records(key))
    assert again.records(b"\0" * 16) is None and key in again and b"\0" * 16 not in again


def test_duplicates_are_captured_once(tmp_path):
    rows = completions(5)
    data = Dataset.from_list([*rows, *rows])
    captured(tmp_path / "c", data, rows)
    assert TeacherCache(tmp_path / "c").index.rows == 5


def test_the_key_of_a_row():
    ids, labels = [5, 6, 7], [-100, 6, 7]
    assert row_key(ids, labels) == row_key(torch.tensor(ids), [5, 6, 7])  # the first is never predicted
    others = [([5, 6, 8], labels), ([6, 6, 7], labels), ([5, 6], [-100, 6]), (ids, [-100, -100, 7])]
    assert row_key(ids, labels) not in {row_key(*other) for other in others}


# Interrupted


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_killed_captures_end_with_the_same_files(tmp_path):
    """By SIGKILL, at random moments and around the calls that make files durable."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "support" / "killed_captures.py"), str(tmp_path), "3", "topk", "sampled"],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("topk", "sampled"):
        assert int(done.stdout.split(f"{kind}: killed ")[1].split()[0]) >= 5
        whole, killed = files_of(tmp_path / kind / "whole"), files_of(tmp_path / kind / "killed")
        assert len(whole) > 4 and whole == killed
        assert len(TeacherCache(tmp_path / kind / "killed", verify=True)) == 24


class Stop(Exception):
    pass


def interrupted(folder, monkeypatch, after=60, **options):
    """A capture that ended after so many tokens, in a later shard than the first."""
    monkeypatch.setattr(cache_capture, "MIB", 512)

    def stop(done, total):
        if done >= after:
            raise Stop

    args = config(folder, cache_shard_mb=1, **{"cache_entries": 8, **options})
    with pytest.raises(Stop):
        capture(teacher_model(), args, tiny_tokenizer(), completions(), progress=stop)
    assert 0 < len(read_index(folder).shards) and not read_index(folder).finished
    return args


CHANGES = {
    "entries": ({"cache_entries": 9}, "settings.entries: 8 there, 9 now"),
    "bits": ({"cache_bits": 16}, "settings.bits: 8 there, 16 now"),
    "draws": ({"cache_tail_draws": 2}, "settings.tail_draws: 0 there, 2 now"),
    "kind": ({"cache_kind": "sampled"}, "settings.kind: topk there, sampled now"),
    "temperature": ({"temperature": 2.0}, "settings.temperature: 1.0 there, 2.0 now"),
    "max_length": ({"max_length": 64}, "settings.max_length: 1024 there, 64 now"),
    "shards": ({"cache_shard_mb": 2}, "settings.shard_mb: 1 there, 2 now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_do_not_go_on_with_a_capture(tmp_path, monkeypatch, change):
    interrupted(tmp_path / "c", monkeypatch)
    options, message = CHANGES[change]
    before = files_of(tmp_path / "c")
    with pytest.raises(ConfigError, match=message):
        captured(tmp_path / "c", **{"cache_entries": 8, "cache_shard_mb": 1, **options})
    assert files_of(tmp_path / "c") == before


def test_another_teacher_or_data_does_not_go_on_with_a_capture(tmp_path, monkeypatch):
    args = interrupted(tmp_path / "c", monkeypatch)
    with pytest.raises(ConfigError, match="fingerprints.data: .* there, .* now"):
        capture(teacher_model(), args, tiny_tokenizer(), completions(23))
    with pytest.raises(ConfigError, match="fingerprints.teacher: .* there, .* now"):
        capture(tiny_model("gemma2", seed=6, hidden_size=48), args, tiny_tokenizer(), completions())
    with pytest.raises(ConfigError, match="not finished: .* tokens. Run the same"):
        trainer_of(args)
    capture(teacher_model(), args, tiny_tokenizer(), completions())
    trainer_of(args)


def test_a_shard_damaged_between_two_captures_is_found(tmp_path, monkeypatch):
    args = interrupted(tmp_path / "c", monkeypatch)
    flip(tmp_path / "c" / "shard-00000.safetensors", -3)
    with pytest.raises(CorruptError, match="shard-00000.safetensors is damaged"):
        capture(teacher_model(), args, tiny_tokenizer(), completions())


def test_two_captures_of_one_directory(tmp_path):
    (tmp_path / "c").mkdir()
    with FileLock(tmp_path / "c" / cache_capture.LOCK), pytest.raises(ConfigError, match="Another capture is writing"):
        captured(tmp_path / "c")
    captured(tmp_path / "c")
    with pytest.raises(ConfigError, match="holds a finished teacher cache"):
        captured(tmp_path / "c")


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\)"):
        captured(tmp_path)
    with pytest.raises(ConfigError, match=r"thesis.tex/c cannot be written to: Not a directory"):
        captured(tmp_path / "thesis.tex" / "c")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache_entries": VOCAB + 1}, "no more than the vocabulary's 64 tokens; got 65"),
        ({"cache_entries": 2000}, "holds 1 to 1024 entries"),
        ({"cache_entries": 60, "cache_tail_draws": 5}, r"the vocabulary's 64 tokens; got 60 \+ 5"),
        ({"teacher": "model", "teacher_cache_dir": None}, "teacher_cache_dir says where"),
    ],
)
def test_a_capture_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        capture(teacher_model(), config(tmp_path / "c", **options), tiny_tokenizer(), completions())


def test_a_teacher_without_some_tokens(tmp_path):
    with pytest.raises(ConfigError, match="The teacher knows 60 tokens, but the student's tokenizer has 64"):
        captured(tmp_path / "c", teacher=tiny_model(vocab_size=60, pad_token_id=1, eos_token_id=2))


def test_padding_of_the_teachers_head_is_cut_off(tmp_path):
    captured(tmp_path / "c", teacher=tiny_model(vocab_size=80), cache_entries=VOCAB, cache_bits=16)
    cache = TeacherCache(tmp_path / "c")
    assert cache.index.settings.vocab_size == VOCAB
    for key in keys_of(config(tmp_path / "c")):
        targets = cache.format.decode(cache.records(key))  # type: ignore[arg-type]
        assert targets.ids.max() < VOCAB
        torch.testing.assert_close(targets.log_probs.exp().sum(-1), torch.ones(len(targets.ids)))


# Damaged


@pytest.fixture(scope="module")
def whole_cache(tmp_path_factory):
    """A cache of several shards, by a teacher from files."""
    folder = tmp_path_factory.mktemp("cache")
    teacher_model().save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    patch = pytest.MonkeyPatch()
    patch.setattr(cache_capture, "MIB", 512)
    captured(folder / "c", teacher=str(folder / "teacher"), cache_entries=8, cache_shard_mb=1)
    patch.undo()
    assert len(read_index(folder / "c").shards) > 3
    return folder


@pytest.fixture
def cache(whole_cache, tmp_path):
    """A copy of it to be damaged."""
    shutil.copytree(whole_cache / "c", tmp_path / "c")
    return tmp_path / "c"


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def end_of(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    printed = capsys.readouterr()
    return int(stopped.value.code or 0), " ".join((printed.out + printed.err).split())


def test_one_flipped_bit_is_found(cache, capsys):
    """Anywhere in a shard, by `verify`, and by a training that asks for it."""
    file, rng = cache / "shard-00001.safetensors", random.Random(0)
    content = file.read_bytes()
    assert end_of(capsys, "cache", "verify", str(cache))[0] == 0
    for place in [0, 8, len(content) - 1, *(rng.randrange(len(content)) for _ in range(20))]:
        flip(file, place, rng.randrange(8))
        with pytest.raises(CorruptError, match="shard-00001.safetensors is damaged"):
            TeacherCache(cache, verify=True)
        file.write_bytes(content)
    flip(file, len(content) // 2)
    code, said = end_of(capsys, "cache", "verify", str(cache))
    assert code == 6 and "shard-00001.safetensors is damaged" in said
    with pytest.raises(CorruptError, match="is damaged"):
        trainer_of(config(cache, verify_teacher_cache=True))


def truncated(cache):
    file = cache / "shard-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def of_another_version(cache):
    content = json.loads((cache / INDEX).read_text())
    content.pop("sha256")
    content["version"] = 2
    (cache / INDEX).write_text(json.dumps({**content, "sha256": teacher_cache._checksum(content)}))


DAMAGES = {
    "truncated": (truncated, "shard-00002.safetensors has .* bytes, and should have"),
    "missing": (lambda cache: (cache / "shard-00003.safetensors").unlink(), "shard-00003.safetensors is missing"),
    "version": (of_another_version, "has version 2 of the format; this liger-trainer reads version 1"),
    "index cut": (lambda cache: (cache / INDEX).write_text((cache / INDEX).read_text()[:200]), "cannot be read"),
    "index changed": (
        lambda cache: (cache / INDEX).write_text((cache / INDEX).read_text().replace('"entries": 8', '"entries": 9')),
        "does not have the checksum",
    ),
    "index of nothing": (lambda cache: (cache / INDEX).write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_exit_code_6(cache, capsys, damage):
    function, message = DAMAGES[damage]
    function(cache)
    with pytest.raises(CorruptError, match=message):
        trainer_of(config(cache, cache_entries=8))  # also when nobody asks
    assert end_of(capsys, "cache", "verify", str(cache))[0] == 6


def test_a_bit_of_the_header_that_nobody_verified(cache):
    """Without `verify`, what cannot be read is still an error of the cache, not a stack trace."""
    flip(cache / "shard-00000.safetensors", 3, 7)
    with pytest.raises(CorruptError, match="shard-00000.safetensors cannot be read"):
        TeacherCache(cache)


def test_info_says_what_is_there(whole_cache, capsys):
    code, said = end_of(capsys, "cache", "info", str(whole_cache / "c"))
    assert code == 0
    for words in ("finished", "the likeliest 8 tokens", "24 with 165 supervised tokens", "19 in a record", "float32"):
        assert words in said, said
    assert "draws" not in said
    with pytest.raises(SystemExit):
        main(["cache", "info", "--json", str(whole_cache / "c")])
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["entries"] == 8 and told["finished"] is True
    assert end_of(capsys, "cache", "info", "nowhere")[0] == 2


# Refused


def other_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w1000"])
    return tokenizer


def other_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<user> ", "<user>  ")
    return tokenizer


def exchanged(data):
    """The same texts, one of them with another mask."""
    rows = list(data)
    first = rows[0]["completion"].split()
    rows[0] = {"prompt": f"{rows[0]['prompt']} {first[0]}", "completion": " " + " ".join(first[1:])}
    return Dataset.from_list(rows)


REFUSALS = {
    "tokenizer": ({}, {"tokenizer": other_tokenizer}, "with another tokenizer"),
    "template": ({}, {"tokenizer": other_template}, "with another chat template"),
    "max_length": ({"max_length": 512}, {}, "with max_length 1024, and this run has 512"),
    "temperature": ({"temperature": 2.0}, {}, "with temperature 1.0, and this run has 2.0"),
    "data": ({}, {"data": lambda: completions(seed=1)}, "from other data: 24 of 24 rows of the train dataset"),
    "one row": (
        {},
        {"data": lambda: Dataset.from_list([*completions(), {"prompt": "w1 w2", "completion": " w3"}])},
        "from other data: 1 of 25 rows of the train dataset are not in it, the first being row 24 with 4 tokens",
    ),
    "mask": ({}, {"data": lambda: exchanged(completions())}, "from other data: 1 of 24 rows"),
    "held-out rows": ({}, {"test": lambda: completions(3, seed=8)}, "3 of 3 rows of the eval dataset"),
    "loss on prompts too": ({"completion_only_loss": False}, {}, "from other data: 24 of 24 rows"),
    "other teacher": ({}, {"teacher": "stranger"}, "from another teacher .*: its weights are not those of .*stranger"),
    "teacher that is nowhere": ({}, {"teacher": "no/such"}, "no/such are not on this machine"),
    "teacher in memory": ({}, {"teacher": teacher_model}, "captured from a model in files, .* one in memory"),
    "collator": ({}, {"data_collator": lambda: list}, "data_collator"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_cache_that_does_not_belong_is_refused_before_the_gpu(whole_cache, monkeypatch, refusal):
    options, given, message = REFUSALS[refusal]
    if refusal == "other teacher":
        stranger = whole_cache / "stranger"
        tiny_model("gemma2", seed=6, hidden_size=48).save_pretrained(stranger)
        given = {"teacher": str(stranger)}
    given = {name: make() if callable(make) else make for name, make in given.items()}
    monkeypatch.setattr("transformers.Trainer.__init__", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        trainer_of(config(whole_cache / "c", **options), **given)


def test_the_teacher_that_was_captured_is_accepted(whole_cache, tmp_path):
    """By its weights, however they lie in files, under whatever name."""
    trainer_of(config(whole_cache / "c"), teacher=str(whole_cache / "teacher"))
    teacher_model().save_pretrained(tmp_path / "copy", max_shard_size="20KB")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    trainer = trainer_of(config(whole_cache / "c", teacher_model_name_or_path=str(tmp_path / "copy")))
    assert trainer.teacher is None


def test_a_teacher_in_memory_is_compared_by_its_state(tmp_path):
    args = captured(tmp_path / "c", teacher=teacher_model())
    trainer_of(args, teacher=teacher_model())
    with pytest.raises(ConfigError, match="from another teacher"):
        trainer_of(args, teacher=tiny_model("gemma2", seed=6, hidden_size=48))
    with pytest.raises(ConfigError, match="captured from a model in memory"):
        trainer_of(args, teacher="some/name")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"teacher_cache_dir": None}, "teacher_cache_dir: missing; `teacher: cache` needs it"),
        ({"beta": 0.5}, "determines the forward KL alone.* asks for jsd"),
        ({"losses": [{"type": "reverse_kl"}]}, "asks for reverse_kl"),
        ({"losses": [{"type": "ce"}]}, "asks for no divergence"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: is not part"),
        ({"cache_kind": "renormalized"}, "cache_kind: expected one of topk, sampled"),
        ({"teacher": "ghost"}, "teacher: expected one of model, cache"),
        ({"cache_bits": 4}, "cache_bits: expected one of 8, 16"),
        (
            {"cache_kind": "sampled", "cache_tail_draws": 4},
            "cache_tail_draws: are of `cache_kind: topk`, beyond its likeliest tokens",
        ),
    ],
)
def test_losses_that_a_cache_does_not_determine(options, message):
    with pytest.raises(ValueError, match=message):
        config("somewhere", **options)


def test_a_student_without_some_tokens(tmp_path):
    args = captured(tmp_path / "c")
    with pytest.raises(ConfigError, match="The student knows 60 tokens, but the tokenizer has 64"):
        trainer_of(args, student=tiny_model(vocab_size=60, pad_token_id=1, eos_token_id=2))


def test_labels_that_are_not_the_rows_own(tmp_path):
    """eval_packing without packing lets a document predict the first token of the next: no target for that."""
    options = {"max_length": 32, "eval_packing": True}
    args = captured(tmp_path / "c", texts(), texts(6, seed=1), **options)
    trainer = trainer_of(args, texts(), texts(6, seed=1))
    with pytest.raises(DataError, match="with eval_packing, use packing too"):
        trainer.evaluate()
    collator = CacheCollator(trainer.data_collator.collator, TeacherCache(tmp_path / "c"))
    with pytest.raises(DataError, match=r"A row of 3 tokens, beginning with \[1, 2, 3\], is not in the teacher cache"):
        collator([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}])
    nothing = collator([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])[RECORDS]
    assert nothing.shape == (1, 3, collator.cache.format.bytes) and not nothing.any()


# Fingerprints


def test_fingerprints_tell_apart_what_matters():
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["w1 w2", "w1"], padding=True, truncation=True, max_length=3)  # changes the state, not the tokenizer
    assert tokenizer_fingerprint(tokenizer) == before != tokenizer_fingerprint(other_tokenizer())
    model = tiny_model()
    before = weights_fingerprint(model)
    assert weights_fingerprint(tiny_model()) == before != weights_fingerprint(tiny_model(seed=1))
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weights_fingerprint(model) != before


def test_files_are_known_in_every_format(tmp_path):
    model = tiny_model("llama_tied")
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    torch.save(model.state_dict(), tmp_path / "b" / "pytorch_model.bin")
    state = {name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}
    (tmp_path / "c").mkdir()
    torch.save(state, tmp_path / "c" / "pytorch_model.bin")
    a, b, c = (files_fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == c != b
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match="No weights were found"):
        files_fingerprint(str(tmp_path / "d"))


# From the command line


RUN = """
recipe: distill
model_name_or_path: student
teacher_model_name_or_path: teacher
teacher: cache
teacher_cache_dir: cache
dataset_name: rows.jsonl
output_dir: out
max_steps: 3
per_device_train_batch_size: 4
learning_rate: 1e-2
gradient_checkpointing: false
save_strategy: no
max_length: 32
holdout_fraction: 0.2
num_sample_completions: 2
max_new_tokens: 4
use_cpu: true
"""


@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_capture_then_train_from_the_command_line(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("student", "teacher")):
        tiny_model(seed=seed).save_pretrained(name)
        tiny_tokenizer().save_pretrained(name)
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2}"} for i in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(RUN)
    settings = [f"cache_kind={kind}", "cache_entries=16"]
    code, said = end_of(capsys, "run", "run.yaml", *settings)
    assert code == 2 and "holds no teacher cache" in said
    assert end_of(capsys, "cache", "run.yaml", *settings)[0] == 0
    shutil.rmtree("teacher")
    code, said = end_of(capsys, "run", "run.yaml", *settings)
    assert code == 2 and "teacher" in said  # named, and not there to be compared
    assert end_of(capsys, "run", "run.yaml", "~teacher_model_name_or_path", *settings)[0] == 0
    result = json.loads(Path("out/metrics.json").read_text())
    assert result["after"]["forward_kl"] < result["before"]["forward_kl"]
    assert "reverse_kl" not in result["after"] and result["completions"][0]["teacher"] is None
