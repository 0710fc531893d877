"""Runs of two processes behind a launcher: ours, torchrun and `accelerate launch`."""

import os
import re
import sys
import time
from pathlib import Path

import psutil

import liger_trainer

ENVIRONMENT = {"PYTHONPATH": str(Path(liger_trainer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
MODULE = ["-m", "liger_trainer", "run", "run.yaml", "ddp_backend=gloo"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *MODULE]
TWO = ["--multi_gpu", "--num_processes", "2"]  # without it accelerate starts one process where there is no GPU
OURS = [*MODULE, "--", *TWO]
ACCELERATE = ["-m", "accelerate.commands.launch", *TWO, *MODULE]


class Launched:
    """A run of two processes behind a launcher, in its second step or later of `steps`, begun in `folder`."""

    def __init__(self, command: list[str], folder: Path = Path(), steps: int = 100_000) -> None:
        environment = {**os.environ, **ENVIRONMENT}
        for name in ("RANK", "ACCELERATE_USE_CPU"):
            environment.pop(name, None)
        self.log, self.steps = folder / "log", steps
        with self.log.open("w") as log:
            self.launcher = psutil.Popen(
                [sys.executable, *command], env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        self.processes = [self.launcher]
        end = time.monotonic() + 120
        while not self._training():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)
        self.processes = [self.launcher, *self.launcher.children(recursive=True)]
        self.ranks = [p for p in self.processes if "RANK" in p.environ()]
        assert len(self.ranks) == 2

    def _training(self) -> bool:
        assert self.launcher.poll() is None, self.log.read_text()
        return bool(re.search(rf"[1-9]\d*/{self.steps}\b", self.log.read_text()))

    def ended(self, seconds: float = 60) -> int:
        """Wait until none of the processes lives; return the launcher's exit code."""
        _, alive = psutil.wait_procs(self.processes, timeout=seconds)
        assert not alive, f"still there: {alive}\n{self.log.read_text()}"
        return self.launcher.returncode

    def kill(self) -> None:
        for process in self.processes:
            if process.is_running():
                process.kill()
