"""`liger-trainer run` on two GPUs: a rank that is killed, going on on two and on one, and NaN on one rank.

The same on two processes of a CPU, by DDP, is slow: each command imports everything three times.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import lines, settings
from tiny import tiny_model, tiny_tokenizer

STEPS, SAVED, ROWS = 20, 2, 8
ROOT = Path(__file__).parents[2]
TWO_GPUS = [
    pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two GPUs"),
]  # fmt: skip


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
    save_student()
    words = settings(
        accelerate_config=engine, num_processes=2, use_cpu=on_cpu, bf16=not on_cpu, max_steps=STEPS, save_steps=SAVED,
        save_strategy="steps", save_total_limit=None, lr_scheduler_type="constant", holdout_fraction=None,
        per_device_train_batch_size=ROWS // 2, **({"ddp_backend": "gloo"} if on_cpu else {}),
    )  # fmt: skip
    Path("run.yaml").write_text(words)
    return tmp_path


def save_student(not_finite: int | None = None) -> None:
    """Save a model with untied heads; the embedding of one word may be NaN, so that the rank that reads it has NaN."""
    model = tiny_model("llama")
    if not_finite is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[not_finite] = torch.nan
    model.save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")


def start(*words: object) -> psutil.Popen:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "liger_trainer", *map(str, words)]
    with Path("log").open("w") as log:
        return psutil.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def end_of(launcher: psutil.Popen, seconds: float = 150) -> tuple[int, str]:
    """Wait until neither a launcher nor a rank is there any more; return its exit code and what all printed."""
    processes = [launcher, *launcher.children(recursive=True)]
    try:
        code = launcher.wait(seconds)
        alive = psutil.wait_procs(processes, timeout=30)[1]
        assert not alive, f"still there: {alive}"
        return code, Path("log").read_text()
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired) as late:
        raise AssertionError(Path("log").read_text()[-4000:]) from late
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


def finish(*words: object) -> str:
    code, log = end_of(start(*words))
    assert code == 0, log[-4000:]
    return log


def losses(out: str) -> dict[int, float]:
    state = json.loads(Path(out, f"checkpoint-{STEPS}", "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def kill_rank_1(launcher: psutil.Popen, when: Path) -> None:
    end = time.monotonic() + 120
    while not when.exists():
        assert launcher.poll() is None and time.monotonic() < end, Path("log").read_text()[-4000:]
        time.sleep(0.01)
    ranks = [process for process in launcher.children(recursive=True) if process.environ().get("RANK") == "1"]
    assert ranks, "no process is rank 1"
    ranks[0].kill()


def test_a_killed_rank_ends_the_run_which_goes_on_on_two_and_on_one(folder):
    finish("run", "run.yaml", "output_dir=whole")
    want = losses("whole")
    assert list(want) == list(range(1, STEPS + 1)) and min(want.values()) < 0.9 * want[1]

    launcher = start("run", "run.yaml", "output_dir=killed")
    kill_rank_1(launcher, Path("killed", f"checkpoint-{2 * SAVED}"))
    code, log = end_of(launcher)
    assert code != 0 and not Path("killed", f"checkpoint-{STEPS}").exists(), log[-4000:]
    shutil.copytree("killed", "on_one")

    resumed = finish("resume", "killed")
    assert re.search(r"checkpoint-\d+", resumed)
    assert losses("killed") == pytest.approx(want, rel=5e-3)
    finish("resume", "on_one", "num_processes=1", f"per_device_train_batch_size={ROWS}")
    assert losses("on_one") == pytest.approx(want, rel=5e-3)


def test_nan_on_one_rank_stops_both(folder):
    """One row of step 3 has the word whose embedding is NaN. Both ranks end, with the sentence and code of NaN."""
    rows = Path("rows.jsonl").read_text().splitlines()
    only = 2 * ROWS + 1
    rows[only] = json.dumps({"prompt": "w12 w12", "completion": " w12 w1"})
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    word = tiny_tokenizer().convert_tokens_to_ids("w12")
    save_student(not_finite=word)
    code, log = end_of(start("run", "run.yaml", "train_sampling_strategy=sequential"))
    assert code == 5 and re.search(r"In step 3 ", log) and "Traceback" not in log, log[-4000:]
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == [f"checkpoint-{SAVED}"]
