"""Tiny vision-language models with their processors, built on the spot, and rows of drawn images with chats.

The processors are transformers' own, with image processors that need only Pillow. Those that read videos too get no
video processor, since transformers' need torchvision; SmolVLM gets the processor of Idefics 3, since its own counts
in words by a package.
"""

import random
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image, ImageDraw
from tiny import WORDS, spread_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TURNS = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>"]
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4, "patch_size": 8, "out_hidden_size": 32,
}  # fmt: skip
SIDE = 32  # pixels of an image, for models that want one size
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SIZE = {"height": SIDE, "width": SIDE}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
QWEN = {
    "tokens": QWEN_TOKENS, "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "images": lambda: Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096),
}  # fmt: skip

# Of each family: the names of its special tokens, what stands for an image in a chat, its classes, and what the
# configuration and the processor are made of, given the ids of the tokens.
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN,
        "classes": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor"),
        "config": lambda ids: {
            **_qwen_ids(ids),
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [1]},
        },
    },
    "qwen3_vl": {
        **QWEN,
        "classes": ("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor"),
        "config": lambda ids: {
            **_qwen_ids(ids),
            "text_config": {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
    },
    "gemma3": {
        "tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "image": "<start_of_image>",
        "classes": ("Gemma3ForConditionalGeneration", "Gemma3Processor"),
        "config": lambda ids: {
            "image_token_index": ids["<image_soft_token>"], "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"], "mm_tokens_per_image": 4,
            "text_config": {**TEXT, "head_dim": 8, "sliding_window": 16},
            "vision_config": {**VISION, "image_size": SIDE, "patch_size": 8, "vision_use_head": False},
        },
        "images": lambda: Gemma3ImageProcessorPil(size=SIZE),
        "processor": {"image_seq_length": 4},
    },
    "gemma4": {
        "tokens": {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        "image": "<|image|>",
        "classes": ("Gemma4ForConditionalGeneration", "Gemma4Processor"),
        "config": lambda ids: {
            "image_token_id": ids["<|image|>"], "boi_token_id": ids["<|image>"], "eoi_token_id": ids["<image|>"],
            "audio_token_id": ids["<|audio|>"], "boa_token_id": ids["<|audio>"], "eoa_token_index": ids["<audio|>"],
            "video_token_id": ids["<|video|>"], "audio_config": None,
            "text_config": {
                **TEXT, "head_dim": 8, "global_head_dim": 8, "sliding_window": 16, "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": len(ids), "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                **VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
                "position_embedding_size": 256,
            },
        },
        "images": lambda: Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70),
        "more": ["<|video|>"],
    },
    "smolvlm": {
        "tokens": {},
        "image": "<image>",
        "classes": ("SmolVLMForConditionalGeneration", "Idefics3Processor"),
        "config": lambda ids: {
            "image_token_id": ids["<image>"], "scale_factor": 2, "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**VISION, "image_size": SIDE, "patch_size": 8},
        },
        "images": lambda: Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        "more": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
        + [f"<row_{i}_col_{j}>" for i in range(1, 3) for j in range(1, 3)],
        "processor": {"image_seq_len": 4},
    },
    "llava": {
        "tokens": {"image_token": "<image>"},
        "image": "<image>",
        "classes": ("LlavaForConditionalGeneration", "LlavaProcessor"),
        "config": lambda ids: {
            "image_token_index": ids["<image>"], "image_seq_length": 16, "vision_feature_layer": -1,
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": SIDE, "patch_size": 8},
        },
        "images": lambda: CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIZE),
        "processor": {
            "patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
        },
    },
    "internvl": {
        "tokens": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "image": "<IMG_CONTEXT>",
        "classes": ("InternVLForConditionalGeneration", "InternVLProcessor"),
        "config": lambda ids: {
            "image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": 4,
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**VISION, "image_size": [SIDE, SIDE], "patch_size": [8, 8], "use_qk_norm": True},
        },
        "images": lambda: GotOcr2ImageProcessorPil(size=SIZE, crop_to_patches=True, max_patches=2),
        "processor": {"image_seq_length": 4},
    },
}  # fmt: skip


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


def chat_template(image: str) -> str:
    """Return a template for contents that are text or lists of parts, with marks around the answers."""
    parts = (
        "{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
        "{% if p['type'] == 'image' %}{{ '" + image + " ' }}{% else %}{{ p['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{% endmacro %}"
    )
    return parts + (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant> ' }}"
        "{% generation %}{{ parts(m['content']) + ' <eos> ' }}{% endgeneration %}"
        "{% else %}{{ '<user> ' + parts(m['content']) + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )


def vision_processor(family: str) -> Any:
    """Return the processor of a family, with a tokenizer of words."""
    parts = VISION_FAMILIES[family]
    special = [*TURNS, *parts["tokens"].values(), *parts.get("more", ())]
    words = {word: i for i, word in enumerate([*WORDS, *special])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>", *parts.get("more", ())],
        extra_special_tokens=parts["tokens"],
    )  # fmt: skip
    name = parts["classes"][1]
    try:
        own = getattr(transformers, name)
    except ModuleNotFoundError as error:  # Gemma 4's, in transformers before 5.23
        pytest.skip(f"{name}: {error}")
    lenient = type(name, (own,), {"check_argument_for_proper_class": lambda self, name, argument: type(argument)})
    template = chat_template(parts["image"])
    tokenizer.chat_template = template
    takes = set(own.get_attributes() if hasattr(own, "get_attributes") else own.attributes)
    absent = dict.fromkeys(takes & {"video_processor", "feature_extractor"})
    return lenient(
        image_processor=parts["images"](), tokenizer=tokenizer, chat_template=template, **absent,
        **parts.get("processor", {}),
    )  # fmt: skip


def vision_model(family: str, processor: Any = None, seed: int = 0, **text: Any) -> Any:
    """Return a tiny model in eval mode whose weights are large enough that every part of it matters to the loss."""
    parts = VISION_FAMILIES[family]
    ids = (processor or vision_processor(family)).tokenizer.get_vocab()
    options = parts["config"](ids)
    known = {"vocab_size": len(ids), "pad_token_id": ids["<pad>"], "eos_token_id": ids["<eos>"], "bos_token_id": None}
    options["text_config"] = {**options["text_config"], **known, **text}
    model_class = getattr(transformers, parts["classes"][0])
    torch.manual_seed(seed)
    model = model_class._from_config(model_class.config_class(**options))
    return spread_weights(model, seed).eval()


def drawn(rng: random.Random) -> Image.Image:
    """Draw an image of random size with a few shapes."""
    width, height = rng.choice([(48, 32), (32, 48), (40, 40), (64, 32)])
    image = Image.new("RGB", (width, height), tuple(rng.choices(range(256), k=3)))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y = rng.randrange(width - 8), rng.randrange(height - 8)
        draw.rectangle((x, y, x + rng.randrange(4, 24), y + rng.randrange(4, 24)), tuple(rng.choices(range(256), k=3)))
    return image


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def picture_chats(count: int = 8, seed: int = 0, most_images: int = 2) -> Dataset:
    """Rows of `images` and `messages` as TRL takes them: plain text, whose images TRL puts into the first turn."""
    rng = random.Random(seed)
    rows = [
        {
            "images": [drawn(rng) for _ in range(rng.randint(1, most_images))],
            "messages": [
                {"role": "user", "content": _words(rng, 1, 4)},
                {"role": "assistant", "content": _words(rng, 1, 6)},
            ],
        }
        for _ in range(count)
    ]
    return Dataset.from_list(rows)


def picture_answers(count: int = 8, seed: int = 0) -> Dataset:
    """Rows of `image`, `prompt` and `completion`, in messages."""
    rng = random.Random(seed)
    rows = [
        {
            "image": drawn(rng),
            "prompt": [{"role": "user", "content": _words(rng, 1, 4)}],
            "completion": [{"role": "assistant", "content": _words(rng, 1, 6)}],
        }
        for _ in range(count)
    ]
    return Dataset.from_list(rows)
