"""enable(): TRL's preference and RL trainers, unmodified, without the logits of a batch. Equal to stock to 1e-5."""

import pytest
import torch
import trl.trainer.utils
from peft import LoraConfig
from quick_cases import slow_but
from tiny import assert_same_gradients, largest_vocabulary_tensor
from trl_runs import assert_same_numbers, trained

import liger_trainer
from liger_trainer.patching.patcher import patched_record
from liger_trainer.patching.use_liger_kernel import FusedLogProbs

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
]

STOCK = trl.trainer.utils._ChunkedLogProbFunction
ADAPTERS = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
CASES = {
    "sft": ("sft", {}),
    "sft, our layers": ("sft", {"use_liger_kernel": True}),
    "dpo": ("dpo", {}),
    "dpo, two losses": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "dpo, WPO's weights": ("dpo", {"use_weighting": True}),
    "dpo, padding-free": ("dpo", {"padding_free": True}),
    "dpo, reference computed before": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo, adapters": ("dpo", {"peft_config": ADAPTERS}),
    "dpo, softcap": ("dpo", {"family": "gemma2"}),
    "dpo, scaled logits": ("dpo", {"family": "granite"}),
    "dpo, experts": ("dpo", {"family": "mixtral"}),
    "dpo, our layers": ("dpo", {"use_liger_kernel": True}),
    "dpo, adapters, our layers": ("dpo", {"peft_config": ADAPTERS, "use_liger_kernel": True}),
    "kto": ("kto", {}),
    "kto, our layers": ("kto", {"use_liger_kernel": True}),
    "kto, adapters, reference computed before": ("kto", {"peft_config": ADAPTERS, "precompute_ref_log_probs": True}),
    "grpo": ("grpo", {}),
    "grpo, our layers": ("grpo", {"use_liger_kernel": True}),
    "grpo, tokens of high entropy, two iterations": ("grpo", {"top_entropy_quantile": 0.5, "num_iterations": 2}),
    "grpo, entropy bonus": ("grpo", {"entropy_coef": 0.1}),
    "grpo, entropy bonus, adapters": ("grpo", {"entropy_coef": 0.1, "peft_config": ADAPTERS}),
    "grpo, adapters": ("grpo", {"peft_config": ADAPTERS}),
    "rloo": ("rloo", {}),
    "rloo, our layers": ("rloo", {"use_liger_kernel": True}),
    "distillation, our layers": ("distillation", {"use_liger_kernel": True}),
}
# KTO shares DPO's path through our code, RLOO GRPO's.
QUICK = ("sft, our layers", "dpo, adapters", "dpo, our layers", "kto", "grpo, entropy bonus", "grpo, our layers",
         "distillation, our layers")  # fmt: skip


@pytest.fixture(autouse=True)
def off_again():
    yield
    liger_trainer.disable()
    assert trl.trainer.utils._ChunkedLogProbFunction is STOCK


def run(case, folder, ours, **options):
    """(trainer, gradients), with our layers in ours alone."""
    (liger_trainer.enable if ours else liger_trainer.disable)()
    name, given = CASES[case]
    return trained(name, folder, **{**given, **options, **({} if ours else {"use_liger_kernel": False})})


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_trainers_train_as_stock_ones_and_store_no_logits(case, tmp_path, monkeypatch):
    want, wanted = run(case, tmp_path, False)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        got, gradients = run(case, tmp_path, True)
    name, patched = CASES[case][0], "our layers" in case
    assert 0 < seen.rows <= 8 or name == "distillation"  # whose loss in TRL is of logits
    assert_same_gradients(gradients, wanted, 1e-4 if patched else 1e-5)
    assert_same_numbers(got, want, 1e-4 if patched else 1e-5)
    record = patched_record(got.model)
    assert (record is not None) == patched and patched_record(want.model) is None
    if patched:
        assert {"RMSNorm", "SwiGLU"} <= set(record.report.swapped)
        assert (record.fused is None) == (name != "distillation")  # which passes no config, and asks for no loss


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
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert [x is None for x in FusedLogProbs(STOCK).apply(*inputs, ("log_probs",))] == [False] + [True] * 4


def test_weights_partitioned_by_zero_3_stay_with_trl():
    inputs, calls = head_inputs(), []

    class Stock:
        apply = staticmethod(lambda *args: calls.append(args))

    inputs[1].ds_id = 1
    FusedLogProbs(Stock).apply(*inputs)
    assert len(calls) == 1 and calls[0][:8] == tuple(inputs)


@pytest.mark.parametrize("other", [None, torch.nn.Identity])  # no such function, and one with other arguments
def test_another_release_of_trl_keeps_its_own_with_a_warning(other):
    name, utils = "_ChunkedLogProbFunction", trl.trainer.utils
    with pytest.MonkeyPatch.context() as patch:
        (patch.delattr(utils, name) if other is None else patch.setattr(utils, name, other))
        with pytest.warns(UserWarning, match="keep TRL's own"):
            liger_trainer.enable()
        assert vars(utils).get(name) is other
        liger_trainer.disable()
