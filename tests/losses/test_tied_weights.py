"""Models whose output head is their embedding: who gets one gradient, that it is the right one, and what is undone."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny import assert_same_gradients, double_copy, masked_batch, named_gradients, tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_trainer.kernels.tied_embedding import TiedWeight
from liger_trainer.losses import tied_weights
from liger_trainer.losses.fused_forward import FusedLoss
from liger_trainer.losses.scored_logits import scored_logits
from liger_trainer.losses.tied_weights import tied_weight

TIED = ("llama_tied", "gemma2", "gemma3", "cohere", "gpt2")


@pytest.fixture
def embedded(monkeypatch) -> list[torch.Tensor]:
    """The ids that tied weights have embedded."""
    ids: list[torch.Tensor] = []

    class Listening(TiedWeight):
        def embed(self, given, padding=None):
            ids.append(given)
            return super().embed(given, padding)

    monkeypatch.setattr(tied_weights, "TiedWeight", Listening)
    return ids


def untied(model, batch):
    """Loss and gradients of the model's own forward in fp64."""
    truth = double_copy(model)
    return named_gradients(truth, truth(**batch).loss)


@pytest.mark.parametrize("family", TIED)
def test_one_gradient_of_both_uses(family, embedded):
    model, batch = tiny_model(family), masked_batch()
    batch["input_ids"][0, :6] = model.get_input_embeddings().padding_idx or 3  # whose rows may have no gradient
    want = untied(model, batch)
    FusedLoss(model)
    got = named_gradients(model, model(**batch).loss)
    assert len(embedded) == 1 and torch.equal(embedded[0], batch["input_ids"])
    assert_same_gradients(got, want)
    assert "weight" not in vars(model.get_input_embeddings())


def test_gradients_are_accumulated_and_kept_graphs_go_backward_again(embedded):
    model, batches = tiny_model("llama_tied"), [masked_batch(seed) for seed in range(2)]
    wants = [untied(model, batch) for batch in batches]
    FusedLoss(model)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(got, {name: 2 * (wants[0][name] + wants[1][name]) for name in got})
    assert len(embedded) == 2


def test_the_rows_in_each_backward_are_those_of_its_forward():
    """Two forwards, then their backwards in the other order."""
    model, batches = tiny_model("gemma3"), [masked_batch(seed) for seed in range(2)]
    wants = [untied(model, batch) for batch in batches]
    FusedLoss(model)
    losses = [model(**batch).loss for batch in batches]
    for loss, want in reversed(list(zip(losses, wants, strict=True))):
        assert_same_gradients(named_gradients(model, loss), want)


def test_losses_outside_of_the_forward_too(embedded):
    """As TRL's preference trainers compute them, of forwards within one context."""
    model, batches = tiny_model("gemma2"), [masked_batch(seed) for seed in range(2)]
    flat = [batch["labels"].reshape(-1) for batch in batches]

    def losses(model) -> list[torch.Tensor]:
        inputs = [{name: x for name, x in batch.items() if name != "labels"} for batch in batches]
        logits = [model(**given).logits for given in inputs]
        return [F.cross_entropy(x.view(-1, x.shape[-1]), labels) for x, labels in zip(logits, flat, strict=True)]

    truth = double_copy(model)
    want = named_gradients(truth, sum(losses(truth)))
    with scored_logits(model):
        apart = losses(model)
    for backward in ([sum(apart)], apart[::-1]):  # of both at once, and of each
        model.zero_grad()
        for loss in backward:
            loss.backward(retain_graph=True)
        assert_same_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, want)
    assert len(embedded) == 2


def test_embeddings_that_are_read_more_than_once_in_a_forward(embedded):
    """As by a hook that adds a loss on other tokens."""
    model, batch, ids = tiny_model("llama_tied"), masked_batch(), masked_batch(1)["input_ids"]
    truth = double_copy(model)
    more: list[torch.Tensor] = []

    def read(embedding) -> torch.Tensor:
        return (embedding(ids) ** 2).sum() + embedding.weight.sum()

    want = named_gradients(truth, truth(**batch).loss + read(truth.get_input_embeddings()))
    FusedLoss(model)
    model.model.norm.register_forward_hook(lambda *_: more.append(read(model.get_input_embeddings())))
    assert_same_gradients(named_gradients(model, model(**batch).loss + more[0]), want)
    assert len(embedded) == 2


def test_embeddings_that_are_given_or_called_alone(embedded):
    model, batch = tiny_model("llama_tied"), masked_batch()
    want = untied(model, batch)
    FusedLoss(model)
    rows = model.get_input_embeddings()(batch["input_ids"])
    inputs = {"inputs_embeds": rows, **{name: batch[name] for name in ("attention_mask", "labels")}}
    assert_same_gradients(named_gradients(model, model(**inputs).loss), want)
    assert not embedded


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_keeps_torchs_gradients(tmp_path, embedded, use_orig_params):
    """Outside of its forward the weight looks whole."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, batch = tiny_model("gemma2"), masked_batch()
        labels = batch.pop("labels").reshape(-1)
        truth = double_copy(model)
        want = F.cross_entropy(truth(**batch).logits.flatten(0, 1), labels)
        wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with scored_logits(model):
            logits = wrapped(**batch).logits
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels)
        loss.backward()
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
        got = torch.cat([parameter.grad.reshape(-1) for parameter in wrapped.parameters()])
        whole = torch.cat([gradient.reshape(-1) for gradient in named_gradients(truth, want).values()])
        torch.testing.assert_close(got.norm().double(), whole.norm(), rtol=1e-5, atol=0)
        assert not embedded
    finally:
        torch.distributed.destroy_process_group()


def test_distributed_data_parallel_averages_it(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, batch = tiny_model("llama_tied"), masked_batch()
        want = untied(model, batch)
        FusedLoss(model)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, lambda _, bucket: bucket_doubled(bucket))
        wrapped(**batch).loss.backward()
        got = {name: parameter.grad / 2 for name, parameter in model.named_parameters()}
        assert_same_gradients(got, want)
    finally:
        torch.distributed.destroy_process_group()


def bucket_doubled(bucket) -> torch.futures.Future:
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(bucket.buffer() * 2)
    return done


def test_who_keeps_torchs_own_gradients(embedded):
    hooked = tiny_model("llama_tied")
    hooked.get_input_embeddings().forward = hooked.get_input_embeddings().forward  # replaced by somebody else
    lora = get_peft_model(tiny_model("llama_tied"), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    by_frequency = tiny_model("llama_tied")
    by_frequency.get_input_embeddings().scale_grad_by_freq = True
    for model in (tiny_model("llama"), hooked, lora, by_frequency):
        base = model.get_base_model() if model is lora else model
        FusedLoss(base)
        named = model(**masked_batch()).loss
        named.backward()
    assert not embedded
    plain = tiny_model("llama_tied")
    want = untied(by_frequency, masked_batch())["model.embed_tokens.weight"]
    got = by_frequency.get_input_embeddings().weight.grad.double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), tied_weight(plain) as tied:
        assert tied is None


@pytest.mark.parametrize("option", [{"max_norm": 0.1}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_of_embeddings_that_only_torch_knows(embedded, option):
    model, ids = tiny_model("llama_tied"), masked_batch()["input_ids"]
    embedding = model.get_input_embeddings()
    for name, value in option.items():
        setattr(embedding, name, value)
    with tied_weight(model):
        embedding(ids)
    assert not embedded


def test_weights_that_are_not_whole_or_replaced(monkeypatch):
    class OfAnother(torch.nn.Parameter):
        pass

    def is_tied(model) -> bool:
        with tied_weight(model) as tied:
            return tied is not None

    model = tiny_model("llama_tied")
    embedding = model.get_input_embeddings()
    assert is_tied(model)
    vars(embedding)["weight"] = embedding.weight.detach()
    assert not is_tied(model) and "weight" in vars(embedding)
    del vars(embedding)["weight"]
    monkeypatch.setattr(tied_weights, "is_partitioned", lambda weight: True)
    assert not is_tied(model)
    monkeypatch.undo()
    embedding._parameters["weight"] = model.lm_head._parameters["weight"] = OfAnother(embedding.weight.detach())
    assert not is_tied(model)


def test_the_weight_is_itself_for_everything_else():
    model = tiny_model("llama_tied")
    embedding = model.get_input_embeddings()
    with tied_weight(model):
        weight = embedding.weight
        assert (weight.dtype, weight.shape) == (torch.float32, embedding._parameters["weight"].shape)
        assert torch.equal(torch.nn.functional.linear(torch.eye(32), weight), model.lm_head.weight.t())
        assert torch.equal(weight[3], model.lm_head.weight[3]) and weight[3].requires_grad and len(weight) == 64
        assert [name for name, _ in embedding.named_parameters()] == ["weight"]
    assert embedding.weight is model.lm_head.weight
