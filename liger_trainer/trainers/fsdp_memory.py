"""CUDA graphs under FSDP2: the decoder layers' whole weights stay in place where they fit.

accelerate prepares the models as ever (`fully_shard`). After the first step it is known what a step takes besides
weights and optimizer. Where the whole weights of the decoder layers, their gradients and the graphs fit into what is
left on each GPU, the weights' memory is not freed any more (compat/fsdp2.py), and the layers are recorded within FSDP's
hooks: these gather before a layer is replayed, and share its gradients out after. Else FSDP2 goes on as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from ..common.console import announce
from ..compat.fsdp2 import WholeWeights
from ..errors import ConfigError
from ..patching.graphs.cuda_graphs import GraphedLayers, layers_of
from ..patching.graphs.layer_graphs import NotCapturable
from ..patching.graphs.recorder import free_memory, memory_of_graphs
from .host import TrainerHost

MANY = 1 << 60


class ShardedGraphs(TrainerCallback):
    """Puts the layers of the models into graphs at the end of the first step that has run them.

    Args:
        trainer: whose models FSDP2 shards when the training begins.
        models: returns the student and the frozen models by name, as they are then.
        always: keep and record whatever the memory.

    Attributes:
        graphed: by the models' names, their layers in graphs.

    Raises:
        ConfigError: at the end of the step, if `always`, and something is against it.
    """

    def __init__(self, trainer: TrainerHost, models: Callable[[], dict[str, Any]], always: bool):
        self._trainer, self._models, self._always = trainer, models, always
        self._open: set[str] = set(models())
        self._whole: dict[str, WholeWeights] = {}
        self._promised: list[WholeWeights] = []  # that are kept, but not gathered yet
        self.graphed: dict[str, GraphedLayers] = {}
        trainer.callback_handler.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, model in self._models().items() if self._open else ():
            if name in self._open:
                try:
                    self._decide(name, model)
                except NotCapturable as error:
                    self._open.discard(name)
                    if self._always:
                        raise ConfigError(f"cuda_graphs: always does not go with this training: {error}.") from None
                    self._trainer.graph_reports[name] = f"CUDA graphs: none for the {name}: {error}"
                    announce(self._trainer.graph_reports[name])
        while self._promised:
            self._promised.pop(0).gather()

    def _decide(self, name: str, model: Any) -> None:
        """Record a model's layers from now on, if they have run and it is possible.

        Raises:
            NotCapturable: it is not. The message says why.
        """
        layers = layers_of(model)
        if not any(isinstance(module, FSDPModule) for layer in layers for module in layer.modules()):
            self._open.discard(name)  # a teacher that each process holds as a whole
            self.graphed[name] = GraphedLayers(model, name, trained=name == "student", always=self._always)
            return
        if not all(isinstance(layer, FSDPModule) for layer in layers):
            raise NotCapturable("its decoder layers are no units of FSDP2 one by one")
        whole = WholeWeights(layers)
        if not whole.are_known:  # a teacher that has not been asked yet
            return
        self._open.discard(name)
        try:
            reason, graphed = None, GraphedLayers(model, name, name == "student", self._always, whole=whole)
        except NotCapturable as error:
            reason, graphed = str(error), None
        needed, lacking = self._memory(whole, possible=reason is None)
        if lacking > 0 and graphed is not None and not self._always:
            graphed.undo()
            reason = (
                f"FSDP2 frees its layers' weights: to keep them, and for graphs, each GPU needs {_gib(needed)} more, "
                f"and one lacks {_gib(lacking)} of it" if lacking < MANY else "another process cannot record them"
            )  # fmt: skip
        if reason is not None or graphed is None:
            raise NotCapturable(reason)
        whole.keep()
        self._promised.append(whole)
        self._whole[name], self.graphed[name] = whole, graphed
        announce(f"FSDP2 keeps the whole weights of the {name}'s {len(layers)} layers: {_gib(whole.bytes)} a GPU.")

    def _memory(self, whole: WholeWeights, possible: bool) -> tuple[int, int]:
        """Return the bytes that are needed on this GPU, and how many the fullest lacks; MANY if one cannot record."""
        device = self._trainer.args.device
        free = free_memory(device)
        assert free is not None
        # in the memory of the graphs all gradients are there at once
        needed = (
            sum(other.bytes for other in self._promised) + whole.bytes + whole.gradient_bytes + memory_of_graphs(device)
        )
        lacking = torch.tensor(needed - free if possible else MANY, device=device)
        distributed.all_reduce(lacking, distributed.ReduceOp.MAX)
        return needed, int(lacking)

    def undo(self) -> None:
        """Give the weights back to FSDP2, after the layers are out of their graphs; their reports say what was kept."""
        self._trainer.callback_handler.remove_callback(self)
        for name, whole in self._whole.items():
            self.graphed[name].report += f"; FSDP2 kept their whole weights in place, {_gib(whole.bytes)} a GPU"
            whole.undo()


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
