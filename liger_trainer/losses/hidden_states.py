"""Losses between what the decoder blocks of student and teacher return: mean squared error, and 1 - cosine.

Block i of either model is counted from 0, or from the end below 0; its output is the residual stream behind it, before
the final norm. Where the widths differ, or on demand, a learned projector takes the student's to the teacher's.

    hidden_mse     mean over the width of (W h_student - h_teacher)^2
    hidden_cosine  1 - cos(W h_student, h_teacher)

both a mean over the pairs of blocks, at the positions that predict a label, summed and divided by num_items as every
other term. Source: FitNets (Romero et al. 2014, arXiv:1412.6550); the uniform layout: TinyBERT (Jiao et al. 2019,
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
from ..kernels.types import put, stats_dtype, take
from .model_parts import decoder_layers
from .plan import LossTerm
from .spec import Distillation, Targets
from .teacher_answer import BatchLoss


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
        self._student, self._teacher = ([_blocks(model)] for model in (student, teacher))  # no submodules
        width, other_width = (m.config.get_text_config(decoder=True).hidden_size for m in (student, teacher))
        self.projectors = nn.ModuleDict()
        self._pairs: dict[str, list[_Pair]] = {}
        generator = torch.Generator().manual_seed(seed)
        for term in terms:
            self._pairs[term.type] = []
            for own, other in self._layout(term):
                name = None
                if width != other_width or term.options.get("projector"):
                    name = f"{term.type}_{own}_{other}"
                    self.projectors[name] = _projector(width, other_width, generator)
                self._pairs[term.type].append(_Pair(own, other, name))
        self.projectors.to(student.device)

    def _layout(self, term: LossTerm) -> list[tuple[int, int]]:
        counts = len(self._student[0]), len(self._teacher[0])
        layers = term.options.get("layers", "uniform")
        if layers == "last":
            return [(counts[0] - 1, counts[1] - 1)]
        if layers == "uniform":
            return [(i, math.ceil((i + 1) * counts[1] / counts[0]) - 1) for i in range(counts[0])]
        for pair in layers:
            for index, count, whose in zip(pair, counts, ("student", "teacher"), strict=True):
                if not -count <= index < count:
                    raise ConfigError(
                        f"losses: {term.type}: layers names block {index} of the {whose}, which has {count}: "
                        f"0 to {count - 1}, or -{count} to -1."
                    )
        found = [(own % counts[0], other % counts[1]) for own, other in layers]
        if len(set(found)) < len(found):
            raise ConfigError(f"losses: {term.type}: layers names a pair twice: {layers}.")
        return found

    @contextlib.contextmanager
    def of_teacher(self) -> Iterator["HiddenPass"]:
        """Within the context the teacher answers; the pass is then for the student's forward on the same tokens."""
        states: dict[int, Tensor] = {}
        used = {pair.teacher for pairs in self._pairs.values() for pair in pairs}
        with _recorded(self._teacher[0], used, states):
            yield HiddenPass(self, states)

    def recording(self, states: dict[int, Tensor]) -> contextlib.AbstractContextManager:
        used = {pair.student for pairs in self._pairs.values() for pair in pairs}
        return _recorded(self._student[0], used, states)

    def values(self, own: Callable[[int], Tensor], other: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """{type: (rows,)}, where either side gives the states (rows, width) of a block."""

        def of(kind: str, pair: _Pair) -> Tensor:
            return self._of_pair(kind, pair, own(pair.student), other(pair.teacher))

        return {kind: torch.stack([of(kind, pair) for pair in pairs]).mean(0) for kind, pairs in self._pairs.items()}

    def _of_pair(self, kind: str, pair: _Pair, own: Tensor, other: Tensor) -> Tensor:
        if pair.projector is not None:
            projector: Any = self.projectors[pair.projector]
            own = F.linear(own.to(projector.weight.dtype), projector.weight.to(own.device))
        dtype = stats_dtype(own.dtype)
        own, other = own.to(dtype), other.to(dtype)
        if kind == "hidden_mse":
            return (own - other).square().mean(-1)
        return 1 - F.cosine_similarity(own, other, dim=-1)


class HiddenPass:
    """One forward of the student beside one of the teacher: what their blocks returned."""

    def __init__(self, losses: HiddenLosses, teacher: dict[int, Tensor]):
        self._losses, self._teacher = losses, teacher
        self._student: dict[int, Tensor] = {}

    def recording(self) -> contextlib.AbstractContextManager:
        return self._losses.recording(self._student)

    def added_to(
        self, result: BatchLoss, targets: Targets, how: Distillation, partners: Tensor | None = None
    ) -> BatchLoss:  # fmt: skip
        """The result of a batch with these terms in it.

        Args:
            partners: (batch, length) int64, the teacher's position for each of the student's, negative for none, whose
                terms are 0; without, both have the same.
        """
        assert targets.rows is not None  # refused where it is: under torch.compile
        rows, device = targets.rows.wait(), targets.labels.device
        index = None if partners is None else take(partners.to(device).flatten(), rows)

        def of_student(block: int) -> Tensor:
            return take(self._student[block].to(device).flatten(0, -2), rows)

        def of_teacher(block: int) -> Tensor:
            states = self._teacher[block].to(device).flatten(0, -2)
            return take(states, rows) if index is None else states.index_select(0, index.clamp(min=0))

        values = self._losses.values(of_student, of_teacher)
        if index is not None:
            values = {kind: value.where(index >= 0, 0) for kind, value in values.items()}
        loss = result.loss
        for kind, value in values.items():
            loss = loss + how.hidden_weights[kind] * value.sum() * rows.alpha
        total = targets.labels.numel()
        per_token = {kind: put(value.detach(), rows, total) for kind, value in values.items()}
        return result._replace(loss=loss.to(result.loss.dtype), terms={**(result.terms or {}), **per_token})


def _blocks(model: Any) -> nn.ModuleList:
    try:
        return decoder_layers(model)[1]
    except ConfigError as error:
        raise ConfigError(f"Hidden-state losses need the model's decoder blocks. {error}") from error


def _projector(width: int, teacher_width: int, generator: torch.Generator) -> nn.Linear:
    """fp32. For equal widths the identity, so that nothing changes at first."""
    projector = nn.Linear(width, teacher_width, bias=False)
    if width == teacher_width:
        nn.init.eye_(projector.weight)
    else:
        nn.init.orthogonal_(projector.weight, generator=generator)
    return projector


@contextlib.contextmanager
def _recorded(blocks: nn.ModuleList, indices: set[int], states: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, `states` gets what these blocks return, (batch, length, width).

    Some releases of transformers call hooks within gradient checkpointing. What a hook sees there is the very tensor
    that leaves it, which then has its graph, also where it is reentrant. Its recomputation finds no hooks.
    """

    def keep(index: int, output: Any) -> None:
        states[index] = output[0] if isinstance(output, tuple) else output

    hooks = [blocks[i].register_forward_hook(lambda _, inputs, output, i=i: keep(i, output)) for i in indices]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
