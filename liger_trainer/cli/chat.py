"""`chat`: talk to the student of a run in the terminal, or give it prompts by stdin."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.console import visible
from ..errors import ConfigError
from ._shared import write_new

if TYPE_CHECKING:
    from ..extras.chat import Answer, Chat, Manner, Speaker

HELP = """\
/help               this text
/status             models, settings and length of the chat
/clear              begin a new chat
/retry              answer the last message again
/teacher            have the teacher answer too, or no longer
/set KEY=VALUE ...  max_new_tokens, temperature (0: greedy), top_p, top_k, repetition_penalty, seed
/system TEXT        a system prompt; without TEXT none
/save [FILE]        write the chat as JSON; default: chat.json
/exit               leave; Ctrl-D too. Ctrl-C breaks an answer off
! does for /, as in `transformers chat`."""
_MARKS = "/!"


def chat(
    model: Annotated[
        str, typer.Argument(metavar="RUN_DIR | MODEL", help="A run, a checkpoint, or any model.", show_default=False)
    ],
    teacher: Annotated[bool, typer.Option("--teacher", help="Have the run's teacher answer beside it.")] = False,
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
    """Chat with the student of a run, with its teacher beside it, or with any model; /help says how. Reads stdin."""
    from .run import _quieten

    _quieten()
    from ..extras.chat import Manner, open_chat

    manner = Manner(max_new_tokens, temperature, seed=seed, system=system)
    session = _Session(open_chat(model, manner, device, trust_remote_code), sys.stdin.isatty())
    if teacher:
        session.chat.with_teacher(True)
    session.run()


class _Session:
    """Lines in, answers out. On a terminal a mistake is told and the chat goes on; in a script it ends it."""

    def __init__(self, chat: "Chat", interactive: bool):
        self.chat, self.interactive = chat, interactive
        self.last = ""

    def run(self) -> None:
        if self.interactive:
            print(f"{self._status()}\n/help lists the commands.")
        if not self.chat.student.tokenizer.chat_template:
            print("liger-trainer: no chat template: this model goes on with each text by itself.", file=sys.stderr)
        for line in self._lines():
            try:
                if self._answers(line) is False:
                    return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(broken off)")
            except ConfigError as error:
                if not self.interactive:
                    raise
                print(f"liger-trainer: {error}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        if not self.interactive:
            for line in sys.stdin:
                if line.strip():
                    print(f"> {line.strip()}", flush=True)
                    yield line.strip()
            return
        try:
            import readline  # noqa: F401  lets input() edit lines; not on Windows
        except ImportError:
            pass
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D leaves.")
                continue
            if line:
                yield line

    def _answers(self, line: str) -> bool | None:
        """Do what a line says; return False to leave."""
        if line[0] not in _MARKS:
            self._ask(line)
            return None
        word, _, rest = line[1:].partition(" ")
        if word in ("exit", "quit"):
            return False
        commands = {
            "help": lambda: print(HELP), "status": lambda: print(self._status()), "clear": self._clear,
            "retry": self._retry, "teacher": self._teacher, "set": lambda: self._set(rest),
            "system": lambda: self._change(system=rest.strip() or None), "save": lambda: self._save(rest.strip()),
        }  # fmt: skip
        if word not in commands:
            raise ConfigError(
                f"/{word} is no command; expected one of {', '.join('/' + name for name in (*commands, 'exit'))}."
            )
        commands[word]()
        return None

    def _ask(self, text: str) -> None:
        self.last = text
        answers = self.chat.ask(text, self._say)
        print()
        if self.interactive:
            print(f"({', '.join(_pace(*answer) for answer in answers)})")

    def _say(self, speaker: "Speaker") -> Any:
        if self.chat.beside is not None:
            begun = "" if speaker is self.chat.student else "\n"
            print(f"{begun}{speaker.name}: ", end="", flush=True)
        return lambda piece: print(visible(piece), end="", flush=True)

    def _clear(self) -> None:
        self.chat.messages, self.last = [], ""

    def _retry(self) -> None:
        if not self.last:
            raise ConfigError("/retry: nothing was asked yet.")
        self.chat.messages = self.chat.messages[:-2]
        self._ask(self.last)

    def _teacher(self) -> None:
        self.chat.with_teacher(self.chat.beside is None)
        print(f"The teacher answers {'too' if self.chat.beside else 'no longer'}.")

    def _set(self, words: str) -> None:
        """Read KEY=VALUE pairs."""
        from ..extras.chat import Manner

        kinds = {field.name: int if "int" in str(field.type) else float for field in dataclasses.fields(Manner)}
        del kinds["system"]
        changes: dict[str, Any] = {}
        for word in words.split() or [""]:
            key, equals, value = word.partition("=")
            if not equals or key not in kinds:
                raise ConfigError(f"/set: expected KEY=VALUE with one of {', '.join(kinds)}, got {word!r}.")
            try:
                changes[key] = kinds[key](value)
            except ValueError:
                raise ConfigError(f"/set: {key}: expected a number, got {value!r}.") from None
        self._change(**changes)

    def _change(self, **changes: Any) -> None:
        self.chat.manner = dataclasses.replace(self.chat.manner, **changes)

    def _save(self, name: str) -> None:
        path = Path(name or "chat.json").expanduser()
        settings = _given(self.chat.manner)
        content = {"model": self.chat.student.name, "settings": settings, "messages": self.chat.messages}
        write_new(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", force=False)
        print(f"Wrote {path}")

    def _status(self) -> str:
        speakers = [self.chat.student, *([self.chat.beside] if self.chat.beside else [])]
        models = [
            f"{speaker.name}: {speaker.model.num_parameters():,} parameters, {speaker.model.dtype} on "
            f"{speaker.model.device}"
            for speaker in speakers
        ]
        chosen = ", ".join(f"{key}={value}" for key, value in _given(self.chat.manner).items())
        return "\n".join([*models, f"settings: {chosen}", f"messages: {len(self.chat.messages)}"])


def _given(manner: "Manner") -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(manner).items() if value is not None}


def _pace(speaker: "Speaker", answer: "Answer") -> str:
    return f"{speaker.name}: {answer.tokens} tokens, {answer.tokens / max(answer.seconds, 1e-9):,.1f} tokens/s"
