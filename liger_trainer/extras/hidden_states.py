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
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import ConfigError, CorruptError
from ..kernels.types import gather_rows, scatter_rows, stats_dtype
from ..losses.model_parts import decoder_layers
from ..losses.plan import LossPlan, LossTerm
from ..losses.spec import BatchLoss, BatchTargets, Distillation
from ..patching.patcher import base_of
from ..trainers.finite_guard import drops_on_device
from ..trainers.host import DistillTrainerHost
from ..trainers.loss_schedule import needed_file
from ..trainers.options import updating_in_backward

# in a checkpoint
PROJECTORS, PROJECTORS_OPTIMIZER = "hidden_projectors.safetensors", "hidden_projectors_optimizer.pt"


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


class TrainedHiddenLosses(HiddenLosses, TrainerCallback):
    """The hidden-state losses of a `LigerDistillTrainer`; projectors are trained, saved and read with the student.

    Raises:
        ConfigError: hidden-state terms where there are no hidden states, or where they would not be learned right.
    """

    def __init__(self, trainer: DistillTrainerHost, plan: LossPlan):
        student, teacher = _models_of(trainer)
        super().__init__(plan.of("hidden"), student, teacher, trainer.args.seed)
        self._trainer = trainer
        self._own: ProjectorOptimizer | None = None  # where the student's optimizer takes no projectors
        optim = updating_in_backward(trainer.args)
        if optim and self.projectors:
            raise ConfigError(f"optim: {optim} updates the student in its backward, and would not train projectors.")
        if self.projectors and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            self.to(trainer.accelerator.device)  # the student is not there yet
            self._own = ProjectorOptimizer(trainer, list(self.parameters()))

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.zero_grad()  # of a training that was interrupted

    def on_step_begin(self, args, state, control, optimizer: Any = None, **kwargs) -> None:
        if self._own is not None:
            self._own.follow(optimizer)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if args.max_grad_norm > 0 and self.projectors:
            nn.utils.clip_grad_norm_(self.parameters(), args.max_grad_norm)
        if self._own is not None:
            poisoned = self._trainer.finite.poisoned
            assert poisoned is not None  # the guard is an earlier callback, and has judged this step
            self._own.step(poisoned)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.zero_grad()  # the trainer clears only its model's gradients

    def add_projectors(self, optimizer: Any) -> None:
        """Have projectors without their own optimizer trained by the student's, with its weight decay."""
        if self._own is not None:
            return
        there = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [p for p in self.parameters() if id(p) not in there]
        if mine and self._trainer.lr_scheduler is not None:
            raise ConfigError(
                "optimizers: a learning-rate scheduler made before the projectors of hidden-state losses has no rate "
                "for them. Give only the optimizer, or leave hidden-state losses out."
            )
        if mine:
            optimizer.add_param_group({"params": mine, "weight_decay": self._trainer.args.weight_decay})

    def average_gradients(self) -> None:
        """Average the projectors' gradients over ranks: they are not inside the student's DDP wrapper."""
        accelerator, parameters = self._trainer.accelerator, list(self.parameters())
        if accelerator.num_processes == 1 or not parameters:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        mean: Any = accelerator.reduce(flat, "mean")
        for p, gradient in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)

    def save(self, folder: str) -> None:
        if self.projectors:
            save_file({name: x.contiguous() for name, x in self.state_dict().items()}, Path(folder, PROJECTORS))
        if self._own is not None:
            self._own.save(folder)

    def load(self, folder: str) -> None:
        """Load what `save` wrote. Raise ConfigError where it is missing, CorruptError where it is damaged."""
        if self.projectors:
            self._load_projectors(needed_file(folder, PROJECTORS, "projectors of hidden-state losses"))
        if self._own is not None:
            what = "an optimizer of their own for projectors of hidden-state losses"
            self._own.load(needed_file(folder, PROJECTORS_OPTIMIZER, what))

    def load_best(self, folder: str) -> None:
        """Load the projectors of the best checkpoint. One that has only weights leaves them as they are."""
        path = Path(folder, PROJECTORS)
        if self.projectors and path.is_file():
            self._load_projectors(path)

    def _load_projectors(self, path: Path) -> None:
        try:
            self.load_state_dict(load_file(path))
        except SafetensorError as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
        except RuntimeError as error:
            raise ConfigError(f"{path} holds the projectors of other layers or widths: {error}") from error


def _models_of(trainer: DistillTrainerHost) -> tuple[Any, Any]:
    """Return student and teacher without wrappers. Raise ConfigError where their hidden states are out of reach."""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    data_parallel = parallel is None or parallel.total_size == parallel.dp_replicate_size * parallel.dp_shard_size
    fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if fsdp1 or not data_parallel:  # hidden states are in parts, or out of reach
        raise ConfigError(
            "Hidden-state losses read what blocks return: not with FSDP1 or models split over devices. Use DDP, "
            "FSDP2 or DeepSpeed, or leave them out of losses."
        )
    with trainer.teaching.live() as teachers:
        models = list(teachers.values())
    if len(models) != 1:
        raise ConfigError(
            f"Hidden-state losses need one teacher whose model is in this process, got {len(models)}. "
            "Leave them out of losses, or use a single teacher with teacher='model' or 'self'."
        )
    return base_of(trainer.student), base_of(trainer.accelerator.unwrap_model(models[0]))


class ProjectorOptimizer:
    """Trains projectors where the student's optimizer is an engine's, which takes no other parameters.

    It is one of the same kind, at the same learning rate.

    Args:
        trainer: a Trainer that has made no optimizer yet.
        parameters: plain tensors, the same on all ranks.

    Raises:
        ConfigError: the student's optimizer is given to the trainer, or none of torch's; fp16, whose scale of the loss
            only the student's would take out of its gradients.
    """

    def __init__(self, trainer: DistillTrainerHost, parameters: list[nn.Parameter]):
        args = trainer.args
        engine = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        about = f"Hidden-state losses that learn projectors next to a student that {engine} shards: "
        if args.fp16:
            raise ConfigError(f"{about}fp16 scales the gradients of both, and takes the scale out of one. Use bf16.")
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise ConfigError(f"{about}they get an optimizer of the same kind, so name it in optim; one was given.")
        kind, options = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
        if not kind.__module__.startswith("torch.optim"):
            optim = getattr(args.optim, "value", args.optim)
            raise ConfigError(f"{about}they need one of torch's optimizers, such as adamw_torch; got optim={optim}.")
        self._optimizer = kind([{"params": parameters, "weight_decay": args.weight_decay}], **options)

    def follow(self, student: Any) -> None:
        """Take the learning rate of the student's optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = student.param_groups[0]["lr"]

    def step(self, poisoned: Tensor) -> None:
        """Step, unless `poisoned`, a bool on the device. Torch's fused optimizers don't wait for it."""
        if drops_on_device(self._optimizer):
            self._optimizer.found_inf = poisoned.float()
            self._optimizer.step()
            del self._optimizer.found_inf
        elif not bool(poisoned):
            self._optimizer.step()

    def save(self, folder: str) -> None:
        torch.save(self._optimizer.state_dict(), Path(folder, PROJECTORS_OPTIMIZER))

    def load(self, path: Path) -> None:
        """Load what `save` wrote. Raise CorruptError where it is damaged."""
        try:
            self._optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (RuntimeError, EOFError, UnpicklingError, ValueError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
