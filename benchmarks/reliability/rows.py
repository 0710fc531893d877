"""Wrong lines of ten kinds among many: every one located, and the others trained on."""

import argparse
import json
from collections import Counter
from typing import Any

from malformed import TEN_KINDS, located, malformed

from benchmarks.reliability.runs import SETTINGS, Bench, remove
from benchmarks.report import table
from liger_trainer.common.files import METRICS

TITLE = "Wrong rows"
ROWS, EACH, MAX_STEPS = 10_000, 100, 3


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    (bench.folder / "wrong").mkdir(exist_ok=True)
    places = malformed(bench.folder / "wrong" / "rows.jsonl", ROWS, EACH)
    config = {**SETTINGS, "dataset_name": "wrong/rows.jsonl", "max_steps": MAX_STEPS, "eval_strategy": "no"}
    config |= {"save_strategy": "no", "holdout_fraction": 0.01, "num_sample_completions": 0}
    (bench.folder / "wrong.yaml").write_text(json.dumps(config))
    out = bench.folder / "wrong" / "out"
    remove(out)
    command = ["run", "wrong.yaml", f"output_dir={out}"]
    run = bench.end(command)
    named, refused = located(run.printed), run.code == 4 and "Traceback" not in run.printed and not out.exists()
    failures = [] if refused else [f"bad_rows: error, exit code {run.code}\n{run.printed[-3000:]}"]
    run = bench.end([*command, "bad_rows=skip"])
    counts: dict[str, Any] = {"skipped": 0, "trained": 0, "steps": 0}
    if run.code == 0:
        metrics = json.loads((out / METRICS).read_text())
        counts = {"skipped": metrics["data"]["rows_skipped"], "steps": metrics["training"]["steps"],
                  "trained": metrics["data"]["train_rows"] + metrics["data"]["test_rows"]}  # fmt: skip
    wrong = sum(map(len, places.values()))
    if counts != {"skipped": wrong, "trained": ROWS - wrong, "steps": MAX_STEPS}:
        failures.append(f"bad_rows: skip, exit code {run.code}, {counts}\n{run.printed[-3000:]}")
    kinds = Counter({kind: len(named & set(lines)) for kind, lines in places.items()})
    failures += [f"{kind}: {found} of {EACH} located" for kind, found in kinds.items() if found < EACH]
    if extra := named - {line for lines in places.values() for line in lines}:
        failures.append(f"lines that are right were called wrong: {sorted(extra)[:20]}")
    return [{"rows": ROWS, "wrong": wrong, "each": EACH, "located": kinds, **counts, "failures": failures}]


def lines(results: list[dict[str, Any]]) -> list[str]:
    (result,) = results
    rows = [(kind, f"{result['located'][kind]} of {result['each']}") for kind in TEN_KINDS if kind in result["located"]]
    named = sum(result["located"].values())
    return [
        f"{result['wrong']:,} wrong lines among {result['rows']:,}. `bad_rows: error` ends before training and names",
        f"the file and line of {named:,}; `bad_rows: skip` leaves out {result['skipped']:,} and trains on the other "
        f"{result['trained']:,}.",
        "",
        *table(("kind", "located by file and line"), rows),
    ]
