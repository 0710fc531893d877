"""Functions that run side by side, each in a process of its own: one that fails or is too late stops no other."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Task = tuple[Callable[..., Any], tuple[Any, ...]]


def _use_device() -> None:
    """Fail where the device cannot be used in this process."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


def start_importing(preload: str) -> None:
    """Start the fork server of `context_for`, which imports the module meanwhile."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that an import may ask for the device
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])
    multiprocessing.forkserver.ensure_running()


@functools.cache
def context_for(preload: str) -> Any:
    """Return the context whose processes start quickest: those of a fork server have imported the module `preload`
    already. If they cannot use the device, as where an import has touched it, each process imports for itself."""
    start_importing(preload)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_use_device, daemon=True)
    process.start()
    process.join()
    if process.exitcode == 0:
        return context
    print("No use of the device after a fork: each process imports for itself.", flush=True)
    return multiprocessing.get_context("spawn")


def work(function: Callable[..., Any], arguments: tuple[Any, ...], path: Path) -> None:
    """Write what `function` returns to `path`, or why it failed; what it prints goes to a log beside it."""
    log = path.with_suffix(".log")
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            content = {"result": function(*arguments)}
        except BaseException as error:
            traceback.print_exc(file=file)
            first = (str(error).strip().splitlines() or [""])[0]
            content = {"failure": f"{type(error).__name__}: {first}"[:300]}
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(content, ensure_ascii=False))
    staged.replace(path)


def run_together(
    tasks: Mapping[str, Task],
    context: Any,
    folder: Path,
    deadline: float,
    done: Callable[[str, Any, str | None], None],
    start: Any = None,
) -> None:
    """Start all tasks at once, and call `done` with name, result and failure as each ends.

    Args:
        deadline: by `time.monotonic()`; what still runs then is killed, and is a failure.
        start: a barrier that they wait at. It is broken once one of them fails, so that the others do not wait for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running = {}
    for name, (function, arguments) in tasks.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        process = context.Process(target=work, args=(function, arguments, path), daemon=True)
        process.start()
        running[name] = process
    try:
        while running:
            left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            ended = multiprocessing.connection.wait([process.sentinel for process in running.values()], left)
            for name, process in list(running.items()):
                if ended and process.sentinel not in ended:
                    continue
                if not ended:
                    process.kill()
                process.join()
                result, failure = _answer(folder / f"{name}.json", process.exitcode, in_time=bool(ended))
                del running[name]
                if failure is not None and start is not None:
                    start.abort()
                done(name, result, failure)
    finally:
        for process in running.values():
            process.kill()


def _answer(path: Path, exit_code: int | None, in_time: bool) -> tuple[Any, str | None]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content.get("result"), content.get("failure")
    return None, f"its process ended with exit code {exit_code}" if in_time else "out of time"
