"""The documentation does what it says: every command in it is executed here, on tiny models and rows, every import in
its Python is there, every link leads somewhere.

A new command in a block of bash fails `test_every_command_is_known` until it has a line in COMMANDS: what it finds when
it starts, and the settings that make it small. What cannot run here is in PARSED, with the reason.
"""

import argparse
import ast
import contextlib
import importlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from commands import end_of, without_report
from foreign_records import answer_of, output_of, write_lines
from stand_ins import StandIns
from transformers import AutoModelForCausalLM

from liger_trainer.cli import app as cli
from liger_trainer.cli.convert import ForeignTool
from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.schema import built_in_configs
from liger_trainer.config.yaml_reader import read_settings
from liger_trainer.extras.convert import convert
from liger_trainer.run import launch as launching
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.models import open_model
from liger_trainer.teachers.row_keys import documents
from liger_trainer.trainers.row_preparation import prepare_rows

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "liger_trainer" / "cli" / "SKILL.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), SKILL]
MINE = """
model_name_or_path: demo:smollm2-135m-instruct
dataset_name: demo:python_docstrings
learning_rate: 1e-3
"""
LORA = "use_peft: true\nlora_target_modules: all-linear\n"
TEACHER = "teacher_model_name_or_path: demo:smollm2-135m-instruct\n"
MINE_LAST = ("dataset_name=mine.csv",)  # after those that make a configuration small
NEW = (
    "--purpose",
    "sft",
    "--model",
    "some/model",
    "--method",
    "lora",
    "--data",
    "trl-lib/Capybara",
)  # instead of questions
CACHED = f"{TEACHER}teacher: cache\nteacher_cache_dir: outputs/my_cache\n"


class Place:
    """A folder where a reader tries the commands: what earlier ones left there is made here at once."""

    def __init__(self, folder: Path, stand_ins: StandIns, kept: Path):
        self.folder, self.stand_ins, self.kept = folder, stand_ins, kept

    def small(self, config: str) -> list[str]:
        """The settings that put tiny models, rows and steps into a configuration; its files stay where it says."""
        changes = self.stand_ins.changes(load_run_config(config), self.folder)
        return [change for change in changes if not change.startswith(("output_dir=", "teacher_cache_dir="))]

    def run(self, *arguments: str) -> None:
        assert end_of(*arguments) == 0, arguments

    def copy_of(self, name: str, make: Callable[["Place"], None]) -> None:
        """Put in what `make` makes. It is made once, in a folder that the commands of this file copy."""
        source = self.kept / name
        if not source.exists():
            source.mkdir()
            with contextlib.chdir(source):
                make(Place(source, self.stand_ins, self.kept))
        shutil.copytree(source, self.folder, dirs_exist_ok=True)


def my_yaml(extra: str = "") -> Callable[[Place], None]:
    return lambda place: (place.folder / "my.yaml").write_text(MINE + extra) and None


def train(place: Place) -> None:
    my_yaml(LORA)(place)
    place.run("run", "my.yaml", *place.small("my.yaml"), "output_dir=outputs/my", "save_strategy=steps", "save_steps=1")


def trained(*names: str) -> Callable[[Place], None]:
    """my.yaml with adapters, run to its end into outputs/my, and copies of the run as outputs/NAME."""

    def copy(place: Place) -> None:
        place.copy_of("trained", train)
        for name in names:
            shutil.copytree(place.folder / "outputs/my", place.folder / "outputs" / name)

    return copy


def interrupted(place: Place) -> None:
    """A run in outputs/my as if it had been stopped after its first step."""
    trained()(place)
    (place.folder / "outputs/my/metrics.json").unlink()
    shutil.rmtree(place.folder / "outputs/my/checkpoint-2")


def captured(place: Place) -> None:
    config = "smollm2/distill_cached"
    place.copy_of("captured", lambda kept: kept.run("cache", config, *kept.small(config)))


def recorded(place: Place) -> None:
    """my.yaml, and what vLLM would say about its rows."""
    my_yaml("teacher: cache\nteacher_cache_dir: outputs/my_cache\n")(place)
    config = load_run_config("my.yaml", place.small("my.yaml")).on_this_machine()
    files = open_model(config, "model_name_or_path")
    data = load_run_datasets(config, files.vocab_size)
    args: Any = config.training_args()
    rows = prepare_rows(args, files.tokenizer, data.train, data.test)
    model = AutoModelForCausalLM.from_pretrained(files.path)
    read = [d.input_ids.tolist() for dataset in rows.datasets.values() for d in documents(dataset)]
    write_lines(place.folder / "answers.jsonl", [answer_of(output_of(model, ids, 4)) for ids in read])


def model_directory(place: Place) -> None:
    model = place.stand_ins.path("demo:smollm2-135m-instruct")
    shutil.copytree(model, place.folder / "path/to/model")


def mine_csv(place: Place) -> None:
    rows = "".join(f"What is {i}?,The number {i}.\n" for i in range(20))
    (place.folder / "mine.csv").write_text("prompt,completion\n" + rows)


def foreign(origin: str) -> Callable[[Place], None]:
    return lambda place: (
        shutil.copy(ROOT / f"tests/extras/foreign_configs/{origin}.yaml", place.folder / "theirs.yaml") and None
    )


class Played(NamedTuple):
    """`before` makes what the command finds; with `small` its configuration becomes so; `extra` are further words.

    With `model_first` the first argument is a model, which a stand-in takes the place of.
    """

    before: Callable[[Place], Any] = lambda place: None
    small: str | None = None
    extra: tuple[str, ...] = ()
    model_first: bool = False


def demo(name: str, *extra: str, before: Callable[[Place], Any] = lambda place: None) -> Played:
    return Played(before, name, extra)


COMMANDS = {
    "liger-trainer cache import my.yaml --from vllm --records answers.jsonl": Played(recorded, "my.yaml"),
    "liger-trainer cache info outputs/smollm2/teacher_cache": Played(captured),
    "liger-trainer cache my.yaml": Played(my_yaml(CACHED), "my.yaml"),
    "liger-trainer cache smollm2/distill_cached": demo("smollm2/distill_cached"),
    "liger-trainer cache verify outputs/smollm2/teacher_cache": Played(captured),
    "liger-trainer cat smollm2/sft_lora": Played(),
    "liger-trainer chat outputs/my": Played(trained(), extra=("--max-new-tokens", "3")),
    "liger-trainer config my.yaml --diff": Played(my_yaml()),
    **{f"liger-trainer convert theirs.yaml --from {tool} -o my.yaml": Played(foreign(tool)) for tool in ForeignTool},
    "liger-trainer cp smollm2/sft_lora my.yaml": Played(),
    "liger-trainer doctor path/to/model": Played(model_directory),
    "liger-trainer env": Played(),
    "liger-trainer estimate my.yaml --gpu 'RTX 4090'": Played(my_yaml(), "my.yaml"),
    "liger-trainer estimate smollm2/distill_lora --gpu 'H100 80GB'": demo("smollm2/distill_lora"),
    "liger-trainer eval outputs/my": Played(trained()),
    "liger-trainer generate demo:smollm2-135m-instruct data/generated num_rows=2000": Played(extra=("num_rows=1",
     "max_new_tokens=4", "max_prompt_tokens=8", "batch_size=64", "keep_unfinished=true"), model_first=True),
    "liger-trainer init-student my.yaml": Played(my_yaml(), "my.yaml", ("keep_every_nth_layer=2",)),
    "liger-trainer init-student my.yaml student_num_layers=15 student_output_dir=students/half": Played(my_yaml(),
     "my.yaml", ("student_num_layers=2",)),
    "liger-trainer init-student smollm2/distill_pruned '~keep_layers' student_num_layers=25 "
    "student_layer_choice=greedy_kl dataset_test_split=train max_eval_rows=8 packing=false max_length=128": demo(
        "smollm2/distill_pruned", "~keep_layers", "student_num_layers=2"
    ),
    "liger-trainer ls": Played(),
    "liger-trainer ls --fits 24": Played(),
    "liger-trainer new my.yaml": Played(extra=NEW),
    "liger-trainer merge outputs/my merged": Played(trained()),
    "liger-trainer preview my.yaml": Played(my_yaml(), "my.yaml"),
    "liger-trainer preview my.yaml --rows 5": Played(my_yaml(), "my.yaml"),
    "liger-trainer preview my.yaml packing=true max_length=2048": Played(my_yaml(), "my.yaml"),
    "liger-trainer preview smollm2/sft_lora dataset_name=mine.csv": Played(mine_csv, "smollm2/sft_lora", MINE_LAST),
    "liger-trainer run smollm2/sft_lora dataset_name=mine.csv": Played(mine_csv, "smollm2/sft_lora", MINE_LAST),
    "liger-trainer report outputs/a outputs/b --output ab.html": Played(trained("a", "b")),
    "liger-trainer report outputs/my": Played(trained()),
    "liger-trainer resume outputs/my": Played(interrupted),
    "liger-trainer run my.yaml -- --num_processes 2": Played(my_yaml()),
    "liger-trainer run my.yaml learning_rate=2e-5 --max_steps 200": Played(my_yaml(), "my.yaml"),
    "liger-trainer run my.yaml output_dir=first": Played(my_yaml(), "my.yaml"),
    "liger-trainer run my.yaml max_steps=20": Played(my_yaml(), "my.yaml"),
    "liger-trainer run smollm2/distill_cached": demo("smollm2/distill_cached", before=captured),
    "liger-trainer run smollm2/distill_pruned": demo("smollm2/distill_pruned"),
    "liger-trainer run smollm2/distill_task": demo("smollm2/distill_task"),
    "liger-trainer run smollm2/sft_task": demo("smollm2/sft_task"),
    "liger-trainer schema": Played(),
    "liger-trainer skill": Played(),
    "liger-trainer validate my.yaml max_steps=20": Played(my_yaml()),
}  # fmt: skip
GPU = "minutes on a GPU; tests/benchmarks/test_tables.py runs it on small shapes"
SEVERAL_GPUS = "several GPUs; tests/benchmarks/test_many_gpus.py runs some of it on CPUs"
PARSED = {
    "liger-trainer schema --write": "writes into the package; tests/project/test_walkthroughs.py runs it in a copy",
    "liger-trainer selfcheck": "tests/extras/test_selfcheck.py runs it, and all its checks",
    "liger-trainer doctor --all": "minutes; tests/extras/test_doctor.py holds docs/models.md to it",
    "liger-trainer run smollm2/distill_layerdrop '~keep_every_nth_layer' qat=int4 learning_rate=5e-5": (
        "needs torchao; tests/extras/test_qat.py trains by it where it is installed"
    ),
    "liger-trainer run smollm2/sft_full model_name_or_path=TEACHER dataset_name=mine.jsonl output_dir=corrected": (
        "TEACHER stands for the name of a model"
    ),
    "liger-trainer run my.yaml teacher_model_name_or_path=corrected": "takes what the command before it has saved",
    "liger-trainer run my.yaml model_name_or_path=first output_dir=second beta=1.0 lmbda=0.5 learning_rate=2e-5 "
    "max_steps=200 packing=false": "starts from what the command before it has saved",
    "liger-trainer eval outputs/smollm2/sft_task outputs/smollm2/distill_task": (
        "takes what the commands before it have saved; tests/extras/test_tasks.py evaluates such a run"
    ),
    "liger-trainer report outputs/my outputs/other": "the same as of outputs/a and outputs/b, into another file",
    "python -m benchmarks.many_gpus --output results": SEVERAL_GPUS,
    "python -m benchmarks.many_gpus --output results --cases 'ddp-*'": SEVERAL_GPUS,
    "python -m benchmarks.many_gpus --output results --gpus 2 "
    "--rows sft-llama-3-8b:trl,trl_compiled,ours": SEVERAL_GPUS,
    "python -m benchmarks.many_gpus --tiny --gpus 1 2": "minutes; tests/benchmarks/test_many_gpus.py runs some of it",
    "python -m benchmarks.run": GPU,
    "python -m benchmarks.run --smoke": "half a minute; tests/benchmarks/test_tables.py runs it on fewer cases",
    "python -m benchmarks.run --suite ops": GPU,
}
ELSEWHERE = {
    ".": "activates a virtual environment",
    "pip": "installs; .ci/run does",
    "pytest": "runs this",
    "python -m venv": "makes a virtual environment; .ci/run does",
    "python tests/support/tiny_files.py": "tests/extras call it",
    "axolotl": "tests/extras runs it where axolotl is installed",
    "export": "sets a variable",
    "llamafactory-cli": "tests/extras runs it where LLaMA-Factory is installed",
    "swift": "tests/extras runs it where ms-swift is installed",
}


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [str(block) for block in found]


def commands_of(page: Path) -> list[str]:
    """The commands of its shell blocks, without comments; `a && b` are two."""
    lines = "\n".join(blocks(page, "bash", "sh", "shell", "console")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    commands = [[]]
    for word in (word for line in words for word in (*line, "&&")):
        commands.append([]) if word == "&&" else commands[-1].append(word)
    return [shlex.join(command) for command in commands if command]


DOCUMENTED = sorted({command for page in PAGES for command in commands_of(page)})


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Drawing takes longer than the commands, and tests of reports are elsewhere."""
    without_report(monkeypatch)
    monkeypatch.setattr("liger_trainer.extras.report.html.draw", lambda runs, labels: [])


@pytest.fixture
def place(stand_ins, kept, tmp_path, monkeypatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))  # for chat
    return Place(tmp_path, stand_ins, kept)


def test_every_command_is_known():
    known = {*COMMANDS, *PARSED}
    elsewhere = tuple(f"{word} " for word in ELSEWHERE)
    unknown = [command for command in DOCUMENTED if command not in known and not f"{command} ".startswith(elsewhere)]
    assert not unknown, "give each a line in COMMANDS or PARSED of tests/project/test_docs.py"
    assert known <= set(DOCUMENTED), f"no longer documented: {known - set(DOCUMENTED)}"


@pytest.mark.parametrize("command", [command for command in DOCUMENTED if command in COMMANDS])
def test_a_documented_command_runs(command, place, monkeypatch, capsys):
    played, words = COMMANDS[command], shlex.split(command)[1:]
    played.before(place)
    changes = place.small(played.small) if played.small else []
    if played.model_first:
        words[1] = str(place.stand_ins.path(words[1]))
    launched = []
    monkeypatch.setattr(launching, "launch", lambda *arguments: launched.append(arguments) or sys.exit(0))
    place.run(*words, *changes, *played.extra)
    assert bool(launched) == (" -- " in command)
    if launched:
        assert launched == [(["--num_processes", "2"], ["run", "my.yaml"], False)]


@pytest.mark.parametrize("command", [command for command in DOCUMENTED if command in PARSED])
def test_a_documented_command_that_is_not_run_is_parsed(command, monkeypatch):
    words = shlex.split(command)
    if words[0] == "liger-trainer":
        parse(typer.main.get_command(cli.app), words[1:])
        return
    assert words[:2] == ["python", "-m"]

    class Parsed(Exception):
        pass

    def parse_only(self, *arguments):
        parse_args(self, *arguments)
        raise Parsed

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", words[2:])
    module = __import__(words[2], fromlist=["main"])
    with pytest.raises(Parsed):
        module.main()


def parse(command: Any, words: list[str]) -> None:
    """As far as typer goes before it calls the command; groups of commands one after the other."""
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_named_in_the_text_exist(page):
    app = typer.main.get_command(cli.app)
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for words in re.findall(r"`liger-trainer ([a-z][\w-]*[^`\n]*)`", text):
        assert words.split()[0] in app.commands, f"`liger-trainer {words}`"
    named = re.findall(r"`liger-trainer \w+ ([a-z0-9]+/[\w.]+)[^`]*`", text)
    assert set(named) <= built_in_configs().keys() | {"outputs/my"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_compiles_and_its_imports_from_here_are_there(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "liger_trainer" in ast.unparse(node):
                if "liger_trainer.integrations" not in ast.unparse(node):  # which need their tools: tests/extras
                    exec(compile(ast.unparse(node), str(page), "exec"), {})


def table_of(tool: str) -> list[tuple[str, str]]:
    """The rows of the table about a tool's file in docs/migrating.md: the YAML of its left and right cells."""
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    sections = {re.sub(r"\W", "", part.partition("\n")[0]).lower(): part for part in text.split("\n## ")}
    rows = re.findall(r"^\| (.*) \|$", sections[tool].partition("|---|---|\n")[2], re.M)
    cells = [[re.findall(r"`([^`]*)`", cell) for cell in row.split(" | ")] for row in rows]
    return [("\n".join(left), "\n".join(right)) for left, right in cells]


@pytest.mark.parametrize("tool", ForeignTool)
def test_a_file_of_another_tool_becomes_what_is_shown(tool):
    theirs, ours = ("".join(f"{line}\n" for line in column if line) for column in zip(*table_of(tool), strict=True))
    table = importlib.import_module(f"liger_trainer.extras.convert.{tool}").TOOL
    assert convert(theirs, "theirs.yaml", table).settings == read_settings_of(ours)


def read_settings_of(text: str) -> dict[str, Any]:
    settings = read_settings(text, "shown")
    assert not settings.findings
    return {key: setting.value for key, setting in settings.values.items()}


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


ABOUT_CODE = ["CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("architecture", "how-it-works", "kernels", "lora"))]
ABOUT_CODE += sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs/extending").glob("*.md"))
NAME = re.compile(r"[A-Za-z_]\w*_\w+")  # a word with an underscore is a name of somebody's code


@pytest.fixture(scope="module")
def names_in_code() -> set[str]:
    files = [path for name in ("liger_trainer", "kernels", "tests", "benchmarks") for path in (ROOT / name).rglob("*")]
    paths = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    return paths.union(*(NAME.findall(path.read_text(encoding="utf-8")) for path in files if path.suffix == ".py"))


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_names_in_the_text_are_in_the_code(page, names_in_code):
    """On the pages that speak about the code, so that a name that was changed is found there too."""
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(blocks(ROOT / page, r'\w+(?: title="[^"]+")?'))
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    named = {name for span in spans for name in NAME.findall(span)}
    assert named - names_in_code - set(NAME.findall(code)) == set()
