"""What the collaborators of a trainer know of it. Whatever is not named here, they keep themselves.

`LigerTrainer` is a `TrainerHost`, `LigerDistillTrainer` also a `DistillTrainerHost`. transformers declares many
attributes of its Trainer more loosely than they are once it is constructed; these are Any.
"""

from typing import Any, Protocol

from ..losses.fused_forward import FusedLoss
from ..losses.spec import Distillation, LossOptions
from ..patching.packing.packed_rows import PackedRows
from ..patching.patcher import Patched
from ..plugins import TrainerPlugin
from ..teachers.base import Teacher
from .finite_guard import FiniteGuard


class RowsHost(Protocol):
    """Whose rows are prepared: a trainer, or a `Preparation` without a model to train."""

    args: Any
    train_dataset: Any
    eval_dataset: Any
    chat_template: Any
    completion_only_loss: Any

    def read_rows(self, tokenized: Any, kept: Any, dataset_name: str, part: slice) -> None: ...


class TrainerHost(RowsHost, Protocol):
    # of transformers and TRL
    model: Any
    model_wrapped: Any
    accelerator: Any
    state: Any
    control: Any
    is_in_train: bool
    callback_handler: Any
    processing_class: Any
    data_collator: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any
    compute_loss_func: Any
    gather_function: Any
    is_fsdp_enabled: Any
    is_deepspeed_enabled: Any
    padding_free: Any
    aux_loss_enabled: Any

    def add_callback(self, callback: Any) -> None: ...
    def remove_callback(self, callback: Any) -> None: ...
    def is_world_process_zero(self) -> bool: ...
    def is_local_process_zero(self) -> bool: ...
    def get_tp_size(self) -> int: ...
    def get_sp_size(self) -> int: ...
    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]: ...
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any: ...

    # ours
    patched: Patched
    fused: FusedLoss | None
    finite: FiniteGuard
    packed_rows: PackedRows | None
    row_preparation: Any  # RowPreparation and EvaluationRows, whose files import this one
    evaluation_rows: Any
    graph_reports: dict[str, str]

    def plugins(self) -> list[TrainerPlugin]: ...
    def shards_sequences(self) -> bool: ...
    def loss_options(self) -> LossOptions: ...
    def frozen_models(self) -> dict[str, Any]: ...
    def teacher_fingerprints(self) -> dict[str, Any]: ...
    def restart_metrics(self, tokens: int) -> None: ...


class DistillTrainerHost(TrainerHost, Protocol):
    teaching: Teacher
    distillation: Distillation
    lmbda: float
    max_completion_length: int
    prompts_alone: set[str]

    @property
    def student(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    def distil(self, **changes: Any) -> None: ...
