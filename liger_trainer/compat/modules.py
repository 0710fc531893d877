"""What is inside torch's modules: their hooks, and the dictionaries of their parameters, buffers and children.

Also the attributes by which accelerate puts a hook around a module's forward. torch (2.8 to 2.14) has public walks
over the same dictionaries, but they skip None and names of one tensor, make new objects, and cost a step's host time:
these functions return the dictionaries themselves.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
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


def hook_places(modules: Iterable[nn.Module]) -> list[dict]:
    """Return the dictionaries of the hooks that run when modules are called, to be asked again later."""
    return [
        hooks for module in modules
        for hooks in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        )
    ]  # fmt: skip


def any_hook(places: Iterable[dict]) -> bool:
    """Whether there is a hook in one of these dictionaries, or a global one."""
    return any(places) or bool(nn.modules.module._has_any_global_hook())  # pyright: ignore[reportAttributeAccessIssue]


def is_hooked_by_others(module: nn.Module) -> bool:
    """Do as `is_hooked`, DeepSpeed's hooks aside, which gather a module's weights. Its reader sees to that itself."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for kind in kinds for hook in kind.values()]
    if hooks and all(map(is_of_deepspeed, hooks)):
        return bool(nn.modules.module._has_any_global_hook())  # pyright: ignore[reportAttributeAccessIssue]
    return is_hooked(module)


def is_of_deepspeed(hook: Any) -> bool:
    """Whether DeepSpeed has made a hook: its functions and closures keep the name of their module."""
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


def is_of_fsdp2(hook: Any) -> bool:
    """Whether FSDP2 has made a hook around a module's forward: those of its state keep the name of their module."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")


def is_hooked_by_deepspeed(module: nn.Module) -> bool:
    """Whether DeepSpeed has put a hook before a module's forward."""
    return any(map(is_of_deepspeed, module._forward_pre_hooks.values()))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks want the gradients of what a module takes or returns: its own, or those of all modules."""
    torchs: Any = nn.modules.module
    of_all = torchs._global_backward_hooks, torchs._global_backward_pre_hooks
    return any((module._backward_hooks, module._backward_pre_hooks, *of_all))


def is_called(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward that is not its class's."""
    return is_hooked(module) or "forward" in vars(module)


@contextlib.contextmanager
def without_some_hooks(modules: Iterable[nn.Module], left_out: Callable[[int, Any], bool]) -> Iterator[None]:
    """Within the context, modules run without the hooks around their forward that are `left_out(id, hook)`.

    The dictionaries are exchanged, and not emptied: what is registered meanwhile is dropped, and removing a hook by
    its handle, which knows the dictionary, works as ever.
    """
    places = [(vars(module), name) for module in modules for name in ("_forward_hooks", "_forward_pre_hooks")]
    before = [attributes[name] for attributes, name in places]
    for (attributes, name), hooks in zip(places, before, strict=True):
        attributes[name] = OrderedDict((k, hook) for k, hook in hooks.items() if not left_out(k, hook))
    try:
        yield
    finally:
        for (attributes, name), hooks in zip(places, before, strict=True):
            attributes[name] = hooks


# accelerate (1.14 and 1.15) moves the forward of a module with a hook to `_old_forward`, and back when it takes the
# hook off. A model that is spread over devices or offloaded has such hooks on its layers.
FORWARD_PLACES = {"forward": "_old_forward", "_old_forward": "forward"}  # each with the other


def place_of_forward(module: nn.Module) -> str:
    """Return the attribute with the forward that runs: a hook of accelerate calls another than `forward`."""
    return "_old_forward" if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward") else "forward"


def replaced_forward(module: nn.Module) -> Any:
    """Return the forward that a module itself has in place of its class's, below accelerate's hook; None without."""
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    return vars(module).get("_old_forward" if hooked else "forward")


def accelerate_hook(module: nn.Module) -> Any:
    """Return accelerate's hook on a module itself, None without one."""
    return vars(module).get("_hf_hook")


def forward_is_moved(module: nn.Module) -> bool:
    """Whether accelerate has put its own forward on a module itself, which calls the one that was there."""
    return "_old_forward" in vars(module)


def forward_below_hook(module: nn.Module) -> Any:
    """Return the forward that accelerate's hook on a module calls, None without a hook."""
    hooked = getattr(module, "_hf_hook", None) is not None
    return getattr(module, "_old_forward", None) if hooked else None


# The dictionaries of a module


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of the parameters that it holds itself, by name; some may be None."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of the buffers that it holds itself, by name; some may be None."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of its children by name; some may be None, and one may have two names."""
    return module._modules


def is_compiled(model: nn.Module) -> bool:
    """Whether it is the module that torch.compile has put around another one."""
    return "_orig_mod" in model._modules


def copy_without_tensors(module: nn.Module, left_out: Collection[str], training: bool) -> nn.Module:
    """Return a module of the same class and attributes, without hooks and children, whose tensors are None.

    Args:
        left_out: further attributes that it does not get.
    """
    copy = object.__new__(type(module))  # no constructor: it would draw full-size weights
    left_out = ("forward", "_old_forward", "_hf_hook", *left_out)
    vars(copy).update({k: v for k, v in vars(module).items() if k not in left_out})
    vars(copy).update(vars(nn.Module()), training=training)  # empty dictionaries in place of those of the module
    copy._parameters.update(dict.fromkeys(module._parameters))
    copy._buffers.update(dict.fromkeys(module._buffers))
    return copy


def without_child(module: nn.Module, name: str, kind: type) -> nn.Module:
    """Return a module of class `kind` with the tensors and attributes of another one, and without one child."""
    plain = object.__new__(kind)
    children = {other: child for other, child in module._modules.items() if other != name}
    vars(plain).update({**vars(module), "_modules": children})
    return plain


# Parameters of a model without a walk over its modules, which takes long where adapters make many small ones.


Places = list[tuple[dict[str, Any], str]]


def parameter_places(modules: Iterable[nn.Module]) -> Places:
    """Return where modules hold their parameters, to be read again later: others may be put in their place."""
    return [(module._parameters, name) for module in modules for name in module._parameters]


def without_walks(model: nn.Module) -> dict[str, Callable]:
    """Return the methods `train` and `zero_grad` for `model`, of which Trainer calls both for each batch.

    With adapters on all layers of a small model, a walk takes as long as a tenth of the step. It is taken again only
    where somebody, such as a callback that adds adapters, has put a module in or taken one out.
    """
    modules: list[nn.Module] = []
    children: list[list[nn.Module | None]] = []

    def all_modules() -> list[nn.Module]:
        same = (list(module._modules.values()) == known for module, known in zip(modules, children, strict=True))
        if not modules or not all(same):
            modules[:] = model.modules()
            children[:] = [list(module._modules.values()) for module in modules]
        return modules

    def train(self, mode: bool = True):
        if mode and self is model and all(module.training for module in all_modules()):
            return self
        return type(self).train(self, mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none or self is not model:  # a deep copy, which has these methods too
            return type(self).zero_grad(self, set_to_none)
        for module in all_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None

    return {"train": train, "zero_grad": zero_grad}
