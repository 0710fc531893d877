"""DPO and GRPO: their losses from hidden states, and whole steps of TRL's trainers, with and without `enable()`.

    python -m benchmarks.preference_step --output DIR     # on a GPU: DIR/preference-step-<device>.json and .md
    python -m benchmarks.preference_step --parts losses   # or steps
    python -m benchmarks.preference_step --tiny           # small enough for a CPU: does it still work

Losses: forward and backward to hidden states and head, DPO with its reference's pass. First a gate: loss and gradients
of a small batch in bf16 against fp32 from stored logits. Ours must err at most twice as much as stored logits in bf16.
Then providers take turns, and each one's peak above its inputs is taken.

Steps: DPOTrainer and GRPOTrainer of TRL in this process, on a model of random weights. The rows differ in `enable()`
and `use_liger_kernel` alone. GRPO samples once, before the timed steps. Losses and gradient norms of all steps must be
those of the stock trainer within TOLERANCE, else a row has no times. Exit code 1: a gate refused a row of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .measure import MIB, Spread, Stopwatch, explain, interleave, release_memory, settle_libraries
from .preference_losses import PROVIDERS, Case, Tensors, make_tensors
from .report import join_versions, provenance, slug, table, write
from .shapes import random_model
from .trainer_cases import make_tokenizer

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "liger-kernel")
KINDS = (("DPO", 4096, 128256), ("GRPO", 2048, 151936))
CASES = tuple(Case(*kind, frozen) for kind in KINDS for frozen in (False, True))
ROUNDS, FLOOR = 7, 3e-3
SHAPE, TOLERANCE = "Qwen3-0.6B", 0.05
WARMUP, STEPS = 2, 6
SECONDS = 140
LEAVES = ("hidden", "weight")


@dataclass
class LossRow:
    """A provider in a case of the losses."""

    case: str
    provider: str
    errors: dict[str, float] = field(default_factory=dict)
    ms: Spread | None = None
    peak_mib: float | None = None
    failure: str | None = None


def gradients_of(loss: Callable[[Tensors], torch.Tensor], tensors: Tensors, case: Case) -> dict[str, torch.Tensor]:
    """Run forward and backward. Returns the loss and the gradients."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in LEAVES[: 1 if case.frozen else 2]}
    value = loss({**tensors, **leaves})
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return {"loss": value.detach(), **dict(zip(leaves, gradients, strict=True))}


def errors_of(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    return {n: ((got[n].float() - x).norm() / x.norm().clamp(min=1e-30)).item() for n, x in truth.items()}


def measure_losses(case: Case, device: torch.device, rounds: int, deadline: float) -> list[LossRow]:
    """Check and time every provider of a case."""
    rows = {name: LossRow(str(case), name) for name in PROVIDERS}
    short = replace(case, sequences=2)  # of full length: Liger-Kernel then compiles once
    tensors = make_tensors(short, device, torch.bfloat16)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    truth = gradients_of(PROVIDERS["stored"][1](short), wide, short)
    calls: dict[str, Callable[[], object]] = {}
    full: Tensors = {}
    for name, (_, make) in PROVIDERS.items():
        with failing(rows[name]):
            rows[name].errors = errors_of(gradients_of(make(short), tensors, short), truth)
    judge(rows)
    del tensors, wide, truth
    release_memory()
    full.update(make_tensors(case, device, torch.bfloat16))
    for name, (_, make) in PROVIDERS.items():
        if rows[name].failure is None:
            with failing(rows[name]):
                call = _call(make(case), full, case)
                call()  # compiles
                rows[name].peak_mib = peak_of(call, device)
                calls[name] = call
    for name, times in interleave(calls, Stopwatch(device), rounds, deadline).items():
        rows[name].ms = Spread.of(times)
    return list(rows.values())


def _call(loss: Callable[[Tensors], torch.Tensor], tensors: Tensors, case: Case) -> Callable[[], object]:
    return lambda: gradients_of(loss, tensors, case) and None


@contextlib.contextmanager
def failing(row: Any):
    """Note an error of the block in the row."""
    try:
        yield
    except Exception as error:
        row.failure = explain(error)
        release_memory()


def judge(rows: dict[str, LossRow]) -> None:
    """Refuse what errs more than twice as much as stored logits in bf16; peers by 10 % alone."""
    plain = rows["stored"].errors
    for row in rows.values():
        if row.failure or row.provider == "stored":
            continue
        for name, error in row.errors.items():
            bound = 2 * plain[name] + FLOOR if row.provider == "ours" else max(0.1, 2 * plain[name])
            if not error <= bound:
                row.failure = f"refused: {name} is {error:.1e} from fp32, stored logits {plain[name]:.1e}"


def peak_of(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    release_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


@dataclass
class StepRow:
    """A way to run one of TRL's trainers."""

    trainer: str
    way: str
    adapters: bool
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ms: Spread | None = None
    peak_mib: float | None = None
    failure: str | None = None


WAYS = {"TRL": (False, False), "TRL, enable()": (True, False), "TRL, enable(), our layers": (True, True)}


class Watch(TrainerCallback):
    """Times the steps after WARMUP, and notes what is logged."""

    def __init__(self, row: StepRow):
        self._row, self._times, self._start = row, [], 0.0

    def on_step_begin(self, args, state, control, **_):
        _synchronize()
        if state.global_step == WARMUP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        _synchronize()
        if state.global_step > WARMUP:
            self._times.append(1e3 * (time.perf_counter() - self._start))

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "grad_norm" in logs:
            self._row.losses.append(float(logs["loss"]))
            self._row.norms.append(float(logs["grad_norm"]))

    def on_train_end(self, args, state, control, **_):
        self._row.ms = Spread.of(self._times)
        if torch.cuda.is_available():
            self._row.peak_mib = torch.cuda.max_memory_allocated() / MIB


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_step_row(row: StepRow, tiny: bool, folder: str) -> None:
    """Train WARMUP + STEPS steps."""
    import liger_trainer

    ours, layers = WAYS[row.way]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(SHAPE, tiny, device)
    (liger_trainer.enable if ours else liger_trainer.disable)()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            trainer = (dpo_trainer if row.trainer == "DPO" else grpo_trainer)(row, model, tiny, layers, folder)
            trainer.add_callback(Watch(row))
            trainer.train()
    finally:
        liger_trainer.disable()


def arguments_of(config: Any, tiny: bool, layers: bool, folder: str, **options: Any) -> Any:
    return config(
        output_dir=folder, max_steps=WARMUP + STEPS, learning_rate=1e-5, bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
        gradient_checkpointing=False, use_liger_kernel=layers, seed=0, **options,
    )  # fmt: skip


def shared(row: StepRow, model: Any) -> dict[str, Any]:
    from peft import LoraConfig

    adapters = LoraConfig(r=16, target_modules="all-linear") if row.adapters else None
    tokenizer = make_tokenizer(model.config.vocab_size)
    return {"model": model, "processing_class": tokenizer, "peft_config": adapters}


def words(vocab: int, count: int, rows: int, seed: int) -> list[str]:
    ids = torch.randint(2, vocab, (rows, count), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def dpo_trainer(row: StepRow, model: Any, tiny: bool, layers: bool, folder: str) -> Any:
    """Pairs of a prompt of 256 words and answers of 768, four pairs a step; the reference's pass in each step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    vocab, pairs, prompt, answer = model.config.vocab_size, 4, 4 if tiny else 256, 8 if tiny else 767
    rows = pairs * (WARMUP + STEPS)
    columns = {"prompt": (prompt, 1), "chosen": (answer, 2), "rejected": (answer, 3)}
    data = Dataset.from_dict({name: [" " + w for w in words(vocab, n, rows, s)] for name, (n, s) in columns.items()})
    args = arguments_of(DPOConfig, tiny, layers, folder, per_device_train_batch_size=pairs, max_length=None)
    reference = None if row.adapters else random_model(SHAPE, tiny, str(model.device), seed=1).eval()
    return DPOTrainer(args=args, train_dataset=data, ref_model=reference, **shared(row, model))


def grpo_trainer(row: StepRow, model: Any, tiny: bool, layers: bool, folder: str) -> Any:
    """Prompts of 64 words, completions of 256 tokens, eight to a prompt, 32 rows a step, sampled once for all steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompt, answer, batch = (4, 8, 4) if tiny else (64, 256, 32)
    group, steps = (2 if tiny else 8), WARMUP + STEPS
    data = Dataset.from_dict({"prompt": words(model.config.vocab_size, prompt, batch * steps, 1)})
    model.generation_config.update(pad_token_id=0, eos_token_id=1)
    args = arguments_of(
        GRPOConfig, tiny, layers, folder, per_device_train_batch_size=batch, num_generations=group,
        steps_per_generation=steps, max_completion_length=answer, temperature=0.9, beta=0.0,
        generation_kwargs={"min_new_tokens": answer}, shuffle_dataset=False, gradient_accumulation_steps=1,
    )  # fmt: skip
    return GRPOTrainer(args=args, train_dataset=data, **{"reward_funcs": _reward, **shared(row, model)})


def _reward(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 97) for ids in completion_ids]


def measure_steps(tiny: bool, deadline: float) -> Iterable[StepRow]:
    for trainer in ("DPO", "GRPO"):
        for adapters in (False, True):
            plain: StepRow | None = None
            for way in WAYS:
                row = StepRow(trainer, way, adapters)
                if plain is not None and time.monotonic() > deadline:
                    row.failure = "not run: time limit"
                    yield row
                    continue
                with failing(row), tempfile.TemporaryDirectory() as folder:
                    run_step_row(row, tiny, folder)
                release_memory()
                plain = plain or row
                judge_step(row, plain)
                yield row


def judge_step(row: StepRow, plain: StepRow) -> None:
    """Refuse a row whose losses or gradient norms are not those of the stock trainer."""
    if row.failure:
        return
    scale = max(abs(x) for x in plain.losses) if plain.losses else 0.0
    largest = max(plain.norms, default=0.0)
    pairs = [(a, b, max(scale, 0.05)) for a, b in zip(row.losses, plain.losses, strict=True)]
    pairs += [(a, b, largest) for a, b in zip(row.norms, plain.norms, strict=True)]
    gap = max((abs(a - b) / by for a, b, by in pairs), default=float("nan"))
    if not gap <= TOLERANCE:
        row.failure = f"refused: losses or gradient norms are {gap:.1%} from the stock trainer's"


def of_ours(value: float | None, base: float | None) -> str:
    return "" if not value or not base else f"{value / base:.2f}x"


def markdown(header: dict[str, Any], losses: list[LossRow], steps: list[StepRow]) -> str:
    lines = ["# Preferences and RL", "", f"{header['device']}, {header['date']}, commit {header['commit']};"]
    lines += [f"{join_versions(header['packages'])}; bf16. `{header['command']}`", ""]
    cells = []
    for row in losses:
        base = next(x for x in losses if x.case == row.case and x.provider == "ours")
        title = PROVIDERS[row.provider][0]
        if row.failure or row.ms is None:
            cells.append((row.case, title, row.failure or "", "", "", "", ""))
            continue
        worst = max(value for name, value in row.errors.items() if name != "loss")
        cells.append((
            row.case, title, f"{row.ms.median:.1f}", _mib(row.peak_mib),
            of_ours(row.ms.median, base.ms and base.ms.median), f"{row.errors['loss']:.1e}", f"{worst:.1e}",
        ))  # fmt: skip
    if cells:
        lines += ["## Losses from hidden states", ""]
        lines += table(("case", "provider", "ms", "MiB", "of ours: time", "loss error", "gradient error"), cells)
    if steps:
        lines += ["", f"## Steps of TRL's trainers, {SHAPE}", ""]
        titles = ("trainer", "way", "ms", "MiB", "last loss", "first gradient norm")
        lines += table(titles, [_step_cells(row) for row in steps])
    return "\n".join(lines) + "\n"


def _step_cells(row: StepRow) -> tuple[str, ...]:
    name = f"{row.trainer}{', LoRA r 16' * row.adapters}"
    if row.failure or row.ms is None:
        return name, row.way, row.failure or "", "", "", ""
    times = f"{row.ms.median:.0f} ({row.ms.p25:.0f} to {row.ms.p75:.0f})"
    return name, row.way, times, _mib(row.peak_mib), f"{row.losses[-1]:.5f}", f"{row.norms[0]:.4f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", default="losses,steps", help="losses, steps, or both")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start no further round or row after these")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        settle_libraries(device)
    losses: list[LossRow] = []
    steps: list[StepRow] = []
    cases = CASES if not options.tiny else [Case(x, 24, 99, f, 4, 16) for x in ("DPO", "GRPO") for f in (False, True)]
    command = "python -m benchmarks.preference_step" + (f" --parts {options.parts}" if "," not in options.parts else "")
    header = {**provenance(PACKAGES, cuda), "command": command}
    parts = options.parts.split(",")

    def report() -> str:
        text = markdown(header, losses, steps)
        if options.output:
            data = {**header, "losses": [asdict(x) for x in losses], "steps": [asdict(x) for x in steps]}
            write(options.output / f"preference-step-{slug(header['device'])}", data, text)
        return text

    for case in cases if "losses" in parts else ():
        losses += measure_losses(case, device, 2 if options.tiny else ROUNDS, started + options.seconds / 2)
        report()
    for row in measure_steps(options.tiny, started + options.seconds) if "steps" in parts else ():
        steps.append(row)
        report()
    print(report())
    failed = [x for x in losses if x.provider == "ours" and x.failure] + [x for x in steps if x.failure]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
