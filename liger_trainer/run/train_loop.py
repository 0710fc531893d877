"""The training of a run: measure the student, train it, stop it early, show how it goes, and say what that took."""

import json
import math
import os
import shlex
import signal
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ..common import signals
from ..common.checkpoints import checkpoints_in, newest_whole, refuse_damaged
from ..common.console import announce, on_first_rank
from ..common.files import BEFORE, METRICS
from ..common.signals import handling
from ..compat.deepspeed import shape_of
from ..errors import ConfigError, Interrupted, OutOfTimeError
from ..trainers.metrics import tokens_before
from ..trainers.sft_trainer import LigerTrainer
from .reports.tables import duration
from .results import TrainingFacts, start_output
from .samples import Measurement

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


@dataclass
class Clock:
    """Seconds of each named part of a run, and when it began by `time.monotonic()`."""

    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 2)


class MeasureBefore(TrainerCallback):
    """Measures the student before the first step, prepares the output directory, and has the result stored in each
    checkpoint.

    It waits until training is set up: an evaluation before `Trainer.train()` marks the model as prepared, and then
    `train()` leaves out the DDP wrapper and every rank follows its own gradients (accelerate 1.15).
    """

    def __init__(
        self,
        trainer: LigerTrainer,
        config: "RunConfig",
        measure: Callable[[], Measurement],
        clock: Clock,
        show: Callable[[dict[str, float]], None],
    ) -> None:
        self.trainer, self.config, self.measure, self.clock, self.show = trainer, config, measure, clock, show
        self.result: Measurement | None = None
        self.began_at = self.tokens_before = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if self.result is None:  # else auto_find_batch_size begins again, with weights that have trained by now
            _check_steps_left(args, state, self.trainer.resumed_from)
            _warn_of_few_steps(self.trainer, state.max_steps)
            self.began_at, self.tokens_before = state.global_step, tokens_before(state)
            with self.clock("measure_before"):
                # A resumed run goes on with the measurement that its first start made.
                self.result = self._stored() or self.measure()
            self.show(self.result.metrics)
            self.trainer.checkpoint_files[BEFORE] = json.dumps(asdict(self.result))
            _check_best_metric(self.config, self.result.metrics)
        start_output(self.trainer, self.config)  # after all checks: it removes what is overwritten
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.ended = time.perf_counter()

    def _stored(self) -> Measurement | None:
        """Return the measurement that the checkpoint holds, if training goes on from one."""
        checkpoint = self.trainer.resumed_from
        if checkpoint is None:
            return None
        text = on_first_rank(self.trainer.is_world_process_zero(), lambda: _text_of(checkpoint / BEFORE))
        if text is None:
            if self.trainer.is_world_process_zero():
                warnings.warn(
                    f"{checkpoint} has no {BEFORE}, the measurement before training, as no run saved it: what "
                    f"{METRICS} and the report call before is the student after step {self.began_at}.",
                    stacklevel=2,
                )
            return None
        # Written by our own process into the checkpoint, whose manifest has its SHA-256.
        content = json.loads(text)
        content.pop("drafts", None)  # of checkpoints of earlier versions
        return Measurement(**content)


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def train(
    trainer: LigerTrainer,
    config: "RunConfig",
    measure: Callable[[], Measurement],
    clock: Clock,
    show: Callable[[dict[str, float]], None],
) -> tuple[Measurement, TrainingFacts]:
    """Measure the student, then train it to the end. A checkpoint brings its own measurement.

    Args:
        show: prints the metrics of that measurement.

    Raises:
        ConfigError: the optimizer's package is not installed; the checkpoint is at the last step already, or was saved
            with other data or models; metric_for_best_model is none of the metrics.
        Interrupted: a signal came, or `max_hours` are over; the checkpoint to go on from is named.
        NonFiniteError: a number in training is NaN or infinite, and steps are not left out for it.
    """
    stop, first = StopEarly(config["max_hours"], clock.began), MeasureBefore(trainer, config, measure, clock, show)
    speed = SpeedMetrics()
    trainer.callback_handler.callbacks.insert(0, speed)  # before the trackers, so that they get its values
    trainer.add_callback(stop)
    trainer.add_callback(first)
    show_progress(trainer, speed)
    _check_optimizer(trainer, config)
    # Only around training: before and after it a signal is a KeyboardInterrupt, since there is nothing to save.
    with handling(stop.receive):
        trainer.train(resume_from_checkpoint=config["resume_from_checkpoint"], force_resume=config["force_resume"])
        trainer.accelerator.wait_for_everyone()  # the first process may still be writing; a launcher ends all with one
    seconds = time.perf_counter() - first.ended
    # Without the measurement before, which has its own entry.
    clock.seconds["train"] = round(seconds, 2)
    all_steps_made = trainer.state.global_step >= trainer.state.max_steps
    # Hours that end in the last step cost nothing more than the last measurement; who sends a signal wants an end now.
    if stop.reason and not (stop.reason == OUT_OF_TIME and all_steps_made):
        raise stop.error(_how_to_go_on(trainer))
    assert first.result is not None
    return first.result, _facts(trainer, seconds, first)


def _how_to_go_on(trainer: LigerTrainer) -> str:
    """Say what was saved. Checkpoints of later steps may be there, from before the run went back to an earlier one."""
    state, run_dir = trainer.state, Path(str(trainer.args.output_dir))
    saved = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if not saved.is_dir():  # a signal behind the last step, after which `save_strategy` saves nothing
        return f"Stopped after step {state.global_step} of {state.max_steps}; nothing was saved of it."
    newer = [] if checkpoints_in(run_dir)[-1:] == [saved] else ["--checkpoint", saved.name]
    return (
        f"Stopped at step {state.global_step} of {state.max_steps}; saved {saved}. "
        f"To go on: liger-trainer {shlex.join(['resume', str(run_dir), *newer])}"
    )


def _check_steps_left(args: TrainingArguments, state: TrainerState, checkpoint: Path | None) -> None:
    """Refuse to train a finished run on for no steps, and a checkpoint that is beyond the last one.

    A run that was killed between its last step and the end of it has something left: saving and measuring.
    """
    # metrics.json is written last, so without it something is left to do after the last step.
    finished = Path(str(args.output_dir), METRICS).is_file()
    if checkpoint and (state.global_step > state.max_steps or (finished and state.global_step == state.max_steps)):
        raise ConfigError(
            f"{checkpoint} is after step {state.global_step} of {state.max_steps}: nothing is left to train. To train "
            "on, say for how long: max_steps=... or num_train_epochs=...; to measure what is there: "
            f"liger-trainer eval {shlex.quote(str(checkpoint))}"
        )


FEW_STEPS = 10


def _warn_of_few_steps(trainer: LigerTrainer, steps: int) -> None:
    """Say so where the rows make only a few steps, in which hardly anything is learned; not where `max_steps` asks."""
    args = trainer.args
    if args.max_steps > 0 or steps >= FEW_STEPS:
        return
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    packed = "sequences that rows are packed into" if args.packing else "rows"
    more = [f"num_train_epochs={math.ceil(args.num_train_epochs * FEW_STEPS / steps)}"]
    more += ["packing=false"] if args.packing else []
    more += ["gradient_accumulation_steps=1"] if args.gradient_accumulation_steps > 1 else []
    only = "1 step" if steps == 1 else f"{steps} steps"
    announce(
        f"this run has only {only}, since there are {len(trainer.train_dataset):,} {packed} and a step takes up to "
        f"{rows}: the model will hardly change. More steps come of {', '.join(more)}."
    )


def _check_optimizer(trainer: LigerTrainer, config: "RunConfig") -> None:
    """Find out now whether Trainer can make the optimizer: it makes it only after the student is measured."""
    model: Any = trainer.model
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    except (ImportError, ValueError) as error:  # a package that is not installed; wrong optim_args
        raise config.error("optim", f"{config['optim']}: {error}") from None


def _check_best_metric(config: "RunConfig", metrics: Mapping[str, float]) -> None:
    """Find out now whether there is such a metric: Trainer looks only after the first evaluation."""
    name = config["metric_for_best_model"]
    if name is not None and config["eval_strategy"] != "no" and name.removeprefix("eval_") not in metrics:
        raise config.error("metric_for_best_model", f"expected one of {', '.join(sorted(metrics))}, got {name!r}.")


def check_checkpoint(config: "RunConfig") -> None:
    """Look at what `resume_from_checkpoint` names, by names, sizes and headers: before anything is loaded. The trainer
    reads every byte.

    Raises:
        ConfigError: there is none.
        CorruptError: it is damaged; where the newest is meant, all are.
    """
    wanted = config["resume_from_checkpoint"]
    if wanted is True:
        output_dir = Path(config["output_dir"]).expanduser()
        if newest_whole(output_dir, contents=False) is None:
            raise config.error("resume_from_checkpoint", f"no checkpoint in {output_dir}.")
    elif wanted and not Path(wanted).is_dir():
        raise config.error("resume_from_checkpoint", f"no such directory: {wanted}")
    elif wanted:
        refuse_damaged(Path(wanted))


def _facts(trainer: LigerTrainer, seconds: float, first: MeasureBefore) -> TrainingFacts:
    gpu = trainer.args.device.type == "cuda"
    tokens = trainer.tokens_trained  # the last log may be of steps before, or of an evaluation
    assert isinstance(trainer.model, torch.nn.Module)
    parameters = list(trainer.model.parameters())
    return TrainingFacts(
        steps=trainer.state.global_step,
        epochs=round(trainer.state.epoch or 0.0, 3),
        tokens=tokens,
        seconds=round(seconds, 2),
        # A resumed run counts all tokens, and has seconds only of this start.
        tokens_per_second=round((tokens - first.tokens_before) / seconds, 1),
        peak_memory_mib=round(peak_memory_mib(trainer.args), 1),
        peak_memory_of="GPU memory allocated in training" if gpu else "resident memory of the process",
        device=torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        processes=trainer.args.world_size,
        trainable_parameters=sum(shape_of(p).numel() for p in parameters if p.requires_grad),
        parameters=sum(shape_of(p).numel() for p in parameters),
        resumed_at=first.began_at,
        skipped_steps=trainer.finite.skipped,
    )


# Stop training early, with a checkpoint: on a signal, or when the hours that a run may take are over.
OUT_OF_TIME = 1000  # above the number of every signal
SECOND_SIGINT_AFTER = 1.0  # seconds; one Ctrl-C can arrive twice, from the terminal and from a launcher


class StopEarly(TrainerCallback):
    """Ends training with a checkpoint after a signal or after `max_hours`; at once on a second Ctrl-C.

    One process stops after the current step. Several compare notes after each step, in the background and on the host,
    so that no device waits: they read the result one step later, and all stop after that one.

    Args:
        max_hours: how long the run may take, from `began` on.
        began: by `time.monotonic()`.
    """

    def __init__(self, max_hours: float | None = None, began: float = 0.0) -> None:
        self.ends = None if max_hours is None else began + 3600 * max_hours
        self.max_hours = max_hours
        self.received, self.received_at = 0, 0.0
        self.reason = 0  # why all processes stop: the number of a signal, or OUT_OF_TIME; 0 while they train
        self.process, self.stepping = os.getpid(), False
        self._notes: _Notes | None = None

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if os.getpid() != self.process:  # in a worker of the data loader, which ends with this process
            return
        now = time.monotonic()
        if not self.stepping:  # the student is being measured: there is nothing to save
            raise KeyboardInterrupt
        if self.received and number == signal.SIGINT and now - self.received_at > SECOND_SIGINT_AFTER:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.received_at = number, now
            name = signal.Signals(number).name
            line = f"\n{name}: stopping after this step and saving a checkpoint; Ctrl-C again to stop at once.\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())  # print is not reentrant

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:
            self._notes = _Notes()

    def on_step_begin(self, args, state, control, **kwargs):
        self.stepping = True

    def on_step_end(self, args, state, control, **kwargs):
        late = self.ends is not None and time.monotonic() >= self.ends
        mine = OUT_OF_TIME if late else self.received
        self.reason = mine if self._notes is None else self._notes.exchange(mine)
        if self.reason:
            control.should_save = control.should_training_stop = True
            # An evaluation takes time that may not be left, and with `save_strategy: best` decides whether to save.
            control.should_evaluate = False
        return control

    def on_train_end(self, args, state, control, **kwargs):
        # A signal after the last step, such as in an evaluation there, comes to no `on_step_end`.
        if self._notes is None:
            self.reason = self.reason or self.received
        else:
            self.reason = self.reason or self._notes.last(self.received)
        self.stepping = False

    def error(self, message: str) -> Interrupted:
        """Return what to raise for the reason of the stop."""
        if self.reason == OUT_OF_TIME:
            return OutOfTimeError(f"max_hours: {self.max_hours:g} is over. {message}")
        return Interrupted(f"{signal.Signals(self.reason).name}: {message}")


class _Notes:
    """The largest number that any process gave, one exchange late."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")  # on the host: NCCL would take its turn on the device
        self.value = torch.zeros(1, dtype=torch.int64)
        self.work: Any = None

    def exchange(self, mine: int) -> int:
        """Start to compare `mine`; return the result of the exchange before, 0 at first."""
        before = self._finish()
        # A new tensor: the exchange before may still be reading the old one.
        self.value = torch.tensor([mine])
        self.work = dist.all_reduce(self.value, dist.ReduceOp.MAX, self.group, async_op=True)
        return before

    def _finish(self) -> int:
        if self.work is None:
            return 0
        self.work.wait()
        self.work = None
        return int(self.value)

    def last(self, mine: int) -> int:
        """Compare for the last time, and wait for the result."""
        result = max(self.exchange(mine), self._finish())
        dist.destroy_process_group(self.group)  # pyright: ignore[reportArgumentType]
        return result


# What is seen of a run while it goes: a line a log and a line an evaluation, which stay, and bars on a terminal.
IN_TRAINING = ("loss", "forward_kl", "agreement_at_1", "mean_token_accuracy", "grad_norm")
# Metrics of a line. Terms of a loss follow the loss; accuracy is shown where there is no agreement.
HELD_OUT = ("loss", "forward_kl", "reverse_kl", "agreement_at_1", "perplexity", "mean_token_accuracy")
SHORT = {"agreement_at_1": "agreement", "mean_token_accuracy": "accuracy"}
TERM = "loss/"
MEASURING_BEFORE, BETWEEN, AFTER = "measuring before", "evaluating", "measuring after"
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
                print(f"{self.phase}: held-out rows, batches: {len(eval_dataloader)}", flush=True)
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


# Tokens per second, peak memory and the use of the GPU in every log of a run.


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
