"""A model folder as one GGUF file, for llama.cpp and Ollama, written by llama.cpp's own converter.

The converter knows each architecture's tensors and tokenizers, and changes with llama.cpp: we call it where it is
installed, and copy nothing of it. It is `convert_hf_to_gguf.py`, on PATH or in the folder that LLAMA_CPP_DIR names (a
checkout of llama.cpp).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..common.files import writing_to
from ..errors import ConfigError

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
