"""Twenty steps of a small Qwen3 in bf16 on whatever engine `accelerate launch` has chosen: losses and gradient norms.

    accelerate launch --config_file fsdp2.yaml tests/support/engines/twenty_steps.py DIRECTORY NAME ARM...

DIRECTORY holds what `save_models` puts there, and gets the logs of each arm in NAME.json. An arm is "sft", "liger" or
"kd"; "lora" behind it is for adapters, "tied" for tied embeddings, "bf16" for weights that are not kept in fp32,
"parallel" for heads that stay on their ranks, "plain" for layers that are not in graphs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import forget
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.trainers.config import LigerConfig

ROWS, LENGTH, STEPS, VOCAB = 8, 512, 20, 32_000


def save_models(directory):
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    for name, layers, tied in (("student", 4, False), ("student tied", 4, True), ("teacher", 6, False)):
        torch.manual_seed(layers)
        config = Qwen3Config(vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=tied, head_dim=64, **sizes)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / name)


def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")


def rows():
    """Ids that a model can learn something about: some are frequent, and each hints at the next."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(ROWS * STEPS, LENGTH, generator=generator) ** 4 * VOCAB / 2).long()
    ids[:, 1::2] = ids[:, ::2] * 2 % VOCAB
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def run(directory, arm):
    name, *how = arm.split()
    student = str(directory / ("student tied" if "tied" in how else "student"))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": ROWS // processes, "max_steps": STEPS,
        "bf16": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "max_length": LENGTH, "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True}, "seed": 7,
        # as FSDP2 keeps them, whatever they were
        "model_init_kwargs": {"dtype": "bfloat16" if "bf16" in how else "float32"},
    }  # fmt: skip
    torch.manual_seed(7)  # of the adapters
    common = {"train_dataset": rows(), "processing_class": tokenizer()}
    if "lora" in how:
        common["peft_config"] = LoraConfig(r=16, target_modules="all-linear")
    computed = {"vocab_parallel": "always"} if "parallel" in how else {}
    computed |= {"cuda_graphs": "never"} if "plain" in how else {}
    if name == "kd":
        args = LigerDistillConfig(**options, **computed, losses=[{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}])
        trainer = LigerDistillTrainer(student, teacher_model=str(directory / "teacher"), args=args, **common)
    elif computed:
        trainer = LigerTrainer(student, args=LigerConfig(**options, **computed), **common)
    else:
        trainer = (SFTTrainer if name == "sft" else LigerTrainer)(student, args=SFTConfig(**options), **common)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    engine = str(trainer.accelerator.distributed_type)
    graphs = getattr(trainer, "graph_reports", {})
    return {"engine": engine, "graphs": graphs, **{key: [log[key] for log in logs] for key in ("loss", "grad_norm")}}


def main(directory, name, *arms):
    results = {}
    for arm in arms:
        forget()
        results[arm] = run(Path(directory), arm)
    if int(os.environ.get("RANK", 0)) == 0:
        (Path(directory) / f"{name}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
