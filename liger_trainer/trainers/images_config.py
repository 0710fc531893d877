"""The fields of LigerConfig and LigerDistillConfig about rows with images and the models that read them."""

from dataclasses import dataclass

from ..common.options import option


@dataclass
class ImagesConfig:
    """What is learned of rows with images, and which part of a vision-language model.

    Args:
        learn_image_tokens: learn the tokens that hold the places of an image too, where labels have them. TRL's
            collator puts them there when every token of a chat is learned. Default: they are left out, in fine-tuning
            and in distillation. With TRL's own SFTConfig labels stay as TRL makes them.
        freeze_vision_tower: train nothing of the vision tower, adapters included, and run it without gradients.
    """

    learn_image_tokens: bool = option(
        False,
        "Learn the tokens that hold the places of an image too, as TRL does where every token of a chat is learned.",
    )
    freeze_vision_tower: bool = option(
        False,
        "Train nothing of a vision-language model's vision tower, adapters included, and run it without gradients.",
    )
