"""`liger-trainer run` on two GPUs: a rank that is killed, going on on two and on one, and NaN on one rank.

The same on two processes of a CPU, by DDP, is slow: each command imports everything three times.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import lines, settings
from processes import free_port
from tiny import tiny_model, tiny_tokenizer

STEPS, SAVED, ROWS = 20, 2, 8
RUN = ("run", "run.yaml", "~holdout_fraction")
ROOT = Path(__file__).parents[2]
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(params=[
    pytest.param(("ddp", False), marks=TWO_GPUS, id="ddp"), pytest.param(("fsdp2", False), marks=TWO_GPUS, id="fsdp2"),
    pytest.param(("ddp", True), marks=[pytest.mark.slow], id="ddp on a CPU"),
])  # fmt: skip
def folder(request, tmp_path, monkeypatch):
    """A folder with a run of two processes: ROWS rows a step, and a checkpoint every SAVED steps."""
    engine, on_cpu = request.param
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"w{i % 7} w{i % 5}", "completion": f" w{i % 3} w{i % 11}"} for i in range(STEPS * ROWS)]
    Path("rows.jsonl").write_text(lines(rows))
    tiny_model("llama").save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")
    words = settings(
        accelerate_config=engine, num_processes=2, use_cpu=on_cpu, bf16=not on_cpu, max_steps=STEPS, save_steps=SAVED,
        save_strategy="steps", lr_scheduler_type="constant",
        per_device_train_batch_size=ROWS // 2, **({"ddp_backend": "gloo"} if on_cpu else {}),
    )  # fmt: skip
    Path("run.yaml").write_text(words)
    return tmp_path


def start(*words: object) -> psutil.Popen:
    paths = [str(Path.cwd()), str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "liger_trainer", *map(str, words), f"main_process_port={free_port()}"]
    path = Path(f"{free_port()}.log")
    with path.open("w") as log:
        launcher = psutil.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    launcher.log = path
    return launcher


def end_of(launcher: psutil.Popen, seconds: float = 150) -> tuple[int, str]:
    """Wait until neither a launcher nor a rank is there any more; return its exit code and what all printed."""
    processes = [launcher, *launcher.children(recursive=True)]
    try:
        code = launcher.wait(seconds)
        alive = psutil.wait_procs(processes, timeout=30)[1]
        assert not alive, f"still there: {alive}"
        return code, launcher.log.read_text()
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired) as late:
        raise AssertionError(launcher.log.read_text()[-4000:]) from late
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


def finish(launcher: psutil.Popen) -> None:
    code, log = end_of(launcher)
    assert code == 0, log[-4000:]


def losses(out: str) -> dict[int, float]:
    state = json.loads(Path(out, f"checkpoint-{STEPS}", "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def kill_rank_1(launcher: psutil.Popen, when: Path) -> None:
    end = time.monotonic() + 120
    while not when.exists():
        assert launcher.poll() is None and time.monotonic() < end, launcher.log.read_text()[-4000:]
        time.sleep(0.01)
    ranks = [process for process in launcher.children(recursive=True) if process.environ().get("RANK") == "1"]
    assert ranks, "no process is rank 1"
    ranks[0].kill()


def test_a_killed_rank_ends_the_run_which_goes_on_on_two_and_on_one(folder):
    whole, launcher = start(*RUN, "output_dir=whole"), start(*RUN, "output_dir=killed")
    kill_rank_1(launcher, Path("killed", f"checkpoint-{2 * SAVED}"))
    code, log = end_of(launcher)
    assert code != 0 and not Path("killed", f"checkpoint-{STEPS}").exists(), log[-4000:]
    shutil.copytree("killed", "on_one")

    first = [Path(out, f"checkpoint-{SAVED}", "trainer_state.json") for out in ("killed", "on_one")]
    written = [path.stat().st_mtime_ns for path in first]
    on_one = "num_processes=1", f"per_device_train_batch_size={ROWS}"
    for resumed in (start("resume", "killed"), start("resume", "on_one", *on_one), whole):
        finish(resumed)
    want = losses("whole")
    assert list(want) == list(range(1, STEPS + 1)) and min(want.values()) < 0.9 * want[1]
    for out in ("killed", "on_one"):
        assert losses(out) == pytest.approx(want, rel=5e-3)
    assert [path.stat().st_mtime_ns for path in first] == written, "they began again"


PLANTED = """
import os

if os.environ.get("RANK") == "1":
    from planted import Plant
    from transformers import Trainer

    train = Trainer.train

    def planted(trainer, *arguments, **options):
        Plant(trainer, "loss", 3)
        return train(trainer, *arguments, **options)

    Trainer.train = planted
"""  # which Python imports as sitecustomize before the command line


def test_nan_on_one_rank_stops_both(folder):
    """In step 3, on rank 1. Both end with NaN's sentence and exit code, and only the checkpoint before it is there."""
    Path("sitecustomize.py").write_text(PLANTED)
    code, log = end_of(start(*RUN))
    assert code == 5 and "In step 3 " in log, log[-4000:]
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == [f"checkpoint-{SAVED}"]
