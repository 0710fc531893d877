"""A saved model keeps the head for multi-token prediction that transformers leaves in the files it was loaded from."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, texts, tiny_tokenizer, train_args
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.common.mtp_head import INDEX, ONE_FILE, ONE_OF_SEVERAL, SHARD, keep_mtp_head

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {  # with the names of a head's weights, and of others that are skipped too
    "qwen3_5_text": (
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], ["model.visual.patch_embed.weight"],
    ),
    "glm4_moe": (
        {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
         "n_group": 1, "topk_group": 1},
        ["model.layers.46.eh_proj.weight"], [],
    ),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def source(request, tmp_path):
    """A folder with a tiny model and such weights, and the names of these."""
    more, head, others = FAMILIES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SIZES, **more))
    folder = tmp_path / "source"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    added = {name: torch.randn(3, 4).bfloat16() for name in (*head, *others)}
    save_file({**load_file(folder / ONE_FILE), **added}, folder / ONE_FILE, metadata={"format": "pt"})
    return folder, {name: added[name] for name in head}


def weights_in(folder):
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {file: load_file(folder / file) for file in set(places.values())}
    return {name: found[file][name] for name, file in places.items()}


def trained(folder, out):
    args = train_args(LigerConfig, output_dir=str(out), max_steps=1, save_strategy="steps", save_steps=1, max_length=16)
    trainer = LigerTrainer(str(folder), args=args, train_dataset=texts(4), processing_class=tiny_tokenizer())
    trainer.train()
    trainer.save_model()
    assert trainer.model is not None
    return trainer.model


def test_a_trained_model_has_the_head_that_it_was_loaded_with(source, tmp_path, capsys):
    folder, head = source
    model = trained(folder, tmp_path / "out")
    assert f"is kept as it was ({len(head)} tensors)" in capsys.readouterr().out
    written = weights_in(tmp_path / "out")
    assert written.keys() == load_file(tmp_path / "out" / ONE_OF_SEVERAL).keys() | head.keys()
    assert not (tmp_path / "out" / ONE_FILE).exists(), "transformers would not look into the index"
    assert all(
        torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in head.items()
    )
    assert not (tmp_path / "out" / "checkpoint-1" / SHARD).exists(), "checkpoints are read back into the same model"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    trained(tmp_path / "out", tmp_path / "later")
    assert weights_in(tmp_path / "later").keys() == written.keys()


def test_a_model_is_saved_where_it_was_saved_before(source, tmp_path):
    folder, head = source
    model, out = AutoModelForCausalLM.from_pretrained(folder), tmp_path / "out"
    for _ in range(2):
        model.save_pretrained(out)
        keep_mtp_head(model, out)
        assert {file.name for file in out.glob("model*")} == {ONE_OF_SEVERAL, SHARD, INDEX}
        assert weights_in(out).keys() >= head.keys()
        with torch.no_grad():
            model.get_input_embeddings().weight += 1
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(again.get_input_embeddings().weight + 1, model.get_input_embeddings().weight)


def test_files_in_shards_get_one_more_and_what_does_not_fit_is_left_out(source, tmp_path):
    folder, head = source
    out, config = tmp_path / "out", folder / "config.json"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    before = weights_in(tmp_path / "shards")
    keep_mtp_head(model, tmp_path / "shards")
    assert weights_in(tmp_path / "shards").keys() == before.keys() | head.keys()
    model.save_pretrained(out)
    text = config.read_text()
    config.write_text(json.dumps({**json.loads(text), "quantization_config": {"quant_method": "fp8"}}))
    assert "is not kept: it is stored quantised" in str(keep_mtp_head(model, out))
    config.write_text(text)
    model.resize_token_embeddings(VOCAB + 8)
    assert "is not kept: hidden size, vocabulary or layers have changed" in str(keep_mtp_head(model, out))
    config.unlink()
    assert "is not kept" in str(keep_mtp_head(model, out))
    shutil.rmtree(folder)
    for name in (str(folder), "gone", "no name of a hub's"):
        model.config._name_or_path = name
        assert "is not kept" in str(keep_mtp_head(model, out))
    assert (out / ONE_FILE).is_file() and not (out / SHARD).exists()


def test_layers_that_a_pattern_names_by_chance_are_no_head(tmp_path):
    """GLM-4.5-Air's 46 layers end before its head, GLM-4.5 has a layer of that number."""
    folder = tmp_path / "source"
    more = FAMILIES["glm4_moe"][0] | {"num_hidden_layers": 47}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **SIZES | more))
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "out")
    assert keep_mtp_head(model, tmp_path / "out") is None


def test_other_models_are_saved_as_they_are(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path)
    assert keep_mtp_head(model, tmp_path) is None and (tmp_path / ONE_FILE).is_file()
