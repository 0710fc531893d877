"""Runs of several trainings: started, killed in one of them, and what they leave."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from commands import call, save_models, write_rows
from tiny import WORDS

from liger_trainer.cli import main
from liger_trainer.common.files import sha256
from liger_trainer.run import train_loop


def enter(folder: Path, models: Path, monkeypatch: Any) -> None:
    """Work in `folder`, with links to the models in another, and without reports, but where a test asks for one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("liger_trainer.run.output_dir._report", lambda output_dir: None)
    for name in ("student", "teacher"):
        Path(name).symlink_to(models / name)


def two_models(folder: Path) -> Path:
    """Save a student and a teacher; return the folder."""
    save_models(folder, "student", "teacher")
    return folder


def write_completions() -> None:
    rows = [{"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i : i + 4])} for i in range(20)]
    write_rows(Path("rows.jsonl"), rows)


def run(capsys: Any, *words: str) -> str:
    code, out, err = call(capsys, *words)
    assert code == 0, err
    return " ".join(out.split()) + err


def metrics(path: Path | str) -> dict:
    return json.loads(Path(path, "metrics.json").read_text())


def weights(path: Path | str) -> dict[str, str]:
    return {file.name: sha256(file) for file in Path(path).glob("*.safetensors")}


def killed(*words: str, stage: str, step: int) -> None:
    """Run a command in a process of its own, which is killed at the end of a step of a stage."""
    child = os.fork()
    if child == 0:
        stop = train_loop.StopEarly
        ends = stop.on_step_end

        def on_step_end(self, args, state, control, **kwargs):
            if Path(args.output_dir).name == stage and state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return ends(self, args, state, control, **kwargs)

        stop.on_step_end = on_step_end
        try:
            main(list(words))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
