"""One training step on the same eight rows, however they are split. Run as a script, one of two processes does it."""

import contextlib
import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from caches import files_of
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from processes import finish
from tiny import WORDS, tiny_model, tiny_tokenizer, train_args
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import liger_trainer
from liger_trainer import DistillationCallback, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.common.files import sha256
from liger_trainer.trainers import capture as capturing

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
    "hidden, one width": [{"type": "skew_kl", "alpha": 0.2}, {"type": "hidden_mse", "weight": 0.3}],
    "on_policy": [{"type": "reverse_kl"}, {"type": "ce", "weight": 0.5}],
    "on_policy in graphs": [{"type": "reverse_kl"}, {"type": "ce", "weight": 0.5}],
    "lora on_policy": [{"type": "reverse_kl"}],
    "seq_kd": [{"type": "forward_kl"}],
    "self": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}],  # the student without its adapters
    "lora": None,
    "stock flag": None,
    "cached": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}],
    "cached hidden": [{"type": "jsd"}, {"type": "reverse_kl", "weight": 0.5}, {"type": "ce", "weight": 0.5}],
    "callback": [{"type": "reverse_kl"}, {"type": "ce", "weight": 0.5}],
    "lora kd": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}],
    "weighted": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}],  # rows, by a column
}  # fmt: skip
# greedy, so that the students of all processes write the same
STOCK = ("stock flag", "callback")  # trainers of transformers and TRL
SPLITS = [
    *((objective, 2) for objective in OBJECTIVES if objective != "lora on_policy"),
    ("ce", 1),
    ("kd", 1),
]  # in two processes, with accumulation
# The others are slow, which two processes of FSDP2 take by default: see engines/test_trained_steps.py.
QUICK = [
    *((objective, 2) for objective in ("ce", "kd", "mix", "hidden", "on_policy", "seq_kd", "self", "weighted")),
    ("kd", 1),
]
NOT_COMPARED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "sampled_tokens_per_second")
ADAPTERS = {
    "self": LoraConfig(init_lora_weights=False),
    "lora": LoraConfig(init_lora_weights=False, target_modules="all-linear"),
    "lora on_policy": LoraConfig(init_lora_weights=False, target_modules="all-linear"),
    "lora kd": LoraConfig(init_lora_weights=False, target_modules=["q_proj", "down_proj", "lm_head"]),
}
SAMPLED = {"max_completion_length": 16, "generation_kwargs": {"do_sample": False}}
CHANGES = {
    "on_policy": {"lmbda": 0.999, **SAMPLED}, "lora on_policy": {"lmbda": 0.999, **SAMPLED},  # with 1.0 there is no ce
    "on_policy in graphs": {"lmbda": 0.999, "sampler": "graphs", **SAMPLED},
    "seq_kd": {"seq_kd": True, **SAMPLED}, "self": {"teacher": "self"},
}  # fmt: skip


class _Capture(TrainerCallback):
    def __init__(self, gradients, hidden):
        self.gradients, self.hidden = gradients, hidden

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = [] if args.deepspeed else [*model.named_parameters()]  # it has stepped: see engines/test_zero.py
        named += self.hidden.named_parameters() if self.hidden else []
        whole = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in named
                 if p.requires_grad}  # fmt: skip
        self.gradients.update((name.removeprefix("module."), gradient.clone()) for name, gradient in whole.items())


def capture_gradients(trainer):
    """The gradients by name, of model and projectors, as the optimizer gets them in the last step."""
    gradients = {}
    state = getattr(trainer, "loss_state", None)
    trainer.add_callback(_Capture(gradients, state and state.hidden))
    return gradients


def student_of(objective, family):
    student = tiny_model(family)
    if objective not in ADAPTERS:
        return student
    torch.manual_seed(1)
    return get_peft_model(student, ADAPTERS[objective])


def saved(model):
    """The name by which trainers load a model."""
    directory = shared(tempfile.mkdtemp())
    model.save_pretrained(directory)  # in the first process
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return directory


def shared(value):
    """What the first process has."""
    values = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values)
    return values[0]


@contextlib.contextmanager
def by_peft(model):
    """Count, within the context, the calls of PEFT's own forward of a LoRA layer in train mode."""
    forward, layers, calls = LoraLinear.forward, set(model.modules()), []

    @functools.wraps(forward)  # the head's is recognised by its name
    def counted(self, *args, **kwargs):
        if self in layers and self.training:
            calls.append(self)
        return forward(self, *args, **kwargs)

    with mock.patch.object(LoraLinear, "forward", counted):
        yield calls


def shared_out(model):
    """How many decoder layers are units of FSDP2."""
    modules = () if model is None else model.modules()
    return sum(isinstance(module, FSDPModule) and "DecoderLayer" in type(module).__name__ for module in modules)


def capture_of(teacher, losses, hidden):
    """Capture the rows in several shards and batches; return where, and what is there."""
    directory = shared(tempfile.mkdtemp())
    options = {
        "teacher": "cache",
        "teacher_cache_dir": directory,
        "cache_shard_mb": 1,
        **({"cache_kind": "hidden"} if hidden else {"cache_tail_draws": 0, "cache_entries": 8}),
    }
    args = train_args(
        LigerDistillConfig, losses=losses, beta=0.4, temperature=2.0, per_device_eval_batch_size=1, **options
    )
    with mock.patch.object(capturing, "MIB", 256):
        index = capturing.capture(teacher, args, tiny_tokenizer(), Dataset.from_list(ROWS))
    assert index.finished and len(index.shards) > 2
    return options, {name: sha256(content) for name, content in files_of(Path(directory)).items()}


def one_step(objective, batch, accumulation, evaluated=False, family="llama", named=False, **changes):
    """evaluated: before training too, which must change nothing. named: models are given by their names. changes: of
    the options."""
    options = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 1,
        "optim": "sgd", "learning_rate": 0.0,
    }  # fmt: skip
    rows = ROWS
    if objective == "weighted":  # by weights that bf16 would round
        rows, options["weight_column"] = [{**row, "weight": 1.001 * i} for i, row in enumerate(ROWS)], "weight"
    common = {"train_dataset": Dataset.from_list(rows), "processing_class": tiny_tokenizer()}
    if changes.get("eval_on_start"):
        common["eval_dataset"] = common["train_dataset"]
    student, losses = student_of(objective, family), OBJECTIVES[objective]
    width = 32 if objective == "hidden, one width" else 48
    teacher = None if losses is None or objective == "self" else tiny_model("gemma2", seed=5, hidden_size=width)
    if named:
        student, teacher = saved(student), teacher and saved(teacher)
        options["model_init_kwargs"] = {"dtype": "float32"}
    options.update(changes)
    files = None
    if objective.startswith("cached"):
        (cache, files), teacher = capture_of(teacher, losses, "hidden" in objective), None
        options.update(cache)
    if objective == "stock flag":
        liger_trainer.enable()
        trainer = SFTTrainer(student, args=train_args(SFTConfig, use_liger_kernel=True, **options), **common)
    elif objective == "callback":
        callback = DistillationCallback(teacher, losses=losses)
        trainer = SFTTrainer(student, args=train_args(SFTConfig, **options), callbacks=[callback], **common)
    elif losses is None:
        trainer = LigerTrainer(student, args=train_args(SFTConfig, **options), **common)
    else:
        options.update(CHANGES.get(objective, {}))
        args = train_args(LigerDistillConfig, losses=losses, beta=0.4, temperature=2.0, **options)
        trainer = LigerDistillTrainer(student, teacher_model=teacher, args=args, **common)
    gradients = capture_gradients(trainer)
    if evaluated:
        trainer.evaluate(trainer.train_dataset)
    with by_peft(trainer.model) as calls:
        trainer.train()
    liger_trainer.disable()
    logs = next(log for log in trainer.state.log_history if "loss" in log)
    evaluated = next((log for log in trainer.state.log_history if "eval_loss" in log), {})
    teacher = callback.teacher if objective == "callback" else getattr(trainer, "teacher", None)
    return {
        "layers": shared_out(trainer.model), "teacher_layers": shared_out(teacher), "by_peft": len(calls),
        "files": files, "loss": logs["loss"], "gradients": gradients, "eval_loss": evaluated.get("eval_loss"),
        "logs": {name: value for name, value in logs.items() if name not in NOT_COMPARED},
    }  # fmt: skip


if __name__ == "__main__":
    results = {}
    for name, accumulation in SPLITS:
        if ((name, accumulation) in QUICK) != (sys.argv[2] == "quick"):
            continue
        evaluated = name not in STOCK  # which lose DDP then
        results[name, accumulation] = one_step(name, 4 // accumulation, accumulation, evaluated=evaluated)
    assert torch.distributed.get_world_size() == 2
    finish(results, sys.argv[1])
