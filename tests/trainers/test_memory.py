"""`memory`: the same losses and gradients with fewer bytes kept for the backward, and what it does not go with."""

import pytest
import torch
from peft import LoraConfig
from tiny import FirstGradients, tiny_model
from trainings import logged, sft

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.errors import ConfigError
from liger_trainer.patching.layers.mlps import REMADE
from liger_trainer.patching.patcher import patch, patched_record

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
LAYERS, INNER = 2, 48


def trainer_of(model, **options) -> LigerTrainer:
    return sft(model, config=LigerConfig, max_steps=2, per_device_train_batch_size=2, **options)


def trained(memory: str, adapters) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Return the losses, the gradients of the first step, and its bytes of the width of gate and up, and of others."""
    first, kept = FirstGradients(), {}
    torch.manual_seed(0)
    trainer = trainer_of(
        tiny_model("qwen3", num_hidden_layers=LAYERS), peft_config=adapters, callbacks=[first], memory=memory
    )
    parameters = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not first.values and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (tensor.shape[-1] == INNER and tensor.numel() > LORA.r * INNER, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.train()
    report, layers = trainer.patched.report.swapped, {"fast": 0, "balanced": LAYERS // 2, "lean": LAYERS}[memory]
    assert report[REMADE] == layers and (REMADE in str(trainer.patched.report)) == bool(layers)
    gate_and_up = sum(size for is_wide, size in kept.values() if is_wide)
    return logged(trainer), first.values, gate_and_up, sum(size for _, size in kept.values())


@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
def test_the_same_is_learned_with_less_kept(adapters, kernels):
    runs = [trained(memory, adapters) for memory in ("fast", "balanced", "lean")]
    losses, gradients, gate_and_up, every = zip(*runs, strict=True)
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 2
    for got in gradients[1:]:
        assert got.keys() == gradients[0].keys()
        assert all(torch.equal(got[name], want) for name, want in gradients[0].items())
    assert gate_and_up[0] == 2 * gate_and_up[1] > gate_and_up[2] == 0
    assert every[0] - every[1] >= gate_and_up[1] <= every[1] - every[2]


def test_a_second_trainer_decides_anew_until_the_first_one_trains():
    model = tiny_model("qwen3")
    first = trainer_of(model, memory="lean")
    assert first.patched.report.swapped[REMADE] == 2
    second = trainer_of(model)
    assert REMADE not in second.patched.report.swapped
    first.train()
    assert first.patched.report.swapped[REMADE] == 2
    second.train()
    assert REMADE not in second.patched.report.swapped


def test_what_cannot_be_made_again_in_a_call_is_said():
    trainer = trainer_of(tiny_model("qwen3"), memory="lean")
    trainer.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="memory: a Qwen3MLP keeps gate and up, since its layers"):
        trainer.train()


def test_a_model_without_such_an_mlp():
    with pytest.raises(ConfigError, match=r"No MLP of this GPT2LMHeadModel can .* Set memory to fast\."):
        trainer_of(tiny_model("gpt2"), memory="lean")
    model = tiny_model("gpt2")
    record = patch(model)
    with pytest.raises(ConfigError, match="Set memory to fast"):
        trainer_of(model, memory="lean")
    assert patched_record(model) is record
    trainer_of(tiny_model("gpt2"), memory="fast")
