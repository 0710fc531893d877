"""The tests' environment, set before triton and Hugging Face's libraries are imported: they read it once."""

import atexit
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# The tests' tensors are too small for more threads, and pytest and its processes run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import older_releases
import processes
import pytest
import quick_libraries
import torch

from liger_trainer import secrets

pytest.register_assert_rewrite("tiny", "splits", "trainings", "plain_models")

# The files that take longest come first, so that at the end no process waits long for another one. The others follow
# as they were found.
LONG_FILES = (
    "test_promises", "test_compiles", "test_estimate", "test_linear_modes", "test_linear_losses", "test_without_trl",
    "test_rollouts", "test_cross_tokenizer", "test_catalogue", "test_step_graphs", "test_commands", "test_recipes",
    "test_fsdp2_graphs", "test_tasks", "test_mtp_families", "test_import_cache", "test_finite_guard", "test_data_forms",
    "test_on_policy", "test_server", "test_checkpointing", "test_trained_steps", "test_images", "test_measured_memory",
    "test_docs", "test_packed_rows", "test_distill_callback", "test_resume_check", "test_distill_trainer",
    "test_token_ids", "test_labels", "test_cuda_graphs", "test_optimizer", "test_stopping", "test_against_trl",
    "test_hidden_cache", "test_capture", "test_cached",
)  # fmt: skip

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels run on the CPU, in numpy
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETER:
    import quick_interpreter

    quick_interpreter.install()
quick_libraries.install()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, which leaves little garbage and takes a fifth longer with it
    if config.getoption("dist", "no") == "loadfile":
        config.option.loadscopereorder = False  # which begins files of few tests last, however long they take


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return older_releases.imports_later_families(collection_path) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    older_releases.wait_for_newer(items)
    rank = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    quick_libraries.install_in_imported()
    gc.freeze()
    processes.keep_as_imported()
    gc.enable()
    atexit.register(gc.unfreeze)  # or libraries report as leaked what is there to the end; pytest collects before that


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


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory) -> Iterator[None]:
    """What tests, libraries and their processes make by tempfile lies in pytest's own folder, which ends with it."""
    folder = str(tmp_path_factory.mktemp("tempfile"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Each training collects garbage, which takes half a second where all that was imported is looked through."""
    gc.collect()
    gc.freeze()


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
