"""Tasks with a checker, of the package reasoning-gym (arXiv:2505.24760): `dataset_name: reasoning_gym:chain_sum`.

Rows are generated: the question is the prompt of a chat, the answer its completion. In every evaluation the student
answers the held-out questions greedily, and the task's own `score_answer` says which answers are right.

A fifth of all questions, chosen by their hash, is held out, whatever the seed: reasoning-gym makes row i from the
number seed + i, so the rows of two near seeds are mostly the same ones.

Rows of another dataset are scored by `exact_match: true`: an answer is right where it is the row's own.
"""

import difflib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from ..common.files import sha256
from ..errors import DataError
from ..plugins import TASK
from ..run.samples import held_out_prompts, texts_of
from ..trainers.decoder import Decoder

if TYPE_CHECKING:
    from datasets import Dataset

    from ..config.run_config import RunConfig
    from ..run.data.datasets import RunData
    from ..run.samples import Prompt

INSTALL = "pip install reasoning-gym"
TRAINING_ROWS, HELD_OUT_ROWS = 5000, 256  # where neither task_config nor max_eval_rows says
HELD_OUT_SEED = 1_000_000_007  # far from the seeds that people choose
ONE_IN = 5  # questions is held out
TRIES = 20  # rows that are generated for one that is kept, before a task is said to have no more
# These have no wheels, and serve few tasks: the others go without them.
RARE = ("cellpylib", "pycosat", "zss")
SPEC = "name", "weight", "config"  # of each task of a composite
EXACT_MATCH = "exact_match"
Entry = dict[str, Any]  # a row of reasoning-gym: question, answer, metadata


@dataclass(frozen=True)
class TaskRows:
    """The rows of a task, and how the held-out ones were chosen."""

    train: "Dataset"
    test: "Dataset"
    licence: str = "Apache-2.0"
    held_out: str = f"one question in {ONE_IN} by its hash, never trained on whatever the seed"


def load_task(config: "RunConfig") -> TaskRows:
    """Generate the rows that `dataset_name` and `task_config` describe.

    Raises:
        ConfigError: no such task or setting; reasoning-gym, or what the task needs, is not installed; the task has too
            few different questions, or no answers to learn.
    """
    name = config["dataset_name"].removeprefix(TASK)
    options = {"size": TRAINING_ROWS, "seed": 0, **(config["task_config"] or {})}
    with _refusals(config):
        if not isinstance(options["size"], int) or options["size"] < 1:
            raise _Refused("task_config", f"size: expected the number of training rows, got {options['size']!r}.")
        learned = list(_rows(_task(name, options), options["size"], held_out=False))
        asked = held_out(config)[1]
        if not learned or not asked:
            raise _Refused("task_config", f"{name} has too few different questions with these settings; widen them.")
        if any(entry["answer"] is None for entry in learned):
            raise _Refused("dataset_name", f"{name} has questions without an answer to learn.")
    return TaskRows(_dataset(learned), _dataset(asked))


def held_out(config: "RunConfig") -> tuple[Any, list[Entry]]:
    """Return reasoning-gym's dataset, which scores answers, and the held-out questions, for which no seed counts."""
    name, count = config["dataset_name"].removeprefix(TASK), config["max_eval_rows"] or HELD_OUT_ROWS
    with _refusals(config):
        task = _task(name, {**(config["task_config"] or {}), "seed": HELD_OUT_SEED, "size": count})
        return task, list(_rows(task, count, held_out=True))


@contextmanager
def _refusals(config: "RunConfig") -> Iterator[None]:
    try:
        yield
    except _Refused as refused:
        raise config.error(refused.key, str(refused)) from None


class _Refused(ValueError):
    """What is wrong with a key of the configuration."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


def _task(name: str, options: Mapping[str, Any]) -> Any:
    """Return reasoning-gym's dataset of a task."""
    try:
        gym = reasoning_gym()
    except ImportError as error:
        raise _Refused("dataset_name", f"needs the package reasoning-gym ({error}): {INSTALL}") from None
    options = dict(options)
    _check(gym.factory.DATASETS, name, options)
    try:
        if name == "composite":  # as its own YAML files have them
            specs = options.get("datasets") or []
            for spec in specs:
                if not isinstance(spec, dict) or "name" not in spec or spec.keys() - {*SPEC}:
                    raise _Refused("task_config", f"datasets: expected entries of {', '.join(SPEC)}, got {spec}.")
                _check(gym.factory.DATASETS, spec["name"], spec.get("config") or {})
            options["datasets"] = [gym.composite.DatasetSpec(**{"weight": 1, "config": {}, **spec}) for spec in specs]
        return gym.create_dataset(name, **options)
    except ImportError as error:
        raise _Refused("dataset_name", f"the task {name} needs another package: pip install {error.name}") from None
    except (AssertionError, ValueError, TypeError) as error:
        raise _Refused("task_config", f"{name} refuses this: {error or 'a value out of range'}") from None


def _check(known: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> None:
    """Refuse a task that is not there, settings that it does not have, and text where it expects a number."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        advice = f"do you mean {' or '.join(near)}?" if near else f"choose from {', '.join(sorted(known))}."
        raise _Refused("dataset_name", f"reasoning-gym has no task {name!r}; {advice}")
    taken = {field.name: field.type for field in fields(known[name][1])}
    unknown = sorted(options.keys() - taken.keys())
    if unknown:
        raise _Refused("task_config", f"{name} has no {', '.join(unknown)}; it takes {', '.join(taken)}.")
    for setting, value in options.items():
        if isinstance(value, str) and taken[setting] in (int, float, int | None):
            raise _Refused("task_config", f"{setting} of {name}: expected a number, got {value!r}.")


def reasoning_gym() -> Any:
    """Return the package, imported without what only few of its tasks need."""
    with _without_rare_packages():
        import reasoning_gym as package  # pyright: ignore[reportMissingImports]
        import reasoning_gym.composite  # pyright: ignore[reportMissingImports]
    return package


class _Missing(ModuleType):
    """Stands for a package that is not installed, until a task asks for something in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)


@contextmanager
def _without_rare_packages() -> Iterator[None]:
    """Let reasoning-gym, which imports all its tasks at once, be imported without what only few of them need."""
    from importlib.util import find_spec

    missing = [name for name in RARE if name not in sys.modules and find_spec(name) is None]
    sys.modules.update({name: _Missing(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _rows(task: Any, count: int, held_out: bool) -> Iterator[Entry]:
    """Yield up to `count` rows, of the questions that are held out or of the others; held-out ones differ."""
    questions, kept = set[str](), 0
    for index in range(TRIES * count):
        try:
            entry = task[index]
        except IndexError:  # a task of a fixed number of questions
            return
        except ImportError as error:
            raise _Refused("dataset_name", f"the task needs another package: pip install {error.name}") from None
        question = entry["question"]
        if _is_held_out(question) != held_out or (held_out and question in questions):
            continue
        questions.add(question)
        yield entry
        kept += 1
        if kept == count:
            return


def _is_held_out(question: str) -> bool:
    return int(sha256(question.encode())[:8], 16) % ONE_IN == 0


def _dataset(entries: Sequence[Entry]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": entry["question"]}] for entry in entries],
            "completion": [[{"role": "assistant", "content": str(entry["answer"])}] for entry in entries],
        }
    )


class ExactMatch(TrainerCallback):
    """Adds to each evaluation of a trainer the share of held-out questions that the student answers right.

    Of a task an answer is right where `score_answer` gives it 1, of other rows where it is the row's own, but for white
    space at both ends. What precedes `</think>` is no part of an answer. `exact_match/<task>` is the share of each task
    of a `composite`, `teacher_exact_match` the teacher's, where it is one model of this process that reads the
    student's tokens.

    Args:
        data: the rows of the run; the held-out ones are asked.

    Raises:
        ConfigError: questions or answers are longer than the settings allow, so that none can be right.
        DataError: rows have no answer.
    """

    def __init__(self, trainer: Any, config: "RunConfig", data: "RunData"):
        self.trainer, self.decoder = trainer, Decoder(autocast=trainer.accelerator.autocast)
        self.most, self.at_once = config["max_new_tokens"], config["per_device_eval_batch_size"]
        self.prompts = held_out_prompts(config, data, trainer.processing_class, len(data.test))
        _check_lengths(config, self.prompts, trainer.processing_class)
        self.names = [""] * len(self.prompts)  # of the task of each question
        self.is_right: Callable[[int, str], bool] = self._is_the_row_s
        if (config["dataset_name"] or "").startswith(TASK):
            task, asked = held_out(config)
            by_question = {entry["question"]: entry for entry in asked}
            entries = [by_question[messages[-1]["content"]] for messages in data.test["prompt"]]
            self.names = [entry["metadata"].get("source_dataset") for entry in entries]
            self.is_right = lambda i, text: float(task.score_answer(answer=text, entry=entries[i])) >= 1
        self._of_teacher: dict[str, float] | None = None

    def _is_the_row_s(self, i: int, text: str) -> bool:
        return text == _answer(self.prompts[i].reference or "")

    def on_evaluate(self, args, state, control, *, metrics: dict[str, float], **kwargs):
        found = self.measure(self.trainer.accelerator.unwrap_model(self.trainer.model))
        if self._of_teacher is None:
            self._of_teacher = self._measured_teacher()
        found |= self._of_teacher
        found = {f"eval_{name}": value for name, value in found.items()}
        metrics.update(found)  # Trainer returns it, and chooses the best model by it
        self.trainer.log(found)

    def measure(self, model: Any) -> dict[str, float]:
        """Return the shares of right answers of a model."""
        accelerator = self.trainer.accelerator
        rank, ranks = accelerator.process_index, accelerator.num_processes
        # A rank without its own questions answers one too: what FSDP gathers it must help to gather.
        own = list(range(rank, len(self.prompts), ranks))
        prompts = [self.prompts[i] for i in own or [0]]
        tokenizer = self.trainer.processing_class
        texts = texts_of(model, tokenizer, prompts, self.most, self.decoder, self.at_once)
        scored = {i: self.is_right(i, _answer(text)) for i, text in zip(own, texts, strict=False)}
        scores = {i: right for each in gather_object([scored]) for i, right in each.items()}
        parts = defaultdict(list)
        for i, right in scores.items():
            parts[EXACT_MATCH].append(right)
            parts[f"{EXACT_MATCH}/{self.names[i]}"].append(right)
        shares = {name: sum(each) / len(each) for name, each in parts.items()}
        return shares if len(shares) > 2 else {EXACT_MATCH: shares[EXACT_MATCH]}

    def _measured_teacher(self) -> dict[str, float]:
        teaching = getattr(self.trainer, "teaching", None)
        if teaching is None or teaching.tokenizer is not None:  # none, or one with another vocabulary
            return {}
        with teaching.live() as models:
            if len(models) != 1:
                return {}
            (teacher,) = models.values()
            return {f"teacher_{name}": share for name, share in self.measure(teacher).items()}


def _answer(text: str) -> str:
    """Return what a text answers once it has thought."""
    return text.rpartition("</think>")[2].strip()


def _check_lengths(config: "RunConfig", prompts: Sequence["Prompt"], tokenizer: Any) -> None:
    """Refuse held-out rows that have no answer, and those whose answer or question the settings would cut."""
    unanswered = sum(not (prompt.reference or "").strip() for prompt in prompts)
    if unanswered:
        raise DataError(f"exact_match: {unanswered} of {len(prompts)} held-out rows have no answer to compare with.")
    lengths = [len(tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]) for prompt in prompts]
    most, longest = config["max_new_tokens"], max(lengths)
    if longest > most:
        cut = f"{sum(n > most for n in lengths)} of {len(prompts)} held-out answers are longer than {most} tokens"
        raise config.error("max_new_tokens", f"{cut}, so that none of them can be right; set it to {longest} or more.")
    limit = config["max_length"]
    cut = sum(len(prompt.input_ids) + n > limit for prompt, n in zip(prompts, lengths, strict=True)) if limit else 0
    if cut:
        raise config.error("max_length", f"{limit} tokens cut {cut} of {len(prompts)} held-out rows; set it higher.")


def measure_with(trainer: Any, config: "RunConfig", data: "RunData") -> None:
    """Have every evaluation of a trainer measure exact match."""
    # First, so that the callbacks that read metrics, such as early stopping, see it.
    trainer.callback_handler.callbacks.insert(0, ExactMatch(trainer, config, data))
