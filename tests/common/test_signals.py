"""A run's worker processes end with it."""

import os
import signal
import time

import multiprocess
import psutil
import pytest
from datasets import Dataset
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerTrainer


def wait(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("rows", [2, 40], ids=["all at work", "some wait for work"])
def test_processes_of_dataset_num_proc_end_when_the_run_is_killed(rows):
    """The pool's workers and the process that manages its queue."""
    LigerTrainer(tiny_model(), train_args(LigerConfig), train_dataset=completions(2), processing_class=tiny_tokenizer())
    run = os.fork()
    if run == 0:
        try:
            Dataset.from_dict({"a": list(range(rows))}).map(lambda row: time.sleep(0.3 * rows), num_proc=2)
        finally:
            os._exit(1)
    wait(lambda: len(psutil.Process(run).children()) == 3)
    workers = psutil.Process(run).children()
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    gone, alive = psutil.wait_procs(workers, timeout=10)
    for worker in alive:
        worker.kill()
    assert len(gone) == 3


def test_a_worker_works_on_while_its_run_lives():
    with multiprocess.get_context("fork").Pool(1) as pool:
        assert pool.apply(lambda: time.sleep(1.2) or 7) == 7
