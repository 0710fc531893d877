"""Other tools' commands, run as a user runs them, and the losses that they log."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "AXOLOTL_DO_NOT_TRACK": "1",
    "DISABLE_VERSION_CHECK": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def run(command: str, *arguments: Any, cwd: Path, **environment: str) -> str:
    """Run a command that lies next to this Python, and return what it printed. A failure is an AssertionError."""
    done = attempt(command, *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def attempt(command: str, *arguments: Any, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name(command)), *map(str, arguments)],
        cwd=cwd, env={**os.environ, **ENVIRONMENT, **environment}, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def logged(output_dir: Path, name: str = "loss") -> list[float]:
    """Return what the Trainer logged under a name, step by step."""
    (state,) = output_dir.glob("**/trainer_state.json")
    return [float(entry[name]) for entry in json.loads(state.read_text())["log_history"] if name in entry]
