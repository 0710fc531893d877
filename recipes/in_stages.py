"""A run of several trainings: the teacher's correction, a first stage, a second stage, each by its own recipe.

Those before the last have folders in the output directory, the last has the output directory itself. What one has
saved, the next ones load.
"""

import gc
import time
from dataclasses import replace
from pathlib import Path

import torch

from liger_trainer.config.run_config import RunConfig
from liger_trainer.recipes import distill, sft
from liger_trainer.run.stages import check_stage, stages_to_run


def main(config: RunConfig) -> Path:
    """Run all stages of `config`, or what an earlier start has left of them, and return the output directory.

    Raises:
        ConfigError, CorruptError, DataError, Interrupted: as the recipes. What shows without weights is checked of all
            stages before the first one begins.
    """
    began = time.monotonic()
    stages = stages_to_run(config)
    for stage in stages[1:]:
        check_stage(stage)
    output_dir = Path()
    for stage in stages:
        if stage["max_hours"] is not None:
            left = max(stage["max_hours"] - (time.monotonic() - began) / 3600, 1e-6)
            stage = replace(stage, values={**stage.values, "max_hours": left})
        output_dir = (sft if stage.recipe == "sft" else distill).main(stage)
        gc.collect()  # the models of this stage, before those of the next are loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return output_dir
