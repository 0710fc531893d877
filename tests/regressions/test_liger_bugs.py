"""Defects of Liger-Kernel 0.8.5: each test shows that we do not have one. Numbers in brackets are Liger's.

Proved elsewhere:
- the other models of a class change with one of them: test_patcher.py,
  test_another_model_keeps_its_objects_and_undo_gives_back_every_one
- adapters on lm_head are left out of the loss and get no gradient: test_peft.py, test_adapters, "lm_head" and
  "lm_head, dora"
- the bias of lm_head is left out of the loss and gets no gradient: test_families.py,
  test_an_instance_computes_what_it_did, for phi
- an evaluation computes all logits: test_use_liger_kernel.py, test_a_loss_only_evaluation_computes_no_logits
- Granite's and Cohere's scale of the logits is not implemented: test_fused_models.py, for each of FAMILIES
- torch.compile(fullgraph=True) raises: test_compiles_into_one_graph and the like, for each op in tests/kernels
- a frozen head's gradient is computed, and without gradients too: tests/kernels/test_linear_modes.py,
  test_frozen_inputs_skip_their_products and test_without_gradients_only_the_forward_runs
- a student's logits are filled with zeros where its teacher knows more tokens: tests/kernels/test_linear_losses.py,
  test_padding_takes_no_part
- an unknown family, and a flag without effect, pass in silence: test_families.py
"""

import copy

import pytest
import torch
import torch.distributed as dist
from families import build_class
from quick_cases import slow_but
from tiny import VOCAB, assert_same_gradients, double_copy, masked_batch, named_gradients, shift_labels_of, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import liger_trainer
from liger_trainer import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, patch
from liger_trainer.errors import ConfigError


def assert_same_step(model, truth, rtol=1e-5, **batch):
    batch = batch or masked_batch()
    got, want = model(**batch).loss, truth(**batch).loss
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=0)
    assert_same_gradients(named_gradients(model, got), named_gradients(truth, want), rtol)


# Heads


def test_a_head_that_is_trained_alone_gets_a_gradient():
    """[none, with a loss that requires one]"""
    model = tiny_model()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    truth = double_copy(model)
    patch(model)
    assert_same_step(model, truth)
    assert model.lm_head.weight.grad.any()


def test_the_auxiliary_loss_of_experts_is_there_with_shift_labels_alone():
    """[dropped]"""
    model, batch = tiny_model("mixtral"), masked_batch()
    shifted = shift_labels_of(batch.pop("labels"))
    truth = double_copy(model)
    want = truth(**batch, labels=shifted, shift_labels=shifted).loss
    patch(model)
    got = model(**batch, shift_labels=shifted)
    torch.testing.assert_close(got.loss.double(), want.double(), rtol=1e-6, atol=0)
    assert got.aux_loss > 0


# Sharding


@pytest.fixture
def one_process_mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp2_with_lm_head_as_a_unit_of_its_own(one_process_mesh, tied):
    """[mixed Tensor and DTensor in mm; invalid storage in RMSNorm]"""
    model = tiny_model("llama_tied" if tied else "llama")
    plain = copy.deepcopy(model)
    patch(model)
    for part in [*model.model.layers, model.model.norm, *([] if tied else [model.lm_head])]:
        fully_shard(part, mesh=one_process_mesh)
    fully_shard(model, mesh=one_process_mesh)
    for _ in range(2):
        batch = masked_batch()
        got, want = model(**batch).loss, plain(**batch).loss
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        got.backward()
        want.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_head_that_fsdp2_has_not_gathered_is_refused(one_process_mesh):
    """Its gradient would be that of one rank: the forward of the unit that holds the head is not running."""
    model = tiny_model()
    patch(model)
    for part in [*model.model.layers, model.model.embed_tokens, model.model.norm]:
        fully_shard(part, mesh=one_process_mesh)
    fully_shard(nn.Sequential(model), mesh=one_process_mesh)
    with pytest.raises(ConfigError, match="FSDP2 has not gathered weight of the output head.*a unit of its own"):
        model(**masked_batch())


# A second backward


def test_a_second_backward_gives_the_same_gradients():
    """[half of them]"""
    model = tiny_model()
    patch(model)
    loss = model(**masked_batch()).loss * 0.5
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-8)


# The rest of the process


def test_no_function_and_no_class_of_torch_is_replaced():
    """[F.cross_entropy, nn.LayerNorm and nn.CrossEntropyLoss, for everybody]"""
    before = F.cross_entropy, nn.functional.cross_entropy, nn.LayerNorm, nn.CrossEntropyLoss, nn.Linear.forward
    model = tiny_model("phi")
    with liger_trainer.apply_liger_kernel_to_llama(cross_entropy=True), patch(model, cross_entropy=True):
        tiny_model("llama")(**masked_batch())
        model(**masked_batch())
        after = F.cross_entropy, nn.functional.cross_entropy, nn.LayerNorm, nn.CrossEntropyLoss, nn.Linear.forward
        assert all(a is b for a, b in zip(after, before, strict=True))
        logits = torch.randn(2, 5, 3)
        kept = logits.clone()
        F.cross_entropy(logits, torch.randint(5, (2, 3)))  # three dimensions
        F.cross_entropy(logits, torch.rand(2, 5, 3))  # probabilities
        assert torch.equal(logits, kept)
        nn.LayerNorm(4, elementwise_affine=False)(torch.randn(2, 4))


VISION = (
    "Glm4vMoeForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_but(VISION, VISION[0], VISION[1], VISION[-1]))
def test_models_whose_classes_were_renamed_are_patched(name):
    """[ImportError with transformers 5.23]"""
    record = patch(build_class(name))
    assert record.fused is not None and record.report.swapped["RMSNorm"] >= 4


# Losses


def test_a_misspelt_option_is_an_error():
    """[label_smoothin= and unknown flags pass in silence]"""
    for loss in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(TypeError, match="label_smoothin"):
            loss(label_smoothin=0.1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_of_bf16_logits_is_summed_in_fp32(reduction):
    """[18944 instead of 19063.6; 4.625 instead of 4.654]"""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, VOCAB, generator=generator).mul(1.5).bfloat16()
    labels = torch.randint(VOCAB, (4096,), generator=generator)
    want = F.cross_entropy(logits.double(), labels, reduction=reduction)
    got = LigerCrossEntropyLoss(reduction=reduction)(logits, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    assert abs(want.bfloat16().double() / want - 1) > 1e-5  # what rounding to bf16 would do


@pytest.mark.parametrize("fused", [True, False])
def test_a_label_outside_the_vocabulary_is_not_read_in_silence(fused):
    """[a number from beyond the logits]"""
    model, batch = tiny_model(), masked_batch()
    patch(model) if fused else patch(model, cross_entropy=True)
    batch["labels"][0, 4] = VOCAB + 3
    try:
        assert torch.isnan(model(**batch).loss)
    except (IndexError, RuntimeError) as error:
        assert "bounds" in str(error) or "out of range" in str(error)


def test_without_any_label_accuracy_and_loss_are_zero():
    """[NaN]"""
    loss = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)
    hidden, head = torch.randn(6, 8, requires_grad=True), torch.randn(VOCAB, 8)
    output = loss(head, hidden, torch.full((6,), -100))
    assert output.loss == 0 and output.token_accuracy == 0
    output.loss.backward()
    assert not hidden.grad.any()
