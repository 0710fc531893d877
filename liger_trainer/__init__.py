"""Fused SFT and knowledge distillation for Hugging Face Trainer and TRL.

The names below are imported when first used: `liger_trainer.kernels.*` and the layers and losses on top of them need
only torch and do not wait for TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import MaterializedLogitsWarning
    from .extras.foreign_caches.import_cache import import_cache as import_teacher_cache
    from .extras.generate.options import GenerateOptions
    from .extras.generate.run import generate as generate_dataset
    from .extras.modules.experts import LigerExperts
    from .extras.modules.families import (
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        AutoLigerKernelForCausalLM,
        _apply_liger_kernel,
        _apply_liger_kernel_to_instance,
    )
    from .extras.modules.layers import (
        LigerFusedAddRMSNorm,
        LigerGEGLUMLP,
        LigerLayerNorm,
        LigerPhi3SwiGLUMLP,
        LigerReLUSquared,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )
    from .extras.modules.losses import (
        CrossEntropyOutput,
        LigerCrossEntropyLoss,
        LigerFusedCETVDLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDivergence,
        LigerFusedLinearJSD,
        LigerFusedLinearKLDivLoss,
        LigerJSD,
        LigerKLDIVLoss,
        LigerTVDLoss,
    )
    from .extras.modules.mlps import (
        LigerBlockSparseTop2MLP,
        LigerFalconH1MLP,
        LigerFalconH1SwiGLUMLP,
        LigerMLP,
        LigerQwen3MoeSwiGLUMLP,
        LigerSwiGLUMLPForMuseGlimmer,
        LigerTiledGEGLUMLP,
        LigerTiledSwiGLUMLP,
    )
    from .extras.modules.norms import (
        LigerModulatedRMSNorm,
        LigerRMSNormForMuseGlimmer,
        LigerRMSNormForMuseGlimmerTextCentered,
    )
    from .extras.modules.rope import (
        LigerQKNormRope,
        LigerRope,
        liger_llama4_text_rotary_pos_emb,
        liger_llama4_vision_rotary_pos_emb,
        liger_multimodal_rotary_pos_emb,
        liger_rotary_pos_emb,
    )
    from .patching.patcher import Patched, PatchOptions, patch
    from .patching.use_liger_kernel import disable, enable
    from .trainers.capture import capture as capture_teacher_cache
    from .trainers.config import LigerConfig, LigerDistillConfig
    from .trainers.distill_callback import DistillationCallback
    from .trainers.distill_trainer import LigerDistillTrainer
    from .trainers.sft_trainer import LigerTrainer

__version__ = "0.2.0"

# name: its module, and its name there where that is another
_MODULE_OF = {
    "AutoLigerKernelForCausalLM": "extras.modules.families",
    "CrossEntropyOutput": "extras.modules.losses",
    "DistillationCallback": "trainers.distill_callback",
    "GenerateOptions": "extras.generate.options",
    "LigerBlockSparseTop2MLP": "extras.modules.mlps",
    "LigerConfig": "trainers.config",
    "LigerCrossEntropyLoss": "extras.modules.losses",
    "LigerDistillConfig": "trainers.config",
    "LigerDistillTrainer": "trainers.distill_trainer",
    "LigerExperts": "extras.modules.experts",
    "LigerFalconH1MLP": "extras.modules.mlps",
    "LigerFalconH1SwiGLUMLP": "extras.modules.mlps",
    "LigerFusedAddRMSNorm": "extras.modules.layers",
    "LigerFusedCETVDLoss": "extras.modules.losses",
    "LigerFusedLinearCrossEntropyLoss": "extras.modules.losses",
    "LigerFusedLinearDivergence": "extras.modules.losses",
    "LigerFusedLinearJSD": "extras.modules.losses",
    "LigerFusedLinearKLDivLoss": "extras.modules.losses",
    "LigerGEGLUMLP": "extras.modules.layers",
    "LigerJSD": "extras.modules.losses",
    "LigerKLDIVLoss": "extras.modules.losses",
    "LigerLayerNorm": "extras.modules.layers",
    "LigerMLP": "extras.modules.mlps",
    "LigerModulatedRMSNorm": "extras.modules.norms",
    "LigerPhi3SwiGLUMLP": "extras.modules.layers",
    "LigerQKNormRope": "extras.modules.rope",
    "LigerQwen3MoeSwiGLUMLP": "extras.modules.mlps",
    "LigerRMSNorm": "extras.modules.layers",
    "LigerRMSNormForMuseGlimmer": "extras.modules.norms",
    "LigerRMSNormForMuseGlimmerTextCentered": "extras.modules.norms",
    "LigerReLUSquared": "extras.modules.layers",
    "LigerRope": "extras.modules.rope",
    "LigerSwiGLUMLP": "extras.modules.layers",
    "LigerSwiGLUMLPForMuseGlimmer": "extras.modules.mlps",
    "LigerTVDLoss": "extras.modules.losses",
    "LigerTiledGEGLUMLP": "extras.modules.mlps",
    "LigerTiledSwiGLUMLP": "extras.modules.mlps",
    "LigerTrainer": "trainers.sft_trainer",
    "MODEL_TYPE_TO_APPLY_LIGER_FN": "extras.modules.families",
    "MaterializedLogitsWarning": "errors",
    "PatchOptions": "patching.patcher",
    "Patched": "patching.patcher",
    "_apply_liger_kernel": "extras.modules.families",
    "_apply_liger_kernel_to_instance": "extras.modules.families",
    "capture_teacher_cache": "trainers.capture:capture",
    "disable": "patching.use_liger_kernel",
    "enable": "patching.use_liger_kernel",
    "generate_dataset": "extras.generate.run:generate",
    "import_teacher_cache": "extras.foreign_caches.import_cache:import_cache",
    "liger_llama4_text_rotary_pos_emb": "extras.modules.rope",
    "liger_llama4_vision_rotary_pos_emb": "extras.modules.rope",
    "liger_multimodal_rotary_pos_emb": "extras.modules.rope",
    "liger_rotary_pos_emb": "extras.modules.rope",
    "patch": "patching.patcher",
}
_FAMILY = "apply_liger_kernel_to_"  # followed by a model type; see extras/modules/families.py
_REMOVED = {"map_kernels": "call patch(model), which proves and replaces the same layers and needs no other package"}

__all__ = [
    "AutoLigerKernelForCausalLM",
    "CrossEntropyOutput",
    "DistillationCallback",
    "GenerateOptions",
    "LigerBlockSparseTop2MLP",
    "LigerConfig",
    "LigerCrossEntropyLoss",
    "LigerDistillConfig",
    "LigerDistillTrainer",
    "LigerExperts",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDivergence",
    "LigerFusedLinearJSD",
    "LigerFusedLinearKLDivLoss",
    "LigerGEGLUMLP",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerMLP",
    "LigerModulatedRMSNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQKNormRope",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerReLUSquared",
    "LigerRope",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "LigerTrainer",
    "MODEL_TYPE_TO_APPLY_LIGER_FN",
    "MaterializedLogitsWarning",
    "PatchOptions",
    "Patched",
    "__version__",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    "capture_teacher_cache",
    "disable",
    "enable",
    "generate_dataset",
    "import_teacher_cache",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name.startswith(_FAMILY):
        return getattr(import_module(".extras.modules.families", __name__), name)
    if name in _REMOVED:
        raise AttributeError(f"{__name__}.{name} was removed: {_REMOVED[name]}.")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    module, _, attribute = _MODULE_OF[name].partition(":")
    value = getattr(import_module(f".{module}", __name__), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
