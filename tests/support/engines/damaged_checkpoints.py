"""Two processes by DDP and FSDP2 that are refused a damaged checkpoint, take the one before, and are refused to go on
with other rows in the first process only. FOLDER"""

import contextlib
import sys
from pathlib import Path

import torch
from engines.fsdp2_on_cpu import fsdp2
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from trl import SFTConfig

from liger_trainer import LigerTrainer
from liger_trainer.errors import ConfigError, CorruptError

ENGINES = {"ddp": contextlib.nullcontext, "fsdp2": lambda: fsdp2(state_dict_type="SHARDED_STATE_DICT")}


def make(folder: Path, steps: int) -> LigerTrainer:
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "output_dir": str(folder / "out")}
    args = train_args(SFTConfig, **options)
    return LigerTrainer(tiny_model(), args=args, train_dataset=completions(), processing_class=tiny_tokenizer())


def main(folder: Path) -> None:
    trainer = make(folder, 2)
    trainer.train()
    newest = folder / "out" / "checkpoint-2"
    if trainer.is_world_process_zero():
        [damaged] = list(newest.glob("**/*__1_0.distcp"))[:1] or [newest / "rng_state_1.pth"]
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    trainer.accelerator.wait_for_everyone()
    rank = trainer.args.process_index
    try:
        make(folder, 3).train(resume_from_checkpoint=str(newest))
    except CorruptError as error:
        (folder / f"refused{rank}").write_text(str(error))
    trainer = make(folder, 3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.resumed_from is not None
    (folder / f"resumed{rank}").write_text(trainer.resumed_from.name)
    trainer = make(folder, 4)
    if rank == 0:
        trainer.train_dataset = trainer.train_dataset.select(range(23, -1, -1))
    try:
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
    except ConfigError as error:
        (folder / f"other_rows{rank}").write_text(str(error))


if __name__ == "__main__":
    for name, engine in ENGINES.items():
        Path(sys.argv[1], name).mkdir(exist_ok=True)
        with engine():
            main(Path(sys.argv[1], name))
    torch.distributed.destroy_process_group()
