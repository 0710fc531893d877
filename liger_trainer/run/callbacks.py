"""Tokens per second, peak memory and the use of the GPU in every log of a run."""

import time

import torch
from transformers import TrainerCallback, TrainingArguments

from ..common import limits
from ..trainers.metrics import tokens_before


class Pace(TrainerCallback):
    """Adds `tokens_per_second`, `peak_memory_mib` and, where it can be read, `gpu_utilization` to every training log.

    The clock runs during steps, not during evaluations and saves. Memory is the peak since training began.
    """

    def __init__(self) -> None:
        self.start = self.end = self.paused = 0.0
        self.tokens, self.out_of_step = 0.0, True

    def on_train_begin(self, args, state, control, **kwargs):
        self.tokens = tokens_before(state)

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.start == 0.0:
            self.start = now
        elif self.out_of_step:
            self.paused += now - self.end
        self.out_of_step = False

    def on_step_end(self, args, state, control, **kwargs):
        self.end = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs):
        self.out_of_step = True

    on_save = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or "num_tokens" not in logs:
            return
        now = self.end = time.perf_counter()  # reading the losses waited for the device, so its steps are done
        tokens, seconds = logs["num_tokens"] - self.tokens, now - self.start - self.paused
        facts = {"tokens_per_second": round(tokens / seconds, 1), "peak_memory_mib": round(peak_memory_mib(args), 1)}
        busy = gpu_utilization(args)
        if busy is not None:
            facts["gpu_utilization"] = busy
        logs.update(facts)  # trackers read these logs; log_history holds a copy
        state.log_history[-1].update(facts)
        self.start, self.paused, self.tokens = now, 0.0, logs["num_tokens"]


def gpu_utilization(args: TrainingArguments) -> float | None:
    """Return the percent of the last second or less in which this process's GPU computed, as NVML counts it, without
    waiting for the device.

    None where nothing counts it: on a CPU, without the package nvidia-ml-py, on a part of a GPU (MIG).
    """
    if args.device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization())
    except Exception:  # those of NVML are classes of a package that may not be there
        return None


def peak_memory_mib(args: TrainingArguments) -> float:
    """Return the GPU memory allocated since training began; on a CPU, the resident memory of the process."""
    if args.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return limits.peak_memory_mib()
