"""On-policy distillation: micro-batches whose completions are sampled, instead of those in the dataset.

After Agarwal et al. 2023, arXiv:2306.13649 (GKD): with probability `lmbda` the student completes the prompts of a
micro-batch, otherwise they keep the dataset's completions or, with `seq_kd`, get the teacher's. All micro-batches of an
optimizer step are made before its first forward, so the loss is divided by the tokens that it sums.

Completions have different lengths, so the rows of a micro-batch lie end to end in one flat row where student and
teacher are known to keep them apart, as with `packing: true`; else they are padded to the longest.

A schedule of `max_completion_length` is on-policy prefix distillation (Zhang et al. 2026, arXiv:2602.15260): sampling
stops after the first tokens of a completion, and the number of these grows with the steps.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..compat.sft_trainer import DataCollatorForLanguageModeling, with_lengths
from ..errors import ConfigError, DataError
from ..patching.packing.packed_rows import reads_documents
from ..patching.patcher import base_of
from ..plugins import load
from ..teachers.adapters_off import SelfTeacher
from ..teachers.model import ModelTeacher
from .config import LigerDistillConfig
from .decoder import Decoder, ModelSampler, Tokens
from .host import DistillTrainerHost
from .metrics import TokenMetrics
from .rows import GENERATION_PROMPT, NO_PROMPT, AllowedIds
from .step_graphs import filled_to_a_step

Batch = dict[str, Any]
SOURCE = "completions_of"  # a key of a micro-batch
STUDENT, TEACHER, DATASET = "student", "teacher", "dataset"
# what a micro-batch may have for its rows to change places with others: nothing that a teacher looks up by row
_OF_ANY_ROWS = {"input_ids", "attention_mask", "labels", GENERATION_PROMPT}


def prompts_of(batch: Batch) -> list[Tokens]:
    """Return each row's generation prompt. Where it has none, as rows of tokens or of only prompts, return its tokens
    before the first supervised one, or all of them.

    Args:
        batch: input_ids, attention_mask, labels, each (batch, length), padded on the right.

    Raises:
        DataError: a row that begins with a supervised token.
    """
    if GENERATION_PROMPT in batch:
        return [ids.tolist() for ids in batch[GENERATION_PROMPT]]
    supervised = batch["labels"] != -100
    first = supervised.int().argmax(1)
    lengths = torch.where(supervised.any(1), first, batch["attention_mask"].sum(1)).tolist()
    if 0 in lengths:
        raise DataError(NO_PROMPT)
    return [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]


def rows_of(prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[dict[str, Tokens]]:
    """Return rows for the collator, with supervised completions."""
    return [
        {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def sources(lmbda: float, seq_kd: bool, seed: int, step: int, count: int) -> list[str]:
    """Draw whose completions each micro-batch of an optimizer step has.

    The draw depends only on seed and step, so it is the same on all ranks, and after a resume.
    """
    other = TEACHER if seq_kd else DATASET
    draws = np.random.default_rng((seed, step)).random(count)
    return [STUDENT if draw < lmbda else other for draw in draws]


def check_sampling(trainer: DistillTrainerHost) -> None:
    """Raise ConfigError where completions cannot be sampled, or the teacher knows nothing about them."""
    args, zero = cast(LigerDistillConfig, trainer.args), trainer.accelerator.state.deepspeed_plugin
    fsdp2 = trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2
    if (trainer.is_fsdp_enabled and not fsdp2) or trainer.get_tp_size() > 1:
        raise ConfigError(
            "lmbda and seq_kd sample from models that each process holds or gathers as a whole, not from one that "
            "FSDP1 or tensor parallelism splits. Use DDP, FSDP2 or DeepSpeed, or the completions of the dataset."
        )
    gathers = fsdp2 or (zero is not None and zero.zero_stage == 3)
    if gathers and (args.use_vllm or (args.seq_kd and isinstance(trainer.teaching, SelfTeacher))):
        raise ConfigError(
            "Under FSDP2 and ZeRO-3 the student, or its own teacher, samples by generate: set use_vllm to false, "
            "and with teacher: self leave seq_kd at false. DDP has both."
        )
    if trainer.padding_free or args.packing:
        raise ConfigError("lmbda and seq_kd need rows one by one: set packing and padding_free to false.")
    if not trainer.teaching.knows_new_tokens:
        raise ConfigError(f"{type(trainer.teaching).__name__} knows only the completions of the dataset: leave lmbda "
                          "at 0.0 and seq_kd at false, or take a teacher in this process.")  # fmt: skip
    if args.seq_kd:
        with trainer.teaching.live() as teachers:
            if len(teachers) != 1:
                raise ConfigError(
                    f"seq_kd: one teacher in this process writes the completions, but there are {len(teachers)}. "
                    "Leave seq_kd at false, or use teacher='model' with a single teacher."
                )


def _packs(trainer: DistillTrainerHost) -> bool:
    """Return whether several sampled rows may lie in one: student and teacher read documents by their lengths."""
    accelerator, adapters = trainer.accelerator, getattr(trainer.student, "peft_config", {}).values()
    if type(trainer.teaching) not in (ModelTeacher, SelfTeacher) or any(a.is_prompt_learning for a in adapters):
        return False
    with trainer.teaching.live() as teachers:
        models = [base_of(model) for model in (trainer.student, *teachers.values())]
    # a GPU's kernels read documents at once in 16 bits
    halves = accelerator.mixed_precision != "no" or all(model.dtype.itemsize == 2 for model in models)
    return all(map(reads_documents, models)) and (halves or accelerator.device.type == "cpu")


class PromptCollator:
    """Add `generation_prompt`, an array of token ids for each row that has one."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        asked = [np.asarray(row[GENERATION_PROMPT]) for row in rows if GENERATION_PROMPT in row]
        return {**self.collator(rows), **({GENERATION_PROMPT: asked} if asked else {})}


class OnPolicy:
    """Samples completions for a trainer.

    Args:
        trainer: constructed, with its teacher in place.
        collator: TRL's, which makes a batch of rows with input_ids and labels.

    Attributes:
        mixes: whether some micro-batches are the student's and some are not.

    Raises:
        ConfigError: sharded models, packed rows, another collator, a teacher that cannot answer, vllm that is
            not installed.
    """

    def __init__(self, trainer: DistillTrainerHost, collator: Any):
        if not isinstance(collator, DataCollatorForLanguageModeling):
            raise ConfigError("data_collator: rows with sampled completions are batched by TRL's own. Leave it out.")
        self._trainer, self._collate = trainer, trainer.teaching.sampled_collator(collator)
        self._args = args = cast(LigerDistillConfig, trainer.args)
        accelerator: Any = trainer.accelerator
        check_sampling(trainer)
        self._packs = _packs(trainer)
        self._seen: set[bool] = set()  # whether completions were the student's; both, if micro-batches mix
        shared = cast(int, trainer.distillation.vocab_size)
        writable = AllowedIds(shared, trainer.teaching.unshared)
        decoder = Decoder(args.sampler, accelerator.autocast)
        self._sampler = ModelSampler(args, trainer.tokenizer, writable, decoder)
        self._vllm = None
        if args.use_vllm:
            self._vllm = load("use_vllm").VLLMSampler(args, trainer.model, accelerator, trainer.tokenizer, writable)
        self._counts: dict[str, float] = {}
        self._metrics = {"on_policy": TokenMetrics(), "off_policy": TokenMetrics()}

    def replace(self, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of an optimizer step, with sampled completions, each marked with its SOURCE."""
        trainer = self._trainer
        step = trainer.state.global_step
        origins = sources(trainer.lmbda, self._args.seq_kd, self._args.seed, step, len(batches))
        if DATASET in origins and "train" in trainer.prompts_alone:
            raise ConfigError(f"The rows have only prompts, but lmbda is {trainer.lmbda}: it must stay at 1.0.")
        replaced = list(batches)
        for writer in (STUDENT, TEACHER):
            places = [i for i, source in enumerate(origins) if source == writer]
            if places:
                begin, rows = time.perf_counter(), sum(len(batches[i]["labels"]) for i in places)
                for i, batch in zip(places, self._sampled([batches[i] for i in places], writer, step), strict=True):
                    replaced[i] = batch
                self._count([replaced[i] for i in places], rows, time.perf_counter() - begin)
        self._add(micro_batches=len(origins), on_policy=origins.count(STUDENT))
        self._seen |= {source == STUDENT for source in origins}
        # Marked until the loss is computed: what the student has written is no label, and has its own metrics.
        for batch, source in zip(replaced, origins, strict=True):
            batch.pop(GENERATION_PROMPT, None)
            batch[SOURCE] = source
        return replaced

    @property
    def mixes(self) -> bool:
        scheduled = "lmbda" in (self._args.schedules or {})
        return scheduled or 0 < self._trainer.lmbda < 1 or len(self._seen) == 2

    def replace_in_eval(self, batch: Batch, index: int) -> Batch:
        """Have the student complete an evaluation's batch of only prompts, the `index`th of this process, from 1."""
        # The seed is made of the batch's place among all processes, so that one process would draw the same.
        accelerator = self._trainer.accelerator
        place = (index - 1) * accelerator.num_processes + accelerator.process_index
        (sampled,) = self._sampled([batch], STUDENT, self._trainer.state.global_step, 2 + place)
        return {**sampled, SOURCE: STUDENT}

    def add_metrics(self, source: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        """Add a micro-batch's sums over the tokens of all ranks to the metrics of its source."""
        part = self._metrics["on_policy" if source == STUDENT else "off_policy"]
        part.add({name: total for name, total in totals.items() if name != "entropy"}, tokens)

    def flush(self) -> dict[str, float]:
        """Return what was sampled since the last call, over all ranks, for the logs."""
        counts, self._counts = self._counts, {}
        logs = {}
        if counts.get("micro_batches"):
            logs["on_policy_share"] = counts["on_policy"] / counts["micro_batches"]
        if counts.get("rows"):
            logs["completion_length"] = counts["tokens"] / counts["rows"]
            logs["sampled_tokens_per_second"] = counts["tokens"] / counts["seconds"]
        parts = {part: metrics.flush() for part, metrics in self._metrics.items()}
        if self.mixes:
            logs.update({f"{part}/{name}": x for part, means in parts.items() for name, x in means.items()})
        return logs

    def _sampled(self, batches: list[Batch], writer: str, step: int, evaluation: int = 0) -> list[Batch]:
        prompts = [prompts_of(batch) for batch in batches]
        flat = [prompt for rows in prompts for prompt in rows]
        # in evaluations as in the end, like all that is scheduled
        most = self._args.max_completion_length if evaluation else self._trainer.max_completion_length
        if writer == STUDENT and self._vllm is not None:
            completions = self._vllm.sample(flat, step, most)
        else:
            seed = self._seed(step, writer == TEACHER, evaluation)
            if writer == STUDENT:
                completions = self._sampler.sample(self._trainer.student, flat, seed, most)
            else:
                with self._trainer.teaching.live() as teachers:
                    (teacher,) = teachers.values()
                    completions = self._sampler.sample(teacher, flat, seed, most)
        # All prompts of a step are sampled at once, and then dealt out to the micro-batches.
        rows, movable = rows_of(flat, completions), all(batch.keys() <= _OF_ANY_ROWS for batch in batches)
        packs = self._packs and movable and not evaluation
        if not evaluation and movable:
            rows = self._dealt(rows, len(batches) if packs else 1)
        rest = iter(rows)
        filled = []
        for batch, asked in zip(batches, prompts, strict=True):
            made, device = self._batch(list(islice(rest, len(asked))), packs), batch["input_ids"].device
            made = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in made.items()}
            # its other columns stay, such as what a teacher looks up by row
            filled.append(made if packs else {**batch, **made})
        return filled

    def _batch(self, rows: list[dict[str, Tokens]], packs: bool) -> Batch:
        if not packs:
            return self._collate(rows)
        few_shapes = self._collate.pad_to_multiple_of is not None and not self._trainer.aux_loss_enabled
        batch = with_lengths(replace(self._collate, padding_free=True, pad_to_multiple_of=None))(rows)
        return filled_to_a_step(batch, self._collate.pad_token_id) if few_shapes else batch

    def _dealt(self, rows: list[dict[str, Tokens]], parts: int) -> list[dict[str, Tokens]]:
        """Return as many rows, the longest first, of all ranks' by turns, and in each of so many parts by turns.

        So ranks, which wait for each other, and packed micro-batches have about as many tokens. Padded ones are one
        part: they have rows of like length, of which little is padded. The loss of a step is one sum, wherever its rows
        are.
        """
        accelerator = self._trainer.accelerator
        of_ranks = gather_object([rows])
        if len({len(each) for each in of_ranks}) > 1:  # at the end of the data
            of_ranks = [rows]
        dealt = sorted(chain.from_iterable(of_ranks), key=lambda row: -len(row["input_ids"]))
        if len(of_ranks) > 1:
            dealt = dealt[accelerator.process_index :: len(of_ranks)]
        return [row for part in range(parts) for row in dealt[part::parts]]

    def _seed(self, step: int, of_teacher: bool, evaluation: int) -> int:
        """Return the seed of one call's draws. In training each rank has its own."""
        rank = 0 if evaluation else self._trainer.accelerator.process_index
        entropy = (self._args.seed, rank, step, of_teacher, evaluation)
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _count(self, batches: list[Batch], rows: int, seconds: float) -> None:
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        accelerator = self._trainer.accelerator
        # fp32, which every device and backend of torch.distributed can add up
        local = torch.tensor([tokens, rows, seconds], dtype=torch.float32, device=accelerator.device)
        total = cast(Tensor, accelerator.reduce(local, "sum")).tolist()
        self._add(tokens=total[0], rows=total[1], seconds=total[2] / accelerator.num_processes)

    def _add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self._counts[name] = self._counts.get(name, 0) + number
