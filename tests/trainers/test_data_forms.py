"""Forms of rows: fine-tuning logs and learns what SFTTrainer does, distillation what is so by hand."""

import copy
import math
import sys
import warnings

import pytest
import torch
from peft import LoraConfig
from quick_cases import slow_but
from tiny import (
    VOCAB,
    chats,
    completions,
    divergence_by_hand,
    double_copy,
    largest_vocabulary_tensor,
    texts,
    tiny_model,
)
from trainings import a_teacher, distill, logged, sft, supervised_logits, trained
from trl import SFTTrainer

from liger_trainer import LigerTrainer, patch
from liger_trainer.errors import ConfigError
from liger_trainer.losses.spec import Distillation

pytestmark = [
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS = 4
COMPARED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "grad_norm")
FORMS = {
    "completion_only": ("llama_tied", completions, {}),
    "packing_bfd": ("llama_tied", completions, {"packing": True, "max_length": 24}),
    "packing_bfd_split": ("llama", texts, {"packing": True, "max_length": 10, "packing_strategy": "bfd_split"}),
    "padding_free": ("llama_tied", completions, {"padding_free": True, "max_length": None}),
    "assistant_only_loss": ("llama_tied", chats, {"assistant_only_loss": True}),
    "label_smoothing": ("llama_tied", completions, {"label_smoothing_factor": 0.1, "gradient_checkpointing": True}),
    "dft": ("llama_tied", completions, {"loss_type": "dft"}),
    "accumulation": ("llama", completions, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    # in one batch: SFTTrainer averages over batches
    "evaluation": ("llama", completions, {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 9}),
    "lora": ("llama", texts, {"max_length": 9, "peft_config": LoraConfig(target_modules="all-linear", r=4)}),
    "experts": ("mixtral", completions, {"gradient_accumulation_steps": 2, "router_aux_loss_coef": 0.2}),
    "experts without aux_loss": ("mixtral", completions, {"router_aux_loss_coef": 0.0}),
    "softcap": ("gemma2", completions, {}),
}
QUICK = ("completion_only", "packing_bfd", "assistant_only_loss", "accumulation", "evaluation", "lora")


def assert_same_logs(ours, trls):
    names = {f"{prefix}{name}" for name in COMPARED for prefix in ("", "eval_")}
    assert len(logged(trls)) == STEPS
    for got, want in zip(ours.state.log_history, trls.state.log_history, strict=True):
        for name in names & want.keys():
            digits = 1e-4 if name == "grad_norm" else 1e-5
            assert got[name] == pytest.approx(want[name], rel=digits, abs=1e-6), (want["step"], name)


@pytest.mark.parametrize("form", slow_but(FORMS, *QUICK))
def test_fine_tuning_is_that_of_sfttrainer(form):
    family, rows, options = FORMS[form]
    data = rows()
    eval_data = data.select(range(9)) if form == "evaluation" else None

    def by(cls):
        model = tiny_model(family, max_position_embeddings=256)
        # Adam would make whole updates of gradients that are nothing but roundings
        how = {"max_steps": STEPS, "adam_epsilon": 1e-5, **copy.deepcopy(options)}
        return trained(sft(model, data, eval_data, cls=cls, **how))

    ours, trls = by(LigerTrainer), by(SFTTrainer)
    assert_same_logs(ours, trls)
    assert len(set(logged(ours))) == STEPS  # something is learned
    assert len(logged(ours, "aux_loss")) == (STEPS if form == "experts" else 0)
    assert len(logged(ours, "eval_loss")) == (2 if form == "evaluation" else 0)
    if form == "accumulation":  # averages start again after each log
        assert logged(ours, "perplexity") == pytest.approx([math.exp(loss) for loss in logged(ours)], rel=1e-4)
    for (name, got), want in zip(ours.model.named_parameters(), trls.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        assert got.requires_grad == (form != "lora" or "lora_" in name)


@pytest.fixture(scope="module")
def trls():
    return trained(sft(cls=SFTTrainer, max_steps=STEPS))


def test_the_flag_simply_works(monkeypatch, trls):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # whose import is an error
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use_liger_kernel.*")
        ours = trained(sft(max_steps=STEPS, use_liger_kernel=True))
    assert_same_logs(ours, trls)
    assert ours.patched.report.swapped["RMSNorm"] == 5


def test_a_model_that_was_patched_before_keeps_its_layers(trls):
    model = tiny_model()
    record = patch(model, swiglu=False)
    trainer = trained(sft(model, max_steps=STEPS))
    assert trainer.patched is record and trainer.fused is record.fused
    assert "SwiGLU" not in record.report.swapped and record.report.swapped["fused loss"] == 1
    assert_same_logs(trainer, trls)
    with pytest.raises(ConfigError, match="was patched with .* before"):
        sft(model, liger_kernel_config={"swiglu": True})
    record.undo()
    assert all("forward" not in vars(layer) for layer in model.modules() if layer is not model)


# Distillation: one epoch at learning rate 0, against logits in fp64

LOSSES = [{"type": "jsd", "weight": 0.5, "beta": 0.3}, {"type": "reverse_kl"}, {"type": "ce", "weight": 0.25}]
EPOCH = {"learning_rate": 0.0, "num_train_epochs": 1, "max_steps": -1, "logging_strategy": "epoch"}


def by_hand(student, teacher, dataset, how):
    """What is logged: means over the supervised tokens of rows one by one."""
    rows, (student, teacher) = [], map(double_copy, (student, teacher))
    for row in dataset:
        with torch.no_grad():
            s, t, labels = supervised_logits((student, teacher), row)
        s, t = s[:, :VOCAB], t[:, :VOCAB]
        q, p = s.log_softmax(-1), t.log_softmax(-1)
        soft = sum(w * divergence_by_hand(s, t, k, how.temperature, how.beta) for k, w in how.weights.items() if w)
        hard, teachers = (-x.gather(-1, labels[:, None])[:, 0] for x in (q, p))
        kls = (divergence_by_hand(s, t, kind, 1.0) for kind in ("forward_kl", "reverse_kl"))
        agree, entropy = (s.argmax(-1) == t.argmax(-1)).double(), -(p.exp() * p).sum(-1)
        rows.append(torch.stack([how.temperature**2 * soft, hard, *kls, agree, teachers, entropy]))
    kd, ce, fkl, rkl, agree, teacher_nll, entropy = torch.cat(rows, 1).mean(1).tolist()
    return {
        "kd_loss": kd, "ce_loss": ce, "forward_kl": fkl, "reverse_kl": rkl, "agreement_at_1": agree,
        "student_perplexity": math.exp(ce), "teacher_perplexity": math.exp(teacher_nll), "teacher_entropy": entropy,
    }  # fmt: skip


def assert_logged(logs, want, prefix=""):
    for name, value in want.items():
        assert logs[prefix + name] == pytest.approx(value, rel=1e-5), name


def test_what_a_distillation_logs_in_training_and_evaluation():
    # Both heads are padded beyond the tokenizer's vocabulary.
    student, teacher = tiny_model("llama_tied", vocab_size=VOCAB + 3), a_teacher(vocab_size=VOCAB + 8)
    with torch.no_grad():  # so near the teacher that some tokens agree
        teacher.get_output_embeddings().weight[:VOCAB, :32] += student.lm_head.weight[:VOCAB]
    trainer = distill(
        student, teacher, completions(11), completions(7, seed=4), losses=LOSSES, beta=0.3, temperature=2.0, **EPOCH
    )
    how = trainer.fused.options.distillation
    terms = ("jsd", "reverse_kl", "ce")
    assert how == Distillation({"jsd": 0.5, "reverse_kl": 1.0}, 0.3, 0.25, 2.0, True, VOCAB, terms=terms)
    evaluated = trainer.evaluate()
    want = by_hand(student, teacher, trainer.eval_dataset, how)
    assert 0 < want["agreement_at_1"] < 1
    assert_logged(evaluated, want, "eval_")
    assert evaluated["eval_perplexity"] == evaluated["eval_student_perplexity"]
    logs = trained(trainer).state.log_history[-2]
    assert_logged(logs, by_hand(student, teacher, trainer.train_dataset, how))
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(logs)
    assert logs["perplexity"] == logs["student_perplexity"]


@pytest.mark.parametrize("form", ["packing_bfd", "padding_free", "assistant_only_loss"])
def test_distillation_is_that_of_rows_one_by_one(form):
    """Documents in a pack do not see each other, in student and teacher."""
    _, rows, options = FORMS[form]
    data, teacher = rows(12), tiny_model("phi", seed=5)
    trainer = trained(distill(tiny_model(), teacher, data, **EPOCH, **options))
    apart = distill(trainer.model, teacher, data, **{**options, "packing": False, "padding_free": False})
    want = by_hand(tiny_model(), teacher, apart.train_dataset, trainer.fused.options.distillation)
    assert_logged(trainer.state.log_history[0], want)


# What is stored

BOTH = pytest.mark.parametrize("make", [sft, distill])


@BOTH
@pytest.mark.parametrize("form", ["packing", "label_smoothing"])
def test_no_logits_of_a_batch_exist_in_train_or_eval(make, form, monkeypatch):
    options = {"packing": True, "max_length": 32} if form == "packing" else {"label_smoothing_factor": 0.1}
    options |= {"losses": LOSSES} if make is distill else {}
    trainer = make(data=texts(), eval_data=texts(8, seed=3), max_steps=1, **options)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        trainer.train()
        trainer.evaluate()
    assert 0 < seen.rows <= 8
    if (make, form) == (sft, "label_smoothing"):  # the watch sees them where they are
        stock = sft(data=texts(), cls=SFTTrainer, max_steps=1, **options)
        with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
            stock.train()
        assert seen.rows >= 4 * 8


@BOTH
def test_compute_metrics_gets_logits_and_leaves_the_rest_as_it_is(make):
    shapes = []

    def compute_metrics(prediction):
        shapes.append(prediction.predictions.shape)
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[prediction.label_ids[:, 1:] != -100].mean()}

    model, rows = tiny_model(), {"data": completions(8, 3), "eval_data": completions(8, 3)}
    got = make(model, **rows, compute_metrics=compute_metrics, per_device_eval_batch_size=8).evaluate()
    want = make(model, **rows, per_device_eval_batch_size=8).evaluate()
    assert shapes == [(8, shapes[0][1], VOCAB)]
    assert got.pop("eval_accuracy") == pytest.approx(got["eval_mean_token_accuracy"], rel=1e-6)
    assert make is sft or got["eval_loss"] == pytest.approx(want["eval_forward_kl"], rel=1e-5)
    for name in (name for name in want if "time" not in name and "_per_second" not in name):
        assert got[name] == want[name], name


@BOTH
def test_trainers_of_one_model_take_turns(make):
    """The loss is on the model, and each trainer's is its own."""
    rows = {"eval_data": completions(4, 3), "max_steps": 2, "learning_rate": 0.0}
    options = [{"label_smoothing_factor": 0.3}, {}] if make is sft else [{"temperature": 4.0}, {"temperature": 1.0}]
    model = tiny_model()
    separate, both = ([make(of(), **rows, **more) for more in options] for of in (tiny_model, lambda: model))
    sft(model)
    want, got = ([(t.evaluate()["eval_loss"], logged(trained(t))) for t in group] for group in (separate, both))
    assert got == want and want[0][0] != pytest.approx(want[1][0], rel=1e-3)
    assert [t.evaluate()["eval_loss"] for t in both] == [loss for loss, _ in want]
    assert both[0].patched is both[1].patched and both[0].patched.fused is both[1].fused
