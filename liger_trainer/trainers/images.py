"""Rows with images: what is learned of them, images that max_length would cut, and a vision tower that is not trained.

TRL prepares such rows when a batch is made: the processor draws each image to its size, and writes as many
placeholders into the text as the image has features. The model puts the features in their place.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import Tensor, nn

from ..common.replacements import Replacements, forward_of
from ..errors import ConfigError, DataError
from ..losses.model_parts import placeholder_ids, reads_images
from ..losses.spec import IGNORE_INDEX
from ..patching.patcher import base_of
from ..teachers.row_keys import column_names

COLUMNS = ("image", "images")
_NEEDS_TEXT = {
    "packing": "documents of a packed row could not be told which image is theirs; set packing to false. Rows are "
    "padded instead",
    "padding_free": "TRL's collator of images pads; set padding_free to false",
    "eval_packing": "rows with images are padded, in evaluations too; set eval_packing to false",
    "supervised_part": "the processor's chat template writes the rows; take assistant_only_loss, or columns prompt and "
    "completion",
}


_NEEDS_TEXT_TO_TEACH = {
    "teacher_prompt": "it is put in front of rows of text",
    "teacher_prompt_column": "its prompts are put in front of rows of text",
    "teacher_column": "rows with images are prepared batch by batch, and keep no other columns",
    "samples": "completions are sampled for rows of text; leave lmbda and seq_kd out",
}


def check_settings(dataset: Any, args: Any) -> None:
    """Raise ConfigError for a setting that rows with images cannot have, or that rows without them have no use for."""
    known = isinstance(dataset, Dataset | IterableDataset)  # of other rows TRL's refusal names the type
    if known and not set(COLUMNS).isdisjoint(column_names(dataset)):
        for name, reason in _NEEDS_TEXT.items():
            if getattr(args, name, None):
                raise ConfigError(f"{name} does not go with rows that have images: {reason}.")
        _check_teacher(args)
    elif getattr(args, "learn_image_tokens", False):
        raise ConfigError("learn_image_tokens: the training rows have no column image or images. Leave it out.")


def _check_teacher(args: Any) -> None:
    for name, reason in _NEEDS_TEXT_TO_TEACH.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} does not go with rows that have images: {reason}.")
    if getattr(args, "teacher", None) in ("cache", "server"):
        raise ConfigError(f"teacher: {args.teacher} knows only rows of text. With images take model or self.")
    if hasattr(args, "loss_plan") and (name := args.loss_plan().other_tokens):
        raise ConfigError(f"losses: {name} reads rows as text in two tokenizers, and these have images. Leave it out.")


@dataclass
class ImageCollator:
    """TRL's collator of rows with images. Labels leave placeholders out, and no image is cut.

    Args:
        collator: TRL's. Its `max_length` is taken over, so that the rows can be measured before they are cut.
        placeholders: ids that stand for features.
        learned: leave the placeholders in labels, as TRL does.

    Raises:
        DataError: `max_length` would cut off placeholders, whose features would have no place; a row that its
            processor refuses.
    """

    collator: Any  # TRL's DataCollatorForVisionLanguageModeling
    placeholders: tuple[int, ...]
    learned: bool = False

    def __post_init__(self) -> None:
        # TRL would cut the rows without a look at what it cuts.
        self.max_length, self.collator.max_length = self.collator.max_length, None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        pictures = [list((row["images"] if "images" in row else [row["image"]]) or []) for row in rows]
        batch: Any = self.collator(rows)
        stands_for_image = torch.isin(batch["input_ids"], torch.tensor(self.placeholders))
        if self.max_length is not None and batch["input_ids"].shape[1] > self.max_length:
            self._check_cut(stands_for_image, batch["attention_mask"], pictures)
            shape = batch["input_ids"].shape
            # whatever has a value for each token, such as token types and positions of some processors
            for name, value in batch.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    batch[name] = value[:, : self.max_length]
            stands_for_image = stands_for_image[:, : self.max_length]
        if not self.learned:
            batch["labels"] = batch["labels"].masked_fill(stands_for_image, IGNORE_INDEX)
        return batch

    def _check_cut(self, stands_for_image: Tensor, mask: Tensor, pictures: list[list[Any]]) -> None:
        assert self.max_length is not None
        cut = stands_for_image[:, self.max_length :].any(1)
        for row in cut.nonzero().flatten().tolist():
            sizes = ", ".join(f"{image.size[0]} x {image.size[1]}" for image in pictures[row] if hasattr(image, "size"))
            raise DataError(
                f"A row has {int(mask[row].sum()):,} tokens, {int(stands_for_image[row].sum()):,} of them for its "
                f"images ({sizes} pixels), and max_length={self.max_length} would cut images off. Raise max_length or "
                "set it to null, or have the processor make images smaller (max_pixels or size of its image processor)."
            )


def with_image_collator(collator: Any, model: Any, learned: bool) -> Any:
    """Return a trainer's collator for a model, with ours around it if it is TRL's for images.

    Raises:
        ConfigError: the model takes no images, or the processor writes placeholders that are not this model's.
    """
    from ..compat.sft_trainer import DataCollatorForVisionLanguageModeling  # only the trainers need TRL

    # Exactly TRL's: a subclass may treat labels in its own way.
    if type(collator) is not DataCollatorForVisionLanguageModeling:
        return collator
    from ..teachers.own_images import placeholder_of  # which rows of text need not wait for

    if not reads_images(model):
        raise ConfigError(f"The rows have images, and {type(model).__name__} takes none. Load a vision-language model.")
    placeholders, token = placeholder_ids(model.config), placeholder_of(collator.processor)
    if token not in placeholders:
        raise ConfigError(
            f"The processor writes token {token} where an image is, and {type(model).__name__} puts images in the "
            f"place of {', '.join(map(str, placeholders)) or 'no token'}. Pass the processor that belongs to the model."
        )
    return ImageCollator(collator, placeholders, learned)


def vision_tower(model: Any) -> tuple[str, nn.Module] | None:
    """Return path and module of the part of a model that reads images, None where it has none."""
    model = base_of(model)
    # A model without a tower returns itself.
    tower = model.get_encoder(modality="image") if hasattr(model, "get_encoder") else model
    path = next((name for name, module in model.named_modules() if module is tower), "")
    return (path, tower) if path and getattr(model.config, "vision_config", None) is not None else None


def without_adapters(peft_config: Any, model: Any) -> Any:
    """Return a configuration of adapters that passes the vision tower of `model` over, unless it excludes modules."""
    tower = vision_tower(model) if isinstance(model, nn.Module) else None
    if tower is None or peft_config is None or getattr(peft_config, "exclude_modules", "") is not None:
        return peft_config
    # A copy: the same configuration may be given to another trainer.
    changed = copy.copy(peft_config)
    changed.exclude_modules = rf"(.*\.)?{re.escape(tower[0])}(\..*)?"
    return changed


def freeze_tower(model: Any) -> None:
    """Set the vision tower's weights to need no gradient.

    Raises:
        ConfigError: the model has none, or adapters lie in it.
    """
    tower = vision_tower(model)
    if tower is None:
        raise ConfigError(f"freeze_vision_tower: {type(base_of(model)).__name__} has no vision tower. Leave it out.")
    path, module = tower
    if isinstance(model, PeftModel) and any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            f"freeze_vision_tower: adapters, or weights that are trained besides them, lie in {path}. Keep them out: "
            f"exclude_modules=r'.*{re.escape(path)}.*' in the LoraConfig, or other target_modules."
        )
    module.requires_grad_(False)


@contextlib.contextmanager
def tower_without_gradients(model: Any) -> Iterator[None]:
    """Within the context, a vision tower that trains nothing keeps nothing for a backward.

    With adapters and gradient checkpointing, transformers has the outputs of all embeddings require gradients, also
    those of patches, so a frozen tower would be differentiated.
    """
    replacements, tower = Replacements(), vision_tower(model)
    if tower is not None and not any(parameter.requires_grad for parameter in tower[1].parameters()):
        before = forward_of(tower[1])

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return before(*args, **kwargs)

        replacements.forward(tower[1], forward)
    try:
        yield
    finally:
        replacements.undo()
