"""Tasks of EleutherAI's lm-evaluation-harness, for `liger-trainer eval --lm-eval`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..plugins import LM_EVAL


def harness(names: str) -> Callable[[Any], dict[str, float]]:
    """Return what measures the model of a trainer on the harness's tasks.

    Args:
        names: of tasks or groups, or YAML files of tasks, separated by commas.

    Returns:
        a function from a trainer to its metrics, each named `lm_eval/<task>/<metric>`.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
    """
    try:
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import load_yaml_config
    except ImportError as error:
        raise ConfigError(f"--lm-eval needs the package lm-eval ({error}): pip install lm-eval") from None
    manager, tasks = TaskManager(), list[Any]()
    for name in filter(None, (part.strip() for part in names.split(","))):
        if Path(name).is_file():
            tasks.append(load_yaml_config(yaml_path=name, mode="full"))
        elif manager.match_tasks([name]):
            tasks += manager.match_tasks([name])
        else:
            raise ConfigError(
                f"--lm-eval: lm-eval has no task {name!r}, nor is it a file. `lm-eval ls tasks` lists all."
            )

    def measure(trainer: Any) -> dict[str, float]:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        model = HFLM(
            pretrained=trainer.accelerator.unwrap_model(trainer.model), tokenizer=tokenizer,
            batch_size=trainer.args.per_device_eval_batch_size,
        )  # fmt: skip
        found: Any = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=False)
        return {
            f"{LM_EVAL}{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in found["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, (int, float)) and "stderr" not in metric and metric != "sample_len"
        }

    return measure
