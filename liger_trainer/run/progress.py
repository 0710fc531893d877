"""What is seen of a run while it goes: a line a log and a line an evaluation, which stay, and bars on a terminal; and
its speed, memory and use of the GPU, which every log has."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from ..common import signals
from ..trainers.metrics import tokens_before
from .metric_rows import duration

IN_TRAINING = ("loss", "forward_kl", "agreement_at_1", "mean_token_accuracy", "grad_norm")
# Metrics of a line. Terms of a loss follow the loss; accuracy is shown where there is no agreement.
HELD_OUT = ("loss", "forward_kl", "reverse_kl", "agreement_at_1", "perplexity", "mean_token_accuracy", "mtp_accepted")
SHORT = {"agreement_at_1": "agreement", "mean_token_accuracy": "accuracy", "mtp_accepted": "accepted"}
TERM = "loss/"
MEASURING_BEFORE, BETWEEN, AFTER = "before training", "evaluating", "after training"
SILENT_FOR = 20.0  # seconds without a line, in a measurement without bars


class RunProgress(ProgressCallback):
    """Prints a line for each log and each evaluation on stdout. On a terminal, bars on stderr say what is going on.

    Args:
        bars: False: no bars; None: where stderr is a terminal.
        speed: measures the steps.
    """

    def __init__(self, bars: bool | None, speed: "SpeedMetrics") -> None:
        super().__init__()
        self.disable = None if bars is None else not bars
        self.phase, self.speed = MEASURING_BEFORE, speed
        self.said = 0.0  # when the last line about a measurement was printed

    def on_train_begin(self, args, state, control, **kwargs):
        self.phase, self.current_step = BETWEEN, state.global_step
        if state.is_world_process_zero:
            self.training_bar = self._bar("training", state.max_steps, state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            # transformers makes one without a name, which does not say whether this is before, between or after.
            self.prediction_bar = self._bar(self.phase, len(eval_dataloader))
            self.batches = 0
        # Minutes without a line look like a run that hangs.
        if self.prediction_bar.disable and self.phase != BETWEEN:
            if not self.batches:
                print(f"{self.phase}: measuring the held-out rows, batches: {len(eval_dataloader)}", flush=True)
                self.said = time.perf_counter()
            elif time.perf_counter() - self.said > SILENT_FOR:
                print(f"{self.phase}: batch {self.batches} of {len(eval_dataloader)}", flush=True)
                self.said = time.perf_counter()
        self.batches += 1
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
        each, left = self.speed.seconds_a_step(), state.max_steps - state.global_step
        return "" if each is None or left <= 0 else f"ETA {duration(each * left)}"

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


def show_progress(trainer: Trainer, speed: "SpeedMetrics") -> None:
    """Show the progress of a run in place of transformers' bars and dictionaries; in a notebook its table stays.

    Call it after the callback that measures the student was added: its bar comes above the one of training.
    """
    # In a notebook transformers has put its table there instead of these two.
    shown = [type(callback) for callback in trainer.callback_handler.callbacks]
    for usual in (ProgressCallback, PrinterCallback):
        if usual in shown:
            trainer.remove_callback(usual)
            trainer.add_callback(RunProgress(False if usual is PrinterCallback else None, speed))


class SpeedMetrics(TrainerCallback):
    """Adds `tokens_per_second`, `peak_memory_mib` and, where it can be read, `gpu_utilization` to every training log.

    The clock runs during steps, not during evaluations and saves. Memory is the peak since training began.
    """

    def __init__(self) -> None:
        self._begin(0, 0)

    def _begin(self, step: int, tokens: float) -> None:
        self.start = self.end = self.paused = self.all_paused = self.first = 0.0
        self.tokens, self.out_of_step = tokens, True
        self.began_at = self.step = step
        self.recent: deque[float] = deque(maxlen=10)  # seconds of a step, the mean of each log

    def on_train_begin(self, args, state, control, **kwargs):
        # auto_find_batch_size begins again after an attempt that did not fit, whose time does not count.
        self._begin(state.global_step, tokens_before(state))

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.start == 0.0:
            self.start = now
        # The time between two steps counts only where nothing else was done in it.
        elif self.out_of_step:
            self.paused += now - self.end
            self.all_paused += now - self.end
        self.out_of_step = False

    def on_step_end(self, args, state, control, **kwargs):
        self.end = time.perf_counter()
        if not self.first:
            self.first = self.end - self.start

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
        self._remember(state.global_step, seconds)
        self.start, self.paused, self.tokens = now, 0.0, logs["num_tokens"]

    def _remember(self, step: int, seconds: float) -> None:
        steps = step - self.step
        if self.step == self.began_at:  # kernels are compiled in the first step: it tells nothing of the others
            steps, seconds = steps - 1, seconds - self.first
        if steps > 0:
            self.recent.append(seconds / steps)
        self.step = step

    def seconds_a_step(self) -> float | None:
        """Return how long a step takes now, with its share of evaluations and saves; None until that is known.

        It is the median of the last logs, so that a busy moment of the machine does not count.
        """
        if not self.recent:
            return None
        return statistics.median(self.recent) + self.all_paused / (self.step - self.began_at)


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
    return signals.peak_memory_mib()
