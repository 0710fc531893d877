"""Distillation from a frozen teacher or from a cache of one: check, load, measure, train, save, measure again."""

from functools import partial
from pathlib import Path

from trl import get_peft_config

from liger_trainer.config.run_config import RunConfig
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.metric_rows import DISTILL_ROWS
from liger_trainer.run.models import check_same_tokenizer, check_student, load_student, open_model, open_teachers
from liger_trainer.run.output_dir import check_output_dir, finish, save_student
from liger_trainer.run.results import RunResults, patch_facts, print_plan, print_results, print_rows, run_console
from liger_trainer.run.samples import compare, complete_by_each, held_out_prompts, in_other_tokens, measure
from liger_trainer.run.train_loop import Clock, checkpoint_of, train
from liger_trainer.trainers.distill_trainer import LigerDistillTrainer


def main(config: RunConfig) -> Path:
    """Run `config` and return its output directory.

    Raises:
        ConfigError: the configuration or a model it names is wrong, or teacher and student have different
            tokenizers, or the cache is not of this teacher, tokenizer or data; before weights are loaded where
            possible, and before the GPU is used.
        CorruptError: the cache is damaged.
        DataError: the dataset is wrong.
        Interrupted: training was stopped, and a checkpoint saved.
    """
    console, clock = run_console(), Clock()

    output_dir, checkpoint = check_output_dir(config), checkpoint_of(config)
    data = load_run_datasets(config)
    files = open_model(config, "model_name_or_path")
    teachers = open_teachers(config)
    check_student(config, files, data)
    vocabularies = {str(check_same_tokenizer(own, files, teacher)) for own, teacher in teachers.values()}
    paths = {name: teacher.path for name, (_, teacher) in teachers.items()}
    args = config.training_args()
    print_plan(console, config, data.facts, "; ".join(sorted(vocabularies)) or None)

    loading = console.status("Loading weights, tokenizing rows")
    with clock("load"), loading, config.refusals("LigerDistillTrainer"):
        trainer = LigerDistillTrainer(
            load_student(config, files),
            teacher_model=paths if config["teachers"] else paths.get(""),
            args=args,
            train_dataset=data.train,
            eval_dataset=data.test,
            processing_class=files.tokenizer,
            peft_config=get_peft_config(config.model_args()),
        )
    print_rows(console, trainer.row_facts)
    prompts = held_out_prompts(config, data, files.tokenizer)
    measure_now = partial(measure, trainer, prompts, config["max_new_tokens"])

    with clock("complete_by_teacher"), trainer.teaching.live() as live:
        reads, asked = files.tokenizer, prompts
        if trainer.teaching.tokenizer is not None:
            reads = trainer.teaching.tokenizer
            asked = in_other_tokens(prompts, config, data, reads)
        taught = complete_by_each(live, reads, asked, config["max_new_tokens"])
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
        completions=compare(prompts, before, after, taught),
        data=data.facts,
        rows=trainer.row_facts,
        patched=patch_facts(student=trainer.patched, teacher=trainer.teacher_patched),
        training=training,
        seconds=clock.seconds,
        log_history=trainer.state.log_history,
    )
    finish(trainer, config, output_dir, results)
    known = tuple(row for row in DISTILL_ROWS if row.metric in before.metrics)  # a cache does not determine all
    print_results(console, results, known, output_dir)
    return output_dir
