"""Attention over packed rows is that of the documents one by one: loss, every gradient, and no mask of the row."""

import copy
import gc
import json
import weakref

import pytest
import torch
import transformers
from packed import SquareTensors, documents, flash_by_definition, packed
from tiny import FAMILIES, VOCAB, assert_same_gradients, named_gradients, spread_weights, tiny_model
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask

from liger_trainer.common.replacements import Replacements
from liger_trainer.compat.recognitions import (
    SHARING_SLICES,
    can_keep_whole,
    compares_with,
    is_attention,
    mask_structure,
)
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.document_attention import document_attention
from liger_trainer.patching.graphs.layer_graphs import flatten
from liger_trainer.patching.options import PatchReport
from liger_trainer.patching.packing import packed_attention as flash
from liger_trainer.patching.packing.document_mask import DocumentMask, Documents, padded_on_the_right
from liger_trainer.patching.packing.packed_attention import NAMES, attention_configs, attention_modules, pack_attention
from liger_trainer.patching.patcher import patch

LENGTHS = (7, 1, 12, 3, 18)  # 12 and 18 are longer than the windows of 8
GPT_OSS = {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}


GEMMA4 = {  # whose last two layers take keys and values of the first two
    "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4, "sliding_window": 8, "num_hidden_layers": 4,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
has_gemma4 = pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="needs transformers with Gemma 4")


@pytest.fixture(autouse=True)
def families(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt_oss", ("GptOssConfig", GPT_OSS))
    monkeypatch.setitem(FAMILIES, "gemma4", ("Gemma4TextConfig", GEMMA4))


def packing(family, **options):
    """A model in fp64 with packed attention, and an untouched copy."""
    model = tiny_model(family, dtype=torch.float64, **options)
    untouched = copy.deepcopy(model)
    report = PatchReport(family)
    pack_attention(model, Replacements(), report)
    return model, untouched, report


def one_by_one(model, rows, **how):
    """The mean loss over the labelled tokens of all documents, each read alone."""
    total, count = 0.0, 0
    for row in rows:
        if len(row) > 1:
            total += model(row[None], labels=row[None], use_cache=False).loss * (len(row) - 1)
            count += len(row) - 1
    return total / count


@pytest.mark.parametrize(
    "family, options, how",
    [
        *((*case, how) for how in ("lengths", "positions") for case in (
            ("llama", {}),
            ("qwen3", {}),  # norms of queries and keys, fewer key heads
            ("qwen3", {"attn_implementation": "eager"}),
            ("gemma3", {}),  # windows
            ("gemma2", {}),  # softcapping and windows, eager
            ("gpt_oss", {}),  # sinks and windows; its mask does not read positions
            ("mixtral", {"output_router_logits": False}),
        )),
        pytest.param("gemma4", {}, "lengths", marks=has_gemma4),
        ("gemma3", {}, {"use_reentrant": False}),
        ("gemma3", {}, {"use_reentrant": True}),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_documents_one_by_one(family, options, how):
    """By their lengths, by positions that start anew, and where checkpointing recomputes them."""
    model, untouched, report = packing(family, **options)
    assert report.swapped == {"packed attention": 1}
    rows = documents(LENGTHS, VOCAB - 5)
    batch = packed(rows)
    if how == "positions":
        batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    elif how != "lengths":
        model.train().gradient_checkpointing_enable(how)
    want = one_by_one(untouched, rows)
    truth = named_gradients(untouched, want)
    with SquareTensors(sum(LENGTHS)) as squares:  # which sees the mask that sdpa makes
        untouched(**batch, use_cache=False)
    assert squares.operations
    with SquareTensors(sum(LENGTHS)) as squares:
        got = model(**batch, use_cache=False).loss
        gradients = named_gradients(model, got)
    assert not squares.operations
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)  # transformers' loss is in fp32
    assert_same_gradients(gradients, truth, 1e-5)


@has_gemma4
@pytest.mark.parametrize("cache", [False, True])
def test_gemma4_leaves_no_queries_out_by_the_implementation_s_name(cache):
    """It would, for a number of logits, where layers share keys; sdpa then could not tell which tokens they see."""
    model, untouched, _ = packing("gemma4")
    ids = torch.stack(documents((13, 13), VOCAB - 5, seed=2))
    for keep in (0, 1, 4, torch.tensor([2, 5])):
        got, want = (each(ids, logits_to_keep=keep, use_cache=cache).logits for each in (model, untouched))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    mask = (torch.arange(13) >= torch.tensor([[4], [0]])).long()
    how = {"max_new_tokens": 6, "do_sample": False}
    for given in ({}, {"attention_mask": mask}):
        assert torch.equal(model.generate(ids, **given, **how), untouched.generate(ids, **given, **how))


@has_gemma4
def test_gemma4_gets_its_own_method_back():
    model = tiny_model("gemma4")
    replacements = Replacements()
    pack_attention(model, replacements, PatchReport("gemma4"))
    assert SHARING_SLICES in vars(model.model)
    replacements.undo()
    assert SHARING_SLICES not in vars(model.model) and model.config._attn_implementation == "sdpa"
    kind = type(model.model)
    assert can_keep_whole(kind) and compares_with(kind, NAMES) and not compares_with(kind, NAMES, (SHARING_SLICES,))


def test_a_method_that_returns_something_else_is_not_exempt():
    def changed(self, hidden_states, logits_to_keep, cache, **kwargs):
        return (hidden_states + 1,)

    def by_name(self, hidden_states, logits_to_keep, cache, **kwargs):
        return (hidden_states,) if not isinstance(logits_to_keep, int) else (hidden_states[:, -logits_to_keep:],)

    assert not can_keep_whole(type("Changed", (), {SHARING_SLICES: changed}))
    assert can_keep_whole(type("ByName", (), {SHARING_SLICES: by_name})) and not can_keep_whole(torch.nn.Linear)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("by", ["flash", "sdpa"])
def test_rows_of_documents_are_the_documents(monkeypatch, family, rows, by):
    """Positions that start anew, without lengths. By flash: the operation of GPUs is called as it is defined (layout,
    lengths, window and scale); the operation itself runs on GPUs alone, and knows no sinks."""
    if by == "flash" and family != "gpt_oss":
        monkeypatch.setattr(flash, "FLASH_ATTENTION", flash_by_definition)
        monkeypatch.setattr(flash, "serves", lambda *_: True)
    model, untouched, _ = packing(family)
    each = documents((5, 11, 1, 14, 17, 14), VOCAB - 5, seed=7)
    positions = torch.cat([torch.arange(len(row)) for row in each]).view(rows, -1)
    got = model(torch.cat(each).view(rows, -1), position_ids=positions, use_cache=False).logits
    want = torch.cat([untouched(row[None], use_cache=False).logits[0] for row in each])
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("batch", ["alone", "rows", "padded", "ones", "cached"])
def test_rows_that_are_not_packed_are_as_before(family, batch):
    model, untouched, _ = packing(family)
    ids = torch.stack(documents((13, 13), VOCAB - 5, seed=2))[: 1 if batch == "alone" else 2]
    how = {"input_ids": ids, "use_cache": batch == "cached"}
    if batch in ("padded", "ones"):
        how["attention_mask"] = torch.ones_like(ids)
        how["attention_mask"][0, 9:] = 1 if batch == "ones" else 0
    got, want = model(**how).logits, untouched(**how).logits
    real = how.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_as_before(family, cache):
    model, untouched, _ = packing(family)
    ids = torch.stack(documents((11, 11), VOCAB - 5, seed=3))
    mask = (torch.arange(11) >= torch.tensor([[4], [0]])).long()
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(model.generate(ids, **how), untouched.generate(ids, **how))


def test_one_long_document_has_no_square_for_its_window():
    model, untouched, _ = packing("gemma3")
    batch = packed(documents((29,), VOCAB - 5))
    alone = {"input_ids": batch["input_ids"], "use_cache": False}
    torch.testing.assert_close(model(**batch, use_cache=False).logits, untouched(**alone).logits)
    torch.testing.assert_close(model(**alone).logits, untouched(**alone).logits)


def test_lengths_count_where_positions_do_not_start_anew():
    """As for flash-attn: a collator may give lengths alone."""
    model, untouched, _ = packing("llama")
    rows = documents((6, 8), VOCAB, seed=4)
    ends = torch.tensor([0, 6, 14], dtype=torch.int32)
    got = model(torch.cat(rows)[None], cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=8, max_length_k=8).logits
    positions = (torch.arange(6)[None], torch.arange(6, 14)[None])
    want = [untouched(row[None], position_ids=at).logits[0] for row, at in zip(rows, positions, strict=True)]
    torch.testing.assert_close(got[0], torch.cat(want))


@pytest.fixture
def ours(monkeypatch):
    """Our op in fp64, as GPUs in 16 bits take it; the calls it gets. Documents one after the other are an error."""
    calls = []

    def counted(*args, **how):
        calls.append(how | {"ends": args[3]})
        return document_attention(*args, **how)

    monkeypatch.setattr(flash, "OWN_DTYPES", (torch.float64,))
    monkeypatch.setattr(flash, "launches", lambda q: True)
    monkeypatch.setattr(flash, "document_attention", counted)
    monkeypatch.setattr(flash.PackedAttention, "_each", None)
    return calls


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3", "llama"])
def test_sinks_softcaps_and_windows_of_packed_rows_take_our_kernel(ours, family):
    model, untouched, _ = packing(family)
    rows = documents(LENGTHS, VOCAB - 5)
    want = one_by_one(untouched, rows)
    truth = named_gradients(untouched, want)
    got = model(**packed(rows), use_cache=False).loss
    assert len(ours) == model.config.num_hidden_layers
    assert all((how["sinks"] is not None) == (family == "gpt_oss") for how in ours)
    assert all((how["softcap"] is not None) == (family == "gemma2") for how in ours)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(ours)
    assert [how["window"] for how in ours] == [8 if kind == "sliding_attention" else None for kind in kinds]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert_same_gradients(named_gradients(model, got), truth, 1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [20, 15])  # two windows, or fewer
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3", "llama"])
def test_rows_of_one_document_take_our_kernel(ours, family, length, padded):
    """With sinks and softcaps always, else where a window is a small part; padding behind the tokens needs no mask."""
    model, untouched, _ = packing(family)
    ids = torch.stack(documents((length, length), VOCAB - 5, seed=2))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0  # fewer than a window: eager attention has NaN for a token that sees only padding
    how = {"input_ids": ids, "use_cache": False} | ({"attention_mask": mask} if padded else {})
    with padded_on_the_right():
        got = model(**how).logits
    want = untouched(**how).logits
    real = mask.bool() if padded else torch.ones_like(mask).bool()
    off = 1e-5 if family == "gemma2" else 1e-9  # whose own softmax is in fp32
    torch.testing.assert_close(got[real], want[real], rtol=off, atol=off)
    layers = getattr(model.config, "layer_types", None) or []
    windows = layers.count("sliding_attention") if length > 16 or not padded else 0
    assert len(ours) == (len(layers) if family in ("gpt_oss", "gemma2") else windows)
    assert all(how["ends"] == length and how["bounds"] is None for how in ours)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_rows_of_wide_heads_take_our_kernel(ours, monkeypatch, family):
    """Where sdpa has no fast kernel; narrower ones, cached keys and left padding are sdpa's."""
    model, untouched, _ = packing(family)
    ids = torch.stack(documents((13, 13), VOCAB - 5, seed=2))
    left = torch.ones_like(ids)
    left[0, :4] = 0
    for width, count in ((model.config.head_dim, 0), (model.config.head_dim - 1, 2)):
        monkeypatch.setattr(flash, "SDPA_WIDTH", width)
        got, want = (each(ids, use_cache=False).logits for each in (model, untouched))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert len(ours) == count
        for how in ({"attention_mask": left}, {"use_cache": True}):
            model(ids, **how)
    first = model(ids, use_cache=True)
    model(ids[:, :3], past_key_values=first.past_key_values)


def test_the_mask_of_rows_of_one_document_is_a_tensor_to_those_that_take_it_for_one():
    made = torch.arange(16.0).view(1, 1, 4, 4)
    mask = DocumentMask(1, 4, None, 2, "cpu", lambda: made, single=True)
    assert mask.shape == made.shape and torch.equal(mask[..., :2], made[..., :2])
    assert torch.equal(torch.where(mask > 3, mask, 1.0), torch.where(made > 3, made, 1.0))
    assert torch.equal(torch.ones(4) + mask, 1 + made) and torch.equal(torch.cat([mask, made]), made.repeat(2, 1, 1, 1))
    assert torch.equal(copy.deepcopy(mask).tensor, made)
    # to CUDA graphs it is a constant of its sizes, or a tensor once it was read as one
    unread, same, other = (DocumentMask(1, n, None, 2, "cpu", lambda: made, single=True) for n in (7, 7, 8))
    specs = [flatten({"attention_mask": each}, []) for each in (unread, same, other)]
    assert specs[0] == specs[1] != specs[2]
    assert unread.shape == made.shape
    flatten({"attention_mask": same}, tensors := [])
    assert tensors == [same.tensor]


def eager(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    scores = query @ key.repeat_interleave(module.num_key_value_groups, 1).mT * scaling + attention_mask
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2), None


def scaled(*args, **kwargs):
    return eager(*args, **kwargs)


def off(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    return eager(module, query, key, value, attention_mask, 1.01 * scaling)


def other_keyword(module, query, key, value, attention_mask, scaling=None, bias=None, **kwargs):
    return eager(module, query, key, value, attention_mask, scaling)


def other_attribute(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return eager(module, query, key, value, attention_mask, scaling * module.factor)


def other_heads(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return eager(module, query, key.flip(1), value, attention_mask, scaling)


def test_eager_attention_is_tried_before_ours_takes_its_place():
    assert is_attention(eager, sinks=False, softcap=False)
    assert not is_attention(eager, sinks=True, softcap=False)  # which it would leave out
    assert not is_attention(eager, sinks=False, softcap=True)
    for function in (scaled, off, other_keyword, other_attribute, other_heads, print):
        assert not is_attention(function, sinks=False, softcap=False), function
    for family, sinks, softcap in (("gpt_oss", True, False), ("gemma2", False, True), ("gemma3", False, False)):
        function = flash.eager_of(next(attention_modules(tiny_model(family))))
        assert is_attention(function, sinks, softcap)
        assert not is_attention(function, not sinks, softcap)
    sdpa = flash.former_attention("sdpa", torch.nn.Module())
    assert is_attention(sdpa, False, False) and not is_attention(sdpa, True, False)


def test_ends_may_be_repeated_and_changed_in_place():
    """CUDA graphs keep one tensor of ends, filled up with the last."""
    model, untouched, _ = packing("llama")
    buffer = torch.zeros(7, dtype=torch.int32)
    for lengths in ((6, 8), (2, 5, 7), (14,)):
        rows = documents(lengths, VOCAB, seed=5)
        batch = packed(rows)
        ends = batch["cu_seq_lens_q"]
        buffer.copy_(torch.cat([ends, ends[-1:].expand(7 - len(ends))]))
        batch |= {"cu_seq_lens_q": buffer, "cu_seq_lens_k": buffer}
        torch.testing.assert_close(model(**batch, use_cache=False).loss, one_by_one(untouched, rows))


def test_ends_are_kept_no_longer_than_their_batch():
    model, _, _ = packing("llama")
    batch = packed(documents(LENGTHS, VOCAB))
    ends = weakref.ref(batch["cu_seq_lens_q"])
    model(**batch, use_cache=False)
    del batch
    gc.collect()
    assert ends() is None


def test_undo_gives_the_implementation_back_and_nothing_saves_it(tmp_path):
    model = tiny_model("llama")
    before = vars(model.config).copy()
    record = patch(model)
    record.pack_attention()
    assert model.config._attn_implementation == NAMES["sdpa"]
    model.save_pretrained(tmp_path)
    assert "liger" not in (tmp_path / "config.json").read_text()
    assert "liger" not in json.dumps(model.config.to_dict()) + str(model.config)
    clone = copy.deepcopy(model)
    record.unpack_attention()
    assert model.config._attn_implementation == "sdpa" and "packed attention" not in record.report.swapped
    assert clone.config._attn_implementation == NAMES["sdpa"]
    record.pack_attention()
    record.undo()
    saved = {"architectures": None, "dtype": None}  # which save_pretrained fills in
    assert {**vars(model.config), **saved} == {**before, **saved}


@pytest.mark.parametrize(
    "family, options, reason",
    [
        ("llama", {"attn_implementation": "flex_attention"}, "the model runs flex_attention"),
        ("gpt2", {}, "GPT2Attention computes something else for each attention implementation"),
        ("llama", {"attn_implementation": "eager", "output_attentions": True}, "output_attentions"),
    ],
)
def test_a_model_that_keeps_its_own_attention_says_why(family, options, reason):
    model = tiny_model(family, **options)
    before = model.config._attn_implementation
    record = patch(model)
    record.pack_attention()
    assert reason in record.report.left_alone["packed attention"]
    assert model.config._attn_implementation == before


def test_masks_that_say_more_are_made_as_before():
    config = tiny_model("llama").config
    embeds, positions = torch.zeros(1, 9, 4), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    how = {"inputs_embeds": embeds, "past_key_values": None, "position_ids": positions}

    def both(**more):
        masks = []
        for name in ("sdpa", NAMES["sdpa"]):
            config._attn_implementation = name
            masks.append(create_causal_mask(config, **{**how, "attention_mask": None, **more}))
        return masks

    assert isinstance(both()[1], DocumentMask)
    for more in (
        {"attention_mask": torch.tensor([[1] * 7 + [0] * 2])},
        {"or_mask_function": lambda batch, head, q, kv: kv < 2},
        {"and_mask_function": lambda batch, head, q, kv: kv > 0},
        {"block_sequence_ids": torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1]])},
    ):
        want, got = both(**more)
        assert torch.equal(want, got)
    for function in (
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(3),
        masking_utils.sliding_window_overlay(3),  # without causal
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(masking_utils.causal_mask_function),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda *_: True),
    ):
        assert mask_structure(function) is None


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_length": 6, "kv_length": 6},  # what an eager model reads where a row proves to be one document
        {"q_length": 6, "kv_length": 9},  # a cache of fixed size
        {"q_length": 6, "kv_length": 6, "q_offset": 3},
        {"q_length": 6, "kv_length": 6, "q_offset": torch.tensor(0)},
        {"q_length": 1, "kv_length": 1},
    ],
    ids=str,
)
def test_masks_are_made_as_before(name, sizes):
    how = {"batch_size": 2, "dtype": torch.float64, "device": "cpu", "local_size": 3, **sizes,
           "mask_function": masking_utils.sliding_window_causal_mask_function(3)}  # fmt: skip
    got, want = (ALL_MASK_ATTENTION_FUNCTIONS[each](**how) for each in (NAMES[name], name))
    waits = isinstance(got, DocumentMask)
    assert waits == (sizes == {"q_length": 6, "kv_length": 6})
    if waits:
        assert got.window == 3
        got = got.tensor
    assert (got is None and want is None) or torch.equal(got, want)


def test_a_document_mask_is_no_tensor():
    mask = DocumentMask(1, 4, torch.tensor([[0, 0, 1, 1]]), None, "cpu", lambda: None)
    with pytest.raises(ConfigError, match="attention: model"):
        _ = mask.shape
    with pytest.raises(ConfigError, match="attention: model"):
        torch.where(mask, 1.0, 0.0)
    assert not hasattr(mask, "shape")
    assert mask.to("meta").index.is_meta and mask.to("cpu") is mask


def test_packed_rows_with_earlier_keys_are_refused():
    model, _, _ = packing("llama")
    cache = model(torch.arange(5)[None], use_cache=True).past_key_values
    batch = packed(documents((4, 3), VOCAB))
    with pytest.raises(ConfigError, match="use_cache=False"):
        model(**batch, past_key_values=cache)


def test_every_layer_of_a_model_is_served():
    """A configuration that some attention has for itself would keep its own implementation."""
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=tiny_model("gemma3").config.to_dict(),
            vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
            mm_tokens_per_image=4,
        )
    )  # fmt: skip
    model = spread_weights(model).double().eval()
    untouched = copy.deepcopy(model)
    pack_attention(model, Replacements(), PatchReport("gemma3"))
    assert [config.model_type for config in attention_configs(model)] == ["gemma3_text"]
    assert model.config.vision_config._attn_implementation == "sdpa" == model.config._attn_implementation
    rows = documents((5, 11), 40)
    torch.testing.assert_close(model(**packed(rows), use_cache=False).loss, one_by_one(untouched, rows))


def test_bounds_of_a_pass_in_inference_mode_serve_a_training():
    documents, cpu = Documents(torch.tensor([0, 3, 8], dtype=torch.int32)), torch.device("cpu")
    with torch.inference_mode():
        bounds = documents.bounds(8, cpu)
    assert documents.bounds(8, cpu) is bounds and not bounds.is_inference()
    assert bounds.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [3, 3, 3, 8, 8, 8, 8, 8]]
