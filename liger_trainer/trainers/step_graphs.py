"""What keeps the host ahead of the GPU: layers in CUDA graphs, fewer walks over modules, less garbage to look for."""

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..common.console import announce
from ..common.replacements import Replacements
from ..compat.modules import without_walks
from ..errors import ConfigError
from ..losses.model_parts import known_positions
from ..losses.spec import IGNORE_INDEX
from ..patching.graphs.cuda_graphs import GraphedLayers
from ..patching.graphs.layer_graphs import NotCapturable, Places
from ..patching.patcher import base_of
from .ddp_gradients import spare_copies_of_gradients
from .host import TrainerHost
from .options import ALWAYS, AUTO, NEVER

if TYPE_CHECKING:
    from .fsdp_memory import ShardedGraphs

PADDING = "padding_tokens"  # in a batch: how many tokens at its end are padding
MOST_PADDING = 0.1  # of a full batch
LENGTHS = 16  # of padded batches
MEAN_DOCUMENT = 64  # tokens: with documents as long on average, or longer, their number is always the same
_LENGTHS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_TOKENS = {"input_ids", "labels", "position_ids", "seq_idx"}


@contextlib.contextmanager
def reduce_host_work(trainer: TrainerHost) -> Iterator[None]:
    """Within the context, which is one training, the host does less for each step.

    Python's garbage collector leaves alone what is there after the first steps. Under DistributedDataParallel there is
    also less to copy (ddp_gradients.py). Sets `trainer.graph_reports`: for each
    model what was done about CUDA graphs, in a line.

    Raises:
        ConfigError: cuda_graphs is "always", and something is against it.
    """
    replacements, graphed, sharded = Replacements(), {}, None
    trainer.graph_reports = {}
    buckets = spare_copies_of_gradients(trainer, replacements)
    frozen = _FrozenHeap()
    trainer.add_callback(frozen)
    try:
        wanted = getattr(trainer.args, "cuda_graphs", AUTO)
        sharded = _sharded(trainer, wanted)
        graphed = _graphed(trainer, wanted, buckets.places) if sharded is None else sharded.graphed
        for name, quick in without_walks(trainer.model).items():
            replacements.set(trainer.model, name, types.MethodType(quick, trainer.model))
        if "student" in graphed or sharded is not None:
            pad_to_few_shapes(trainer, replacements)
        yield
    finally:
        for layers in graphed.values():
            layers.undo()
        if sharded is not None:
            sharded.undo()
        trainer.graph_reports |= {name: layers.report for name, layers in graphed.items()}
        buckets.leave()
        trainer.remove_callback(frozen)
        frozen.undo()
        replacements.undo()


class _FrozenHeap(TrainerCallback):
    """Keeps Python's garbage collector from going over all that is there after the first steps.

    Modules, weights, graphs and all that was imported stay to the end: half a million objects or more, which a full
    collection goes over for a third of a second, on each rank at another time, while the other ranks wait. What later
    steps make is collected as ever.
    """

    AFTER = 4  # steps: graphs and the optimizer's state are there

    def __init__(self) -> None:
        self._steps, self._is_ours = 0, False

    def on_train_begin(self, args, state, control, **kwargs):
        if self._is_ours:  # auto_find_batch_size begins again, without what an attempt has left
            self.undo()
            gc.collect()
        self._steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self._steps += 1
        if self._steps == self.AFTER and not gc.get_freeze_count():  # else somebody else thaws it
            gc.collect()  # garbage must not be kept
            gc.freeze()
            self._is_ours = True

    def undo(self) -> None:
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False


def _graphed(trainer: TrainerHost, wanted: str, places: Callable[[], Places]) -> dict[str, GraphedLayers]:
    """Return, by the models' names, their layers in graphs."""
    if wanted == NEVER or trainer.args.device.type != "cuda" and wanted == AUTO:
        return {}
    graphed: dict[str, GraphedLayers] = {}
    for name, model in _models(trainer).items():
        try:
            reason = _why_no_graphs(trainer)
            if reason is not None:
                raise NotCapturable(reason)
            options = {"trained": name == "student", "always": wanted == ALWAYS, "places": places}
            graphed[name] = GraphedLayers(model, name, **options)
        except NotCapturable as error:
            if wanted == ALWAYS:
                for layers in graphed.values():
                    layers.undo()
                raise ConfigError(f"cuda_graphs: always does not go with this training: {error}.") from None
            trainer.graph_reports[name] = f"CUDA graphs: none for the {name}: {error}"
            announce(trainer.graph_reports[name])
    return graphed


def _models(trainer: TrainerHost) -> dict[str, Any]:
    return {"student": base_of(trainer.model), **trainer.frozen_models()}


def _sharded(trainer: TrainerHost, wanted: str) -> "ShardedGraphs | None":
    """Return what records the layers of models that FSDP2 shards; None where it has none to record."""
    if not trainer.is_fsdp_enabled or wanted == NEVER or _why_no_graphs(trainer) is not None:
        return None
    from .fsdp_memory import ShardedGraphs  # which other engines need not wait for

    return ShardedGraphs(trainer, lambda: _models(trainer), always=wanted == ALWAYS)


def _why_no_graphs(trainer: TrainerHost) -> str | None:
    """Return why a training cannot have its layers in graphs, None if nothing is known against it."""
    args, plugin = trainer.args, trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    reasons = {
        f"the device is {args.device.type}": args.device.type != "cuda",
        "FSDP1 moves weights": plugin is not None and plugin.fsdp_version == 1,
        "FSDP keeps weights in CPU memory": plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "DeepSpeed moves weights": trainer.is_deepspeed_enabled,
        "tensor parallelism splits layers": trainer.get_tp_size() > 1,
        "torch_compile makes its own graphs": args.torch_compile,
        "activation_offloading moves what layers keep": getattr(args, "activation_offloading", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


# A graph is recorded for a shape, so batches get few shapes: packed rows one, padded rows sixteen, sampled rows, which
# are packed, sixteen for each power of two.


def pad_to_few_shapes(trainer: TrainerHost, replacements: Replacements) -> None:
    """Have TRL's collator make batches of few shapes, where the greatest length of a row can be divided.

    The collator is changed where it is called, since others around it add what a teacher knows to the batch that it
    lays out.
    """
    args, owner, name = trainer.args, trainer, "data_collator"
    while hasattr(getattr(owner, name), "collator"):
        owner, name = getattr(owner, name), "collator"
    collator = getattr(owner, name)
    if type(collator) is not DataCollatorForLanguageModeling:
        return
    if args.packing and trainer.padding_free and args.max_length:
        if trainer.aux_loss_enabled:  # which would count the padding
            return
        tokens = args.per_device_train_batch_size * args.max_length
        replacements.set(owner, name, FixedShapes(collator, tokens, args.max_length, collator.pad_token_id))
    elif not trainer.padding_free and collator.pad_to_multiple_of is None:
        step = _step_of_lengths(trainer)
        if step:
            replacements.set(collator, "pad_to_multiple_of", step)


def _step_of_lengths(trainer: TrainerHost) -> int | None:
    """Return what lengths of padded rows are to be multiples of; None where they stay as they are."""
    args = trainer.args
    if getattr(args, "samples", False):
        # A prompt and its completion have no greatest length, so a model with a table of positions could run out of it.
        known = known_positions(base_of(trainer.model))
        return 8 * -(-args.max_completion_length // (8 * LENGTHS)) if known is None else None
    # No row becomes longer than max_length: a model may know no more positions.
    return args.max_length // LENGTHS if args.max_length and args.max_length % (8 * LENGTHS) == 0 else None


@dataclass
class FixedShapes:
    """A collator around the one of packed rows. It fills the flat row up, behind its last document.

    What is behind a document is not seen by it, and has no labels. Documents of no tokens make up their number.

    Args:
        collator: TRL's, which lays the documents of a batch end to end.
        tokens: of a full batch.
        longest: tokens of the longest document.
        pad_token_id: what the row is filled with.
    """

    collator: Any
    tokens: int
    longest: int
    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        tensors = {name for name, value in batch.items() if isinstance(value, Tensor)}
        if tensors != {*_TOKENS, *_LENGTHS}:  # such as a teacher's answers to each token
            return batch
        missing = self.tokens - batch["input_ids"].shape[1]
        too_long = batch["max_length_q"] > self.longest  # a document of rows that the trainer has not prepared
        if too_long or not 0 <= missing <= min(MOST_PADDING * self.tokens, self.longest):
            return batch
        return filled(batch, self.tokens, self.longest, self.pad_token_id)


def filled(batch: dict[str, Any], tokens: int, longest: int, pad_token_id: int) -> dict[str, Any]:
    """Fill a flat row of documents up to so many tokens.

    Args:
        longest: tokens of the longest document, and at least as many as are missing.
    """
    missing = tokens - batch["input_ids"].shape[1]
    ends: Tensor = batch["cu_seq_lens_q"].clone()
    last = int(ends[-1] - ends[-2])
    # a document of padding where the last one would become too long
    of_its_own = [] if last + missing <= longest else [int(ends[-1])]
    after = torch.arange(missing) if of_its_own else torch.arange(last, last + missing)
    index = batch["seq_idx"][0, -1] + bool(of_its_own)
    filling = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": after, "seq_idx": index}
    rows = dict[str, Any]()
    for name, value in filling.items():
        there = batch[name]
        rows[name] = torch.cat([there, torch.as_tensor(value, dtype=there.dtype).expand(1, missing)], 1)
    known = torch.cat([ends[:-1], ends.new_tensor(of_its_own)])
    step = most_documents(tokens)
    count = -(-len(known) // step) * step + 1
    ends = torch.cat([known, ends.new_full((count - len(known),), tokens)])
    return {**batch, **rows, **dict.fromkeys(_LENGTHS, ends), **dict.fromkeys(_LONGEST, longest), PADDING: missing}


def most_documents(tokens: int) -> int:
    """Return as how many documents so many tokens are read, or a multiple where there are more."""
    return max(16, tokens // MEAN_DOCUMENT)


def filled_to_a_step(batch: dict[str, Any], pad_token_id: int) -> dict[str, Any]:
    """Fill a flat row of documents up by a sixteenth at most, so that few numbers of tokens come, again and again."""
    there, longest = batch["input_ids"].shape[1], batch["max_length_q"]
    step = max(16, 1 << max(0, there.bit_length() - 5))
    tokens = -(-there // step) * step
    return filled(batch, tokens, 1 << (max(longest, tokens - there) - 1).bit_length(), pad_token_id)
