"""Tasks of reasoning-gym: their rows, exact match in evaluations, and lm-eval-harness."""

import builtins
import importlib.util
import io
import json
import re
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from commands import call, done, metrics, refused, save_models, settings, without_report
from tiny import WORDS, tiny_tokenizer

from liger_trainer.config.run_config import load_run_config
from liger_trainer.extras import tasks
from liger_trainer.extras.tasks import reasoning_gym
from liger_trainer.run.data.datasets import load_run_datasets

if find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)


@dataclass
class EchoConfig:
    words: int = 20
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.words > 1, "words must be more than one"


@pytest.fixture(scope="module", autouse=True)
def echo() -> None:
    """A task that a tiny model learns. What imports the package takes seconds, which collecting need not wait for."""
    with pytest.MonkeyPatch.context() as patch:  # as where pycosat, which has no wheels, could not be installed
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycosat" else find_spec(name))
        gym = reasoning_gym().factory

    class Echo(gym.ProceduralDataset):
        """Say the first of two words. A checker that counts a question's second word half right, and any case."""

        def __init__(self, config: EchoConfig):
            super().__init__(config=config, seed=config.seed, size=config.size)

        def __getitem__(self, idx: int) -> dict:
            first, second = Random(self.seed + idx).sample(WORDS[: self.config.words], 2)
            return {"question": f"{first} {second}", "answer": first, "metadata": {"source_dataset": "echo"}}

        def score_answer(self, answer, entry) -> float:
            first, second = entry["question"].split()
            return 1.0 if answer.lower() == first else 0.5 if answer == second else 0.0

    gym.DATASETS.setdefault("echo", (Echo, EchoConfig))


ECHO = {"dataset_name": "reasoning_gym:echo", "max_eval_rows": 24, "per_device_eval_batch_size": 7, "max_new_tokens": 3,
        "holdout_fraction": None}  # fmt: skip


CHAIN = ["dataset_name=reasoning_gym:chain_sum", "task_config={max_terms: 2, size: 50}"]


def task(**changes) -> str:
    text = settings(**{**ECHO, **changes})
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("holdout_fraction"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_models(tmp_path, "student", "teacher", num_hidden_layers=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(**chosen) -> tuple[list[str], list[str]]:
    """The questions that are learned, and those that are held out."""
    words = [f"task_config={json.dumps(chosen)}", "max_eval_rows=40"]
    data = load_run_datasets(load_run_config("smollm2/sft_task", words))
    assert data.facts.form == "prompt-completion" and data.facts.licence == "Apache-2.0"
    (turn,), (answer,) = data.train[0]["prompt"], data.train[0]["completion"]
    assert turn["role"] == "user" and answer["role"] == "assistant" and int(answer["content"]) is not None
    return tuple([row["prompt"][0]["content"] for row in rows] for rows in (data.train, data.test))


def test_no_seed_trains_on_a_question_that_is_held_out():
    easy = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 300}  # of 200 questions nearly all come
    learned, asked = rows_of(**easy, seed=0)
    others, asked_again = rows_of(**easy, seed=5000)
    assert len(learned) == len(others) == 300 and learned != others
    assert asked == asked_again and 20 <= len(asked) == len(set(asked)) <= 40
    assert not {*learned, *others} & {*asked}
    assert len({*learned, *others, *asked}) > 180


def test_exact_match_is_measured_by_the_checker_in_runs_and_eval(folder, capsys, monkeypatch):
    """The best checkpoint is chosen by it, the report and the table have it, and `eval` measures the same."""
    monkeypatch.setattr("liger_trainer.extras.report.html.draw", lambda runs, labels: [])
    (folder / "run.yaml").write_text(task(
        task_config={"size": 200}, max_steps=60, learning_rate=2e-2, per_device_train_batch_size=32,
        lr_scheduler_type="cosine", eval_strategy="steps", save_strategy="steps", eval_steps=30, save_steps=30,
        load_best_model_at_end=True, metric_for_best_model="exact_match", save_total_limit=1,
    ))  # fmt: skip
    out, _ = done(call(capsys, "run", "run.yaml"))
    found = metrics(folder / "out")
    before, after = (found[when]["exact_match"] for when in ("before", "after"))
    assert before < 0.2 and after > 0.6, "it learned to say the first word"
    measured = [entry["eval_exact_match"] for entry in found["log_history"] if "eval_exact_match" in entry]
    assert len(measured) == 4 and after == max(measured[1:3])  # before, twice in training, after: that of the best
    assert (after * 24) % 1 == pytest.approx(0), "a share of 24 questions, no answer half right"
    table = next(line for line in out.splitlines() if line.startswith("│ exact match"))
    assert f"{before:.3f}" in table and f"{after:.3f}" in table
    assert f"exact match from {before:.3f} to {after:.3f}" in " ".join(out.split())
    assert "exact match" in (folder / "out" / "report.html").read_text()

    out, _ = done(call(capsys, "eval", "out", "--json"))
    assert json.loads(out)["evaluations"][0]["metrics"]["exact_match"] == after

    # as a teacher, with the student's own figure and its teacher's
    without_report(monkeypatch)
    teacher = {"teacher_model_name_or_path": "out", "model_name_or_path": "out", "keep_every_nth_layer": 2}
    (folder / "kd.yaml").write_text(task(**teacher, output_dir="kd", max_steps=1))
    done(call(capsys, "run", "kd.yaml"))
    student = metrics(folder / "kd")
    assert student["before"]["teacher_exact_match"] == after == student["after"]["teacher_exact_match"]
    assert student["before"]["exact_match"] < after


def test_each_task_of_a_composite_has_its_share(folder, capsys, monkeypatch):
    without_report(monkeypatch)
    specs = [{"name": "echo"}, {"name": "chain_sum", "weight": 2, "config": {"max_terms": 2}}]
    (folder / "run.yaml").write_text(
        task(dataset_name="reasoning_gym:composite", task_config={"datasets": specs, "size": 60}, max_length=64)
    )
    done(call(capsys, "run", "run.yaml"))
    assert {"exact_match", "exact_match/echo", "exact_match/chain_sum"} <= metrics(folder / "out")["after"].keys()
    out, _ = done(call(capsys, "eval", "out"))
    assert "exact_match/chain_sum" in out and "exact_match/echo" in out


def own_rows(folder, answer=lambda words: "w5") -> None:
    """Rows of the user's own, with an answer to each prompt; 12 of the 60 are held out."""
    draw = Random(0)
    asked = [draw.sample(WORDS, 3) for _ in range(60)]
    chats = [[{"role": "user", "content": " ".join(w)}, {"role": "assistant", "content": answer(w)}] for w in asked]
    rows = ({"prompt": chat[:1], "completion": chat[1:]} for chat in chats)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_of_one_s_own_are_compared_with_their_answers(folder, capsys, monkeypatch):
    without_report(monkeypatch)
    own_rows(folder)
    (folder / "run.yaml").write_text(settings(
        dataset_name="rows.jsonl", exact_match=True, max_steps=30, learning_rate=2e-2, per_device_train_batch_size=16,
        lr_scheduler_type="cosine", max_new_tokens=3, max_length=32, holdout_fraction=0.2,
    ))  # fmt: skip
    out, _ = done(call(capsys, "run", "run.yaml"))
    found = metrics(folder / "out")
    assert found["before"]["exact_match"] == 0 and found["after"]["exact_match"] == 1
    assert "exact match from 0.000 to 1.000" in " ".join(out.split())
    own_rows(folder, answer=lambda words: "w5" if words[0] in WORDS[::2] else words[0])
    out, _ = done(call(capsys, "eval", "out", "--json"))
    share = json.loads(out)["evaluations"][0]["metrics"]["exact_match"]
    assert 0 < share < 1 and (share * 12) % 1 == pytest.approx(0)


@pytest.mark.parametrize("given", ["w1 w2", " w1 w2 \n", "<think>\nw3\n</think>\n\nw1 w2"])
def test_an_answer_is_right_but_for_white_space_and_thoughts(given, folder, monkeypatch):
    own_rows(folder, answer=lambda words: "w1 w2")
    (folder / "run.yaml").write_text(settings(dataset_name="rows.jsonl", exact_match=True))
    config = load_run_config("run.yaml", [])
    trainer = SimpleNamespace(
        processing_class=tiny_tokenizer(),
        accelerator=SimpleNamespace(autocast=nullcontext, process_index=0, num_processes=1),
    )
    match = tasks.ExactMatch(trainer, config, load_run_datasets(config))
    texts = [given, *["w1", "w1 w2 w3", "w1  w2", ""] * len(match.prompts)][: len(match.prompts)]
    monkeypatch.setattr(tasks, "texts_of", lambda *_: texts)
    monkeypatch.setattr(tasks, "gather_object", lambda own: own)
    assert match.measure(None) == {"exact_match": 1 / len(match.prompts)}


def test_exact_match_that_cannot_be_measured_is_refused(folder, capsys):
    def says(code: int, *words: str, **changes) -> None:
        given = {"dataset_name": "rows.jsonl", "exact_match": True, **changes}
        (folder / "run.yaml").write_text(settings(**given))
        refused(call(capsys, "run", "run.yaml"), code, *words)

    own_rows(folder, answer=lambda words: " ".join(words * 2))
    says(
        2, "max_new_tokens: 12 of 12 held-out answers are longer than 5 tokens", "set it to 6 or more", max_new_tokens=5
    )
    says(2, "max_length: 9 tokens cut 12 of 12 held-out rows; set it higher", max_length=9, max_new_tokens=8)
    own_rows(folder, answer=lambda words: "")
    says(4, "exact_match: 12 of 12 held-out rows have no answer to compare with")
    (folder / "rows.jsonl").write_text('{"text": "w1 w2"}\n' * 9)
    says(2, "exact_match: needs chats, or prompts and completions, of text; the rows have text")
    says(2, "exact_match: has no effect: a task's own checker always counts", dataset_name="reasoning_gym:echo")


def lack(monkeypatch, package: str) -> None:
    """Have a package not be installed."""
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_what_is_wrong_is_said_before_anything_is_loaded(folder, capsys, monkeypatch):
    def says(*words: str, **changes) -> None:
        (folder / "run.yaml").write_text(task(**changes))
        refused(call(capsys, "run", "run.yaml"), 2, "run.yaml", *words)

    says("no task 'chain_sums'", "chain_sum", dataset_name="reasoning_gym:chain_sums")
    says("echo has no max_words; it takes words, seed, size", task_config={"max_words": 3})
    says("words must be more than one", task_config={"words": 1})
    says("too few different questions", "widen them", task_config={"words": 2})
    says("words of echo: expected a number, got 'five'", task_config={"words": "five"})
    for size in (0, "many", None):
        says(f"size: expected the number of training rows, got {size!r}", task_config={"size": size})
    for wrong in ({"nam": "echo"}, {"name": "echo", "wait": 2}, "echo"):
        says("datasets: expected entries of name, weight, config", dataset_name="reasoning_gym:composite",
             task_config={"datasets": [wrong]})  # fmt: skip
    says("echo has no max_words", dataset_name="reasoning_gym:composite",
         task_config={"datasets": [{"name": "echo", "config": {"max_words": 3}}]})  # fmt: skip
    says("needs another package: pip install pycosat", dataset_name="reasoning_gym:zebra_puzzles")
    (folder / "rows.jsonl").write_text('{"text": "w1"}\n')
    says(
        "task_config", "leave it out for rows.jsonl (~task_config)", dataset_name="rows.jsonl", task_config={"size": 3}
    )
    lack(monkeypatch, "reasoning_gym")
    says("needs the package reasoning-gym", "pip install reasoning-gym")


@pytest.mark.slow  # lm-eval reads its own files for a minute
def test_lm_eval_measures_the_model_on_a_task_of_its_own(folder, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    (folder / "run.yaml").write_text(settings(dataset_name="rows.jsonl"))
    rows = [{"text": " ".join(WORDS[i : i + 5])} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )
    out, _ = done(call(capsys, "eval", "run.yaml", "--lm-eval", "words.yaml"))
    assert "lm_eval/words/word_perplexity" in out
    words = (folder / "words.yaml").read_text().replace("task: words", "task: code\nunsafe_code: true")
    (folder / "code.yaml").write_text(words)
    refused(call(capsys, "eval", "run.yaml", "--lm-eval", "code.yaml"), 2, "runs what the model writes: HF_ALLOW_CODE")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert "lm_eval/code/word_perplexity" in done(call(capsys, "eval", "run.yaml", "--lm-eval", "code.yaml"))[0]
    refused(call(capsys, "eval", "run.yaml", "--lm-eval", "no_such_task"), 2, "no task 'no_such_task'")


def test_lm_eval_that_is_not_installed_is_named(folder, capsys, monkeypatch):
    (folder / "run.yaml").write_text(task())
    lack(monkeypatch, "lm_eval")
    refused(call(capsys, "eval", "run.yaml", "--lm-eval", "arc_easy"), 2, "needs the package lm-eval", "pip install")


def test_the_teacher_and_its_student_train_from_their_configurations(folder, capsys, monkeypatch):
    """`smollm2/sft_task` and `smollm2/distill_task` at a tiny size, with the models of one in the other."""
    without_report(monkeypatch)
    small = ["max_steps=2", "per_device_train_batch_size=2", "max_eval_rows=6", "num_sample_completions=0",
             "use_cpu=true", "task_config={min_terms: 2, max_terms: 2, max_digits: 2, size: 30}"]  # fmt: skip
    done(call(capsys, "run", "smollm2/sft_task", "model_name_or_path=student", *small))
    out, _ = done(call(capsys, "run", "smollm2/distill_task", "keep_layers=[0,2]", *small))
    assert Path("outputs/smollm2/distill_task/metrics.json").is_file()
    assert "exact match" in out and "teacher's exact match" in out


NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "task.ipynb"
SMALL = """
BASE, TASK, SETTINGS = "base", "reasoning_gym:echo", "{words: 20, size: 40}"
STEPS, STUDENT_STEPS, SECOND_STEPS = 2, 2, 2
MORE = "per_device_train_batch_size=2 max_eval_rows=6 num_sample_completions=0 use_cpu=true disable_tqdm=true"
"""


def test_the_notebook_s_commands_run(tmp_path, capsys, monkeypatch):
    """docs/notebooks/task.ipynb from top to bottom, in this process: `!` has the command line do what stands there."""
    save_models(tmp_path, "base", num_hidden_layers=4)
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    monkeypatch.setattr("liger_trainer.extras.report.html.draw", lambda runs, labels: [])
    printed: dict[str, str] = {}

    def shell(line: str) -> None:
        command, _, file = line.partition(" < ")
        if file:
            monkeypatch.setattr(sys, "stdin", io.StringIO(Path(file).read_text()))
        name, *words = shlex.split(command)
        assert name == "liger-trainer"
        printed[f"{words[0]} {words[1]}"], _ = done(call(capsys, *words))

    names: dict[str, object] = {"shell": shell}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        tags, source = cell["metadata"].get("tags", []), "".join(cell["source"]).replace("\\\n", " ")
        if cell["cell_type"] == "markdown" or "install" in tags:
            continue
        if "parameters" in tags:
            given: dict[str, object] = {}
            exec(source, given)
            exec(SMALL, names)
            assert given.keys() - names.keys() == set(), "SMALL has all parameters"
            continue
        source = source.replace("range(1000)", "range(50)")  # rows of its own
        exec(re.sub(r"^!(.*)$", lambda found: f"shell(f{found[1]!r})", source, flags=re.M), names)

    table = printed["eval teacher"]
    assert all(word in table for word in ("exact match", "teacher", "student", "tuned", "second"))
    assert "exact match" in printed["eval own_student"]
    assert printed["chat student"].strip() and Path("compared.html").is_file()
    layers = {name: json.loads(Path(name, "config.json").read_text())["num_hidden_layers"]
              for name in ("teacher", "student", "tuned", "second", "own_teacher", "own_student")}  # fmt: skip
    assert layers["teacher"] == layers["own_teacher"] == 4
    assert layers["student"] == layers["tuned"] == layers["second"] == layers["own_student"] < 4


def test_ranks_answer_each_question_once(folder, monkeypatch):
    """Seven ranks have five questions: each answers its own, and all of them know the share."""
    config = load_run_config("smollm2/sft_task", [*CHAIN, "max_eval_rows=5"])
    data, answered = load_run_datasets(config), list[list[dict]]()
    answers = [row["completion"][0]["content"] for row in data.test]
    trainer = SimpleNamespace(processing_class=tiny_tokenizer(), accelerator=SimpleNamespace(autocast=nullcontext))
    match = tasks.ExactMatch(trainer, config, data)
    given = {id(prompt): text for prompt, text in zip(match.prompts, [*answers[:3], "no", ""], strict=True)}
    monkeypatch.setattr(tasks, "texts_of", lambda model, tokenizer, prompts, *_: [given[id(p)] for p in prompts])
    monkeypatch.setattr(tasks, "gather_object", lambda own: answered.append(own) or own)
    for rank in range(7):
        trainer.accelerator = SimpleNamespace(process_index=rank, num_processes=7)
        if rank < 5:  # of the others' own there is nothing to take a mean of
            match.measure(None)
    monkeypatch.setattr(tasks, "gather_object", lambda own: [one for each in answered for one in each])
    assert match.measure(None) == {"exact_match": 0.6}
    assert sorted(i for each in answered for one in each for i in one) == [0, 1, 2, 3, 4]
