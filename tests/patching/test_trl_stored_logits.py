"""enable(): TRL's ORPO and CPO trainers, unmodified, without the logits of a batch. Equal to stock to 1e-5."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from quick_cases import slow_but
from tiny import (
    FirstGradients,
    assert_same_gradients,
    completions,
    largest_vocabulary_tensor,
    tiny_model,
    tiny_tokenizer,
    train_args,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import liger_trainer
from liger_trainer import MaterializedLogitsWarning
from liger_trainer.losses import scored_logits as scored_logits_file
from liger_trainer.losses.scored_logits import ScoredLogits, scored_logits
from liger_trainer.patching import trl_losses as trl_stored_logits

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

TIMES = ("runtime", "per_second", "epoch")
ADAPTERS = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
ON_THE_HEAD = LoraConfig(target_modules=["q_proj", "lm_head"], r=4, task_type="CAUSAL_LM")
TRAINERS = {"orpo": (ORPOTrainer, ORPOConfig), "cpo": (CPOTrainer, CPOConfig)}
CASES = {
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


@pytest.fixture(autouse=True)
def off_again():
    before = [vars(cls)[name] for cls in (ORPOTrainer, CPOTrainer) for name in trl_stored_logits._METHODS]
    yield
    liger_trainer.disable()
    assert [vars(cls)[name] for cls in (ORPOTrainer, CPOTrainer) for name in trl_stored_logits._METHODS] == before


def preferences(n=8) -> Dataset:
    data = completions(n)
    return data.rename_column("completion", "chosen").add_column("rejected", completions(n, seed=9)["completion"])


def trained(name, ours, family="llama", peft_config=None, **options):
    """Train two steps and evaluate. Returns (trainer, gradients of the first step)."""
    cls, config = TRAINERS[name]
    (liger_trainer.enable if ours else liger_trainer.disable)()
    gradients = FirstGradients()
    options = {**options, "use_liger_kernel": ours and options.get("use_liger_kernel", False)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.manual_seed(0)
        trainer = cls(
            model=tiny_model(family), args=train_args(config, max_steps=2, seed=3, max_length=64, **options),
            train_dataset=preferences(), eval_dataset=preferences(4), processing_class=tiny_tokenizer(),
            peft_config=peft_config, callbacks=[gradients],
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
    return trainer, gradients.values


def numbers(trainer) -> list[tuple[str, float]]:
    logs = [item for log in trainer.state.log_history for item in log.items()]
    return [(name, x) for name, x in logs if isinstance(x, (int, float)) and not any(t in name for t in TIMES)]


def assert_same_numbers(got, want, tolerance=1e-5) -> None:
    ours, theirs = numbers(got), numbers(want)
    assert [name for name, _ in ours] == [name for name, _ in theirs] and len(theirs) > 20
    np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", slow_but(CASES, "orpo", "orpo, adapters", "cpo, scaled logits", "simpo"))
def test_trainers_train_as_stock_ones_and_store_no_logits(case, monkeypatch):
    name, options = CASES[case]
    want, wanted = trained(name, False, **options)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        got, gradients = trained(name, True, **options)
    assert 0 < seen.rows <= 8
    assert_same_gradients(gradients, wanted, rtol=1e-4 if "use_liger_kernel" in options else 1e-5)
    assert_same_numbers(got, want)


def test_in_bf16_the_products_are_those_of_the_forwards_autocast(monkeypatch):
    seen = []
    for name in ("linear_log_probs", "linear_cross_entropy"):
        op = getattr(scored_logits_file, name)

        def spy(*args, op=op, **options):
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            return op(*args, **options)

        monkeypatch.setattr(scored_logits_file, name, spy)
    (got, gradients), (want, wanted) = (trained("orpo", ours, bf16=True) for ours in (True, False))
    assert len(seen) >= 4 and set(seen) == {torch.bfloat16}
    assert_same_numbers(got, want, 0.03)
    for name, x in wanted.items():
        assert (gradients[name] - x).norm() < 0.03 * x.norm(), name


def test_a_head_that_cannot_be_deferred_warns_and_trains_on():
    liger_trainer.enable()
    model = tiny_model()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    trainer = ORPOTrainer(
        model=model, args=train_args(ORPOConfig, max_steps=1, max_length=64), train_dataset=preferences(),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    with pytest.warns(MaterializedLogitsWarning, match="LlamaForCausalLM stores .* backward hooks"):
        trainer.train()


@pytest.mark.parametrize("gone", ["ORPOTrainer", "get_batch_logps"])
def test_a_release_without_them_stays_as_it_is_with_a_warning(monkeypatch, gone):
    module = trl_stored_logits.importlib.import_module("trl.experimental.orpo.orpo_trainer")
    monkeypatch.delattr(module if gone == "ORPOTrainer" else ORPOTrainer, gone)
    with pytest.warns(UserWarning, match="no ORPOTrainer as of 1.16"):
        liger_trainer.enable()
    liger_trainer.disable()
    monkeypatch.undo()


# The logits themselves


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
    for get in (
        lambda x: x.mean(-1), lambda x: x.mean(), lambda x: x.detach().logsumexp(-1),
        lambda x: F.cross_entropy(x.view(-1, 64), labels.view(-1), reduction="none"),
        lambda x: F.cross_entropy(x.view(-1, 64), labels.view(-1), weight=torch.rand(64, generator=torch.Generator())),
    ):  # fmt: skip
        torch.manual_seed(0)
        got = get(logits)
        torch.manual_seed(0)
        torch.testing.assert_close(got, get(real))


def test_within_the_forward_they_warn():
    model = tiny_model()
    with scored_logits(model):
        logits = model(torch.arange(6)[None]).logits
        with pytest.warns(MaterializedLogitsWarning, match="a mean along a dimension"):
            logits.mean(-1)
