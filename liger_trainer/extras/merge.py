"""`liger-trainer merge`: a LoRA adapter and its base as one model that transformers loads."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.files import staged_folder, writing_to
from ..errors import ConfigError, CorruptError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "merge.json"
ADAPTER, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")


def merge(run_dir: Path, out: Path, base: str | None, dtype: str | None, gguf: Path | None, force: bool) -> None:
    adapter = _adapter(run_dir)
    name = base or adapter.get("base_model_name_or_path")
    if not (name and isinstance(name, str)):
        raise ConfigError(f"{run_dir / ADAPTER} does not name its base model; name it with --base MODEL.")
    # Before the base is loaded, which may take minutes.
    _check_target(out, run_dir, name, force)
    if gguf is not None:
        if gguf.exists() and not (force and gguf.is_file()):
            raise ConfigError(f"--gguf: {gguf} exists; choose another name{' or add --force' * gguf.is_file()}.")
        converter = find_converter()
    from ..common.weights import check_mergeable
    from ..compat.models import name_or_path

    check_mergeable(str(adapter.get("peft_type")))
    model, tokenizer = _merged(run_dir, name, None if base else adapter.get("revision"), dtype)

    of, weights_dtype = name_or_path(model.config), model.dtype
    try:
        with writing_to(out), staged_folder(out) as staged:
            from ..common.mtp_head import SHARD, keep_mtp_head
            from ..common.weights import logits_of

            expected = logits_of(model)
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            kept = keep_mtp_head(model, staged, trained=run_dir / SHARD)
            del model  # one copy of the weights is in memory when the files are read again
            _check_files(staged, expected, weights_dtype)
            files = sorted(path.name for path in staged.iterdir())
            (staged / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
            if out.exists():
                # Only now that the new one is whole; a link is kept, and what it leads to is replaced.
                shutil.rmtree(out.resolve())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    print(f"Wrote {out}: {of} with the adapter of {run_dir} merged in, {weights_dtype}")
    if kept:
        print(kept)
    if gguf is not None:
        write_gguf(out, gguf, converter)
        print(f"Wrote {gguf}")


def _adapter(run_dir: Path) -> dict[str, Any]:
    """Return the adapter's configuration. Raise for everything that can be found without reading weights."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; expected a run, a checkpoint or an adapter.")
    path = run_dir / ADAPTER
    if not path.is_file():
        inside = sorted(str(found.parent) for found in run_dir.glob(f"*/{ADAPTER}"))
        hint = f" There is one in {', '.join(inside)}." if inside else ""
        if not hint and (run_dir / "config.json").is_file():
            hint = " It is a whole model already."
        raise ConfigError(f"{run_dir} holds no adapter ({ADAPTER}).{hint}")
    try:
        adapter = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptError(f"{path} cannot be read: {error}") from None
    if not any((run_dir / name).is_file() for name in WEIGHTS):
        raise CorruptError(f"{run_dir}: the weights of the adapter are missing: {' or '.join(WEIGHTS)}.")
    return adapter


def _check_target(out: Path, run_dir: Path, base: str, force: bool) -> None:
    """Refuse to replace anything but an earlier merge: the adapter, its base, or a folder with other files."""
    target, adapter = out.resolve(), run_dir.resolve()
    if target == adapter or target in adapter.parents:
        raise ConfigError(f"{out} {'is' if target == adapter else 'holds'} the adapter itself; choose another name.")
    if target == Path(base).expanduser().resolve():
        raise ConfigError(f"{out} is the base of the adapter; choose another name.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise ConfigError(f"{out} exists; choose another name or add --force.")
    others = sorted(path.name for path in out.iterdir() if path.name not in _merged_files(out)) if out.is_dir() else []
    if others or not out.is_dir():
        what = f"holds what no merge wrote ({', '.join(others[:3])})" if others else "is a file"
        raise ConfigError(f"{out} {what}, and --force replaces only merged models; choose another name.")


def _merged_files(out: Path) -> set[str]:
    """Return the names of files that a merge wrote into the folder, from its manifest; none without one."""
    try:
        return {MANIFEST, *json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _merged(run_dir: Path, name: str, revision: str | None, dtype: str | None) -> "tuple[PreTrainedModel, Any]":
    import torch
    from transformers import AutoConfig

    from ..common.weights import auto_class, load_whole, merged, with_adapter
    from .demo import resolve_model

    path = resolve_model(name)
    target = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(target, torch.dtype) and target.is_floating_point):
        raise ConfigError(f"--dtype: expected float32, bfloat16 or float16, got {dtype!r}.")
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        # Weights in 4 bits would be unpacked, added to, and packed again, with another error.
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"{name} is quantized on disk; name the unquantized model with --base MODEL.")
        load = partial(auto_class(config).from_pretrained, trust_remote_code=False)
        # In fp32 the sum is rounded once, when it is saved.
        model = load_whole(load, path, revision=revision, dtype=torch.float32)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"the base model {name} cannot be loaded: {error} Name it with --base MODEL.") from None
    try:
        plain = merged(with_adapter(model, run_dir))
    except ConfigError as error:
        raise ConfigError(f"{run_dir} on {name}: {error}") from error
    has_tokenizer = any((run_dir / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    plain.config.use_cache = True
    return plain.to(target or config.dtype or torch.float32), _processing(str(run_dir) if has_tokenizer else path)


def _check_files(folder: Path, expected: Any, dtype: Any) -> None:
    """Raise ConfigError unless the model that transformers loads from the folder has these logits."""
    from transformers import AutoConfig

    from ..common.weights import TOLERANCE, auto_class, check_alike, load_whole, logits_of

    try:
        load = partial(auto_class(AutoConfig.from_pretrained(folder)).from_pretrained, trust_remote_code=False)
        again = load_whole(load, str(folder), dtype=dtype)
    except (ConfigError, OSError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"the merged model cannot be loaded again, so it was not kept: {error}") from error
    check_alike(logits_of(again), expected, TOLERANCE[dtype], "saved")


def _processing(folder: str) -> Any:
    """Return the tokenizer of a folder or hub id, or the processor that a folder has for images."""
    from transformers import AutoProcessor, AutoTokenizer

    has_processor = any(
        (Path(folder) / file).is_file() for file in ("processor_config.json", "preprocessor_config.json")
    )
    try:
        return (AutoProcessor if has_processor else AutoTokenizer).from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:  # such as of torchvision
        raise ConfigError(f"the processor in {folder} cannot be read: {' '.join(str(error).split())}") from None


# A model folder as one GGUF file, for llama.cpp and Ollama. llama.cpp's own converter writes it: it knows each
# architecture's tensors and tokenizers, and changes with llama.cpp, so we call it where it is installed, and copy
# nothing of it. It is `convert_hf_to_gguf.py`, on PATH or in the folder that LLAMA_CPP_DIR names (a checkout).


CONVERTER, FOLDER = "convert_hf_to_gguf.py", "LLAMA_CPP_DIR"


def find_converter() -> Path:
    """Return the path of llama.cpp's converter.

    Raises:
        ConfigError: it is not installed, or not where LLAMA_CPP_DIR says.
    """
    folder = os.environ.get(FOLDER)
    found = Path(folder).expanduser() / CONVERTER if folder else shutil.which(CONVERTER)
    if found is None or not Path(found).is_file():
        where = f"not in {folder}, which {FOLDER} names" if folder else "not on PATH"
        raise ConfigError(
            f"--gguf: llama.cpp's {CONVERTER} is {where}. Clone llama.cpp, pip install its requirements for it "
            f"(requirements/requirements-convert_hf_to_gguf.txt), and set {FOLDER} to the checkout."
        )
    return Path(found)


def write_gguf(model: Path, target: Path, converter: Path) -> None:
    """Convert the model in a folder into the file `target`, in the 16-bit dtype nearest to the model's.

    Raises:
        ConfigError: the converter failed; the message has its last line, and nothing is left at `target`.
    """
    staged = target.with_name(f".{target.name}.partial")
    # With this Python: it has torch and transformers, which the converter imports.
    command = [sys.executable, str(converter), str(model), "--outfile", str(staged), "--outtype", "auto"]
    try:
        with writing_to(target):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not staged.is_file():
                said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with {done.returncode}"]
                raise ConfigError(f"--gguf: {converter} wrote no file: {said[-1]} The merged model is in {model}.")
            staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
