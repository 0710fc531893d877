"""Run a script of the tests in several processes that train together on this machine, as torchrun does.

To import torch and the trainers takes a process 8 seconds. So those without a GPU are forked, from a process that
`keep_as_imported` has forked from the tests' own when it had imported everything and run nothing.
"""

import gc
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])


_imported: Connection | None = None


def keep_as_imported() -> None:
    """Fork a process that forks those of `run_on` from now on. It ends with this one."""
    global _imported
    if torch.cuda.is_available():  # it does not survive a fork
        return
    _imported, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        _imported.close()
        try:
            while True:
                theirs.send(_run_all("fork", *theirs.recv()))
        finally:  # in particular, EOFError: those that asked are gone
            os._exit(0)
    theirs.close()


def free_port() -> str:
    """Return a port by which the processes of a run may find each other: several runs may go on at a time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_on(count: int, script: str, *arguments: Any, timeout: float = 300, gpus: bool = False) -> list[str]:
    """Run tests/support/`script` in `count` processes, each on another GPU if `gpus`; return what each printed.

    Raises:
        AssertionError: one of them failed; it shows what they printed.
    """
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS,
    }  # fmt: skip
    if not gpus:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(count)]
        command = [str(HERE / script), *map(str, arguments)]
        jobs = [(rank, os.getcwd(), environment, command, log) for rank, log in enumerate(logs)]
        if gpus or _imported is None:
            codes = _run_all("spawn", jobs, timeout)
        else:
            _imported.send((jobs, timeout))
            codes = _imported.recv()
        printed = [log.read_text() if log.is_file() else "" for log in logs]
        assert codes == [0] * count, f"{codes}\n" + "\n".join(printed)
        return printed


def outcome_of(count: int, script: str, *arguments: Any, **how: Any) -> Any:
    """Run a script that gets a file before its arguments, and return what it has put there by `finish`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.pt")
        run_on(count, script, file, *arguments, **how)
        return torch.load(file)


def finish(results: Any, file: str | Path) -> None:
    """The end of a script: what the first process has found is kept."""
    if torch.distributed.get_rank() == 0:
        torch.save(results, file)
    torch.distributed.destroy_process_group()


def _run_all(method: str, jobs: list[tuple], timeout: float) -> list[int | None]:
    """Return the exit code of each job."""
    context: Any = multiprocessing.get_context(method)
    processes = [context.Process(target=_run, args=job) for job in jobs]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def _run(rank: int, folder: str, environment: dict[str, str], command: list[str], log: Path) -> None:
    gc.freeze()  # each training collects garbage, see frozen_heap of conftest.py
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    tempfile.tempdir = None  # as the environment says
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has its own
    sys.path[:0] = PATHS.split(os.pathsep)
    sys.argv = command
    random.seed()  # not as in the other processes
    _triton_as_told()
    # Data loaders' workers would else be started with all imports.
    multiprocessing.set_start_method("fork", force=True)
    runpy.run_path(command[0], run_name="__main__")


def _triton_as_told() -> None:
    """By the environment, which the test may have changed after the import."""
    from liger_trainer.kernels import _triton

    _triton.INTERPRETED = _triton.INTERPRETED and os.environ.get("TRITON_INTERPRET") == "1"
