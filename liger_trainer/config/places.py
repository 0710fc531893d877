"""What a configuration names outside itself: files and folders on this machine, and variables of the environment."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .settings import Finding, Setting

ALLOW_ENV = "--allow-env"
PATHS = (
    "model_name_or_path", "teacher_model_name_or_path", "teacher_tokenizer_name_or_path", "dataset_name",
    "chat_template_path", "resume_from_checkpoint",
)  # fmt: skip
_IN_A_LIST = {"datasets": ("data_files", "data_dir"), "teachers": ("teacher_model_name_or_path",)}
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow", ".jinja", ".gguf", ".safetensors")
# An interpreter, a loader or a compiler that finds one of these runs or loads what it names.
_RUNS_CODE = ("PYTHON", "LD_", "DYLD_", "BASH_", "PERL5", "RUBY")
_RUN_CODE_TOO = ("ENV", "PATH", "CC", "CXX", "NODE_OPTIONS", "GCONV_PATH", "IFS", "SHELLOPTS", "GIT_SSH_COMMAND")
_HARMLESS = ("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONIOENCODING", "PYTHONUTF8")


def missing_paths(settings: Mapping[str, Setting]) -> Iterator[Finding]:
    """Yield the settings that name a file or folder which is not there; what may be a hub id is none."""
    for key, setting in settings.items():
        for path, value in _names(key, setting.value):
            if _is_local(value) and not Path(value).expanduser().exists():
                yield Finding(setting.place(path), key, f"no such file or folder: {value}")


def _names(key: str, value: Any) -> Iterator[tuple[tuple, str]]:
    if key in PATHS and isinstance(value, str):
        yield (), value
    for index, entry in enumerate(value if key in _IN_A_LIST and isinstance(value, list) else ()):
        for name in _IN_A_LIST[key] if isinstance(entry, dict) else ():
            listed = entry.get(name)
            for item in listed if isinstance(listed, list) else [listed]:
                if isinstance(item, str):
                    yield (index, name), item


def _is_local(name: str) -> bool:
    """Whether a name can only be a path: a hub id is "name" or "owner/name", and `demo:` and URLs have a colon."""
    if ":" in name or "*" in name:
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_FILES)


def variables_that_run_code(env: Setting) -> Iterator[Finding]:
    """Yield the variables of `env` by which a file that was only meant to be trained with could start a program."""
    for name in env.value if isinstance(env.value, dict) else ():
        upper = str(name).upper()
        if (upper.startswith(_RUNS_CODE) or upper in _RUN_CODE_TOO) and upper not in _HARMLESS:
            message = f"{name} can make programs run other code; set it in the shell, or add {ALLOW_ENV}."
            yield Finding(env.place((name,)), "env", message)
