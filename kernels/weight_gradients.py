"""Products that write the gradient of a weight to a given place:  dW = dy^T x.

Shapes    dy: (N, O)  x: (N, K)  dW and its place: (O, K), any strides
Method    the BLAS writes into the place (`out=`); in another dtype than the product's, dW is a tensor as always
Numerics  as dy.t() @ x, bit for bit
Traffic   one read and one write of dW less than with a copy to the place
Source    weight gradients written to where they are reduced: Narayanan et al. 2021, arXiv:2104.04473 (Megatron-LM)

An op asks for the place in its forward. Only the first op that reads a weight gets it: a second one's product would
overwrite what autograd adds it to.
"""

import torch
from torch import Tensor

from ._autograd import copy_all

_PLACE = "_gradient_place"  # an attribute of the weight


def place_gradient(weight: Tensor, place: Tensor) -> None:
    """Have the op that next reads `weight` write the weight's gradient to `place`, and return it as the gradient.

    It is a request: an op of torch, or a product in another dtype, takes no notice of it. See `put_in_places`.
    """
    vars(weight)[_PLACE] = place


def taken_place(weight: Tensor) -> Tensor | None:
    """Return where the gradient of a weight is to be written, if anywhere, and let no other op write there."""
    return vars(weight).pop(_PLACE, None)


def weight_gradient(dy: Tensor, x: Tensor, place: Tensor | None = None) -> Tensor:
    """Return dW, which is `place` if it is of the product's dtype."""
    if place is None or place.dtype != dy.dtype:
        return dy.t() @ x
    return torch.mm(dy.t(), x, out=place)


def put_in_places(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each gradient, which comes with its place, that is elsewhere; in one launch."""
    elsewhere = [(gradient, place) for gradient, place in pairs if gradient.data_ptr() != place.data_ptr()]
    if elsewhere:
        copy_all([place for _, place in elsewhere], [gradient for gradient, _ in elsewhere])
