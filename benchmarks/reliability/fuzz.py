"""`liger-trainer validate` on configurations that are broken at random."""

import argparse
import contextlib
import functools
import io
import json
import random
import re
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.runs import Bench
from benchmarks.report import table
from liger_trainer.cli import main
from liger_trainer.config.catalogue import built_in_configs
from liger_trainer.config.schema import shipped_schema

TITLE = "Broken YAML"
SLOW = 2.0  # seconds of the processor
ODD = (
    '-1 0 1e999 -1e999 .nan .inf 1_000 0x7fffffffffffffffff 99999999999999999999 true no ~ null \'\' "\\0" "\\ud800" '
    "[] {} [1,2] {a: b} [[]] {[1]: 2} 2024-13-45 2024-01-01 12:30:45 !!binary,AAA= !!python/name:os.system !!set,{a} "
    "!!int,x !!float,x !!timestamp,x *a &a <<: ? | > % @ ` \" ' - --- ... : # ../../etc /dev/zero http://[::1 $HOME"
).split(" ")
UNICODE = "\0\t\r\n\x07\x1b\x7f\x85\xa0\u2028\u2029\ufeff\ufffe\u202eé漢😀&*!|>%@`[]{}:?-,#'\""
CHARACTERS = UNICODE + "\ud800"


def _bytes(rng: random.Random, text: str) -> bytes:
    content = bytearray(text.encode())
    highest = rng.choice((127, 255))
    for _ in range(rng.randint(1, 9)):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 3)] = bytes(rng.randint(9, highest) for _ in range(rng.randint(0, 3)))
    return bytes(content)


def _tokens(rng: random.Random, text: str) -> str:
    tokens = re.findall(r"\w+|\s+|.", text)
    for _ in range(rng.randint(1, 10)):
        a, b = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        tokens[a : a + rng.randint(0, 3)] = tokens[b : b + rng.randint(0, 3)]
    return "".join(tokens)


def _values(rng: random.Random, text: str) -> str:
    share = rng.choice((0.03, 0.3))
    return re.sub(
        r"(?m)(?<=: ).*$", lambda m: rng.choice(ODD).replace(",", " ") if rng.random() < share else m[0], text
    )


def _lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 8)):
        lines.insert(rng.randrange(len(lines)), " " * rng.randint(0, 9) + rng.choice(lines).strip())
    rng.shuffle(lines) if rng.random() < 0.2 else None
    return "\n".join(lines)


def _nesting(rng: random.Random, text: str) -> str:
    depth = rng.choice((3, 45, 55, 500, 5_000, 50_000))
    deep = rng.choice(("[", "{a: ", "- ", "? ", "[{a: ", "!!set {", "\n".join(" " * i + "a:" for i in range(200))))
    return _put(rng, text, deep * depth if len(deep) < 50 else deep)


def _aliases(rng: random.Random, text: str) -> str:
    count, width = rng.randint(1, 40), rng.randint(1, 12)
    laughs = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, count))]
    merges = [
        "m0: &m0 {x: 1}",
        *(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * width)}]}}" for i in range(1, count)),
    ]
    own = ["env: &e {a: *e}", "losses: &l [*l]", "? &k [*k]\n: 1", "<<: *nowhere", "<<: [1]", "<<: &t {<<: *t}"]
    return "\n".join([text, *rng.choice((laughs, merges, [rng.choice(own)]))])


def _characters(rng: random.Random, text: str) -> bytes:
    for _ in range(rng.choice((1, 1, 20))):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(CHARACTERS) + text[at:]
    return text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1")), "backslashreplace")


def _long(rng: random.Random, text: str) -> str:
    unit = rng.choice(
        ("a", "-", "1", " ", "é", "\\x", "hf_", "a://", "eyJa", "a: b\n", "token=", "?", "9e", "_", "'", "&a ")
    )
    return _put(rng, text, unit * rng.choice((100, 5_000, 100_000 // len(unit))))


def _spliced(rng: random.Random, text: str) -> str:
    other = rng.choice(_texts())
    return text[: rng.randrange(len(text))] + other[rng.randrange(len(other)) :]


def _documents(rng: random.Random, text: str) -> str:
    keys = list(shipped_schema().keys)
    document: dict[str, Any] = {"model_name_or_path": "a/b", "dataset_name": "a/b"}
    document |= {rng.choice(keys): _value(rng, 3) for _ in range(rng.choice((1, 2, 30)))}
    return yaml.safe_dump(
        document, default_flow_style=rng.choice((True, False, None)), allow_unicode=rng.random() < 0.5
    )


KINDS: dict[str, Callable[[random.Random, str], str | bytes]] = {
    "bytes changed": _bytes, "tokens moved": _tokens, "values replaced": _values, "lines moved and indented": _lines,
    "nested deep": _nesting, "aliases and merges": _aliases, "characters and encodings": _characters, "long": _long,
    "two files spliced": _spliced, "random documents of known keys": _documents,
}  # fmt: skip


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for kind in KINDS:
        note = bench.folder / "fuzzed.json"
        run = bench.end(lambda kind=kind, note=note: note.write_text(json.dumps(_fuzz(bench, kind, options))))
        assert run.code == 0, run.printed
        results.append(json.loads(note.read_text()))
        print(f"{kind}: { ({name: count for name, count in results[-1].items() if name != 'failures'}) }", flush=True)
    return results


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("the built-in configurations with", "inputs", "valid", "refused", "tracebacks", "slowest")
    rows = [
        (result["kind"], *(f"{result[what]:,}" for what in ("inputs", "valid", "refused", "tracebacks")),
         f"{result['slowest']:.2f} s") for result in results
    ]  # fmt: skip
    about = (
        "`liger-trainer validate`, and `config` where it is valid. The seconds are those of one core, for one command."
    )
    return [about, "", *table(titles, rows)]


def _fuzz(bench: Bench, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    rng, file = random.Random(f"{kind} {options.seed}"), Path("fuzzed.yaml")
    result: dict[str, Any] = {"kind": kind, "inputs": 0, "valid": 0, "refused": 0, "tracebacks": 0, "slowest": 0.0}
    failures: list[str] = []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(options.inputs // len(KINDS)):
        content = KINDS[kind](rng, rng.choice(_texts()))
        file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
        code, error, seconds = _ended("validate", file)
        if code == 0:
            code, error, more = _ended("config", file)
            seconds = max(seconds, more)
        outcome = {0: "valid", 2: "refused"}.get(code, "tracebacks")
        result[outcome] += 1
        result["inputs"] += 1
        result["slowest"] = max(result["slowest"], round(seconds, 3))
        if outcome == "tracebacks" or seconds > SLOW:
            failures.append(f"{kind}, exit code {code}, {seconds:.1f} s: {file.read_bytes()[:2000]!r}\n{error[-2000:]}")
    return {**result, "failures": failures[:20]}


def _ended(command: str, file: Path) -> tuple[int, str, float]:
    printed, start = io.StringIO(), time.process_time()
    signal.alarm(60)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main([command, str(file)])
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:
        code = 1
        printed.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    text = printed.getvalue()
    return 1 if "Traceback" in text else code, text, time.process_time() - start


def _put(rng: random.Random, text: str, what: str) -> str:
    at = rng.choice([0, len(text), *(match.end() for match in re.finditer(r": |\n", text))])
    return text[:at] + what + text[at:]


def _value(rng: random.Random, depth: int) -> Any:
    simple = (
        rng.randint(-(2**70), 2**70), rng.randint(-2, 5), rng.uniform(-1e9, 1e9), float("nan"), float("inf"), 1e-320,
        True, None, "", "".join(rng.choices(UNICODE + "abc=/", k=rng.randint(1, 30))), rng.choice(ODD), b"\xff\0",
    )  # fmt: skip
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(simple)
    inside = [_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return inside if rng.random() < 0.5 else {str(rng.choice(simple)): value for value in inside}


@functools.cache
def _texts() -> list[str]:
    return [file.read_text(encoding="utf-8") for file in built_in_configs().values()]
