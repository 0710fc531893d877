"""Rows that processes share, each with a slice, by DeepSpeed's Ulysses: the step of one process on whole rows.

Run as a script, it is one of the processes, without a GPU.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import forget as forget_engine
from engines.fsdp2_on_cpu import fsdp2
from peft import PromptTuningConfig, get_peft_model
from processes import finish, outcome_of
from splits import NOT_COMPARED, OBJECTIVES, ROWS, capture_gradients, student_of
from tiny import assert_same_gradients, tiny_model, tiny_tokenizer, train_args
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTConfig, SFTTrainer

import liger_trainer
from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.divergence_kinds import KINDS


def deepspeed_of(stage: int, **changes) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes}
    return {
        "zero_optimization": zero, "zero_allow_untested_optimizer": True, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip


LOSSES = {
    **OBJECTIVES,
    "windows": [{"type": "jsd"}],
    "all": [{"type": kind, "weight": 0.2 * i + 0.4} for i, kind in enumerate([*KINDS, "ce"])],
}
STEPS = [  # stage of ZeRO, objective, variant
    (2, "ce", "packed"), (2, "all", "packed"), (2, "ce", ""), (2, "all", ""), (2, "mix", "launched"),
    (2, "kd", "padded"), (2, "lora", "recomputed"), (2, "weighted", ""),
    (2, "stock flag", "one batch"), (2, "stock flag", "one padded batch"),
    (3, "ce", "packed"), (3, "all", ""), (3, "lora", "recomputed"), (3, "stock flag", "one batch"),
]  # fmt: skip
OF_FOUR = [(2, "ce", ""), (2, "all", ""), (3, "all", "")]  # of which two share each row
REFUSED = {  # objective, options; what the message says
    "packed": ("ce", {"packing": True, "max_length": 40}, "Set per_device_train_batch_size to 1"),
    "packed, model's attention": (
        "ce", {"packing": True, "per_device_train_batch_size": 1, "attention": "model"}, "see one another",
    ),
    "no multiple": ("ce", {"pad_to_multiple_of": None}, "Set pad_to_multiple_of to a multiple of 2"),
    "other collator": ("collator", {}, "padded on the right by TRL's own collator"),
    "counted apart": ("ce", {"average_tokens_across_devices": False}, "average_tokens_across_devices"),
    "prompt learning": ("prompts", {}, "in front of each slice"),
    "auxiliary loss": ("experts", {}, "Set router_aux_loss_coef to 0"),
    "eager": ("eager", {}, "its attention is eager"),
    "teacher with windows": ("windows", {}, "teacher: the windows of its attention"),
    "self": ("self", {"teacher": "self"}, "knows one teacher"),
    "hidden states": ("hidden, one width", {}, "Hidden-state losses"),
    "sampled": ("on_policy", {"lmbda": 0.5}, "samples no completions"),
    "no reduce_scatter": ("ce", {"deepspeed": deepspeed_of(3, reduce_scatter=False)}, "Leave reduce_scatter at true"),
}  # fmt: skip
LENGTH = 20  # longer than any row: gloo gathers only equal lengths
VARIANTS: dict[str, dict] = {
    "": {},
    "launched": {},
    "recomputed": {"gradient_checkpointing": True},
    "padded": {"pad_to_multiple_of": 2 * LENGTH},  # the second slices are nothing but padding
    "packed": {"packing": True, "max_length": 60, "pad_to_multiple_of": 60, "per_device_train_batch_size": 1},
    "one batch": {"gradient_accumulation_steps": 1},
    "one padded batch": {"pad_to_multiple_of": 2 * LENGTH, "gradient_accumulation_steps": 1},
}
LAUNCHED = {  # what accelerate's launcher makes of a file
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
}  # fmt: skip


def sequence_step(objective: str, variant: str = "", ranks: int = 1, **engine) -> dict:
    """Train a step on the eight rows and evaluate them.

    Args:
        ranks: that train together; each loads its share of the rows.
        engine: of TrainingArguments.
    """
    options = {
        "per_device_train_batch_size": min(8 // ranks, 4), "gradient_accumulation_steps": 2, "max_steps": 1,
        "optim": "sgd", "learning_rate": 0.0, "pad_to_multiple_of": LENGTH, **VARIANTS[variant], **engine,
    }  # fmt: skip
    trainer = trainer_of(objective, options)
    gradients = capture_gradients(trainer) if ranks == 1 else {}
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    metrics = {} if objective == "stock flag" else trainer.evaluate(trainer.train_dataset)
    liger_trainer.disable()
    return {
        "gradients": gradients, "loss": log["loss"],
        "logs": {name: value for name, value in log.items() if name not in NOT_COMPARED},
        "metrics": {name: value for name, value in metrics.items() if not name.endswith(("second", "time"))},
    }  # fmt: skip


def refusal(objective: str, options: dict) -> str:
    try:
        trainer_of(objective, {"pad_to_multiple_of": LENGTH, **options})
    except ConfigError as error:
        return str(error)
    return ""


def trainer_of(objective: str, options: dict):
    losses, rows = LOSSES.get(objective), ROWS
    if objective == "weighted":
        rows, options["weight_column"] = [{**row, "weight": 1.001 * i} for i, row in enumerate(ROWS)], "weight"
    common = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    student = student_of(objective, "mixtral" if objective == "experts" else "llama")
    if objective == "eager":
        student.set_attn_implementation("eager")
    if objective == "prompts":
        student = get_peft_model(student, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    if objective == "collator":
        common["data_collator"] = lambda rows: rows
    if objective == "stock flag":
        liger_trainer.enable()
        return SFTTrainer(student, args=train_args(SFTConfig, use_liger_kernel=True, **options), **common)
    if losses is None:
        return LigerTrainer(student, args=train_args(LigerConfig, **options), **common)
    # with other heads than the student, which DeepSpeed prepares
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1}
    teacher = None if objective == "self" else tiny_model("qwen3", seed=5, **heads)
    if objective == "windows":
        teacher = tiny_model("gemma3", seed=5)
    args = train_args(LigerDistillConfig, losses=losses, beta=0.4, temperature=2.0, **options)
    return LigerDistillTrainer(student, teacher_model=teacher, args=args, **common)


def engine_of(ranks: int, stage: int, *names: str) -> dict:
    """Return the arguments about the engine, or those of these names."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    engine = {
        "parallelism_config": ParallelismConfig(dp_replicate_size=ranks // 2, sp_size=2, sp_handler=handler),
        "deepspeed": deepspeed_of(stage),
    }
    return {name: engine[name] for name in names or engine}


@contextlib.contextmanager
def recorded() -> Iterator[dict]:
    """Record the gradients that DeepSpeed's optimizer gets in the last step, by name."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_grad

    gradients, step = {}, DeepSpeedEngine.step

    def recording(engine, *args, **kwargs):
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradients[name] = safe_get_full_grad(parameter).clone()
        return step(engine, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "step", recording):
        yield gradients


def forget() -> None:
    """Let DeepSpeed begin again, which knows one training of slices a process."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    forget_engine()
    unset_hf_deepspeed_config()
    state._release_sequence_parallel_groups()
    groups.mpu = None
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def by_deepspeed(steps: list[tuple], refused: dict[str, tuple]) -> dict:
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    os.environ.pop("ACCELERATE_USE_CPU", None)  # accelerate would take it for a wish to leave DeepSpeed out
    import deepspeed

    taken = {}
    with mock.patch.dict(deepspeed.ops.__compatible_ops__, clear=True):  # compiles nothing
        deepspeed.init_distributed(dist_backend="gloo")  # as accelerate does on a GPU
        ranks = torch.distributed.get_world_size()
        for stage, *case in steps:
            forget()
            launched = case[1] == "launched"
            with recorded() as gradients, mock.patch.dict(os.environ, LAUNCHED if launched else {}):
                engine = engine_of(ranks, stage, *(("deepspeed",) if launched else ()))
                taken[stage, *case] = sequence_step(*case, ranks=ranks, **engine) | {"gradients": gradients}
        for name, (objective, options, _) in refused.items():
            forget()
            taken[name] = refusal(objective, engine_of(ranks, 2) | options)
    return taken


def without_deepspeed() -> dict:
    from accelerate.utils import ParallelismConfig

    taken = {}
    for objective, sizes in [
        ("ce", {"cp_size": 2}),
        ("kd", {"cp_size": 2}),
        ("ce", {"sp_size": 2, "dp_shard_size": 2}),
    ]:
        with fsdp2():
            taken[objective, *sizes] = refusal(objective, {"parallelism_config": ParallelismConfig(**sizes)})
    return taken


BY_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed, which runs without a GPU: pip install it"
)

of_one_process = functools.cache(sequence_step)


@functools.cache
def taken(part, ranks=2):
    """What processes did of one part of the cases."""
    return outcome_of(ranks, "../engines/test_sequence_parallel.py", part)


def assert_same(got, want, scale=1.0):
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["metrics"] == pytest.approx(want["metrics"], rel=1e-5)
    assert_same_gradients({name: gradient / scale for name, gradient in got["gradients"].items()}, want["gradients"])


@BY_DEEPSPEED
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_slices_make_the_step_of_whole_rows(case):
    """Loss, gradients, metrics and evaluation. transformers' own loss has the gradients of both ranks, added up, where
    ZeRO-3 does not average them."""
    got, want = taken("two")[case], of_one_process(*case[1:])
    assert_same(got, want, scale=2.0 if case[:2] == (2, "stock flag") else 1.0)
    assert got["logs"] == pytest.approx(want["logs"], rel=1e-5)


@BY_DEEPSPEED
@pytest.mark.slow  # four processes
@pytest.mark.parametrize("case", OF_FOUR, ids=str)
def test_two_pairs_of_ranks_share_the_rows_out(case):
    assert_same(taken("four", 4)[case], of_one_process(*case[1:]))


@BY_DEEPSPEED
@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_would_compute_otherwise_is_refused(name):
    words = REFUSED[name][2]
    assert words in taken("two")[name]


@pytest.mark.parametrize("case, words", [
    (("ce", "cp_size"), "cp_size > 1) is not supported"), (("kd", "cp_size"), "cp_size > 1) is not supported"),
    (("ce", "sp_size", "dp_shard_size"), "only DeepSpeed cuts rows into slices"),
])  # fmt: skip
def test_other_engines_are_refused(case, words):
    assert words in taken("without")[case]


if __name__ == "__main__":
    file, what = sys.argv[1:]
    if what == "without":
        taken = without_deepspeed()
    else:
        taken = by_deepspeed(*{"two": (STEPS, REFUSED), "four": (OF_FOUR, {})}[what])
    finish(taken, file)
