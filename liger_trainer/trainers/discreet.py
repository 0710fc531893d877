"""What a Trainer saves and reports of its arguments, without the secrets in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from ..common.replacements import Replacements
from ..secrets import names_a_secret, redacted, remember_settings


class DiscreetTrainer(SFTTrainer):
    """SFTTrainer that keeps secrets in `args` out of training_args.bin and out of what trackers are sent."""

    def train(self, *args, **kwargs):
        with _replaced(self.args, "to_dict", _redacted_dict):
            return super().train(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with _replaced(self.args, "to_dict", _redacted_dict):
            return super().evaluate(*args, **kwargs)

    def _save(self, *args, **kwargs):
        with _replaced(self.args, "__getstate__", _public_state):  # which pickle asks for
            super()._save(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        with _replaced(self.args, "__getstate__", _public_state):  # it saves the arguments too, and needs their token
            super()._push_from_checkpoint(checkpoint_folder)


@contextmanager
def _replaced(args: Any, method: str, function: Callable[[Any], Any]) -> Iterator[None]:
    """Within it `args.method()` is `function(args)`."""
    replacements = Replacements()
    replacements.set(args, method, partial(function, args))
    try:
        yield
    finally:
        replacements.undo()


def _redacted_dict(args: Any) -> dict[str, Any]:
    return redacted(type(args).to_dict(args))


def _public_state(args: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(args).items() if name not in ("to_dict", "__getstate__")}
    for field in fields(args):
        value = state.get(field.name)
        remember_settings(field.name, value)
        held = isinstance(value, str) and names_a_secret(field.name)
        state[field.name] = None if held else redacted(value)
    return state
