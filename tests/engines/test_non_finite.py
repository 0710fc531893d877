"""NaN on one of two ranks, by DDP and FSDP2: both stop at the same step, or leave out the same one.

Run as a script, it is one of the two.
"""

import contextlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from planted import Plant
from processes import run_on
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from torch.distributed.tensor import DTensor
from trl import SFTConfig

from liger_trainer import LigerTrainer
from liger_trainer.errors import NonFiniteError
from liger_trainer.trainers.finite_report import FiniteReport

ENGINES = {"ddp": contextlib.nullcontext, "fsdp2": fsdp2}
# Each engine with each policy and each optimizer.
CASES = [
    ("ddp", "stop", "adamw_torch_fused"), ("ddp", "skip_step", "adamw_torch"), ("fsdp2", "stop", "adamw_torch"),
    ("fsdp2", "skip_step", "adamw_torch_fused"),
]  # fmt: skip


def outcome(policy: str, optim: str, place: str = "loss", **options) -> dict:
    args = train_args(
        SFTConfig, max_steps=4, optim=optim, max_grad_norm=1.0, logging_steps=500, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, **options,
    )  # fmt: skip
    trainer = LigerTrainer(
        tiny_model(), args, train_dataset=completions(), processing_class=tiny_tokenizer(), on_non_finite=policy
    )
    if args.process_index == 1:
        Plant(trainer, place, 2)
    message = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trainer.train()
        except NonFiniteError as error:
            message = str(error)
    weights = FiniteReport(trainer.args, trainer.model, trainer.optimizer, None).weights().values()
    assert trainer.train_dataset is not None
    return {
        "message": message, "step": trainer.state.global_step, "skipped": trainer.finite.skipped,
        "sharded": any(isinstance(weight, DTensor) for weight in weights),
        "finite": all(bool(torch.isfinite(w.full_tensor() if isinstance(w, DTensor) else w).all()) for w in weights),
        "warnings": [str(warning.message) for warning in told if "left out" in str(warning.message)],
    }  # fmt: skip


def main(folder: Path) -> None:
    results = {}
    for engine, policy, optim in CASES:
        with ENGINES[engine]():
            results[f"{engine} {policy}"] = outcome(policy, optim)
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_on(2, "../engines/test_non_finite.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_stop_together_and_name_the_one(ranks, engine):
    first, second = (rank[f"{engine} stop"] for rank in ranks)
    assert first["sharded"] == (engine == "fsdp2")
    assert first["message"] == second["message"] and first["step"] == second["step"] <= 3
    assert re.match(r"In step 2 on ranks 1 the loss(, the gradient norm)? ", first["message"]), first["message"]
    assert len(re.search(r"as the trainer holds it: ([\d, ]+)\.", first["message"])[1].split(", ")) == 4
    assert first["finite"] == ((engine, "stop", "adamw_torch_fused") in CASES)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_leave_out_the_step(ranks, engine):
    for rank, outcome in enumerate(rank[f"{engine} skip_step"] for rank in ranks):
        assert not outcome["message"] and outcome["step"] == 4 and outcome["finite"]
        assert outcome["skipped"] == 1 and len(outcome["warnings"]) == (rank == 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
