"""Trainings that see quantised weights, compared with torchao's quantisation-aware layers and the loaded model."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from accelerate import cpu_offload
from peft import LoraConfig
from tiny import FirstGradients, assert_same_gradients, completions, tiny_model, train_args
from torch import nn
from trainings import logged, trained
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig, TrainerCallback
from trl import SFTTrainer

from liger_trainer import LigerConfig
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


INT4 = {"qat": "int4", "qat_group_size": 16}


def sft(model: Any = None, **options) -> Any:
    return trainings.sft(model, None, completions(6), config=LigerConfig, **{**RUN, **options})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_weights(model: Any, want: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())


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
        assert_weights(model, before)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_those_of_torchaos_own_layers(accumulation):
    """torchao's layers under TRL's trainer; it passes no gradient at numbers that were clamped, and ours does."""
    firsts = FirstGradients(), FirstGradients()
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "logging_steps": 1}
    ours = sft(tiny_model("llama", intermediate_size=64), callbacks=[firsts[0]], qat="int8", **options)
    model: Any = tiny_model("llama", intermediate_size=64)
    layers = linear_layers(model).values()
    config = QATConfig(torchao_config("int8", 32), step="prepare")  # pyright: ignore[reportArgumentType]
    quantize_(model, config, lambda module, name: any(module is layer for layer in layers))
    assert sum(isinstance(module, FakeQuantizedLinear) for module in model.modules()) == 14
    theirs = sft(model, cls=SFTTrainer, callbacks=[firsts[1]], **options)
    losses = [logged(trained(trainer))[0] for trainer in (ours, theirs)]
    got, want = (first.values for first in firsts)
    clamped = {name: (want[name] == 0) & (got[name] != 0) for name in want}
    assert sum(int(mask.sum()) for mask in clamped.values()) < 0.1 * sum(p.numel() for p in want.values())
    assert_same_gradients({name: got[name].masked_fill(clamped[name], 0) for name in got}, want)
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
    trainer = sft(**INT4, optim="sgd", lr_scheduler_type="constant", max_steps=3)
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
    trainer = trained(sft(**INT4, output_dir=str(tmp_path)))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    with trainer.quantised.lifted():
        behind = weights(trainer.model)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_weights(saved, behind)
    how = TorchAoConfig(torchao_config("int4", 16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model(ids).logits, rtol=1e-5, atol=1e-5)
    plain = sft(copy.deepcopy(saved)).evaluate()["eval_loss"]
    again = sft(saved, **INT4).evaluate()["eval_loss"]
    assert again == pytest.approx(evaluated, rel=1e-6) and again != pytest.approx(plain)


def test_a_resumed_training_ends_like_one_that_went_through(tmp_path):
    options = {**INT4, "save_strategy": "steps", "save_steps": 2}
    through = trained(sft(**options, output_dir=str(tmp_path / "through")))
    again = sft(**options, output_dir=str(tmp_path / "through"))
    trained(again, str(tmp_path / "through" / "checkpoint-2"))
    assert_weights(again.model, weights(through.model))
    with through.quantised.lifted(), again.quantised.lifted():
        assert_weights(again.model, weights(through.model))


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
    first = sft(**INT4, output_dir=str(tmp_path))
    with first.quantised.lifted():
        behind = weights(first.model)
    copied, later = sft(copy.deepcopy(first.model), **again), sft(first.model, **again)
    first.save_model()
    assert_weights(AutoModelForCausalLM.from_pretrained(tmp_path), behind)
    for trainer in (copied, later):
        with trainer.quantised.lifted() if again else nullcontext():
            assert_weights(trainer.model, behind)
    now = "are quantised again" if again else "are no longer quantised"
    for use in (first.train, first.evaluate):
        with pytest.raises(ConfigError, match=f"a trainer that was made later has got this model, whose weights {now}"):
            use()


def test_an_earlier_trainer_does_not_train_weights_that_a_later_one_has_quantised():
    first = sft()
    sft(first.model, **INT4)
    for use in (first.train, first.evaluate):
        with pytest.raises(ConfigError, match="whose weights are quantised again"):
            use()


UNTRAINABLE = {  # what is done to a trainer, and what is said
    "a release": (lambda trainer: trainer.quantised.release(), "the weights have been released"),
    "a model made when training begins": (
        lambda trainer: setattr(trainer, "model_init", lambda: tiny_model("llama")), "no model_init",
    ),
    "an optimizer that swaps weights for evaluations": (  # as those of schedulefree
        lambda trainer: setattr(trainer.create_optimizer(), "eval", lambda: None),
        "AdamW, which swaps weights for evaluations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNTRAINABLE)
def test_a_training_that_is_refused(what):
    change, message = UNTRAINABLE[what]
    trainer = sft(**INT4)
    change(trainer)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


class Interrupted(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        raise KeyboardInterrupt


def test_a_training_after_an_interrupted_update_sees_quantised_weights():
    through, again = (sft(**INT4, max_steps=1) for _ in range(2))
    again.add_callback(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    again.remove_callback(Interrupted)
    assert logged(trained(again)) == logged(trained(through))


def test_a_student_wins_back_what_its_format_lost():
    """Taught by its own weights before; the teacher is not quantised, and the loss of the student falls."""
    options = {**RUN, **INT4, "max_steps": 40, "learning_rate": 3e-4}
    trainer = trainings.distill(tiny_model(), tiny_model(), None, completions(12, 1), **options)
    teacher = weights(trainer.teacher)
    lost = trainer.evaluate()["eval_forward_kl"]
    trainer.train()
    assert_weights(trainer.teacher, teacher)
    assert 0.001 < trainer.evaluate()["eval_forward_kl"] < 0.85 * lost


def test_a_step_that_is_left_out_changes_no_weight():
    trainer = sft(**INT4, on_non_finite="skip_step", max_steps=1)
    before = weights(trainer.model)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) * float("nan")
    assert_weights(trained(trainer).model, before)


def offloaded() -> Any:
    model: Any = tiny_model("llama")
    cpu_offload(model.model.layers[1].mlp.down_proj, torch.device("cpu"))
    model.hf_device_map = {"model": "cpu", "model.layers.1.mlp.down_proj": "disk"}  # as from_pretrained leaves it
    return model


@pytest.mark.parametrize(
    "model, options, message",
    [
        (tiny_model, {"qat": "int4"}, "expected groups of 32 inputs, model.layers.0.mlp.down_proj has 48 inputs"),
        (partial(tiny_model, "gpt2"), {"qat": "int8"}, "GPT2LMHeadModel has no linear layers except its head"),
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
        sft(qat="int8", peft_config=LoraConfig(target_modules="all-linear"))
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
