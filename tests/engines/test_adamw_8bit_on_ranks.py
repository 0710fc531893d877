"""AdamW in 8 bits, whose weights are rounded by chance, under DistributedDataParallel: the same on all ranks.

Run as a script, it is one of two processes.
"""

import sys

import torch
from processes import finish, outcome_of
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.trainers.finite_guard import innermost


def main(path: str) -> None:
    options = {"max_steps": 3, "max_grad_norm": 0.05, "use_cpu": True}
    options |= {"optim": "adamw_8bit", "optim_args": "bf16_stochastic_round=true"}
    trainer = LigerTrainer(
        tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96),
        train_args(LigerConfig, **options), train_dataset=completions(), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    alike, moved = True, 0
    for name, p in trainer.model.named_parameters():
        first = p.detach().clone()
        torch.distributed.broadcast(first, 0)
        alike &= torch.equal(first, p)
        moved += int((p != start[name]).sum())
    every: list = [None, None]
    torch.distributed.all_gather_object(every, alike)
    kinds = [type(innermost(trainer.optimizer)).__name__, type(trainer.model_wrapped).__name__]
    finish((kinds, all(every), moved), path)


def test_ranks_stay_alike():
    kinds, alike, moved = outcome_of(2, "../engines/test_adamw_8bit_on_ranks.py")
    assert kinds == ["OneLaunchAdamW8bit", "DistributedDataParallel"]
    assert alike and moved > 1000


if __name__ == "__main__":
    main(sys.argv[1])
