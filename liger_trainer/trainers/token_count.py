"""The tokens that a training has seen, carried through its checkpoints: TRL's counter begins anew with each process."""

from typing import Any

from transformers import TrainerCallback, TrainerState

NAME = "LigerTrainer"  # among the states in trainer_state.json


def tokens_before(state: TrainerState) -> int:
    """Tokens up to where `state` stands, at the begin of a training or as read from a checkpoint. A checkpoint without
    the count, such as SFTTrainer's, knows those up to its last log."""
    states: Any = state.stateful_callbacks
    stored = states.get(NAME)
    if stored is not None:
        return stored["num_tokens"]
    logged = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
    return int(logged[-1]) if logged else 0


def remember_tokens(state: TrainerState, tokens: int) -> None:
    """For a checkpoint of this state."""
    states: Any = state.stateful_callbacks
    states.setdefault(NAME, {})["num_tokens"] = tokens


class TokenCount(TrainerCallback):
    """Has a trainer's `num_tokens` begin where its training does: at 0, or at what the checkpoint had."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._trainer.begin_counting(tokens_before(state))
