"""The tests' environment, set before triton and Hugging Face's libraries are imported: they read it once."""

import gc
import os
import signal
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

from liger_trainer import secrets

pytest.register_assert_rewrite("tiny", "splits")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels run on the CPU, in numpy
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETER:
    import quick_interpreter

    quick_interpreter.install()
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # the tests' tensors are too small for more, and pytest runs several processes


@pytest.fixture(scope="module", autouse=True)
def chunked_torch() -> Iterator[None]:
    """The ops' CPU path, as users without a GPU run it, in this process and in those that tests start: the interpreter,
    which is slow, is for tests/kernels."""
    from liger_trainer.kernels import _triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "INTERPRETED", False)
        patch.setenv("TRITON_INTERPRET", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def signals_end_a_process() -> None:
    """nohup and shells that start the tests in the background have two signals ignored, which runs respect."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Each training collects garbage, which takes a third of a second where all that was imported is looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch) -> None:
    """What one test gave as a key may be a word in another's messages."""
    monkeypatch.setattr(secrets, "_remembered", set())


@pytest.fixture
def kernels(monkeypatch) -> None:
    """The Triton kernels after all, under the interpreter."""
    from liger_trainer.kernels import _triton

    if not (INTERPRETER and _triton.INSTALLED):
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the interpreter reads each time
