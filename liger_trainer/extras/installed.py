"""`liger-trainer env`: the installed versions, the GPU, and what is missing for which purpose."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import __version__
from ..run.launch import device_facts

NEEDED = (
    "torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "typer", "rich", "PyYAML",
    "jinja2", "matplotlib",
)  # fmt: skip
OPTIONAL = {
    "triton": "the kernels on a GPU; comes with CUDA builds of torch",
    "bitsandbytes": "load_in_4bit, load_in_8bit and the 8-bit optimizers",
    "deepspeed": "deepspeed: and the zero configurations of accelerate",
    "fla-core": "gated delta rules (Qwen3.5, Qwen3-Next) at speed, and packed; `pip install fla-core einops`",
    "flash-attn": "attn_implementation: flash_attention_2",
    "kernels": "attn_implementation: kernels-community/...",
    "liger-kernel": "LinkedIn's kernels; ours do not need it",
    "tensorboard": "report_to: tensorboard",
    "trackio": "report_to: trackio",
    "wandb": "report_to: wandb",
}


def facts_of() -> dict[str, Any]:
    return {
        "liger-trainer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "needed": {name: _version(name) for name in NEEDED},
        "optional": {name: _version(name) for name in OPTIONAL},
        "device": device_facts(),
        "launched": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_facts(facts: dict[str, Any]) -> None:
    device = facts["device"]
    table = Table(show_header=False, box=None)
    for name in ("liger-trainer", "python", "platform", "executable"):
        table.add_row(name, facts[name])
    for index, gpu in enumerate(device["gpus"]):
        table.add_row(f"GPU {index}", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute {gpu['compute_capability']}")
    if not device["gpus"]:
        table.add_row("GPU", f"none that torch sees (CUDA of this torch: {device['cuda'] or 'none'})")
    table.add_row("bf16 on a GPU", "yes" if device["bf16"] else "no")
    table.add_row("CPU threads", str(device["cpu_threads"]))
    table.add_row("kernels run by", device["kernels"])
    for name, number in facts["needed"].items():
        table.add_row(name, number or "[red]missing[/red]")
    for name, number in facts["optional"].items():
        table.add_row(name, number or f"not installed; for {OPTIONAL[name]}")
    for name, value in facts["launched"].items():
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)
