"""Several teachers: all of them teach each row, by weight; or a column of the rows names the teacher of each.

The column does not survive TRL's packing, so a document's key says which teacher it has. Where each row of a batch is
one of the dataset, its teacher is told by the row, and stays the same when its completion is sampled again.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from datasets import Dataset

from ...errors import ConfigError, DataError
from ...losses.answers import SeveralAnswers, WeightedAnswer
from ...teachers.adapters_off import SelfTeacher
from ...teachers.base import Cut, DistillHost, Teacher
from ...teachers.config import TeacherConfig, TeacherEntry, entries_of
from ...teachers.fingerprints import data_fingerprint
from ...teachers.model import ModelTeacher
from ...teachers.row_keys import DocumentCollator, check_known, row_key, rows_with

ROUTES, PRESENT = "teacher_routes", "teachers_present"
NO_ROUTE = -1


class EnsembleTeacher(Teacher):
    """Teachers by name: those of `args.teachers`, or a dictionary of models and paths given to the trainer.

    With `args.teacher_column` a teacher without a token in a batch does not read it, unless its weights are sharded:
    then all ranks must take part in each pass.

    Raises:
        ConfigError: a name without a model, a model without a name, a value of the wrong kind; later, packing that cuts
            documents, or teachers with different vocabularies.
        DataError, with a column: a row without a value, or with one that no teacher has; equal rows with different
            values.
    """

    def __init__(self, args: TeacherConfig, given: Any):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                "args.teachers names several teachers: pass teacher_model as a dictionary of them by name, or leave it "
                f"out; got {type(given).__name__}."
            )
        if name := args.loss_plan().other_tokens:
            raise ConfigError(
                f"losses: {name} has one teacher, of another tokenizer. Leave it out, or several teachers."
            )
        try:
            entries = entries_of(args, given)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # A name that no entry has would be a teacher that nobody asks.
        models = [entry.name for entry in entries if entry.args.teacher == "model"]
        if unknown := [name for name in given or () if name not in models]:
            raise ConfigError(
                f"teacher_model has a teacher {unknown[0]!r}, and args.teachers has models for "
                f"{', '.join(models)} and no other."
            )
        self.entries = {entry.name: entry for entry in entries}
        self.teachers = {entry.name: _teacher(entry, given) for entry in entries}
        self._column, self._strategy = args.teacher_column, args.packing_strategy
        self._index = {route: i for i, entry in enumerate(entries) for route in entry.routes}
        self._routes: dict[bytes, int] = {}
        self._all_read = False

    @property
    def models(self) -> dict[str, Any]:
        return {name: teacher.model for name, teacher in self.teachers.items()}

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        for teacher in self.teachers.values():
            teacher.see(dataset, tokenizer, name)

    def read_rows(self, dataset: Dataset, name: str, cut: Cut) -> None:
        """Remember the teacher of every document, by its key after truncation."""
        if self._column is None:
            return
        for value, document in rows_with(self._column, dataset, "teacher_column", name):
            route = self._index.get(str(value))
            if route is None:
                raise DataError(
                    f"Row {document.row} of the {name} dataset has {value!r} in the column {self._column!r}, and no "
                    f"teacher is of that name or route. Known: {', '.join(self._index)}."
                )
            # By the key that the document has after truncation: packed rows hold it in that form.
            ids, labels = cut(document.input_ids), cut(document.labels)
            if self._routes.setdefault(row_key(ids, labels), route) != route:
                names = list(self.entries)
                raise DataError(
                    f"Row {document.row} of the {name} dataset, beginning with {ids[:8].tolist()}, stands in the data "
                    f"twice, with different values in {self._column!r}: one is taught by {names[route]}, the other by "
                    f"{names[self._routes[row_key(ids, labels)]]}. Equal rows need one teacher."
                )

    def fingerprints(self) -> dict[str, Any]:
        names = list(self.entries)
        return {
            "teachers": ", ".join(sorted(names)),
            # which teacher has which rows: a training that goes on must not change that
            "rows of each": data_fingerprint(key + names[route].encode() for key, route in self._routes.items()),
            **{f"teacher {name}": teacher.fingerprints() for name, teacher in self.teachers.items()},
        }

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        for teacher in self.teachers.values():
            teacher.check(dataset, name, tokenizer)
        if self._column is not None:
            check_known(dataset, self._routes, "teacher_column", self._strategy)

    def collator(self, collator: Any) -> Any:
        for name, teacher in self.teachers.items():
            if teacher.collator(collator) is not collator:
                raise ConfigError(
                    f"teachers: the processor of {name} draws images otherwise than the student's. Several teachers "
                    "read the student's rows; take those with its processor, or one teacher."
                )
        return collator if self._column is None else RouteCollator(collator, self._routes)

    def prepare(self, trainer: DistillHost) -> int:
        # Sharded weights are gathered in each pass, so a rank whose batch has no token of a teacher reads it all the
        # same: the others would wait for it.
        self._all_read = bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        sizes = [teacher.prepare(trainer) for teacher in self.teachers.values()]
        # What all of them can read, and what each shares with the student.
        self.reads = min((each.reads for each in self.teachers.values() if each.reads is not None), default=None)
        self.unshared = frozenset().union(*(each.unshared for each in self.teachers.values()))
        return min(sizes)

    def answer(self, inputs: dict[str, Any]) -> SeveralAnswers:
        routes, present = inputs.pop(ROUTES, None), inputs.pop(PRESENT, None)
        shares = []
        for i, (name, teacher) in enumerate(self.teachers.items()):
            # One of them always answers: a batch without any token of a teacher has a loss of 0, but still a graph.
            reads = present is None or self._all_read or i in (present or (0,))
            if reads:
                taught = None if routes is None else (routes == i).expand(inputs["input_ids"].shape)
                known: Any = teacher.answer(dict(inputs))  # a copy, since a teacher takes out what only it needs
                shares.append(WeightedAnswer(name, known, self.entries[name].weight, taught))
        return SeveralAnswers(shares, tuple(self.teachers), routed=routes is not None)

    @contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        """All at once: one that is the student without adapters is so as long as the context lasts."""
        with ExitStack() as stack:
            live = {name: stack.enter_context(teacher.live()) for name, teacher in self.teachers.items()}
            yield {name: model for name, models in live.items() for model in models.values()}


def _teacher(entry: TeacherEntry, given: Mapping[str, Any] | None) -> Teacher:
    if entry.args.teacher == "self":
        return SelfTeacher()
    model = (given or {}).get(entry.name, entry.args.teacher_model_name_or_path)
    if model is None:
        raise ConfigError(
            f"teachers: {entry.name} needs teacher_model_name_or_path, or a model of that name in teacher_model."
        )
    return ModelTeacher(entry.args, model, f"teacher {entry.name}")


class RouteCollator(DocumentCollator):
    """Add `teacher_routes` int64 and `teachers_present`, the teachers that have any.

    The routes are (batch, 1), the teacher of each row, whatever it predicts; or, of rows that hold several documents,
    (batch, length), the teacher of each position that predicts a token.
    """

    def __init__(self, collator: Any, routes: Mapping[bytes, int]):
        super().__init__(collator, "is of no dataset that the trainer prepared, so its teacher is not known.")
        self.routes = routes

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(examples)
        # Packed or padding-free: several documents in one row of the batch, so `columns` has told them by position.
        if any("seq_lengths" in example for example in examples) or len(batch["input_ids"]) != len(examples):
            return batch
        rows = [(example["input_ids"], example.get("labels", example["input_ids"])) for example in examples]
        routes = torch.cat([self._answer(ids, labels)[:1] for ids, labels in rows])
        return {**batch, ROUTES: routes[:, None], PRESENT: tuple(routes.unique().tolist())}

    def look_up(self, key: bytes, tokens: int) -> torch.Tensor | None:
        route = self.routes.get(key)
        # at least one, which a row that predicts nothing shows its teacher by
        return None if route is None else torch.full((max(tokens, 1),), route)

    def columns(self, answers: list[torch.Tensor], predicts: torch.Tensor) -> dict[str, Any]:
        routes = torch.full(predicts.shape, NO_ROUTE)
        if answers:
            routes[predicts] = torch.cat(answers)
        return {ROUTES: routes, PRESENT: tuple(routes[predicts].unique().tolist())}
