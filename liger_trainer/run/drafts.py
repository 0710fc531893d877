"""The student as a draft of its teacher: how many tokens the teacher accepts of it, and how much faster it writes.

In speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318) a small model
writes some tokens ahead, and one pass of the large one says up to where they stand, and what comes next. The text is
the large model's own. transformers calls this assisted generation.
"""

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, __version__
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import logging

from ..common.replacements import Replacements
from ..losses.model_parts import device_of, head_rows
from ..patching.patcher import base_of
from ..trainers.samplers import end_tokens, in_eval_mode, no_router_logits, seeded
from ..trainers.token_ids import Writable

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..trainers.distill_trainer import LigerDistillTrainer

Tokens = list[int]
_WINDOWS = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are measured.

    Attributes:
        tokens: that the student writes before each pass of the teacher.
        temperature: of both models; 0 takes the likeliest tokens.
        max_new_tokens: of each completion.
        shared: tokens 0 to `shared` - 1 are written, those that both models have; None: all of the teacher's.
    """

    tokens: int = 5
    temperature: float = 0.0
    max_new_tokens: int = 64
    seed: int = 42
    shared: int | None = None


@dataclass
class DraftCounts:
    """What was written with drafts.

    Attributes:
        written: tokens of the completions.
        passes: of the teacher. Each adds one token of its own to those that it accepts.
        drafts: passes before which the student wrote something.
        drafted: tokens that the student wrote.
        seconds, plain_written, plain_seconds: with drafts; without them, the teacher alone.
        same: completions that are, token for token, those of the teacher alone.
        completions: all of them.
    """

    written: int = 0
    passes: int = 0
    drafts: int = 0
    drafted: int = 0
    seconds: float = 0.0
    plain_written: int = 0
    plain_seconds: float = 0.0
    same: int = 0
    completions: int = 0

    @property
    def accepted(self) -> int:
        return self.written - self.passes

    def metrics(self, timed: bool, greedy: bool) -> dict[str, float]:
        """Return the figures by the names in metrics.json; docs/drafts.md.

        Args:
            timed: with the speeds and what one is of the other.
            greedy: with the share of completions that are the teacher's own.
        """
        metrics = {
            "draft_accepted": self.accepted / max(1, self.drafts),
            "draft_acceptance": self.accepted / max(1, self.drafted),
        }
        if greedy:
            metrics["draft_same_text"] = self.same / self.completions
        if timed:
            with_drafts, alone = self.written / self.seconds, self.plain_written / self.plain_seconds
            metrics["draft_tokens_per_second"] = with_drafts
            metrics["draft_plain_tokens_per_second"] = alone
            metrics["draft_speedup"] = with_drafts / alone
        return metrics


def measure_drafts(
    teacher: Any, student: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Tokens], options: DraftOptions
) -> DraftCounts:
    """Complete each prompt by the teacher alone, then by the teacher with the student's drafts.

    One prompt at a time, with a KV cache and without gradients; the first is tried before it is timed, since kernels
    are compiled then. Afterwards both models are as they were.

    Args:
        teacher, student: causal LMs of transformers; the student may be a PEFT model. Where their heads have different
            numbers of rows, `shared` says which tokens both have, and only greedy drafts are possible.
    """
    student, counts = base_of(student), DraftCounts()
    settings = _settings(teacher, student, tokenizer, options)
    device = device_of(teacher)
    with (
        in_eval_mode(teacher), in_eval_mode(student), no_router_logits(teacher), no_router_logits(student),
        torch.no_grad(), _as_assistant(student, teacher, options.tokens), seeded(options.seed, device), _quiet(),
    ):  # fmt: skip
        warm = copy.deepcopy(settings)
        warm.max_new_tokens = min(options.max_new_tokens, 2 * options.tokens + 2)
        for assistant in (None, student):
            _written(teacher, assistant, prompts[0], warm, device)
        for prompt in prompts:
            alone, seconds = _written(teacher, None, prompt, settings, device)
            counts.plain_written += len(alone)
            counts.plain_seconds += seconds
            with _counting(teacher, student, counts):
                drafted, seconds = _written(teacher, student, prompt, settings, device)
            counts.written += len(drafted)
            counts.seconds += seconds
            counts.same += alone == drafted
            counts.completions += 1
    return counts


def _settings(
    teacher: Any, student: Any, tokenizer: PreTrainedTokenizerBase, options: DraftOptions
) -> GenerationConfig:
    ends = end_tokens(teacher, tokenizer)
    sampling = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    # Nothing is padded. A pad token that is no end would be masked for the student where the teacher wrote it.
    settings = GenerationConfig(
        **sampling, max_new_tokens=options.max_new_tokens, use_cache=True, eos_token_id=ends, pad_token_id=ends[0],
        disable_compile=True,
    )  # fmt: skip
    if options.shared is not None:
        writable = Writable(options.shared)
        settings.suppress_tokens = sorted({*writable.others(teacher), *writable.others(student)}) or None
    return settings


@contextlib.contextmanager
def _as_assistant(student: Any, teacher: Any, tokens: int) -> Iterator[None]:
    """Have the student write so many tokens each time.

    By itself transformers ends a draft where the student is not sure, and a student's generation_config may have drafts
    grow and shrink; how many are accepted would then say little about the student. Where heads are padded differently,
    transformers takes the tokenizers for different ones, and would translate by way of text.
    """
    changes = Replacements()
    chosen = copy.deepcopy(student.generation_config) or GenerationConfig()
    chosen.num_assistant_tokens, chosen.num_assistant_tokens_schedule = tokens, "constant"
    chosen.assistant_confidence_threshold = 0.0
    config = student.config.get_text_config()
    try:
        changes.set(student, "generation_config", chosen)
        changes.set(config, "vocab_size", teacher.config.get_text_config().vocab_size)
        yield
    finally:
        changes.undo()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which warns of how it hands its own settings to the assistant (5.23)."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _counting(teacher: Any, student: Any, counts: DraftCounts) -> Iterator[None]:
    waiting = 0

    def drafted(*_: Any) -> None:
        nonlocal waiting
        waiting += 1

    def passed(*_: Any) -> None:
        nonlocal waiting
        counts.passes += 1
        counts.drafts += waiting > 0
        counts.drafted += waiting
        waiting = 0

    hooks = student.register_forward_pre_hook(drafted), teacher.register_forward_pre_hook(passed)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _written(
    teacher: Any, assistant: Any, prompt: Tokens, settings: GenerationConfig, device: torch.device
) -> tuple[Tokens, float]:
    """Return the tokens after the prompt, and the seconds that they took."""
    ids = torch.tensor([prompt], device=device)
    began = time.perf_counter()
    sequence = teacher.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, assistant_model=assistant
    )
    tokens = sequence[0, len(prompt) :].tolist()  # which waits for the device
    return tokens, time.perf_counter() - began


def _why_none(model: Any) -> str | None:
    """Return why a model cannot forget tokens that were rejected; None if it can."""
    name, kinds = model.config.model_type, getattr(model.config.get_text_config(), "layer_types", None) or ()
    if getattr(model, "_is_stateful", False):
        return f"{name} keeps a state from which rejected tokens cannot be taken back."
    if any(kind in _WINDOWS for kind in kinds) and not _windows_are_taken_back():
        return f"transformers {__version__} masks drafts for the windows of {name} wrongly; 5.23 does not."
    return None


def _windows_are_taken_back() -> bool:
    """Whether a mask is as long as the keys in a window's cache that waits to be cropped: not so in transformers 5.17,
    which fails there with an error about sizes."""
    layer, state = DynamicSlidingWindowLayer(2), torch.zeros(1, 1, 1, 1)
    layer.activate_past_recording()
    return all(layer.get_mask_sizes(1)[0] == layer.update(state, state)[0].shape[-2] for _ in range(5))


class Drafts:
    """Measures the student of a distillation as its teacher's draft, on held-out prompts.

    Raises:
        ConfigError: a teacher with another tokenizer; a model that cannot forget rejected tokens, as Mamba, and in some
            versions of transformers those with windows; sampled drafts of heads with different numbers of rows.
    """

    def __init__(self, trainer: "LigerDistillTrainer", config: "RunConfig", prompts: Sequence[Tokens]):
        self._trainer, self._prompts = trainer, prompts
        self._options = DraftOptions(
            tokens=config["draft_tokens"],
            temperature=config["draft_temperature"],
            max_new_tokens=config["max_new_tokens"],
            seed=config["seed"],
            shared=trainer.distillation.vocab_size,
        )
        teacher, student = trainer.teacher, base_of(trainer.student)
        if trainer.teaching.tokenizer is not None:
            raise config.error("num_draft_prompts", "the teacher has another tokenizer, so nothing can be drafted.")
        for reason in filter(None, map(_why_none, (teacher, student))):
            raise config.error("num_draft_prompts", reason)
        rows = head_rows(student), head_rows(teacher)
        if config["draft_temperature"] and rows[0] != rows[1]:
            message = "the heads have {:,} and {:,} rows; only greedy drafts are possible: leave it at 0.".format(*rows)
            raise config.error("draft_temperature", message)
        self._timed = student.dtype == teacher.dtype and not config["teacher_offload"]
        if not self._timed and trainer.is_world_process_zero():
            why = f"the student's weights are {student.dtype}, the teacher's {teacher.dtype}"
            why = "the teacher's weights are brought layer by layer" if config["teacher_offload"] else why
            again = "`liger-trainer eval RUN num_draft_prompts=8 dtype=bfloat16` times the trained student"
            warnings.warn(f"Drafts are counted, not timed: {why}. {again}.", stacklevel=2)

    def measure(self) -> dict[str, float]:
        """Return the figures for the student as it is now."""
        trainer = self._trainer
        tokenizer: Any = trainer.tokenizer
        with trainer.teaching.live() as teachers:
            (teacher,) = teachers.values()
            counts = measure_drafts(teacher, trainer.student, tokenizer, self._prompts, self._options)
        return counts.metrics(timed=self._timed, greedy=not self._options.temperature)
