"""One training step through the trainers by DeepSpeed, in one of two processes without a GPU; see splits.py."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import forget
from engines.non_finite_ranks import outcome
from engines.projector_training import trained_projectors
from processes import finish
from safetensors.torch import load_file
from splits import one_step
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig

import liger_trainer
from liger_trainer import LigerTrainer
from liger_trainer.trainers.finite_guard import FiniteGuard

FAMILIES = {f"tied {objective}": "llama_tied" for objective in ("ce", "kd", "self", "callback")}  # llama otherwise
RESUMED = (3, "tied ce", "resumed")
STEPS = [  # stage, objective, variant
    (2, "ce", ""), (2, "lora kd", ""), (2, "self", ""),
    (3, "tied ce", "evaluated"), (3, "tied ce", "named"), (3, "lora", ""), (3, "lora", "recomputed"),
    (3, "lora kd", ""), (3, "kd", "evaluated"), (3, "tied kd", "named"), (3, "tied self", ""),
    (3, "tied self", "recomputed"), (3, "hidden, one width", ""), (3, "stock flag", ""), (3, "cached", ""),
    (3, "weighted", ""), (3, "on_policy", ""), (3, "lora on_policy", ""), (3, "seq_kd", ""),
    (2, "callback", ""), (3, "callback", ""), (3, "tied callback", "evaluated"), (3, "callback", "recomputed"),
    (2, "ce", "offloaded"), (3, "lora kd", "offloaded"), (2, "hidden", ""), (3, "hidden", ""),
]  # fmt: skip
NON_FINITE = [  # stage, policy, where there is NaN
    (0, "skip_step", "loss"), (2, "skip_step", "loss"), (3, "skip_step", "loss"), (3, "stop", "loss"),
    (3, "stop", "weight"),
]  # fmt: skip
OPTIONS = {
    "": {},
    "evaluated": {"eval_on_start": True},
    "named": {"named": True},
    "recomputed": {"gradient_checkpointing": True},
    "offloaded": {},
}


def settings(stage: int, variant: str = "") -> dict:
    """DeepSpeed's, by which ZeRO-3 partitions every parameter, however small, and saves whole ones."""
    zero: dict = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if variant == "offloaded":
        zero |= {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")[: stage - 1]}
    return {
        "zero_optimization": {**zero, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip


@contextlib.contextmanager
def recorded() -> Iterator[dict]:
    """Record the gradients that DeepSpeed's optimizer gets in the last step, by name, the norm that we watch, and the
    stage."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_grad

    taken: dict = {"gradients": {}}
    step = DeepSpeedEngine.step

    def recording(engine, *args, **kwargs):
        trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        taken["gradients"] = {name: safe_get_full_grad(p).clone() for name, p in trained}
        taken["stage"] = engine.zero_optimization_stage()
        return step(engine, *args, **kwargs)

    def record_norm(guard, norm):
        taken["norm"] = float(norm)

    with (
        mock.patch.object(DeepSpeedEngine, "step", recording),
        mock.patch.object(FiniteGuard, "record_norm", record_norm),
    ):
        yield taken


def forget_all() -> None:
    """Let the next training arguments of this process choose engine and settings again."""
    forget()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def zero_step(stage: int, objective: str, variant: str) -> dict:
    forget_all()
    family, objective = FAMILIES.get(objective, "llama"), objective.removeprefix("tied ")
    with recorded() as taken:
        results = one_step(objective, 2, 2, family=family, deepspeed=settings(stage, variant), **OPTIONS[variant])
    return results | taken | {"gradients": results["gradients"] | taken["gradients"]}


def non_finite(stage: int, policy: str, place: str) -> dict:
    forget_all()
    return outcome(policy, "adamw_torch", place, deepspeed=settings(stage))


def projectors_of_zero3(output_dir: Path, resume: bool) -> dict:
    forget_all()
    return trained_projectors(output_dir, resume=resume, deepspeed=settings(3))


def preferred(stage: int) -> dict:
    """Train a step by ORPO, without and with `enable()`. Return both losses, the gradients, and what is said."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # warns that it may change

    answers = {"chosen": completions(8)["completion"], "rejected": completions(8, seed=9)["completion"]}
    rows = Dataset.from_dict({"prompt": completions(8)["prompt"], **answers})
    taken: dict = {"losses": [], "gradients": []}
    for switch in (liger_trainer.disable, liger_trainer.enable):
        forget_all()
        switch()
        with warnings.catch_warnings(record=True) as told, recorded() as of_step:
            warnings.simplefilter("always")
            args = train_args(ORPOConfig, max_steps=1, max_length=64, deepspeed=settings(stage))
            trainer = ORPOTrainer(tiny_model(), args, train_dataset=rows, processing_class=tiny_tokenizer())
            trainer.train()
        taken["losses"].append(next(log["loss"] for log in trainer.state.log_history if "loss" in log))
        taken["gradients"].append(of_step["gradients"])
    liger_trainer.disable()
    return taken | {"told": [str(w.message) for w in told if w.category is liger_trainer.MaterializedLogitsWarning]}


def resumed_steps(output_dir: Path) -> dict:
    """Train four steps by ZeRO-3, then the last two again from the checkpoint after the second. Return both."""
    losses, saved = [], []
    for checkpoint in (None, str(output_dir / "checkpoint-2")):
        forget_all()
        args = train_args(
            SFTConfig, output_dir=str(output_dir), max_steps=4, save_strategy="steps", save_steps=2,
            learning_rate=1e-2, deepspeed=settings(3),
        )  # fmt: skip
        common = {"train_dataset": completions(), "processing_class": tiny_tokenizer()}
        trainer = LigerTrainer(tiny_model("llama_tied"), args, **common)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(output_dir / "saved"))
        torch.distributed.barrier()
        losses.append({log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log})
        saved.append(load_file(output_dir / "saved" / "model.safetensors"))
    return {"losses": losses, "saved": saved}


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    os.environ.pop("ACCELERATE_USE_CPU")  # accelerate would take it for a wish to leave DeepSpeed out
    import deepspeed

    with mock.patch.dict(deepspeed.ops.__compatible_ops__, clear=True):  # compiles nothing
        steps: dict = {case: zero_step(*case) for case in STEPS}
        steps |= {case: non_finite(*case) for case in NON_FINITE}
        steps |= {("orpo", stage): preferred(stage) for stage in (2, 3)}
        steps[RESUMED] = resumed_steps(Path(sys.argv[2]))
        steps["projectors"] = [projectors_of_zero3(Path(sys.argv[2], "projectors"), again) for again in (False, True)]
    finish(steps, sys.argv[1])
