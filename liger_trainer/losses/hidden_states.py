"""Losses between the outputs of decoder blocks of student and teacher: mean squared error, and 1 - cosine.

Blocks are counted from 0; negative indices count from the end. A block's output is the residual stream behind it,
before the final norm. Where the widths differ, or on demand, a learned projector maps the student's width to the
teacher's.

    hidden_mse     mean over the width of (W h_student - h_teacher)^2
    hidden_cosine  1 - cos(W h_student, h_teacher)

Both are means over the pairs of blocks, at the positions that predict a label, summed and divided by num_items like
every other term. Source: FitNets (Romero et al. 2014, arXiv:1412.6550); the uniform layout: TinyBERT (Jiao et al. 2019,
arXiv:1909.10351).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.types import gather_rows, scatter_rows, stats_dtype
from .model_parts import decoder_layers
from .plan import LossTerm
from .spec import BatchLoss, BatchTargets, Distillation


@dataclass(frozen=True)
class _Pair:
    """A block of the student and one of the teacher, by index, and the projector's name, if there is one."""

    student: int
    teacher: int
    projector: str | None


class HiddenLosses(nn.Module):
    """The hidden-state terms of a loss, and their projectors: bias-free linear maps, semi-orthogonal at first.

    Args:
        terms: of the family "hidden".
        student, teacher: the causal LMs, without wrappers.
        seed: of the projectors.

    Raises:
        ConfigError: blocks that a model does not have, or that are not found in it.
    """

    def __init__(self, terms: Sequence[LossTerm], student: Any, teacher: Any, seed: int = 0):
        super().__init__()
        # in lists, so that nn.Module does not take the models' blocks for submodules
        self._student, self._teacher = ([_blocks(model)] for model in (student, teacher))
        width, teacher_width = (m.config.get_text_config(decoder=True).hidden_size for m in (student, teacher))
        self.projectors = nn.ModuleDict()
        self._pairs: dict[str, list[_Pair]] = {}
        generator = torch.Generator().manual_seed(seed)
        for term in terms:
            self._pairs[term.type] = []
            for block, teacher_block in self._layout(term):
                name = None
                if width != teacher_width or term.options.get("projector"):
                    name = f"{term.type}_{block}_{teacher_block}"
                    # in fp32, and for equal widths the identity, so that nothing changes at first
                    self.projectors[name] = projector = nn.Linear(width, teacher_width, bias=False)
                    if width == teacher_width:
                        nn.init.eye_(projector.weight)
                    else:
                        nn.init.orthogonal_(projector.weight, generator=generator)
                self._pairs[term.type].append(_Pair(block, teacher_block, name))
        # Drawn on the CPU and then moved, so that the same seed gives the same projectors on any device.
        self.projectors.to(student.device)

    def _layout(self, term: LossTerm) -> list[tuple[int, int]]:
        """Return the pairs of blocks, student's and teacher's, counted from 0."""
        counts = len(self._student[0]), len(self._teacher[0])
        layers = term.options.get("layers", "uniform")
        if layers == "last":
            return [(counts[0] - 1, counts[1] - 1)]
        if layers == "uniform":
            return [(i, math.ceil((i + 1) * counts[1] / counts[0]) - 1) for i in range(counts[0])]
        for pair in layers:
            for index, count, side in zip(pair, counts, ("student", "teacher"), strict=True):
                if not -count <= index < count:
                    raise ConfigError(
                        f"losses: {term.type}: layers names block {index} of the {side}, which has {count}: "
                        f"0 to {count - 1}, or -{count} to -1."
                    )
        pairs = [(i % counts[0], j % counts[1]) for i, j in layers]
        if len(set(pairs)) < len(pairs):
            raise ConfigError(f"losses: {term.type}: layers names a pair twice: {layers}.")
        return pairs

    @contextlib.contextmanager
    def of_teacher(self) -> Iterator["HiddenPass"]:
        """Record the teacher's blocks within the context; the pass is for the student's forward on the same tokens."""
        states: dict[int, Tensor] = {}
        used = {pair.teacher for pairs in self._pairs.values() for pair in pairs}
        with _recorded(self._teacher[0], used, states):
            yield HiddenPass(self, states)

    def recording(self, states: dict[int, Tensor]) -> contextlib.AbstractContextManager:
        """Record the student's blocks within the context."""
        used = {pair.student for pairs in self._pairs.values() for pair in pairs}
        return _recorded(self._student[0], used, states)

    def values(self, student: Callable[[int], Tensor], teacher: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """Return {type: (rows,)}. Either function returns the states (rows, width) of a block."""
        values = {}
        for kind, pairs in self._pairs.items():
            each = [self._pair_value(kind, p, student(p.student), teacher(p.teacher)) for p in pairs]
            values[kind] = torch.stack(each).mean(0)
        return values

    def _pair_value(self, kind: str, pair: _Pair, student: Tensor, teacher: Tensor) -> Tensor:
        if pair.projector is not None:
            projector: Any = self.projectors[pair.projector]
            student = F.linear(student.to(projector.weight.dtype), projector.weight.to(student.device))
        # bf16 sums of squares over thousands of channels would lose most of their digits
        dtype = stats_dtype(student.dtype)
        student, teacher = student.to(dtype), teacher.to(dtype)
        if kind == "hidden_mse":
            return (student - teacher).square().mean(-1)
        return 1 - F.cosine_similarity(student, teacher, dim=-1)


class HiddenPass:
    """The blocks' outputs in one forward of the student and one of the teacher, on the same tokens."""

    def __init__(self, losses: HiddenLosses, teacher: dict[int, Tensor]):
        self._losses, self._teacher = losses, teacher
        self._student: dict[int, Tensor] = {}

    def recording(self) -> contextlib.AbstractContextManager:
        return self._losses.recording(self._student)

    def added_to(
        self, result: BatchLoss, targets: BatchTargets, how: Distillation, partners: Tensor | None = None
    ) -> BatchLoss:
        """Return the result of a batch with these terms added.

        Args:
            partners: (batch, length) int64, the teacher's position for each of the student's. A negative one means
                none, and the terms there are 0. None: both models read the same tokens.
        """
        assert targets.rows is not None  # it is None under torch.compile, where the trainers refuse hidden-state losses
        rows, device = targets.rows.wait(), targets.labels.device
        index = None if partners is None else gather_rows(partners.to(device).flatten(), rows)

        def of_student(block: int) -> Tensor:
            return gather_rows(self._student[block].to(device).flatten(0, -2), rows)

        def of_teacher(block: int) -> Tensor:
            states = self._teacher[block].to(device).flatten(0, -2)
            return gather_rows(states, rows) if index is None else states.index_select(0, index.clamp(min=0))

        values = self._losses.values(of_student, of_teacher)
        if index is not None:
            values = {kind: value.where(index >= 0, 0) for kind, value in values.items()}
        loss = result.loss
        factors = None if targets.weights is None else gather_rows(targets.weights, rows)
        for kind, value in values.items():
            weighted = value if factors is None else value * factors
            loss = loss + how.hidden_weights[kind] * weighted.sum() * rows.alpha
        total = targets.labels.numel()
        per_token = {kind: scatter_rows(value.detach(), rows, total) for kind, value in values.items()}
        return result._replace(loss=loss.to(result.loss.dtype), terms={**(result.terms or {}), **per_token})


def _blocks(model: Any) -> nn.ModuleList:
    try:
        return decoder_layers(model)[1]
    except ConfigError as error:
        raise ConfigError(f"Hidden-state losses need the model's decoder blocks. {error}") from error


@contextlib.contextmanager
def _recorded(blocks: nn.ModuleList, indices: set[int], states: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, keep the outputs of these blocks in `states`, each (batch, length, width).

    Some releases of transformers call hooks within gradient checkpointing. The hook then gets the same tensor object
    that the checkpoint returns, and that tensor has its graph, in reentrant checkpointing too. When the block is
    recomputed in the backward, the hooks are gone.
    """

    def keep(index: int, output: Any) -> None:
        states[index] = output[0] if isinstance(output, tuple) else output

    hooks = [blocks[i].register_forward_hook(lambda _, inputs, output, i=i: keep(i, output)) for i in indices]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
