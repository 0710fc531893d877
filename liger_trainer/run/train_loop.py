"""The training step of a run: a progress bar, a stop that keeps the work, tokens per second and peak memory."""

import json
import math
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProgressCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ..common.files import METRICS
from ..errors import ConfigError, LigerTrainerError, NonFiniteError
from ..trainers.sft_trainer import LigerTrainer
from ..trainers.token_metrics import tokens_before
from .checkpoints import BEFORE, checkpoints_in, step_of
from .output_dir import start_output
from .results import TrainingFacts
from .samples import Measurement

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

SHOWN = ("loss", "forward_kl", "agreement_at_1", "mean_token_accuracy", "learning_rate")


class Interrupted(LigerTrainerError):
    """Training was stopped by the user or the system, after a checkpoint was saved."""

    exit_code = 130


@dataclass
class Clock:
    """Seconds of each named part of a run."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 2)


class ProgressBar(ProgressCallback):
    """Trainer's bar with the latest metrics beside it, instead of a printed dictionary a log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and logs:
            shown = {name: f"{logs[name]:.4g}" for name in SHOWN if isinstance(logs.get(name), float)}
            if shown:
                self.training_bar.set_postfix(shown)


class StopOnSignal(TrainerCallback):
    """SIGINT or SIGTERM ends training after the step at hand, with a checkpoint; a second one ends it at once.

    With several processes the signals keep their usual meaning: the ranks could stop at different steps, and the
    one that goes on would wait for the others.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the two signals; the handlers from before are put back."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number, frame):
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        print("\nStopping after this step and saving a checkpoint; again to stop at once.", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        if self.received is not None:
            control.should_save = control.should_training_stop = True
        return control


class StopOnNonFinite(TrainerCallback):
    """A logged loss that is NaN or infinite ends the run, before a checkpoint of such weights is saved."""

    def __init__(self) -> None:
        self.last_finite = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = (logs or {}).get("loss")
        if not isinstance(loss, float):
            return
        if math.isfinite(loss):
            self.last_finite = state.global_step
            return
        before = [path for path in checkpoints_in(Path(args.output_dir)) if step_of(path) <= self.last_finite]
        advice = f"liger-trainer resume {args.output_dir} --checkpoint {before[-1].name}" if before else ""
        raise NonFiniteError(
            f"the loss up to step {state.global_step} is {loss}; it was finite up to step {self.last_finite}. Training "
            f"stopped. {f'The last checkpoint before: {advice}' if before else 'No checkpoint was saved before.'} "
            "A smaller learning_rate, warmup_steps or max_grad_norm may help; so may bf16 instead of fp16."
        )


class Pace(TrainerCallback):
    """Adds `tokens_per_second` and `peak_memory_mib` to every training log.

    The clock runs in steps, not in the evaluations and saves between them. Memory is the peak since training began.
    """

    def __init__(self) -> None:
        self.start = self.end = self.paused = 0.0
        self.tokens, self.elsewhere = 0.0, True

    def on_train_begin(self, args, state, control, **kwargs):
        self.tokens = tokens_before(state)

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.start == 0.0:
            self.start = now
        elif self.elsewhere:
            self.paused += now - self.end
        self.elsewhere = False

    def on_step_end(self, args, state, control, **kwargs):
        self.end = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs):
        self.elsewhere = True

    on_save = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or "num_tokens" not in logs:
            return
        now = self.end = time.perf_counter()  # the losses were read, so the device has done its steps
        tokens, seconds = logs["num_tokens"] - self.tokens, now - self.start - self.paused
        facts = {"tokens_per_second": round(tokens / seconds, 1), "peak_memory_mib": round(peak_memory_mib(args), 1)}
        logs.update(facts)  # for the trackers
        state.log_history[-1].update(facts)
        self.start, self.paused, self.tokens = now, 0.0, logs["num_tokens"]


class MeasureFirst(TrainerCallback):
    """Measures the student once training is set up and before its first step, and stores that with each checkpoint.
    Then the output directory becomes that of this run.

    Earlier would be wrong with several processes: an evaluation before `Trainer.train()` marks the model as prepared,
    so that `train()` leaves out the DDP wrapper and every rank follows its own gradients (accelerate 1.15).
    """

    def __init__(
        self,
        trainer: LigerTrainer,
        config: "RunConfig",
        checkpoint: str | None,
        measure: Callable[[], Measurement],
        clock: Clock,
    ) -> None:
        self.trainer, self.config, self.checkpoint = trainer, config, checkpoint
        self.measure, self.clock = measure, clock
        self.stored = Path(checkpoint, BEFORE) if checkpoint else None
        self.result: Measurement | None = None
        self.began_at = self.tokens_before = 0

    def on_train_begin(self, args, state, control, **kwargs):
        _check_steps_left(args, state, self.checkpoint)
        self.began_at, self.tokens_before = state.global_step, tokens_before(state)
        with self.clock("measure_before"):
            if self.stored is not None and self.stored.is_file():
                self.result = Measurement(**json.loads(self.stored.read_text(encoding="utf-8")))
            else:
                self.result = self.measure()
        _check_best_metric(self.config, self.result.metrics)
        start_output(self.trainer, self.config)  # once nothing speaks against it: it takes away what is overwritten
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.ended = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.result is not None:
            folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            (folder / BEFORE).write_text(json.dumps(asdict(self.result)), encoding="utf-8")


def train(
    trainer: LigerTrainer,
    config: "RunConfig",
    checkpoint: str | None,
    measure: Callable[[], Measurement],
    clock: Clock,
) -> tuple[Measurement, TrainingFacts]:
    """Measure the student, then train it to the end; from a checkpoint, with its measurement, if one is given.

    Raises:
        ConfigError: the optimizer's package is not installed; the checkpoint is at the last step already, or was saved
            with other data or models; metric_for_best_model is none of the metrics.
        Interrupted: a signal came; the checkpoint to go on from is named.
        NonFiniteError: a logged loss is NaN or infinite.
    """
    stop, first = StopOnSignal(), MeasureFirst(trainer, config, checkpoint, measure, clock)
    trainer.callback_handler.callbacks.insert(0, Pace())  # before the trackers, which get its values too
    trainer.add_callback(stop)
    trainer.add_callback(StopOnNonFinite())
    trainer.add_callback(first)
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressBar)
    _check_optimizer(trainer, config)
    with stop.listening() if trainer.args.world_size == 1 else nullcontext():
        trainer.train(resume_from_checkpoint=checkpoint, force_resume=config["force_resume"])
    seconds = time.perf_counter() - first.ended
    clock.seconds["train"] = round(seconds, 2)
    if stop.received is not None and trainer.state.global_step < trainer.state.max_steps:
        raise _interrupted(trainer)
    assert first.result is not None
    return first.result, _facts(trainer, seconds, first)


def _interrupted(trainer: LigerTrainer) -> Interrupted:
    """Says what was saved. A checkpoint of a later step may be there, of before the run went back to an earlier one."""
    state, run_dir = trainer.state, Path(str(trainer.args.output_dir))
    saved = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    newer = [] if checkpoints_in(run_dir)[-1:] == [saved] else ["--checkpoint", saved.name]
    return Interrupted(
        f"Stopped at step {state.global_step} of {state.max_steps}; saved {saved}. "
        f"To go on: liger-trainer {shlex.join(['resume', str(run_dir), *newer])}"
    )


def _check_steps_left(args: TrainingArguments, state: TrainerState, checkpoint: str | None) -> None:
    """Trainer would take one more step than `max_steps`. After the last epoch it takes none: a run that was killed when
    it had trained comes to its end."""
    finished = Path(str(args.output_dir), METRICS).is_file()
    if checkpoint and state.global_step >= state.max_steps and (finished or state.epoch < state.num_train_epochs):
        raise ConfigError(
            f"{checkpoint} is after step {state.global_step} of {state.max_steps}: nothing is left to train. To train "
            "on, say for how long: max_steps=... or num_train_epochs=...; to measure what is there: "
            f"liger-trainer eval {shlex.quote(checkpoint)}"
        )


def _check_optimizer(trainer: LigerTrainer, config: "RunConfig") -> None:
    """Trainer makes it after the student was measured."""
    model: Any = trainer.model
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    except (ImportError, ValueError) as error:  # of a package that is not installed; arguments that it does not take
        raise config.error("optim", f"{config['optim']}: {error}") from None


def _check_best_metric(config: "RunConfig", known: Mapping[str, float]) -> None:
    """Trainer looks for it after the first evaluation, some time into the training."""
    name = config["metric_for_best_model"]
    if name is not None and config["eval_strategy"] != "no" and name.removeprefix("eval_") not in known:
        raise config.error("metric_for_best_model", f"expected one of {', '.join(sorted(known))}, got {name!r}.")


def checkpoint_of(config: "RunConfig") -> str | None:
    """The checkpoint directory that `resume_from_checkpoint` means; true is the newest one in output_dir.

    Raises:
        ConfigError: there is none.
    """
    wanted = config["resume_from_checkpoint"]
    if not wanted:
        return None
    if wanted is True:
        output_dir = Path(config["output_dir"]).expanduser()
        wanted = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
        if wanted is None:
            raise config.error("resume_from_checkpoint", f"no checkpoint in {output_dir}.")
    if not Path(wanted).is_dir():
        raise config.error("resume_from_checkpoint", f"no such directory: {wanted}")
    return wanted


def _facts(trainer: LigerTrainer, seconds: float, first: MeasureFirst) -> TrainingFacts:
    gpu = trainer.args.device.type == "cuda"
    tokens = trainer.tokens_trained  # the last log may be of steps before, or of an evaluation
    assert isinstance(trainer.model, torch.nn.Module)
    parameters = list(trainer.model.parameters())
    return TrainingFacts(
        steps=trainer.state.global_step,
        epochs=round(trainer.state.epoch or 0.0, 3),
        tokens=tokens,
        seconds=round(seconds, 2),
        tokens_per_second=round((tokens - first.tokens_before) / seconds, 1),
        peak_memory_mib=round(peak_memory_mib(trainer.args), 1),
        peak_memory_of="GPU memory allocated in training" if gpu else "resident memory of the process",
        device=torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        processes=trainer.args.world_size,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameters=sum(p.numel() for p in parameters),
        resumed_at=first.began_at,
    )


def peak_memory_mib(args: TrainingArguments) -> float:
    """Of the GPU, allocated since training began; on a CPU, the resident memory of the process."""
    if args.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes on macOS, KiB elsewhere
