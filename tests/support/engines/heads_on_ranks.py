"""Training steps with the output head's rows kept on their ranks: FSDP2 by accelerate and by hand, tensor parallelism.

Run as a script in each of two processes, it writes the loss, gradients and logs of each step.
"""

import importlib.util
import itertools
import sys

import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import fsdp2
from peft import LoraConfig, get_peft_model
from processes import finish
from splits import ROWS, capture_gradients, saved
from tiny import tiny_model, tiny_tokenizer, train_args
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer, patch
from liger_trainer.kernels import _vocab_parallel
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.losses.deferring_head import deferred_logits
from liger_trainer.losses.model_parts import output_module
from liger_trainer.patching.patcher import base_of
from liger_trainer.trainers.config import LigerConfig

ENGINES = {
    "fsdp2": {},
    "kept gathered": {"reshard_after_forward": False},
    "loaded by rank 0": {"cpu_ram_efficient_loading": True},
}
MIX = [{"type": "reverse_kl"}, {"type": "jsd", "weight": 0.5, "beta": 0.3}, {"type": "ce", "weight": 0.5}]
# name: (losses, the teacher's embeddings are tied, words by which its head is longer)
OBJECTIVES = {
    "ce": (None, False, 0),
    "kd": (MIX, False, 0),
    "tied teacher": (MIX, True, 0),
    "longer teacher": (MIX, False, 3),
    "lora": (None, False, 0),
}
STEPS = [
    *itertools.product(["fsdp2"], OBJECTIVES), *itertools.product(["kept gathered", "loaded by rank 0"], ["kd"]),
]  # fmt: skip


def student_of(objective):
    student = tiny_model("llama", vocab_size=65)  # an odd number of rows
    if objective != "lora":
        return student
    torch.manual_seed(1)
    return get_peft_model(student, LoraConfig(init_lora_weights=False, target_modules=["q_proj", "down_proj"]))


def step(objective, batch, accumulation, vocab_parallel="never", **how):
    """Train a step and evaluate."""
    options = {
        "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "max_steps": 1, "optim": "sgd",
        "gradient_accumulation_steps": accumulation, "learning_rate": 0.0, "vocab_parallel": vocab_parallel, **how,
    }  # fmt: skip
    rows = Dataset.from_list(ROWS)
    common = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tiny_tokenizer()}
    losses, tied, longer = OBJECTIVES[objective]
    if losses is None:
        trainer = LigerTrainer(student_of(objective), args=train_args(LigerConfig, **options), **common)
    else:
        teacher = tiny_model(
            "gemma2",
            seed=5,
            hidden_size=48,
            tie_word_embeddings=tied,
            vocab_size=65 + longer,
            final_logit_softcapping=3.0,
        )
        args = train_args(LigerDistillConfig, losses=losses, temperature=2.0, **options)
        trainer = LigerDistillTrainer(student_of(objective), teacher_model=teacher, args=args, **common)
    gradients, walks = capture_gradients(trainer), count_walks()
    trainer.train()
    heads = [output_module(base_of(model)) for model in (trainer.model, getattr(trainer, "teacher", None)) if model]
    were_gathered = [gathered(head) for head in heads]
    with torch.no_grad():  # the whole head, as for generation
        logits = trainer.model(input_ids=rows_of_ids()).logits
    evaluated = trainer.evaluate()  # and its rows again
    logs = next(log for log in trainer.state.log_history if "loss" in log)
    return {
        "gradients": gradients, "walks": walks, "gathered": were_gathered, "logits": logits,
        "logs": {name: x for name, x in {**evaluated, **logs}.items() if isinstance(x, float) and compared(name)},
    }  # fmt: skip


def gathered(head):
    """Whether FSDP2 has ever gathered a head that is a unit of its own; None for other heads."""
    if not isinstance(head, FSDPModule):
        return None
    parameters = head._get_fsdp_state()._fsdp_param_group.fsdp_params
    return any(hasattr(parameter, "_unsharded_param") for parameter in parameters)


def compared(name):
    timed = name.endswith(("_runtime", "_per_second"))
    return not timed and name not in ("grad_norm", "epoch", "learning_rate", "entropy", "mean_token_accuracy")


def count_walks():
    """Return a list that gets this rank's number of rows for each loss over the ranks from now on."""
    walks, walk = [], _vocab_parallel.ParallelLoss.walk

    def counting(self, head, gradients):
        walks.append(head.weight.shape[0])
        return walk(self, head, gradients)

    _vocab_parallel.ParallelLoss.walk = counting
    return walks


def rows_of_ids():
    return torch.randint(65, (4, 12), generator=torch.Generator().manual_seed(0))


def tensor_parallel(directory):
    """Return the loss and gradients of a patched model that transformers has sharded by its `tp_plan`."""
    model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto", dtype=torch.float32)
    return gradients_of(model)


def gradients_of(model):
    patch(model)
    model.train()
    walks = count_walks()
    outputs = model(input_ids=rows_of_ids(), labels=rows_of_ids(), fused_lm_head=True)
    outputs.loss.backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with deferred_logits(model):
        logits = model(input_ids=rows_of_ids()).logits
    linear_cross_entropy(**logits.operands(), labels=rows_of_ids().flatten()).loss.backward()
    with torch.no_grad():
        logits = model(input_ids=rows_of_ids()).logits
    return {
        "loss": outputs.loss.item(), "entropy": outputs.entropy, "walks": walks, "logits": logits,
        "gradients": gradients, "whole": {name: whole(p.grad) for name, p in model.named_parameters()},
    }  # fmt: skip


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(path):
    results, walk = {}, _vocab_parallel.ParallelLoss.walk
    for engine, objective in STEPS:
        with fsdp2(**ENGINES[engine]):
            results[engine, objective] = step(objective, 2, 2, "always")
        _vocab_parallel.ParallelLoss.walk = walk
    if importlib.util.find_spec("transformers.distributed.tensor_parallel"):
        results["tensor parallel"] = tensor_parallel(saved(student_of("ce")))
    finish(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
