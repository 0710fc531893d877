"""What measuring the fused losses gives: a result for each provider on each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .cases import Case, Inputs
from .measure import Memory, Roofline, Spread, forward_backward
from .providers import LossFunction, Provider
from .reference import Errors


@dataclass
class Result:
    """One provider on one case. `failure` says why there are no times, or is empty."""

    provider: Provider
    failure: str = ""
    errors: Errors | None = None
    beyond_bound: list[str] = field(default_factory=list)
    memory: Memory | None = None
    ms: Spread | None = None
    ratio: Spread | None = None  # to the first of ours, paired by round
    loss_of: LossFunction | None = None

    def step(self, case: Case, x: Inputs) -> Callable[[], object]:
        assert self.loss_of is not None
        return partial(forward_backward, case, self.loss_of, x)


@dataclass
class CaseResult:
    """One case: accuracy bound, GEMM floor, a result for each provider; `not_run` says why there is none."""

    case: Case
    bound: Errors | None = None
    floor_ms: float = 0.0
    results: list[Result] = field(default_factory=list)
    not_run: str = ""

    def set_floor(self, roofline: Roofline) -> None:
        self.floor_ms = roofline.floor_ms(self.case)

    @property
    def violations(self) -> list[str]:
        """Why the gate refuses: ours failed, or was further from the truth than allowed."""
        return [
            f"{self.case.name}: {result.provider.name}: {reason}"
            for result in self.results
            if result.provider.ours
            for reason in ([result.failure] if result.failure else result.beyond_bound)
        ]
