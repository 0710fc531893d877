"""Distillation from a frozen teacher or from a cache of one: check, load, measure, train, save, measure again."""

from pathlib import Path

from liger_trainer.config.run_config import RunConfig
from liger_trainer.patching.patcher import base_of
from liger_trainer.run.metric_rows import DISTILL_ROWS, OTHER_TOKENS_ROWS
from liger_trainer.run.models import check_same_tokenizer, check_student, open_teachers
from liger_trainer.run.recipe import load_trainer, prepare, train_and_save
from liger_trainer.run.results import print_plan
from liger_trainer.run.samples import complete_by_each, held_out_prompts, in_other_tokens, model_facts
from liger_trainer.trainers.distill_trainer import LigerDistillTrainer


def main(config: RunConfig) -> Path:
    """Run `config` and return its output directory.

    Raises:
        ConfigError: the configuration or a model that it names is wrong, teacher and student have different
            tokenizers, or the cache is not of this teacher, tokenizer or data. Raised before weights are loaded where
            possible, and before the GPU is used.
        CorruptError: the cache is damaged.
        DataError: the dataset is wrong.
        Interrupted: training was stopped, and a checkpoint saved.
    """
    run = prepare(config)
    teachers = open_teachers(config)
    check_student(config, run.student, run.data)
    shared = {str(check_same_tokenizer(own, run.student, teacher)) for own, teacher in teachers.values()}
    args = config.training_args()
    print_plan(run.console, config, run.data.facts, "; ".join(sorted(shared)) or None)

    paths = {name: teacher.path for name, (_, teacher) in teachers.items()}
    teacher_model = paths if config["teachers"] else paths.get("")
    trainer = load_trainer(run, LigerDistillTrainer, args, teacher_model=teacher_model)
    prompts = held_out_prompts(config, run.data, run.student.processing)

    teacher = None
    with run.clock("complete_by_teacher"), trainer.teaching.live() as live:
        tokenizer, teacher_prompts = run.student.tokenizer, prompts
        if trainer.teaching.tokenizer is not None:  # a teacher of another vocabulary
            tokenizer = trainer.teaching.tokenizer
            teacher_prompts = in_other_tokens(prompts, config, run.data, tokenizer)
        if trainer.teaching.draws_by is not None:  # a teacher whose images are others
            teacher_prompts = held_out_prompts(config, run.data, trainer.teaching.draws_by)
        texts = complete_by_each(live, tokenizer, teacher_prompts, config["max_new_tokens"])
        models = list(live.values())
        if len(models) == 1 and models[0] is not base_of(trainer.model):
            teacher = model_facts(models[0])
    return train_and_save(run, trainer, prompts, (*OTHER_TOKENS_ROWS, *DISTILL_ROWS), texts, teacher)
