"""What a configuration names outside itself: files and folders on this machine, and variables of the environment."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .settings import COMMAND_LINE, Finding, Setting

ALLOW_ENV, API_KEY = "--allow-env", "teacher_server_api_key_env"
PATHS = (
    "model_name_or_path", "teacher_model_name_or_path", "teacher_tokenizer_name_or_path", "dataset_name",
    "chat_template_path", "resume_from_checkpoint",
)  # fmt: skip
_IN_A_LIST = {"datasets": ("data_files", "data_dir"), "teachers": ("teacher_model_name_or_path",)}
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow", ".jinja", ".gguf", ".safetensors")
# Variables that choose among what is installed, and none that names a program, a library or compiled code to load.
_ALLOWED = re.compile(
    # Hugging Face's libraries: where files lie, what is printed, which server is asked
    r"HF_(?!MODULES_CACHE)\w+|HUGGINGFACE_HUB_\w+|(TRANSFORMERS|DATASETS|DIFFUSERS)_(VERBOSITY|CACHE|OFFLINE)"
    r"|TOKENIZERS_PARALLELISM|TRL_EXPERIMENTAL_SILENCE|LIGER_TRAINER_\w+"
    # trackers: project, names, server, login
    r"|(WANDB|MLFLOW|COMET|NEPTUNE|CLEARML|TRACKIO|SWANLAB|DVCLIVE)_[A-Z]\w*|TENSORBOARD_LOGGING_DIR"
    # which devices, how many threads, how memory is taken, what is logged
    r"|(CUDA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG"
    r"|NVIDIA_TF32_OVERRIDE|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|PYTORCH_MPS_HIGH_WATERMARK_RATIO|TORCH_LOGS"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|RAYON|POLARS|VECLIB_MAXIMUM)_(NUM_|MAX_)?THREADS|RAYON_NUM_THREADS"
    # how processes talk to each other, and to the network
    r"|TORCH_NCCL_\w+|(NCCL|GLOO)_SOCKET_IFNAME|NCCL_(DEBUG(_SUBSYS|_FILE)?|TIMEOUT|ALGO|PROTO|P2P_(DISABLE|LEVEL)"
    r"|SHM_DISABLE|IB_(DISABLE|HCA|TIMEOUT|GID_INDEX|TC|SL)|NET_GDR_LEVEL|CUMEM_ENABLE|NVLS_ENABLE|BUFFSIZE"
    r"|(MIN|MAX)_(NCHANNELS|CTAS)|NTHREADS|ASYNC_ERROR_HANDLING|BLOCKING_WAIT|CROSS_NIC|TOPO_DUMP_FILE)"
    r"|(HTTPS?|ALL|NO)_PROXY|PYTHON(HASHSEED|UNBUFFERED|FAULTHANDLER|IOENCODING|UTF8)",
    re.IGNORECASE,
)


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


def variables_not_allowed(env: Setting) -> Iterator[Finding]:
    """Yield the variables of `env` by which a file that was only meant to be trained with could start a program."""
    for name in env.value if isinstance(env.value, dict) else ():
        if not _ALLOWED.fullmatch(str(name)):
            message = (
                f"{name} is none of the variables that a configuration may set: those of trackers, of Hugging Face's "
                "libraries and of NCCL, devices, threads, memory and proxies. Others can make programs run other code. "
                f"Set it in the shell, or add {ALLOW_ENV} to the command line."
            )
            yield Finding(env.place((name,)), "env", message)


def needs_trust(settings: Mapping[str, Setting]) -> Iterator[Finding]:
    """Yield the settings that run code of a model or of the hub, or send a variable of this machine to a server. A
    configuration that lies in a folder does not decide them, since nobody named it."""
    for key, setting in settings.items():
        if setting.where != COMMAND_LINE and _is_trusting(key, setting.value):
            risk = "send a key to a server" if key == API_KEY else "run code that a model or the hub brings"
            message = (
                f"{setting.value!r} can {risk}. A configuration that was found in a folder does not decide that: if "
                f"you trust it, add {key}=... to the command line."
            )
            yield Finding(setting.where, key, message)


def _is_trusting(key: str, value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("{"):  # JSON, as TRL takes keywords too
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            return False  # no keywords either
    if isinstance(value, dict):
        return any(_is_trusting(str(name), item) for name, item in value.items())
    if isinstance(value, list):
        return any(_is_trusting(key, item) for item in value)
    if key in ("attn_implementation", "experts_implementation"):  # owner/name is code of the hub
        return "/" in str(value)
    return key in ("trust_remote_code", "use_kernels", API_KEY) and bool(value)
