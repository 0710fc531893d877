"""Types of the ops' arguments and helpers for them, which other packages import from here."""

from ._autograd import stats_dtype
from ._linear_head import HostCopy, Lora, RowSelection, gather_rows, scatter_rows, token_count
from ._logits import LogitTransform, transform
from ._low_rank import Adapter, Projection
from ._packed_gate import Gate
from ._ranks import VocabParallel
from ._workspace import SharedUnpack, Workspace

__all__ = [
    "Adapter", "Gate", "HostCopy", "LogitTransform", "Lora", "Projection", "RowSelection", "SharedUnpack",
    "VocabParallel", "Workspace", "gather_rows", "scatter_rows", "stats_dtype", "token_count", "transform",
]  # fmt: skip
