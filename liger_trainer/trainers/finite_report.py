"""What is said of a step that is not finite: its rows, the weights, and the checkpoint to go on from.

All ranks call these functions together, and get the same words.
"""

import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..common.checkpoints import checkpoints_in, set_aside, step_of
from ..common.console import is_main_process
from ..common.files import CONFIG, STATE
from ..compat import deepspeed
from ..compat.deepspeed import share_of
from ..errors import NonFiniteError
from .rows import values_of

KEPT = ("input_ids", "attention_mask", "position_ids")  # of a micro-batch
SHOWN = 8  # rows named in a message, and first tokens of a row that is not found
SHARDED = ("pytorch_model_fsdp_*", "global_step*")  # folders whose weights a single process does not read

Batch = dict[str, Tensor]


@dataclass
class FiniteReport:
    """Knows what is trained, and on what."""

    args: Any
    model: Any
    optimizer: Any
    dataset: Any

    def weights(self) -> dict[str, Tensor]:
        """Return by name the weights that training changes, those that only the optimizer knows included."""
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        there = {id(p) for p in weights.values()}
        groups = getattr(self.optimizer, "param_groups", None) or []
        others = [p for group in groups for p in group["params"] if id(p) not in there]
        return weights | {f"weight {i} besides the model's": p for i, p in enumerate(others)}

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
        parts = {name: _local(weight) for name, weight in self.weights().items()}
        bad = [name for name, part in parts.items() if _is_checked(part) and not bool(torch.isfinite(part).all())]
        names = list(dict.fromkeys(gather_object(bad)))
        if names and "weights" not in wrong:
            wrong = [*wrong, "weights"]
        saved = "nothing was saved since"
        if unseen is not None and self.args.should_save and unseen.is_dir():
            saved = f"{unseen.name}, saved before its state was checked, was renamed to {set_aside(unseen).name}"
        run_dir = Path(str(self.args.output_dir))
        lines = [saved, finite_checkpoint_hint(run_dir, step) if is_main_process() else ""]
        broadcast_object_list(lines)
        saved, how_to_go_on = lines
        sentences = [
            f"{where} {subject_and_verb(wrong)} not finite.",
            f"{left_out} steps in a row were left out." if left_out else "",
            f"Training stopped, and {saved}.",
            rows,
            f"Weights: {listed(names)}." if names else "The weights are finite still.",
            "A smaller learning_rate, warmup_steps or max_grad_norm may help, or bf16 instead of fp16; "
            "on_non_finite='skip_step' leaves such steps out.",
            how_to_go_on,
        ]
        return NonFiniteError(" ".join(filter(None, sentences)))


def warn(message: str) -> None:
    """Warn once, not on every rank."""
    if is_main_process():
        warnings.warn(message, stacklevel=2)


def subject_and_verb(names: list[str]) -> str:
    """Return names with articles and their verb: "the loss and the gradient norm are"."""
    *first, last = [name if name.startswith("the ") else f"the {name}" for name in names]
    plural = bool(first) or last.endswith("s")
    return f"{', '.join(first)} and {last} are" if first else f"{last} {'are' if plural else 'is'}"


# The rows of a micro-batch are found by their tokens, and only when somebody has to be told. So it needs no bookkeeping
# in the steps before, and does not depend on samplers, workers, epochs and resumes.


def rows_in(batch: Batch, dataset: Any) -> list[str]:
    """Return the rows of a micro-batch in words: their indices in `dataset`, else their first token ids.

    Waits for the device and reads the whole column `input_ids` of the dataset.
    """
    words: list[str] = []
    for sequence, starts in _sequences(batch):
        found = [str(index) for index in sorted(_indices(sequence, starts, dataset))]
        words += found or [f"one that begins with the token ids {' '.join(map(str, sequence[:SHOWN].tolist()))}"]
    return list(dict.fromkeys(words))


def listed(words: list[str]) -> str:
    """Return the first of many rows in one line."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def _sequences(batch: Batch) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield the tokens of each sequence without padding, and where rows may start in it."""
    if "input_ids" not in batch:
        return
    ids = batch["input_ids"].cpu().numpy()
    mask, positions = (batch[name].cpu().numpy() if name in batch else None for name in KEPT[1:])
    for i, row in enumerate(ids):
        if mask is not None and mask.shape == ids.shape:
            yield row[mask[i] != 0], [0]
        elif positions is not None and positions.shape == ids.shape:  # rows behind one another
            yield row, np.flatnonzero(positions[i] == 0).tolist()
        else:
            yield row, [0]


def _indices(sequence: np.ndarray, starts: list[int], dataset: Any) -> Iterator[int]:
    """Yield the indices of rows whose tokens stand in the sequence from one of the starts on."""
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    ahead, first = np.concatenate([[0], np.cumsum(sequence, dtype=np.int64)]), 0
    for values, offsets in values_of(dataset, "input_ids"):
        lengths, totals = np.diff(offsets), np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[offsets])
        for start in starts:
            ends = np.minimum(start + lengths, len(sequence))
            same_sum = (ahead[ends] - ahead[start] == totals) & (start + lengths <= len(sequence)) & (lengths > 0)
            for row in np.flatnonzero(same_sum):
                tokens = values[offsets[row] : offsets[row + 1]]
                if np.array_equal(tokens, sequence[start : start + len(tokens)]):
                    yield first + int(row)
        first += len(lengths)


# Whether weights are finite: those of a model, of an optimizer's state, and in the files of checkpoints.


def abs_max(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute entry of all tensors of this process; NaN if one of them has a NaN. Does not wait."""
    parts = [part for tensor in tensors if (part := _local(tensor)).numel() and _is_checked(part)]
    if not parts:
        return torch.zeros((), device=device)
    return get_total_norm(parts, norm_type=float("inf")).detach().to(device, torch.float32)


def moments(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def norm_of_gradients(model: Any, optimizer: Any, device: torch.device) -> Tensor | float | None:
    """Return a norm of a step's gradients for a callback, which is not shown the trainer's: the largest entry.

    DeepSpeed has taken the gradients by then, and its optimizer has left their norm.
    """
    if isinstance(optimizer, DeepSpeedOptimizerWrapper):
        return deepspeed.norm_of_gradients(optimizer.optimizer)
    return abs_max((p.grad for p in model.parameters() if p.grad is not None), device)


def _local(tensor: Any) -> Tensor:
    tensor = share_of(tensor).detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_checked(tensor: Tensor) -> bool:
    """Whether entries can be compared: those of quantized weights cannot, and offloaded ones are not there."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not tensor.is_meta


def finite_checkpoint_hint(run_dir: Path, step: int) -> str:
    """Say which is the newest checkpoint before `step` that is finite, and what resumes from it. Reads its weights."""
    unread = []
    for checkpoint in reversed([path for path in checkpoints_in(run_dir) if step_of(path) < step]):
        finite = is_finite(checkpoint)
        if finite is None:
            unread.append(checkpoint.name)
        elif finite:
            how = f"trainer.train(resume_from_checkpoint={str(checkpoint)!r})"
            if (run_dir / CONFIG).is_file():
                how = f"liger-trainer {shlex.join(['resume', str(run_dir), '--checkpoint', checkpoint.name])}"
            return f"The newest checkpoint with finite weights is {checkpoint}. To go on from it: {how}"
    if unread:
        return f"{unread[0]} is the newest checkpoint before; its weights are sharded and were not read."
    return f"No checkpoint with finite weights is in {run_dir}."


def is_finite(checkpoint: Path) -> bool | None:
    """Return whether a checkpoint can be resumed from and all weights in it are finite; None if they are sharded."""
    if not (checkpoint / STATE).is_file():
        return False
    files = sorted([*checkpoint.glob("*.safetensors"), *checkpoint.glob("*model*.bin")])
    if not files:
        return None if any(next(checkpoint.glob(name), None) for name in SHARDED) else False
    try:
        return all(bool(torch.isfinite(tensor).all()) for file in files for tensor in _tensors(file))
    except (SafetensorError, OSError, RuntimeError, ValueError):  # cut off
        return False


def _tensors(file: Path) -> Iterator[Tensor]:
    if file.suffix == ".bin":
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True).values()
        yield from (tensor for tensor in tensors if isinstance(tensor, Tensor) and _is_checked(tensor))
        return
    with safe_open(file, "pt") as opened:
        for name in opened.keys():
            tensor = opened.get_tensor(name)
            if _is_checked(tensor):
                yield tensor
