"""Deferred logits against real ones, operation by operation; and heads that cannot be deferred."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from plain_models import assert_equals_plain, without_labels
from tiny import (
    VOCAB,
    assert_same_gradients,
    double_copy,
    masked_batch,
    named_gradients,
    tiny_model,
)
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_trainer.errors import ConfigError, MaterializedLogitsWarning
from liger_trainer.losses import deferred_logits as deferred
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import deferred_logits
from liger_trainer.losses.fused_forward import FusedLoss, _warn_once
from liger_trainer.losses.model_parts import Head, gather

B, T, H, V = 2, 4, 8, 13


class Toy(nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(H, V, bias=bias)

    def get_output_embeddings(self):
        return self.head


@pytest.fixture
def hidden():
    return torch.randn(B, T, H, generator=torch.Generator().manual_seed(1), requires_grad=True)


ROWS = torch.tensor([[True, False, True, True], [False, False, True, False]])

DEFERRED = {
    "nothing": lambda x: x,
    "times a float": lambda x: x * 2.5,
    "times an int": lambda x: x * 3,
    "a float times it": lambda x: 0.3 * x,
    "over a float": lambda x: x / 4.0,
    "times in place": lambda x: _scaled_in_place(x),
    "mul": lambda x: x.mul(1.5),
    "div": lambda x: x.div(1.5),
    "torch.mul": lambda x: torch.mul(x, 1.5),
    "torch.div": lambda x: torch.div(x, 1.5),
    "torch.true_divide": lambda x: torch.true_divide(x, 1.5),
    "cap": lambda x: torch.tanh(x / 0.7) * 0.7,
    "cap by methods": lambda x: (x / 0.7).tanh() * 0.7,
    "scale, cap, scale": lambda x: torch.tanh(x * 3 / 0.7) * 0.7 / 2,
    "cap without scales": lambda x: x.tanh(),
    "float": lambda x: x.float(),
    "to a dtype": lambda x: x.to(torch.float64),
    "to dtype=": lambda x: x.to(dtype=torch.float64),
    "to a device": lambda x: x.to("cpu"),
    "to a device and a dtype": lambda x: x.to("cpu", torch.float64),
    "to like a tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "to where it is": lambda x: x.to(x.device),
    "scale, then cast": lambda x: (x * 2).float() / 3,
    "contiguous": lambda x: x.contiguous(),
    "view flat": lambda x: x.view(-1, V),
    "view by sizes": lambda x: x.view(x.size(0) * x.shape[1], x.size(-1)),
    "view a tuple": lambda x: x.view((B * T, V)),
    "view with the last inferred": lambda x: x.view(B * T, -1),
    "view deeper": lambda x: x.view(B, 2, 2, V),
    "reshape": lambda x: x.reshape(T, B, V),
    "torch.reshape": lambda x: torch.reshape(x, (-1, V)),
    "shifted": lambda x: x[..., :-1, :],
    "shifted and contiguous": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "shifted, last whole by omission": lambda x: x[:, :-1],
    "one row": lambda x: x[1],
    "one position": lambda x: x[:, -1, :],
    "a position without the last": lambda x: x[0, 1],
    "a slice": lambda x: x[1:],
    "everything": lambda x: x[:],
    "Ellipsis": lambda x: x[...],
    "Ellipsis at the end": lambda x: x[0, ...],
    "None in front": lambda x: x[None],
    "None in between": lambda x: x[:, None],
    "None and whole": lambda x: x[..., None, :],
    "a mask of rows": lambda x: x[ROWS],
    "a mask and the whole": lambda x: x[ROWS, :],
    "a mask of the first": lambda x: x[torch.tensor([True, False])],
    "positions": lambda x: x[:, torch.tensor([0, 2])],
    "positions in a list": lambda x: x[:, [3, 1]],
    "pairs of positions": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "logits_to_keep": lambda x: x[:, slice(-2, None), :],
    "twice": lambda x: x[:, :-1][0, 1:],
}

COMPUTED = {
    "+": ("__add__", lambda x: x + 1),
    "+ from the left": ("__radd__", lambda x: 1 + x),
    "-": ("__sub__", lambda x: x - 1.0),
    "- from the left": ("__rsub__", lambda x: 1 - x),
    "negation": ("__neg__", lambda x: -x),
    "power": ("__pow__", lambda x: x**2),
    "over it": ("__rtruediv__", lambda x: 1 / x),
    "comparison": ("__gt__", lambda x: x > 0),
    "equality": ("__eq__", lambda x: x == 0),
    "inequality": ("__ne__", lambda x: x != 0),
    "matmul": ("__matmul__", lambda x: x @ torch.ones(V)),
    "times a tensor": ("multiplication by a tensor", lambda x: x * torch.arange(V)),
    "a tensor times it": ("mul", lambda x: torch.arange(V) * x),
    "over a tensor": ("division by a tensor", lambda x: x / torch.full((V,), 2.0)),
    "a second cap": ("a second tanh", lambda x: torch.tanh(torch.tanh(x) * 2)),
    "part of the vocabulary": ("indexing by", lambda x: x[..., :5]),
    "part of the vocabulary, in full": ("indexing by", lambda x: x[:, :, 2:]),
    "one token": ("indexing by", lambda x: x[:, :, 3]),
    "a column of columns": ("indexing by", lambda x: x[..., None]),
    "a mask over the vocabulary": ("indexing by", lambda x: x[..., torch.arange(V) % 2 == 0]),
    "a mask over everything": ("indexing by", lambda x: x[torch.ones(B, T, V, dtype=torch.bool)]),
    "a mask of rows and some tokens": ("indexing by", lambda x: x[ROWS, :3]),
    "flattened": (r"view\(-1,\)", lambda x: x.view(-1)),
    "viewed across the vocabulary": (r"view\(2, -1\)", lambda x: x.view(2, -1)),
    "method": (r"\.softmax", lambda x: x.softmax(-1)),
    "argmax": (r"\.argmax", lambda x: x.argmax(-1)),
    "transposed": (r"\.transpose", lambda x: x.transpose(0, 1)),
    "function": ("softmax", lambda x: torch.softmax(x, -1)),
    "keyword": ("softmax", lambda x: torch.softmax(input=x, dim=-1)),
    "in a list": ("cat", lambda x: torch.cat([x, x])),
    "module": ("log_softmax", lambda x: nn.LogSoftmax(-1)(x)),
    "another device": ("a move to another device", lambda x: x.to("meta")),
}


def _scaled_in_place(x):
    x = x * 1
    x *= 2.0
    x /= 3.0
    return x


def real(toy, hidden, operation):
    return operation(toy.head(hidden))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", DEFERRED)
@pytest.mark.filterwarnings("error")
def test_operations_that_stay_deferred(hidden, name, bias):
    toy, operation = Toy(bias), DEFERRED[name]
    want = real(toy, hidden, operation)
    with deferred_logits(toy) as forward:
        got = operation(toy.head(hidden))
    assert forward.why_not_deferred is None and isinstance(got, DeferredLogits)
    assert (got.shape, got.size(), got.size(-1)) == (want.shape, want.size(), want.size(-1))
    assert (got.dtype, got.device, got.ndim, got.dim()) == (want.dtype, want.device, want.ndim, want.dim())
    torch.testing.assert_close(got.compute(), want)
    # What a fused loss reads of it.
    product = (got.hidden @ got.head.weight.T + (got.head.bias if bias else 0)) * got.scale
    capped = product if got.softcap is None else got.softcap * torch.tanh(product / got.softcap)
    torch.testing.assert_close(capped.to(got.dtype), want)


@pytest.mark.parametrize("name", COMPUTED)
def test_other_operations_compute_the_logits_and_say_which(hidden, name):
    toy, (words, operation) = Toy(), COMPUTED[name]
    want = real(toy, hidden, operation)
    with deferred_logits(toy):
        logits = toy.head(hidden)
        with pytest.warns(MaterializedLogitsWarning, match=f"Toy computes its logits for {words}"):
            got = operation(logits)
    assert isinstance(got, torch.Tensor) and got.shape == want.shape
    if got.device.type != "meta":
        torch.testing.assert_close(got, want)
    # After the forward, anyone may read them.
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        operation(logits)


def test_what_is_read_later_carries_gradients_has_a_length_and_rows(hidden):
    toy = Toy()
    with deferred_logits(toy):
        logits = toy.head(hidden) / 2
    leaves = (hidden, toy.head.weight, toy.head.bias)
    got, want = (torch.autograd.grad(x.square().sum(), leaves) for x in (logits, toy.head(hidden) / 2))
    torch.testing.assert_close(got, want)
    assert len(logits) == B
    torch.testing.assert_close(torch.stack(list(logits)), toy.head(hidden) / 2)


def test_a_gradient_that_is_retained_and_files_and_copies_are_those_of_a_tensor(hidden, tmp_path):
    toy = Toy()
    with deferred_logits(toy):
        logits = toy.head(hidden) / 2
    want = toy.head(hidden) / 2
    torch.save(logits, tmp_path / "logits.pt")
    for got in (torch.load(tmp_path / "logits.pt"), copy.copy(logits), copy.deepcopy(logits.detach())):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)
    for x in (logits, want):
        x.retain_grad()
        (x * x).sum().backward()
    torch.testing.assert_close(logits.grad, 2 * want.detach())


def test_only_this_head_is_changed_and_its_own_again_after_an_error(hidden):
    toy, other = Toy(), Toy()
    with contextlib.suppress(RuntimeError), deferred_logits(toy):
        assert isinstance(other.head(hidden), torch.Tensor)
        assert isinstance(toy.head(hidden), DeferredLogits)
        raise RuntimeError
    assert isinstance(toy.head(hidden), torch.Tensor)


# Heads


def test_head_is_read_when_it_is_used():
    model, batch = tiny_model(), masked_batch()
    FusedLoss(model)
    model(**batch)
    model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    new = nn.Linear(32, VOCAB + 6, bias=True)
    model.set_output_embeddings(new)
    truth = double_copy(model)
    del truth.forward
    assert_equals_plain(model, truth)
    assert new.bias.grad.any()


def peft_pair(config, family="llama"):
    """A PEFT model with a fused loss, and its plain fp64 copy."""
    model = get_peft_model(tiny_model(family), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # adapters start as nothing
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    truth = double_copy(model)
    FusedLoss(model.get_base_model())
    return model, truth


def dora_on_head():
    return peft_pair(LoraConfig(target_modules=["lm_head"], r=4, use_dora=True))


def replaced_adapter():
    """An adapter whose first product is more than a linear map."""
    model, truth = peft_pair(LoraConfig(target_modules=["lm_head"], r=4))
    for m in (model, truth):
        a = m.base_model.model.lm_head.lora_A["default"]
        a.forward = lambda x, a=a: type(a).forward(a, x) * 2
    return model, truth


class HalfDropout(nn.Dropout):
    """Not known to be what its class says."""

    def forward(self, x):
        return x / 2


def another_dropout():
    model, truth = peft_pair(LoraConfig(target_modules=["lm_head"], r=4, lora_dropout=0.5))
    for m in (model, truth):
        m.base_model.model.lm_head.lora_dropout["default"] = HalfDropout()
    return model, truth


def replaced_forward():
    model = tiny_model()
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x) + 0.5 * plain(x).roll(1, -1)
    truth = tiny_model().double()
    plain64 = truth.lm_head.forward
    truth.lm_head.forward = lambda x: plain64(x) + 0.5 * plain64(x).roll(1, -1)
    FusedLoss(model)
    return model, truth


def missing_head():
    model = tiny_model()
    truth = double_copy(model)
    model.get_output_embeddings = lambda: None
    FusedLoss(model)
    return model, truth


OBSTACLES = {
    dora_on_head: r"the adapter 'default' on its output head is more than plain LoRA \(DoraLinearVariant\)",
    replaced_adapter: "the adapter 'default' on its output head has layers that do more than a linear map",
    another_dropout: "the adapter 'default' on its output head drops out by HalfDropout",
    replaced_forward: r"the forward of its output head \(Linear\) has been replaced",
    missing_head: "the model has no output embeddings",
}


@pytest.mark.parametrize("pair", OBSTACLES)
def test_a_head_that_cannot_be_deferred_warns_and_stays_exact(pair):
    model, truth = pair()
    batch = masked_batch()
    _warn_once.cache_clear()
    with pytest.warns(
        MaterializedLogitsWarning, match=f"LlamaForCausalLM stores the logits of the whole batch: {OBSTACLES[pair]}"
    ):
        outputs, _ = assert_equals_plain(model, truth, batch)
    assert isinstance(outputs.logits, torch.Tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        batch["num_items_in_batch"] = 11
        got = model(**batch, fused_lm_head=True)  # says it once
    torch.testing.assert_close(got.loss.double(), truth(**batch).loss.double(), rtol=1e-6, atol=0)


class ShiftedLogits(LlamaForCausalLM):
    """Does something to its logits that no fused loss knows."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        outputs.logits = outputs.logits + torch.linspace(-1, 1, VOCAB)
        if labels is not None:
            outputs.loss = self.loss_function(outputs.logits, labels, vocab_size=VOCAB, **kwargs)
        return outputs


def test_a_forward_that_computes_its_logits_warns_and_stays_exact():
    model = ShiftedLogits(tiny_model().config)
    truth = double_copy(model)
    FusedLoss(model)
    with pytest.warns(MaterializedLogitsWarning, match="ShiftedLogits computes its logits for __add__"):
        assert_equals_plain(model, truth)


def test_what_a_head_is_not():
    assert Head.read(None) == "the model has no output embeddings"
    assert "Embedding, which does more than a linear map" in str(Head.read(nn.Embedding(3, 4)))
    head = nn.Linear(3, 4)
    head.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.int8), requires_grad=False)
    assert "is not a floating-point matrix" in str(Head.read(head))


def test_a_head_that_zero3_frees_before_the_loss_is_refused():
    head = nn.Linear(3, 4, bias=False)
    head.weight.ds_id = 0  # as DeepSpeed marks it
    with pytest.raises(ConfigError, match="ZeRO-3 gathers weight of the output head .* patched before DeepSpeed was"):
        gather(head, nn.Sequential(head))


# Writing into logits: each function changes what it gets, or a view or a copy of it.


def _view_first(x):
    shifted, flat = x[:, 1:], x.view(-1, V)
    x.mul_(2.0)
    shifted.add_(1.0)
    flat[0] = 3.0


def _other_name(x):
    other = x
    other += 1.0
    other *= 2.0


def _copies(x):
    for each in (x * 1.0, x[ROWS], x[:, [0, 2]], x[:, :-1].contiguous(), x[:, :-1].reshape(-1, V), x.to(torch.float64)):
        each.zero_()


WRITES = {
    "mul_": lambda x: x.mul_(2.0), "div_": lambda x: x.div_(0.5),
    "div_ by a tensor": lambda x: x.div_(torch.full((V,), 2.0)),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(V) > 8, -1e4), "clamp_": lambda x: x.clamp_(-0.1, 0.1),
    "a function": lambda x: F.relu(x, inplace=True),
    "some tokens": lambda x: x.__setitem__((..., slice(10, None)), -1e4),
    "rows": lambda x: x.__setitem__(ROWS, 0.0), "index_fill_": lambda x: x.index_fill_(-1, torch.tensor([1, 2]), -5.0),
    "a view": lambda x: x[:, :-1].mul_(3.0), "a view in place": lambda x: x[0].__imul__(3.0),
    "part of the vocabulary": lambda x: x[..., :5].fill_(0.0), "flat": lambda x: x.view(-1)[::3].fill_(1.0),
    "a view of a view": lambda x: x[:, 1:][0].view(-1, V).sub_(2.0), "same dtype": lambda x: x.float().clamp_(min=0),
    "contiguous": lambda x: x.contiguous().reshape(-1, V).tanh_(), "transposed": lambda x: x.transpose(0, 1).add_(1.0),
    "detached": lambda x: x.detach().mul_(2.0), "data": lambda x: x.data.mul_(2.0),
    "numpy": lambda x: x.detach().numpy().fill(2.0), "no gradient": lambda x: torch.no_grad()(x.clamp_)(max=0.0),
    "views taken first": _view_first, "another name": _other_name, "copies": _copies,
}  # fmt: skip


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore::liger_trainer.errors.MaterializedLogitsWarning")
def test_what_is_written_into_logits_stays(hidden, name, running):
    toy, factors = Toy(), torch.randn(B, T, V, generator=torch.Generator().manual_seed(2))
    want = toy.head(hidden) * 1.5
    WRITES[name](want)
    with deferred_logits(toy) as forward:
        got = toy.head(hidden) * 1.5
        forward.running = running
        WRITES[name](got)
    torch.testing.assert_close(got.compute(), want)
    assert got.shape == want.shape and got.stored == (name not in ("mul_", "div_", "copies"))
    leaves = [hidden, toy.head.weight]
    if name not in ("detached", "data", "numpy"):  # whose writes autograd does not see
        theirs = torch.autograd.grad((want * factors).sum(), leaves)
        torch.testing.assert_close(torch.autograd.grad((got * factors).sum(), leaves), theirs)


@pytest.mark.parametrize("name", ["div_", "masked_fill_", "part of the vocabulary", "a view", "data"])
@pytest.mark.filterwarnings("ignore::liger_trainer.errors.MaterializedLogitsWarning")
def test_a_models_forward_may_write_into_its_logits(name):
    class Writing(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids)[0])
            WRITES[name](logits)
            return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, V, **kwargs), logits=logits)

    config = tiny_model().config
    config.vocab_size, config.pad_token_id = V, None
    model = Writing(config)
    truth = double_copy(model)
    FusedLoss(model)
    ids = torch.randint(V, (2, 9))
    got, want = model(input_ids=ids, labels=ids), truth(input_ids=ids, labels=ids)
    torch.testing.assert_close(got.loss.double(), want.loss.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close((got.logits + 0).double(), want.logits, rtol=1e-4, atol=1e-5)
    assert_same_gradients(named_gradients(model, got.loss), named_gradients(truth, want.loss))


# Weights that change after the forward


def _adapted():
    config = LoraConfig(target_modules=["lm_head", "q_proj"], r=4, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    model.add_adapter("other", config)
    return model.eval()


SWITCHES = {
    "adapters off": lambda m: m.base_model.disable_adapter_layers(),
    "another adapter": lambda m: m.set_adapter("other"),
    "training mode": lambda m: m.train(),
}
CHANGES = {
    "a step": lambda m: torch.no_grad()(head_of(m).lora_B["default"].weight.add_)(1.0),
    "of the base": lambda m: torch.no_grad()(head_of(m).base_layer.weight.mul_)(3.0),
    "loaded": lambda m: m.load_state_dict(m.state_dict()),
    "merged": lambda m: m.merge_adapter(),
    "cast": lambda m: m.to(torch.bfloat16),
}


def unlabelled(model):
    return model(**without_labels(masked_batch())).logits


def head_of(model):
    return model.base_model.model.lm_head


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_logits_are_of_the_adapters_that_computed_them(name, grad, monkeypatch):
    monkeypatch.setattr(deferred, "CHEAP", 0)
    model = _adapted()
    FusedLoss(model.get_base_model())
    with torch.set_grad_enabled(grad):
        outputs, want = model(**masked_batch()), unlabelled(model)
    SWITCHES[name](model)
    torch.testing.assert_close(outputs.logits.clone(), want)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_logits_of_weights_that_have_changed_are_refused(name, grad, monkeypatch):
    monkeypatch.setattr(deferred, "CHEAP", 0)
    model = _adapted()
    FusedLoss(model.get_base_model())
    with torch.set_grad_enabled(grad):
        outputs, read = model(**masked_batch()), model(**masked_batch())
        want = read.logits.clone()
    CHANGES[name](model)
    with pytest.raises(ConfigError, match="are read after the weights of its output head have changed"):
        outputs.logits.argmax(-1)
    if not grad:  # what was read is kept
        torch.testing.assert_close(read.logits.clone(), want)


def test_few_logits_are_real_at_once_without_gradients():
    model = tiny_model().eval()
    FusedLoss(model)
    with torch.no_grad():
        logits, want = model(**masked_batch()).logits, unlabelled(model)
        assert type(logits) is torch.Tensor
        model.lm_head.weight.mul_(3.0)
    torch.testing.assert_close(logits, want)


def test_logits_are_of_the_autocast_of_their_forward():
    model = tiny_model()
    FusedLoss(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits, want = model(**masked_batch()).logits, unlabelled(model)
    assert logits.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(logits + 0, want)


class Packed(torch.Tensor):
    """Stands for a weight that a library has quantised: its memory is not what it multiplies by."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return F.linear(args[0], args[1].as_subclass(torch.Tensor) * 2, *args[2:], **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in (torch.Tensor.detach, torch.Tensor.clone) else result


@pytest.mark.parametrize("lora", [False, True])
def test_logits_of_a_packed_head_are_stored(lora):
    model = tiny_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed), requires_grad=False)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False))
    base, batch = model.get_base_model() if lora else model, masked_batch()
    want = model(**batch).loss
    FusedLoss(base)
    _warn_once.cache_clear()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), contextlib.suppress(MaterializedLogitsWarning):
            torch.testing.assert_close(model(**batch).loss, want)
