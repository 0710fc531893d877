"""Averages over tokens, kept on the device until they are logged, and the count of tokens through checkpoints."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from ..common.checkpoints import TRAINER_STATE
from ..losses.teacher_answer import TokenLossOutput


class TokenMetrics:
    """Sums over tokens between two logs. Perplexities are averaged as log-probabilities and exponentiated last.

    `x/share` is the share of tokens of a kind x. The other `x/...` are then means over the tokens of that kind, and are
    left out where there were none.
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """Add scalars by name, summed over `tokens` tokens of all ranks, or of this rank if `flush` adds ranks up."""
        totals = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=tokens.device), self._sums)
        self._sums = {name: totals[name] + value for name, value in sums.items()}
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def flush(self, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Return the means since the last flush. Waits for the device. `over_ranks` adds up the sums of ranks."""
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
    """Turn means over all tokens into means over the tokens of each kind that has a share."""
    shares = {name.removesuffix("share"): share for name, share in means.items() if name.endswith("/share")}
    result = {}
    for name, mean in means.items():
        share = 1.0 if name.endswith("/share") else shares.get(f"{name.rpartition('/')[0]}/", 1.0)
        if share:
            result[name] = mean / share
    return result


def tokens_before(state: TrainerState) -> int:
    """Return the tokens trained until `state`. A checkpoint without the count, such as SFTTrainer's, has those of its
    last log."""
    states: Any = state.stateful_callbacks
    stored = states.get(TRAINER_STATE)
    if stored is not None:
        return stored["num_tokens"]
    logged = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
    return int(logged[-1]) if logged else 0


def remember_tokens(state: TrainerState, tokens: int) -> None:
    """Put the count into a state that a checkpoint saves."""
    states: Any = state.stateful_callbacks
    states.setdefault(TRAINER_STATE, {})["num_tokens"] = tokens


class TokenCount(TrainerCallback):
    """Starts a trainer's `num_tokens` at 0, or at the checkpoint's count. TRL's starts at 0 in each process."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._trainer.start_counting(tokens_before(state))


def per_token_values(outputs: TokenLossOutput) -> dict[str, Tensor]:
    """Return what distillation averages over tokens and logs, without what the teacher does not determine."""
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
        **(outputs.parts or {}),
    }
    return {name: value for name, value in values.items() if value is not None}


def count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


def num_tokens(inputs: dict[str, Any]) -> Tensor:
    """Count the tokens of the micro-batch without padding. Padding-free batches carry no attention mask."""
    if "attention_mask" in inputs:
        return count(inputs["attention_mask"])
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), dtype=torch.float64, device=ids.device)  # torch.tensor would wait for the device
