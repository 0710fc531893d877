"""Stopping a run from outside: signals to one process, to a rank and to launchers, and the limit of hours."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import call, done, refused, save_models, settings, texts, without_report, write_rows
from processes import run_on

import liger_trainer
from liger_trainer.common.signals import SIGNALS, handling
from liger_trainer.run import progress, train_loop

ROOT = str(Path(liger_trainer.__file__).parents[1])
SETTINGS = settings(max_steps=100000, per_device_train_batch_size=2, disable_tqdm=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    save_models(tmp_path, "student")
    write_rows(Path("rows.jsonl"), texts(20))
    Path("run.yaml").write_text(SETTINGS)
    return tmp_path


def run(capsys, *overrides: str) -> tuple[int, str, str]:
    return call(capsys, "run", "run.yaml", *overrides)


@pytest.fixture
def send(monkeypatch):
    """Have the next runs get signals at the start of step 2, so long after one another."""

    def add(*numbers, pause=0.0):
        made = train_loop.StopEarly

        def stop(*args):
            callback = made(*args)
            begin = callback.on_step_begin

            def on_step_begin(args, state, control, **kwargs):
                begin(args, state, control, **kwargs)
                for number in numbers if state.global_step == 1 else ():
                    os.kill(os.getpid(), number)
                    time.sleep(pause)

            callback.on_step_begin = on_step_begin
            return callback

        monkeypatch.setattr(train_loop, "StopEarly", stop)

    return add


def test_each_signal_is_handled_and_earlier_handlers_come_back():
    handlers, heard = [signal.getsignal(each) for each in SIGNALS], []
    with handling(lambda number, frame: heard.append(number)):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    assert heard == list(SIGNALS) and [number.name[3:] for number in SIGNALS] == "INT TERM HUP USR1 USR2".split()
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_a_checkpoint(folder, capsys, send, number):
    """Schedulers send it to all processes, and launchers pass it on: it may come twice."""
    send(number, number)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    # save_strategy best decides after an evaluation whether to save; none is made
    best = ("save_strategy=best", "metric_for_best_model=loss", "greater_is_better=true")
    said = f"{number.name}: Stopped at step 2 of 100000; saved out/checkpoint-2. To continue: liger-trainer resume out"
    refused(run(capsys, *best, "eval_strategy=steps", "eval_steps=1"), 130, said)
    assert Path("out/checkpoint-2/model.safetensors").is_file()
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


def test_a_second_ctrl_c_stops_at_once(folder, capsys, send):
    send(signal.SIGINT, signal.SIGINT, pause=1.1)
    refused(run(capsys), 130, "interrupted. Nothing in output_dir was removed")
    assert not Path("out/checkpoint-2").exists()


def test_a_signal_that_was_ignored_stays_ignored(folder, capsys, send):
    """As nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        send(signal.SIGHUP)
        assert run(capsys, "max_steps=3")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_training_ends_the_run(folder, capsys, monkeypatch):
    def prepare(config):
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("not interrupted")

    monkeypatch.setattr("liger_trainer.recipes.sft.prepare", prepare)
    refused(run(capsys), 130, "interrupted")
    assert not Path("out").exists()


def test_a_signal_in_the_last_step_ends_the_run(folder, capsys, send):
    """And what is left to do, saving the model and measuring it, a resumed run does."""
    send(signal.SIGTERM)
    said = "SIGTERM: Stopped at step 2 of 2; saved out/checkpoint-2. To continue: liger-trainer resume out"
    refused(run(capsys, "max_steps=2"), 130, said)
    assert not Path("out/metrics.json").exists()
    done(call(capsys, "resume", "out"))
    assert Path("out/metrics.json").exists()


@pytest.mark.parametrize("save", ["steps", "no"])
def test_a_signal_after_the_last_step_ends_the_run_where_that_loses_nothing(folder, capsys, monkeypatch, save):
    """In the evaluation there, which no further step follows."""
    evaluated = progress.RunProgress.on_evaluate

    def on_evaluate(self, args, state, control, **kwargs):
        if self.phase == progress.BETWEEN:
            os.kill(os.getpid(), signal.SIGTERM)
        evaluated(self, args, state, control, **kwargs)

    monkeypatch.setattr(progress.RunProgress, "on_evaluate", on_evaluate)
    ran = run(capsys, "max_steps=2", f"save_strategy={save}", "eval_strategy=steps", "eval_steps=2")
    if save == "no":  # only the end of the run saves the model
        done(ran)
    else:
        refused(ran, 130, "saved out/checkpoint-2. To continue")
    assert Path("out/metrics.json").exists() is (save == "no")


def test_max_hours_saves_a_checkpoint(folder, capsys, send):
    said = "max_hours: 1e-09 hours have passed. Stopped at step 1 of 100000; saved out/checkpoint-1."
    said = f"{said} To continue: liger-trainer resume"
    assert "--checkpoint" not in refused(run(capsys, "max_hours=1e-9"), 124, f"{said} out")
    Path("out/checkpoint-9").mkdir()  # of later steps, before a run that goes back
    again = call(capsys, "resume", "out", "--checkpoint", "checkpoint-1", "max_hours=1e-9")
    refused(again, 124, "To continue: liger-trainer resume out --checkpoint checkpoint-2")
    done(run(capsys, "max_hours=1e-9", "max_steps=1", "output_dir=ended"))  # over in the last step: it is finished
    refused(run(capsys, "max_hours=0"), 2, "max_hours")


MODULE = ["-m", "liger_trainer", "run", "run.yaml", "ddp_backend=gloo"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *MODULE]
TWO = ["--multi_gpu", "--num_processes", "2"]  # without it accelerate starts one process where there is no GPU
OURS = [*MODULE, "--", *TWO]
ACCELERATE = ["-m", "accelerate.commands.launch", *TWO, *MODULE]


def ended(command: list[str], ready: str, number: int | None) -> tuple[int, str]:
    """Start a launcher, send it a signal when its log matches `ready`, and wait until none of its processes lives;
    return its exit code and its log."""
    environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        environment.pop(name, None)
    log, end = Path("log"), time.monotonic() + 120
    with log.open("w") as file:
        command = [sys.executable, *command]
        launcher = psutil.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    processes = [launcher]
    try:
        while number is not None and not re.search(ready, log.read_text(), re.DOTALL):
            assert launcher.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        processes += launcher.children(recursive=True)
        if number is not None:
            launcher.send_signal(number)
        alive = psutil.wait_procs(processes, timeout=60)[1]
        assert not alive, f"still there: {alive}\n{log.read_text()}"
        return launcher.returncode, log.read_text()
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


def check_one_checkpoint(log: str) -> None:
    stopped = re.findall(r"Stopped at step (\d+) of 100000; saved out/checkpoint-(\d+)", log)
    assert len(stopped) == 1 and len(set(stopped[0])) == 1, log
    saved = Path(f"out/checkpoint-{stopped[0][0]}")
    assert {"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in saved.iterdir()}


@pytest.mark.slow  # the two tests below are the quick ones
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (OURS, signal.SIGTERM, 130),
        (OURS, signal.SIGKILL, -9),
        (TORCHRUN, signal.SIGTERM, 1),
        (TORCHRUN, signal.SIGUSR1, -signal.SIGUSR1),
        (ACCELERATE, signal.SIGINT, 1),
    ],
)
def test_two_ranks_stop_together(folder, command, number, code):
    """They save the same step, and nothing goes on training, whatever becomes of the launcher."""
    found, log = ended(command, r"[1-9]\d*/100000", number)
    assert found == code, log
    check_one_checkpoint(log)
    if command is OURS:
        assert "Traceback" not in log


def test_a_signal_to_one_rank_stops_both(folder):
    logs = run_on(2, "command_ranks.py", "SIGUSR1", "run", "run.yaml", "ddp_backend=gloo")
    assert all(log.endswith("exit code 130\n") for log in logs), logs
    check_one_checkpoint("".join(logs))


LAUNCHER = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": rank}) for rank in "01"]
while ranks[0].poll() is None and not ranks[1].poll():
    time.sleep(0.05)
if ranks[1].poll():
    ranks[0].terminate()
sys.exit(max(rank.wait() for rank in ranks))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from liger_trainer.common.signals import handling
from liger_trainer.errors import DataError, Interrupted, LigerTrainerError
from liger_trainer.run.launch import as_rank

def stop(number, frame):
    raise Interrupted(f"rank heard {signal.Signals(number).name}")

try:
    with as_rank(), handling(stop):
        print("rank ready", flush=True)
        while True:
            time.sleep(0.05)
            if os.environ["RANK"] == "1" and Path("fail").exists() and Path("log").read_text().count("ready") == 2:
                raise DataError("wrong rows")
except LigerTrainerError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code", "heard"),
    [
        (signal.SIGUSR1, 130, ["SIGUSR1", "SIGUSR1"]),
        (signal.SIGKILL, -9, ["SIGTERM", "SIGTERM"]),  # the ranks miss it
        (None, 4, ["SIGTERM"]),  # rank 1 has failed
    ],
)
def test_our_launcher_and_its_ranks_end_together(tmp_path, monkeypatch, number, code, heard):
    """Behind a stand-in for accelerate; where a rank fails, its exit code is that of all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    Path("accelerate/commands").mkdir(parents=True)
    for name, text in (("__init__", ""), ("commands/__init__", ""), ("commands/launch", LAUNCHER)):
        Path(f"accelerate/{name}.py").write_text(text)
    Path("rank.py").write_text(RANK)
    Path("wait" if number else "fail").touch()
    script = "from liger_trainer.run import launch; launch._as_asked = lambda words, _: words; launch.launch([], [])"
    found, log = ended(["-c", script], "ready.*ready", number)
    assert (found, re.findall(r"rank heard (SIG[A-Z0-9]+)", log)) == (code, heard), log
