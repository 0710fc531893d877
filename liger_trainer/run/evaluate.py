"""Evaluate a student on the held-out rows: one that a run has saved, or the one that a configuration names.

The trainers measure; calibration is added here.
"""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PrinterCallback, ProgressCallback
from trl import get_peft_config

from .. import plugins
from ..common.checkpoints import checkpoints_in
from ..common.files import CONFIG
from ..common.weights import ADAPTER, DamagedWeightsError, with_adapter
from ..config.run_config import load_run_config
from ..config.yaml_reader import Setting, setting
from ..errors import ConfigError, CorruptError, NonFiniteError
from .data.datasets import DataFacts, RunData, load_run_datasets
from .metric_rows import DISTILL_ROWS, OTHER_TOKENS_ROWS, SFT_ROWS, MetricRow
from .models import (
    ModelFiles,
    check_same_tokenizer,
    check_student,
    load_base,
    load_student,
    load_weights,
    open_model,
    open_teachers,
    with_processor,
)

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

CALIBRATION = MetricRow("calibration_error", "calibration error (ECE)", better="lower")
ROWS = {
    "sft": (*SFT_ROWS, CALIBRATION),
    "distill": (
        *OTHER_TOKENS_ROWS,
        *DISTILL_ROWS[:2],
        MetricRow("jsd", "JSD (nats/token)", 4, better="lower"),
        *DISTILL_ROWS[2:],
        MetricRow("entropy", "student entropy (nats/token)"),
        MetricRow("teacher_entropy", "teacher entropy (nats/token)"),
        CALIBRATION,
    ),
}
BINS = 15
WEIGHTS = "*.safetensors", "pytorch_model*.bin", "adapter_model.bin"


@dataclass(frozen=True)
class Subject:
    """What is evaluated. `weights` is a directory; None means the model of the configuration."""

    name: str
    config: "RunConfig"
    weights: Path | None


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    name: str
    recipe: str
    model: str
    teacher: str | None  # names in the configuration, joined by commas; None if no teacher is loaded by name
    # those of `trainer.evaluate()` without `eval_`, without losses that fresh projectors are part of, the calibration
    # error. Losses, KLs and entropies are in nats.
    metrics: dict[str, float]
    data: DataFacts


def subject_of(target: str, overrides: Iterable[str]) -> Subject:
    """Return what `target` names: a configuration, or the directory of a run or of one of its checkpoints.

    Raises:
        ConfigError: it is none of these, or a directory without weights or without the configuration of a run.
    """
    path = Path(target).expanduser()
    if not path.is_dir():
        return Subject(target, load_run_config(target, overrides, exact=True), None)
    # A checkpoint lies in the folder of its run, which has the configuration.
    settings = next((p / CONFIG for p in (path, path.absolute().parent) if (p / CONFIG).is_file()), None)
    if settings is None:
        hint = f"eval CONFIG {setting('model_name_or_path', target)} evaluates a model on the rows of a configuration."
        raise ConfigError(f"{target} holds no {CONFIG}, which a run writes. {hint}")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        saved = ", ".join(str(p) for p in checkpoints_in(path))
        raise ConfigError(f"{target} holds no weights.{f' There are some in {saved}.' if saved else ''}")
    return Subject(target, load_run_config(str(settings), overrides, exact=True, found=True), path)


def evaluate(subject: Subject, more: Callable[[Any], dict[str, float]] | None = None) -> Evaluation:
    """Measure on the held-out rows.

    Args:
        more: returns further metrics of the trainer's model.

    Raises:
        ConfigError: a model that cannot be loaded, a teacher with another tokenizer.
        CorruptError: the saved weights cannot be read.
        DataError: the dataset is wrong.
        NonFiniteError: a metric is NaN or infinite.
    """
    with tempfile.TemporaryDirectory(prefix="liger-trainer-eval-") as folder:
        config = _for_evaluation(subject.config.on_this_machine(), folder)
        base = open_model(config, "model_name_or_path")
        # What was saved may have another vocabulary or chat template than the base.
        files = base if subject.weights is None else _saved_files(base, subject.weights, config["trust_remote_code"])
        data = load_run_datasets(config, files.vocab_size)
        files = with_processor(config, files, data)
        check_student(config, files, data)
        teachers = open_teachers(config) if config.recipe == "distill" else {}
        for entry_config, teacher in teachers.values():
            check_same_tokenizer(entry_config, files, teacher)
        paths = {name: teacher.path for name, (_, teacher) in teachers.items()}
        trainer = _trainer(subject, config, data, base, files, paths)
        trainer.remove_callback(PrinterCallback)  # stdout has the table, or JSON
        if not sys.stderr.isatty():
            trainer.remove_callback(ProgressCallback)
        plugins.measure_task(trainer, config, data)
        measured = {**trainer.evaluate(), **(more(trainer) if more else {})}
        unlearned = set()
        hidden = trainer.loss_state.hidden if config.recipe == "distill" else None
        if hidden is not None and hidden.projectors:
            # losses that fresh projectors are part of: only checkpoints keep the trained ones
            unlearned = {"loss", *(f"loss/{term.type}" for term in trainer.args.loss_plan().of("hidden"))}
    metrics = {name.removeprefix("eval_"): value for name, value in measured.items() if isinstance(value, float)}
    metrics = {name: value for name, value in metrics.items() if name not in unlearned}
    # JSON has no NaN, and a table with one looks like a result.
    wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(f"{subject.name}: {', '.join(wrong)} of the model is not finite.")
    model = str(subject.weights or config["model_name_or_path"])
    names = [entry_config["teacher_model_name_or_path"] for entry_config, _ in teachers.values()]
    return Evaluation(subject.name, config.recipe, model, ", ".join(names) or None, metrics, data.facts)


def _for_evaluation(config: "RunConfig", folder: str) -> "RunConfig":
    """Remove what belongs to training: saving, trackers, other processes."""
    here = {
        "output_dir": folder, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "push_to_hub": False,
        "load_best_model_at_end": False, "use_vllm": False, "fsdp": None, "fsdp_config": None, "deepspeed": None,
    }  # fmt: skip
    here = {key: value for key, value in here.items() if key in config.values}
    settings = {**config.settings, **{key: Setting(value, "eval") for key, value in here.items()}}
    return dataclasses.replace(config, values={**config.values, **here}, settings=settings)


def _saved_files(base: ModelFiles, weights: Path, trust: bool) -> ModelFiles:
    """Read configuration and tokenizer from the folder of the weights, if they are there."""
    try:
        # An adapter comes without a configuration of the model.
        has_config = (weights / "config.json").is_file()
        model_config = AutoConfig.from_pretrained(weights, trust_remote_code=trust) if has_config else base.config
        has_tokenizer = any((weights / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = base.tokenizer
        if has_tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise CorruptError(f"{weights} cannot be read as a model directory: {error}") from None
    return ModelFiles(base.key, str(weights), None, model_config, tokenizer)


def _student(subject: Subject, config: "RunConfig", base: ModelFiles, files: ModelFiles) -> Any:
    if subject.weights is None:
        return load_student(config, base)
    try:
        if (subject.weights / ADAPTER).is_file():
            return with_adapter(load_base(config, base), subject.weights)
        return load_weights(config, files)
    except ConfigError as error:
        if isinstance(error.__cause__, DamagedWeightsError):  # those that a run wrote
            raise CorruptError(f"{subject.weights}: the weights cannot be read: {error.__cause__}") from None
        raise


def _trainer(
    subject: Subject, config: "RunConfig", data: RunData, base: ModelFiles, files: ModelFiles, teachers: dict[str, str]
) -> Any:
    args = config.training_args()
    # a cache is compared with the training rows too
    cached = config.recipe == "distill" and config["teacher"] == "cache"
    with config.refusals("the evaluation"):
        common: dict[str, Any] = {
            "args": args, "train_dataset": data.train if cached else data.test, "eval_dataset": data.test,
            "processing_class": files.processing, "compute_metrics": _calibration,
            "preprocess_logits_for_metrics": signed_confidence,
            "peft_config": get_peft_config(config.model_args()) if subject.weights is None else None,
        }  # fmt: skip
        student = _student(subject, config, base, files)
        if config.recipe == "sft":
            from ..trainers.sft_trainer import LigerTrainer

            return LigerTrainer(student, **common)
        from ..trainers.distill_trainer import LigerDistillTrainer

        return LigerDistillTrainer(
            student, teacher_model=teachers if config["teachers"] else teachers.get(""), **common
        )


def signed_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the top-1 probability of each token, negative if it is not the label, 0 without a label.

    logits: (batch, length, V), or longer by what prompt learning puts in front; the result: (batch, length - 1).
    """
    # Prompt learning puts positions in front that have no label.
    logits = logits[:, -labels.shape[1] :]
    wide = (row.float() for row in logits[:, :-1])  # row by row: a whole batch would take too much memory
    confident = torch.stack([(row.amax(-1) - row.logsumexp(-1)).exp() for row in wide])
    target = labels[:, 1:].to(logits.device)
    right = logits[:, :-1].argmax(-1) == target
    return torch.where(target == -100, 0.0, torch.where(right, confident, -confident))


def _calibration(predictions: Any) -> dict[str, float]:
    """Compute the metric for `compute_metrics`, which gets rows of different lengths, padded with -100."""
    # Trainer pads predictions of different lengths with -100, and gathers lists of batches.
    signed = np.concatenate([np.ravel(x) for x in np.atleast_1d(predictions.predictions)])
    return {CALIBRATION.metric: calibration_error(signed[(signed != 0) & (np.abs(signed) <= 1.001)])}


def calibration_error(signed: np.ndarray) -> float:
    """Expected calibration error of top-1 confidences, negative where wrong: the mean, over tokens in 15 bins of equal
    width, of |share that is right - mean confidence| (Naeini et al. 2015; Guo et al. 2017, arXiv:1706.04599)."""
    confidence, right = np.abs(signed).astype(np.float64), signed > 0
    # A confidence of 1 belongs to the last bin.
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)  # tokens of a bin times its gap
    return float(np.abs(gaps).sum() / max(1, len(signed)))
