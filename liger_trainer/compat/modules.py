"""What is inside torch's modules: their hooks, and the dictionaries of their parameters, buffers and children.

torch (2.11 to 2.13) keeps these in attributes without a promise.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# Hooks say whether somebody relies on a module being called. An op must then not replace the call by its weights.


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run when a module is called: forward or backward, its own or global ones."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # pyright: ignore[reportAttributeAccessIssue]
    )


def is_hooked_by_others(module: nn.Module) -> bool:
    """Do as `is_hooked`, DeepSpeed's hooks aside, which gather a module's weights. Its reader sees to that itself."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for kind in kinds for hook in kind.values()]
    if hooks and all(map(is_of_deepspeed, hooks)):
        return bool(nn.modules.module._has_any_global_hook())  # pyright: ignore[reportAttributeAccessIssue]
    return is_hooked(module)


def is_of_deepspeed(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


def is_called(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward that is not its class's."""
    return is_hooked(module) or "forward" in vars(module)


# Parameters of a model without a walk over its modules, which takes long where adapters make many small ones.


Places = list[tuple[dict[str, Any], str]]


def parameter_places(modules: Iterable[nn.Module]) -> Places:
    """Return where modules hold their parameters, to be read again later: others may be put in their place."""
    return [(module._parameters, name) for module in modules for name in module._parameters]


def without_walks(model: nn.Module) -> dict[str, Callable]:
    """Return the methods `train` and `zero_grad` for `model`, of which Trainer calls both for each batch.

    With adapters on all layers of a small model, a walk takes as long as a tenth of the step.
    """
    modules = list(model.modules())
    places = parameter_places(modules)

    def train(self, mode: bool = True):
        if mode and self is model and all(module.training for module in modules):
            return self
        return type(self).train(self, mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none or self is not model:  # a deep copy, which has these methods too
            return type(self).zero_grad(self, set_to_none)
        for parameters, name in places:
            parameter = parameters.get(name)
            if parameter is not None:
                parameter.grad = None

    return {"train": train, "zero_grad": zero_grad}
