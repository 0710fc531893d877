"""Measures the parts that are named, keeps the results of the others, and writes docs/results/reliability.md."""

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.reliability import corrupt, disk, fuzz, kill, nonfinite, rows, secrets, signals
from benchmarks.reliability.runs import KINDS, Bench
from benchmarks.report import join_versions, provenance, write

PARTS = {
    "kill": kill,
    "corrupt": corrupt,
    "nonfinite": nonfinite,
    "disk": disk,
    "signals": signals,
    "rows": rows,
    "yaml": fuzz,
    "secrets": secrets,
}
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "liger-trainer")


def main() -> int:
    """Return 1 if any run did not end as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--moments", type=int, default=50, help="random moments of each kind of run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs that are killed")
    parser.add_argument("--inputs", type=int, default=10_000, help="configurations that are broken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    parts, file = options.parts or list(PARTS), options.output / "reliability.json"
    where = provenance(PACKAGES, cuda=False)  # before the results change the checkout
    results = json.loads(file.read_text()) if file.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="liger-trainer-reliability-") as folder:
        bench = Bench(Path(folder))
        for name in parts:
            start = time.perf_counter()
            measured = PARTS[name].measure(bench, options)
            took = round(time.perf_counter() - start)
            results[name] = {**where, "seconds": took, "results": measured}
            write(options.output / "reliability", results, page(results))
    print(page(results))
    return int(any(result["failures"] for name in parts for result in results[name]["results"]))


def page(results: dict) -> str:
    lines = [
        "# Reliability",
        "",
        "Runs of tiny models from the command line, on a CPU, that are disturbed; and whether they end with",
        "the weights of the run that nobody disturbed, bit for bit. Then wrong input and secrets.",
        "`python -m benchmarks.reliability` measures it again. What holds and how:",
        "[reliability](../reliability.md).",
    ]
    for name, part in sorted(results.items(), key=lambda item: list(PARTS).index(item[0])):
        where = f"{part['date']}, commit {part['commit']}, {part['seconds']} s."
        lines += ["", f"## {PARTS[name].TITLE}", "", *PARTS[name].lines(part["results"]), "", where]
        lines += [join_versions(part["packages"]) + "."]
        for failure in [failure for result in part["results"] for failure in result["failures"]]:
            lines += ["", "```", failure.strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
