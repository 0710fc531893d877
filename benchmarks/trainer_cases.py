"""Trainings that `benchmarks.trainer_step` measures: a model, how it is trained, and rows, the same for every provider.

To measure another training, add a `Case` to CASES. Token ids are random with Zipf's frequencies, so that a model with
random weights has something to learn: the loss falls. Lengths of real mixes are log-normal with a mean of MEAN_LENGTH
tokens, between SHORTEST and LONGEST.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .shapes import config_of

MEAN_LENGTH, SHORTEST, LONGEST, SIGMA = 300, 16, 2048, 1.0
TINY_LENGTH, TINY_SCALE = 32, 32  # of full rows; and what the other lengths are divided by
PAD, END, FIRST = 0, 1, 2  # ids; words begin at FIRST
SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}  # of a model


@dataclass(frozen=True)
class Plan:
    """Optimizer steps of a row: untimed, timed, and traced."""

    warmup: int
    timed: int
    traced: int

    @property
    def steps(self) -> int:
        return self.warmup + self.timed + self.traced


PLAN, TINY_PLAN = Plan(6, 20, 4), Plan(2, 6, 2)
REFERENCE = "trl"  # plain TRL, where it fits
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.02


SIZES = {"full": "{} x {}", "packed": "packed {} x {}", "padded": "padded {} rows of at most {}"}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        rows: of a batch, in one micro-batch. A row of DPO is a pair.
        length: tokens of a row: all have as many, or are packed into as many, or have at most as many.
        layout: "full", "packed" or "padded".
        method: "DPO" or "GRPO"; empty for fine-tuning, and for distillation, which has a teacher.
        teacher: the teacher's shape, of a distillation by forward KL.
        lora_dropout: of adapters of rank 16 on all linear layers; None trains all weights.
        experts: whether there are adapters on stacked experts too.
        four_bit: whether the adapters' base is quantised by bitsandbytes (nf4).
        gently: so many times smaller a rate, reached within the warm-up: the losses of wide models jump at more.
        default: whether it runs without being named.
        plan: the steps, at full size.
        reference: the provider whose losses the others must have.
        layers: of the student, where it has fewer than its shape.
        fp32: trained weights are kept in fp32, and computed with in bf16.
        optim: the optimizer, by transformers' name; those with "bnb" are bitsandbytes' for all but ours.
        engine: of several processes: a name of accelerate's files.
    """

    name: str
    shape: str
    rows: int
    length: int
    layout: str = "full"
    method: str = ""
    teacher: str | None = None
    lora_dropout: float | None = None
    experts: bool = False
    four_bit: bool = False
    checkpointing: bool = False
    gently: int = 1
    default: bool = True
    plan: Plan = PLAN
    reference: str = REFERENCE
    layers: int | None = None
    fp32: bool = False
    optim: str = "adamw_torch_fused"
    engine: str = "fsdp2"

    def config(self, tiny: bool, teacher: bool = False) -> Any:
        """Return the configuration of the student, or of the teacher."""
        shape = self.teacher if teacher and self.teacher else self.shape
        return config_of(shape, tiny, **self.model_options(tiny, teacher))

    def model_options(self, tiny: bool, teacher: bool = False) -> dict[str, Any]:
        """Return what `config_of` and `random_model` are given besides the shape."""
        layers = None if teacher else self.layers
        return {**SPECIAL, **({"num_hidden_layers": layers} if layers and not tiny else {})}

    @property
    def kind(self) -> str:
        return self.method or ("SFT" if self.teacher is None else "KD")

    @property
    def tolerances(self) -> tuple[float, float]:
        """Return how far a loss may be from the reference's, over its first one, and the first gradient norm."""
        return (0.05, 0.05) if self.method else (LOSS_TOLERANCE, NORM_TOLERANCE)

    def learning_rate(self, tiny: bool) -> float:
        """Return one at which bf16 weights move: half of their last digit is about 6e-5. Preferences jump at more."""
        if self.method:
            return 1e-5
        if tiny:  # at more, rounding of adapters grows to other losses within eight steps
            return 5e-3
        return (1e-4 if self.lora_dropout is None else 5e-4) / self.gently

    @property
    def schedule(self) -> dict[str, Any]:
        """Return options of the learning rate's course."""
        if self.gently == 1:
            return {"lr_scheduler_type": "constant"}
        return {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": self.plan.warmup}

    def __str__(self) -> str:
        how = "all weights" if self.lora_dropout is None else f"{'Q' * self.four_bit}LoRA r 16"
        how += f", dropout {self.lora_dropout:g}" if self.lora_dropout else ""
        how += " and experts" * self.experts
        what = f"{self.shape} from {self.teacher}" if self.teacher else self.shape
        size = SIZES[self.layout].format(self.rows, self.length)
        more = ", gradient checkpointing" * self.checkpointing
        more += f", 1/{self.gently} of the rate, rising at first" if self.gently > 1 else ""
        more += f", {self.layers} layers of {self.shape}" if self.layers else ""
        more += f", {self.optim}" if self.optim != Case.optim else ""
        return f"{self.kind}, {what}, {how}, {size}{more}"


SMALL, LLAMA = "Qwen3-0.6B", "Llama-3.2-1B"
ON_POLICY = "on-policy KD"  # prompts of a third of a row, completions of the rest
SAMPLED = Plan(2, 6, 2)  # GRPO samples for all steps before the first: more would not fit
# Plain TRL does not fit on 80 GB. The rate is halved, since losses of wide models jump.
EIGHT: dict[str, Any] = {"gently": 2, "default": False, "plan": Plan(5, 9, 2), "reference": "trl_liger"}
CASES = (
    Case("sft-qwen3-0.6b", SMALL, 8, 1024),
    Case("sft-qwen3-0.6b-packed", SMALL, 4, 2048, "packed"),
    Case("sft-qwen3-0.6b-padded", SMALL, 8, LONGEST, "padded"),
    Case("sft-llama-3.2-1b", LLAMA, 4, 2048),
    Case("lora-qwen3-0.6b", SMALL, 8, 1024, lora_dropout=0.0),
    Case("lora-qwen3-0.6b-dropout", SMALL, 8, 1024, lora_dropout=0.05),
    Case("lora-llama-3.2-1b", LLAMA, 4, 2048, lora_dropout=0.0),
    Case("qlora-qwen3-0.6b", SMALL, 8, 1024, lora_dropout=0.0, four_bit=True),
    Case("kd-qwen3-0.6b", SMALL, 8, 1024, teacher="Qwen3-1.7B"),
    Case("sft-qwen3-0.6b-packed-16", SMALL, 16, 2048, "packed", default=False),
    Case("sft-qwen3-1.7b", "Qwen3-1.7B", 4, 2048, default=False),
    Case("sft-gemma-3-1b", "Gemma-3-1B", 4, 2048, default=False),
    Case("sft-gemma-3-1b-8k", "Gemma-3-1B", 1, 8192, default=False),
    Case("sft-gemma-4-e2b-8k", "Gemma-4-E2B", 1, 8192, default=False, plan=Plan(5, 9, 2)),
    Case("sft-qwen3.5-0.8b", "Qwen3.5-0.8B", 8, 1024, default=False),
    Case("lora-qwen3.5-0.8b", "Qwen3.5-0.8B", 8, 1024, lora_dropout=0.0, default=False),
    Case("kd-qwen3.5-0.8b", "Qwen3.5-0.8B", 8, 1024, teacher="Qwen3.5-2B", default=False),
    Case("lora-gpt-oss-20b", "gpt-oss-20b", 2, 2048, layers=4, lora_dropout=0.0, default=False),
    # a half, so that all providers fit on 80 GB
    Case("sft-llama-3-8b", "Llama-3-8B", 4, 2048, layers=16, gently=2, default=False),
    Case("sft-llama-3-8b-8bit", "Llama-3-8B", 4, 2048, optim="adamw_bnb_8bit", **EIGHT),
    Case(
        "sft-llama-3-8b-8bit-checkpointing", "Llama-3-8B", 4, 2048, optim="adamw_bnb_8bit", checkpointing=True, **EIGHT
    ),
    Case("lora-llama-3-8b", "Llama-3-8B", 2, 4096, lora_dropout=0.0, **EIGHT),
    Case("qlora-llama-3-8b", "Llama-3-8B", 2, 4096, lora_dropout=0.0, four_bit=True, **EIGHT),
    Case("sft-qwen3-1.7b-checkpointing", "Qwen3-1.7B", 4, 2048, checkpointing=True, default=False),
    Case("lora-qwen3-0.6b-packed", SMALL, 4, 2048, "packed", lora_dropout=0.0, default=False),
    Case("lora-qwen3-1.7b", "Qwen3-1.7B", 4, 2048, lora_dropout=0.0, default=False),
    Case(
        "lora-qwen3-30b-a3b", "Qwen3-30B-A3B", 4, 2048, layers=4, lora_dropout=0.0, experts=True, default=False
    ),
    Case("on-policy-qwen3-0.6b", SMALL, 64, 384, "full", ON_POLICY, "Qwen3-1.7B", default=False, plan=Plan(3, 3, 1)),
    # the same tokens, given: what a step takes without sampling
    Case("on-policy-rows-qwen3-0.6b", SMALL, 64, 384, teacher="Qwen3-1.7B", default=False, plan=Plan(3, 3, 1)),
    Case("dpo-qwen3-0.6b", SMALL, 4, 1024, method="DPO", default=False),
    Case("dpo-qwen3-0.6b-lora", SMALL, 4, 1024, method="DPO", lora_dropout=0.0, default=False),
    Case("grpo-qwen3-0.6b", SMALL, 32, 320, method="GRPO", default=False, plan=SAMPLED),
    Case("grpo-qwen3-0.6b-lora", SMALL, 32, 320, method="GRPO", lora_dropout=0.0, default=False, plan=SAMPLED),
)  # fmt: skip


def length_of(case: Case, tiny: bool) -> int:
    """Return how many tokens a row, or a pack of rows, has at most."""
    if not tiny:
        return case.length
    return case.length // TINY_SCALE if case.layout in ("packed", "padded") else TINY_LENGTH


def make_rows(case: Case, plan: Plan, tiny: bool, seed: int = 0) -> list[list[int]]:
    """Return token ids of all rows that a run of `plan` reads, in order; packs are shuffled later.

    The traced steps have the rows of the last timed ones, so that both do the same work.
    """
    rows = _random_rows(case, plan, tiny, seed)
    if case.layout == "packed":
        return rows
    before, repeated = (case.rows * steps for steps in (plan.warmup + plan.timed, plan.traced))
    return [*rows[:before], *rows[before - repeated : before]]


def _random_rows(case: Case, plan: Plan, tiny: bool, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = _lengths(case, plan, tiny, rng)
    words = np.arange(FIRST, case.config(tiny).vocab_size)
    ids = rng.choice(words, sum(lengths), p=1 / words / (1 / words).sum())
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]


def draw_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths of a real mix, not yet whole numbers."""
    return np.clip(rng.lognormal(math.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, count), SHORTEST, LONGEST)


def _lengths(case: Case, plan: Plan, tiny: bool, rng: np.random.Generator) -> list[int]:
    longest = length_of(case, tiny)
    if case.layout == "full":
        return [longest] * (case.rows * plan.steps)
    scale = TINY_SCALE if tiny else 1
    lengths = (draw_lengths(rng, 200 * case.rows * plan.steps) / scale).astype(int).clip(2, longest)
    if case.layout == "padded":
        return lengths[: case.rows * plan.steps].tolist()
    enough = 1.1 * longest * case.rows * plan.steps  # packs are not quite full
    return lengths[: int(np.searchsorted(np.cumsum(lengths), enough)) + 1].tolist()


def make_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer of as many words. Most rows are token ids: it only says what pads and ends them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<end>": END, **{word(i): i for i in range(FIRST, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def word(token: int) -> str:
    return f"w{token}"


def text_of(tokens: list[int]) -> str:
    """Return what `make_tokenizer`'s reads as these tokens."""
    return " ".join(map(word, tokens))
