"""Two collectives, which torch 2.13 renamed; None in builds of torch without them."""

from typing import Any

import torch.distributed as dist

all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
