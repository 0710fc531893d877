"""LigerDistillTrainer: one loss however a batch is split, logs against values by hand, the teacher, its errors."""

import copy
import dataclasses
import functools
import json
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from processes import run_on
from safetensors import safe_open
from splits import QUICK, ROWS, SPLITS, capture_gradients, one_step
from tiny import VOCAB, chats, completions, kl, texts, tiny_model, tiny_tokenizer, train_args
from trainings import OnStep, a_teacher, distill, logged, trained
from trl import SFTConfig

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, PatchOptions, patch
from liger_trainer.errors import ConfigError
from liger_trainer.patching.patcher import patched_record

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "jsd", "weight": 0.5, "beta": 0.3}, {"type": "reverse_kl"}, {"type": "ce", "weight": 0.25}]


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
    teacher = a_teacher()
    trainer = distill(teacher=teacher)
    assert trainer.patched is patched_record(trainer.model) and trainer.fused is trainer.patched.fused
    assert trainer.teacher_patched is patched_record(teacher) and trainer.teacher_patched.fused is None
    assert {"RMSNorm", "SwiGLU", "rope", "fused loss"} <= set(trainer.patched.report.swapped)
    assert {"RMSNorm", "GEGLU"} <= set(trainer.teacher_patched.report.swapped)
    out = capsys.readouterr().out
    for name, record in (("", trainer.patched), ("teacher: ", trainer.teacher_patched)):
        assert f"liger-trainer: {name}{record.report}\n" in out
    trainer = distill(liger_kernel_config={"rms_norm": False}, use_liger_kernel=True)
    for record in (trainer.patched, trainer.teacher_patched):
        assert "RMSNorm" not in record.report.swapped and "rope" in record.report.swapped


def test_a_teacher_that_was_patched_before_stays_so_and_one_with_nothing_to_replace_is_as_good():
    record = patch(teacher := a_teacher(), geglu=False)
    trainer = trained(distill(teacher=teacher, max_steps=1))
    assert trainer.teacher_patched is record and record.fused is not None
    parts = {field.name for field in dataclasses.fields(PatchOptions)} - {"fused_linear_cross_entropy", "cross_entropy"}
    none = trained(distill(liger_kernel_config=dict.fromkeys(parts, False), max_steps=1))
    assert none.teacher_patched is None and logged(none) == pytest.approx(logged(trainer), rel=1e-5)


# The objective


def gradient_of(**options):
    trainer = distill(data=completions(4), max_steps=1, optim="sgd", **options)
    captured = capture_gradients(trainer)
    return trained(trainer).state.log_history[0], torch.cat([g.flatten() for g in captured.values()])


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


def test_label_smoothing_is_of_the_cross_entropy_and_temperatures_are_not():
    losses = [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}]
    (logs, _), (smooth, _) = (gradient_of(losses=losses, label_smoothing_factor=x) for x in (0.0, 0.3))
    assert logs["loss"] == pytest.approx(logs["kd_loss"] + 0.5 * logs["ce_loss"], rel=1e-5)
    assert smooth["loss"] > logs["loss"] + 1e-3
    assert smooth["kd_loss"] == pytest.approx(logs["kd_loss"], rel=1e-6)
    (logs, gradient), (hot_logs, hot) = (gradient_of(losses=[{"type": "ce"}], temperature=t) for t in (1.0, 4.0))
    assert logs["loss"] == hot_logs["loss"] == pytest.approx(logs["ce_loss"], rel=1e-5)
    assert torch.equal(gradient, hot)


# Training


@pytest.mark.parametrize("teachers", ["model", "models"])
def test_a_fresh_trainer_measures_what_the_one_that_trained_does(teachers):
    """To the last bit, in bf16 too: transformers evaluates before training with whatever accelerate has prepared."""
    rows, teacher, several = {"eval_data": completions(8, seed=8)}, a_teacher(), {}
    if teachers == "models":
        several = {"teachers": [{"name": "a"}, {"name": "b", "weight": 0.5}]}
        teacher = {"a": teacher, "b": tiny_model(seed=7)}
    trainer = trained(distill(teacher=teacher, **rows, bf16=True, max_steps=2, learning_rate=1e-2, **several))
    student = tiny_model()
    student.load_state_dict(trainer.model.state_dict())
    changing = ("_per_second", "time", "eval_num_tokens", "epoch")
    measured, again = (
        {k: v for k, v in t.evaluate().items() if not any(word in k for word in changing)}
        for t in (trainer, distill(student, teacher, **rows, bf16=True, **several))
    )
    assert measured == again


def test_bf16_autocast_stays_near_fp32():
    logs = []
    for bf16 in (False, True):
        trainer = distill(data=texts(8), eval_data=texts(8, seed=8), losses=LOSSES, bf16=bf16, max_steps=2,
                          gradient_checkpointing=True)  # fmt: skip
        logs.append({**trainer.evaluate(), "loss": logged(trained(trainer))[-1]})
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    want, got = logs
    for name in ("loss", "eval_loss", *(f"eval_{name}" for name in
                 ("forward_kl", "reverse_kl", "ce_loss", "teacher_entropy"))):  # fmt: skip
        assert got[name] == pytest.approx(want[name], rel=0.02), name
    assert got["eval_loss"] != want["eval_loss"]


def test_a_callback_that_leaves_eval_mode_does_not_change_the_log_of_its_step():
    options = {"max_steps": 2, "schedules": {"temperature": {"to": 2.0}}}
    plain, trainer = distill(**options), distill(**options)
    trainer.add_callback(OnStep(trainer.model.eval))  # as one that generates
    want, got = ([log for log in trained(t).state.log_history if "loss" in log] for t in (plain, trainer))
    assert len(got) == 2 and got == want and "kd_loss" in got[0]


def test_what_a_student_puts_in_front_of_its_rows_is_refused():
    """Prompt tuning does; prefixes are keys and values, and no positions."""
    with pytest.raises(ConfigError, match="PROMPT_TUNING: the student would read positions in front of each row"):
        distill(peft_config=PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    prefixes = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="PREFIX_TUNING: .*gradient_checkpointing=False"):
        distill(peft_config=prefixes, gradient_checkpointing=True)
    assert logged(trained(distill(peft_config=prefixes, max_steps=1)), "kd_loss")[0] > 0


# The teacher


def test_the_teacher_is_frozen_and_no_part_of_what_is_trained_and_saved(tmp_path):
    teacher, saving = a_teacher().train(), {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    trainer = trained(distill(teacher=teacher, max_steps=2, **saving))
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    pairs = zip(trainer.model.parameters(), tiny_model().parameters(), strict=True)
    assert not any(torch.equal(now, before) for now, before in pairs)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized.isdisjoint(id(p) for p in teacher.parameters())
    assert optimized == {id(p) for p in trainer.model.parameters()}
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(tiny_model().state_dict())
        assert weights.get_tensor("lm_head.weight").shape == (VOCAB, 32)
    assert "forward" not in vars(teacher.get_output_embeddings())


def with_dropout(model, p=0.5):
    model.config.attention_dropout = p
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
        if isinstance(module, torch.nn.Dropout):
            module.p = p
    return model


def losses_of(**options):
    return logged(trained(distill(data=completions(4), max_steps=2, learning_rate=0.0, **options)))


def test_the_teachers_dropout_is_off_and_the_students_can_be():
    plain = losses_of()
    assert losses_of(teacher=with_dropout(a_teacher()).train()) == plain
    own = losses_of(student=with_dropout(tiny_model("phi")))
    assert abs(own[0] - own[1]) > 1e-3
    without = losses_of(student=with_dropout(tiny_model("phi")), disable_dropout=True)
    assert without == losses_of(student=tiny_model("phi"))


def test_a_teacher_by_its_directory(tmp_path):
    a_teacher().save_pretrained(tmp_path)
    trainer = distill(teacher=str(tmp_path), data=completions(4), max_steps=2, learning_rate=0.0)
    assert trainer.teacher.dtype == torch.float32 and not trainer.teacher.training
    assert trainer.teacher_model is trainer.teacher  # its name in TRL's trainers
    want = losses_of()
    assert logged(trained(trainer)) == losses_of(teacher_model_name_or_path=str(tmp_path)) == want
    rounded = losses_of(teacher=str(tmp_path), teacher_model_init_kwargs='{"dtype": "bfloat16"}')
    assert rounded == pytest.approx(want, rel=0.05) and rounded != want  # the teacher's rounding, and no more


# Errors


def test_the_configuration_survives_json():
    given = {"losses": LOSSES, "teacher_model_init_kwargs": {"dtype": "float32"}, "beta": 0.3}
    config = train_args(LigerDistillConfig, **given)
    written = json.loads(config.to_json_string())
    again = train_args(LigerDistillConfig, **{name: written[name] for name in given})
    as_text = train_args(LigerDistillConfig, **{**given, "losses": json.dumps(LOSSES)})
    assert again.distillation() == as_text.distillation() == config.distillation()


def test_wrong_arguments_of_the_trainer():
    student, other, small = tiny_model(), tiny_model(), tiny_model(vocab_size=40, pad_token_id=1, eos_token_id=2)
    adapters = get_peft_model(student, LoraConfig(target_modules=["q_proj"]))
    elsewhere = [train_args(LigerDistillConfig, teacher_cache_dir="c", teacher=kind) for kind in ("model", "self")]
    of_a_capture = "teacher_cache_dir has no effect with teacher='"  # where it says where to
    for given, message in (
        ({"args": train_args(SFTConfig)}, "args must be a LigerDistillConfig, got SFTConfig"),
        ({"args": None}, "args must be a LigerDistillConfig, got NoneType"),
        ({"teacher_model": None}, "No teacher was given: pass teacher_model, or set teacher_model_name_or_p"),
        *(({"teacher_model": None, "args": args}, of_a_capture) for args in elsewhere),
        ({"teacher_model": student, "model": student}, "The student cannot be its own teacher"),
        ({"teacher_model": student, "model": adapters}, "its own teacher.*teacher='self'"),
        ({"teacher_model": {"a": student, "b": other}, "model": adapters}, "its own teacher.*teacher='self'"),
        *(({"teacher_model": kind}, "expected a causal language model .*, got a ") for kind in (other.model, [other])),
        ({"teacher_model": tiny_model().to("meta")}, "teacher_model: expected .* on the meta device"),
        ({"teacher_model": Path("/no/teacher")}, "teacher_model: no such folder: /no/teacher"),
        ({"model": "/no/student"}, "^model: no such folder: /no/student$"),
        ({"teacher_model": small}, "teacher knows 40 tokens, but the student's tokenizer has 64"),
        ({"model": small}, "student knows 40 tokens, but the tokenizer has 64: resize its embeddings"),
        ({"compute_loss_func": lambda *a, **k: 0}, "compute_loss_func would take the place of distillation"),
    ):
        usual = {"model": tiny_model(), "teacher_model": other, "args": train_args(LigerDistillConfig)}
        with pytest.raises(ConfigError, match=message):
            LigerDistillTrainer(**{**usual, **given}, train_dataset=completions(), processing_class=tiny_tokenizer())
        assert any(parameter.requires_grad for parameter in adapters.parameters())


@pytest.mark.parametrize("form", [dict, lambda outputs: (outputs.logits,)])
def test_teachers_whose_outputs_are_of_another_form(form, monkeypatch):
    want, teacher = logged(trained(distill(max_steps=1))), a_teacher()
    forward = type(teacher).forward
    monkeypatch.setattr(teacher, "forward", lambda *args, **kwargs: form(forward(teacher, *args, **kwargs)))
    assert logged(trained(distill(teacher=teacher, max_steps=1))) == pytest.approx(want, rel=1e-5)


def test_heads_of_several_modules():
    student, teacher = tiny_model(), tiny_model(seed=2)
    for model in (student, teacher):
        model.lm_head = torch.nn.Sequential(torch.nn.LayerNorm(32), model.lm_head)
    truth = copy.deepcopy(student)
    how = {"max_steps": 1, "learning_rate": 0.0, "losses": [{"type": "forward_kl"}]}
    with warnings.catch_warnings(action="ignore"):  # whose logits are stored
        trainer = trained(distill(student, teacher, completions(4), **how))
    (batch,) = trainer.get_train_dataloader()
    keep = batch["labels"][:, 1:] != -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        p, q = (torch.log_softmax(m(**inputs).logits[:, :-1][keep], -1) for m in (teacher, truth))
    assert logged(trainer) == pytest.approx([kl(p, q).mean().item()], rel=1e-4)


def other_template(folder, template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return {"teacher_tokenizer_name_or_path": str(folder)}


@pytest.mark.parametrize("change, said", [("<assistant> w7", True), ("<assistant>", False)])
def test_a_teacher_with_another_chat_template_is_said_before_training(change, said, tmp_path, capsys):
    """Where it writes the rows otherwise: a template may differ only in its text."""
    template = "{# another #}" + tiny_tokenizer().chat_template.replace("<assistant>", change)
    distill(data=chats(4), max_steps=1, assistant_only_loss=True, **other_template(tmp_path, template))
    out = "".join(capsys.readouterr())
    assert ("teacher: reads chats in the student's chat template, and its own writes them otherwise" in out) == said


@pytest.mark.parametrize("options", [{"max_length": 64}, {"lmbda": 1.0, "max_completion_length": 30}], ids=str)
def test_a_teacher_with_fewer_positions_than_the_rows_have_tokens(options):
    rows = Dataset.from_list([{"prompt": "w1 w2", "completion": "w3 " * (30 if "max_length" in options else 2)}])
    with pytest.raises(ConfigError, match="the teacher has 24 positions in a table and none beyond"):
        distill(data=rows, teacher=tiny_model("gpt2", max_position_embeddings=24), max_steps=1, **options)
