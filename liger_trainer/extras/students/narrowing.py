"""Make MLPs narrower: the units that are kept compute what they computed in the teacher.

The MLPs are found as `patch` finds them: by structure, proved on a miniature (patching/layers/mlps.py). So gate, up and
down may have any names, packed or apart, and an MLP that computes anything else is refused.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...compat.models import new_model
from ...errors import ConfigError
from ...losses.model_parts import decoder_layers
from ...patching import structure
from ...patching.layers.linears import is_plain
from ...patching.layers.mlps import MLPRule, looks_like_an_mlp, prove_mlp
from .drop_layers import fill


@dataclass(frozen=True)
class LayerMLP:
    """The MLP of a decoder layer: its path in the model, the module, and how its linear layers work together."""

    path: str
    module: nn.Module
    rule: MLPRule

    @property
    def down(self) -> nn.Module:
        return getattr(self.module, self.rule.down)

    def narrowed(self, state: dict[str, Tensor], units: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries of a state dict that change, cut to the kept units."""
        inner = state[f"{self.path}.{self.rule.down}.weight"].shape[1]
        # a packed first layer holds gate and up one below the other
        rows = torch.cat([units, inner + units]) if self.rule.layout in ("gate first", "up first") else units
        for name in self.rule.first:
            for key in (f"{self.path}.{name}.weight", f"{self.path}.{name}.bias"):
                if key in state:
                    yield key, state[key][rows.to(state[key].device)].clone()
        weight = state[f"{self.path}.{self.rule.down}.weight"]
        # its bias, one number an output, stays as it is
        yield f"{self.path}.{self.rule.down}.weight", weight[:, units.to(weight.device)].clone()


def layer_mlps(model: PreTrainedModel) -> list[LayerMLP]:
    """Return the MLP of each decoder layer, all of width `config.intermediate_size`.

    Raises:
        ConfigError: a layer without exactly one such MLP (experts, Conv1D, another activation), or a configuration
            without a single width.
    """
    # families with a width for each layer have a list here
    width = getattr(model.config.get_text_config(decoder=True), "intermediate_size", None)
    if not isinstance(width, int):
        raise ConfigError(
            f"The MLPs of {type(model).__name__} cannot be narrowed: its configuration has no single "
            "intermediate_size. Leave student_intermediate_size out."
        )
    path, layers = decoder_layers(model)
    prove = structure.once_for_equal_layers(prove_mlp)
    return [_mlp_of(layer, f"{path}.{index}", width, prove) for index, layer in enumerate(layers)]


def _mlp_of(layer: nn.Module, path: str, width: int, prove: Callable[[nn.Module], MLPRule | str | None]) -> LayerMLP:
    candidates, reasons = [], []
    for name, module in layer.named_modules():
        if not looks_like_an_mlp(module):
            continue
        rule = prove(module)
        if isinstance(rule, str):
            reasons.append(f"{type(module).__name__}: {rule}")
        # rows and columns of a quantised or adapted layer cannot be cut out
        elif rule is not None and all(is_plain(linear) for linear in rule.linear_layers(module)):
            candidates.append(LayerMLP(f"{path}.{name}", module, rule))
    if len(candidates) == 1 and getattr(candidates[0].down, "in_features", None) == width:
        return candidates[0]
    what = (
        "; ".join(reasons) or ", ".join(f"{mlp.path} of width {mlp.down.in_features}" for mlp in candidates) or "none"
    )
    raise ConfigError(
        f"The MLPs cannot be narrowed: expected one of width {width} (intermediate_size) in {path}, found {what}. "
        "Leave student_intermediate_size out."
    )


def narrow_mlps(model: PreTrainedModel, units: Sequence[Tensor]) -> PreTrainedModel:
    """Return a new model with only some units of each MLP: rows of gate and up, columns of down.

    Other weights are shared with `model`, which is meant to be thrown away.

    Args:
        model: a causal LM with plain weights.
        units: for each layer, the units to keep: (n,) int64, ascending, the same n for all.

    Raises:
        ConfigError: MLPs that cannot be narrowed, or a configuration that cannot describe the result.
    """
    mlps = layer_mlps(model)
    sizes = {len(kept) for kept in units}
    if len(units) != len(mlps) or len(sizes) != 1:
        raise ConfigError(f"units must have the same number for each of {len(mlps)} layers, got {len(units)}: {sizes}.")
    config = copy.deepcopy(model.config)
    config.get_text_config(decoder=True).intermediate_size = sizes.pop()
    state = model.state_dict()
    for mlp, kept in zip(mlps, units, strict=True):
        state.update(mlp.narrowed(state, kept))
    try:
        with torch.device("meta"):
            # on the meta device: no memory for weights that `fill` replaces
            student = new_model(type(model), config, dtype=model.dtype)
        fill(student, state, dict(model.named_buffers(remove_duplicate=False)))
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ConfigError(
            f"The configuration of {type(model).__name__} cannot describe narrower MLPs: {error}"
        ) from error
    student.generation_config = copy.deepcopy(model.generation_config)
    return student.train(model.training)
