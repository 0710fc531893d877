"""What is said of a step that is not finite: its rows, the weights, and the checkpoint to go on from.

All ranks call these functions together, and get the same words.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..common.checkpoints import set_aside
from ..common.console import is_main_process
from ..errors import NonFiniteError
from .finite_weights import advice, not_finite, trained
from .row_search import Batch, listed, rows_in


@dataclass
class FiniteReport:
    """Knows what is trained, and on what."""

    args: Any
    model: Any
    optimizer: Any
    dataset: Any

    def weights(self) -> dict[str, Tensor]:
        return trained(self.model, self.optimizer)

    def rows(self, batches: Sequence[Batch], chosen: Tensor) -> str:
        """Return the rows of the chosen micro-batches of all ranks in a sentence.

        Args:
            batches: the micro-batches of this rank.
            chosen: (ranks, micro-batches) bool.
        """
        mine = chosen[self.args.process_index].tolist()
        batches = [batch for batch, is_chosen in zip(batches, mine, strict=False) if is_chosen]
        words = gather_object([word for batch in batches for word in rows_in(batch, self.dataset)])
        return f"Rows of the training dataset, as the trainer holds it: {listed(words)}." if words else ""

    def failure(
        self, where: str, wrong: list[str], step: int, rows: str = "", unseen: Path | None = None, left_out: int = 0
    ) -> NonFiniteError:
        """Return the error that stops the training, which also says what to go on from.

        Args:
            where: the step, and the ranks.
            wrong: what is not finite.
            step: checkpoints before it are looked at.
            rows: a sentence about the rows, or "".
            unseen: a checkpoint that was saved before the state was checked; it loses its name.
            left_out: steps in a row that were left out, if these are too many.
        """
        names = list(dict.fromkeys(gather_object(not_finite(self.weights()))))
        if names and "weights" not in wrong:
            wrong = [*wrong, "weights"]
        lines = [
            self._set_aside(unseen),
            advice(Path(str(self.args.output_dir)), step) if is_main_process() else "",
        ]
        broadcast_object_list(lines)
        saved, how_to_go_on = lines
        sentences = [
            f"{where} {are(wrong)} not finite.",
            f"{left_out} steps in a row were left out." if left_out else "",
            f"Training stopped, and {saved}.",
            rows,
            f"Weights: {listed(names)}." if names else "The weights are finite still.",
            "A smaller learning_rate, warmup_steps or max_grad_norm may help, or bf16 instead of fp16; "
            "on_non_finite='skip_step' leaves such steps out.",
            how_to_go_on,
        ]
        return NonFiniteError(" ".join(filter(None, sentences)))

    def _set_aside(self, unseen: Path | None) -> str:
        """Take its name from an unseen checkpoint, where this process writes; return what was saved."""
        if unseen is None or not self.args.should_save or not unseen.is_dir():
            return "nothing was saved since"
        return f"{unseen.name}, saved before its state was checked, was renamed to {set_aside(unseen).name}"


def warn(message: str) -> None:
    """Warn once, not on every rank."""
    if is_main_process():
        warnings.warn(message, stacklevel=2)


def are(names: list[str]) -> str:
    """Return names with articles and their verb: "the loss and the gradient norm are"."""
    *first, last = [name if name.startswith("the ") else f"the {name}" for name in names]
    plural = bool(first) or last.endswith("s")
    return f"{', '.join(first)} and {last} are" if first else f"{last} {'are' if plural else 'is'}"
