"""Measure the memory of a training step by running it on tensors without data.

Models are built from their configurations, adapted and patched as the trainers do it. They take a step in torch's
FakeTensorMode, with our ops on their GPU path, while `MemoryTracker` counts. So the code itself says what the backward
saves, autocast copies, checkpointing recomputes and the loss holds, and no formula has to follow it. Stand-ins have the
memory of FlashAttention's kernels, of fla-core's, and of the layers and optimizers of bitsandbytes.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.configuration_utils import PreTrainedConfig

from ...common.weights import auto_class
from ...compat.models import attention_implementation
from ...compat.modules import own_buffers, own_parameters, without_some_hooks
from ...compat.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from ...errors import ConfigError
from ...losses.spec import LossOptions
from ...patching.graphs.cuda_graphs import layers_of, most_rows
from ...patching.graphs.layer_graphs import NotCapturable
from ...patching.patcher import NothingToPatch, Patched, PatchOptions, base_of
from ...teachers.adapters_off import without_adapters
from ...teachers.base import teacher_logits
from ...trainers.options import ALWAYS, NEVER
from ...trainers.step_graphs import most_documents
from ..mtp import MtpHead, MtpPass
from ..qat import linear_layers
from .memory_tracker import GraphPool, MemoryTracker, Peak
from .stand_ins import (
    as_bitsandbytes,
    as_fla_core,
    attention,
    attention_mask,
    kernel_serves,
    on_a_gpu,
    pack_experts,
    packed_weight,
    quantize,
)

GATHERED = "weights to gather"  # the whole of them, which no process ever has: Sharding counts the layers at work
SAMPLING = "sampling"  # a phase
ATTENTION, BY_LENGTHS = "liger_trainer_without_data", "liger_trainer_without_data_by_lengths"


@dataclass(frozen=True)
class ModelSpec:
    """A model without its weights."""

    config: PreTrainedConfig
    dtype: torch.dtype
    attention: str | None = None  # attn_implementation; None is sdpa where the model has it
    bits: int | None = None  # 4 or 8 of bitsandbytes, for linear layers
    experts: float | None = None  # bytes of a number of stacked experts, where they are in 4 bits


@dataclass(frozen=True)
class Rollout:
    """Completions that are sampled at once in this process."""

    rows: int
    prompt: int  # prompt, completion: most tokens of each
    completion: int
    by_student: bool = True
    by_teacher: bool = False


@dataclass(frozen=True)
class StepSpec:
    """What the memory of a step depends on."""

    student: ModelSpec  # student, teacher: the models
    rows: int  # rows, length: of a batch on one device; `length` is in tokens
    length: int
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # makes one from parameter groups
    supervised: int | None = None  # tokens of a row that have a label
    masked: bool = False  # attention gets a mask, since rows differ in length or are packed
    # packed rows are read by the lengths of their documents, so that windows take no mask either
    by_lengths: bool = False
    own_attention: bool = False  # our kernel may compute it: in 16 bits, with `attention: auto`
    accumulation: int = 1  # micro-batches a step
    buckets: bool = False  # gradients lie in DDP's buckets, where graphs write them
    teacher: ModelSpec | None = None
    teacher_records: Any = None  # the format of a teacher cache, which makes the records of a batch
    rollout: Rollout | None = None  # None: nothing is sampled
    teaches_itself: bool = False  # the teacher is the student without its adapters
    remake_every: int = 0  # in every n-th decoder layer the MLP makes gate and up again; 0: in none
    # FSDP2 computes with gathered copies of the student's weights, and keeps shares of them in this format, but in fp32
    # of those that it trains; None without FSDP2
    shares: torch.dtype | None = None
    quantises: bool = False  # linear layers hold quantised numbers, and their weights are kept too
    cuda_graphs: str = NEVER  # `auto`, `always` or `never`
    peft: Any = None  # configuration of the student's adapters
    patch: PatchOptions = field(default_factory=PatchOptions)
    loss: LossOptions = field(default_factory=LossOptions)  # distillation, smoothing
    autocast: torch.dtype | None = None  # its dtype; None without autocast
    # keywords of `gradient_checkpointing_enable`; None without checkpointing
    checkpointing: dict[str, Any] | None = None
    max_grad_norm: float = 1.0
    mtp_weight: float = 0.0  # of the head for multi-token prediction, which is trained beside the model; 0: it is not

    @property
    def labelled(self) -> int:
        """Rows of the logits with a label. The first token of a row is never predicted."""
        return self.rows * min(self.supervised or self.length, self.length - 1)


@dataclass(frozen=True)
class StepMemory:
    """Peaks by phase, numbers of parameters, bytes of the trained weights, and of what computes in the format in which
    it does: the trained weights, the largest layer and the output head of the student and of the teacher.

    tied: the head is the embedding.
    sampling: the peak while completions are sampled, all rows at once: where less is free, it is fewer at once.
    weights_bytes: of the student, in the format that they compute in.
    outside: the peaks by phase of what is not in the memory of CUDA graphs.
    pools_bytes: what the graphs keep: all that their layers allocate, with the gradients that they write; 0 without.
    whole_bytes: the weights of the layers that graphs are not ruled out for, in the format that they compute in.
    always: graphs are recorded whatever the memory, so that they belong to the peak.
    """

    peaks: dict[str, Peak]
    parameters: int
    trainable: int
    trained_bytes: int
    computed_bytes: int
    layer_bytes: int
    head_bytes: int
    tied: bool
    teacher_parameters: int
    weights_bytes: int
    teacher_layer_bytes: int = 0
    teacher_head_bytes: int = 0
    sampling: Peak | None = None
    outside: dict[str, Peak] = field(default_factory=dict)
    pools_bytes: int = 0
    whole_bytes: int = 0
    always: bool = False


def simulate(spec: StepSpec) -> StepMemory:
    """Run a training step without data.

    Raises:
        ConfigError: a model cannot be built, or its computation depends on values.
    """
    with _stand_ins(spec):
        fake, tracker = FakeTensorMode(), MemoryTracker()
        student = _student(spec)
        teacher = _teacher(spec) if spec.teacher is not None else None
        with fake:
            for model in (student, teacher) if teacher is not None else (student,):
                _allocate(model)
            resident = [] if spec.teacher_records is None else spec.teacher_records.resident()
        step = _TrainerSteps(spec, student, teacher, tracker, resident)
        try:
            with fake, tracker, on_a_gpu(spec.labelled, float(spec.labelled)):
                step.run()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"{type(base_of(student)).__name__} computes something that depends on its numbers, so that its memory "
                f"cannot be told without running it: {str(error).partition(chr(10))[0]}"
            ) from error
    if step.sampling is not None:
        step.sampling.add("optimizer state", tracker.live["optimizer state"])
    return StepMemory(
        peaks=tracker.peaks,
        sampling=step.sampling,
        weights_bytes=_computed_bytes(base_of(student), spec.autocast),
        parameters=_numbers(student),
        trainable=sum(p.numel() for p in step.trained),
        trained_bytes=sum(p.nbytes for p in step.trained),
        computed_bytes=sum(p.nbytes for p in step.kept),
        layer_bytes=_largest_layer(student, spec.autocast),
        head_bytes=_computed_bytes(base_of(student).get_output_embeddings(), spec.autocast),
        tied=base_of(student).get_output_embeddings().weight is base_of(student).get_input_embeddings().weight,
        teacher_parameters=0 if teacher is None else _numbers(teacher),
        teacher_layer_bytes=0 if teacher is None else _largest_layer(teacher, spec.autocast),
        teacher_head_bytes=0 if teacher is None else _computed_bytes(teacher.get_output_embeddings(), spec.autocast),
        outside=tracker.outside,
        pools_bytes=sum(size for pool, size in tracker.pools.items() if pool is not None),
        whole_bytes=sum(_computed_bytes(layer, spec.autocast) for layer in step.recordable),
        always=spec.cuda_graphs == ALWAYS,
    )


def simulate_reading(spec: StepSpec) -> Peak:
    """Return the highest point of a forward of only the teacher over a batch, without logits: what a capture does."""
    with _stand_ins(spec):
        fake, tracker = FakeTensorMode(), MemoryTracker()
        teacher = _teacher(spec)
        with fake:
            _allocate(teacher)
        tracker.add([*teacher.parameters(), *teacher.buffers()], "teacher weights")
        with fake, tracker, on_a_gpu(spec.labelled, float(spec.labelled)):
            ids = torch.zeros(spec.rows, spec.length, dtype=torch.int64)
            with tracker.during("teacher", "teacher activations"), _autocast(spec.autocast):
                teacher_logits(teacher, teacher, input_ids=ids, use_cache=False)
    return tracker.peaks["teacher"]


@contextlib.contextmanager
def _stand_ins(spec: StepSpec) -> Iterator[None]:
    """Within it, models of transformers may be built with our stand-ins, which warn of nothing."""
    documents = most_documents(spec.rows * spec.length) if spec.by_lengths else None
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, attention_mask)
    AttentionInterface.register(BY_LENGTHS, attention)
    AttentionMaskInterface.register(BY_LENGTHS, lambda *args, **kwargs: None)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings(), as_bitsandbytes(), as_fla_core(documents):
        warnings.simplefilter("ignore")
        yield


def _autocast(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext()


class _TrainerSteps:
    """The highest moments of a Trainer's steps, each once.

    A micro-batch peaks as the last of its step, with the gradients of those before it. The optimizer peaks in the
    second step, when its state exists. What lies in memory during a whole micro-batch raises its peaks and does not
    move them, so it is added at the end.
    """

    def __init__(self, spec: StepSpec, student: Any, teacher: Any, tracker: MemoryTracker, resident: list[Tensor]):
        self.spec, self.student, self.teacher, self.tracker = spec, student, teacher, tracker
        computed = [p for p in student.parameters() if p.requires_grad]
        whole: dict[Any, Any] = {}
        if spec.shares is not None:
            whole = {p: Parameter(torch.empty_like(p, dtype=torch.float32)) for p in computed}
            frozen = [torch.empty_like(p, dtype=spec.shares) for p in student.parameters() if not p.requires_grad]
            tracker.add(student.parameters(), GATHERED)
            tracker.add(frozen, "student weights")
            self.frozen = frozen  # which keeps them
        self.kept = {p: whole.get(p, p) for p in computed}  # by what computes, what the optimizer steps
        self.trained = list(self.kept.values())
        if spec.shares is None:
            tracker.add((p for p in student.parameters() if not p.requires_grad), "student weights")
        tracker.add(self.trained, "adapter weights" if spec.peft is not None else "student weights")
        tracker.add(student.buffers(), "student weights")
        if teacher is not None:
            tracker.add([*teacher.parameters(), *teacher.buffers()], "teacher weights")
        quantised = linear_layers(student).values() if spec.quantises else ()
        behind = [torch.empty_like(layer.weight) for layer in quantised]
        tracker.add(behind, "weights behind the quantised")
        self.behind = behind  # which keeps them
        self.resident = resident  # of a teacher cache
        tracker.add(resident, "teacher weights")
        self.used: set[Tensor] = set()
        self.sampling: Peak | None = None
        for parameter in computed:
            parameter.register_post_accumulate_grad_hook(self._has_gradient)
        self.recordable: list[nn.Module] = []
        self.in_graphs: set[Tensor] = set()
        for name, model in (("student", student), ("teacher", teacher)):
            layers = () if model is None else _recordable(model, spec)
            self.recordable += layers
            # Larger batches keep the GPU busy without graphs.
            if layers and (spec.cuda_graphs == ALWAYS or spec.rows * spec.length <= most_rows(layers)):
                GraphPool(name, tracker).watch(layers, spec.checkpointing is not None and name == "student")
                self.in_graphs |= {parameter for layer in layers for parameter in layer.parameters()}
        base_of(student).get_decoder().register_forward_hook(lambda *_: tracker.enter("loss"))
        # As Trainer has them: without weight decay for biases and norms; moments of embeddings never in 8 bits.
        embeddings = {self.kept.get(m.weight) for m in student.modules() if isinstance(m, nn.Embedding)}
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for p in self.trained:
            groups.setdefault((p.ndim > 1, p in embeddings), []).append(p)
        self.optimizer = spec.optimizer([{"params": ps, "in_32_bits": wide} for (_, wide), ps in groups.items()])

    def _has_gradient(self, parameter: Tensor) -> None:
        kept = self.kept[parameter]
        self.used.add(kept)
        added_up = self.spec.accumulation > 1 and not self.spec.buckets  # elsewhere
        if parameter in self.in_graphs and (added_up or kept is not parameter):  # each has its place there
            self.tracker.keep("student", parameter.nbytes)
        if kept is not parameter:  # summed up over the processes, each of which keeps its share
            pool, self.tracker.pool = self.tracker.pool, None
            parameter.grad, kept.grad = None, torch.empty_like(kept)
            self.tracker.pool = pool
        self.tracker.add([kept.grad], "gradients")  # pyright: ignore

    def run(self) -> None:
        tracker = self.tracker
        if self.spec.rollout is not None:
            writes = {self.student: self.spec.rollout.by_student, self.teacher: self.spec.rollout.by_teacher}
            for model in (model for model, does in writes.items() if does):
                self._sample(model, self.spec.rollout)
            self.sampling = tracker.peaks.pop(SAMPLING)
            tracker.outside.pop(SAMPLING)
        if self.spec.accumulation > 1:
            for parameter in self.trained:
                parameter.grad = torch.empty_like(parameter)
                tracker.add([parameter.grad], "gradients")
        self._micro_batch()
        unused = -self._drop_unused_gradients()
        phases, outside = [*tracker.peaks.values()], [*tracker.outside.values()]
        # The state of the optimizer is made in the first step, and there during the second.
        for _ in range(2):
            with tracker.during("optimizer", "optimizer temporaries"):
                if self.spec.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(self.trained, self.spec.max_grad_norm, foreach=True)
                self.optimizer.step()
                tracker.add(_states(self.optimizer), "optimizer state")
        for peak in [*phases, *outside]:
            peak.add("gradients", unused)
            # From the second step on it is there in each phase.
            peak.add("optimizer state", tracker.live["optimizer state"])

    def _sample(self, model: Any, rollout: Rollout) -> None:
        """Read all prompts in one flat row, next to room for keys and values, as rollouts/rollouts.py does.

        The steps that follow have a token a row, which takes less.
        """
        base, dtype = base_of(model), self.spec.autocast
        text = base.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shape = (2 * text.num_hidden_layers, rollout.rows + 1, heads, rollout.prompt + rollout.completion, width)
        merged = [m.get_base_layer() for m in model.modules() if isinstance(m, BaseTunerLayer)]
        ids = torch.zeros(1, rollout.rows * rollout.prompt, dtype=torch.int64)
        training = model.training
        model.eval()
        # the hooks are of a training step: its layers may be in graphs, and its loss follows
        with (
            without_some_hooks(model.modules(), lambda key, hook: True), torch.no_grad(), _autocast(dtype),
            self.tracker.during(SAMPLING, "prompts being read"),
        ):  # fmt: skip
            kept = torch.empty(shape, dtype=dtype or base.dtype)
            self.tracker.add([kept], "keys and values")
            saved = [torch.empty_like(p) for layer in merged for p in layer.parameters()]
            self.tracker.add(saved, "weights under merged adapters")
            base(input_ids=ids, use_cache=False, logits_to_keep=rollout.rows)
        model.train(training)

    def _drop_unused_gradients(self) -> int:
        """Drop gradients of parameters that the loss does not use; return their bytes."""
        before = self.tracker.live["gradients"]
        for parameter in self.trained:
            if parameter not in self.used:
                parameter.grad = None
        return before - self.tracker.live["gradients"]

    def _micro_batch(self) -> None:
        with self.tracker.during("forward", "activations"):
            loss = self._loss()
            with self.tracker.during("backward", "in the backward"):
                loss.backward()
                self.tracker.pool = None

    def _loss(self) -> Tensor:
        spec = self.spec
        ids = torch.zeros(spec.rows, spec.length, dtype=torch.int64)
        inputs = {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if spec.masked else {})}
        how = self._taught(inputs)
        if spec.mtp_weight:
            how["mtp_pass"] = MtpPass(base_of(self.student).mtp, spec.mtp_weight, None)
        with _autocast(spec.autocast):
            outputs = self.student(
                **inputs, **how, labels=ids, use_cache=False, fused_lm_head=True, num_items_in_batch=1.0
            )
        return outputs.token_loss

    def _taught(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        spec = self.spec
        if spec.teacher_records is not None:
            with self.tracker.during("teacher", "teacher records"):
                return {"teacher_logits": spec.teacher_records.records(spec.rows, spec.length, self.resident)}
        teacher = base_of(self.student) if spec.teaches_itself else self.teacher
        if teacher is None:
            return {}
        as_teacher = without_adapters(self.student) if spec.teaches_itself else contextlib.nullcontext()
        with self.tracker.during("teacher", "teacher activations"), as_teacher, _autocast(spec.autocast):
            return {"teacher_logits": teacher_logits(teacher, teacher, **inputs, use_cache=False)}


def _recordable(model: Any, spec: StepSpec) -> Sequence[nn.Module]:
    """Return the decoder layers of a model where they may be in graphs, if the GPU has the memory; else none."""
    try:
        layers = layers_of(base_of(model))
    except NotCapturable:
        return ()
    weights = [p for layer in layers for p in layer.parameters()]
    packed = any(hasattr(p, "quant_state") or hasattr(p, "packed_bytes") for p in weights)
    return () if packed or spec.cuda_graphs == NEVER else layers


def _student(spec: StepSpec) -> Any:
    with torch.device("meta"):
        model = _built(spec.student, spec)
        if spec.peft is not None:
            model = get_peft_model(model, spec.peft)
            if spec.student.bits is not None:
                _round_adapters(model)
        if spec.mtp_weight:
            base = base_of(model)
            base.mtp = MtpHead(base)
    # preserve_rng_state would read the state of the GPU, and there is none.
    if spec.checkpointing is not None:
        base_of(model).gradient_checkpointing_enable({**spec.checkpointing, "preserve_rng_state": False})
        if spec.peft is not None:
            base_of(model).enable_input_require_grads()
    try:
        # In the order of the trainers: adapters, checkpointing, patches.
        Patched(base_of(model), spec.patch, spec.loss).remake_mlps(spec.remake_every)
    except NothingToPatch as error:
        raise ConfigError(str(error)) from None
    return model.train()


def _teacher(spec: StepSpec) -> Any:
    assert spec.teacher is not None
    with torch.device("meta"):
        model = _built(spec.teacher, spec).requires_grad_(False).eval()
    with contextlib.suppress(NothingToPatch):
        Patched(model, replace(spec.patch, fused_linear_cross_entropy=False))
    return model


def _allocate(model: Any) -> None:
    """Move a model from the meta device, which autocast does not support, to the CPU. Shared tensors stay shared."""
    new: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in new:
            if hasattr(tensor, "packed_bytes"):
                empty = packed_weight(tensor.shape, tensor.dtype, tensor.packed_bytes)  # pyright: ignore
            else:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            trained = isinstance(tensor, torch.nn.Parameter)
            new[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trained else empty
            vars(new[id(tensor)]).update(vars(tensor))  # how a packed weight is unpacked
        return new[id(tensor)]

    for module in model.modules():
        for tensors in (own_parameters(module), own_buffers(module)):
            tensors.update({name: on_cpu(x) for name, x in tensors.items() if x is not None})


def _round_adapters(model: Any) -> None:
    """Make the adapters of a quantised model bf16, as TRL's trainers do."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def _built(spec: ModelSpec, step: StepSpec) -> Any:
    config = spec.config
    # Any other is replaced by a stand-in below, which needs no kernels to be installed.
    implementation = "eager" if spec.attention == "eager" else None
    try:
        model = auto_class(config).from_config(config, dtype=spec.dtype, attn_implementation=implementation)
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"The causal LM of a {type(config).__name__} cannot be built: {error}") from error
    reads_all = step.by_lengths or (step.own_attention and _changes_scores(model))  # as rows of our kernel
    if attention_implementation(model.config) != "eager" or (reads_all and kernel_serves(model)):
        model.set_attn_implementation(BY_LENGTHS if step.by_lengths else ATTENTION)
    if spec.bits is not None:
        quantize(model, spec.bits)
    if spec.experts is not None:
        pack_experts(model, spec.experts)
    return model


def _changes_scores(model: Any) -> bool:
    """Whether attention has sinks or caps its scores, which our kernel computes in all rows."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return capped is not None or any(hasattr(module, "sinks") for module in model.modules())


def _numbers(model: Any) -> int:
    """Count the parameters; packed weights count as if unpacked."""
    return sum(math.prod(getattr(p, "quant_state", p).shape) for p in model.parameters())


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _largest_layer(model: Any, dtype: torch.dtype | None) -> int:
    # FSDP and ZeRO-3 gather one layer at a time.
    layers = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((_computed_bytes(layer, dtype) for modules in layers for layer in modules), default=0)


def _computed_bytes(module: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes of a module's weights, those of more bytes than autocast's dtype in that."""
    widest = math.inf if dtype is None else dtype.itemsize
    return sum(getattr(p, "packed_bytes", p.numel() * min(p.itemsize, widest)) for p in module.parameters())
