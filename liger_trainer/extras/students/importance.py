"""Measure how important each decoder layer, and each unit of each MLP, is on given rows. Nothing is trained.

    importance of a layer = 1 - mean over tokens of cos(hidden state before it, hidden state after it)
    importance of a unit  = mean over tokens of |act(gate) * up|, what enters the down-projection

The first is the block influence of ShortGPT (Men et al. 2024, arXiv:2403.03853): a layer that hardly turns the
hidden state can be left out. The second is how Minitron (Muralidharan et al. 2024, arXiv:2407.14679)
ranks the units of an MLP. `eliminate_layers` leaves out one layer after the other instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...common.replacements import Replacements
from ...errors import ConfigError, DataError
from ...kernels.linear_divergence import linear_divergence
from ...losses.deferred_logits import DeferredLogits
from ...losses.model_parts import decoder_layers
from ...losses.spec import IGNORE_INDEX, BatchTargets
from ...teachers.base import teacher_logits


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
    with _hooks(handles):
        yield


# Leave out decoder layers one after the other, each time the one without which the model stays closest to itself.
#
#     distance of a set of layers = mean over supervised tokens of KL(the whole model || the model without them)
#
# After each layer all that are left are tried again, since what a layer adds depends on the others: two layers may do
# the same work, so that either can go and not both. This is the greedy elimination of SLEB (Song et al. 2024,
# arXiv:2402.09025), which compares perplexities. The divergence from the model itself is what a distillation goes on to
# minimise.


@dataclass(frozen=True)
class LeftOut:
    """A layer, and the forward KL of the model without it and those left out before, in nats a supervised token."""

    layer: int
    forward_kl: float


def eliminate_layers(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    count: int,
    report: Callable[[LeftOut], None] = lambda left_out: None,
) -> list[LeftOut]:
    """Return `count` layers in the order in which they are left out; of equals the earlier goes first.

    For each layer that is left out, each of the others costs half a forward on average: what lies below a layer is
    computed once. Of one batch at a time, the hidden states that enter each layer are kept.

    Args:
        model: a causal LM with one list of decoder layers, which each return their hidden state. It is not changed.
        batches: keywords of the model with labels, on its device.
        count: from 1 to one less than the number of layers.
        report: is called with each layer as soon as it is chosen.

    Raises:
        ConfigError: no single list of layers, layers that return something else, a head that is no linear map.
        DataError: no supervised token.
    """
    layers, batches, training = decoder_layers(model)[1], list(batches), model.training
    model.eval()
    try:
        with torch.no_grad(), _only_hidden_states(layers):
            measured = _Distance(model, layers, batches)
        left_out: list[LeftOut] = []
        while len(left_out) < count:
            with torch.no_grad():
                distances = measured.without_one_more([one.layer for one in left_out])
            # of equals the first: dictionaries keep the layers' order
            nearest = min(distances, key=lambda index: distances[index])
            left_out.append(LeftOut(nearest, distances[nearest]))
            report(left_out[-1])
    finally:
        model.train(training)
    return left_out


class _Distance:
    """The forward KL between the whole model and what is left of it."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, batches: list[Mapping[str, Any]]):
        self._model, self._layers = model, layers
        self._inputs = [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
        # num_items 1: sums over tokens, which are divided once all batches are in
        self._targets = [BatchTargets.of(batch["labels"], None, 1.0) for batch in batches]
        self._tokens = sum(int((targets.labels != IGNORE_INDEX).sum()) for targets in self._targets)
        if not self._tokens:
            raise DataError("There is no supervised token to measure layers on.")
        # deferred logits: hidden states and the head, not (tokens, vocabulary) numbers for each batch
        self._whole = [self._logits(inputs) for inputs in self._inputs]

    def _logits(self, inputs: Mapping[str, Any]) -> DeferredLogits:
        logits = teacher_logits(self._model, self._model, **inputs, use_cache=False)
        if not isinstance(logits, DeferredLogits):
            raise ConfigError(
                f"The head of {type(self._model).__name__} is no linear map of its hidden states, so models without a "
                "layer cannot be compared with it. Choose layers by block_influence, or name them in keep_layers."
            )
        return logits

    def without_one_more(self, gone: list[int]) -> dict[int, float]:
        """Return, for each layer that is not gone, the distance of the model without it as well."""
        totals = {index: 0.0 for index in range(len(self._layers)) if index not in gone}
        for inputs, targets, whole in zip(self._inputs, self._targets, self._whole, strict=True):
            # one forward without the layers that are gone; what enters each layer is what trying it without that layer
            # starts from
            with _passing_on(self._layers, gone), _entering(self._layers) as entering:
                self._logits(inputs)
            for index in totals:
                # The layers below are skipped, and this one hands on what entered it: only those above compute.
                with _passing_on(self._layers, [*range(index), *gone]), _giving(self._layers[index], entering[index]):
                    ours, theirs = self._logits(inputs).operands(), whole.operands("teacher_")
                    kl = linear_divergence(**ours, **theirs, kind="forward_kl", **targets.for_ops())
                # this waits for the device, once for a layer and batch
                totals[index] += kl.loss.item() / self._tokens
        return totals


@contextmanager
def _only_hidden_states(layers: nn.ModuleList) -> Iterator[None]:
    """Refuse layers that return more than one hidden state: it is not known what they would pass on when left out."""

    def check(module: nn.Module, args: tuple, output: Any) -> None:
        if not isinstance(output, Tensor) or not args or args[0].shape != output.shape:
            raise ConfigError(
                f"{type(module).__name__} does not take one hidden state of each token and return another, so it "
                "cannot be left out to try. Choose layers by block_influence, or name them in keep_layers."
            )

    with _hooks([layer.register_forward_hook(check) for layer in layers]):
        yield


@contextmanager
def _entering(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Yield a list that fills with the hidden state that enters each layer."""
    states: list[Tensor] = []
    with _hooks([layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]):
        yield states


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _passing_on(layers: nn.ModuleList, indices: list[int]) -> Iterator[None]:
    """Have these layers return what enters them."""
    replaced = Replacements()
    try:
        for index in indices:
            replaced.forward(layers[index], lambda layer, hidden, *args, **kwargs: hidden)
        yield
    finally:
        replaced.undo()


@contextmanager
def _giving(layer: nn.Module, state: Tensor) -> Iterator[None]:
    """Have a layer return `state`, whatever enters it."""
    replaced = Replacements()
    try:
        replaced.forward(layer, lambda *args, **kwargs: state)
        yield
    finally:
        replaced.undo()
