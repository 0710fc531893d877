"""GPUs by name, with the memory that a process can allocate on them."""

import difflib
import re
from dataclasses import dataclass

from ...errors import ConfigError

CONTEXT_MIB = 700  # CUDA's context and loaded kernels, which torch does not allocate
FRAGMENTED = 0.03  # share of the reserved memory that is lost between blocks in use


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory as torch reports it, and whether its tensor cores have bf16."""

    name: str
    mib: int
    bf16: bool = True

    @property
    def usable_mib(self) -> int:
        return int((self.mib - CONTEXT_MIB) * (1 - FRAGMENTED))


GPUS = (
    Gpu("B200 180GB", 182642),
    Gpu("H200 141GB", 143156),
    Gpu("H100 80GB", 81090),
    Gpu("A100 80GB", 81154),
    Gpu("A100 40GB", 40337),
    Gpu("MI300X 192GB", 196288),
    Gpu("L40S 48GB", 45470),
    Gpu("L40 48GB", 45470),
    Gpu("A40 48GB", 45400),
    Gpu("RTX A6000 48GB", 48530),
    Gpu("RTX PRO 6000 96GB", 97250),
    Gpu("RTX 6000 Ada 48GB", 48530),
    Gpu("RTX 5090 32GB", 32080),
    Gpu("RTX 4090 24GB", 24080),
    Gpu("RTX 3090 24GB", 24110),
    Gpu("RTX 4080 16GB", 15950),
    Gpu("RTX 4060 Ti 16GB", 15950),
    Gpu("RTX 3060 12GB", 11910),
    Gpu("A10G 24GB", 22580),
    Gpu("L4 24GB", 22570),
    Gpu("V100 32GB", 32490, bf16=False),
    Gpu("V100 16GB", 16140, bf16=False),
    Gpu("T4 16GB", 14910, bf16=False),
)


def gpu_named(name: str) -> Gpu:
    """Return the GPU with all words of `name`: "H100", "4090" or "a100 40gb"; or one of a size, "24GB".

    Raises:
        ConfigError: no GPU has them, or several GPUs of different memory.
    """
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\s*", name, re.I)
    if size:
        return Gpu(f"{size[1]} GB", int(float(size[1]) * 1024))
    words = re.sub(r"(\d)\s+(gb|gib)\b", r"\1\2", name.lower()).replace("gib", "gb").split()
    matches = [gpu for gpu in GPUS if all(word in gpu.name.lower().split() for word in words)] if words else []
    if not matches:
        close = difflib.get_close_matches(name, [gpu.name for gpu in GPUS], 3, 0.4)
        hint = f"Did you mean {', '.join(close)}? " if close else ""
        raise ConfigError(
            f"--gpu: no GPU is called {name!r}. {hint}There are {', '.join(gpu.name for gpu in GPUS)}, or give its "
            "memory: --gpu 24GB."
        )
    if len({gpu.mib for gpu in matches}) > 1:
        raise ConfigError(f"--gpu: {name!r} may be {', '.join(gpu.name for gpu in matches)}: say which.")
    return matches[0]


def present_gpu() -> Gpu | None:
    """Return the first GPU that torch sees; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(
        properties.name, properties.total_memory // 2**20, torch.cuda.is_bf16_supported(including_emulation=False)
    )
