"""A trainer whose checkpoints are there as a whole or not at all, and which goes on from the newest that is whole.

Trainer writes a checkpoint file by file under its final name, removes older ones without a look at it, and takes the
one with the highest number. Everything that it writes goes to the folder that `_get_output_dir` and `_save_checkpoint`
name, so it is led to one beside. Who knows the final path is told after the renaming: callbacks (`on_save`) and the
push to the hub. The state's pointer to the best checkpoint is put right before, and again on resume, since a path is
another one after a move, from another folder or on another mount.

Trainer reads weights back by the names that they have in memory, and only warns where `save_pretrained` has written
others: those of older files (LLaVA, Gemma 3), or one tensor for each expert (Mixtral).
"""

# transformers types its Trainer's model, args and accelerator more loosely than they are once it is constructed:
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerState

from ..common.checkpoints import (
    STAGING,
    TRAINER_STATE,
    WITH_MANIFEST,
    best_checkpoint,
    clear_staging,
    has_manifest,
    newest_whole,
    put_in_place,
    refuse_damaged,
    rotate,
    weights_alone,
)
from ..common.files import STATE, write_atomically
from ..common.folder_lock import folder_lock
from ..common.replacements import Replacements
from ..common.weights import load_whole
from ..errors import ConfigError
from .prepare_rows import RowPreparingTrainer
from .qat import QuantisedWeights, check_not_taken, quantised_weights
from .ranks import decided_by_first

ENCODER = "prompt_encoder.safetensors"


class CheckpointingTrainer(RowPreparingTrainer):
    """Saves checkpoints that are whole, resumes from those, and lets no second process train in the folder meanwhile.

    Attributes:
        resumed_from: the checkpoint that the last `train` went on from; None from the beginning.
        checkpoint_files: further small files of every checkpoint, by name.
        quantised: what holds the weights that files have, where the model has quantised ones; else None.
    """

    resumed_from: Path | None = None
    _is_staging = False
    _loads_from: Path | None = None  # while weights are read back

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.checkpoint_files: dict[str, str] = {}

    @property
    def quantised(self) -> QuantisedWeights | None:
        return quantised_weights(self.model)

    def train(self, *args, **kwargs):
        check_not_taken(self)
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        check_not_taken(self)
        return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def folder_locked(self, trial: Any = None) -> Iterator[None]:
        """Hold the output directory's lock, which the first process takes for all."""
        folder = Path(self._get_output_dir(trial))
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(folder_lock(folder, warnings.warn))
                clear_staging(folder)

            decided_by_first(self.is_world_process_zero(), begin)
            yield

    def choose_checkpoint(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to go on from. True is the newest that is whole; what is passed over is said.

        Raises:
            ConfigError: there is none.
            CorruptError: `wanted` is not whole, or none is.
        """
        chosen = decided_by_first(self.is_world_process_zero(), lambda: self._chosen(wanted)) if wanted else None
        self.resumed_from = Path(chosen) if chosen else None
        return chosen

    def _chosen(self, wanted: str | bool) -> str:
        run_dir = Path(str(self.args.output_dir))
        if wanted is True:
            choice = newest_whole(run_dir)
            if choice is None:
                raise ConfigError(f"resume_from_checkpoint: no checkpoint in {run_dir}.")
            for name, reason in choice.passed_over.items():
                warnings.warn(f"{name} is passed over: {reason}. Going on from {choice.checkpoint}.", stacklevel=6)
            checkpoint = choice.checkpoint
        else:
            checkpoint = Path(str(wanted))
            refuse_damaged(checkpoint, contents=True)
        if not has_manifest(checkpoint):
            warnings.warn(
                f"{checkpoint} has no manifest, as it was saved by an earlier version or by another trainer: the files "
                "are there, but whether they are as they were written is not known.",
                stacklevel=6,
            )
        if weights_alone(checkpoint):
            warnings.warn(f"{checkpoint} holds the model alone: optimizer and schedule start anew.", stacklevel=6)
        return str(checkpoint)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args):
        """Find the best checkpoint again, and leave no epoch to a training that has made all its steps: Trainer would
        make one more."""
        replacements = Replacements()
        replacements.set(TrainerState, "load_from_json", self._state_with_best(TrainerState.load_from_json))
        try:
            begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        finally:
            replacements.undo()
        return begun if self.state.global_step < max_steps else (num_train_epochs, 0)

    def _state_with_best(self, load: Callable[[str], TrainerState]) -> Callable[[str], TrainerState]:
        """Return a `load` whose states know the best checkpoint by the path that it has now.

        Without it no other one can be compared with it, so the best is chosen anew from then on.
        """

        def loaded(path: str) -> TrainerState:
            state = load(path)
            if state.best_model_checkpoint is None:
                return state
            known, main = state.best_model_checkpoint, self.is_world_process_zero()
            state.best_model_checkpoint = decided_by_first(main, lambda: best_checkpoint(Path(path).parent))
            if state.best_model_checkpoint is None:
                state.best_metric = state.best_global_step = None
                if main:
                    warnings.warn(
                        f"The best checkpoint so far, {known}, is neither there nor next to {Path(path).parent} any "
                        "more: the best is chosen among those that come.",
                        stacklevel=8,
                    )
            return state

        return loaded

    def _load_best_model(self):
        best = Path(str(self.state.best_model_checkpoint))
        decided_by_first(self.is_world_process_zero(), lambda: refuse_damaged(best, contents=True))
        if self._loaded_encoder(best):
            return
        with self._reading(best):
            super()._load_best_model()

    def _prompt_encoder(self) -> nn.Module | None:
        """Return what makes the prompts of p-tuning or of projected prefixes; PEFT saves only what it makes."""
        encoder = getattr(self.accelerator.unwrap_model(self.model), "prompt_encoder", None)
        made_by_more = encoder is not None and any("embedding." not in name for name, _ in encoder.named_parameters())
        return encoder if made_by_more else None

    def _loaded_encoder(self, checkpoint: Path) -> bool:
        """Load the encoder of prompts, which is all that is trained, and return whether the model has one."""
        encoder, path = self._prompt_encoder(), checkpoint / ENCODER
        if encoder is None:
            return False
        if not path.is_file():
            raise ConfigError(
                f"{checkpoint} has no {ENCODER}: an earlier version, another trainer, FSDP or DeepSpeed saved what the "
                "encoder of prompts makes, without its weights. Begin anew."
            )
        encoder.load_state_dict(load_file(path))
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self._loaded_encoder(Path(resume_from_checkpoint)):
            return
        with self._reading(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @contextmanager
    def _reading(self, folder: Path) -> Iterator[None]:
        self._loads_from = folder
        try:
            with self._unquantised():
                yield
        finally:
            self._loads_from = None

    def _unquantised(self) -> AbstractContextManager[None]:
        return nullcontext() if self.quantised is None else self.quantised.lifted()

    def save_model(self, output_dir=None, _internal_call=False):
        with self._unquantised():
            super().save_model(output_dir, _internal_call)

    def _issue_warnings_after_load(self, load_result):
        """Load the weights again where Trainer could not, since their names in the files are others."""
        if self._loads_from is None or not (load_result.missing_keys and load_result.unexpected_keys):
            return super()._issue_warnings_after_load(load_result)
        model: Any = self.model
        loaded = load_whole(type(model).from_pretrained, str(self._loads_from), dtype=model.dtype)
        model.load_state_dict(loaded.state_dict())

    def _get_output_dir(self, trial):
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, STAGING) if self._is_staging else run_dir

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self._is_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model, trial):
        name = f"checkpoint-{self.state.global_step}"
        run_dir = Path(self._get_output_dir(trial))
        staged, target = run_dir / STAGING / name, run_dir / name
        if self.is_world_process_zero():
            own: Any = self.state.stateful_callbacks.setdefault(TRAINER_STATE, {})
            own[WITH_MANIFEST] = self.state.global_step
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)
            encoder, sharded = self._prompt_encoder(), self.is_fsdp_enabled or self.is_deepspeed_enabled
            if encoder is not None and self.args.should_save and not sharded:
                save_file({name: value.clone() for name, value in encoder.state_dict().items()}, staged / ENCODER)
            self._point_to_best(staged, target)
            self._put_in_place(staged, target)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)  # a full disk gets its room back
            raise
        finally:
            self._is_staging = False
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _point_to_best(self, staged: Path, target: Path) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best) == staged:
            self.state.best_model_checkpoint = str(target)
            if self.args.should_save:
                self.state.save_to_json(str(staged / STATE))

    def _put_in_place(self, staged: Path, target: Path) -> None:
        """Finish a checkpoint that all processes have written their parts of, and remove those that are too many."""

        def finish() -> None:
            for name, content in self.checkpoint_files.items():
                write_atomically(staged / name, content)
            put_in_place(staged, target)
            rotate(target, self.args.save_total_limit, self.state.best_model_checkpoint)
            shutil.rmtree(staged.parent, ignore_errors=True)

        self.accelerator.wait_for_everyone()
        decided_by_first(self.is_world_process_zero(), finish)
        if self.is_local_process_zero() and staged.is_dir():  # on a disk of its own: another node's part
            finish()
        self.accelerator.wait_for_everyone()
