"""What keeps the host ahead of the GPU in a training: decoder layers in CUDA graphs, and fewer walks over modules."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from ..common.console import announce
from ..common.module_walks import without_walks
from ..common.replacements import Replacements
from ..errors import ConfigError
from ..patching.graphs.cuda_graphs import GraphedLayers
from ..patching.graphs.layer_graphs import NotCapturable
from ..patching.patcher import base_of
from .fixed_shapes import few_shapes
from .step_config import ALWAYS, AUTO, NEVER


@contextlib.contextmanager
def host_ahead(trainer: Any) -> Iterator[None]:
    """Within the context, which is one training, the host does less for each step.

    Sets `trainer.graph_reports`: for each model what was done about CUDA graphs, in a line.

    Raises:
        ConfigError: cuda_graphs is "always", and something is against it.
    """
    replacements = Replacements()
    graphed = _graphed(trainer, getattr(trainer.args, "cuda_graphs", AUTO))
    for name, quick in without_walks(trainer.model).items():
        replacements.set(trainer.model, name, types.MethodType(quick, trainer.model))
    if "student" in graphed and not getattr(trainer.args, "samples", False):
        few_shapes(trainer, replacements)
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
            reason = _obstacle(trainer, wanted)
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


def _obstacle(trainer: Any, wanted: str) -> str | None:
    """Return why a training cannot have its layers in graphs, None if nothing is known against it."""
    args = trainer.args
    reasons = {
        f"the device is {args.device.type}": args.device.type != "cuda",
        "FSDP moves weights": trainer.is_fsdp_enabled,
        "DeepSpeed moves weights": trainer.is_deepspeed_enabled,
        "tensor parallelism splits layers": trainer.get_tp_size() > 1,
        "several processes have not been measured": wanted == AUTO and trainer.accelerator.num_processes > 1,
        "torch_compile has graphs of its own": args.torch_compile,
        "activation_offloading moves what layers keep": getattr(args, "activation_offloading", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
