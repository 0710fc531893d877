"""A LoRA training step of a whole model: PEFT alone, PEFT with Liger-Kernel, PEFT with our patch.

    python -m benchmarks.lora_step --output DIR       # on a GPU: DIR/lora-step.json and .md
    python -m benchmarks.lora_step --tiny             # small enough for a CPU: does it still work

Each provider has a process of its own, since Liger patches module globals; they take turns on the device. First a gate:
loss and adapter gradients of every provider against the plain model in fp32 on a short batch. Ours must err at most
twice as much as PEFT alone, else no time is reported. Then, per case, rounds in which each provider in turn runs one
untimed step and STEPS timed ones: forward, backward, fused AdamW on the adapters.
"""

import gc
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from .processes import Benchmark, Provider, Result, build_all, main, truth_of

RANK, ALPHA, B_STD = 16, 32, 0.02
BATCH, LENGTH, GATE_LENGTH = 4, 2048, 512
ROUNDS, STEPS = 3, 2
SECONDS = 120  # no round but a case's first starts later than this after the start
MIB = 2**20
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel")

COMMON = {
    "attn_implementation": "sdpa",
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("LlamaConfig", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    }),
    "Qwen3-1.7B": ("Qwen3Config", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
# How adapters over a bf16 base are kept, and whether the step runs under autocast.
MODES = {
    "fp32 adapters": (torch.float32, False),  # PEFT's default
    "fp32 adapters, autocast": (torch.float32, True),  # as transformers.Trainer and TRL run it with bf16=True
    "bf16 adapters": (torch.bfloat16, False),  # autocast_adapter_dtype=False
}
PROVIDERS = {"peft": "PEFT", "liger": "PEFT + Liger-Kernel", "ours": "PEFT + liger-trainer"}


@dataclass(frozen=True)
class Case:
    shape: str
    mode: str
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"{self.shape}, {self.mode}{', gradient checkpointing' * self.checkpointing}"


def cases_of(shape: str) -> list[Case]:
    return [Case(shape, mode) for mode in MODES] + [Case(shape, "fp32 adapters, autocast", checkpointing=True)]


class Worker:
    """One provider, in its own process: a model, and steps of it."""

    def __init__(self, provider: str, tiny: bool):
        self.provider, self.tiny = provider, tiny
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = None
        self.initial: dict[str, torch.Tensor] = {}  # the adapters' values
        self.optimizer: Any = None

    def build(self, shape: str) -> float:
        """Make the model with its adapters. Returns a number that depends on every weight."""
        import transformers
        from peft import LoraConfig, get_peft_model

        self.model, self.initial = None, {}
        config_name, sizes = SHAPES[shape]
        config = getattr(transformers, config_name)(**COMMON, **{**sizes, **(TINY if self.tiny else {})})
        torch.manual_seed(0)
        with torch.device(self.device):
            base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        model: Any = get_peft_model(base, lora).train()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # values that bf16 holds too, and B not zero, so that every gradient counts
                parameter.data = parameter.data.float()
                if "lora_B" in name:
                    parameter.data.normal_(std=B_STD)
                self.initial[name] = parameter.data.bfloat16()
        self.model, vocab = model, config.vocab_size
        generator = torch.Generator().manual_seed(1)
        length = (32, 16) if self.tiny else (LENGTH, GATE_LENGTH)
        ids = torch.randint(vocab, (BATCH, length[0]), generator=generator).to(self.device)
        self.batch, self.gate_batch = ids, ids[:1, : length[1]]
        self._apply(base)
        return sum(p.double().sum().item() for p in model.parameters())

    def _apply(self, base: Any) -> None:
        if self.provider == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=base)
        elif self.provider == "ours":
            from liger_trainer.patching.patcher import patch

            print(patch(self.model).report, file=sys.stderr)

    def _prepare(self, case: Case) -> None:
        dtype, self.autocast = MODES[case.mode]
        parameters = dict(self.model.named_parameters())
        for name, value in self.initial.items():
            parameters[name].data, parameters[name].grad = value.to(dtype, copy=True), None
        trained = [parameters[name] for name in self.initial]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=self.device == "cuda")
        if case.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def _gradients(self) -> torch.Tensor:
        """Of all adapters, one after another, taken off the model."""
        parameters = dict(self.model.named_parameters())
        gradients = torch.cat([parameters[name].grad.float().flatten() for name in self.initial])
        self.model.zero_grad(set_to_none=True)
        return gradients

    def truth(self, shape: str, path: str) -> None:
        """Loss and gradients of the model in fp32, written to `path`. Builds the model anew afterwards."""
        torch.backends.cuda.matmul.allow_tf32 = False
        self._prepare(Case(shape, "fp32 adapters"))
        self.model.float()
        loss = self._loss(self.gate_batch)
        torch.save({"loss": loss.item(), "gradients": self._gradients().cpu()}, path)
        self.build(shape)

    def gate(self, case: Case, path: str) -> dict[str, float]:
        """Relative errors of loss and gradients on the short batch."""
        truth = torch.load(path)
        self._prepare(case)
        loss = self._loss(self.gate_batch).item()
        want = truth["gradients"].to(self.device)
        error = (self._gradients() - want).norm() / want.norm()
        return {"loss": abs(loss / truth["loss"] - 1), "gradients": error.item()}

    def measure(self, case: Case) -> dict[str, Any]:
        """Milliseconds of STEPS steps, peak MiB above weights and optimizer, and the loss of the first step."""
        self._prepare(case)
        cuda = self.device == "cuda"
        gc.collect()  # an earlier model's cycles, which would be taken for this one's weights
        before = torch.cuda.memory_allocated() if cuda else 0
        loss = self._step()[1]  # untimed
        before += sum(x.nbytes for state in self.optimizer.state.values() for x in state.values())
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ms = [self._step()[0] for _ in range(STEPS)]
        peak = (torch.cuda.max_memory_allocated() - before) / MIB if cuda else None
        self.optimizer = None
        if cuda:
            torch.cuda.empty_cache()  # the next provider needs it
        return {"ms": ms, "peak_mib": peak, "loss": loss}

    def _step(self) -> tuple[float, float]:
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        loss = self._loss(self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize()
        return 1e3 * (time.perf_counter() - start), loss.item()


def check(shape: str, providers: dict[str, Provider]) -> list[Result]:
    results = build_all(shape, providers.values(), cases_of(shape))
    with truth_of(providers["peft"], shape) as path:
        for result in (r for r in results if r.failure is None):
            result.errors, result.failure = providers[result.provider].call("gate", result.case, path)
    return results


BENCHMARK = Benchmark(
    name="lora-step",
    title="A LoRA training step",
    what=f"Rank {RANK} on all linear layers, bf16 base, {{batch}}x{{length}} tokens, sdpa; forward, backward and "
    f"AdamW. Median of {{rounds}} interleaved rounds of {STEPS} steps; peak MiB above weights and optimizer. Errors: "
    "relative, of loss and adapter gradients, against fp32 on a shorter batch.",
    doc=__doc__,
    worker=Worker,
    shapes=list(SHAPES),
    providers=PROVIDERS,
    reference="peft",
    packages=PACKAGES,
    batch=lambda tiny: {"batch": BATCH, "length": 32 if tiny else LENGTH},
    columns=("ms", "MiB", "of ours: time", "memory", "loss error", "gradient error"),
    check=check,
    rounds=ROUNDS,
    seconds=SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
