"""Parts of a causal LM: its output head, its decoder layers, its device.

The head is read when it is used, because FSDP and PEFT replace modules and parameters after patching. PEFT's layers are
recognised by the forward that they run: PEFT need not be imported, and a layer with a replaced forward is not mistaken
for what it was.

FSDP2 gathers a weight just before the forward of its module, and sums the gradient over the ranks only through the
gathered copy. So the head of a model in training is read inside its own forward, after `gather`. ZeRO-3 gathers it for
the whole pass of the model that `gather_head_for_pass` has prepared.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..common.replacements import own_attribute
from ..compat.code_objects import name_in_source
from ..compat.deepspeed import is_needed_in, is_partitioned, need_in, shape_of
from ..compat.models import adapters_of_wrapper, check_tokens
from ..compat.modules import has_backward_hooks, is_hooked_by_others
from ..compat.torch_internals import FakeTensor
from ..errors import ConfigError
from ..kernels.types import Lora, VocabParallel
from ..plugins import KEEPS_ROWS, load


@dataclass(frozen=True)
class Head:
    """A linear output head as plain tensors: x @ weight.T + bias, and the low-rank terms of its adapters.

    The tensors are whole, or this rank's rows where `parallel` says how the rows lie on the ranks.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    lora: tuple[Lora, ...] = ()
    parallel: VocabParallel | None = None
    gather: "Callable[[], Head] | None" = None  # makes the whole head of these rows, or raises ConfigError

    def whole(self) -> "Head":
        return self if self.gather is None else self.gather()

    @property
    def vocab(self) -> int:
        return shape_of(self.weight)[0] if self.parallel is None else self.parallel.vocab

    def detached(self) -> "Head":
        """Return the tensors without gradient, which stay what they are when DeepSpeed frees the parameters."""
        bias = None if self.bias is None else self.bias.detach()
        lora = tuple(adapter._replace(a=adapter.a.detach(), b=adapter.b.detach()) for adapter in self.lora)
        return replace(self, weight=self.weight.detach(), bias=bias, lora=lora)

    @classmethod
    def read(cls, module: nn.Module | None) -> "Head | str":
        """Return the head, or in words why `module` cannot be replaced by what a `Head` holds."""
        read = reader_of(module)
        return read if isinstance(read, str) else read(module)


Reader = Callable[[Any], Head | str]


def reader_of(module: nn.Module | None) -> Reader | str:
    """Return the function that reads the head of such a module, or in words why it cannot be replaced."""
    if module is None:
        return "the model has no output embeddings"
    if own_attribute(module, "forward") is not None:
        return f"the forward of its output head ({type(module).__name__}) has been replaced"
    if has_backward_hooks(module):
        return f"its output head ({type(module).__name__}) has backward hooks, which need the gradient of its logits"
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return _of_linear
    reader = _PEFT_READERS.get(f"{forward.__module__}.{name_in_source(forward)}")
    return reader or f"its output head is a {type(module).__name__}, which does more than a linear map"


def gather(module: nn.Module, model: nn.Module) -> None:
    """Make sure that the head of `model` holds whole weights from its forward to the backward.

    The loss reads them after the head's forward is over. Only FSDP2 has anything to gather.

    Raises:
        ConfigError: FSDP2 shards a trained weight with a module whose forward is not running; ZeRO-3 gathers one only
            for the head's forward.
    """
    freed = [name for name, p in module.named_parameters() if is_partitioned(p) and not is_needed_in(model, p)]
    if freed:
        raise ConfigError(
            f"ZeRO-3 gathers {', '.join(freed)} of the output head ({type(module).__name__}) only for its own forward: "
            "the model was patched before DeepSpeed was configured, or its head was changed since. Make the training "
            "arguments first, then patch the model that will be trained."
        )
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
    sharded = [name for name, p in module.named_parameters() if p.requires_grad and hasattr(p, "full_tensor")]
    if not sharded or not torch.is_grad_enabled() or getattr(model, "tp_size", None):
        return
    if any(isinstance(unit, FSDPModule) for unit in model.modules()):
        raise ConfigError(
            f"FSDP2 has not gathered {', '.join(sharded)} of the output head ({type(module).__name__}) for its "
            "forward, so its gradient would be of one rank. Call the module that fully_shard was given last, not "
            "one inside of it, or give the head its own unit."
        )


def gather_head_for_pass(model: nn.Module) -> None:
    """Have ZeRO-3 gather the output head of a model for the model's whole pass, forward and backward."""
    module = output_module(model)
    if module is not None:
        need_in(model, list(module.parameters()))


def _of_linear(module: Any) -> Head | str:
    weight, bias = module.weight, module.bias
    if not weight.is_floating_point():
        return f"the weight of its output head ({type(module).__name__}) is not a floating-point matrix"
    special = next((x for x in (weight, module.bias) if x is not None and not _is_plain(x)), None)
    if special is not None:
        return f"its output head ({type(module).__name__}) holds a {type(special).__name__}, which is no plain matrix"
    return Head(_whole(weight), None if bias is None else _whole(bias))


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds a tensor as it is, in this process or, sharded, in several: no quantised or packed one."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, FakeTensor)


def _of_wrapper(module: Any) -> Head | str:
    """Read PEFT's wrapper of modules to save, which uses the active adapter's copy, or of trainable tokens."""
    if hasattr(module, "token_adapter"):
        return Head.read(module.token_adapter)
    active = module.active_adapters
    if module.disable_adapters or not active or any(name not in adapters_of_wrapper(module) for name in active):
        return Head.read(module.original_module)
    return Head.read(module.modules_to_save[active[0]])


def _of_trainable_tokens(module: Any) -> Head | str:
    """Read a weight with the trained tokens' rows replaced, differentiably. PEFT's layer leaves out the bias."""
    _unmerge_if_disabled(module)
    base = Head.read(module.base_layer)
    if isinstance(base, str) or module.disable_adapters or module.merged or not module.active_adapters:
        return base
    check_tokens(module, module.active_adapters)
    return Head(_whole(module.get_merged_weights(module.active_adapters)), None)


def _of_lora(module: Any) -> Head | str:
    _unmerge_if_disabled(module)
    head = Head.read(module.base_layer)
    if is_hooked_by_others(module.base_layer):
        head = "the base layer of its output head has hooks, which would not be called"
    if isinstance(head, str) or module.disable_adapters or module.merged:
        return head
    for name in (name for name in module.active_adapters if name in module.lora_A):
        adapter = _adapter(module, name)
        if isinstance(adapter, str):
            return f"the adapter {name!r} on its output head {adapter}"
        bias, of_adapter = head.bias, module.lora_B[name].bias
        if of_adapter is not None:
            scaled = _whole(of_adapter) * adapter.scaling
            bias = scaled if bias is None else bias + scaled
        head = replace(head, lora=(*head.lora, adapter), bias=bias)
    return head


def _adapter(module: Any, name: str) -> Lora | str:
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    variant = module.lora_variant.get(name)
    if variant is not None:
        return f"is more than plain LoRA ({type(variant).__name__})"
    if any("forward" in vars(m) or type(m).forward is not nn.Linear.forward for m in (a, b)):
        return "has layers that do more than a linear map"
    if not (_is_plain(a.weight) and _is_plain(b.weight)):
        return "has weights that are no plain matrices"
    if any(is_hooked_by_others(m) for m in (a, b, dropout)):
        return "has hooks on its layers, which would not be called"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"drops out by {type(dropout).__name__}"
    p = dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
    return Lora(_whole(a.weight), _whole(b.weight), module.scaling[name], p)


def _unmerge_if_disabled(module: Any) -> None:
    """Do what PEFT's forwards do first."""
    if module.disable_adapters and module.merged:
        module.unmerge()


_PEFT_READERS: dict[str, Reader] = {
    "peft.utils.other.AuxiliaryTrainingWrapper.forward": _of_wrapper,
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer.forward": _of_trainable_tokens,
    "peft.tuners.lora.layer.Linear.forward": _of_lora,
}


def _whole(parameter: Tensor) -> Tensor:
    """Return a sharded parameter gathered: a frozen one of FSDP2, or one of tensor parallelism.

    The gradient is of this rank's rows. That is right only in tensor parallelism, where all ranks have the same.
    """
    full_tensor = getattr(parameter, "full_tensor", None)
    return parameter if full_tensor is None else full_tensor()


def output_module(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def device_of(model: Any) -> torch.device:
    """Return the device on which a model takes its tokens."""
    # streamed weights are on the meta device between two passes, except the head's
    device, head = next(model.parameters()).device, output_module(model)
    return head.weight.device if device.type == "meta" and isinstance(head, nn.Linear) else device


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of the decoder layers. The list is recognised by its length.

    Of a model that reads images it is looked for in the part that reads text.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    part = model.get_decoder() if reads_images(model) else model
    prefix = next(f"{path}." if path else "" for path, module in model.named_modules() if module is part)
    lists: dict[str, nn.ModuleList] = {}
    for path, module in part.named_modules(prefix=prefix.rstrip(".")):
        nested = any(path.startswith(outer + ".") for outer in lists)  # such as the experts of a layer
        if isinstance(module, nn.ModuleList) and len(module) == count and not nested:
            lists[path] = module
    if len(lists) != 1:
        raise ConfigError(
            f"Expected one list of {count} decoder layers (num_hidden_layers) in {type(model).__name__}, "
            f"found {', '.join(lists) or 'none'}. Layers can be dropped only where one nn.ModuleList has all."
        )
    return next(iter(lists.items()))


_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the ids of the tokens in whose place a model puts features of images, videos and sound."""
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(sorted({token for token in ids if isinstance(token, int)}))


def reads_images(model: Any) -> bool:
    """Return whether a model takes images besides its tokens."""
    return "pixel_values" in inspect.signature(type(model).forward).parameters


_FIXED_POSITIONS = ("embed_positions", "pos_encoding")  # tables of sines, as GPT-J's and CTRL's


def known_positions(model: Any) -> int | None:
    """Return how many positions a model has in a table, learned or fixed; None where it computes them, as RoPE does.

    Only the part that reads text counts. The tables of OPT and RoBERTa begin with rows that stand for no position.
    """
    reader = model.get_decoder() if hasattr(model, "get_decoder") else None
    sizes = []
    for name, module in (reader or model).named_modules():
        if isinstance(module, nn.Embedding) and any(part == "wpe" or "pos" in part for part in name.split(".")):
            padding = module.padding_idx
            unused = getattr(module, "offset", 0 if padding is None else padding + 1)
            sizes.append(module.num_embeddings - unused)
        tables = (getattr(module, table, None) for table in _FIXED_POSITIONS)
        sizes += [len(table) for table in tables if isinstance(table, Tensor) and table.dim() == 2]
    return min(sizes, default=None)


def embedding_rows(model: Any) -> int:
    """Return how many token ids a model can read."""
    module = model.get_input_embeddings()
    return getattr(module, "num_embeddings", None) or shape_of(module.weight)[0]


def head_rows(model: Any) -> int:
    """Return how many token ids a model can write."""
    module = model.get_output_embeddings()
    rows, weight = getattr(module, "out_features", None), getattr(module, "weight", None)
    if weight is None:  # a head of several modules
        return model.config.get_text_config().vocab_size
    # of modules to save with ensure_weight_tying, PEFT makes a head whose features are swapped
    if isinstance(rows, int) and shape_of(weight) != (getattr(module, "in_features", None), rows):
        return rows
    return shape_of(weight)[0]


def sharded_head(module: Any) -> Any:
    """Return the `ShardedHead` (extras/vocab_parallel) of an output head whose rows stay on their ranks, else None."""
    marked = getattr(module, KEEPS_ROWS, False)
    if not marked and not isinstance(getattr(module, "weight", None), DTensor):  # as tensor parallelism makes them
        return None
    return load("vocab_parallel").ShardedHead.of(module)
