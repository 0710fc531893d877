"""LigerDistillTrainer: one loss however a batch is split, logs against values by hand, the teacher, its errors."""

import dataclasses
import functools
import json
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from processes import run_on
from safetensors import safe_open
from splits import QUICK, ROWS, SPLITS, capture_gradients, one_step
from tiny import (
    VOCAB,
    chats,
    completions,
    divergence_by_hand,
    double_copy,
    largest_vocabulary_tensor,
    shift_labels_of,
    texts,
    tiny_model,
    tiny_tokenizer,
    train_args,
)  # fmt: skip
from transformers import TrainerCallback
from trl import SFTConfig

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer, PatchOptions, patch
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.losses.spec import Distillation
from liger_trainer.patching.patcher import patched_record

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")


def make(student=None, teacher=None, data=None, eval_data=None, peft_config=None, **options):
    return LigerDistillTrainer(
        student or tiny_model(), teacher_model=teacher or tiny_model("gemma2", seed=5, hidden_size=48),
        args=train_args(LigerDistillConfig, **options), train_dataset=data or completions(), eval_dataset=eval_data,
        processing_class=tiny_tokenizer(), peft_config=peft_config,
    )  # fmt: skip


# However a batch is split


def assert_same_step(got, want):
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    total = torch.stack([g.double().norm() for g in want["gradients"].values()]).norm()
    assert total > 1e-2
    for name, gradient in want["gradients"].items():
        error = (got["gradients"][name] - gradient).double().norm()
        assert error <= 1e-6 * total, f"{name}: {error / total:.2e} of the whole gradient"
    for name, value in want["logs"].items():  # over tokens
        if name not in ("entropy", "mean_token_accuracy"):  # as in TRL, means over micro-batches
            assert got["logs"][name] == pytest.approx(value, rel=1e-5), name


@functools.cache
def whole_batch(objective):
    return one_step(objective, batch=8, accumulation=1)


def test_the_split_is_one_that_a_mean_of_means_gets_wrong():
    lengths = [len(row["completion"].split()) for row in ROWS]
    assert len(ROWS) == 8 and sum(lengths[:4]) != sum(lengths[4:]) and len(set(lengths)) > 4


@pytest.mark.parametrize("objective", ["ce", "kd", "hidden", "on_policy"])  # the others: in two processes
def test_micro_batches_equal_one_batch(objective):
    assert_same_step(one_step(objective, batch=1, accumulation=8), whole_batch(objective))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The step of an objective in two processes with four rows each, which is run with all that are as quick."""

    @functools.cache
    def of(speed):
        out = tmp_path_factory.mktemp("two")
        run_on(2, "splits.py", out / "result.pt", speed)
        return torch.load(out / "result.pt")

    return lambda *split: of("quick" if split in QUICK else "slow")[split]


@pytest.mark.parametrize(
    ("objective", "accumulation"),
    [pytest.param(*split, marks=[] if split in QUICK else pytest.mark.slow) for split in SPLITS],
)
def test_two_processes_equal_one(two_processes, objective, accumulation):
    got, want = two_processes(objective, accumulation), whole_batch(objective)
    assert_same_step(got, want)
    assert objective in ("on_policy", "seq_kd") or got["logs"]["num_tokens"] == sum(
        len(f"{r['prompt']}{r['completion']}".split()) + 1 for r in ROWS
    )


# Layers


def test_the_layers_of_student_and_teacher_are_patched_and_said_so(capsys):
    teacher = tiny_model("gemma2", seed=5, hidden_size=48)
    trainer = make(teacher=teacher)
    assert trainer.patched is patched_record(trainer.model) and trainer.fused is trainer.patched.fused
    assert trainer.teacher_patched is patched_record(teacher) and trainer.teacher_patched.fused is None
    assert {"RMSNorm", "SwiGLU", "rope", "fused loss"} <= set(trainer.patched.report.swapped)
    assert {"RMSNorm", "GEGLU"} <= set(trainer.teacher_patched.report.swapped)
    out = capsys.readouterr().out
    assert f"liger-trainer: {trainer.patched.report}\n" in out
    assert f"liger-trainer: teacher: {trainer.teacher_patched.report}\n" in out


def test_liger_kernel_config_is_of_both():
    trainer = make(liger_kernel_config={"rms_norm": False}, use_liger_kernel=True)
    for record in (trainer.patched, trainer.teacher_patched):
        assert "RMSNorm" not in record.report.swapped and "rope" in record.report.swapped


def test_a_teacher_with_nothing_to_replace_is_as_good():
    every = {f.name: False for f in dataclasses.fields(PatchOptions) if f.name != "fused_linear_cross_entropy"}
    del every["cross_entropy"]
    losses = []
    for config in (every, None):
        trainer = make(liger_kernel_config=config, max_steps=1)
        assert (trainer.teacher_patched is None) == (config is not None)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_teacher_that_was_patched_before_stays_so():
    teacher = tiny_model("gemma2", seed=5, hidden_size=48)
    record = patch(teacher, geglu=False)
    trainer = make(teacher=teacher, max_steps=1)
    assert trainer.teacher_patched is record and record.fused is not None
    trainer.train()


# Logs


def token_values(student, teacher, dataset, how, vocab=VOCAB):
    """Sums over the supervised tokens of what is logged, from real logits in fp64, and their number."""
    student, teacher = double_copy(student), double_copy(teacher)
    rows = []
    for row in dataset:
        ids = torch.tensor([row["input_ids"]])
        labels = shift_labels_of(torch.tensor([row["labels"]]))[0]
        keep = labels != -100
        with torch.no_grad():
            s, t = (m(input_ids=ids).logits[0, keep, :vocab] for m in (student, teacher))
        q, p = s.log_softmax(-1), t.log_softmax(-1)
        soft = sum(w * divergence_by_hand(s, t, k, how.temperature, how.beta) for k, w in how.weights.items() if w)
        hard, teachers = (-x.gather(-1, labels[keep, None])[:, 0] for x in (q, p))
        kls = (divergence_by_hand(s, t, kind, 1.0) for kind in ("forward_kl", "reverse_kl"))
        agree, entropy = (s.argmax(-1) == t.argmax(-1)).double(), -(p.exp() * p).sum(-1)
        rows.append(torch.stack([how.temperature**2 * soft, hard, *kls, agree, teachers, entropy]))
    return torch.cat(rows, 1)


def expected_logs(values):
    kd, ce, fkl, rkl, agree, teacher_nll, entropy = values.mean(1).tolist()
    return {
        "kd_loss": kd, "ce_loss": ce, "forward_kl": fkl, "reverse_kl": rkl, "agreement_at_1": agree,
        "student_perplexity": math.exp(ce), "teacher_perplexity": math.exp(teacher_nll), "teacher_entropy": entropy,
    }  # fmt: skip


LOSSES = [{"type": "jsd", "weight": 0.5, "beta": 0.3}, {"type": "reverse_kl"}, {"type": "ce", "weight": 0.25}]


def test_logs_equal_values_by_hand_in_train_and_eval():
    # Both heads are padded beyond the tokenizer's vocabulary.
    student = tiny_model("llama_tied", vocab_size=VOCAB + 3)
    teacher = tiny_model("gemma2", seed=5, hidden_size=48, vocab_size=VOCAB + 8)
    # So near the teacher that some tokens agree.
    with torch.no_grad():
        teacher.get_output_embeddings().weight[:VOCAB, :32] += student.lm_head.weight[:VOCAB]
    trainer = make(
        student, teacher, completions(11), completions(7, seed=4), losses=LOSSES, beta=0.3, temperature=2.0,
        learning_rate=0.0, num_train_epochs=1, max_steps=-1, logging_strategy="epoch",
    )  # fmt: skip
    how = trainer.fused.options.distillation
    terms = ("jsd", "reverse_kl", "ce")
    assert how == Distillation({"jsd": 0.5, "reverse_kl": 1.0}, 0.3, 0.25, 2.0, True, VOCAB, terms=terms)
    evaluated = trainer.evaluate()
    want = expected_logs(token_values(student, teacher, trainer.eval_dataset, how))
    assert 0 < want["agreement_at_1"] < 1
    for name, value in want.items():
        assert evaluated[f"eval_{name}"] == pytest.approx(value, rel=1e-5), name
    trainer.train()
    values = token_values(student, teacher, trainer.train_dataset, how)
    logged = trainer.state.log_history[-2]
    for name, value in expected_logs(values).items():
        assert logged[name] == pytest.approx(value, rel=1e-5), name
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(logged)
    assert logged["perplexity"] == logged["student_perplexity"]
    assert evaluated["eval_perplexity"] == evaluated["eval_student_perplexity"]


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 32}, {"label_smoothing_factor": 0.1}],
                         ids=["packing", "label_smoothing"])  # fmt: skip
def test_no_logits_of_a_batch_exist_in_train_or_eval(options, monkeypatch):
    trainer = make(data=texts(), eval_data=texts(8, seed=3), losses=LOSSES, max_steps=1, **options)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        trainer.train()
        trainer.evaluate()
    assert 0 < seen.rows <= 8


def test_compute_metrics_leaves_the_objective_and_its_logs_as_they_are():
    def compute_metrics(prediction):
        return {"vocabulary": prediction.predictions.shape[-1]}

    student, teacher, data = tiny_model(), tiny_model("phi", seed=5), completions(8, 3)
    trainer = LigerDistillTrainer(
        student, teacher_model=teacher, args=train_args(LigerDistillConfig, per_device_eval_batch_size=8),
        train_dataset=data, eval_dataset=data, processing_class=tiny_tokenizer(), compute_metrics=compute_metrics,
    )  # fmt: skip
    got = trainer.evaluate()
    assert got.pop("eval_vocabulary") == VOCAB
    want = make(student, teacher, data, data, per_device_eval_batch_size=8).evaluate()
    assert got["eval_loss"] == pytest.approx(want["eval_forward_kl"], rel=1e-5)
    for name in (name for name in want if "time" not in name and "_per_second" not in name):
        assert got[name] == want[name], name


# The objective


def gradient_of(**options):
    trainer = make(data=completions(4), max_steps=1, optim="sgd", **options)
    captured = capture_gradients(trainer)
    trainer.train()
    return trainer.state.log_history[0], torch.cat([g.flatten() for g in captured.values()])


def test_temperature_squared_scales_value_and_gradient():
    logs, gradient = gradient_of(temperature=3.0)
    plain_logs, plain = gradient_of(temperature=3.0, scale_loss_by_temperature_squared=False)
    for name in ("loss", "kd_loss"):
        assert logs[name] == pytest.approx(9 * plain_logs[name], rel=1e-5)
    torch.testing.assert_close(gradient, 9 * plain, rtol=1e-4, atol=1e-6)
    # The KLs are logged at temperature 1, whatever the loss's is; and the temperature matters to the loss.
    cold_logs, cold = gradient_of(temperature=1.0)
    assert cold_logs["forward_kl"] == pytest.approx(logs["forward_kl"], rel=1e-6)
    assert cold_logs["loss"] == pytest.approx(cold_logs["forward_kl"], rel=1e-5)
    assert abs(cold_logs["loss"] - logs["loss"]) > 1e-2 and (cold - gradient).norm() > 1e-2 * cold.norm()


def test_temperature_and_its_square_leave_cross_entropy_alone():
    (logs, gradient), (hot_logs, hot) = (gradient_of(losses=[{"type": "ce"}], temperature=t) for t in (1.0, 4.0))
    assert logs["loss"] == hot_logs["loss"] == pytest.approx(logs["ce_loss"], rel=1e-5)
    assert torch.equal(gradient, hot)


@pytest.mark.parametrize(
    "options, weights",
    [
        ({}, {"forward_kl": 1.0}),
        ({"beta": 1.0}, {"reverse_kl": 1.0}),
        ({"beta": 0.4}, {"jsd": 1.0}),
        ({"losses": '[{"type": "reverse_kl"}, {"type": "jsd", "weight": 0.5}]', "beta": 0.5},
         {"reverse_kl": 1.0, "jsd": 0.5}),
        ({"losses": [{"type": "ce", "weight": 0.3}]}, {}),
    ],
)  # fmt: skip
def test_what_the_options_mean(options, weights):
    config = train_args(LigerDistillConfig, **options)
    how = config.distillation(50)
    assert how.weights == weights
    assert how.beta == config.beta and how.vocab_size == 50 and how.temperature == 1.0
    assert how.ce_weight == (0.3 if "'ce'" in str(options) else 0.0)


def test_label_smoothing_is_of_the_cross_entropy():
    losses = [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}]
    (logs, _), (smooth, _) = (gradient_of(losses=losses, label_smoothing_factor=x) for x in (0.0, 0.3))
    assert logs["loss"] == pytest.approx(logs["kd_loss"] + 0.5 * logs["ce_loss"], rel=1e-5)
    assert smooth["loss"] > logs["loss"] + 1e-3
    assert smooth["kd_loss"] == pytest.approx(logs["kd_loss"], rel=1e-6)


def test_a_mixture_of_experts_learns_with_its_auxiliary_loss():
    (plain, _), (logs, _) = (gradient_of(student=tiny_model("mixtral"), router_aux_loss_coef=x) for x in (0.0, 0.2))
    assert "aux_loss" not in plain
    assert logs["loss"] == pytest.approx(plain["loss"] + 0.2 * logs["aux_loss"], rel=1e-5)


# Training


@pytest.mark.parametrize("teachers", ["model", "models"])
def test_a_fresh_trainer_measures_what_the_one_that_trained_does(tmp_path, teachers):
    """To the last bit, in bf16 too: transformers evaluates before training with whatever accelerate has prepared."""
    data, of_eval = completions(), completions(8, seed=8)
    teacher, several = tiny_model("gemma2", seed=5, hidden_size=48), {}
    if teachers == "models":
        several = {"teachers": [{"name": "a"}, {"name": "b", "weight": 0.5}]}
        teacher = {"a": teacher, "b": tiny_model(seed=7)}
    trainer = make(teacher=teacher, data=data, eval_data=of_eval, bf16=True, max_steps=2, learning_rate=1e-2, **several)
    trainer.train()
    student = tiny_model()
    student.load_state_dict(trainer.model.state_dict())
    measured, again = (
        {k: v for k, v in t.evaluate().items() if "_per_second" not in k and "time" not in k}
        for t in (trainer, make(student, teacher, data, of_eval, bf16=True, **several))
    )
    changing = {"eval_num_tokens", "epoch"}
    assert {k: measured[k] for k in measured.keys() - changing} == {k: again[k] for k in again.keys() - changing}


def test_bf16_autocast_stays_near_fp32():
    logs = []
    for bf16 in (False, True):
        trainer = make(data=texts(8), eval_data=texts(8, seed=8), losses=LOSSES, bf16=bf16, max_steps=2,
                       gradient_checkpointing=True)  # fmt: skip
        evaluated = trainer.evaluate()
        trainer.train()
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
        logs.append({**evaluated, **trainer.state.log_history[-2]})
    want, got = logs
    compared = ("loss", "eval_loss", "eval_forward_kl", "eval_reverse_kl", "eval_ce_loss", "eval_teacher_entropy")
    for name in compared:
        assert got[name] == pytest.approx(want[name], rel=0.02), name
    assert got["eval_loss"] != want["eval_loss"]


def test_packing_and_assistant_only_loss():
    for data, options in (
        (completions(12), {"packing": True, "max_length": 24}),
        (completions(12), {"padding_free": True, "max_length": None}),
        (chats(12), {"assistant_only_loss": True}),
    ):
        student, teacher = tiny_model(), tiny_model("phi", seed=5)
        trainer = make(student, teacher, data, learning_rate=0.0, num_train_epochs=1, max_steps=-1,
                       logging_strategy="epoch", **options)  # fmt: skip
        trainer.train()
        # The same rows one by one: documents in a pack do not see each other, in student and teacher.
        alone = make(student, teacher, data, **{**options, "packing": False, "padding_free": False})
        want = expected_logs(
            token_values(tiny_model(), teacher, alone.train_dataset, trainer.fused.options.distillation)
        )
        for name, value in want.items():
            assert trainer.state.log_history[0][name] == pytest.approx(value, rel=1e-5), (options, name)


def test_lora_students_train_adapters_only():
    student = tiny_model()
    before = {name: p.clone() for name, p in student.named_parameters()}
    config = LoraConfig(target_modules="all-linear", r=4)
    trainer = make(student, eval_data=texts(8), data=texts(16), peft_config=config, max_steps=12, learning_rate=1e-2)
    first = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_forward_kl"] < 0.9 * first["eval_forward_kl"]
    now = {name.replace("base_layer.", ""): p for name, p in trainer.model.get_base_model().named_parameters()}
    assert all(torch.equal(now[name], p) for name, p in before.items())


def test_a_callback_that_leaves_eval_mode_leaves_the_log_of_its_step_alone():
    class Generate(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.eval()

    options = {"max_steps": 2, "schedules": {"temperature": {"to": 2.0}}}
    alone, trainer = make(**options), make(**options)
    trainer.add_callback(Generate())
    for each in (alone, trainer):
        each.train()
    want, got = ([log for log in t.state.log_history if "loss" in log] for t in (alone, trainer))
    assert len(got) == 2 and got == want and "kd_loss" in got[0]


def test_trainers_of_one_student_take_turns():
    alone = [make(max_steps=2, learning_rate=0.0, temperature=temperature) for temperature in (4.0, 1.0)]
    student = tiny_model()
    both = [make(student, max_steps=2, learning_rate=0.0, temperature=temperature) for temperature in (4.0, 1.0)]
    LigerTrainer(student, args=train_args(SFTConfig), train_dataset=completions(), processing_class=tiny_tokenizer())
    for trainer in (*alone, *both):
        trainer.train()
    want, got = ([[log.get("loss") for log in t.state.log_history] for t in group] for group in (alone, both))
    assert got == want and got[0] != got[1]


def test_what_a_student_puts_in_front_of_its_rows_is_refused():
    """Prompt tuning does; prefixes are keys and values, and no positions."""
    with pytest.raises(ConfigError, match="PROMPT_TUNING: the student would read positions in front of each row"):
        make(peft_config=PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    prefixes = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="PREFIX_TUNING: .*gradient_checkpointing=False"):
        make(peft_config=prefixes, gradient_checkpointing=True)
    trainer = make(peft_config=prefixes, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kd_loss"] > 0


# The teacher


def test_the_teacher_is_frozen_and_no_part_of_what_is_trained_and_saved(tmp_path):
    teacher = tiny_model("gemma2", seed=5, hidden_size=48).train()
    trainer = make(teacher=teacher, max_steps=2, save_strategy="steps", save_steps=2, output_dir=str(tmp_path))
    trainer.train()
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    pairs = zip(trainer.model.parameters(), tiny_model().parameters(), strict=True)
    assert not any(torch.equal(now, before) for now, before in pairs)
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained.isdisjoint(id(p) for p in teacher.parameters())
    assert trained == {id(p) for p in trainer.model.parameters()}
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(tiny_model().state_dict())
        assert weights.get_tensor("lm_head.weight").shape == (VOCAB, 32)
    assert "forward" not in vars(teacher.get_output_embeddings())


def with_dropout(model, p=0.5):
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, p)
    model.config.attention_dropout = p
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
        if isinstance(module, torch.nn.Dropout):
            module.p = p
    return model


def train_logs(**options):
    trainer = make(data=completions(4), max_steps=2, learning_rate=0.0, **options)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history[:2]]


def test_the_teachers_dropout_is_off_and_the_students_can_be():
    plain = train_logs()
    assert train_logs(teacher=with_dropout(tiny_model("gemma2", seed=5, hidden_size=48)).train()) == plain
    own = train_logs(student=with_dropout(tiny_model("phi")))
    assert abs(own[0] - own[1]) > 1e-3
    without = train_logs(student=with_dropout(tiny_model("phi")), disable_dropout=True)
    assert without == train_logs(student=tiny_model("phi"))


def test_a_teacher_by_its_directory(tmp_path):
    teacher = tiny_model("gemma2", seed=5, hidden_size=48)
    teacher.save_pretrained(tmp_path)
    want = train_logs(teacher=teacher)
    args = train_args(LigerDistillConfig, teacher_model_name_or_path=str(tmp_path), max_steps=2, learning_rate=0.0)
    trainer = LigerDistillTrainer(
        tiny_model(), args=args, train_dataset=completions(4), processing_class=tiny_tokenizer()
    )
    assert trainer.teacher.dtype == torch.float32 and not trainer.teacher.training
    assert trainer.teacher_model is trainer.teacher  # its name in TRL's trainers
    trainer.train()
    assert [log["loss"] for log in trainer.state.log_history[:2]] == want


def test_the_teachers_own_dtype(tmp_path):
    tiny_model("gemma2", seed=5, hidden_size=48).save_pretrained(tmp_path)
    trainer = make(teacher=str(tmp_path), teacher_model_init_kwargs='{"dtype": "bfloat16"}', data=completions(4),
                   max_steps=1, learning_rate=0.0)  # fmt: skip
    assert trainer.teacher.dtype == torch.bfloat16 and trainer.model.dtype == torch.float32
    trainer.train()
    got, want = trainer.state.log_history[0]["loss"], train_logs()[0]
    assert got == pytest.approx(want, rel=0.05) and got != want  # the teacher's rounding, and no more


@pytest.mark.parametrize("bf16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_what_reaches_the_loading_of_a_teacher(monkeypatch, bf16, dtype):
    seen = {}

    def create_model_from_path(path, **kwargs):
        seen.update(path=path, **kwargs)
        return tiny_model("phi"), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    monkeypatch.setattr("liger_trainer.teachers.placement.create_model_from_path", create_model_from_path)
    options = {"teacher_model_revision": "v2", "teacher_model_init_kwargs": {"attn_implementation": "eager"}}
    make(teacher="some/teacher", bf16=bf16, **options)
    assert seen == {
        "path": "some/teacher", "revision": "v2", "attn_implementation": "eager", "trust_remote_code": False,
        "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True,
    }  # fmt: skip


# Errors


@pytest.mark.parametrize(
    "options, message",
    [
        ({"beta": 1.5}, "beta: expected a number of at most 1, got 1.5"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"temperature": float("inf")}, "temperature: expected a finite number, got inf"),
        ({"losses": [{"type": "ce", "weight": 0}]}, "every weight is 0, so nothing would be learned"),
        ({"loss_type": "dft"}, "loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'"),
        ({"losses": []}, r"losses must be a list such as .*, got \[\]"),
        ({"losses": ["ce"]}, "Each of losses needs a type out of forward_kl, reverse_kl, jsd, .*; got 'ce'"),
        ({"losses": [{"type": "kl"}]}, "Each of losses needs a type out of .*; got {'type': 'kl'}"),
        ({"losses": [{"type": "ce", "beta": 1.0}]}, "losses: ce: beta: unknown key. Known: type, weight"),
        ({"losses": [{"type": "ce", "weight": "much"}]}, "losses: ce: weight: expected a number, got 'much'"),
        ({"losses": [{"type": "ce"}, {"type": "ce"}]}, "losses names ce twice"),
        ({"kd_temperature": 2.0, "losses": [{"type": "ce"}]}, "kd_temperature: has no effect: nothing in the loss"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: has no effect: it is of the cross-entropy"),
        ({"teacher": "self", "teacher_tokenizer_name_or_path": "d"}, "teacher_tokenizer_name_or_path: has no effect"),
        ({"verify_teacher_cache": True}, "verify_teacher_cache: has no effect without `teacher: cache`"),
    ],
)
def test_wrong_values_of_the_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **options)


def test_the_configuration_survives_json():
    config = train_args(LigerDistillConfig, losses=LOSSES, teacher_model_init_kwargs={"dtype": "float32"}, beta=0.3)
    again = LigerDistillConfig(**{
        name: value for name, value in json.loads(config.to_json_string()).items()
        if name in ("losses", "teacher_model_init_kwargs", "beta")
    }, output_dir=config.output_dir, bf16=False, use_cpu=True)  # fmt: skip
    assert again.distillation() == config.distillation()


def test_wrong_arguments_of_the_trainer():
    def trainer(model, **kwargs):
        return LigerDistillTrainer(model, train_dataset=completions(), processing_class=tiny_tokenizer(), **kwargs)

    with pytest.raises(ConfigError, match="args must be a LigerDistillConfig, got SFTConfig"):
        trainer(tiny_model(), teacher_model=tiny_model(), args=train_args(SFTConfig))
    with pytest.raises(ConfigError, match="args must be a LigerDistillConfig, got NoneType"):
        trainer(tiny_model(), teacher_model=tiny_model())
    args = train_args(LigerDistillConfig)
    with pytest.raises(ConfigError, match="No teacher was given: pass teacher_model, or set teacher_model_name_or_p"):
        trainer(tiny_model(), args=args)
    for options in ({}, {"teacher": "self"}):  # in the arguments of a capture it says where to
        elsewhere = train_args(LigerDistillConfig, teacher_cache_dir="c", **options)
        with pytest.raises(ConfigError, match="teacher_cache_dir has no effect with teacher='"):
            trainer(tiny_model(), args=elsewhere)
    student = tiny_model()
    with pytest.raises(ConfigError, match="The student cannot be its own teacher"):
        trainer(student, teacher_model=student, args=args)
    adapters = get_peft_model(student, LoraConfig(target_modules=["q_proj"]))
    for options in ({"teacher_model": student}, {"teacher_model": {"a": student, "b": tiny_model()}}):
        with pytest.raises(ConfigError, match="its own teacher.*teacher='self'"):
            trainer(adapters, args=args, **options)
        assert any(parameter.requires_grad for parameter in adapters.parameters())
    with pytest.raises(ConfigError, match="teacher knows 40 tokens, but the student's tokenizer has 64"):
        trainer(tiny_model(), teacher_model=tiny_model(vocab_size=40, pad_token_id=1, eos_token_id=2), args=args)
    with pytest.raises(ConfigError, match="student knows 40 tokens, but the tokenizer has 64: resize its embeddings"):
        trainer(tiny_model(vocab_size=40, pad_token_id=1, eos_token_id=2), teacher_model=tiny_model(), args=args)
    with pytest.raises(ConfigError, match="compute_loss_func would take the place of distillation"):
        trainer(tiny_model(), teacher_model=tiny_model(), args=args, compute_loss_func=lambda *a, **k: 0)
    with pytest.raises(DataError, match="No row of the train dataset has a supervised token"):
        make(data=completions(), max_length=1)


def other_template(folder, template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return {"teacher_tokenizer_name_or_path": str(folder)}


@pytest.mark.parametrize("change, said", [("<assistant> w7", True), ("<assistant>", False)])
def test_a_teacher_with_another_chat_template_is_said_before_training(change, said, tmp_path, capsys):
    """Where it writes the rows otherwise: a template may differ in its text alone."""
    template = "{# another #}" + tiny_tokenizer().chat_template.replace("<assistant>", change)
    make(data=chats(4), max_steps=1, assistant_only_loss=True, **other_template(tmp_path, template))
    out = "".join(capsys.readouterr())
    assert ("teacher: reads chats in the student's chat template, and its own writes them otherwise" in out) == said


@pytest.mark.parametrize("options", [{"max_length": 64}, {"lmbda": 1.0, "max_completion_length": 30}], ids=str)
def test_a_teacher_with_fewer_positions_than_the_rows_have_tokens(options):
    rows = Dataset.from_list([{"prompt": "w1 w2", "completion": "w3 " * (30 if "max_length" in options else 2)}])
    with pytest.raises(ConfigError, match="the teacher has 24 positions in a table and none beyond"):
        make(data=rows, teacher=tiny_model("gpt2", max_position_embeddings=24), max_steps=1, **options)
