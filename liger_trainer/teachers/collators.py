"""What collators of teachers share: they find each document of a batch by its content.

TRL's packing and its collator keep token ids, labels and the lengths of what was packed, and no other column. So what a
teacher knows of a row cannot travel with the row; it is looked up by the row's key.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from ..errors import DataError
from ..losses.spec import IGNORE_INDEX
from .row_keys import row_key, spans, supervised_tokens


class DocumentCollator(ABC):
    """Add what a teacher knows of each document to the batch of TRL's collator.

    Args:
        collator: TRL's own.
        unknown: ends the message about a document that is not found, after "A row of 9 tokens, beginning with [...],".

    Raises, when called:
        DataError: a document is not found, or the batch has other labels than its rows.
    """

    def __init__(self, collator: Any, unknown: str):
        self.collator, self._unknown = collator, unknown

    @abstractmethod
    def look_up(self, key: bytes, tokens: int) -> Any:
        """Return what is known of a document with so many supervised tokens; None where it is not found."""

    @abstractmethod
    def columns(self, answers: list[Any], predicts: torch.Tensor) -> dict[str, Any]:
        """Return the columns to add, from what `look_up` returned for each document.

        `predicts` (batch, length) is true at positions that predict a supervised token, in the documents' order.
        """

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        documents = [document for example in examples for document in supervised_documents(example)]
        answers = [self._answer(ids, labels) for ids, labels in documents]
        predicts = pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX) != IGNORE_INDEX
        in_rows, in_batch = sum(supervised_tokens(labels) for _, labels in documents), int(predicts.sum())
        if in_rows != in_batch:
            raise DataError(
                f"A batch has {in_batch} supervised tokens, and its rows have {in_rows}. Labels must be as the rows "
                "have them: with eval_packing, use packing too, so that the collator keeps documents apart."
            )
        return {**batch, **self.columns(answers, predicts)}

    def _answer(self, ids: Any, labels: Any) -> Any:
        answer = self.look_up(row_key(ids, labels), supervised_tokens(labels))
        if answer is None:
            raise DataError(f"A row of {len(ids)} tokens, beginning with {list(ids[:8])}, {self._unknown}")
        return answer


def supervised_documents(example: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield token ids and labels of each document of an example that has something to predict."""
    ids, labels = example["input_ids"], example.get("labels", example["input_ids"])
    for start, end in spans(len(ids), example.get("seq_lengths")):
        if supervised_tokens(labels[start:end]):
            yield ids[start:end], labels[start:end]
