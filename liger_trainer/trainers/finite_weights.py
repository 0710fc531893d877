"""Whether weights are finite: those of a model, of an optimizer's state, and in the files of checkpoints."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..common.checkpoints import checkpoints_in, step_of
from ..common.files import CONFIG, STATE
from ..common.zero3 import share_of

SHARDED = ("pytorch_model_fsdp_*", "global_step*")  # folders whose weights a single process does not read


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute entry of all tensors of this process; NaN if one of them has a NaN. Does not wait."""
    parts = [part for tensor in tensors if (part := _local(tensor)).numel() and _is_checked(part)]
    if not parts:
        return torch.zeros((), device=device)
    return get_total_norm(parts, norm_type=float("inf")).detach().to(device, torch.float32)


def trained(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return by name the weights that training changes, those that only the optimizer knows included."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    there = {id(p) for p in weights.values()}
    others = [p for group in _groups(optimizer) for p in group["params"] if id(p) not in there]
    return weights | {f"weight {i} beside the model's": p for i, p in enumerate(others)}


def moments(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def norm_of_gradients(model: Any, optimizer: Any, device: torch.device) -> Tensor | float | None:
    """Return a norm of a step's gradients for a callback, which is not shown the trainer's: the largest entry.

    DeepSpeed has taken the gradients by then, and its optimizer has left their norm.
    """
    if isinstance(optimizer, DeepSpeedOptimizerWrapper):
        return getattr(optimizer.optimizer, "_global_grad_norm", None)
    return largest((p.grad for p in model.parameters() if p.grad is not None), device)


def not_finite(weights: dict[str, Tensor]) -> list[str]:
    """Return the names of weights of this process with an entry that is not finite. Waits for the device."""
    parts = {name: _local(weight) for name, weight in weights.items()}
    return [name for name, part in parts.items() if _is_checked(part) and not bool(torch.isfinite(part).all())]


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return getattr(optimizer, "param_groups", None) or []


def _local(tensor: Any) -> Tensor:
    tensor = share_of(tensor).detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_checked(tensor: Tensor) -> bool:
    """Whether entries can be compared: those of quantized weights cannot, and offloaded ones are not there."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not tensor.is_meta


def advice(run_dir: Path, step: int) -> str:
    """Say which is the newest checkpoint before `step` that is finite, and what resumes from it. Reads its weights."""
    unread = []
    for checkpoint in reversed([path for path in checkpoints_in(run_dir) if step_of(path) < step]):
        finite = is_finite(checkpoint)
        if finite is None:
            unread.append(checkpoint.name)
        elif finite:
            return f"The newest checkpoint with finite weights is {checkpoint}. To go on from it: {_resume(checkpoint)}"
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


def _resume(checkpoint: Path) -> str:
    run_dir = checkpoint.parent
    if (run_dir / CONFIG).is_file():
        return f"liger-trainer {shlex.join(['resume', str(run_dir), '--checkpoint', checkpoint.name])}"
    return f"trainer.train(resume_from_checkpoint={str(checkpoint)!r})"
