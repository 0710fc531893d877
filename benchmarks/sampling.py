"""How fast a model samples: in CUDA graphs, by transformers' `generate` and by its continuous batching.

    python -m benchmarks.sampling --output DIR              # on a GPU: DIR/sampling-<device>.json and .md
    python -m benchmarks.sampling --models Qwen3-0.6B --providers 'ours*' --prompt 384
    python -m benchmarks.sampling --tiny                    # small enough for a CPU: does it still work

Random weights, no end of sequence: all completions have all tokens. A round of each provider is not timed: kernels are
compiled and graphs recorded in it. A step is what a round of all tokens takes longer than one of FEW, by their
difference; the bound is the time in which weights, keys and values are read once a step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .measure import Roofline, Spread, Stopwatch, explain, release_memory
from .report import matching, provenance, slug, table, where, without_output, write
from .shapes import random_model

PACKAGES = ("torch", "triton", "transformers", "peft")
FEW = 129  # tokens of the shorter completions: one of the prompts' pass, and eight times the steps between two looks
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Llama-3.2-1B")
Tokens = list[int]
Sample = Callable[[int, int], Sequence[Tokens]]  # by a seed, and the tokens of a completion


@dataclass(frozen=True)
class Workload:
    """Prompts that are completed together."""

    rows: int
    prompt: int
    new: int

    def prompts(self, vocab_size: int) -> list[Tokens]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(2, vocab_size, (self.rows, self.prompt), generator=generator).tolist()


@dataclass(frozen=True)
class Result:
    """What a provider did; no times where it failed.

    Attributes:
        seconds, seconds_of_few: of each round, and of each of FEW tokens.
        step_ms, of_bound: of a step, and the share of the bound that it reaches.
        peak_mib: above the weights.
    """

    model: str
    provider: str
    seconds: list[float]
    seconds_of_few: list[float] = field(default_factory=list)
    tokens_per_second: float | None = None
    step_ms: float | None = None
    of_bound: float | None = None
    peak_mib: float | None = None
    failure: str | None = None


def settings_of(tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, use_cache=True, pad_token_id=0,
        eos_token_id=None, disable_compile=True,
    )  # fmt: skip


def by_decoder(sampler: str) -> Callable[[Any, Workload], Sample]:
    def make(model: Any, work: Workload) -> Sample:
        from liger_trainer.trainers.decoder import Decoder

        decoder, prompts = Decoder(sampler), work.prompts(model.config.vocab_size)
        return lambda seed, tokens: decoder.complete(model, prompts, settings_of(work.new), seed, most_tokens=tokens)

    return make


def by_patched(model: Any, work: Workload) -> Sample:
    from liger_trainer import patch

    patch(model)
    return by_decoder("graphs")(model, work)


def by_adapters(model: Any, work: Workload) -> Sample:
    """With adapters of rank 16 on all linear layers, which change what the model says."""
    from peft import LoraConfig, get_peft_model

    lora: Any = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return by_patched(get_peft_model(model, lora).eval(), work)


def by_continuous_batching(model: Any, work: Workload) -> Sample:
    """transformers' own; its manager, with what it has recorded, is kept between two rounds."""
    prompts = work.prompts(model.config.vocab_size)

    def sample(seed: int, tokens: int) -> list[Tokens]:
        torch.manual_seed(seed)
        outputs = model.generate_batch(prompts, generation_config=settings_of(tokens), persistent_manager=True)
        return [output.generated_tokens for output in outputs.values()]

    return sample


PROVIDERS: dict[str, tuple[str, Callable[[Any, Workload], Sample]]] = {
    "ours": ("CUDA graphs", by_patched),
    "ours_lora": ("CUDA graphs, LoRA", by_adapters),
    "generate": ("`generate`", by_decoder("generate")),
    "continuous": ("`generate_batch`", by_continuous_batching),
}


def bound(model: Any, work: Workload, few: int, bandwidth: float) -> float:
    """Return the least seconds of a step, as the mean over those behind the first `few` tokens, at so many bytes a
    second."""
    text = model.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = next(model.parameters()).element_size()
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * width * size
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    weights = sum(p.numel() for p in model.parameters()) * size - (0 if head is embedding else embedding.nbytes)
    kept = work.rows * (work.prompt + (few + work.new) / 2) * token
    return (weights + kept) / bandwidth


def _clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, provider: str, work: Workload, options: argparse.Namespace, bandwidth: float) -> Result:
    device = options.device
    model = random_model(name, options.tiny, device, **({"num_hidden_layers": 2} if options.tiny else {}))
    model = (model.float() if options.tiny else model).eval()
    few = FEW if work.new > FEW else work.new - 1
    times: dict[int, list[float]] = {few: [], work.new: []}
    weights = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        sample = PROVIDERS[provider][1](model, work)
        for seed in range(1 + options.rounds):
            for tokens in reversed(times):
                begin = _clock(device)
                texts = sample(seed, tokens)
                if seed:
                    times[tokens].append(_clock(device) - begin)
                if [len(text) for text in texts] != [tokens] * work.rows:
                    raise RuntimeError(f"expected {work.rows} x {tokens} tokens, got {sum(map(len, texts))}")
    except Exception as error:  # a provider that fails must not stop the others
        return Result(name, provider, [], failure=explain(error))
    some, all_of_them = (Spread.of(seconds).median for seconds in times.values())
    step = (all_of_them - some) / (work.new - few)
    return Result(
        name, provider, times[work.new], times[few], work.rows * work.new / all_of_them, 1e3 * step,
        bound(model, work, few, bandwidth) / step,
        (torch.cuda.max_memory_allocated() - weights) / 2**20 if device == "cuda" else None,
    )  # fmt: skip


def markdown(header: dict[str, Any], results: Sequence[Result]) -> str:
    lines = [
        "# Sampling", "", where(header), "",
        f"{header['rows']} prompts of {header['prompt']} tokens, {header['new']} new ones each, random weights in "
        f"{header['dtype']}, temperature 1; medians of {header['rounds']} rounds. Tokens/s: with the prompts. A step: "
        f"what all tokens take longer than {FEW}, over their difference. Of the bound: the time in which weights, keys "
        f"and values would be read once, at the rate of a copy ({header['bandwidth'] / 1e12:.2f} TB/s), over a step's. "
        "MiB: allocated above the weights.", "",
    ]  # fmt: skip
    cells = [
        [f"{r.model}, {PROVIDERS[r.provider][0]}", r.failure, "", "", ""] if r.failure else
        [f"{r.model}, {PROVIDERS[r.provider][0]}", f"{r.tokens_per_second:,.0f}", f"{r.step_ms:.2f}",
         f"{r.of_bound:.3f}", "" if r.peak_mib is None else f"{r.peak_mib:,.0f}"]
        for r in results
    ]  # fmt: skip
    return "\n".join([*lines, *table(["", "tokens/s", "ms a step", "of the bound", "MiB"], cells)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the .md and the .json")
    parser.add_argument("--models", default="*", help=f"comma-separated names or globs of {', '.join(MODELS)}")
    parser.add_argument("--providers", default="*", help=f"comma-separated names or globs of {', '.join(PROVIDERS)}")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--time-limit", type=float, default=480, help="seconds after which nothing is begun (480)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, fp32, few tokens")
    options = parser.parse_args(arguments)
    models = matching(options.models, MODELS, "model", parser)
    providers = matching(options.providers, list(PROVIDERS), "provider", parser)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    work = Workload(3, 5, 9) if options.tiny else Workload(options.rows, options.prompt, options.new)
    device = torch.device(options.device)
    bandwidth = 1e9 * Roofline.measure(Stopwatch(device), device).copy_gbs
    until = time.monotonic() + options.time_limit
    command = shlex.join(["python", "-m", "benchmarks.sampling", *without_output(arguments)])
    header = {
        **provenance(PACKAGES), "command": command,
        **asdict(work), "rounds": options.rounds, "dtype": "fp32" if options.tiny else "bf16", "bandwidth": bandwidth,
    }  # fmt: skip
    results: list[Result] = []
    for name in (name for name in MODELS if name in models):
        for provider in (provider for provider in PROVIDERS if provider in providers):
            if time.monotonic() > until:
                results.append(Result(name, provider, [], failure="not run: the time was over"))
                continue
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            results.append(measure(name, provider, work, options, bandwidth))
            release_memory()
            print(json.dumps(asdict(results[-1])), flush=True)
            if options.output:
                path = options.output / f"sampling-{'tiny' if options.tiny else slug(header['device'])}"
                write(path, {"header": header, "results": list(map(asdict, results))}, markdown(header, results))
    print(markdown(header, results))
    return int(any(result.failure and result.provider.startswith("ours") for result in results))


if __name__ == "__main__":
    sys.exit(main())
