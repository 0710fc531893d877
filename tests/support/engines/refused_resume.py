"""A training that goes on with other rows in the first of two processes alone: what each of them is told."""

import sys
from pathlib import Path

import torch
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from trl import SFTConfig

from liger_trainer import LigerTrainer
from liger_trainer.errors import ConfigError


def make(folder):
    args = train_args(SFTConfig, max_steps=2, save_strategy="steps", save_steps=1, output_dir=str(folder / "out"))
    return LigerTrainer(tiny_model(), args=args, train_dataset=completions(), processing_class=tiny_tokenizer())


def main(folder):
    make(folder).train()
    trainer = make(folder)
    if trainer.is_world_process_zero():
        trainer.train_dataset = trainer.train_dataset.select(range(23, -1, -1))
    try:
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-1"))
    except ConfigError as error:
        (folder / f"refused{trainer.args.process_index}").write_text(str(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
