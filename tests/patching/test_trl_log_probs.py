"""enable(): the fused head of TRL's preference and RL trainers, unmodified, on our op. Equal to stock to 1e-5."""

import numpy as np
import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tiny import (
    FirstGradients,
    assert_same_gradients,
    completions,
    largest_vocabulary_tensor,
    tiny_model,
    tiny_tokenizer,
    train_args,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import liger_trainer
from liger_trainer.patching import trl_losses as trl_log_probs
from liger_trainer.patching.trl_losses import FusedLogProbs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

STOCK = trl.trainer.utils._ChunkedLogProbFunction
TIMES = ("runtime", "per_second", "step_time", "epoch")


@pytest.fixture(autouse=True)
def off_again():
    yield
    liger_trainer.disable()
    assert trl.trainer.utils._ChunkedLogProbFunction is STOCK


def preferences(n=8) -> Dataset:
    data = completions(n)
    return data.rename_column("completion", "chosen").add_column("rejected", completions(n, seed=9)["completion"])


def judged(n=8) -> Dataset:
    return completions(n).add_column("label", [i % 2 == 0 for i in range(n)])


def prompts(n=8) -> Dataset:
    return completions(n).remove_columns("completion")


def length(completions, **_) -> list[float]:
    return [float(len(text.split())) for text in completions]


SAMPLED = {
    "max_completion_length": 6, "num_generations": 2, "temperature": 0.9, "beta": 0.1,
    "generation_kwargs": {"min_new_tokens": 2},
}  # fmt: skip
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, completions, {}, {}),
    "dpo": (DPOTrainer, DPOConfig, preferences, {}, {}),
    "kto": (KTOTrainer, KTOConfig, judged, {}, {}),
    "grpo": (GRPOTrainer, GRPOConfig, prompts, SAMPLED, {"reward_funcs": length}),
    "rloo": (RLOOTrainer, RLOOConfig, prompts, SAMPLED, {"reward_funcs": length}),
}
ADAPTERS = LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
CASES = {
    "sft": ("sft", {}),
    "dpo": ("dpo", {}),
    "dpo, two losses": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "dpo, WPO's weights": ("dpo", {"use_weighting": True}),
    "dpo, padding-free": ("dpo", {"padding_free": True}),
    "dpo, reference computed before": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo, adapters": ("dpo", {"peft_config": ADAPTERS}),
    "dpo, softcap": ("dpo", {"family": "gemma2"}),
    "dpo, scaled logits": ("dpo", {"family": "granite"}),
    "dpo, experts": ("dpo", {"family": "mixtral"}),
    "kto": ("kto", {}),
    "kto, adapters, reference computed before": ("kto", {"peft_config": ADAPTERS, "precompute_ref_log_probs": True}),
    "grpo": ("grpo", {}),
    "grpo, tokens of high entropy, two iterations": ("grpo", {"top_entropy_quantile": 0.5, "num_iterations": 2}),
    "grpo, entropy bonus": ("grpo", {"entropy_coef": 0.1}),
    "grpo, entropy bonus, adapters": ("grpo", {"entropy_coef": 0.1, "peft_config": ADAPTERS}),
    "grpo, adapters": ("grpo", {"peft_config": ADAPTERS}),
    "rloo": ("rloo", {}),
}  # fmt: skip


def trained(name, folder, ours, family="llama", peft_config=None, **options):
    """Train two steps and evaluate. Returns (trainer, gradients of the first step)."""
    cls, config, data, needed, arguments = TRAINERS[name]
    model = tiny_model(family)
    model.save_pretrained(folder)  # where GRPO and RLOO load their reference from
    model.config._name_or_path = str(folder)
    tokenizer, gradients = tiny_tokenizer(), FirstGradients()
    tokenizer.padding_side = "left"
    (liger_trainer.enable if ours else liger_trainer.disable)()
    torch.manual_seed(0)
    trainer = cls(
        model=model, args=train_args(config, **{"max_steps": 2, "seed": 3, **needed, **options}),
        train_dataset=data(), eval_dataset=data(4), processing_class=tokenizer, peft_config=peft_config,
        callbacks=[gradients], **arguments,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return trainer, gradients.values


def numbers(trainer) -> list[tuple[str, float]]:
    logs = [item for log in trainer.state.log_history for item in log.items()]
    return [(name, x) for name, x in logs if isinstance(x, (int, float)) and not any(t in name for t in TIMES)]


QUICK = ("sft", "dpo, adapters", "kto", "grpo, entropy bonus")


@pytest.mark.parametrize(
    "name, options",
    [pytest.param(*x, id=case, marks=() if case in QUICK else pytest.mark.slow) for case, x in CASES.items()],
)
def test_trainers_train_as_stock_ones_and_store_no_logits(name, options, tmp_path, monkeypatch):
    want, wanted = trained(name, tmp_path, False, **options)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        got, gradients = trained(name, tmp_path, True, **options)
    assert 0 < seen.rows <= 8
    assert_same_gradients(gradients, wanted)
    ours, theirs = numbers(got), numbers(want)
    assert [name for name, _ in ours] == [name for name, _ in theirs] and len(theirs) > 10
    np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], rtol=1e-5, atol=1e-5)


def test_layers_and_head_together(tmp_path):
    want, wanted = trained("dpo", tmp_path, False)
    got, gradients = trained("dpo", tmp_path, True, use_liger_kernel=True)
    assert_same_gradients(gradients, wanted, rtol=1e-4)
    np.testing.assert_allclose([x for _, x in numbers(got)], [x for _, x in numbers(want)], rtol=1e-4, atol=1e-4)


def head_inputs(dtype=torch.float32) -> list:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 6), (20, 6), (20,)))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    return [*leaves, torch.randint(20, (9,), generator=generator), 0.7, 8, 5.0, 1.3]


def test_each_value_is_that_of_trl():
    inputs = head_inputs()
    ours, theirs = FusedLogProbs(STOCK).apply(*inputs), STOCK.apply(*inputs)
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for output in (0, 1):
        got, want = (
            torch.autograd.grad(x[output].square().sum(), inputs[:3], retain_graph=True) for x in (ours, theirs)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert [x is None for x in FusedLogProbs(STOCK).apply(*inputs, ("log_probs",))] == [False] + [True] * 4


def test_weights_partitioned_by_zero_3_stay_with_trl():
    inputs, calls = head_inputs(), []

    class Stock:
        apply = staticmethod(lambda *args: calls.append(args))

    inputs[1].ds_id = 1
    FusedLogProbs(Stock).apply(*inputs)
    assert len(calls) == 1 and calls[0][:8] == tuple(inputs)


def test_switched_on_and_off():
    for _ in range(2):
        liger_trainer.enable()
    assert isinstance(trl.trainer.utils._ChunkedLogProbFunction, FusedLogProbs)
    liger_trainer.disable()
    assert trl.trainer.utils._ChunkedLogProbFunction is STOCK


@pytest.mark.parametrize("other", [None, torch.nn.Identity], ids=["gone", "other arguments"])
def test_another_head_of_trl_stays_with_a_warning(monkeypatch, other):
    monkeypatch.setattr(trl_log_probs.trl.trainer.utils, "_ChunkedLogProbFunction", other)
    with pytest.warns(UserWarning, match="keep TRL's own"):
        liger_trainer.enable()
    assert trl.trainer.utils._ChunkedLogProbFunction is other
    liger_trainer.disable()
    monkeypatch.undo()
