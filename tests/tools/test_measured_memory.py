"""`estimate` next to what the benchmark of training steps measured on a GPU. Two rows always, all with `-m slow`.

Layers in CUDA graphs do not show in `max_memory_allocated`: their pools are free while they are replayed. So what is
compared is what the process held, `max_memory_reserved`, with what the graphs keep.
"""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.trainer_cases import CASES, length_of
from benchmarks.trainer_providers import lora_options
from liger_trainer.config.run_config import check_text
from liger_trainer.tools.estimate.estimator import MIB, highest
from liger_trainer.tools.estimate.simulate import simulate
from liger_trainer.tools.estimate.step_spec import Sharding, step_spec

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "trainer-step-nvidia-h100-80gb-hbm3.json"
NAMES = (
    "sft-qwen3-0.6b", "lora-qwen3-0.6b", "kd-qwen3-0.6b", "sft-llama-3.2-1b", "sft-qwen3-1.7b", "sft-gemma-3-1b",
    "lora-llama-3.2-1b",
)  # fmt: skip
BALANCED = [(f"lora-{model}", "memory=balanced") for model in ("qwen3-0.6b", "llama-3.2-1b")]
KEYS = [*((name, "") for name in NAMES), *BALANCED]
ALWAYS = {("lora-qwen3-0.6b", ""), ("sft-qwen3-1.7b", "")}
# with what the allocator keeps besides, which is up to a tenth
TOLERANCE = 0.1
# The allocator holds what the first steps took before layers were recorded: 21 % more than both need.
BEYOND = {("sft-qwen3-0.6b", "gradient_checkpointing=true"): 0.25}


def measured(name: str, setting: str) -> float:
    provider = f"ours:{setting}" if setting else "ours"
    rows = json.loads(MEASURED.read_text())["results"]
    return [r["reserved_mib"] for r in rows if (r["case"], r["provider"]) == (name, provider) and r["reserved_mib"]][-1]


def estimated(name: str, setting: str, folder: Path) -> float:
    case = next(case for case in CASES if case.name == name)
    length = length_of(case, False)
    case.config(False).save_pretrained(folder / "model")
    settings = {
        "model_name_or_path": str(folder / "model"), "dataset_name": "rows.jsonl", "max_length": length,
        "per_device_train_batch_size": case.rows, "gradient_checkpointing": False, "optim": "adamw_torch_fused",
        "bf16": True, "dtype": "bfloat16", "max_steps": 1, "output_dir": "out",
    }  # fmt: skip
    if case.teacher:
        case.config(False, teacher=True).save_pretrained(folder / "teacher")
        settings["teacher_model_name_or_path"] = str(folder / "teacher")
    if case.lora_dropout is not None:
        settings |= {f"lora_{key.removeprefix('lora_')}": value for key, value in lora_options(case).items()}
        settings |= {"use_peft": True, "lora_target_modules": "all-linear"}
    config = check_text(yaml.safe_dump(settings), "case.yaml", [setting] if setting else [])
    memory = simulate(step_spec(config, length, False, True))
    return (highest(memory, Sharding())[1].bytes + (memory.graphs_bytes or 0)) / MIB


@pytest.mark.parametrize(
    ("name", "setting"),
    [key if key in ALWAYS else pytest.param(*key, marks=pytest.mark.slow) for key in [*KEYS, *BEYOND]],
)
def test_estimates_are_within_a_tenth_of_what_a_gpu_held(name, setting, tmp_path):
    held = measured(name, setting)
    assert abs(estimated(name, setting, tmp_path) / held - 1) < BEYOND.get((name, setting), TOLERANCE)
