"""One step of a patched model and of a plain one: the same loss and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny import assert_same_gradients, masked_batch, named_gradients
from torch import Tensor

from liger_trainer import PatchOptions


def step(model: Any, batch: dict | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its gradients if there are any."""
    loss = model(**(batch or masked_batch())).loss
    return loss.detach(), named_gradients(model, loss) if loss.requires_grad else {}


def assert_same_outcome(got: tuple, want: tuple, rtol: float = 1e-5, loss_rtol: float = 1e-6) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=loss_rtol, atol=0)
    assert bool(got[1]) == bool(want[1])
    if want[1]:
        assert_same_gradients(got[1], want[1], rtol)


def assert_same_step(model: Any, plain: Any, batch: dict | None = None, **bounds: float) -> None:
    """Random draws, too, are the same in both."""
    results = []
    for each in (model, plain):
        torch.manual_seed(5)
        results.append(step(each, batch))
    assert_same_outcome(*results, **bounds)


def lora(**options: Any) -> LoraConfig:
    """Plain LoRA on every linear layer, B not zero."""
    plain = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False}
    return LoraConfig(**{**plain, **options})


def adapted(model: Any, autocast_adapter_dtype: bool = True, **options: Any) -> Any:
    """The model with adapters that are the same each time, in train mode."""
    torch.manual_seed(1)
    return get_peft_model(model, lora(**options), autocast_adapter_dtype=autocast_adapter_dtype).train()


# What may be switched after patching: what a layer or its experts compute is decided when they are called.
ADAPTER_STATES: dict[str, Callable[[Any], Any]] = {
    "the first of two": lambda model: model.set_adapter("default"),
    "the second of two": lambda model: model.set_adapter("other"),
    "both at once": lambda model: model.base_model.set_adapter(["default", "other"]),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.base_model.merge_adapter(),
    "merged and taken apart": lambda model: (model.base_model.merge_adapter(), model.base_model.unmerge_adapter()),
    "rescaled": lambda model: [m.scale_layer(0.3) for m in model.modules() if hasattr(m, "scale_layer")],
}


def only(*options: str) -> dict[str, bool]:
    """Options of `patch` for these parts and no others."""
    return {option: option in options for option in vars(PatchOptions())}
