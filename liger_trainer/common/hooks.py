"""Whether somebody counts on the call of a module, so that no op may pass over it."""

from torch import nn


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run where a module is called, forward or backward, its own or those of all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # pyright: ignore[reportAttributeAccessIssue]
    )


def is_called(module: nn.Module) -> bool:
    """Whether somebody counts on the call of a module: it is hooked, or it has another forward than its class."""
    return is_hooked(module) or "forward" in vars(module)
