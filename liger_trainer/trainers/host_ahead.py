"""What keeps the host ahead of the GPU in a training: decoder layers in CUDA graphs, and fewer walks over modules."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..common.console import announce
from ..common.replacements import Replacements
from ..errors import ConfigError
from ..patching.cuda_graphs import GraphedLayers, NotCapturable
from ..patching.patcher import base_of
from .step_config import ALWAYS, AUTO, NEVER


@contextlib.contextmanager
def host_ahead(trainer: Any) -> Iterator[None]:
    """Within the context, which is one training, the host does less for each step.

    Sets `trainer.graph_reports`: for each model what was done about CUDA graphs, in a line.

    Raises:
        ConfigError: cuda_graphs is "always", and something is against it.
    """
    replacements = Replacements()
    replacements.set(trainer.model, "train", types.MethodType(_train_where_needed(trainer.model), trainer.model))
    graphed = _graphed(trainer, getattr(trainer.args, "cuda_graphs", AUTO))
    try:
        yield
    finally:
        for name, layers in graphed.items():
            trainer.graph_reports[name] = layers.report
            layers.undo()
        replacements.undo()


def _graphed(trainer: Any, wanted: str) -> dict[str, GraphedLayers]:
    """Return, by the models' names, their layers in graphs."""
    trainer.graph_reports = {}
    if wanted == NEVER or trainer.args.device.type != "cuda" and wanted == AUTO:
        return {}
    graphed: dict[str, GraphedLayers] = {}
    for name, model in {"student": base_of(trainer.model), **trainer.frozen_models()}.items():
        try:
            reason = _obstacle(trainer)
            if reason is not None:
                raise NotCapturable(reason)
            graphed[name] = GraphedLayers(model, name, trained=name == "student", always=wanted == ALWAYS)
        except NotCapturable as error:
            if wanted == ALWAYS:
                for layers in graphed.values():
                    layers.undo()
                raise ConfigError(f"cuda_graphs: always does not go with this training: {error}.") from None
            trainer.graph_reports[name] = f"CUDA graphs: none for the {name}: {error}"
            announce(trainer.graph_reports[name])
    return graphed


def _obstacle(trainer: Any) -> str | None:
    """Return why a training cannot have its layers in graphs, None if nothing is known against it."""
    args = trainer.args
    reasons = {
        f"the device is {args.device.type}": args.device.type != "cuda",
        "FSDP moves weights": trainer.is_fsdp_enabled,
        "DeepSpeed moves weights": trainer.is_deepspeed_enabled,
        "tensor parallelism splits layers": trainer.get_tp_size() > 1,
        "torch_compile has graphs of its own": args.torch_compile,
        "activation_offloading moves what layers keep": getattr(args, "activation_offloading", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _train_where_needed(model: Any) -> Callable:
    """Return `model.train` that walks over the modules only where one of them does not train.

    Trainer calls it for each micro-batch. With adapters on all layers that takes 10 ms.
    """
    modules = list(model.modules())

    def train(self, mode: bool = True):
        if mode and all(module.training for module in modules):
            return self
        return type(self).train(self, mode)

    return train
