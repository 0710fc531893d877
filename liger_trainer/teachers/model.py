"""`teacher: model`: a causal LM, frozen and in eval mode, whose layers are patched too, and where its weights live."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState, cpu_offload
from accelerate.utils import gather_object, patch_environment, send_to_device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel, TrainingArguments

from ..common.console import announce
from ..common.files import refuse_missing
from ..common.weights import auto_class, load_merged, refuse_meta
from ..compat.models import unsplit_layers
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits
from ..losses.model_parts import Head, device_of, embedding_rows, output_module, placeholder_ids, reads_images
from ..losses.spec import Logits
from ..patching.packing.packed_rows import patch_packed_attention
from ..patching.patcher import base_of
from ..plugins import KEEPS_ROWS, load
from .base import DistillHost, Teacher, check_apart, check_writes, patch_layers, teacher_logits, without_labels
from .config import OF_LOADING, TeacherConfig, placed
from .fingerprints import describe_frozen_model
from .own_images import (
    OwnImages,
    at_student_positions,
    collator_of_images,
    own_inputs,
    processor_of,
    same_image_processing,
)
from .vocabulary import (
    Vocabulary,
    announce_other_template,
    compare_tokenizers,
    options_of_teacher,
    teacher_tokenizer,
    with_heads,
)

RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
KEEP_DEVICE = ("teacher_load_in_4bit", "teacher_load_in_8bit", "teacher_device", "teacher_offload")


def load_teacher(teacher: PreTrainedModel | str, args: TeacherConfig) -> PreTrainedModel:
    """Load a teacher in the dtype, form and place that `args` name; offloading comes later. A model is returned as is.

    Raises:
        ConfigError: `args` say how to load a model that is loaded already; bitsandbytes is not installed; the folder
            is not there; the files lack weights of the model.
    """
    if not isinstance(teacher, str):
        unused = placed(args) or next((name for name in OF_LOADING if getattr(args, name)), None)
        if unused:
            raise ConfigError(
                f"{unused} is about a teacher that is loaded by its name, but a model was given. Load it "
                "that way, or pass its name."
            )
        return teacher
    refuse_missing("teacher_model", teacher)
    try:
        return load_frozen(teacher, **_load_kwargs(args))
    except ImportError as error:
        raise ConfigError(f"The teacher {teacher} cannot be loaded as asked for: {error}") from error


def load_frozen(name: str, **options: Any) -> PreTrainedModel:
    """Load a model that nobody trains, with all its weights in every process. Adapters are merged into their base.

    RAM-efficient loading leaves zeros in all ranks but the first (transformers 5.17). accelerate then sends the
    student's weights to the others, but nobody sends the teacher's.
    """
    with patch_environment(**{RAM_EFFICIENT: "false"}):
        return load_merged(_from_files, name, **options)


def _from_files(name: str, **options: Any) -> Any:
    """Load a model as TRL loads a student: in fp32, and where there is a GPU, on it, unless `options` say otherwise."""
    how = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    device: Any = PartialState().device
    place = None if device.type in ("cpu", "mps") else "auto"
    kind = auto_class(AutoConfig.from_pretrained(name, **how))
    return kind.from_pretrained(name, **{"dtype": "float32", "device_map": place, **options})


def shard(teacher: PreTrainedModel, accelerator: Any, like: nn.Module | None = None) -> nn.Module:
    """Share a frozen model's weights out over the ranks, as accelerate's FSDP plugin says.

    By FSDP2 each decoder layer is a unit: TRL's `prepare_fsdp` makes one of the whole model, of which each rank would
    then hold every weight during a pass. The head is one, too, where the head of `like`, the student, is kept
    sharded.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version == 1:
        from trl.models.utils import prepare_fsdp

        return prepare_fsdp(teacher, accelerator)  # pyright: ignore[reportReturnType]
    mesh = getattr(accelerator, "torch_device_mesh", None)
    how: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    if like is not None and getattr(output_module(like), KEEPS_ROWS, False):
        load("vocab_parallel").shard_teacher_head(like, base_of(teacher), **how)
    layers = unsplit_layers(teacher)
    for module in list(teacher.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, **how)
    fully_shard(teacher, **how)
    return teacher.eval()


def teacher_dtype(args: TrainingArguments | TeacherConfig) -> str:
    """Return the run's dtype, the default for a teacher loaded from its path."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def check_alike(fingerprints: dict[str, Any], name: str) -> None:
    """Raise ConfigError where the ranks hold different teachers and are about to shard them as one."""
    everywhere = gather_object([fingerprints])
    if any(there != everywhere[0] for there in everywhere):
        raise ConfigError(
            f"{name}: its weights are not the same in all processes, which are about to share them out. With "
            f"{RAM_EFFICIENT}=true, some releases of transformers load a model only in the first process. Give the "
            "teacher by its name, or load it with that off (fsdp_cpu_ram_efficient_loading: false for accelerate)."
        )


def _load_kwargs(args: TeacherConfig) -> dict[str, Any]:
    assert not isinstance(args.teacher_model_init_kwargs, str)  # transformers parses JSON in its dict fields
    kwargs = dict(args.teacher_model_init_kwargs or {})
    if args.teacher_model_revision is not None:
        kwargs["revision"] = args.teacher_model_revision
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    kwargs.setdefault("allow_missing_weights", args.allow_missing_weights)
    kwargs.setdefault("dtype", args.teacher_dtype or teacher_dtype(args))
    if args.teacher_load_in_4bit:
        compute = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    if args.teacher_load_in_8bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    if args.teacher_offload:
        kwargs["device_map"] = None
    elif keeps_device(args):
        kwargs["device_map"] = {"": args.teacher_device or str(args.device)}
    elif args.world_size > 1:  # TRL's default would spread it over all GPUs that a process sees
        kwargs.setdefault("device_map", None)
    return kwargs


def keeps_device(args: TeacherConfig) -> bool:
    """Return whether the trainer leaves the teacher where it was loaded."""
    return any(getattr(args, name) for name in KEEP_DEVICE)


def check_processes(args: TeacherConfig, processes: int, fsdp: bool, deepspeed: bool) -> None:
    """Raise ConfigError where a place names another device in each process, or the engine decides on it."""
    if not keeps_device(args):
        return
    name = next(name for name in KEEP_DEVICE if getattr(args, name))
    if fsdp and args.teacher_offload:
        raise ConfigError(
            "teacher_offload does not go with FSDP, which shares the teacher's weights out over the processes. Leave "
            "it out, or have FSDP keep all weights in CPU memory: fsdp_offload_params: true for accelerate."
        )
    if deepspeed:
        raise ConfigError(f"{name} does not go with DeepSpeed, which decides where the teacher's weights are.")
    if processes > 1 and args.teacher_device is not None and torch.device(args.teacher_device).index is not None:
        raise ConfigError(
            f"teacher_device={args.teacher_device!r} would be the same for all {processes} processes. Leave it out, "
            "and each has its teacher next to its student; or train in one process."
        )


def stream_weights(model: Any, device: torch.device | str) -> None:
    """Keep the weights in CPU memory and bring each layer's to the device while it computes.

    The head moves to the device for good, because the loss reads it after the forward pass.

    Raises:
        ConfigError: the model has no backbone apart from its head.
    """
    backbone = model.base_model
    if backbone is model or output_module(model) is None:
        raise ConfigError(f"teacher_offload: {type(model).__name__} has no backbone besides its output head.")
    cpu_offload(backbone, execution_device=torch.device(device))
    for child in model.children():
        if child is not backbone:
            child.to(device)


class LogitsMover:
    """Bring a frozen teacher's deferred logits to another device. The head is copied there once."""

    def __init__(self) -> None:
        self._head: Head | None = None

    def __call__(self, logits: Logits, device: torch.device) -> Logits:
        if not isinstance(logits, DeferredLogits):
            return logits.to(device)
        if self._head is None:
            head = logits.head.detached()
            bias = None if head.bias is None else head.bias.to(device)
            lora = tuple(adapter._replace(a=adapter.a.to(device), b=adapter.b.to(device)) for adapter in head.lora)
            self._head = Head(head.weight.to(device), bias, lora)
        teacher_device, project = logits.device, logits.project
        return replace(
            logits,
            hidden=logits.hidden.to(device),
            head=self._head,
            project=lambda hidden: project(hidden.to(teacher_device)).to(device),
        )


class ModelTeacher(Teacher):
    """A model, or its directory or hub id, which is loaded once the student exists.

    Args:
        args: where the teacher comes from and where it lives.
        teacher: the model or its name.
        name: for messages.
    """

    def __init__(self, args: TeacherConfig, teacher: PreTrainedModel | str, name: str = "teacher"):
        if not isinstance(teacher, str):
            check_writes(teacher)
            refuse_meta("teacher_model", teacher)
        self._args, self._teacher, self._name = args, teacher, name
        self._accelerator: Any = None
        self._carry = LogitsMover()
        self._vocabulary: Vocabulary | None = None
        self._padding_is_beyond = False
        self._fingerprints: dict[str, Any] = {}
        self._sees_images = False
        self._sliced: Any = None  # what has it read whole rows, of which ranks have slices

    @functools.cached_property
    def _own_tokenizer(self) -> Any:
        return teacher_tokenizer(self._teacher, **options_of_teacher(self._teacher, self._args))

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        if name == "train" and self.tokenizer is None:
            announce_other_template(dataset, tokenizer, self._own_tokenizer, self._name)

    def collator(self, collator: Any) -> Any:
        """Return a collator that makes the teacher's rows too, where its processor draws images otherwise."""
        images = collator_of_images(collator)
        if images is None:
            return collator
        self._sees_images, own = True, self.processor_beside()
        if own is None or same_image_processing(images.processor, own):
            return collator
        if self._args.loss_plan().of("hidden"):
            raise ConfigError(
                f"The processor of the {self._name} draws images otherwise than the student's, so their hidden states "
                "stand at other positions. Leave the losses on hidden states out."
            )
        announce(f"{self._name}: its own processor draws the images.")
        self.draws_by = own
        return OwnImages.around(collator, own)

    def processor_beside(self) -> Any:
        """Return the teacher's processor: the one that was given, or the one next to the model; None without one."""
        if self.processor is not None:
            return self.processor
        options = options_of_teacher(self._teacher, self._args)
        named, _ = options.pop("named"), options.pop("gguf_file", None)
        return processor_of(self._teacher if named is None else named, **options)

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        self._shared(tokenizer).check_rows(dataset, name)

    def prepare(self, trainer: DistillHost) -> int:
        self._accelerator = trainer.accelerator
        fsdp, deepspeed = trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled
        check_processes(self._args, self._accelerator.num_processes, fsdp, deepspeed)
        teacher = load_teacher(self._teacher, self._args)
        check_apart(trainer.student, teacher)
        self._check_images(trainer.student, teacher)
        self._fingerprints = describe_frozen_model(teacher)  # before its weights are sharded or streamed
        # Each rank will keep its share of the copy that it has, so the copies must be the same.
        if (fsdp or deepspeed) and not keeps_device(self._args):
            check_alike(self._fingerprints, self._name)
        if self._args.teacher_offload:
            announce(f"{self._name}: its layers are not patched, since their weights are streamed.")
            patch_packed_attention(base_of(teacher), None, trainer.packed_rows)
        else:
            self.patched = patch_layers(teacher, trainer.patched.options, self._name, trainer.packed_rows)
        if trainer.shards_sequences():
            self._sliced = load("parallelism_config").sliced_teacher(base_of(teacher), self._name)
        vocab_size = self.vocabulary_size(trainer, teacher)
        teacher.requires_grad_(False).eval()
        self.model = self._placed(teacher, trainer)
        return vocab_size

    def _check_images(self, student: Any, teacher: Any) -> None:
        if not self._sees_images:
            return
        if not reads_images(base_of(teacher)):
            raise ConfigError(
                f"The rows have images, and the {self._name}, a {type(base_of(teacher)).__name__}, takes none: it "
                "would read placeholders in their place. Take a vision-language teacher."
            )
        theirs, ours = placeholder_ids(base_of(teacher).config), placeholder_ids(base_of(student).config)
        if theirs != ours and self.draws_by is None:
            raise ConfigError(
                f"Student and {self._name} put images in the place of other tokens ({ours} and {theirs}), and the "
                "teacher's processor is not known. Pass it as teacher_processor, or name it in "
                "teacher_tokenizer_name_or_path."
            )

    def fingerprints(self) -> dict[str, Any]:
        return self._fingerprints

    def vocabulary_size(self, trainer: DistillHost, teacher: Any) -> int:
        """Return how many tokens student and teacher share."""
        vocabulary = with_heads(self._shared(trainer.tokenizer), trainer.student, teacher)
        announce(f"vocabulary: {vocabulary}")
        self.unshared, self.reads = vocabulary.unshared, embedding_rows(teacher)
        # `check` refused rows with tokens that only the student has; only padding may be one of them.
        self._padding_is_beyond = any(i >= self.reads for i in vocabulary.student_only)
        return vocabulary.size

    def _shared(self, tokenizer: Any) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = compare_tokenizers(tokenizer, self._own_tokenizer)
        return self._vocabulary

    def _placed(self, teacher: PreTrainedModel, trainer: DistillHost) -> nn.Module:
        # Weights live as the student's do: under its engine, next to it, or where `args` say.
        if trainer.is_deepspeed_enabled:
            from trl.models.utils import prepare_deepspeed

            return prepare_deepspeed(teacher, self._accelerator)
        if trainer.is_fsdp_enabled and not keeps_device(self._args):
            return shard(teacher, self._accelerator, like=base_of(trainer.student))
        if not keeps_device(self._args):
            return self._accelerator.prepare_model(teacher, evaluation_mode=True)
        if self._args.teacher_offload:
            stream_weights(teacher, self._accelerator.device)
        return teacher

    def answer(self, inputs: dict[str, Any]) -> Logits:
        """Return deferred logits: hidden states, and the head that makes logits of them."""
        own = own_inputs(inputs)
        if own is not None:
            return at_student_positions(self.logits(**own[0]), own[1])
        read = without_labels(inputs)
        if self._padding_is_beyond and self.reads is not None:
            # padding of the student's that the teacher has no row for; nothing is learned there
            read["input_ids"] = read["input_ids"].clamp(max=self.reads - 1)
        slices = self._sliced if "shift_labels" in inputs else None  # evaluations read whole rows
        with contextlib.nullcontext() if slices is None else slices.gathered():
            return self.logits(**read)

    def logits(self, **read: Any) -> Logits:
        """Return the logits on the device of `input_ids`, wherever the teacher lives."""
        base = self._accelerator.unwrap_model(self.model)
        if not keeps_device(self._args):  # who prepared it has seen to the run's mixed precision
            return teacher_logits(self.model, base, **read)
        here, there = read["input_ids"].device, device_of(base)
        with self._accelerator.autocast():
            logits = teacher_logits(base, base, **send_to_device(read, there))
        return logits if there == here else self._carry(logits, here)

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        yield {"": self._accelerator.unwrap_model(self.model)}
