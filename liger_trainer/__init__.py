"""Fused SFT and knowledge distillation for Hugging Face Trainer and TRL.

The names below are imported when first used: `liger_trainer.kernels.*` and the layers and losses on top of them need
torch alone and do not wait for TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import MaterializedLogitsWarning
    from .modules.layers import (
        LigerFusedAddRMSNorm,
        LigerGEGLUMLP,
        LigerLayerNorm,
        LigerPhi3SwiGLUMLP,
        LigerReLUSquared,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )
    from .modules.losses import (
        CrossEntropyOutput,
        LigerCrossEntropyLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDivergence,
        LigerFusedLinearJSD,
        LigerJSD,
        LigerKLDIVLoss,
        LigerTVDLoss,
    )
    from .modules.rope import LigerQKNormRope, LigerRope, liger_multimodal_rotary_pos_emb, liger_rotary_pos_emb
    from .patching.auto_model import AutoLigerKernelForCausalLM
    from .patching.families import _apply_liger_kernel_to_instance
    from .patching.hf_kernels import map_kernels
    from .patching.patcher import Patched, PatchOptions, patch
    from .patching.use_liger_kernel import disable, enable
    from .trainers.capture import capture as capture_teacher_cache
    from .trainers.distill_callback import DistillationCallback
    from .trainers.distill_config import LigerDistillConfig
    from .trainers.distill_trainer import LigerDistillTrainer
    from .trainers.sft_config import LigerConfig
    from .trainers.sft_trainer import LigerTrainer

__version__ = "0.1.0"

# name: its module, and its name there where that is another
_MODULE_OF = {
    "AutoLigerKernelForCausalLM": "patching.auto_model",
    "CrossEntropyOutput": "modules.losses",
    "DistillationCallback": "trainers.distill_callback",
    "LigerConfig": "trainers.sft_config",
    "LigerCrossEntropyLoss": "modules.losses",
    "LigerDistillConfig": "trainers.distill_config",
    "LigerDistillTrainer": "trainers.distill_trainer",
    "LigerFusedAddRMSNorm": "modules.layers",
    "LigerFusedLinearCrossEntropyLoss": "modules.losses",
    "LigerFusedLinearDivergence": "modules.losses",
    "LigerFusedLinearJSD": "modules.losses",
    "LigerGEGLUMLP": "modules.layers",
    "LigerJSD": "modules.losses",
    "LigerKLDIVLoss": "modules.losses",
    "LigerLayerNorm": "modules.layers",
    "LigerPhi3SwiGLUMLP": "modules.layers",
    "LigerQKNormRope": "modules.rope",
    "LigerRMSNorm": "modules.layers",
    "LigerReLUSquared": "modules.layers",
    "LigerRope": "modules.rope",
    "LigerSwiGLUMLP": "modules.layers",
    "LigerTVDLoss": "modules.losses",
    "LigerTrainer": "trainers.sft_trainer",
    "MaterializedLogitsWarning": "errors",
    "PatchOptions": "patching.patcher",
    "Patched": "patching.patcher",
    "_apply_liger_kernel_to_instance": "patching.families",
    "capture_teacher_cache": "trainers.capture:capture",
    "disable": "patching.use_liger_kernel",
    "enable": "patching.use_liger_kernel",
    "liger_multimodal_rotary_pos_emb": "modules.rope",
    "liger_rotary_pos_emb": "modules.rope",
    "map_kernels": "patching.hf_kernels",
    "patch": "patching.patcher",
}
_FAMILY = "apply_liger_kernel_to_"  # followed by a model type; see patching/families.py

__all__ = [
    "AutoLigerKernelForCausalLM",
    "CrossEntropyOutput",
    "DistillationCallback",
    "LigerConfig",
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
    "MaterializedLogitsWarning",
    "PatchOptions",
    "Patched",
    "__version__",
    "_apply_liger_kernel_to_instance",
    "capture_teacher_cache",
    "disable",
    "enable",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "map_kernels",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name.startswith(_FAMILY):
        return getattr(import_module(".patching.families", __name__), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    module, _, attribute = _MODULE_OF[name].partition(":")
    value = getattr(import_module(f".{module}", __name__), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
