"""PyTorch's FlashAttention over packed rows, in bf16 on a GPU, beside documents one by one in fp32."""

import copy

import pytest
import torch
import transformers
from packed import SquareTensors, documents, packed
from recorders import calls_of
from tiny import named_gradients

from liger_trainer.common.replacements import Replacements
from liger_trainer.patching.options import PatchReport
from liger_trainer.patching.packing import packed_attention as flash
from liger_trainer.patching.packing.document_mask import Documents
from liger_trainer.patching.packing.packed_attention import pack_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB = 512
SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
         "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 128}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 64, "sliding_window": 40, "attn_logit_softcapping": 20.0}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 256, "sliding_window": 40, "num_hidden_layers": 6}),
}
CUTS = {"some": (70, 1, 130, 33, 266), "one": (500,), "300": tuple(3 + i % 11 for i in range(300))}


def models(family, dtype=torch.bfloat16):
    """The model in bf16 with packed attention, in bf16 as it is, and in fp32."""
    config, options = FAMILIES[family]
    torch.manual_seed(0)
    truth = transformers.AutoModelForCausalLM.from_config(config(**{**SIZES, **options})).cuda()
    plain = copy.deepcopy(truth).to(dtype)
    ours = copy.deepcopy(plain)
    pack_attention(ours, Replacements(), PatchReport(family))
    return ours, plain, truth


def step(model, rows):
    """Loss and gradients of documents, each read alone."""
    count = sum(len(row) - 1 for row in rows)
    losses = [model(row[None].cuda(), labels=row[None].cuda(), use_cache=False).loss * (len(row) - 1)
              for row in rows if len(row) > 1]  # fmt: skip
    loss = torch.stack(losses).sum() / count
    return loss.detach(), named_gradients(model, loss)


def errors(got, want):
    """Relative error of each gradient."""
    return {name: ((got[name].float() - want[name]).norm() / want[name].norm()).item() for name in want}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_are_documents_one_by_one(monkeypatch, family, cut, checkpointing):
    ours, plain, truth = models(family)
    rows = documents(CUTS[cut], VOCAB)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    calls = calls_of(monkeypatch, flash, "attend")
    batch = packed(rows, "cuda")
    with SquareTensors(sum(CUTS[cut])) as squares:
        loss = ours(**batch, use_cache=False).loss
    assert len(calls) == ours.config.num_hidden_layers and not squares.operations
    got = named_gradients(ours, loss)
    (wanted, exact), (_, rounded) = step(truth, rows), step(plain, rows)
    assert abs(loss.item() - wanted.item()) < 2e-2 * wanted.item()
    ours_off, plain_off = errors(got, exact), errors(rounded, exact)
    for name, off in ours_off.items():
        assert off <= 2 * plain_off[name] + 1e-2, (name, off, plain_off[name])


def test_a_changed_document_moves_no_other():
    ours, _, _ = models("gemma3")
    lengths = CUTS["some"]
    rows = documents(lengths, VOCAB)
    with torch.no_grad():
        before = ours(**packed(rows, "cuda"), use_cache=False).logits.split(lengths, 1)
        for changed in (0, 2, 4):
            others = [row.flip(0) if i == changed else row for i, row in enumerate(rows)]
            after = ours(**packed(others, "cuda"), use_cache=False).logits.split(lengths, 1)
            moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert moved == [i == changed for i in range(len(rows))]


@pytest.mark.parametrize("window", [None, 17])
def test_repeated_ends_are_empty_documents(window):
    """As a tensor of fixed size for CUDA graphs is filled up."""
    torch.manual_seed(0)
    lengths = torch.tensor([30, 1, 90, 7])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
    filled = torch.cat([ends, ends[-1:].expand(29)])
    q, k, v = (torch.randn(1, heads, 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    results = []
    for each, longest in ((ends, 90), (filled, 90), (filled, 128)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash.attend(*leaves, Documents(each, longest), {"scaling": 0.1}, window=window)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        results.append([out, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            assert bool(b.isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_and_fp32(monkeypatch, family):
    """fp32 weights: under autocast FlashAttention, else one document after the other, exact."""
    _, plain, truth = models(family)
    ours = copy.deepcopy(truth)
    pack_attention(ours, Replacements(), PatchReport(family))
    rows = documents(CUTS["some"], VOCAB)
    calls = calls_of(monkeypatch, flash, "attend")
    loss = ours(**packed(rows, "cuda"), use_cache=False).loss
    wanted, exact = step(truth, rows)
    assert not calls and max(errors(named_gradients(ours, loss), exact).values()) < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        loss = ours(**packed(rows, "cuda"), use_cache=False).loss
        _, rounded = step(truth, rows)
    assert len(calls) == ours.config.num_hidden_layers
    limits = errors(rounded, exact)
    for name, off in errors(named_gradients(ours, loss), exact).items():
        assert off <= 2 * limits[name] + 1e-2, (name, off, limits[name])


def test_dropout_is_of_attention_s_probabilities():
    """Values that are 1 give 1 in the mean, and each document's draws are its own."""
    ends = torch.tensor([0, 500, 512], dtype=torch.int32, device="cuda")
    q, k = (torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones_like(q)
    v[:, :, 500:] = 0
    out = flash.attend(q, k, v, Documents(ends, 500), {"dropout": 0.2}).float()
    assert out[:, 500:].abs().max() == 0
    assert abs(out[:, 100:500].mean().item() - 1) < 0.02 and out[:, 100:500].std() > 0.01
