"""`chat`: talk to the student of a run in the terminal, or give it prompts by stdin."""

import sys
from functools import partial
from typing import Annotated

import typer

from ._shared import quieten, write_new


def chat(
    model: Annotated[
        str, typer.Argument(metavar="RUN_DIR | MODEL", help="A run, a checkpoint, or any model.", show_default=False)
    ],
    teacher: Annotated[bool, typer.Option("--teacher", help="Have the run's teacher answer too.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0, help="0: greedy. Default: as the model's own settings.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of every answer.", show_default=False)] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cuda, cuda:1, mps, cpu. Default: a GPU if there is one.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the models bring.")
    ] = False,
) -> None:
    """Chat with the student of a run, with its teacher too, or with any model; /help says how. Reads stdin."""
    quieten()
    from ..extras.chat import Manner, Session, open_chat

    manner = Manner(max_new_tokens, temperature, seed=seed, system=system)
    # Before the session starts, so that a wrong name ends the command and not the chat.
    chat = open_chat(model, manner, device, trust_remote_code)
    session = Session(chat, sys.stdin.isatty(), partial(write_new, force=False))
    if teacher:
        session.chat.with_teacher(True)
    session.run()
