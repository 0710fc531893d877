"""What models, their configurations, arguments and adapters hold: transformers (5.6 to 5.24), PEFT (0.18 to 0.21)."""

from typing import Any

from torch import Tensor, nn

# Configurations


# The attribute behind a configuration's `attn_implementation`. The public `set_attn_implementation` works on a whole
# model, and this has to be set on one configuration of several, and put back.
ATTENTION = "_attn_implementation_internal"


def attention_implementation(config: Any) -> Any:
    """Return the name under which a model asks transformers for its attention; None for none."""
    return getattr(config, "_attn_implementation", None)


def experts_implementation(module: nn.Module) -> str | None:
    """Return the name under which a module of experts asks transformers for their products; None for none."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def name_or_path(config: Any) -> str:
    """Return where a model was loaded from, empty if it was made of a configuration. It may be absent in the files."""
    return config._name_or_path


def note_as_loaded(config: Any) -> None:
    """Have a generation configuration count as it is now as the one that was loaded, which may break its own rules."""
    config._original_object_hash = hash(config)


# Models


def new_model(kind: Any, config: Any, **how: Any) -> Any:
    """Make a model of a class from a configuration. Unlike the constructor it takes `dtype`, as `from_pretrained`."""
    return kind._from_config(config, **how)


# The attribute behind `model.loss_function`. The property's setter stores here; to undo it, one has to see what is
# the object's own.
LOSS_FUNCTION = "_loss_function"


def unsplit_layers(model: Any) -> set[str]:
    """Return the names of the classes of layers that transformers keeps whole, on one device or in one unit."""
    return set(getattr(model, "_no_split_modules", None) or ())


def modules_kept_in_fp32(model: Any) -> list[str]:
    """Return the names of modules that transformers keeps in fp32, and so does not quantise."""
    return list(model._keep_in_fp32_modules or ())


# The method that transformers' decorator `use_experts_implementation` gives experts: act(gate) * up of both in one.
GATE = "_apply_gate"
# The parameters of such experts, of three dimensions.
STACKED = ("gate_up_proj", "down_proj")


def apply_gate(module: Any, packed: Tensor) -> Tensor:
    """Compute the gate of experts as their class does."""
    return type(module)._apply_gate(module, packed)


def is_expert_parallel(module: nn.Module) -> bool:
    """Whether transformers has spread experts over ranks, each of which has some, or parts of all."""
    # before 5.16 it noted the plan by which it had sharded any module
    return getattr(module, "_is_expert_parallel", False) or hasattr(module, "_hf_tp_plan")


def use_one_gpu(args: Any) -> None:
    """Have Trainer train on one GPU of all that the process sees, and not wrap the model in nn.DataParallel."""
    args._n_gpu = 1  # what `args.n_gpu` returns


# TRL's autograd function (a class in trl.trainer.utils) of log-probabilities from hidden states, in pieces. Its fused
# head looks the name up at each call.
CHUNKED_LOG_PROBS = "_ChunkedLogProbFunction"

# PEFT's layers

# Attributes of a layer that its forward reads, so that a recording of the layer has them as constants: which adapter
# runs, and whether one does.
ADAPTER_SETTINGS = frozenset(("_active_adapter", "_disable_adapters"))


def adapter_switches(model: nn.Module) -> list[Any]:
    """Return the layers of a model whose adapters can be switched."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


def switch_adapters(layer: Any, off: bool) -> None:
    """Switch a layer's adapters off, or on. PEFT's `enable_adapters` would also set requires_grad by its own rules."""
    layer._disable_adapters = off


def adapters_of_wrapper(wrapper: Any) -> Any:
    """Return the names of adapters for which PEFT's wrapper of whole modules has a copy of its module."""
    return wrapper._adapters


def check_tokens(layer: Any, adapters: Any) -> None:
    """Raise ValueError, as PEFT's own forward does, where two active adapters train the same token."""
    layer._check_overlapping_tokens(adapters)


def has_swapped_features(wrapper: Any) -> bool:
    """Whether PEFT has exchanged what it took for inputs and outputs of stacked experts. Before 0.21 it never does."""
    return getattr(wrapper, "_did_swap_in_out_features", False)
