"""Chat with the student of a run, and with its teacher next to it: loading, the history, and streamed answers."""

import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TextStreamer

from ..common.checkpoints import checkpoints_in
from ..common.console import visible
from ..common.files import CONFIG
from ..common.weights import ADAPTER, adapter_at, auto_class, load_whole, with_adapter
from ..config.run_config import RunConfig, load_run_config
from ..errors import ConfigError
from ..teachers.adapters_off import without_adapters
from ..trainers.decoder import Decoder
from .demo import resolve_model

Say = Callable[[str], None]
"""Takes the pieces of an answer as they come."""


@dataclass
class Manner:
    """How answers are generated. None: as the model's generation_config says."""

    max_new_tokens: int = 512
    temperature: float | None = None
    """0: the likeliest token each time"""
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": self.max_new_tokens >= 1, "temperature": (self.temperature or 0) >= 0,
            "top_p": self.top_p is None or 0 < self.top_p <= 1, "top_k": (self.top_k or 0) >= 0,
            "repetition_penalty": self.repetition_penalty is None or self.repetition_penalty > 0,
        }  # fmt: skip
        for name, fits in limits.items():
            if not fits:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range.")

    def keywords(self) -> dict[str, Any]:
        """Return fields of GenerationConfig."""
        keys = ("top_p", "top_k", "repetition_penalty")
        chosen = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.temperature is not None:
            chosen |= {"do_sample": self.temperature > 0}
            chosen |= {"temperature": self.temperature} if self.temperature else {"temperature": None, "top_p": None}
            # transformers warns of sampling options that greedy decoding does not read, also of those that the model's
            # own generation_config sets
            chosen |= {} if self.temperature else {"top_k": None}
        return {"max_new_tokens": self.max_new_tokens, **chosen}


@dataclass
class Answer:
    text: str
    tokens: int
    seconds: float


@dataclass
class Speaker:
    """A model that answers; with `adapters_off` it is its base that does."""

    name: str
    model: Any
    tokenizer: Any
    adapters_off: bool = False
    decoder: Decoder = field(default_factory=Decoder)

    def answer(self, messages: list[dict[str, str]], manner: Manner, say: Say) -> Answer:
        """Generate the next message, and hand its pieces to `say`.

        Raises:
            ConfigError: the chat is longer than the model reads, or its template refuses it.
        """
        ids = self._ids(messages)
        # beyond this length positions mean nothing to the model, and some index out of a table
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and len(ids) >= limit:
            raise ConfigError(f"the chat has {len(ids):,} tokens and {self.name} reads {limit:,}; /clear it.")
        settings = copy.deepcopy(self.model.generation_config)
        settings.update(**manner.keywords())
        if settings.pad_token_id is None:
            settings.pad_token_id = self.tokenizer.eos_token_id
        most = min(settings.max_new_tokens, limit - len(ids)) if limit else None
        seed = int(torch.randint(2**31, ())) if manner.seed is None else manner.seed
        streamer, began = _Pieces(self.tokenizer, say), time.perf_counter()
        with without_adapters(self.model) if self.adapters_off else nullcontext():
            (new,) = self.decoder.complete(self.model, [ids], settings, seed, most_tokens=most, streamer=streamer)
        # once more as a whole: the streamer hands text on in pieces
        text = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        return Answer(text, len(new), time.perf_counter() - began)

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:  # a base model goes on with the text
            return self.tokenizer(messages[-1]["content"])["input_ids"]
        try:
            rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # jinja2's, raised by the template
            raise ConfigError(f"the chat template of {self.name} refuses this chat: {error}") from None
        return rendered["input_ids"]


class _Pieces(TextStreamer):
    """transformers' streamer, which hands text to a function in place of printing it."""

    def __init__(self, tokenizer: Any, say: Say):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.say(text)


@dataclass
class Chat:
    """A chat with a student. `teacher` loads the teacher when it is asked for."""

    student: Speaker
    teacher: Callable[[], Speaker]
    manner: Manner = field(default_factory=Manner)
    messages: list[dict[str, str]] = field(default_factory=list)
    second: Speaker | None = None

    def with_teacher(self, wanted: bool) -> None:
        """Have the teacher answer too, or not. Raises ConfigError where the run has no teacher that can be loaded."""
        self.second = self.teacher() if wanted else None

    def ask(self, text: str, say: Callable[[Speaker], Say]) -> list[tuple[Speaker, Answer]]:
        """Have each model answer `text`. The student's answer joins the history."""
        system = [{"role": "system", "content": self.manner.system}] if self.manner.system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        speakers = [self.student, *([self.second] if self.second else [])]
        answers = [(speaker, speaker.answer([*system, *asked], self.manner, say(speaker))) for speaker in speakers]
        # the teacher goes on from the student's answers: both see one chat
        self.messages = [*asked, {"role": "assistant", "content": answers[0][1].text}]
        return answers


def open_chat(target: str, manner: Manner, device: str | None, trust: bool = False) -> Chat:
    """Load the student of a run or of a checkpoint, or any model: a directory, a hub id, a demo name.

    Args:
        trust: run code that the model brings. A config.yaml in the folder does not decide that.

    Raises:
        ConfigError: there is no such model, or no weights in it.
        CorruptError: its weights cannot be read.
    """
    place = _device(device)
    path = Path(target).expanduser()
    # a run's folder, or a checkpoint in it
    settings = next((p / CONFIG for p in (path, path.absolute().parent) if (p / CONFIG).is_file()), None)
    config = None
    if path.is_dir() and settings is not None:
        config = load_run_config(str(settings), ["trust_remote_code=true"] if trust else [], found=True)
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", ADAPTER)):
        saved = checkpoints_in(path)
        hint = f" There is one in {saved[-1]}." if saved else ""
        expected = "Expected a model, a finished run or one of its checkpoints."
        state = "The run has not finished." if settings or saved else expected
        raise ConfigError(f"{target} holds no model. {state}{hint}")
    name = target if config is None else "student" if config.recipe == "distill" else "model"
    student = _load(name, str(path) if path.is_dir() else target, place, trust)
    return Chat(student, lambda: _teacher(config, target, student, place, trust), manner)


def _teacher(config: RunConfig | None, target: str, student: Speaker, device: torch.device, trust: bool) -> Speaker:
    values = config.values if config else {}
    # the teacher of such a run was the student without its adapters, which is loaded already
    if values.get("teacher") == "self" and hasattr(student.model, "peft_config"):
        return Speaker("teacher", student.model, student.tokenizer, adapters_off=True)
    name = values.get("teacher_model_name_or_path")
    if not name:
        raise ConfigError(f"{target} names no teacher that can be loaded here: no teacher_model_name_or_path.")
    revision = values.get("teacher_model_revision")
    return _load("teacher", name, device, trust, revision)


def _device(name: str | None) -> torch.device:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name or best)
        # torch.device takes any name; memory shows whether there is such a device
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, or not in this build or machine
        raise ConfigError(f"--device {name}: {str(error).partition(chr(10))[0]}") from None
    return device


def _load(name: str, where: str, device: torch.device, trust: bool, revision: str | None = None) -> Speaker:
    source, options = resolve_model(where), {"trust_remote_code": trust, "revision": revision or "main"}
    dtype = torch.float32 if device.type == "cpu" else "auto"  # few CPUs compute fast in bf16
    try:
        adapter = adapter_at(source, revision)
        base, of_base = source, options
        if adapter is not None:
            base, of_base = resolve_model(adapter.base), {**options, "revision": adapter.revision or "main"}
        load = auto_class(AutoConfig.from_pretrained(base, **of_base)).from_pretrained
        model = load_whole(load, base, dtype=dtype, **of_base)
        if adapter is not None:
            model = with_adapter(model, source, revision)
        has_tokenizer = any((Path(source) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        # adapters are often saved without a tokenizer: then the base's
        named, options = (base, of_base) if adapter is not None and not has_tokenizer else (source, options)
        tokenizer = AutoTokenizer.from_pretrained(named, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        nowhere = (
            "" if Path(source).is_dir() else f"there is no such folder in {Path.cwd()}, and as a model of the hub: "
        )
        raise ConfigError(f"{where} cannot be loaded: {nowhere}{error}") from None
    # a run with gradient checkpointing saves it as False
    model.config.use_cache = True
    return Speaker(name, model.to(device).eval(), tokenizer)


# The chat in a terminal: lines in, answers out.
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


class Session:
    """Lines in, answers out. On a terminal a mistake is told and the chat goes on; in a script it ends it."""

    def __init__(self, chat: Chat, interactive: bool, write: Callable[[Path, str], None]):
        self.chat, self.interactive, self.write = chat, interactive, write
        self.last = ""

    def run(self) -> None:
        if self.interactive:
            print(f"{self._status()}\n/help lists the commands.")
        # to stderr: a script reads answers from stdout
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
                    # a script's output then reads like a chat
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

    def _say(self, speaker: Speaker) -> Any:
        if self.chat.second is not None:
            begun = "" if speaker is self.chat.student else "\n"
            print(f"{begun}{speaker.name}: ", end="", flush=True)
        # a model may write control characters, which a terminal would obey
        return lambda piece: print(visible(piece), end="", flush=True)

    def _clear(self) -> None:
        self.chat.messages, self.last = [], ""

    def _retry(self) -> None:
        if not self.last:
            raise ConfigError("/retry: nothing was asked yet.")
        # the question and its answer
        self.chat.messages = self.chat.messages[:-2]
        self._ask(self.last)

    def _teacher(self) -> None:
        self.chat.with_teacher(self.chat.second is None)
        print(f"The teacher answers {'too' if self.chat.second else 'no longer'}.")

    def _set(self, words: str) -> None:
        """Read KEY=VALUE pairs."""
        # types are text in a dataclass: `int | None`
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
        self.write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        print(f"Wrote {path}")

    def _status(self) -> str:
        speakers = [self.chat.student, *([self.chat.second] if self.chat.second else [])]
        models = [
            f"{speaker.name}: {speaker.model.num_parameters():,} parameters, {speaker.model.dtype} on "
            f"{speaker.model.device}"
            for speaker in speakers
        ]
        chosen = ", ".join(f"{key}={value}" for key, value in _given(self.chat.manner).items())
        return "\n".join([*models, f"settings: {chosen}", f"messages: {len(self.chat.messages)}"])


def _given(manner: Manner) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(manner).items() if value is not None}


def _pace(speaker: Speaker, answer: Answer) -> str:
    return f"{speaker.name}: {answer.tokens} tokens, {answer.tokens / max(answer.seconds, 1e-9):,.1f} tokens/s"
