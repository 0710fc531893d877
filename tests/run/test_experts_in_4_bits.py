"""Mixtures whose experts are loaded in 4 bits: nf4 by `load_in_4bit`, and gpt-oss in its own MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call, done, settings, texts, without_report, write_rows
from families import build
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.quantization_config import Mxfp4Config

from liger_trainer.compat.four_bit_tensor import FourBitTensor
from liger_trainer.compat.quantizers import experts_in_4_bits, packed_experts

LORA = [
    "use_peft=true",
    "lora_dropout=0",
    "lora_target_modules=[q_proj]",
    "lora_target_parameters=[experts.gate_up_proj]",
]


def save(family: str, folder: Path, **options: Any) -> Any:
    tokenizer = tiny_tokenizer()
    options = {"num_experts_per_tok": 2, "vocab_size": len(tokenizer), **options}
    model = build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], experts="grouped_mm", **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture
def run_in(tmp_path, monkeypatch, capsys):
    """Run one step on rows of text; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    write_rows(tmp_path / "rows.jsonl", texts(8))
    (tmp_path / "run.yaml").write_text(settings(max_steps=1))

    def run(*overrides: str) -> tuple[int, str, str]:
        code, out, err = call(capsys, "run", "run.yaml", *overrides)
        return code, " ".join(out.split()), err

    return run


@pytest.fixture
def gpt_oss(tmp_path) -> Path:
    """A checkpoint as OpenAI's: experts as blocks and scales, which its configuration names."""
    folder = tmp_path / "student"
    save("gpt_oss", folder, hidden_size=64, intermediate_size=32)
    (file,) = folder.glob("*.safetensors")
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(118, 122, blocks.shape[:-1], generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_stays_packed_to_the_bit(gpt_oss):
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    plain = AutoModelForCausalLM.from_pretrained(gpt_oss, **options)
    with experts_in_4_bits():
        ours = AutoModelForCausalLM.from_pretrained(gpt_oss, **options)
    again = AutoModelForCausalLM.from_pretrained(gpt_oss, **options)
    assert len(packed_experts(ours)) == 4 and not packed_experts(again)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.unpacked() if isinstance(own, FourBitTensor) else own, other)


def test_adapters_of_gpt_oss_train_on_its_own_mxfp4(run_in, gpt_oss):
    said = done(run_in(*LORA))
    assert "Experts stay in 4 bits: 8 experts in 0.00 GB." in said[0]
    assert not list((gpt_oss.parent / "out").glob("model*.safetensors"))
    assert "Experts stay in 4 bits" not in done(run_in("output_dir=whole"))[0]


def test_experts_are_quantised_with_the_linear_layers(run_in, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = save("qwen3_moe", tmp_path / "student")
    said = done(run_in(*LORA, "load_in_4bit=true", "bnb_4bit_quant_type=nf4"))
    assert "Experts stay in 4 bits: 8 experts in 0.00 GB." in said[0]
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": {"": "cpu"}}
    with experts_in_4_bits():
        quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "student", **options)
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            found = quantised.get_parameter(name)
            assert isinstance(found, FourBitTensor)
            torch.testing.assert_close(found.unpacked(), FourBitTensor.nf4(weight.detach()).unpacked())
