"""CUDA graphs of decoder layers: what a layer launches, forward and backward, is recorded once and replayed.

A layer of a small model launches more kernels than the host can keep up with. A graph of them is one launch. Each layer
has one graph of its forward and one of its backward, for one shape of its inputs. All graphs of a model take their
memory from one pool, in the order of a training step: what backward has read is free for what comes after it.

The idea of graphs for a chain of layers in one pool is from `torch.cuda.make_graphed_callables`. That one keeps all
outputs and gradients for each shape, and leaves a gradient that is being accumulated in memory that the next
micro-batch overwrites.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...compat.modules import own_parameters
from ...kernels.weight_gradients import place_gradient, put_in_places
from ..packing.document_mask import DocumentMask
from .recorder import Recorder, Tensors

# What a layer is called with, taken apart into tensors and a structure that two calls can be compared by.


Places = dict[nn.Parameter, Tensor]  # where the gradients of parameters are to be


class NotCapturable(Exception):
    """A call that cannot be replayed. The message says why."""


@dataclass(frozen=True)
class TensorSpec:
    """What a replayed tensor has in common with the recorded one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor and holds none that a layer reads."""

    key: tuple
    value: Any = field(compare=False)


def flatten(value: Any, tensors: Tensors) -> Any:
    """Return the hashable structure of `value`, and append its tensors.

    Raises:
        NotCapturable: it holds something else than tensors, numbers and text.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        grad = value.requires_grad and torch.is_grad_enabled()
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype, value.device, grad)
    if type(value) in (tuple, list):
        return type(value), tuple(flatten(item, tensors) for item in value)
    if type(value) is dict:
        lengths_are_given = isinstance(value.get("cu_seq_lens_q"), Tensor)
        return dict, tuple((key, _flatten_mask(item, lengths_are_given, tensors)) for key, item in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    raise NotCapturable(f"a layer gets a {type(value).__name__}")


def _flatten_mask(value: Any, lengths_are_given: bool, tensors: Tensors) -> Any:
    """Flatten a keyword of a layer: a mask that says no more than sizes is a constant.

    So it is where attention reads the lengths that come with it, or where each row is one document; there a model may
    still read the mask's tensor.
    """
    if not isinstance(value, DocumentMask) or not (lengths_are_given or value.single):
        return flatten(value, tensors)
    if value.single and not lengths_are_given and value.is_read:
        return flatten(value.tensor, tensors)
    return Constant(value.sizes, value)


def fill(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of a structure, with these tensors in it."""
    if isinstance(structure, Constant):
        return structure.value
    if isinstance(structure, TensorSpec):
        return next(tensors)
    if isinstance(structure, tuple):
        kind, items = structure
        if kind is dict:
            return {key: fill(item, tensors) for key, item in items}
        return kind(fill(item, tensors) for item in items)
    return structure


def specs_of(structure: Any) -> list[TensorSpec]:
    """Return the specs of a structure's tensors, in their order."""
    if isinstance(structure, TensorSpec):
        return [structure]
    if isinstance(structure, tuple):
        items = [item for _, item in structure[1]] if structure[0] is dict else structure[1]
        return [spec for item in items for spec in specs_of(item)]
    return []


class Turn:
    """One forward through the layers, and which of them have run backward.

    Backward overwrites what forward left, so it can run once.
    """

    def __init__(self, layers: int):
        self._layers = layers
        self._over: set[int] = set()

    @property
    def is_over(self) -> bool:
        return len(self._over) == self._layers

    def end(self, index: int) -> None:
        """Note the backward of a layer.

        Raises:
            RuntimeError: it is the second.
        """
        if index in self._over:
            raise RuntimeError(
                "A second backward through layers in CUDA graphs: the first has overwritten what they keep. Set "
                "cuda_graphs to never."
            )
        self._over.add(index)


@dataclass
class LayerCall:
    """A recorded call of a layer.

    Attributes:
        structure: of (args, kwargs).
        inputs: tensors of the same shapes, for the graph to read; None for an output of the layer before.
        chained: which output of the layer before each None is.
        outputs: the structure of what the layer returned.
    """

    structure: Any
    inputs: list[Tensor | None]
    chained: list[int | None]
    outputs: Any


class LayerGraph:
    """The graphs of one layer for one shape.

    Args:
        layer: whose class has the forward that is recorded.
        trains: whether its trained parameters get gradients.
        recompute: keep only the layer's inputs; backward computes the rest again.
        places: where gradients of parameters are to be, if not in the memory of the graphs.
    """

    def __init__(self, layer: nn.Module, call: LayerCall, trains: bool, recompute: bool, places: Places | None = None):
        self.call, self._layer, self._recompute = call, layer, recompute
        self.parameters = [p for p in layer.parameters() if p.requires_grad] if trains else []
        self._places = {p: places[p] for p in self.parameters if places and p in places}
        self._aliases: dict[nn.Parameter, nn.Parameter] = {}
        self.specs = specs_of(call.structure)
        self.trains = bool(self.parameters) or any(spec.requires_grad for spec in self.specs)
        self.inputs: Tensors = []
        self.outputs: Tensors = []
        self.output_gradients: Tensors = []
        self.gradients: list[Tensor | None] = []  # of the inputs that need one, then of the parameters
        self._are_computed: list[bool] = []  # whether each of these exists
        self._live: Tensors = []  # outputs with their autograd graph, between the recordings of forward and backward

    def link(self, before: "LayerGraph | None") -> None:
        """Take as inputs the recorded ones and the outputs of the layer before; zeros without such a layer."""
        outputs = None if before is None else before.outputs
        inputs = []
        for spec, given, index in zip(self.specs, self.call.inputs, self.call.chained, strict=True):
            if index is not None:
                given = (
                    torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if outputs is None else outputs[index]
                )
            assert given is not None
            inputs.append(given.detach().requires_grad_(spec.requires_grad))
        self.inputs = inputs

    def run(self) -> Tensors:
        """Run the layer's own forward on the recorded inputs; return its outputs."""
        args, kwargs = fill(self.call.structure, iter(self.inputs))
        outputs: Tensors = []
        self._aliases = {parameter: nn.Parameter(parameter.detach()) for parameter in self.parameters}
        for parameter, place in self._places.items():
            place_gradient(self._aliases[parameter], place)
        with _in_place_of(self._aliases, self._layer):
            flatten(type(self._layer).forward(self._layer, *args, **kwargs), outputs)
        return outputs

    def run_forward(self) -> Tensors:
        """Run forward as it is recorded."""
        with torch.set_grad_enabled(self.trains and not self._recompute):
            outputs = self.run()
        self._live = outputs if self.trains else []
        return [output.detach() for output in outputs]

    def run_backward(self, rehearses: bool = False) -> Tensors:
        """Run backward as it is recorded; return the gradients that exist."""
        if self._recompute:
            with torch.enable_grad():
                self._live = self.run()
        pairs = [pair for pair in zip(self._live, self.output_gradients, strict=True) if pair[0].requires_grad]
        wanted = [*(tensor for tensor in self.inputs if tensor.requires_grad), *self._aliases.values()]
        outputs, gradients = zip(*pairs, strict=True)
        if rehearses:
            _check_leaves(outputs, wanted)
        with torch.autocast(self.output_gradients[0].device.type, enabled=False):  # as backward runs in a training
            computed = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        self._live, self._are_computed = [], [gradient is not None for gradient in computed]
        if self._places:
            of_parameters = zip(self.parameters, computed[-len(self.parameters) :], strict=True)
            put_in_places([(g, self._places[p]) for p, g in of_parameters if g is not None and p in self._places])
        return [gradient for gradient in computed if gradient is not None]

    def rehearse(self) -> None:
        """Run both once. Compilers and libraries set themselves up, and what waits for the device fails."""
        places, self._places = self._places, {}  # where gradients of earlier micro-batches may be
        self.link(None)
        self.outputs = self.run_forward()
        if self.trains:
            self.output_gradients = [torch.zeros_like(output) for output in self.outputs]
            self.run_backward(rehearses=True)
        self.inputs, self.outputs, self.output_gradients, self._places = [], [], [], places

    def record_forward(self, recorder: Recorder) -> None:
        self.outputs, self.replay_forward = recorder.record(self.run_forward)

    def record_backward(self, recorder: Recorder, after: "LayerGraph | None") -> None:
        """Record backward, where the gradients of outputs are those that the layer after computes, if it does."""
        given: dict[int, tuple[int, Tensor]] = {}  # by output: its gradient, and which of theirs that is
        theirs: list[Tensor | None] = []
        if after is not None:
            theirs = after.gradients
            trained = (index for index, spec in zip(after.call.chained, after.specs, strict=True) if spec.requires_grad)
            given = {
                index: (place, gradient)
                for place, (index, gradient) in enumerate(zip(trained, theirs, strict=False))
                if index is not None and gradient is not None
            }
        self.output_gradients = [
            given[index][1] if index in given else torch.zeros_like(output) for index, output in enumerate(self.outputs)
        ]
        computed, self.replay_backward = recorder.record(self.run_backward)
        for index, (place, gradient) in given.items():  # they are read: what is recorded next may use their memory
            self.output_gradients[index] = theirs[place] = recorder.unowned(gradient)
        kept = iter(computed)
        self.gradients = [next(kept) if is_computed else None for is_computed in self._are_computed]
        for index, parameter in enumerate(self.parameters, len(self.gradients) - len(self.parameters)):
            if self.gradients[index] is not None:
                self.gradients[index] = self._places.get(parameter, self.gradients[index])

    def feed(self, tensors: Tensors, fed: dict[int, Tensor]) -> bool:
        """Copy the tensors of a call to where the graph reads them. Return False if they cannot get there.

        Args:
            fed: by address of the graph's input, what was copied there in this turn.
        """
        for static, tensor, index in zip(self.inputs, tensors, self.call.chained, strict=True):
            address = static.data_ptr()
            if tensor.data_ptr() == address or fed.get(address) is tensor:
                continue
            # its memory is the output of the layer before, or holds what an earlier layer got: their backwards read it
            if index is not None or address in fed:
                return False
            static.detach().copy_(tensor)
            fed[address] = tensor
        return True

    def replay(self, index: int, turn: Turn, tensors: Tensors) -> Any:
        """Return what the layer returns, after `feed`."""
        if not self.trains:
            self.replay_forward()
            return fill(self.call.outputs, iter([output.detach() for output in self.outputs]))
        edges = [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.requires_grad]
        outputs = _Replay.apply(self, index, turn, *edges, *self.parameters)
        return fill(self.call.outputs, iter(outputs))

    def returned_gradients(self) -> list[Tensor | None]:
        """Return the gradients for autograd. What leaves the layers has separate memory: anything may keep it."""
        chained = [index is not None for index, spec in zip(self.call.chained, self.specs, strict=True)
                   if spec.requires_grad]  # fmt: skip
        stays = [*chained, *(True for _ in self.parameters)]
        return [
            None if gradient is None else gradient.detach() if is_ours else gradient.clone()
            for gradient, is_ours in zip(self.gradients, stays, strict=True)
        ]

    def release(self, recorder: Recorder) -> None:
        """Let what is recorded later use the memory of this recording, all of which is read within one step."""
        self.inputs = [
            tensor if index is None else recorder.unowned(tensor)
            for tensor, index in zip(self.inputs, self.call.chained, strict=True)
        ]
        self.outputs = [recorder.unowned(tensor) for tensor in self.outputs]
        ours = {id(place) for place in self._places.values()}  # not in the pool
        self.gradients = [
            gradient if gradient is None or id(gradient) in ours else recorder.unowned(gradient)
            for gradient in self.gradients
        ]


class _Replay(torch.autograd.Function):
    """A layer's graphs in the autograd graph of a step."""

    @staticmethod
    def forward(ctx, graph: LayerGraph, index: int, turn: Turn, *edges: Tensor):
        ctx.graph, ctx.index, ctx.turn = graph, index, turn
        graph.replay_forward()
        outputs = tuple(output.detach() for output in graph.outputs)
        specs = specs_of(graph.call.outputs)
        ctx.mark_non_differentiable(
            *(output for output, spec in zip(outputs, specs, strict=True) if not spec.requires_grad)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        graph: LayerGraph = ctx.graph
        ctx.turn.end(ctx.index)
        for static, gradient in zip(graph.output_gradients, gradients, strict=True):
            if gradient is None:
                static.zero_()
            elif gradient.data_ptr() != static.data_ptr():
                static.copy_(gradient)
        graph.replay_backward()
        return None, None, None, *graph.returned_gradients()


@contextlib.contextmanager
def _in_place_of(aliases: dict[nn.Parameter, nn.Parameter], layer: nn.Module) -> Iterator[None]:
    """Have a layer compute with aliases of its parameters.

    Autograd sends a parameter's gradient to the stream on which it was first used, if anything still holds the autograd
    graph of then. That is not the stream that is recorded.
    """
    changed = [
        (own_parameters(module), name, parameter)
        for module in layer.modules() for name, parameter in own_parameters(module).items()
        if parameter is not None and parameter in aliases
    ]  # fmt: skip
    try:
        for parameters, name, parameter in changed:
            parameters[name] = aliases[parameter]
        yield
    finally:
        for parameters, name, parameter in changed:
            parameters[name] = parameter


def _check_leaves(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raise NotCapturable if autograd reaches other leaves than the wanted: their gradients would be lost."""
    ids, seen = {id(tensor) for tensor in wanted}, set()
    nodes: list[Any] = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in ids:
            raise NotCapturable("a layer computes with weights that are not its own")
        nodes += [below for below, _ in node.next_functions]


def _host_random(device: str) -> tuple:
    """Return the states of the generators whose numbers a recording would keep."""
    return random.getstate(), None if device == "cpu" else torch.get_rng_state().numpy().tobytes()


def record_stack(graphs: Sequence[LayerGraph], recorder: Recorder) -> None:
    """Record the graphs of all layers for one shape, in the order of a training step.

    Raises:
        NotCapturable: what a layer does cannot be recorded.
    """
    before = _host_random(recorder.device_type)
    try:
        with recorder.rehearsing():
            for graph in graphs:
                graph.rehearse()
    except NotCapturable:
        raise
    except Exception as error:  # nothing is recorded yet, so the layers can go on as they are
        raise NotCapturable(str(error).split("\n")[0] or type(error).__name__) from error
    if _host_random(recorder.device_type) != before:
        raise NotCapturable("a layer draws random numbers on the host")
    try:
        _record_in_order(graphs, recorder)
    except torch.OutOfMemoryError:
        raise NotCapturable("the GPU lacks the memory for them") from None
    except Exception as error:
        raise RuntimeError(
            f"CUDA graphs of the model's layers could not be recorded ({str(error).splitlines()[0]}), after which CUDA "
            "is not usable in this process. Set cuda_graphs to never."
        ) from error


def _record_in_order(graphs: Sequence[LayerGraph], recorder: Recorder) -> None:
    before: LayerGraph | None = None
    for graph in graphs:
        graph.link(before)
        graph.record_forward(recorder)
        before = graph
    after: LayerGraph | None = None
    for graph in reversed(graphs):
        if graph.trains:
            graph.record_backward(recorder, after)
        after = graph
    for graph in graphs:
        graph.release(recorder)
