"""Supervised fine-tuning, full or LoRA: check, load, measure, train, save, measure again."""

from functools import partial
from pathlib import Path

from trl import get_peft_config

from liger_trainer.config.run_config import RunConfig
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.metric_rows import SFT_ROWS
from liger_trainer.run.models import check_student, load_student, open_model
from liger_trainer.run.output_dir import check_output_dir, finish, save_student
from liger_trainer.run.results import RunResults, patch_facts, print_plan, print_results, print_rows, run_console
from liger_trainer.run.samples import compare, held_out_prompts, measure
from liger_trainer.run.train_loop import Clock, checkpoint_of, train
from liger_trainer.trainers.sft_trainer import LigerTrainer


def main(config: RunConfig) -> Path:
    """Run `config` and return its output directory.

    Raises:
        ConfigError: the configuration or a model it names is wrong; before weights are loaded where possible.
        DataError: the dataset is.
        Interrupted: training was stopped, and a checkpoint saved.
    """
    console, clock = run_console(), Clock()

    output_dir, checkpoint = check_output_dir(config), checkpoint_of(config)
    data = load_run_datasets(config)
    files = open_model(config, "model_name_or_path")
    check_student(config, files, data)
    args = config.training_args()
    print_plan(console, config, data.facts)

    loading = console.status("Loading weights, tokenizing rows")
    with clock("load"), loading, config.refusals("LigerTrainer"):
        trainer = LigerTrainer(
            load_student(config, files),
            args=args,
            train_dataset=data.train,
            eval_dataset=data.test,
            processing_class=files.tokenizer,
            peft_config=get_peft_config(config.model_args()),
        )
    print_rows(console, trainer.row_facts)
    prompts = held_out_prompts(config, data, files.tokenizer)
    measure_now = partial(measure, trainer, prompts, config["max_new_tokens"])

    before, training = train(trainer, config, checkpoint, measure_now, clock)
    with clock("save"):
        save_student(trainer, config, output_dir)
    with clock("measure_after"):
        after = measure_now()

    results = RunResults(
        recipe=config.recipe,
        config=config.source,
        before=before.metrics,
        after=after.metrics,
        completions=compare(prompts, before, after),
        data=data.facts,
        rows=trainer.row_facts,
        patched=patch_facts(student=trainer.patched),
        training=training,
        seconds=clock.seconds,
        log_history=trainer.state.log_history,
    )
    finish(trainer, config, output_dir, results)
    print_results(console, results, SFT_ROWS, output_dir)
    return output_dir
