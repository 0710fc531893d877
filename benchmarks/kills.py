"""Kills runs of tiny models at random moments, and resumes them: do they end as the run that nobody disturbed?

    python -m benchmarks.kills                          # every kind of run, 50 moments each
    python -m benchmarks.kills --kinds sft --moments 6  # one kind, few moments

Half of the moments are times, spread evenly over the run from the moment that it has its `config.yaml` to its end; half
are calls that make something durable. Three in ten runs are killed again while they are resumed. The weights must be
the same bit for bit. All runs are forked from one process that has imported everything, so that each takes a second or
two on one core. Damaged checkpoints, NaN, full disks and signals, whose ends are not random, are in tests.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Hugging Face's libraries read these when they are imported; a process that has seen a GPU cannot fork.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.update(CUDA_VISIBLE_DEVICES="", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))  # the tests' models and rows

import datasets
import torch
from commands import save_models, write_rows
from transformers.utils import logging

from benchmarks.report import table
from liger_trainer.cli.app import main as command_line
from liger_trainer.common.files import CONFIG, METRICS, sha256
from liger_trainer.errors import LigerTrainerError
from liger_trainer.recipes import distill, sft
from liger_trainer.run import recipe

RECIPES = (distill, sft)  # imported now, for every run
STEPS, ROWS = 12, 40
SETTINGS = {
    "model_name_or_path": "student", "dataset_name": "rows.jsonl", "max_steps": STEPS, "save_strategy": "steps",
    "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2, "learning_rate": 1e-2,
    "per_device_train_batch_size": 4, "logging_steps": 1, "gradient_checkpointing": False, "max_length": 32,
    "holdout_fraction": 0.2, "num_sample_completions": 2, "max_new_tokens": 4, "use_cpu": True, "report_to": "none",
}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "lora_target_modules": ["q_proj", "v_proj"]}
KD = {
    "teacher_model_name_or_path": "teacher", "schedules": {"temperature": {"from": 4.0, "to": 1.0}},
    "load_best_model_at_end": True,
}  # fmt: skip
ON_POLICY = {"teacher_model_name_or_path": "teacher", "lmbda": 0.5, "max_completion_length": 6}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {  # title, settings, processes
    "sft": ("fine-tuning", {}, 1),
    "lora": ("LoRA with dropout", LORA, 1),
    "kd": ("distillation with a schedule, best model at the end", KD, 1),
    "on-policy": ("on-policy distillation", ON_POLICY, 1),
    "ranks": ("fine-tuning on two processes", {"ddp_backend": "gloo", "per_device_train_batch_size": 2}, 2),
}


class Run:
    """A command that was started: its processes."""

    def __init__(self, pids: list[int]):
        self.pids = pids
        self.code: int | None = None  # of the first process

    def kill(self) -> None:
        """Send SIGKILL to every process, as when the machine's memory or power ends."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for all processes. One that fails ends the others, as a launcher does."""
        codes: dict[int, int] = {}
        while len(codes) < len(self.pids):
            pid, status = os.waitpid(next(pid for pid in self.pids if pid not in codes), 0)
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                self.kill()
        self.code = codes[self.pids[0]]


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbs. `seconds` and `calls` count from the moment that it can be resumed."""

    folder: Path
    outcome: dict[str, Any]
    seconds: float
    calls: int


class Bench:
    """A folder with models, rows and a configuration of each kind, in which runs are started."""

    def __init__(self, folder: Path):
        self.folder, self._undisturbed = folder, {}
        self.log = folder / "log"  # of the run at hand
        self.calls = mmap.mmap(-1, 8)  # shared with the runs: calls that make something durable
        torch.set_num_threads(1)
        recipe._report = lambda output_dir: None  # its figures take seven times as long as all the rest
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        save_models(folder, "student", "teacher")
        rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i % 7}"} for i in range(ROWS)]
        write_rows(folder / "rows.jsonl", rows)
        for name, (_, settings, _) in KINDS.items():
            (folder / f"{name}.yaml").write_text(json.dumps({**SETTINGS, **settings}))  # JSON is YAML

    def start(self, command: list[str], kind: str, before: Callable[[], None] = lambda: None) -> Run:
        """Start `liger-trainer COMMAND` on the processes of a kind. Each calls `before` first."""
        ranks = KINDS[kind][2]
        self.log.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments = [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in range(ranks)] if ranks > 1 else [{}]
        return Run([self._fork(command, environment, before) for environment in environments])

    def _fork(self, command: list[str], environment: dict[str, Any], before: Callable[[], None]) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ.update({name: str(value) for name, value in environment.items()})
            before()
            command_line(command)
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except BaseException as error:
            traceback.print_exc()
            code = error.exit_code if isinstance(error, LigerTrainerError) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def undisturbed(self, kind: str) -> Undisturbed:
        """Return the run of a kind that nobody disturbs, made once."""
        if kind not in self._undisturbed:
            out = self.folder / f"undisturbed-{kind}"
            run = self.start(["run", f"{kind}.yaml", f"output_dir={out}"], kind, self.counting(out / CONFIG))
            wait_for(out / CONFIG, run)
            start = time.perf_counter()
            run.wait()
            assert run.code == 0, self.log.read_text()
            seconds = time.perf_counter() - start
            self._undisturbed[kind] = Undisturbed(out, outcome(out), seconds, self.counted())
        return self._undisturbed[kind]

    def counting(self, begun: Path, last: int = 0) -> Callable[[], None]:
        """Return what makes a run count its calls of fsync and replace once a path is there.

        At the call with the number `last` it kills itself.
        """
        self.calls[:8] = bytes(8)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if begun.exists() and os.environ.get("RANK", "0") == "0":
                    number = self.counted() + 1
                    self.calls[:8] = number.to_bytes(8, "little")
                    if number == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        def patch() -> None:
            os.fsync, os.replace = counted(os.fsync), counted(os.replace)

        return patch

    def counted(self) -> int:
        return int.from_bytes(self.calls[:8], "little")


def wait_for(path: Path, run: Run) -> None:
    """Wait until a file is there, or the run has ended."""
    while not path.exists() and os.waitid(os.P_PID, run.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def outcome(out: Path) -> dict[str, Any]:
    """Return what must not depend on disturbances: the weights, and the numbers before and after training."""
    if not (out / METRICS).is_file():
        return {"unfinished": f"{out} holds no {METRICS}"}
    metrics = json.loads((out / METRICS).read_text())
    numbers = {
        part: {name: metrics[part][name] for name in ("loss", "num_tokens") if name in metrics[part]}
        for part in ("before", "after")
    }
    return {"weights": {path.name: sha256(path) for path in sorted(out.glob("*.safetensors"))}, **numbers}


def killed(bench: Bench, kind: str, moments: int, seed: int) -> dict[str, int]:
    """Return how often a kind of run was killed and resumed, and how often it then ended as it should."""
    rng, want = random.Random(f"{kind} {seed}"), bench.undisturbed(kind)
    found, out = {"moments": 0, "kills": 0, "the same": 0}, bench.folder / f"killed-{kind}"
    while found["moments"] < moments:
        shutil.rmtree(out, ignore_errors=True)
        _kill(bench, kind, ["run", f"{kind}.yaml", f"output_dir={out}"], out, rng)
        if (out / METRICS).exists():
            continue  # it was at its end already
        again, resume = rng.random() < 0.3, ["resume", str(out)]
        if again:
            _kill(bench, kind, resume, out, rng)
        if not (out / METRICS).exists():
            bench.start(resume, kind).wait()
        same = outcome(out) == want.outcome
        for count, more in (("moments", 1), ("kills", 1 + again), ("the same", same)):
            found[count] += more
        said = "as expected" if same else bench.log.read_text()[-3000:]
        print(f"{kind}, moment {found['moments']}: {said}", flush=True)
    return found


def _kill(bench: Bench, kind: str, command: list[str], out: Path, rng: random.Random) -> None:
    want = bench.undisturbed(kind)
    if rng.random() < 0.5:
        run = bench.start(command, kind, bench.counting(out / CONFIG, rng.randint(1, want.calls)))
    else:
        run = bench.start(command, kind)
        wait_for(out / CONFIG, run)
        time.sleep(rng.uniform(0, want.seconds))
        run.kill()
    run.wait()


def main() -> int:
    """Return 1 if any run did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50, help="random moments at which each kind of run is killed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs that are killed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="liger-trainer-kills-") as folder:
        bench = Bench(Path(folder))
        results = {kind: killed(bench, kind, options.moments, options.seed) for kind in options.kinds}
    heads = ("run", "kills", "ended with the same weights and numbers")
    rows = [[KINDS[k][0], str(r["kills"]), f"{r['the same']} of {r['moments']}"] for k, r in results.items()]
    print("\n".join(table(heads, rows)))
    return int(any(result["the same"] < result["moments"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
