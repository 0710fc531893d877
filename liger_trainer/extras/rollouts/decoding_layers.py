"""A decoder's layers while it decodes a token a row: as few launches as may be, and no weight read twice.

Queries, keys and values are one product, gate, up and their activation another, and a product that the layer adds to
its residual stream does so itself (kernels/thin_linear.py). A norm in front of products stays a launch: taken along, it
is computed again for each tile, and cost 0.8 ms a step. Adapters are merged into the weights by then, so what counts of
such a layer is its base. Weights in fp32 under autocast are read as they are: no copy of them is made. Cosines and
sines are looked up in tables, which the model's own rotary embedding has filled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ...common.replacements import replaced
from ...compat.modules import own_children
from ...kernels.thin_linear import MOST_TILES, thin_linear
from ...losses.model_parts import decoder_layers
from ...patching.layers.deferred_norm import Deferred
from ...patching.layers.linears import is_weight_and_bias, layers_of_one_input
from ...patching.layers.mlps import RULE, calls_other_children
from ...patching.layers.rotary import ROTATES_LATER


class Product(Deferred):
    """A linear layer's output, computed when it is used: with what it is added to, if that comes first."""

    def __init__(self, x: Tensor | Deferred, layer: nn.Linear, arrived: Tensor):
        self._x, self._layer, self._arrived, self._y = _computed(x), layer, arrived, None
        self.shape, self.dtype, self.device = (*x.shape[:-1], layer.out_features), _dtype(x), x.device

    def compute(self) -> Tensor:
        if self._y is None:
            self._y = self._product(None)
        return self._y

    def _product(self, residual: Tensor | None) -> Tensor:
        layer = self._layer
        how = {"residual": residual, "dtype": self.dtype, "arrived": self._arrived}
        return thin_linear(self._x, [layer.weight], [layer.bias], **how)[0]

    def __add__(self, other: Any) -> Tensor:
        if self._y is None and type(other) is Tensor and other.shape == self.shape:
            return self._product(other)
        return self.compute() + other

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (Tensor.add, Tensor.__add__, torch.add) and len(args) == 2 and not kwargs:
            first, second = args
            return second + first if isinstance(second, cls) else first + second
        return super().__torch_function__(func, types, args, kwargs)


class DecodingLayers:
    """The linear layers of a model's decoder that are nothing but weights and biases, and its rotary embeddings.

    Attributes:
        positions: how many the tables of cosines and sines have.
    """

    def __init__(self, model: Any):
        self.positions = 0
        self._tables: dict[Any, tuple[Tensor, ...]] = {}
        device = next(model.parameters()).device
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for module in decoder_layers(model)[1].modules():
            if isinstance(module, BaseTunerLayer):
                continue  # its base is the layer
            linears = {name: base for name, child in own_children(module).items() if (base := _base(child)) is not None}
            rule = vars(module).get(RULE)
            if (
                rule is not None
                and {*rule.first, rule.down} <= set(linears)
                and not calls_other_children(module, linears)
            ):
                *first, down = (linears[name] for name in (*rule.first, rule.down))
                self._forwards.append((module, partial(self._mlp, first, down, rule.activation)))
                continue
            for names in layers_of_one_input(type(module)):
                group = list(dict.fromkeys(names))
                if 2 <= len(group) <= 3 and set(group) <= set(linears):
                    together = _Together([linears.pop(name) for name in group])
                    for at, name in enumerate(group):
                        self._forwards.append((own_children(module)[name], partial(together.output, at)))
            self._forwards += [(own_children(module)[name], partial(self._one, base)) for name, base in linears.items()]
        rotary = [module for module in model.modules() if hasattr(module, "inv_freq") or hasattr(module, "rope_type")]
        self._of_one_token = [(module, partial(self._looked_up, module, module.forward)) for module in rotary]
        head = _base(model.get_output_embeddings())
        if head is not None and head.weight.dtype == torch.float32:  # of 16 bits, torch's product is as fast
            self._forwards.append((model.get_output_embeddings(), partial(self._head, head)))

    @contextmanager
    def in_use(self, one_token: bool) -> Iterator[None]:
        """Within, the layers compute so. Of one token a row, attention rotates queries and keys where it can."""
        with ExitStack() as stack:
            token = ROTATES_LATER.set(one_token)
            stack.callback(lambda: ROTATES_LATER.reset(token))
            for module, forward in [*self._forwards, *(self._of_one_token if one_token else ())]:
                stack.enter_context(replaced(module, forward=forward))
            yield

    def make_room(self, positions: int) -> None:
        """Have tables of so many positions. More than before are other tables, which no graph of before has read."""
        if positions > self.positions:
            self.positions, self._tables = 1 << (positions - 1).bit_length(), {}

    def _looked_up(
        self, module: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *kind: Any, **named: Any
    ) -> Any:
        """Return what a rotary embedding returns for positions, out of what it has returned for all of them."""
        key = (module, x.dtype, *kind, *named.values())
        if key not in self._tables:
            self._tables[key] = forward(x, torch.arange(self.positions, device=x.device)[None], *kind, **named)
        tables = self._tables[key]
        if position_ids.dim() != 2 or not isinstance(tables, tuple) or any(table.dim() != 3 for table in tables):
            return forward(x, position_ids, *kind, **named)
        return tuple(F.embedding(position_ids, table[0]) for table in tables)

    def _one(self, layer: nn.Linear, x: Tensor | Deferred) -> Product:
        return Product(x, layer, self._arrived)

    def _head(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return thin_linear(x, [layer.weight], [layer.bias], dtype=_dtype(x), arrived=self._arrived)[0]

    def _mlp(self, first: Sequence[nn.Linear], down: nn.Linear, activation: str, x: Tensor | Deferred) -> Product:
        weights, biases = [layer.weight for layer in first], [layer.bias for layer in first]
        if len(first) == 1:  # both are packed in one weight
            weights = list(weights[0].chunk(2))
            biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
        (h,) = thin_linear(_computed(x), weights, biases, activation=activation, dtype=_dtype(x))
        return Product(h, down, self._arrived)


class _Together:
    """Layers that a module calls one after the other with one tensor: the first call computes all."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers = layers
        self._x: Tensor | Deferred | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, at: int, x: Tensor | Deferred) -> Tensor:
        if at == 0 or x is not self._x:
            weights, biases = [layer.weight for layer in self._layers], [layer.bias for layer in self._layers]
            self._x, self._outputs = x, thin_linear(_computed(x), weights, biases, dtype=_dtype(x))
        y = self._outputs[at]
        if at == len(self._layers) - 1:  # the last call: what is kept no longer may serve no later tensor
            self._x, self._outputs = None, ()
        return y


def _computed(x: Tensor | Deferred) -> Tensor:
    return x.compute() if isinstance(x, Deferred) else x


def _dtype(x: Tensor | Deferred) -> torch.dtype:
    """Return the dtype of a product of x: autocast's, or x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _base(layer: nn.Module | None) -> nn.Linear | None:
    """Return the plain linear layer that a layer is once its adapters are merged, None if it is another one."""
    if isinstance(layer, BaseTunerLayer):
        layer = layer.get_base_layer()
    return layer if layer is not None and is_weight_and_bias(layer) else None
