"""Supervised fine-tuning, full or LoRA: check, load, measure, train, save, measure again."""

from pathlib import Path

from liger_trainer.config.run_config import RunConfig
from liger_trainer.run.metric_rows import SFT_ROWS
from liger_trainer.run.models import check_student
from liger_trainer.run.recipe import load_trainer, prepare, train_and_save
from liger_trainer.run.results import print_plan
from liger_trainer.run.samples import held_out_prompts
from liger_trainer.trainers.sft_trainer import LigerTrainer


def main(config: RunConfig) -> Path:
    """Run `config` and return its output directory.

    Raises:
        ConfigError: the configuration or a model that it names is wrong. Raised before weights are loaded where
            possible.
        DataError: the dataset is wrong.
        Interrupted: training was stopped, and a checkpoint saved.
    """
    run = prepare(config)
    check_student(config, run.student, run.data)
    args = config.training_args()
    print_plan(run.console, config, run.data.facts)

    trainer = load_trainer(run, LigerTrainer, args)
    prompts = held_out_prompts(config, run.data, run.student.processing)
    return train_and_save(run, trainer, prompts, SFT_ROWS)
