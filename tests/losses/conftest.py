from collections.abc import Iterator

import pytest
from datasets import arrow_dataset, fingerprint


@pytest.fixture(scope="module", autouse=True)
def fingerprints_by_chance() -> Iterator[None]:
    """Each step of a dataset hashes the trainer that its function refers to, for a cache that no test here reads."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrow_dataset, fingerprint):
            patch.setattr(module, "update_fingerprint", lambda *_, **__: fingerprint.generate_random_fingerprint())
        yield
