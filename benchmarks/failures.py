"""What becomes of a provider that raises: one line in the table, and its memory back."""

from __future__ import annotations

import gc

import torch


def explain(error: Exception) -> str:
    """One line for the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ImportError):
        return f"not available: {error}"
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:160] if message else ''}"


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
