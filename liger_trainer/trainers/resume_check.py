"""Fingerprints of what a training started with, kept in its checkpoints, so that none goes on with something else.

The check compares the datasets as they are trained on, the tokenizer and its chat template, the student and the
teacher. It skips what is unknown on either side, such as the rows of a stream or sharded weights. It does not compare
settings: most may change while a training goes on.
"""

import json
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from datasets import Dataset
from peft import PeftModel
from torch import nn

from ..common.checkpoints import TRAINER_STATE
from ..common.console import on_first_rank
from ..common.files import CONFIG, STATE
from ..errors import ConfigError
from ..patching.patcher import base_of
from ..teachers.fingerprints import (
    LABEL,
    describe_model,
    describe_tokenizer,
    rows_fingerprint,
    sampled_fingerprint,
    shortened,
)
from .rows import GENERATION_PROMPT

BEFORE = "weights before training"
KEY = "fingerprints"  # beside num_tokens in trainer_state.json
_AT_FIRST: WeakKeyDictionary[nn.Module, str | None] = (
    WeakKeyDictionary()
)  # the weights of models that have trained since


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
    if isinstance(model, PeftModel) or not base.config._name_or_path:
        return prints
    if base not in _AT_FIRST:
        _AT_FIRST[base] = sampled_fingerprint((name, weight) for name, weight in weights if weight.requires_grad)
    return {**prints, BEFORE: _AT_FIRST[base]}


class ResumeCheck:
    """Puts fingerprints of a trainer's data, tokenizer, student and teacher into its checkpoints, and compares them.

    Make it before anything trains. The first process alone compares; all processes go on, or none.
    """

    def __init__(self, trainer: Any):
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
            warnings.warn(f"Going on from {checkpoint} with something else: {'; '.join(differences)}.", stacklevel=3)

    def remember(self) -> None:
        """Put the fingerprints into the trainer's state, which a checkpoint saves."""
        if self._trainer.is_world_process_zero():
            states: Any = self._trainer.state.stateful_callbacks
            states.setdefault(TRAINER_STATE, {})[KEY] = self._now()

    def _now(self) -> dict[str, Any]:
        """Return the fingerprints, computed at first use: reading rows takes seconds for each GB."""
        if self._known is None:
            self._known = {**self._of_data(), **self._of_models()}
        return self._known

    def _of_models(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "tokenizer": describe_tokenizer(trainer._tokenizer, trainer.processing_class),
            "model": self._student,
            **trainer.teacher_fingerprints(),
        }

    def _of_data(self) -> dict[str, Any]:
        named = self._trainer.row_preparation.named_datasets()
        return {f"{name} dataset": self._of_rows(rows) for name, rows in named.items()}

    def _of_rows(self, rows: Any) -> dict[str, Any]:
        """Return the fingerprint of the columns that the trainer reads, without images and sound."""
        if not isinstance(rows, Dataset):
            return {"rows": len(rows)} if hasattr(rows, "__len__") else {}
        columns = [column.name for column in rows.data.schema if "binary" not in str(column.type)]
        if self._trainer.args.remove_unused_columns:
            self._trainer._set_signature_columns_if_needed()
            columns = [name for name in columns if name in (self._trainer._signature_columns or ())]
        # Made of the prompts, which are compared. It comes and goes with lmbda, which may change.
        columns = [name for name in columns if name != GENERATION_PROMPT]
        fingerprint = rows_fingerprint(rows.select_columns(columns))
        return {LABEL: rows.info.dataset_name, "rows": len(rows), "sha256": fingerprint}

    def _differences(self, checkpoint: Path) -> list[str]:
        """Return the differences in words, one for each part."""
        file = checkpoint / STATE
        state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        there = state.get("stateful_callbacks", {}).get(TRAINER_STATE, {}).get(KEY)
        if there is None:
            warnings.warn(
                f"{checkpoint} does not say what its training was begun with, as it was saved by an earlier version "
                "or by another trainer, so data, tokenizer and models are not compared.",
                stacklevel=4,
            )
            return []
        self._take_weights_for_those_before(checkpoint, there)
        return list(_compared(there, self._now()))

    def _take_weights_for_those_before(self, checkpoint: Path, there: Mapping[str, Any]) -> None:
        """Take the checkpoint's word for the weights before training, where the model was loaded from it."""
        name = base_of(self._trainer.model).config._name_or_path
        before = there.get("model", {}).get(BEFORE)
        if before is not None and name and Path(name).resolve() == checkpoint.resolve():
            self._student = {**self._student, BEFORE: before}


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
        f"{checkpoint} was saved by a training that was begun with something else:\n"
        + "".join(f"  {line}\n" for line in differences)
        + "A dataset is compared as it is trained on: tokenized, cut to length, packed, its rows in their order. "
        f"Restore what differs; or, to go on all the same: {how}"
    )
