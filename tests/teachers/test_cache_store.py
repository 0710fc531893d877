"""A cache on disk: rows found by their content, damage found and named, fingerprints that tell apart what matters."""

import json
import os
import random
import shutil
import threading

import pytest
import torch
from caches import config, end_of, flip, keys_of, trainer_of
from commands import call
from tiny import tiny_model
from trainings import OnStep

from liger_trainer.common.files import sha256
from liger_trainer.errors import ConfigError, CorruptError
from liger_trainer.teachers.cache import store
from liger_trainer.teachers.cache.store import INDEX, TeacherCache
from liger_trainer.teachers.fingerprints import files_fingerprint
from liger_trainer.teachers.row_keys import row_key


@pytest.fixture
def cache(whole_cache, tmp_path):
    """A copy of it to be damaged."""
    shutil.copytree(whole_cache / "c", tmp_path / "c")
    return tmp_path / "c"


def test_the_key_of_a_row():
    ids, labels = [5, 6, 7], [-100, 6, 7]
    assert row_key(ids, labels) == row_key(torch.tensor(ids), [5, 6, 7])  # the first is never predicted
    others = [([5, 6, 8], labels), ([6, 6, 7], labels), ([5, 6], [-100, 6]), (ids, [-100, -100, 7])]
    assert row_key(ids, labels) not in {row_key(*other) for other in others}


def test_one_flipped_bit_is_found(cache, capsys):
    """Anywhere in a shard, by `verify`, and by a training that asks for it."""
    file, rng = cache / "shard-00001.safetensors", random.Random(0)
    content = file.read_bytes()
    assert end_of(capsys, "cache", "verify", str(cache))[0] == 0
    for place in [0, 8, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))]:
        flip(file, place, rng.randrange(8))
        with pytest.raises(CorruptError, match="shard-00001.safetensors is damaged"):
            TeacherCache(cache, verify=True)
        file.write_bytes(content)
    flip(file, len(content) // 2)
    code, said = end_of(capsys, "cache", "verify", str(cache))
    assert code == 6 and "shard-00001.safetensors is damaged" in said
    with pytest.raises(CorruptError, match="is damaged"):
        trainer_of(config(cache, verify_teacher_cache=True))


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_checkpoints_and_the_end_wait_for_the_check(cache, tmp_path, monkeypatch, saves):
    """The thread that compares is held up until two steps are taken; nothing waits for it before."""
    stepped, compare = threading.Event(), store.sha256
    monkeypatch.setattr(
        store, "sha256", lambda part: compare(part) if isinstance(part, bytes) or stepped.wait(20) else ""
    )
    file, out = cache / "shard-00002.safetensors", tmp_path / "out"
    flip(file, file.stat().st_size - 40, 5)  # in its records
    options = {"output_dir": str(out), "max_steps": 2, "save_strategy": saves, "save_steps": 2}
    trainer = trainer_of(config(cache, cache_entries=8, **options))
    trainer.add_callback(OnStep(lambda: trainer.state.global_step == 2 and stepped.set()))
    with pytest.raises(CorruptError, match=r"shard-00002.safetensors is damaged: .* then start the same run again"):
        trainer.train()
    assert stepped.is_set() and trainer.state.global_step == 2
    assert not list(out.glob("checkpoint-*"))


def rewritten(change):
    """Change the content of the index and give it the checksum of the new one."""

    def rewrite(cache):
        content = json.loads((cache / INDEX).read_text())
        del content["sha256"]
        change(content)
        checksum = sha256(json.dumps(content, sort_keys=True).encode())
        (cache / INDEX).write_text(json.dumps({**content, "sha256": checksum}))

    return rewrite


def edited(name, change):
    return lambda cache: (cache / name).write_bytes(change((cache / name).read_bytes()))


DAMAGES = {
    "truncated": (edited("shard-00002.safetensors", lambda x: x[:-1]), "shard-00002.safetensors has .* bytes, and sho"),
    "missing": (lambda cache: (cache / "shard-00003.safetensors").unlink(), "shard-00003.safetensors is missing"),
    "path": (
        rewritten(lambda content: content["shards"][0].update(name="../x/shard-00000.safetensors")),
        r"(?s)is not an index of a teacher cache: .*shards.0.name",
    ),
    "version": (
        rewritten(lambda content: content.update(version=2)),
        "has version 2 of the format; this liger-trainer reads version 1",
    ),
    "index cut": (edited(INDEX, lambda x: x[:200]), "cannot be read"),
    "index changed": (edited(INDEX, lambda x: x.replace(b'"entries": 8', b'"entries": 9')), "does not have the checks"),
    "index of nothing": (edited(INDEX, lambda _: b"[]"), "cannot be read"),
    # what cannot be read is an error of the cache, not a stack trace, where nobody verifies it
    "a bit of a header": (
        lambda cache: flip(cache / "shard-00000.safetensors", 3, 7),
        "shard-00000.safetensors cannot",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_exit_code_6(cache, capsys, damage):
    function, message = DAMAGES[damage]
    function(cache)
    with pytest.raises(CorruptError, match=message):
        trainer_of(config(cache, cache_entries=8))  # also when nobody asks
    assert end_of(capsys, "cache", "verify", str(cache))[0] == 6


def test_a_cache_from_before_there_were_draws_from_the_rest(cache):
    rewritten(lambda content: content["settings"].pop("tail_draws"))(cache)
    assert TeacherCache(cache, verify=True).format.tail == "bucket"


def test_info_says_what_is_there(whole_cache, capsys):
    code, said = end_of(capsys, "cache", "info", str(whole_cache / "c"))
    assert code == 0
    for words in ("finished", "the likeliest 8 tokens", "24 with 165 supervised tokens", "19 in a record", "float32"):
        assert words in said, said
    assert "draws" not in said
    code, out, _ = call(capsys, "cache", "info", "--json", str(whole_cache / "c"))
    told = json.loads(out)
    assert code == 0 and told["settings"]["entries"] == 8 and told["finished"] is True
    assert end_of(capsys, "cache", "info", "nowhere")[0] == 2


def test_files_are_known_in_every_format(tmp_path):
    model = tiny_model("llama_tied")
    state = model.state_dict()
    tied = {name: x for name, x in state.items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "a")
    for name, weights in (("b", state), ("c", tied)):
        (tmp_path / name).mkdir()
        torch.save(weights, tmp_path / name / "pytorch_model.bin")
    a, b, c = (files_fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == c != b
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match="No weights were found"):
        files_fingerprint(str(tmp_path / "d"))


def replaced(file):
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


CHANGES = {
    "in place": lambda file: flip(file, file.stat().st_size - 40, 5),
    "replaced": lambda file: (replaced(file), flip(file, file.stat().st_size - 40, 5)),
    "emptied": lambda file: file.write_bytes(b""), "removed": lambda file: file.unlink(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verified", [True, False])
def test_a_shard_that_changes_after_it_was_compared_ends_the_training(cache, tmp_path, change, verified):
    """Changed after the first step, by when all are compared; also by a copy that has the old time of change."""
    file, out = cache / "shard-00002.safetensors", tmp_path / "out"
    options = {"output_dir": str(out), "max_steps": 6, "save_strategy": "steps", "save_steps": 6}
    trainer = trainer_of(config(cache, cache_entries=8, verify_teacher_cache=verified, **options))

    def alter():
        if trainer.state.global_step == 1:
            trainer.teaching.settle()
            times = file.stat().st_atime_ns, file.stat().st_mtime_ns
            CHANGES[change](file)
            if file.exists():
                os.utime(file, ns=times)

    trainer.add_callback(OnStep(alter))
    with pytest.raises(CorruptError, match="shard-00002.safetensors"):
        trainer.train()
    assert not list(out.glob("checkpoint-*"))


def test_a_shard_that_is_touched_or_copied_is_read_on(cache):
    """What is there is compared again, so a copy of the same content does no harm."""
    read, keys = TeacherCache(cache), keys_of(config(cache))
    before = [read.records(key) for key in keys]
    for file in cache.glob("shard-*"):
        os.utime(file)
        shutil.copy(file, cache / "copy")
        (cache / "copy").replace(file)
    assert all(torch.equal(record, read.records(key)) for record, key in zip(before, keys, strict=True))
