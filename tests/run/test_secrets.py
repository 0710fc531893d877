"""Secrets reach no file, no line that is printed and no tracker, whichever way they came; and a run still works."""

import json
import os
import sys
import time

import pytest
import torch
from canaries import ENVIRONMENT, SETTINGS, TENSORBOARD, holding
from commands import call, save_models, write_rows
from served import Reply, served
from tiny import WORDS, tiny_model
from trainings import distill
from transformers import TrainerCallback

from liger_trainer.config.run_config import check_text
from liger_trainer.errors import ConfigError
from liger_trainer.extras.report import drawing
from liger_trainer.extras.report.drawing import charts_of
from liger_trainer.secrets import redact


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, "student")
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch, capfd):
    """Run SETTINGS with a server in a folder of its own; return exit code and output."""
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ("COMET_AUTH", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "tensorboardX").mkdir()
    (tmp_path / "tensorboardX" / "__init__.py").write_text(TENSORBOARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would hold this folder's name, which has the test's
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    monkeypatch.setattr(sys, "argv", ["liger-trainer", "run", "run.yaml", "hub_token=canary-hub-token"])
    monkeypatch.setattr(drawing, "charts_of", lambda runs: charts_of(runs)[:1])  # drawing takes long
    (tmp_path / "student").symlink_to(models / "student")
    rows = [{"prompt": " ".join(WORDS[i : i + 3]), "completion": " w1 w2"} for i in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)

    def run_main(change=None) -> tuple[int, str]:
        with served(tiny_model(seed=1), change) as server:
            url = server.url.replace("http://", "http://me:canary-in-url@")
            (tmp_path / "run.yaml").write_text(SETTINGS.format(url=url))
            code, out, err = call(capfd, "run", "run.yaml")
        return code, out + err

    yield run_main
    for name in ("COMET_AUTH", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)


def test_a_canary_given_in_nine_ways_is_nowhere(run, tmp_path):
    code, printed = run()
    assert code == 0, printed
    assert "canary" not in printed
    assert holding(tmp_path) == []
    files = {file.name for file in (tmp_path / "out").rglob("*")}
    assert {"config.yaml", "metrics.json", "report.html", "README.md", "training_args.bin"} <= files
    tracked = (tmp_path / "tracked.txt").read_text()
    assert "hub_token=<secret>" in tracked and '"teacher_server_base_url": "http://<secret>@127' in tracked
    scalars = [line.split()[1:] for line in tracked.splitlines() if line.startswith("scalar ")]
    logged = json.loads((tmp_path / "out" / "metrics.json").read_text())["log_history"]
    assert {int(step): float(value) for name, step, value in scalars if name == "train/forward_kl"} == pytest.approx(
        {entry["step"]: entry["forward_kl"] for entry in logged if "forward_kl" in entry}
    )
    assert {"train/loss", "train/learning_rate", "eval/forward_kl"} <= {name for name, *_ in scalars}
    args = torch.load(tmp_path / "out" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert args.max_steps == 2 and args.hub_token is None


def test_an_error_quotes_no_canary(run, tmp_path):
    """A server that quotes the key and the address; an error that nobody expected is in the next test."""
    quoted = b"no rights: canary-of-server at http://me:canary-in-url@host, COMET_AUTH=canary-by-env"
    code, printed = run(lambda *_: Reply(quoted, 403))
    assert code == 2 and "no rights" in printed
    assert "canary" not in printed
    assert holding(tmp_path) == []


def test_a_traceback_quotes_no_canary(run, monkeypatch):
    def fail(*args):
        raise RuntimeError(f"for {ENVIRONMENT['OTHER_PASSWORD']}")

    monkeypatch.setattr("liger_trainer.run.recipe.load_student", fail)
    monkeypatch.setattr("liger_trainer.config.run_config.RunConfig.refusals", lambda *_: pytest.MonkeyPatch.context())
    code, printed = run()
    assert code == 1 and "RuntimeError: for <secret>" in printed and "canary" not in printed


KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "words",
    [
        (f"env.WANDB_API_KEY={KEY}",), (f"env={{WANDB_API_KEY:{KEY}}}",), (f"env={{WANDB_API_KEY: [{KEY}",),
        (f"model_init_kwargs={{token:{KEY}",), (f"hub_token={KEY}:",), (f"hub_token=[{KEY}",),
        ("--hub-token", f"[{KEY}"), (f"--hub_token={KEY}:",),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_quotes_no_secret(words, capsys):
    code, out, err = call(capsys, "validate", "smollm2/sft_full", *words)
    assert code == 2 and "<secret>" in err and KEY not in out + err


def test_resuming_asks_for_a_secret_that_was_left_out():
    config = check_text("model_name_or_path: m\ndataset_name: d\nrun_name: http://me:hunter2@host/x\n", "run.yaml")
    text = config.to_yaml()
    assert "hunter2" not in text and "run_name: http://<secret>@host/x" in text
    with pytest.raises(ConfigError, match=r"config.yaml:\d: run_name: a secret was left out here .* run_name=\.\.\."):
        check_text(text, "config.yaml")
    assert check_text(text, "config.yaml", ["run_name=other"])["run_name"] == "other"


def test_a_trainer_in_python_saves_and_reports_no_secret(models, tmp_path):
    class Tracker(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.sent = args.to_json_string() + repr(args.to_sanitized_dict())

    tracker = Tracker()
    trainer = distill(
        tiny_model("llama_tied"), str(models / "student"), callbacks=[tracker], output_dir=str(tmp_path), max_steps=1,
        save_strategy="steps", save_steps=1, hub_token="canary-1", teacher_model_init_kwargs={"token": "canary-2"},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    args = trainer.args
    assert "canary" not in tracker.sent and "max_steps" in tracker.sent
    assert holding(tmp_path) == []
    assert args.hub_token == "canary-1" and vars(args).keys().isdisjoint({"to_dict", "__getstate__"})


@pytest.mark.parametrize("text", ["?" + "token" * 10_000, "-eyJaaaaaaaaaa" * 10_000, "a://" * 10_000, "hf_" * 10_000])
def test_looking_for_secrets_takes_time_in_proportion_to_the_text(text):
    start = time.perf_counter()
    assert redact(text) == text
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://user:pw@host/a@b?x=1", "https://<secret>@host/a@b?x=1"),
        ("git+ssh://git@host/x, http://host:80/a@b", "git+ssh://git@host/x, http://host:80/a@b"),
        ("GET /x?a=1&X-Amz-Signature=abc&sig=d", "GET /x?a=1&X-Amz-Signature=<secret>&sig=<secret>"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <secret>"),
        ("hf_" + "a1" * 17, "<secret>"),
        ("eos_token <eos>, a key of a run, basic authority", "eos_token <eos>, a key of a run, basic authority"),
    ],
)
def test_secrets_are_known_by_their_form(text, shown):
    assert redact(text) == shown
