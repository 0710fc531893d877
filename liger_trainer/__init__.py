"""Fused SFT and knowledge distillation for Hugging Face Trainer and TRL.

The names below are imported when first used: `liger_trainer.kernels.*` and the layers and losses on top of them need
torch alone and do not wait for TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto_model import AutoLigerKernelForCausalLM
    from .distill_callback import DistillationCallback
    from .distill_config import LigerDistillConfig
    from .distill_trainer import LigerDistillTrainer
    from .families import _apply_liger_kernel_to_instance
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
    from .patching import Patched, PatchOptions, patch
    from .rope_modules import LigerQKNormRope, LigerRope, liger_multimodal_rotary_pos_emb, liger_rotary_pos_emb
    from .stock_flag import disable, enable
    from .trainer import LigerTrainer

__version__ = "0.1.0"

_MODULE_OF = {
    "AutoLigerKernelForCausalLM": "auto_model",
    "CrossEntropyOutput": "loss_modules",
    "DistillationCallback": "distill_callback",
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
    "PatchOptions": "patching",
    "Patched": "patching",
    "_apply_liger_kernel_to_instance": "families",
    "disable": "stock_flag",
    "enable": "stock_flag",
    "liger_multimodal_rotary_pos_emb": "rope_modules",
    "liger_rotary_pos_emb": "rope_modules",
    "patch": "patching",
}
_FAMILY = "apply_liger_kernel_to_"  # followed by a model type; see families.py

__all__ = [
    "AutoLigerKernelForCausalLM",
    "CrossEntropyOutput",
    "DistillationCallback",
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
    "PatchOptions",
    "Patched",
    "__version__",
    "_apply_liger_kernel_to_instance",
    "disable",
    "enable",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name.startswith(_FAMILY):
        return getattr(import_module(".families", __name__), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
