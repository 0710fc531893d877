"""The processes of a row of `benchmarks.many_gpus`: one launch, as a user would launch a training of his own.

Several GPUs: `accelerate launch` with TRL's fsdp2.yaml. One: plain Python. Tiny shapes on CPUs: torchrun, over gloo.
NVLink multicast stays off (NCCL_NVLS_ENABLE=0): not every host lends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from liger_trainer.config.engines import accelerate_names

from .many_gpus_rank import GO, TASK, Task
from .trainer_worker import Measured

ROOT = Path(__file__).parents[1]
RANK = "benchmarks.many_gpus_rank"
POLL = 0.1  # seconds


class Launch:
    """Processes that import at once, and train when they are told to. The names are those of `processes.Provider`."""

    def __init__(self, task: Task):
        self.task, self.folder = task, Path(tempfile.mkdtemp(prefix="many-gpus-"))
        self.shares: dict[str, float] = {}
        self._go = False
        (self.folder / TASK).write_bytes(pickle.dumps(task))
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command(task, self.folder), env=environment(task), cwd=ROOT, stdout=log, stderr=log
            )

    def start(self, method: str, *arguments: Any) -> None:
        """Let them train."""
        self._go = True
        (self.folder / GO).touch()

    def result(self, seconds: float | None = None) -> tuple[Measured | None, str | None]:
        """Wait for the imports, or for the training once it has been started; return what was measured, or why not.

        The end of the log of what fails goes to stderr.
        """
        awaited = "rank-{}.json" if self._go else "ready-{}"
        until = None if seconds is None else time.monotonic() + seconds
        paths = [self.folder / awaited.format(rank) for rank in range(self.task.gpus)]
        while True:
            code, late = self._process.poll(), until is not None and time.monotonic() > until  # before the files
            failure = self._failure()
            if failure is None and all(path.exists() for path in paths):
                return (self._merged() if self._go else None), None
            if failure is None and code is not None:
                failure = f"ended with exit code {code}: {self._log()[-1][:200]}"
            elif failure is None and late:
                failure = f"took more than {seconds:.0f} s"
            if failure:
                print("\n".join(self._log()[-60:]), file=sys.stderr)
                return None, failure
            time.sleep(POLL)

    def _answers(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*.json"))]

    def _failure(self) -> str | None:
        """Return why one of them failed; the others wait for it then."""
        return next((answer["failure"] for answer in self._answers() if "failure" in answer), None)

    def _merged(self) -> Measured:
        answers = self._answers()
        self.shares = most([answer["shares"] for answer in answers])
        return merged([Measured(**answer["measured"]) for answer in answers])

    def _log(self) -> list[str]:
        return (self.folder / "log").read_text(errors="replace").strip().splitlines() or ["it printed nothing"]

    def close(self) -> None:
        """End what still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            family = [*process.children(recursive=True), process]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family, timeout=30)  # until then they hold memory of the GPUs
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def command(task: Task, folder: Path) -> list[str]:
    """Return the command line of a row."""
    python, last = [sys.executable, "-m"], [RANK, str(folder)]
    if task.gpus == 1:
        return [*python, *last]
    if task.tiny:
        how = ["--nproc_per_node", str(task.gpus), "--master_port", str(_free_port())]
        return [*python, "torch.distributed.run", *how, "-m", *last]
    how = ["--config_file", str(accelerate_names()["fsdp2"]), "--num_processes", str(task.gpus)]
    return [*python, "accelerate.commands.launch", *how, "--main_process_port", str(_free_port()), "-m", *last]


def environment(task: Task) -> dict[str, str]:
    """Return the environment of a row: as many GPUs as it has; none for tiny shapes."""
    paths = [str(ROOT), *([str(ROOT / "tests" / "support")] if task.tiny else []), os.environ.get("PYTHONPATH", "")]
    ours = {
        "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "" if task.tiny else ",".join(map(str, range(task.gpus))),
        **({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} if task.tiny else {}),
    }  # fmt: skip
    return {**os.environ, **ours}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def merged(ranks: Sequence[Measured]) -> Measured:
    """Return the ranks' measurements as one: means of losses, sums of tokens, the slowest and the largest.

    `rows` has, for each step, the sums over the ranks' rows: tokens, and a weighted sum of their ids, so that rows on
    another rank are other rows.
    """
    first = ranks[0]
    return Measured(
        losses=[statistics.fmean(losses) for losses in zip(*(m.losses for m in ranks), strict=True)],
        norms=first.norms,
        rows=[
            (sum(tokens for tokens, _ in rows), sum((i + 1) * ids for i, (_, ids) in enumerate(rows)))
            for rows in zip(*(m.rows for m in ranks), strict=True)
        ],
        ms=[max(ms) for ms in zip(*(m.ms for m in ranks), strict=True)],
        seconds=max(m.seconds for m in ranks),
        tokens=sum(m.tokens for m in ranks),
        padded_tokens=sum(m.padded_tokens for m in ranks),
        busy_ms=None if first.busy_ms is None else max(m.busy_ms or 0.0 for m in ranks),
        kernels=first.kernels,
        traced_ms=max(m.traced_ms for m in ranks),
        reserved_mib=None if first.reserved_mib is None else max(m.reserved_mib or 0.0 for m in ranks),
        weights_mib=max(m.weights_mib for m in ranks),
        allocated_mib=None if first.allocated_mib is None else max(m.allocated_mib or 0.0 for m in ranks),
        notes=first.notes,
    )


def most(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: max(of[part] for of in shares) for part in shares[0]}
