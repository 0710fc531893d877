"""What a training does when its teacher has gone: save what is trained, and say how to go on."""

import shlex
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..common.checkpoints import checkpoints_in
from ..common.files import CONFIG


def save_and_advise(trainer: Any) -> str:
    """Save a checkpoint after the last whole step, unless there is one, and return how to go on from it.

    With several processes nothing is saved: the others are in the middle of a step and know nothing of it.
    """
    args, step = trainer.args, trainer.state.global_step
    folder = Path(str(args.output_dir))
    checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if step > 0 and args.world_size == 1 and not checkpoint.is_dir():
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.control = trainer.callback_handler.on_save(args, trainer.state, trainer.control)
    saved = checkpoints_in(folder)
    if not saved:
        return "No step was taken, so nothing was saved." if step == 0 else "No checkpoint was saved."
    by_command = (folder / CONFIG).is_file()
    how = shlex.join(["liger-trainer", "resume", str(folder)]) if by_command else "train(resume_from_checkpoint=True)"
    return f"Training stopped after step {step}; {saved[-1]} is saved. When the server is back, go on: {how}"
