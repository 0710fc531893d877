"""Whether a training computes in bf16 where nobody said so: the device decides; on a CPU the README's lines run."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny import WORDS, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerDistillConfig, LigerTrainer
from liger_trainer.trainers import config as sft_config


@pytest.mark.parametrize(
    ("has", "options", "expected"),
    [
        (True, {}, True), (False, {}, False), (True, {"fp16": True}, False), (True, {"use_cpu": True}, False),
        (False, {"bf16": True}, True), (True, {"bf16": False}, False),
    ],
)  # fmt: skip
def test_the_device_decides_where_nothing_is_set(monkeypatch, has, options, expected):
    monkeypatch.setattr(sft_config, "is_torch_bf16_gpu_available", lambda: has)
    args = SimpleNamespace(**{"bf16": None, "fp16": False, "use_cpu": False, **options})
    sft_config.choose_bf16(args)
    assert args.bf16 is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU, TRL's default is an error")
@pytest.mark.parametrize("config", [LigerConfig, LigerDistillConfig])
def test_a_configuration_without_bf16_on_a_cpu(config, tmp_path):
    assert config(output_dir=str(tmp_path)).bf16 is False
    assert config(output_dir=str(tmp_path), bf16=True, use_cpu=True).bf16 is True


def test_a_trainer_without_arguments_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_list([{"text": " ".join(WORDS[i : i + 5])} for i in range(8)])
    tiny_model("llama_tied").save_pretrained("some/model")
    tiny_tokenizer().save_pretrained("some/model")
    trainer = LigerTrainer("some/model", train_dataset=rows)
    assert isinstance(trainer.args, LigerConfig) and trainer.args.output_dir == "model-SFT"
    assert trainer.train_dataset.num_rows == len(rows)
    short = train_args(LigerConfig, max_steps=1)
    trainer = LigerTrainer(tiny_model("llama_tied"), short, None, rows, processing_class=tiny_tokenizer())
    assert trainer.args is short and trainer.train().metrics["train_loss"] > 0
