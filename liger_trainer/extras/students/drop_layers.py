"""Make a student from its teacher: a copy of a causal LM without some of its decoder layers.

`drop_layers(teacher, keep_every_nth=2)` keeps the embeddings, the final norm, the head, every second layer
and the last. The result is an ordinary model: it trains, generates, is saved and loaded like any other, and shares
nothing with the teacher.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ...compat.models import new_model
from ...errors import ConfigError
from ...losses.model_parts import decoder_layers


def drop_layers(
    model: PreTrainedModel, *, keep_every_nth: int | None = None, keep: Sequence[int] | None = None
) -> PreTrainedModel:
    """Return a new model with only the kept decoder layers of `model`: weights copied, dtype and device unchanged.

    The layers are the one `nn.ModuleList` with `config.num_hidden_layers` entries.
    Per-layer lists of the configuration (`layer_types` and the like) shrink with them and the layers are
    numbered again, so that the KV cache works. Exactly one of the two keywords is given.

    Args:
        model: the teacher, with its plain weights: neither quantised nor wrapped by PEFT.
        keep_every_nth: n from 2 to the number of layers. Keeps the layers 0, n, 2n, ..., the last of them replaced
            by the model's last layer. Where layers of different kinds alternate, they may all be of one kind.
        keep: indices of the kept layers, ascending, from 0.

    Raises:
        ConfigError: indices that do not fit, no single list of decoder layers, a quantised or wrapped model,
            or a configuration that cannot describe the student.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"drop_layers needs a transformers model with plain weights, got {type(model).__name__}. "
            "Load the teacher without quantisation, and merge a PEFT adapter first (merge_and_unload)."
        )
    path, layers = decoder_layers(model)
    kept = kept_indices(len(layers), keep_every_nth, keep)
    try:
        with torch.device("meta"):  # shapes only: every tensor comes from the teacher
            student = new_model(type(model), thinned_config(model.config, kept), dtype=model.dtype)
        _copy_tensors(model, student, path, kept)
        _check_layers(layers, student.get_submodule(path), kept)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ConfigError(
            f"The configuration of {type(model).__name__} cannot describe a model of its layers {kept}. "
            f"Keep other layers, or make the student yourself. {error}"
        ) from error
    # from_config makes a default one, without the tokens that end a text.
    student.generation_config = copy.deepcopy(model.generation_config)
    return student.train(model.training)


def kept_indices(count: int, keep_every_nth: int | None, keep: Sequence[int] | None) -> list[int]:
    if keep_every_nth is not None and keep is None:
        if not _is_int(keep_every_nth) or not 2 <= keep_every_nth <= count:
            raise ConfigError(
                f"keep_every_nth must be a whole number from 2 to {count}, the number of layers, "
                f"got {keep_every_nth!r}."
            )
        kept = list(range(0, count, keep_every_nth))
        # The last layer in place of the one before: 2.6 nats instead of 3.5 (docs/results/layer_choice.md)
        return [*kept[:-1], count - 1] if len(kept) > 1 else kept
    if keep is not None and keep_every_nth is None:
        kept = list(keep)
        if not kept or not all(_is_int(i) and 0 <= i < count for i in kept) or kept != sorted(set(kept)):
            raise ConfigError(
                f"keep must name at least one layer by its index from 0 to {count - 1}, each once and in "
                f"ascending order, got {kept}."
            )
        return kept
    raise ConfigError("drop_layers needs one of keep_every_nth and keep, and not both.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def thinned_config(teacher_config: PreTrainedConfig, kept: list[int]) -> PreTrainedConfig:
    """Return a copy with fewer layers, in which each per-layer list is cut to the kept ones."""
    config = copy.deepcopy(teacher_config)
    text = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        per_layer = isinstance(value, (list, tuple)) and len(value) == count
        if per_layer and not key.endswith(("_id", "architectures")):  # eos_token_id can be as long by chance
            setattr(text, key, type(value)(value[i] for i in kept))
    text.num_hidden_layers = len(kept)
    return config


def _copy_tensors(teacher: PreTrainedModel, student: PreTrainedModel, path: str, kept: list[int]) -> None:
    """Replace each parameter and buffer of `student` (on the meta device) by a copy of the teacher's."""
    new_index = {str(old): str(new) for new, old in enumerate(kept)}

    def copied(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            if name.startswith(path + "."):
                index, _, rest = name.removeprefix(path + ".").partition(".")
                if index not in new_index:
                    continue
                name = f"{path}.{new_index[index]}.{rest}"
            yield name, tensor.detach().to(teacher.device, copy=True)

    fill(
        student, dict(copied(teacher.state_dict().items())), dict(copied(teacher.named_buffers(remove_duplicate=False)))
    )


def fill(student: PreTrainedModel, state: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Give a model on the meta device the tensors of a state dict, and those buffers that none holds."""
    # assign: the student is on the meta device, and has nothing to copy into.
    student.load_state_dict(state, assign=True)
    student.tie_weights()
    for name, buffer in list(student.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:  # not persistent, so not in the state dict
            owner, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(owner), attribute, buffers[name])


def _check_layers(teacher_layers: nn.ModuleList, student_layers: nn.Module, kept: list[int]) -> None:
    """Raise ValueError unless each layer has the modules and settings of its original, its own index apart.

    Some models derive a setting from a layer's position (every fourth without rotary embedding, say): the
    weights would fit at the new position and compute something else.
    """
    for new, old in enumerate(kept):
        originals = dict(teacher_layers[old].named_modules())
        copies = dict(student_layers.get_submodule(str(new)).named_modules())
        if different := originals.keys() ^ copies.keys():
            raise ValueError(f"Only one of teacher and student has {sorted(different)} in layer {old}.")
        # Only the index of the layer may differ.
        for name, module in copies.items():
            original = _settings(originals[name])
            for key, value in _settings(module).items():
                if value != original.get(key) and (original.get(key), value) != (old, new):
                    raise ValueError(
                        f"{name or 'The layer'} has {key}={original.get(key)!r} in layer {old} of the teacher "
                        f"and {value!r} in layer {new} of the student."
                    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain values set on a module, without those that do not change what it computes."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None), list, tuple))
        and not key.startswith("_")
        and key not in ("training", "gradient_checkpointing")
    }
