"""A capture writes down what the teacher says, once, and goes on where it was interrupted."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import (
    CACHED_RUN,
    STEP,
    captured,
    config,
    end_of,
    files_of,
    flip,
    keys_of,
    logits_by_hand,
    teacher_model,
    trainer_of,
)
from commands import call, done, metrics, refused, save_models, without_report, write_rows
from datasets import Dataset
from filelock import FileLock
from processes import run_on
from tiny import VOCAB, completions, largest_vocabulary_tensor, shift_labels_of, tiny_model, tiny_tokenizer
from trainings import a_teacher, step

from liger_trainer.errors import ConfigError, CorruptError, LigerTrainerError
from liger_trainer.teachers.cache import reader as teacher_reader
from liger_trainer.teachers.cache.records import RecordFormat
from liger_trainer.teachers.cache.store import TeacherCache, read_index
from liger_trainer.teachers.row_keys import documents
from liger_trainer.trainers import capture as cache_capture
from liger_trainer.trainers.capture import capture
from liger_trainer.trainers.row_preparation import prepare_rows

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")


@pytest.mark.parametrize("family, temperature", [("gemma2", 2.0), ("granite", 1.0), ("gpt2", 1.0), ("llama_tied", 2.0)])
def test_topk_is_what_the_teacher_says(tmp_path, monkeypatch, family, temperature):
    """Scales, softcaps and biases of the head, chunks of logits, rows of different lengths in a batch, shards."""
    monkeypatch.setattr(teacher_reader, "_CHUNK_LOGITS", 7 * VOCAB)
    teacher = tiny_model(family, seed=3)
    options = {"cache_entries": 9, "cache_bits": 16, "temperature": temperature, "per_device_eval_batch_size": 5}
    args = captured(tmp_path / "c", completions(13), teacher=teacher, mib=8, **options)
    cache = TeacherCache(tmp_path / "c", verify=True)
    assert len(cache.index.shards) > 2
    rows = prepare_rows(args, tiny_tokenizer(), completions(13))
    seen = 0
    close = {"rtol": 1e-3, "atol": 1e-3}
    for document in documents(rows.datasets["train"]):
        labels = shift_labels_of(torch.from_numpy(document.labels)[None])[0]
        logits = logits_by_hand(teacher, document.input_ids.tolist())[labels != -100]
        records = cache.records(document.key)
        assert records is not None
        got = cache.format.decode(records)
        values, ids = (logits / temperature).log_softmax(-1).topk(9, -1)
        assert torch.equal(got.ids.long(), ids)
        torch.testing.assert_close(got.log_probs.double(), values, **close)
        log_p = logits.log_softmax(-1)
        label = log_p.gather(-1, labels[labels != -100][:, None]).squeeze(-1)
        torch.testing.assert_close(got.label_log_prob.double(), label, **close)
        torch.testing.assert_close(got.entropy.double(), torch.special.entr(log_p.exp()).sum(-1), **close)
        seen += len(records)
    assert seen == cache.index.tokens and len(cache) == cache.index.rows == 13


@pytest.mark.parametrize("likeliest", [0, 5])
def test_draws_are_unbiased(tmp_path, likeliest):
    """count / m is the teacher's probability on average over seeds, the label's and the rare ones' too; beyond the
    likeliest that are known, their mass times that."""
    teacher, data = tiny_model(seed=3), completions(1)
    shares, draws, seeds = 0, 6, 50
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


def test_draws_depend_only_on_the_row_and_the_seed(tmp_path):
    """Not on the batch. That may change the last bits of logits: numbers then move by one step of their code, and a
    draw that lies within a rounding of the border between two tokens, one of thousands, to the other token."""
    whole = captured(tmp_path / "a", cache_kind="sampled", per_device_eval_batch_size=24)
    captured(tmp_path / "b", completions().shuffle(seed=9), cache_kind="sampled", per_device_eval_batch_size=2)
    captured(tmp_path / "c", cache_kind="sampled", seed=7)
    a, b, c = (TeacherCache(tmp_path / name) for name in "abc")
    assert a.index.fingerprints == b.index.fingerprints == c.index.fingerprints
    keys: Any = keys_of(whole)
    assert len(keys) == 24
    moved = changed = 0
    for key in keys:
        one, same, other = (cache.format.decode(cache.records(key)) for cache in (a, b, c))
        drawn_alike = (one.ids == same.ids).all(-1)
        moved += (~drawn_alike).sum()
        changed += (one.ids != other.ids).any(-1).sum()
        for name in ("log_probs", "label_log_prob", "entropy"):
            got, want = (getattr(record, name)[drawn_alike] for record in (one, same))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert moved <= 1 and changed > 100  # of 165 tokens


def test_logits_of_a_batch_are_never_stored_and_info_says_how_many_draws_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(teacher_reader, "_CHUNK_LOGITS", 3 * VOCAB)
    hidden = {"cache_kind": "hidden", "cache_tail_draws": None, **STEP}
    with largest_vocabulary_tensor(monkeypatch, rows=3) as seen:
        captured(tmp_path / "c", cache_entries=4, cache_tail_draws=5)
        step(trainer_of(captured(tmp_path / "hidden", **hidden)))
    assert 0 < seen.rows <= 3
    assert "5 draws" in end_of(capsys, "cache", "info", str(tmp_path / "c"))[1]


def test_a_head_that_is_no_plain_linear_layer(tmp_path):
    """Quantized heads and heads with adapters or hooks are called as they are, chunk by chunk."""

    class Scaled(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    plain, other = tiny_model(seed=3), tiny_model(seed=3)
    head = Scaled(32, VOCAB, bias=False)
    head.load_state_dict({"weight": plain.get_output_embeddings().weight / 2})
    other.set_output_embeddings(head)
    caches = []
    for name, teacher in (("a", plain), ("b", other)):
        args = captured(tmp_path / name, teacher=teacher, cache_entries=8, cache_bits=16)
        caches.append(TeacherCache(tmp_path / name))
    for key in keys_of(args):
        one, same = (cache.format.decode(cache.records(key)).log_probs for cache in caches)
        torch.testing.assert_close(one, same, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind, message", [("topk", "NaN or infinite"), ("hidden", "NaN or infinite in float32")])
def test_a_teacher_of_nan_is_not_written_down(tmp_path, kind, message):
    teacher = teacher_model()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[1:40] = torch.nan
    with pytest.raises(LigerTrainerError, match=message):
        captured(tmp_path / "c", teacher=teacher, cache_kind=kind, cache_tail_draws=None)
    assert not list((tmp_path / "c").glob("shard*"))


@pytest.mark.parametrize(
    "kind, moments", [("topk", 5), *(pytest.param(kind, 15, marks=pytest.mark.slow) for kind in ("sampled", "hidden"))]
)
def test_killed_captures_end_with_the_same_files(tmp_path, kind, moments):
    """By SIGKILL, at random moments and around the calls that make files durable."""
    run_on(1, "killed_captures.py", tmp_path, kind, moments)
    assert int((tmp_path / "times").read_text()) >= moments / 3
    whole, killed = files_of(tmp_path / "whole"), files_of(tmp_path / "killed")
    assert len(whole) > 4 and whole == killed
    assert len(TeacherCache(tmp_path / "killed", verify=True)) == 24


def test_what_was_read_of_a_shard_outlives_ctrl_c(tmp_path, monkeypatch):
    """All fits into one shard; what the interrupted capture read is not read again, and the files are the same."""

    def stop(done, total):
        if done >= total / 2:
            raise KeyboardInterrupt

    def counted(self, keys, rows):
        read.extend(keys)
        return own(self, keys, rows)

    read, own = [], teacher_reader.TeacherReader.read
    monkeypatch.setattr(teacher_reader.TeacherReader, "read", counted)
    args = config(tmp_path / "c")
    with pytest.raises(KeyboardInterrupt):
        capture(teacher_model(), args, tiny_tokenizer(), completions(), progress=stop)
    index = read_index(tmp_path / "c")
    assert not index.shards and len(index.parts) == 1 and index.tokens / 2 <= index.tokens_read < index.tokens
    kept = len(read)
    capture(teacher_model(), args, tiny_tokenizer(), completions())
    assert 0 < kept < len(read) == len(set(read)) == 24
    captured(tmp_path / "whole")
    assert files_of(tmp_path / "c") == files_of(tmp_path / "whole")


def test_what_was_read_is_written_each_minute(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cache_capture.time, "monotonic", lambda: clock[0])
    seen = []

    def look(done, total):
        clock[0] += 25.0
        seen.append((done, read_index(tmp_path / "c").tokens_read))

    capture(teacher_model(), config(tmp_path / "c"), tiny_tokenizer(), completions(), progress=look)
    assert all(kept >= done for (done, _), (_, kept) in zip(seen, seen[3:], strict=False)), seen
    assert len({kept for _, kept in seen}) > 2, seen


def test_what_does_not_go_on_with_an_interrupted_capture(tmp_path, monkeypatch):
    """Other settings, another teacher or data, and any with a damaged shard."""
    monkeypatch.setattr(cache_capture, "MIB", 512)
    settings = {"cache_entries": 8, "cache_shard_mb": 1}
    args = config(tmp_path / "c", **settings)

    def stop(done, total):
        if done >= 60:  # in a later shard than the first
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(teacher_model(), args, tiny_tokenizer(), completions(), progress=stop)
    assert 0 < len(read_index(tmp_path / "c").shards) and not read_index(tmp_path / "c").finished
    before = files_of(tmp_path / "c")
    for name, there, now in (
        ("entries", 8, 9), ("bits", 8, 16), ("tail_draws", 0, 2), ("kind", "topk", "sampled"), ("shard_mb", 1, 2),
        ("temperature", 1.0, 2.0), ("max_length", 1024, 64),
    ):  # fmt: skip
        key = name if name in ("temperature", "max_length") else f"cache_{name}"
        with pytest.raises(ConfigError, match=f"settings.{name}: {there} there, {now} now"):
            captured(tmp_path / "c", **{**settings, key: now})
    for what, teacher, data in (
        ("data", teacher_model(), completions(23)), ("teacher", a_teacher(seed=6), completions()),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"fingerprints.{what}: .* there, .* now"):
            capture(teacher, args, tiny_tokenizer(), data)
    with pytest.raises(ConfigError, match="not finished: .* tokens. Run the same"):
        trainer_of(args)
    assert files_of(tmp_path / "c") == before
    shard = tmp_path / "c" / "shard-00000.safetensors"
    flip(shard, -3)
    with pytest.raises(CorruptError, match="shard-00000.safetensors is damaged"):
        capture(teacher_model(), args, tiny_tokenizer(), completions())
    flip(shard, -3)
    capture(teacher_model(), args, tiny_tokenizer(), completions())
    trainer_of(args)


def test_two_captures_of_one_directory_and_one_of_something_else(tmp_path):
    """Rows that come twice are captured once."""
    (tmp_path / "c").mkdir()
    rows = completions(5)
    with FileLock(tmp_path / "c" / cache_capture.LOCK), pytest.raises(ConfigError, match="Another capture is writing"):
        captured(tmp_path / "c", rows)
    captured(tmp_path / "c", Dataset.from_list([*rows, *rows]), rows)
    assert TeacherCache(tmp_path / "c").index.rows == 5
    (tmp_path / "thesis.tex").write_text("words")
    for folder, said in (
        ("c", "holds a finished teacher cache"), (".", r"holds other files \(.*thesis.tex.*\)"),
        ("thesis.tex/c", r"thesis.tex/c cannot be written to: Not a directory"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            captured(tmp_path / folder, rows)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache_entries": VOCAB + 1}, "no more than the vocabulary's 64 tokens; got 65"),
        ({"cache_entries": 60, "cache_tail_draws": 5}, r"the vocabulary's 64 tokens; got 60 \+ 5"),
        ({"teacher": "model", "teacher_cache_dir": None}, "teacher_cache_dir says where"),
    ],
)
def test_a_capture_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        capture(teacher_model(), config(tmp_path / "c", **options), tiny_tokenizer(), completions())


def test_deepspeed_is_left_out_of_a_capture(tmp_path, monkeypatch):
    args = config(tmp_path / "c")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="Leave deepspeed out, and launch the processes without it"):
        capture(teacher_model(), args, tiny_tokenizer(), completions())


def test_padding_of_the_teachers_head_is_cut_off_and_one_that_is_too_small_refused(tmp_path):
    with pytest.raises(ConfigError, match="The teacher knows 60 tokens, but the student's tokenizer has 64"):
        captured(tmp_path / "c", teacher=tiny_model(vocab_size=60, pad_token_id=1, eos_token_id=2))
    args = captured(tmp_path / "c", teacher=tiny_model(vocab_size=80), cache_entries=VOCAB, cache_bits=16)
    cache: Any = TeacherCache(tmp_path / "c")
    assert cache.index.settings.vocab_size == VOCAB
    for key in keys_of(args):
        targets = cache.format.decode(cache.records(key))
        assert targets.ids.max() < VOCAB
        torch.testing.assert_close(targets.log_probs.exp().sum(-1), torch.ones(len(targets.ids)))


RUN = CACHED_RUN + "teacher_model_name_or_path: teacher\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with student, teacher and rows."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    save_models(tmp_path, "student", "teacher")
    write_rows(Path("rows.jsonl"), [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2}"} for i in range(20)])


def test_capture_then_train_from_the_command_line(folder, capsys):
    Path("run.yaml").write_text(RUN)
    settings = ["cache_kind=sampled", "cache_entries=16"]
    refused(call(capsys, "run", "run.yaml", *settings), 2, "holds no teacher cache")
    done(call(capsys, "cache", "run.yaml", *settings))
    shutil.rmtree("teacher")
    refused(call(capsys, "run", "run.yaml", *settings), 2, "teacher")  # named, and not there to be compared
    done(call(capsys, "run", "run.yaml", "~teacher_model_name_or_path", *settings))
    result = metrics(Path("out"))
    assert result["after"]["forward_kl"] < result["before"]["forward_kl"]
    assert "reverse_kl" not in result["after"] and result["completions"][0]["teacher"] is None


def test_hidden_states_from_the_command_line(folder, capsys):
    """The live run's metrics, of another divergence and temperature, with the teacher's files gone."""
    Path("run.yaml").write_text(RUN + "beta: 0.5\nkd_temperature: 2.0\n")
    hidden = "run.yaml", "cache_kind=hidden"
    refused(call(capsys, "validate", "run.yaml"), 2, "with cache_kind: hidden on all tokens")
    done(call(capsys, "validate", *hidden))
    without_effect = "cache_bits: has no effect with `cache_kind: hidden`"
    refused(call(capsys, "run", *hidden, "cache_bits=8"), 2, without_effect)
    code, said = end_of(capsys, "cache", *hidden, "kd_temperature=1.0")
    assert code == 0 and "128 in a record" in said
    done(call(capsys, "run", "run.yaml", "teacher=model", "~teacher_cache_dir", "output_dir=live"))
    shutil.rmtree("teacher")
    done(call(capsys, "run", *hidden, "~teacher_model_name_or_path"))
    cached, live = metrics(Path("out")), metrics(Path("live"))
    for name in ("forward_kl", "reverse_kl", "loss", "teacher_entropy"):
        assert cached["before"][name] == pytest.approx(live["before"][name], rel=1e-5), name
        assert cached["after"][name] == pytest.approx(live["after"][name], rel=1e-4), name
    code, said = end_of(capsys, "eval", "out")
    assert code == 0 and "everse" in said, said
