"""Who trains in `benchmarks.trainer_step`, and how each one's trainer is made: with everything else equal.

To measure another library, add a `Provider` to PROVIDERS and a function to TRAINERS that makes its trainer.
Liger-Kernel is switched on by `use_liger_kernel=True`, which transformers still serves: it patches the model's layers
when training starts, and TRL keeps its own fused head. A teacher has no such switch: its layers are patched here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from typing import Any

import torch

from .shapes import random_model
from .trainer_cases import END, ON_POLICY, PAD, REFERENCE, Case, length_of, make_tokenizer, text_of

NEVER = 10**6  # steps
STUDENT, TEACHER = 0, 1  # seeds of their weights


def unsloth_site() -> list[str]:
    """Return the folder that UNSLOTH_SITE names: of packages for Unsloth's process, which pins older ones than ours."""
    return [path for path in [os.environ.get("UNSLOTH_SITE")] if path]


@dataclass(frozen=True)
class Provider:
    """A trainer and what it is given.

    Attributes:
        name: on the command line; ours begin with "ours".
        trainer: a key of TRAINERS.
        options: of the trainer's configuration, besides what all share.
        needs: modules that must be installed, with the name of their package.
        enables: whether `liger_trainer.enable()` is called first.
    """

    name: str
    title: str
    trainer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    enables: bool = False

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def uses_liger(self) -> bool:
        return bool(self.options.get("use_liger_kernel")) and not self.enables

    @property
    def compiles(self) -> bool:
        """Whether it compiles the model, which takes minutes and processes of its own. Unsloth always does."""
        return self.trainer == "unsloth" or bool(self.options.get("torch_compile"))

    def missing(self, case: Case) -> str | None:
        """Return what is not installed."""
        bnb = case.four_bit or ("bnb" in self.options.get("optim", case.optim) and not self.is_ours)
        needs = {**self.needs, **({"bitsandbytes": "bitsandbytes"} if bnb else {})}
        path = [*unsloth_site(), *sys.path] if self.trainer == "unsloth" else sys.path
        packages = [package for module, package in needs.items() if PathFinder.find_spec(module, path) is None]
        return f"{', '.join(packages)}: not installed" if packages else None


LIGER: dict[str, Any] = {"options": {"use_liger_kernel": True}, "needs": {"liger_kernel": "liger-kernel"}}
COMPILED: dict[str, Any] = {"options": {"torch_compile": True}}
PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "SFT": (
        Provider(REFERENCE, "TRL SFTTrainer", "sft"),
        Provider("trl_liger", "TRL SFTTrainer + Liger-Kernel", "sft", **LIGER),
        Provider("trl_compiled", "TRL SFTTrainer + torch_compile", "sft", **COMPILED),
        Provider("unsloth", "Unsloth", "unsloth", needs={"unsloth": "unsloth"}),
        Provider("ours", "LigerTrainer", "ours"),
    ),
    "KD": (
        Provider(REFERENCE, "TRL DistillationTrainer", "distillation"),
        Provider("trl_liger", "TRL DistillationTrainer + Liger-Kernel", "distillation", **LIGER),
        Provider("ours", "LigerDistillTrainer", "ours"),
    ),
    ON_POLICY: (
        Provider(REFERENCE, "TRL DistillationTrainer", "distillation"),
        Provider("ours", "LigerDistillTrainer", "ours"),
    ),
    **{
        method: (
            Provider(REFERENCE, f"TRL {method}Trainer", trainer),
            Provider("ours", f"TRL {method}Trainer, enable()", trainer, enables=True),
            Provider(
                "ours_layers", f"TRL {method}Trainer, enable(), our layers", trainer, {"use_liger_kernel": True},
                enables=True,
            ),
        )
        for method, trainer in (("DPO", "dpo"), ("GRPO", "grpo"))
    },
}  # fmt: skip


def variant(options: Mapping[str, Any], of: str = "ours") -> dict[str, Provider]:
    """Return a provider, ours unless another is named, with further options, by kind of training that it does."""
    name = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    )
    return {
        kind: replace(p, name=f"{of}:{name}", title=f"{p.title}, {name}", options={**p.options, **options})
        for kind, providers in PROVIDERS.items()
        for p in providers
        if p.name == of
    }


@dataclass(frozen=True)
class Run:
    """What a trainer is made of.

    Attributes:
        options: of its configuration.
        inputs: rows, tokenizer and adapters, by the names of a trainer's arguments.
        folder: for what it writes.
    """

    case: Case
    provider: Provider
    tiny: bool
    device: str
    folder: str
    options: dict[str, Any]
    inputs: dict[str, Any]

    def student(self) -> Any:
        model = self.random()
        if self.case.fp32 and self.case.lora_dropout is None:
            model.float()
        return self._quantised(model) if self.case.four_bit else model

    def teacher(self) -> Any:
        teacher = self.random(self.case.teacher, TEACHER).requires_grad_(False).eval()
        if self.provider.uses_liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=teacher)
        return teacher

    def random(self, shape: str | None = None, seed: int = STUDENT) -> Any:
        """Return a model with random weights, on the device: of the student's shape, unless another is given."""
        options = self.case.model_options(self.tiny, teacher=seed == TEACHER)
        if self.provider.trainer != "unsloth":  # which brings its own way round
            register_refused_step()
        model = random_model(shape or self.case.shape, self.tiny, self.device, seed, **options)
        return model.float() if self.tiny else model

    def saved(self, model: Any) -> str:
        """Write a model for those that only read one from files."""
        path = f"{self.folder}/model"
        model.save_pretrained(path)
        self.inputs["processing_class"].save_pretrained(path)
        return path

    def _quantised(self, model: Any) -> Any:
        """Return it in 4 bits, quantised from the tensors as they are: 16 GB of files would take half a minute."""
        from transformers import BitsAndBytesConfig

        how: Any = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=model.dtype,
            bnb_4bit_use_double_quant=True,
        )  # fmt: skip
        where = {"device_map": {"": self.device}, "dtype": model.dtype, "attn_implementation": "sdpa"}
        given = {"config": model.config, "state_dict": model.state_dict(), "quantization_config": how}
        return type(model).from_pretrained(None, **given, **where).train()


def register_refused_step() -> None:
    """Have fla-core, where it is installed and refuses one step of a delta rule's backward, run ours in its place.

    On Hopper with Triton before 3.7.1 no trainer could train a hybrid by fla-core otherwise.
    """
    if PathFinder.find_spec("fla") is not None:
        from liger_trainer.patching.packing.token_mixers import refused

        refused()


def prepare(
    case: Case, provider: Provider, tiny: bool, device: str, folder: str, rows: list[list[int]], steps: int
) -> Run:
    """Return the `Run` of a provider in a case."""
    from datasets import Dataset

    inputs: dict[str, Any] = {
        "train_dataset": Dataset.from_dict({"input_ids": rows}),
        "processing_class": make_tokenizer(case.config(tiny).vocab_size),
    }
    if case.lora_dropout is not None and provider.trainer != "unsloth":
        from peft import LoraConfig

        inputs["peft_config"] = LoraConfig(**lora_options(case), **_targets(case), task_type="CAUSAL_LM")
    options = {
        "output_dir": folder, "per_device_train_batch_size": case.rows, "max_steps": steps, "bf16": not tiny,
        "use_cpu": device == "cpu", "learning_rate": case.learning_rate(tiny), **case.schedule,
        "optim": case.optim, "gradient_checkpointing": case.checkpointing, "report_to": [],
        "gradient_accumulation_steps": 1,  # Unsloth's own default is 2
        "save_strategy": "no", "logging_steps": NEVER, "disable_tqdm": True, "seed": 7, "data_seed": 7,
        **provider.options,
    }  # fmt: skip
    return Run(case, provider, tiny, device, folder, options, inputs)


def lora_options(case: Case) -> dict[str, Any]:
    return {"r": 16, "lora_alpha": 32, "lora_dropout": case.lora_dropout}


def _targets(case: Case) -> dict[str, Any]:
    """Return which weights get adapters: all linear layers, and experts where there are to be some."""
    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if case.experts:  # by name, or PEFT alone would give the router one, and gate and up twice the rank
        targets["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    return targets


def _rows_options(run: Run) -> dict[str, Any]:
    """Options of SFTConfig and what is made of it. Packs come sorted by the length of their first row: shuffle them."""
    packed = run.case.layout == "packed"
    order = "random" if packed else "sequential"
    return {"packing": packed, "max_length": length_of(run.case, run.tiny), "train_sampling_strategy": order}


def make_sft(run: Run) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(run.student(), args=SFTConfig(**run.options, **_rows_options(run)), **run.inputs)


def make_ours(run: Run) -> Any:
    from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer
    from liger_trainer.trainers.config import LigerConfig

    options = {**run.options, **_rows_options(run)}
    if run.case.teacher is None:
        return LigerTrainer(run.student(), args=LigerConfig(**options), **run.inputs)
    sampling: dict[str, Any] = {}
    if run.case.method == ON_POLICY:
        run, sampling = _with_prompts(run), {"lmbda": 1.0, "max_completion_length": _completion_length(run)}
    args = LigerDistillConfig(**options, **sampling, losses=[{"type": "forward_kl"}])
    return LigerDistillTrainer(run.student(), teacher_model=run.teacher(), args=args, **run.inputs)


def make_distillation(run: Run) -> Any:
    """TRL's DistillationTrainer with its fused loss, where the rows stand in for completions that it would sample.

    The first token of a row is its prompt.
    """
    from trl import DistillationConfig, DistillationTrainer

    if run.case.method == ON_POLICY:
        run = _with_prompts(run)
        most = _completion_length(run)
        args = DistillationConfig(**run.options, beta=0.0, max_completion_length=most, shuffle_dataset=False)
        return DistillationTrainer(run.student(), teacher_model=run.teacher(), args=args, **run.inputs)

    class OnRows(DistillationTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            ids = torch.tensor([row["input_ids"] for row in inputs], device=self.accelerator.device)
            mask = torch.ones_like(ids)
            return {
                "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1],
                "completion_ids": ids[:, 1:], "completion_mask": mask[:, 1:],
                "num_items_in_batch": self.accelerator.gather(mask[:, 1:].sum()).sum(),
            }  # fmt: skip

    if run.case.layout != "full":
        raise ValueError(f"DistillationTrainer takes rows of one length here; the case is {run.case.layout}.")
    length = length_of(run.case, run.tiny)
    args = DistillationConfig(**run.options, beta=0.0, max_completion_length=length - 1, shuffle_dataset=False)
    rows = run.inputs["train_dataset"]
    inputs = {**run.inputs, "train_dataset": rows.add_column("prompt", ["w2"] * len(rows))}
    return OnRows(run.student(), teacher_model=run.teacher(), args=args, **inputs)


def _completion_length(run: Run) -> int:
    return length_of(run.case, run.tiny) - length_of(run.case, run.tiny) // 3


def _with_prompts(run: Run) -> Run:
    """Return a run on prompts, the first thirds of its rows. Of random weights hardly a completion ends early."""
    from datasets import Dataset

    prompt = length_of(run.case, run.tiny) // 3
    prompts = [text_of(row[:prompt]) for row in run.inputs["train_dataset"]["input_ids"]]
    return replace(run, inputs={**run.inputs, "train_dataset": Dataset.from_dict({"prompt": prompts})})


def make_dpo(run: Run) -> Any:
    """Pairs that share their first quarter; the rejected answer is the chosen one backwards."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    prompt = length_of(run.case, run.tiny) // 4
    rows = [(row[:prompt], row[prompt:]) for row in run.inputs["train_dataset"]["input_ids"]]
    data = {
        "prompt": [text_of(prompt) for prompt, _ in rows],
        "chosen": [f" {text_of(answer)}" for _, answer in rows],
        "rejected": [f" {text_of(answer[::-1])}" for _, answer in rows],
    }
    inputs = {**run.inputs, "train_dataset": Dataset.from_dict(data)}
    reference = None if "peft_config" in inputs else run.random(seed=TEACHER).eval()
    args = DPOConfig(**run.options, max_length=None)
    return DPOTrainer(run.student(), ref_model=reference, args=args, **inputs)


def make_grpo(run: Run) -> Any:
    """Prompts of a fifth of a row, and completions of the rest, which are sampled once, before the first step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    length = length_of(run.case, run.tiny)
    prompt = length // 5
    prompts = [text_of(row[:prompt]) for row in run.inputs["train_dataset"]["input_ids"]]
    args = GRPOConfig(
        **run.options, num_generations=8, steps_per_generation=run.options["max_steps"], shuffle_dataset=False,
        max_completion_length=length - prompt, generation_kwargs={"min_new_tokens": length - prompt}, temperature=0.9,
        beta=0.0,
    )  # fmt: skip
    model = run.student()
    model.generation_config.update(pad_token_id=PAD, eos_token_id=END)
    inputs = {**run.inputs, "train_dataset": Dataset.from_dict({"prompt": prompts})}
    return GRPOTrainer(model, reward_funcs=reward, args=args, **inputs)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [float(sum(ids) % 97) for ids in completion_ids]


def make_unsloth(run: Run) -> Any:
    """TRL's SFTTrainer as Unsloth changes it, which wants to be imported first."""
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]

    case, length = run.case, length_of(run.case, run.tiny)
    checkpointing: dict[str, Any] = {"use_gradient_checkpointing": case.checkpointing}  # it is on by default
    model, _ = FastLanguageModel.from_pretrained(
        run.saved(run.random()), max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=case.four_bit,
        full_finetuning=case.lora_dropout is None, float32_mixed_precision=case.fp32, **checkpointing,
    )  # fmt: skip
    if case.lora_dropout is not None:
        targets = _targets(case) if case.experts else {"target_modules": _linear_layers(model)}
        model = FastLanguageModel.get_peft_model(model, **lora_options(case), **targets, **checkpointing)
    return SFTTrainer(model, args=SFTConfig(**run.options, **_rows_options(run)), **run.inputs)


def _linear_layers(model: torch.nn.Module) -> list[str]:
    """Return what "all-linear" means to PEFT: to Unsloth it means other layers in some models."""
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return sorted(names - {"lm_head"})


def draw_adapters(model: torch.nn.Module) -> None:
    """Draw the A of all adapters, the same for every provider: Unsloth draws its own, at another time."""
    generator = torch.Generator().manual_seed(STUDENT)
    for name, a in sorted(model.named_parameters()):
        if ".lora_A." in name:
            a.data.copy_(torch.rand(a.shape, generator=generator).sub_(0.5).mul_(2 / a.shape[-1] ** 0.5))


TRAINERS: dict[str, Callable[[Run], Any]] = {
    "sft": make_sft, "ours": make_ours, "distillation": make_distillation, "dpo": make_dpo,
    "grpo": make_grpo, "unsloth": make_unsloth,
}  # fmt: skip
