"""What is, or was, wrong in other trainers and in Liger-Kernel 0.8.5, and where it is shown not to be so here.

In other trainers' distillation, all but the last against numbers of their own in tests/:
- loss and gradient grow with gradient accumulation; gradients are divided by the tokens twice; DDP divides by the
  number of processes twice: trainers/test_distill_trainer.py, in micro-batches and two processes
- unshifted logits are masked by the labels (DistillKit 1.0); half of the loss is a cross-entropy that nobody asked for
  (TRL's Liger path); a temperature changes sampling only (TRL 1.16's GKDTrainer): losses/test_plan.py, every type at
  once against plain torch
- the value is multiplied by T^2 and the gradient is not: kernels/test_linear_losses.py
- the denominator counts tokens of the dataset where the student's own are summed: trainers/test_on_policy.py
- a padded vocabulary is refused, or filled with the other side's logits (ms-swift 4.6): teachers/test_vocabulary.py,
  kernels/test_linear_losses.py
- a softcap or a scale of logits is ignored by the fused loss: losses/test_fused_forward.py
- NaN is logged as 0.0 and trained with to the end: trainers/test_finite_guard.py
- misspelled options are taken in silence: losses/test_plan.py, patching/test_families.py
- entries of a teacher divided by their sum without a word: test_oracle.py shows what comes of it; there is no such loss

In Liger-Kernel, besides the tests below:
- the other models of a class change with one of them: patching/test_patcher.py
- adapters on lm_head, or its bias, are left out of the loss and get no gradient: patching/test_peft.py,
  patching/test_families.py for phi
- an evaluation computes all logits: patching/test_use_liger_kernel.py
- Granite's and Cohere's scale of the logits is not implemented: losses/test_fused_forward.py
- torch.compile(fullgraph=True) raises: kernels/test_linear_modes.py, test_promises.py
- a frozen head's gradient is computed, and without gradients too: kernels/test_linear_modes.py
- a second backward gives half of the gradients: kernels/test_promises.py and the losses' own files
- lm_head as a separate unit fails under FSDP2: engines/test_sharded_models.py
- the loss of bf16 logits is rounded to bf16, and without any label the accuracy is NaN: extras/test_losses.py
- a label outside of the vocabulary is read beyond the logits: kernels/test_cross_entropy.py, test_linear_losses.py
- an unknown family, and a flag without effect, pass in silence: patching/test_families.py
"""

import pytest
import torch
import torch.distributed as dist
from families import build_class
from quick_cases import slow_but
from tiny import assert_same_gradients, double_copy, masked_batch, named_gradients, shift_labels_of, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import liger_trainer
from liger_trainer import patch
from liger_trainer.errors import ConfigError


def test_a_head_that_is_trained_alone_gets_a_gradient():
    """Liger's loss requires a gradient, and its head gets none."""
    model = tiny_model()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    truth = double_copy(model)
    patch(model)
    got, want = model(**masked_batch()).loss, truth(**masked_batch()).loss
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=0)
    assert_same_gradients(named_gradients(model, got), named_gradients(truth, want))
    assert model.lm_head.weight.grad.any()


def test_the_auxiliary_loss_of_experts_is_there_with_shift_labels_alone():
    """Liger drops it."""
    model, batch = tiny_model("mixtral"), masked_batch()
    shifted = shift_labels_of(batch.pop("labels"))
    truth = double_copy(model)
    want = truth(**batch, labels=shifted, shift_labels=shifted).loss
    patch(model)
    got = model(**batch, shift_labels=shifted)
    torch.testing.assert_close(got.loss.double(), want.double(), rtol=1e-6, atol=0)
    assert got.aux_loss > 0


def test_a_head_that_fsdp2_has_not_gathered_is_refused():
    """Its gradient would be one rank's: the forward of the unit that holds the head is not running."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), tiny_model()
        patch(model)
        for part in [*model.model.layers, model.model.embed_tokens, model.model.norm]:
            fully_shard(part, mesh=mesh)
        fully_shard(nn.Sequential(model), mesh=mesh)
        with pytest.raises(ConfigError, match="FSDP2 has not gathered weight of the output head.*its own unit"):
            model(**masked_batch())
    finally:
        dist.destroy_process_group()


def test_no_function_and_no_class_of_torch_is_replaced():
    """Liger replaces F.cross_entropy, nn.LayerNorm and nn.CrossEntropyLoss, for everybody."""

    def of_torch():
        return F.cross_entropy, nn.functional.cross_entropy, nn.LayerNorm, nn.CrossEntropyLoss, nn.Linear.forward

    before, model = of_torch(), tiny_model("phi")
    with liger_trainer.apply_liger_kernel_to_llama(cross_entropy=True), patch(model, cross_entropy=True):
        tiny_model("llama")(**masked_batch())
        model(**masked_batch())
        assert all(a is b for a, b in zip(of_torch(), before, strict=True))


VISION = (
    "Glm4vMoeForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_but(VISION, VISION[0], VISION[1], VISION[-1]))
def test_models_whose_classes_were_renamed_are_patched(name):
    """Liger ends with an ImportError on transformers 5.23."""
    record = patch(build_class(name))
    assert record.fused is not None and record.report.swapped["RMSNorm"] >= 4
