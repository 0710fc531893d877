"""A training of projectors of hidden states, by whichever engine this process has chosen."""

from pathlib import Path

import torch
from planted import Plant
from splits import OBJECTIVES
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer


def trained_projectors(output_dir: Path, nan_in: int | None = None, resume: bool = False, **options) -> dict:
    """Train four steps of eight rows, or the last two again. Return the projectors and the losses by step.

    Args:
        nan_in: a step whose loss is NaN in the last process, and which is left out.
        options: of the training.
    """
    student, teacher = tiny_model(), tiny_model("gemma2", seed=5, hidden_size=48)  # whole: before ZeRO-3 is configured
    args = train_args(
        LigerDistillConfig, output_dir=str(output_dir), losses=OBJECTIVES["hidden"], max_steps=4, learning_rate=1e-2,
        weight_decay=0.1, per_device_train_batch_size=8 // ranks(), save_strategy="steps", save_steps=2,
        on_non_finite="skip_step", **options,
    )  # fmt: skip
    trainer = LigerDistillTrainer(
        student, teacher_model=teacher, args=args, train_dataset=completions(), processing_class=tiny_tokenizer()
    )
    if nan_in is not None and args.process_index == ranks() - 1:
        Plant(trainer, "loss", nan_in)
    trainer.train(resume_from_checkpoint=str(output_dir / "checkpoint-2") if resume else None)
    return {
        "projectors": {name: p.detach().clone() for name, p in trainer.loss_state.hidden.named_parameters()},
        "losses": {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log},
        "skipped": trainer.finite.skipped,
    }


def ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
