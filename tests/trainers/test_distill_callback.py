"""DistillationCallback in stock trainers: step for step LigerDistillTrainer's loss, splits, undo, refusals."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainings
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import VOCAB, completions, tiny_model, tiny_tokenizer, train_args
from trainings import OnStep, distill, logged, trained, weights_of
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from trl import SFTTrainer

from liger_trainer import DistillationCallback, LigerTrainer, patch
from liger_trainer.errors import ConfigError
from liger_trainer.patching.patcher import patched_record
from liger_trainer.trainers.distill_callback import refuse

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

LOSS = {
    "losses": [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.25}],
    "beta": 0.3, "temperature": 2.0,
}  # fmt: skip
RUN = {
    "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "optim": "sgd", "learning_rate": 0.05,
    "per_device_eval_batch_size": 7,  # all rows: a stock trainer's eval_loss is a mean over batches
}  # fmt: skip
METRICS = (
    "kd_loss", "ce_loss", "forward_kl", "reverse_kl", "agreement_at_1", "student_perplexity", "teacher_perplexity",
    "teacher_entropy",
)  # fmt: skip


def a_teacher():
    return trainings.a_teacher(vocab_size=VOCAB + 8)


def a_student():
    return tiny_model(vocab_size=VOCAB + 3)


def by_callback(**options):
    return DistillationCallback(a_teacher(), **{**LOSS, **options})


def tokenized(rows):
    """What TRL makes of prompts and completions, for a plain Trainer."""
    tokenizer = tiny_tokenizer()
    made = []
    for row in rows:
        prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"]))
        ids = [*whole, tokenizer.eos_token_id]
        made.append({"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]})
    return Dataset.from_list(made)


def sft(callback, student=None, data=None, cls=SFTTrainer, **options):
    callbacks = [callback] if callback else []
    return trainings.sft(student or a_student(), data, completions(7, seed=4), cls=cls, callbacks=callbacks, **options)


def plain(callback, student=None, data=None, tokenizer=True, peft_config=None, compute_loss_func=None, **options):
    student = student or a_student()
    return Trainer(
        student if peft_config is None else get_peft_model(student, peft_config),
        train_args(TrainingArguments, **options), train_dataset=tokenized(data or completions()),
        eval_dataset=tokenized(completions(7, seed=4)), processing_class=tiny_tokenizer() if tokenizer else None,
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()), callbacks=[callback] if callback else [],
        compute_loss_func=compute_loss_func,
    )  # fmt: skip


STOCK = pytest.mark.parametrize("make", [sft, plain])


def logs_of(trainer, *names):
    return [
        {k: v for k, v in log.items() if k in names} for log in trainer.state.log_history if "train_loss" not in log
    ]


# Against LigerDistillTrainer

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "packing": {"packing": True, "max_length": 32},  # rows are separate for the teacher too
    "lora": {"bf16": True},
}


def with_options(make, *args, name, **options):
    """A trainer whose LoRA weights, if it has any, do not depend on when they were made."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM") if name == "lora" else None
    trainer = make(*args, peft_config=lora, **RUN, **OPTIONS[name], **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for name, p in trainer.model.named_parameters() if "lora_" in name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return trainer


@functools.cache
def ours(name):
    how = {"eval_data": completions(7, seed=4), **LOSS}
    return trained(with_options(distill, a_student(), a_teacher(), name=name, **how))


@pytest.mark.parametrize(
    "make, name",
    [
        (sft, "accumulation"), pytest.param(sft, "bf16", marks=pytest.mark.slow), (sft, "packing"), (sft, "lora"),
        (plain, "accumulation"), (plain, "bf16"), pytest.param(plain, "lora", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_step_and_metric_is_that_of_the_distillation_trainer(make, name):
    """Whose loss is compared with values by hand, however a batch is split."""
    want, got = ours(name), with_options(make, by_callback(), name=name)
    before = weights_of(got)
    trained(got)
    names = ["loss", "eval_loss", *METRICS, *(f"eval_{name}" for name in METRICS)]
    rtol = 5e-3 if "bf16" in OPTIONS[name] else 1e-5  # attention without a mask rounds differently from that with one
    assert len(logs_of(got, *names)) == 4
    for mine, theirs in zip(logs_of(got, *names), logs_of(want, *names), strict=True):
        assert len(mine) == len(METRICS) + 1
        assert mine == pytest.approx(theirs, rel=rtol)
    mine, theirs = weights_of(got), weights_of(want)
    assert mine.keys() == theirs.keys()
    for parameter, value in theirs.items():
        torch.testing.assert_close(mine[parameter], value, rtol=rtol, atol=rtol)
        if name == "lora":
            assert ("lora_" in parameter) == (not torch.equal(mine[parameter], before[parameter])), parameter


# Beginning and end


@STOCK
def test_the_end_of_training_gives_both_models_back(make):
    student, teacher = a_student(), a_teacher().train()
    callback = DistillationCallback(teacher, **LOSS)
    trainer = make(callback, student, max_steps=1)
    before = vars(student).get("forward")
    evaluated = trainer.evaluate()["eval_loss"]
    seen = []
    trainer.add_callback(OnStep(lambda: seen.append((patched_record(student), patched_record(teacher)))))
    for _ in range(2):  # the second training begins as the first one did
        trainer.train()
        assert patched_record(student) is None and patched_record(teacher) is None
        assert vars(student).get("forward") is before
        for model in (student, teacher):
            assert not any("forward" in vars(module) for module in model.modules() if module is not student)
    assert len(seen) == 2 and all(record for pair in seen for record in pair)
    assert {"RMSNorm", "SwiGLU"} <= set(seen[0][0].report.swapped) and "GEGLU" in seen[0][1].report.swapped
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training
    after = trainer.evaluate()
    assert "eval_kd_loss" not in after and after["eval_loss"] != evaluated
    fresh = make(None, copy.deepcopy(student), max_steps=1)
    assert after["eval_loss"] == pytest.approx(fresh.evaluate()["eval_loss"], rel=1e-6)


def fail():
    raise RuntimeError("stopped")


@STOCK
def test_after_an_error_training_begins_anew(make):
    trainer, again = (make(by_callback(), max_steps=2, learning_rate=0.0) for _ in range(2))
    stop = OnStep(fail)
    trainer.add_callback(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert patched_record(trainer.model) is not None
    trainer.remove_callback(stop)
    trainer.train()
    assert patched_record(trainer.model) is None
    assert logged(trainer)[-2:] == pytest.approx(logged(trained(again)), rel=1e-6)


@STOCK
def test_a_student_that_was_patched_before_keeps_its_layers_and_its_loss(make):
    student = a_student()
    record = patch(student, rope=False)
    trainer = make(by_callback(), student, max_steps=1, learning_rate=0.0)
    before, fused = vars(student)["forward"], record.fused
    trainer.train()
    assert patched_record(student) is record and record.fused is fused and vars(student)["forward"] is before
    want = trained(make(by_callback(), max_steps=1, learning_rate=0.0))
    assert logged(trainer) == pytest.approx(logged(want), rel=1e-5)
    ids = torch.arange(8)[None]
    plain_loss = a_student()(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(student(input_ids=ids, labels=ids).loss, plain_loss, rtol=1e-5, atol=0.0)


def test_a_teacher_is_loaded_from_its_path_in_the_dtype_of_the_run(tmp_path):
    a_teacher().save_pretrained(tmp_path)

    def train(teacher, bf16=False, **options):
        callback = DistillationCallback(teacher, **LOSS, **options)
        trainer = plain(callback, max_steps=1, learning_rate=0.0, bf16=bf16)
        assert (callback.teacher is None) == isinstance(teacher, str)
        return logged(trained(trainer)), callback.teacher.dtype

    losses, dtype = train(str(tmp_path))
    assert losses == pytest.approx(train(a_teacher())[0], rel=1e-6) and dtype == torch.float32
    assert train(str(tmp_path), bf16=True)[1] == torch.bfloat16
    assert train(str(tmp_path), teacher_model_init_kwargs={"dtype": "float16"})[1] == torch.float16


@STOCK
def test_metrics_reach_the_history_and_callbacks_behind_ours(make):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    best = {"metric_for_best_model": "eval_two_forward_kl", "save_strategy": "best"}
    trainer = make(by_callback(), **RUN, **best)
    trainer.eval_dataset = {"one": trainer.eval_dataset, "two": trainer.eval_dataset}
    trainer.add_callback(Reporter())
    trainer.train()
    history = trainer.state.log_history
    assert [set(METRICS) <= set(log) for log in history] == [True, True, True, False, False, False]
    for log, prefix in ((history[3], "eval_one_"), (history[4], "eval_two_")):
        assert {f"{prefix}{name}" for name in METRICS} <= set(log)
    assert not any(name.endswith("forward_kl") for name in history[5])
    assert [set(log) | {"step"} for log in seen[:5]] == [set(log) for log in history[:5]]
    assert trainer.state.best_metric == pytest.approx(history[4]["eval_two_forward_kl"])


def test_compute_metrics_gets_logits():
    shapes, trainer = [], plain(by_callback(), **RUN)
    trainer.compute_metrics = lambda predictions: shapes.append(predictions.predictions.shape) or {}
    trainer.train()
    assert shapes[0][0] == 7 and shapes[0][-1] == VOCAB + 3


# What it refuses


USUAL = {
    "label_smoothing_factor": 0.0, "n_gpu": 1, "parallelism_config": None, "torch_compile": False, "loss_type": "nll",
}  # fmt: skip


def engine(kind, is_fsdp2=False) -> Any:
    return SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2)


def test_arguments_it_cannot_serve_and_those_it_can():
    for changes in ({}, {"parallelism_config": ParallelismConfig(dp_replicate_size=2)}):
        refuse(SimpleNamespace(**{**USUAL, **changes}), engine(DistributedType.MULTI_GPU))
    refuse(SimpleNamespace(**USUAL), engine(DistributedType.FSDP, is_fsdp2=True))
    for key, value in (
        ("label_smoothing_factor", 0.1), ("n_gpu", 2), ("parallelism_config", ParallelismConfig(tp_size=2)),
        ("parallelism_config", ParallelismConfig(cp_size=2)), ("torch_compile", True), ("loss_type", "dft"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{key.replace('n_gpu', 'DataParallel')}.*LigerDistillTrainer"):
            refuse(SimpleNamespace(**{**USUAL, key: value}), engine(DistributedType.NO))
    refuse(SimpleNamespace(**USUAL), engine(DistributedType.DEEPSPEED))
    for kind in (DistributedType.MEGATRON_LM, DistributedType.FSDP):
        with pytest.raises(ConfigError, match="sharded.*LigerDistillTrainer"):
            refuse(SimpleNamespace(**USUAL), engine(kind))


@pytest.mark.parametrize(
    "make, options, message",
    [
        (plain, {"compute_loss_func": lambda outputs, *_, **__: outputs.logits.sum()}, "compute_loss_func"),
        (plain, {"tokenizer": False}, "processing_class"),
        (plain, {"student": tiny_model(vocab_size=VOCAB - 1)}, "resize"),
        (sft, {"cls": LigerTrainer}, "such as LigerTrainer"),
        (plain, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}, "inputs_embeds"),
    ],
    ids=["compute_loss_func", "no tokenizer", "vocabulary", "LigerTrainer", "prompt tuning"],
)
def test_trainers_it_cannot_serve(make, options, message):
    trainer = make(by_callback(), max_steps=1, **options)
    with pytest.raises(ConfigError, match=message) as error:
        trainer.train()
    assert message == "resize" or "LigerDistillTrainer" in str(error.value)


def test_a_student_is_not_its_own_teacher():
    student, tied, base = a_student(), a_student(), a_student()
    tied.model.embed_tokens.weight = student.model.embed_tokens.weight
    adapters = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    for theirs, own in ((student, student), (tied, student), (adapters, base), (base, adapters)):
        with pytest.raises(ConfigError, match="its own teacher.*LigerDistillTrainer"):
            plain(DistillationCallback(theirs, **LOSS), own, max_steps=1).train()
        assert any(parameter.requires_grad for parameter in own.parameters())
