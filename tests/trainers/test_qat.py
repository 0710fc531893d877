"""Trainings that see quantised weights, beside torchao's own quantisation-aware layers and the model that is loaded."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig
from tiny import FirstGradients, assert_same_gradients, completions, tiny_model, tiny_tokenizer, train_args
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig, TrainerCallback
from trl import SFTTrainer

from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.errors import ConfigError

pytest.importorskip("torchao", reason='needs torchao: pip install -e ".[qat]"')

from torchao.quantization import quantize_
from torchao.quantization.qat import FakeQuantizedLinear, QATConfig
from torchao.utils import TorchAOBaseTensor

from liger_trainer.extras.qat import linear_layers, quantised, torchao_config

RUN: dict[str, Any] = {
    "max_steps": 4, "save_strategy": "no", "learning_rate": 1e-2, "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.0,
}  # fmt: skip
FORMATS = ("int4", "int8", "nvfp4")


def sft(model: Any = None, callbacks=(), **options) -> Any:
    model = tiny_model("llama") if model is None else model
    return LigerTrainer(
        model, train_args(LigerConfig, **{**RUN, **options}), train_dataset=completions(), eval_dataset=completions(6),
        processing_class=tiny_tokenizer(), callbacks=list(callbacks),
    )  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def as_used(model: Any, qat: str) -> nn.Module:
    """A copy of a model as torchao quantises it."""
    used = copy.deepcopy(model)
    layers = linear_layers(used).values()
    quantize_(used, torchao_config(qat, 32), lambda module, name: any(module is layer for layer in layers))
    return used


@pytest.mark.parametrize("qat", FORMATS)
def test_the_model_has_the_numbers_of_torchao(qat):
    model = tiny_model("llama", intermediate_size=64)
    before, used = weights(model), as_used(model, qat)
    trainer = sft(model, qat=qat)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, used(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"{name}.weight" for name in linear_layers(model)} and "lm_head.weight" not in changed
    with trainer.quantised.lifted():
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_those_of_torchaos_own_layers(accumulation):
    """torchao's layers under TRL's trainer; it passes no gradient at numbers that were clamped, and ours does."""
    firsts = FirstGradients(), FirstGradients()
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "logging_steps": 1}
    ours = sft(tiny_model("llama", intermediate_size=64), [firsts[0]], qat="int8", **options)
    model: Any = tiny_model("llama", intermediate_size=64)
    layers = linear_layers(model).values()
    config = QATConfig(torchao_config("int8", 32), step="prepare")  # pyright: ignore[reportArgumentType]
    quantize_(model, config, lambda module, name: any(module is layer for layer in layers))
    assert sum(isinstance(module, FakeQuantizedLinear) for module in model.modules()) == 14
    theirs = SFTTrainer(
        model, args=train_args(LigerConfig, **{**RUN, **options}), train_dataset=completions(),
        processing_class=tiny_tokenizer(), callbacks=[firsts[1]],
    )  # fmt: skip
    for trainer in (ours, theirs):
        trainer.train()
    got, want = (first.values for first in firsts)
    clamped = {name: (want[name] == 0) & (got[name] != 0) for name in want}
    assert sum(int(mask.sum()) for mask in clamped.values()) < 0.1 * sum(p.numel() for p in want.values())
    assert_same_gradients({name: got[name].masked_fill(clamped[name], 0) for name in got}, want)
    losses = [trainer.state.log_history[0]["loss"] for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Behind(TrainerCallback):
    """A model's weights before each step, and those behind the quantised ones, as they lie there."""

    def __init__(self, trainer: Any):
        self.trainer, self.seen = trainer, []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        model, behind = self.trainer.model, self.trainer.quantised._behind
        names = [f"{name}.weight" for name in linear_layers(model)]
        whole = {name: weight.clone() for name, weight in zip(names, behind, strict=True)}
        self.seen.append((weights(model), weights(model) | whole))

    on_train_end = on_step_begin


def test_steps_are_those_of_a_straight_through_loop():
    """SGD on the weights behind, with gradients at the quantised ones, in plain torch; each step by itself, since a
    weight between two levels may be rounded to the other one."""
    trainer = sft(qat="int4", qat_group_size=16, optim="sgd", lr_scheduler_type="constant", max_steps=3)
    model, behind = tiny_model("llama"), Behind(trainer)
    form, names = torchao_config("int4", 16), {f"{name}.weight" for name in linear_layers(model)}
    seen: list[Any] = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: seen.append(collate(rows)) or seen[-1]
    trainer.add_callback(behind)
    trainer.train()
    assert len(seen) >= 6 and len(behind.seen) == 4
    for step, ((used, before), (_, after)) in enumerate(itertools.pairwise(behind.seen)):
        for name, parameter in model.named_parameters():
            parameter.data = quantised(before[name], form) if name in names else before[name].clone()
            parameter.grad = None
            assert torch.equal(used[name], parameter)
        batches = seen[2 * step : 2 * step + 2]
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            (loss / items).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(after[name], before[name] - 1e-2 * parameter.grad, rtol=1e-4, atol=1e-6)


def test_files_hold_the_weights_behind_and_load_as_they_were_trained(tmp_path):
    """What transformers makes of them with the same format is the model that was evaluated."""
    trainer = sft(qat="int4", qat_group_size=16, output_dir=str(tmp_path))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    with trainer.quantised.lifted():
        behind = weights(trainer.model)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, behind[name]) for name, p in saved.named_parameters())
    how = TorchAoConfig(torchao_config("int4", 16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model(ids).logits, rtol=1e-5, atol=1e-5)
    plain = sft(copy.deepcopy(saved)).evaluate()["eval_loss"]
    again = sft(saved, qat="int4", qat_group_size=16).evaluate()["eval_loss"]
    assert again == pytest.approx(evaluated, rel=1e-6) and again != pytest.approx(plain)


def test_a_resumed_training_ends_like_one_that_went_through(tmp_path):
    options = {"qat": "int4", "qat_group_size": 16, "save_strategy": "steps", "save_steps": 2}
    through = sft(**options, output_dir=str(tmp_path / "through"))
    through.train()
    again = sft(**options, output_dir=str(tmp_path / "through"))
    again.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-2"))
    assert all(torch.equal(p, weights(through.model)[name]) for name, p in again.model.named_parameters())
    with through.quantised.lifted(), again.quantised.lifted():
        assert all(torch.equal(p, weights(through.model)[name]) for name, p in again.model.named_parameters())


class OtherLayers(LlamaForCausalLM):
    """A model whose head is not the last module, and with two layers of one weight."""

    _tied_weights_keys = {"model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight"}

    def __init__(self, config: Any):
        super().__init__(config)
        self.projector = nn.Linear(32, 32, bias=False)
        self.post_init()


def test_the_layers_are_those_that_transformers_quantises(tmp_path):
    model = OtherLayers(tiny_model("llama_tied").config)
    model.save_pretrained(tmp_path)
    how = TorchAoConfig(torchao_config("int8", 32))
    loaded = OtherLayers.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    theirs = {
        name
        for name, module in loaded.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, TorchAOBaseTensor)
    }
    assert set(linear_layers(model)) == theirs and len(theirs) == 12


@pytest.mark.parametrize("again", [{"qat": "int8"}, {}])
def test_a_later_trainer_of_the_model_gets_the_weights_behind(again, tmp_path):
    """It does not quantise the quantised; the trainer before saves the same, and neither trains nor measures."""
    first = sft(qat="int4", qat_group_size=16, output_dir=str(tmp_path))
    with first.quantised.lifted():
        behind = weights(first.model)
    copied, later = sft(copy.deepcopy(first.model), **again), sft(first.model, **again)
    first.save_model()
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with copied._unquantised(), later._unquantised():
        for model in (copied.model, later.model, saved):
            assert all(torch.equal(p, behind[name]) for name, p in model.named_parameters())
    now = "are quantised anew" if again else "are no longer quantised"
    for use in (first.train, first.evaluate):
        with pytest.raises(ConfigError, match=f"a trainer that was made later has got this model, whose weights {now}"):
            use()


def test_an_earlier_trainer_does_not_train_weights_that_a_later_one_has_quantised():
    first = sft()
    sft(first.model, qat="int4", qat_group_size=16)
    for use in (first.train, first.evaluate):
        with pytest.raises(ConfigError, match="whose weights are quantised anew"):
            use()


def test_a_training_after_the_release_is_refused():
    trainer = sft(qat="int4", qat_group_size=16)
    trainer.quantised.release()
    with pytest.raises(ConfigError, match="the weights have been released"):
        trainer.train()


def test_models_made_when_training_begins_are_refused():
    trainer = sft(qat="int4", qat_group_size=16)
    trainer.model_init = lambda: tiny_model("llama")
    with pytest.raises(ConfigError, match="no model_init"):
        trainer.train()


class Interrupted(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        raise KeyboardInterrupt


def test_a_training_after_an_interrupted_update_sees_quantised_weights():
    options = {"qat": "int4", "qat_group_size": 16, "max_steps": 1, "logging_steps": 1}
    through, again = sft(**options), sft(**options)
    through.train()
    again.add_callback(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    again.remove_callback(Interrupted)
    again.train()
    assert again.state.log_history[0]["loss"] == through.state.log_history[0]["loss"]


def test_optimizers_that_swap_weights_for_evaluations_are_refused():
    trainer = sft(qat="int4", qat_group_size=16)
    trainer.create_optimizer().eval = lambda: None  # as those of schedulefree have it
    with pytest.raises(ConfigError, match="AdamW, which swaps weights for evaluations"):
        trainer.train()


def test_a_student_wins_back_what_its_format_lost():
    """Taught by its own weights before; the teacher is not quantised, and the loss of the student falls."""
    args = train_args(LigerDistillConfig, **{**RUN, "max_steps": 40, "learning_rate": 3e-4, "qat": "int4"})
    args.qat_group_size = 16
    trainer: Any = LigerDistillTrainer(
        tiny_model("llama"), tiny_model("llama"), args, train_dataset=completions(), eval_dataset=completions(12, 1),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    teacher = weights(trainer.teacher)
    lost = trainer.evaluate()["eval_forward_kl"]
    trainer.train()
    assert all(torch.equal(p, teacher[name]) for name, p in trainer.teacher.named_parameters())
    assert 0.001 < trainer.evaluate()["eval_forward_kl"] < 0.85 * lost


def test_a_step_that_is_left_out_changes_no_weight():
    trainer = sft(qat="int4", qat_group_size=16, on_non_finite="skip_step", max_steps=1)
    before = weights(trainer.model)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) * float("nan")
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def offloaded() -> Any:
    model: Any = tiny_model("llama")
    cpu_offload(model.model.layers[1].mlp.down_proj, torch.device("cpu"))
    model.hf_device_map = {"model": "cpu", "model.layers.1.mlp.down_proj": "disk"}  # as from_pretrained leaves it
    return model


@pytest.mark.parametrize(
    "model, options, message",
    [
        (tiny_model, {"qat": "int4"}, "expected groups of 32 inputs, model.layers.0.mlp.down_proj has 48 inputs"),
        (partial(tiny_model, "gpt2"), {"qat": "int8"}, "GPT2LMHeadModel has no linear layers beside its head"),
        (tiny_model, {"qat": "int8", "optim": "lomo"}, "optim=lomo, which updates weights in its backward"),
        (partial(tiny_model, dtype=torch.float16), {"qat": "nvfp4"}, "nvfp4 knows bfloat16 and float32, model.layers"),
        (partial(tiny_model, intermediate_size=24), {"qat": "nvfp4"}, "outputs in 16s, model.layers.0.mlp.gate_proj"),
        (offloaded, {"qat": "int8"}, "model.layers.1.mlp.down_proj is offloaded"),
    ],
)
def test_what_does_not_go_is_said(model, options, message):
    with pytest.raises(ConfigError, match=message):
        sft(model(), **options)


def test_adapters_and_groups_of_other_formats_are_refused():
    with pytest.raises(ConfigError, match="load_in_4bit"):
        LigerTrainer(
            tiny_model("llama"), train_args(LigerConfig, **RUN, qat="int8"), train_dataset=completions(),
            processing_class=tiny_tokenizer(), peft_config=LoraConfig(target_modules="all-linear"),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="bf16_full_eval"):
        sft(qat="int8", bf16_full_eval=True)
    with pytest.raises(ValueError, match="qat_group_size"):
        train_args(LigerConfig, **RUN, qat="int8", qat_group_size=16)


def test_by_yaml(tmp_path: Path):
    from liger_trainer.config.run_config import load_run_config

    file = tmp_path / "run.yaml"
    file.write_text("recipe: sft\nmodel_name_or_path: owner/model\ndataset_name: owner/rows\nqat: int4\n")
    args: Any = load_run_config(str(file), ["qat_group_size=16"]).training_args()
    assert (args.qat, args.qat_group_size) == ("int4", 16)
    for extra, named in (("use_peft=true", "load_in_4bit"), ("accelerate_config=fsdp2", "use ddp")):
        with pytest.raises(ConfigError, match=named):
            load_run_config(str(file), [extra])
