"""Placeholders of images, counted before the tower runs.

A vision-language model counts the placeholders in its rows once the tower's features are there, to say so if there are
more or fewer of them. That waits until the device has computed the whole tower, and then the device waits for the host,
which makes masks and launches the first layers of the text. Here the ids come to the host when the forward starts: the
count and its message are the model's own, and the device never runs out of work.
"""

import dis
import functools
import inspect
import types
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..common.replacements import Replacements
from . import structure
from .options import PatchOptions, PatchReport

KIND = "placeholders"
_METHOD = "get_placeholder_mask"
_COPIES: Any = WeakIdKeyDictionary()
_IDS: ContextVar[tuple[Any, Any]] = ContextVar("ids", default=(None, None))  # and the same on the host, in a forward


def patch_placeholders(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have models count their placeholders on the host, where they wait for the device to do it."""
    for module in model.modules() if options.towers else ():
        if module not in replacements and _counts(type(module)) and structure.obstacle(module) is None:
            replacements.forward(module, counting_forward)
            replacements.set(module, _METHOD, types.MethodType(_placeholder_mask, module))
            report.swap(KIND)


@functools.cache
def _counts(kind: type) -> bool:
    """Whether a class has the method, compares features in it, and reads no more of the embeddings than their shape.

    Gemma 4's compares none: it is called before there are features or embeddings.
    """
    method = inspect.unwrap(getattr(kind, _METHOD, None) or nn.Module.forward)
    named = set(inspect.signature(method).parameters)
    compares = any(name.endswith("features") for name in named)
    if not compares or not {"input_ids", "inputs_embeds"} <= named or not _takes_images(kind):
        return False
    steps = list(dis.get_instructions(method))
    for i, step in enumerate(steps):
        loads = [s for s in steps[max(0, i - 2) : i] if s.opname.startswith("LOAD_FAST")]
        names = [n for s in loads for n in (s.argval if isinstance(s.argval, tuple) else (s.argval,))]
        takes = "SUBSCR" in step.opname or step.argrepr == "[]"  # from Python 3.14 on the latter
        if takes and names[-2:-1] == ["inputs_embeds"]:
            return False
    return True


def _takes_images(kind: type) -> bool:
    names = list(inspect.signature(kind.forward).parameters)
    return names[1:2] == ["input_ids"] and "pixel_values" in names


def counting_forward(module: Any, *inputs: Any, **named: Any) -> Any:
    """Run the module's own forward, with the ids on the host while it runs."""
    forward = type(module).forward
    ids = named.get("input_ids", inputs[0] if inputs else None)
    images = any(value is not None for name, value in named.items() if name.startswith("pixel_values"))
    if not images or ids is None or not _is_far(ids) or torch.compiler.is_compiling():
        return forward(module, *inputs, **named)
    before = _IDS.set((ids, _on_host(ids)))
    try:
        return forward(module, *inputs, **named)
    finally:
        _IDS.reset(before)


def _on_host(ids: Tensor) -> Tensor:
    """Return ids on the host, those that a teacher has read before its student without waiting again."""
    if ids.is_inference():
        return ids.cpu()
    version, copy = _COPIES.get(ids, (None, ids))
    if version != ids._version:
        copy = ids.cpu()
        _COPIES[ids] = ids._version, copy
    return copy


def _is_far(ids: Tensor) -> bool:
    return ids.is_cuda


def _placeholder_mask(module: Any, input_ids: Any, inputs_embeds: Tensor, *features: Any, **named: Any) -> Any:
    ids, on_host = (None, None) if torch.compiler.is_compiling() else _IDS.get()
    method = getattr(type(module), _METHOD)
    if on_host is None or ids is not input_ids:
        return method(module, input_ids, inputs_embeds, *features, **named)
    stand_in = inputs_embeds.new_empty((), device="cpu").expand(inputs_embeds.shape)
    masks = method(module, on_host, stand_in, *features, **named)
    if isinstance(masks, Tensor):
        return _on_device(masks, inputs_embeds)
    return type(masks)(_on_device(mask, inputs_embeds) for mask in masks)


def _on_device(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Copy a mask (rows, length, 1), or one expanded from that, without waiting."""
    if mask is None:
        return None
    narrow = (mask[..., :1] if mask.stride(-1) == 0 else mask).contiguous()
    narrow = narrow.pin_memory() if like.is_cuda else narrow
    return narrow.to(like.device, non_blocking=True).expand(mask.shape)
