"""Turn a configuration into the step to simulate. Of the models, only configurations are read."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers import AutoConfig, LlamaConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.optimization import Adafactor
from trl import get_peft_config

from ...common.weights import adapter_at
from ...config.yaml_reader import Setting
from ...errors import ConfigError, LigerTrainerError
from ...losses.answers import RecordedAnswer
from ...losses.sparse_answer import SparseAnswer, TokenTargets
from ...losses.spec import LossOptions
from ...patching.patcher import PatchOptions
from ...plugins import DEMO, TASK
from ...run.launch import launcher_arguments
from ...teachers.cache.records import HiddenFormat, RecordFormat, TeacherHead
from ...teachers.cache.store import HiddenSettings, read_index
from ...trainers.options import AUTO, MEMORY, NEVER
from ..demo import CONFIG, demo_key
from ..rollouts.rollouts import SIZES
from ..students.drop_layers import kept_indices, thinned_config
from .memory_tracker import Peak
from .simulate import GATHERED as WHOLE
from .simulate import SAMPLING, ModelSpec, Rollout, StepMemory, StepSpec
from .stand_ins import MomentsOptimizer, expert_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...config.run_config import RunConfig

# What one of several processes holds: DDP's buckets, and its shares under ZeRO and FSDP.
WEIGHTS = ("student weights", "adapter weights", "teacher weights")
# Layers whose weights FSDP has whole at one time: one computes, the next is gathered; and as many layers' gradients:
# one's are summed up over the processes, the next one's are computed.
GATHERED = 2


@dataclass(frozen=True)
class Sharding:
    """The number of processes, the parts that they share, and whether gradients lie in DDP's buckets."""

    name: str = "one process"
    processes: int = 1
    shared: tuple[str, ...] = ()
    gathers: bool = False
    buckets: bool = False
    stays: bool = False  # the whole weights of layers in CUDA graphs stay in place, as FSDP2's can
    accumulates: bool = False  # micro-batches are added up before the processes' gradients are

    @property
    def records(self) -> bool:
        """Whether `auto` records layers in CUDA graphs: DeepSpeed moves weights, and so does FSDP1."""
        return self.processes == 1 or self.buckets or self.stays

    def per_process(self, memory: StepMemory) -> dict[str, Peak]:
        """Return the peaks of one process."""
        peaks = {phase: self.share(phase, peak, memory) for phase, peak in memory.peaks.items()}
        graphs = self.graphs_bytes(memory) if memory.always else None
        for peak in peaks.values() if graphs else ():
            peak.add("CUDA graphs", graphs or 0)
        return peaks

    def graphs_bytes(self, memory: StepMemory) -> int | None:
        """Return what graphs keep besides the highest peak of one process, None without graphs.

        Their memory stays through the whole step, sampling included; what is outside of it peaks separately. Under
        FSDP2 whole weights of the layers stay too where graphs are not ruled out, though a large batch is not recorded.
        """
        if not memory.pools_bytes and not (self.stays and memory.whole_bytes):
            return None
        highest = max(self.share(phase, peak, memory).bytes for phase, peak in memory.peaks.items())
        outside = self.outside_bytes(memory)
        if memory.sampling is not None:  # of all rows at once, which is what is done where this memory is free
            outside = max(outside, self.share(SAMPLING, memory.sampling, memory).bytes)
        return max(0, memory.pools_bytes + outside - highest)

    def outside_bytes(self, memory: StepMemory) -> int:
        """Return the highest peak of what one process has besides its graphs' memory, with weights that stay whole."""
        outside = max(self.share(phase, peak, memory).bytes for phase, peak in memory.outside.items())
        return outside + (memory.whole_bytes if self.stays else 0)

    def share(self, phase: str, peak: Peak, memory: StepMemory) -> Peak:
        parts = Counter({p: n // self.processes if p in self.shared else n for p, n in peak.parts.items()})
        if self.gathers and phase == SAMPLING:  # all weights, for all tokens
            parts["gathered weights"] = memory.weights_bytes
        elif self.gathers:
            parts += self._gathered(phase, memory)
        if self.gathers:  # a layer is gathered in the format that it computes in
            del parts["autocast copies"], parts[WHOLE]
        if self.buckets and phase != SAMPLING:  # gradients are views of them, and they stay through the whole step
            del parts["gradients"]
            parts["gradient buckets"] = memory.trained_bytes
        return Peak(parts.total(), parts)

    def _gathered(self, phase: str, memory: StepMemory) -> Counter[str]:
        """Return what a process has whole in a phase, besides its shares."""
        if phase == "optimizer":
            return Counter()
        layer = memory.teacher_layer_bytes if phase == "teacher" else memory.layer_bytes
        parts = Counter({"gathered layers": GATHERED * layer})
        # as the embedding, it is kept from the first layer's pass to its backward
        if phase == "loss" or (memory.tied and phase != "teacher"):
            parts["gathered head"] = memory.head_bytes
        if phase in ("loss", "teacher"):
            parts["gathered head"] += memory.teacher_head_bytes
        if phase == "backward":
            parts["gathered gradients"] = min(GATHERED * memory.layer_bytes, memory.computed_bytes)
        if self.accumulates:  # accelerate's no_sync: until the last micro-batch they are not shared out
            parts["gathered gradients"] = memory.computed_bytes
        return parts


def sharding_of(config: "RunConfig") -> Sharding:
    """Read num_processes, accelerate_config, fsdp and deepspeed.

    Raises:
        ConfigError: `accelerate_config` is neither a file nor one of TRL's, or a file cannot be read.
    """
    file = _accelerate_file(config)
    processes = config["num_processes"] or file.get("num_processes") or 1
    if config["deepspeed"]:
        setting = config["deepspeed"]
        engine = setting if isinstance(setting, dict) else _mapping(config, "deepspeed", setting)
        return _zero((engine.get("zero_optimization") or {}).get("stage", 0), processes)
    kind = str(file.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        return _zero(int((file.get("deepspeed_config") or {}).get("zero_stage", 0)), processes)
    # FSDP of one process gathers nothing.
    if kind == "FSDP" or config["fsdp"]:
        accumulates = processes > 1 and config["gradient_accumulation_steps"] > 1
        # accelerate leaves out packed weights: their numbers are no floats, which FSDP2 shards
        packed = config["load_in_4bit"] or config["load_in_8bit"]
        shared = (*(WEIGHTS[1:] if packed else WEIGHTS), "gradients", "optimizer state")
        units: dict[str, Any] = file.get("fsdp_config") or {}
        stays = processes > 1 and units.get("fsdp_version") == 2 and not units.get("fsdp_offload_params")
        return Sharding("FSDP", processes, shared, processes > 1, stays=stays, accumulates=accumulates)
    return Sharding("DDP", processes, buckets=True) if processes > 1 else Sharding()


def _zero(stage: int, processes: int) -> Sharding:
    # Stage 1 shares the first, stage 2 the first two, stage 3 all of them.
    shared = ("optimizer state", "gradients", *WEIGHTS)[: {0: 0, 1: 1, 2: 2}.get(stage, 5)]
    return Sharding(f"ZeRO-{stage}", processes, shared, gathers=stage == 3 and processes > 1)


def _accelerate_file(config: "RunConfig") -> dict[str, Any]:
    arguments = launcher_arguments(config)
    if "--config_file" not in arguments:
        return {}
    return _mapping(config, "accelerate_config", arguments[arguments.index("--config_file") + 1])


def _mapping(config: "RunConfig", key: str, path: str) -> dict[str, Any]:
    """Read a file of YAML, or of JSON, which is YAML too."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise config.error(key, f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise config.error(key, f"{path}: expected keys with values, got a {type(content).__name__}.")
    return content


# Measure the rows of a local or demo dataset in tokens.
MEASURED = 2000  # rows that are tokenized; of a larger dataset, every n-th


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the training rows, before they are cut at max_length."""

    rows: int  # number of rows
    mean: float  # mean, longest, shortest: tokens of a row. The last two are None if not every row was tokenized.
    longest: int | None = None
    shortest: int | None = None


def row_lengths(config: "RunConfig") -> RowLengths | str:
    """Measure the training rows, or say why that is not possible."""
    name = config["dataset_name"]
    if config["datasets"] or not (name.startswith((DEMO, TASK)) or Path(name).expanduser().exists()):
        return "the dataset is not local"
    from ...run.data.datasets import load_run_datasets
    from ...run.models import open_model

    try:
        data = load_run_datasets(config)
        if data.facts.form == "prompt" or config.values.get("lmbda") or config.values.get("seq_kd"):
            return "completions are sampled"
        if data.facts.images is not None:
            return "the rows have images, and neither their tokens nor the vision tower's activations are counted"
        tokenizer = open_model(config, "model_name_or_path").tokenizer
        rows = data.train.select(range(0, len(data.train), -(-len(data.train) // MEASURED)))
        lengths = [_tokens(row, data.facts.form, tokenizer, config["dataset_text_field"]) for row in rows]
    except LigerTrainerError as error:
        return str(error)
    # Rows that were not measured may be longer or shorter.
    ends = (max(lengths), min(lengths)) if len(lengths) == len(data.train) else ()
    return RowLengths(len(data.train), sum(lengths) / len(lengths), *ends)


def _tokens(row: Any, form: str, tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    if form == "input_ids":
        return len(row["input_ids"])
    if form == "text":
        return len(tokenizer(row[text])["input_ids"]) + 1  # the token that ends the text
    if form == "prompt" and isinstance(row["prompt"], str):
        return len(tokenizer(row["prompt"])["input_ids"])
    if form == "prompt-completion" and isinstance(row["prompt"], str):
        return len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1
    if form in ("prompt", "prompt-completion"):
        messages = row["prompt"] + row.get("completion", [])
    else:
        messages = row["messages"]
    from ...trainers.chat_template import fitting

    options: Any = {"add_generation_prompt": form == "prompt", **(row.get("chat_template_kwargs") or {})}
    rendered: Any = tokenizer.apply_chat_template(fitting(messages, tokenizer), return_dict=True, **options)
    return len(rendered["input_ids"])


CHUNK_BYTES = 4 * 2**27  # of the logits that a capture computes at a time; teachers/cache/reader.py
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# optimizers of bitsandbytes, by the number of moments that they keep of each weight
_MOMENTS = {
    2: "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit",
    3: "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit",
    1: "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit",
}


def _of_bitsandbytes(name: str, moments: int) -> Optimizer:
    bits = 8 if name.endswith("8bit") else 32
    return functools.partial(MomentsOptimizer, moments=moments, bits=bits, paged=name.startswith("paged"))


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw_torch_fused": functools.partial(torch.optim.AdamW, fused=True),
    "adafactor": functools.partial(Adafactor, lr=1e-3, scale_parameter=False, relative_step=False),
    "sgd": functools.partial(torch.optim.SGD, foreach=True),
    "adagrad": functools.partial(torch.optim.Adagrad, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, foreach=True),
    **{name: _of_bitsandbytes(name, count) for count, names in _MOMENTS.items() for name in names.split()},
}


def step_spec(config: "RunConfig", longest: int, padded: bool, bf16: bool) -> StepSpec:
    """Return the step of a configuration on a GPU with or without bf16.

    Args:
        longest: tokens of the longest row of a batch, or of its prompt where completions are sampled.
        padded: whether the others may be shorter.

    Raises:
        ConfigError: settings whose memory is not known, or that `training_args` refuses.
    """
    args = _training_args(config)
    _check_known(config, args)
    student = _student(config)
    distils = config.recipe == "distill"
    teacher, records = _teacher(config, args, student.config, bf16) if distils else (None, None)
    rollout = _rollout(config, args, longest) if distils and args.samples else None
    if rollout is not None:
        longest, padded = rollout.prompt + rollout.completion, True
    packed, graphs = config["packing"] or config["padding_free"], config["cuda_graphs"]
    rows, flash = config["per_device_train_batch_size"], "flash" in str(student.attention or "")
    # Rows that are cut anywhere ("wrapped") have no documents to tell apart.
    merged = packed and (config["packing_strategy"] != "wrapped" or config["padding_free"])
    by_lengths = merged and config["attention"] == AUTO and student.attention in (None, "sdpa", "eager")
    causal = config["attention"] == AUTO and student.attention in (None, "sdpa")  # padding is behind what is read
    autocast = _autocast(config, bf16)
    sharding, shares = sharding_of(config), None
    if sharding.name == "FSDP" and sharding.gathers and student.bits is None and autocast is not None:
        student, shares = replace(student, dtype=autocast), student.dtype
    return StepSpec(
        student=student,
        shares=shares,
        # documents that attention reads by their lengths take what as many rows without padding take
        rows=1 if merged and not by_lengths else rows,
        length=longest * rows if merged and not by_lengths else longest,
        masked=(merged if packed else padded and rows > 1 and not causal) and not flash and not by_lengths,
        by_lengths=by_lengths,
        own_attention=config["attention"] == AUTO and autocast in (torch.bfloat16, torch.float16),
        optimizer=OPTIMIZERS[args.optim],
        accumulation=config["gradient_accumulation_steps"],
        buckets=sharding.buckets,
        teacher=teacher,
        teacher_records=records,
        rollout=rollout,
        teaches_itself=distils and args.teacher == "self",
        quantises=args.qat is not None,
        cuda_graphs=NEVER if graphs == AUTO and not sharding.records else graphs,
        peft=get_peft_config(config.model_args()),
        patch=PatchOptions.of(config["liger_kernel_config"]),
        remake_every=MEMORY[config["memory"]],
        loss=LossOptions(
            label_smoothing=args.label_smoothing_factor,
            dft=args.loss_type == "dft",
            distillation=args.distillation() if distils else None,
        ),
        autocast=autocast,
        checkpointing=(args.gradient_checkpointing_kwargs or {}) if args.gradient_checkpointing else None,
        max_grad_norm=args.max_grad_norm,
        mtp_weight=args.mtp_loss_weight,
    )


def _rollout(config: "RunConfig", args: Any, prompt: int) -> Rollout:
    rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    rows = min(rows, args.generation_batch_size or rows, SIZES[-1])
    by_student = bool(args.lmbda or "lmbda" in (args.schedules or {})) and not args.use_vllm
    by_teacher = args.seq_kd and args.teacher == "model"
    return Rollout(rows, prompt, args.max_completion_length, by_student, by_teacher)


def _check_known(config: "RunConfig", args: Any) -> None:
    if args.optim not in OPTIMIZERS:
        raise config.error(
            "optim", f"estimate does not know its memory: {args.optim}. It knows {', '.join(OPTIMIZERS)}."
        )
    if config.recipe == "distill":
        unknown = [term.type for term in args.loss_plan().terms if term.family not in ("divergence", "ce")]
        if unknown:
            raise config.error("losses", f"estimate does not know the memory of {', '.join(unknown)}.")
    for key in ("activation_offloading", "torch_compile"):
        if config[key]:
            raise config.error(key, f"estimate does not know what it saves. Estimate without: {key}=false.")


def _training_args(config: "RunConfig") -> Any:
    """Return the trainer's arguments, without settings that need the GPU or the other processes of the run."""
    here = {
        "bf16": False, "fp16": False, "tf32": None, "deepspeed": None, "fsdp": None,
        "fsdp_config": None, "bf16_full_eval": False, "fp16_full_eval": False,
        "use_cpu": True,  # on a GPU, arguments make a context there, which a launcher would keep through the training
    }  # fmt: skip
    here = {key: value for key, value in here.items() if key in config.values}
    settings = {**config.settings, **{key: Setting(value, "estimate") for key, value in here.items()}}
    return replace(config, values={**config.values, **here}, settings=settings).training_args()


def _autocast(config: "RunConfig", bf16: bool) -> torch.dtype | None:
    if config["fp16"]:
        return torch.float16
    return torch.bfloat16 if (bf16 if config["bf16"] is None else config["bf16"]) else None


def read_config(config: "RunConfig", key: str, options: dict[str, Any]) -> PreTrainedConfig:
    """Read the configuration of the model that a key names. The demo model need not exist yet.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    name = config[key]
    if name.startswith(DEMO) and demo_key(name):
        return LlamaConfig(**CONFIG, dtype="float32")
    try:
        adapter = adapter_at(name, options.get("revision"))
        if adapter is not None and key == "model_name_or_path":
            raise config.error(key, f"{adapter}.")
        if adapter is not None:  # it will be merged into its base
            name, options = adapter.base, {**options, "revision": adapter.revision or "main"}
        return AutoConfig.from_pretrained(name, trust_remote_code=config["trust_remote_code"], **options)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise config.error(key, f"{name} has no configuration that transformers can read: {error}") from None


def _student(config: "RunConfig") -> ModelSpec:
    args, extra = config.model_args(), config.init_kwargs("model_init_kwargs")
    model = read_config(config, "model_name_or_path", {"revision": config["model_revision"] or "main"})
    if config.drops_layers():
        count = model.get_text_config(decoder=True).num_hidden_layers
        model = thinned_config(model, kept_indices(count, config["keep_every_nth_layer"], config["keep_layers"]))
    # model_init_kwargs may ask for it too, as in transformers.
    bits = 4 if args.load_in_4bit else 8 if args.load_in_8bit else _bits(extra.get("quantization_config") or {})
    attention = extra.get("attn_implementation", args.attn_implementation)
    packs = config["use_peft"] and sharding_of(config).name in ("DDP", Sharding().name)
    experts = expert_bytes(model, bits) if packs else None
    return ModelSpec(model, _dtype(extra.get("dtype", args.dtype), model), attention, bits, experts)


def _teacher(config: "RunConfig", args: Any, student: PreTrainedConfig, bf16: bool) -> tuple[ModelSpec | None, Any]:
    """Return (the teacher's model, None), or (None, the format of its cache)."""
    if args.teacher == "cache":
        return None, cache_format(config, student, bf16)
    if args.teacher == "self":
        return None, None
    if args.teacher != "model":
        raise config.error("teacher", f"estimate knows model, cache and self, got {args.teacher!r}.")
    for key in ("teachers", "teacher_device", "teacher_offload"):
        if config[key]:
            raise config.error(key, "estimate knows one teacher, on the student's GPU. Estimate without it.")
    return _teacher_model(config, bf16), None


def _teacher_model(config: "RunConfig", bf16: bool) -> ModelSpec:
    extra = config.init_kwargs("teacher_model_init_kwargs")
    model = read_config(config, "teacher_model_name_or_path", {"revision": config["teacher_model_revision"] or "main"})
    named = extra.get("dtype", config["teacher_dtype"])
    dtype = _dtype(named, model) if named is not None else _autocast(config, bf16) or torch.float32
    bits = 4 if config["teacher_load_in_4bit"] else 8 if config["teacher_load_in_8bit"] else None
    packed = bits or _bits({**extra, **(extra.get("quantization_config") or {})})
    return ModelSpec(model, dtype, extra.get("attn_implementation"), packed)


def capture_spec(config: "RunConfig", step: StepSpec, bf16: bool) -> tuple[StepSpec, int] | None:
    """Return what `liger-trainer cache` reads of a step's rows at a time, and the bytes of the logits that it holds;
    None without a cache, or if its teacher is not named.

    Args:
        step: of the training from the cache.
    """
    if step.teacher_records is None or not config["teacher_model_name_or_path"]:
        return None
    teacher = _teacher_model(config, bf16)
    reading = replace(step, teacher=teacher, rows=config["per_device_eval_batch_size"])
    return reading, step.teacher_records.capture_bytes(reading.rows * reading.length)


def _bits(options: dict[str, Any]) -> int | None:
    return 4 if options.get("load_in_4bit") else 8 if options.get("load_in_8bit") else None


def _dtype(name: Any, config: PreTrainedConfig) -> torch.dtype:
    if name in (None, "auto"):
        name = config.dtype or torch.float32
    return getattr(torch, name) if isinstance(name, str) else name


@dataclass(frozen=True)
class TokenCache:
    """What a cache of tokens takes.

    Attributes:
        token_bytes: of one token on disk.
        fixed_bytes: on disk, however many tokens there are.
    """

    record: RecordFormat
    fixed_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        return self.record.bytes

    def capture_bytes(self, tokens: int) -> int:
        """Return the bytes of a chunk of logits of a batch in fp32 and of the arrays made of it; drawing takes one
        more."""
        return min(CHUNK_BYTES, 4 * tokens * self.record.vocab_size) * (5 if self.record.draws else 4)

    def resident(self) -> list[torch.Tensor]:
        """Return what lies in memory as long as training lasts, without data."""
        return []

    def records(self, rows: int, length: int, resident: list[torch.Tensor]) -> SparseAnswer:
        """Return the decoded records of a batch, without data."""
        ids = torch.empty(rows, length, self.record.entries + self.record.tail_draws, dtype=torch.int32)
        values = (torch.empty(rows, length) for _ in range(3))
        targets = TokenTargets(ids, torch.empty(ids.shape), ids[..., 0], *values)
        return SparseAnswer(targets, self.record.tail, self.record.vocab_size)


@dataclass(frozen=True)
class HiddenCache:
    """What a cache of hidden states takes; the attributes are those of `TokenCache`."""

    record: HiddenFormat
    vocab_size: int

    @property
    def token_bytes(self) -> int:
        return self.record.bytes

    @property
    def fixed_bytes(self) -> int:
        return self.vocab_size * self.record.bytes

    def capture_bytes(self, tokens: int) -> int:
        """Return 0: no logits are computed."""
        return 0

    def resident(self) -> list[torch.Tensor]:
        """Return the head, without data. A bias is too small to count."""
        return [torch.empty(self.vocab_size, self.record.width, dtype=self.record.torch_dtype)]

    def records(self, rows: int, length: int, resident: list[torch.Tensor]) -> RecordedAnswer:
        """Return the hidden states of a batch, with the head resident, without data."""
        hidden = torch.empty(rows, length, self.record.width, dtype=self.record.torch_dtype)
        return RecordedAnswer(TeacherHead(*resident, bias=None).logits(hidden))


def cache_format(config: "RunConfig", student: PreTrainedConfig, bf16: bool) -> TokenCache | HiddenCache:
    """Return what the cache takes that `liger-trainer cache` would write, with the vocabulary of the model.

    Raises:
        ConfigError: the width of hidden states is not known: no teacher is named, and nothing is captured yet.
    """
    vocabulary = student.get_text_config(decoder=True).vocab_size
    if config["cache_kind"] == "hidden":
        return HiddenCache(_hidden_format(config, bf16), vocabulary)
    kind, entries, draws, bits = (config[f"cache_{name}"] for name in ("kind", "entries", "tail_draws", "bits"))
    return TokenCache(RecordFormat.of(kind, entries, draws, bits, vocabulary))


def _hidden_format(config: "RunConfig", bf16: bool) -> HiddenFormat:
    if config["teacher_model_name_or_path"]:
        teacher = _teacher_model(config, bf16)
        name: Any = str(_autocast(config, bf16) or teacher.dtype).removeprefix("torch.")
        return HiddenFormat(teacher.config.get_text_config(decoder=True).hidden_size, name)
    try:
        settings = read_index(Path(config["teacher_cache_dir"]).expanduser()).settings
    except LigerTrainerError as error:
        raise config.error("teacher_model_name_or_path", f"missing, and no cache tells the width: {error}") from None
    if not isinstance(settings, HiddenSettings):
        raise config.error("cache_kind", f"hidden, but the cache that is there is of {settings.kind}.")
    return settings.format
