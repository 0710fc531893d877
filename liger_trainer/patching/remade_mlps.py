"""Gated MLPs that make gate(x) and up(x) again in the backward instead of keeping them, in some of the decoder layers.

Which of them do is noted on the modules, whose forward (mlps.py) looks for it in each call.
"""

from typing import Any

from torch import nn

from ..common.replacements import Replacements
from ..errors import ConfigError
from ..losses.model_parts import decoder_layers
from .linears import is_weight_and_bias
from .lora import is_lora_mlp
from .mlps import REMADE, RULE
from .options import PatchOptions, PatchReport

KIND = "gate and up made again"


def remake_mlps(
    model: Any, every: int, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:  # fmt: skip
    """Have MLPs make gate(x) and up(x) again in every n-th of the decoder layers that have such an MLP.

    Raises:
        ConfigError: there is none, or the decoder layers are not recognised.
    """
    layers = [mlps for layer in decoder_layers(model)[1] if (mlps := _mlps_of(layer, options.lora))]
    if not layers:
        raise ConfigError(
            f"No MLP of this {type(model).__name__} can make gate and up again. It takes a patched MLP, "
            "down(act(gate(x)) * up(x)), whose layers are plain nn.Linear, or plain LoRA over frozen ones. Set "
            "memory to fast."
        )
    chosen = layers[::every]
    for mlps in chosen:
        for mlp in mlps:
            replacements.set(mlp, REMADE, True)
    report.swap(KIND, len(chosen))


def _mlps_of(layer: nn.Module, lora: bool) -> list[nn.Module]:
    """Return the MLPs in a decoder layer that can, as they are now."""
    ruled = [(module, vars(module).get(RULE)) for module in layer.modules()]
    candidates = [(module, rule.linear_layers(module)) for module, rule in ruled if rule is not None]
    return [
        module
        for module, linears in candidates
        if all(map(is_weight_and_bias, linears)) or (lora and is_lora_mlp(linears))
    ]
