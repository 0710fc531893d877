"""Lines for people, from the first of several processes only."""

import os


def is_main_process() -> bool:
    """Whether this is the first process, by the RANK that launchers set."""
    return os.environ.get("RANK", "0") == "0"


def announce(line: str) -> None:
    """Print one line, in the first process only."""
    if is_main_process():
        print(f"liger-trainer: {line}", flush=True)
