"""Tiny random models of many families, a word tokenizer and small datasets, shared by the tests."""

import contextlib
import copy
import random
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_log_probs import linear_log_probs

VOCAB = 64
SPECIAL = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>"]
WORDS = [f"w{i}" for i in range(VOCAB - len(SPECIAL))]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant> ' }}"
    "{% generation %}{{ m['content'] + ' <eos> ' }}{% endgeneration %}"
    "{% else %}{{ '<user> ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "pad_token_id": VOCAB - 4,
    "eos_token_id": VOCAB - 3,
}  # fmt: skip

# name: (configuration class, its options besides SIZES). Caps and scales so strong that leaving them out shows.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    # eager, as transformers from 5.17 on has it by itself
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 8, "attn_implementation": "eager"},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "final_logit_softcapping": 1.5, "sliding_window": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.5, "embedding_multiplier": 2.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3}),
    "gpt2": ("GPT2Config", {"n_inner": 48, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
}


def tiny_model(
    family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides
) -> PreTrainedModel:
    """A model in eval mode whose weights are large enough that every part of it matters to the loss."""
    config_name, options = FAMILIES[family]
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or k != "num_key_value_heads"}
    config = getattr(transformers, config_name)(**{**sizes, **options, **overrides})
    torch.manual_seed(seed)
    # Not grouped products, which know no fp64.
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return spread_weights(model, seed).to(dtype).eval()


def spread_weights(model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([*WORDS, *SPECIAL])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def completions(n: int = 24, seed: int = 0) -> Dataset:
    """Prompts and completions of different lengths."""
    rng = random.Random(seed)
    return Dataset.from_list([{"prompt": _text(rng, 2, 6), "completion": " " + _text(rng, 2, 9)} for _ in range(n)])


def texts(n: int = 24, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    return Dataset.from_list([{"text": _text(rng, 4, 14)} for _ in range(n)])


def chats(n: int = 24, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    roles = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": r, "content": _text(rng, 1, 4)} for r in roles]} for _ in range(n)]
    )


def masked_batch(seed: int = 0, vocab: int = VOCAB, length: int = 11) -> dict[str, Tensor]:
    """Three rows: prompts without labels, padding on the right, holes within."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (3, length), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    labels[0, 5:7] = -100
    mask = torch.ones_like(ids)
    mask[1, -3:] = mask[2, -1:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def padding_free_batch(seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Rows of 5, 2 and 7 tokens behind one another, as TRL's collator makes them."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(n) for n in (5, 2, 7)])[None]
    ids = torch.randint(vocab, positions.shape, generator=generator)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def shift_labels_of(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


class FirstGradients(TrainerCallback):
    """Of the trained parameters, before the first step of the optimizer."""

    def __init__(self):
        self.values = {}

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if not self.values:
            self.values = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def named_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return gradients(model)


def assert_same_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor], rtol: float = 1e-5) -> None:
    """Each within rtol of its norm; where a gradient is zero but for rounding, rtol / 10 of the norm of all."""
    assert got.keys() == want.keys()
    total = torch.stack([g.double().norm() for g in want.values()]).norm()
    assert total > 0
    for name, truth in want.items():
        error = (got[name].double() - truth.double()).norm()
        limit = rtol * truth.double().norm() + rtol / 10 * total
        assert error <= limit, f"gradient of {name}: error {error:.3e}, allowed {limit:.3e}"


def double_copy(model: Any) -> Any:
    return copy.deepcopy(model).double()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) per row, of log-probabilities."""
    return nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def divergence_by_hand(student: Tensor, teacher: Tensor, kind: str, temperature: float, beta: float = 0.5) -> Tensor:
    """Per row, of logits (N, V); not multiplied by temperature^2."""
    q, p = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    m = ((1 - beta) * q.exp() + beta * p.exp()).log()
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def train_args(cls: type, **options) -> Any:
    """Training arguments for a short, plain run on the CPU in fp32."""
    defaults = {
        "output_dir": tempfile.mkdtemp(prefix="liger-trainer-test-"), "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "learning_rate": 3e-3, "bf16": False, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": False,
        "max_grad_norm": 0.0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(**{**defaults, **options})


_VIEWS = {getattr(torch.ops.aten, name) for name in ("t", "transpose", "expand", "view")}


class _VocabularyTensors(TorchDispatchMode):
    """The most rows of any tensor with VOCAB columns that an operation returns."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _VIEWS:  # of the head's weight
            return result
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == VOCAB:
                self.rows = max(self.rows, x.numel() // VOCAB)
        return result


@contextlib.contextmanager
def largest_vocabulary_tensor(monkeypatch, rows: int) -> Iterator[_VocabularyTensors]:
    """Watch for logits, with a workspace of so few rows that a batch does not fit into it."""
    megabytes = rows * VOCAB * 4 / 2**20
    monkeypatch.setitem(linear_cross_entropy.__kwdefaults__, "workspace_mb", megabytes)
    monkeypatch.setitem(linear_log_probs.__kwdefaults__, "workspace_mb", megabytes)
    monkeypatch.setitem(linear_divergence.__kwdefaults__, "workspace_mb", 2 * megabytes)
    with _VocabularyTensors() as seen:
        yield seen
