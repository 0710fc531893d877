"""One training step on the same eight rows, however they are split. Run as a script, one of two processes does it."""

import os
import sys

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import WORDS, tiny_model, tiny_tokenizer, train_args
from transformers import TrainerCallback
from trl import SFTConfig

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer

LENGTHS = [(2, 1), (3, 9), (1, 2), (5, 4), (4, 12), (2, 3), (6, 7), (3, 5)]  # words of prompt and completion
ROWS = [
    {"prompt": " ".join(WORDS[i : i + p]), "completion": " " + " ".join(WORDS[3 * i : 3 * i + c])}
    for i, (p, c) in enumerate(LENGTHS)
]
OBJECTIVES = {
    "ce": None,
    "kd": [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5, "beta": 0.3}],
    "mix": [{"type": "reverse_kl"}, {"type": "ce", "weight": 0.5}],
    "hidden": [{"type": "skew_kl", "alpha": 0.2}, {"type": "hidden_mse", "weight": 0.3, "layers": [[0, 1], [1, 0]]},
               {"type": "hidden_cosine", "layers": "last"}],
    "on_policy": [{"type": "reverse_kl"}, {"type": "ce", "weight": 0.5}],
    "self": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}],  # the student without its adapters
}  # fmt: skip
# greedy, so that the students of all processes write the same
ON_POLICY = {"lmbda": 1.0, "max_completion_length": 16, "generation_kwargs": {"do_sample": False}}


class _Capture(TrainerCallback):
    def __init__(self, gradients, hidden):
        self.gradients, self.hidden = gradients, hidden

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = [*model.named_parameters(), *(self.hidden.named_parameters() if self.hidden else [])]
        self.gradients.update((name.removeprefix("module."), p.grad.clone()) for name, p in named if p.requires_grad)


def capture_gradients(trainer):
    """The gradients by name, of model and projectors, as the optimizer gets them in the last step."""
    gradients = {}
    progress = getattr(trainer, "progress", None)
    trainer.add_callback(_Capture(gradients, progress and progress.hidden))
    return gradients


def one_step(objective, batch, accumulation, evaluated=False):
    """evaluated: before training too, which must change nothing."""
    options = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 1,
        "optim": "sgd", "learning_rate": 0.0,
    }  # fmt: skip
    common = {"train_dataset": Dataset.from_list(ROWS), "processing_class": tiny_tokenizer()}
    if OBJECTIVES[objective] is None:
        trainer = LigerTrainer(tiny_model(), args=train_args(SFTConfig, **options), **common)
    else:
        options.update({"on_policy": ON_POLICY, "self": {"teacher": "self"}}.get(objective, {}))
        args = train_args(LigerDistillConfig, losses=OBJECTIVES[objective], beta=0.4, temperature=2.0, **options)
        student, teacher = tiny_model(), tiny_model("gemma2", seed=5, hidden_size=48)
        if objective == "self":
            torch.manual_seed(1)
            student, teacher = get_peft_model(student, LoraConfig(init_lora_weights=False)), None
        trainer = LigerDistillTrainer(student, teacher_model=teacher, args=args, **common)
    gradients = capture_gradients(trainer)
    if evaluated:
        trainer.evaluate(trainer.train_dataset)
    trainer.train()
    logs = next(log for log in trainer.state.log_history if "loss" in log)
    not_compared = ("loss", "grad_norm", "learning_rate", "epoch", "step", "sampled_tokens_per_second")
    return {
        "loss": logs["loss"], "gradients": gradients, "logs": {k: v for k, v in logs.items() if k not in not_compared},
    }  # fmt: skip


if __name__ == "__main__":
    results = {}
    for name in OBJECTIVES:
        results[name, "2x4"] = one_step(name, batch=4, accumulation=1, evaluated=True)
        results[name, "2x2x2"] = one_step(name, batch=2, accumulation=2)
    assert torch.distributed.get_world_size() == 2
    if os.environ["RANK"] == "0":
        torch.save(results, sys.argv[1])
    torch.distributed.destroy_process_group()
