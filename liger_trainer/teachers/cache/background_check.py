"""Compare the shards of a cache with their checksums while a training already reads them."""

import threading
from pathlib import Path

from ...errors import CorruptError
from .store import CacheIndex, check_shards


class BackgroundCheck:
    """Reads every shard in a thread, which waits for nobody and holds nobody up: hashing runs outside of Python."""

    def __init__(self, path: Path, index: CacheIndex):
        self._damage: CorruptError | None = None
        self._thread = threading.Thread(target=self._read, args=(path, index), name="teacher cache check", daemon=True)
        self._thread.start()

    def _read(self, path: Path, index: CacheIndex) -> None:
        try:
            for _ in check_shards(path, index, contents=True):
                pass
        except (CorruptError, OSError) as error:
            self._damage = CorruptError(
                f"{error} Training stopped before a checkpoint was saved with what it read there. Restore the file, or "
                "capture the cache again, then start the same run again."
            )

    def raise_if_damaged(self) -> None:
        """Raise CorruptError if damage has been found so far."""
        if self._damage is not None:
            raise self._damage

    def wait(self) -> None:
        """Return when every shard is compared. Raise CorruptError if one is damaged."""
        self._thread.join()
        self.raise_if_damaged()
