"""A model whose linear layers torchao computes in fp8, under our patches and loss, and under TRL's trainer."""

from typing import Any

import pytest
import torch
from tiny import FirstGradients, tiny_model
from trainings import sft
from trainings import trained as run
from trl import SFTTrainer

from liger_trainer import LigerConfig, LigerTrainer

pytest.importorskip("torchao", reason='needs torchao: pip install -e ".[qat]"')

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

LAYERS = 14


def trained(trainer: Any, converted: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Train a step, and return its loss and gradients."""
    model, first = tiny_model("llama"), FirstGradients()
    if converted:
        config = Float8LinearConfig(emulate=True)  # of the GPU's products, with the same numbers
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)
        assert sum(isinstance(module, Float8Linear) for module in model.modules()) == LAYERS
    made = run(sft(model, cls=trainer, config=LigerConfig, max_steps=1, callbacks=[first]))
    return made.state.log_history[0]["loss"], first.values


def error(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    distance = sum(float((got[name] - truth[name]).norm() ** 2) for name in truth)
    return (distance / sum(float(x.norm() ** 2) for x in truth.values())) ** 0.5


def test_its_layers_compute_in_fp8_and_err_no_more_than_under_trl(monkeypatch):
    """Scales are taken over padding too, whose numbers differ: so neither rounds as the other does."""
    loss, truth = trained(SFTTrainer, converted=False)
    stock = trained(SFTTrainer, converted=True)
    calls = []
    forward = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    ours = trained(LigerTrainer, converted=True)
    assert len(calls) == LAYERS
    assert 0.01 < error(ours[1], truth) < 1.1 * error(stock[1], truth)
    assert abs(ours[0] - loss) < 1.1 * abs(stock[0] - loss) < 0.1
