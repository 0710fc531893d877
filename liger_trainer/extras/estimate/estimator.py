"""Estimate what a run needs before it starts: memory by part, tokens and steps, the size of a teacher cache.

`estimate(config, gpu)` simulates one training step of the configuration (simulate.py) and compares its peak with a GPU.
If it does not fit, settings that take less are simulated too. No weights are loaded.
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config.run_config import load_run_config
from ...errors import ConfigError
from ...trainers.options import FAST
from .memory_tracker import Peak
from .simulate import SAMPLING, StepMemory, StepSpec, simulate, simulate_reading
from .step_spec import RowLengths, Sharding, capture_spec, row_lengths, sharding_of, step_spec

if TYPE_CHECKING:
    from ...config.run_config import RunConfig

# GPUs by name, with the memory that a process can allocate on them.

CONTEXT_MIB = 700  # CUDA's context and loaded kernels, which torch does not allocate
FRAGMENTED = 0.03  # share of the reserved memory that is lost between blocks in use


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory as torch reports it, and whether its tensor cores have bf16."""

    name: str
    mib: int
    bf16: bool = True

    @property
    def usable_mib(self) -> int:
        return int((self.mib - CONTEXT_MIB) * (1 - FRAGMENTED))


GPUS = (
    Gpu("B200 180GB", 182642), Gpu("H200 141GB", 143156), Gpu("H100 80GB", 81090), Gpu("A100 80GB", 81154),
    Gpu("A100 40GB", 40337), Gpu("MI300X 192GB", 196288), Gpu("L40S 48GB", 45470), Gpu("L40 48GB", 45470),
    Gpu("A40 48GB", 45400), Gpu("RTX A6000 48GB", 48530), Gpu("RTX PRO 6000 96GB", 97250),
    Gpu("RTX 6000 Ada 48GB", 48530), Gpu("RTX 5090 32GB", 32080), Gpu("RTX 4090 24GB", 24080),
    Gpu("RTX 3090 24GB", 24110), Gpu("RTX 4080 16GB", 15950), Gpu("RTX 4060 Ti 16GB", 15950),
    Gpu("RTX 4060 Ti 8GB", 7810), Gpu("RTX 4060 8GB", 7810), Gpu("RTX 3060 12GB", 11910),
    Gpu("A10G 24GB", 22580), Gpu("L4 24GB", 22570), Gpu("V100 32GB", 32490, bf16=False),
    Gpu("V100 16GB", 16140, bf16=False), Gpu("T4 16GB", 14910, bf16=False),
)  # fmt: skip


# What nvidia-smi's names say besides: "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3".
# NVL and Laptop are not among them, since those have other memory.
_OF_ANY_GPU = re.compile(r"nvidia|amd|geforce|tesla|instinct|generation|pcie|sxm\d?|hbm\w+|gpu")


def _is_called(gpu: Gpu, words: Sequence[str]) -> bool:
    """Return whether a GPU has all the words, and none that makes it another than the one with them: a "4060" is no
    "4060 Ti"."""
    own = gpu.name.lower().split()
    return set(words) <= set(own) and not {"ti", "super"}.intersection(own).difference(words)


def gpu_named(name: str) -> Gpu:
    """Return the GPU with all words of `name`: "H100", "4090", nvidia-smi's name; or one of a size, "24GB".

    Raises:
        ConfigError: no GPU has them, or several GPUs of different memory.
    """
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\s*", name, re.I)
    if size and float(size[1]) <= 0:
        raise ConfigError(f"--gpu: expected a size above 0, got {name!r}.")
    if size:
        return Gpu(f"{size[1]} GB", int(float(size[1]) * 1024))
    spaced = re.sub(r"(\d)\s+(gb|gib)\b", r"\1\2", re.sub(r"[-_]", " ", name.lower())).replace("gib", "gb")
    words = [word for word in re.sub(r"\brtx(?=\d)", "rtx ", spaced).split() if not _OF_ANY_GPU.fullmatch(word)]
    matches = [gpu for gpu in GPUS if words and _is_called(gpu, words)]
    if not matches:
        names = [gpu.name for gpu in GPUS]
        # By name alone: another card of the same memory is not what was meant.
        bare = {re.sub(r"\s+\d+GB$", "", each).lower(): each for each in names}
        asked = re.sub(r"\s*\d+gb$", "", " ".join(words))
        close = [bare[each] for each in difflib.get_close_matches(asked, bare, 1, 0.8)]
        hint = f"Did you mean {', '.join(close)}?" if close else f"There are {', '.join(names)}."
        raise ConfigError(f"--gpu: no GPU is called {name!r}. {hint} Or give its memory: --gpu 24GB.")
    # Several of one memory are as good as one.
    if len({gpu.mib for gpu in matches}) > 1:
        raise ConfigError(f"--gpu: {name!r} may be {', '.join(gpu.name for gpu in matches)}: say which.")
    return matches[0]


def present_gpu() -> Gpu | None:
    """Return the GPU with the least memory that torch sees; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = min(
        (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())),
        key=lambda device: device.total_memory,
    )
    return Gpu(
        properties.name, properties.total_memory // 2**20, torch.cuda.is_bf16_supported(including_emulation=False)
    )


MIB = 2**20
# Each cuBLAS handle has a workspace, 32 MiB on Hopper: one for the thread of the forward, one for the backward's.
LIBRARIES = ("cuBLAS workspaces", 64 * MIB)
# cheapest first; each is tried if it changes the configuration
CHANGES: tuple[tuple[str, ...], ...] = (
    ("gradient_checkpointing=true",),
    ("optim=adamw_8bit",),
    ("use_peft=true", "lora_target_modules=all-linear"),
    ("dtype=bfloat16",),
    ("use_peft=true", "lora_target_modules=all-linear", "load_in_4bit=true"),
)
TEACHER_CHANGES = (
    ("teacher_dtype=bfloat16",),
    ("teacher_load_in_4bit=true",),
    ("teacher=cache", "teacher_cache_dir=teacher-cache"),
    ("teacher=cache", "teacher_cache_dir=teacher-cache", "cache_kind=hidden"),
)


@dataclass(frozen=True)
class Change:
    """Settings that may take less memory, and the peak with them."""

    settings: tuple[str, ...]
    peak_mib: float
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """What a run needs on each of its GPUs."""

    source: str
    recipe: str
    parameters: int
    trainable: int
    teacher_parameters: int
    rows: int
    length: int
    sharding: Sharding
    peak_mib: float
    phase: str
    parts_mib: dict[str, float]  # parts of the peak, largest first; `phase` says when it occurs
    peaks_mib: dict[str, float]  # the highest point of each phase of a step
    tokens_per_step: int  # of one optimizer step over all processes: the mean if rows are known, else the maximum
    steps: int | None
    total_tokens: int | None  # total_tokens, steps: of the run; None if the number of rows is not known
    # size of a teacher cache of the training rows for `teacher: cache`, if all tokens were supervised
    cache_mib: float | None
    unknown: str
    # what CUDA graphs, and under FSDP2 whole weights for them, keep besides the peak where they are recorded, which
    # `cuda_graphs: auto` does where that memory is free; None without graphs. With `cuda_graphs: always` it is in the
    # peak.
    graphs_mib: float | None = None
    # what capturing it takes on a GPU, if the teacher is named. It is no part of the run's peak.
    capture_mib: float | None = None
    # the peak while completions are sampled in this process, all rows at once, and its part of keys and values; where
    # less memory is free, fewer rows are completed at once, so that this decides nothing
    sampling_mib: float | None = None
    kept_mib: float | None = None
    gpu: Gpu | None = None
    fits: bool | None = None  # None without a GPU to compare with
    # settings that take less, each by itself; if none is enough, the last combines several
    changes: tuple[Change, ...] = ()


def estimate(config: "RunConfig", gpu: Gpu | None) -> Estimate:
    """Estimate a configuration on one of its GPUs.

    Raises:
        ConfigError: a model without a configuration, settings whose memory is not known, or max_length null with rows
            that are not local.
    """
    lengths = row_lengths(config)
    bf16 = gpu is None or gpu.bf16
    spec = step_spec(config, *_longest(config, lengths), bf16)
    sharding = sharding_of(config)
    memory = simulate(spec)
    (phase, peak), graphs = highest(memory, sharding), sharding.graphs_bytes(memory)
    parts = {part: size / MIB for part, size in peak.parts.most_common() if size}
    fits = None if gpu is None else peak.bytes / MIB <= gpu.usable_mib
    changes = _changes(config, lengths, gpu, peak.bytes / MIB) if gpu is not None and not fits else ()
    sampling = None if memory.sampling is None else sharding.share(SAMPLING, memory.sampling, memory)
    capture_mib, capture = None, capture_spec(config, spec, bf16)
    if capture is not None:
        reading, logits_bytes = capture
        capture_mib = (simulate_reading(reading).bytes + logits_bytes + LIBRARIES[1]) / MIB
    return Estimate(
        source=config.source,
        recipe=config.recipe,
        parameters=memory.parameters,
        trainable=memory.trainable,
        teacher_parameters=memory.teacher_parameters,
        rows=spec.rows,
        length=spec.length,
        sharding=sharding,
        peak_mib=peak.bytes / MIB,
        phase=phase,
        parts_mib=parts,
        peaks_mib={name: p.bytes / MIB for name, p in sharding.per_process(memory).items()},
        **_tokens(config, spec, lengths, sharding),
        graphs_mib=None if graphs is None else graphs / MIB,
        capture_mib=capture_mib,
        sampling_mib=None if sampling is None else (sampling.bytes + LIBRARIES[1]) / MIB,
        kept_mib=None if sampling is None else sampling.parts["keys and values"] / MIB,
        gpu=gpu,
        fits=fits,
        changes=changes,
    )


def simulated(config: "RunConfig", bf16: bool) -> StepMemory:
    """Return the memory of a configuration's step on GPUs with or without bf16.

    Raises:
        ConfigError: as `estimate` does.
    """
    return simulate(step_spec(config, *_longest(config, row_lengths(config)), bf16))


def highest(memory: StepMemory, sharding: Sharding) -> tuple[str, Peak]:
    """Return the phase with the highest peak, and that peak with what libraries allocate."""
    phase, peak = max(sharding.per_process(memory).items(), key=lambda item: item[1].bytes)
    name, size = LIBRARIES
    parts = peak.parts.copy()
    parts[name] = size
    return phase, Peak(peak.bytes + size, parts)


def _longest(config: "RunConfig", lengths: RowLengths | str) -> tuple[int, bool]:
    """Return the tokens of the longest row of a batch, and whether others may be shorter."""
    # TRL cuts rows at max_length; packed rows are all that long.
    limit = config["max_length"]
    longest_row = shortest = None
    if isinstance(lengths, RowLengths) and not config["packing"]:
        longest_row, shortest = lengths.longest, lengths.shortest
    if limit is None and longest_row is None:
        why = lengths if isinstance(lengths, str) else "its longest row is not known"
        raise config.error("max_length", f"null, and the dataset says no more ({why}): give a max_length.")
    longest = min(n for n in (longest_row, limit) if n is not None)
    return longest, shortest is None or shortest < longest


def _tokens(config: "RunConfig", spec: StepSpec, lengths: RowLengths | str, sharding: Sharding) -> dict[str, Any]:
    """Return tokens_per_step, steps, total_tokens, cache_mib and unknown of an `Estimate`."""
    longest = spec.length * spec.rows // config["per_device_train_batch_size"]
    rows_a_step = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] * sharding.processes
    steps, unknown, cache = config["max_steps"] if config["max_steps"] > 0 else None, "", None
    if isinstance(lengths, str):
        unknown, tokens = lengths, float(rows_a_step * longest)
    else:
        epoch_tokens = lengths.rows * min(lengths.mean, longest)
        # Packed rows are full, but for the last.
        epoch_rows = math.ceil(epoch_tokens / longest) if config["packing"] else lengths.rows
        epoch_steps = math.ceil(epoch_rows / rows_a_step)
        # The last step of an epoch has the rows that are left, and so has the only one of a small dataset.
        tokens = epoch_tokens / epoch_steps
        steps = steps or math.ceil(epoch_steps * config["num_train_epochs"])
        if config.recipe == "distill" and config["teacher"] == "cache":
            assert spec.teacher_records is not None
            cache = (epoch_tokens * spec.teacher_records.token_bytes + spec.teacher_records.fixed_bytes) / MIB
    return {
        "tokens_per_step": round(tokens),
        "steps": steps,
        "total_tokens": None if steps is None else round(tokens * steps),
        "cache_mib": cache,
        "unknown": unknown,
    }


def _changes(config: "RunConfig", lengths: RowLengths | str, gpu: Gpu, peak_mib: float) -> tuple[Change, ...]:
    """Try each change by itself; if none is enough, add one after another until the run fits.

    A change that takes more by itself may help after others: smaller batches, if few gradients are left to keep.
    """
    tried = [c for c in (_changed(config, change, lengths, gpu) for change in _candidates(config)) if c is not None]
    less = tuple(change for change in tried if change.peak_mib < peak_mib)
    if any(change.fits for change in less):
        return less
    # Each change is cheap by itself; together they may be what fits.
    together: tuple[str, ...] = ()
    for change in tried:
        together += tuple(setting for setting in change.settings if setting not in together)
        combined = _changed(config, together, lengths, gpu) if together != change.settings else None
        if combined is not None and combined.fits:
            return *less, combined
    return less


def _candidates(config: "RunConfig") -> Sequence[tuple[str, ...]]:
    rows, accumulation = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    candidates: list[tuple[str, ...]] = []
    if not config["gradient_checkpointing"]:
        candidates += [("memory=lean",), CHANGES[0] if config["memory"] == FAST else (*CHANGES[0], "memory=fast")]
    if rows > 1:
        # Half of the rows, and as many steps of accumulation more: the batch stays as large.
        less = -(-rows // 2)
        more = math.ceil(rows * accumulation / less)
        candidates.append((f"per_device_train_batch_size={less}", f"gradient_accumulation_steps={more}"))
    if config["use_peft"]:
        candidates += [] if config["load_in_4bit"] else [(*CHANGES[3],), ("load_in_4bit=true",)]
    else:
        candidates += CHANGES[1:]
    if config.recipe == "distill" and config["teacher"] == "model":
        candidates += TEACHER_CHANGES
    return candidates


def _changed(config: "RunConfig", settings: tuple[str, ...], lengths: Any, gpu: Gpu) -> Change | None:
    """Simulate the changed settings; None if they are refused or change nothing."""
    try:
        changed = load_run_config(config.source, [*config.overrides, *settings])
        # The configuration has it already.
        if all(changed[key] == config[key] for key in (s.partition("=")[0] for s in settings)):
            return None
        memory = simulate(step_spec(changed, *_longest(changed, lengths), gpu.bf16))
    except ConfigError:
        return None
    peak = highest(memory, sharding_of(changed))[1].bytes / MIB
    return Change(settings, peak, peak <= gpu.usable_mib)
