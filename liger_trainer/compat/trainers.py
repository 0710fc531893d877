"""What trainers keep to themselves: transformers' Trainer (5.6 to 5.24), TRL's SFTTrainer, and accelerate.

The methods that `LigerTrainer` and `LigerDistillTrainer` override stand in their files: super() needs them there. What
needs TRL to be imported is in sft_trainer.py.
"""

from typing import Any

# Trainer


def output_dir_of(trainer: Any, trial: Any) -> str:
    """Return the folder of a run, or of a trial of a hyperparameter search, where there is one."""
    return trainer._get_output_dir(trial)


def push_checkpoint(trainer: Any, folder: str) -> None:
    """Push what a checkpoint holds to the hub, as `hub_strategy` says."""
    trainer._push_from_checkpoint(folder)


def without_unused_columns(trainer: Any, dataset: Any, description: str) -> Any:
    """Return a dataset with only the columns that the model takes, if `remove_unused_columns`."""
    return trainer._remove_unused_columns(dataset, description=description)


def columns_of_model(trainer: Any) -> list[str]:
    """Return the names of the columns that the model, or the collator, takes."""
    trainer._set_signature_columns_if_needed()  # it stores them, and returns nothing
    return trainer._signature_columns or []


def logged_losses(trainer: Any) -> float:
    """Return the sum over steps of the losses that were logged: `train_loss` is made of it."""
    return trainer._total_loss_scalar


def set_logged_losses(trainer: Any, total: float) -> None:
    """Put another sum in the place of `logged_losses`."""
    trainer._total_loss_scalar = total


def restart_running_loss(trainer: Any) -> None:
    """Set the sum since the last log to 0. Trainer subtracts it from itself, and NaN - NaN would stay NaN."""
    trainer._tr_loss.zero_()


def running_loss(trainer: Any) -> float:
    """Return the sum of the losses of the steps since the last log. Waits for the device."""
    return trainer._tr_loss.item()


def unlogged_steps(trainer: Any) -> int:
    """Return the number of steps since the last log."""
    return trainer.state.global_step - trainer._globalstep_last_logged


def clips_gradients(kind: type) -> bool:
    """Whether a class of trainers has its own methods that clip gradients, or look at their norm."""
    return not {"_clip_grad_norm", "_get_grad_norm"}.isdisjoint(vars(kind))


def use_new_names(args: Any) -> None:
    """Give arguments the names that transformers 5.23 has for them. It warns of the old ones, TRL's defaults too."""
    for part in ("", "_kwargs"):
        new = f"activation_checkpointing{part}"
        if getattr(args, new, True) is None:
            setattr(args, new, getattr(args, f"gradient_checkpointing{part}"))


# SFTTrainer


def tokenizer_of(trainer: Any) -> Any:
    """Return a trainer's tokenizer: its processing class, or what is inside of a processor."""
    return trainer._tokenizer


def trl_metrics(trainer: Any, mode: str) -> dict[str, list]:
    """Return what TRL has gathered by name since the last log; `mode` is "train" or "eval"."""
    # its `log` averages the lists and clears them: whoever takes them over before has to clear them too
    return trainer._metrics[mode]


def set_tokens_seen(trainer: Any, tokens: int) -> None:
    """Set the number of tokens that a training has seen, which is logged as `num_tokens`."""
    trainer._total_train_tokens = tokens


def model_card_tags(trainer: Any) -> list[str]:
    """Return the tags of the model card that a trainer of TRL writes; none of another trainer."""
    return list(getattr(trainer, "_tag_names", []))


# accelerate


def drops_last_rows(loader: Any) -> bool:
    """Whether a loader that accelerate has prepared leaves out rows that fill no batch."""
    return loader._drop_last


def is_prepared(model: Any) -> bool:
    """Whether accelerate has prepared a model. It marks what it has prepared for an evaluation too."""
    # before 1.14 it marked none, and put another autocast around the former one when training began
    return getattr(model, "_is_accelerate_prepared", False) or "_original_forward" in vars(model)


def unprepare(model: Any) -> None:
    """Take accelerate's mark, and its autocast around the forward, off a model."""
    if "_original_forward" in vars(model):  # accelerate's unwrap_model would go on below the fused loss
        model.forward = vars(model).pop("_original_forward")
    vars(model).pop("_is_accelerate_prepared", None)
