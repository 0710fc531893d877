"""`weight_column`: rows that count more or less than others.

The loss of a batch is sum_i w(i) l(i) / N, where l(i) is the loss of token i, w(i) the weight of its row, and N the
number of supervised tokens of the global batch, weighted or not. So a row's share of the gradient does not depend on
the rows that it is batched with, weights of 1 change nothing, and weights of 2 are a loss of twice the size.
"""

import math
from typing import Any

import torch
from datasets import Dataset

from ..errors import DataError
from ..teachers.row_keys import DocumentCollator, check_known, documents, row_key, rows_with

TOKEN_WEIGHTS = "token_weights"  # in a batch, see `WeightCollator`
TRAIN = "train"


class RowWeights:
    """The weights of the training rows, by the content of each row: TRL's packing keeps no column.

    Evaluations are not weighted, so that they can be compared.

    Args:
        column: has numbers of at least 0.
        strategy: of packing, for messages.
    """

    def __init__(self, column: str, strategy: str | None):
        self._column, self._strategy = column, strategy
        self.of: dict[bytes, float] = {}

    def read(self, dataset: Dataset, name: str, cut: slice) -> None:
        """Take the weights of tokenized rows before they are packed.

        Args:
            cut: what truncation leaves of a row.

        Raises:
            DataError: no such column; a value that is no weight; equal rows with different weights; only zeros.
        """
        if name != TRAIN:
            for document in documents(dataset.select_columns(["input_ids", "labels"])):
                self.of.setdefault(row_key(document.input_ids[cut], document.labels[cut]), 1.0)
            return
        for value, document in rows_with(self._column, dataset, "weight_column", "training"):
            weight = self._weight(value, document.row)
            key = row_key(document.input_ids[cut], document.labels[cut])
            if self.of.setdefault(key, weight) != weight:
                raise DataError(
                    f"Row {document.row} of the training dataset, beginning with {document.input_ids[:8].tolist()}, "
                    f"stands in it twice, with the weights {self.of[key]:g} and {weight:g}. Equal rows need one weight."
                )
        if not any(self.of.values()):
            raise DataError(f"Every row of the training dataset has weight 0 in {self._column!r}: nothing is learned.")

    def _weight(self, value: Any, row: int) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise DataError(
                f"Row {row} of the training dataset has {value!r} in {self._column!r}; expected a number of at least 0."
            )
        return float(value)

    def check(self, prepared: Any) -> None:
        """Raise ConfigError where rows were not read, or packing has cut them so that they are not found again."""
        check_known(prepared if self.of else None, self.of, "weight_column", self._strategy)


class WeightCollator(DocumentCollator):
    """Add `token_weights` (batch, length) fp32, the weight of each position that predicts a token; 0 elsewhere."""

    def __init__(self, collator: Any, weights: RowWeights):
        super().__init__(collator, "is of no dataset that the trainer prepared, so its weight is not known.")
        self._weights = weights

    def look_up(self, key: bytes, tokens: int) -> torch.Tensor | None:
        weight = self._weights.of.get(key)
        return None if weight is None else torch.full((tokens,), weight)

    def columns(self, answers: list[torch.Tensor], predicts: torch.Tensor) -> dict[str, Any]:
        weights = torch.zeros(predicts.shape)
        if answers:
            weights[predicts] = torch.cat(answers)
        return {TOKEN_WEIGHTS: weights}
