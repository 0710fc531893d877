"""Launch constants so small that inputs of a few numbers take several blocks, tiles and programs.

The one place that knows the kernels' own names. A name that no module has is an error, so that a constant which moves
or is renamed cannot silently leave the tests with single blocks.
"""

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import liger_trainer

FOLDER = Path(liger_trainer.__file__).parent / "kernels"
# (module, name): value. The module counts where several have a constant of that name.
CONSTANTS: dict[tuple[str, str], Any] = {
    ("_divergence_kernels", "VECTOR_BYTES"): 8, ("_sparse_rows", "BLOCK"): 16,
    ("_unfused_divergence", "GIVEN_BLOCK"): 16, ("_unfused_divergence", "LOGITS_BLOCK"): 16,
    ("_gated", "FORWARD"): (16, 1), ("_gated", "BACKWARD"): (16, 1), ("_packed_gate", "BLOCK"): 8,
    ("lora_experts", "ROWS"): 16, ("lora_experts", "COLUMNS"): 16, ("lora_experts", "COMBINED"): 4,
    ("rope", "TILE"): 128, ("qk_norm_rope", "FORWARD_TILE"): 256, ("qk_norm_rope", "BACKWARD_TILE"): 128,
    ("qk_norm_rope", "PROGRAMS"): 1, ("_dropout", "FORWARD_TILE"): 512,
    ("causal_conv", "TILE"): (8, 16, 1),
    ("_lora_gated", "FORWARD"): (16, 16, 4, 1, 6), ("_lora_gated", "BACKWARD"): (16, 16, 4, 1, 6),
    ("document_attention", "PROGRAMS"): 5, ("document_attention", "SINKS_BLOCK"): 32,
    ("_norm", "SUM_ROWS"): 2, ("_norm", "SUM_COLUMNS"): 16,
    ("layer_norm", "TORCH_NUMBERS"): -1,  # torch's own layer_norm takes none
    ("adamw", "CHUNK"): 16, ("gradient_norm", "CHUNK"): 32, ("gradient_norm", "BLOCK"): 16,
}  # fmt: skip


def _norm_tile(columns: int) -> tuple[int, int, int]:
    return 1 << max(columns - 1, 0).bit_length(), 2, 1


def _attention_tiles(module: ModuleType, kind: str) -> Any:
    """Queries' blocks differ from keys'."""
    return module.Tiles(*((16, 32) if kind in ("dkdv", "dk", "dv") else (32, 16)), 4, 2)


# name of a function that chooses a tile: from the module that has it, its replacement
FUNCTIONS = {
    "forward_config": lambda module: _norm_tile,
    "backward_config": lambda module: lambda columns, *_: (*_norm_tile(columns), 1, 2),
    "tiles_of": lambda module: lambda kind, *_: _attention_tiles(module, kind),
    "_tiling": lambda module: lambda *_: module.Tiling(rows=32, columns=16, warps=4, programs=6),
}


@functools.cache
def kernel_modules() -> dict[str, ModuleType]:
    """Import all files of kernels/; return them by name."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    return {name: importlib.import_module(f"liger_trainer.kernels.{name}") for name in names}


def home(module: str, name: str) -> ModuleType:
    """Return the module that has a constant: the named one, or else the only one that has it."""
    modules = kernel_modules()
    if hasattr(modules.get(module), name):
        return modules[module]
    found = [each for each in modules.values() if name in vars(each)]
    assert len(found) == 1, f"{name} of kernels/{module}.py is in {len(found)} others: see tests/support/small_blocks"
    return found[0]


def set_blocks(patch: Any, logits: int = 16) -> None:
    """Set every constant to its small value; `logits`: columns of a block of the losses' row kernels."""
    rows = {("_cross_entropy_rows", "BLOCK"): logits, ("_cross_entropy_rows", "TILE_BLOCK"): logits,
            ("_divergence_kernels", "LANES"): max(2, logits // 2)}  # fmt: skip
    for (module, name), value in (CONSTANTS | rows).items():
        patch.setattr(home(module, name), name, value)
    for name, make in FUNCTIONS.items():
        holders = [module for module in kernel_modules().values() if hasattr(module, name)]
        assert holders, f"no file of kernels/ has {name}: see tests/support/small_blocks"
        for module in holders:
            patch.setattr(module, name, make(module))
