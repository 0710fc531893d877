"""The student of a trainer: how it is loaded, patched and checked."""

import copy
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from peft import PeftModel, PeftType
from torch import nn
from transformers.trainer_utils import align_special_tokens
from trl.trainer import sft_trainer
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model

from ..common.files import refuse_missing
from ..common.replacements import replaced
from ..common.weights import adapter_at, load_whole, refuse_meta
from ..compat.models import note_as_loaded
from ..compat.modules import is_compiled
from ..compat.recognitions import TRL_CONSTRUCTOR, check
from ..compat.trainers import is_prepared, unprepare
from ..errors import ConfigError
from ..losses.spec import LossOptions
from ..patching.patcher import Patched, PatchOptions, patched_record
from .host import TrainerHost
from .options import FAST, MEMORY


def pop_liger_options(args: Any) -> PatchOptions | None:
    """Return what `liger_kernel_config` asks for, None without it, and switch `use_liger_kernel` off.

    transformers and TRL would serve the flag with liger-kernel, or refuse it.

    Raises:
        ConfigError: the options leave the fused loss out, which the trainers are made for.
    """
    config = getattr(args, "liger_kernel_config", None)
    if getattr(args, "use_liger_kernel", False):
        args.use_liger_kernel = False
    if config is None:
        return None
    options = PatchOptions.of(config)
    if not options.fused_linear_cross_entropy:
        raise ConfigError(
            "The trainers of liger_trainer compute their loss from hidden states; with "
            f"liger_kernel_config={dict(config)} there would be no such loss. Take fused_linear_cross_entropy and "
            "cross_entropy out of it, or use TRL's SFTTrainer with liger_trainer.enable()."
        )
    return options


def names_of_modules(targets: Any) -> Any:
    """Return a list for the name of one module, such as "q_proj"; patterns, "all-linear" and lists as they are.

    TRL's ModelConfig makes text of a list of one, and PEFT matches text with the whole path of a module, so that it
    finds none.
    """
    return [targets] if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets) else targets


def with_names_of_modules(peft_config: Any) -> Any:
    """Return a configuration of adapters whose `target_modules` are `names_of_modules`."""
    targets = getattr(peft_config, "target_modules", None)
    if names_of_modules(targets) is targets:
        return peft_config
    changed = copy.copy(peft_config)
    changed.target_modules = set(names_of_modules(targets))
    return changed


def patch_student(model: Any, options: PatchOptions | None, loss: LossOptions, memory: str = FAST) -> Patched:
    """Patch layers and loss. A model that is patched already keeps its layers, and gets this loss on top.

    memory: see `StepConfig`.

    Raises:
        ConfigError: the model's loss cannot be replaced, an earlier patch contradicts `options`, or no MLP can take
            less memory.
    """
    record = earlier = patched_record(model)
    if record is None:
        record = Patched(model, options or PatchOptions(), loss)
    elif record.options.cross_entropy:
        raise ConfigError(
            "The model was patched with cross_entropy=True before, so its loss wants stored logits, and this trainer "
            "stores none. Patch it without cross_entropy, or leave the patching to the trainer."
        )
    elif options in (None, replace(record.options, fused_linear_cross_entropy=True)):
        record.fuse(loss)
    else:
        raise ConfigError(
            f"liger_kernel_config asks for {options}, but the model was patched with {record.options} before. "
            "Leave one of the two away."
        )
    # Layers may be patched without the loss, as of a model that is no causal LM. A trainer needs the loss.
    if record.fused is None:
        reason = record.report.left_alone["loss"]
        record.undo()
        raise ConfigError(reason)
    try:
        record.remake_mlps(MEMORY[memory])
    except ConfigError:  # a model that somebody else has patched stays patched
        if earlier is None:
            record.undo()
        raise
    return record


def patched_sft_module(args: Any, model: Any) -> AbstractContextManager[None]:
    """Change two things in SFTTrainer's module while it constructs itself.

    A model that is given by its name must be there, with all its weights in its files, and be no adapter. And adapters
    on `lm_head`, which SFTTrainer refuses because its own fused head would leave them out, are let through: our loss
    includes them.

    Raises:
        ConfigError: the model writes no text, or torch.compile has wrapped it, or its weights are not there.
    """
    if isinstance(model, nn.Module) and is_compiled(model):  # the layers below could not be replaced
        raise ConfigError(
            f"model: expected the model itself, got the {type(model).__name__} that torch.compile has put around it. "
            "Give the model, and set torch_compile=True or call model.compile()."
        )
    if not isinstance(model, str):
        if getattr(model, "generation_config", None) is None:
            raise ConfigError(
                f"model: expected a causal language model, without a wrapper, or the name of one, got a "
                f"{type(model).__name__}. Other models train with transformers' Trainer."
            )
        refuse_meta("model", model)
    allowed = getattr(args, "allow_missing_weights", False)

    def load(name: str, **options: Any) -> Any:
        refuse_missing("model", name)
        adapter = adapter_at(name, options.get("revision"))
        if adapter is not None:
            raise ConfigError(f"{adapter}.")
        return load_whole(create_model_from_path, name, **{"allow_missing_weights": allowed, **options})

    check(TRL_CONSTRUCTOR)
    changes: dict[str, Any] = {"create_model_from_path": load}
    if hasattr(sft_trainer, "BaseTunerLayer"):  # only the check of lm_head reads it there, and finds no instance of it
        changes["BaseTunerLayer"] = type("NoLayer", (), {})
    return replaced(sft_trainer, **changes)


def check_trains(model: Any) -> None:
    """Raise ConfigError for a model of which nothing is trained, whose first backward would fail."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        how = (
            "load its adapters by PeftModel.from_pretrained(..., is_trainable=True), and do not merge them"
            if hasattr(model, "peft_config")
            else "call model.requires_grad_(True), which merge_and_unload() leaves to you, or give a peft_config"
        )
        raise ConfigError(
            f"model: expected weights to train, but every one of {type(model).__name__} is frozen; {how}."
        )


def check_savable(model: Any, processing_class: Any) -> None:
    """Raise ConfigError where transformers would refuse, when training is over, to save the generation config.

    It saves one that breaks its rules, as published ones do, only if nothing in it has changed since it was loaded.
    The special tokens that TRL and transformers set are no reason to refuse it, so they are set here, and what there
    is then counts as unchanged.
    """
    config = None if isinstance(model, PeftModel) else getattr(model, "generation_config", None)
    if config is None:  # adapters are saved without one
        return
    align_special_tokens(model, processing_class)
    note_as_loaded(config)
    try:
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The model's generation_config could not be saved with the trained model: {error} Change "
            "model.generation_config, or the generation_config.json that it was loaded from."
        ) from error


def undo_evaluation(trainer: TrainerHost) -> None:
    """Undo, before a training, what accelerate did to a model that was evaluated.

    accelerate takes a model that was prepared for evaluation for one that is ready to train, and would not wrap it in
    DDP: every process would train on its own gradients.

    Raises:
        ConfigError: DeepSpeed has prepared it, which can't be undone.
    """
    model, sharded = trainer.model, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    evaluated = is_prepared(model) and trainer.model_wrapped is model
    if evaluated and trainer.accelerator.num_processes > 1 and not sharded:
        unprepare(model)
    engine = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)  # of a training
    if trainer.is_deepspeed_enabled and engine is None and trainer.model_wrapped is not model:
        raise ConfigError(
            "DeepSpeed has prepared this model for an evaluation, without an optimizer, and cannot train it then. "
            "Leave out evaluate() before train(); eval_on_start=True evaluates before the first step."
        )


def disable_dropout(model: nn.Module) -> None:
    """Switch dropout off in modules, and where attention keeps a probability for the functional form."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


def _adapters(student: Any) -> Iterable[Any]:
    """Return the configurations of a student's adapters."""
    return student.peft_config.values() if isinstance(student, PeftModel) else ()


def check_no_prefix(student: Any) -> None:
    """Raise ConfigError where adapters put tokens or keys in front of a row that holds several documents."""
    for config in _adapters(student):
        if config.is_prompt_learning:
            raise ConfigError(
                f"{config.peft_type.value}: what these adapters put in front of a packed row is only the first "
                "document's, and keeps the others from being told apart. Set `packing: false` and `padding_free: "
                "false`, or train adapters of layers, such as LoRA's."
            )


def check_prompt_learning(student: Any) -> None:
    """Raise ConfigError where adapters put their own positions in front of a row."""
    for config in _adapters(student):
        # Prefixes are keys and values, so they add no positions.
        if config.is_prompt_learning and config.peft_type != PeftType.PREFIX_TUNING:
            raise ConfigError(
                f"{config.peft_type.value}: the student would read positions in front of each row that its teacher "
                "does not have, so the two cannot be compared. Train adapters of layers, such as LoRA's, or prefixes."
            )


def check_adapters(student: Any, args: Any) -> None:
    """Raise ConfigError for adapters that would be lost.

    Some are run by PEFT and not in the model's forward, where the loss is; and gradient checkpointing drops the cache
    that holds prefixes.
    """
    for config in _adapters(student):
        if config.peft_type in (PeftType.ADAPTION_PROMPT, PeftType.CPT, PeftType.POLY):
            raise ConfigError(
                f"{config.peft_type.value}: PEFT trains these by a forward, loss or inputs of their own, which the "
                "fused loss is no part of. Train them with transformers' Trainer, or train adapters such as LoRA's."
            )
        if config.peft_type == PeftType.PREFIX_TUNING and args.gradient_checkpointing:
            raise ConfigError(
                "PREFIX_TUNING: prefixes are keys and values in the cache, which gradient checkpointing does without. "
                "Set gradient_checkpointing=False, or train adapters of layers, such as LoRA's."
            )
