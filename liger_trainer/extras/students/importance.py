"""Measure how important each decoder layer, and each unit of each MLP, is on given rows. Nothing is trained.

    importance of a layer = 1 - mean over tokens of cos(hidden state before it, hidden state after it)
    importance of a unit  = mean over tokens of |act(gate) * up|, what enters the down-projection

The first is the block influence of ShortGPT (Men et al. 2024, arXiv:2403.03853): a layer that hardly turns the
hidden state can be left out. The second is how Minitron (Muralidharan et al. 2024, arXiv:2407.14679)
ranks the units of an MLP.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ConfigError, DataError
from ...losses.model_parts import decoder_layers


@dataclass(frozen=True)
class Importance:
    """The measured importance.

    Attributes:
        layers: the block influence of each layer, from 0 (changes no direction) to 2.
        units: for each MLP, (intermediate_size,) fp64, the mean absolute activations.
        tokens: number of tokens in the means, without padding.
    """

    layers: list[float]
    units: list[Tensor]
    tokens: int

    def most_important(self, count: int) -> list[int]:
        """Return the `count` layers with the largest block influence, ascending; earlier layers win ties."""
        ranked = sorted(range(len(self.layers)), key=lambda index: -self.layers[index])
        return sorted(ranked[:count])


class _Sums:
    """Sums over tokens, kept on the device in fp64; `real` marks the tokens of the batch that are not padding."""

    def __init__(self, layers: int, mlps: int, device: torch.device):
        self.real = torch.ones(0, dtype=torch.bool)
        self.cosine = torch.zeros(layers, dtype=torch.float64, device=device)
        self.called = [0] * layers
        self.units: list[Tensor | None] = [None] * mlps

    def of_layer(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
            # families differ in whether they pass it by name
            before = args[0] if args else kwargs.get("hidden_states")
            after = output[0] if isinstance(output, tuple) else output
            if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not self._fits(before, after):
                raise ConfigError(
                    "Importance needs layers that take and return one hidden state of each token; "
                    f"{type(module).__name__} does not. Its layers can be chosen by hand, with drop_layers(keep=...)."
                )
            # in fp32: in bf16 the cosine of two nearly equal states is 1 for most layers
            cosine = F.cosine_similarity(before.float(), after.float(), dim=-1)
            # layers may lie on several devices
            self.cosine[index] += cosine.to(self.real.device)[self.real].sum(dtype=torch.float64)
            self.called[index] += 1

        return hook

    def _fits(self, before: Tensor, after: Tensor) -> bool:
        return before.shape == after.shape and before.shape[:-1] == self.real.shape

    def of_mlp(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple) -> None:
            if args[0].shape[:-1].numel() != self.real.numel():
                raise ConfigError("The MLPs do not see each token once; their units cannot be ranked.")
            active = args[0].flatten(0, -2).to(self.real.device)[self.real.flatten()]
            total, before = active.abs().sum(0, dtype=torch.float64), self.units[index]
            self.units[index] = total if before is None else before + total

        return hook


def measure_importance(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], downs: Sequence[nn.Module] = ()
) -> Importance:
    """Run the batches through `model` and measure its layers, and the units that enter the modules `downs`.

    Args:
        model: a causal LM with one list of decoder layers; it is not changed. Its head is not computed.
        batches: keywords of the model's decoder, such as input_ids and attention_mask, on its device; labels are not
            used. Without an attention mask every token counts.
        downs: down-projections, called once in a forward with (..., intermediate_size).

    Raises:
        ConfigError: no single list of layers, or layers whose hidden states cannot be compared.
        DataError: no batch.
    """
    layers = decoder_layers(model)[1]
    sums, tokens, training = _Sums(len(layers), len(downs), model.device), 0, model.training
    model.eval()
    try:
        with torch.no_grad(), _hooked(layers, downs, sums):
            for batch in batches:
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                mask = inputs.get("attention_mask")
                sums.real = (torch.ones_like(inputs["input_ids"]) if mask is None else mask).bool()
                tokens += int(sums.real.sum())
                # without the head, whose logits nobody needs
                model.base_model(**inputs, use_cache=False)
    finally:
        model.train(training)
    if not tokens:
        raise DataError("There is no token to measure importance on.")
    # a model may call some layers only for images, or share one
    if any(count != max(sums.called) for count in sums.called) or any(units is None for units in sums.units):
        raise ConfigError(f"The layers of {type(model).__name__} are not each called in every forward.")
    units = [(total / tokens).cpu() for total in sums.units if total is not None]
    return Importance((1 - sums.cosine / tokens).tolist(), units, tokens)


@contextmanager
def _hooked(layers: nn.ModuleList, downs: Sequence[nn.Module], sums: _Sums) -> Iterator[None]:
    handles = [m.register_forward_hook(sums.of_layer(i), with_kwargs=True) for i, m in enumerate(layers)]
    handles += [m.register_forward_pre_hook(sums.of_mlp(i)) for i, m in enumerate(downs)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
