"""The decoder layers of one model in CUDA graphs, recorded when a shape comes again.

The layers' forwards are replaced. In the first passes of a shape they run as they are, while what they are called with
is noted; then their graphs are recorded (layer_graphs.py), and later passes replay them. Embedding, head and loss stay
outside. A pass that differs in anything, such as a flag or a weight's address, is one of another shape, or runs as it
is.
"""

import contextlib
import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...common.console import announce
from ...common.replacements import Replacements
from ...compat.fsdp2 import WholeWeights
from ...compat.models import ADAPTER_SETTINGS
from ...compat.modules import any_hook, hook_places, is_hooked, parameter_places
from ...compat.torch_internals import in_backward
from ...errors import ConfigError
from ...losses.model_parts import decoder_layers
from .layer_graphs import LayerCall, LayerGraph, NotCapturable, Places, Turn, flatten, record_stack
from .recorder import CudaRecorder, Recorder, Tensors

SEEN = 2  # passes of a shape before its graphs are recorded: a compiler of kernels has its turn, and shapes come again
SHAPES = 16  # that graphs are recorded for: each keeps its layers' inputs
REMEMBERED = 64  # shapes whose passes are counted
# Products of a layer's forward, in FLOP, up to which an H100 waits for the host: `auto` records no larger layers.
HOST_BOUND = 2e12
# Attributes of dropout and of PEFT's layers that a recording holds as constants, and that a callback may change.
SETTINGS = {"p", "scaling", "merged_adapters", *ADAPTER_SETTINGS}


class GraphedLayers:
    """The decoder layers of `model` in CUDA graphs.

    Args:
        model: a transformers model; the base model of a PEFT model.
        name: of the model, for messages.
        trained: whether its passes with gradients are recorded, or those without, as of a teacher.
        always: record layers of any size.
        recorder: the class of what records.
        places: returns where gradients of parameters are to be, if not in the memory of the graphs. It is asked when
            graphs are recorded.
        whole: the layers' weights where FSDP2 shards them: whole in the forwards of their layers, and shards elsewhere.

    Attributes:
        report: what was done, in a line.

    Raises:
        NotCapturable: the model's layers cannot be in graphs. The message says why.
    """

    def __init__(
        self, model: Any, name: str = "student", trained: bool = True, always: bool = False,
        recorder: type[Recorder] = CudaRecorder, places: Callable[[], Places] = dict,
        whole: WholeWeights | None = None,
    ):  # fmt: skip
        self.layers, self._whole = layers_of(model), whole
        self.name, self._trained, self._always, self._make_recorder = name, trained, always, recorder
        self._gradient_places = places
        self._check()
        self._most_rows = float("inf") if always else most_rows(self.layers)
        self.report = f"CUDA graphs: none for the {name} yet"
        self._off: str | None = None
        self._is_full = False
        self._sizes: list[str] = []
        self._seen: OrderedDict[Any, int] = OrderedDict()
        self._calls: dict[Any, list[LayerCall]] = {}
        self._graphs: dict[Any, list[LayerGraph]] = {}
        self._recorder: Recorder | None = None
        self._pass: _Noting | _Replaying | None = None
        self._thread: int | None = None  # the first that called: all graphs have one memory, so no other has any
        self._turn: weakref.ref[Turn] | None = None
        self._weights: tuple[Any, ...] = ()
        self._gradient_addresses: set[int] = set()
        self._replacements = Replacements()
        for index, layer in enumerate(self.layers):
            self._replacements.forward(layer, _forward_in(self, index))

    def undo(self) -> None:
        """Give the layers their forwards back, and the memory of the graphs. Say why there were none."""
        self._replacements.undo()
        if not self._graphs and self._off is None and len(self._seen) > SEEN:
            count = f"{len(self._seen)} shapes" if len(self._seen) < REMEMBERED else f"the last {REMEMBERED} shapes"
            self.report = f"CUDA graphs: none for the {self.name}: of {count}, none came {SEEN + 1} times"
            announce(f"{self.report}.")
        self._forget()

    def call(self, index: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a layer, or replay it."""
        plain = functools.partial(type(layer).forward, layer)
        if layer is not self.layers[index] or not self._applies(layer):
            return plain(*args, **kwargs)
        if self._thread is None:
            self._thread = threading.get_ident()
        if index == 0:
            self._pass = self._begin(args, kwargs)
        current = self._pass
        if layer is self.layers[-1]:
            self._pass = None
        return plain(*args, **kwargs) if current is None else current.call(index, plain, args, kwargs)

    def _applies(self, layer: nn.Module) -> bool:
        """Whether this pass is of the recorded kind; not a checkpoint's second forward, nor one that is compiled."""
        return (
            self._off is None
            and torch.is_grad_enabled() is self._trained is layer.training
            and not torch.compiler.is_compiling()
            and not in_backward()
            and self._thread in (None, threading.get_ident())
        )

    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> "_Noting | _Replaying | None":
        """Decide what is done with a pass: it is replayed, noted for a recording, or neither (None)."""
        tensors: Tensors = []
        try:
            shape = (flatten((args, kwargs), tensors), *self._modes(tensors))
        except NotCapturable:  # as with a cache of keys and values: another kind of pass
            return None
        try:
            if self._hooks != RemovableHandle.next_id:
                self._check_hooks()
            if (self._graphs or self._calls) and self._weights != self._constants():
                self._forget()  # the weights have moved, others are trained, or an adapter has another scale
            if shape not in self._graphs and shape in self._calls and not self._is_busy() and self._has_room():
                self._record(shape)
        except NotCapturable as error:
            return self._give_up(str(error))
        if shape in self._graphs:
            return None if self._is_busy() else self._replaying(self._graphs[shape])
        rows = tensors[0].numel() // tensors[0].shape[-1]
        free = len(self._graphs) + len(self._calls) < SHAPES and not self._is_full
        return self._noting(shape) if free and rows <= self._most_rows else None

    def _has_room(self) -> bool:
        """Return whether there is memory for the graphs of a shape.

        Raises:
            NotCapturable: there is none for those of the first shape.
        """
        if self._recorder is None:
            self._recorder = self._make_recorder(next(self.layers[0].parameters()).device)
        if self._always or self._recorder.has_room():
            return True
        if not self._graphs:
            raise NotCapturable("the GPU may lack the memory for them")
        self._is_full = True
        self._calls.clear()
        return False

    def _check(self) -> None:
        """Raise NotCapturable if the layers cannot be in graphs, as far as that can be seen."""
        with self._whole_in_place():
            reason = obstacle(self.layers, self._make_recorder.device_type)
        if reason is not None:
            raise NotCapturable(reason)
        self._hooks = RemovableHandle.next_id  # torch counts all hooks that are registered
        self._find_places()

    def _check_hooks(self) -> None:
        """Check again after hooks have been registered; FSDP2 does that in each pass, on what layers return."""
        if self._whole is None or any_hook(self._hook_places):
            self._check()
        self._hooks = RemovableHandle.next_id

    def _whole_in_place(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which all layers have whole weights."""
        return contextlib.nullcontext() if self._whole is None else self._whole.in_place()

    def _find_places(self) -> None:
        modules = [module for layer in self.layers for module in layer.modules()]
        self._hook_places = hook_places(module for module in modules if module not in self.layers)
        self._places = parameter_places(modules)
        self._settings = [
            (vars(module), name) for module in modules for name, value in vars(module).items()
            if name in SETTINGS or "dropout" in name and isinstance(value, float)
        ]  # fmt: skip

    def _modes(self, tensors: Tensors) -> tuple[Any, ...]:
        """Return what else decides what the layers launch.

        Raises:
            NotCapturable: a tensor is not on the GPU.
        """
        device = self._make_recorder.device_type
        elsewhere = next((tensor for tensor in tensors if tensor.device.type != device), None)
        if elsewhere is not None:
            raise NotCapturable(f"a layer gets a tensor on {elsewhere.device.type}")
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), self._recomputes()

    def _noting(self, shape: Any) -> "_Noting | None":
        """Count a pass; note the last one before the recording."""
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        if self._seen[shape] < SEEN:
            return None
        self._weights = self._constants()
        return _Noting(len(self.layers), functools.partial(self._calls.__setitem__, shape), self._give_up)

    def _replaying(self, graphs: list[LayerGraph]) -> "_Replaying":
        """Begin a replay. Gradients in the pool's memory, which it overwrites, move out of it."""
        assert self._recorder is not None
        self._recorder.take_turn()
        ours = self._gradient_addresses
        for parameter in self._all_parameters():
            if parameter.grad is not None and parameter.grad.data_ptr() in ours:
                parameter.grad = parameter.grad.clone()
        turn = Turn(sum(graph.trains for graph in graphs))
        self._turn = weakref.ref(turn)
        return _Replaying(graphs, turn)

    def _is_busy(self) -> bool:
        """Whether the backward of the last replay may still come: its memory is needed until then."""
        turn = None if self._turn is None else self._turn()
        return turn is not None and not turn.is_over

    def _recomputes(self) -> bool:
        return self._trained and bool(getattr(self.layers[0], "gradient_checkpointing", False))

    def _record(self, shape: Any) -> None:
        """Record the graphs of a shape whose pass was noted."""
        recompute, calls = self._recomputes(), self._calls.pop(shape)
        if recompute and any(_drops_out(layer) for layer in self.layers):
            raise NotCapturable("gradient checkpointing would compute other dropout masks in a graph")
        assert self._recorder is not None
        self._find_places()
        self._weights = self._constants()
        places = self._places_of_one_layer()
        with (
            self._whole_in_place(), _without_cast_cache(self._make_recorder.device_type),
            _without_checkpointing(self.layers),
        ):  # fmt: skip
            graphs = [
                LayerGraph(layer, call, self._trained, recompute, places)
                for layer, call in zip(self.layers, calls, strict=True)
            ]
            record_stack(graphs, self._recorder)
        self._graphs[shape] = graphs
        self._gradient_addresses = {
            gradient.data_ptr()
            for recorded in self._graphs.values() for graph in recorded for gradient in graph.gradients
            if gradient is not None
        }  # fmt: skip
        self._sizes.append("x".join(map(str, graphs[0].inputs[0].shape)))
        self.report = f"CUDA graphs: {len(graphs)} layers of the {self.name}, hidden states of {', '.join(self._sizes)}"
        announce(self.report)

    def _places_of_one_layer(self) -> Places:
        """Return where gradients are to be. Layers that share a weight would write over each other's share of its."""
        layers_with = Counter(parameter for layer in self.layers for parameter in layer.parameters())
        return {parameter: at for parameter, at in self._gradient_places().items() if layers_with[parameter] == 1}

    def _in_layers(self) -> list[Any]:
        """Return the parameters as the layers have them now."""
        return [p for parameters, name in self._places if (p := parameters.get(name)) is not None]

    def _all_parameters(self) -> list[Any]:
        """Return the parameters that graphs read, and that get gradients of them."""
        found = self._in_layers()
        return found if self._whole is None else list(map(self._whole.of, found))

    def _constants(self) -> tuple[Any, ...]:
        """Return what a graph holds that may change: where weights are, which are trained, and numbers of modules."""
        trained = (parameter.requires_grad for parameter in self._in_layers())  # a shard knows it first
        weights = zip((parameter.data_ptr() for parameter in self._all_parameters()), trained, strict=True)
        return *weights, *(_frozen(attributes.get(name)) for attributes, name in self._settings)

    def _give_up(self, reason: str) -> None:
        """Run the layers as they are from now on.

        Raises:
            ConfigError: graphs are wanted always.
        """
        if self._always:
            raise ConfigError(f"cuda_graphs: always does not go with this model: {reason}.")
        self._off = reason
        self.report = f"CUDA graphs: none for the {self.name}: {reason}"
        announce(f"{self.report}.")
        self._forget()

    def _forget(self) -> None:
        for parameter in self._all_parameters() if self._graphs else ():
            if parameter.grad is not None and parameter.grad.data_ptr() in self._gradient_addresses:
                parameter.grad = parameter.grad.clone()
        self._graphs, self._calls, self._recorder, self._pass = {}, {}, None, None
        self._seen.clear()
        self._gradient_addresses = set()


class _Noting:
    """A pass as it is, noted for a recording.

    An input that is the same tensor as an output of the layer before, or as an input of an earlier layer, is one again
    when it is replayed.
    """

    def __init__(self, count: int, done: Callable[[list[LayerCall]], None], refuse: Callable[[str], None]):
        self._count, self._done, self._refuse = count, done, refuse
        self._calls: list[LayerCall] = []
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, and its copy
        self._outputs: Tensors = []

    def call(self, index: int, plain: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if index != len(self._calls):
            return plain(*args, **kwargs)
        tensors: Tensors = []
        try:
            structure = flatten((args, kwargs), tensors)
        except NotCapturable as error:
            self._refuse(str(error))
            return plain(*args, **kwargs)
        places = [next((i for i, output in enumerate(self._outputs) if is_one(output, t)), None) for t in tensors]
        inputs = [self._copy(t) if place is None else None for t, place in zip(tensors, places, strict=True)]
        result = plain(*args, **kwargs)
        self._outputs = []
        try:
            _check_untouched((args, kwargs), structure, tensors)
            self._calls.append(LayerCall(structure, inputs, places, flatten(result, self._outputs)))
        except NotCapturable as error:
            self._refuse(str(error))
        if len(self._calls) == self._count:
            self._done(self._calls)
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        kept = self._inputs.get(id(tensor))
        if kept is None:
            kept = self._inputs[id(tensor)] = tensor, tensor.detach().clone()
        return kept[1]


class _Replaying:
    """A pass that replays graphs; from the first layer on whose call differs, the layers run as they are."""

    def __init__(self, graphs: Sequence[LayerGraph], turn: Turn):
        self._graphs, self._turn = graphs, turn
        self._next = 0
        self._fed: dict[int, Tensor] = {}

    def call(self, index: int, plain: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors: Tensors = []
        graph = self._graphs[index]
        with contextlib.suppress(NotCapturable):  # an argument that was none when it was recorded
            if index == self._next and flatten((args, kwargs), tensors) == graph.call.structure:
                if graph.feed(tensors, self._fed):
                    self._next += 1
                    return graph.replay(index, self._turn, tensors)
        return plain(*args, **kwargs)


def is_one(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, or views of the same memory alike: FSDP2 hands layers such a view."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )


def _check_untouched(value: Any, structure: Any, tensors: Tensors) -> None:
    """Raise NotCapturable if a layer has put other things into what it was called with: a graph would not."""
    now: Tensors = []
    if flatten(value, now) != structure or any(a is not b for a, b in zip(now, tensors, strict=True)):
        raise NotCapturable("a layer writes into its arguments")


def layers_of(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a model.

    Raises:
        NotCapturable: it has no list of them.
    """
    try:
        return list(decoder_layers(model)[1])
    except ConfigError as error:
        raise NotCapturable(str(error)) from None


def most_rows(layers: Sequence[nn.Module]) -> float:
    """Return the tokens of a batch up to which `auto` records such layers."""
    return HOST_BOUND / (2 * max(sum(p.numel() for p in layer.parameters() if p.dim() > 1) for layer in layers))


def obstacle(layers: Sequence[nn.Module], device: str) -> str | None:
    """Return why these layers cannot be in graphs on such a device, None if nothing is known against it."""
    for layer in layers:
        replaced = vars(layer).get("forward")
        if replaced is not None and not hasattr(replaced, "is_graphed"):
            return f"the forward of a {type(layer).__name__} has been replaced"
        hooked = next((module for module in layer.modules() if module is not layer and is_hooked(module)), None)
        if hooked is not None:
            return f"a {type(hooked).__name__} has hooks"
        for parameter in layer.parameters():
            if parameter.device.type != device:
                return f"its weights are on {parameter.device.type}"
            if isinstance(parameter, DTensor) or type(parameter) is not nn.Parameter:
                return f"its weights are {type(parameter).__name__}"
    return None


def _frozen(value: Any) -> Any:
    """Return a copy of a module's setting, to compare later ones with."""
    if isinstance(value, dict):
        return tuple(value.items())
    if isinstance(value, Tensor):
        return id(value)
    return tuple(value) if isinstance(value, list) else value


def _drops_out(layer: nn.Module) -> bool:
    dropped = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())
    return dropped or any(
        value for module in layer.modules() for name, value in vars(module).items()
        if "dropout" in name and isinstance(value, float)
    )  # fmt: skip


def _without_cast_cache(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return autocast as it is, but with weights cast in each graph that reads them."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled, cache_enabled=False)


@contextlib.contextmanager
def _without_checkpointing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Have the layers' forwards run without transformers' checkpointing around them: graphs recompute by themselves."""
    replacements = Replacements()
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            replacements.set(layer, "gradient_checkpointing", False)
    kept_as_is = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        # the first layer may be called within a checkpoint, which would take what the recording keeps
        with kept_as_is if len(replacements) else contextlib.nullcontext():
            yield
    finally:
        replacements.undo()


def _forward_in(graphed: GraphedLayers, index: int) -> Callable:
    """Return the forward of the layer `index`."""

    def forward(self, *args, **kwargs):
        return graphed.call(index, self, args, kwargs)

    forward.is_graphed = True  # pyright: ignore[reportFunctionMemberAccess]
    return forward
