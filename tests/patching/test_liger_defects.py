"""What is wrong in Liger-Kernel 0.8.5, where no other file has a test of it, and is not so here."""

import pytest
import torch
import torch.distributed as dist
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
