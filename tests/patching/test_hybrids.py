"""Models with layers beside attention: packed rows are the sum over single documents, in loss and gradients."""

import builtins
import copy
import inspect
import sys

import pytest
import torch
from families import build
from packed import documents, packed
from quick_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.extras import delta_rule_gradients
from liger_trainer.patching.packing import token_mixers
from liger_trainer.patching.packing.packed_attention import documents_of
from liger_trainer.patching.packing.packed_rows import PackedRows, patch_packed_attention, why_documents_mix

try:  # before the fixture that turns the interpreter off, which Triton asks where it reads a kernel
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
except ImportError:
    chunk_gated_delta_rule = None

LENGTHS = (5, 1, 2, 70, 64, 3)
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": DELTA,
    "olmo_hybrid": DELTA,
}
MAMBA = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "nemotron_h": {},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
}
ALL = FAMILIES | MAMBA
QUICK = ("lfm2", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "zamba2")  # one for each way through our code
RULED = [name for name, overrides in FAMILIES.items() if overrides is DELTA]
RULE = "torch_chunk_gated_delta_rule"


def tiny(family):
    model = build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], **{"num_hidden_layers": 2} | ALL[family])
    if isinstance(model, str):
        pytest.skip(model)
    if not any(token_mixers._mixers_of(type(module)) for module in model.modules()):
        pytest.skip("this transformers calls no function for its convolutions")
    return model.train()


def outcome(model, batches):
    """The sum of the loss over all tokens with a label, and its gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        count = (batch["labels"][:, 1:] != -100).sum()
        if count:
            loss = model(**batch, use_cache=False).loss * count
            loss.backward()
            total += loss.item()
    return torch.tensor(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance=1e-4):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert got[1].keys() == want[1].keys()
    largest = max(gradient.norm() for gradient in want[1].values())  # a router's own may be all rounding
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7 * largest, name


def single(rows):
    return [{"input_ids": row[None], "labels": row[None]} for row in rows]


def assert_as_before(model):
    """Rows without packing give what they gave, patched and afterwards. Return what was swapped."""
    rows = torch.stack(documents([9, 9], 50)) + 4
    batches = [{"input_ids": rows, "labels": rows}]
    want = outcome(model, batches)
    with patch(model) as patched:
        assert_same(outcome(model, batches), want)
    assert_same(outcome(model, batches), want)
    return patched.report.swapped


def scanning(family):
    model = tiny(family)
    scans = [name for module in model.modules() for name in token_mixers._mixers_of(type(module)) if "scan" in name]
    if not scans:
        pytest.skip("this transformers calls no function for its scan")
    return model, len(scans)


@pytest.mark.parametrize("family", slow_but(ALL, *QUICK))
def test_unpacked_rows_are_as_before(with_rule, family):
    if family in MAMBA:
        model, scans = scanning(family)
        assert assert_as_before(model)["Mamba-2 scan"] == scans
    else:  # transformers' own rule dies on a CPU where fla-core is installed
        assert assert_as_before(with_rule(family, None))["causal conv"] == 1


@pytest.mark.parametrize("family", slow_but(["lfm2", "lfm2_moe", *MAMBA], "lfm2", *(set(QUICK) & set(MAMBA))))
def test_packed_rows_are_the_sum_over_documents(family):
    model = scanning(family)[0] if family in MAMBA else tiny(family)
    rows = [row + 4 for row in documents(LENGTHS, 50)]
    want = outcome(model, single(rows))
    assert family not in MAMBA or "mamba2_chunk_scan" in why_documents_mix(model, by_lengths=True)
    patched = patch(model)
    patch_packed_attention(model, patched, PackedRows())
    assert_same(outcome(model, [packed(rows)]), want)


def test_without_our_convolution_packing_is_refused():
    model = tiny("lfm2")
    assert "causal_conv1d" in why_documents_mix(model, by_lengths=True)
    with patch(model, hybrids=False) as patched, pytest.raises(ConfigError, match="type conv"):
        patch_packed_attention(model, patched, PackedRows())
    with patch(model) as patched, pytest.raises(ConfigError, match="type conv"):  # told by positions alone
        patch_packed_attention(model, patched, PackedRows(by_lengths=False))


def test_what_is_no_causal_convolution_is_left_alone():
    def doubled(hidden_states, weight, bias=None, activation=None):
        shifted = torch.nn.functional.pad(hidden_states, (3, 0)).unfold(2, 4, 1)
        y = 2 * (shifted * weight[:, None]).sum(-1)
        y = y if bias is None else y + bias[:, None]
        return y if activation is None else torch.nn.functional.silu(y)

    def exact(hidden_states, weight, bias=None, activation=None):
        return doubled(hidden_states, weight / 2, bias, activation)

    assert "no causal convolution" in token_mixers.why_no_conv(doubled)
    assert token_mixers.why_no_conv(exact) is None


def test_copies_of_a_patched_model_convolve_by_our_op():
    model = tiny("lfm2")
    patched = patch(model)
    clone = copy.deepcopy(model)
    patched.undo()
    patch_packed_attention(clone, clone._liger_patched, PackedRows())
    assert why_documents_mix(clone, by_lengths=True) is None and why_documents_mix(model, by_lengths=True)


# The gated delta rule. fla-core is optional: without it, one of its form stands in.


def stand_in(plain):
    """A function that is called like fla-core's, and reads documents by its chunks."""

    def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None, chunk_indices=None, **how):
        assert q.shape[0] == 1 or cu_seqlens is None
        if cu_seqlens is None:
            return plain(q, k, v, g, beta, **how)
        wanted = [(d, i) for d, n in enumerate(cu_seqlens.diff().tolist()) for i in range(-(-n // 64))]
        assert [tuple(chunk) for chunk in chunk_indices.tolist()][: len(wanted)] == wanted
        assert cu_seqlens[-1] == cu_seqlens[-2] and (chunk_indices[len(wanted) :, 0] == len(cu_seqlens) - 2).all()
        ends = cu_seqlens.unique().tolist()
        parts = [[x[:, a:b] for x in (q, k, v, g, beta)] for a, b in zip(ends, ends[1:], strict=False)]
        return torch.cat([plain(*part, **how)[0] for part in parts], 1), None

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    return chunk_gated_delta_rule


def bound(plain, implementation, is_new_implementation=True):
    """As transformers' decorator binds a kernel to its function."""

    def wrapped(*args, **kwargs):
        return (implementation if is_new_implementation else plain)(*args, **kwargs)

    wrapped.__wrapped__ = plain
    wrapped.__name__ = plain.__name__
    return wrapped


@pytest.fixture
def interpreted(request, monkeypatch):
    """Of a test with `fla_core`: its kernels."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("make") is fla_core:
        if chunk_gated_delta_rule is None or torch.cuda.is_available():
            pytest.skip("fla-core is not installed, or Triton's interpreter is off")
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def with_rule(monkeypatch, interpreted):
    """Return a function that gives the tiny model of a family, whose delta rule runs `make(plain)`; None: plain."""

    def model_with(family, make):
        model = tiny(family)
        for place in {sys.modules[type(module).__module__] for module in model.modules()}:
            if RULE in vars(place):
                plain = inspect.unwrap(getattr(place, RULE))
                monkeypatch.setattr(place, RULE, bound(plain, make(plain) if make else plain, make is not None))
        token_mixers._mixers_of.cache_clear()
        monkeypatch.setattr(token_mixers, "is_interpreted", lambda: True)  # fla-core runs, or what stands in for it
        return model

    yield model_with
    token_mixers._mixers_of.cache_clear()


def fla_core(plain):
    """The real one, under Triton's interpreter, which has no tuning, and whose loops count in numbers of Python."""
    from fla.ops.common import chunk_delta_h  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner

    class Index(int):
        def to(self, _):
            return self

    def first_of_all(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    Autotuner.run = first_of_all
    chunk_delta_h.range = lambda *ends: map(Index, builtins.range(*map(int, ends)))
    return chunk_gated_delta_rule


WITHIN = {stand_in: 1e-4, fla_core: 2e-3}  # fla-core rounds more: 2e-4 of A_log's gradient


@pytest.mark.parametrize("make", WITHIN)
@pytest.mark.parametrize("family", RULED)
def test_packed_delta_rules_are_the_sum_over_documents(with_rule, family, make):
    plain = with_rule(family, None)
    rows = [row + 4 for row in documents((3, 1, 2, 70), 50)]
    want = outcome(plain, single(rows))
    model = with_rule(family, make)
    model.load_state_dict(plain.state_dict())
    patched = patch(model)
    assert patched.report.swapped["delta rule"] == 1
    patch_packed_attention(model, patched, PackedRows())
    assert_same(outcome(model, [packed(rows)]), want, WITHIN[make])
    same = torch.stack(rows[3:4] * 2)
    want = outcome(plain, single(list(same)))
    assert_same(outcome(model, [{"input_ids": same, "labels": same}]), want, WITHIN[make])


QWEN4 = {
    **DELTA, "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2, "ple_layer_ids": [1],
    "ngram_vocab_size_base": 101,
}  # fmt: skip


@pytest.fixture
def qwen4(monkeypatch):
    """The name of a family with n-grams of tokens, whose indexer rotates queries without keys."""
    family = "qwen4_exp_text"
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("this transformers has no Qwen4-Exp")
    monkeypatch.setitem(ALL, family, QWEN4)
    return family


def test_n_grams_across_documents_are_refused(with_rule, qwen4):
    model = with_rule(qwen4, stand_in)
    patched = patch(model)
    with pytest.raises(ConfigError, match="layers of type linear_attention take no lengths of documents"):
        patch_packed_attention(model, patched, PackedRows())


def test_queries_that_are_rotated_without_keys_are_as_before(with_rule, qwen4):
    assert any(name.endswith("rope") for name in assert_as_before(with_rule(qwen4, None)))


def test_without_fla_delta_rules_stay_and_packing_is_refused(with_rule):
    model = with_rule("qwen3_5_text", None)
    patched = patch(model)
    assert "pip install fla-core einops" in patched.report.reasons and "delta rule" not in patched.report.swapped
    with pytest.raises(ConfigError, match="pip install fla-core einops"):
        patch_packed_attention(model, patched, PackedRows())


def test_a_gpu_on_which_fla_refuses_its_backward_takes_plain_torch(with_rule, monkeypatch):
    plain = with_rule("qwen3_5_text", None)
    rows = torch.stack(documents([70, 70], 50)) + 4
    batches = [{"input_ids": rows, "labels": rows}]
    want = outcome(plain, batches)

    def refusing(plain):
        def chunk_gated_delta_rule(*args, **kwargs):
            raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")

        chunk_gated_delta_rule.__module__ = "fla.ops"
        return chunk_gated_delta_rule

    model = with_rule("qwen3_5_text", refusing)
    model.load_state_dict(plain.state_dict())
    token_mixers.refused.cache_clear()
    monkeypatch.setattr(delta_rule_gradients, "register_gradients", lambda: False)  # as before fla-core 0.6
    monkeypatch.setattr(token_mixers, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    try:
        assert "pip install 'fla-core>=0.6'" in token_mixers.refused()
    finally:
        monkeypatch.undo()
        reason = token_mixers.refused()
    monkeypatch.setattr(token_mixers, "refused", lambda: reason)
    model = with_rule("qwen3_5_text", refusing)
    model.load_state_dict(plain.state_dict())
    patched = patch(model)
    assert reason in patched.report.reasons and "delta rule" not in patched.report.swapped
    assert_same(outcome(model, batches), want)
    with pytest.raises(ConfigError, match="fla-core>=0.6"):
        patch_packed_attention(model, patched, PackedRows())


class HostReads(TorchDispatchMode):
    """Refuses what waits for the device, and so cannot be recorded in a CUDA graph."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "repeat_interleave")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda plain: lambda q, k, v, g, beta, **how: (v * beta[..., None], None), fla_core])
def test_delta_rules_over_documents_read_nothing_on_the_host(make, interpreted, monkeypatch):
    def torch_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64):
        raise AssertionError

    monkeypatch.setattr(token_mixers, "is_interpreted", lambda: True)

    rule = token_mixers.delta_rule(bound(torch_chunk_gated_delta_rule, make(None)), by_fla=True)
    x, ends = torch.randn(1, 70, 2, 16).requires_grad_(), torch.tensor([0, 3, 70, 70], dtype=torch.int32)
    with HostReads():
        y = rule(x, x, x, -x[..., 0].exp(), x[..., 1].sigmoid(), cu_seqlens=ends, use_qk_l2norm_in_kernel=True)[0]
        y.sum().backward()
    assert y.shape == x.shape and x.grad.isfinite().all()


def test_lengths_in_the_same_tensor_are_read_again():
    ends = torch.tensor([0, 3, 70], dtype=torch.int32)
    before = token_mixers.chunks_of(documents_of(ends, {}), 70, ends.device)
    assert before is token_mixers.chunks_of(documents_of(ends, {}), 70, ends.device)
    ends.copy_(torch.tensor([0, 65, 70]))
    after = token_mixers.chunks_of(documents_of(ends, {}), 70, ends.device)
    assert after[0].tolist() == [0, 65, 70, 70] and after[1].tolist() == [[0, 0], [0, 1], [1, 0]]
    assert before[1].tolist() == [[0, 0], [1, 0], [1, 1]] and before[0] is not after[0]
