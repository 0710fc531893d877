"""Canaries given as secrets in nine ways, and where they turn up: in files, in what is printed, at a tracker."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from canaries import ENVIRONMENT, SETTINGS, TENSORBOARD, holding
from served import Reply, served
from tiny import tiny_model

from benchmarks.reliability.runs import Bench, Run
from benchmarks.report import table
from liger_trainer.cli import main
from liger_trainer.recipes import distill

TITLE = "Secrets"
WAYS = {
    "canary-hub-token": "`hub_token` in the configuration, and on the command line",
    "canary-of-model": "`token` in `model_init_kwargs`",
    "canary-by-env": "a variable `MY_AUTH` in `env`",
    "canary-in-env-url": "a password in a URL in `env`",
    "canary-of-environment": "`HF_TOKEN` in the environment",
    "canary-of-server": "the variable that `teacher_server_api_key_env` names",
    "canary-by-value": "`OTHER_PASSWORD` in the environment, and its value in `run_name`",
    "canary-in-url-of-environment": "a password in a URL in the environment",
    "canary-in-url": "a password in `teacher_server_base_url`",
}
QUOTED = b"no rights: canary-of-server at http://me:canary-in-url@host"
EXITS = {"to its end": 0, "the server answers with the key": 2, "an error that nobody expected quotes all": 1}


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [_canaries(bench, ended) for ended in EXITS]


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("a run", "secrets given", "of them in what is printed", "at the tracker", "in files", "files searched")
    rows = [
        (result["ended"], str(len(WAYS)), *(str(result[what]) for what in ("printed", "tracked", "in_files", "files")))
        for result in results
    ]  # fmt: skip
    ways = [f"- {way}" for way in WAYS.values()]
    return ["The secrets of each run:", "", *ways, "", *table(titles, rows)]


def _canaries(bench: Bench, ended: str) -> dict[str, Any]:
    folder = bench.folder / f"secrets-{EXITS[ended]}"
    (folder / "tensorboardX").mkdir(parents=True)
    (folder / "tensorboardX" / "__init__.py").write_text(TENSORBOARD)
    change = (lambda *_: Reply(QUOTED, 403)) if EXITS[ended] == 2 else None
    with served(tiny_model(seed=1), change) as server:
        text = SETTINGS.format(url=server.url.replace("http://", "http://me:canary-in-url@"))
        text = re.sub(r"(?<=: )(student|rows\.jsonl)$", rf"{bench.folder}/\1", text, flags=re.M)
        (folder / "run.yaml").write_text(text)
        run = bench.end(lambda: _run(folder, fails=EXITS[ended] == 1))
        failures, printed = _wrong(run, ended), run.printed
    if EXITS[ended] == 0:  # the bench's runs write no report of their own
        printed += bench.end(["report", str(folder / "out")]).printed
        names = {path.name for path in folder.rglob("*")}
        missing = {
            "config.yaml",
            "metrics.json",
            "report.html",
            "README.md",
            "training_args.bin",
            "tracked.txt",
        } - names
        failures += [f"{ended}: no {missing}\n{printed[-3000:]}"] if missing else []
    searched = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.yaml"]
    tracked = folder / "tracked.txt"
    payload = tracked.read_text() if tracked.is_file() else ""
    leaks = {secret: files for secret in WAYS if (files := holding(folder, secret.encode()))}
    result = {"ended": ended, "files": len(searched), "in_files": len(leaks), "failures": failures}
    result |= {"printed": sum(secret in printed for secret in WAYS), "tracked": sum(way in payload for way in WAYS)}
    if leaks or result["printed"]:
        result["failures"].append(f"{ended}: {leaks}\n{printed[-3000:]}")
    return result


def _run(folder: Path, fails: bool) -> None:
    os.chdir(folder)
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(folder))
    sys.argv = ["liger-trainer", "run", "run.yaml", "hub_token=canary-hub-token"]
    if fails:

        def fail(*args, **options):
            raise RuntimeError(f"these: {json.dumps(list(WAYS))}")

        distill.main = fail
    main(sys.argv[1:])


def _wrong(run: Run, ended: str) -> list[str]:
    """Say where a run was not one in which secrets could have come out."""
    if run.code == EXITS[ended] and (run.code == 0 or "<secret>" in run.printed):
        return []
    return [f"{ended}: exit code {run.code}\n{run.printed[-3000:]}"]
