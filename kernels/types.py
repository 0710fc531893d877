"""Types of the ops' arguments and helpers for them, which other rooms import from here."""

from ._autograd import stats_dtype
from ._head import Lora
from ._labelled_rows import HostCopy, RowSelection, put, take, token_count
from ._logits import LogitTransform, transform
from ._low_rank import Adapter, Projection
from ._packed_gate import Gate
from ._vocab_parallel import VocabParallel

__all__ = [
    "Adapter", "Gate", "HostCopy", "LogitTransform", "Lora", "Projection", "RowSelection", "VocabParallel", "put",
    "stats_dtype", "take", "token_count", "transform",
]  # fmt: skip
