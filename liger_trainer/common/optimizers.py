"""Optimizers of transformers with an extra rule. Imports no torch."""

from typing import Any

# They change weights while gradients are still being computed.
UPDATING_IN_BACKWARD = (
    "lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
    "apollo_adamw_layerwise",
)  # fmt: skip


def updating_in_backward(args: Any) -> str | None:
    """Return the name of the optimizer of TrainingArguments if it updates weights in its backward."""
    optim = str(getattr(args.optim, "value", args.optim))
    return optim if optim in UPDATING_IN_BACKWARD else None
