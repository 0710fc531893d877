"""Twenty steps of a small Qwen3 in bf16 on whatever engine `accelerate launch` has chosen: losses and gradient norms.

    accelerate launch --config_file fsdp2.yaml tests/engines/twenty_steps.py PATH ARM...

An arm is "sft", "liger" or "kd", with " lora" behind it for adapters; PATH gets the logs of each as JSON.
"""

import json
import os
import sys
import tempfile

import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import forget
from peft import LoraConfig
from tiny import tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer

ROWS, LENGTH, STEPS, VOCAB = 8, 512, 20, 32_000


def model(seed, layers):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=False, head_dim=64, **sizes)
    ).to(torch.bfloat16)


def rows():
    """Ids that a model can learn something about: some are frequent, and each hints at the next."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(ROWS * STEPS, LENGTH, generator=generator) ** 4 * VOCAB / 2).long()
    ids[:, 1::2] = ids[:, ::2] * 2 % VOCAB
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def run(arm):
    name, *adapters = arm.split()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": ROWS // processes, "max_steps": STEPS,
        "bf16": True, "learning_rate": 3e-4, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "max_length": LENGTH, "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True}, "seed": 7,
    }  # fmt: skip
    common = {"train_dataset": rows(), "processing_class": tiny_tokenizer()}
    if adapters:
        common["peft_config"] = LoraConfig(r=16, target_modules="all-linear")
    if name == "kd":
        args = LigerDistillConfig(**options, losses=[{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}])
        trainer = LigerDistillTrainer(model(0, 4), teacher_model=model(1, 6), args=args, **common)
    else:
        trainer = (SFTTrainer if name == "sft" else LigerTrainer)(model(0, 4), args=SFTConfig(**options), **common)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    engine = str(trainer.accelerator.distributed_type)
    return {"engine": engine, **{key: [log[key] for log in logs] for key in ("loss", "grad_norm")}}


def main(path, *arms):
    results = {}
    for arm in arms:
        forget()
        results[arm] = run(arm)
    if int(os.environ.get("RANK", 0)) == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
