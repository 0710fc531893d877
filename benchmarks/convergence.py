"""Does a patched model train as the plain one does? The same model, batches and optimizer, with and without `patch`.

    python -m benchmarks.convergence                  # bf16 on a GPU: mini models and SmolLM2-135M
    python -m benchmarks.convergence llama --tiny     # small enough for a CPU

How far rounding by itself carries a training apart is shown by plain runs that compute the same in another order (rows
split into other micro-batches, eager attention instead of sdpa), and by the distance of a plain bf16 run from one in
fp32. The patched run must stay within twice either; in fp32 on a CPU, tests hold it to a fixed bound. Trainings through
the trainers, on real rows, are cases of `benchmarks.trainer_step`: sft-smollm2, lora-smollm2, kd-smollm2.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from liger_trainer.extras.demo import demo_model_dir
from liger_trainer.patching.patcher import patch

from .report import join_versions, provenance, slug, table, write

STEPS, MICRO_BATCHES = 32, 4
FLOOR = 1e-5  # what rounding in fp32 may do to one run and not to another
SMOLLM2 = "smollm2-135m"
LEARNING_RATE = (1e-3, 1e-4)  # from random weights, and from trained ones
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    # Without the router's loss, which is no sum over tokens: split otherwise, a batch would have another one.
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 128}),
}


@dataclass
class Trained:
    """Results of a training. logits: of the last batch, after the last step."""

    losses: list[float]
    logits: Tensor
    weights: dict[str, Tensor]


@dataclass
class Distance:
    """How far two runs are apart: the largest relative difference of a step's loss, and relative L2 of the rest."""

    loss: float
    logits: float
    weights: float

    @classmethod
    def between(cls, a: Trained, b: Trained) -> Distance:
        loss = max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))
        difference = sum(_squares(a.weights[name] - b.weights[name]) for name in b.weights)
        total = sum(_squares(weight) for weight in b.weights.values())
        return cls(loss, _relative(a.logits, b.logits), math.sqrt(difference / total))

    @classmethod
    def largest(cls, distances: Iterable[Distance]) -> Distance:
        return cls(*(max(values) for values in zip(*(vars(d).values() for d in distances), strict=True)))


def _squares(x: Tensor) -> float:
    return x.double().square().sum().item()


def _relative(a: Tensor, b: Tensor) -> float:
    return math.sqrt(_squares(a - b) / _squares(b))


def build(name: str, tiny: bool = False) -> Any:
    """A plain model in fp32 on the CPU, in train mode without dropout."""
    if name == SMOLLM2:
        return transformers.AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).train()
    config_name, options = MODELS[name]
    config = getattr(transformers, config_name)(**{**SHAPE, **(TINY if tiny else {}), **options})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batches(vocab: int, rows: int, length: int, device: str) -> Iterator[Tensor]:
    """(rows, length) bytes of the Python manual, over and over, the same ones each time."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % vocab
    size = rows * length
    for start in itertools.count(0, size):
        yield ids.roll(-start)[:size].view(rows, length).to(device)


def train(model: Any, steps: int, rows: int, length: int, learning_rate: float, parts: int = MICRO_BATCHES) -> Trained:
    """AdamW over `steps` batches of MICRO_BATCHES x rows sequences, each in so many parts, the last one first."""
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    source = batches(model.config.vocab_size, MICRO_BATCHES * rows, length, device)
    losses = []
    for _ in range(steps):
        batch = next(source)
        num_items = batch[:, 1:].numel()
        total = 0.0
        for ids in reversed(batch.chunk(parts)):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=num_items, use_cache=False).loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(input_ids=next(source)[:rows], use_cache=False).logits.float().cpu()
    return Trained(losses, logits, {name: p.detach().float().cpu() for name, p in model.named_parameters()})


def compare(model: Any, steps: int, rows: int, length: int, learning_rate: float) -> tuple[dict[str, Distance], str]:
    """Return the distances that the page shows, and what was patched. The model itself stays as it was."""

    def run(prepare: Callable[[Any], Any] = lambda model: None, **options: Any) -> tuple[Trained, Any]:
        replica = copy.deepcopy(model)
        prepared = prepare(replica)
        return train(replica, steps, rows, length, learning_rate, **options), prepared

    plain, _ = run()
    assert plain.losses[-1] < 0.95 * plain.losses[0], "the model learns nothing: nothing is compared"
    others = [run(parts=MICRO_BATCHES // 2)[0], run(parts=2 * MICRO_BATCHES)[0]]
    if model.config._attn_implementation != "eager":
        others.append(run(lambda model: model.set_attn_implementation("eager"))[0])
    patched, record = run(patch)
    pairs = itertools.combinations([plain, *others], 2)
    distances = {
        "patched from plain": Distance.between(patched, plain),
        "plain from plain": Distance.largest(Distance.between(*pair) for pair in pairs),
    }
    if model.dtype != torch.float32:
        truth, _ = run(lambda model: model.float())
        distances["patched from fp32"] = Distance.between(patched, truth)
        distances["plain from fp32"] = Distance.between(plain, truth)
    return distances, str(record.report)


def is_within(distances: dict[str, Distance]) -> bool:
    """Return whether every distance is at most twice what rounding does without us."""
    return all(
        distance <= max(2 * bound, FLOOR)
        for reference in ("plain", "fp32")
        if f"patched from {reference}" in distances
        for distance, bound in zip(
            vars(distances[f"patched from {reference}"]).values(),
            vars(distances[f"plain from {reference}"]).values(),
            strict=True,
        )
    )


def page(results: dict[str, dict[str, Any]], where: dict[str, Any], command: str) -> str:
    rows = [
        [name, kind, *(f"{value:.1e}" for value in distance.values()), "yes" if result["within"] else "**no**"]
        for name, result in results.items()
        for kind, distance in result["distances"].items()
    ]
    return "\n".join([
        "# Training with and without `patch`", "",
        f"{where['device']}, {where['date']}, commit {where['commit']}, {join_versions(where['packages'])}, "
        f"`{command}`.", "",
        f"{STEPS} steps of AdamW from the same weights on the same batches. Plain from plain: the largest distance",
        "among plain runs that split their batches into 2, 4 or 8 micro-batches, or whose attention is eager, not sdpa",
        "(not gemma2, which is always eager). From fp32: distance from a plain run in fp32. Loss: the largest relative",
        "difference of a step; logits and weights: relative L2 after the last step. Within: both of patched's",
        f"distances are at most twice plain's, or {FLOOR:g}.", "",
        *table(["model", "", "loss", "logits", "weights", "within"], rows), "",
        *(f"- {result['report']}" for result in results.values()), "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a patched model is too far from the plain one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS, SMOLLM2], help=", ".join([*MODELS, SMOLLM2]))
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    sizes = (2, 64) if options.tiny else (8, 512)
    results = {}
    for name in options.models:
        model = build(name, options.tiny).to(device, dtype)
        distances, report = compare(model, options.steps, *sizes, LEARNING_RATE[name == SMOLLM2])
        shown = {kind: asdict(distance) for kind, distance in distances.items()}
        results[name] = {"distances": shown, "within": is_within(distances), "report": report}
        print(name, json.dumps(results[name]), flush=True)
    command = " ".join(["python -m benchmarks.convergence", *options.models, *["--tiny"] * options.tiny])
    where = provenance(("torch", "transformers"))
    write(options.output / f"convergence-{slug(where['device'])}", results, page(results, where, command))
    return 0 if all(result["within"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
