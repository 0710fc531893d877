"""Log-probabilities that DistillKit captured (`sample_logits_vllm`): Parquet files and the way they are compressed.

    input_ids            (n,)           the row's tokens; shorter rows end with one of padding
    compressed_logprobs  (n - 1, bytes) what follows each token: the k likeliest, likeliest first
    bytepacked_indices   (n - 1, bytes) their ids, ceil(log2 d) bits each, the highest bit first

A log-probability list of k numbers is, one after the other: `exact_k` numbers in `exact_dtype`; a coefficient in
`term_dtype` for each of `polynomial_terms`, whose sum over terms at 0, 1, 2, ... approximates the others; and for each
of `residual_bins` a scale and its `num_elements` integers of `element_bits` bits, the corrections. With
`delta_encoding` each number but the first is the difference to the one before it.

Source: Arcee's DistillKit, distillkit/compression/{config,bitpack,monotonic_logprobs}.py and
distillkit/sample_{common,logits_vllm}.py, Apache-2.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import yaml
from datasets import Dataset, concatenate_datasets
from torch import Tensor

from ...errors import ConfigError, DataError
from ...teachers.row_keys import ragged
from .foreign import ForeignRecords, ForeignRow, Listed

COLUMNS = ("input_ids", "compressed_logprobs", "bytepacked_indices")
LEGACY = ("packed_indices", "exact_values", "coeffs")
CONFIG = "compression_config.yaml"
DTYPES = ("float16", "bfloat16", "float32", "float64")
FUNCTIONS = ("sqrt", "exp")


@dataclass(frozen=True)
class Bin:
    """Corrections that share a scale."""

    scale_dtype: str
    element_bits: int
    num_elements: int

    @property
    def bytes(self) -> int:
        return _dtype(self.scale_dtype).itemsize + -(-self.element_bits * self.num_elements // 8)


@dataclass(frozen=True)
class Compression:
    """DistillKit's `DistributionQuantizationConfig`, its defaults included."""

    d: int
    k: int
    exact_k: int
    residual_bins: tuple[Bin, ...]
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read DistillKit's YAML: a compression_config.yaml, or a run's file, which has it as `logprob_compressor`.

        Raises:
            ConfigError: it has none, or one that this project does not know.
        """
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: the compression configuration cannot be read: {error}") from None
        for key in ("teacher", "logprob_compressor"):
            if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
                content = content[key]
        try:
            return cls.of(content)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{file} is no compression configuration of DistillKit, with d, k, exact_k, residual_bins and so on: "
                f"{error}"
            ) from None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        unknown = sorted(set(content) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown key {unknown[0]}")
        terms = tuple(content.get("polynomial_terms") or ())
        if any(not isinstance(term, int) and term not in FUNCTIONS for term in terms):
            raise ValueError(f"polynomial_terms are powers, or {', '.join(FUNCTIONS)}; got {terms}")
        made = cls(**{**content, "polynomial_terms": terms,
                      "residual_bins": tuple(Bin(**each) for each in content["residual_bins"] or ())})  # fmt: skip
        for name in (made.exact_dtype, made.term_dtype, *(each.scale_dtype for each in made.residual_bins)):
            if name not in DTYPES:
                raise ValueError(f"expected one of {', '.join(DTYPES)}, got {name}")
        if not 0 <= made.exact_k <= made.k or sum(each.num_elements for each in made.residual_bins) > made.rest:
            raise ValueError(f"k {made.k} is less than exact_k {made.exact_k} and the elements of residual_bins")
        return made

    @property
    def rest(self) -> int:
        """How many numbers are approximated."""
        return self.k - self.exact_k

    @property
    def id_bits(self) -> int:
        # in fp32, as DistillKit does: next to a power of two fp64 may give another number
        return int(torch.log2(torch.tensor(self.d, dtype=torch.float32)).ceil())

    @property
    def widths(self) -> tuple[int, int]:
        """Return the bytes of a place in compressed_logprobs and in bytepacked_indices."""
        numbers = self.exact_k * _dtype(self.exact_dtype).itemsize
        numbers += len(self.polynomial_terms) * _dtype(self.term_dtype).itemsize
        return numbers + sum(each.bytes for each in self.residual_bins), -(-self.k * self.id_bits // 8)

    def log_probs(self, packed: np.ndarray) -> np.ndarray:
        """Return (n, k) fp64 of (n, bytes) uint8."""
        at, rest = 0, torch.from_numpy(packed.copy())

        def take(count: int, dtype: str) -> Tensor:
            nonlocal at
            start, at = at, at + count * _dtype(dtype).itemsize
            # one after the other at the beginning of memory, as numbers of several bytes must lie
            return rest[:, start:at].flatten().clone().view(_dtype(dtype)).reshape(len(packed), count)

        exact = take(self.exact_k, self.exact_dtype).double()
        fit = torch.zeros(len(packed), self.rest, dtype=torch.float64)
        if self.polynomial_terms:
            coefficients = take(len(self.polynomial_terms), self.term_dtype)
            fit = (self._terms() * coefficients[:, None]).sum(-1).double()  # rounded as DistillKit rounds
        column = 0
        for each in self.residual_bins:
            scale, start = take(1, each.scale_dtype).float(), at
            at += each.bytes - _dtype(each.scale_dtype).itemsize
            codes = torch.from_numpy(unpacked(packed[:, start:at], each.element_bits, each.num_elements))
            # one bit stands for -1 and 1, more for integers around 0
            centred = 2 * codes - 1 if each.element_bits == 1 else codes - 2 ** (each.element_bits - 1)
            fit[:, column : column + each.num_elements] += (centred.float() * scale).double()
            column += each.num_elements
        numbers = torch.cat([exact, fit], -1)
        return (numbers.cumsum(-1) if self.delta_encoding else numbers).numpy()

    def _terms(self) -> Tensor:
        """Return the terms (rest, count) that the coefficients multiply."""
        dtype = _dtype(self.term_dtype)
        steps = torch.linspace(0, 1, self.rest, dtype=dtype) if self.normalize_t else torch.arange(self.rest).to(dtype)
        each = [steps**term if isinstance(term, int) else getattr(torch, term)(steps) for term in self.polynomial_terms]
        return torch.stack(each, -1)


def unpacked(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return (n, count) int64 of (n, bytes) uint8: integers of `bits` bits without gaps, the highest bit first."""
    # padding bits at the end of the last byte are cut off
    each = np.unpackbits(packed, axis=-1)[:, : count * bits].reshape(len(packed), count, bits)
    return each.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class DistillKitRecords(ForeignRecords):
    """Parquet files of DistillKit.

    Args:
        path: a file, or a folder of them.
        compression: the YAML file that says how they are compressed. Default: compression_config.yaml next to them.

    Raises:
        ConfigError: there are none, or they are of another form; the compression is unknown, or is not theirs.
        DataError: later, a row is not of this form.
    """

    tool = "distillkit"
    most_mass = 1.1  # the compression loses more than bf16 does
    knows_labels = False

    def __init__(self, path: Path, compression: Path | None = None):
        self.files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
        if not self.files or any(file.suffix != ".parquet" for file in self.files):
            raise ConfigError(f"{path}: expected a Parquet file of DistillKit, or a folder of them.")
        default = (path if path.is_dir() else path.parent) / CONFIG
        if compression is None and not default.is_file():
            raise ConfigError(
                f"{default} is not there, which says how the records are compressed. Name the file that does: "
                "DistillKit's YAML with its logprob_compressor."
            )
        self.compression = Compression.read(compression or default)
        self._table = concatenate_datasets([_columns(file) for file in self.files]).with_format("arrow")

    def name(self, number: int) -> str:
        return f"{self.files[0] if len(self.files) == 1 else self.files[0].parent}, row {number}"

    def rows(self) -> Iterator[ForeignRow]:
        for number in range(len(self._table)):
            row: Any = self._table[number : number + 1]
            ids = row["input_ids"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            places = len(row["compressed_logprobs"].combine_chunks().flatten())
            # one a token, or none for the last, after which nothing stands
            if places not in (len(ids) - 1, len(ids)):
                raise DataError(
                    f"{self.name(number)} has {len(ids)} tokens and log-probabilities for what follows {places} of "
                    f"them; expected {len(ids) - 1}."
                )
            yield ForeignRow(number, ids[:places].astype(np.int64), self.compression.k)

    def listed(self, number: int, places: np.ndarray, k: int) -> Listed:
        row: Any = self._table[number : number + 1]
        columns = zip(COLUMNS[1:], self.compression.widths, strict=True)
        # place p is predicted from the token before it
        numbers, packed = (self._bytes(number, row[name], name, width)[places - 1] for name, width in columns)
        log_probs = self.compression.log_probs(numbers)
        ids = unpacked(packed, self.compression.id_bits, self.compression.k)
        # the approximation need not fall everywhere, so the likeliest are sought again
        order = np.argsort(-log_probs, -1, kind="stable")[:, :k]
        return Listed(np.take_along_axis(ids, order, -1), np.take_along_axis(log_probs, order, -1), None)

    def _bytes(self, number: int, column: Any, name: str, width: int) -> np.ndarray:
        inner = ragged(column.combine_chunks().flatten())
        lengths = np.diff(inner.offsets.to_numpy())
        if (lengths != width).any():
            raise ConfigError(
                f"{self.name(number)} has {lengths[lengths != width][0]} bytes a place in {name}, and by the "
                f"compression configuration (d {self.compression.d}, k {self.compression.k}) there are {width}. "
                "The configuration is of other records."
            )
        return inner.flatten().to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, width)


def _columns(file: Path) -> Dataset:
    table = Dataset.from_parquet(str(file))
    assert isinstance(table, Dataset)
    if set(LEGACY) <= set(table.column_names):
        raise ConfigError(
            f"{file} is of DistillKit's legacy compression ({', '.join(LEGACY)}), which is not read. Sample the logits "
            "again with its sample_logits_vllm."
        )
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ConfigError(f"{file} lacks the column {missing[0]}; it has {', '.join(table.column_names)}.")
    return table.select_columns(list(COLUMNS))
