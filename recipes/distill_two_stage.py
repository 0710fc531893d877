"""Distillation in two stages: on the completions of a dataset, then on the student's own with a share of those.

Each stage is a run of `recipes/distill.py`. The first has the folder `stage-1` in the output directory, the second the
output directory itself, and starts from the student that the first has saved.
"""

import gc
import time
from dataclasses import replace
from pathlib import Path

import torch

from liger_trainer.config.run_config import RunConfig
from liger_trainer.recipes import distill
from liger_trainer.run.stages import check_stage, stages_to_run


def main(config: RunConfig) -> Path:
    """Run both stages of `config`, or what an earlier start has left of them, and return the output directory.

    Raises:
        ConfigError, CorruptError, DataError, Interrupted: as the recipe distill. What shows without weights is checked
            of both stages before the first one begins.
    """
    began = time.monotonic()
    stages = stages_to_run(config)
    check_stage(stages[-1])
    output_dir = Path()
    for stage in stages:
        if stage["max_hours"] is not None:
            left = max(stage["max_hours"] - (time.monotonic() - began) / 3600, 1e-6)
            stage = replace(stage, values={**stage.values, "max_hours": left})
        output_dir = distill.main(stage)
        gc.collect()  # the student and the teacher of this stage, before those of the next are loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return output_dir
