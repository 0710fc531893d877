import pytest
from caches import captured, teacher_model
from tiny import tiny_tokenizer

from liger_trainer.teachers.cache.store import read_index


@pytest.fixture(scope="module")
def whole_cache(tmp_path_factory):
    """A cache of several shards, by a teacher from files."""
    folder = tmp_path_factory.mktemp("cache")
    teacher_model().save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    captured(folder / "c", teacher=str(folder / "teacher"), mib=512, cache_entries=8, cache_shard_mb=1)
    assert len(read_index(folder / "c").shards) > 3
    return folder
