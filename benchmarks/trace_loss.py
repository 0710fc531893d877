"""Which of our functions lie between a model's forward and its row kernel: `python -m benchmarks.trace_loss`.

A CPU has no row kernel, so the chain ends at the function that hands the rows to the kernel's torch twin; on a GPU the
same function launches the kernel.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liger_trainer
from liger_trainer.losses.spec import Distillation, LossOptions
from liger_trainer.teachers.base import teacher_logits

ROOT = Path(__file__).resolve().parents[1]
TWIN = "rows_torch"  # how the names of the row kernels' torch twins end


class Step(NamedTuple):
    """One function of a chain."""

    file: str
    function: str


def chain_of(run: Callable[[], Any]) -> list[Step]:
    """Return our functions that are running when the first row pass begins, outermost first."""
    chain: list[Step] = []

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not chain and frame.f_code.co_name.endswith(TWIN) and _file(frame):
            chain.extend(_callers(frame))

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return chain


def _callers(frame: FrameType) -> list[Step]:
    steps, caller = [], frame.f_back
    while caller is not None:
        file = _file(caller)
        if file is not None:
            steps.append(Step(file, caller.f_code.co_qualname))
        caller = caller.f_back
    return steps[::-1]


def _file(frame: FrameType) -> str | None:
    """Return the file's path in the repository, None outside of liger_trainer/ and kernels/."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT).as_posix().removeprefix("liger_trainer/kernels/")
    return f"kernels/{file}" if "/" not in file else file if file.startswith("liger_trainer/") else None


def _model(hidden_size: int) -> LlamaForCausalLM:
    torch.manual_seed(hidden_size)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=hidden_size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        )
    )  # fmt: skip


def traced() -> dict[str, list[Step]]:
    """Return the chains of one step of fine-tuning and of one step of distillation."""
    ids = torch.arange(24).view(2, 12)
    student, teacher = _model(16), _model(8)
    fused = liger_trainer.patch(student).fused
    assert fused is not None
    chains = {"fine-tuning": chain_of(lambda: student(input_ids=ids, labels=ids))}
    fused.options = LossOptions(distillation=Distillation({"forward_kl": 1.0}))
    answer = teacher_logits(teacher, teacher, input_ids=ids)
    chains["distillation"] = chain_of(lambda: student(input_ids=ids, labels=ids, teacher_logits=answer))
    return chains


def main() -> None:
    for name, chain in traced().items():
        print(f"{name}: {len(chain)} functions in {len({step.file for step in chain})} files")
        for number, step in enumerate(chain, 1):
            print(f"  {number:2} {step.file:44} {step.function}")


if __name__ == "__main__":
    main()
