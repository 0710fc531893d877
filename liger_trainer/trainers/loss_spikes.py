"""Losses that are far above those of the steps before, by a robust z-score."""

import statistics
from collections import deque

WINDOW, LEAST = 100, 20  # steps that a loss is compared with, and how many of them there must be
LIMIT = 8.0  # a z-score beyond it is a spike
TO_DEVIATION = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation
LEAST_SPREAD = 0.02  # of the median: losses that barely move are not spikes of one another


class LossSpikes:
    """The losses of the latest steps. Median and median absolute deviation are hardly moved by spikes among them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: float) -> tuple[float, float] | None:
        """Add the finite loss of a step. Return its z-score and the median of the steps before, if it is a spike."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < LEAST:
            return None
        median = statistics.median(before)
        spread = TO_DEVIATION * statistics.median(abs(x - median) for x in before)
        score = (loss - median) / max(spread, LEAST_SPREAD * abs(median), 1e-6)
        return (score, median) if score > LIMIT else None
