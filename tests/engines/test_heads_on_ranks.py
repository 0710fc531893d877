"""Steps with the head's rows kept on their ranks, in two processes, against those in one with the whole head.

Run as a script in each of two processes, it writes the loss, gradients and logs of each step: FSDP2 by accelerate and
by hand, tensor parallelism.
"""

import importlib.util
import itertools
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import fsdp2
from peft import LoraConfig, get_peft_model
from processes import finish, outcome_of
from splits import ROWS, capture_gradients, saved
from tiny import assert_same_gradients, texts, tiny_model, tiny_tokenizer, train_args
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trainings import distill, sft
from transformers import AutoModelForCausalLM

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer, patch
from liger_trainer.errors import ConfigError
from liger_trainer.extras.vocab_parallel import (
    ShardedHead,
    kept_sharded,
    mark_sharded,
    shard_head,
    why_gathered,
    why_whole_head,
)
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
STEPS = [*itertools.product(["fsdp2"], OBJECTIVES), *itertools.product(["kept gathered", "loaded by rank 0"], ["kd"])]


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
    """Whether FSDP2 has ever gathered a head that is a separate unit; None for other heads."""
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


DTENSORS = importlib.util.find_spec("transformers.distributed.tensor_parallel") is not None
assert set(ENGINES) == {engine for engine, _ in STEPS}


@pytest.fixture(scope="module")
def two_processes():
    return outcome_of(2, "../engines/test_heads_on_ranks.py")


@pytest.fixture(scope="module")
def one_process():
    return {objective: step(objective, 8, 1) for objective in OBJECTIVES}


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(("engine", "objective"), STEPS)
def test_a_step_is_that_of_one_process(two_processes, one_process, engine, objective):
    got, want = two_processes[engine, objective], one_process[objective]
    assert_same_gradients(got["gradients"], want["gradients"])
    assert got["logs"] == pytest.approx(want["logs"], rel=1e-5)
    torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(("engine", "objective"), STEPS)
def test_no_head_is_gathered(two_processes, engine, objective):
    result = two_processes[engine, objective]
    assert len(result["walks"]) >= 4  # two micro-batches, two evaluated ones
    assert set(result["walks"]) == {33}  # of 65 rows
    teacher = {"kd": [False], "tied teacher": [None], "longer teacher": [None]}  # the latter two are gathered
    assert result["gathered"] == [False, *teacher.get(objective, [])]


@pytest.mark.skipif(not DTENSORS, reason="this transformers shards without DTensor")
@pytest.mark.slow
def test_tensor_parallel_heads_stay_sharded(two_processes):
    got, want = two_processes["tensor parallel"], gradients_of(student_of("ce"))
    assert got["walks"] == [33]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    torch.testing.assert_close(got["entropy"], want["entropy"])
    torch.testing.assert_close(got["logits"], want["logits"])
    assert_same_gradients(got["gradients"], want["gradients"])
    assert_same_gradients(got["whole"], want["whole"])  # of a loss that reads a whole head


def trainer_with(vocab_parallel, model=None):
    return sft(model, texts(), config=LigerConfig, vocab_parallel=vocab_parallel)


def test_what_is_in_the_way_is_an_error_where_it_must_stay_sharded():
    with pytest.raises(ConfigError, match="vocab_parallel: always, but this training is not on FSDP2"):
        trainer_with("always")


def test_auto_gathers_where_there_is_one_process():
    trainer_with("auto").train()


def test_a_mark_does_not_outlive_its_trainer():
    model = tiny_model()
    mark_sharded(model)
    trainer_with("never", model)
    assert not kept_sharded(model)


def test_tied_heads_are_gathered():
    assert "tied" in (why_gathered(tiny_model("llama_tied")) or "")
    assert why_gathered(tiny_model("llama")) is None


@pytest.mark.parametrize(
    ("losses", "teacher"), [([{"type": "hidden_mse"}, {"type": "ce"}], "model"), ([{"type": "forward_kl"}], "several")]
)
def test_losses_that_need_whole_heads_say_so(losses, teacher):
    models = tiny_model(seed=1) if teacher == "model" else {"a": tiny_model(seed=1), "b": tiny_model(seed=2)}
    trainer = distill(None, models, texts(), losses=losses)
    assert why_whole_head(trainer) is not None


def test_a_loss_that_reads_a_whole_head_refuses_rows():
    with pytest.raises(ConfigError, match="reads a whole output head"):
        ShardedHead(tiny_model().lm_head, "sharded").whole()


def host(model, **args):
    """As much of a trainer on FSDP2 as `shard_head` reads."""
    plugin = SimpleNamespace(fsdp_version=2, cpu_offload=None)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2, prepare=None)
    options = {"max_length": 8, "per_device_train_batch_size": 2, "torch_compile": False, **args}
    return SimpleNamespace(
        model=model, accelerator=accelerator, args=SimpleNamespace(**options), is_fsdp_enabled=True,
        compute_loss_func=None, shards_sequences=lambda: False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "max_length", "kept", "why"),
    [
        (48, 8, True, "its 48 rows stay on 2 ranks"),  # 2 * 48 numbers against 3 * 32
        (47, 8, False, "a batch of 32 tokens on all ranks is more to move than its 47 rows"),
        (48, None, False, "max_length is not set"),
    ],
)
def test_auto_moves_fewer_numbers(rows, max_length, kept, why, capsys):
    model = tiny_model(vocab_size=rows, pad_token_id=None, eos_token_id=None)
    shard_head(host(model, max_length=max_length), "auto")
    assert kept_sharded(model) == kept
    assert why in capsys.readouterr().out


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_tied_heads_are_gathered_or_refused(wanted, capsys):
    model = tiny_model("llama_tied", vocab_size=96)
    with pytest.raises(ConfigError, match="tied") if wanted == "always" else nullcontext():
        shard_head(host(model), wanted)
    assert not kept_sharded(model)
    assert wanted == "always" or "gathered, since its embeddings are tied" in capsys.readouterr().out


def test_what_fsdp2_does_otherwise_is_in_the_way():
    trainer = host(tiny_model())
    trainer.accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(ConfigError, match="not on FSDP2"):
        shard_head(trainer, "always")
    with pytest.raises(ConfigError, match="torch_compile"):
        shard_head(host(tiny_model(), torch_compile=True), "always")


if __name__ == "__main__":
    main(*sys.argv[1:])
