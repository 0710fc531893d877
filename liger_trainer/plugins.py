"""The one place that names `extras`: a setting or a command loads the module that serves it, and nothing else does.

The core never imports extras otherwise, which the lint contracts check.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

DEMO = "demo:"  # begins the name of a model or a data set that is made on this machine
LM_EVAL = "lm_eval/"  # begins the name of a metric of lm-eval-harness
TASK = "reasoning_gym:"  # begins the name of a data set of generated questions with a checker

# what asks for it, a setting, the beginning of a name or a command: the module below extras
PLUGINS = {
    "server": "teachers.server",
    "teachers": "teachers.ensemble",
    "alm": "cross_tokenizer.spans",
    "uld": "cross_tokenizer.teacher",
    "teacher_prompt": "privileged",
    "vocab_parallel": "vocab_parallel",
    "from_trl": "from_trl",
    "schema": "schema_writer",
    "keep_layers": "students.drop_layers",
    "adamw_8bit": "adamw_8bit",
    "hidden": "hidden_states",
    "delta_rule": "delta_rule_gradients",
    "mamba_scan": "mamba_scan",
    "parallelism_config": "sequence_parallel",
    "rollouts": "rollouts.rollouts",
    "use_vllm": "vllm_sampler",
    "qat": "qat",
    "mtp": "mtp",
    DEMO: "demo",
    TASK: "tasks",
    "lm_eval": "lm_harness",
    "model_card": "report.model_card",
    "report": "report.html",
}

# Attributes that extras leave on modules. A trainer without the setting has to see what an earlier one has done.
QUANTISED = "liger_trainer_quantised_weights"  # on a model: what holds the weights behind its quantised ones
MTP = "mtp"  # on a model: its head for multi-token prediction, by the name that files have
KEEPS_ROWS = "_liger_keeps_rows_sharded"  # on an output head: whether its rows stay on their ranks

# of the trainers' extras: setting, its values that ask for nothing, mark, name in PLUGINS. In the order in which they
# take a trainer that is made: quantised weights come last, since nothing may copy them then.
_OF_TRAINERS = (
    ("vocab_parallel", (None, "never"), KEEPS_ROWS, "vocab_parallel"),
    ("mtp_loss_weight", (None, 0), MTP, "mtp"),
    ("qat", (None,), QUANTISED, "qat"),
)


def load(name: str) -> Any:
    """Import the module that serves a setting or a command, by its name in `PLUGINS`."""
    return import_module(f"{__package__}.extras.{PLUGINS[name]}")


def measure_task(trainer: Any, config: Any, data: Any) -> None:
    """Have a trainer's evaluations count right answers: of a task with a checker, or by `exact_match`."""
    if config["exact_match"] or (config["dataset_name"] or "").startswith(TASK):
        load(TASK).measure_with(trainer, config, data)


class TrainerPlugin:
    """An extra of the trainers, as `PLUGIN` in its module. What it leaves out it has nothing to do for."""

    def before_model(self, model: Any) -> None:
        """Get a model ready for a new trainer, if an earlier one has changed it."""

    def before_patch(self, trainer: Any) -> None:
        """Add to a trainer's model, before its layers are patched."""

    def after_init(self, trainer: Any) -> None:
        """Do its part for a trainer that is made, at the end of `__init__`."""

    def of_batch(self, trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what the model's forward gets besides a batch."""
        return {}

    def check(self, trainer: Any) -> None:
        """Raise ConfigError where a training or an evaluation, which is about to begin, would be wrong."""

    def files_hold(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that files hold, to be saved or read."""
        return nullcontext()

    def saved(self, trainer: Any, folder: Path) -> None:
        """Write what belongs to its part next to the model's files, which the first process has written."""

    def loaded(self, trainer: Any, folder: Path) -> None:
        """Read what belongs to its part from a checkpoint, whose weights have been read into the model."""


def of_trainer(args: Any, *modules: Any) -> list[TrainerPlugin]:
    """Return the extras that a trainer's arguments ask for, or that have left their mark on its model or head."""
    return [
        load(name).PLUGIN
        for setting, nothing, mark, name in _OF_TRAINERS
        if getattr(args, setting, None) not in nothing or any(getattr(module, mark, None) for module in modules)
    ]
