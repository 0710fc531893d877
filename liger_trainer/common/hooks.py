"""Whether somebody relies on a module being called. An op must then not replace the call by the module's weights."""

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


def is_called(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward that is not its class's."""
    return is_hooked(module) or "forward" in vars(module)
