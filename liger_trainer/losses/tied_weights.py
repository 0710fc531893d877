"""A model whose output head is its embedding: both gradients of that weight are made in one buffer.

Autograd would make a gradient of the whole vocabulary for the embedded tokens, and add it to the head's. Within
`tied_weight` the embedding adds its rows to the head's gradient instead: kernels/tied_embedding.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..common.zero3 import is_partitioned
from ..kernels.tied_embedding import TiedWeight
from .model_parts import output_module

FSDP1 = "_fsdp_flattened"  # an attribute of what it shards


@contextlib.contextmanager
def tied_weight(model: Any) -> Iterator[TiedWeight | None]:
    """Within the context, where `model` runs once or more, its embedding reads one of two aliases of the tied weight.

    Yields them, for the head; None where the weight is not tied, not trained, not whole in this process, or replaced by
    somebody else.
    """
    embedding = _tied_embedding(model)
    if embedding is None:
        yield None
        return
    tied = TiedWeight(embedding.weight)
    vars(embedding)["weight"] = _EmbeddingWeight.of(tied)  # found before the parameter of this name
    try:
        yield tied
    finally:
        del vars(embedding)["weight"]


class _EmbeddingWeight(Tensor):
    """Stands in for the weight of an embedding. All functions of torch but F.embedding get that weight itself."""

    _tied: TiedWeight

    @staticmethod
    def of(tied: TiedWeight) -> "_EmbeddingWeight":
        weight = tied.weight.detach().as_subclass(_EmbeddingWeight)
        weight._tied = tied
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        if func is F.embedding and len(args) == 2 and isinstance(args[1], cls):
            if not any(options.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
                return args[1]._tied.embed(args[0], options.get("padding_idx"))
        return func(*tree_map(_weight_of, args), **tree_map(_weight_of, options))


def _weight_of(value: Any) -> Any:
    return value._tied.weight if isinstance(value, _EmbeddingWeight) else value


def _tied_embedding(model: Any) -> nn.Embedding | None:
    """Return the embedding of a model if `tied_weight` applies to it.

    A DTensor is no plain parameter. What FSDP1 shards looks like one outside of the model's forward.
    """
    head, embedding = output_module(model), _embedding(model)
    weight = None if embedding is None else embedding._parameters.get("weight")
    if weight is None or head is None or head._parameters.get("weight") is not weight:
        return None
    trained = weight.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    sharded = is_partitioned(weight) or getattr(weight, FSDP1, False)
    whole = type(weight) is nn.Parameter and not sharded
    return embedding if trained and whole else None


def _embedding(model: Any) -> nn.Embedding | None:
    try:
        module = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model that embeds no tokens
        return None
    return module if isinstance(module, nn.Embedding) and not {"forward", "weight"} & vars(module).keys() else None
