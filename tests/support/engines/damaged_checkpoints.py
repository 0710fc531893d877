"""Two processes whose newest checkpoint is damaged: both go on from the one before, or are refused. FOLDER SHARDED"""

import contextlib
import sys
from pathlib import Path

import torch
from engines.fsdp2_on_cpu import fsdp2
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from trl import SFTConfig

from liger_trainer import LigerTrainer
from liger_trainer.errors import CorruptError


def make(folder: Path, steps: int) -> LigerTrainer:
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "output_dir": str(folder / "out")}
    args = train_args(SFTConfig, **options)
    return LigerTrainer(tiny_model(), args=args, train_dataset=completions(), processing_class=tiny_tokenizer())


def main(folder: Path, sharded: bool) -> None:
    engine = fsdp2(state_dict_type="SHARDED_STATE_DICT") if sharded else contextlib.nullcontext()
    with engine:
        trainer = make(folder, 2)
        trainer.train()
        if trainer.is_world_process_zero():
            [damaged] = list((folder / "out" / "checkpoint-2").glob("**/*__1_0.distcp"))[:1] or [
                folder / "out" / "checkpoint-2" / "rng_state_1.pth"
            ]
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(content)
        trainer.accelerator.wait_for_everyone()
        rank = trainer.args.process_index
        try:
            make(folder, 3).train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
        except CorruptError as error:
            (folder / f"refused{rank}").write_text(str(error))
        trainer = make(folder, 3)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.resumed_from is not None
        (folder / f"resumed{rank}").write_text(trainer.resumed_from.name)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), bool(int(sys.argv[2])))
