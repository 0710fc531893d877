"""Captures that are killed over and over, and one that is not. Run as a script: FOLDER KIND MOMENTS

Each capture is another process, forked from one that has imported everything. It is killed by SIGKILL after a
random time, or kills itself right before or after one of the calls that make a shard and the index durable.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig
from liger_trainer.teachers.cache import store as teacher_cache
from liger_trainer.trainers import capture as cache_capture

BYTES_OF_A_SHARD = 512


def captured(folder: str, kind: str) -> None:
    options = {"cache_kind": kind, "per_device_eval_batch_size": 2, "cache_shard_mb": 1}
    options |= {} if kind == "hidden" else {"cache_entries": 8}
    args = train_args(LigerDistillConfig, teacher="cache", teacher_cache_dir=folder, **options)
    cache_capture.capture(tiny_model(seed=3), args, tiny_tokenizer(), completions(24))


def die_at_a_call(number: int) -> None:
    """Before or after the number-th of these calls, by turns."""
    calls = 0

    def mortal(function):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done = function(*args)
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    os.fsync, os.replace = mortal(os.fsync), mortal(os.replace)


def attempt(folder: str, kind: str, calls: int | None, seconds: float | None) -> bool:
    """Whether the capture came to its end."""
    child = os.fork()
    if child == 0:
        try:
            if calls is not None:
                die_at_a_call(calls)
            captured(folder, kind)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, "the capture failed"
    return True


def main(folder: Path, kind: str, moments: int) -> int:
    """Return how many captures were killed on the way to the end of one."""
    start = time.perf_counter()
    assert attempt(str(folder / "whole"), kind, None, None)
    took, rng, killed = time.perf_counter() - start, random.Random(3), 0
    path = str(folder / "killed")
    timed = [(None, rng.uniform(0.1, 0.5) * took) for _ in range(moments // 5)]
    # six calls a shard or a part, before and after each
    counted = [(calls, None) for calls in rng.sample(range(1, 25), moments - len(timed))]
    for calls, seconds in timed + counted:
        if not is_finished(path):
            killed += not attempt(path, kind, calls, seconds)
    assert is_finished(path) or attempt(path, kind, None, None)
    return killed


def is_finished(path: str) -> bool:
    file = Path(path, teacher_cache.INDEX)
    return file.is_file() and teacher_cache.read_index(file.parent).finished


if __name__ == "__main__":
    cache_capture.MIB, cache_capture.SECONDS_OF_A_PART = BYTES_OF_A_SHARD, 0.0  # a part after each batch
    folder = Path(sys.argv[1])
    (folder / "times").write_text(str(main(folder, sys.argv[2], int(sys.argv[3]))))
