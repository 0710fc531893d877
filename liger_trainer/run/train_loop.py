"""The training of a run: measure the student, train it, and say what that took."""

import json
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..common.checkpoints import checkpoints_in, newest_whole, refuse_damaged
from ..common.console import on_first_rank
from ..common.files import METRICS
from ..common.signals import handling
from ..common.zero3 import shape_of
from ..errors import ConfigError
from ..trainers.metrics import tokens_before
from ..trainers.sft_trainer import LigerTrainer
from .callbacks import Pace, peak_memory_mib
from .checkpoints import BEFORE
from .output_dir import start_output
from .progress import show_progress
from .results import TrainingFacts
from .samples import Measurement
from .stopping import StopEarly

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


class MeasureFirst(TrainerCallback):
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
            self.began_at, self.tokens_before = state.global_step, tokens_before(state)
            with self.clock("measure_before"):
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
    stop, first = StopEarly(config["max_hours"], clock.began), MeasureFirst(trainer, config, measure, clock, show)
    trainer.callback_handler.callbacks.insert(0, Pace())  # before the trackers, so that they get its values
    trainer.add_callback(stop)
    trainer.add_callback(first)
    show_progress(trainer)
    _check_optimizer(trainer, config)
    with handling(stop.receive):
        trainer.train(resume_from_checkpoint=config["resume_from_checkpoint"], force_resume=config["force_resume"])
        trainer.accelerator.wait_for_everyone()  # the first process may still be writing; a launcher ends all with one
    seconds = time.perf_counter() - first.ended
    clock.seconds["train"] = round(seconds, 2)
    if stop.reason and trainer.state.global_step < trainer.state.max_steps:
        raise stop.error(_how_to_go_on(trainer))
    assert first.result is not None
    return first.result, _facts(trainer, seconds, first)


def _how_to_go_on(trainer: LigerTrainer) -> str:
    """Say what was saved. Checkpoints of later steps may be there, from before the run went back to an earlier one."""
    state, run_dir = trainer.state, Path(str(trainer.args.output_dir))
    saved = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    newer = [] if checkpoints_in(run_dir)[-1:] == [saved] else ["--checkpoint", saved.name]
    return (
        f"Stopped at step {state.global_step} of {state.max_steps}; saved {saved}. "
        f"To go on: liger-trainer {shlex.join(['resume', str(run_dir), *newer])}"
    )


def _check_steps_left(args: TrainingArguments, state: TrainerState, checkpoint: Path | None) -> None:
    """Refuse to train a finished run on for no steps, and a checkpoint that is beyond the last one.

    A run that was killed between its last step and the end of it has something left: saving and measuring.
    """
    finished = Path(str(args.output_dir), METRICS).is_file()
    if checkpoint and (state.global_step > state.max_steps or (finished and state.global_step == state.max_steps)):
        raise ConfigError(
            f"{checkpoint} is after step {state.global_step} of {state.max_steps}: nothing is left to train. To train "
            "on, say for how long: max_steps=... or num_train_epochs=...; to measure what is there: "
            f"liger-trainer eval {shlex.quote(str(checkpoint))}"
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
        trainable_parameters=sum(shape_of(p).numel() for p in parameters if p.requires_grad),
        parameters=sum(shape_of(p).numel() for p in parameters),
        resumed_at=first.began_at,
        skipped_steps=trainer.finite.skipped,
    )
