"""`teacher: self` equals a copy of the base as teacher: losses, gradients, logs; and leaves the student as it was."""

import copy
import gc
from functools import partial

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from quick_cases import slow_but
from tiny import assert_same_gradients, completions, masked_batch, tiny_model
from torch import nn
from trainings import distill, measured, sft, step

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError
from liger_trainer.teachers.adapters_off import SelfTeacher, without_adapters

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about tied weights
TOKENS = masked_batch()["input_ids"][0, :3].tolist()
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]
CASES = {
    "lora": ("qwen3", {"target_modules": "all-linear"}),
    "geglu and softcap": ("gemma2", {"target_modules": "all-linear"}),
    "dropout": ("llama", {"target_modules": "all-linear", "lora_dropout": 0.4}),
    "lm_head, dora": ("llama", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    "lm_head, tied": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "saved embeddings and lm_head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "trained tokens": ("llama_tied", {"trainable_token_indices": TOKENS}),
    "another tuner of layers": ("qwen3", IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False)),
}  # fmt: skip


def student(case="lora", config=None):
    """With adapters that are not zero, in train mode."""
    family, options = CASES[case]
    torch.manual_seed(1)
    if isinstance(options, dict):
        options = LoraConfig(**{"r": 3, "lora_alpha": 5, "init_lora_weights": False, **options})
    model = get_peft_model(tiny_model(family), config or copy.deepcopy(options))
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model.train()


def make(model, teacher="self", data=None, **options):
    options = {"losses": LOSSES, "beta": 0.3, "temperature": 2.0, "max_steps": 1, "optim": "sgd", **options}
    return distill(model, teacher, data or completions(4), completions(3, 5), **options)


def seeded_step(trainer):
    torch.manual_seed(7)  # dropout
    return step(trainer)


@pytest.mark.parametrize("case", slow_but(CASES, "dropout", "lm_head, tied", "another tuner of layers"))
def test_it_equals_a_copy_of_the_base(case):
    trainer, other = make(student(case)), make(student(case), tiny_model(CASES[case][0]))
    assert measured(trainer.evaluate()) == pytest.approx(measured(other.evaluate()), rel=1e-5)
    (logs, gradients), (want_logs, want) = seeded_step(trainer), seeded_step(other)
    assert want_logs["forward_kl"] > 1e-3  # the adapters matter
    assert logs == pytest.approx(want_logs, rel=1e-5)
    assert_same_gradients(gradients, want, 1e-4)


@pytest.mark.parametrize("options", [
    pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"packing": True, "max_length": 24, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    {"bf16": True},
], ids=["checkpointing", "reentrant", "packing", "bf16"])  # fmt: skip
def test_options_of_the_trainer(options):
    logs, gradients = seeded_step(make(student("dropout"), **options))
    want_logs, want = seeded_step(make(student("dropout"), tiny_model(), **options))
    rel = 2e-2 if "bf16" in options else 1e-5
    assert logs == pytest.approx(want_logs, rel=rel)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=rel * 10, atol=rel * 0.1, msg=name)


def state_of(model):
    return [
        (name, module.training, getattr(module, "_disable_adapters", None), getattr(module, "_active_adapter", None))
        for name, module in model.named_modules()
    ] + [(name, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()]


def test_afterwards_everything_is_as_it_was():
    model = student("saved embeddings and lm_head")
    model.base_model.model.model.layers[0].eval()  # no rule of PEFT's or torch's would bring these back
    next(p for name, p in model.named_parameters() if "lora_A" in name).requires_grad_(False)
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    layer._disable_adapters = True
    trainer = make(model)
    before, forwards = state_of(model), [m for m in model.modules() if "forward" in vars(m)]
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    trainer.teaching.answer(batch)
    assert state_of(model) == before and "labels" in batch
    assert [m for m in model.modules() if "forward" in vars(m)] == forwards
    with pytest.raises(ZeroDivisionError), without_adapters(model):
        assert not any(m.training for m in model.modules())
        _ = 1 / 0
    assert state_of(model) == before


def test_no_weight_is_copied():
    model = student()

    def weights():
        gc.collect()
        return sum(isinstance(x, nn.Parameter) for x in gc.get_objects())

    trainer = make(model)
    before = weights()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    logits = trainer.teaching.answer(batch)
    head = model.get_base_model().lm_head
    assert logits.head.weight.data_ptr() == getattr(head, "base_layer", head).weight.data_ptr()
    trainer.train()
    del logits
    assert weights() == before and trainer.teacher is None and trainer.teacher_patched is None


def test_the_teacher_can_generate():
    model, prompt = student(), {"input_ids": masked_batch()["input_ids"][:1], "max_new_tokens": 6, "do_sample": False}
    trainer = make(model)
    with trainer.teaching.live() as live:
        taught = live[""].generate(**prompt)
    assert torch.equal(taught, tiny_model("qwen3").generate(**prompt))
    assert not torch.equal(taught, model.eval().generate(**prompt))


def merged():
    model = student()
    model.base_model.merge_adapter()
    return model


def lora(model=None, **options):
    return get_peft_model(model or tiny_model(), LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}))


def begun_by(start):
    """PEFT moves part of the base into such adapters, so the base without them is not the model before training."""
    if start in ("pissa", "pissa_niter_2", "olora"):
        return lora(init_lora_weights=start)
    model = lora()  # needs data, or more packages
    model.peft_config["default"].init_lora_weights = start
    return model


REFUSED = {
    "no adapters": (tiny_model, "the student has none. Train adapters"),
    "prompt learning": (
        lambda: student(config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), "prompt learning",
    ),
    "trained biases": (lambda: lora(tiny_model("phi"), target_modules=["q_proj"], bias="all"), "are trained too"),
    "merged": (merged, "call unmerge_adapter"),
    **{start: (partial(begun_by, start), f"init_lora_weights='{start}' of the adapter 'default' moves part of the")
       for start in ("pissa", "pissa_niter_2", "olora", "corda", "loftq", "lora_ga")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_students_that_cannot_teach_themselves(case):
    model, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        make(model())


def test_a_model_beside_it_and_fsdp1_are_refused():
    with pytest.raises(ConfigError, match="teacher='self' takes no model"):
        sft(student(), cls=LigerDistillTrainer, config=LigerDistillConfig, teacher="self", teacher_model=tiny_model())
    trainer = make(student())
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="teacher: self does not work with FSDP1"):
        SelfTeacher().prepare(trainer)


@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_alone_begins_at_a_divergence_of_0(start):
    torch.manual_seed(0)
    trainer = make(lora(init_lora_weights=start), losses=[{"type": "forward_kl"}])
    evaluated = trainer.evaluate()
    assert abs(evaluated["eval_forward_kl"]) < 1e-6 and evaluated["eval_agreement_at_1"] == 1.0
    trainer.train()
    assert abs(trainer.state.log_history[0]["forward_kl"]) < 1e-6
