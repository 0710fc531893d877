"""Averages over tokens, kept on the device until they are logged."""

from collections import defaultdict

import torch
from torch import Tensor


class TokenMetrics:
    """Sums over tokens between two logs. Perplexities are averaged as log-probabilities and exponentiated last."""

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """sums: name to scalar, summed over `tokens` tokens of all ranks."""
        totals = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=tokens.device), self._sums)
        self._sums = {name: totals[name] + value for name, value in sums.items()}
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def flush(self) -> dict[str, float]:
        """Means since the last flush. Waits for the device."""
        if self._tokens is None:
            return {}
        means = torch.stack(list(self._sums.values())) / self._tokens.clamp(min=1)
        means = torch.stack(
            [m.exp() if name.endswith("perplexity") else m for name, m in zip(self._sums, means, strict=True)]
        )
        result = dict(zip(self._sums, means.tolist(), strict=True))
        self._sums, self._tokens = {}, None
        return result
