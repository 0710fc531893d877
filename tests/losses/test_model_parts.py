"""PEFT on the output head: the fused loss and every gradient against the unfused model in fp64."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from plain_models import assert_equals_plain, relative_error, without_labels
from tiny import VOCAB, assert_same_gradients, double_copy, masked_batch, named_gradients, shift_labels_of, tiny_model

from liger_trainer.errors import MaterializedLogitsWarning
from liger_trainer.kernels.linear_divergence import distillation_reference
from liger_trainer.kernels.linear_sparse_divergence import sparse_divergence_reference
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import deferred_logits
from liger_trainer.losses.fused_forward import FusedLoss
from liger_trainer.losses.model_parts import Head, output_module
from liger_trainer.losses.sparse_answer import SparseAnswer, TokenTargets
from liger_trainer.losses.spec import Distillation, LossOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # PEFT's, about tied weights and merged adapters
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
]
TOKENS = masked_batch()["input_ids"][0, :3].tolist()


def lora(**options) -> LoraConfig:
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False, **options}
    return LoraConfig(**given)


def wrapped(family: str, config: Any) -> PeftModel:
    """A model whose trainable parameters differ from its base's."""
    model = tiny_model(family)
    with torch.no_grad():
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    return spread_trainable(model)


def spread_trainable(model: Any) -> Any:
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    return model


def assert_fused_equals_plain(model: Any, truth: Any) -> dict[str, torch.Tensor]:
    FusedLoss(model.get_base_model())
    outputs, gradients = assert_equals_plain(model, truth)
    assert isinstance(outputs.logits, DeferredLogits) or not torch.is_grad_enabled()
    return gradients


CONFIGS: dict[str, tuple[str, Any]] = {
    "lora": ("llama", lora()),
    "elsewhere": ("llama", lora(target_modules=["q_proj", "down_proj"])),
    "rank 1": ("llama", lora(r=1)),
    "rslora": ("llama", lora(use_rslora=True)),
    "only the head": ("llama", lora(target_modules=["lm_head"])),
    "with a softcap": ("gemma2", lora()),
    "with a scale": ("granite", lora()),
    "with a bias": ("phi", lora()),
    "with biases": ("phi", lora(lora_bias=True)),
    "with a bias that the head lacks": ("llama", lora(lora_bias=True)),
    "next to trained biases": ("phi", lora(bias="all")),
    "next to a trained embedding": ("llama", lora(modules_to_save=["embed_tokens"])),
    "tied": ("llama_tied", lora()),
    "tied adapters": ("llama_tied", lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)),
    "tokens": ("llama", lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": TOKENS})),
    "tokens, tied": ("llama_tied", lora(target_modules=["q_proj"], trainable_token_indices=TOKENS)),
    "tokens without the bias": ("phi", TrainableTokensConfig(target_modules=["lm_head"], token_indices=TOKENS)),
    "saved": ("phi", lora(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "saved, tied": (
        "llama_tied",
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_loss_and_every_gradient_equal_the_plain_model(case):
    model, truth = wrapped(*CONFIGS[case]), wrapped(*CONFIGS[case]).double()  # adapters that are tied cannot be copied
    gradients = assert_fused_equals_plain(model, truth)
    assert all(x.any() for x in gradients.values())
    assert sum("lm_head" in name for name in gradients) or "tied" in case or case == "elsewhere"


def several(model: Any) -> None:
    model.add_adapter("other", lora(r=2, lora_alpha=9, target_modules=["lm_head"]))
    model.add_adapter("elsewhere", lora(target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "other", "elsewhere"])


def another(**options: Any) -> Callable:
    def change(model: Any) -> None:
        model.add_adapter("other", lora(**options))
        model.set_adapter("other")

    return change


ADAPTERS = {
    "several": several,
    "not the first": another(r=2),
    "none on the head": another(target_modules=["v_proj"]),
    "a frozen A": lambda model: output_module(model).lora_A["default"].requires_grad_(False),
}


@pytest.mark.parametrize("which", ADAPTERS)
def test_several_adapters(which):
    torch.manual_seed(2)
    model = wrapped("llama", lora())
    ADAPTERS[which](model)
    gradients = assert_fused_equals_plain(model, double_copy(model))
    assert all(x.any() for x in gradients.values())
    assert which != "several" or len(Head.read(output_module(model)).lora) == 2


@pytest.mark.parametrize("case", ["lora", "tokens, tied", "saved"])
def test_adapters_disabled(case):
    model = wrapped(*CONFIGS[case])
    truth = double_copy(model)
    with_adapters = truth(**masked_batch()).loss
    with model.disable_adapter(), truth.disable_adapter(), torch.no_grad():
        assert_fused_equals_plain(model, truth)
        assert abs(with_adapters - truth(**masked_batch()).loss) > 1e-3


@pytest.mark.parametrize("case", ["lora", "with biases", "tokens, tied"])
def test_adapters_merged_and_unmerged(case):
    model = wrapped(*CONFIGS[case])
    truth = double_copy(model)
    want = truth(**masked_batch()).loss.double()
    model.merge_adapter()
    FusedLoss(model.get_base_model())
    head = Head.read(output_module(model))
    assert isinstance(head, Head) and not head.lora
    merged = model(**masked_batch()).loss
    torch.testing.assert_close(merged.double(), want.detach(), rtol=1e-5, atol=0)
    assert not merged.requires_grad
    with model.disable_adapter(), truth.disable_adapter():  # PEFT's own forwards unmerge here
        got, want = model(**masked_batch()).loss, truth(**masked_batch()).loss
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=0)
    assert case == "tokens, tied" or not output_module(model).merged


def test_dropout_is_drawn_as_the_plain_model_draws_it():
    model = wrapped("llama", lora(lora_dropout=0.3, target_modules=["lm_head"])).train()
    plain, batch = copy.deepcopy(model), masked_batch()
    FusedLoss(model.get_base_model())
    results = []
    for m in (model, plain):
        torch.manual_seed(7)
        loss = m(**batch).loss
        results.append((loss, named_gradients(m, loss)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
    assert_same_gradients(results[0][1], results[1][1])
    assert abs(results[0][0] - model.eval()(**batch).loss) > 1e-3
    torch.testing.assert_close(model(**batch).loss, plain.eval()(**batch).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_distillation_with_adapters_on_both_sides(kind):
    student, teacher = wrapped("phi", lora()), wrapped("gemma2", lora(r=2))
    truth, batch = double_copy(student), masked_batch()
    true_teacher = double_copy(teacher)
    inputs, labels = without_labels(batch), shift_labels_of(batch["labels"]).flatten()
    with torch.no_grad():
        logits = true_teacher(**inputs).logits.flatten(0, 1)
    how = {"ce_weight": 0.3, "temperature": 1.5}
    want = distillation_reference(truth(**inputs).logits.flatten(0, 1), logits, kind=kind, labels=labels, **how)
    FusedLoss(student.get_base_model(), LossOptions(distillation=Distillation(weights={kind: 1.0}, **how)))
    with torch.no_grad(), deferred_logits(teacher.get_base_model()):
        of_teacher = teacher(**inputs).logits
    got = student(**batch, teacher_logits=of_teacher, fused_lm_head=True)
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=0)
    assert_same_gradients(named_gradients(student, got.loss), named_gradients(truth, want.loss))
    assert all(p.grad is None for p in teacher.parameters())


def test_distillation_from_a_cache():
    student, batch = wrapped("phi", lora()), masked_batch()
    truth = double_copy(student)
    n, length = batch["labels"].shape
    generators = (torch.Generator().manual_seed(i) for i in range(n * length))
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for generator in generators])
    of_token = torch.zeros(n, length)
    targets = TokenTargets(
        ids=ids.view(n, length, 4), log_probs=torch.full((n, length, 4), 0.2).log(), unnamed=of_token,
        top_ids=ids[:, 0].view(n, length), label_log_prob=of_token, entropy=of_token,
    )  # fmt: skip
    teacher = SparseAnswer(targets, "bucket", VOCAB)
    logits = truth(**without_labels(batch)).logits.flatten(0, 1)
    keep = shift_labels_of(batch["labels"]).flatten() != -100
    want = sparse_divergence_reference(logits, ids, targets.log_probs.flatten(0, 1))[keep].mean()
    FusedLoss(student.get_base_model(), LossOptions(distillation=Distillation()))
    got = student(**batch, teacher_logits=teacher, fused_lm_head=True).loss
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    assert_same_gradients(named_gradients(student, got), named_gradients(truth, want))


def test_half_precision_keeps_the_adapters_gradients_in_fp32():
    """PEFT keeps adapters in fp32 over a base in bf16; the products are bf16's."""
    model = get_peft_model(tiny_model().bfloat16(), lora())
    truth, plain, batch = double_copy(model), copy.deepcopy(model), masked_batch()
    want = named_gradients(truth, truth(**batch).loss)
    FusedLoss(model.get_base_model())
    errors = []
    for m in (model, plain):
        loss = m(**batch).loss
        errors.append(relative_error(m, loss, want, "lm_head"))
        assert abs(loss.item() - truth(**batch).loss.item()) < 0.02 * loss.item()
    for part in ("lora_A", "lora_B"):
        assert getattr(output_module(model), part)["default"].weight.grad.dtype == torch.float32
    assert errors[0] <= 2 * errors[1]


def test_adapters_chosen_row_by_row_compute_the_logits():
    model = wrapped("llama", lora()).eval()
    truth, batch = double_copy(model), masked_batch()
    names = ["default", "__base__", "default"]
    FusedLoss(model.get_base_model())
    with torch.no_grad(), pytest.warns(MaterializedLogitsWarning, match="an output head called with adapter_names"):
        got = model(**batch, adapter_names=names).loss
    with torch.no_grad():
        torch.testing.assert_close(got.double(), truth(**batch, adapter_names=names).loss.double(), rtol=1e-6, atol=0)


def test_a_peft_that_computes_something_else_is_not_taken_for_lora(monkeypatch):
    model = wrapped("llama", lora())
    layer = type(output_module(model))
    forward: Callable = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x: forward(self, x) * 1.01)
    assert "does more than a linear map" in str(Head.read(output_module(model)))


def test_the_weight_of_a_frozen_head_gets_no_gradient():
    model = wrapped("llama", lora(target_modules=["lm_head"]))
    head = Head.read(output_module(model))
    assert isinstance(head, Head) and not head.weight.requires_grad and head.weight.shape == (VOCAB, 32)
    (adapter,) = head.lora
    assert adapter.a.requires_grad and adapter.b.requires_grad and adapter.scaling == 1.5


def put_hook(module: Any, kind: str, seen: list) -> None:
    """A hook that doubles what it is given."""

    def double(module, *given):
        seen.append(module)
        last = given[0] if kind in ("full_backward_hook", "forward_pre_hook") else given[-1]
        return tuple(x * 2 for x in last) if isinstance(last, tuple) else last * 2

    getattr(module, f"register_{kind}")(double)


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
PLACES = ("base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default")


@pytest.mark.parametrize("place, kind", [*(("", kind) for kind in HOOKS), *zip(PLACES, HOOKS, strict=True)])
def test_hooks_on_the_head_count(place, kind):
    model = wrapped("llama", lora())
    truth, seen = double_copy(model), []
    for each in (model, truth):
        put_hook(output_module(each.get_base_model()).get_submodule(place), kind, seen)
    FusedLoss(model.get_base_model())
    with warnings.catch_warnings(action="ignore", category=MaterializedLogitsWarning):
        assert_equals_plain(model, truth)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_on_a_plain_head_need_its_logits(kind):
    model = tiny_model()
    truth, seen = double_copy(model), []
    for each in (model, truth):
        put_hook(each.lm_head, kind, seen)
    FusedLoss(model)
    with warnings.catch_warnings(action="ignore", category=MaterializedLogitsWarning):
        assert_equals_plain(model, truth)
    assert len(seen) == 2
    assert "its output head (Linear) has backward hooks" in str(Head.read(model.lm_head))


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_on_all_modules_are_called_for_the_head(kind):
    model, seen = tiny_model(), []
    FusedLoss(model)
    register = getattr(torch.nn.modules.module, f"register_module_{kind}")
    handle = register(lambda module, *gradients: seen.append(module))
    try:
        with warnings.catch_warnings(action="ignore", category=MaterializedLogitsWarning):
            model(**masked_batch()).loss.backward()
    finally:
        handle.remove()
    assert model.lm_head in seen
