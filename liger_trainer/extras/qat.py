"""Quantisation-aware training: steps see quantised weights, and the optimizer moves the weights behind them.

The straight-through estimator (Bengio et al. 2013, arXiv:1308.3432; for weights Jacob et al. 2018, arXiv:1712.05877)
takes the gradient of the quantised weight for the weight's. So a step can be computed with the quantised numbers
in the model's own parameters: kernels, CUDA graphs, checkpointing, generation and evaluation need not know. The numbers
are what torchao's `quantize_` makes of the weights, hence those of the model that is used later.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.quantizers.quantizers_utils import should_convert_module

from ..compat.models import modules_kept_in_fp32
from ..errors import ConfigError
from ..patching.patcher import base_of
from ..plugins import QUANTISED, TrainerPlugin
from ..trainers.host import TrainerHost
from ..trainers.options import INT4, INT8, NVFP4, updating_in_backward

# inputs that share a scale in NVFP4; torchao wants outputs in as many, too
NVFP4_GROUP = 16


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return by name the layers that are quantised: those that transformers' `TorchAoConfig` takes when it loads the
    model, which are all linear ones but the output head, what is tied, and the last module."""
    head, ties = model.get_output_embeddings(), model.all_tied_weights_keys
    # transformers skips the last module when it loads a model, as that is often the head
    last = list(model.named_parameters(remove_duplicate=False))[-1][0]  # while it loads, nothing is tied yet
    whole = [key.removesuffix(".weight") for key in (last, *ties, *ties.values())]
    whole += modules_kept_in_fp32(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        name: layer
        for name, layer in layers.items()
        if layer is not head and should_convert_module(f"{name}.weight", whole)
    }


def quantised_weights(model: Any) -> "QuantisedWeights | None":
    """Return what holds the weights behind a model's quantised ones; None where it has none."""
    return vars(base_of(model)).get(QUANTISED)


class QatPlugin(TrainerPlugin):
    """`qat` for the trainers."""

    def before_model(self, model: Any) -> None:
        """Put the weights behind back for good, where an earlier trainer has quantised a model, before it is copied."""
        weights = quantised_weights(model) if isinstance(model, nn.Module) else None
        if weights is not None:
            weights.release()
            delattr(base_of(model), QUANTISED)

    def after_init(self, trainer: TrainerHost) -> None:
        """Quantise a trainer's model as its configuration has it."""
        qat: str | None = getattr(trainer.args, "qat", None)
        if qat is not None:
            weights = QuantisedWeights(trainer, qat, trainer.args.qat_group_size)
            trainer.add_callback(weights)
            setattr(base_of(trainer.model), QUANTISED, weights)

    def check(self, trainer: TrainerHost) -> None:
        """Refuse a model that a trainer made later has given other weights than this one's."""
        callbacks = trainer.callback_handler.callbacks
        ours = next((callback for callback in callbacks if isinstance(callback, QuantisedWeights)), None)
        now = quantised_weights(trainer.model)
        if now is not ours:
            are = "are no longer quantised" if now is None else "are quantised again"
            raise ConfigError(
                f"qat: a trainer that was made later has got this model, whose weights {are}. Make the other trainer "
                "when this one is done, or give it a copy of the model."
            )

    def files_hold(self, trainer: TrainerHost) -> contextlib.AbstractContextManager[None]:
        weights = quantised_weights(trainer.model)
        return contextlib.nullcontext() if weights is None else weights.lifted()


PLUGIN = QatPlugin()


class QuantisedWeights(TrainerCallback):
    """Puts the quantised numbers into a model's linear layers, and the weights behind them back for each update.

    Args:
        trainer: its model must hold whole weights.
        qat, group_size: see `QatConfig`.

    Raises:
        ConfigError: torchao is missing; adapters, sharded or offloaded weights, or an optimizer that changes weights
            outside of its step; a model without linear layers, or with one of a shape or dtype that the format does
            not have; a training of a model that `model_init` has made, or after `release`.
    """

    def __init__(self, trainer: TrainerHost, qat: str, group_size: int):
        _check(trainer)
        self._format = torchao_config(qat, group_size)
        layers = linear_layers(trainer.model)
        _check_layers(trainer.model, layers, qat, {INT4: group_size, INT8: 1}.get(qat, NVFP4_GROUP))
        self._weights = [layer.weight for layer in layers.values()]
        # The weights as they are trained. The parameters hold them only while the optimizer steps.
        self._behind = [weight.detach().clone() for weight in self._weights]
        self._quantise()

    @torch.no_grad()
    def _quantise(self) -> None:
        for weight, behind in zip(self._weights, self._behind, strict=True):
            weight.copy_(quantised(behind, self._format))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within the context the model has the weights behind the quantised ones, to be saved or loaded."""
        self._restore_weights()
        try:
            yield
        finally:
            self._take_weights()

    @torch.no_grad()
    def _restore_weights(self) -> None:
        for weight, behind in zip(self._weights, self._behind, strict=True):
            weight.copy_(behind)

    @torch.no_grad()
    def _take_weights(self) -> None:
        for weight, behind in zip(self._weights, self._behind, strict=True):
            behind.copy_(weight)
        self._quantise()

    def release(self) -> None:
        """Leave the weights behind in the model, and forget them."""
        self._restore_weights()
        self._weights, self._behind = [], []

    def on_train_begin(self, args, state, control, model: Any = None, optimizer: Any = None, **kwargs) -> None:
        if quantised_weights(model) is not self:
            raise ConfigError("qat goes with no model_init: the model that it makes is not quantised. Give a model.")
        if not self._weights:
            raise ConfigError("qat: the weights have been released. Make a new trainer of this model.")
        # accelerate's wrapper holds the optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        # schedule-free optimizers have train() and eval()
        if callable(getattr(inner, "eval", None)):
            raise ConfigError(f"qat does not go with {type(inner).__name__}, which swaps weights for evaluations.")
        self._quantise()  # a training that was interrupted in its optimizer's step has left the weights behind

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._restore_weights()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._take_weights()


def torchao_config(qat: str, group_size: int) -> Any:
    """Return torchao's configuration of a format, as `TorchAoConfig` and `quantize_` take it."""
    try:
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig  # pyright: ignore[reportMissingImports]
        from torchao.quantization import (  # pyright: ignore[reportMissingImports]
            IntxWeightOnlyConfig,
            PerAxis,
            PerGroup,
        )
    except ImportError as error:
        raise ConfigError(f"qat needs torchao: pip install torchao ({error}).") from None
    if qat == INT4:
        return IntxWeightOnlyConfig(getattr(torch, INT4), PerGroup(group_size))
    return IntxWeightOnlyConfig(torch.int8, PerAxis(0)) if qat == INT8 else NVFP4WeightOnlyConfig()


def quantised(weight: Tensor, config: Any) -> Tensor:
    """Return the numbers (out, in) that torchao's format has in place of a linear layer's weight, in its dtype."""
    from torchao.quantization import quantize_  # pyright: ignore[reportMissingImports]

    # on the meta device: a real one would draw numbers from torch's generator, and change the run
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    # quantize_ replaces the children of a module, so the layer needs a parent
    quantize_(nn.Sequential(layer), config)
    packed: Any = layer.weight
    return packed.dequantize()


def _check(trainer: TrainerHost) -> None:
    optim = updating_in_backward(trainer.args)
    reasons = {
        "adapters, since their base stays as it is: train them on packed weights with load_in_4bit": hasattr(
            trainer.model, "peft_config"
        ),
        "FSDP, which shards weights": trainer.is_fsdp_enabled,
        "DeepSpeed, which steps by itself": trainer.is_deepspeed_enabled,
        "tensor parallelism": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        f"optim={optim}, which updates weights in its backward": optim is not None,
        "bf16_full_eval and fp16_full_eval, which round the weights that are trained": (
            trainer.args.bf16_full_eval or trainer.args.fp16_full_eval
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"qat does not go with {reason}.")


def _check_layers(model: Any, layers: dict[str, nn.Linear], qat: str, group: int) -> None:
    if not layers:
        raise ConfigError(f"qat: {type(model).__name__} has no linear layers except its head.")
    for name, layer in layers.items():
        dtype = layer.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise ConfigError(f"qat: expected weights of 16 or 32 bits, {name} has {dtype}.")
        if qat == NVFP4 and dtype == torch.float16:
            raise ConfigError(f"qat: nvfp4 knows bfloat16 and float32, {name} has {dtype}. Load it with another dtype.")
        if layer.weight.is_meta:
            raise ConfigError(f"qat: {name} is offloaded. Load the model without a device_map that offloads.")
        if layer.in_features % group:
            raise ConfigError(f"qat: expected groups of {group} inputs, {name} has {layer.in_features} inputs.")
        if qat == NVFP4 and layer.out_features % NVFP4_GROUP:
            raise ConfigError(f"qat: nvfp4 has outputs in {NVFP4_GROUP}s, {name} has {layer.out_features} outputs.")
