"""The optimizer in one launch under DistributedDataParallel and FSDP2: the same steps as torch's.

Run as a script, it is one of two processes.
"""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from processes import finish, outcome_of
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from torch.distributed.tensor import DTensor

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.trainers import one_launch_adamw as adamw
from liger_trainer.trainers.finite_guard import innermost


def trained(folder: Path, resume: Path | None = None) -> dict[str, object]:
    options = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0.05}
    options |= {"gradient_accumulation_steps": 2, "use_cpu": not torch.cuda.is_available()}
    options |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", "output_dir": str(folder)}
    trainer = LigerTrainer(
        tiny_model("llama"), train_args(LigerConfig, **options), train_dataset=completions(),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume and str(resume))
    weights = {name: whole(p.detach()).cpu() for name, p in trainer.model.named_parameters()}
    norms = [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    wrapped = type(trainer.model_wrapped).__name__
    return {"weights": weights, "norms": norms, "kind": type(innermost(trainer.optimizer)).__name__, "in": wrapped}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(path: str, engine: str) -> None:
    if not torch.cuda.is_available():  # the op then runs in torch, or in Triton's interpreter
        adamw._are_plain = lambda params: True
    folder = Path(path).parent / engine
    with fsdp2() if engine == "fsdp2" else contextlib.nullcontext():
        ours = trained(folder)
        adamw.OneLaunchStep.of = lambda self, optimizer: optimizer
        finish((ours, trained(folder / "torch"), trained(folder, folder / "checkpoint-2")), path)


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("gpus", [False, pytest.param(True, marks=TWO_GPUS)], ids=["CPUs", "GPUs"])
@pytest.mark.parametrize(("engine", "wrapper"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPLlamaForCausalLM")])
def test_steps_are_those_of_torch_which_goes_on_from_its_checkpoint(engine, wrapper, gpus):
    ours, torchs, resumed = outcome_of(2, "../engines/test_optimizer_on_ranks.py", engine, gpus=gpus)
    assert ours["kind"] == "OneLaunchAdamW" and torchs["kind"] == resumed["kind"] == "AdamW"
    assert ours["in"] == torchs["in"] == wrapper
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
    assert len(ours["norms"]) == 3 and min(ours["norms"]) > 0.05  # gradients are clipped
    for name, weight in torchs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=2e-5, atol=2e-6)


if __name__ == "__main__":
    main(*sys.argv[1:])
