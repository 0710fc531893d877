"""Run a script of the tests in several processes that train together on this machine, as torchrun does."""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])


def run_on(count: int, script: str, *arguments: Any, timeout: float = 300, gpus: bool = False) -> list[str]:
    """Run tests/support/`script` in `count` processes, each on a GPU of its own if `gpus`; return what each printed.

    On the CPU they are forked from one process that has imported torch and the trainers, which takes 8 seconds, once.

    Raises:
        AssertionError: one of them failed; it shows what they printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS,
    }  # fmt: skip
    if not gpus:
        common |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn" if gpus else "forkserver")
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, common):  # a server takes it over
        if not gpus:
            context.set_forkserver_preload(["liger_trainer.trainers.distill_trainer", "peft", "tiny"])
        logs = [Path(folder, f"{rank}.log") for rank in range(count)]
        command = [str(HERE / script), *map(str, arguments)]
        processes = [context.Process(target=_run, args=(rank, common, command, log)) for rank, log in enumerate(logs)]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout)
        finally:
            for process in processes:
                process.kill()
        codes = [process.exitcode for process in processes]
        printed = [log.read_text() if log.is_file() else "" for log in logs]
        assert codes == [0] * count, f"{codes}\n" + "\n".join(printed)
        return printed


def _run(rank: int, environment: dict[str, str], command: list[str], log: Path) -> None:
    gc.freeze()  # each training collects garbage, see frozen_heap of conftest.py
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:0] = PATHS.split(os.pathsep)
    sys.argv = command
    # A fork server's children would start data loaders' workers by a server of their own, with all its imports.
    multiprocessing.set_start_method("fork", force=True)
    runpy.run_path(command[0], run_name="__main__")
