"""Commands that start nothing: they answer without torch; and what `run` hands to a launcher."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
from commands import save_models, write_rows
from finished_runs import content

import liger_trainer
from liger_trainer.cli import app as cli
from liger_trainer.cli import cache, run
from liger_trainer.config.run_config import check_text, load_run_config
from liger_trainer.config.schema import built_in_configs, shipped_schema, shipped_text
from liger_trainer.extras import installed
from liger_trainer.run import launch as launching

NEEDED = "model_name_or_path: some/model\ndataset_name: some/data\n"
MISTAKES = """\
model_name_or_path: some/model
model_nam_or_path: x
dataset_name: some/data
max_length: 2.5
max_length: 3
packing: ture
learning_rate: [1]
lr_scheduler_type: cosin
per_device_train_batch_size: 0
lora_r: 8
datasets:
  - path: json
    splits: a
beta: 0.5
dataset_streaming: true
deepspeed: missing.json
1: 2
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The command line in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: commands.call(capsys, *words)


@pytest.mark.skipif(not shipped_schema().is_of_installed(), reason="the keys of other releases come from their classes")
def test_what_starts_nothing_imports_no_torch(tmp_path):
    """And reports no pyplot. One process runs them all: in ten of their own they would import the same."""
    (tmp_path / "wrong.yaml").write_text(MISTAKES)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.json").write_text(json.dumps(content()))
    script = """
import json, sys
from liger_trainer.cli import main
for words in json.loads(sys.argv[1]):
    if words == ["report", "out"]:
        assert not {"matplotlib", "jinja2"} & set(sys.modules)
    try:
        main(words)
    except SystemExit as stopped:
        print("exit", words, stopped.code)
heavy = {"torch", "transformers", "trl", "datasets", "peft", "accelerate", "matplotlib.pyplot"} & set(sys.modules)
assert not heavy, heavy
"""
    name = "smollm2/distill_lora"
    every = [
        ["--help"], ["run", "--help"], ["ls"], ["ls", "sft", "--json"], ["cat", name], ["cp", name, "my.yaml"],
        ["validate", name, "max_steps=3"], ["validate", "wrong.yaml"], ["config", name, "--diff"], ["config", name],
        ["schema"], ["convert", "my.yaml", "--from", "trl"], ["resume", "nowhere"], ["--version"],
        ["new", "n.yaml", "--purpose", "sft", "--model", "m", "--method", "full", "--data", "d"],
        ["report", "--help"], ["report", "out"],
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(liger_trainer.__file__).parents[1])}
    words = [sys.executable, "-c", script, json.dumps(every)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert ends == ["0"] * 7 + ["2"] + ["0"] * 4 + ["2"] + ["0"] * 4, done.stderr


def test_a_file_with_many_mistakes_gets_them_all_with_their_lines(call, tmp_path):
    (tmp_path / "wrong.yaml").write_text(MISTAKES)
    code, _, err = call("validate", "wrong.yaml", "max_stepz=1", "~learning_rat", "seed")
    assert code == 2
    head, *lines = (line.strip() for line in err.splitlines())
    assert head == "liger-trainer: 15 problems in wrong.yaml:"
    expected = [
        "wrong.yaml:2: model_nam_or_path: unknown key. Did you mean model_name_or_path?",
        "wrong.yaml:5: the key 'max_length' is given twice, first on line 4.",
        "wrong.yaml:6: packing: expected true or false, got 'ture' (text).",
        "wrong.yaml:7: learning_rate: expected a number, got [1] (a list).",
        "wrong.yaml:8: lr_scheduler_type: expected one of linear, cosine, ",
        "wrong.yaml:9: per_device_train_batch_size: expected a number of at least 1, got 0.",
        "wrong.yaml:10: lora_r: has no effect without `use_peft: true`",
        "wrong.yaml:13: datasets: [0].splits: unknown key. Did you mean split?",
        "wrong.yaml:14: beta: belongs to `recipe: distill`; this is `recipe: sft`.",
        "wrong.yaml:15: dataset_streaming: not supported: every row is checked",
        "wrong.yaml:16: deepspeed: no such file: missing.json",
        "wrong.yaml:17: expected a name before the colon, got 1.",
        "command line: expected key=value, --key value or ~key, got 'seed'.",
        "command line: ~learning_rat: wrong.yaml does not set it. Did you mean learning_rate?",
        "command line: max_stepz: unknown key. Did you mean max_steps?",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_validate_says_which_names_it_could_not_check(call, tmp_path):
    (tmp_path / "lora.yaml").write_text("model_name_or_path: not/here\ndataset_name: rows/of\nuse_peft: true\n")
    _, err = commands.done(call("validate", "lora.yaml", "lora_target_modules=[q_porj]"))
    assert "lora_target_modules: not checked: not/here is not on this machine" in err
    assert "not checked" not in commands.done(call("validate", "lora.yaml", "lora_target_modules=all-linear"))[1]


def test_ls_names_and_describes_the_built_in_configurations(call):
    head, *printed = call("ls")[1].splitlines()
    assert head.split() == "configuration what it does needs".split()
    assert all(len(re.split(r"\s\s+", line.strip())) == 3 for line in printed)
    every = [entry["name"] for entry in json.loads(call("ls", "--json")[1])]
    assert sorted(every) == sorted(line.split()[0] for line in printed) == list(built_in_configs())
    for recipe in ("sft", "distill"):
        names = [entry["name"] for entry in json.loads(call("ls", recipe, "--json")[1])]
        assert {load_run_config(name).recipe for name in names[:3]} == {recipe}
        assert [line.split()[0] for line in call("ls", recipe)[1].splitlines()[1:]] == names
    assert json.loads(call("ls", "smollm2", "--json")[1])[0]["family"] == "smollm2"


def test_ls_is_sorted_by_model_memory_and_purpose(call):
    entries = json.loads(call("ls", "--json")[1])
    llama = [entry for entry in entries if entry["family"] == "llama3"]
    assert [e["family"] for e in entries] == sorted(e["family"] for e in entries)
    assert [e["model"].split("-")[3] for e in llama] == sorted(e["model"].split("-")[3] for e in llama)
    small = [(e["gpus"], e["memory_gb"]) for e in llama if e["model"].split("-")[3] == "1B"]
    assert small == sorted(small) and small[0] == (1, 5)
    by_memory = [(e["gpus"], e["memory_gb"]) for e in json.loads(call("ls", "--sort", "memory", "--json")[1])]
    assert by_memory == sorted(by_memory) and by_memory[0] == (0, 4) and by_memory[-1][0] == 8
    kinds = [(e["recipe"], e["kind"]) for e in json.loads(call("ls", "--sort", "purpose", "--json")[1])]
    assert list(dict.fromkeys(kinds)) == [
        *(("sft", kind) for kind in ("full", "lora", "qlora", "task")),
        *(("distill", kind) for kind in ("cached", "full", "layerdrop", "lora", "on_policy", "pruned", "task")),
    ]
    fitting = json.loads(call("ls", "qwen3", "--fits", "12", "--json")[1])
    assert {e["name"] for e in fitting} == {
        e["name"] for e in entries if e["family"] == "qwen3" and e["memory_gb"] <= 12
    }
    assert 0 < len(fitting) and "None needs 1 GB or less." in call("ls", "--fits", "1")[1]


def test_cat_and_cp(call, tmp_path):
    text = built_in_configs()["smollm2/sft_lora"].read_text()
    assert call("cat", "smollm2/sft_lora")[1] == text
    assert call("cp", "smollm2/sft_lora", "deep/down/my.yaml")[0] == 0
    assert (tmp_path / "deep/down/my.yaml").read_text() == text
    assert call("cp", "smollm2/sft_lora", "deep")[0] == 0 and (tmp_path / "deep/sft_lora.yaml").read_text() == text
    (tmp_path / "deep/sft_lora.yaml").write_text("mine")
    code, _, err = call("cp", "smollm2/sft_lora", "deep")
    assert code == 2 and "deep/sft_lora.yaml exists" in err and (tmp_path / "deep/sft_lora.yaml").read_text() == "mine"
    assert call("cp", "smollm2/sft_lora", "deep", "--force")[0] == 0
    assert (tmp_path / "deep/sft_lora.yaml").read_text() == text


def test_config_says_where_each_value_comes_from_and_is_a_configuration_again(call, tmp_path):
    secrets = "env: {HF_A_TOKEN: x, WANDB_SHOWN: y}\nhub_token: secret\n"
    (tmp_path / "my.yaml").write_text(f'{NEEDED}learning_rate: 2e-5\nmax_steps: 4\n{secrets}run_name: "no"\n')
    code, out, _ = call("config", "my.yaml", "seed=7", "--logging_steps", "2", "~max_steps")
    places = dict(line.rsplit("  # ", 1) for line in out.splitlines())
    places = {line.removeprefix("# ").partition(":")[0]: place for line, place in places.items()}
    assert code == 0 and set(places) == {"recipe", *shipped_schema().sft.keys}
    assert (places["learning_rate"], places["seed"], places["logging_steps"]) == ("my.yaml:3", *["command line"] * 2)
    assert (places["max_steps"], places["output_dir"]) == ("default", "recipe default")
    assert places["bf16"] == "default: whether the GPU has it" and "secret" not in out and "HF_A_TOKEN" not in out
    again = check_text(out, "again.yaml")
    first = load_run_config("my.yaml", ["seed=7", "logging_steps=2", "~max_steps"])
    hidden = ("hub_token", "env")
    assert {**again.values, **dict.fromkeys(hidden)} == {**first.values, **dict.fromkeys(hidden)}

    code, out, _ = call("config", "my.yaml", "--diff", "--json")
    shown = json.loads(out)
    assert shown["max_steps"] == {"value": 4, "set_by": "my.yaml:4"} and shown["run_name"]["value"] == "no"
    assert "learning_rate" not in shown  # TRL's default


def test_env_names_versions_and_what_is_missing(call, monkeypatch):
    code, out, _ = call("env", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["needed"]["torch"] and facts["python"] == sys.version.split()[0]
    assert set(facts["optional"]) == set(installed.OPTIONAL)
    monkeypatch.setitem(installed.OPTIONAL, "no-such-package", "nothing")
    code, out, _ = call("env")
    assert code == 0 and "no-such-package" in out and "not installed; for nothing" in out and "GPU" in out


@pytest.fixture
def launched(monkeypatch):
    """The command of the launcher that would be started, or the recipe that would be run."""
    started: list[list[str]] = []

    class Replaced(Exception):
        pass

    def popen(command, **options):
        started.append(command[1:])
        raise Replaced

    for name in (launching.LAUNCHED, "RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launching, "subprocess", SimpleNamespace(Popen=popen))  # others may start processes
    monkeypatch.setattr(run, "_run_recipe", lambda config: started.append([config.recipe]))

    def start(*arguments: str) -> list[str]:
        started.clear()
        with contextlib.suppress(Replaced, SystemExit):
            cli.main(list(arguments))
        return started[0] if started else []

    return start


def test_a_launchers_command_line_holds_no_secret(launched, tmp_path, monkeypatch):
    """accelerate prints it where a run fails."""
    monkeypatch.chdir(tmp_path)
    environments: list[dict[str, str]] = []
    popen = launching.subprocess.Popen
    monkeypatch.setattr(
        launching.subprocess, "Popen", lambda command, env, **more: (environments.append(env), popen(command, **more))
    )
    words = ["run", "smollm2/sft_full", "hub_token=hunter2-secret"]
    assert launched(*words, "--", "--num_processes", "2")[-3:] == ["run", "smollm2/sft_full", "hub_token=<secret>"]
    monkeypatch.setenv(launching.ARGUMENTS, environments[0][launching.ARGUMENTS])
    assert launching.given_by_launcher() == words
    assert launching.given_by_launcher() is None, "the process's own children have their own"


@pytest.mark.parametrize("gpus", [0, 2])
def test_processes_without_a_gpu_are_told_to_use_the_cpu(gpus, launched, monkeypatch):
    """accelerate makes no group of them otherwise: each would train by itself."""
    environments, popen = [], launching.subprocess.Popen
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    monkeypatch.setattr(
        launching.subprocess, "Popen", lambda command, env, **more: (environments.append(env), popen(command, **more))
    )
    launched("run", "smollm2/sft_full", "--", "--num_processes", "2")
    assert environments[0].get("ACCELERATE_USE_CPU") == (None if gpus else "true")


def test_what_follows_two_dashes_goes_to_the_launcher(launched, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    launch = ["-m", "accelerate.commands.launch"]
    ours = ["-m", "liger_trainer", "run", "smollm2/sft_full", "seed=1", "--packing"]
    words = ["run", "smollm2/sft_full", "seed=1", "--packing"]
    assert launched(*words) == ["sft"]
    assert launched(*words, "--", "--num_processes", "2") == [*launch, "--num_processes", "2", "--multi_gpu", *ours]

    (tmp_path / "my.yaml").write_text(NEEDED + "num_processes: 4\naccelerate_config: zero2\n")
    command = launched("run", "my.yaml")
    assert command[:3] == [*launch, "--config_file"]
    assert Path(command[3]).name == "zero2.yaml" and Path(command[3]).is_file()
    assert command[4:] == ["--num_processes", "4", "-m", "liger_trainer", "run", "my.yaml"]
    monkeypatch.setenv("RANK", "1")  # the processes that the launcher starts read the same file
    assert launched("run", "my.yaml") == ["sft"]
    monkeypatch.delenv("RANK")

    ddp = launched("run", "my.yaml", "accelerate_config=ddp")
    assert Path(ddp[3]).name == "multi_gpu.yaml" and ddp[4:6] == ["--num_processes", "4"]
    distil, itself = ["recipe=distill", "teacher_model_name_or_path=x"], ["recipe=distill", "teacher=self"]
    for words, message in (
        (["zero3", *distil, "teacher_load_in_4bit=true"], "teacher_load_in_4bit: does not go with DeepSpeed"),
        (["fsdp1", *distil, "losses=[{type: hidden_mse}]"], "losses: hidden-state losses do not work with"),
        (["fsdp1", *itself, "use_peft=true"], "teacher: self does not work with FSDP1"),
        (["fsdp2", *distil, "teacher_offload=true"], "teacher_offload: does not go with FSDP"),
        (["fsdp1", *distil, "lmbda=1.0"], "lmbda: a model that FSDP1 splits is not sampled from"),
        (["zero9"], "accelerate_config: expected a file or one of"),
        (["ddp", "max_stepz=1", "--", "--num_processes", "2"], "Did you mean max_steps?"),
        (["validate"], "only run, resume, cache take arguments for a launcher"),
    ):  # before anything is launched
        engine, *others = words
        if engine == "validate":
            assert launched("validate", "my.yaml", "--", "--num_processes", "2") == []
        else:
            assert launched("run", "my.yaml", f"accelerate_config={engine}", *others) == []
        assert message in " ".join(capsys.readouterr().err.split()), words
    assert launched("validate", "my.yaml", "accelerate_config=fsdp3") == []
    assert "got 'fsdp3'. Did you mean fsdp" in " ".join(capsys.readouterr().err.split())
    for engine in ("fsdp2", "zero3"):
        assert launched("run", "my.yaml", f"accelerate_config={engine}", *itself, "use_peft=true")


@pytest.mark.parametrize(
    "mib, words, engine, said",
    [
        (80_000, [], "ddp", "auto is DDP, which takes"),
        (800, [], "fsdp2", "auto is FSDP2: DDP would take"),
        (80_000, ["optim=galore_adamw"], "fsdp2", "auto is FSDP2: whether DDP fits is not known (command line: optim:"),
        (80_000, ["use_cpu=true", "num_processes=2"], "ddp", "auto is DDP over gloo: there is no GPU"),
        (80_000, ["num_processes=1"], None, ""),
        (800, ["qat=int8"], "", "accelerate_config: auto takes FSDP2, since DDP would take"),
        (80_000, ["fsdp=full_shard"], "", "fsdp: names the engine already"),
        (80_000, ["num_machines=2"], "", "num_machines: with `accelerate_config: auto` each machine would choose"),
        (80_000, ["--", "--num_processes", "2"], "", "accelerate_config: auto decides what the launcher is told"),
    ],
    ids=str,
)
def test_auto_chooses_by_what_fits(launched, tmp_path, monkeypatch, capsys, mib, words, engine, said):
    """None: nothing but the number of processes is said; "": it is refused."""
    device = SimpleNamespace(name="H100", total_memory=mib * 2**20)
    for name, value in (("is_available", True), ("device_count", 4), ("get_device_properties", device)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    write_rows(tmp_path / "rows.jsonl", [{"text": "w1"}] * 40)  # the demo's, and its layers, take seconds
    save_models(tmp_path, "student", vocab_size=49152, hidden_size=576, intermediate_size=1536)
    small = (f"dataset_name={tmp_path / 'rows.jsonl'}", f"model_name_or_path={tmp_path / 'student'}")
    command = launched("run", "smollm2/sft_full", *small, "accelerate_config=auto", *words)
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())
    if engine:
        processes = "2" if "num_processes=2" in words else "4"
        file = {"ddp": "multi_gpu.yaml", "fsdp2": "fsdp2.yaml"}[engine]
        assert Path(command[command.index("--config_file") + 1]).name == file
        assert command[command.index("--num_processes") + 1] == processes
        assert command[-2:] == [f"accelerate_config={engine}", f"num_processes={processes}"]  # what its ranks read
    else:
        assert "--config_file" not in command and bool(command) == (engine is None)


@pytest.mark.parametrize(
    "gpus, words, expected",
    [
        (0, ["num_processes=2"], "--multi_gpu"),  # accelerate would start one process
        (1, ["num_processes=2"], "expected at most 1,"),
        (1, ["num_processes=2", "use_cpu=true"], "--multi_gpu"),
        (1, ["num_processes=4", "num_machines=4"], None),
        (2, ["num_processes=2"], "--multi_gpu"),
        (2, ["accelerate_config=ddp"], "expected at most 2, one for each GPU that this machine has or gpu_ids nam"),
        (8, ["num_processes=2", "gpu_ids='3'"], "expected at most 1,"),
        (2, ["accelerate_config=fsdp2", "num_processes=2"], None),
        (2, ["accelerate_config=one.yaml", "num_processes=2"], "--multi_gpu"),
        (0, ["--", "--cpu", "--num_processes", "2"], "--cpu: accelerate starts one process"),
        (1, ["num_processes=1"], None),
    ],
    ids=str,
)
def test_as_many_processes_are_started_as_asked_for(launched, tmp_path, monkeypatch, capsys, gpus, words, expected):
    """None: accelerate starts them without our help."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    (tmp_path / "one.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: false\n")
    command = launched("run", "smollm2/sft_full", *words)
    said = " ".join(capsys.readouterr().err.split())
    if command:
        assert ("--multi_gpu" in command) == (expected == "--multi_gpu"), command
    else:
        assert expected is not None and expected in said, said


@pytest.mark.parametrize(
    "command, name, advice",
    [("run", "smollm2/sft_full", "per_device_train_batch_size"), ("cache", "smollm2/distill_cached", "takes less: ")],
)
def test_out_of_memory_is_exit_code_3(call, monkeypatch, command, name, advice):
    import torch

    def fails(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore words")

    recipe = SimpleNamespace(import_module=lambda name: SimpleNamespace(main=fails))
    monkeypatch.setattr(run, "importlib", recipe)
    monkeypatch.setattr(cache, "_capture", fails)
    code, _, err = call(command, name, "use_cpu=true")
    assert code == 3 and "Tried to allocate 20 GiB." in err and advice in err
    assert "Traceback" not in err and "More words" not in err


def test_schema_prints_what_the_package_ships(call):
    assert call("schema")[1] == shipped_text()
