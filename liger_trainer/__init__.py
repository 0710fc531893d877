"""Fused SFT and knowledge distillation for Hugging Face Trainer and TRL.

The names below are imported when first used: `liger_trainer.kernels.*` and the layers and losses on top of them need
torch alone and do not wait for TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distill_config import LigerDistillConfig
    from .distill_trainer import LigerDistillTrainer
    from .loss_modules import (
        CrossEntropyOutput,
        LigerCrossEntropyLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDivergence,
        LigerFusedLinearJSD,
        LigerJSD,
        LigerKLDIVLoss,
        LigerTVDLoss,
    )
    from .modules import (
        LigerFusedAddRMSNorm,
        LigerGEGLUMLP,
        LigerLayerNorm,
        LigerPhi3SwiGLUMLP,
        LigerReLUSquared,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )
    from .rope_modules import LigerQKNormRope, LigerRope, liger_multimodal_rotary_pos_emb, liger_rotary_pos_emb
    from .trainer import LigerTrainer

__version__ = "0.1.0"

_MODULE_OF = {
    "CrossEntropyOutput": "loss_modules",
    "LigerCrossEntropyLoss": "loss_modules",
    "LigerDistillConfig": "distill_config",
    "LigerDistillTrainer": "distill_trainer",
    "LigerFusedAddRMSNorm": "modules",
    "LigerFusedLinearCrossEntropyLoss": "loss_modules",
    "LigerFusedLinearDivergence": "loss_modules",
    "LigerFusedLinearJSD": "loss_modules",
    "LigerGEGLUMLP": "modules",
    "LigerJSD": "loss_modules",
    "LigerKLDIVLoss": "loss_modules",
    "LigerLayerNorm": "modules",
    "LigerPhi3SwiGLUMLP": "modules",
    "LigerQKNormRope": "rope_modules",
    "LigerRMSNorm": "modules",
    "LigerReLUSquared": "modules",
    "LigerRope": "rope_modules",
    "LigerSwiGLUMLP": "modules",
    "LigerTVDLoss": "loss_modules",
    "LigerTrainer": "trainer",
    "liger_multimodal_rotary_pos_emb": "rope_modules",
    "liger_rotary_pos_emb": "rope_modules",
}

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerDistillConfig",
    "LigerDistillTrainer",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDivergence",
    "LigerFusedLinearJSD",
    "LigerGEGLUMLP",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQKNormRope",
    "LigerRMSNorm",
    "LigerReLUSquared",
    "LigerRope",
    "LigerSwiGLUMLP",
    "LigerTVDLoss",
    "LigerTrainer",
    "__version__",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
