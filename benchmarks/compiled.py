"""Forward and backward of a whole model: plain and patched, each eager and under torch.compile, and Liger-Kernel.

    python -m benchmarks.compiled --output DIR       # on a GPU: DIR/compiled.json and .md
    python -m benchmarks.compiled --tiny             # small enough for a CPU: does it still work

Each provider has a process of its own; they take turns on the device. First a gate: loss, gradient norm and a sample of
the gradients of every provider in bf16 against the plain model in fp32, on the batch that is measured. Ours may err at
most twice as much as the plain model in bf16, else no time is reported. Compilation happens there, all at once. Then
rounds in which each provider in turn runs one untimed step and STEPS timed ones.
"""

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from .processes import Benchmark, Provider, Result, build_all, main, say, truth_of

TOKENS = 8192
ROUNDS, STEPS = 4, 4
SECONDS = 125  # no round but a shape's first starts later than this after the start
SAMPLE = 4096  # gradients of each parameter that are compared one by one
MIB = 2**20
PACKAGES = ("torch", "triton", "transformers", "liger-kernel")

COMMON = {
    "attn_implementation": "sdpa", "tie_word_embeddings": True, "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip
# name: (configuration class, rows of the batch, sizes)
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Qwen3-0.6B": ("Qwen3Config", 8, {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "Llama-3.2-1B": ("LlamaConfig", 4, {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    }),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
PROVIDERS = {
    "plain": "transformers", "plain_compiled": "transformers, torch.compile", "liger": "Liger-Kernel",
    "ours": "liger-trainer", "ours_compiled": "liger-trainer, torch.compile",
}  # fmt: skip


class Worker:
    """One provider, in its own process: a model, and steps of it."""

    def __init__(self, provider: str, tiny: bool):
        self.provider, self.tiny = provider, tiny
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = None
        self.call: Any = None

    def build(self, shape: str) -> float:
        """Make the model and its batch. Returns a number that depends on every weight."""
        import transformers

        self.model = self.call = None
        torch.compiler.reset()
        gc.collect()  # an earlier model's cycles, which would be taken for this one's weights
        config_name, rows, sizes = SHAPES[shape]
        config = getattr(transformers, config_name)(**COMMON, **{**sizes, **(TINY if self.tiny else {})})
        torch.manual_seed(0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        generator = torch.Generator().manual_seed(1)
        length = 16 if self.tiny else TOKENS // rows
        self.ids = torch.randint(config.vocab_size, (rows, length), generator=generator).to(self.device)
        if self.provider == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        elif self.provider.startswith("ours"):
            from liger_trainer.patching.patcher import patch

            print(patch(model).report, file=sys.stderr)
        self.model = self.call = model
        if self.provider.endswith("compiled"):
            self.call = torch.compile(model, dynamic=False, backend="aot_eager" if self.tiny else "inductor")
        return sum(p.double().sum().item() for p in model.parameters())

    def _loss(self, ids: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        loss = self.call(input_ids=ids, labels=ids).loss * share
        loss.backward()
        return loss.detach()

    def _results(self, loss: torch.Tensor) -> dict[str, Any]:
        """Loss, norm of all gradients, and every n-th of each parameter's. Takes the gradients off the model."""
        norms, samples = [], []
        for parameter in self.model.parameters():
            gradient = parameter.grad.flatten()
            norms.append(gradient.double().norm() if self.device == "cpu" else gradient.float().norm().double())
            samples.append(gradient[:: max(1, gradient.numel() // SAMPLE)].float())
        self.model.zero_grad(set_to_none=True)
        norm = torch.stack(norms).norm()
        return {"loss": loss.item(), "gradient norm": norm.item(), "gradients": torch.cat(samples).cpu()}

    def truth(self, shape: str, path: str) -> None:
        """Results of the model in fp32, row by row to save memory, written to `path`. Builds the model anew after."""
        torch.backends.cuda.matmul.allow_tf32 = False
        self.model.float()
        losses = [self._loss(row[None], 1 / len(self.ids)) for row in self.ids]  # rows have equally many labels
        torch.save(self._results(torch.stack(losses).sum()), path)
        self.build(shape)
        self._empty_cache()

    def gate(self, path: str) -> dict[str, float]:
        """Relative errors."""
        truth, got = torch.load(path), self._results(self._loss(self.ids))
        self._empty_cache()
        want = truth["gradients"]
        sample = (got["gradients"] - want).norm() / want.norm()
        errors = {name: abs(got[name] / truth[name] - 1) for name in ("loss", "gradient norm")}
        return {**errors, "gradients": sample.item()}

    def measure(self, shape: str) -> dict[str, Any]:
        """Milliseconds of STEPS steps, peak MiB above the weights, and the loss."""
        cuda = self.device == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        loss = self._step()[1]  # untimed
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ms = [self._step()[0] for _ in range(STEPS)]
        peak = (torch.cuda.max_memory_allocated() - before) / MIB if cuda else None
        self._empty_cache()
        return {"ms": ms, "peak_mib": peak, "loss": loss}

    def _step(self) -> tuple[float, float]:
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        loss = self._loss(self.ids)
        synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        self.model.zero_grad(set_to_none=True)
        return elapsed, loss.item()

    def _empty_cache(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()  # the next provider needs it


def check(shape: str, providers: dict[str, Provider]) -> list[Result]:
    results = build_all(shape, providers.values(), [shape])
    say(shape, "built")
    with truth_of(providers["plain"], shape) as path:
        say(shape, "truth in fp32 computed")
        _pass_gate([result for result in results if result.failure is None], providers, path)
    say(shape, "compiled, and held against the truth")
    return results


def _pass_gate(results: Sequence[Result], providers: dict[str, Provider], path: str) -> None:
    """Those that compile do so together; the others, which need more memory, one after another."""
    compiling = [result for result in results if result.provider.endswith("compiled")]
    for result in compiling:
        providers[result.provider].start("gate", path)
    for result in compiling:
        result.errors, result.failure = providers[result.provider].result()
    for result in (r for r in results if r not in compiling):
        result.errors, result.failure = providers[result.provider].call("gate", path)


BENCHMARK = Benchmark(
    name="compiled",
    title="Whole models, with and without torch.compile",
    what="Forward and backward in bf16, {tokens} tokens, sdpa, random weights. Median of {rounds} interleaved rounds "
    f"of {STEPS} steps; peak MiB above weights, gradients included. Errors: relative, against the plain model in fp32; "
    "gradients by a sample.",
    doc=__doc__,
    worker=Worker,
    shapes=list(SHAPES),
    providers=PROVIDERS,
    reference="plain",
    packages=PACKAGES,
    batch=lambda tiny: {"tokens": "few" if tiny else TOKENS},
    columns=("ms", "MiB", "loss error", "norm error", "gradient error"),
    check=check,
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
