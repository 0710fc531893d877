"""The one place that names `extras`: a setting loads the module that serves it, and without the setting nothing of it.

The core never imports extras otherwise, which the lint contracts check.
"""

from importlib import import_module
from typing import Any

# what is set: the module below extras
PLUGINS = {
    "alm": "cross_tokenizer.spans",
    "uld": "cross_tokenizer.teacher",
    "teacher_prompt": "privileged",
    "vocab_parallel": "vocab_parallel.heads",
    "vocab_parallel_trainer": "vocab_parallel.trainer",
}


def load(name: str) -> Any:
    """Import the module that serves a setting, by its name in `PLUGINS`."""
    return import_module(f"{__package__}.extras.{PLUGINS[name]}")
