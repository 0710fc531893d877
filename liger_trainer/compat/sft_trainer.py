"""TRL's SFTTrainer (1.15, 1.16): its classes, once it is known to be new enough, and what it keeps to itself.

Our trainers import TRL's classes from here, so that an older TRL, or none, ends in one sentence. Nothing else of the
package imports TRL with the module.
"""

import functools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

from ..errors import ConfigError
from .code_objects import names_read

OLDEST = "1.15"  # the first whose SFTTrainer asks the model for its loss (`fused_lm_head`)


def _check_trl() -> None:
    """Raise ConfigError where TRL is not installed, or older than our trainers need."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = None
    if found is None or Version(found) < Version(OLDEST):
        raise ConfigError(
            f"LigerTrainer and LigerDistillTrainer need TRL {OLDEST} or later, and "
            f"{'none' if found is None else found} is installed: pip install --upgrade trl. With any TRL, or none, "
            "patch(model), enable() and DistillationCallback serve a transformers.Trainer."
        )


_check_trl()

from trl import SFTConfig  # noqa: E402
from trl.data_utils import is_conversational  # noqa: E402
from trl.trainer.sft_trainer import (  # noqa: E402
    DataCollatorForLanguageModeling,
    DataCollatorForVisionLanguageModeling,
    SFTTrainer,
)

__all__ = [
    "DataCollatorForLanguageModeling", "DataCollatorForVisionLanguageModeling", "SFTConfig", "SFTTrainer",
    "is_conversational",
]  # fmt: skip


class RowsTrainer(SFTTrainer):
    """An SFTTrainer that has its rows prepared by `prepare_rows`. A constructor of SFTTrainer prepares them all."""

    def _prepare_dataset(self, *rows: Any) -> Any:
        return self.prepare_rows(super()._prepare_dataset, *rows)

    def prepare_rows(self, prepare: Callable[..., Any], *rows: Any) -> Any:
        """Return a dataset as `prepare(*rows)` would, SFTTrainer's own method.

        Args:
            rows: dataset, processing_class, args, packing, formatting_func, dataset_name.
        """
        raise NotImplementedError


def takes_json(*names: str) -> Callable[[type], type]:
    """Let fields of a configuration be JSON on a command line, besides those of TRL's SFTConfig."""

    def of(kind: type) -> type:
        # `__post_init__` of transformers' arguments reads the list of the object's class
        kind._VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, *names]  # pyright: ignore[reportAttributeAccessIssue]
        return kind

    return of


# What TRL 1.16 tells of the documents of a batch, and 1.15 does not. Without it attention would have to look for them
# in the positions, which waits for the device, and some families' masks know no positions.


def with_lengths(collator: Any) -> Any:
    """Have TRL's collator of rows without padding tell the lengths of their documents. Returns the same collator."""
    own = type(collator) is DataCollatorForLanguageModeling and collator.padding_free
    if own and "repeat_interleave" not in names_read(DataCollatorForLanguageModeling.torch_call):
        collator.torch_call = functools.partial(_told, collator)
    return collator


def _told(collator: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = DataCollatorForLanguageModeling.torch_call(collator, examples)
    positions = batch["position_ids"][0]
    ends = torch.cat([(positions == 0).nonzero().flatten(), torch.tensor([len(positions)])]).to(torch.int32)
    lengths = ends.diff()
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = ends
    batch["max_length_q"] = batch["max_length_k"] = int(lengths.max())
    batch["seq_idx"] = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]
    return batch
