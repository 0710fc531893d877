"""Fused SFT and knowledge distillation for Hugging Face Trainer and TRL.

The names below are imported when first used: `liger_trainer.kernels.*` needs torch alone and does not wait for TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distill_config import LigerDistillConfig
    from .distill_trainer import LigerDistillTrainer
    from .trainer import LigerTrainer

__version__ = "0.1.0"

_MODULE_OF = {
    "LigerDistillConfig": "distill_config",
    "LigerDistillTrainer": "distill_trainer",
    "LigerTrainer": "trainer",
}

__all__ = ["LigerDistillConfig", "LigerDistillTrainer", "LigerTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
