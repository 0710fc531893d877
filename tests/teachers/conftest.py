import pytest
from caches import captured, teacher_model
from tiny import tiny_tokenizer

from liger_trainer.teachers.cache.store import read_index
from liger_trainer.trainers import capture as cache_capture


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
