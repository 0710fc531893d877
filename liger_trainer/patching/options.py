"""What a patch may replace, and its report of what it replaced."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError

ALIASES = {"relu_squared": "relu2"}  # Liger-Kernel's names of options


def canonical(flags: Mapping[str, bool] | None) -> dict[str, bool]:
    """Return the flags under our names.

    Raises:
        ConfigError: an option by both of its names.
    """
    flags = dict(flags or {})
    for alias, name in ALIASES.items():
        if alias in flags and name in flags:
            raise ConfigError(f"{alias} is another name of {name}: pass one of them.")
    return {ALIASES.get(name, name): value for name, value in flags.items()}


@dataclass(frozen=True)
class PatchOptions:
    """What to replace. The names are those of transformers' `liger_kernel_config`.

    Attributes:
        rope: rotary embedding, together with the norms of queries and keys where the model has them.
        rms_norm: RMSNorm layers.
        layer_norm: LayerNorm layers.
        swiglu: MLPs and experts gated by SiLU, clamped (gpt-oss) or not.
        geglu: MLPs and experts gated by GELU.
        relu2: MLPs with squared ReLU; relu_squared, Liger-Kernel's name, is taken too.
        gelu: MLPs with GELU and no gate.
        linear: linear layers that read one tensor, such as queries, keys and values.
        lora: linear layers, MLPs and stacked experts with plain LoRA adapters; stacked experts that are frozen.
        towers: towers that read images or sound: attention over a whole batch in one call where the model calls it
            image by image, patches embedded by a product instead of a convolution, and placeholders counted before the
            tower runs.
        hybrids: layers that mix tokens otherwise than by attention: causal convolutions (Qwen3.5, LFM2), Mamba-2's
            scan (Granite 4.0 H) where mamba_ssm is not installed, and the gated delta rule (Qwen3.5) where fla-core is.
        fused_linear_cross_entropy: the loss from hidden states, without stored logits.
        cross_entropy: the loss's kernel on stored logits, for code that wants both. Not with the fused one.
    """

    rope: bool = True
    rms_norm: bool = True
    layer_norm: bool = True
    swiglu: bool = True
    geglu: bool = True
    relu2: bool = True
    gelu: bool = True
    linear: bool = True
    lora: bool = True
    towers: bool = True
    hybrids: bool = True
    fused_linear_cross_entropy: bool = True
    cross_entropy: bool = False

    def __post_init__(self) -> None:
        for option, value in vars(self).items():
            if not isinstance(value, bool):
                raise ConfigError(f"The option {option} of a patch must be true or false, got {value!r}.")
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ConfigError(
                "cross_entropy works on stored logits, and fused_linear_cross_entropy stores none: choose one. "
                "Pass fused_linear_cross_entropy=False to have cross_entropy."
            )

    @classmethod
    def of(cls, flags: Mapping[str, bool] | None) -> "PatchOptions":
        """Read `liger_kernel_config`. cross_entropy=True by itself turns the fused loss off.

        Raises:
            ConfigError: an unknown name, or an option by two names.
        """
        flags = canonical(flags)
        names = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(flags) - set(names))
        if unknown:
            raise ConfigError(f"Unknown patch options: {', '.join(unknown)}. There are {', '.join(names)}.")
        if flags.get("cross_entropy"):
            flags.setdefault("fused_linear_cross_entropy", False)
        return cls(**flags)


@dataclass
class PatchReport:
    """What was swapped in a model, and what stays although it looked like one of our layers."""

    model: str
    swapped: Counter[str] = field(default_factory=Counter)  # "RMSNorm": 57
    left_alone: dict[str, str] = field(default_factory=dict)  # class or function: why
    tower: "PatchReport | None" = None  # only `doctor`'s: what of it is in the part that reads images
    classes: set[str] = field(default_factory=set)  # only `doctor`'s: those of which a layer was swapped

    def swap(self, kind: str, count: int = 1) -> None:
        self.swapped[kind] += count

    def leave(self, name: str, why: str) -> None:
        self.left_alone.setdefault(name, why)

    @property
    def reasons(self) -> str:
        """What stays as it was, and why, as errors quote it."""
        return "; ".join(f"{name}: {why}" for name, why in self.left_alone.items())

    def __str__(self) -> str:
        """Return a line that begins like `qwen3: RMSNorm 57, SwiGLU 28, shared input 56, fused loss.`"""
        swapped = ", ".join(kind if count == 1 else f"{kind} {count}" for kind, count in self.swapped.items())
        left = "; ".join(f"{name} ({why})" for name, why in self.left_alone.items())
        return f"{self.model}: {swapped or 'nothing'}. Left alone: {left or 'none'}."


class NothingToPatch(ConfigError):
    """The error for a model without anything to replace. Its `report` says what stays and why."""

    def __init__(self, report: PatchReport, options: PatchOptions):
        # Here, since the layers of extras import this file where transformers need not be installed.
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        wanted = ", ".join(name for name, value in vars(options).items() if value)
        super().__init__(
            f"Nothing was found to patch in {report.model} for {wanted or 'no option'}. "
            + (f"Left alone: {report.reasons}. " if report.left_alone else "")
            + (f"`liger-trainer doctor {report.model}` says more. " if report.model in CONFIG_MAPPING else "")
            + f"The options are {', '.join(vars(options))}."
        )
        self.report = report
