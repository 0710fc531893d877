"""The head for multi-token prediction under DistributedDataParallel: the step of one process over all rows.

Run as a script, it is one of two processes.
"""

import sys
from pathlib import Path

import pytest
import torch
from mtp_heads import save_with_head
from processes import finish, outcome_of
from tiny import completions, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerTrainer

ROWS = 4


def trained(source: str, folder: Path, ranks: int) -> dict[str, object]:
    args = train_args(
        LigerConfig, output_dir=str(folder), max_steps=2, mtp_loss_weight=0.3, optim="sgd", learning_rate=0.1,
        per_device_train_batch_size=ROWS // ranks, per_device_eval_batch_size=ROWS // ranks,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = LigerTrainer(
        source, args, train_dataset=completions(2 * ROWS), eval_dataset=completions(7, seed=1),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    return {
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "losses": [log["mtp_loss"] for log in trainer.state.log_history if "mtp_loss" in log],
        "metrics": [metrics[f"eval_mtp_{name}"] for name in ("loss", "accepted", "share")],
        "in": type(trainer.model_wrapped).__name__,
    }


def main(path: str, source: str) -> None:
    finish(trained(source, Path(path).parent / "out", 2), path)


def test_two_processes_train_the_head_as_one_does(tmp_path):
    source = save_with_head(tmp_path / "source")
    ours = outcome_of(2, "../engines/test_mtp_on_ranks.py", str(source))
    alone = trained(str(source), tmp_path / "alone", 1)
    assert ours["in"] == "DistributedDataParallel"
    for name in ("losses", "metrics"):
        assert ours[name] == pytest.approx(alone[name], rel=1e-5), name
    assert len(ours["losses"]) == 2
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)


if __name__ == "__main__":
    main(*sys.argv[1:])
