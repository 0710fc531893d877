"""Checkpoints that are there as a whole or not at all, without secrets, and a training that goes on from a whole one.

Trainer writes a checkpoint file by file under its final name, removes older ones without a look at it, and takes the
one with the highest number. Everything that it writes goes to the folder that `_get_output_dir` and `_save_checkpoint`
name, so it is led to one next to it. Who knows the final path is told after the renaming: callbacks (`on_save`) and the
push to the hub. The state's pointer to the best checkpoint is put right before, and again on resume, since a path is
another one after a move, from another folder or on another mount.

Trainer reads weights back by the names that they have in memory, and only warns where `save_pretrained` has written
others: those of older files (LLaVA, Gemma 3), or one tensor for each expert (Mixtral).
"""

import json
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Adam, Optimizer
from transformers import TrainerCallback, TrainerState

from ..common.checkpoints import (
    STAGING,
    TRAINER_STATE,
    WITH_MANIFEST,
    best_checkpoint,
    clear_staging,
    has_manifest,
    holds_checkpoints,
    newest_whole,
    put_in_place,
    refuse_damaged,
    renew_manifest,
    rotate,
    weights_alone,
)
from ..common.console import on_first_rank
from ..common.files import CONFIG, STATE, folder_lock, write_atomically
from ..common.replacements import replaced
from ..common.weights import load_whole
from ..compat.models import name_or_path
from ..compat.trainers import columns_of_model, output_dir_of, push_checkpoint, tokenizer_of
from ..errors import ConfigError
from ..patching.patcher import base_of
from ..secrets import names_a_secret, redacted, remember_settings
from ..teachers.fingerprints import (
    LABEL,
    describe_model,
    describe_tokenizer,
    rows_fingerprint,
    sampled_fingerprint,
    shortened,
)
from .finite_guard import innermost
from .host import TrainerHost
from .rows import GENERATION_PROMPT

ENCODER = "prompt_encoder.safetensors"


class CheckpointGuard(TrainerCallback):
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
        self._newest: Path | None = None  # which callbacks may still write into

    # going on

    @contextmanager
    def folder_locked(self, trial: Any = None) -> Iterator[None]:
        """Hold the output directory's lock within the context; the first process takes it for all."""
        folder = Path(output_dir_of(self._trainer, trial))
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(folder_lock(folder))
                clear_staging(folder)

            self._on_first_rank(begin)
            yield

    def choose(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to go on from. True is the newest that is whole; what is passed over is said.

        A folder of checkpoints means the newest that is whole in it.

        Raises:
            ConfigError: there is none.
            CorruptError: `wanted` is not whole, or none is.
        """
        return self._on_first_rank(lambda: self._chosen(wanted)) if wanted else None

    def _chosen(self, wanted: str | bool) -> str:
        run_dir = Path(str(self._trainer.args.output_dir if wanted is True else wanted))
        if wanted is True or holds_checkpoints(run_dir):
            choice = newest_whole(run_dir)
            if choice is None:
                raise ConfigError(f"resume_from_checkpoint: no checkpoint in {run_dir}.")
            # stacklevel 7 is who called train(): this, two functions that the first process runs, choose, train
            for name, reason in choice.passed_over.items():
                warnings.warn(
                    f"{name} is damaged and is not used: {reason}. Continuing from {choice.checkpoint}.", stacklevel=7
                )
            checkpoint = choice.checkpoint
        else:
            checkpoint = run_dir
            refuse_damaged(checkpoint, contents=True)
        if not has_manifest(checkpoint):
            warnings.warn(
                f"{checkpoint} has no manifest, as it was saved by an earlier version or by another trainer: the files "
                "are there, but nothing tells whether they have changed since.",
                stacklevel=7,
            )
        if weights_alone(checkpoint):
            warnings.warn(f"{checkpoint} holds only the model: optimizer and schedule start again.", stacklevel=7)
        return str(checkpoint)

    def best_found_again(self) -> AbstractContextManager[None]:
        """Within the context, a state that Trainer loads knows the best checkpoint by the path that it has now.

        Else no other one could be compared with it, and the best would be chosen from the start.
        """
        load = partial(self._state_with_best, TrainerState.load_from_json)
        return replaced(TrainerState, load_from_json=load)

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
                    f"The best checkpoint so far, {known}, is gone, and is not next to {folder}: the best will be "
                    "chosen among the checkpoints from now on.",
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
            self._read_more(Path(folder))

    def load_best(self, load: Callable[[], None]) -> None:
        """Have Trainer `load` the best checkpoint, unless it is damaged."""
        best = Path(str(self._trainer.state.best_model_checkpoint))
        self._on_first_rank(lambda: refuse_damaged(best, contents=True))
        if not self._loaded_encoder(best):
            with self._reading(best):
                load()
                self._read_more(best)

    def _read_more(self, folder: Path) -> None:
        for plugin in self._trainer.plugins():
            plugin.loaded(self._trainer, folder)

    def load_again(self, load_result: Any) -> bool:
        """Load the weights again where Trainer could not, since the files have other names for them.

        Returns whether all are loaded; else what Trainer warns of is true.
        """
        if self._loads_from is None or not load_result.missing_keys:
            return False
        model: Any = self._trainer.model
        if not load_result.unexpected_keys:  # a tied head is not missing: its matrix is loaded by its other name
            weights = model.state_dict(keep_vars=True)
            loaded = {id(weight) for name, weight in weights.items() if name not in load_result.missing_keys}
            return all(id(weights.get(name)) in loaded for name in load_result.missing_keys)
        loaded = load_whole(type(model).from_pretrained, str(self._loads_from), dtype=model.dtype)
        # a head that was added to the model has its own names in files, and is loaded
        model.load_state_dict({**model.state_dict(), **loaded.state_dict()})
        return True

    def load_optimizer(self, load: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Have Trainer `load` the optimizer's state, and raise ConfigError where it is of other weights or kinds."""
        optimizer: Any = innermost(self._trainer.optimizer)

        def names() -> set[str]:  # DeepSpeed checks its own
            return {name for group in getattr(optimizer, "param_groups", []) for name in group}

        needed, reason = names(), None
        kept = {} if checkpoint is None or weights_alone(Path(checkpoint)) else _kept(Path(checkpoint)).get(KINDS, {})
        for setting, now in kinds(self._trainer).items():
            there = kept.get(setting, now)
            if there != now:
                raise ConfigError(
                    f"{setting}: {checkpoint} holds the state of another kind, {there}, than this {now} can go on "
                    f"from. Train with the same {setting}, or begin anew with its weights as the model."
                )
        try:
            load(checkpoint)
        except ValueError as error:
            reason = str(error)
        missing = needed - names()
        moment = _first_moment(optimizer)
        if moment:
            missing |= {moment for state in optimizer.state.values() if moment not in state}
        if reason or missing:
            reason = reason or f"it has no {', '.join(sorted(missing))}"
            raise ConfigError(
                f"optim: the state of the optimizer in {checkpoint} does not fit this {type(optimizer).__name__}: "
                f"{reason}. Train the same weights with the same optim, or begin again with its weights as the model."
            )

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
                "encoder of prompts makes, without its weights. Begin again."
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
        run_dir = Path(output_dir_of(trainer, trial))
        staged, target = run_dir / STAGING / name, run_dir / name
        if trainer.is_world_process_zero():
            trainer.state.stateful_callbacks.setdefault(TRAINER_STATE, {})[WITH_MANIFEST] = trainer.state.global_step
        self.is_staging = True
        try:
            yield
            encoder, sharded = self._prompt_encoder(), trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if encoder is not None and trainer.args.should_save and not sharded:
                save_file({name: value.clone() for name, value in encoder.state_dict().items()}, staged / ENCODER)
            best = trainer.state.best_model_checkpoint
            if best is not None and Path(best) == staged:
                trainer.state.best_model_checkpoint = str(target)
                if trainer.args.should_save:
                    trainer.state.save_to_json(str(staged / STATE))
            self._put_in_place(staged, target)
            self._newest = target
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)  # a full disk gets its room back
            raise
        finally:
            self.is_staging = False
        if trainer.args.push_to_hub:
            push_checkpoint(trainer, str(target))

    def folder(self, run_dir: str) -> str:
        """Return the folder that checkpoints of a run are written to now."""
        return os.path.join(run_dir, STAGING) if self.is_staging else run_dir

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

    def on_step_begin(self, args, state, control, **kwargs):
        """Take what callbacks have written into a checkpoint since it has its name for a part of it."""
        newest, self._newest = self._newest, None
        if newest is not None and args.should_save:
            renew_manifest(newest)

    on_train_end = on_step_begin

    def _on_first_rank(self, decide: Callable[[], Any]) -> Any:
        return on_first_rank(self._trainer.is_world_process_zero(), decide)


# arguments without secrets


def public_report(args: Any) -> AbstractContextManager[None]:
    """Within the context, what trackers are sent of a trainer's arguments has no secrets."""
    return replaced(args, to_dict=lambda: redacted(type(args).to_dict(args)))


def public_files(args: Any) -> AbstractContextManager[None]:
    """Within the context, a trainer's arguments are pickled without secrets, as for training_args.bin."""
    return replaced(args, __getstate__=partial(_public_state, args))  # which pickle asks for


def _public_state(args: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(args).items() if name not in ("to_dict", "__getstate__")}
    for field in fields(args):
        value = state.get(field.name)
        remember_settings(field.name, value)
        held = isinstance(value, str) and names_a_secret(field.name)
        state[field.name] = None if held else redacted(value)
    return state


# Checkpoints keep fingerprints of what their training started with, so that none goes on with something else. The check
# compares the datasets as they are trained on, the tokenizer and its chat template, the student and the
# teacher. It skips what is unknown on either side, such as the rows of a stream or sharded weights. It does not compare
# settings: most may change while a training goes on.


BEFORE = "weights before training"
KEY, KINDS = "fingerprints", "kinds"  # next to num_tokens in trainer_state.json
# of the weights of models that have trained since
_AT_FIRST: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def _kept(checkpoint: Path) -> dict[str, Any]:
    """Return what these trainers have put into a checkpoint's state; nothing for another trainer's."""
    file = checkpoint / STATE
    state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return state.get("stateful_callbacks", {}).get(TRAINER_STATE, {})


def kinds(trainer: TrainerHost) -> dict[str, str]:
    """Return what the states of a trainer's optimizer, if it is one of torch's, and of its schedule are of."""
    optimizer: Any = innermost(trainer.optimizer)
    names = [kind.__name__ for kind in type(optimizer).__mro__ if kind is not Optimizer and issubclass(kind, Optimizer)]
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside accelerate's wrapper
    found = {"lr_scheduler_type": type(schedule).__name__}
    if names:
        found["optim"] = getattr(optimizer, "optimizer_name", names[-1]).lower()  # bitsandbytes' are of one class
    return found


def _first_moment(optimizer: Any) -> str | None:
    """Return the name of a moment that every state of an optimizer has to have, if it is known."""
    if hasattr(optimizer, "optimizer_name"):  # bitsandbytes'
        return "state1"
    reads_others = type(optimizer).load_state_dict is not Adam.load_state_dict
    return None if reads_others or not isinstance(optimizer, Adam) else "exp_avg"


def student_fingerprints(model: Any) -> dict[str, Any]:
    """Return the fingerprints of a model that is about to train.

    They leave out what may be drawn at random: embeddings, which have rows for new tokens, and, since the checkpoint
    holds them anyway, adapters and a model that was not loaded from files.
    """
    base = base_of(model)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    embeddings = {id(weight) for module in ends if module is not None for weight in module.parameters()}
    weights = [(name, weight) for name, weight in base.named_parameters() if id(weight) not in embeddings]
    frozen = [(name.replace(".base_layer", ""), weight) for name, weight in weights if not weight.requires_grad]
    prints = {**describe_model(model), "frozen weights": sampled_fingerprint(frozen)}
    if isinstance(model, PeftModel) or not name_or_path(base.config):
        return prints
    if base not in _AT_FIRST:
        _AT_FIRST[base] = sampled_fingerprint((name, weight) for name, weight in weights if weight.requires_grad)
    return {**prints, BEFORE: _AT_FIRST[base]}


class ResumeCheck:
    """Puts fingerprints of a trainer's data, tokenizer, student and teacher into its checkpoints, and compares them.

    Make it before anything trains. Only the first process compares; all processes go on, or none.
    """

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer
        self._student = student_fingerprints(trainer.model)
        self._known: dict[str, Any] | None = None

    def begin(self, checkpoint: str | None, force: bool) -> None:
        """Compare a checkpoint with what this trainer has.

        Raises:
            ConfigError: something differs, and `force` is not set.
        """
        self._known = None  # an earlier training of this trainer may have had other rows
        if checkpoint is None:
            return
        main = self._trainer.is_world_process_zero()
        differences = on_first_rank(main, lambda: self._differences(Path(checkpoint)))
        if differences and not force:
            raise ConfigError(_refusal(Path(checkpoint), differences))
        if differences and main:
            warnings.warn(
                f"Continuing from {checkpoint}, although these differ: {'; '.join(differences)}.", stacklevel=3
            )

    def remember(self) -> None:
        """Put the fingerprints into the trainer's state, which a checkpoint saves."""
        if self._trainer.is_world_process_zero():
            states: Any = self._trainer.state.stateful_callbacks
            states.setdefault(TRAINER_STATE, {}).update({KEY: self._now(), KINDS: kinds(self._trainer)})

    def _now(self) -> dict[str, Any]:
        """Return the fingerprints, computed at first use: reading rows takes seconds for each GB."""
        if self._known is None:
            trainer = self._trainer
            named = trainer.row_preparation.named_datasets()
            self._known = {
                **{f"{name} dataset": self._of_rows(rows) for name, rows in named.items()},
                "tokenizer": describe_tokenizer(tokenizer_of(trainer), trainer.processing_class),
                "model": self._student,
                **trainer.teacher_fingerprints(),
            }
        return self._known

    def _of_rows(self, rows: Any) -> dict[str, Any]:
        """Return the fingerprint of the columns that the trainer reads, without images and sound."""
        if not isinstance(rows, Dataset):
            return {"rows": len(rows)} if hasattr(rows, "__len__") else {}
        columns = [column.name for column in rows.data.schema if "binary" not in str(column.type)]
        if self._trainer.args.remove_unused_columns:
            read = columns_of_model(self._trainer)
            columns = [name for name in columns if name in read]
        # Made of the prompts, which are compared. It comes and goes with lmbda, which may change.
        columns = [name for name in columns if name != GENERATION_PROMPT]
        fingerprint = rows_fingerprint(rows.select_columns(columns))
        return {LABEL: rows.info.dataset_name, "rows": len(rows), "sha256": fingerprint}

    def _differences(self, checkpoint: Path) -> list[str]:
        """Return the differences in words, one for each part."""
        there = _kept(checkpoint).get(KEY)
        if there is None:
            warnings.warn(
                f"{checkpoint} does not record what its training started with, as it was saved by an earlier version "
                "or by another trainer, so data, tokenizer and models are not compared.",
                stacklevel=4,
            )
            return []
        # Where the model was loaded from this checkpoint, only it knows the weights before training.
        name, before = name_or_path(base_of(self._trainer.model).config), there.get("model", {}).get(BEFORE)
        if before is not None and name and Path(name).resolve() == checkpoint.resolve():
            self._student = {**self._student, BEFORE: before}
        return list(_compared(there, self._now()))


def _compared(there: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in now:
        old, new = dict(_flat(there.get(part) or {})), dict(_flat(now[part]))
        names = [name for name in (old.get(LABEL), new.get(LABEL)) if name]
        both = [name for name in new if None not in (new[name], old.get(name)) and name.split(".")[-1] != LABEL]
        different = [name for name in both if new[name] != old[name]]
        if different:
            label = f" ({', now '.join(dict.fromkeys(names))})" if names else ""
            yield f"{part}{label}: " + ", ".join(
                f"{name} {shortened(old[name])} there, {shortened(new[name])} now" for name in different
            )


def _flat(parts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in parts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _refusal(checkpoint: Path, differences: list[str]) -> str:
    how = "train(resume_from_checkpoint=..., force_resume=True)."
    if (checkpoint.parent / CONFIG).is_file():
        name = ["--checkpoint", checkpoint.name]
        how = shlex.join(["liger-trainer", "resume", str(checkpoint.parent), *name, "--force"])
    return (
        f"{checkpoint} was saved by a training that started with something else:\n"
        + "".join(f"  {line}\n" for line in differences)
        + "A dataset is compared as it is trained on: tokenized, cut to length, packed, its rows in their order. "
        f"Restore what differs; or, to go on all the same: {how}"
    )
