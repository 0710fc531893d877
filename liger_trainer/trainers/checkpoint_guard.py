"""Checkpoints that are there as a whole or not at all, without secrets, and a training that goes on from a whole one.

Trainer writes a checkpoint file by file under its final name, removes older ones without a look at it, and takes the
one with the highest number. Everything that it writes goes to the folder that `_get_output_dir` and `_save_checkpoint`
name, so it is led to one next to it. Who knows the final path is told after the renaming: callbacks (`on_save`) and the
push to the hub. The state's pointer to the best checkpoint is put right before, and again on resume, since a path is
another one after a move, from another folder or on another mount.

Trainer reads weights back by the names that they have in memory, and only warns where `save_pretrained` has written
others: those of older files (LLaVA, Gemma 3), or one tensor for each expert (Mixtral).
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
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
from ..common.console import on_first_rank
from ..common.files import STATE, folder_lock, write_atomically
from ..common.replacements import Replacements
from ..common.weights import load_whole
from ..errors import ConfigError
from ..secrets import names_a_secret, redacted, remember_settings
from .host import TrainerHost

ENCODER = "prompt_encoder.safetensors"


class CheckpointGuard:
    """Saves a trainer's checkpoints as a whole, and finds and reads them again.

    Attributes:
        files: further small files of every checkpoint, by name.
        is_staging: whether what Trainer writes goes to the folder of checkpoints that are not whole yet.
    """

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer
        self.files: dict[str, str] = {}
        self.is_staging = False
        self._loads_from: Path | None = None  # while weights are read back

    # going on

    @contextmanager
    def folder_locked(self, trial: Any) -> Iterator[None]:
        """Hold the output directory's lock, which the first process takes for all."""
        folder = Path(self._trainer._get_output_dir(trial))
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(folder_lock(folder, warnings.warn))
                clear_staging(folder)

            self._on_first_rank(begin)
            yield

    def choose(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to go on from. True is the newest that is whole; what is passed over is said.

        Raises:
            ConfigError: there is none.
            CorruptError: `wanted` is not whole, or none is.
        """
        return self._on_first_rank(lambda: self._chosen(wanted)) if wanted else None

    def _chosen(self, wanted: str | bool) -> str:
        run_dir = Path(str(self._trainer.args.output_dir))
        if wanted is True:
            choice = newest_whole(run_dir)
            if choice is None:
                raise ConfigError(f"resume_from_checkpoint: no checkpoint in {run_dir}.")
            # stacklevel 7 is who called train(): this, two functions that the first process runs, choose, train
            for name, reason in choice.passed_over.items():
                warnings.warn(f"{name} is passed over: {reason}. Going on from {choice.checkpoint}.", stacklevel=7)
            checkpoint = choice.checkpoint
        else:
            checkpoint = Path(str(wanted))
            refuse_damaged(checkpoint, contents=True)
        if not has_manifest(checkpoint):
            warnings.warn(
                f"{checkpoint} has no manifest, as it was saved by an earlier version or by another trainer: the files "
                "are there, but whether they are as they were written is not known.",
                stacklevel=7,
            )
        if weights_alone(checkpoint):
            warnings.warn(f"{checkpoint} holds the model alone: optimizer and schedule start anew.", stacklevel=7)
        return str(checkpoint)

    @contextmanager
    def best_found_again(self) -> Iterator[None]:
        """Within the context, a state that Trainer loads knows the best checkpoint by the path that it has now.

        Else no other one could be compared with it, and the best would be chosen from the start.
        """
        replacements = Replacements()
        replacements.set(TrainerState, "load_from_json", partial(self._state_with_best, TrainerState.load_from_json))
        try:
            yield
        finally:
            replacements.undo()

    def _state_with_best(self, load: Callable[[str], TrainerState], path: str) -> TrainerState:
        state = load(path)
        if state.best_model_checkpoint is None:
            return state
        known, folder = state.best_model_checkpoint, Path(path).parent
        state.best_model_checkpoint = self._on_first_rank(lambda: best_checkpoint(folder))
        if state.best_model_checkpoint is None:
            state.best_metric = state.best_global_step = None
            if self._trainer.is_world_process_zero():
                warnings.warn(
                    f"The best checkpoint so far, {known}, is neither there nor next to {folder} any more: the best is "
                    "chosen among those that come.",
                    stacklevel=8,  # who called train()
                )
        return state

    @contextmanager
    def files_hold(self) -> Iterator[None]:
        """Within the context the model has the weights that files hold: those behind quantised ones."""
        with ExitStack() as stack:
            for plugin in self._trainer.plugins():
                stack.enter_context(plugin.files_hold(self._trainer))
            yield

    def load(self, load: Callable[..., None], folder: str, model: Any) -> None:
        """Have Trainer `load` a checkpoint's weights, or load the encoder of prompts, where that is what is trained."""
        if self._loaded_encoder(Path(folder)):
            return
        with self._reading(Path(folder)):
            load(folder, model)

    def load_best(self, load: Callable[[], None]) -> None:
        """Have Trainer `load` the best checkpoint, unless it is damaged."""
        best = Path(str(self._trainer.state.best_model_checkpoint))
        self._on_first_rank(lambda: refuse_damaged(best, contents=True))
        if not self._loaded_encoder(best):
            with self._reading(best):
                load()

    def load_again(self, load_result: Any) -> bool:
        """Load the weights again where Trainer could not, since the files have other names for them.

        Returns whether it has; else what Trainer warns of is true.
        """
        if self._loads_from is None or not (load_result.missing_keys and load_result.unexpected_keys):
            return False
        model: Any = self._trainer.model
        loaded = load_whole(type(model).from_pretrained, str(self._loads_from), dtype=model.dtype)
        model.load_state_dict(loaded.state_dict())
        return True

    def _prompt_encoder(self) -> nn.Module | None:
        """Return what makes the prompts of p-tuning or of projected prefixes; PEFT saves only what it makes."""
        encoder = getattr(self._trainer.accelerator.unwrap_model(self._trainer.model), "prompt_encoder", None)
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

    @contextmanager
    def _reading(self, folder: Path) -> Iterator[None]:
        self._loads_from = folder
        try:
            with self.files_hold():
                yield
        finally:
            self._loads_from = None

    # saving

    @contextmanager
    def staged(self, trial: Any) -> Iterator[None]:
        """Within the context Trainer writes a checkpoint, which gets its name, and what else belongs to it, behind."""
        trainer = self._trainer
        name = f"checkpoint-{trainer.state.global_step}"
        run_dir = Path(trainer._get_output_dir(trial))
        staged, target = run_dir / STAGING / name, run_dir / name
        if trainer.is_world_process_zero():
            trainer.state.stateful_callbacks.setdefault(TRAINER_STATE, {})[WITH_MANIFEST] = trainer.state.global_step
        self.is_staging = True
        try:
            yield
            encoder, sharded = self._prompt_encoder(), trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if encoder is not None and trainer.args.should_save and not sharded:
                save_file({name: value.clone() for name, value in encoder.state_dict().items()}, staged / ENCODER)
            self._point_to_best(staged, target)
            self._put_in_place(staged, target)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)  # a full disk gets its room back
            raise
        finally:
            self.is_staging = False
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(target))

    def folder(self, run_dir: str) -> str:
        """Return the folder that checkpoints of a run are written to now."""
        return os.path.join(run_dir, STAGING) if self.is_staging else run_dir

    def _point_to_best(self, staged: Path, target: Path) -> None:
        best = self._trainer.state.best_model_checkpoint
        if best is not None and Path(best) == staged:
            self._trainer.state.best_model_checkpoint = str(target)
            if self._trainer.args.should_save:
                self._trainer.state.save_to_json(str(staged / STATE))

    def _put_in_place(self, staged: Path, target: Path) -> None:
        """Finish a checkpoint that all processes have written their parts of, and remove those that are too many."""

        def finish() -> None:
            for name, content in self.files.items():
                write_atomically(staged / name, content)
            put_in_place(staged, target)
            rotate(target, self._trainer.args.save_total_limit, self._trainer.state.best_model_checkpoint)
            shutil.rmtree(staged.parent, ignore_errors=True)

        self._trainer.accelerator.wait_for_everyone()
        self._on_first_rank(finish)
        if self._trainer.is_local_process_zero() and staged.is_dir():  # on its own disk: another node's part
            finish()
        self._trainer.accelerator.wait_for_everyone()

    def _on_first_rank(self, decide: Callable[[], Any]) -> Any:
        return on_first_rank(self._trainer.is_world_process_zero(), decide)


# arguments without secrets


@contextmanager
def public_report(args: Any) -> Iterator[None]:
    """Within the context, what trackers are sent of a trainer's arguments has no secrets."""
    with _replaced(args, "to_dict", lambda args: redacted(type(args).to_dict(args))):
        yield


@contextmanager
def public_files(args: Any) -> Iterator[None]:
    """Within the context, a trainer's arguments are pickled without secrets, as for training_args.bin."""
    with _replaced(args, "__getstate__", _public_state):  # which pickle asks for
        yield


@contextmanager
def _replaced(args: Any, method: str, function: Callable[[Any], Any]) -> Iterator[None]:
    """Within it `args.method()` is `function(args)`."""
    replacements = Replacements()
    replacements.set(args, method, partial(function, args))
    try:
        yield
    finally:
        replacements.undo()


def _public_state(args: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(args).items() if name not in ("to_dict", "__getstate__")}
    for field in fields(args):
        value = state.get(field.name)
        remember_settings(field.name, value)
        held = isinstance(value, str) and names_a_secret(field.name)
        state[field.name] = None if held else redacted(value)
    return state
