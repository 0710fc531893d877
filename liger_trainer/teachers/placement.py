"""Where a teacher's weights live, in which form, and how its answers come to the student's device."""

from dataclasses import replace
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.utils import gather_object, patch_environment
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainingArguments
from trl.models.utils import prepare_fsdp
from trl.trainer.utils import create_model_from_path

from ..common.adapters import load_merged
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits
from ..losses.model_parts import Head, output_module
from ..losses.spec import Logits
from ..patching.patcher import base_of
from ..plugins import KEEPS_ROWS, load
from .config import OF_LOADING, TeacherConfig, placed

RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
STAYS = ("teacher_load_in_4bit", "teacher_load_in_8bit", "teacher_device", "teacher_offload")


def load_teacher(teacher: PreTrainedModel | str, args: TeacherConfig) -> PreTrainedModel:
    """Load a teacher in the dtype, form and place that `args` name; offloading comes later. A model is returned as is.

    Raises:
        ConfigError: `args` say how to load a model that is loaded already; bitsandbytes is not installed; the files
            lack weights of the model.
    """
    if not isinstance(teacher, str):
        set_in_vain = placed(args) or next((name for name in OF_LOADING if getattr(args, name)), None)
        if set_in_vain:
            raise ConfigError(
                f"{set_in_vain} is about a teacher that is loaded by its name, but a model was given. Load it "
                "that way, or pass its name."
            )
        return teacher
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
        return load_merged(create_model_from_path, name, **options)


def shard(teacher: PreTrainedModel, accelerator: Any, like: nn.Module | None = None) -> nn.Module:
    """Share a frozen model's weights out over the ranks, as accelerate's FSDP plugin says.

    By FSDP2 each decoder layer is a unit: TRL's `prepare_fsdp` makes one of the whole model, of which each rank would
    then hold every weight during a pass. The head is one, too, where that of `like`, the
    student, is kept sharded.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version == 1:
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
    layers = set(getattr(teacher, "_no_split_modules", None) or ())
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
            f"{RAM_EFFICIENT}=true, some releases of transformers load a model in the first process alone. Give the "
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
    elif stays(args):
        kwargs["device_map"] = {"": args.teacher_device or str(args.device)}
    elif args.world_size > 1:  # TRL's default would spread it over all GPUs that a process sees
        kwargs.setdefault("device_map", None)
    return kwargs


def stays(args: TeacherConfig) -> bool:
    """Return whether the trainer leaves the teacher where it was loaded."""
    return any(getattr(args, name) for name in STAYS)


def check_processes(args: TeacherConfig, processes: int, fsdp: bool, deepspeed: bool) -> None:
    """Raise ConfigError where a place names another device in each process, or the engine decides on it."""
    if not stays(args):
        return
    name = next(name for name in STAYS if getattr(args, name))
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
            "and each has its teacher beside its student; or train in one process."
        )


def stream_weights(model: Any, device: torch.device | str) -> None:
    """Keep the weights in CPU memory and bring each layer's to the device while it computes.

    The head moves to the device for good, because the loss reads it after the forward pass.

    Raises:
        ConfigError: the model has no backbone apart from its head.
    """
    backbone = model.base_model
    if backbone is model or output_module(model) is None:
        raise ConfigError(f"teacher_offload: {type(model).__name__} has no backbone beside its output head.")
    cpu_offload(backbone, execution_device=torch.device(device))
    for child in model.children():
        if child is not backbone:
            child.to(device)


class Carrier:
    """Bring a frozen teacher's deferred logits to another device. The head is copied there once."""

    def __init__(self) -> None:
        self._head: Head | None = None

    def __call__(self, logits: Logits, device: torch.device) -> Logits:
        if not isinstance(logits, DeferredLogits):
            return logits.to(device)
        if self._head is None:
            self._head = _head_on(logits.head, device)
        teacher_device, project = logits.device, logits.project
        return replace(
            logits,
            hidden=logits.hidden.to(device),
            head=self._head,
            project=lambda hidden: project(hidden.to(teacher_device)).to(device),
        )


def _head_on(head: Head, device: torch.device) -> Head:
    def there(x: Any) -> Any:
        return None if x is None else x.detach().to(device)

    lora = tuple(adapter._replace(a=there(adapter.a), b=there(adapter.b)) for adapter in head.lora)
    return Head(there(head.weight), there(head.bias), lora)
