"""Tasks of EleutherAI's lm-evaluation-harness, for `liger-trainer eval --lm-eval`."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..plugins import LM_EVAL

ALLOWS_CODE = "HF_ALLOW_CODE_EVAL"  # which `evaluate`'s metrics of code ask for too


def harness(names: str) -> Callable[[Any], dict[str, float]]:
    """Return what measures the model of a trainer on the harness's tasks.

    Args:
        names: of tasks or groups, or YAML files of tasks, separated by commas.

    Returns:
        a function from a trainer to its metrics, each named `lm_eval/<task>/<metric>`.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task. The function: one runs what the model writes
            (HumanEval), and HF_ALLOW_CODE_EVAL is not 1.
    """
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--lm-eval needs the package lm-eval ({error}): pip install lm-eval") from None
    asked = [name for name in map(str.strip, names.split(",")) if name]
    files = {name: Path(name) for name in asked if Path(name).is_file()}
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files.values()}) or None)
    tasks = [_name_in(files[name]) if name in files else name for name in asked]
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown or not tasks:
        raise ConfigError(f"--lm-eval: lm-eval has no task {', '.join(unknown) or names!r}, nor is there such a file.")

    def measure(trainer: Any) -> dict[str, float]:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        model = HFLM(
            pretrained=trainer.accelerator.unwrap_model(trainer.model), tokenizer=tokenizer,
            batch_size=trainer.args.per_device_eval_batch_size,
        )  # fmt: skip
        try:
            found: Any = lm_eval.simple_evaluate(
                model=model, tasks=tasks, task_manager=manager, log_samples=False,
                confirm_run_unsafe_code=os.environ.get(ALLOWS_CODE) == "1",
            )  # fmt: skip
        except ValueError as error:
            if "unsafe" not in str(error):
                raise
            raise ConfigError(f"--lm-eval: {names} runs what the model writes: {ALLOWS_CODE}=1 allows it.") from None
        return {
            f"{LM_EVAL}{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in found["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, (int, float)) and "stderr" not in metric and metric != "sample_len"
        }

    return measure


def _name_in(file: Path) -> str:
    """Return the name of the task in a file. Its YAML may call functions, so it is not parsed here."""
    found = re.search(r"^task:\s*[\"']?([^\s\"']+)", file.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ConfigError(f"--lm-eval: {file} has no line `task: NAME`.")
    return found[1]
