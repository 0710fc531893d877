"""Leave out decoder layers one after the other, each time the one without which the model stays closest to itself.

    distance of a set of layers = mean over supervised tokens of KL(the whole model || the model without them)

After each layer all that are left are tried again, since what a layer adds depends on the others: two layers may do the
same work, so that either can go and not both. This is the greedy elimination of SLEB (Song et al. 2024,
arXiv:2402.09025), which compares perplexities. The divergence from the model itself is what a distillation goes on to
minimise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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
