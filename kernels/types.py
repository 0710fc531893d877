"""Types of the ops' arguments and helpers for them, which other rooms import from here."""

from ._autograd import stats_dtype
from ._head import Lora
from ._labelled_rows import HostCopy, RowSelection, put, take, token_count
from ._logits import LogitTransform, transform
from ._low_rank import Adapter, Projection

__all__ = [
    "Adapter", "HostCopy", "LogitTransform", "Lora", "Projection", "RowSelection", "put", "stats_dtype", "take",
    "token_count", "transform",
]  # fmt: skip
