"""The command line in each of several processes; the last one may get a signal in its second step. SIGNAL WORD ...

Each prints its exit code at the end."""

import os
import signal
import sys

from liger_trainer.cli.app import main
from liger_trainer.run import recipe
from liger_trainer.run import train_loop as stopping


def send_in_step_2(number: int) -> None:
    begin = stopping.StopEarly.on_step_begin

    def on_step_begin(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        if state.global_step == 1:
            os.kill(os.getpid(), number)

    stopping.StopEarly.on_step_begin = on_step_begin


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name != "none" and os.environ["RANK"] == "1":
        send_in_step_2(getattr(signal, name))
    recipe._report = lambda *arguments: None
    try:
        main(words)
    except SystemExit as ended:
        print(f"exit code {ended.code or 0}")
