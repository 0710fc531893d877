"""Averages over tokens, kept on the device until they are logged, and the count of tokens through checkpoints."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from ..losses.token_output import TokenLossOutput

TRAINER_STATE = "LigerTrainer"  # among the states in trainer_state.json


class TokenMetrics:
    """Sums over tokens between two logs. Perplexities are averaged as log-probabilities and exponentiated last.

    Where there is `x/share`, 1 for tokens of a kind and 0 for others, the other `x/...` are means over the tokens of
    that kind, and left out where there were none.
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """sums: name to scalar, summed over `tokens` tokens; of all ranks, unless `flush` adds them up."""
        totals = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=tokens.device), self._sums)
        self._sums = {name: totals[name] + value for name, value in sums.items()}
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def flush(self, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Means since the last flush. Waits for the device. `over_ranks` adds up what was added on each rank."""
        if self._tokens is None:
            return {}
        *sums, tokens = over_ranks(torch.stack([*self._sums.values(), self._tokens])).unbind()
        means = torch.stack(sums) / tokens.clamp(min=1)
        means = torch.stack(
            [m.exp() if name.endswith("perplexity") else m for name, m in zip(self._sums, means, strict=True)]
        )
        result = dict(zip(self._sums, means.tolist(), strict=True))
        self._sums, self._tokens = {}, None
        return _of_kinds(result)


def _of_kinds(means: dict[str, float]) -> dict[str, float]:
    """Means over all tokens as means over those of each kind, where there is a share of it."""
    shares = {name.removesuffix("share"): share for name, share in means.items() if name.endswith("/share")}
    result = {}
    for name, mean in means.items():
        share = 1.0 if name.endswith("/share") else shares.get(f"{name.rpartition('/')[0]}/", 1.0)
        if share:
            result[name] = mean / share
    return result


def tokens_before(state: TrainerState) -> int:
    """Tokens up to where `state` stands, at the begin of a training or as read from a checkpoint. A checkpoint without
    the count, such as SFTTrainer's, knows those up to its last log."""
    states: Any = state.stateful_callbacks
    stored = states.get(TRAINER_STATE)
    if stored is not None:
        return stored["num_tokens"]
    logged = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
    return int(logged[-1]) if logged else 0


def remember_tokens(state: TrainerState, tokens: int) -> None:
    """For a checkpoint of this state."""
    states: Any = state.stateful_callbacks
    states.setdefault(TRAINER_STATE, {})["num_tokens"] = tokens


class TokenCount(TrainerCallback):
    """Has a trainer's `num_tokens` begin where its training does: at 0, or at what the checkpoint had."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._trainer.begin_counting(tokens_before(state))


def per_token_values(outputs: TokenLossOutput) -> dict[str, Tensor]:
    """What distillation logs, to be averaged over tokens; without what the teacher does not determine."""
    values = {
        "kd_loss": outputs.divergence,
        "ce_loss": -outputs.log_probs,
        "forward_kl": outputs.forward_kl,
        "reverse_kl": outputs.reverse_kl,
        "agreement_at_1": outputs.agrees,
        "student_perplexity": -outputs.log_probs,
        "teacher_perplexity": None if outputs.teacher_log_probs is None else -outputs.teacher_log_probs,
        "teacher_entropy": outputs.teacher_entropy,
        "jsd": outputs.jsd,
        **{f"loss/{name}": value for name, value in (outputs.terms or {}).items()},
        **(outputs.by_teacher or {}),
    }
    return {name: value for name, value in values.items() if value is not None}
