"""A training of two processes goes on on one and on four with the same losses; what it saves is a plain model.

Run as a script it is one of the processes: with a folder only it trains four steps of eight rows and saves after the
second; with "resume" it goes on from copies of these checkpoints. The first process writes the losses.
"""

import contextlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from engines.fsdp2_on_cpu import fsdp2
from processes import run_on
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from liger_trainer import LigerTrainer

ENGINES = {
    "ddp": contextlib.nullcontext,
    "fsdp2": lambda: fsdp2(state_dict_type="FULL_STATE_DICT"),
    "fsdp2, sharded checkpoints": lambda: fsdp2(state_dict_type="SHARDED_STATE_DICT"),
}
SAVED, STEPS, ROWS = 2, 4, 8


def trained(output_dir: Path, resume: bool) -> dict:
    """The losses by step, and how far the saved model is from the trained one."""
    args = train_args(
        SFTConfig, output_dir=str(output_dir), per_device_train_batch_size=ROWS // torch.distributed.get_world_size(),
        max_steps=STEPS, save_strategy="steps", save_steps=SAVED, learning_rate=1e-2, weight_decay=0.1,
    )  # fmt: skip
    trainer = LigerTrainer(
        tiny_model("llama_tied"), args, train_dataset=completions(), processing_class=tiny_tokenizer()
    )
    trainer.train(resume_from_checkpoint=str(output_dir / f"checkpoint-{SAVED}") if resume else None)
    state = trainer.accelerator.get_state_dict(trainer.model)
    trainer.save_model(str(output_dir / "saved"))
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    result = {"losses": losses, "files": sorted(p.name for p in (output_dir / f"checkpoint-{SAVED}").iterdir())}
    if trainer.is_world_process_zero() and (output_dir / "saved" / "model.safetensors").is_file():
        loaded = AutoModelForCausalLM.from_pretrained(output_dir / "saved", dtype="float32").state_dict()
        result["saved"] = max((loaded[name] - weight).abs().max().item() for name, weight in state.items())
    return result


def main(folder: str, *resumes: str) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # accelerate makes none for one process
    first, size = torch.distributed.get_rank() == 0, torch.distributed.get_world_size()
    results = {}
    for engine, within in ENGINES.items():
        output_dir = Path(folder, engine)
        if resumes:
            output_dir = Path(folder, f"{engine} on {size}")
            if first:
                shutil.copytree(Path(folder, engine, f"checkpoint-{SAVED}"), output_dir / f"checkpoint-{SAVED}")
            torch.distributed.barrier()
        with within():
            results[engine] = trained(output_dir, bool(resumes))
    if first:
        torch.save(results, Path(folder, f"{'resumed' if resumes else 'begun'}-{size}.pt"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    run_on(2, "../engines/test_other_counts.py", folder)
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def resumed(request, folder):
    run_on(request.param, "../engines/test_other_counts.py", folder, "resume")
    return torch.load(folder / f"resumed-{request.param}.pt")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_goes_on_with_the_same_losses(folder, resumed, engine):
    want, got = torch.load(folder / "begun-2.pt")[engine], resumed[engine]
    assert want["losses"][STEPS] < want["losses"][1] - 0.1
    for step in range(SAVED + 1, STEPS + 1):
        assert got["losses"][step] == pytest.approx(want["losses"][step], rel=1e-5), step


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_saved_model_loads_in_transformers(folder, engine):
    assert torch.load(folder / "begun-2.pt")[engine]["saved"] == 0


def test_sharded_checkpoints_have_a_file_for_each_process(folder):
    files = torch.load(folder / "begun-2.pt")
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= set(files["fsdp2, sharded checkpoints"]["files"])


if __name__ == "__main__":
    main(*sys.argv[1:])
