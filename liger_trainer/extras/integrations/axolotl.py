"""axolotl's plugin: our layers, LoRA and loss in the models that axolotl trains, and distillation.

    plugins:
      - liger_trainer.integrations.axolotl.LigerTrainerPlugin
    liger_trainer:                        # may be left out: then everything is patched
      liger_kernel_config: {rope: false}
      distillation: {teacher: Qwen/Qwen3-8B, losses: [{type: forward_kl}]}

axolotl calls the plugin's hooks: `register` before it validates the file, `post_model_load` with the model and its
adapters, `add_callbacks_post_trainer` with the trainer.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...common.console import announce
from ...compat.models import attention_implementation
from ...errors import ConfigError
from ...patching.patcher import Patched, PatchOptions, patch, patched_record
from ...trainers.distill_callback import DistillationCallback

try:
    from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    # axolotl goes on without a plugin whose import raises ImportError
    raise ConfigError(
        f"liger_trainer.integrations.axolotl needs axolotl 0.19 or later: {error}. Install axolotl, or leave this "
        "module to it: name LigerTrainerPlugin under plugins in a file for `axolotl train`."
    ) from error

_HOOKS = ("register", "get_input_args", "post_model_load", "add_callbacks_post_trainer", "post_train")
_OTHER_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
# axolotl turns these on by itself unless they are set
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_OTHER_KERNELS = (
    "chunked_cross_entropy", "flash_attn_cross_entropy", "flash_attn_fuse_mlp", "fused_attn_kernel", "tiled_mlp",
    "use_kernels", "dpo_use_liger_kernel",
)  # fmt: skip
_OTHER_LOSSES = ("rl", "reward_model", "process_reward_model", "kd_trainer", "use_eaft")


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DistillationOptions(_Options):
    """What `DistillationCallback` takes, with a path or a hub id as the teacher."""

    teacher: str
    losses: list[dict[str, Any]] | None = None
    beta: float = 0.0
    temperature: float = 1.0
    skew_alpha: float | None = None
    schedules: dict[str, Any] | None = None
    taid: dict[str, Any] | None = None
    scale_loss_by_temperature_squared: bool = True
    teacher_model_init_kwargs: dict[str, Any] = Field(default_factory=dict)
    on_non_finite: str | None = None

    def callback(self, **init_kwargs: Any) -> DistillationCallback:
        """Make the callback. init_kwargs: defaults for `teacher_model_init_kwargs`."""
        options = {name: value for name, value in self.model_dump().items() if value is not None}
        options["teacher_model_init_kwargs"] = {**init_kwargs, **self.teacher_model_init_kwargs}
        return DistillationCallback(**options)

    @model_validator(mode="after")
    def _are_those_of_the_callback(self) -> "DistillationOptions":
        self.callback()
        return self


class LigerTrainerOptions(_Options):
    """The block `liger_trainer` of a file for axolotl.

    Attributes:
        liger_kernel_config: what to patch, as `PatchOptions` names it; everything by default.
        distillation: a teacher, and the losses to learn from it.
    """

    liger_kernel_config: dict[str, bool] = Field(default_factory=dict)
    distillation: DistillationOptions | None = None

    @property
    def patch_options(self) -> PatchOptions:
        return PatchOptions.of(self.liger_kernel_config)

    @model_validator(mode="after")
    def _are_options_of_patch(self) -> "LigerTrainerOptions":
        _ = self.patch_options
        return self


class LigerTrainerArgs(BaseModel):
    """What axolotl merges into its own configuration."""

    liger_trainer: LigerTrainerOptions | None = None


class LigerTrainerPlugin(BasePlugin):
    """Patch the model that axolotl has loaded, and distil if the file says so.

    Raises:
        ConfigError: an option that is not known or out of range; another plugin or option that replaces the same layers
            or loss; distillation together with another loss; an axolotl without the hooks; a model without anything
            to replace.
    """

    def __init__(self) -> None:
        super().__init__()
        # an older axolotl would call none of them, without a word
        missing = [name for name in _HOOKS if not hasattr(BasePlugin, name)]
        if missing:
            raise ConfigError(f"LigerTrainerPlugin needs axolotl 0.19 or later: its plugins have no {missing[0]}.")
        self._record: Patched | None = None

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerTrainerArgs.__name__}"

    def register(self, cfg: Any) -> None:
        options = _options(cfg)
        plugins = [name.rpartition(".")[2] for name in cfg.get("plugins") or []]
        others = [name for name in plugins if name in _OTHER_PLUGINS]
        # two replacements of one layer: which of them runs would depend on the order
        others += [name for name in (*_LORA_KERNELS, *_OTHER_KERNELS) if cfg.get(name)]
        if others:
            raise ConfigError(
                f"LigerTrainerPlugin replaces what {', '.join(others)} would replace too. Take the other out of the "
                "file, or this plugin."
            )
        losses = [name for name in _OTHER_LOSSES if cfg.get(name)]
        if losses and options.distillation is not None:
            raise ConfigError(
                f"liger_trainer.distillation does not go with {', '.join(losses)}, which is another loss. Take one of "
                "them out of the file."
            )
        for name in _LORA_KERNELS:
            # written down, since axolotl turns on those that are not set
            cfg[name] = False

    def post_model_load(self, cfg: Any, model: Any) -> None:
        new = patched_record(model) is None
        record = patch(model, _options(cfg).patch_options)
        if new:
            self._record = record
            announce(str(record.report))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        distillation = _options(cfg).distillation
        if distillation is None:
            return []
        # axolotl marks packed rows for the attention that it has chosen, so the teacher needs the same
        attention = attention_implementation(trainer.model.config)
        return [distillation.callback(**({} if attention is None else {"attn_implementation": attention}))]

    def post_train(self, cfg: Any, model: Any) -> None:
        if self._record is not None:
            self._record.undo()
            self._record = None


def _options(cfg: Any) -> LigerTrainerOptions:
    block: Any = cfg.get("liger_trainer") or {}
    try:
        # axolotl's own mapping type
        return LigerTrainerOptions.model_validate(block.to_dict() if hasattr(block, "to_dict") else block)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
        raise ConfigError(
            f"liger_trainer in the file for axolotl: {wrong}. It has {', '.join(LigerTrainerOptions.model_fields)}; "
            f"distillation has {', '.join(DistillationOptions.model_fields)}."
        ) from None
