"""What is seen of a run while it goes: a line a log and a line an evaluation, which stay, and bars on a terminal."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from ..common import limits
from ..trainers.metrics import tokens_before
from .reports.tables import duration

IN_TRAINING = ("loss", "forward_kl", "agreement_at_1", "mean_token_accuracy", "grad_norm")
HELD_OUT = ("loss", "forward_kl", "reverse_kl", "agreement_at_1", "perplexity", "mean_token_accuracy")
"""Metrics of a line. Terms of a loss follow the loss; accuracy is shown where there is no agreement."""
SHORT = {"agreement_at_1": "agreement", "mean_token_accuracy": "accuracy"}
TERM = "loss/"
BEFORE, BETWEEN, AFTER = "measuring before", "evaluating", "measuring after"


class RunProgress(ProgressCallback):
    """Prints a line for each log and each evaluation on stdout. On a terminal, bars on stderr say what is going on.

    Args:
        bars: False: no bars; None: where stderr is a terminal.
    """

    def __init__(self, bars: bool | None) -> None:
        super().__init__()
        self.disable = None if bars is None else not bars
        self.phase = BEFORE
        self.began, self.began_at = 0.0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.phase, self.current_step = BETWEEN, state.global_step
        if state.is_world_process_zero:
            self.training_bar = self._bar("training", state.max_steps, state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.began:
            self.began, self.began_at = time.perf_counter(), state.global_step

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            self.prediction_bar = self._bar(self.phase, len(eval_dataloader))
            if self.prediction_bar.disable and self.phase != BETWEEN:
                print(f"{self.phase}: held-out rows, batches: {len(eval_dataloader)}", flush=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        if state.is_world_process_zero and self.phase == BETWEEN:
            held_out = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
            took = duration(held_out.get("runtime"))
            self._print(state, ["held out:", *_figures(held_out, HELD_OUT), f"in {took}" if took else ""])

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        facts = _figures(logs, IN_TRAINING)
        if "learning_rate" in logs:
            facts.append(f"lr {logs['learning_rate']:.3g}")
        if "tokens_per_second" in logs:
            facts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
        self._print(state, [*facts, self._left(state)])

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self.phase = AFTER

    def _left(self, state: Any) -> str:
        done = state.global_step - self.began_at
        if not self.began or done < 1 or state.global_step >= state.max_steps:
            return ""
        return f"ETA {duration((time.perf_counter() - self.began) / done * (state.max_steps - state.global_step))}"

    def _print(self, state: Any, facts: list[str]) -> None:
        width = len(str(state.max_steps))
        line = "  ".join([f"step {state.global_step:>{width}}/{state.max_steps}", *filter(None, facts)])
        tqdm.write(line, file=sys.stdout)  # above the bars
        sys.stdout.flush()

    def _bar(self, name: str, total: int, done: int = 0) -> tqdm:
        return tqdm(desc=name, total=total, initial=done, disable=self.disable, leave=False, dynamic_ncols=True)


def _figures(metrics: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return names with values, the terms of the loss behind the loss."""
    terms = [name for name in metrics if name.startswith(TERM)]
    order = [*names[:1], *terms, *(name for name in names[1:] if f"{TERM}{name}" not in terms)]
    if "agreement_at_1" in metrics:
        order = [name for name in order if name != "mean_token_accuracy"]
    shown = [(name, metrics[name]) for name in order if isinstance(metrics.get(name), (int, float))]
    return [f"{SHORT.get(name, name.removeprefix(TERM))} {value:.4g}" for name, value in shown]


def show_progress(trainer: Trainer) -> None:
    """Show the progress of a run in place of transformers' bars and dictionaries; in a notebook its table stays.

    Call it after the callback that measures the student was added: the bar of training comes below that of measuring.
    """
    shown = [type(callback) for callback in trainer.callback_handler.callbacks]
    for usual in (ProgressCallback, PrinterCallback):
        if usual in shown:
            trainer.remove_callback(usual)
            trainer.add_callback(RunProgress(False if usual is PrinterCallback else None))


# Tokens per second, peak memory and the use of the GPU in every log of a run.


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
