"""Distillation against an oracle: the teacher is a source whose next-token distribution is known exactly.

It is an order-2 Markov source over 32 tokens with a flat tail. Students that see the same sequences in the same order
differ only in their loss. Their score is KL(truth || student) over all tokens, which no real teacher can tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.teachers.base import teacher_logits
from liger_trainer.teachers.cache.reader import TeacherReader
from liger_trainer.teachers.cache.records import RecordFormat
from liger_trainer.teachers.row_keys import row_key

V, LENGTH, BATCH = 32, 18, 16
FLAT = 0.3  # of the mass lies evenly on all tokens, so a few entries lack much of it


class MarkovConfig(PreTrainedConfig):
    model_type = "markov"


class MarkovSource(PreTrainedModel):
    """A causal LM whose logits are the log-probabilities of the next token after each two tokens, (V, V, V)."""

    config_class = MarkovConfig

    def __init__(self, seed: int):
        super().__init__(MarkovConfig(vocab_size=V))
        generator = torch.Generator().manual_seed(seed)
        of_either = torch.randn(V, 1, V, generator=generator) + torch.randn(1, V, V, generator=generator)
        of_both = torch.randn(V, V, V, generator=generator)
        peaked = (6.0 * (0.55 * of_either + 0.63 * of_both)).softmax(-1)
        self.log_probs = nn.Parameter(((1 - FLAT) * peaked + FLAT / V).log())
        self.lm_head = nn.Linear(V, V, bias=False)
        nn.init.eye_(self.lm_head.weight)
        self.requires_grad_(False).eval()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids: Tensor, **_):
        before = input_ids.roll(1, -1)  # of the first token there is none: it is not supervised
        return CausalLMOutput(logits=self.lm_head(self.log_probs[before, input_ids]))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, LENGTH) token ids."""
        ids = [torch.randint(V, (count,), generator=generator) for _ in range(2)]
        while len(ids) < LENGTH:
            ids.append(torch.multinomial(self.log_probs[ids[-2], ids[-1]].exp(), 1, generator=generator)[:, 0])
        return torch.stack(ids, 1)


def aligned(ids: Tensor) -> Tensor:
    """(batch * LENGTH,) what each position predicts; the first and the last nothing."""
    labels = torch.full_like(ids, -100)
    labels[:, 1:-1] = ids[:, 2:]
    return labels.flatten()


@dataclass(frozen=True)
class Batch:
    """The input of a loss: hidden states (N, H) and head of the student, labels (N,), and the source of the tokens."""

    hidden: Tensor
    head: Tensor
    labels: Tensor
    source: MarkovSource
    ids: Tensor
    seed: int
    step: int
    steps: int


def full(**how) -> Callable[[Batch], Tensor]:
    """A loss against the whole distribution, from the source's own deferred logits."""

    def loss(batch: Batch) -> Tensor:
        taught = teacher_logits(batch.source, batch.source, input_ids=batch.ids)
        assert isinstance(taught, DeferredLogits)
        teacher = taught.hidden.flatten(0, -2), taught.head.weight
        return linear_divergence(batch.hidden, batch.head, *teacher, labels=batch.labels, **how).loss

    return loss


def cached(kind, entries: int, draws: int = 0, renormalised: bool = False) -> Callable[[Batch], Tensor]:
    """A loss against what a cache of the source holds. Likeliest tokens divided by their sum are made only here."""
    form = RecordFormat(kind, entries, 16, V, draws)

    def loss(batch: Batch) -> Tensor:
        known = form.decode(captured(form, batch.seed, batch.steps)[batch.step])
        log_probs, tail = known.log_probs, form.tail
        if renormalised:
            log_probs, tail = log_probs.log_softmax(-1), "none"
        keep = batch.labels != -100
        return linear_sparse_divergence(batch.hidden[keep], batch.head, known.ids, log_probs, tail=tail).loss

    return loss


@cache
def captured(form: RecordFormat, seed: int, steps: int) -> Tensor:
    """(steps, tokens, bytes): the records of all batches, in one pass of the source."""
    source, data = source_and_data(seed, steps)
    rows = [(ids, labels.roll(1)) for ids, labels in zip(data, aligned(data).view(data.shape), strict=True)]
    records = TeacherReader(source, form, seed=seed).read([row_key(ids, labels) for ids, labels in rows], rows)
    return torch.stack(records).view(steps, -1, form.bytes)


ARMS = {
    "ce": full(kind={"forward_kl": 0.0}, ce_weight=1.0),
    "forward_kl": full(kind="forward_kl"),
    "jsd": full(kind="jsd"),
    "reverse_kl": full(kind="reverse_kl"),
    "top-4 and tail": cached("topk", 4),
    "top-4, renormalised": cached("topk", 4, renormalised=True),
    "top-4, 8 draws": cached("topk", 4, draws=8),
    "12 draws": cached("sampled", 12),
}


def trained(arm: str, seed: int, steps: int, layers: int) -> LlamaForCausalLM:
    source, data = source_and_data(seed, steps)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2,
    }  # fmt: skip
    student = LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(student.parameters(), lr=8e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, steps, pct_start=0.1)
    for step, ids in enumerate(data.split(BATCH)):
        hidden = student.model(ids, use_cache=False).last_hidden_state.flatten(0, -2)
        batch = Batch(hidden, student.lm_head.weight, aligned(ids), source, ids, seed, step, steps)
        ARMS[arm](batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return student


@cache
def source_and_data(seed: int, steps: int) -> tuple[MarkovSource, Tensor]:
    source = MarkovSource(seed)
    return source, source.sample(BATCH * steps, torch.Generator().manual_seed(seed))


@torch.no_grad()
def true_kl(student: PreTrainedModel, source: MarkovSource, seed: int) -> float:
    """Over sequences that the student has not seen."""
    ids = source.sample(128, torch.Generator().manual_seed(1000 + seed))
    keep = aligned(ids) != -100
    log_q, log_p = (model(input_ids=ids).logits.flatten(0, -2)[keep].log_softmax(-1) for model in (student, source))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def mean_kl(arms: list[str], steps: int, seeds: int, layers: int) -> dict[str, float]:
    def of_seed(arm: str, seed: int) -> float:
        return true_kl(trained(arm, seed, steps, layers), source_and_data(seed, steps)[0], seed)

    by_arm = {arm: [of_seed(arm, seed) for seed in range(seeds)] for arm in arms}
    for arm, values in by_arm.items():
        print(f"{arm:20} {sum(values) / seeds:.3f}   {'  '.join(f'{value:.3f}' for value in values)}")
    return {arm: sum(values) / seeds for arm, values in by_arm.items()}


@pytest.mark.slow
def test_what_is_known_of_the_teacher_decides_what_is_learnt():
    arms = ["ce", "forward_kl", "top-4 and tail", "top-4, renormalised", "top-4, 8 draws", "12 draws"]
    kl = mean_kl(arms, steps=70, seeds=1, layers=1)
    assert kl["forward_kl"] < 0.85 * kl["ce"]
    assert kl["top-4, 8 draws"] < 1.03 * kl["forward_kl"]
    assert kl["12 draws"] < 1.1 * kl["forward_kl"]
    assert kl["12 draws"] < kl["top-4 and tail"] < 0.98 * kl["top-4, renormalised"]
    assert kl["top-4 and tail"] < 0.9 * kl["ce"]


@pytest.mark.slow
def test_the_order_of_all_losses_after_longer_training():
    kl = mean_kl(list(ARMS), steps=400, seeds=4, layers=2)
    assert kl["forward_kl"] < 0.8 * kl["ce"]
    assert kl["12 draws"] < 1.1 * kl["forward_kl"]
    order = ["forward_kl", "jsd", "reverse_kl", "ce", "top-4, renormalised"]
    assert sorted(order, key=kl.__getitem__) == order
    assert kl["12 draws"] < kl["top-4 and tail"] < kl["ce"]


def test_the_source_as_a_teacher_is_exact():
    source, data = source_and_data(0, 1)
    taught = teacher_logits(source, source, input_ids=data)
    log_p = source.log_probs[data[:, :-1], data[:, 1:]]
    assert isinstance(taught, DeferredLogits)
    torch.testing.assert_close(taught.compute()[:, 1:], log_p, rtol=0, atol=0)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(log_p.shape[:-1]))
