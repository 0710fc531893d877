"""Patched models under torch.compile: whole graphs, with the loss and the gradients of the plain model."""

import contextlib
import copy
import functools
import shutil
import sys
import warnings

import pytest
import torch
from quick_cases import slow_but
from steps import adapted
from tiny import assert_same_gradients, masked_batch, named_gradients, shift_labels_of, texts, tiny_model, train_args
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from trainings import distill, logged, sft
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import liger_trainer
from liger_trainer import patch
from liger_trainer.errors import MaterializedLogitsWarning
from liger_trainer.kernels import _triton
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import LazyLogits, deferred_logits
from liger_trainer.losses.spec import Distillation, LossOptions

pytestmark = [
    pytest.mark.filterwarnings("error:Dynamo detected a call:UserWarning"),
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
]


# Its Dynamo is the first that traces how the head is put back, so that forward and loss are one graph.
whole_graph = pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < "2.13", reason="torch 2.13")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


def pair(family="llama", layers=1):
    """A plain model, and a copy of it that is patched. Where the loss alone is at stake, no layers are compiled."""
    plain = tiny_model(family, num_hidden_layers=layers)
    model = copy.deepcopy(plain)
    return plain, model, patch(model)


def compiled(model, **options):
    return torch.compile(model, fullgraph=True, **{"backend": "aot_eager", **options})


def assert_same(got, want, rtol=1e-5):
    """Losses and gradients of two models, each (model, loss)."""
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=0)
    assert_same_gradients(named_gradients(*got), named_gradients(*want), rtol=rtol)


@whole_graph
@pytest.mark.parametrize("family", slow_but(["qwen3", "llama_tied", "gemma2", "granite", "cohere"], "qwen3"))
def test_one_graph_with_the_plain_models_gradients(family):
    plain, model, patched = pair(family)
    assert patched.fused is not None and len(patched.report.swapped) >= 3
    before = {id(m): dict(vars(m)) for m in model.modules()}
    batch = masked_batch()
    eager, step = model(**batch).loss, compiled(model)
    got, want = step(**batch), plain(**batch)
    assert isinstance(got.logits, DeferredLogits)
    assert_same((model, got.loss), (plain, want.loss))
    torch.testing.assert_close(step(**batch).loss, eager)
    for module in model.modules():
        assert vars(module).keys() - {"_is_torch_compile"} == before[id(module)].keys()  # transformers' own
    patched.undo()
    assert "forward" not in vars(model) and "_loss_function" not in vars(model)


CALLS = {
    "divisor": lambda batch: batch | {"num_items_in_batch": torch.tensor(7)},
    "divisor as a number": lambda batch: batch | {"num_items_in_batch": 7},
    "shifted labels": lambda batch: batch | {"shift_labels": shift_labels_of(batch["labels"])},
    "without labels": lambda batch: {k: v for k, v in batch.items() if k != "labels"},
}


@whole_graph
@pytest.mark.parametrize("call", slow_but(CALLS, "shifted labels"))
def test_arguments(call):
    plain, model, _ = pair(layers=0)
    batch = CALLS[call](masked_batch())
    got, want = compiled(model)(**batch), plain(**batch)
    if "labels" in batch:
        assert_same((model, got.loss), (plain, want.loss))
    torch.testing.assert_close(got.logits + 0, want.logits)  # the deferred ones are computed when they are read


@whole_graph
@pytest.mark.parametrize("loss", slow_but(["per token", "distillation"], "distillation"))
def test_outputs_of_the_fused_head(loss):
    _, model, patched = pair(layers=0)
    batch = masked_batch() | {"fused_lm_head": True, "num_items_in_batch": torch.tensor(9)}
    if loss == "distillation":
        patched.fuse(LossOptions(distillation=Distillation(ce_weight=0.3)))
        teacher = tiny_model("qwen3", seed=3)
        with torch.no_grad(), deferred_logits(teacher):
            batch["teacher_logits"] = teacher(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    got, want = compiled(model)(**batch), dict(model(**batch))
    del want["uncast"]  # which a graph does not return
    assert got.keys() == want.keys() and len(got) >= (12 if loss == "distillation" else 6)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
        assert got[name].requires_grad == value.requires_grad == (name in ("loss", "token_loss"))


@whole_graph
@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 1])
def test_batches_of_other_sizes_and_another_divisor(layers):
    """Two graphs, the second for any size; none that is made anew for each number of labels."""
    plain, model, _ = pair(layers=layers)
    counter = CompileCounterWithBackend("aot_eager")
    step = compiled(model, backend=counter)
    for i, length in enumerate((7, 9, 11, 12, 13)):
        batch = masked_batch(seed=i, length=length) | {"num_items_in_batch": torch.tensor(length + i)}
        torch.testing.assert_close(step(**batch).loss, plain(**batch).loss)
    assert counter.frame_count == 2


@whole_graph
@pytest.mark.slow
def test_loss_without_gradients_leaves_the_logits_for_later():
    """One graph for all that is computed, and one break after it: a graph cannot make logits that wait."""
    plain, model, _ = pair(layers=0)
    batch, counter = masked_batch(), CompileCounterWithBackend("eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        got, want = torch.compile(model, backend=counter)(**batch), plain(**batch)
        assert isinstance(got.logits, LazyLogits)
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(got.logits + 0, want.logits)
        skipped = compiled(model, backend="eager")(**batch, skip_logits=True)
    assert counter.frame_count == 1 and "logits" not in skipped


@pytest.mark.slow
@pytest.mark.parametrize("head", [pytest.param(False, marks=whole_graph), True])
def test_adapters(head):
    """A head with adapters cannot be deferred, which warns when it is traced."""
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"] if head else "all-linear"
    plain = adapted(tiny_model(num_hidden_layers=1), target_modules=targets).eval()
    model = copy.deepcopy(plain)
    swapped = patch(model).report.swapped
    assert swapped["LoRA linear"] and swapped["LoRA MLP"]
    liger_trainer.losses.fused_forward._warn_once.cache_clear()
    warns = pytest.warns(MaterializedLogitsWarning, match="does more than a linear map")
    with warns if head else contextlib.nullcontext():
        loss = compiled(model)(**masked_batch()).loss
    assert_same((model, loss), (plain, plain(**masked_batch()).loss))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_elementwise_kernels_make_way_for_inductor(monkeypatch, family):
    """Where Triton would be launched, a traced model takes the ops' plain torch form instead, without graph breaks."""
    plain = tiny_model(family, num_hidden_layers=1)
    model = copy.deepcopy(plain)
    patch(model, fused_linear_cross_entropy=False)

    def launch(self, *tensors):
        raise RuntimeError("a kernel was launched")

    monkeypatch.setattr(_triton.Launch, "__call__", launch)
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_trainer.kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: True)
    ids = {"input_ids": masked_batch()["input_ids"]}
    torch.testing.assert_close(compiled(model, backend="eager")(**ids).logits, plain(**ids).logits)
    with pytest.raises(RuntimeError, match="launched"):
        model(**ids)


def test_an_unknown_operation_on_the_logits_warns_when_it_is_traced():
    plain, model, _ = pair(layers=0)
    hidden = torch.randn(2, 32)
    with pytest.warns(MaterializedLogitsWarning, match="__neg__"):
        with deferred_logits(model):
            got = compiled(lambda x: -model.lm_head(x))(hidden)
    torch.testing.assert_close(got, -plain.lm_head(hidden))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_inductor():
    plain, model, _ = pair("qwen3")
    batch = masked_batch()
    assert_same((model, compiled(model, backend="inductor")(**batch).loss), (plain, plain(**batch).loss))


# Trainers: the losses of an eager run of theirs with the plain model, and no graph break.

RUN = {"max_steps": 2, "pad_to_multiple_of": 32}  # batches of one size, compiled once
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def run(make, **options):
    """Losses and graph breaks of a trainer's run."""
    torch.compiler.reset()
    counters.clear()
    trainer = make(tiny_model("qwen3", num_hidden_layers=1), **options)
    trainer.train()
    return logged(trainer), {reason.splitlines()[0] for reason in counters["graph_break"]}


def distillation(model, **options):
    return distill(model, tiny_model("llama", seed=5), texts(), **options)


@whole_graph
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "ours", "rel"), [(functools.partial(sft, cls=SFTTrainer), sft, 1e-4), (distillation, distillation, 1e-5)]
)
def test_our_trainers(plain, ours, rel):
    want, _ = run(plain, **RUN)
    got, breaks = run(ours, **RUN, **COMPILED)
    assert got == pytest.approx(want, rel=rel) and len(got) == 2 and not breaks


@whole_graph
@pytest.mark.slow
def test_stock_trainer_with_the_flag():
    def make(model, **options):
        ids = [masked_batch(seed)["input_ids"][0] for seed in range(12)]
        data = [{"input_ids": row, "labels": row} for row in ids]
        return Trainer(model, train_args(TrainingArguments, **options), train_dataset=data)  # pyright: ignore[reportArgumentType]

    want, plain_breaks = run(make, max_steps=2, **COMPILED)
    liger_trainer.enable()
    try:
        got, breaks = run(make, max_steps=2, use_liger_kernel=True, **COMPILED)
    finally:
        liger_trainer.disable()
    assert got == pytest.approx(want, rel=1e-4) and len(got) == 2
    assert breaks <= plain_breaks
