"""Whether somebody relies on a module being called. An op must then not replace the call by the module's weights."""

from typing import Any

from torch import nn


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
