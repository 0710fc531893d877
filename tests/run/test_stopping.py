"""Stopping a run from outside: signals to one process, to a rank and to launchers, and the limit of hours."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import ACCELERATE, ENVIRONMENT, OURS, TORCHRUN, Launched
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from liger_trainer.cli import main
from liger_trainer.common.signals import SIGNALS
from liger_trainer.run import train_loop

SETTINGS = """
model_name_or_path: student
dataset_name: rows.jsonl
output_dir: out
per_device_train_batch_size: 2
learning_rate: 1e-2
save_strategy: no
max_length: 32
holdout_fraction: 0.2
num_sample_completions: 0
use_cpu: true
max_steps: 100000
logging_steps: 1
disable_tqdm: false
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("liger_trainer.run.output_dir._report", lambda output_dir: None)
    tiny_model("llama_tied").save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")
    Path("rows.jsonl").write_text("".join(json.dumps({"text": " ".join(WORDS[i : i + 5])}) + "\n" for i in range(20)))
    Path("run.yaml").write_text(SETTINGS)
    return tmp_path


def run(capsys, *overrides: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "run.yaml", *overrides])
    return int(stopped.value.code or 0), capsys.readouterr().err


class Send(TrainerCallback):
    """Sends this process signals at the start of step 2, so long after one another."""

    def __init__(self, *numbers, pause=0.0):
        self.numbers, self.pause = numbers, pause

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.pause)


@pytest.fixture
def send(monkeypatch):
    """Have the next runs get signals."""

    def add(*numbers, pause=0.0):
        made = train_loop.StopEarly

        def stop(*args):
            callback = made(*args)
            sender, begin = Send(*numbers, pause=pause), callback.on_step_begin

            def on_step_begin(args, state, control, **kwargs):
                begin(args, state, control, **kwargs)
                sender.on_step_begin(args, state, control, **kwargs)

            callback.on_step_begin = on_step_begin
            return callback

        monkeypatch.setattr(train_loop, "StopEarly", stop)

    return add


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_signal_saves_a_checkpoint(folder, capsys, send, number):
    """Schedulers send it to all processes, and launchers pass it on: it may come twice."""
    send(number, number)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    # save_strategy best decides after an evaluation whether to save; none is made
    best = ("save_strategy=best", "metric_for_best_model=loss", "greater_is_better=true")
    code, err = run(capsys, *best, "eval_strategy=steps", "eval_steps=1")
    assert code == 130, err
    assert f"{number.name}: Stopped at step 2 of 100000; saved out/checkpoint-2." in err
    assert "To go on: liger-trainer resume out\n" in err and "Traceback" not in err
    assert Path("out/checkpoint-2/model.safetensors").is_file()
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


def test_a_second_ctrl_c_stops_at_once(folder, capsys, send):
    send(signal.SIGINT, signal.SIGINT, pause=1.1)
    code, err = run(capsys)
    assert code == 130 and "interrupted; what the output_dir holds is kept" in err
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
    code, err = run(capsys)
    assert code == 130 and "interrupted" in err and not Path("out").exists()


def test_max_hours_saves_a_checkpoint(folder, capsys):
    code, err = run(capsys, "max_hours=1e-9")
    assert code == 124 and "max_hours: 1e-09 is over. Stopped at step 1 of 100000; saved out/checkpoint-1." in err
    assert "To go on: liger-trainer resume out\n" in err
    assert run(capsys, "max_hours=9", "max_steps=2", "output_dir=whole")[0] == 0
    code, _ = run(capsys, "max_hours=1e-9", "max_steps=1", "output_dir=last")
    assert code == 0  # over in the last step: the run is finished
    code, err = run(capsys, "max_hours=0")
    assert code == 2 and "max_hours" in err


@pytest.mark.parametrize(
    ("command", "target", "number", "code"),
    [
        (OURS, "launcher", signal.SIGTERM, 130),
        (OURS, "launcher", signal.SIGKILL, -9),
        pytest.param(OURS, "rank", signal.SIGUSR1, 130, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "launcher", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "launcher", signal.SIGUSR1, -signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(ACCELERATE, "launcher", signal.SIGINT, 1, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_stop_together(folder, command, target, number, code):
    """They save the same step, and nothing goes on training, whatever becomes of the launcher."""
    launched = Launched(command)
    try:
        {"launcher": launched.launcher, "rank": launched.ranks[-1]}[target].send_signal(number)
        assert launched.ended() == code
    finally:
        launched.kill()
    log = launched.log.read_text()
    stopped = re.findall(r"Stopped at step (\d+) of 100000; saved out/checkpoint-(\d+)", log)
    assert len(stopped) == 1 and len(set(stopped[0])) == 1, log
    saved = Path(f"out/checkpoint-{stopped[0][0]}")
    assert {"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in saved.iterdir()}
    if command is OURS:
        assert "Traceback" not in log


def test_the_launcher_has_the_exit_code_of_the_first_rank_that_failed(folder):
    Path("rows.jsonl").write_text('{"text": 3}\n{"text": "a"}\n')
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run([sys.executable, *OURS], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 4, ended.stderr
