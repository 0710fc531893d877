"""`patch(model)`: our kernels and the fused loss in one model object.

Each part, in a separate file, recognises its kind of layer by structure and proves it on a miniature before it swaps
anything (structure.py). Nothing but the model object is touched; `undo()` gives it back as it was.
"""

import copy
import inspect
import logging
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ..common.replacements import Replacements
from ..compat.code_objects import argument_of_deepcopy
from ..compat.deepspeed import LEAF
from ..compat.models import LOSS_FUNCTION
from ..compat.modules import is_compiled, is_hooked_by_deepspeed
from ..compat.recognitions import LOSS, calls_loss_function, check
from ..compat.torch_internals import REPLICATE
from ..errors import ConfigError
from ..losses.answers import stored_logits_loss
from ..losses.deferred_logits import DeferredLogits
from ..losses.fused_forward import FusedLoss, check_loss, has_trl_head
from ..losses.model_parts import decoder_layers, output_module
from ..losses.spec import LossOptions
from .layers.attention import patch_attention
from .layers.experts import patch_experts, patch_stacked_experts
from .layers.linears import patch_linears
from .layers.lora import patch_lora
from .layers.mlps import REMADE, patch_mlps, remake_mlps
from .layers.norms import patch_gated_norms, patch_norms
from .options import NothingToPatch, PatchOptions, PatchReport
from .packing.packed_attention import KIND, pack_attention
from .packing.token_mixers import patch_hybrids
from .vision import patch_patch_embedding, patch_placeholders, patch_tower_attention

_MARK = "_liger_patched"
_NO_LOSS_FUNCTION = (
    "the model's forward does not call `loss_function`: it computes the loss itself, from stored logits, or none"
)
# Parts that compute several layers at once come first: attention takes norms, MLPs take LoRA layers.
PARTS = (
    patch_attention, patch_gated_norms, patch_norms, patch_mlps, patch_experts, patch_stacked_experts, patch_lora,
    patch_linears, patch_hybrids, patch_tower_attention, patch_patch_embedding, patch_placeholders,
)  # fmt: skip


class Patched:
    """The record of a patched model, with the way back. As a context manager it undoes the patch on leaving.

    Attributes:
        model: the patched model, without PEFT around it.
        options: what to replace.
        report: what was replaced, and what stays and why.
        fused: the fused loss, or None if it was not wanted or the model has another loss.
    """

    def __init__(self, model: Any, options: PatchOptions, loss: LossOptions | None = None):
        self.options, self.report = options, PatchReport(_name(model))
        self.fused: FusedLoss | None = None
        self.model, self._replacements, self._packed = model, Replacements(), Replacements()
        self._remade = Replacements()
        try:
            for part in PARTS:
                part(model, options, self._replacements, self.report)
            self._patch_loss(loss)
            gather_by_layers(model, self._replacements)
        except BaseException:
            self.undo()
            raise
        if not self.report.swapped:
            self.undo()
            raise NothingToPatch(self.report, options)
        for name, guard in GUARDS.items():
            self._replacements.set(model, name, types.MethodType(guard, model))
        self._replacements.set(model, _MARK, self)

    def _patch_loss(self, loss: LossOptions | None) -> None:
        wanted = self.options.cross_entropy or self.options.fused_linear_cross_entropy
        if wanted and loss is None and not calls_loss_function(type(self.model)):
            check(LOSS)
            self.report.leave("loss", _NO_LOSS_FUNCTION)
            return
        try:
            if self.options.cross_entropy:
                check_loss(self.model)
                self._replacements.set(self.model, LOSS_FUNCTION, stored_logits_loss)
                self.report.swap("cross-entropy")
            elif self.options.fused_linear_cross_entropy:
                self._fuse(loss)
        except ConfigError as error:
            self.report.leave("loss", str(error))

    def _fuse(self, loss: LossOptions | None) -> None:
        if loss is None and has_trl_head(self.model):
            raise ConfigError("a trainer of TRL computes it from the hidden states already")
        if loss is None and output_module(self.model) is None:
            raise ConfigError("the model has no output embeddings, so its logits are stored")
        self.fused = FusedLoss(self.model, loss)
        self.report.swap("fused loss")

    def fuse(self, loss: LossOptions) -> FusedLoss:
        """Fuse the loss again, with a trainer's options, on top of whatever has wrapped the model's forward since.

        Raises:
            ConfigError: the model's loss is not the causal-LM cross-entropy.
        """
        if self.fused is not None:
            self.fused.undo()
            self.fused = None
            del self.report.swapped["fused loss"]
        self._fuse(loss)
        assert self.fused is not None
        return self.fused

    def pack_attention(self, sliced: bool = False) -> None:
        """Compute attention over packed rows by lengths, without a mask, where the model runs sdpa or eager attention.

        The report says whether it does. Once is enough; `unpack_attention` takes it off. `sliced`: of the rows, each
        rank has a slice.
        """
        if not self.packs_attention:
            pack_attention(self.model, self._packed, self.report, sliced)

    @property
    def packs_attention(self) -> bool:
        """Return whether `pack_attention` was called, and `unpack_attention` not since."""
        return bool(len(self._packed))

    def unpack_attention(self) -> None:
        """Give the model its own attention over packed rows back. Doing it twice does nothing."""
        self._packed.undo()
        self.report.swapped.pop(KIND, None)

    def remake_mlps(self, every: int) -> None:
        """Have gated MLPs of every n-th decoder layer make gate(x) and up(x) again in the backward; 0: of none.

        It stands for the last call. Decoder layers without an MLP that can are not counted.

        Raises:
            ConfigError: none can, or the decoder layers are not recognised.
        """
        self._remade.undo()
        self.report.swapped.pop(REMADE, None)
        if every:
            remake_mlps(self.model, every, self.options, self._remade, self.report)

    def undo(self) -> None:
        """Give the model back as it was, object for object. Doing it twice does nothing."""
        # In the reverse order of patching: each part puts back what it found.
        if self.fused is not None:
            self.fused.undo()
            self.fused = None
        self._packed.undo()
        self._remade.undo()
        self._replacements.undo()

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch(model: Any, options: PatchOptions | Mapping[str, bool] | None = None, **flags: bool) -> Patched:
    """Replace layers and loss of one model object by our kernels.

    Args:
        model: a transformers model, or a PEFT model around one. It may be on the meta device, spread by `device_map`,
            and wrapped by PEFT before or after.
        options: what to replace; everything by default. `flags` are the same options by keyword.

    Returns:
        The record; the former one if the model is already patched with these options.

    Raises:
        ConfigError: `model` is no model, or torch.compile or DDP has wrapped it; an option is unknown; options exclude
            each other; the model is patched with other options; it has nothing to replace.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"patch takes a model that is loaded, got {model!r:.80}. "
            "AutoLigerKernelForCausalLM.from_pretrained loads one and patches it."
        )
    if is_compiled(model) or isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"patch takes the model itself, not the {type(model).__name__} around it, which hides its loss: "
            "patch first, then compile or wrap."
        )
    if not isinstance(options, PatchOptions):
        options = PatchOptions.of({**(options or {}), **flags})
    elif flags:
        raise ConfigError("Give options or keywords, not both.")
    base, record = base_of(model), patched_record(model)
    if record is None:
        return Patched(base, options)
    if record.options != options:
        raise ConfigError(
            f"This {type(base).__name__} is patched with {record.options}. Undo that before: patched.undo()."
        )
    return record


def patched_record(model: Any) -> Patched | None:
    """Return the record of a patched model, None for any other. A PEFT model counts as the model that it wraps."""
    return vars(base_of(model)).get(_MARK)


def base_of(model: Any) -> Any:
    """Return the model that a PEFT model wraps; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _name(model: Any) -> str:
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__


def _refuse_data_parallel(model: Any) -> None:
    """Stand in for what nn.DataParallel calls: the replicas would run forwards that are bound to the original."""
    raise ConfigError(
        "A patched model does not run under nn.DataParallel, which Trainer uses when one process sees several GPUs. "
        "Launch with `torchrun` or `accelerate launch`, or show the process one GPU with CUDA_VISIBLE_DEVICES."
    )


def _refuse_to_pickle(model: Any, protocol: Any = None) -> None:
    """Stand in for `__reduce_ex__`, which pickle calls before it writes any weights."""
    raise pickle.PicklingError(
        f"A patched {type(model).__name__} cannot be pickled, as torch.save(model), copy.copy(model) and spawned "
        "processes do: its forwards are functions made in this process. Save it with model.save_pretrained(...) or "
        "torch.save(model.state_dict(), ...), or undo the patch first: patched.undo(). copy.deepcopy(model) works."
    )


def _deep_copy(model: Any, memo: dict[int, Any]) -> Any:
    """Stand in for `__deepcopy__`, because copy.deepcopy would call `__reduce_ex__`.

    The copy has its own guards and record: a deep copy of a bound method is bound to the copy. A PEFT model looks
    attributes up in the model that it wraps, and so finds this method when it is copied itself.
    """
    copied = argument_of_deepcopy()
    model = model if copied is None else copied
    memo[id(model)] = clone = object.__new__(type(model))
    clone.__setstate__(copy.deepcopy(model.__getstate__(), memo))
    return clone


# Methods that a patched model has in place of its class's.
GUARDS: dict[str, Callable] = {
    REPLICATE: _refuse_data_parallel,
    "__reduce_ex__": _refuse_to_pickle,
    "__deepcopy__": _deep_copy,
}


# DeepSpeed's ZeRO-3 by decoder layers.
#
# DeepSpeed gathers a module's own parameters by hooks on it. Our ops read the weights of several modules at once, so
# they need a whole layer gathered: DeepSpeed calls that a leaf. It then has no hooks inside, and fewer and larger
# messages.
#
# DeepSpeed sums the gradients of a leaf over the ranks when the input's gradient is known. The input of the first layer
# over frozen embeddings needs none, so the layer's gradients would be summed before they are computed. So it gets one.


def gather_by_layers(model: Any, replacements: Replacements) -> None:
    """Have ZeRO-3, if it is configured, gather each decoder layer of a model as one. Call it before DeepSpeed starts.

    A model whose decoder layers are not recognised, or which DeepSpeed has hooked, is gathered module by module.
    """
    if not is_deepspeed_zero3_enabled():
        return
    from deepspeed.utils import logger  # pyright: ignore[reportMissingImports]

    logger.addFilter(_is_not_of_deferred_logits)  # a second time adds nothing
    try:
        _, layers = decoder_layers(model)
    except ConfigError:
        return
    if is_hooked_by_deepspeed(layers[0]):
        return
    for layer in layers:
        replacements.set(layer, LEAF, True)
        replacements.pre_hook(layer, _with_gradient_of_input)


def _with_gradient_of_input(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the arguments with hidden states that need a gradient, first and by position, where hooks see them."""
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in layer.parameters()):
        return None
    if not args:
        name = list(inspect.signature(type(layer).forward).parameters)[1]
        args = (kwargs.pop(name),)
    hidden, *others = args
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *others), kwargs


def _is_not_of_deferred_logits(record: logging.LogRecord) -> bool:
    """Leave out DeepSpeed's warning that an output head returns none of the types that it knows: it need not."""
    return DeferredLogits.__name__ not in record.getMessage()
