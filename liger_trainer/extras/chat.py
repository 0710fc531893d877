"""Chat with the student of a run, and with its teacher beside it: loading, the history, and streamed answers."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TextStreamer

from ..common.checkpoints import checkpoints_in
from ..common.files import CONFIG, METRICS
from ..common.weights import ADAPTER, adapter_at, auto_class, load_whole, with_adapter
from ..config.run_config import RunConfig, load_run_config
from ..errors import ConfigError
from ..teachers.adapters_off import without_adapters
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
        """Return the keywords for `generate`."""
        keys = ("top_p", "top_k", "repetition_penalty")
        chosen = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.temperature is not None:
            chosen |= {"do_sample": self.temperature > 0}
            chosen |= {"temperature": self.temperature} if self.temperature else {"temperature": None, "top_p": None}
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

    def answer(self, messages: list[dict[str, str]], manner: Manner, say: Say) -> Answer:
        """Generate the next message, and hand its pieces to `say`.

        Raises:
            ConfigError: the chat is longer than the model reads, or its template refuses it.
        """
        ids = self._ids(messages).to(self.model.device)
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and ids.shape[1] >= limit:
            raise ConfigError(f"the chat has {ids.shape[1]:,} tokens and {self.name} reads {limit:,}; /clear it.")
        if manner.seed is not None:
            torch.manual_seed(manner.seed)
        keywords = manner.keywords()
        if limit:
            keywords["max_new_tokens"] = min(keywords["max_new_tokens"], limit - ids.shape[1])
        if self.tokenizer.pad_token_id is None:
            keywords["pad_token_id"] = self.tokenizer.eos_token_id
        streamer, began = _Pieces(self.tokenizer, say), time.perf_counter()
        with torch.no_grad(), without_adapters(self.model) if self.adapters_off else nullcontext():
            written = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **keywords
            )
        new = written[0, ids.shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        return Answer(text, len(new), time.perf_counter() - began)

    def _ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        if not self.tokenizer.chat_template:  # a base model goes on with the text
            return self.tokenizer(messages[-1]["content"], return_tensors="pt")["input_ids"]
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
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
    beside: Speaker | None = None

    def with_teacher(self, wanted: bool) -> None:
        """Have the teacher answer too, or not. Raises ConfigError where the run has no teacher that can be loaded."""
        self.beside = self.teacher() if wanted else None

    def ask(self, text: str, say: Callable[[Speaker], Say]) -> list[tuple[Speaker, Answer]]:
        """Have each model answer `text`. The student's answer joins the history."""
        system = [{"role": "system", "content": self.manner.system}] if self.manner.system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        speakers = [self.student, *([self.beside] if self.beside else [])]
        answers = [(speaker, speaker.answer([*system, *asked], self.manner, say(speaker))) for speaker in speakers]
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
    settings = next((p / CONFIG for p in (path, path.absolute().parent) if (p / CONFIG).is_file()), None)
    config = None
    if path.is_dir() and settings is not None:
        config = load_run_config(str(settings), ["trust_remote_code=true"] if trust else [], found=True)
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", ADAPTER)):
        saved = checkpoints_in(path)
        hint = f" There is one in {saved[-1]}." if saved else ""
        unfinished = "" if (path / METRICS).is_file() else " The run has not finished."
        raise ConfigError(f"{target} holds no model.{unfinished}{hint}")
    student = _load("student" if config else target, str(path) if path.is_dir() else target, place, trust)
    return Chat(student, lambda: _teacher(config, target, student, place, trust), manner)


def _teacher(config: RunConfig | None, target: str, student: Speaker, device: torch.device, trust: bool) -> Speaker:
    values = config.values if config else {}
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
        beside = any((Path(source) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        named, options = (base, of_base) if adapter is not None and not beside else (source, options)
        tokenizer = AutoTokenizer.from_pretrained(named, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}") from None
    model.config.use_cache = True
    return Speaker(name, model.to(device).eval(), tokenizer)
