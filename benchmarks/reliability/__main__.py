"""Does the harms of the parts that are named, keeps the results of the others, and writes docs/results/reliability.md.

A row of a page's table is a `Harm`; `judge` says of each of its trials whether the run ended as the harm expects.
"""

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability import __doc__ as usage
from benchmarks.reliability.bench import KINDS, Bench
from benchmarks.reliability.harms import HARMS, Harm, Trial
from benchmarks.report import join_versions, provenance, table, write

PARTS = list(dict.fromkeys(harm.part for harm in HARMS))
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "liger-trainer")
CHECKS = {"exit": "exit code", "sentence": "sentence", "intact": "data intact", "after": "afterwards"}
HEADS = ("harm", "trials", "exit code expected", *CHECKS.values(), "sentence expected", "afterwards expected")


def main() -> int:
    """Return 1 if any run did not end as it should."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.reliability", description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--moments", type=int, default=50, help="random moments at which each kind of run is killed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    file = options.output / "reliability.json"
    where = provenance(PACKAGES, cuda=False)  # before the results change the checkout
    kept = json.loads(file.read_text()) if file.is_file() else {}
    results = {part: kept[part] for part in PARTS if "harms" in kept.get(part, {})}
    failed = False
    with tempfile.TemporaryDirectory(prefix="liger-trainer-reliability-") as folder:
        bench = Bench(Path(folder))
        for part in options.parts or PARTS:
            start, rows = time.perf_counter(), []
            for harm in HARMS:
                if harm.part == part and harm.kind in (None, *options.kinds):
                    rows.append(measure(harm, bench, options))
            results[part] = {**where, "seconds": round(time.perf_counter() - start), "harms": rows}
            failed |= any(row["failures"] for row in rows)
            write(options.output / "reliability", results, page(results))
    print(page(results))
    return int(failed)


def measure(harm: Harm, bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Return how many trials of a harm ended as expected, by what was expected."""
    row: dict[str, Any] = {"harm": harm.name, "trials": 0, "good": dict.fromkeys(CHECKS, 0), "failures": []}
    for trial in harm.trials(bench, options):
        row["trials"] += 1
        verdict = judge(harm, trial)
        for check, holds in verdict.items():
            row["good"][check] += holds
        wrong = [CHECKS[check] for check, holds in verdict.items() if not holds]
        if wrong:
            row["failures"].append(f"{harm.name}, {trial.what}: {', '.join(wrong)}\n{trial.printed[-3000:]}")
        print(f"{harm.part}, {harm.name}, {trial.what}: {', '.join(wrong) or 'as expected'}", flush=True)
    return row


def judge(harm: Harm, trial: Trial) -> dict[str, bool]:
    """Compare one run with what is expected; True where nothing is."""
    sentence = re.escape(harm.sentence).replace(r"\{\}", re.escape(trial.named)).replace(r"\*", ".*")
    printed = trial.printed
    return {
        "exit": harm.exit is None or trial.code in harm.exit,
        "sentence": bool(re.search(sentence, printed)) and "Traceback" not in printed if harm.sentence else True,
        "intact": trial.intact, "after": trial.after,
    }  # fmt: skip


def page(results: dict[str, Any]) -> str:
    lines = [
        "# Reliability",
        "",
        "Runs of tiny models from the command line, on a CPU, that are disturbed: in how many trials each ended with",
        "the expected exit code and sentence, left earlier data as it was, and what came of it afterwards. The same",
        "weights: as of the run that nobody disturbed, bit for bit.",
        "`python -m benchmarks.reliability` measures it again. What holds and how:",
        "[reliability](../reliability.md).",
    ]
    harms = {(harm.part, harm.name): harm for harm in HARMS}
    for part, measured in results.items():
        rows = []
        for row in measured["harms"]:
            harm, trials = harms[part, row["harm"]], row["trials"]
            codes = "any" if harm.exit is None else " or ".join(map(str, harm.exit))
            good = [f"{row['good'][check]} of {trials}" for check in CHECKS]
            rows.append([harm.name, str(trials), codes, *good, harm.sentence, harm.after])
        where = f"{measured['date']}, commit {measured['commit']}, {measured['seconds']} s, "
        lines += ["", f"## {part}", "", *table(HEADS, rows), "", where + join_versions(measured["packages"]) + "."]
        for failure in [failure for row in measured["harms"] for failure in row["failures"]]:
            lines += ["", "```", failure.strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
