"""The training of a run: measure the student, train it, stop it early, and say what that took."""

import json
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState, TrainingArguments, get_scheduler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..common.checkpoints import checkpoints_in, holds_checkpoints, newest_whole, refuse_damaged
from ..common.console import announce, on_first_rank
from ..common.files import BEFORE, METRICS
from ..common.signals import handling
from ..compat.deepspeed import shape_of
from ..errors import ConfigError, Interrupted, OutOfTimeError
from ..trainers.metrics import tokens_before
from ..trainers.sft_trainer import LigerTrainer
from .progress import SpeedMetrics, peak_memory_mib, show_progress
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
        stored = checkpoint / BEFORE
        text = on_first_rank(
            self.trainer.is_world_process_zero(), lambda: stored.read_text("utf-8") if stored.is_file() else None
        )
        if text is None:
            if self.trainer.is_world_process_zero():
                warnings.warn(
                    f"{checkpoint} was not saved by `liger-trainer run`, so the measurement before training is "
                    f"missing: in {METRICS} and the report, 'before' is the model after step {self.began_at}.",
                    stacklevel=2,
                )
            return None
        # Written by our own process into the checkpoint, whose manifest has its SHA-256.
        content = json.loads(text)
        content.pop("drafts", None)  # of checkpoints of earlier versions
        return Measurement(**content)


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
    is_done = trainer.state.global_step >= trainer.state.max_steps
    # Hours that end in the last step cost nothing more than the last measurement; who sends a signal wants an end now,
    # if nothing is lost by it: no checkpoint may hold the last step, as with `save_strategy: no`.
    if stop.reason and not (is_done and (stop.reason == OUT_OF_TIME or not _last_checkpoint(trainer).is_dir())):
        raise stop.error(_how_to_go_on(trainer))
    assert first.result is not None
    return first.result, _facts(trainer, seconds, first)


def _last_checkpoint(trainer: LigerTrainer) -> Path:
    """Return where a checkpoint of the present step is, if there is one."""
    return Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


def _how_to_go_on(trainer: LigerTrainer) -> str:
    """Say what was saved. Checkpoints of later steps may be there, from before the run went back to an earlier one."""
    state, saved = trainer.state, _last_checkpoint(trainer)
    run_dir = saved.parent
    newer = [] if checkpoints_in(run_dir)[-1:] == [saved] else ["--checkpoint", saved.name]
    return (
        f"Stopped at step {state.global_step} of {state.max_steps}; saved {saved}. "
        f"To continue: liger-trainer {shlex.join(['resume', str(run_dir), *newer])}"
    )


def _check_steps_left(args: TrainingArguments, state: TrainerState, checkpoint: Path | None) -> None:
    """Refuse to train a finished run on for no steps, and a checkpoint that is beyond the last one.

    A run that was killed between its last step and the end of it has something left: saving and measuring.
    """
    # metrics.json is written last, so without it something is left to do after the last step.
    finished = Path(str(args.output_dir), METRICS).is_file()
    if checkpoint and (state.global_step > state.max_steps or (finished and state.global_step == state.max_steps)):
        raise ConfigError(
            f"{checkpoint} was saved after step {state.global_step} of {state.max_steps}: nothing is left to train. To "
            "train longer, set max_steps=... or num_train_epochs=...; to measure the model as it is: "
            f"liger-trainer eval {shlex.quote(str(checkpoint))}"
        )


FEW_STEPS = 10


def _warn_of_few_steps(trainer: LigerTrainer, steps: int) -> None:
    """Say so where the rows make only a few steps, in which hardly anything is learned; not where `max_steps` asks."""
    args: Any = trainer.args
    sequences: Any = trainer.train_dataset
    if args.max_steps > 0 or steps >= FEW_STEPS:
        return
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    packed = "sequences that rows are packed into" if args.packing else "rows"
    more = [f"num_train_epochs={math.ceil(args.num_train_epochs * FEW_STEPS / steps)}"]
    more += ["packing=false"] if args.packing else []
    more += ["gradient_accumulation_steps=1"] if args.gradient_accumulation_steps > 1 else []
    only = "1 step" if steps == 1 else f"{steps} steps"
    announce(
        f"this run has only {only}, in which the model will hardly change: there are {len(sequences):,} {packed}, and "
        f"a step takes up to {rows} of them. For more steps: {', '.join(more)}."
    )


def _check_optimizer(trainer: LigerTrainer, config: "RunConfig") -> None:
    """Find out now whether Trainer can make optimizer and schedule: it makes them after the student is measured."""
    model: Any = trainer.model
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    name, options = config["lr_scheduler_type"], config["lr_scheduler_kwargs"]
    try:
        get_scheduler(name, stand_in, num_warmup_steps=0, num_training_steps=2, scheduler_specific_kwargs=options or {})
    except (TypeError, ValueError) as error:  # an option that it lacks, or does not know
        raise config.error("lr_scheduler_kwargs", f"{name}: {error}") from None
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
    folder = Path(config["output_dir"]).expanduser() if wanted is True else Path(wanted or "")
    if wanted is True or wanted and holds_checkpoints(folder):
        if newest_whole(folder, contents=False) is None:
            raise config.error("resume_from_checkpoint", f"no checkpoint in {folder}.")
    elif wanted and not Path(wanted).is_dir():
        raise config.error("resume_from_checkpoint", f"no such directory: {wanted}")
    elif wanted:
        refuse_damaged(Path(wanted))


def _facts(trainer: LigerTrainer, seconds: float, first: MeasureBefore) -> TrainingFacts:
    gpu = trainer.args.device.type == "cuda"
    tokens = trainer.tokens_trained  # the last log may be of steps before, or of an evaluation
    assert isinstance(trainer.model, torch.nn.Module)
    parameters = list(trainer.model.parameters())
    threads = torch.get_num_threads()
    return TrainingFacts(
        steps=trainer.state.global_step,
        epochs=round(trainer.state.epoch or 0.0, 3),
        tokens=tokens,
        seconds=round(seconds, 2),
        # A resumed run counts all tokens, and has seconds only of this start.
        tokens_per_second=round((tokens - first.tokens_before) / seconds, 1),
        peak_memory_mib=round(peak_memory_mib(trainer.args), 1),
        peak_memory_of="GPU memory allocated in training" if gpu else "resident memory of the process",
        device=torch.cuda.get_device_name() if gpu else f"CPU, {threads} thread{'s' * (threads != 1)}",
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
            return OutOfTimeError(f"max_hours: {self.max_hours:g} hours have passed. {message}")
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
