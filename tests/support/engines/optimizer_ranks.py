"""Three steps under DistributedDataParallel in one of two processes, by our optimizer and by torch's.

python optimizer_ranks.py RESULTS
"""

import sys

import torch
from processes import finish
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.trainers import one_launch_adamw as adamw
from liger_trainer.trainers.finite_guard import innermost


def trained() -> dict[str, object]:
    options = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0.05}
    options |= {"gradient_accumulation_steps": 2, "use_cpu": not torch.cuda.is_available()}
    trainer = LigerTrainer(
        tiny_model("llama"), train_args(LigerConfig, **options), train_dataset=completions(),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train()
    weights = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    norms = [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    wrapped = type(trainer.model_wrapped).__name__
    return {"weights": weights, "norms": norms, "kind": type(innermost(trainer.optimizer)).__name__, "in": wrapped}


def main(path: str) -> None:
    if not torch.cuda.is_available():  # the op then runs in torch, or in Triton's interpreter
        adamw._are_plain = lambda params: True
    ours = trained()
    adamw.OneLaunchStep.of = lambda self, optimizer: optimizer
    torchs = trained()
    finish((ours, torchs), path)


if __name__ == "__main__":
    main(sys.argv[1])
