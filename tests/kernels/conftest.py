from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_uninitialized_memory() -> Iterator[None]:
    """torch.empty and its kin return NaN (the largest integer), so what a kernel forgets to write shows.

    PyTorch fills only while deterministic algorithms are on; warn_only, since some CUDA operations have none.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
