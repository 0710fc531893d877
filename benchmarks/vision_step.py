"""A training step of a vision-language model: stock transformers, Liger-Kernel, our patch.

    python -m benchmarks.vision_step --output DIR     # on a GPU: DIR/vision-step.json and .md
    python -m benchmarks.vision_step --tiny           # small enough for a CPU: does it still work

The widths, heads, vocabularies and images of Qwen2.5-VL-3B and Gemma-3-4B, with LAYERS layers in either tower and
random weights. Each row has one image; labels are on its text. SFT trains everything. LoRA trains adapters on the
linear layers of the text, with gradient checkpointing, as TRL has it by default. KD learns from a frozen model of the
same shape.

Each provider has a process of its own, since Liger patches module globals; they take turns on the device. First a gate:
loss and a sample of the gradients of every provider against the plain model in fp32 on one row. Ours must err at most
twice as much as stock transformers, else no time is reported. Then rounds in which each provider in turn runs one
untimed step and STEPS timed ones: forward, backward, fused AdamW.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kd_step import loss_function
from .processes import Benchmark, main
from .workers import SAMPLE, Worker, apply_liger

LAYERS = 8  # of each tower; the models have 36 and 32, 34 and 27
BATCH, LENGTH = 8, 1024
RANK, ALPHA, B_STD = 16, 32, 0.02
ROUNDS, STEPS = 3, 2
SECONDS = 160  # no round but a case's first starts later than this after the start
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel")
MODES = ("SFT", "LoRA", "KD")
PROVIDERS = {"stock": "transformers", "liger": "Liger-Kernel", "ours": "liger-trainer"}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "type": "qwen2_5_vl",
        "image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "text": {
            "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
            "vocab_size": 151936, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision": {
            "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "out_hidden_size": 2048,
            "window_size": 112, "fullatt_block_indexes": [7],
        },
        "grid": 32,  # patches on a side of an image: 448 x 448 pixels, 256 tokens
    },
    "Gemma-3-4B": {
        "type": "gemma3",
        "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000, "mm_tokens_per_image": 256,
        "text": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
        },
        "vision": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "image_size": 896,
            "patch_size": 14, "vision_use_head": False,
        },
        "grid": 64,  # 896 x 896 pixels, 4096 patches, 256 tokens
    },
}  # fmt: skip
SHAPES = [f"{model}, {mode}" for model in MODELS for mode in MODES]
_TINY_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "image_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5, "grid": 8,
        "text": {**_TINY_TEXT, "vocab_size": 128, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision": {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    },
    "Gemma-3-4B": {
        "image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5, "mm_tokens_per_image": 16, "grid": 8,
        "text": {**_TINY_TEXT, "head_dim": 16, "vocab_size": 128},
        "vision": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 112},
    },
}  # fmt: skip


def sizes_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return the sizes of a model, small ones in their place if `tiny`."""
    sizes, small = MODELS[name], TINY[name] if tiny else {}
    parts = {part: {**sizes[part], **small.get(part, {})} for part in ("text", "vision")}
    return {**sizes, **small, **parts}


def random_vision_model(name: str, tiny: bool, device: str, seed: int) -> Any:
    """Make a model in bf16 on `device`, the same one for the same seed."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes, layers = sizes_of(name, tiny), 1 if tiny else LAYERS
    depth = "depth" if sizes["type"] == "qwen2_5_vl" else "num_hidden_layers"
    text = {**sizes["text"], "num_hidden_layers": layers, "max_position_embeddings": 4096, "use_cache": False}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    others = {key: value for key, value in sizes.items() if key not in ("type", "text", "vision", "grid")}
    config = AutoConfig.for_model(
        sizes["type"], text_config=text, vision_config={**sizes["vision"], depth: layers}, tie_word_embeddings=True,
        **others,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()


class VisionWorker(Worker):
    """Steps of a model on rows of one image and text."""

    steps = STEPS
    teacher: Any = None

    def make(self, shape: str) -> None:
        name, self.mode = shape.split(", ")
        self.sizes = sizes_of(name, self.tiny)
        self.teacher = None
        self.model = base = random_vision_model(name, self.tiny, self.device, 0)
        if self.mode == "KD":
            self.teacher = random_vision_model(name, self.tiny, self.device, 1).requires_grad_(False).eval()
        if self.mode == "LoRA":
            self.model = self._with_adapters(base)
        self.batch = self._rows(base.config)
        self.gate_batch = self.batch[:1]
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=self.device == "cuda")
        self.kd_loss = loss_function({"stock": "plain"}.get(self.provider, self.provider))
        if self.provider == "liger":
            apply_liger(*(model for model in (base, self.teacher) if model is not None))
        elif self.provider == "ours":
            self._patch(base)

    def _with_adapters(self, base: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear",
            exclude_modules=r".*(visual|vision_tower|multi_modal_projector).*",
        )  # fmt: skip
        model: Any = get_peft_model(base, lora, autocast_adapter_dtype=False).train()
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # not zero, so that every gradient counts
                parameter.data.normal_(std=B_STD)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _patch(self, base: Any) -> None:
        from liger_trainer.losses.spec import Distillation, LossOptions
        from liger_trainer.patching.patcher import Patched, PatchOptions
        from liger_trainer.trainers.images import tower_without_gradients

        options = LossOptions(distillation=Distillation() if self.mode == "KD" else None)
        print(Patched(base, PatchOptions(), options).report, file=sys.stderr)
        if self.teacher is not None:
            Patched(self.teacher, PatchOptions(fused_linear_cross_entropy=False))
        self.tower = tower_without_gradients(self.model)  # as LigerTrainer does in training
        self.tower.__enter__()

    def _rows(self, config: Any) -> Tensor:
        """Return token ids: an image's placeholders between its marks, then text that has no placeholder."""
        vocabulary = self.sizes["text"]["vocab_size"]
        ids = self.random_ids(min(vocabulary, 100_000), BATCH, 64 if self.tiny else LENGTH).clamp(min=10)
        self.image = next(self.sizes[key] for key in ("image_token_id", "image_token_index") if key in self.sizes)
        marks = ("vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index")
        before, after = (self.sizes[mark] for mark in marks if mark in self.sizes)
        grid = self.sizes["grid"]
        count = self.sizes.get("mm_tokens_per_image") or (grid // 2) ** 2
        ids[:, 0], ids[:, 1 : count + 1], ids[:, count + 1] = before, self.image, after
        generator = torch.Generator().manual_seed(3)
        patch = self.sizes["vision"]["patch_size"]
        if self.sizes["type"] == "qwen2_5_vl":
            pixels = torch.randn(BATCH, grid * grid, 3 * 2 * patch * patch, generator=generator)
        else:
            pixels = torch.randn(BATCH, 3, grid * patch, grid * patch, generator=generator)
        self.pixels = pixels.to(self.device, torch.bfloat16)
        return ids

    def _inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what a processor makes of the first rows."""
        kinds = (ids == self.image).long()
        pixels = self.pixels[: len(ids)].to(next(self.model.parameters()).dtype)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.sizes["type"] != "qwen2_5_vl":
            return {**inputs, "pixel_values": pixels, "token_type_ids": kinds}
        grid = torch.tensor([[1, self.sizes["grid"], self.sizes["grid"]]] * len(ids), device=ids.device)
        return {**inputs, "pixel_values": pixels.flatten(0, 1), "image_grid_thw": grid, "mm_token_type_ids": kinds}

    @contextlib.contextmanager
    def prepared(self, case: Any) -> Iterator[None]:
        """Leave the room of the optimizer's moments to the other providers afterwards."""
        try:
            yield
        finally:
            self.optimizer.state.clear()

    def in_fp32(self, shape: str) -> None:
        self.model.float()
        if self.teacher is not None:
            self.teacher.float()

    def loss_of(self, ids: Tensor) -> Tensor:
        inputs, labels = self._inputs(ids), ids.masked_fill(ids == self.image, -100)
        if self.teacher is None:
            return self.model(**inputs, labels=labels).loss
        if self.provider == "ours":
            from liger_trainer.teachers.base import teacher_logits

            known = teacher_logits(self.teacher, self.teacher, **inputs)  # as the trainer does
            return self.model(**inputs, labels=labels, teacher_logits=known, fused_lm_head=True).loss
        learned = F.pad(labels[:, 1:], (0, 1), value=-100) != -100
        with torch.no_grad():
            teacher = self.teacher.model(**inputs).last_hidden_state[learned]
        hidden = self.model.model(**inputs).last_hidden_state[learned]
        return self.kd_loss(hidden, self.model.lm_head.weight, teacher, self.teacher.lm_head.weight)

    def take_results(self, loss: Tensor) -> dict[str, Any]:
        """Return the loss and a sample of each trained parameter's gradients, taken off the model."""
        grads = [p.grad.flatten() for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        samples = [grad[:: max(1, grad.numel() // SAMPLE)].float() for grad in grads]
        self.model.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "gradients": torch.cat(samples).cpu()}


BENCHMARK = Benchmark(
    name="vision-step",
    title="A training step of a vision-language model",
    what=f"{LAYERS} layers in either tower, random weights in bf16, {{batch}}x{{length}} tokens, 256 of each row for "
    f"its image, sdpa; forward, backward and AdamW. LoRA: rank {RANK} on the text's linear layers, gradient "
    f"checkpointing. KD: forward KL from a model of the same shape. Median of {{rounds}} interleaved rounds of {STEPS} "
    "steps; peak MiB above weights and optimizer. Errors: relative, of loss and sampled gradients, against fp32 on one "
    "row.",
    doc=__doc__,
    worker=VisionWorker,
    shapes=SHAPES,
    providers=PROVIDERS,
    reference="stock",
    packages=PACKAGES,
    batch=lambda tiny: {"batch": BATCH, "length": 64 if tiny else LENGTH},
    columns=("ms", "MiB", "of ours: time", "memory", "loss error", "gradient error"),
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
