"""enable(): TRL's preference and RL trainers, unmodified, without the logits of a batch. Equal to stock to 1e-5."""

import importlib

import pytest
import torch
import torch.nn.functional as F
import trl.trainer.utils
from peft import LoraConfig
from quick_cases import slow_but
from tiny import assert_same_gradients, largest_vocabulary_tensor, tiny_model
from trl_runs import CPOTrainer, ORPOTrainer, assert_same_numbers, make, trained

import liger_trainer
from liger_trainer import MaterializedLogitsWarning
from liger_trainer.kernels import linear_log_probs
from liger_trainer.losses import deferring_head
from liger_trainer.losses.deferring_head import ScoredLogits, scored_logits
from liger_trainer.patching.patcher import patched_record
from liger_trainer.patching.use_liger_kernel import FusedLogProbs

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
]

STOCK = trl.trainer.utils._ChunkedLogProbFunction
ADAPTERS = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
ON_THE_HEAD = LoraConfig(target_modules=["q_proj", "lm_head"], r=4, task_type="CAUSAL_LM")
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
    "orpo": ("orpo", {}),
    "orpo, softcap": ("orpo", {"family": "gemma2"}),
    "orpo, adapters": ("orpo", {"peft_config": ADAPTERS}),
    "orpo, experts": ("orpo", {"family": "mixtral"}),
    "orpo, our layers": ("orpo", {"use_liger_kernel": True}),
    "cpo": ("cpo", {}),
    "cpo, scaled logits": ("cpo", {"family": "granite"}),
    "simpo": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "simpo, adapters on the head": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.3, "peft_config": ON_THE_HEAD}),
}
# KTO shares DPO's path through our code, RLOO GRPO's.
QUICK = ("sft, our layers", "dpo, adapters", "dpo, our layers", "grpo, entropy bonus", "grpo, our layers",
         "distillation, our layers", "orpo, adapters", "cpo, scaled logits", "simpo")  # fmt: skip


def replaced():
    """What of TRL's we replace, as it is now."""
    methods = [{n: x for n, x in vars(cls).items() if callable(x)} for cls in (ORPOTrainer, CPOTrainer)]
    return trl.trainer.utils._ChunkedLogProbFunction, methods


@pytest.fixture(autouse=True)
def off_again():
    before = replaced()
    yield
    liger_trainer.disable()
    assert replaced() == before


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
    assert_same_numbers(got, want, 1e-4 if patched and name != "orpo" else 1e-5)
    record = patched_record(got.model)
    assert (record is not None) == patched and patched_record(want.model) is None
    if patched:
        assert {"RMSNorm", "SwiGLU"} <= set(record.report.swapped)
        if name not in ("orpo", "cpo"):  # distillation passes no config, and asks for no loss
            assert (record.fused is None) == (name != "distillation")


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


@pytest.mark.parametrize(
    ("module", "name", "other", "message"),
    [
        ("trl.trainer.utils", "_ChunkedLogProbFunction", None, "keep TRL's own"),
        ("trl.trainer.utils", "_ChunkedLogProbFunction", torch.nn.Identity, "keep TRL's own"),  # other arguments
        ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer", None, "no ORPOTrainer as of 1.16"),
        ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer.get_batch_logps", None, "no ORPOTrainer as of 1.16"),
    ],
)
def test_another_release_of_trl_keeps_its_own_with_a_warning(module, name, other, message):
    *holders, attribute = name.split(".")
    holder = importlib.import_module(module)
    for each in holders:
        holder = getattr(holder, each)
    with pytest.MonkeyPatch.context() as patch:
        (patch.delattr(holder, attribute) if other is None else patch.setattr(holder, attribute, other))
        with pytest.warns(UserWarning, match=message):
            liger_trainer.enable()
        assert vars(holder).get(attribute) is other
        liger_trainer.disable()


def test_in_bf16_the_products_are_those_of_the_forwards_autocast(monkeypatch):
    seen = []
    for module, name in ((linear_log_probs, "linear_log_probs"), (deferring_head, "linear_cross_entropy")):
        op = getattr(module, name)

        def spy(*args, op=op, **options):
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            return op(*args, **options)

        monkeypatch.setattr(module, name, spy)
    (got, gradients), (want, wanted) = (run("orpo", None, ours, bf16=True) for ours in (True, False))
    assert len(seen) >= 4 and set(seen) == {torch.bfloat16}
    assert_same_numbers(got, want, 0.03)
    for name, x in wanted.items():
        assert (gradients[name] - x).norm() < 0.03 * x.norm(), name


def test_a_head_that_cannot_be_deferred_warns_and_trains_on():
    liger_trainer.enable()
    trainer = make("orpo", max_steps=1)
    trainer.model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(MaterializedLogitsWarning, match="LlamaForCausalLM stores .* backward hooks"):
        trainer.train()


# The logits of ORPO and CPO themselves


def scored(family="llama", seed=0):
    """(scored logits, real ones, labels) of a forward without labels."""
    model = tiny_model(family)
    ids = torch.randint(60, (3, 7), generator=torch.Generator().manual_seed(seed))
    with scored_logits(model):
        logits = model(ids).logits
    assert isinstance(logits, ScoredLogits)
    labels = ids.clone()
    labels[:, :2] = -100
    return logits, model(ids).logits, labels


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_losses_on_them(family):
    logits, real, labels = scored(family)
    flat = logits[:, :-1].contiguous().view(-1, logits.shape[-1]), real[:, :-1].reshape(-1, real.shape[-1])
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"ignore_index": 7}):
        got, want = (F.cross_entropy(x, labels[:, 1:].reshape(-1).clamp(min=0), **options) for x in flat)
        torch.testing.assert_close(got, want)
    values = logits.log_probs(labels, mean_logits=True)
    expected = real.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(values.log_prob, expected * (labels != -100))
    torch.testing.assert_close(logits.detach().mean(), real.mean())
    assert not logits.detach().mean().requires_grad


def test_what_they_do_not_know_computes_logits():
    logits, real, labels = scored()
    weight = torch.rand(64)
    for get in (
        lambda x: x.mean(-1), lambda x: x.mean(), lambda x: x.detach().logsumexp(-1),
        lambda x: F.cross_entropy(x.view(-1, 64), labels.view(-1), reduction="none"),
        lambda x: F.cross_entropy(x.view(-1, 64), labels.view(-1), weight=weight),
    ):  # fmt: skip
        torch.testing.assert_close(get(logits), get(real))


def test_within_the_forward_they_warn():
    model = tiny_model()
    with scored_logits(model):
        logits = model(torch.arange(6)[None]).logits
        with pytest.warns(MaterializedLogitsWarning, match="a mean along a dimension"):
            logits.mean(-1)
